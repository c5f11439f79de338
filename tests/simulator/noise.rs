//! The noise of a job: a sequence of random numbers, or one number for each thing that happens.

use super::case::Ns;
use super::{Key, Simulation};
use ringwatch::model::Track;

/// The last step of splitmix64.
pub(super) fn mix(mut x: u64) -> u64 {
    x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The key of a draw for a rank's action.
pub(super) fn of_action(rank: u32, number: u32, salt: u64) -> u64 {
    mix(u64::from(rank) << 32 | u64::from(number)) ^ mix(salt)
}

/// The key of a draw for one rank's part of an operation.
pub(super) fn of_op((comm, track, order): Key, own: u32, salt: u64) -> u64 {
    let track = match track {
        Track::Collective => 1,
        Track::Replay => 2,
        Track::Pair(a, b) => 3 + (u64::from(a.0) << 32 | u64::from(b.0)),
    };
    mix(mix(mix(comm as u64) ^ track) ^ order) ^ mix(u64::from(own) << 8 | salt)
}

impl Simulation {
    /// A random number. `key` says what it is for.
    pub(super) fn draw(&mut self, key: u64) -> u64 {
        if self.case.keyed {
            return mix(self.seed ^ key);
        }
        self.seed ^= self.seed << 13;
        self.seed ^= self.seed >> 7;
        self.seed ^= self.seed << 17;
        self.seed
    }

    pub(super) fn below(&mut self, n: u64, key: u64) -> u64 {
        self.draw(key) % n.max(1)
    }

    /// The factor by which a rank takes longer than the fastest one may, where ranks differ by up to a share. `salt` says in what.
    pub(super) fn pace(&self, rank: u32, differ: f64, salt: u64) -> f64 {
        1.0 + differ * (mix(self.seed ^ of_action(rank, u32::MAX - 1, salt)) as f64 / u64::MAX as f64)
    }

    /// A time with its noise: even up to the case's share, and now and then several times as long.
    pub(super) fn noisy(&mut self, t: Ns, key: u64) -> u64 {
        let wide = (t.0 as f64 * self.case.noise) as u64;
        let usual = t.0 + self.below(wide, key);
        if self.case.tail_share > 0.0 {
            let tail = mix(self.seed ^ mix(key));
            if (tail % 100_000) as f64 <= self.case.tail_share * 100_000.0 {
                let more = mix(tail) % 1_000;
                return usual + (t.0 as f64 * self.case.tail_factor * more as f64 / 1_000.0) as u64;
            }
        }
        usual
    }
}
