//! From a recorded event to the calls that an NCCL of the chosen version would make.

use std::collections::HashMap;

use super::abi::{DescriptorBytes, Setting, StateBytes, has_state, has_type, implied_by, known_bits};
use super::clock::{Clock, Pacer};
use super::player::PlayReport;
use super::plugin::{Abi, Comm, Plugin, c_string};
use super::trace::{Call, Descriptor, Event, RankTrace};

const GROUP: u64 = 0x1;
const COLL: u64 = 0x2;
const P2P: u64 = 0x4;
const PROXY_OP: u64 = 0x8;
const PROXY_STEP: u64 = 0x10;
const KERNEL_CH: u64 = 0x40;
const GROUP_API: u64 = 0x100;
const KERNEL_LAUNCH: u64 = 0x800;

const STEP_SEND_PEER_WAIT: u32 = 20;
const KERNEL_CH_STOP: u32 = 22;
const GROUP_START_API_STOP: u32 = 23;
const GROUP_END_API_START: u32 = 24;

/// The value that NCCL has in a handle's place where it does not initialise it.
const UNINITIALISED: usize = 0xa5a5_a5a5_a5a5_a5a5;

/// Indices of the events of which a version makes a call.
pub(super) fn applicable(rank: &RankTrace, abi: Abi) -> Vec<usize> {
    let mut types = HashMap::new();
    let applies = |event: &Event| match &event.call {
        Call::Init { .. } | Call::Finalize { .. } => true,
        Call::Start { handle, descriptor, .. } => {
            types.insert(*handle, descriptor.type_bit());
            has_type(abi, descriptor.type_bit())
        }
        Call::Stop { handle } => types.get(handle).is_none_or(|&bit| has_type(abi, bit)),
        Call::State { handle, state, .. } => match types.get(handle) {
            Some(&PROXY_STEP) if old_proxy_states(abi) => old_state_of(*state).is_some(),
            Some(&bit) => has_type(abi, bit) && has_state(abi, *state),
            None => has_state(abi, *state),
        },
    };
    let mut applies = applies;
    (0..rank.events.len()).filter(|&index| applies(&rank.events[index])).collect()
}

/// Up to v3 the network's progress is told by states of the ProxyOp.
fn old_proxy_states(abi: Abi) -> bool {
    abi.number() <= 3
}

/// The old ProxyOp state that goes with a step's state.
fn old_state_of(step_state: u32) -> Option<u32> {
    match step_state {
        8 => Some(0),                   // GPU wait: posted
        STEP_SEND_PEER_WAIT => Some(1), // waiting for the remote FIFO
        9 => Some(2),                   // transmitted
        10 => Some(4),                  // posted
        11 => Some(5),                  // received
        12 => Some(6),                  // transmitted
        _ => None,
    }
}

/// The old states of a ProxyOp one of whose steps is over.
const OLD_SEND_DONE: u32 = 3;
const OLD_RECV_DONE: u32 = 7;

/// The fate of a recorded handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Given {
    Handle(usize),
    /// The plugin gave NULL.
    Null,
    /// The mask did not ask for it.
    Masked,
    /// NCCL never started it, because of a NULL further up.
    Suppressed,
}

#[derive(Debug)]
struct Slot {
    given: Given,
    type_bit: u64,
    parent: u64,
    /// The plugin's mask when it began: NCCL decides about an operation's kernel events then.
    mask: u64,
    /// How much later than recorded the operation was issued, in ns: its GPU stamps move by this.
    slip_ns: u64,
    send: bool,
    step: i32,
    /// Of a ProxyOp: bytes moved so far.
    bytes: u64,
}

#[derive(Debug, Default)]
struct Enqueuer {
    open_group: Option<u64>,
    /// True where a kernel was launched whose plan's group has not ended.
    launched: bool,
    /// Largest delay of the calls since the launch, in ns: the kernel's stamps may not move by less,
    /// or it might seem to start before the call that launched it.
    behind_ns: u64,
}

