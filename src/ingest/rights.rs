//! Starts a program with no more rights than the user of the process that it reads has.
//!
//! A tool opens whatever files the watched process says that it uses. With root's rights it would open files of the host
//! that the process only links to.

#![expect(unsafe_code, reason = "rights are given up between fork and exec")]

use rustix::fs::{Mode, OFlags};
use rustix::process::{
    Gid, Resource, Rlimit, Signal, Uid, geteuid, set_parent_process_death_signal, setrlimit,
};
use rustix::thread::{
    CapabilitySet, CapabilitySets, configure_capability_in_ambient_set, set_capabilities,
    set_keep_capabilities, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// The process that a tool reads.
#[derive(Debug, Clone, Copy)]
pub(super) struct Watched {
    pub(super) pid: u32,
    /// The user of its segment: what /proc says of a process, the process can change.
    pub(super) owner: u32,
}

/// The rights of a started program.
#[derive(Debug, Clone, Copy)]
struct Rights {
    memory: u64,
    /// The user and group to become; absent where this process is that user, or not root.
    become_user: Option<(Uid, Gid)>,
    /// The kernel lets only parents and those with this capability read a process's memory.
    needs_ptrace: bool,
}

/// Has a command run as the user of the watched process, with so much memory, and be the first to be killed where the limit
/// comes too late.
pub(super) fn restrict(command: &mut Command, watched: Watched, memory: u64) {
    let is_other = geteuid().is_root() && watched.owner != 0;
    let group = || (Uid::from_raw(watched.owner), Gid::from_raw(group_of(watched.pid).unwrap_or(NOBODY)));
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    let rights = Rights {
        memory,
        become_user: is_other.then(group),
        needs_ptrace: scope.is_ok_and(|s| s.trim() != "0"),
    };
    // SAFETY: between fork and exec `take` makes system calls alone, and neither allocates nor takes a lock.
    unsafe { command.pre_exec(move || take(rights)) };
}

/// The group of nobody, on all usual systems.
const NOBODY: u32 = 65_534;

/// The group that a process has; one of those that it may have.
fn group_of(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|l| l.strip_prefix("Gid:"))?.split_whitespace().next()?.parse().ok()
}

fn take(rights: Rights) -> io::Result<()> {
    let most = Some(rights.memory);
    setrlimit(Resource::Data, Rlimit { current: most, maximum: most })?;
    // Without /proc the limit has to do.
    if let Ok(file) = rustix::fs::open(c"/proc/self/oom_score_adj", OFlags::WRONLY, Mode::empty()) {
        rustix::io::write(&file, b"1000").ok();
    }
    let Some((user, group)) = rights.become_user else { return end_with_parent() };
    set_keep_capabilities(true)?;
    set_thread_groups(&[])?;
    set_thread_res_gid(group, group, group)?;
    set_thread_res_uid(user, user, user)?;
    let kept = if rights.needs_ptrace { CapabilitySet::SYS_PTRACE } else { CapabilitySet::empty() };
    set_capabilities(None, CapabilitySets { effective: kept, permitted: kept, inheritable: kept })?;
    if rights.needs_ptrace {
        configure_capability_in_ambient_set(CapabilitySet::SYS_PTRACE, true)?;
    }
    end_with_parent()
}

/// A tool ends with the probe that runs it. To become another user would take that back, so it comes last.
fn end_with_parent() -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_has_the_rights_of_the_watched_user_and_no_others() {
        if !geteuid().is_root() {
            super::super::skip::skipped("a_program_has_the_rights_of_the_watched_user_and_no_others", "root");
            return;
        }
        let said = |owner: u32| {
            let mut command = Command::new("cat");
            command.arg("/proc/self/status");
            restrict(&mut command, Watched { pid: std::process::id(), owner }, 1 << 30);
            let text = String::from_utf8(command.output().expect("cat runs").stdout).expect("text");
            move |name: &str| {
                let line = text.lines().find_map(|l| l.strip_prefix(name)).expect("in status");
                line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
            }
        };
        let of_user = said(12_345);
        assert_eq!(of_user("Uid:"), ["12345"; 4]);
        assert_eq!(of_user("Groups:"), Vec::<String>::new());
        let capabilities = u64::from_str_radix(&of_user("CapEff:")[0], 16).expect("a number");
        assert_eq!(capabilities & !(1 << 19), 0, "CAP_SYS_PTRACE at most");
        assert_eq!(said(0)("Uid:"), ["0"; 4]);
    }
}
