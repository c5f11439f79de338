//! Notices as their receivers want them.

use super::settings::Format;
use super::{Notice, Webhook};
use crate::model::{Change, Severity};
use serde_json::{Value, json};

/// Letters of a summary at most: PagerDuty takes 1,024.
const SUMMARY_MAX: usize = 1_000;

/// The body of a request to a webhook.
pub fn body(hook: &Webhook, notice: &Notice) -> Value {
    match hook.format {
        Format::Json => as_json(notice),
        Format::Slack => json!({ "text": slack(notice) }),
        Format::Pagerduty => {
            let key = hook.routing_key.as_ref().map(|k| k.exposed().to_owned()).unwrap_or_default();
            pagerduty(&key, notice)
        }
    }
}

fn change(notice: &Notice) -> &'static str {
    match notice.change {
        Change::Opened => "opened",
        Change::Updated => "updated",
        Change::Closed => "closed",
    }
}

fn ranks(notice: &Notice) -> Vec<Value> {
    notice.named.iter().map(|n| json!({ "job_rank": n.job_rank, "host": n.host })).collect()
}

/// The finding with what is around it: what a program reads from its standard input.
pub fn as_json(notice: &Notice) -> Value {
    json!({
        "version": 1,
        "change": change(notice),
        "node": notice.node,
        "job": notice.job,
        "named": ranks(notice),
        "finding": notice.finding,
    })
}

/// The finding in a line: `train: missing-rank, rank 12 on n7: ...`.
fn summary(notice: &Notice) -> String {
    let f = &notice.finding;
    let of = if notice.job.is_empty() { String::new() } else { format!("{}: ", notice.job) };
    let whom = notice.named.iter().map(|n| match n.job_rank {
        Some(rank) => format!(", rank {rank} on {}", n.host),
        None => format!(", {}", n.host),
    });
    let why = f.evidence.first().map_or(String::new(), |e| format!(": {}", e.text));
    let all = format!("{of}{}{}{why}", f.kind.as_str(), whom.collect::<String>());
    all.chars().take(SUMMARY_MAX).collect()
}

