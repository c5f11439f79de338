//! The identity of this process.

use crate::runtime::clock::now_ns;
use crate::runtime::segment_name::{SegmentName, Text};
use crate::runtime::sys::{self, variable};
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
    c"SLURM_JOB_PARTITION",
    c"SLURM_JOB_ACCOUNT",
    c"PBS_JOBID",
    c"PBS_JOBNAME",
    c"LSB_JOBID",
    c"LSB_JOBNAME",
    c"OMPI_COMM_WORLD_RANK",
    c"OMPI_COMM_WORLD_SIZE",
    c"RAY_JOB_ID",
    c"PMI_RANK",
    c"PMI_SIZE",
    c"CUDA_VISIBLE_DEVICES",
    c"TORCHELASTIC_RESTART_COUNT",
    c"POD_NAME",
    c"POD_NAMESPACE",
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

    /// The process as a file's name says it.
    pub(crate) fn segment_name(&self) -> SegmentName {
        SegmentName { pid: self.pid, start_ticks: self.start_ticks, nonce: self.nonce }
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

fn start_ticks() -> u64 {
    stat(c"/proc/self/stat").map_or(0, |s| s.start_ticks)
}

/// True when a process of this pid and start time runs, as /proc of our own pid namespace reports.
pub(crate) fn runs(pid: u32, start_ticks: u64) -> bool {
    let mut path = Text::<32>::new();
    path.push(b"/proc/").push_number(u64::from(pid), 10).push(b"/stat");
    stat(path.as_c()).is_some_and(|s| s.start_ticks == start_ticks && !matches!(s.state, b'Z' | b'X'))
}

pub(crate) struct Stat {
    /// The letter of its state.
    pub(crate) state: u8,
    /// Start time in clock ticks since boot.
    pub(crate) start_ticks: u64,
}

fn stat(path: &CStr) -> Option<Stat> {
    let mut text = [0u8; 1024];
    let len = read_file(path, &mut text);
    parse_stat(text.get(..len)?)
}

/// Fields 3 and 22 of a `stat` file, counted behind the last `)`, since a program's name may hold anything.
pub(crate) fn parse_stat(stat: &[u8]) -> Option<Stat> {
    let behind = stat.iter().rposition(|b| *b == b')')?;
    // The first piece is `)` itself, the end of field 2.
    let mut fields = stat.get(behind..)?.split(|b| *b == b' ').skip(1);
    let state = *fields.next()?.first()?;
    let digits = fields.nth(18)?.iter().filter(|b| b.is_ascii_digit());
    let start_ticks =
        digits.fold(0u64, |n, b| n.wrapping_mul(10).wrapping_add(u64::from(b.wrapping_sub(b'0'))));
    Some(Stat { state, start_ticks })
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

    #[test]
    fn a_process_runs_until_it_has_ended() {
        let mut child =
            std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().expect("cat");
        let path = std::ffi::CString::new(format!("/proc/{}/stat", child.id())).expect("no NUL");
        let ticks = stat(&path).expect("procfs").start_ticks;
        assert!(runs(child.id(), ticks));
        assert!(!runs(child.id(), ticks + 1), "an earlier process of the same pid");
        drop(child.stdin.take());
        let status = child.wait().expect("ours");
        assert!(status.success() && !runs(child.id(), ticks));
    }
}
