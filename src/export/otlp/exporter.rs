//! The way to the receiver.

use super::http::Http;
use super::partial::listening;
use super::point;
use super::queue::{Batch, LOGS, LogEntry};
use super::settings::{Compression, Protocol, Settings};
use super::way::{Way, channel, check, headers, may_come_again, metadata};
use crate::export::metrics::{Exported, Family};
use crate::secret::{SecretText, SecretUrl};
use flate2::write::GzEncoder;
use opentelemetry::logs::{LogRecord as _, Logger as _, LoggerProvider as _};
use opentelemetry::{InstrumentationScope, KeyValue, SpanId, TraceFlags, TraceId};
use opentelemetry_http::HttpClient as _;
use opentelemetry_otlp::{LogExporter, SpanExporter, WithExportConfig, WithHttpConfig, WithTonicConfig};
use opentelemetry_proto::tonic::collector::metrics::v1::metrics_service_client::MetricsServiceClient;
use opentelemetry_proto::tonic::collector::metrics::v1::{
    ExportMetricsServiceRequest, ExportMetricsServiceResponse,
};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkError;
use opentelemetry_sdk::logs::{LogBatch, LogExporter as _, SdkLogRecord, SdkLogger, SdkLoggerProvider};
use opentelemetry_sdk::trace::SpanExporter as _;
use prost::Message;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};
use tonic::codec::CompressionEncoding;
use tonic::metadata::MetadataMap;
use tonic::transport::Channel;

/// Why something cannot be sent.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no receiver.
    #[error("no OTLP endpoint is set: give one, as http://collector:4317")]
    NoEndpoint,
    /// The endpoint is no address.
    #[error("{endpoint} is no OTLP endpoint: {why}; http:// or https://, a host and a port are needed")]
    Endpoint {
        /// The endpoint as it was given.
        endpoint: SecretUrl,
        /// The fault in it.
        why: String,
    },
    /// A header has a name or a value that HTTP does not allow.
    #[error("the OTLP header {0} cannot be sent: its name or its value is none that HTTP allows")]
    Header(String),
    /// A file cannot be read.
    #[error("{}: {source}", path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// TLS cannot be set up.
    #[error("TLS for OTLP cannot be set up: {0}")]
    Tls(String),
    /// The exporter refused its settings.
    #[error("the OTLP exporter cannot be set up: {0}")]
    Setup(String),
    /// The receiver was not reached, or said to come again.
    #[error("the OTLP receiver {endpoint} took no {signal}: {why}; they wait and are sent again")]
    Unreachable {
        /// Where.
        endpoint: SecretUrl,
        /// Spans, logs or metrics.
        signal: &'static str,
        /// The event.
        why: String,
    },
    /// The receiver refuses them for good.
    #[error("the OTLP receiver {endpoint} refused {count} {signal} for good: {why}; they are lost")]
    Refused {
        /// Where.
        endpoint: SecretUrl,
        /// Spans, logs or metrics.
        signal: &'static str,
        /// How many.
        count: u64,
        /// The event.
        why: String,
    },
}

/// Why something was lost here.
const REFUSED: &str = "the receiver refused them";

#[derive(Debug, Default)]
struct Count {
    sent: AtomicU64,
    refused: AtomicU64,
}

impl Count {
    fn add(&self, sent: u64, refused: u64) {
        self.sent.fetch_add(sent, Ordering::Relaxed);
        self.refused.fetch_add(refused, Ordering::Relaxed);
    }
}

/// Sends batches and metrics to one receiver.
pub struct Exporter {
    /// Without the user that may have been in it.
    endpoint: SecretUrl,
    /// Of every request.
    headers: BTreeMap<String, SecretText>,
    settings: Settings,
    resource: Vec<(String, String)>,
    way: Way,
    metadata: MetadataMap,
    spans: SpanExporter,
    logs: LogExporter,
    logger: SdkLogger,
    scope: InstrumentationScope,
    counts: [Count; 3],
}

/// A derived output would print the headers.
impl fmt::Debug for Exporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exporter").field("endpoint", &self.endpoint).finish_non_exhaustive()
    }
}

/// Where the counts of signals are.
const SPANS: usize = 0;
const LOG: usize = 1;
const METRICS: usize = 2;

