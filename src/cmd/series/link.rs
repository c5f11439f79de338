//! The bandwidth of a GPU's link: as the file of targets states it, else by what NVML says of the GPUs' NVLinks.

use crate::bench::targets::{Goal, Link, Targets};
use crate::bench::{Environment, Report};
use crate::ingest::hardware::{Nvml, Samplers};
use crate::ingest::now_ns;
use crate::model::{Fact, GpuFact};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

/// The link that shares are taken of. NVML is asked only where a target needs it.
pub(super) fn of(targets: &Targets, reports: &[Report], nvml: Option<&PathBuf>) -> Link {
    let unknown = |source: &str| Link { gb_per_s: None, source: source.to_owned() };
    if let Some(gb_per_s) = targets.link_gb_per_s {
        return Link { gb_per_s: Some(gb_per_s), source: format!("stated in {}", targets.origin()) };
    }
    let is_needed = |g: &Goal| matches!(g, Goal::MinLinkShare { .. });
    if !targets.all().iter().flat_map(|t| &t.goals).any(is_needed) {
        return unknown("no target needs it");
    }
    let Some(environment) = reports.first().map(|r| &r.environment) else {
        return unknown("nothing was measured");
    };
    if environment.nodes() > 1 {
        return unknown("the ranks are on several nodes; state link: in the file of targets");
    }
    match nvlinks(environment, &gpus(nvml)) {
        Ok(link) => link,
        Err(why) => unknown(&format!("{why}; state link: in the file of targets")),
    }
}

/// The GPUs of this host with their NVLinks. Without NVML there are none.
fn gpus(nvml: Option<&PathBuf>) -> Vec<GpuFact> {
    let once = Duration::from_secs(1);
    let sampler = Nvml::new(nvml.cloned()).health(once, Some(once), Some(once));
    let readings = Samplers::of("", vec![sampler]).poll(now_ns());
    let gpu = |fact| if let Fact::Gpu(gpu) = fact { Some(*gpu) } else { None };
    readings.into_iter().filter_map(|r| gpu(r.fact)).collect()
}

/// The NVLinks of the run's GPUs: their number times their speed, whether they are up or not, since a link that is down
/// is no reason to expect less. Of GPUs that differ the one with the least.
fn nvlinks(environment: &Environment, gpus: &[GpuFact]) -> Result<Link, String> {
    let used: BTreeSet<&str> = environment.ranks.iter().map(|r| r.pci.as_str()).collect();
    let mut least: Option<(f64, String)> = None;
    for pci in used {
        let gpu = gpus.iter().find(|g| g.gpu.eq_ignore_ascii_case(pci));
        let gpu = gpu.ok_or_else(|| format!("NVML says nothing of GPU {pci}"))?;
        if gpu.links.is_empty() {
            return Err(format!("GPU {pci} has no NVLink"));
        }
        let speed = gpu.links.iter().filter_map(|l| l.speed_mb_per_s).max();
        let speed = speed.ok_or_else(|| format!("NVML does not say the speed of GPU {pci}'s NVLinks"))?;
        let each = speed as f64 / 1000.0;
        let all = each * gpu.links.len() as f64;
        if least.as_ref().is_none_or(|(gb, _)| all < *gb) {
            least = Some((all, format!("{} NVLinks x {each:.2} GB/s by NVML", gpu.links.len())));
        }
    }
    let (gb_per_s, source) = least.ok_or_else(|| "no GPU is known".to_owned())?;
    Ok(Link { gb_per_s: Some(gb_per_s), source })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::fixtures;
    use crate::model::LinkFact;

    fn environment(pci: &[&str]) -> Environment {
        let mut environment = fixtures::environment(u32::try_from(pci.len()).unwrap());
        environment.ranks.iter_mut().zip(pci).for_each(|(r, pci)| r.pci = (*pci).to_owned());
        environment
    }

    fn gpu(pci: &str, speeds: &[Option<u64>]) -> GpuFact {
        let link = |s: &Option<u64>| LinkFact { speed_mb_per_s: *s, ..LinkFact::default() };
        GpuFact { gpu: pci.to_owned(), links: speeds.iter().map(link).collect(), ..GpuFact::default() }
    }

    #[test]
    fn the_gpu_with_the_least_decides_and_a_link_that_is_down_counts() {
        let gpus =
            [gpu("0000:1A:00.0", &[Some(25_000); 4]), gpu("0000:1b:00.0", &[Some(25_000), None, None])];
        let of = |pci: &[&str]| nvlinks(&environment(pci), &gpus).map(|l| l.gb_per_s);
        assert_eq!(of(&["0000:1a:00.0"]), Ok(Some(100.0)));
        assert_eq!(of(&["0000:1a:00.0", "0000:1b:00.0"]), Ok(Some(75.0)));
        assert!(of(&["0000:1c:00.0"]).unwrap_err().contains("0000:1c:00.0"));
        let none = nvlinks(&environment(&["a"]), &[gpu("a", &[])]).unwrap_err();
        assert!(none.contains("has no NVLink"), "{none}");
        let silent = nvlinks(&environment(&["a"]), &[gpu("a", &[None])]).unwrap_err();
        assert!(silent.contains("does not say the speed"), "{silent}");
    }
}
