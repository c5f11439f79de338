//! The recorder's text form: one line a callback, read and written.
//!
//! `at_ns tid verb key=value ...`. Writing gives back the very bytes that were read, which is how a
//! test shows that the compact form loses nothing; it is also the way to look at a recording.

use std::collections::HashSet;
use std::fmt;

use super::trace::{Call, Descriptor, Event, RankTrace, Text, Trace, TraceError};

type Parsed<T> = Result<T, &'static str>;

/// A line in an error is shown up to here, in characters.
const SHOWN_MAX: usize = 200;

impl Trace {
    /// Reads the recorder's logs, one `(label, text)` per rank, in rank order.
    ///
    /// # Errors
    /// [`TraceError::Line`] names the first line that is not understood.
    pub fn parse_logs<'a>(logs: impl IntoIterator<Item = (&'a str, &'a str)>) -> Result<Self, TraceError> {
        let mut names = Names::default();
        let mut ranks = Vec::new();
        for (label, text) in logs {
            let mut rank = RankTrace { label: label.to_owned(), ..RankTrace::default() };
            for (index, line) in text.lines().enumerate() {
                let event = parse_line(line, &mut rank.threads, &mut names).map_err(|what| {
                    TraceError::Line { label: label.to_owned(), line: index + 1, what, text: shown(line) }
                })?;
                rank.events.push(event);
            }
            // The first callback is a communicator's init on the main thread, whose id is the process's.
            rank.pid = rank.threads.first().copied().unwrap_or(0);
            ranks.push(rank);
        }
        Ok(Self { ranks })
    }
}

/// A line as an error shows it: it may be anything, what steers a terminal too.
fn shown(line: &str) -> String {
    let end = line.char_indices().nth(SHOWN_MAX).map_or(line.len(), |(at, _)| at);
    let cut = if end < line.len() { "..." } else { "" };
    format!("{}{cut}", line[..end].escape_debug())
}

impl RankTrace {
    /// This rank's log as the recorder wrote it.
    #[must_use]
    pub fn to_log(&self) -> String {
        let mut text = String::new();
        for event in &self.events {
            let tid = self.threads.get(usize::from(event.thread)).copied().unwrap_or(0);
            text.push_str(&format!("{} {tid} {}\n", event.at_ns, event.call));
        }
        text
    }
}

#[derive(Default)]
struct Names(HashSet<Text>);

impl Names {
    fn share(&mut self, name: &str) -> Parsed<Text> {
        if name.is_empty() || name.contains('\0') {
            return Err("empty name");
        }
        if let Some(known) = self.0.get(name) {
            return Ok(known.clone());
        }
        let text = Text::from(name);
        self.0.insert(text.clone());
        Ok(text)
    }
}

/// The words of one line; the recorder's order is fixed, so they are taken from the front.
struct Words<'a>(std::str::SplitAsciiWhitespace<'a>);

impl<'a> Words<'a> {
    fn word(&mut self) -> Parsed<&'a str> {
        self.0.next().ok_or("the line ends early")
    }

    fn number<T: std::str::FromStr>(&mut self) -> Parsed<T> {
        self.word()?.parse().map_err(|_| "not a number in range")
    }

    fn value(&mut self, key: &str) -> Parsed<&'a str> {
        let word = self.word()?;
        word.strip_prefix(key).and_then(|rest| rest.strip_prefix('=')).ok_or("another key was expected")
    }

    fn field<T: std::str::FromStr>(&mut self, key: &str) -> Parsed<T> {
        self.value(key)?.parse().map_err(|_| "not a number in range")
    }

    fn flag(&mut self, key: &str) -> Parsed<bool> {
        match self.value(key)? {
            "0" => Ok(false),
            "1" => Ok(true),
            _ => Err("neither 0 nor 1"),
        }
    }

    fn pointer(&mut self, key: &str) -> Parsed<u64> {
        match self.value(key)? {
            "(nil)" => Ok(0),
            hex => hex
                .strip_prefix("0x")
                .and_then(|digits| u64::from_str_radix(digits, 16).ok())
                .ok_or("not a pointer"),
        }
    }

    fn end(mut self) -> Parsed<()> {
        if self.0.next().is_none() { Ok(()) } else { Err("unexpected words at the end") }
    }
}

