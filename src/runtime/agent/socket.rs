//! The Unix socket: screens and findings for whoever may see them.
//!
//! One line of JSON is the question, lines of JSON are the answers. Who asks is known by the kernel's word
//! (peer credentials): root, the agent's own user and those named in the settings see every job, others their own.
//! A conversation ends when the asker closes its end, so an asker of several answers keeps it open for writing too.

use super::peer;
use super::places::{Place, Places, is_privileged};
use crate::config::SocketSettings;
use crate::model::Snapshot;
use crate::runtime::daemon::{self, Asked, Closed, Connections, Error, Lane, StateSender, is_exhausted};
use serde::{Deserialize, Serialize};
use std::io::{Read as _, Write as _};
use std::ops::RangeInclusive;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncBufRead, AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::unix::OwnedWriteHalf;
use tokio::net::{UnixListener, UnixStream};

/// The version of what is spoken.
pub const PROTOCOL: u32 = 1;
/// The longest question, in bytes.
const QUESTION: u64 = 4096;
/// The longest that a question may take to come, and an answer to be taken.
const PATIENCE: Duration = Duration::from_secs(10);
/// The limits of [`Question::every_ms`].
const EVERY_MS: RangeInclusive<u64> = 100..=60_000;

/// A question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Question {
    /// [`PROTOCOL`].
    pub ringwatch: u32,
    /// The wanted answer.
    pub want: Want,
    /// Time between two snapshots in ms, 100 to 60,000; one alone where it is left out.
    pub every_ms: Option<u64>,
}

/// The kinds of answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Want {
    /// Everything for a screen, findings too.
    Snapshot,
}

/// One line of an answer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Answer {
    /// The wanted snapshot.
    Snapshot(Box<Snapshot>),
    /// Why there is none.
    Refused(String),
}

/// The socket, open.
#[derive(Debug)]
pub(super) struct Gate {
    listener: UnixListener,
    path: PathBuf,
    settings: Arc<SocketSettings>,
}

impl Gate {
    /// Opens it; `None` where none is wanted.
    pub(super) async fn bind(settings: &SocketSettings) -> Result<Option<Self>, Error> {
        let Some(path) = settings.path.clone() else { return Ok(None) };
        let wrong = |why: String| Error::Socket { path: path.clone(), why };
        if let Some(dir) = path.parent() {
            std::fs::create_dir_all(dir).map_err(|e| {
                wrong(format!("{e}; name another place (socket.path), or null for no socket"))
            })?;
        }
        // One that a dead agent left is in the way; one that is served is not taken from its owner.
        if let Ok(meta) = std::fs::symlink_metadata(&path) {
            if !meta.file_type().is_socket() {
                return Err(wrong("there is something that is no socket".to_owned()));
            }
            if UnixStream::connect(&path).await.is_ok() {
                return Err(wrong("another agent serves it".to_owned()));
            }
            std::fs::remove_file(&path).map_err(|e| wrong(e.to_string()))?;
        }
        let listener = UnixListener::bind(&path).map_err(|e| wrong(e.to_string()))?;
        // Everybody may ask; what they get is decided by who they are.
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o666))
            .map_err(|e| wrong(e.to_string()))?;
        Ok(Some(Gate { listener, path, settings: Arc::new(settings.clone()) }))
    }

    /// Serves until it is dropped, at most so many connections at once.
    #[expect(clippy::disallowed_methods, reason = "here is where tasks are spawned")]
    pub(super) async fn serve(self, state: StateSender, most: usize, connections: Arc<Connections>) {
        let places = Places::new(most);
        // Answers of users are made one at a time: before one is made nobody knows how long it is.
        let turn = Arc::new(tokio::sync::Mutex::new(()));
        loop {
            let stream = match self.listener.accept().await {
                Ok((stream, _)) => stream,
                Err(e) => {
                    if is_exhausted(&e) {
                        connections.closed(Closed::SocketExhausted);
                    }
                    tokio::time::sleep(Duration::from_millis(100)).await;
                    continue;
                }
            };
            let Ok(asks) = stream.peer_cred() else { continue };
            let place = match places.take(asks.uid()) {
                Ok(place) => place,
                Err((why, text)) => {
                    connections.closed(why);
                    refuse(stream, text);
                    continue;
                }
            };
            let (state, settings, turn) = (state.clone(), Arc::clone(&self.settings), Arc::clone(&turn));
            let connections = Arc::clone(&connections);
            tokio::spawn(async move {
                let ended = converse(stream, &state, &settings, (&place, &turn)).await;
                // Who goes away in the middle of an answer has had enough of it.
                if ended.is_err_and(|e| e.kind() == std::io::ErrorKind::TimedOut) {
                    connections.closed(Closed::SlowAsker);
                }
                drop(place);
            });
        }
    }
}

