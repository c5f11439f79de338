//! The facts by which kinds of hang are judged: the join as it stands still, one place in it, and questions to both.

use super::{Settings, fact, names, number, seconds, verb};
use crate::join::{
    Activity, Communicator, Instance, Join, Origin, Part, Process, Stall, Standstills, Waited, WaitingFor,
};
use crate::model::{Evidence, Liveness, Making, Rank, Track, Victims};
use std::cell::OnceCell;
use std::collections::HashMap;

/// So many times the farthest that a host was ahead of its GPU, it is not ahead.
const LEADS: u64 = 4;

/// Ranks that are asked for what they did before.
const ASKED: usize = 4;

/// The facts by which a kind of hang is judged.
#[derive(Debug, Clone, Copy)]
pub(super) struct HangContext<'a> {
    pub(super) join: &'a Join,
    pub(super) standing: &'a Standstills,
    pub(super) settings: Settings,
    pub(super) now_ns: u64,
    pub(super) gpu_users: &'a OnceCell<GpuUsers<'a>>,
}

/// Numbers of running processes that use each GPU, by host and PCI address.
pub(super) type GpuUsers<'a> = HashMap<(&'a str, &'a str), usize>;

/// One place where standing still begins, and what lies there.
#[derive(Debug, Clone, Copy)]
pub(super) struct StallSite<'a> {
    pub(super) origin: &'a Origin,
    pub(super) stall: &'a Stall,
    pub(super) comm: &'a Communicator,
    pub(super) instance: &'a Instance,
    pub(super) waited: &'a Waited,
}

impl<'a> HangContext<'a> {
    /// The ranks that an operation lacks, where several untimed operations explain why some of them do not go on: those of which
    /// their GPUs tell more. Absent where nobody is in doubt.
    pub(super) fn told_by_gpus(
        &self,
        origin: &Origin,
        stall: &Stall,
        comm: &Communicator,
    ) -> Option<Vec<Rank>> {
        let process = |r: &Rank| stall.lacking.binary_search_by_key(r, |(l, _)| *l).ok();
        let is_unclear =
            |r: &Rank| process(r).is_some_and(|at| self.standing.is_unclear(stall.lacking[at].1));
        let tells = |r: &Rank| self.activity(comm, *r).is_some_and(|a| a != Activity::Waiting);
        let is_sure = |r: &Rank| !is_unclear(r) || tells(r);
        if !origin.circle.is_empty() || origin.ranks.iter().all(is_sure) {
            return None;
        }
        Some(origin.ranks.iter().copied().filter(is_sure).collect())
    }

    /// The ranks of an operation that is in progress which have aborted its communicator, as where the first of such
    /// operations begins to stand still.
    pub(super) fn aborted_in(
        &self,
        comm: &Communicator,
        stall: &Stall,
        instance: &Instance,
    ) -> Option<Origin> {
        let aborted = |i: &Instance| -> Vec<Rank> {
            i.parts.iter().filter(|(r, p)| !p.finished && self.aborted(comm, **r)).map(|(r, _)| *r).collect()
        };
        let ranks = aborted(instance);
        if stall.lack != WaitingFor::End || ranks.is_empty() {
            return None;
        }
        let first = self.standing.origins().iter().find(|o| {
            let other =
                self.standing.stall(o.first).filter(|s| s.comm == comm.id && s.lack == WaitingFor::End);
            let other = other.and_then(|s| comm.instance(s.track, s.order));
            other.is_some_and(|i| !aborted(i).is_empty())
        })?;
        Some(Origin { ranks, ..first.clone() })
    }

