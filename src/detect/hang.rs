//! Hangs: from the places where standing still begins to findings, one a cause.
//!
//! The wait-for graph says where it begins; what lies there says which kind of hang it is. Each kind has a file of
//! its own; what they share is the scene.

use super::hang_context::{HangContext, StallSite};
use super::{
    Rule, Settings, choice, endings, held_by_gpu, interleaved, missing_rank, not_started, out_of_order,
    standstill, stuck_transfer, transfers,
};
use crate::join::{Join, Origin, WaitingFor};
use crate::model::{Confidence, Finding, Kind, Track};
use std::cell::OnceCell;
use std::collections::BTreeSet;

/// The rule.
#[derive(Debug)]
pub struct HangRule {
    settings: Settings,
}

impl HangRule {
    /// With these times.
    pub fn new(settings: Settings) -> Self {
        HangRule { settings }
    }
}

impl Rule for HangRule {
    fn check(&self, join: &Join, now_ns: u64) -> Vec<Finding> {
        let standing = join.standing(now_ns);
        let gpu_users = OnceCell::new();
        let scene =
            HangContext { join, standing: &standing, settings: self.settings, now_ns, gpu_users: &gpu_users };
        let (mut found, mut behind_untimed, mut unclear) = (Vec::new(), Vec::new(), Vec::new());
        for origin in standing.origins() {
            match scene.judge(origin) {
                Outcome::Pending => {}
                Outcome::BehindUntimed(missing) => behind_untimed.push(*missing),
                Outcome::Unclear(finding) => unclear.push(*finding),
                Outcome::Found(finding) => found.push(*finding),
            }
        }
        // An untimed operation may stand still where nothing else is known to, or where others wait for its ranks.
        if !behind_untimed.is_empty() || found.is_empty() {
            let untimed = standing.untimed().iter().map(|o| scene.judge(o));
            // Several places may be told as one that covers them all.
            let mut named = BTreeSet::new();
            let untimed = untimed.filter_map(Outcome::found).filter(|f| named.insert(f.named()));
            let untimed: Vec<Finding> = untimed.collect();
            // Nothing shows which untimed operation it is.
            let is_old = |f: &Finding| now_ns.saturating_sub(f.since_ns) >= self.settings.patience_blind_ns;
            if untimed.is_empty() {
                found.extend(behind_untimed.into_iter().filter(is_old).map(standstill::behind));
            }
            found.extend(untimed);
        }
        // Where nothing else is known, the only operation that ranks do not start is.
        if found.is_empty() && standing.origins().iter().filter(|o| scene.is_unclear(o)).count() == 1 {
            found.extend(unclear);
        }
        if found.is_empty() {
            let alone = standing.origins().iter().filter_map(|o| scene.out_of_order(o));
            found.extend(alone.min_by_key(|f| f.since_ns));
        }
        super::victims::leave_out(join, self.settings, found)
    }
}

/// The outcome of judging one place where standing still begins.
#[derive(Debug)]
enum Outcome {
    /// Nothing is to be reported yet.
    Pending,
    /// The ranks that it waits for, which this finding calls missing, are in an operation that is not timed.
    BehindUntimed(Box<Finding>),
    /// Ranks do not start an operation, and several untimed ones explain that: one of these ranks is where the job stands still, or
    /// waits there.
    Unclear(Box<Finding>),
    Found(Box<Finding>),
}

impl Outcome {
    fn found(self) -> Option<Finding> {
        match self {
            Outcome::Found(finding) => Some(*finding),
            Outcome::Pending | Outcome::BehindUntimed(_) | Outcome::Unclear(_) => None,
        }
    }
}

