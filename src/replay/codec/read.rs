//! From the bytes of the body, which may be hostile, to a recording.

use super::{
    Before, HAS_PARENT, KERNEL_CH_STOP, MAX_ALL_THREADS, MAX_EVENTS, MAX_NAMES, MAX_RANKS, MAX_THREADS, tag,
};
use crate::replay::trace::{Call, Descriptor, Event, RankTrace, Text, Trace, TraceError};

pub(super) fn body(body: &[u8]) -> Result<Trace, TraceError> {
    let (threads_left, events_left) = (MAX_ALL_THREADS, MAX_EVENTS);
    Reader { body, at: 0, names: Vec::new(), threads_left, events_left }.trace()
}

struct Reader<'a> {
    body: &'a [u8],
    at: usize,
    names: Vec<Text>,
    threads_left: usize,
    events_left: usize,
}

type Read<T> = Result<T, TraceError>;

impl Reader<'_> {
    fn corrupt(&self, what: &'static str) -> TraceError {
        TraceError::Corrupt { what, at: self.at }
    }

    fn bytes(&mut self, len: usize, what: &'static str) -> Read<&[u8]> {
        let end = self.at.checked_add(len).filter(|&end| end <= self.body.len());
        let end = end.ok_or_else(|| self.corrupt(what))?;
        let bytes = &self.body[self.at..end];
        self.at = end;
        Ok(bytes)
    }

    fn byte(&mut self, what: &'static str) -> Read<u8> {
        Ok(self.bytes(1, what)?[0])
    }

    fn unsigned(&mut self, what: &'static str) -> Read<u64> {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte(what)?;
            let low = u64::from(byte & 0x7f);
            if shift == 63 && low > 1 {
                break;
            }
            value |= low << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(self.corrupt(what))
    }

    fn signed(&mut self, what: &'static str) -> Read<i64> {
        let value = self.unsigned(what)?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    fn int(&mut self, what: &'static str) -> Read<i32> {
        let value = self.signed(what)?;
        i32::try_from(value).map_err(|_| self.corrupt(what))
    }

    fn small<T: TryFrom<u64>>(&mut self, what: &'static str) -> Read<T> {
        let value = self.unsigned(what)?;
        T::try_from(value).map_err(|_| self.corrupt(what))
    }

    fn step(&mut self, before: &mut u64, what: &'static str) -> Read<u64> {
        *before = before.wrapping_add(self.signed(what)? as u64);
        Ok(*before)
    }

    fn flag(&mut self, what: &'static str) -> Read<bool> {
        match self.byte(what)? {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(self.corrupt(what)),
        }
    }

    /// A count of things that take at least one byte each, so that no claim outgrows the file, and are no more than
    /// this.
    fn count(&mut self, what: &'static str, most: usize) -> Read<usize> {
        let count: usize = self.small(what)?;
        if count > most.min(self.body.len() - self.at) { Err(self.corrupt(what)) } else { Ok(count) }
    }

    fn text(&mut self, what: &'static str) -> Read<String> {
        let len = self.count(what, usize::MAX)?;
        let text = std::str::from_utf8(self.bytes(len, what)?).map(str::to_owned);
        match text {
            // The names become C strings.
            Ok(text) if !text.contains('\0') => Ok(text),
            _ => Err(self.corrupt(what)),
        }
    }

    fn name(&mut self, what: &'static str) -> Read<Text> {
        let index: usize = self.small(what)?;
        self.names.get(index).cloned().ok_or_else(|| self.corrupt(what))
    }

    fn trace(mut self) -> Read<Trace> {
        for _ in 0..self.count("count of names", MAX_NAMES)? {
            let name = self.text("name")?;
            self.names.push(name.into());
        }
        let mut ranks = Vec::new();
        for _ in 0..self.count("count of ranks", MAX_RANKS)? {
            ranks.push(self.rank()?);
        }
        if self.at == self.body.len() { Ok(Trace { ranks }) } else { Err(self.corrupt("end")) }
    }

    fn rank(&mut self) -> Read<RankTrace> {
        let label = self.text("rank's label")?;
        let pid = self.small("pid")?;
        let mut threads = Vec::new();
        let thread_count = self.count("count of threads", MAX_THREADS.min(self.threads_left))?;
        self.threads_left -= thread_count;
        for _ in 0..thread_count {
            threads.push(self.small("thread id")?);
        }
        let count = self.count("count of events", self.events_left)?;
        self.events_left -= count;
        let mut events = Vec::with_capacity(count);
        let mut before = Before::default();
        for _ in 0..count {
            let tag = self.byte("tag")?;
            let thread: u16 = self.small("thread")?;
            if usize::from(thread) >= threads.len() {
                return Err(self.corrupt("thread"));
            }
            let at_ns = self.step(&mut before.at_ns, "time")?;
            events.push(Event { at_ns, thread, call: self.call(tag, &mut before)? });
        }
        Ok(RankTrace { label, pid, threads, events })
    }

    fn call(&mut self, tag: u8, before: &mut Before) -> Read<Call> {
        Ok(match tag {
            tag::INIT => Call::Init {
                ctx: self.unsigned("context")?,
                comm_id: self.bytes(8, "communicator")?.iter().rev().fold(0, |id, &b| id << 8 | u64::from(b)),
                name: match self.unsigned("communicator's name")? {
                    0 => None,
                    index => Some(
                        usize::try_from(index - 1)
                            .ok()
                            .and_then(|index| self.names.get(index).cloned())
                            .ok_or_else(|| self.corrupt("communicator's name"))?,
                    ),
                },
                nodes: self.int("nodes")?,
                ranks: self.int("ranks")?,
                rank: self.int("rank")?,
            },
            tag::STOP => Call::Stop { handle: self.step(&mut before.handle, "handle")? },
            tag::STATE | tag::STATE_ARG => {
                let handle = self.step(&mut before.handle, "handle")?;
                let state = self.small("state")?;
                let arg = match (tag, state) {
                    (tag::STATE, _) => None,
                    (_, KERNEL_CH_STOP) => Some(self.step(&mut before.stamp_ns, "stamp")?),
                    _ => Some(self.unsigned("argument")?),
                };
                Call::State { handle, state, arg }
            }
            tag::FINALIZE => Call::Finalize { ctx: self.unsigned("context")? },
            _ => {
                let handle = self.step(&mut before.handle, "handle")?;
                let ctx = self.unsigned("context")?;
                let parent = if tag & HAS_PARENT == 0 {
                    0
                } else {
                    handle.wrapping_sub(self.signed("parent")? as u64)
                };
                let descriptor = self.descriptor(tag & !HAS_PARENT, before)?;
                Call::Start { handle, ctx, parent, descriptor }
            }
        })
    }

    fn descriptor(&mut self, tag: u8, before: &mut Before) -> Read<Descriptor> {
        Ok(match tag {
            tag::GROUP_API => {
                Descriptor::GroupApi { depth: self.int("depth")?, graph_captured: self.flag("capture")? }
            }
            tag::COLL_API => Descriptor::CollApi {
                func: self.name("function")?,
                count: self.unsigned("count")?,
                datatype: self.name("type")?,
                root: self.int("root")?,
                stream: self.unsigned("stream")?,
                graph_captured: self.flag("capture")?,
            },
            tag::P2P_API => Descriptor::P2pApi {
                func: self.name("function")?,
                count: self.unsigned("count")?,
                datatype: self.name("type")?,
                stream: self.unsigned("stream")?,
                graph_captured: self.flag("capture")?,
            },
            tag::KERNEL_LAUNCH => Descriptor::KernelLaunch { stream: self.unsigned("stream")? },
            tag::GROUP => Descriptor::Group,
            tag::COLL => Descriptor::Coll {
                rank: self.int("rank")?,
                seq: self.unsigned("seq")?,
                func: self.name("function")?,
                count: self.unsigned("count")?,
                root: self.int("root")?,
                datatype: self.name("type")?,
                channels: self.byte("channels")?,
                warps: self.byte("warps")?,
                algo: self.name("algorithm")?,
                proto: self.name("protocol")?,
            },
            tag::P2P => Descriptor::P2p {
                rank: self.int("rank")?,
                func: self.name("function")?,
                count: self.unsigned("count")?,
                datatype: self.name("type")?,
                peer: self.int("peer")?,
                channels: self.byte("channels")?,
            },
            tag::KERNEL_CH => Descriptor::KernelCh {
                channel: self.byte("channel")?,
                stamp_ns: self.step(&mut before.stamp_ns, "stamp")?,
            },
            tag::PROXY_OP => Descriptor::ProxyOp {
                pid: self.int("pid")?,
                channel: self.byte("channel")?,
                peer: self.int("peer")?,
                steps: self.int("steps")?,
                chunk_bytes: self.int("chunk")?,
                send: self.flag("direction")?,
            },
            tag::PROXY_STEP => Descriptor::ProxyStep { step: self.int("step")? },
            tag::OTHER => Descriptor::Other(self.unsigned("type")?),
            _ => return Err(self.corrupt("tag")),
        })
    }
}