    /// Ranks that aborted a communicator wait for nobody: a circle through them begins there.
    pub(super) fn aborted_in_circle(&self, origin: &Origin) -> Option<Origin> {
        let of = |i: &usize| {
            let stall = self.standing.stall(*i)?;
            let comm = self.join.communicator(stall.comm)?;
            let ranks: Vec<Rank> =
                stall.lacking.iter().map(|(r, _)| *r).filter(|r| self.aborted(comm, *r)).collect();
            (!ranks.is_empty()).then_some((*i, ranks))
        };
        let (first, ranks) = origin.circle.iter().find_map(of)?;
        let others = origin.circle.iter().filter(|i| **i != first).chain(&origin.held_up);
        Some(Origin { first, ranks, circle: Vec::new(), held_up: others.copied().collect() })
    }

    pub(super) fn behind_mismatch(&self, comm: &Communicator, stall: &Stall) -> bool {
        let Some((track, order, _)) = comm.mismatch() else { return false };
        if track == stall.track {
            return order <= stall.order;
        }
        // Tracks have no order among each other, but each rank's calls have.
        let (Some(wrong), Some(instance)) =
            (comm.instance(track, order), comm.instance(stall.track, stall.order))
        else {
            return true;
        };
        let is_before = |(rank, part): (&Rank, &Part)| {
            part.op.issued_ns.zip(wrong.parts.get(rank)?.op.issued_ns).map(|(own, wrong)| own < wrong)
        };
        !instance.parts.iter().filter_map(is_before).any(|before| before)
    }

    /// Where all that started an operation are through with it: who waits behind it for those that have not, for longest.
    pub(super) fn held_up(&self, origin: &Origin, behind: Option<&(u64, Waited)>) -> Option<Waited> {
        let elsewhere = origin.held_up.iter().filter_map(|i| self.standing.stall(*i));
        let elsewhere = elsewhere.filter_map(|s| self.join.waited(s, self.now_ns));
        elsewhere.chain(behind.map(|(_, w)| w.clone())).min_by_key(|w| w.since_ns)
    }

    /// The waiting ranks: first in the operation itself, then behind it, then in operations that it holds up.
    pub(super) fn victims(
        &self,
        origin: &Origin,
        waited: Option<&Waited>,
        behind: Option<&(u64, Waited)>,
    ) -> Vec<Victims> {
        let of = |i: &usize| {
            let s = self.standing.stall(*i)?;
            let ranks: Vec<Rank> = s.waiting.iter().map(|(r, _)| *r).collect();
            Some((s, s.order, ranks))
        };
        let first = self.standing.stall(origin.first);
        let own = waited.and_then(|w| first.map(|s| (s, s.order, w.ranks.clone())));
        let held_up = |order: u64| {
            let mut all = origin.held_up.iter().filter_map(|i| self.standing.stall(*i)).chain(first);
            all.any(|s| Some((s.comm, s.track, s.order)) == first.map(|f| (f.comm, f.track, order)))
        };
        let behind = behind.filter(|(order, _)| !held_up(*order)).and_then(|(order, w)| {
            // The ranks that wait in it are named already.
            let own = |r: &Rank| waited.is_some_and(|w| w.ranks.contains(r));
            first.map(|s| (s, *order, w.ranks.iter().copied().filter(|r| !own(r)).collect::<Vec<_>>()))
        });
        let others = origin.circle.iter().filter(|i| **i != origin.first).chain(&origin.held_up);
        own.into_iter()
            .chain(behind)
            .chain(others.filter_map(of))
            .filter(|(.., ranks)| !ranks.is_empty())
            .map(|(s, order, ranks)| Victims { communicator: s.comm, ranks, order, track: s.track })
            .collect()
    }

    /// True when a wait was long enough. A black box that nobody watched does not say for how long: then the state
    /// itself has to do.
    pub(super) fn enough(&self, waited: &Waited, patience_ns: u64) -> bool {
        waited.for_ns.map_or_else(|| self.join.all_gone(), |w| w >= patience_ns)
    }

    /// How long ranks may wait for each other in a communicator before something is wrong: what is set, or longer
    /// where the job has its own slow rhythm.
    pub(super) fn patience(&self, comm: &Communicator) -> u64 {
        let learned = comm.longest_ns().saturating_mul(2).min(self.settings.patience_most_ns);
        self.settings.patience_ns.max(learned)
    }

