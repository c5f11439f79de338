//! The receivers of findings.

use crate::model::Severity;
use crate::secret::SecretText;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The least severity of the findings that a receiver gets. No receiver gets an info.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Least {
    /// Findings that cost the job 3 % of its time or more, and standstills.
    #[default]
    Warning,
    /// Standstills.
    Critical,
}

impl Least {
    /// As a severity.
    pub fn severity(self) -> Severity {
        match self {
            Least::Warning => Severity::Warning,
            Least::Critical => Severity::Critical,
        }
    }
}

/// The form of a webhook's body.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// The finding as `ringwatch diagnose --json` has it, with what changed, the job, and the ranks and hosts that it names.
    #[default]
    Json,
    /// A line of text, as Slack's incoming webhooks and what imitates them take it.
    Slack,
    /// An event of PagerDuty's Events API v2: it opens an incident, and resolves it when the finding is closed.
    Pagerduty,
}

/// A receiver that is called by HTTP.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Webhook {
    /// Where to, `https://host/path`. It is a secret as a whole: whoever knows it may post there.
    pub url: SecretText,
    /// The form of the body.
    #[serde(default)]
    pub format: Format,
    /// The least severity.
    #[serde(default)]
    pub severity: Least,
    /// Headers of every request.
    #[serde(default)]
    pub headers: BTreeMap<String, SecretText>,
    /// The integration key, for PagerDuty.
    #[serde(default)]
    pub routing_key: Option<SecretText>,
    /// How long one request may take.
    #[serde(default = "request_ms")]
    pub timeout_ms: u64,
}

/// A program that is started for each change of a finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Command {
    /// Its path, which is absolute.
    pub program: PathBuf,
    /// Its arguments.
    #[serde(default)]
    pub arguments: Vec<String>,
    /// The least severity.
    #[serde(default)]
    pub severity: Least,
    /// It is killed when it takes longer.
    #[serde(default = "command_ms")]
    pub timeout_ms: u64,
}

fn request_ms() -> u64 {
    5_000
}

fn command_ms() -> u64 {
    60_000
}

/// The receivers of findings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Receivers that are called by HTTP.
    pub webhooks: Vec<Webhook>,
    /// Programs that are started.
    pub commands: Vec<Command>,
}

impl Settings {
    /// The first key that is wrong, and what is wrong with it.
    ///
    /// # Errors
    /// One is wrong.
    pub fn check(&self) -> Result<(), (&'static str, String)> {
        for (n, hook) in self.webhooks.iter().enumerate() {
            let key = "notify.webhooks";
            if host(hook.url.exposed()).is_none() {
                return Err((
                    key,
                    format!("the URL of number {n} is none: http:// or https:// and a host are needed"),
                ));
            }
            let authority =
                hook.url.exposed().split_once("://").map(|(_, rest)| rest.split('/').next().unwrap_or(""));
            if authority.is_some_and(|a| a.contains('@')) {
                return Err((
                    key,
                    format!("the URL of number {n} has a user in it: give a header authorization instead"),
                ));
            }
            if hook.format == Format::Pagerduty && hook.routing_key.is_none() {
                return Err((key, format!("number {n} is for PagerDuty and has no routing_key")));
            }
            if !(100..=60_000).contains(&hook.timeout_ms) {
                return Err((
                    key,
                    format!("timeout_ms of number {n} is {}, and not in 100 to 60000", hook.timeout_ms),
                ));
            }
            for (name, value) in &hook.headers {
                let is_name = hyper::http::HeaderName::from_bytes(name.as_bytes()).is_ok();
                if !is_name || hyper::http::HeaderValue::from_str(value.exposed()).is_err() {
                    return Err((
                        key,
                        format!("HTTP does not allow the header {name:?} of number {n}, or its value"),
                    ));
                }
            }
        }
        for (n, command) in self.commands.iter().enumerate() {
            let key = "notify.commands";
            if !command.program.is_absolute() {
                return Err((key, format!("{} of number {n} is not absolute", command.program.display())));
            }
            if !(100..=3_600_000).contains(&command.timeout_ms) {
                return Err((
                    key,
                    format!("timeout_ms of number {n} is {}, and not in 100 to 3600000", command.timeout_ms),
                ));
            }
        }
        Ok(())
    }

    /// All texts in it that are secret.
    pub fn secrets(&self) -> impl Iterator<Item = &SecretText> {
        self.webhooks
            .iter()
            .flat_map(|h| std::iter::once(&h.url).chain(h.headers.values()).chain(&h.routing_key))
    }
}

/// The host of a URL, by which a receiver is named where its URL must not be shown.
pub(super) fn host(url: &str) -> Option<String> {
    let url: hyper::http::Uri = url.parse().ok()?;
    let is_http = matches!(url.scheme_str(), Some("http" | "https"));
    url.host().filter(|h| is_http && !h.is_empty()).map(str::to_owned)
}
