//! Jobs from what was drawn: the program of every rank, and the faults at places where the healthy job really is.

mod families;
mod faults;
mod pipeline;
mod steps;

use crate::simulator::{Case, Members, Ns, Simulation, Slow, Stay, Step};
use crate::spec::Spec;
pub(crate) use faults::Planted;
use ringwatch::model::{CommId, Func};
use steps::{call, host, issue, repeat, rooted, sync};

const MS: u64 = 1_000_000;

/// A job, what was planted in it, and the run of the same job without that.
#[derive(Debug)]
pub(crate) struct Exam {
    pub(crate) case: Case,
    pub(crate) planted: Vec<Planted>,
    /// What happens in the job without its faults, by rank and in the order of its calls.
    pub(crate) healthy: Vec<Stay>,
    /// The communicators, and the ranks of the job in each.
    pub(crate) members: Vec<(CommId, Vec<u32>)>,
}

impl Exam {
    /// The name of a communicator in a scenario file, by its place among all.
    pub(crate) fn comm_name(&self, at: usize) -> String {
        let mut first = 0;
        for (name, members) in &self.case.comms {
            let groups = members.groups(self.case.ranks).len();
            if at < first + groups {
                return if groups == 1 { name.clone() } else { format!("{name}/{}", at - first) };
            }
            first += groups;
        }
        unreachable!("there is no communicator {at}")
    }

    /// True for a communicator that ranks make in the middle of their work.
    pub(crate) fn is_made_at_work(&self, comm: CommId) -> bool {
        let at = self.members.iter().position(|(id, _)| *id == comm);
        at.is_some_and(|at| {
            let name = self.comm_name(at);
            let name = name.split('/').next().unwrap_or(&name);
            self.case.comms.get(name).is_some_and(|m| m.later)
        })
    }

    /// The name that decides a job's noise.
    pub(crate) fn name(spec: &Spec) -> String {
        format!("exam-{}", spec.seed)
    }

    pub(crate) fn of(drawn: &Spec) -> Self {
        let spec = &within_calls(drawn);
        let mut case = healthy_case(spec);
        let healthy = run(&case, spec);
        let planted = faults::plant(&mut case, spec, &healthy);
        lose_records(&mut case, spec, &healthy);
        let members = Simulation::new(&case, &Exam::name(spec), 0, 0).members();
        Exam { case, planted, healthy, members }
    }
}

/// What really happens in a case.
pub(crate) fn run(case: &Case, spec: &Spec) -> Vec<Stay> {
    let mut sim = Simulation::new(case, &Exam::name(spec), 0, 0);
    sim.run_to(case.until.0);
    let mut stays = sim.stays();
    stays.sort_by_key(|s| (s.rank, s.ticket));
    stays
}

/// How long one step takes where nothing is waited for, in ns, and how many calls all ranks make in it.
fn one_step(case: &Case, spec: &Spec) -> (u64, u64) {
    let mut trial = Case { until: Ns(u64::MAX / 8), ..case.clone() };
    trial.program.push(repeat(3, families::of(spec).step));
    let stays = run(&trial, spec);
    let ends = stays.iter().filter_map(|s| s.ended_ns).max().unwrap_or(MS);
    ((ends / 3).max(MS), stays.len() as u64 / 3)
}

/// The same job with so much computing that it makes no more calls than it may.
fn within_calls(drawn: &Spec) -> Spec {
    let mut spec = drawn.clone();
    let mut case = faults::empty_case(&spec);
    case.comms = families::of(&spec).comms;
    let (takes, calls) = one_step(&case, &spec);
    let all = spec.until_ms * MS / takes * calls;
    if all > spec.calls {
        // Longer steps would leave nothing to watch.
        let most = (1_500 * MS / takes).max(1);
        let more = (all / spec.calls + 1).min(most);
        spec.unit_us *= more;
        spec.count *= if spec.faults.iter().any(|f| f.kind.is_data()) { more } else { 1 };
    }
    spec
}

