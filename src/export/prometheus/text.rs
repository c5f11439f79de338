//! The two texts.

use crate::export::catalogue::Kind;
use crate::export::metrics::{Exemplar, Family, Histogram, Sample, Value};

/// A foreign family: metrics under names that are not ours.
pub(super) use crate::export::metrics::Foreign;

/// OpenMetrics 1.0.
pub(super) fn open_metrics(families: &[Family], foreign: &[Foreign]) -> String {
    let mut out = String::new();
    for f in families {
        let m = f.metric;
        head(&mut out, m.name, m.help, m.kind.as_str(), m.unit);
        body(&mut out, f, true);
    }
    for f in foreign {
        head(&mut out, f.name, f.help, "gauge", None);
        gauges(&mut out, f);
    }
    out.push_str("# EOF\n");
    out
}

/// Prometheus' own text: counters are declared by the name that their samples have.
pub(super) fn plain(families: &[Family], foreign: &[Foreign]) -> String {
    let mut out = String::new();
    for f in families {
        let m = f.metric;
        match m.kind {
            Kind::Counter => head(&mut out, &format!("{}_total", m.name), m.help, "counter", None),
            Kind::Info => head(&mut out, &format!("{}_info", m.name), m.help, "gauge", None),
            Kind::Gauge | Kind::Histogram => head(&mut out, m.name, m.help, m.kind.as_str(), None),
        }
        body(&mut out, f, false);
    }
    for f in foreign {
        head(&mut out, f.name, f.help, "gauge", None);
        gauges(&mut out, f);
    }
    out
}

fn head(out: &mut String, name: &str, help: &str, kind: &str, unit: Option<&str>) {
    out.push_str(&format!("# HELP {name} {}\n", escaped(help, false)));
    out.push_str(&format!("# TYPE {name} {kind}\n"));
    if let Some(unit) = unit {
        out.push_str(&format!("# UNIT {name} {unit}\n"));
    }
}

fn body(out: &mut String, f: &Family, exemplars: bool) {
    let suffix = match f.metric.kind {
        Kind::Counter => "_total",
        Kind::Info => "_info",
        Kind::Gauge | Kind::Histogram => "",
    };
    for s in &f.samples {
        match &s.value {
            Value::Number(v) => {
                out.push_str(&format!("{}{suffix}", f.metric.name));
                labels(out, s, None);
                out.push_str(&format!(" {}\n", number(*v)));
            }
            Value::Histogram(h) => histogram(out, f.metric.name, s, h, exemplars),
        }
    }
}

fn gauges(out: &mut String, f: &Foreign) {
    for (given, value) in &f.samples {
        let labels: Vec<_> = given.iter().map(|(k, v)| format!("{k}=\"{}\"", escaped(v, true))).collect();
        out.push_str(&format!("{}{{{}}} {}\n", f.name, labels.join(","), number(*value)));
    }
}

fn histogram(out: &mut String, name: &str, s: &Sample, h: &Histogram, exemplars: bool) {
    for (bound, count, exemplar) in h.cumulated() {
        out.push_str(&format!("{name}_bucket"));
        labels(out, s, Some(&number(bound)));
        out.push_str(&format!(" {count}"));
        if let Some(e) = exemplar.filter(|_| exemplars) {
            exemplar_text(out, e);
        }
        out.push('\n');
    }
    out.push_str(&format!("{name}_sum"));
    labels(out, s, None);
    out.push_str(&format!(" {}\n", number(h.sum)));
    out.push_str(&format!("{name}_count"));
    labels(out, s, None);
    out.push_str(&format!(" {}\n", h.count));
}

fn exemplar_text(out: &mut String, e: &Exemplar) {
    let (trace, span, value) = (e.trace, e.span, number(e.value));
    out.push_str(&format!(" # {{trace_id=\"{trace:032x}\",span_id=\"{span:016x}\"}} {value}"));
    if let Some(ns) = e.unix_ns {
        out.push_str(&format!(" {}.{:03}", ns / 1_000_000_000, ns / 1_000_000 % 1000));
    }
}

fn labels(out: &mut String, s: &Sample, le: Option<&str>) {
    let given = s.labels.iter().map(|(k, v)| (*k, v.as_str()));
    let mut any = false;
    for (k, v) in given.chain(le.map(|v| ("le", v))) {
        out.push_str(&format!("{}{k}=\"{}\"", if any { ',' } else { '{' }, escaped(v, true)));
        any = true;
    }
    if any {
        out.push('}');
    }
}

/// Backslashes, line ends and (in labels) quotes are escaped.
fn escaped(text: &str, quotes: bool) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '"' if quotes => out.push_str("\\\""),
            c => out.push(c),
        }
    }
    out
}

/// The shortest text that reads back as the same number.
fn number(v: f64) -> String {
    if v.is_infinite() {
        return if v > 0.0 { "+Inf".to_owned() } else { "-Inf".to_owned() };
    }
    if v.is_nan() {
        return "NaN".to_owned();
    }
    format!("{v:?}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::catalogue as c;

    #[test]
    fn hostile_labels_stay_inside_their_quotes() {
        let family = Family {
            metric: c::NODE_CPUS,
            samples: vec![Sample {
                labels: vec![("node", "a\"} evil 1\n\\".to_owned())],
                value: Value::Number(2.0),
                hardware: Vec::new(),
            }],
        };
        let text = open_metrics(&[family], &[]);
        let line = text.lines().find(|l| l.starts_with("ringwatch_node_cpus{")).expect("a sample");
        assert_eq!(line, r#"ringwatch_node_cpus{node="a\"} evil 1\n\\"} 2.0"#);
        assert!(text.ends_with("# EOF\n"));
    }

    #[test]
    fn numbers_read_back_as_they_are() {
        for v in [0.0, 1.0, 1e-9, 0.1, 123_456_789_012_345.0, 1e300, 2.5e-5] {
            assert_eq!(number(v).parse::<f64>().ok(), Some(v));
        }
        assert_eq!(number(f64::INFINITY), "+Inf");
    }
}