impl Exporter {
    /// A way to the receiver; it is reached when something is sent. Needs a tokio runtime. The resource says who
    /// sends, `service.name` and `host.name` for example.
    pub fn new(settings: &Settings, resource: Vec<(String, String)>) -> Result<Self, Error> {
        let (endpoint, user) = settings.endpoint.as_ref().ok_or(Error::NoEndpoint)?.split_user();
        let url = endpoint.exposed().trim_end_matches('/').to_owned();
        let endpoint = SecretUrl::from(url.as_str());
        let timeout = Duration::from_millis(settings.timeout_ms);
        let setup = |e: opentelemetry_otlp::ExporterBuildError| Error::Setup(e.to_string());
        let gzip = settings.compression == Compression::Gzip;
        let headers = headers(settings, user.as_ref());
        let metadata = metadata(&headers)?;
        let (way, mut spans, mut logs);
        match settings.protocol {
            Protocol::Grpc => {
                let channel = channel(&endpoint, settings)?;
                let mut s = SpanExporter::builder().with_tonic().with_channel(channel.clone());
                let mut l = LogExporter::builder().with_tonic().with_channel(channel.clone());
                s = s.with_metadata(metadata.clone()).with_timeout(timeout);
                l = l.with_metadata(metadata.clone()).with_timeout(timeout);
                if gzip {
                    s = s.with_compression(opentelemetry_otlp::Compression::Gzip);
                    l = l.with_compression(opentelemetry_otlp::Compression::Gzip);
                }
                (spans, logs) = (s.build().map_err(setup)?, l.build().map_err(setup)?);
                way = Way::Grpc(channel);
            }
            Protocol::Http => {
                check(&endpoint, settings)?;
                let http = Http::new(settings)?;
                let of_all = headers.iter().map(|(name, value)| (name.clone(), value.exposed().to_owned()));
                let of_all: HashMap<String, String> = of_all.collect();
                let mut s = SpanExporter::builder()
                    .with_http()
                    .with_http_client(http.clone())
                    .with_headers(of_all.clone())
                    .with_endpoint(format!("{url}/v1/traces"))
                    .with_protocol(opentelemetry_otlp::Protocol::HttpBinary)
                    .with_timeout(timeout);
                let mut l = LogExporter::builder()
                    .with_http()
                    .with_http_client(http.clone())
                    .with_headers(of_all)
                    .with_endpoint(format!("{url}/v1/logs"))
                    .with_protocol(opentelemetry_otlp::Protocol::HttpBinary)
                    .with_timeout(timeout);
                if gzip {
                    s = s.with_compression(opentelemetry_otlp::Compression::Gzip);
                    l = l.with_compression(opentelemetry_otlp::Compression::Gzip);
                }
                (spans, logs) = (s.build().map_err(setup)?, l.build().map_err(setup)?);
                way = Way::Http(Box::new(http));
            }
        }
        let attributes = resource.iter().map(|(k, v)| KeyValue::new(k.clone(), v.clone()));
        let of = Resource::builder_empty().with_attributes(attributes).build();
        spans.set_resource(&of);
        logs.set_resource(&of);
        Ok(Exporter {
            endpoint,
            headers,
            settings: settings.clone(),
            resource,
            way,
            metadata,
            spans,
            logs,
            // It only makes empty records, which nothing else can.
            logger: SdkLoggerProvider::builder().build().logger("ringwatch"),
            scope: InstrumentationScope::builder("ringwatch").with_version(env!("CARGO_PKG_VERSION")).build(),
            counts: Default::default(),
        })
    }

    /// Sends what was taken from the tracer. Where the receiver could not be reached, what is to be sent again comes
    /// back: give it back to the tracer and wait a while. What it refuses for good is counted and told, and does not
    /// come back.
    pub async fn send(&self, batch: Batch) -> Result<(), (Error, Batch)> {
        let mut back = Batch::default();
        let mut error = None;
        if !batch.spans.is_empty() {
            let n = batch.spans.len() as u64;
            let (sent, partly) = listening(self.spans.export(batch.spans.clone())).await;
            if let Err(e) = self.judge(sent, SPANS, n, partly) {
                if let Error::Unreachable { .. } = e {
                    back.spans = batch.spans;
                }
                error = Some(e);
            }
        }
        if !batch.logs.is_empty() {
            let n = batch.logs.len() as u64;
            let records: Vec<SdkLogRecord> = batch.logs.iter().map(|l| self.record(l)).collect();
            let pairs: Vec<_> = records.iter().map(|r| (r, &self.scope)).collect();
            let (sent, partly) = listening(self.logs.export(LogBatch::new(&pairs))).await;
            if let Err(e) = self.judge(sent, LOG, n, partly) {
                if let Error::Unreachable { .. } = e {
                    back.logs = batch.logs;
                }
                error = Some(e);
            }
        }
        match error {
            None => Ok(()),
            Some(e) => Err((e, back)),
        }
    }

    fn judge(&self, sent: Result<(), OTelSdkError>, signal: usize, n: u64, partly: u64) -> Result<(), Error> {
        let Err(e) = sent else {
            self.counts[signal].add(n.saturating_sub(partly), partly.min(n));
            return Ok(());
        };
        let why = self.endpoint.hide_in(&e.to_string());
        let (endpoint, name) = (self.endpoint.clone(), NAMES[signal]);
        if may_come_again(&why) {
            return Err(Error::Unreachable { endpoint, signal: name, why });
        }
        self.counts[signal].add(0, n);
        Err(Error::Refused { endpoint, signal: name, count: n, why })
    }

