//! The parties that may be asked about: users, and what belongs to root or to nobody, by how they answered before.

use super::message::Bytes;
use crate::ingest::directory::FileId;
use crate::model::{Unread, UnreadReason};
use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

/// Abandoned probes that are not gone: with so many, users who never answered are not asked about.
const STUCK_MAX: usize = 8;
/// With so many, no user is but root.
const STUCK_AT_ALL_MAX: usize = 16;
/// An unresponsive user is asked about again after this, twice as long each time.
const BACK_OFF: Duration = Duration::from_secs(1);
const BACK_OFF_MAX: Duration = Duration::from_secs(64);
/// A user who answered for so long begins with the first of these times again.
const FORGIVEN: Duration = Duration::from_secs(600);
/// A task that takes longer is slow: its user waits ten times as long for the next one.
const SLOW: Duration = Duration::from_millis(20);
const SLOW_SHARE: u32 = 10;
/// Users who never answered, or not the last time, have one in so many parts of the time together.
const STRANGERS_SHARE: u32 = 4;
/// So many parties have to take long for that, each within so much time of the one before.
const STRANGERS_MAX: u32 = 3;
const FEW: Duration = Duration::from_secs(60);
/// Parties that are remembered, and for how long one counts that was left out.
const RECORDS_MAX: usize = 4096;
const LEFT_OUT: Duration = Duration::from_secs(10);

/// The subject of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::ingest) struct Subject {
    /// The user who can keep it from being done; none where that is the administrator.
    pub(in crate::ingest) user: Option<u32>,
    pub(in crate::ingest) object: Object,
}

/// The file or process that does or does not answer, by itself where it belongs to root or to nobody.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(in crate::ingest) enum Object {
    /// The host's own /dev/shm, in which everybody may rename and remove files of theirs.
    HostShm,
    /// The host's list of processes.
    Processes,
    Path(Bytes),
    Directory(FileId, Bytes),
    File(FileId, Bytes),
    MountNamespace(u64),
    Process(u32),
}

impl fmt::Display for Object {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path = |path: &Bytes| path.0.display().to_string().escape_debug().to_string();
        match self {
            Object::HostShm => f.write_str("/dev/shm"),
            Object::Processes => f.write_str("/proc"),
            Object::Path(p) | Object::Directory(_, p) | Object::File(_, p) => f.write_str(&path(p)),
            Object::MountNamespace(id) => write!(f, "mount namespace {id}"),
            Object::Process(pid) => write!(f, "process {pid}"),
        }
    }
}

/// The party that is unresponsive when a subject does not answer.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Party {
    User(u32),
    Object(Object),
}

impl Subject {
    /// True where no user but root can keep it from being done.
    pub(super) fn is_of_root(&self) -> bool {
        matches!(self.user, None | Some(0))
    }

    /// The same, as that of a user where it is nobody's.
    pub(super) fn or_of(&self, user: Option<u32>) -> Self {
        Subject { user: self.user.or(user), object: self.object.clone() }
    }

    fn party(&self) -> Party {
        match self.user {
            // Root runs what others made as well: containers.
            None | Some(0) => Party::Object(self.object.clone()),
            Some(uid) => Party::User(uid),
        }
    }
}

/// Why nothing is known of a task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::ingest) enum Unanswered {
    /// Its user does not answer, or too many others do not: [`super::Pool::unread`] says so.
    Unresponsive,
    /// Its user was slow, and waits for the others.
    Later,
    /// There is no probe.
    NoProbe,
}

/// The state of a party.
#[derive(Debug)]
struct Record {
    has_answered: bool,
    /// The object that did not answer the last time.
    silent: Option<Object>,
    /// The number of the probe that waits for it.
    stuck: Option<u64>,
    failures: u32,
    failed_at: Option<Instant>,
    not_before: Option<Instant>,
    left_out_at: Option<Instant>,
    used_at: Instant,
}

impl Record {
    fn new(now: Instant) -> Self {
        Record {
            has_answered: false,
            silent: None,
            stuck: None,
            failures: 0,
            failed_at: None,
            not_before: None,
            left_out_at: None,
            used_at: now,
        }
    }

    /// It never answered, or not the last time.
    fn is_stranger(&self) -> bool {
        !self.has_answered || self.silent.is_some()
    }

