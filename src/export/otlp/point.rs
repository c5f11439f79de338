//! The metrics' families as OTLP has them. Names become `ringwatch.collective_transfer` with the unit beside them, so
//! that a Prometheus behind a collector gets the very names that `/metrics` has. What OpenTelemetry's conventions for
//! hardware know comes under their names (`hw.*`) as well.

use super::attributes::whole;
use crate::export::catalogue::{Convention, Instrument, Kind, Metric};
use crate::export::metrics::{Exemplar, Family, Histogram, Sample, Value, ZERO};
use opentelemetry_proto::tonic::collector::metrics::v1::ExportMetricsServiceRequest;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue, any_value};
use opentelemetry_proto::tonic::metrics::v1 as proto;
use opentelemetry_proto::tonic::resource::v1::Resource;
use proto::exponential_histogram_data_point::Buckets;
use proto::metric::Data;
use proto::number_data_point;
use std::collections::BTreeMap;

/// Sums and counts since this agent started.
const CUMULATIVE: i32 = proto::AggregationTemporality::Cumulative as i32;

/// When what is sent began and when it is true, ns since the epoch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Span {
    pub(super) start: u64,
    pub(super) now: u64,
}

/// One request with all of it, and the number of points in it.
pub(super) fn request(
    families: &[Family],
    resource: &[(String, String)],
    of: Span,
) -> (ExportMetricsServiceRequest, u64) {
    let mut metrics: Vec<_> = families.iter().map(|f| metric(f, of)).collect();
    let mut points = families.iter().map(|f| f.samples.len() as u64).sum();
    for (convention, data_points) in by_convention(families, of).into_values() {
        points += data_points.len() as u64;
        metrics.push(conventional(&convention, data_points));
    }
    let scope = InstrumentationScope {
        name: "ringwatch".to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..InstrumentationScope::default()
    };
    let scope_metrics = proto::ScopeMetrics { scope: Some(scope), metrics, ..proto::ScopeMetrics::default() };
    let resource =
        Resource { attributes: resource.iter().map(|(k, v)| pair(k, v)).collect(), ..Resource::default() };
    let resource_metrics = vec![proto::ResourceMetrics {
        resource: Some(resource),
        scope_metrics: vec![scope_metrics],
        ..proto::ResourceMetrics::default()
    }];
    (ExportMetricsServiceRequest { resource_metrics }, points)
}

fn metric(f: &Family, of: Span) -> proto::Metric {
    let m = f.metric;
    let numbers = || f.samples.iter().filter_map(|s| number(s, of)).collect();
    let data = match m.kind {
        Kind::Counter => Data::Sum(proto::Sum {
            data_points: numbers(),
            aggregation_temporality: CUMULATIVE,
            is_monotonic: true,
        }),
        Kind::Gauge | Kind::Info => Data::Gauge(proto::Gauge { data_points: numbers() }),
        Kind::Histogram => Data::ExponentialHistogram(proto::ExponentialHistogram {
            data_points: f.samples.iter().filter_map(|s| histogram(s, of)).collect(),
            aggregation_temporality: CUMULATIVE,
        }),
    };
    proto::Metric {
        name: name(m),
        description: m.help.to_owned(),
        unit: unit(m).to_owned(),
        data: Some(data),
        ..proto::Metric::default()
    }
}

/// The points of hardware under the conventions' names: several metrics of ours may be one of theirs.
fn by_convention(
    families: &[Family],
    of: Span,
) -> BTreeMap<&'static str, (Convention, Vec<proto::NumberDataPoint>)> {
    let mut all: BTreeMap<&'static str, (Convention, Vec<proto::NumberDataPoint>)> = BTreeMap::new();
    for f in families {
        let Some(convention) = f.metric.convention else { continue };
        let own = f.samples.iter().filter(|s| !s.hardware.is_empty());
        let points = own.filter_map(|s| {
            let attributes = hardware_attributes(&convention, s);
            Some(proto::NumberDataPoint { attributes, ..number(s, of)? })
        });
        let points: Vec<_> = points.collect();
        if !points.is_empty() {
            all.entry(convention.name).or_insert_with(|| (convention, Vec::new())).1.extend(points);
        }
    }
    all
}