/// Ranks take different times to compile, one of them longest.
fn compile(spec: &Spec) -> Vec<Step> {
    let slowest = (spec.seed >> 8) as u32 % spec.ranks;
    (0..spec.ranks)
        .map(|rank| {
            let ms = if rank == slowest { spec.compile_ms } else { spec.compile_ms * 3 / 4 };
            Step { ranks: Some(vec![rank]), ..host(ms * MS) }
        })
        .collect()
}

/// A checkpoint: the hosts are away, or that of rank 0 alone, and all meet again.
fn checkpoint(spec: &Spec, comm: &str) -> Vec<Step> {
    let ranks = spec.checkpoint_alone.then(|| vec![0]);
    let away = Step { ranks, ..host(spec.checkpoint_ms * MS) };
    vec![sync(), away, issue(call(comm, Func::AllReduce, 1), 1), sync()]
}

/// A communicator that a part of the program makes, uses and frees.
fn subgroup(name: &str) -> Vec<Step> {
    vec![
        sync(),
        Step { make: Some(name.to_owned()), ..Step::default() },
        issue(rooted(name, Func::Broadcast, 4_096, 0), 1),
        repeat(3, vec![issue(call(name, Func::AllReduce, 65_536), 1)]),
        sync(),
        Step { free: Some(name.to_owned()), ..Step::default() },
    ]
}

/// A communicator of all ranks, which some families have none of.
fn common(case: &mut Case) -> String {
    let all = |m: &Members| m.ranks.is_none() && m.groups.is_none() && m.strided.is_none();
    let known = case.comms.iter().find(|(_, m)| all(m)).map(|(name, _)| name.clone());
    known.unwrap_or_else(|| {
        case.comms.insert("everyone".to_owned(), Members::default());
        "everyone".to_owned()
    })
}

fn healthy_case(spec: &Spec) -> Case {
    let layout = families::of(spec);
    let mut case = faults::empty_case(spec);
    case.comms = layout.comms;
    let (takes, _) = one_step(&case, spec);
    let world = common(&mut case);
    let steps = (case.until.0 * if spec.ends { 2 } else { 5 } / 4).div_ceil(takes).max(4) as u32;
    let steps = if spec.ends { (steps / 2).max(3) } else { steps };
    let block = (1_500 * MS / takes).clamp(1, 200) as u32;
    if spec.compile_ms > 0 {
        case.program.extend(compile(spec));
    }
    case.program.extend(layout.step.clone());
    if spec.warm_up_ms > 0 {
        case.program.push(host(spec.warm_up_ms * MS));
    }
    case.program.extend(layout.step.clone());
    for at in 0..steps.div_ceil(block) {
        case.program.push(repeat(block, layout.step.clone()));
        if spec.checkpoint_ms > 0 && at % 3 == 2 {
            case.program.extend(checkpoint(spec, &world));
        }
        if spec.evaluation && at % 4 == 1 {
            // Only forward, and the results of all.
            case.program.push(sync());
            case.program.push(repeat(4, vec![steps::compute(spec.unit() * 2, 0)]));
            case.program.extend([steps::wait(1, 0), issue(call(&world, Func::AllReduce, 16), 1), sync()]);
        }
        if at > 0 && at <= spec.subgroups {
            let name = format!("sub{at}");
            let members = Members { later: true, preloaded: spec.preloaded, ..Members::default() };
            case.comms.insert(name.clone(), members);
            case.program.extend(subgroup(&name));
        }
    }
    if spec.ends {
        case.program.extend([sync(), Step { exit: Some(0), ..Step::default() }]);
    }
    case
}

/// Records that the plugin or the reader loses, in a healthy job too.
fn lose_records(case: &mut Case, spec: &Spec, healthy: &[Stay]) {
    let mut random = crate::random::Random::new(spec.seed ^ 0x105e);
    for _ in 0..spec.lost_records {
        let stay = random.pick(healthy);
        if let Some(fault) = faults::at(case, healthy, &stay) {
            case.faults.push(crate::simulator::Fault { overwritten: true, ..fault });
        }
    }
}

/// Data that is slow from some moment on.
fn slow(from: u64, factor: f64) -> Slow {
    Slow {
        comm: None,
        host: None,
        pair: None,
        from: Ns(from),
        until: crate::simulator::FOREVER,
        orders: None,
        share: None,
        factor,
    }
}
