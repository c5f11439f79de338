//! The limits of connections to the socket, and of bytes of answers that wait for their readers: so many in all, so
//! many a user, and some that are kept for root.

use crate::runtime::daemon::Closed;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Connections of one user at once, unless it is root or the agent's own.
pub(super) const OF_ONE_USER: usize = 8;
/// Bytes of answers that wait to be read: of one answer, of one user and of all users who see their own jobs alone.
const ANSWER_BYTES: usize = 4 << 20;
const USER_BYTES: usize = 8 << 20;
const ALL_BYTES: usize = 16 << 20;

/// The places of all connections.
#[derive(Debug)]
pub(super) struct Places {
    all: usize,
    /// Of these, for root and the agent's own user alone.
    kept: usize,
    taken: Mutex<Taken>,
}

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    /// By user, without root and the agent's own.
    by_user: HashMap<u32, usize>,
    /// Bytes of answers that wait, by user.
    bytes: HashMap<u32, usize>,
}

/// The room of one answer, which is free again when this is dropped.
#[derive(Debug)]
pub(super) struct Room<'p> {
    place: &'p Place,
    bytes: usize,
}

/// One connection's place, which is free again when this is dropped.
#[derive(Debug)]
pub(super) struct Place {
    places: Arc<Places>,
    uid: u32,
}

impl Places {
    pub(super) fn new(all: usize) -> Arc<Self> {
        Arc::new(Places { all, kept: (all / 8).max(1), taken: Mutex::default() })
    }

    /// A place for a user, or why there is none. The reason is for the user to read.
    pub(super) fn take(self: &Arc<Self>, uid: u32) -> Result<Place, (Closed, String)> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let own = taken.by_user.get(&uid).copied().unwrap_or(0);
        let others: usize = taken.by_user.values().sum();
        if is_privileged(uid) {
            if taken.all >= self.all {
                let why = format!("the agent has {} connections already; try again later", taken.all);
                return Err((Closed::Full, why));
            }
        } else if own >= OF_ONE_USER {
            let why = format!("user {uid} has {own} connections already, and may have no more");
            return Err((Closed::UserFull, why));
        } else if others >= self.all - self.kept || taken.all >= self.all {
            let why = format!("the agent has {} connections already; try again later", taken.all);
            return Err((Closed::Full, why));
        }
        taken.all += 1;
        if !is_privileged(uid) {
            *taken.by_user.entry(uid).or_default() += 1;
        }
        Ok(Place { places: Arc::clone(self), uid })
    }
}

impl Place {
    /// Room for an answer of so many bytes, or why there is none. The reason is for the user to read.
    pub(super) fn room(&self, bytes: usize) -> Result<Room<'_>, String> {
        if bytes > ANSWER_BYTES {
            return Err(format!(
                "the answer has {bytes} bytes, and may have {ANSWER_BYTES}: your jobs have too many rows"
            ));
        }
        let mut taken = self.places.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let (all, own) = (taken.bytes.values().sum::<usize>(), taken.bytes.entry(self.uid).or_default());
        if *own + bytes > USER_BYTES {
            return Err(format!("user {} does not read {own} bytes of answers; read them first", self.uid));
        }
        if all + bytes > ALL_BYTES {
            return Err(format!("{all} bytes of answers wait for their readers; try again later"));
        }
        *own += bytes;
        Ok(Room { place: self, bytes })
    }
}

impl Drop for Room<'_> {
    fn drop(&mut self) {
        let mut taken = self.place.places.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(n) = taken.bytes.get_mut(&self.place.uid) {
            *n -= self.bytes;
            if *n == 0 {
                taken.bytes.remove(&self.place.uid);
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = self.places.taken.lock().unwrap_or_else(PoisonError::into_inner);
        taken.all -= 1;
        if let Some(n) = taken.by_user.get_mut(&self.uid) {
            *n -= 1;
            if *n == 0 {
                taken.by_user.remove(&self.uid);
            }
        }
    }
}

/// Root and the agent's own user.
pub(super) fn is_privileged(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_may_fill_their_share_and_root_still_gets_in() {
        let places = Places::new(64);
        let mut held = Vec::new();
        for uid in 1..=7 {
            for _ in 0..OF_ONE_USER {
                held.push(places.take(1_000_000 + uid).expect("within its share"));
            }
            let (why, _) = places.take(1_000_000 + uid).expect_err("one too many");
            assert_eq!(why, Closed::UserFull);
        }
        let (why, text) = places.take(2_000_000).expect_err("all are taken");
        assert_eq!((why, text.contains("56 connections")), (Closed::Full, true), "{text}");
        held.extend((0..8).map(|_| places.take(0).expect("kept for root")));
        assert_eq!(places.take(0).expect_err("the descriptors are for segments").0, Closed::Full);
        drop(held);
        assert_eq!(places.taken.lock().expect("no panic").by_user.len(), 0, "nothing is left behind");
        places.take(2_000_000).expect("they are free again");
    }

    #[test]
    fn answers_that_nobody_reads_have_so_much_room() {
        let places = Places::new(64);
        let mine: Vec<Place> = (0..3).map(|_| places.take(1_000_001).expect("a place")).collect();
        mine[0].room(ANSWER_BYTES + 1).expect_err("too long");
        let held: Vec<_> = mine[..2].iter().map(|p| p.room(ANSWER_BYTES).expect("room")).collect();
        assert!(mine[2].room(1).expect_err("one too many").contains("user 1000001 does not read 8388608"));
        let other = places.take(1_000_002).expect("a place");
        let others = [other.room(ANSWER_BYTES), other.room(ANSWER_BYTES)].map(|r| r.expect("room"));
        let third = places.take(1_000_003).expect("a place");
        assert!(third.room(1).expect_err("all is taken").contains("try again later"));
        drop((held, others));
        third.room(ANSWER_BYTES).expect("it is free again");
        assert_eq!(places.taken.lock().expect("no panic").bytes.len(), 0, "nothing is left behind");
    }

    #[test]
    fn few_places_leave_one_for_root() {
        let places = Places::new(4);
        let held: Vec<_> = (1..=3).map(|n| places.take(1_000_000 + n).expect("a place")).collect();
        assert_eq!(places.take(2_000_000).expect_err("the last one is root's").0, Closed::Full);
        places.take(0).expect("root's");
        drop(held);
    }
}
