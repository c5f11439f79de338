//! The stages of a search: all candidates, the best of each size, and the proof.

use super::confirm::{ProofPlan, Question, RatioSample, confirm, test_rounds};
use super::{
    Arm, GAIN_RATIO, HARM_RATIO, Machine, RuleVerdict, SearchGoal, SearchProgress, SearchResult, SearchStage,
    Space, Times, TunedSize, TunerChoice,
};
use std::time::Duration;

/// Arms that are alive at once, beside the default.
const BATCH: usize = 6;
/// Rounds and repeats of the first two stages.
const COARSE: Effort = Effort { rounds: 2, repeats: 3, share: 0.5 };
const FINE: Effort = Effort { rounds: 3, repeats: 4, share: 0.7 };
/// Candidates of a size that come into the second stage, and how far behind the best one they may be.
const SURVIVORS: usize = 4;
const SURVIVOR_RATIO: f64 = 1.03;
/// After the first round a candidate that takes longer than the best one by this factor is given up.
const FAR_BEHIND: f64 = 1.2;
/// A choice is tested where its ratio to the default is below this.
const PROMISING_RATIO: f64 = GAIN_RATIO * 1.003;
/// An environment variable is asked for where it makes this difference over all sizes.
const ENVIRONMENT_RATIO: f64 = 0.99;

/// How much a stage measures.
#[derive(Debug, Clone, Copy)]
struct Effort {
    rounds: usize,
    repeats: u32,
    /// The share of the time limit after which the stage ends.
    share: f64,
}

/// The expected times of measuring.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Expected {
    /// Time until the processes of a batch are ready.
    pub start: Duration,
    /// Time of one repeat of all sizes by one arm.
    pub repeat: Duration,
}

impl Expected {
    fn batch(&self, arms: usize, repeats: u32) -> Duration {
        self.start + self.repeat * repeats * u32::try_from(arms).unwrap_or(u32::MAX)
    }
}

/// The time that a search is expected to take without a limit.
pub fn expected(space: &Space, goal: &SearchGoal, times: &Expected) -> Duration {
    let tables = space.candidates.iter().map(Vec::len).max().unwrap_or(0) * space.environments.len();
    let stage = |tables: usize, effort: Effort| {
        let batches = u32::try_from(tables.div_ceil(BATCH) * effort.rounds).unwrap_or(u32::MAX);
        times.batch(BATCH + 1, effort.repeats) * batches
    };
    let rounds = u32::try_from(test_rounds(goal, space.sizes.len())[0]).unwrap_or(u32::MAX);
    stage(tables, COARSE) + stage(fine_tables(space), FINE) + times.batch(4, 5) * rounds
}

/// Tables of the second stage, about.
fn fine_tables(space: &Space) -> usize {
    (SURVIVORS + 2) * space.environments.len()
}

/// How fast a search gets on.
#[derive(Debug, Default)]
pub(super) struct BatchTiming {
    /// Time of all batches so far, and their arms.
    spent: Duration,
    arms: u32,
}

impl BatchTiming {
    /// True where another batch of so many arms fits before the deadline.
    pub(super) fn has_time<M: Machine>(&self, machine: &M, arms: usize, deadline: Duration) -> bool {
        machine.elapsed() + self.of(arms) <= deadline
    }

    fn of(&self, arms: usize) -> Duration {
        self.spent.mul_f64(arms as f64 / f64::from(self.arms.max(1)))
    }

    /// Measures a batch and its time.
    pub(super) fn timed<M: Machine, T>(
        &mut self,
        machine: &mut M,
        arms: usize,
        batch: impl FnOnce(&mut M) -> Result<T, M::Error>,
    ) -> Result<T, M::Error> {
        let before = machine.elapsed();
        let result = batch(machine)?;
        self.spent += machine.elapsed().saturating_sub(before);
        self.arms = self.arms.saturating_add(u32::try_from(arms).unwrap_or(u32::MAX));
        Ok(result)
    }