    fn is_left_out(&self, now: Instant) -> bool {
        self.left_out_at.is_some_and(|t| now.saturating_duration_since(t) < LEFT_OUT)
    }
}

/// The probes that are stuck, by number, and with whom.
#[derive(Debug, Clone, Copy)]
pub(super) struct StuckWith {
    pub(super) number: u64,
    pub(super) is_of_root: bool,
}

/// All parties that something was asked about.
#[derive(Debug, Default)]
pub(super) struct Parties {
    records: HashMap<Party, Record>,
    /// When strangers have their next turn.
    strangers_at: Option<Instant>,
    /// Strangers who took long, one after the other, and when the last one did.
    slow_strangers: u32,
    slow_stranger_at: Option<Instant>,
}

impl Parties {
    /// Returns whether a task about a subject may be done now, while these probes are stuck.
    pub(super) fn may_ask(
        &mut self,
        subject: &Subject,
        stuck: &[StuckWith],
        now: Instant,
    ) -> Result<(), Unanswered> {
        self.forget_some(now);
        let party = subject.party();
        let record = self.records.entry(party).or_insert_with(|| Record::new(now));
        record.used_at = now;
        if record.stuck.is_some_and(|number| stuck.iter().any(|s| s.number == number)) {
            return Err(Unanswered::Unresponsive);
        }
        if record.not_before.is_some_and(|t| now < t) {
            return Err(if record.silent.is_some() { Unanswered::Unresponsive } else { Unanswered::Later });
        }
        let is_stranger = record.is_stranger();
        let is_root = subject.is_of_root();
        let of_root = stuck.iter().filter(|s| s.is_of_root).count();
        let is_left_out = match is_root {
            true => is_stranger && of_root >= STUCK_MAX,
            // Many users may be one person's: root is served whatever they do.
            false => {
                let of_users = stuck.len() - of_root;
                is_stranger && of_users >= STUCK_MAX || of_users >= STUCK_AT_ALL_MAX
            }
        };
        if is_left_out {
            record.left_out_at = Some(now);
            return Err(Unanswered::Unresponsive);
        }
        record.left_out_at = None;
        if is_stranger && !is_root && self.strangers_at.is_some_and(|t| now < t) {
            return Err(if record.silent.is_some() { Unanswered::Unresponsive } else { Unanswered::Later });
        }
        Ok(())
    }

    /// A task about a subject was done, and took so long.
    pub(super) fn answered(&mut self, subject: &Subject, took: Duration, now: Instant) {
        let record = self.records.entry(subject.party()).or_insert_with(|| Record::new(now));
        let was_stranger = record.is_stranger();
        (record.has_answered, record.silent, record.stuck) = (true, None, None);
        record.not_before = None;
        if record.failed_at.is_some_and(|t| now.saturating_duration_since(t) >= FORGIVEN) {
            (record.failures, record.failed_at) = (0, None);
        }
        if took >= SLOW && !subject.is_of_root() {
            record.not_before = Some(now + took * SLOW_SHARE);
            if was_stranger {
                self.pace_strangers(took, now);
            }
        }
    }

    /// A probe is stuck with a subject, after so long.
    pub(super) fn failed(&mut self, subject: &Subject, number: u64, took: Duration, now: Instant) {
        let record = self.records.entry(subject.party()).or_insert_with(|| Record::new(now));
        let was_stranger = record.is_stranger();
        record.silent = Some(subject.object.clone());
        (record.stuck, record.failed_at) = (Some(number), Some(now));
        let back_off = BACK_OFF.saturating_mul(1 << record.failures.min(16)).min(BACK_OFF_MAX);
        record.failures = record.failures.saturating_add(1);
        record.not_before = Some(now + back_off);
        if was_stranger && !subject.is_of_root() {
            self.pace_strangers(took, now);
        }
    }

    /// A stranger took so long. A few cost little; many may be one person's.
    fn pace_strangers(&mut self, took: Duration, now: Instant) {
        let since = self.slow_stranger_at.replace(now).map(|t| now.saturating_duration_since(t));
        self.slow_strangers = if since.is_some_and(|t| t < FEW) { self.slow_strangers + 1 } else { 1 };
        if self.slow_strangers > STRANGERS_MAX {
            self.strangers_at = Some(now + took * (STRANGERS_SHARE - 1));
        }
    }