/// Reports to an asker that has no place why, without waiting for it.
fn refuse(stream: UnixStream, why: String) {
    let (Ok(mut stream), Ok(mut line)) = (stream.into_std(), serde_json::to_vec(&Answer::Refused(why)))
    else {
        return;
    };
    line.push(b'\n');
    // A question that nobody has read would reset the connection, and the asker lose the answer.
    drop(stream.read(&mut [0; QUESTION as usize]));
    drop(stream.write(&line));
}

impl Drop for Gate {
    fn drop(&mut self) {
        drop(std::fs::remove_file(&self.path));
    }
}

async fn converse(
    stream: UnixStream,
    state: &StateSender,
    settings: &SocketSettings,
    (place, turn): (&Place, &tokio::sync::Mutex<()>),
) -> std::io::Result<()> {
    let asks = stream.peer_cred()?;
    let mut groups = peer::groups(&stream);
    groups.push(asks.gid());
    let sees_all = sees_all(asks.uid(), &groups, settings);
    let (read, mut write) = stream.into_split();
    let mut line = String::new();
    let mut read = BufReader::new(read.take(QUESTION));
    tokio::time::timeout(PATIENCE, read.read_line(&mut line)).await??;
    let question = match serde_json::from_str::<Question>(&line) {
        Ok(q) if q.ringwatch == PROTOCOL => match q.every_ms.filter(|ms| !EVERY_MS.contains(ms)) {
            None => q,
            Some(ms) => {
                let (least, most) = (EVERY_MS.start(), EVERY_MS.end());
                let why = format!("every_ms is {ms}, and may be {least} to {most}");
                return say(&mut write, &Answer::Refused(why)).await;
            }
        },
        Ok(q) => {
            let why = format!("this agent speaks version {PROTOCOL}, and you version {}", q.ringwatch);
            return say(&mut write, &Answer::Refused(why)).await;
        }
        Err(e) => return say(&mut write, &Answer::Refused(format!("not a question: {e}"))).await,
    };
    loop {
        let uid = (!sees_all).then_some(asks.uid());
        let Want::Snapshot = question.want;
        let lane = if sees_all { Lane::Trusted } else { Lane::Public };
        let mine = if sees_all { None } else { Some(turn.lock().await) };
        let answer = match daemon::ask(state, lane, |reply| Asked::Snapshot { uid, reply }).await {
            Some(s) => Answer::Snapshot(s),
            None => Answer::Refused("the agent is busy".to_owned()),
        };
        let line = line_of(&answer)?;
        let room = if sees_all { Ok(None) } else { place.room(line.len()).map(Some) };
        match room {
            Ok(_room) => {
                drop((mine, answer));
                send(&mut write, &line).await?;
            }
            Err(why) => return say(&mut write, &Answer::Refused(why)).await,
        }
        let Some(every) = question.every_ms else { return Ok(()) };
        tokio::select! {
            () = tokio::time::sleep(Duration::from_millis(every)) => {}
            () = hung_up(&mut read) => return Ok(()),
        }
    }
}

/// Ends when the asker has closed its end, or sends more than a question.
async fn hung_up(read: &mut (impl AsyncBufRead + Unpin)) {
    while let Ok(more) = read.fill_buf().await {
        let n = more.len();
        if n == 0 {
            return;
        }
        read.consume(n);
    }
}

fn sees_all(uid: u32, groups: &[u32], settings: &SocketSettings) -> bool {
    let member = groups.iter().any(|g| settings.see_all_gids.contains(g));
    is_privileged(uid) || settings.see_all_uids.contains(&uid) || member
}

fn line_of(answer: &Answer) -> std::io::Result<Vec<u8>> {
    let mut line = serde_json::to_vec(answer)?;
    line.push(b'\n');
    Ok(line)
}

async fn say(write: &mut OwnedWriteHalf, answer: &Answer) -> std::io::Result<()> {
    send(write, &line_of(answer)?).await
}

async fn send(write: &mut OwnedWriteHalf, line: &[u8]) -> std::io::Result<()> {
    tokio::time::timeout(PATIENCE, write.write_all(line)).await?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_sees_what_is_a_matter_of_who_asks() {
        let own = rustix::process::geteuid().as_raw();
        let s = SocketSettings { see_all_uids: vec![7], see_all_gids: vec![8], ..SocketSettings::default() };
        assert!([0, own, 7].iter().all(|uid| sees_all(*uid, &[99], &s)));
        assert!(sees_all(9, &[8], &s) && sees_all(9, &[99, 8, 100], &s), "by any of its groups");
        assert!(!sees_all(own.wrapping_add(10), &[99, 100], &s));
    }

    #[test]
    fn questions_and_answers_are_lines() {
        let q = Question { ringwatch: 1, want: Want::Snapshot, every_ms: Some(250) };
        let text = serde_json::to_string(&q).expect("text");
        assert_eq!(text, r#"{"ringwatch":1,"want":"snapshot","every_ms":250}"#);
        let a = Answer::Refused("no".to_owned());
        assert_eq!(serde_json::to_string(&a).expect("text"), r#"{"refused":"no"}"#);
    }
}
