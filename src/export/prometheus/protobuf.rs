//! Prometheus' protobuf: the one format in which histograms can be native.

use super::text::Foreign;
use crate::export::catalogue::Kind;
use crate::export::metrics::{Exemplar, Family, Histogram, Value, ZERO};
use prometheus_client::encoding::prometheus_protobuf::prometheus_data_model as proto;
use prost::{EncodeError, Message};

/// Every family behind its length.
pub(super) fn write(families: &[Family], foreign: &[Foreign]) -> Result<Vec<u8>, EncodeError> {
    let mut out = Vec::new();
    for f in families.iter().map(family).chain(foreign.iter().map(gauges)) {
        f.encode_length_delimited(&mut out)?;
    }
    Ok(out)
}

fn family(f: &Family) -> proto::MetricFamily {
    let m = f.metric;
    let (suffix, kind) = match m.kind {
        Kind::Counter => ("_total", proto::MetricType::Counter),
        Kind::Gauge => ("", proto::MetricType::Gauge),
        Kind::Info => ("_info", proto::MetricType::Gauge),
        Kind::Histogram => ("", proto::MetricType::Histogram),
    };
    let metric = f.samples.iter().map(|s| {
        let mut metric = proto::Metric {
            label: s.labels.iter().map(|(k, v)| pair(k, v.clone())).collect(),
            ..proto::Metric::default()
        };
        match &s.value {
            Value::Number(v) if m.kind == Kind::Counter => {
                metric.counter = Some(proto::Counter { value: *v, ..proto::Counter::default() });
            }
            Value::Number(v) => metric.gauge = Some(proto::Gauge { value: *v }),
            Value::Histogram(h) => metric.histogram = Some(histogram(h)),
        }
        metric
    });
    proto::MetricFamily {
        name: format!("{}{suffix}", m.name),
        help: m.help.to_owned(),
        r#type: kind as i32,
        metric: metric.collect(),
        unit: m.unit.unwrap_or("").to_owned(),
    }
}

fn gauges(f: &Foreign) -> proto::MetricFamily {
    let metric = f.samples.iter().map(|(labels, value)| proto::Metric {
        label: labels.iter().map(|(k, v)| pair(k, v.clone())).collect(),
        gauge: Some(proto::Gauge { value: *value }),
        ..proto::Metric::default()
    });
    proto::MetricFamily {
        name: f.name.to_owned(),
        help: f.help.to_owned(),
        r#type: proto::MetricType::Gauge as i32,
        metric: metric.collect(),
        unit: String::new(),
    }
}

fn pair(name: &str, value: String) -> proto::LabelPair {
    proto::LabelPair { name: name.to_owned(), value }
}

fn histogram(h: &Histogram) -> proto::Histogram {
    let bucket = h.cumulated().map(|(upper_bound, cumulative_count, e)| proto::Bucket {
        cumulative_count,
        upper_bound,
        exemplar: e.map(exemplar),
        ..proto::Bucket::default()
    });
    let (mut positive_span, mut positive_delta) = (Vec::new(), Vec::new());
    let (mut end, mut before) = (0, 0);
    for (first, counts) in h.runs() {
        let length = counts.len() as i32;
        // The first span begins at an index, each later one by its distance to the end of the one before.
        positive_span.push(proto::BucketSpan { offset: first - end, length: length as u32 });
        end = first + length;
        for n in counts {
            positive_delta.push(n as i64 - before);
            before = n as i64;
        }
    }
    proto::Histogram {
        sample_count: h.count,
        sample_sum: h.sum,
        bucket: bucket.collect(),
        schema: h.scale,
        zero_threshold: ZERO,
        zero_count: h.zero,
        positive_span,
        positive_delta,
        ..proto::Histogram::default()
    }
}

fn exemplar(e: &Exemplar) -> proto::Exemplar {
    proto::Exemplar {
        label: vec![
            pair("trace_id", format!("{:032x}", e.trace)),
            pair("span_id", format!("{:016x}", e.span)),
        ],
        value: e.value,
        timestamp: e.unix_ns.map(|ns| prost_types::Timestamp {
            seconds: (ns / 1_000_000_000) as i64,
            nanos: (ns % 1_000_000_000) as i32,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_and_deltas_read_back_as_the_counts() {
        let mut h = Histogram::default();
        for (value, times) in [(1e-6, 3), (1.05e-6, 1), (1e-3, 7), (1.0, 2), (8.0, 1)] {
            (0..times).for_each(|_| h.observe(value, None));
        }
        let p = histogram(&h);
        let mut deltas = p.positive_delta.iter();
        let (mut index, mut count, mut read) = (0, 0, Vec::new());
        for span in &p.positive_span {
            index += span.offset;
            for _ in 0..span.length {
                count += deltas.next().expect("a delta a bucket");
                read.push((index, count as u64));
                index += 1;
            }
        }
        assert_eq!(read, h.exponential.iter().map(|(i, n)| (*i, *n)).collect::<Vec<_>>());
        assert_eq!((p.sample_count, p.bucket.last().map(|b| b.upper_bound)), (14, Some(f64::INFINITY)));
    }
}