    /// A number by which parties that are served first come first: root, those that answered, and the others.
    pub(super) fn rank(&self, subject: &Subject) -> u8 {
        match self.records.get(&subject.party()) {
            _ if subject.is_of_root() => 0,
            Some(record) if !record.is_stranger() => 1,
            _ => 2,
        }
    }

    /// Users who do not answer.
    pub(super) fn silent_users(&self) -> Vec<u32> {
        let silent = self.records.iter().filter(|(_, record)| record.silent.is_some());
        let user = |party: &Party| if let Party::User(uid) = party { Some(*uid) } else { None };
        silent.filter_map(|(party, _)| user(party)).collect()
    }

    /// The parties that do not answer, or were left out.
    pub(super) fn unread(&self, now: Instant) -> Vec<Unread> {
        let mut unread: Vec<Unread> =
            self.records.iter().filter_map(|(party, record)| party.unread(record, now)).collect();
        unread.sort_by(|a, b| (a.owner, &a.path).cmp(&(b.owner, &b.path)));
        unread
    }

    /// Forgets who was not asked about for long, where there are too many.
    fn forget_some(&mut self, now: Instant) {
        if self.records.len() < RECORDS_MAX {
            return;
        }
        let is_kept = |r: &Record| r.silent.is_some() || r.is_left_out(now);
        let mut used: Vec<Instant> =
            self.records.values().filter(|r| !is_kept(r)).map(|r| r.used_at).collect();
        used.sort_unstable();
        let Some(middle) = used.get(used.len() / 2).copied() else {
            // All of them are silent: they may begin anew.
            self.records.clear();
            return;
        };
        self.records.retain(|_, r| is_kept(r) || r.used_at > middle);
    }
}