    /// The progress of a stage (with the batches that are done and all of them), `later` arms being left for later stages.
    pub(super) fn progress(
        &self,
        (stage, done, all): (SearchStage, usize, usize),
        elapsed: Duration,
        arms: usize,
        later: usize,
        deadline: Duration,
    ) -> SearchProgress {
        let remaining = self.of(arms * all.saturating_sub(done) + later);
        let remaining = remaining.min(deadline.saturating_sub(elapsed));
        SearchProgress { stage, done, all, elapsed, remaining }
    }
}

/// One choice of one size under one environment.
#[derive(Debug, Clone, Default)]
struct Candidate {
    choice: TunerChoice,
    sample: RatioSample,
}

/// The candidates of each size under one environment.
#[derive(Debug, Clone)]
struct CandidateSet {
    environment: Option<u32>,
    sizes: Vec<Vec<Candidate>>,
}

impl CandidateSet {
    fn new(environment: Option<u32>, choices: Vec<Vec<TunerChoice>>) -> Self {
        let candidate = |choice| Candidate { choice, sample: RatioSample::default() };
        let sizes = choices.into_iter().map(|all| all.into_iter().map(candidate).collect()).collect();
        CandidateSet { environment, sizes }
    }

    /// The choice of each size that comes at this place; none where a size has fewer.
    fn choices(&self, place: usize) -> Vec<TunerChoice> {
        self.sizes.iter().map(|c| c.get(place).map_or(TunerChoice::NONE, |c| c.choice)).collect()
    }

    /// Gives up what is far behind the best candidate of its size. The first candidate stays.
    fn drop_slow(&mut self) {
        for candidates in &mut self.sizes {
            let best = ranked(candidates).first().map_or(1.0, |(_, ratio)| *ratio);
            candidates.retain(|c| c.choice == TunerChoice::NONE || c.sample.ratio() <= best * FAR_BEHIND);
        }
    }

    fn places(&self) -> usize {
        self.sizes.iter().map(Vec::len).max().unwrap_or(0)
    }
}

/// Searches the rules of one operation.
///
/// # Errors
/// The machine's.
pub fn search<M: Machine>(
    machine: &mut M,
    space: &Space,
    goal: &SearchGoal,
    on: &mut dyn FnMut(&SearchProgress),
) -> Result<SearchResult, M::Error> {
    let mut run = RunningSearch { space, goal, timing: BatchTiming::default(), notes: Vec::new(), on };
    let start = machine.elapsed();
    let until = |effort: Effort| start + goal.deadline.saturating_sub(start).mul_f64(effort.share);
    let mut sets: Vec<CandidateSet> =
        space.environments.iter().map(|e| CandidateSet::new(*e, space.candidates.clone())).collect();
    run.measure(machine, &mut sets, SearchStage::Coarse, COARSE, until(COARSE))?;
    let mut sets: Vec<CandidateSet> =
        sets.iter().map(|f| CandidateSet::new(f.environment, survivors(f))).collect();
    run.measure(machine, &mut sets, SearchStage::Fine, FINE, until(FINE))?;
    let (environment, picked) = chosen(&sets);
    let choices: Vec<TunerChoice> = picked.iter().map(|(choice, _)| *choice).collect();
    let question = |(choice, ratio): &Picked| match *choice {
        TunerChoice::NONE if environment.is_some() && *ratio < PROMISING_RATIO => Question::Environment,
        TunerChoice::NONE => Question::None,
        _ => Question::Rule,
    };
    let tuned = space.arm(environment, &choices);
    let plan = ProofPlan { tuned, questions: picked.iter().map(question).collect() };
    let (evidence, is_complete, failures) = confirm(machine, &plan, goal, &mut run.timing, run.on)?;
    run.notes.extend(failures);
    if !is_complete {
        run.notes.push("the time limit ended the last stage early; a longer one may prove more".to_owned());
    }
    let sizes = space.sizes.iter().zip(choices).zip(evidence);
    let sizes = sizes.map(|((bytes, choice), evidence)| {
        let verdict = match choice {
            TunerChoice::NONE if evidence.is_proven => RuleVerdict::Environment,
            TunerChoice::NONE => RuleVerdict::NoCandidate,
            _ if evidence.is_proven => RuleVerdict::Gain,
            _ if evidence.is_guarded => RuleVerdict::Guard,
            _ => RuleVerdict::NotProven,
        };
        TunedSize { bytes: *bytes, choice, verdict, evidence }
    });
    let mut notes = run.notes;
    notes.sort();
    notes.dedup();
    Ok(SearchResult { min_channels: environment, sizes: sizes.collect(), notes })
}

