//! The directory of the segment: the one that the user named, `/dev/shm/ringwatch-UID`, or one beside it.
//!
//! `/dev/shm` is everybody's, so somebody else may have made `ringwatch-UID` first, or a file or a link of that name. The
//! segment then goes to `ringwatch-UID-RANDOM`, which nobody can foresee. All processes of a user share one such
//! directory: readers look into few of one user.

use crate::runtime::log::{Log, Message};
use crate::runtime::process::Identity;
use crate::runtime::segment_name::Text;
use crate::runtime::settings::Settings;
use crate::runtime::sys::{self, Fd};
use core::ffi::CStr;

/// Length of `RANDOM`, in hexadecimal digits.
const DIGITS: usize = 16;
/// Names of `/dev/shm`, and of these names like ours, that are looked at: somebody may have made millions.
const NAMES_MAX: u32 = 65_536;
const ALIKE_MAX: u32 = 4_096;

/// A directory's name: `ringwatch-`, a user and a random number.
type Name = Text<64>;

/// Opens the directory, and makes it where it is not there.
pub(crate) fn open(settings: &Settings, identity: &Identity, log: &Log) -> Result<Fd, Message> {
    if let Some(dir) = settings.dir {
        let opened = if sys::make_dir(dir) { sys::open(dir, sys::DIRECTORY) } else { None };
        return opened.ok_or(Message::NoDirectory);
    }
    let shm = sys::open(c"/dev/shm", sys::DIRECTORY).ok_or(Message::NoDirectory)?;
    let mut name = Name::new();
    name.push(b"ringwatch-").push_number(u64::from(identity.uid), 10);
    if !sys::make_dir_at(&shm, name.as_c()) && !sys::exists() {
        return Err(Message::NoDirectory);
    }
    if let Some((dir, _)) = own(&shm, name.as_c(), identity.uid) {
        return Ok(dir);
    }
    log.say(Message::DirectoryOwner);
    name.push(b"-");
    beside(&shm, &name, identity).ok_or(Message::NoDirectory)
}

/// The user's directory beside the default one, whose names begin with `prefix`.
fn beside(shm: &Fd, prefix: &Name, identity: &Identity) -> Option<Fd> {
    if let Some(oldest) = oldest(shm, prefix, identity.uid) {
        return Some(oldest.dir);
    }
    let mut name = Name::new();
    name.push(prefix.as_c().to_bytes()).push_digits(identity.nonce);
    if !sys::make_dir_at(shm, name.as_c()) {
        return None;
    }
    // Of processes that begin together each makes one. The first one made is older than all others, and so seen by all.
    let oldest = oldest(shm, prefix, identity.uid)?;
    if oldest.name.as_c() != name.as_c() {
        sys::remove_dir_at(shm, name.as_c());
    }
    Some(oldest.dir)
}

struct Oldest {
    name: Name,
    inode: u64,
    dir: Fd,
}

/// The first one that was made: tmpfs numbers its files in their order.
fn oldest(shm: &Fd, prefix: &Name, uid: u32) -> Option<Oldest> {
    let prefix = prefix.as_c().to_bytes();
    let (mut oldest, mut names, mut alike) = (None::<Oldest>, 0u32, 0u32);
    // A second descriptor, since each list has a place of its own.
    let list = sys::open(c"/dev/shm", sys::DIRECTORY)?;
    sys::names(&list, |name| {
        names += 1;
        let is_alike = name.to_bytes().strip_prefix(prefix).is_some_and(is_random);
        if is_alike {
            alike += 1;
            if let Some((dir, inode)) = own(shm, name, uid)
                && oldest.as_ref().is_none_or(|o| inode < o.inode)
            {
                let mut text = Name::new();
                text.push(name.to_bytes());
                oldest = Some(Oldest { name: text, inode, dir });
            }
        }
        names < NAMES_MAX && alike < ALIKE_MAX
    });
    oldest
}

/// Opens a directory of a user, no link, with the number of its inode.
fn own(shm: &Fd, name: &CStr, uid: u32) -> Option<(Fd, u64)> {
    let dir = sys::open_dir_at(shm, name)?;
    let facts = sys::facts(&dir)?;
    if facts.uid == uid { Some((dir, facts.inode)) } else { None }
}

fn is_random(text: &[u8]) -> bool {
    text.len() == DIGITS && text.iter().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_written_as_they_are_read() {
        for n in [0, 1, 0x0123_4567_89ab_cdef, u64::MAX] {
            let mut text = Name::new();
            text.push_digits(n);
            assert!(is_random(text.as_c().to_bytes()), "{:?}", text.as_c());
            assert_eq!(u64::from_str_radix(text.as_c().to_str().unwrap(), 16), Ok(n));
        }
        for other in [&b""[..], b"0123456789abcde", b"0123456789ABCDEF", b"0123456789abcdef0"] {
            assert!(!is_random(other));
        }
    }
}
