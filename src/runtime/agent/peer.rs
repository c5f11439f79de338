//! The user at the other end of a Unix socket, by the kernel's word.

#![expect(unsafe_code, reason = "the groups of a peer have no safe name")]

use std::os::fd::{AsFd, AsRawFd};

/// Groups of one process that are looked at; Linux allows 65,536.
const GROUPS_MAX: usize = 65_536;

/// The supplementary groups that the peer had when it connected; none where the kernel does not say.
pub(super) fn groups(socket: impl AsFd) -> Vec<u32> {
    let mut groups: Vec<libc::gid_t> = vec![0; 64];
    loop {
        let bytes = std::mem::size_of_val(groups.as_slice());
        let Ok(mut length) = libc::socklen_t::try_from(bytes) else { return Vec::new() };
        // SAFETY: the descriptor is open while it is borrowed; the kernel writes at most `length` bytes, which the vector
        // has, and any bytes are numbers.
        let said = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        let n = length as usize / size_of::<libc::gid_t>();
        if said == 0 {
            groups.truncate(n);
            return groups;
        }
        // Too few: the kernel has said how many there are.
        let more = std::io::Error::last_os_error().raw_os_error() == Some(libc::ERANGE);
        if !more || n <= groups.len() || n > GROUPS_MAX {
            return Vec::new();
        }
        groups.resize(n, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_groups_of_a_peer_are_those_of_its_process() {
        let (a, _b) = UnixStream::pair().unwrap();
        // SAFETY: with no room the kernel writes nothing; then it has as much as it said.
        let own = unsafe {
            let n = libc::getgroups(0, std::ptr::null_mut());
            let mut own = vec![0; usize::try_from(n).unwrap()];
            assert_eq!(libc::getgroups(n, own.as_mut_ptr()), n);
            own
        };
        let (mut said, mut own) = (groups(&a), own);
        said.sort_unstable();
        own.sort_unstable();
        assert_eq!(said, own);
    }

    #[test]
    fn what_is_no_socket_has_no_groups() {
        assert_eq!(groups(std::fs::File::open("/dev/null").unwrap()), [0; 0]);
    }
}