/// One process's view of the plugin while a recording is played.
#[derive(Debug)]
pub(super) struct Stage<'a, C> {
    plugin: &'a Plugin,
    abi: Abi,
    honour_mask: bool,
    recorded_pid: u32,
    loop_index: u32,
    pacer: Pacer<C>,
    contexts: HashMap<u64, (usize, Comm)>,
    slots: HashMap<u64, Slot>,
    threads: Vec<Enqueuer>,
    report: PlayReport,
}

impl<'a, C: Clock> Stage<'a, C> {
    pub(super) fn new(
        plugin: &'a Plugin,
        rank: &RankTrace,
        abi: Abi,
        honour_mask: bool,
        pacer: Pacer<C>,
    ) -> Self {
        Self {
            plugin,
            abi,
            honour_mask,
            recorded_pid: rank.pid,
            loop_index: 0,
            pacer,
            contexts: HashMap::new(),
            slots: HashMap::new(),
            threads: rank.threads.iter().map(|_| Enqueuer::default()).collect(),
            report: PlayReport::default(),
        }
    }

    pub(super) fn begin_loop(&mut self, index: u32) {
        self.loop_index = index;
        self.pacer.begin_loop(index);
        self.contexts.clear();
        self.slots.clear();
        self.threads.iter_mut().for_each(|thread| *thread = Enqueuer::default());
    }

    pub(super) fn into_report(mut self) -> PlayReport {
        self.report.largest_lateness_ns = self.pacer.largest_lateness_ns();
        self.report
    }

    /// Waits until the event is due and makes its calls.
    pub(super) fn play(&mut self, event: &Event) {
        match &event.call {
            Call::Init { ctx, comm_id, name, nodes, ranks, rank } => {
                let comm = Comm {
                    id: comm_id.wrapping_add(self.loop_index.into()),
                    name: name.as_deref().map(c_string),
                    nodes: *nodes,
                    ranks: *ranks,
                    rank: *rank,
                };
                self.pacer.wait(event.at_ns, 0);
                let (code, context) = self.plugin.init(&comm);
                self.report.inits += 1;
                self.returned(code);
                self.report.null_handles += u64::from(context == 0);
                self.contexts.insert(*ctx, (context, comm));
            }
            Call::Start { handle, ctx, parent, descriptor } => {
                self.start(event, *handle, *ctx, *parent, descriptor);
            }
            Call::Stop { handle } => self.stop(event, *handle),
            Call::State { handle, state, arg } => self.state(event, *handle, *state, *arg),
            Call::Finalize { ctx } => match self.contexts.get(ctx) {
                // Since v5's NCCL, finalize comes only for a context that is one.
                Some(&(0, _)) if self.abi.number() >= 5 => self.report.suppressed += 1,
                None => self.report.suppressed += 1,
                Some(&(context, _)) => {
                    self.pacer.wait(event.at_ns, 0);
                    let code = self.plugin.finalize(context);
                    self.report.finalizes += 1;
                    self.returned(code);
                }
            },
        }
    }