impl Party {
    fn unread(&self, record: &Record, now: Instant) -> Option<Unread> {
        let detail = match (&record.silent, self) {
            (Some(object), Party::User(uid)) => {
                format!("{object} does not answer; nothing of user {uid} is looked at until it does")
            }
            (Some(object), Party::Object(_)) => {
                format!("{object} does not answer, and is left alone until it does")
            }
            (None, _) if record.is_left_out(now) => {
                "not looked at: files or processes of too many others do not answer".to_owned()
            }
            _ => return None,
        };
        let (path, owner) = match self {
            Party::User(uid) => (format!("files and processes of user {uid}"), Some(*uid)),
            Party::Object(object) => (object.to_string(), None),
        };
        Some(Unread { path, reason: UnreadReason::Unresponsive, detail, owner })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn of(user: u32) -> Subject {
        Subject { user: Some(user), object: Object::Process(user) }
    }

    fn users(stuck: std::ops::Range<u64>) -> Vec<StuckWith> {
        stuck.map(|number| StuckWith { number, is_of_root: false }).collect()
    }

    /// One after the other, so that strangers are not paced.
    fn answers(parties: &mut Parties, user: u32, now: Instant) {
        assert_eq!(parties.may_ask(&of(user), &[], now), Ok(()));
        parties.answered(&of(user), MS, now);
    }

    #[test]
    fn a_user_is_unresponsive_until_the_probe_is_gone_and_for_a_while_after_that() {
        let (mut parties, now) = (Parties::default(), Instant::now());
        answers(&mut parties, 7, now);
        answers(&mut parties, 8, now);
        parties.failed(&of(7), 1, 400 * MS, now);
        let later = now + Duration::from_secs(3600);
        let stuck = users(1..2);
        assert_eq!(parties.may_ask(&of(7), &stuck, later), Err(Unanswered::Unresponsive));
        assert_eq!(parties.may_ask(&of(8), &stuck, now), Ok(()), "others are served at once");
        let unread = parties.unread(now);
        assert_eq!((unread.len(), unread[0].owner), (1, Some(7)));
        assert!(unread[0].detail.contains("process 7 does not answer"), "{unread:?}");
        assert_eq!(parties.may_ask(&of(7), &[], now + 999 * MS), Err(Unanswered::Unresponsive));
        assert_eq!(parties.may_ask(&of(7), &[], now + 1000 * MS), Ok(()));
        parties.failed(&of(7), 2, 400 * MS, now);
        assert_eq!(
            parties.may_ask(&of(7), &[], now + 1999 * MS),
            Err(Unanswered::Unresponsive),
            "twice as long"
        );
        assert_eq!(parties.may_ask(&of(7), &[], now + 2000 * MS), Ok(()));
        parties.answered(&of(7), MS, now + 2000 * MS);
        assert_eq!(parties.unread(now), []);
    }

    #[test]
    fn beyond_a_few_stuck_probes_only_those_who_answered_before_are_served() {
        let (mut parties, now) = (Parties::default(), Instant::now());
        answers(&mut parties, 7, now);
        let some = users(0..STUCK_MAX as u64);
        assert_eq!(parties.may_ask(&of(7), &some, now), Ok(()));
        assert_eq!(parties.may_ask(&of(8), &some, now), Err(Unanswered::Unresponsive));
        assert_eq!(parties.may_ask(&of(0), &some, now), Ok(()), "root is served whatever users do");
        let unread = parties.unread(now);
        assert_eq!(
            (unread.len(), unread[0].owner, unread[0].reason),
            (1, Some(8), UnreadReason::Unresponsive)
        );
        let many = users(0..STUCK_AT_ALL_MAX as u64);
        assert_eq!(parties.may_ask(&of(7), &many, now), Err(Unanswered::Unresponsive));
        assert_eq!(parties.may_ask(&of(0), &many, now), Ok(()));
        assert_eq!(parties.may_ask(&of(8), &[], now), Ok(()), "they are gone");
        assert!(parties.unread(now).iter().all(|u| u.owner != Some(8)));
    }

    #[test]
    fn what_root_runs_is_unresponsive_by_itself() {
        let (mut parties, now) = (Parties::default(), Instant::now());
        let container = |id| Subject { user: Some(0), object: Object::MountNamespace(id) };
        parties.failed(&container(1), 1, 400 * MS, now);
        let stuck = [StuckWith { number: 1, is_of_root: true }];
        assert_eq!(parties.may_ask(&container(1), &stuck, now), Err(Unanswered::Unresponsive));
        assert_eq!(parties.may_ask(&container(2), &stuck, now), Ok(()));
    }

    #[test]
    fn slow_users_and_strangers_have_their_share_of_the_time() {
        let (mut parties, now) = (Parties::default(), Instant::now());
        answers(&mut parties, 7, now);
        parties.answered(&of(7), 100 * MS, now);
        assert_eq!(parties.may_ask(&of(7), &[], now + 999 * MS), Err(Unanswered::Later));
        assert_eq!(parties.may_ask(&of(7), &[], now + 1000 * MS), Ok(()));
        answers(&mut parties, 9, now);
        for user in 20..20 + STRANGERS_MAX {
            parties.answered(&of(user), 100 * MS, now);
        }
        assert_eq!(parties.may_ask(&of(10), &[], now), Ok(()), "a few are no reason to wait");
        parties.answered(&of(8), 100 * MS, now);
        assert_eq!(parties.may_ask(&of(10), &[], now + 299 * MS), Err(Unanswered::Later), "another stranger");
        assert_eq!(parties.may_ask(&of(9), &[], now), Ok(()), "who answered is none");
        assert_eq!(parties.may_ask(&of(0), &[], now), Ok(()));
        assert_eq!(parties.may_ask(&of(10), &[], now + 300 * MS), Ok(()));
        assert!(parties.rank(&of(0)) < parties.rank(&of(9)) && parties.rank(&of(9)) < parties.rank(&of(10)));
    }

    #[test]
    fn parties_without_number_are_forgotten_and_the_silent_are_not() {
        let (mut parties, now) = (Parties::default(), Instant::now());
        parties.failed(&of(7), 1, 400 * MS, now);
        for user in 0..3 * RECORDS_MAX as u32 {
            let at = now + MS * user;
            parties.may_ask(&of(user + 100), &[], at).unwrap_or_default();
            parties.answered(&of(user + 100), MS, at);
        }
        assert!(parties.records.len() <= RECORDS_MAX && parties.unread(now).len() == 1);
    }
}