    fn record(&self, log: &LogEntry) -> SdkLogRecord {
        let mut r = self.logger.create_log_record();
        let at = UNIX_EPOCH + Duration::from_nanos(log.unix_ns);
        r.set_timestamp(at);
        r.set_observed_timestamp(at);
        r.set_event_name(log.event);
        r.set_severity_number(log.severity);
        r.set_severity_text(log.severity.name());
        r.set_body(log.body.clone().into());
        r.add_attributes(log.attributes.iter().cloned());
        if let Some((trace, span)) = log.context {
            r.set_trace_context(TraceId::from(trace), SpanId::from(span), Some(TraceFlags::SAMPLED));
        }
        r
    }

    /// Sends metrics as they are at a moment (ns since the epoch); counters count from the agent's start. What does
    /// not arrive is in the next ones.
    pub async fn metrics(
        &self,
        families: &[Family],
        started_unix_ns: u64,
        unix_ns: u64,
    ) -> Result<(), Error> {
        let of = point::Span { start: started_unix_ns, now: unix_ns };
        let (request, points) = point::request(families, &self.resource, of);
        let answer = match &self.way {
            Way::Grpc(channel) => self.metrics_by_grpc(channel.clone(), request).await,
            Way::Http(http) => self.metrics_by_http(http, &request).await,
        };
        match answer {
            Ok(answer) => {
                let refused = point::refused(answer.partial_success.map(|p| p.rejected_data_points));
                self.counts[METRICS].add(points.saturating_sub(refused), refused.min(points));
                Ok(())
            }
            Err((why, true)) => {
                Err(Error::Unreachable { endpoint: self.endpoint.clone(), signal: NAMES[METRICS], why })
            }
            Err((why, false)) => {
                self.counts[METRICS].add(0, points);
                let endpoint = self.endpoint.clone();
                Err(Error::Refused { endpoint, signal: NAMES[METRICS], count: points, why })
            }
        }
    }

    async fn metrics_by_grpc(
        &self,
        channel: Channel,
        request: ExportMetricsServiceRequest,
    ) -> Result<ExportMetricsServiceResponse, (String, bool)> {
        let mut client = MetricsServiceClient::new(channel);
        if self.settings.compression == Compression::Gzip {
            client = client.send_compressed(CompressionEncoding::Gzip);
        }
        let mut request = tonic::Request::new(request);
        *request.metadata_mut() = self.metadata.clone();
        let answer = client.export(request).await;
        answer.map(tonic::Response::into_inner).map_err(|status| {
            let why = format!("gRPC code: {:?}", status.code());
            let again = may_come_again(&why);
            (why, again)
        })
    }

    async fn metrics_by_http(
        &self,
        http: &Http,
        request: &ExportMetricsServiceRequest,
    ) -> Result<ExportMetricsServiceResponse, (String, bool)> {
        let mut builder =
            opentelemetry_http::Request::post(format!("{}/v1/metrics", self.endpoint.exposed()))
                .header("content-type", "application/x-protobuf");
        for (name, value) in &self.headers {
            builder = builder.header(name, value.exposed());
        }
        let mut body = request.encode_to_vec();
        if self.settings.compression == Compression::Gzip {
            body = gzip(&body).map_err(|e| (e.to_string(), false))?;
            builder = builder.header("content-encoding", "gzip");
        }
        let request = builder.body(body.into()).map_err(|e| (e.to_string(), false))?;
        let answer = http.send_bytes(request).await.map_err(|e| (e.to_string(), true))?;
        if !answer.status().is_success() {
            let why = format!("status code: {}", answer.status().as_u16());
            let again = may_come_again(&why);
            return Err((why, again));
        }
        // What cannot be read says nothing against the metrics, which were taken.
        Ok(ExportMetricsServiceResponse::decode(answer.into_body()).unwrap_or_default())
    }

    /// The accounting of what was sent and refused so far, with what waits and was lost in the tracer: for the
    /// agent's own metrics.
    pub fn exported(&self, of_tracer: Vec<Exported>) -> Vec<Exported> {
        let mut all: BTreeMap<&'static str, Exported> =
            of_tracer.into_iter().map(|e| (e.signal, e)).collect();
        for (name, count) in NAMES.into_iter().zip(&self.counts) {
            let e = all.entry(name).or_insert_with(|| Exported { signal: name, ..Exported::default() });
            e.sent += count.sent.load(Ordering::Relaxed);
            *e.lost.entry(REFUSED).or_default() += count.refused.load(Ordering::Relaxed);
        }
        all.into_values().collect()
    }
}

const NAMES: [&str; 3] = ["spans", LOGS, "metrics"];

fn gzip(body: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), flate2::Compression::default());
    encoder.write_all(body)?;
    encoder.finish()
}
