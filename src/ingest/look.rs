//! Reading what is new in all segments: in turns, side by side, and for each user a share of the time.
//!
//! A user decides how much there is to read, so reading has a limit, and within it users have their turns. What is not read
//! in time is read in the next look. Where that is too late, records are overwritten, and counted for that user alone.

use super::Segments;
use super::follow::Followed;
use super::tail::{Shared, Tail};
use crate::model::{Liveness, Sink};
use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

/// Operations that are being put together, of all segments: each may hold its share, and some in any case.
const OPEN_MAX: usize = 49_152;
const OPEN_MIN: usize = 64;
/// The share of a segment that is read once, of a user who has no process that runs.
const OPEN_DEAD: usize = 8192;
/// Communicators that are known at once, of all segments of running processes. Each user has the same share.
const COMMS_MAX: usize = 16_384;
/// A slice of a look that is shorter lets nobody read.
const SLICE_MIN: Duration = Duration::from_micros(50);

/// The order in which users are read.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// How long root's segments, and those of all others, are read in one look; without limit where it is absent.
    time: Option<Duration>,
    /// The segment of each user with which the next look begins.
    first: HashMap<u32, usize>,
    /// The user with whom it begins, after root.
    first_user: u32,
}

impl Turns {
    pub(super) fn limit(&mut self, time: Duration) {
        self.time = Some(time);
    }
}

/// The segments of one user in a poll.
struct UserLook<'t> {
    tails: Vec<&'t mut Tail>,
    /// How many of them were begun.
    begun: usize,
    /// True where those begun have more.
    more: bool,
    /// How many communicators of running processes there is room for.
    comms_room: usize,
    /// How many operations each of them may put together at once.
    open_share: usize,
}

/// The context that all share that read in a poll.
struct Context<'c> {
    now_ns: u64,
    shared: &'c mut Shared,
    out: &'c mut dyn Sink,
}

impl Readable<Context<'_>> for UserLook<'_> {
    fn has_more(&self) -> bool {
        self.more || self.begun < self.tails.len()
    }

    fn read(&mut self, time: Option<Duration>, context: &mut Context<'_>) -> Duration {
        let began = Instant::now();
        let is_up = || time.is_some_and(|time| began.elapsed() >= time);
        while self.begun < self.tails.len() {
            self.begin_next(context);
            if is_up() {
                break;
            }
        }
        context.out.rest(&mut context.shared.spare);
        while self.begun == self.tails.len() && self.more && !is_up() {
            self.more = false;
            for tail in &mut self.tails {
                self.more |= tail.turn(self.open_share, context.shared, context.out);
            }
            // What counts is part of what this user costs.
            context.out.rest(&mut context.shared.spare);
        }
        began.elapsed()
    }
}

impl UserLook<'_> {
    /// Begins with the next segment, and reads its first turn: whoever has no time for more comes on a little.
    fn begin_next(&mut self, context: &mut Context<'_>) {
        let Some(tail) = self.tails.get_mut(self.begun) else { return };
        self.begun += 1;
        let before = tail.comms();
        // What is read of a dead process is read once, and then forgotten here.
        let is_alive = tail.liveness() == Liveness::Alive;
        let most = if is_alive { before.saturating_add(self.comms_room) } else { usize::MAX };
        tail.begin(context.now_ns, most, context.shared, context.out);
        if is_alive {
            self.comms_room = self.comms_room.saturating_sub(tail.comms().saturating_sub(before));
        }
        self.more |= tail.turn(self.open_share, context.shared, context.out);
    }
}

impl Segments {
    /// Reads what is new in all segments, as far as there is time.
    pub(super) fn read(&mut self, now_ns: u64, out: &mut dyn Sink) {
        let (rooms, shares) = (self.room_for_comms(), self.shares());
        let mut users: BTreeMap<u32, UserLook<'_>> = BTreeMap::new();
        for tail in self.tails.values_mut() {
            let owner = tail.owner();
            let new = || UserLook {
                tails: Vec::new(),
                begun: 0,
                more: false,
                comms_room: rooms.get(&owner).copied().unwrap_or(0),
                open_share: shares.get(&owner).copied().unwrap_or(OPEN_DEAD),
            };
            users.entry(owner).or_insert_with(new).tails.push(tail);
        }
        for (owner, user) in &mut users {
            let first = self.turns.first.get(owner).copied().unwrap_or(0);
            let many = user.tails.len();
            user.tails.rotate_left(first % many.max(1));
        }
        let mut context = Context { now_ns, shared: &mut self.shared, out };
        let (time, first_user) = (self.turns.time, self.turns.first_user);
        self.turns.first_user = in_turn(&mut users, time, first_user, &mut context);
        self.turns.first = users
            .iter()
            .map(|(owner, u)| {
                let first = self.turns.first.get(owner).copied().unwrap_or(0);
                (*owner, (first + u.begun) % u.tails.len().max(1))
            })
            .collect();
        for tail in users.into_values().flat_map(|u| u.tails) {
            tail.close(now_ns, context.shared, context.out);
        }
    }

