//! A monitor over a source that is hostile, and everything that people and programs get of it.

use super::plain;
use ringwatch::detect::Settings;
use ringwatch::export::{Metrics, Own, otlp, prometheus};
use ringwatch::model::{
    HostFact, OpRecord, ProcessState, SegmentId, Sink, Snapshot, Source, Spare, Unread, Update,
};
use ringwatch::report;
use ringwatch::runtime::Monitor;
use ringwatch::view::{App, Msg, Screen, render_text};

/// The longest text of a single thing, in bytes: names, labels, frames, lines of a screen.
pub(crate) const TEXT_MAX: usize = 4096;
/// The longest line of a report or of metrics, which may hold lists of such texts.
const LINE_MAX: usize = 64 << 10;
/// What one poll may tell beside operations, whatever the source says.
const UPDATES_MAX: usize = 1 << 18;

/// A source whose updates are checked on their way.
#[derive(Debug)]
pub(crate) struct Checked<S> {
    pub(crate) source: S,
}

struct Checking<'a> {
    to: &'a mut dyn Sink,
    taken: usize,
}

impl Sink for Checking<'_> {
    fn take(&mut self, update: Update) {
        self.taken += 1;
        texts(&update, &mut |what, text| plain::text(what, text, TEXT_MAX));
        self.to.take(update);
    }

    fn operation(&mut self, op: Box<OpRecord>) {
        self.taken += 1;
        self.to.operation(op);
    }

    fn rest(&mut self, spare: &mut Spare) {
        self.to.rest(spare);
    }
}

impl<S: Source> Source for Checked<S> {
    fn poll(&mut self, now_ns: u64) -> Vec<Update> {
        self.source.poll(now_ns)
    }

    fn poll_each(&mut self, now_ns: u64, sink: &mut dyn Sink) {
        let mut checking = Checking { to: sink, taken: 0 };
        self.source.poll_each(now_ns, &mut checking);
        assert!(checking.taken <= UPDATES_MAX, "{} updates of one poll", checking.taken);
    }

    fn inspect(&mut self, _: SegmentId, _: u64) {
        // No tool is started for a process that a hostile input names.
    }

    fn unread(&self, uid: Option<u32>) -> Vec<Unread> {
        self.source.unread(uid)
    }

    fn describe(&self) -> String {
        self.source.describe()
    }
}

