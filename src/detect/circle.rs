//! The processes through which every circle of waits goes.
//!
//! Where one rank is out of order, all others wait for it and it waits for all others: there are many circles, and that rank
//! is in each of them.

use crate::join::Stall;
use std::collections::{HashMap, HashSet};

/// Processes of a circle that are tried one by one. A longer circle has no few that could be named.
const TRIED: usize = 64;

/// Processes and the operations in which they wait, by small numbers.
struct Circle<'a> {
    /// The operations.
    stalls: &'a [&'a Stall],
    /// By process: the operations in which it is and which do not lack it.
    is_in: HashMap<u32, Vec<usize>>,
}

/// The processes without which nothing of these operations would wait in a circle; empty where there is none.
pub(super) fn through_all(stalls: &[&Stall]) -> Vec<u32> {
    let circle = Circle::of(stalls);
    let mut all = circle.one_circle();
    if all.len() > TRIED {
        return Vec::new();
    }
    all.retain(|p| circle.ends_without(*p));
    all.sort_unstable();
    all
}

impl<'a> Circle<'a> {
    fn of(stalls: &'a [&'a Stall]) -> Self {
        let mut is_in: HashMap<u32, Vec<usize>> = HashMap::new();
        for (i, s) in stalls.iter().enumerate() {
            let lacking: HashSet<u32> = s.lacking.iter().map(|(_, p)| *p).collect();
            for (_, p) in s.waiting.iter().filter(|(_, p)| !lacking.contains(p)) {
                is_in.entry(*p).or_default().push(i);
            }
        }
        Circle { stalls, is_in }
    }

    /// The processes of some circle; empty where a process waits for nobody.
    fn one_circle(&self) -> Vec<u32> {
        let Some(mut at) = self.is_in.keys().min().copied() else { return Vec::new() };
        let mut path: Vec<u32> = Vec::new();
        let mut seen: HashMap<u32, usize> = HashMap::new();
        loop {
            if let Some(begin) = seen.insert(at, path.len()) {
                return path.split_off(begin);
            }
            path.push(at);
            let stalls = self.is_in.get(&at).into_iter().flatten().filter_map(|i| self.stalls.get(*i));
            let mut next =
                stalls.flat_map(|s| &s.lacking).map(|(_, p)| *p).filter(|p| self.is_in.contains_key(p));
            match next.next() {
                Some(p) => at = p,
                None => return Vec::new(),
            }
        }
    }

    /// True when nothing waits in a circle but through this process: what waits for nobody is taken away, again and again,
    /// until nothing is left.
    fn ends_without(&self, left_out: u32) -> bool {
        // The number of processes that an operation still lacks, and of operations in which a process still waits.
        let mut lacks: Vec<usize> = self.stalls.iter().map(|s| s.lacking.len()).collect();
        let mut in_many: HashMap<u32, usize> = self.is_in.iter().map(|(p, all)| (*p, all.len())).collect();
        let mut lacked_by: HashMap<u32, Vec<usize>> = HashMap::new();
        for (i, s) in self.stalls.iter().enumerate() {
            s.lacking.iter().for_each(|(_, p)| lacked_by.entry(*p).or_default().push(i));
        }
        let mut free: Vec<u32> = lacked_by.keys().copied().filter(|p| !in_many.contains_key(p)).collect();
        in_many.remove(&left_out);
        free.push(left_out);
        while let Some(p) = free.pop() {
            for i in lacked_by.remove(&p).into_iter().flatten() {
                let (Some(n), Some(s)) = (lacks.get_mut(i), self.stalls.get(i)) else { continue };
                *n -= 1;
                if *n > 0 {
                    continue;
                }
                for (_, q) in &s.waiting {
                    let Some(m) =
                        in_many.get_mut(q).filter(|_| self.is_in.get(q).is_some_and(|all| all.contains(&i)))
                    else {
                        continue;
                    };
                    *m -= 1;
                    if *m == 0 {
                        in_many.remove(q);
                        free.push(*q);
                    }
                }
            }
        }
        in_many.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::WaitingFor;
    use crate::model::{CommId, Rank, Track};

    /// An operation in which the first processes wait for the second ones.
    fn stall(waiting: &[u32], lacking: &[u32]) -> Stall {
        let of = |all: &[u32]| all.iter().map(|p| (Rank(*p), *p)).collect();
        Stall {
            comm: CommId::unowned(1),
            track: Track::Collective,
            order: 0,
            lack: WaitingFor::Issue,
            waiting: of(waiting),
            lacking: of(lacking),
            queued: false,
        }
    }

    fn through(stalls: &[Stall]) -> Vec<u32> {
        through_all(&stalls.iter().collect::<Vec<_>>())
    }

    #[test]
    fn one_that_all_wait_for_and_that_waits_for_all_is_in_every_circle() {
        assert_eq!(through(&[stall(&[3, 8, 9], &[0, 1, 2]), stall(&[0, 1, 2], &[3])]), [3]);
        // The ranks that rank 3 waits for wait for it one by one, or for one another.
        let chain = [stall(&[3, 8], &[0, 1, 2]), stall(&[2], &[3]), stall(&[1], &[2]), stall(&[0], &[3])];
        assert_eq!(through(&chain), [3]);
    }

    #[test]
    fn of_a_single_circle_everyone_is_in_it() {
        assert_eq!(through(&[stall(&[0], &[1]), stall(&[1], &[0])]), [0, 1]);
        assert_eq!(through(&[stall(&[0], &[1]), stall(&[1], &[2]), stall(&[2], &[0])]), [0, 1, 2]);
    }

    #[test]
    fn two_circles_without_a_common_process_go_through_nobody() {
        assert_eq!(through(&[stall(&[0, 1], &[2, 3]), stall(&[2, 3], &[0, 1])]), Vec::<u32>::new());
        assert_eq!(through(&[]), Vec::<u32>::new());
    }
}