    /// How many more communicators each user's processes may be in.
    fn room_for_comms(&self) -> HashMap<u32, usize> {
        let mut known: HashMap<u32, usize> = HashMap::new();
        for tail in self.tails.values().filter(|t| t.liveness() == Liveness::Alive) {
            *known.entry(tail.owner()).or_default() += tail.comms();
        }
        let share = COMMS_MAX / known.len().max(1);
        known.values_mut().for_each(|n| *n = share.saturating_sub(*n));
        known
    }

    /// How many operations each user's segments may put together at once.
    fn shares(&self) -> HashMap<u32, usize> {
        let followed = Followed::of(self.tails.values());
        let of_user = OPEN_MAX / followed.by_owner.len().max(1);
        followed.by_owner.into_iter().map(|(owner, n)| (owner, (of_user / n.max(1)).max(OPEN_MIN))).collect()
    }
}

/// Something that is read for some time.
trait Readable<C> {
    fn has_more(&self) -> bool;
    /// Reads until everything is read or the time is up; returns the time that it took.
    fn read(&mut self, time: Option<Duration>, context: &mut C) -> Duration;
}

/// Has root's segments read first, and as long as those of all others together. The others share that time, beginning with
/// the user `first`: who needs less leaves it to the rest. Returns who is first the next time.
fn in_turn<C>(
    users: &mut BTreeMap<u32, impl Readable<C>>,
    time: Option<Duration>,
    first: u32,
    context: &mut C,
) -> u32 {
    if let Some(root) = users.get_mut(&0) {
        root.read(time, context);
    }
    let mut others: Vec<_> = users.iter_mut().filter(|(of, _)| **of != 0).collect();
    others.sort_by_key(|(owner, _)| (**owner < first, **owner));
    let mut left = time;
    loop {
        others.retain(|(_, user)| user.has_more());
        let many = u32::try_from(others.len()).unwrap_or(u32::MAX);
        if many == 0 {
            return 0;
        }
        let slice = left.map(|left| (left / many).max(SLICE_MIN));
        for (owner, user) in &mut others {
            if left.is_some_and(|left| left < SLICE_MIN) {
                return **owner;
            }
            let took = user.read(slice, context);
            left = left.map(|left| left.saturating_sub(took));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// A reader for tests: what is left to read, in ms, and the time that went into it.
    #[derive(Debug, Default)]
    struct Fake {
        left: u32,
        spent: Duration,
    }

    impl Readable<()> for Fake {
        fn has_more(&self) -> bool {
            self.left > 0
        }

        fn read(&mut self, time: Option<Duration>, _: &mut ()) -> Duration {
            let mut took = Duration::ZERO;
            while self.left > 0 && time.is_none_or(|time| took < time) {
                self.left -= 1;
                took += MS;
            }
            self.spent += took;
            took
        }
    }

    fn read(needs: &[(u32, u32)], time: Option<u32>, first: u32) -> (Vec<u128>, u32) {
        let fakes = needs.iter().map(|(uid, left)| (*uid, Fake { left: *left, spent: Duration::ZERO }));
        let mut users: BTreeMap<u32, Fake> = fakes.collect();
        let next = in_turn(&mut users, time.map(|t| t * MS), first, &mut ());
        (users.into_values().map(|f| f.spent.as_millis()).collect(), next)
    }

    #[test]
    fn a_user_with_much_to_read_leaves_the_others_their_shares() {
        assert_eq!(read(&[(7, 1000), (8, 1000), (9, 1000)], Some(30), 0).0, [10, 10, 10]);
        assert_eq!(
            read(&[(7, 1000), (8, 5), (9, 0)], Some(30), 0).0,
            [25, 5, 0],
            "what is left over is used"
        );
        assert_eq!(read(&[(0, 8), (7, 1000)], Some(30), 0).0, [8, 30], "root has a time of its own");
        assert_eq!(read(&[(0, 1000), (7, 1000)], Some(30), 0).0, [30, 30]);
        assert_eq!(read(&[(0, 50), (7, 60)], None, 0).0, [50, 60], "without limit all is read");
    }

    #[test]
    fn of_too_many_users_each_look_begins_with_others() {
        let many: Vec<(u32, u32)> = (1..=100).map(|uid| (uid, 10)).collect();
        let (first, next) = read(&many, Some(30), 0);
        assert_eq!((first.iter().sum::<u128>(), next), (30, 31));
        let (second, next) = read(&many, Some(30), next);
        assert_eq!((second[29], second[30], second[59], second[60], next), (0, 1, 1, 0, 61));
    }
}
