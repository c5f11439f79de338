//! The output: metrics with their samples.

use super::histogram::Histogram;
use super::scope::Container;
use crate::export::catalogue::{CLUSTER, CONTAINER, Metric, OVERFLOW};

/// A metric and its samples.
#[derive(Debug, Clone)]
pub struct Family {
    /// The metric.
    pub metric: &'static Metric,
    /// Its samples; no two have the same labels.
    pub samples: Vec<Sample>,
}

/// One series at a moment.
#[derive(Debug, Clone)]
pub struct Sample {
    /// Names and values; what has no value is left out.
    pub labels: Vec<(&'static str, String)>,
    /// The value.
    pub value: Value,
    /// The piece of hardware that it is of, by OpenTelemetry's attributes; empty where it is of none.
    pub hardware: Vec<(&'static str, String)>,
}

/// The value of a sample.
#[derive(Debug, Clone)]
pub enum Value {
    /// Of a counter, a gauge or an info.
    Number(f64),
    /// Of a histogram.
    Histogram(Box<Histogram>),
}

/// Families that are being filled.
#[derive(Debug, Default)]
pub(super) struct Families {
    cluster: Option<String>,
    families: Vec<Family>,
    hardware: Vec<(&'static str, String)>,
    container: Option<Container>,
}

impl Families {
    pub(super) fn new(cluster: Option<String>) -> Self {
        Families { cluster, ..Families::default() }
    }

    /// Adds the following samples to this piece of hardware, as far as the conventions know the metric.
    pub(super) fn of(&mut self, hardware: Vec<(&'static str, String)>) {
        self.hardware = hardware;
    }

    /// Adds the following samples to this container: to its GPU, or to its rank.
    pub(super) fn inside(&mut self, container: Option<Container>) {
        self.container = container;
    }

    /// Adds a sample. The values are those of the metric's labels, in their order; an empty one is left out.
    pub(super) fn put(&mut self, metric: &'static Metric, labels: &[&str], value: Value) {
        debug_assert_eq!(labels.len(), metric.labels.len(), "{}", metric.name);
        let given = metric.labels.iter().zip(labels).filter(|(_, v)| !v.is_empty());
        let mut labels: Vec<_> = given.map(|(k, v)| (*k, (*v).to_owned())).collect();
        if let Some(container) = &self.container {
            let named = CONTAINER.into_iter().zip(container.names()).filter(|(_, v)| !v.is_empty());
            labels.extend(named.map(|(k, v)| (k, v.to_owned())));
        }
        self.push(metric, labels, value);
    }

    /// Adds a number.
    pub(super) fn number(&mut self, metric: &'static Metric, labels: &[&str], value: f64) {
        self.put(metric, labels, Value::Number(value));
    }

    /// Adds a number that may not be known.
    pub(super) fn known(&mut self, metric: &'static Metric, labels: &[&str], value: Option<f64>) {
        if let Some(v) = value {
            self.number(metric, labels, v);
        }
    }

    /// Adds the sample that stands for all that the budget has no series for.
    pub(super) fn overflow(&mut self, metric: &'static Metric, value: Value) {
        self.push(metric, vec![(OVERFLOW, "true".to_owned())], value);
    }

    fn push(&mut self, metric: &'static Metric, mut labels: Vec<(&'static str, String)>, value: Value) {
        if let Some(cluster) = &self.cluster {
            labels.insert(0, (CLUSTER, cluster.clone()));
        }
        let hardware = if metric.convention.is_some() { self.hardware.clone() } else { Vec::new() };
        let sample = Sample { labels, value, hardware };
        match self.families.iter_mut().rev().find(|f| f.metric == metric) {
            Some(f) => f.samples.push(sample),
            None => self.families.push(Family { metric, samples: vec![sample] }),
        }
    }

    /// All of them, each family's samples by their labels, so that two looks differ only in what changed.
    pub(super) fn finish(mut self) -> Vec<Family> {
        for f in &mut self.families {
            f.samples.sort_by(|a, b| a.labels.cmp(&b.labels));
        }
        self.families
    }
}
