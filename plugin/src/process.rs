//! Who this process is.

use crate::clock::now_ns;
use crate::sys::{self, variable};
use core::ffi::CStr;
use ringwatch_wire::layout::head;
use ringwatch_wire::ring::{Segment, text_word};

/// The variables that may enter a segment: whose job and which rank, never anything secret.
const JOB_VARIABLES: &[&CStr] = &[
    c"RINGWATCH_JOB",
    c"RINGWATCH_TAGS",
    c"RANK",
    c"WORLD_SIZE",
    c"LOCAL_RANK",
    c"LOCAL_WORLD_SIZE",
    c"GROUP_RANK",
    c"TORCHELASTIC_RUN_ID",
    c"SLURM_JOB_ID",
    c"SLURM_JOB_NAME",
    c"SLURM_STEP_ID",
    c"SLURM_PROCID",
    c"SLURM_NTASKS",
    c"PBS_JOBID",
    c"LSB_JOBID",
    c"OMPI_COMM_WORLD_RANK",
    c"OMPI_COMM_WORLD_SIZE",
    c"RAY_JOB_ID",
    c"PMI_RANK",
    c"PMI_SIZE",
    c"CUDA_VISIBLE_DEVICES",
];

/// Identity of the process.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Identity {
    pub(crate) pid: u32,
    pub(crate) uid: u32,
    /// Start time in clock ticks since boot; 0 when /proc does not say.
    pub(crate) start_ticks: u64,
    pub(crate) nonce: u64,
    boot_id: [u8; 36],
    program: [u8; 16],
}

impl Identity {
    pub(crate) fn read() -> Self {
        let (pid, uid) = sys::ids();
        let mut boot_id = [0; 36];
        read_file(c"/proc/sys/kernel/random/boot_id", &mut boot_id);
        let mut program = [0; 16];
        let len = read_file(c"/proc/self/comm", &mut program);
        if let Some(newline) = len.checked_sub(1).and_then(|i| program.get_mut(i))
            && *newline == b'\n'
        {
            *newline = 0;
        }
        Identity { pid, uid, start_ticks: start_ticks(), nonce: nonce(pid), boot_id, program }
    }

    pub(crate) fn write(&self, segment: &Segment<'_>) {
        segment.set(head::PID, u64::from(self.pid) | u64::from(self.uid) << 32);
        segment.set(head::START_TICKS, self.start_ticks);
        segment.set(head::NONCE, self.nonce);
        segment.set(head::CREATED_MONO_NS, now_ns());
        segment.set(head::CREATED_UNIX_NS, sys::clock_ns(sys::REALTIME));
        let version = env!("CARGO_PKG_VERSION").as_bytes();
        segment.set_text(head::PLUGIN_VERSION, head::PLUGIN_VERSION_WORDS, version);
        segment.set_text(head::BOOT_ID, head::BOOT_ID_WORDS, &self.boot_id);
        segment.set_text(head::HOST, head::HOST_WORDS, &sys::host_name());
        segment.set_text(head::PROGRAM, head::PROGRAM_WORDS, &self.program);
    }
}

/// Writes the job's variables as `KEY=value` lines.
pub(crate) fn write_environment(segment: &Segment<'_>) {
    const ROOM: usize = head::ENV_WORDS * 8;
    let mut text = [0u8; ROOM];
    let mut len = 0usize;
    for name in JOB_VARIABLES {
        let Some(value) = variable(name) else { continue };
        let line = name.count_bytes() + value.count_bytes() + 2;
        // A variable that does not fit is left out whole; half a value would be a wrong one.
        if len + line >= ROOM {
            continue;
        }
        // A line break inside a value would begin a line that nobody wrote.
        let value = value.to_bytes().iter().map(|b| if *b < b' ' { b'_' } else { *b });
        let name = name.to_bytes().iter().copied();
        for b in name.chain([b'=']).chain(value).chain([b'\n']) {
            if let Some(place) = text.get_mut(len) {
                *place = b;
                len += 1;
            }
        }
    }
    for i in 0..head::ENV_WORDS {
        segment.set(head::ENV + i, text_word(&text, i, head::ENV_WORDS));
    }
}

fn nonce(pid: u32) -> u64 {
    // Very early in a boot there is no randomness: the clock and the pid still tell processes apart.
    let random =
        sys::random().unwrap_or_else(|| now_ns().wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ u64::from(pid));
    // The low 16 bits mark every handle and must not be 0.
    if random & 0xffff == 0 { random | 1 } else { random }
}

/// Field 22 of /proc/self/stat, counted behind the last `)`, since a program's name may hold anything.
fn start_ticks() -> u64 {
    let mut text = [0u8; 1024];
    let len = read_file(c"/proc/self/stat", &mut text);
    let stat = text.get(..len).unwrap_or(&[]);
    let behind = stat.iter().rposition(|b| *b == b')').unwrap_or(0);
    let mut fields = stat.get(behind..).unwrap_or(&[]).split(|b| *b == b' ');
    // The piece of `)` itself is field 2.
    let Some(field) = fields.nth(20) else { return 0 };
    field
        .iter()
        .filter(|b| b.is_ascii_digit())
        .fold(0u64, |n, b| n.wrapping_mul(10).wrapping_add(u64::from(b.wrapping_sub(b'0'))))
}

fn read_file(path: &CStr, into: &mut [u8]) -> usize {
    sys::open(path, 0).map_or(0, |file| sys::read(&file, into))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_is_this_process() {
        let i = Identity::read();
        assert_eq!(i.pid, std::process::id());
        assert!(i.start_ticks > 0);
        assert_ne!(i.nonce & 0xffff, 0);
        let stat = std::fs::read_to_string("/proc/self/stat").expect("procfs");
        let behind = stat.rsplit(')').next().expect("a name in parentheses");
        let want: u64 = behind.split_whitespace().nth(19).expect("field 22").parse().expect("a number");
        assert_eq!(i.start_ticks, want);
    }
}
