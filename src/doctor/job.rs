//! The checks of all ranks of a job together: each rank's own, what differs between them, and real collectives.

use super::collectives::{Measured, NVLINK, Ready, Step, judge, measure};
use super::host::{Host, within};
use super::libraries::Libraries;
use super::ranks::{RankFacts, together};
use super::{Area, Check, Observation, Outcome, Report, run};
use crate::bench::cuda::Cuda;
use crate::bench::rendezvous::{Launch, Rendezvous};
use crate::bench::{BenchError, RendezvousError};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

/// How long ranks wait for each other.
const MEETING: Duration = Duration::from_secs(60);
/// How long the driver may take to begin, less than ranks wait for each other.
const LOADING: Duration = Duration::from_secs(30);
/// How long the collectives may take in all.
const COLLECTIVES: Duration = Duration::from_secs(120);

/// Why ranks have no report together.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    /// They do not find each other, or one is gone.
    #[error(transparent)]
    Meeting(#[from] RendezvousError),
    /// A rank sent what is no report.
    #[error("rank {rank} sent something else than a report ({why}): do all ranks run the same version?")]
    Strange {
        /// The rank.
        rank: usize,
        /// The fault in it.
        why: String,
    },
}

/// How many GPUs this host's CUDA has; 0 where there is none, or where it does not answer in time.
#[must_use]
pub fn devices(host: &Host, limit: Duration) -> usize {
    let path = host.cuda.clone();
    within(limit, move || Cuda::open(path.as_deref()).map_or(0, |c| c.device_count())).unwrap_or(0)
}

/// Runs the checks on this rank and puts them together with the others'. Rank 0 gets the report. The flag is true if a
/// thread of this process is still inside CUDA or NCCL, so that the process has to be left at once.
///
/// # Errors
/// Which rank did not come, or was lost.
pub fn run_ranks(
    host: &Arc<Host>,
    checks: &[Check],
    limit: Duration,
    launch: &Launch,
    nccl: Option<PathBuf>,
) -> Result<(Option<Report>, bool), JobError> {
    let report = run(host, checks, limit);
    let mut own = RankFacts::gather(launch.rank, host, report, limit);
    let mut meeting = Rendezvous::join(launch, MEETING)?;
    meeting.start_together()?;
    own.clock_ms = host.unix_ms();
    let all = exchange(&mut meeting, &own)?;
    let mut report = own.report.clone();
    report.outcomes = together(&all);
    // The library that a job would load, which is PyTorch's where there is one.
    let nccl = nccl.or_else(|| Libraries::find(host).of_job().map(|l| l.path.clone()));
    let (place, cuda) = (launch.clone(), host.cuda.clone());
    let loaded = within(LOADING, move || Ready::new(&place, cuda.as_deref(), nccl.as_deref()));
    let is_late = loaded.is_none();
    let ready = loaded.unwrap_or_else(|| {
        let text = format!("CUDA and NCCL were not loaded within {} s", LOADING.as_secs());
        Err(BenchError::Settings(text))
    });
    let refusals: Vec<Option<String>> =
        exchange(&mut meeting, &ready.as_ref().err().map(ToString::to_string))?;
    let (outcomes, is_stuck) = match ready {
        Ok(ready) if refusals.iter().all(Option::is_none) => measured(host, ready, meeting),
        _ => (vec![refused(&refusals)], is_late),
    };
    report.outcomes.extend(outcomes);
    Ok(((launch.rank == 0).then_some(report), is_stuck))
}

/// Why no collectives were run.
fn refused(refusals: &[Option<String>]) -> Outcome {
    let result = match refusals.iter().flatten().next() {
        Some(why) if refusals.iter().all(Option::is_some) => {
            Observation::skip(format!("no rank has what they take: {why}"))
        }
        first => {
            let who: Vec<String> = (0..)
                .zip(refusals)
                .filter(|(_, r)| r.is_some())
                .map(|(i, _): (usize, _)| i.to_string())
                .collect();
            let why = first.map_or("", String::as_str);
            Observation::fail(
                format!("ranks {} cannot take part: {why}", who.join(", ")),
                "give them what the others have",
            )
        }
    };
    Outcome::new("collectives", Area::Ranks, Duration::ZERO, vec![result])
}

/// Runs the collectives on a thread of their own, which may not come back.
fn measured(host: &Arc<Host>, ready: Ready, mut meeting: Rendezvous) -> (Vec<Outcome>, bool) {
    let failed = |text: String| {
        let fix = "see the variables, links and ranks above; NCCL_DEBUG=WARN says more";
        vec![Outcome::new("collectives", Area::Ranks, Duration::ZERO, vec![Observation::fail(text, fix)])]
    };
    let (send, receive) = channel();
    let step = Step::default();
    let (theirs, host) = (step.clone(), host.clone());
    let work = move || {
        let outcome = measure(&ready, &mut meeting, &theirs).map_err(|e| {
            meeting.give_up(&e.to_string());
            e.to_string()
        });
        let outcome = outcome.and_then(|mut m| {
            theirs.set("the other ranks' results");
            complete(&mut m, &host);
            exchange(&mut meeting, &m).map_err(|e| e.to_string())
        });
        // Nobody receives it once the time is over.
        send.send(outcome).ok();
    };
    if let Err(e) = std::thread::Builder::new().name("collectives".to_owned()).spawn(work) {
        return (failed(BenchError::Settings(format!("cannot start a thread: {e}")).to_string()), false);
    }
    match receive.recv_timeout(COLLECTIVES) {
        Ok(Ok(all)) => (judge(&all), false),
        Ok(Err(why)) => (failed(why), false),
        Err(RecvTimeoutError::Disconnected) => {
            (failed(format!("it ended without a result in: {}", step.now())), false)
        }
        Err(RecvTimeoutError::Timeout) => {
            let text = format!("after {} s this rank is still at: {}", COLLECTIVES.as_secs(), step.now());
            (failed(text), true)
        }
    }
}

/// Adds what only the driver and the kernel know.
fn complete(m: &mut Measured, host: &Arc<Host>) {
    m.host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    m.gpu = crate::model::pci_address(&m.gpu).unwrap_or_else(|| m.gpu.clone());
    let gpus = host.gpus_within(LOADING).unwrap_or_default().gpus;
    if let Some(own) = gpus.into_iter().find(|g| g.fact.gpu == m.gpu) {
        m.paths = own
            .fact
            .peers
            .into_iter()
            .filter_map(|p| Some((p.gpu, path_kind(p.nvlink, p.path.as_deref())?)))
            .collect();
    }
}

/// Over what a GPU reaches another one.
fn path_kind(nvlink: Option<bool>, path: Option<&str>) -> Option<String> {
    match (nvlink, path) {
        (Some(true), _) => Some(NVLINK.to_owned()),
        (_, Some(path)) => Some(format!("over PCIe ({path})")),
        _ => None,
    }
}

/// Everybody gives something and gets everybody's, by rank.
fn exchange<T: serde::Serialize + serde::de::DeserializeOwned>(
    meeting: &mut Rendezvous,
    own: &T,
) -> Result<Vec<T>, JobError> {
    let strange = |rank: usize, e: &dyn std::fmt::Display| JobError::Strange { rank, why: e.to_string() };
    let bytes = serde_json::to_vec(own).map_err(|e| strange(meeting.rank() as usize, &e))?;
    let all = meeting.all_gather(&bytes)?;
    all.iter().enumerate().map(|(r, b)| serde_json::from_slice(b).map_err(|e| strange(r, &e))).collect()
}
