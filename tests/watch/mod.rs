//! Drives the join and the detector over a simulated job, as an agent or the agents of its hosts would.

use super::simulator::{BEGIN, Case, Simulation};
use ringwatch::cluster::{Moment, Outgoing, Publisher, Reader, Refusal};
use ringwatch::detect::{Detector, Settings};
use ringwatch::join::{Join, Sampling};
use ringwatch::model::{CommId, FindingEvent, Rank, SegmentId, Source as _, Update};
use ringwatch::recording::{Limits, Playback, Writer};
use std::collections::BTreeMap;
use std::path::Path;

const MS: u64 = 1_000_000;

/// The path on which the facts of a job reach the detector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// Every record, to one join.
    Records,
    /// Through the agent of each rank's host, and what these tell over the bus.
    Bus,
    /// The same, where of the operations one of 64 is told, as by the agents of a busy job.
    Sampled,
    /// From a recording of all that the agents see.
    Recorded,
}

/// Of a communicator four operations a second are told whole: what the default budget leaves to 64 busy ones.
const SAMPLED: u32 = 10;

/// The agents of a job's hosts, and who hears them.
struct Agents {
    joins: BTreeMap<String, (Join, Publisher)>,
    of: BTreeMap<SegmentId, String>,
    reader: Reader,
    /// Bytes a second of each.
    budget: u64,
    /// One of `1 << level` operations is told at most.
    level: u32,
    /// They leave nothing out.
    is_everything: bool,
}

impl Agents {
    /// Takes what an agent reads on its host.
    fn take(&mut self, update: Update) {
        let host = match &update {
            Update::Segment(s) => {
                self.of.insert(s.id, s.host.clone());
                s.host.clone()
            }
            Update::Comm(c) => self.of[&c.segment].clone(),
            Update::Op(o) => self.of[&o.segment].clone(),
            Update::Left { segment, .. } | Update::Missed { segment, .. } => self.of[segment].clone(),
            Update::Host(h) => self.of[&h.segment].clone(),
            Update::Hardware(r) => r.host.clone(),
            other => panic!("{other:?} is told by nobody"),
        };
        let (budget, is_everything) = (self.budget, self.is_everything);
        let (join, publisher) = self.joins.entry(host.clone()).or_insert_with(|| {
            let mut join = Join::new();
            join.keep_finished();
            let publisher = Publisher::new(host, 1, budget);
            let publisher = if is_everything { publisher.of_everything() } else { publisher };
            join.sample(Some(publisher.sampling()));
            (join, publisher)
        });
        if let Update::Hardware(r) = &update {
            publisher.reading(r);
        }
        join.feed(update);
    }

    /// Lets agents look, each at its own host's clock. Returns what they publish, by host.
    fn published(&mut self, sim: &Simulation, now: u64) -> Vec<(String, Vec<Outgoing>)> {
        let mut all = Vec::new();
        let lost = sim.lost_host(now);
        for (host, (join, publisher)) in self.joins.iter_mut().filter(|(h, _)| Some(*h) != lost.as_ref()) {
            let mono_ns = sim.host_now(host, now);
            join.tick(mono_ns);
            let finished = join.take_finished();
            let messages = publisher.look(join, &finished, &[], Moment { mono_ns, unix_ns: now });
            all.push((host.clone(), messages));
            let sampling = publisher.sampling();
            join.sample(Some(Sampling { level: sampling.level.max(self.level), ..sampling }));
            assert!(publisher.books().balance(), "{host}: {:?}", publisher.books());
        }
        all
    }

    /// Lets agents look, and gives what an analyser makes of what they say.
    fn look(&mut self, sim: &Simulation, now: u64, out: &mut Vec<Update>) {
        let heard = Moment { mono_ns: BEGIN + now, unix_ns: now };
        for (host, messages) in self.published(sim, now) {
            for message in messages {
                self.reader.read(&message.topic.of(&host), &message.bytes, heard, false, out);
            }
        }
        self.reader.look(BEGIN + now, out);
        // What one finds interesting, the others are asked for.
        for key in self.reader.take_announced() {
            self.joins.values_mut().for_each(|(_, p)| p.wish([key].into_iter()));
        }
    }
}

/// Watches one job on one path.
pub(crate) struct Watcher {
    way: Way,
    pub(crate) join: Join,
    pub(crate) detector: Detector,
    agents: Agents,
    writer: Option<Writer>,
    playback: Option<Playback>,
}