    fn start(&mut self, event: &Event, handle: u64, ctx: u64, parent: u64, descriptor: &Descriptor) {
        let type_bit = descriptor.type_bit();
        let mut slot = Slot {
            given: Given::Suppressed,
            type_bit,
            parent,
            mask: self.plugin.mask() & known_bits(self.abi),
            slip_ns: 0,
            send: matches!(descriptor, Descriptor::ProxyOp { send: true, .. }),
            step: if let Descriptor::ProxyStep { step } = *descriptor { step } else { 0 },
            bytes: 0,
        };
        let thread = usize::from(event.thread);
        let group = self.threads[thread].open_group;
        if type_bit == GROUP {
            self.threads[thread].open_group = Some(handle);
        }
        // Up to v4 an operation's parent is its plan's group, later the call in the user's program.
        let is_op = type_bit == COLL || type_bit == P2P;
        let parent = if is_op && self.abi.number() <= 4 { group.unwrap_or(0) } else { parent };
        let context = self.contexts.get(&ctx).copied();
        let mask = match self.slots.get(&parent) {
            Some(op) if type_bit == KERNEL_CH => op.mask,
            _ => slot.mask,
        };
        if self.honour_mask && implied_by(self.abi, type_bit) & mask == 0 {
            slot.given = Given::Masked;
            self.report.masked += 1;
        } else if let Some((context, comm)) = context
            && !self.suppresses(parent, type_bit)
        {
            let kernel_slip = self.slots.get(&parent).map(|slot| slot.slip_ns);
            let min_slip = if type_bit == KERNEL_CH { kernel_slip.unwrap_or(0) } else { 0 };
            let behind = self.pacer.wait(event.at_ns, min_slip);
            let since_launch = self.enqueued(thread, type_bit, behind);
            slot.slip_ns = match type_bit {
                COLL | P2P => self.pacer.issue(since_launch),
                KERNEL_CH => kernel_slip.unwrap_or(behind),
                _ => behind,
            };
            let setting = Setting {
                parent: self.value(parent),
                parent_group: group.map_or(0, |group| self.value(group)),
                rank: if matches!(type_bit, PROXY_OP | PROXY_STEP) { comm.rank } else { 0 },
                comm_id: comm.id,
                ranks: comm.ranks,
                stamp_ns: match *descriptor {
                    Descriptor::KernelCh { stamp_ns, .. } => self.pacer.stamp(stamp_ns, slot.slip_ns),
                    _ => 0,
                },
                pid: match *descriptor {
                    // A pid of another process stays foreign, as with proxies across NICs.
                    Descriptor::ProxyOp { pid, .. } if pid as u32 == self.recorded_pid => {
                        std::process::id() as i32
                    }
                    Descriptor::ProxyOp { pid, .. } => pid,
                    _ => 0,
                },
            };
            slot.given = self.call_start(context, descriptor, &setting);
            if is_op {
                // The CPU may have been taken away within the call: what the plugin wrote down as its time is later then.
                let behind = self.pacer.behind();
                let since_launch = self.enqueued(thread, type_bit, behind);
                slot.slip_ns = self.pacer.issue(since_launch);
            }
        } else {
            self.report.suppressed += 1;
        }
        self.slots.insert(handle, slot);
    }

    fn call_start(&mut self, context: usize, descriptor: &Descriptor, setting: &Setting) -> Given {
        let mut bytes = DescriptorBytes::new(self.abi, descriptor, setting);
        // NCCL leaves the place for ProxyCtrl's and NetPlugin's handles uninitialised.
        let before = if matches!(descriptor, Descriptor::Other(_)) { UNINITIALISED } else { 0 };
        let (code, value) = self.plugin.start(context, before, &mut bytes);
        *self.report.starts.entry(descriptor.type_name().to_owned()).or_default() += 1;
        self.returned(code);
        if value == UNINITIALISED {
            self.report.unwritten_handles += 1;
            return Given::Null;
        }
        self.report.null_handles += u64::from(value == 0);
        if value == 0 { Given::Null } else { Given::Handle(value) }
    }

    /// Returns whether NCCL leaves out a child because of what the plugin gave for its parent.
    fn suppresses(&self, parent: u64, child: u64) -> bool {
        match self.slots.get(&parent).map(|slot| (slot.given, slot.type_bit)) {
            Some((Given::Suppressed, _)) => true,
            // Up to NCCL 2.27, a NULL group hides its operations, a NULL ProxyOp its steps.
            Some((Given::Null, GROUP)) => self.abi.number() <= 4 && (child == COLL || child == P2P),
            Some((Given::Null, PROXY_OP)) => self.abi.number() <= 4,
            _ => false,
        }
    }

    /// Books a call of an enqueuing thread; gives back the largest delay since the launch, in ns.
    fn enqueued(&mut self, thread: usize, type_bit: u64, behind_ns: u64) -> u64 {
        let thread = &mut self.threads[thread];
        // Graph replays, and NCCL before 2.28, show no launch; then the plan begins with its group.
        let begins = type_bit == KERNEL_LAUNCH || (type_bit == GROUP && !thread.launched);
        thread.launched |= type_bit == KERNEL_LAUNCH;
        thread.behind_ns = if begins { behind_ns } else { thread.behind_ns.max(behind_ns) };
        thread.behind_ns
    }