fn conventional(c: &Convention, data_points: Vec<proto::NumberDataPoint>) -> proto::Metric {
    let sum = |data_points, is_monotonic| {
        Data::Sum(proto::Sum { data_points, aggregation_temporality: CUMULATIVE, is_monotonic })
    };
    let data = match c.instrument {
        Instrument::Counter => sum(data_points, true),
        Instrument::UpDownCounter => sum(data_points, false),
        Instrument::Gauge => Data::Gauge(proto::Gauge { data_points }),
    };
    proto::Metric {
        name: c.name.to_owned(),
        description: c.help.to_owned(),
        unit: c.unit.to_owned(),
        data: Some(data),
        ..proto::Metric::default()
    }
}

/// The component, what happened to it, and whose it is. How our labels name the component is left out.
fn hardware_attributes(c: &Convention, s: &Sample) -> Vec<KeyValue> {
    let name = |label| match label {
        "node" => Some("host.name"),
        "error_type" => Some("error.type"),
        "direction" => Some("network.io.direction"),
        "pod" => Some("k8s.pod.name"),
        "namespace" => Some("k8s.namespace.name"),
        "container" => Some("k8s.container.name"),
        crate::export::catalogue::CLUSTER => Some(crate::export::catalogue::CLUSTER),
        _ => None,
    };
    let labels = s.labels.iter().filter_map(|(k, v)| Some(pair(name(k)?, v)));
    // NVML does not say which task a GPU is at.
    let task = (c.name == "hw.gpu.utilization").then(|| pair("hw.gpu.task", "general"));
    labels.chain(s.hardware.iter().map(|(k, v)| pair(k, v))).chain(task).collect()
}

fn name(m: &Metric) -> String {
    let own = m.name.strip_prefix("ringwatch_").unwrap_or(m.name);
    let own = match m.unit {
        Some(unit) => own.strip_suffix(unit).and_then(|n| n.strip_suffix('_')).unwrap_or(own),
        None => own,
    };
    let info = if m.kind == Kind::Info { "_info" } else { "" };
    format!("ringwatch.{own}{info}")
}

/// The unit as UCUM writes it.
fn unit(m: &Metric) -> &'static str {
    match m.unit {
        Some("seconds") => "s",
        Some("bytes") => "By",
        Some("bytes_per_second") => "By/s",
        Some("ratio") => "1",
        Some("watts") => "W",
        Some("celsius") => "Cel",
        Some("hertz") => "Hz",
        _ => "",
    }
}

/// Labels under OpenTelemetry's names, where it has some.
fn attributes(s: &Sample) -> Vec<KeyValue> {
    let name = |label| match label {
        "node" => "host.name",
        "gpu" => "hw.id",
        "uid" => "process.user.id",
        "error_type" => "error.type",
        "direction" => "network.io.direction",
        other => other,
    };
    s.labels.iter().map(|(k, v)| pair(name(k), v)).collect()
}

fn pair(key: &str, value: &str) -> KeyValue {
    let value = Some(any_value::Value::StringValue(value.to_owned()));
    KeyValue { key: key.to_owned(), value: Some(AnyValue { value }), ..KeyValue::default() }
}

fn number(s: &Sample, of: Span) -> Option<proto::NumberDataPoint> {
    let Value::Number(v) = &s.value else { return None };
    Some(proto::NumberDataPoint {
        attributes: attributes(s),
        start_time_unix_nano: of.start,
        time_unix_nano: of.now,
        value: Some(number_data_point::Value::AsDouble(*v)),
        ..proto::NumberDataPoint::default()
    })
}

fn histogram(s: &Sample, of: Span) -> Option<proto::ExponentialHistogramDataPoint> {
    let Value::Histogram(h) = &s.value else { return None };
    Some(proto::ExponentialHistogramDataPoint {
        attributes: attributes(s),
        start_time_unix_nano: of.start,
        time_unix_nano: of.now,
        count: h.count,
        sum: Some(h.sum),
        scale: h.scale,
        zero_count: h.zero,
        zero_threshold: ZERO,
        positive: Some(buckets(h)),
        exemplars: h.exemplars.iter().flatten().map(|e| exemplar(e, of)).collect(),
        ..proto::ExponentialHistogramDataPoint::default()
    })
}

/// OTLP has no gaps between buckets, and counts their numbers from the lower bound.
fn buckets(h: &Histogram) -> Buckets {
    let Some((first, last)) = h.exponential.first_key_value().zip(h.exponential.last_key_value()) else {
        return Buckets::default();
    };
    let (first, last) = (*first.0, *last.0);
    let bucket_counts = (first..=last).map(|i| h.exponential.get(&i).copied().unwrap_or(0)).collect();
    Buckets { offset: first - 1, bucket_counts }
}

