//! The stages of a search: all candidates, the best of each size, and the proof.

use super::confirm::{Contest, Sample, confirm, looks};
use super::{
    Arm, Choice, GAIN_RATIO, Goal, HARM_RATIO, Machine, Outcome, Progress, SizeOutcome, Space, Stage, Times,
    Verdict,
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
pub fn expected(space: &Space, goal: &Goal, times: &Expected) -> Duration {
    let tables = space.candidates.iter().map(Vec::len).max().unwrap_or(0) * space.environments.len();
    let stage = |tables: usize, effort: Effort| {
        let batches = u32::try_from(tables.div_ceil(BATCH) * effort.rounds).unwrap_or(u32::MAX);
        times.batch(BATCH + 1, effort.repeats) * batches
    };
    let rounds = u32::try_from(looks(goal, space.sizes.len(), space.sizes.len())[0]).unwrap_or(u32::MAX);
    stage(tables, COARSE) + stage(fine_tables(space), FINE) + times.batch(4, 5) * rounds
}

/// Tables of the second stage, about.
fn fine_tables(space: &Space) -> usize {
    (SURVIVORS + 2) * space.environments.len()
}

/// How fast a search gets on.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// Time of all batches so far, and their arms.
    spent: Duration,
    arms: u32,
}

impl Pace {
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
        (stage, done, all): (Stage, usize, usize),
        elapsed: Duration,
        arms: usize,
        later: usize,
        deadline: Duration,
    ) -> Progress {
        let remaining = self.of(arms * all.saturating_sub(done) + later);
        let remaining = remaining.min(deadline.saturating_sub(elapsed));
        Progress { stage, done, all, elapsed, remaining }
    }
}

/// One choice of one size under one environment.
#[derive(Debug, Clone, Default)]
struct Candidate {
    choice: Choice,
    sample: Sample,
}

/// The candidates of each size under one environment.
#[derive(Debug, Clone)]
struct Field {
    environment: Option<u32>,
    sizes: Vec<Vec<Candidate>>,
}

impl Field {
    fn new(environment: Option<u32>, choices: Vec<Vec<Choice>>) -> Self {
        let candidate = |choice| Candidate { choice, sample: Sample::default() };
        let sizes = choices.into_iter().map(|all| all.into_iter().map(candidate).collect()).collect();
        Field { environment, sizes }
    }

    /// The choice of each size that comes at this place; none where a size has fewer.
    fn choices(&self, place: usize) -> Vec<Choice> {
        self.sizes.iter().map(|c| c.get(place).map_or(Choice::NONE, |c| c.choice)).collect()
    }

