//! The host's facts about a culprit, as evidence: its state, what it went without, how it ended, and where it is.

use super::{fact, number};
use crate::join::{HostPressure, Process};
use crate::model::{Evidence, Exit, HostFact, Liveness, ProcessState, Rank};

/// From this share of the time on a want is evidence.
const SHARE: f64 = 0.2;
/// A look at the host tells of the time before it: so much after a moment it still tells of that, in ns.
const AFTER_NS: u64 = 1_500_000_000;
/// Frames of a stack that are told.
const FRAMES: usize = 6;
/// Python's frames that are told beyond these, where they are all native.
const PYTHON_FRAMES: usize = 3;
/// Places in the kernel that are told.
const PLACES: usize = 6;
/// A kill for want of memory this long before a process ended may be the reason of its end, in ns.
const BEFORE_ITS_END_NS: u64 = 60_000_000_000;

/// One culprit's process, and the time in which it held the others up.
#[derive(Debug, Clone, Copy)]
pub(super) struct Suspect<'a> {
    pub(super) rank: Rank,
    pub(super) process: &'a Process,
    /// Since when the others wait, and until when, host monotonic ns.
    pub(super) from_ns: u64,
    pub(super) to_ns: u64,
}

impl Suspect<'_> {
    fn strain(&self) -> HostPressure {
        self.process.strains.worst(self.from_ns, self.to_ns.saturating_add(AFTER_NS))
    }

    /// When it ended, host monotonic ns, as far as somebody saw it.
    fn ended_ns(&self) -> Option<u64> {
        let seen = self.process.host.as_ref().filter(|h| h.is_over()).map(|h| h.at_ns);
        match self.process.record.liveness {
            Liveness::Gone(Some(at)) => Some(seen.map_or(at, |t| t.min(at))),
            _ => seen,
        }
    }

    /// How many processes of its cgroup were killed for want of memory while the others waited, or soon before it ended
    /// itself: other kills, such as those of a container's earlier programs, explain nothing.
    fn oom_kills(&self) -> u64 {
        let s = &self.process.strains;
        let waiting = s.oom_kills(self.from_ns, self.to_ns.saturating_add(AFTER_NS));
        let own = self.ended_ns().map_or(0, |end| {
            s.oom_kills(end.saturating_sub(BEFORE_ITS_END_NS), end.saturating_add(AFTER_NS))
        });
        waiting.max(own)
    }

    /// The state of the process, or how it ended.
    pub(super) fn state(&self) -> Option<Evidence> {
        let (rank, host) = (self.rank, self.process.host.as_ref()?);
        // What was seen before it ended says nothing any more.
        if self.process.record.liveness != Liveness::Alive && !host.is_over() {
            return None;
        }
        let at = |w: &Option<String>| w.as_ref().map_or_else(String::new, |w| format!(" at {w}"));
        Some(fact(match (host.state.as_ref()?, host.exit()) {
            (_, Some(Exit::Signal(n))) => format!("signal {n} ended the process of rank {rank}"),
            (_, Some(Exit::Code(n))) => format!("the process of rank {rank} exited with code {n}"),
            (ProcessState::Zombie(None), _) => {
                format!("the process of rank {rank} ended, and its parent has not asked how")
            }
            (ProcessState::Stopped { traced: true }, _) => {
                format!("the process of rank {rank} is stopped by a debugger")
            }
            (ProcessState::Stopped { traced: false }, _) => {
                format!("the process of rank {rank} is stopped by a signal")
            }
            (ProcessState::Sleeping { wchan }, _) if wchan.is_some() => {
                format!("the main thread of rank {rank} sleeps in the kernel{}", at(wchan))
            }
            (ProcessState::Blocked { wchan }, _) => format!(
                "the main thread of rank {rank} is blocked in the kernel{}: it waits for a device or a file system",
                at(wchan)
            ),
            (ProcessState::Running, _) => format!("the main thread of rank {rank} runs"),
            _ => return None,
        }))
    }

    /// The resources that it went without in that time.
    pub(super) fn wants(&self) -> Vec<Evidence> {
        let (rank, s) = (self.rank, self.strain());
        let shares = [
            ("wanted a CPU and had none", s.cpu_starved),
            ("had a thread of NCCL's that wanted a CPU and had none", s.nccl_starved),
            ("was kept from the CPU by its cgroup's quota", s.cpu_throttled),
            ("stood still for want of memory", s.memory_pressure),
        ];
        let mut evidence: Vec<Evidence> = shares
            .iter()
            .filter_map(|(text, share)| Some((text, share.filter(|s| *s >= SHARE)?)))
            .map(|(text, share)| {
                let percent = share * 100.0;
                number(
                    format!("the process of rank {rank} {text} for up to {percent:.0} % of the time"),
                    share,
                    "1",
                )
            })
            .collect();
        let n = self.oom_kills();
        if n > 0 {
            let what = if n == 1 { "a process".to_owned() } else { format!("{n} processes") };
            evidence.push(number(
                format!("the kernel killed {what} in the cgroup of rank {rank} for want of memory"),
                n as f64,
                "count",
            ));
        }
        evidence
    }

    /// Where it is in its code and in the kernel, if somebody looked since the others wait.
    pub(super) fn stack(&self) -> Vec<Evidence> {
        let fresh = |h: &&HostFact| h.stack_ns.is_some_and(|t| t >= self.from_ns);
        let Some(host) = self.process.host.as_ref().filter(fresh) else { return Vec::new() };
        let mut evidence = Vec::new();
        if !host.stack.is_empty() {
            evidence.push(fact(format!("rank {} is at {}", self.rank, where_it_is(&host.stack))));
        }
        if !host.threads.is_empty() {
            let places: Vec<&str> = host.threads.iter().take(PLACES).map(String::as_str).collect();
            evidence.push(fact(format!(
                "threads of rank {} in the kernel: {}",
                self.rank,
                places.join("; ")
            )));
        }
        evidence
    }

    /// All of it.
    pub(super) fn evidence(&self) -> Vec<Evidence> {
        self.state().into_iter().chain(self.wants()).chain(self.stack()).collect()
    }

    /// The advice about the resources that it went without, as the end of an advice.
    pub(super) fn advice(&self) -> String {
        let s = self.strain();
        let much = |share: Option<f64>| share.is_some_and(|s| s >= SHARE);
        let rank = self.rank;
        let mut text = String::new();
        if self.oom_kills() > 0 {
            text += &format!(
                "; a process of rank {rank}'s cgroup was killed for want of memory: dmesg names it and when; raise memory.max or use fewer or smaller data loader workers"
            );
        } else if much(s.memory_pressure) {
            text += &format!(
                "; rank {rank} is short of memory: memory.max of its cgroup, data loader workers, pinned buffers"
            );
        }
        if much(s.cpu_throttled) {
            text += &format!(
                "; rank {rank} is throttled: raise cpu.max of its cgroup (limits.cpu in Kubernetes)"
            );
        } else if much(s.nccl_starved) {
            text += &format!(
                "; NCCL's own threads of rank {rank} want CPUs, and what goes over the network waits for them: leave a core or two free for them (OMP_NUM_THREADS, data loader workers, --cpu-bind)"
            );
        } else if much(s.cpu_starved) {
            text += &format!(
                "; rank {rank} wants CPUs: look at its pinning (taskset, --cpu-bind), at more threads than cores (OMP_NUM_THREADS, data loader workers) and at what else runs on its cores"
            );
        }
        text
    }
}

