//! Sources that could not be read, and why: a verdict is about everything only where this list is empty.

use serde::{Deserialize, Serialize};

/// Why a segment, or a directory of segments, is not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum UnreadReason {
    /// This user may not read it.
    Permission,
    /// Another format version than this release reads.
    FormatVersion,
    /// The file is no segment.
    NotASegment,
    /// The process was killed while it opened its segment.
    Incomplete,
    /// The file was shortened or overwritten while it was read.
    Damaged,
    /// The file and its directory belong to different users.
    ForeignOwner,
    /// It says to be a process whose segment is another file, which is read.
    Duplicate,
    /// This process has no file descriptor left.
    Descriptors,
    /// There is more of it than one process, one user or the node may have.
    Limits,
    /// The container's file system does not answer.
    Unresponsive,
    /// The system call failed in another way.
    Io,
}

impl UnreadReason {
    /// Every reason.
    pub const ALL: [UnreadReason; 11] = [
        UnreadReason::Permission,
        UnreadReason::FormatVersion,
        UnreadReason::NotASegment,
        UnreadReason::Incomplete,
        UnreadReason::Damaged,
        UnreadReason::ForeignOwner,
        UnreadReason::Duplicate,
        UnreadReason::Descriptors,
        UnreadReason::Limits,
        UnreadReason::Unresponsive,
        UnreadReason::Io,
    ];

    /// The reason as metrics and JSON name it.
    pub const fn as_str(self) -> &'static str {
        match self {
            UnreadReason::Permission => "permission",
            UnreadReason::FormatVersion => "format-version",
            UnreadReason::NotASegment => "not-a-segment",
            UnreadReason::Incomplete => "incomplete",
            UnreadReason::Damaged => "damaged",
            UnreadReason::ForeignOwner => "foreign-owner",
            UnreadReason::Duplicate => "duplicate",
            UnreadReason::Descriptors => "descriptors",
            UnreadReason::Limits => "limits",
            UnreadReason::Unresponsive => "unresponsive",
            UnreadReason::Io => "io",
        }
    }
}

/// One segment, or one directory of segments, that is not read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unread {
    /// Its path, without characters that could steer a terminal.
    pub path: String,
    /// Why.
    pub reason: UnreadReason,
    /// The event, and what to do about it.
    pub detail: String,
    /// The user who owns it, where that is known.
    pub owner: Option<u32>,
}

impl std::fmt::Display for Unread {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.path, self.detail)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reasons_have_one_name_everywhere() {
        for reason in UnreadReason::ALL {
            assert_eq!(serde_json::to_string(&reason).expect("text"), format!("{:?}", reason.as_str()));
        }
    }
}