impl Watcher {
    pub(crate) fn new(case: &Case, way: Way) -> Self {
        let mut join = Join::new();
        join.observe_from(Simulation::OBSERVER);
        // The default's, which is meant for eight ranks a host.
        let budget = 65_536 * u64::from(case.ranks.div_ceil(case.nodes).div_ceil(8));
        let agents = Agents {
            joins: BTreeMap::new(),
            of: BTreeMap::new(),
            reader: Reader::new(std::time::Duration::from_secs(3)),
            budget,
            level: if way == Way::Sampled { SAMPLED } else { 0 },
            is_everything: way == Way::Recorded,
        };
        Watcher {
            way,
            join,
            detector: Detector::new(Settings::default()),
            agents,
            playback: None,
            writer: None,
        }
    }

    /// Records in this directory from now on, and judges nothing.
    pub(crate) fn record(&mut self, dir: &Path, limits: Limits) {
        self.writer = Some(Writer::create(dir, limits).expect("a new directory"));
    }

    /// Closes the recording.
    pub(crate) fn end(self) {
        if let Some(writer) = self.writer {
            writer.end().expect("room");
        }
    }

    /// Judges what this recording holds, in place of what is fed.
    pub(crate) fn play(&mut self, dir: &Path) {
        self.playback = Some(Playback::open(dir).expect("a recording"));
    }

    /// Takes what was read at `now`, `look` ns after the last time, and returns what changed about the findings.
    pub(crate) fn pass(
        &mut self,
        sim: &Simulation,
        mut updates: Vec<Update>,
        now: u64,
        look: u64,
    ) -> Vec<FindingEvent> {
        let by_bus = matches!(self.way, Way::Bus | Way::Sampled);
        if self.writer.is_some() {
            updates.into_iter().for_each(|u| self.agents.take(u));
            self.write(sim, now, look);
            return Vec::new();
        }
        if let Some(playback) = &mut self.playback {
            updates = playback.poll(BEGIN + now);
        }
        if by_bus {
            updates.into_iter().for_each(|u| self.agents.take(u));
            updates = Vec::new();
            self.agents.look(sim, now, &mut updates);
        }
        updates.into_iter().for_each(|u| self.join.feed(u));
        let at_ns = BEGIN + now;
        self.join.tick(at_ns);
        if by_bus && now % (500 * MS) < look {
            let unknown = self.join.unknown(&self.join.standing(at_ns));
            self.agents.joins.values_mut().for_each(|(_, p)| p.wish(unknown.iter().copied()));
        }
        self.detector.check(&self.join, at_ns)
    }

    /// Writes what agents publish, and asks them for what is unknown, as whoever records a cluster does.
    fn write(&mut self, sim: &Simulation, now: u64, look: u64) {
        let Some(writer) = &mut self.writer else { return };
        let at = Moment { mono_ns: BEGIN + now, unix_ns: now };
        let (mut all, mut updates) = (Vec::new(), Vec::new());
        for (host, messages) in self.agents.published(sim, now) {
            for message in messages {
                let subject = message.topic.of(&host);
                self.agents.reader.read(&subject, &message.bytes, at, false, &mut updates);
                all.push(message);
            }
        }
        updates.into_iter().for_each(|u| self.join.feed(u));
        self.join.tick(at.mono_ns);
        if now % (500 * MS) < look {
            let unknown = self.join.unknown(&self.join.standing(at.mono_ns));
            self.agents.joins.values_mut().for_each(|(_, p)| p.wish(unknown.iter().copied()));
        }
        if writer.take(at, all, &[]).expect("room") {
            self.agents.joins.values_mut().for_each(|(_, p)| p.refresh());
        }
    }

    /// Messages that the reader of the bus did not accept, by reason.
    pub(crate) fn refused(&self) -> &BTreeMap<Refusal, u64> {
        self.agents.reader.refused()
    }

    /// The ranks of the job behind the ranks of its communicators.
    pub(crate) fn job_ranks(&self) -> BTreeMap<(CommId, Rank), u32> {
        self.join
            .communicators()
            .flat_map(|c| c.members().iter().map(move |(r, m)| (c.id, *r, m.record.segment)))
            .filter_map(|(c, r, segment)| Some(((c, r), self.join.process(segment)?.record.job.rank?)))
            .collect()
    }
}
