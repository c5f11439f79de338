//! The log lines about settings that were read again.

use super::{Message, StateSender};
use crate::config::{self, Change, Config};
use tracing::{error, info, warn};

/// The settings that a daemon runs with.
#[derive(Debug)]
pub(in crate::runtime) struct Reload {
    /// Keys, or sections, that its state takes over while it runs.
    taken_over: &'static [&'static str],
    /// The settings that it started with: what needs a restart is still as in these.
    started: Config,
    /// The settings that were read last.
    last: Config,
}

/// The changes, by what becomes of each.
#[derive(Debug, Default, PartialEq, Eq)]
struct Changes {
    taken_over: Vec<String>,
    need_restart: Vec<String>,
}

impl Reload {
    pub(in crate::runtime) fn new(config: &Config, taken_over: &'static [&'static str]) -> Self {
        Reload { taken_over, started: config.clone(), last: config.clone() }
    }

    /// Hands settings that were read again to the state, and logs what becomes of them.
    pub(in crate::runtime) fn reload(&mut self, read: Result<Config, config::Error>, state: &StateSender) {
        let new = match read {
            Ok(new) => new,
            Err(e) => {
                error!("the settings stay as they were: {e}");
                return;
            }
        };
        // A state that has ended takes nothing over, and its daemon ends with it.
        state.send(Message::Settings(Box::new(new.clone())));
        match self.changes(&new) {
            Ok(changes) => changes.log(),
            Err(e) => error!("the settings were taken over, and cannot be compared: {e}"),
        }
        self.last = new;
    }

    fn changes(&self, new: &Config) -> Result<Changes, config::Error> {
        let is_taken_over = |c: &Change| self.taken_over.iter().any(|key| c.is_below(key));
        let texts = |old: &Config, taken_over: bool| {
            let all = config::changes(old, new)?.into_iter();
            let texts = all.filter(|c| is_taken_over(c) == taken_over).map(|c| c.to_string()).collect();
            Ok::<Vec<String>, config::Error>(texts)
        };
        Ok(Changes { taken_over: texts(&self.last, true)?, need_restart: texts(&self.started, false)? })
    }
}

impl Changes {
    fn log(&self) {
        if self.taken_over.is_empty() {
            info!("the settings were read again, and nothing is to be taken over");
        } else {
            info!("the settings were read again, and taken over: {}", self.taken_over.join(", "));
        }
        if !self.need_restart.is_empty() {
            warn!("these settings need a restart: {}", self.need_restart.join(", "));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_needs_a_restart_is_named_until_there_was_one() {
        let config = |text: &str| serde_yaml::from_str::<Config>(text).expect("settings");
        let mut reload = Reload::new(&Config::default(), &["detect", "cluster.stacks"]);
        let changes = |reload: &Reload, new: &Config| reload.changes(new).expect("trees");
        let first = config("{detect: {warm_up: 9}, cluster: {stacks: false, silent_ms: 9000}, tags: {a: b}}");
        let got = changes(&reload, &first);
        assert_eq!(got.taken_over, ["cluster.stacks: true -> false", "detect.warm_up: 8 -> 9"]);
        let needed = ["cluster.silent_ms: 3000 -> 9000", "tags.a: nothing -> \"b\""];
        assert_eq!(got.need_restart, needed);
        reload.last = first.clone();
        let again = changes(&reload, &first);
        assert_eq!(
            (again.taken_over.len(), again.need_restart.as_slice()),
            (0, &needed.map(str::to_owned)[..])
        );
        assert_eq!(changes(&reload, &Config::default()).need_restart.len(), 0, "it is as it was started");
    }
}
