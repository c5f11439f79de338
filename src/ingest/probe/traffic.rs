//! Packets between this process and a probe: a message of any length in parts, and descriptors beside the first one.

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

/// The longest packet, in bytes.
const PART: usize = 32 << 10;
/// The longest message, in bytes: 4,096 names of 255 bytes take 2 MiB at most.
const MESSAGE_MAX: usize = 8 << 20;
/// Descriptors of one message. The kernel lets 253 pass.
pub(super) const DESCRIPTORS_MAX: usize = 240;

/// Sends a message, and descriptors with it.
pub(super) fn send(
    socket: BorrowedFd<'_>,
    message: &impl Serialize,
    fds: &[BorrowedFd<'_>],
) -> std::io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    let mut head = (bytes.len() as u64).to_le_bytes().to_vec();
    let (first, rest) = bytes.split_at(bytes.len().min(PART - head.len()));
    head.extend_from_slice(first);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOMANYREFS.into());
    }
    sendmsg(socket, &[IoSlice::new(&head)], &mut control, SendFlags::NOSIGNAL)?;
    for part in rest.chunks(PART) {
        rustix::net::send(socket, part, SendFlags::NOSIGNAL)?;
    }
    Ok(())
}

/// A message as it came.
#[derive(Debug)]
pub(super) struct Received<T> {
    pub(super) message: T,
    /// Fewer than were sent where this process had no room for all of them.
    pub(super) fds: Vec<OwnedFd>,
}

/// Receives a message; `None` when the other side is gone. `wait` is called before each packet.
pub(super) fn receive<T: DeserializeOwned>(
    socket: BorrowedFd<'_>,
    mut wait: impl FnMut() -> Result<(), Errno>,
) -> std::io::Result<Option<Received<T>>> {
    let mut part = vec![0; PART];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    wait()?;
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut part)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    if got.bytes == 0 {
        return Ok(None);
    }
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = message {
            fds.extend(some);
        }
    }
    let broken = || std::io::Error::from(Errno::BADMSG);
    let (head, first) = part.get(..got.bytes).and_then(|p| p.split_first_chunk()).ok_or_else(broken)?;
    let length = usize::try_from(u64::from_le_bytes(*head)).map_err(|_| broken())?;
    if length > MESSAGE_MAX {
        return Err(broken());
    }
    let mut bytes = first.to_vec();
    while bytes.len() < length {
        wait()?;
        let n = rustix::net::recv(socket, &mut part[..], RecvFlags::empty())?.0;
        bytes.extend_from_slice(part.get(..n).filter(|p| !p.is_empty()).ok_or_else(broken)?);
    }
    let message = serde_json::from_slice(&bytes)?;
    Ok(Some(Received { message, fds }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::os::fd::AsFd;

    #[test]
    fn long_messages_and_descriptors_come_through_whole() {
        let pair = || socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
        let (a, b) = pair().expect("a pair");
        let null = std::fs::File::open("/dev/null").expect("opens");
        for length in [0, 1, PART - 10, PART, 5 * PART + 3] {
            let text = "x".repeat(length);
            let (sent, got) = std::thread::scope(|s| {
                let sent = s.spawn(|| send(a.as_fd(), &text, &[null.as_fd(), null.as_fd()]));
                let got = receive::<String>(b.as_fd(), || Ok(())).expect("received").expect("there");
                (sent.join().expect("no panic"), got)
            });
            sent.expect("sent");
            assert_eq!((got.message.len(), got.fds.len()), (length, 2));
        }
        drop(a);
        assert!(receive::<String>(b.as_fd(), || Ok(())).expect("an end").is_none());
    }
}