/// A search that is under way.
struct RunningSearch<'a> {
    space: &'a Space,
    goal: &'a SearchGoal,
    timing: BatchTiming,
    notes: Vec<String>,
    on: &'a mut dyn FnMut(&SearchProgress),
}

impl RunningSearch<'_> {
    /// Measures all candidates of all sets in batches, round by round. In the first stage those that are far behind get one
    /// round.
    fn measure<M: Machine>(
        &mut self,
        machine: &mut M,
        sets: &mut [CandidateSet],
        stage: SearchStage,
        effort: Effort,
        until: Duration,
    ) -> Result<(), M::Error> {
        let mut done = 0;
        for round in 1..=effort.rounds {
            let tables = tables(sets);
            let batches = tables.len().div_ceil(BATCH);
            let all = done + batches * (effort.rounds - round + 1);
            for batch in tables.chunks(BATCH) {
                let arms = self.arms(sets, batch);
                let reserve = self.timing.of(self.later(stage));
                let until = until.min(self.goal.deadline.saturating_sub(reserve));
                if done > 0 && !self.timing.has_time(machine, arms.len(), until) {
                    let text =
                        format!("the time limit ended the {stage} stage after {done} of {all} batches");
                    self.notes.push(text);
                    return Ok(());
                }
                let repeats = effort.repeats;
                let results = self.timing.timed(machine, arms.len(), |m| m.round(&arms, repeats, false))?;
                self.add(sets, batch, &results);
                done += 1;
                let (step, later) = ((stage, done, all), self.later(stage));
                let progress =
                    self.timing.progress(step, machine.elapsed(), arms.len(), later, self.goal.deadline);
                (self.on)(&progress);
            }
            if stage == SearchStage::Coarse {
                sets.iter_mut().for_each(CandidateSet::drop_slow);
            }
        }
        Ok(())
    }

    /// The arms that later stages are expected to measure.
    fn later(&self, stage: SearchStage) -> usize {
        let proof = 4 * test_rounds(self.goal, self.space.sizes.len())[0];
        match stage {
            SearchStage::Coarse => fine_tables(self.space) * FINE.rounds + proof,
            _ => proof,
        }
    }

    fn arms(&self, sets: &[CandidateSet], batch: &[(usize, usize)]) -> Vec<Arm> {
        let of = |(set, place): &(usize, usize)| {
            sets.get(*set).map(|f| self.space.arm(f.environment, &f.choices(*place)))
        };
        std::iter::once(Arm::default_of_nccl()).chain(batch.iter().filter_map(of)).collect()
    }

    fn add(
        &mut self,
        sets: &mut [CandidateSet],
        batch: &[(usize, usize)],
        results: &[Result<Times, String>],
    ) {
        self.notes.extend(results.iter().filter_map(|r| r.as_ref().err()).cloned());
        let Some(Ok(default)) = results.first() else { return };
        for ((set, place), times) in batch.iter().zip(results.iter().skip(1)) {
            let (Some(set), Ok(times)) = (sets.get_mut(*set), times) else { continue };
            for ((candidates, own), default) in set.sizes.iter_mut().zip(times).zip(default) {
                if let Some(candidate) = candidates.get_mut(*place) {
                    candidate.sample.add(own, default);
                }
            }
        }
    }
}

/// Every place of every set, the most promising candidates of all environments first: the time may end.
fn tables(sets: &[CandidateSet]) -> Vec<(usize, usize)> {
    let most = sets.iter().map(CandidateSet::places).max().unwrap_or(0);
    let places = (0..most).flat_map(|place| (0..sets.len()).map(move |set| (set, place)));
    places.filter(|(set, place)| sets.get(*set).is_some_and(|f| *place < f.places())).collect()
}