    /// True in the first operation of a communicator, which waits for slow starts: compilation, data, connections. A job
    /// that makes a communicator in the middle of its work has those behind it, and so have ranks that were at work elsewhere.
    pub(super) fn is_slow_start(&self, at: StallSite<'_>) -> bool {
        let is_first = at.stall.order == 0 && !matches!(at.stall.track, Track::Pair(..));
        is_first && !self.join.was_made_at_work(at.comm) && !self.came_from_work(at)
    }

    /// True where the ranks that an operation lacks were at work until it began.
    pub(super) fn came_from_work(&self, at: StallSite<'_>) -> bool {
        let segment = |r: &Rank| Some(at.comm.members().get(r)?.record.segment);
        let was_at_work = |r: &Rank| {
            let began = at.instance.began_ns().zip(segment(r));
            began.is_some_and(|(began_ns, segment)| self.join.was_at_work(segment, began_ns))
        };
        let ranks = &at.origin.ranks;
        !ranks.is_empty() && ranks.iter().take(ASKED).all(was_at_work)
    }

    /// True where a rank has issued nothing at all in a communicator of a job that begins.
    pub(super) fn is_first_of(&self, at: StallSite<'_>, rank: Rank) -> bool {
        !at.comm.has_issued(rank) && !self.join.was_made_at_work(at.comm)
    }