fn parse_line(line: &str, threads: &mut Vec<u32>, names: &mut Names) -> Parsed<Event> {
    let mut words = Words(line.split_ascii_whitespace());
    let at_ns = words.number()?;
    let tid = words.number()?;
    let call = match words.word()? {
        "init" => Call::Init {
            ctx: words.field("ctx")?,
            comm_id: u64::from_str_radix(words.value("id")?, 16).map_err(|_| "not a hexadecimal id")?,
            name: match words.value("name")? {
                "-" => None,
                name => Some(names.share(name)?),
            },
            nodes: words.field("nn")?,
            ranks: words.field("nr")?,
            rank: words.field("r")?,
        },
        "start" => Call::Start {
            handle: words.field("h")?,
            ctx: words.field("c")?,
            parent: words.field("p")?,
            descriptor: parse_descriptor(&mut words, names)?,
        },
        "stop" => Call::Stop { handle: words.field("h")? },
        "state" => Call::State {
            handle: words.field("h")?,
            state: words.field("s")?,
            arg: match words.0.next() {
                None => None,
                Some(word) => Some(
                    word.strip_prefix("a=").and_then(|v| v.parse().ok()).ok_or("not a state's argument")?,
                ),
            },
        },
        "finalize" => Call::Finalize { ctx: words.field("ctx")? },
        _ => return Err("unknown verb"),
    };
    words.end()?;
    let thread = match threads.iter().position(|&known| known == tid) {
        Some(index) => index,
        None => {
            threads.push(tid);
            threads.len() - 1
        }
    };
    Ok(Event { at_ns, thread: u16::try_from(thread).map_err(|_| "too many threads")?, call })
}

fn parse_descriptor(words: &mut Words<'_>, names: &mut Names) -> Parsed<Descriptor> {
    let kind = words.word()?;
    Ok(match kind {
        "GroupApi" => {
            Descriptor::GroupApi { depth: words.field("depth")?, graph_captured: words.flag("graph")? }
        }
        "CollApi" => Descriptor::CollApi {
            func: names.share(words.word()?)?,
            count: words.field("n")?,
            datatype: names.share(words.value("dt")?)?,
            root: words.field("root")?,
            stream: words.pointer("st")?,
            graph_captured: words.flag("graph")?,
        },
        "P2pApi" => Descriptor::P2pApi {
            func: names.share(words.word()?)?,
            count: words.field("n")?,
            datatype: names.share(words.value("dt")?)?,
            stream: words.pointer("st")?,
            graph_captured: words.flag("graph")?,
        },
        "KernelLaunch" => Descriptor::KernelLaunch { stream: words.pointer("st")? },
        "Group" => Descriptor::Group,
        "Coll" => Descriptor::Coll {
            rank: words.field("rank")?,
            seq: words.field("seq")?,
            func: names.share(words.word()?)?,
            count: words.field("n")?,
            root: words.field("root")?,
            datatype: names.share(words.value("dt")?)?,
            channels: words.field("nch")?,
            warps: words.field("nw")?,
            algo: names.share(words.value("algo")?)?,
            proto: names.share(words.value("proto")?)?,
        },
        "P2p" => Descriptor::P2p {
            rank: words.field("rank")?,
            func: names.share(words.word()?)?,
            count: words.field("n")?,
            datatype: names.share(words.value("dt")?)?,
            peer: words.field("peer")?,
            channels: words.field("nch")?,
        },
        "KernelCh" => Descriptor::KernelCh { channel: words.field("ch")?, stamp_ns: words.field("pt")? },
        "ProxyOp" => Descriptor::ProxyOp {
            pid: words.field("pid")?,
            channel: words.field("ch")?,
            peer: words.field("peer")?,
            steps: words.field("nsteps")?,
            chunk_bytes: words.field("chunk")?,
            send: words.flag("send")?,
        },
        "ProxyStep" => Descriptor::ProxyStep { step: words.number()? },
        _ => match kind.strip_prefix("type=").and_then(|bit| bit.parse().ok()) {
            Some(bit) => Descriptor::Other(bit),
            None => return Err("unknown event type"),
        },
    })
}

impl fmt::Display for Call {
    /// The recorder's words behind time and thread.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Init { ctx, comm_id, name, nodes, ranks, rank } => {
                let name = name.as_deref().unwrap_or("-");
                write!(f, "init ctx={ctx} id={comm_id:x} name={name} nn={nodes} nr={ranks} r={rank}")
            }
            Self::Start { handle, ctx, parent, descriptor } => {
                write!(f, "start h={handle} c={ctx} p={parent} {descriptor}")
            }
            Self::Stop { handle } => write!(f, "stop h={handle}"),
            Self::State { handle, state, arg } => {
                write!(f, "state h={handle} s={state}")?;
                arg.map_or(Ok(()), |arg| write!(f, " a={arg}"))
            }
            Self::Finalize { ctx } => write!(f, "finalize ctx={ctx}"),
        }
    }
}

