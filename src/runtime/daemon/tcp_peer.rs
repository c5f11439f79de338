//! The user at the other end of a TCP connection: the kernel knows the user of a socket of this host.
//!
//! Connections of one peer share one peer's places, so that a flood displaces its own connections.

use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{self, AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// One peer, as far as it can be told apart from others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TcpPeer {
    /// A user of this host.
    User(u32),
    /// Another host; of IPv6 its network, within which a host has any number of addresses.
    Address(IpAddr),
    /// Something of this host of which the kernel says nothing: it has closed its end, or the kernel lacks `tcp_diag`.
    Unknown,
}

/// Asks the kernel for users of sockets (sock_diag(7)).
#[derive(Debug)]
pub(super) struct PeerLookup(Option<OwnedFd>);

/// `SOCK_DIAG_BY_FAMILY` and `NLM_F_REQUEST` of the kernel's headers.
const BY_FAMILY: u16 = 20;
const REQUEST: u16 = 1;
/// The length of a netlink header, in bytes.
const HEADER: usize = 16;
/// Offsets in the kernel's `inet_diag_msg`, behind the header: the state and what follows the socket's identity.
const STATE: usize = HEADER + 1;
const UID: usize = HEADER + 64;
const INODE: usize = HEADER + 68;
/// States of a socket whose owner has not closed it: established, and closed by the other side.
const OWNED: [u8; 2] = [1, 8];

impl PeerLookup {
    /// Without the kernel's help every local peer is unknown.
    pub(super) fn new() -> Self {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket =
            net::socket_with(AddressFamily::NETLINK, SocketType::DGRAM, flags, Some(netlink::SOCK_DIAG));
        PeerLookup(socket.ok())
    }

    /// The peer of an accepted connection.
    pub(super) fn of(&self, local: SocketAddr, remote: SocketAddr) -> TcpPeer {
        // A server of both families sees mapped addresses, and the client's socket has the plain ones.
        let plain = |a: SocketAddr| SocketAddr::new(a.ip().to_canonical(), a.port());
        let (local, remote) = (plain(local), plain(remote));
        if !remote.ip().is_loopback() && remote.ip() != local.ip() {
            return TcpPeer::Address(network(remote.ip()));
        }
        self.user(local, remote).map_or(TcpPeer::Unknown, TcpPeer::User)
    }

    /// The user whose socket is `remote` and is connected to `local`.
    fn user(&self, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
        let socket = self.0.as_ref()?;
        let mut answer = [0; 512];
        // An answer that nobody took belongs to a question of before.
        while net::recv(socket, &mut answer, RecvFlags::DONTWAIT).is_ok() {}
        net::send(socket, &question(remote, local), SendFlags::DONTWAIT).ok()?;
        // The kernel answers within the call.
        let length = loop {
            match net::recv(socket, &mut answer, RecvFlags::DONTWAIT) {
                Err(Errno::INTR) => {}
                Err(_) => return None,
                Ok((_, length)) => break length,
            }
        };
        owner(answer.get(..length)?)
    }
}

/// The question for the one TCP socket with these addresses: `nlmsghdr` and `inet_diag_req_v2`.
fn question(source: SocketAddr, destination: SocketAddr) -> Vec<u8> {
    let family = if source.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let mut text = Vec::with_capacity(72);
    text.extend(72u32.to_ne_bytes());
    text.extend(BY_FAMILY.to_ne_bytes());
    text.extend(REQUEST.to_ne_bytes());
    text.extend([0; 8]);
    // The protocol, no extension, and every state.
    text.extend([family.as_raw() as u8, 6, 0, 0]);
    text.extend(u32::MAX.to_ne_bytes());
    text.extend(source.port().to_be_bytes());
    text.extend(destination.port().to_be_bytes());
    for address in [source, destination] {
        let mut words = [0; 16];
        match address.ip() {
            IpAddr::V4(ip) => words[..4].copy_from_slice(&ip.octets()),
            IpAddr::V6(ip) => words = ip.octets(),
        }
        text.extend(words);
    }
    // Any interface, and no cookie.
    text.extend(0u32.to_ne_bytes());
    text.extend([0xff; 8]);
    text
}

/// The socket's user in the kernel's answer. A closed socket has none, and the kernel then writes root's number.
fn owner(answer: &[u8]) -> Option<u32> {
    let kind = u16::from_ne_bytes(answer.get(4..6)?.try_into().ok()?);
    let word = |at: usize| Some(u32::from_ne_bytes(answer.get(at..at + 4)?.try_into().ok()?));
    let is_owned = kind == BY_FAMILY && OWNED.contains(answer.get(STATE)?) && word(INODE)? != 0;
    is_owned.then(|| word(UID)).flatten()
}

fn network(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(_) => ip,
        IpAddr::V6(ip) => {
            let [a, b, c, d, ..] = ip.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};

    #[test]
    fn the_kernel_names_the_user_at_the_other_end_and_nobody_for_a_closed_one() {
        let me = rustix::process::geteuid().as_raw();
        let lookup = PeerLookup::new();
        for address in ["127.0.0.1:0", "[::1]:0", "[::]:0"] {
            let Ok(listener) = TcpListener::bind(address) else { continue };
            let port = listener.local_addr().unwrap().port();
            let host = if address.starts_with("[::1") { "[::1]" } else { "127.0.0.1" };
            let client = TcpStream::connect(format!("{host}:{port}")).unwrap();
            let (served, remote) = listener.accept().unwrap();
            let local = served.local_addr().unwrap();
            assert_eq!(lookup.of(local, remote), TcpPeer::User(me), "{address}");
            drop(client);
            assert_eq!(lookup.of(local, remote), TcpPeer::Unknown, "{address}: closed");
        }
    }

    #[test]
    fn another_host_is_its_address_and_of_ipv6_its_network() {
        let lookup = PeerLookup(None);
        let of = |remote: &str| lookup.of("[::ffff:10.0.0.1]:9478".parse().unwrap(), remote.parse().unwrap());
        assert_eq!(of("[::ffff:10.0.0.2]:5000"), TcpPeer::Address("10.0.0.2".parse().unwrap()));
        assert_eq!(of("[2001:db8:1:2:3:4:5:6]:5000"), TcpPeer::Address("2001:db8:1:2::".parse().unwrap()));
        assert_eq!(of("[::ffff:10.0.0.1]:5000"), TcpPeer::Unknown, "this host, and no kernel to ask");
    }

    #[test]
    fn answers_that_are_cut_or_errors_name_nobody() {
        let whole = {
            let mut answer = vec![0; 124];
            answer[4..6].copy_from_slice(&BY_FAMILY.to_ne_bytes());
            answer[STATE] = 1;
            answer[UID] = 7;
            answer[INODE] = 1;
            answer
        };
        assert_eq!(owner(&whole), Some(7));
        assert!((0..INODE + 4).all(|n| owner(&whole[..n]).is_none()));
        let changed = |at: usize, to: u8| [&whole[..at], &[to], &whole[at + 1..]].concat();
        assert_eq!(owner(&changed(4, 2)), None, "an error");
        assert_eq!(owner(&changed(STATE, 6)), None, "TIME_WAIT");
        assert_eq!(owner(&changed(INODE, 0)), None, "an orphan");
    }
}