fn exemplar(e: &Exemplar, of: Span) -> proto::Exemplar {
    proto::Exemplar {
        filtered_attributes: Vec::new(),
        time_unix_nano: e.unix_ns.unwrap_or(of.now),
        span_id: e.span.to_be_bytes().to_vec(),
        trace_id: e.trace.to_be_bytes().to_vec(),
        value: Some(proto::exemplar::Value::AsDouble(e.value)),
    }
}

/// How many of a request's points were refused.
pub(super) fn refused(rejected: Option<i64>) -> u64 {
    rejected.map_or(0, |n| n.clamp(0, whole(u64::MAX)).unsigned_abs())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::catalogue;

    #[test]
    fn a_collectors_prometheus_gets_the_names_that_we_have() {
        // The translation that collectors do: dots become underscores, then the unit's word, then the kind.
        let word = |unit: &str| match unit {
            "s" => "_seconds",
            "By" => "_bytes",
            "By/s" => "_bytes_per_second",
            "1" => "_ratio",
            "W" => "_watts",
            "Cel" => "_celsius",
            "Hz" => "_hertz",
            _ => "",
        };
        for m in catalogue::ALL {
            let kind = if m.kind == Kind::Counter { "_total" } else { "" };
            let translated = format!("{}{}{kind}", name(m).replace('.', "_"), word(unit(m)));
            let own = match m.kind {
                Kind::Histogram => m.name.to_owned(),
                _ => m.exposed().concat(),
            };
            assert_eq!(translated, own);
        }
    }

    #[test]
    fn hardware_has_the_conventions_names_beside_ours() {
        let named = |name: &str| {
            let of = |m: &&&Metric| m.convention.is_some_and(|c| c.name == name);
            catalogue::ALL.iter().filter(of).map(|m| m.name).collect::<Vec<_>>()
        };
        // Name, instrument and unit as the conventions have them (docs/hardware of open-telemetry/semantic-conventions).
        for (name, instrument, unit, ours) in [
            ("hw.errors", Instrument::Counter, "{error}", 3),
            ("hw.power", Instrument::Gauge, "W", 1),
            ("hw.temperature", Instrument::Gauge, "Cel", 1),
            ("hw.gpu.utilization", Instrument::Gauge, "1", 1),
            ("hw.gpu.memory.usage", Instrument::UpDownCounter, "By", 1),
            ("hw.gpu.memory.limit", Instrument::UpDownCounter, "By", 1),
            ("hw.network.up", Instrument::UpDownCounter, "1", 2),
            ("hw.network.bandwidth.limit", Instrument::UpDownCounter, "By/s", 2),
            ("hw.network.io", Instrument::Counter, "By", 2),
        ] {
            assert_eq!(named(name).len(), ours, "{name}: {:?}", named(name));
            for c in catalogue::ALL.iter().filter_map(|m| m.convention).filter(|c| c.name == name) {
                assert_eq!((c.instrument, c.unit), (instrument, unit), "{name}");
            }
        }
        let all = catalogue::ALL.iter().filter(|m| m.convention.is_some()).count();
        assert_eq!(all, 14, "a name that is not checked here");
        for m in catalogue::ALL.iter().filter(|m| m.convention.is_some()) {
            let counts = m.convention.is_some_and(|c| c.instrument == Instrument::Counter);
            assert_eq!(counts, m.kind == Kind::Counter, "{}: a counter is one under both names", m.name);
        }
    }

    #[test]
    fn exponential_buckets_keep_their_bounds() {
        let mut h = Histogram::default();
        [1.5e-4, 3.0, 3.0].into_iter().for_each(|v| h.observe(v, None));
        let b = buckets(&h);
        assert_eq!(b.bucket_counts.iter().sum::<u64>(), 3);
        let last = b.offset + b.bucket_counts.len() as i32 - 1;
        let bound = |i: i32| (f64::from(i) / f64::from(h.scale).exp2()).exp2();
        assert!(bound(last) < 3.0 && 3.0 <= bound(last + 1), "{} to {}", bound(last), bound(last + 1));
        assert_eq!(b.bucket_counts.last(), Some(&2));
    }
}