/// The innermost frames of a stack in a line; and where these are all native, the innermost of Python's.
pub fn where_it_is(stack: &[String]) -> String {
    let (near, far) = stack.split_at(stack.len().min(FRAMES));
    let is_python = |f: &&String| f.contains(".py:");
    let mut line = near.join(" < ");
    if !near.iter().any(|f| is_python(&f)) {
        for f in far.iter().filter(is_python).take(PYTHON_FRAMES) {
            line += &format!(" < .. {f}");
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::join::Join;
    use crate::join::testing::process;
    use crate::model::{SegmentId, Update};

    const S: u64 = 1_000_000_000;

    fn join(facts: Vec<HostFact>) -> Join {
        let mut j = Join::new();
        j.feed(process(3));
        facts.into_iter().for_each(|f| j.feed(Update::Host(Box::new(f))));
        j
    }

    fn fact_at(at_ns: u64) -> HostFact {
        HostFact::new(SegmentId(4), at_ns)
    }

    fn told(j: &Join) -> (Vec<String>, String) {
        let process = j.process(SegmentId(4)).unwrap();
        let s = Suspect { rank: Rank(3), process, from_ns: 10 * S, to_ns: 12 * S };
        (s.evidence().into_iter().map(|e| e.text).collect(), s.advice())
    }

    #[test]
    fn each_state_has_its_words() {
        let of = |state| {
            let j = join(vec![HostFact { state: Some(state), ..fact_at(11 * S) }]);
            told(&j).0.join("; ")
        };
        let wchan = || Some("nfs_wait_bit_killable".to_owned());
        assert!(of(ProcessState::Blocked { wchan: wchan() }).contains("blocked in the kernel at nfs_wait"));
        assert!(of(ProcessState::Sleeping { wchan: wchan() }).contains("sleeps in the kernel at nfs_wait"));
        assert!(of(ProcessState::Stopped { traced: true }).contains("debugger"));
        assert!(of(ProcessState::Zombie(None)).contains("has not asked how"));
        assert!(of(ProcessState::Gone(Some(Exit::Code(3)))).contains("exited with code 3"));
        assert_eq!(of(ProcessState::Gone(None)), "");
    }

    #[test]
    fn wants_are_told_of_the_time_in_which_the_others_waited() {
        let starved = |at, share| HostFact { cpu_starved: Some(share), ..fact_at(at) };
        let (evidence, advice) = told(&join(vec![starved(5 * S, 0.9), starved(11 * S, 0.1)]));
        assert_eq!((evidence.len(), advice.as_str()), (0, ""), "it was starved long before");
        let (evidence, advice) = told(&join(vec![starved(11 * S, 0.6), starved(20 * S, 0.0)]));
        assert!(evidence[0].contains("wanted a CPU and had none for up to 60 %"), "{evidence:?}");
        assert!(advice.contains("pinning"), "{advice}");
        let proxy = HostFact { nccl_starved: Some(0.3), ..starved(11 * S, 0.9) };
        let (evidence, advice) = told(&join(vec![proxy]));
        assert!(evidence.iter().any(|e| e.contains("thread of NCCL's that wanted a CPU")), "{evidence:?}");
        assert!(advice.contains("NCCL's own threads of rank 3"), "{advice}");
        let throttled = HostFact { cpu_throttled: Some(0.5), cpu_starved: Some(0.9), ..fact_at(11 * S) };
        assert!(told(&join(vec![throttled])).1.contains("cpu.max"));
        let pressed = HostFact { memory_pressure: Some(0.3), ..fact_at(11 * S) };
        assert!(told(&join(vec![pressed])).0[0].contains("want of memory for up to 30 %"));
    }

    #[test]
    fn a_kill_for_want_of_memory_is_told_where_it_can_be_its_own() {
        let fact = |state: ProcessState, kills| HostFact {
            state: Some(state),
            oom_kills: Some(kills),
            ..fact_at(11 * S)
        };
        let gone = |exit| ProcessState::Gone(Some(exit));
        let ended = |at, kills| HostFact { at_ns: at, ..fact(gone(Exit::Signal(9)), kills) };
        let ran = |at, kills| HostFact { at_ns: at, ..fact(ProcessState::Running, kills) };
        let (evidence, advice) = told(&join(vec![ran(9 * S, 1), ended(11 * S, 2)]));
        assert!(evidence[1].contains("want of memory") && advice.contains("dmesg"), "{evidence:?} {advice}");
        // A minute before its own end, however long before the others waited.
        let advised = |facts| told(&join(facts)).1;
        assert!(advised(vec![ran(S, 1), ran(2 * S, 2), ended(11 * S, 2)]).contains("killed for want"));
        assert_eq!(advised(vec![ran(S, 1), ran(2 * S, 2), ended(63 * S, 2)]), "", "long before");
        assert_eq!(advised(vec![ended(11 * S, 2)]), "", "nobody saw when");
        // Who lives had a process killed beside it, since the others wait.
        assert!(advised(vec![ran(9 * S, 2), ran(11 * S, 3)]).contains("killed for want of memory"));
        assert_eq!(advised(vec![ran(S, 2), ran(9 * S, 3), ran(11 * S, 3)]), "", "before that");
        assert_eq!(advised(vec![ran(9 * S, 3), ran(14 * S, 4)]), "", "after it was over");
        let many = told(&join(vec![ran(9 * S, 2), ran(10 * S, 3), ran(11 * S, 5)])).0;
        assert_eq!(many[1], "the kernel killed 3 processes in the cgroup of rank 3 for want of memory");
    }

    #[test]
    fn a_stack_counts_from_when_the_others_wait() {
        let with = |at| {
            let stack = (0..9).map(|i| format!("f{i} (a.py:{i})")).collect();
            told(&join(vec![HostFact { stack, stack_ns: Some(at), ..fact_at(11 * S) }])).0
        };
        assert_eq!(
            with(11 * S),
            [
                "rank 3 is at f0 (a.py:0) < f1 (a.py:1) < f2 (a.py:2) < f3 (a.py:3) < f4 (a.py:4) < f5 (a.py:5)"
            ]
        );
        assert_eq!(with(9 * S), Vec::<String>::new());
    }

    #[test]
    fn behind_native_frames_pythons_are_told_and_the_kernel_has_a_line_of_its_own() {
        let mut stack: Vec<String> = (0..7).map(|i| format!("n{i} (libc.so.6)")).collect();
        stack.push("load (data.py:12)".into());
        stack.push("ffi (libffi.so)".into());
        stack.push("<module> (train.py:3)".into());
        let threads = vec!["python3 in futex".to_owned(), "NCCL Progress in poll".to_owned()];
        let all = told(&join(vec![HostFact { stack, threads, stack_ns: Some(11 * S), ..fact_at(11 * S) }])).0;
        assert!(
            all[0].ends_with("< n5 (libc.so.6) < .. load (data.py:12) < .. <module> (train.py:3)"),
            "{all:?}"
        );
        assert_eq!(all[1], "threads of rank 3 in the kernel: python3 in futex; NCCL Progress in poll");
    }
}
