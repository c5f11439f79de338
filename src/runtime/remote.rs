//! An agent, asked from outside over its socket.

use super::agent::{Answer, PROTOCOL, Question, Want};
use super::latest::Latest;
use crate::model::Snapshot;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

/// How long an agent may take to answer.
const PATIENCE: Duration = Duration::from_secs(10);
/// The pause before an agent that went away is asked again.
const AGAIN: Duration = Duration::from_secs(1);

/// Why an agent does not answer.
#[derive(Debug, thiserror::Error)]
pub enum Unreachable {
    /// Nobody is there.
    #[error("{}: {why}; is the agent running (`ringwatch agent`)?", path.display())]
    Connect {
        /// The socket.
        path: PathBuf,
        /// Why.
        why: io::Error,
    },
    /// It says no.
    #[error("{}: the agent says: {why}", path.display())]
    Refused {
        /// The socket.
        path: PathBuf,
        /// Its words.
        why: String,
    },
    /// It says something that is no answer.
    #[error("{}: no answer that this version understands: {why}", path.display())]
    Strange {
        /// The socket.
        path: PathBuf,
        /// The fault in it.
        why: String,
    },
}

/// One conversation.
#[derive(Debug)]
struct Line {
    path: PathBuf,
    read: BufReader<UnixStream>,
}

impl Line {
    fn open(path: &Path, every: Option<Duration>) -> Result<Self, Unreachable> {
        let wrong = |why| Unreachable::Connect { path: path.to_owned(), why };
        let mut stream = UnixStream::connect(path).map_err(wrong)?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(wrong)?;
        let every_ms = every.map(|e| u64::try_from(e.as_millis()).unwrap_or(u64::MAX));
        let question = Question { ringwatch: PROTOCOL, want: Want::Snapshot, every_ms };
        let mut line = serde_json::to_vec(&question).map_err(|e| wrong(e.into()))?;
        line.push(b'\n');
        // An agent without a place for us has answered already, and its answer says why.
        match stream.write_all(&line) {
            Err(e) if e.kind() != io::ErrorKind::BrokenPipe => return Err(wrong(e)),
            _ => {}
        }
        Ok(Line { path: path.to_owned(), read: BufReader::new(stream) })
    }

    fn next(&mut self) -> Result<Snapshot, Unreachable> {
        let path = || self.path.clone();
        let mut line = String::new();
        let read =
            self.read.read_line(&mut line).map_err(|why| Unreachable::Connect { path: path(), why })?;
        if read == 0 {
            let why = io::Error::new(io::ErrorKind::UnexpectedEof, "the agent hung up");
            return Err(Unreachable::Connect { path: path(), why });
        }
        match serde_json::from_str(&line) {
            Ok(Answer::Snapshot(mut s)) => {
                s.source = format!("agent {}: {}", self.path.display(), s.source);
                Ok(*s)
            }
            Ok(Answer::Refused(why)) => Err(Unreachable::Refused { path: path(), why }),
            Err(e) => Err(Unreachable::Strange { path: path(), why: e.to_string() }),
        }
    }
}

/// Asks an agent once.
///
/// # Errors
/// Why it does not answer.
pub fn ask(path: &Path) -> Result<Snapshot, Unreachable> {
    Line::open(path, None)?.next()
}

/// An agent that sends a snapshot now and then, also after it was started anew.
#[derive(Debug)]
pub struct Remote(Latest);

impl Remote {
    /// Connects, and has the first snapshot.
    ///
    /// # Errors
    /// Why it does not answer.
    pub fn connect(path: &Path, every: Duration) -> Result<Self, Unreachable> {
        let mut line = Line::open(path, Some(every))?;
        let first = line.next()?;
        let (send, received) = mpsc::sync_channel(1);
        let path = path.to_owned();
        std::thread::spawn(move || {
            loop {
                let said = match line.next() {
                    Ok(snapshot) => Ok(snapshot),
                    Err(e) => {
                        std::thread::sleep(AGAIN);
                        if let Ok(new) = Line::open(&path, Some(every)) {
                            line = new;
                        }
                        Err(e.to_string())
                    }
                };
                if send.send(said).is_err() {
                    break;
                }
            }
        });
        Ok(Remote(Latest::new(first, received, "the agent")))
    }

    /// The latest answer of the agent; an agent that does not answer is reported in the place where the source is
    /// named.
    pub fn snapshot(&mut self) -> Snapshot {
        self.0.snapshot()
    }
}
