//! Filters of system calls, which make a kernel behave as another one would.

/// The answer to the calls that a filter names.
#[derive(Debug, Clone, Copy)]
pub enum Then {
    Fail(libc::c_int),
    Kill,
}

/// Bits of a call's argument, by its number, any of which must be set.
pub type Bits = (u32, u32);

fn statement(code: u32, k: u32) -> libc::sock_filter {
    libc::sock_filter { code: code as u16, jt: 0, jf: 0, k }
}

/// Jumps over `over` statements unless the test holds.
fn unless(test: u32, k: u32, over: u8) -> libc::sock_filter {
    libc::sock_filter { code: (libc::BPF_JMP | test | libc::BPF_K) as u16, jt: 0, jf: over, k }
}

/// From here on a system call of this thread ends as `then` says, where its argument has the bits.
pub fn on(number: i64, bits: Option<Bits>, then: Then) {
    /// Offsets in the kernel's struct seccomp_data.
    const NUMBER: u32 = 0;
    const ARGUMENTS: u32 = 16;
    let load = |at| statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, at);
    let end = |verdict| statement(libc::BPF_RET | libc::BPF_K, verdict);
    let verdict = match then {
        Then::Fail(errno) => libc::SECCOMP_RET_ERRNO | errno as u32,
        Then::Kill => libc::SECCOMP_RET_KILL_PROCESS,
    };
    let mut code =
        vec![load(NUMBER), unless(libc::BPF_JEQ, number as u32, if bits.is_some() { 3 } else { 1 })];
    if let Some((argument, bits)) = bits {
        code.extend([load(ARGUMENTS + 8 * argument), unless(libc::BPF_JSET, bits, 1)]);
    }
    code.extend([end(verdict), end(libc::SECCOMP_RET_ALLOW)]);
    let program = libc::sock_fprog { len: code.len() as u16, filter: code.as_mut_ptr() };
    // SAFETY: documented prctl calls with a program that lives through them.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
}

/// As on a file system without unnamed files, such as overlayfs before Linux 6.3.
pub fn no_unnamed_files() {
    let flag = libc::O_TMPFILE & !libc::O_DIRECTORY;
    on(libc::SYS_openat, Some((2, flag as u32)), Then::Fail(libc::EOPNOTSUPP));
}

/// As where /proc is not mounted: an unnamed file cannot get a name.
pub fn no_links() {
    on(libc::SYS_linkat, None, Then::Fail(libc::ENOENT));
}