/// Slack takes `&`, `<` and `>` for its own marks.
fn slack(notice: &Notice) -> String {
    let f = &notice.finding;
    let state = match notice.change {
        Change::Closed => "over",
        Change::Opened | Change::Updated => f.severity.as_str(),
    };
    let advice = if notice.change == Change::Closed { String::new() } else { format!("\n{}", f.advice) };
    let text = format!("[{state}] {}{advice}", summary(notice));
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn pagerduty(routing_key: &str, notice: &Notice) -> Value {
    let f = &notice.finding;
    if notice.change == Change::Closed {
        return json!({ "routing_key": routing_key, "event_action": "resolve", "dedup_key": f.id.to_string() });
    }
    let severity = if f.severity >= Severity::Critical { "critical" } else { "warning" };
    let source = if notice.host.is_empty() { &notice.node } else { &notice.host };
    json!({
        "routing_key": routing_key,
        "event_action": "trigger",
        "dedup_key": f.id.to_string(),
        "payload": {
            "summary": summary(notice),
            "source": source,
            "severity": severity,
            "class": f.kind.as_str(),
            "group": notice.job,
            "custom_details": as_json(notice),
        },
    })
}

/// A host that is no name could be an option or a range to a program: it is left out.
fn host(notice: &Notice) -> &str {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-');
    let is_name = notice.host.chars().all(is_plain) && !notice.host.starts_with(['.', '-']);
    if is_name { &notice.host } else { "" }
}

/// The variables of a program's environment: what shell scripts need most.
pub fn variables(notice: &Notice) -> Vec<(&'static str, String)> {
    let rank = notice.named.first().and_then(|n| n.job_rank).map_or(String::new(), |r| r.to_string());
    vec![
        ("RINGWATCH_CHANGE", change(notice).to_owned()),
        ("RINGWATCH_FINDING", notice.finding.id.to_string()),
        ("RINGWATCH_KIND", notice.finding.kind.as_str().to_owned()),
        ("RINGWATCH_SEVERITY", notice.finding.severity.as_str().to_owned()),
        ("RINGWATCH_JOB", notice.job.clone()),
        ("RINGWATCH_UID", notice.owner.map_or(String::new(), |uid| uid.to_string())),
        ("RINGWATCH_JOB_RANK", rank),
        ("RINGWATCH_HOST", host(notice).to_owned()),
        ("RINGWATCH_OPEN_ON_HOST", notice.open_on_host.to_string()),
        ("RINGWATCH_SUMMARY", summary(notice)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::metrics::NamedRank;
    use crate::model::{CommId, Evidence, Finding, FindingId, Kind, OperationRef, Rank, Track};

    fn notice(change: Change) -> Notice {
        let operation = OperationRef::named("AllReduce", Track::Collective, 5);
        let mut finding = Finding::new(Kind::MissingRank, CommId::unowned(7), vec![Rank(3)], operation);
        finding.id = FindingId(0xabc);
        finding.severity = Severity::Critical;
        finding.evidence =
            vec![Evidence { text: "rank 3 <did> not come & waits".to_owned(), value: None, unit: None }];
        finding.advice = "look at it".to_owned();
        let named = vec![NamedRank { job_rank: Some(12), host: "n7".to_owned() }];
        let (job, node) = ("train".to_owned(), "n1".to_owned());
        let (host, open_on_host) = ("n7".to_owned(), 1);
        Notice { change, finding, job, owner: Some(1000), named, host, open_on_host, node }
    }

    fn hook(format: &str) -> Webhook {
        let text = format!("url: http://host/x\nformat: {format}\nrouting_key: k\n");
        serde_yaml::from_str(&text).expect("a webhook")
    }

    #[test]
    fn every_receiver_gets_its_form() {
        let opened = notice(Change::Opened);
        let slack = body(&hook("slack"), &opened);
        let line = "[critical] train: missing-rank, rank 12 on n7: rank 3 &lt;did&gt; not come &amp; waits\nlook at it";
        assert_eq!(slack, json!({ "text": line }));
        let event = body(&hook("pagerduty"), &opened);
        assert_eq!((&event["event_action"], &event["routing_key"]), (&json!("trigger"), &json!("k")));
        assert_eq!(
            (&event["payload"]["source"], &event["payload"]["severity"]),
            (&json!("n7"), &json!("critical"))
        );
        assert_eq!(event["dedup_key"], json!("0000000000000abc"));
        let closed = body(&hook("pagerduty"), &notice(Change::Closed));
        assert_eq!((&closed["event_action"], &closed["dedup_key"]), (&json!("resolve"), &event["dedup_key"]));
        let json = body(&hook("json"), &opened);
        assert_eq!((&json["change"], &json["named"][0]["job_rank"]), (&json!("opened"), &json!(12)));
        assert_eq!(json["finding"]["kind"], json!("missing-rank"));
        assert_eq!(serde_json::from_value::<Finding>(json["finding"].clone()).expect("it"), opened.finding);
        let of_host = |host: &str| {
            let notice = Notice { host: host.to_owned(), ..opened.clone() };
            variables(&notice).into_iter().find(|(k, _)| *k == "RINGWATCH_HOST").map(|(_, v)| v)
        };
        assert_eq!(of_host("n7.example"), Some("n7.example".to_owned()));
        for forged in ["n[1-4000]", "-x", "../../pods/p", "a b", "n7;reboot"] {
            assert_eq!(of_host(forged), Some(String::new()), "{forged}");
        }
        let nowhere = Notice { host: String::new(), ..opened.clone() };
        assert_eq!(body(&hook("pagerduty"), &nowhere)["payload"]["source"], json!("n1"));
    }
}