/// A pointer as C's `%p` prints it.
struct Pointer(u64);

impl fmt::Display for Pointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 { f.write_str("(nil)") } else { write!(f, "{:#x}", self.0) }
    }
}

impl fmt::Display for Descriptor {
    /// The recorder's words behind the handles.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::GroupApi { depth, graph_captured } => {
                write!(f, "GroupApi depth={depth} graph={}", u8::from(*graph_captured))
            }
            Self::CollApi { func, count, datatype, root, stream, graph_captured } => {
                let (st, graph) = (Pointer(*stream), u8::from(*graph_captured));
                write!(f, "CollApi {func} n={count} dt={datatype} root={root} st={st} graph={graph}")
            }
            Self::P2pApi { func, count, datatype, stream, graph_captured } => {
                let (st, graph) = (Pointer(*stream), u8::from(*graph_captured));
                write!(f, "P2pApi {func} n={count} dt={datatype} st={st} graph={graph}")
            }
            Self::KernelLaunch { stream } => write!(f, "KernelLaunch st={}", Pointer(*stream)),
            Self::Group => f.write_str("Group"),
            Self::Coll { rank, seq, func, count, root, datatype, channels, warps, algo, proto } => write!(
                f,
                "Coll rank={rank} seq={seq} {func} n={count} root={root} dt={datatype} nch={channels} \
                 nw={warps} algo={algo} proto={proto}"
            ),
            Self::P2p { rank, func, count, datatype, peer, channels } => {
                write!(f, "P2p rank={rank} {func} n={count} dt={datatype} peer={peer} nch={channels}")
            }
            Self::KernelCh { channel, stamp_ns } => write!(f, "KernelCh ch={channel} pt={stamp_ns}"),
            Self::ProxyOp { pid, channel, peer, steps, chunk_bytes, send } => write!(
                f,
                "ProxyOp pid={pid} ch={channel} peer={peer} nsteps={steps} chunk={chunk_bytes} send={}",
                u8::from(*send)
            ),
            Self::ProxyStep { step } => write!(f, "ProxyStep {step}"),
            Self::Other(bit) => write!(f, "type={bit}"),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;

    const LOG: &str = "\
100 7 init ctx=1 id=33b61ea03a60e40d name=- nn=1 nr=4 r=0
101 7 init ctx=2 id=a name=dp nn=2 nr=8 r=5
102 7 start h=3 c=1 p=0 GroupApi depth=1 graph=1
103 7 start h=4 c=1 p=3 CollApi AllReduce n=8 dt=ncclFloat32 root=0 st=(nil) graph=0
104 7 start h=5 c=1 p=3 P2pApi Send n=8 dt=ncclFloat32 st=0x39205bf0 graph=0
105 7 start h=6 c=1 p=3 KernelLaunch st=0x7f
106 7 start h=7 c=1 p=0 Group
107 7 start h=8 c=1 p=4 Coll rank=2 seq=9 AllReduce n=8 root=1 dt=ncclFloat32 nch=24 nw=16 algo=RING proto=LL
108 7 start h=9 c=1 p=5 P2p rank=2 Send n=8 dt=ncclFloat32 peer=3 nch=4
107 9 start h=10 c=1 p=8 KernelCh ch=5 pt=1795244622115232992
109 9 start h=11 c=1 p=8 ProxyOp pid=77 ch=1 peer=3 nsteps=12 chunk=4096 send=1
110 9 start h=12 c=1 p=11 ProxyStep 3
111 9 start h=13 c=1 p=0 type=32
112 9 state h=10 s=22 a=1795244622115233056
113 9 state h=3 s=23
114 9 stop h=10
115 7 finalize ctx=1
";

    #[test]
    fn lines_of_every_kind_come_back_to_the_letter() {
        let trace = Trace::parse_logs([("rank0", LOG)]).unwrap();
        assert_eq!(trace.ranks[0].pid, 7);
        assert_eq!(trace.ranks[0].threads, [7, 9]);
        assert_eq!(trace.ranks[0].to_log(), LOG);
    }

    #[test]
    fn a_bad_line_is_named() {
        for bad in
            ["1 2 leap h=1", "1 2 stop", "x 2 stop h=1", "1 2 stop h=1 h=2", "1 2 start h=1 c=1 p=1 Foo"]
        {
            let log = format!("100 7 stop h=1\n{bad}\n");
            let error = Trace::parse_logs([("rank3", log.as_str())]).unwrap_err();
            assert!(
                matches!(&error, TraceError::Line { label, line: 2, text, .. } if label == "rank3" && text == bad),
                "{error}"
            );
        }
    }
}