    /// Gives up what is far behind the best candidate of its size. The first candidate stays.
    fn drop_slow(&mut self) {
        for candidates in &mut self.sizes {
            let best = ranked(candidates).first().map_or(1.0, |(_, ratio)| *ratio);
            candidates.retain(|c| c.choice == Choice::NONE || c.sample.ratio() <= best * FAR_BEHIND);
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
    goal: &Goal,
    on: &mut dyn FnMut(&Progress),
) -> Result<Outcome, M::Error> {
    let mut run = Run { space, goal, pace: Pace::default(), notes: Vec::new(), on };
    let start = machine.elapsed();
    let until = |effort: Effort| start + goal.deadline.saturating_sub(start).mul_f64(effort.share);
    let mut fields: Vec<Field> =
        space.environments.iter().map(|e| Field::new(*e, space.candidates.clone())).collect();
    run.measure(machine, &mut fields, Stage::Coarse, COARSE, until(COARSE))?;
    let mut fields: Vec<Field> = fields.iter().map(|f| Field::new(f.environment, survivors(f))).collect();
    run.measure(machine, &mut fields, Stage::Fine, FINE, until(FINE))?;
    let (environment, choices) = chosen(&fields);
    let tuned = space.arm(environment, &choices);
    let is_asked: Vec<bool> = choices.iter().map(|c| *c != Choice::NONE).collect();
    let contest = Contest { tuned, is_asked };
    let (evidence, is_complete, failures) = confirm(machine, &contest, goal, &mut run.pace, run.on)?;
    run.notes.extend(failures);
    if !is_complete {
        run.notes.push("the time limit ended the last stage early; a longer one may prove more".to_owned());
    }
    let sizes = space.sizes.iter().zip(choices).zip(evidence);
    let sizes = sizes.map(|((bytes, choice), evidence)| {
        let verdict = match choice {
            Choice::NONE => Verdict::NoCandidate,
            _ if evidence.is_proven => Verdict::Gain,
            _ if evidence.is_guarded => Verdict::Guard,
            _ => Verdict::NotProven,
        };
        SizeOutcome { bytes: *bytes, choice, verdict, evidence }
    });
    let mut notes = run.notes;
    notes.sort();
    notes.dedup();
    Ok(Outcome { min_channels: environment, sizes: sizes.collect(), notes })
}

/// A search that is under way.
struct Run<'a> {
    space: &'a Space,
    goal: &'a Goal,
    pace: Pace,
    notes: Vec<String>,
    on: &'a mut dyn FnMut(&Progress),
}

impl Run<'_> {
    /// Measures all candidates of all fields in batches, round by round. In the first stage those that are far behind get one
    /// round.
    fn measure<M: Machine>(
        &mut self,
        machine: &mut M,
        fields: &mut [Field],
        stage: Stage,
        effort: Effort,
        until: Duration,
    ) -> Result<(), M::Error> {
        let mut done = 0;
        for round in 1..=effort.rounds {
            let tables = tables(fields);
            let batches = tables.len().div_ceil(BATCH);
            let all = done + batches * (effort.rounds - round + 1);
            for batch in tables.chunks(BATCH) {
                let arms = self.arms(fields, batch);
                if done > 0 && !self.pace.has_time(machine, arms.len(), until) {
                    let text =
                        format!("the time limit ended the {stage} stage after {done} of {all} batches");
                    self.notes.push(text);
                    return Ok(());
                }
                let repeats = effort.repeats;
                let results = self.pace.timed(machine, arms.len(), |m| m.round(&arms, repeats, false))?;
                self.add(fields, batch, &results);
                done += 1;
                let (step, later) = ((stage, done, all), self.later(stage));
                let progress =
                    self.pace.progress(step, machine.elapsed(), arms.len(), later, self.goal.deadline);
                (self.on)(&progress);
            }
            if stage == Stage::Coarse {
                fields.iter_mut().for_each(Field::drop_slow);
            }
        }
        Ok(())
    }

    /// The arms that later stages are expected to measure.
    fn later(&self, stage: Stage) -> usize {
        let proof = 4 * looks(self.goal, self.space.sizes.len(), self.space.sizes.len())[0];
        match stage {
            Stage::Coarse => fine_tables(self.space) * FINE.rounds + proof,
            _ => proof,
        }
    }

    fn arms(&self, fields: &[Field], batch: &[(usize, usize)]) -> Vec<Arm> {
        let of = |(field, place): &(usize, usize)| {
            fields.get(*field).map(|f| self.space.arm(f.environment, &f.choices(*place)))
        };
        std::iter::once(Arm::default_of_nccl()).chain(batch.iter().filter_map(of)).collect()
    }

    fn add(&mut self, fields: &mut [Field], batch: &[(usize, usize)], results: &[Result<Times, String>]) {
        self.notes.extend(results.iter().filter_map(|r| r.as_ref().err()).cloned());
        let Some(Ok(default)) = results.first() else { return };
        for ((field, place), times) in batch.iter().zip(results.iter().skip(1)) {
            let (Some(field), Ok(times)) = (fields.get_mut(*field), times) else { continue };
            for ((candidates, own), default) in field.sizes.iter_mut().zip(times).zip(default) {
                if let Some(candidate) = candidates.get_mut(*place) {
                    candidate.sample.add(own, default);
                }
            }
        }
    }
}