    pub(super) fn process(&self, comm: &Communicator, rank: Rank) -> Option<&'a Process> {
        self.join.process(comm.members().get(&rank)?.record.segment)
    }

    /// The activity of a rank's GPU now; absent where it is not known.
    pub(super) fn activity(&self, comm: &Communicator, rank: Rank) -> Option<Activity> {
        let member = &comm.members().get(&rank)?.record;
        let host = &self.process(comm, rank)?.record.host;
        self.join.hardware().activity(host, member.gpu.as_ref()?, self.now_ns)
    }

    /// True when more than one process uses a GPU.
    pub(super) fn is_shared(&self, host: &str, gpu: &str) -> bool {
        let count = || {
            let mut users: GpuUsers<'a> = HashMap::new();
            for p in self.join.processes().filter(|p| !p.record.liveness.is_gone()) {
                let first = self.join.memberships(p.record.id).first();
                let member = first.and_then(|(id, rank)| self.join.communicator(*id)?.members().get(rank));
                if let Some(gpu) = member.and_then(|m| m.record.gpu.as_deref()) {
                    *users.entry((p.record.host.as_str(), gpu)).or_default() += 1;
                }
            }
            users
        };
        self.gpu_users.get_or_init(count).get(&(host, gpu)).is_some_and(|n| *n > 1)
    }

    /// True where a file describes a rank's process, and nobody has seen it.
    pub(super) fn is_of_file(&self, comm: &Communicator, rank: Rank) -> bool {
        self.process(comm, rank).is_some_and(|p| p.record.liveness == Liveness::Unknown)
    }

    /// True when a rank's process is gone.
    pub(super) fn gone(&self, comm: &Communicator, rank: Rank) -> bool {
        self.process(comm, rank).is_some_and(|p| {
            p.record.liveness.is_gone() || p.host.as_ref().is_some_and(crate::model::HostFact::is_over)
        })
    }

    /// How long a rank's process has been gone, in ns; absent where nobody saw it go.
    pub(super) fn gone_for(&self, comm: &Communicator, rank: Rank) -> Option<u64> {
        let p = self.process(comm, rank)?;
        let at = match p.record.liveness {
            Liveness::Gone(at) => at,
            Liveness::Alive => p.host.as_ref().filter(|h| h.is_over()).map(|h| h.at_ns),
            Liveness::Unknown => None,
        };
        Some(self.now_ns.saturating_sub(at?))
    }

    /// True while a rank's process goes on to issue operations. Hosts run ahead of their GPUs by seconds: where nothing
    /// says that a GPU waits, a process that is at work is behind, and not missing. It is no excuse for good.
    pub(super) fn at_work(&self, at: StallSite<'_>, rank: Rank, patience_ns: u64) -> bool {
        let last = self.process(at.comm, rank).and_then(|p| p.issuing.last_ns());
        let is_at_work = last.is_some_and(|t| self.now_ns.saturating_sub(t) < patience_ns);
        at.waited.is_by_hosts() && is_at_work && !self.enough(at.waited, self.settings.patience_most_ns)
    }

    /// True where the hosts of all ranks of an operation issue more, and are farther ahead of it than any was of its GPU so
    /// far: it has ended, and the news of that is lost.
    pub(super) fn went_on(&self, at: StallSite<'_>) -> bool {
        let is_ahead = |(rank, p): (&Rank, &Part)| {
            let issuing = self.process(at.comm, *rank).map(|p| p.issuing);
            let (last_ns, lead_ns) = issuing.map_or((None, 0), |i| (i.last_ns(), i.lead_ns()));
            last_ns.zip(p.op.issued_ns).is_some_and(|(last, issued)| {
                let is_at_work = self.now_ns.saturating_sub(last) < self.settings.patience_ns;
                lead_ns > 0 && is_at_work && last.saturating_sub(issued) > lead_ns.saturating_mul(LEADS)
            })
        };
        at.stall.lack != WaitingFor::Issue
            && at.origin.circle.is_empty()
            && at.instance.parts.iter().all(is_ahead)
    }

    /// True when a rank came out of a long wait a moment ago, or issues operations again after a silence of half the time that
    /// the others have waited: what they wait for it may yet do.
    pub(super) fn just_released(&self, at: StallSite<'_>, rank: Rank) -> bool {
        let Some(p) = self.process(at.comm, rank) else { return false };
        let waited_ns = self.now_ns.saturating_sub(at.waited.since_ns);
        let is_long = |(from, to): &(u64, u64)| to.saturating_sub(*from).saturating_mul(2) >= waited_ns;
        let resumed = p.issuing.silence().filter(is_long).map(|(_, to)| to);
        let is_recent = |t: u64| self.now_ns.saturating_sub(t) < self.patience(at.comm);
        p.busy.released_long_ns().into_iter().chain(resumed).any(is_recent)
    }

    pub(super) fn aborted(&self, comm: &Communicator, rank: Rank) -> bool {
        comm.members().get(&rank).is_some_and(|m| m.record.making == Some(Making::Aborted))
    }

    /// The first line of evidence: who waits, and for how long.
    pub(super) fn wait_evidence(&self, waited: &Waited) -> Vec<Evidence> {
        let who = names(&waited.ranks);
        // Nobody saw these processes: files describe them, and may have been written later than they say.
        let is_of_files = self.join.processes().all(|p| p.record.liveness == Liveness::Unknown);
        let mut evidence = vec![match waited.for_ns {
            Some(w) if is_of_files => {
                let have = verb(&waited.ranks, "has", "have");
                let text = format!("{who} issued it and {have} waited at most {:.1} s", seconds(w));
                number(text, seconds(w), "s")
            }
            Some(w) => {
                let have = verb(&waited.ranks, "has", "have");
                number(format!("{who} issued it and {have} waited {:.1} s", seconds(w)), seconds(w), "s")
            }
            None => fact(format!(
                "{who} issued it and did not finish; for how long is not known, as all processes were gone before ringwatch looked",
            )),
        }];
        if is_of_files {
            return evidence;
        }
        if waited.silent {
            evidence.push(fact(
                "measured from the hosts' issue times: the overhead budget left this operation out of GPU times (RINGWATCH_OVERHEAD_BUDGET)",
            ));
        } else if !waited.on_gpu {
            evidence.push(fact(
                "measured from the hosts' issue times: no believable stamp says that a GPU started it",
            ));
        }
        evidence
    }
}
