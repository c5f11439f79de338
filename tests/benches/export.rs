//! What exporting costs: an operation of eight ranks in the metrics and in the tracer, and a scrape under a full budget.

#![allow(clippy::unwrap_used, missing_docs, reason = "a benchmark")]

#[path = "../exported/mod.rs"]
mod exported;

use criterion::{Criterion, criterion_group, criterion_main};
use exported::{Hand, S};
use ringwatch::export::otlp::{self, Tracer};
use ringwatch::export::prometheus::{Format, Metrics, Own, Settings, negotiated};
use ringwatch::model::CommId;
use std::hint::black_box;

fn export(c: &mut Criterion) {
    let mut hand = Hand::new(8);
    for n in 0..100 {
        hand.round(10 * S + n * 1_000_000, None);
    }
    let finished = hand.join.take_finished();
    assert_eq!(finished.len(), 100);

    let mut metrics = Metrics::new(Settings::default());
    c.bench_function("metrics: 100 operations of 8 ranks", |b| {
        b.iter(|| metrics.finished(&hand.join, black_box(&finished)));
    });
    let mut quiet = Tracer::new(&otlp::Settings { sample_ratio: 0.0, ..otlp::Settings::default() });
    c.bench_function("tracer: 100 operations of 8 ranks, none sampled", |b| {
        b.iter(|| quiet.finished(&hand.join, black_box(&finished)));
    });
    let mut all = Tracer::new(&otlp::Settings { sample_ratio: 1.0, ..otlp::Settings::default() });
    c.bench_function("tracer: 100 operations of 8 ranks, all written (19 spans each)", |b| {
        b.iter(|| {
            all.finished(&hand.join, black_box(&finished));
            let mut spans = 0;
            loop {
                let batch = all.take();
                if batch.is_empty() {
                    break;
                }
                spans += batch.spans.len();
            }
            assert_eq!(spans, 1_900);
        });
    });

    // 960 series of operations, each with its histogram.
    let mut full = Metrics::new(Settings::default());
    for n in 0..960 {
        let mut f = finished[0].clone();
        f.comm = CommId::unowned(n);
        full.finished(&hand.join, &[f]);
    }
    let own = Own { now_ns: 11 * S, node: "node1".into(), ..Own::default() };
    let (_, body) = full.render(&hand.join, &[], &own, Format::OpenMetrics).unwrap();
    c.bench_function(&format!("scrape: text of {} KiB", body.len() >> 10), |b| {
        b.iter(|| full.render(&hand.join, &[], &own, Format::OpenMetrics).unwrap());
    });
    let accept = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited";
    let (_, body) = full.render(&hand.join, &[], &own, negotiated(Some(accept), true)).unwrap();
    c.bench_function(&format!("scrape: protobuf of {} KiB", body.len() >> 10), |b| {
        b.iter(|| full.render(&hand.join, &[], &own, negotiated(Some(accept), true)).unwrap());
    });
}

criterion_group!(benches, export);
criterion_main!(benches);