/// Every place of every field, the most promising candidates of all environments first: the time may end.
fn tables(fields: &[Field]) -> Vec<(usize, usize)> {
    let most = fields.iter().map(Field::places).max().unwrap_or(0);
    let places = (0..most).flat_map(|place| (0..fields.len()).map(move |field| (field, place)));
    places.filter(|(field, place)| fields.get(*field).is_some_and(|f| *place < f.places())).collect()
}

/// The candidates that were measured, best first.
fn ranked(candidates: &[Candidate]) -> Vec<(Choice, f64)> {
    let measured = candidates.iter().filter(|c| !c.sample.ratios.is_empty());
    let mut all: Vec<(Choice, f64)> = measured.map(|c| (c.choice, c.sample.ratio())).collect();
    all.sort_by(|a, b| a.1.total_cmp(&b.1));
    all
}

/// The choices of each size for the second stage. The first decides nothing.
fn survivors(field: &Field) -> Vec<Vec<Choice>> {
    let of_size = |candidates: &Vec<Candidate>| {
        let all = ranked(candidates);
        let best = all.first().map_or(1.0, |(_, ratio)| *ratio);
        let near = all.iter().filter(|(c, ratio)| *c != Choice::NONE && *ratio <= best * SURVIVOR_RATIO);
        let mut choices: Vec<Choice> =
            std::iter::once(Choice::NONE).chain(near.map(|(c, _)| *c).take(SURVIVORS)).collect();
        if let Some((first, _)) = all.iter().find(|(c, _)| *c != Choice::NONE) {
            choices.extend(between(*first, candidates));
        }
        choices
    };
    field.sizes.iter().map(of_size).collect()
}

/// The same entry with numbers of channels half-way to the next ones that were measured.
fn between(choice: Choice, candidates: &[Candidate]) -> Vec<Choice> {
    let Some(channels) = choice.channels else { return Vec::new() };
    let others = candidates.iter().filter(|c| c.choice.entry == choice.entry);
    let others: Vec<u8> = others.filter_map(|c| c.choice.channels).collect();
    let below = others.iter().copied().filter(|n| *n < channels).max();
    let above = others.iter().copied().filter(|n| *n > channels).min();
    let middle = |other: u8| other.midpoint(channels);
    let new = [below, above].into_iter().flatten().map(middle).filter(|n| !others.contains(n));
    new.map(|n| Choice { channels: Some(n), ..choice }).collect()
}

/// The environment and the choice of each size that are worth a proof.
fn chosen(fields: &[Field]) -> (Option<u32>, Vec<Choice>) {
    let mut best: Option<(f64, Option<u32>, Vec<Choice>)> = None;
    for field in fields {
        let picked: Vec<(Choice, f64)> = field.sizes.iter().map(|c| pick(c)).collect();
        let sum: f64 = picked.iter().map(|(_, ratio)| ratio.ln()).sum();
        let score = (sum / picked.len().max(1) as f64).exp();
        // The first field sets nothing. A job that has to set a variable gets something for it.
        if best.as_ref().is_none_or(|(least, ..)| score < least * ENVIRONMENT_RATIO) {
            best = Some((score, field.environment, picked.iter().map(|(c, _)| *c).collect()));
        }
    }
    best.map_or((None, Vec::new()), |(_, environment, choices)| (environment, choices))
}

/// The choice for one size, and the ratio that is expected of it.
fn pick(candidates: &[Candidate]) -> (Choice, f64) {
    let all = ranked(candidates);
    let idle = all.iter().find(|(c, _)| *c == Choice::NONE).map_or(1.0, |(_, ratio)| *ratio);
    let Some((choice, ratio)) = all.iter().find(|(c, _)| *c != Choice::NONE) else {
        return (Choice::NONE, idle);
    };
    let is_gain = *ratio < PROMISING_RATIO;
    let is_guard = idle > HARM_RATIO && *ratio < idle * GAIN_RATIO && *ratio < HARM_RATIO;
    if is_gain || is_guard { (*choice, *ratio) } else { (Choice::NONE, idle) }
}
