//! The last answer of somebody who is asked again and again.

use crate::model::Snapshot;
use std::sync::mpsc::{Receiver, TryRecvError};

/// The latest answer, and the reason why there is nothing newer.
#[derive(Debug)]
pub(super) struct Latest {
    received: Receiver<Result<Snapshot, String>>,
    last: Snapshot,
    trouble: Option<String>,
    /// The source's name.
    who: &'static str,
}

impl Latest {
    /// The first answer, and where the next ones come from.
    pub(super) fn new(
        first: Snapshot,
        received: Receiver<Result<Snapshot, String>>,
        who: &'static str,
    ) -> Self {
        Latest { received, last: first, trouble: None, who }
    }

    /// The latest answer; that nobody answers is reported in the place where the source is named.
    pub(super) fn snapshot(&mut self) -> Snapshot {
        loop {
            match self.received.try_recv() {
                Ok(Ok(snapshot)) => (self.last, self.trouble) = (snapshot, None),
                Ok(Err(why)) => self.trouble = Some(why),
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => break,
            }
        }
        let mut s = self.last.clone();
        if let Some(why) = &self.trouble {
            s.source = format!("AS IT WAS, {} does not answer: {why}", self.who);
        }
        s
    }
}
