//! The place of a process among the others, as a launcher reports it.

use super::meeting::{MAGIC, VERSION};
use super::{PORTS, RendezvousError};

/// Slurm's jobs have no port of their own by default: PyTorch's.
pub(super) const DEFAULT_PORT: u16 = 29_500;

/// The place of this process among the others, as a launcher reported it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// This process.
    pub rank: u32,
    /// How many processes.
    pub world: u32,
    /// This process among those of its host.
    pub local_rank: u32,
    /// Rank 0's host.
    pub master: String,
    /// The port behind which rank 0 listens.
    pub port: u16,
    /// Names the job: a hash of its launcher's id.
    pub key: u64,
    /// The number among several benchmarks of one job.
    pub epoch: u64,
}

impl Launch {
    /// Reads what torchrun (`WORLD_SIZE`, `RANK`, ...) or srun (`SLURM_NTASKS`, `SLURM_PROCID`, ...) has set. `None`
    /// where neither tells of more than one process.
    ///
    /// # Errors
    /// [`RendezvousError::Environment`] names the variable that is missing or makes no sense.
    pub fn read(
        variable: impl Fn(&str) -> Option<String>,
        epoch: u64,
    ) -> Result<Option<Self>, RendezvousError> {
        let get = |name: &str| variable(name).filter(|v| !v.trim().is_empty());
        let number = |name: &str| -> Result<Option<u32>, RendezvousError> {
            let Some(text) = get(name) else { return Ok(None) };
            let wrong = |_| RendezvousError::Environment(format!("{name} is {text:?}, which is no number"));
            text.trim().parse().map(Some).map_err(wrong)
        };
        let need = |name: &str, who: &str| {
            let wrong = || RendezvousError::Environment(format!("{who}, but {name} is not set"));
            number(name).and_then(|n| n.ok_or_else(wrong))
        };
        let torch = number("WORLD_SIZE")?;
        let tasks = || Ok::<_, RendezvousError>(number("SLURM_STEP_NUM_TASKS")?.or(number("SLURM_NTASKS")?));
        let (world, rank, local_rank, job) = if let Some(world) = torch {
            if world <= 1 {
                return Ok(None);
            }
            let who = format!("WORLD_SIZE is {world} (torchrun)");
            let rank = need("RANK", &who)?;
            (world, rank, need("LOCAL_RANK", &who)?, get("TORCHELASTIC_RUN_ID"))
        } else if let (Some(world), Some(rank)) = (tasks()?.filter(|n| *n > 1), number("SLURM_PROCID")?) {
            let who = format!("there are {world} Slurm tasks");
            (world, rank, need("SLURM_LOCALID", &who)?, get("SLURM_JOB_ID"))
        } else {
            return Ok(None);
        };
        if rank >= world {
            let text = format!("rank {rank} of {world} processes: ranks go from 0 to {}", world - 1);
            return Err(RendezvousError::Environment(text));
        }
        let Some(master) = get("MASTER_ADDR") else {
            return Err(RendezvousError::Environment(format!(
                "there are {world} processes, and MASTER_ADDR is not set. torchrun sets it; under srun set it to the \
                 host of rank 0: MASTER_ADDR=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)"
            )));
        };
        let port = match number("MASTER_PORT")? {
            None => DEFAULT_PORT,
            Some(p) => u16::try_from(p).ok().filter(|p| p.checked_add(PORTS).is_some()).ok_or_else(|| {
                RendezvousError::Environment(format!("MASTER_PORT is {p}: up to {}", u16::MAX - PORTS))
            })?,
        };
        let job = job.unwrap_or_default();
        Ok(Some(Launch {
            rank,
            world,
            local_rank,
            master: master.trim().to_owned(),
            port,
            key: hash(&job),
            epoch,
        }))
    }

    pub(super) fn greeting(&self) -> [u8; 40] {
        let mut g = [0; 40];
        g[..8].copy_from_slice(&MAGIC.to_be_bytes());
        g[8..12].copy_from_slice(&VERSION.to_be_bytes());
        g[12..16].copy_from_slice(&self.rank.to_be_bytes());
        g[16..24].copy_from_slice(&self.key.to_be_bytes());
        g[24..32].copy_from_slice(&self.epoch.to_be_bytes());
        g[32..36].copy_from_slice(&self.world.to_be_bytes());
        g
    }
}

/// FNV-1a, 64 bits: the same on every host.
pub(super) fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}