    fn stop(&mut self, event: &Event, handle: u64) {
        let thread = &mut self.threads[usize::from(event.thread)];
        if thread.open_group == Some(handle) {
            thread.open_group = None;
            thread.launched = false;
        }
        let Some(slot) = self.slots.get(&handle) else {
            self.report.suppressed += 1;
            return;
        };
        let (given, type_bit, parent, step) = (slot.given, slot.type_bit, slot.parent, slot.step);
        let slip_ns = slot.slip_ns;
        if type_bit == PROXY_STEP && old_proxy_states(self.abi) {
            // Of the operation, whether the steps are asked for or not.
            self.pacer.wait(event.at_ns, 0);
            let send = self.slots.get(&parent).is_some_and(|op| op.send);
            self.old_op_state(parent, if send { OLD_SEND_DONE } else { OLD_RECV_DONE }, step);
        }
        let value = match given {
            Given::Handle(value) => value,
            // Up to NCCL 2.25 an operation is stopped without a look at its handle.
            Given::Null if self.abi.number() <= 2 && (type_bit == COLL || type_bit == P2P) => 0,
            Given::Masked => {
                self.report.masked += 1;
                return;
            }
            Given::Null | Given::Suppressed => {
                self.report.suppressed += 1;
                return;
            }
        };
        let min_slip = if type_bit == KERNEL_CH { slip_ns } else { 0 };
        self.pacer.wait(event.at_ns, min_slip);
        let code = self.plugin.stop(value);
        self.report.stops += 1;
        self.returned(code);
    }

    fn state(&mut self, event: &Event, handle: u64, state: u32, arg: Option<u64>) {
        let Some(slot) = self.slots.get(&handle) else {
            self.report.suppressed += 1;
            return;
        };
        let (type_bit, parent, step, slip_ns) = (slot.type_bit, slot.parent, slot.step, slot.slip_ns);
        let given = slot.given;
        let old = type_bit == PROXY_STEP && old_proxy_states(self.abi);
        if let Some(old_state) = old_state_of(state).filter(|_| old) {
            self.pacer.wait(event.at_ns, 0);
            if matches!(old_state, 2 | 5)
                && let Some(op) = self.slots.get_mut(&parent)
            {
                op.bytes = op.bytes.saturating_add(arg.unwrap_or(0));
            }
            self.old_op_state(parent, old_state, step);
        }
        let value = match given {
            // A step's states want a ProxyOp's handle, whatever the step's own is.
            Given::Handle(value) if type_bit != PROXY_STEP || self.value(parent) != 0 => value,
            Given::Masked => {
                self.report.masked += 1;
                return;
            }
            _ => {
                self.report.suppressed += 1;
                return;
            }
        };
        self.pacer.wait(event.at_ns, if type_bit == KERNEL_CH { slip_ns } else { 0 });
        if old {
            if has_state(self.abi, state) {
                // The old argument has no arm for steps.
                self.record(value, state, None);
            }
            return;
        }
        let argument = match (type_bit, state) {
            (KERNEL_CH, KERNEL_CH_STOP) => arg.map(|stamp_ns| self.pacer.stamp(stamp_ns, slip_ns)),
            (GROUP_API, GROUP_START_API_STOP | GROUP_END_API_START) => None,
            _ => arg,
        };
        self.record(value, state, argument.map(StateBytes::word));
    }

    /// Up to v3: the ProxyOp's own state, with its bytes so far and the steps that came to it.
    fn old_op_state(&mut self, op: u64, state: u32, step: i32) {
        let Some(slot) = self.slots.get(&op) else { return };
        if let Given::Handle(value) = slot.given {
            let steps = u32::try_from(step).map_or(0, |step| step.saturating_add(1));
            let argument = StateBytes::proxy_op(slot.bytes, steps);
            self.record(value, state, Some(argument));
        }
    }

    fn record(&mut self, value: usize, state: u32, argument: Option<StateBytes>) {
        let code = self.plugin.record(value, state, argument);
        self.report.states += 1;
        self.returned(code);
    }

    /// The handle that the plugin gave, however long ago; 0 for none.
    fn value(&self, handle: u64) -> usize {
        match self.slots.get(&handle).map(|slot| slot.given) {
            Some(Given::Handle(value)) => value,
            _ => 0,
        }
    }

    fn returned(&mut self, code: i32) {
        self.report.nonzero_returns += u64::from(code != 0);
    }
}
