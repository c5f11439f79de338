//! How NCCL runs an operation, and how slow its data is.

use super::case::Choice;
use super::{Key, Simulation, Way, noise};
use ringwatch::model::{Algo, Func, Proto, Track};

impl Simulation {
    /// How NCCL runs a rank's operation.
    pub(super) fn way(&self, rank: u32, comm: usize, func: Func, order: u64) -> Way {
        let is_it = |c: &&Choice| {
            self.by_name.get(&c.comm).is_some_and(|all| all.contains(&comm))
                && c.ranks.as_ref().is_none_or(|r| r.contains(&rank))
                && c.func.is_none_or(|f| f == func)
                && order >= c.from
                && c.every.is_none_or(|n| (order - c.from).is_multiple_of(n))
        };
        let chosen = self.case.choices.iter().find(is_it);
        chosen.map_or((Algo::Ring, Proto::Simple, 1), |c| (c.algo, c.proto, c.channels))
    }

    /// How many times as long an operation's data takes as it should.
    pub(super) fn slowness(&mut self, (at, track, order): Key, t: u64) -> f64 {
        let mut factor = 1.0;
        for s in self.case.slow.clone() {
            let members = &self.comms[at].members;
            // From whom to whom its data goes.
            let hops: Vec<(u32, u32)> = match track {
                Track::Pair(a, b) => vec![(members[a.0 as usize], members[b.0 as usize])],
                _ => (0..members.len()).map(|i| (members[i], members[(i + 1) % members.len()])).collect(),
            };
            let comm = |name: &String| {
                let (name, group) =
                    name.split_once('/').map_or((name.as_str(), None), |(n, g)| (n, g.parse().ok()));
                let all = &self.by_name[name];
                group.map_or_else(|| all.contains(&at), |g: usize| all[g] == at)
            };
            let host = |h: u32| hops.iter().any(|(a, b)| (self.node(*a) == h) != (self.node(*b) == h));
            let pair = |(x, y): (u32, u32)| hops.iter().any(|h| *h == (x, y) || *h == (y, x));
            let hit = s.comm.as_ref().is_none_or(comm)
                && s.host.is_none_or(host)
                && s.pair.is_none_or(pair)
                && (s.from.0..s.until.0).contains(&t)
                && s.orders.is_none_or(|(a, b)| (a..b).contains(&order));
            let now = s.share.is_none_or(|share| {
                self.below(10_000, noise::of_op((at, track, order), 0, 7)) < (share * 10_000.0) as u64
            });
            if hit && now {
                factor *= s.factor;
            }
        }
        factor
    }
}
