//! The facts about a watched process from outside, as readings come in.

use super::process_reading::Reading;
use super::stacks::Answer;
use crate::model::{HostFact, ProcessState, SegmentId};

/// One process, watched from outside.
#[derive(Debug)]
pub(super) struct Host {
    pid: u32,
    fact: HostFact,
    /// A reading was requested and has not come.
    pub(super) is_requested: bool,
}

impl Host {
    pub(super) fn new(segment: SegmentId, pid: u32) -> Self {
        Host { pid, fact: HostFact::new(segment, 0), is_requested: false }
    }

    pub(super) fn pid(&self) -> u32 {
        self.pid
    }

    /// True when the process was read to have ended.
    pub(super) fn is_over(&self) -> bool {
        self.fact.is_over()
    }

    /// Takes a reading. Returns what is to be told: something new, or a second has passed.
    pub(super) fn take(&mut self, reading: Reading, now_ns: u64) -> Option<HostFact> {
        self.is_requested = false;
        let state = match reading.state {
            // How it ended was seen while somebody could still ask.
            ProcessState::Gone(None) => ProcessState::Gone(self.fact.exit()),
            state => state,
        };
        let is_changed = self.fact.state.as_ref() != Some(&state);
        self.fact.state = Some(state);
        self.fact.oom_kills = reading.oom_kills.or(self.fact.oom_kills);
        let is_slow = reading.load.is_some();
        if let Some(load) = reading.load {
            self.fact.cpu_starved = load.cpu_starved;
            self.fact.nccl_starved = load.nccl_starved;
            self.fact.nccl_busy = load.nccl_busy;
            self.fact.cpu_throttled = load.cpu_throttled;
            self.fact.memory_pressure = load.memory_pressure;
        }
        if !is_slow && !is_changed {
            return None;
        }
        self.fact.at_ns = now_ns;
        Some(self.fact.clone())
    }

    /// Takes where it is, which somebody requested; it is told with the next fact.
    pub(super) fn stack(&mut self, answer: Answer, now_ns: u64) -> HostFact {
        self.fact.stack = answer.frames;
        self.fact.threads = answer.threads;
        self.fact.stack_ns = Some(now_ns);
        self.fact.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ingest::process_reading::Load;
    use crate::model::Exit;

    #[test]
    fn how_a_process_ended_is_remembered_when_it_is_gone() {
        let mut host = Host::new(SegmentId(1), 7);
        let read = |state| Reading { state, load: None, oom_kills: None };
        let killed = Some(Exit::Signal(9));
        assert!(host.take(read(ProcessState::Running), 1).is_some());
        assert_eq!(host.take(read(ProcessState::Running), 2), None, "nothing new");
        let load = Some(Load { nccl_busy: Some(0.5), ..Load::default() });
        let fact =
            host.take(Reading { load, ..read(ProcessState::Running) }, 3).expect("a second has passed");
        assert_eq!((fact.nccl_busy, fact.at_ns), (Some(0.5), 3));
        let zombie = Reading { oom_kills: Some(1), ..read(ProcessState::Zombie(killed)) };
        assert_eq!(host.take(zombie, 4).expect("it ended").exit(), killed);
        let fact = host.take(read(ProcessState::Gone(None)), 5).expect("it went");
        assert_eq!((fact.exit(), fact.is_over(), fact.oom_kills), (killed, true, Some(1)));
    }
}