/// The candidates that were measured, best first.
fn ranked(candidates: &[Candidate]) -> Vec<(TunerChoice, f64)> {
    let measured = candidates.iter().filter(|c| !c.sample.ratios.is_empty());
    let mut all: Vec<(TunerChoice, f64)> = measured.map(|c| (c.choice, c.sample.ratio())).collect();
    all.sort_by(|a, b| a.1.total_cmp(&b.1));
    all
}

/// The choices of each size for the second stage. The first decides nothing.
fn survivors(set: &CandidateSet) -> Vec<Vec<TunerChoice>> {
    let of_size = |candidates: &Vec<Candidate>| {
        let all = ranked(candidates);
        let best = all.first().map_or(1.0, |(_, ratio)| *ratio);
        let near = all.iter().filter(|(c, ratio)| *c != TunerChoice::NONE && *ratio <= best * SURVIVOR_RATIO);
        let mut choices: Vec<TunerChoice> =
            std::iter::once(TunerChoice::NONE).chain(near.map(|(c, _)| *c).take(SURVIVORS)).collect();
        if let Some((first, _)) = all.iter().find(|(c, _)| *c != TunerChoice::NONE) {
            choices.extend(between(*first, candidates));
        }
        choices
    };
    set.sizes.iter().map(of_size).collect()
}

/// The same entry with numbers of channels half-way to the next ones that were measured.
fn between(choice: TunerChoice, candidates: &[Candidate]) -> Vec<TunerChoice> {
    let Some(channels) = choice.channels else { return Vec::new() };
    let others = candidates.iter().filter(|c| c.choice.entry == choice.entry);
    let others: Vec<u8> = others.filter_map(|c| c.choice.channels).collect();
    let below = others.iter().copied().filter(|n| *n < channels).max();
    let above = others.iter().copied().filter(|n| *n > channels).min();
    let middle = |other: u8| other.midpoint(channels);
    let new = [below, above].into_iter().flatten().map(middle).filter(|n| !others.contains(n));
    new.map(|n| TunerChoice { channels: Some(n), ..choice }).collect()
}

/// The choice for a size, and the ratio to the default that is expected of it.
type Picked = (TunerChoice, f64);

/// The environment and the choice of each size that are worth a proof.
fn chosen(sets: &[CandidateSet]) -> (Option<u32>, Vec<Picked>) {
    let mut best: Option<(f64, Option<u32>, Vec<Picked>)> = None;
    for set in sets {
        let picked: Vec<Picked> = set.sizes.iter().map(|c| pick(c, set.environment.is_some())).collect();
        let sum: f64 = picked.iter().map(|(_, ratio)| ratio.ln()).sum();
        let score = (sum / picked.len().max(1) as f64).exp();
        // The first set sets nothing. A job that has to set a variable gets something for it.
        if best.as_ref().is_none_or(|(least, ..)| score < least * ENVIRONMENT_RATIO) {
            best = Some((score, set.environment, picked));
        }
    }
    best.map_or((None, Vec::new()), |(_, environment, picked)| (environment, picked))
}

/// The choice for one size, and the ratio that is expected of it. Where an environment gains by itself, a rule is worth what
/// it gains beyond that.
fn pick(candidates: &[Candidate], has_environment: bool) -> Picked {
    let all = ranked(candidates);
    let idle = all.iter().find(|(c, _)| *c == TunerChoice::NONE).map_or(1.0, |(_, ratio)| *ratio);
    let Some((choice, ratio)) = all.iter().find(|(c, _)| *c != TunerChoice::NONE) else {
        return (TunerChoice::NONE, idle);
    };
    let without_rule = if has_environment { idle.min(1.0) } else { 1.0 };
    let is_gain = *ratio < PROMISING_RATIO * without_rule;
    let is_guard = idle > HARM_RATIO && *ratio < idle * GAIN_RATIO && *ratio < HARM_RATIO;
    if is_gain || is_guard { (*choice, *ratio) } else { (TunerChoice::NONE, idle) }
}