impl HangContext<'_> {
    fn judge(&self, origin: &Origin) -> Outcome {
        self.judge_place(origin).unwrap_or(Outcome::Pending)
    }

    fn judge_place(&self, origin: &Origin) -> Option<Outcome> {
        let stall = self.standing.stall(origin.first)?;
        let comm = self.join.communicator(stall.comm)?;
        let instance = comm.instance(stall.track, stall.order)?;
        if let Some(other) = standstill::instead_of_cause(self, origin, stall, instance) {
            return self.judge_place(&other);
        }
        if let Some(other) = interleaved::instead_of_circle(self, origin) {
            return self.judge_place(&other);
        }
        // Behind a mismatch every rank is lost; the mismatch itself is the finding.
        if self.behind_mismatch(comm, stall) {
            return None;
        }
        // Ranks that run one operation in different ways do not finish it; that is the finding.
        if !matches!(stall.track, Track::Pair(..)) && !choice::alike(instance) {
            return None;
        }
        // Of a rooted operation the other ranks may be through, and wait for the missing one in what comes next.
        let is_rooted = instance.first().is_some_and(|p| p.op.func.is_rooted());
        let may_wait_behind = stall.lack == WaitingFor::Start || stall.lack == WaitingFor::Issue && is_rooted;
        let behind = may_wait_behind.then(|| self.join.waited_behind(stall, self.now_ns)).flatten();
        let in_it = if standstill::is_untimed(stall, instance) && !origin.held_up.is_empty() {
            Some(standstill::waited_behind(self, origin, stall)?)
        } else {
            self.join.waited(stall, self.now_ns)
        };
        let waited = &match &in_it {
            Some(waited) => waited.clone(),
            None => self.held_up(origin, behind.as_ref())?,
        };
        if let Some(aborted) = self.aborted_in_circle(origin) {
            return self.judge_place(&aborted);
        }
        let aborted = self.aborted_in(comm, stall, instance);
        if aborted.as_ref().is_some_and(|a| a.first != origin.first) {
            return None;
        }
        let origin = aborted.as_ref().unwrap_or(origin);
        let told = self.told_by_gpus(origin, stall, comm);
        let unclear = told.as_ref().is_some_and(Vec::is_empty);
        if unclear
            && (stall.lack != WaitingFor::Start || !self.enough(waited, self.settings.patience_blind_ns))
        {
            return None;
        }
        let told = told.filter(|_| !unclear).map(|ranks| Origin { ranks, ..origin.clone() });
        let origin = told.as_ref().unwrap_or(origin);
        let place = StallSite { origin, stall, comm, instance, waited };
        if self.went_on(place) {
            return None;
        }
        let proof = endings::proof(self, place);
        if proof == endings::Proof::Nothing {
            return None;
        }
        let mut finding = match (stall.lack, stall.track) {
            _ if !origin.circle.is_empty() => interleaved::judge(self, place),
            _ if aborted.is_some() => missing_rank::judge(self, place),
            (WaitingFor::Issue, Track::Pair(..)) => transfers::judge(self, place),
            (WaitingFor::Issue, _) => missing_rank::judge(self, place),
            (WaitingFor::Start, _) => not_started::judge(self, place),
            (WaitingFor::End, _) if standstill::is_untimed(stall, instance) => {
                standstill::judge_cause(self, place)
            }
            (WaitingFor::End, _) => stuck_transfer::judge(self, place),
        }?;
        endings::explain_by_abort(self, place, &mut finding);
        let mut behind_untimed = false;
        match held_by_gpu::judge(self, place, &finding) {
            held_by_gpu::Hold::None => {}
            held_by_gpu::Hold::Untimed => behind_untimed = true,
            held_by_gpu::Hold::Unclear => return None,
            held_by_gpu::Hold::Explained(held) => finding = *held,
        }
        if let Some(out_of_order) = out_of_order::judge(self, place) {
            (finding, behind_untimed) = (out_of_order, false);
        }
        if proof == endings::Proof::Likely {
            finding.confidence = Confidence::Likely;
        }
        finding.since_ns = waited.since_ns;
        finding.since = super::wall(self.join, waited.since_ns);
        if finding.kind != Kind::ShiftedOrder {
            finding.victims = self.victims(origin, in_it.as_ref(), behind.as_ref());
        }
        let comm = self.join.communicator(finding.communicator)?;
        super::add_host_facts(&mut finding, self.join, comm, waited.since_ns, self.now_ns);
        let finding = Box::new(finding);
        Some(match () {
            () if behind_untimed => Outcome::BehindUntimed(finding),
            () if unclear => Outcome::Unclear(finding),
            () => Outcome::Found(finding),
        })
    }

    /// Where nothing else explains a standstill: a process of it that left the order of its calls.
    fn out_of_order(&self, origin: &Origin) -> Option<Finding> {
        let stall = self.standing.stall(origin.first)?;
        let comm = self.join.communicator(stall.comm)?;
        let instance = comm.instance(stall.track, stall.order)?;
        let waited = &self.join.waited(stall, self.now_ns)?;
        let place = StallSite { origin, stall, comm, instance, waited };
        let is_over = self.behind_mismatch(comm, stall) || self.went_on(place);
        if is_over || self.is_slow_start(place) || !self.enough(waited, self.settings.patience_blind_ns) {
            return None;
        }
        let mut finding = out_of_order::judge(self, place)?;
        finding.since_ns = waited.since_ns;
        finding.since = super::wall(self.join, waited.since_ns);
        finding.victims = self.victims(origin, Some(waited), None);
        Some(finding)
    }

    /// True where several untimed operations explain why ranks do not start one, and nothing tells more of any of these ranks.
    fn is_unclear(&self, origin: &Origin) -> bool {
        let stall = self.standing.stall(origin.first).filter(|s| s.lack == WaitingFor::Start);
        let place = stall.and_then(|s| Some((s, self.join.communicator(s.comm)?)));
        let told = place.and_then(|(stall, comm)| self.told_by_gpus(origin, stall, comm));
        told.is_some_and(|ranks| ranks.is_empty())
    }
}
