//! The questions to a probe and its answers: JSON, beside the descriptors of a packet.

use crate::ingest::directory::{Failure, FileId, Folder};
use crate::ingest::lock::Lock;
use crate::ingest::process_reading::Reading;
use crate::ingest::stacks::StackKind;
use serde::de::{Error, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::ffi::{OsStr, OsString};
use std::fmt;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

/// A name or a path, which need not be UTF-8. In JSON each byte is the character with its number.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(in crate::ingest) struct Bytes(pub(in crate::ingest) OsString);

impl<T: AsRef<OsStr> + ?Sized> From<&T> for Bytes {
    fn from(name: &T) -> Self {
        Bytes(name.as_ref().to_owned())
    }
}

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        out.serialize_str(&self.0.as_bytes().iter().copied().map(char::from).collect::<String>())
    }
}

impl<'de> Deserialize<'de> for Bytes {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct Text;
        impl Visitor<'_> for Text {
            type Value = Bytes;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text whose characters are bytes")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Bytes, E> {
                let bytes: Result<Vec<u8>, _> = text.chars().map(u8::try_from).collect();
                bytes.map(|b| Bytes(OsString::from_vec(b))).map_err(E::custom)
            }
        }
        from.deserialize_str(Text)
    }
}

/// One thing that a probe does. Where a directory is needed, its descriptor comes with it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(in crate::ingest) enum Task {
    /// Opens users' directories in a /dev/shm, except those that are known: in that of a container, whose
    /// descriptor comes with it, or in the host's own.
    OpenUsers {
        /// The container's path, for people; absent for the host's own.
        container: Option<Bytes>,
        known: Vec<Folder>,
        /// The turn of too many names.
        turn: u64,
    },
    /// Opens a directory that the settings name.
    OpenNamed { path: Bytes },
    /// Opens the /dev/shm of a process's mount namespace.
    OpenRoot { pid: u32, namespace: u64 },
    /// Lists the segments in a directory.
    List { folder: Folder },
    /// Opens a segment, and finds its process.
    OpenSegment { folder: Folder, name: Bytes },
    /// Removes the oldest segments of dead processes in a directory.
    Reap {
        folder: Folder,
        keep_bytes: u64,
        keep_for_s: Option<u64>,
        /// Users whose files are left alone.
        spared: Vec<u32>,
    },
    /// Writes the words of a segment's header by which a reader requests detail of a communicator.
    RequestDetail {
        folder: Folder,
        name: Bytes,
        file: FileId,
        /// Indices in the header, and values.
        words: Vec<(u64, u64)>,
    },
    /// Lists the processes of the host.
    ListProcesses,
    /// Finds the mount namespace of a process.
    FindNamespace { pid: u32 },
    /// Reads a process's state and load.
    ReadProcess { pid: u32, start_ticks: u64 },
    /// Finds where a process's threads are in the kernel.
    FindThreads { pid: u32 },
    /// Does nothing for so long.
    #[cfg(test)]
    Sleep { ms: u64 },
    /// Reads a process's stack with a tool, which takes seconds: for a probe of its own.
    ReadStack { pid: u32, owner: u32, kind: StackKind },
}

/// The outcome of a [`Task`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(in crate::ingest) enum Outcome {
    /// Nothing is to be told.
    Done,
    /// The users' directories in a /dev/shm.
    Users(Users),
    /// A directory that was named, whose descriptor comes with it.
    Folder(Folder),
    /// The identity of the /dev/shm whose descriptor comes with it.
    Directory(FileId),
    /// The names of segments and their owners, where these are known, and whether there are more than are looked at.
    Names(Vec<(Bytes, Option<u32>)>, bool),
    /// A segment, whose descriptor comes with it, and a pidfd of its process where there is one.
    Segment(OpenedSegment),
    /// The names of segments that were removed.
    Removed(Vec<Bytes>),
    /// Pids, and the users of the processes.
    Processes(Vec<(u32, u32)>),
    Namespace(u64),
    Reading(Reading),
    /// Frames or places, as texts.
    Texts(Vec<String>),
    /// Why it could not be done, and whose file it is about, where that is known.
    Failed(Failure, Option<u32>),
}

/// The users' directories in a /dev/shm.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(in crate::ingest) struct Users {
    /// The identity of the /dev/shm itself.
    pub(in crate::ingest) shm: FileId,
    /// The folders that were known before and are there.
    pub(in crate::ingest) known: Vec<FileId>,
    /// The folders that were opened now; descriptors come in this order.
    pub(in crate::ingest) opened: Vec<Folder>,
    pub(in crate::ingest) refused: Vec<RefusedFolder>,
    /// There are more, which the next request opens.
    pub(in crate::ingest) more: bool,
}

/// A directory that is not read, or not as its name suggests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(in crate::ingest) struct RefusedFolder {
    pub(in crate::ingest) path: Bytes,
    /// The user who misses something by that, where it is one.
    pub(in crate::ingest) owner: Option<u32>,
    pub(in crate::ingest) why: Failure,
}

/// A segment's file and its process, as a probe found them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(in crate::ingest) struct OpenedSegment {
    pub(in crate::ingest) facts: FileFacts,
    pub(in crate::ingest) lock: Lock,
    pub(in crate::ingest) life: Option<FoundLife>,
    /// The list of its process's control groups, as the kernel writes it.
    pub(in crate::ingest) control_groups: String,
}

/// How it is known that a segment's process lives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::ingest) enum FoundLife {
    /// It is the process of this pid and start time.
    Process(u32, u64),
    /// It holds the segment's lock, and is not seen.
    Lock,
}

/// The kernel's facts about a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::ingest) struct FileFacts {
    pub(in crate::ingest) id: FileId,
    pub(in crate::ingest) owner: u32,
    pub(in crate::ingest) bytes: u64,
    pub(in crate::ingest) blocks: i64,
    /// When it was last written, in ns since 1970.
    pub(in crate::ingest) written_ns: u64,
    pub(in crate::ingest) is_on_tmpfs: bool,
}

/// A packet of tasks.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Request {
    /// Host monotonic ns.
    pub(super) at_ns: u64,
    /// Each with whether a descriptor comes with it.
    pub(super) tasks: Vec<(Task, bool)>,
}

/// The outcomes of the first tasks of a packet: the rest was not begun, since these took long.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Answer {
    pub(super) outcomes: Vec<Timed>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Timed {
    pub(super) outcome: Outcome,
    pub(super) took_us: u64,
    /// How many of the descriptors are of this one.
    pub(super) descriptors: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_of_a_name_comes_through() {
        let all = Bytes(OsString::from_vec((1..=255).collect()));
        let text = serde_json::to_string(&all).expect("JSON");
        assert_eq!(serde_json::from_str::<Bytes>(&text).expect("a name"), all);
        assert!(serde_json::from_str::<Bytes>("\"\u{100}\"").is_err());
    }
}