/// Every text of an update.
fn texts(update: &Update, each: &mut dyn FnMut(&'static str, &str)) {
    match update {
        Update::Segment(s) => {
            each("host", &s.host);
            each("program", &s.program);
            s.nccl.iter().for_each(|t| each("NCCL's version", t));
            s.job.name.iter().for_each(|t| each("job", t));
            for (name, value) in &s.job.labels {
                each("label", name);
                each("label's value", value);
            }
        }
        Update::Comm(c) => {
            c.name.iter().for_each(|t| each("communicator", t));
            c.gpu.iter().for_each(|t| each("GPU", t));
        }
        Update::Host(h) => host(h, each),
        Update::Hardware(r) => plain::json("reading", &serde_json::to_value(r).unwrap(), TEXT_MAX),
        Update::Clock { host, .. } => each("host", host),
        _ => {}
    }
}

fn host(h: &HostFact, each: &mut dyn FnMut(&'static str, &str)) {
    h.stack.iter().for_each(|t| each("frame", t));
    h.threads.iter().for_each(|t| each("thread", t));
    if let Some(ProcessState::Sleeping { wchan } | ProcessState::Blocked { wchan }) = &h.state {
        wchan.iter().for_each(|t| each("place in the kernel", t));
    }
    for share in [h.cpu_starved, h.nccl_starved, h.nccl_busy, h.cpu_throttled, h.memory_pressure] {
        assert!(share.is_none_or(|s| (0.0..=1.0).contains(&s)), "a share of {share:?}");
    }
}

/// A monitor, and what keeps the books of what it finds.
#[derive(Debug)]
pub(crate) struct Watch<S> {
    pub(crate) monitor: Monitor<Checked<S>>,
    metrics: Metrics,
    tracer: otlp::Tracer,
}

impl<S: Source> Watch<S> {
    pub(crate) fn new(source: S) -> Self {
        let mut monitor = Monitor::new(Checked { source }, Settings::default()).following_live();
        monitor.keep_finished();
        let settings = prometheus::Settings { inspector_names: true, ..prometheus::Settings::default() };
        let tracer = otlp::Tracer::new(&otlp::Settings::default());
        Watch { monitor, metrics: Metrics::new(settings), tracer }
    }

    pub(crate) fn source(&mut self) -> &mut S {
        &mut self.monitor.source_mut().source
    }

    /// Takes in what is new, judges it and counts it.
    pub(crate) fn step(&mut self, now_ns: u64) {
        let events = self.monitor.step(now_ns);
        let finished = self.monitor.take_finished();
        let join = self.monitor.join();
        self.tracer.finished(join, &finished);
        self.tracer.events(join, &events);
        drop(self.tracer.take());
        self.metrics.finished(join, &finished);
        self.metrics.events(join, &events);
    }

    /// Writes what there is to write, and checks it. Writing takes longer than all that came before: which of the
    /// outputs it is, the input chooses.
    pub(crate) fn write(&mut self, input: &[u8], now_ns: u64) {
        let (join, findings) = (self.monitor.join(), self.monitor.findings());
        let own = Own { now_ns, node: "node".to_owned(), ..Own::default() };
        let accept = match choice(input) % 8 {
            0 => return screens(self.monitor.snapshot(now_ns)),
            1 | 2 => return snapshot(&self.monitor.snapshot(now_ns)),
            3 => "text/plain",
            4 => "application/openmetrics-text",
            _ => return,
        };
        let (_, body) =
            self.metrics.render(join, &findings, &own, prometheus::negotiated(Some(accept), true)).unwrap();
        metrics(std::str::from_utf8(&body).unwrap());
    }
}

/// Every line is a comment, or a name, labels in braces and a number.
fn metrics(text: &str) {
    plain::lines("a line of metrics", text, LINE_MAX);
    for line in text.lines().filter(|l| !l.starts_with('#')) {
        let exemplar = line.find(" # {");
        let (name, value) = line[..exemplar.unwrap_or(line.len())].rsplit_once(' ').unwrap();
        assert!(value.parse::<f64>().is_ok(), "{line}");
        let plain = name.split('{').next().unwrap();
        assert!(plain.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_'), "{line}");
        assert_eq!(name.contains('{'), name.ends_with('}'), "{line}");
    }
}

/// A number of an input, the same each time.
pub(crate) fn choice(input: &[u8]) -> u32 {
    input.iter().fold(0x811c_9dc5, |h, b| (h ^ u32::from(*b)).wrapping_mul(0x0100_0193)) >> 8
}

/// What people see of a snapshot without a terminal: JSON and reports.
fn snapshot(s: &Snapshot) {
    plain::json("snapshot", &serde_json::to_value(s).unwrap(), TEXT_MAX);
    let mut text = Vec::new();
    report::summary(&mut text, s).unwrap();
    let pages = report::Pages::of(s);
    pages.text(&mut text).unwrap();
    plain::lines("a line of the report", std::str::from_utf8(&text).unwrap(), LINE_MAX);
    plain::json("page", &serde_json::to_value(&pages).unwrap(), TEXT_MAX);
}

/// What a terminal shows of a snapshot.
pub(crate) fn screens(s: Snapshot) {
    let mut app = App::new();
    let is_cluster = s.fleet.is_some();
    app.set_snapshot(s);
    for screen in if is_cluster { &Screen::OF_CLUSTER[..] } else { &Screen::ALL[..] } {
        app.update(Msg::Show(*screen));
        plain::lines("a line of the screen", &render_text(&app, 100, 40), TEXT_MAX);
    }
}
