//! An OTLP receiver in the test's own process, built on the protocol's own definitions.

use axum::body::Bytes;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use opentelemetry_proto::tonic::collector::logs::v1 as logs;
use opentelemetry_proto::tonic::collector::metrics::v1 as metrics;
use opentelemetry_proto::tonic::collector::trace::v1 as trace;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::logs::v1::LogRecord;
use opentelemetry_proto::tonic::metrics::v1::Metric;
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use ringwatch::export::otlp::Protocol;
use std::collections::BTreeSet;
use std::io::Read;
use std::sync::{Arc, Mutex};
use tokio::net::TcpListener;
use tonic::codec::CompressionEncoding;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Identity, Server, ServerTlsConfig};
use tonic::{Request, Status};

/// What it insists on, and how it fails.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Wants {
    /// It speaks TLS only, with a certificate of its own.
    pub(crate) tls: bool,
    /// Requests need the header `x-tenant: lab`.
    pub(crate) tenant: bool,
    /// Requests need a user and a password, `user:pL4nt3d-otlp`.
    pub(crate) user: bool,
    /// So many requests are answered with "not now".
    pub(crate) unavailable: u32,
    /// It takes requests for spans and says that it refused so many of them.
    pub(crate) rejects: i64,
}

/// What it got.
#[derive(Debug, Clone, Default)]
pub(crate) struct Got {
    pub(crate) spans: Vec<Span>,
    pub(crate) logs: Vec<LogRecord>,
    pub(crate) metrics: Vec<Metric>,
    /// `service.name` of whoever sent log records or metrics.
    pub(crate) services: BTreeSet<String>,
    /// Who sent log records or metrics.
    pub(crate) resources: Vec<Resource>,
    /// Requests that were answered with "not now".
    pub(crate) refused: u32,
    /// Requests came compressed.
    pub(crate) compressed: bool,
    /// Requests had the header.
    pub(crate) tenant: bool,
}

fn service(of: Option<&Resource>) -> Option<String> {
    let name = of?.attributes.iter().find(|a| a.key == "service.name")?.value.clone()?.value?;
    match name {
        Value::StringValue(text) => Some(text),
        _ => None,
    }
}

#[derive(Debug, Clone)]
struct Shared {
    wants: Wants,
    got: Arc<Mutex<Got>>,
}

/// Why a request is not taken.
enum Refusal {
    Busy,
    Stranger,
}

impl Shared {
    fn admit<'a>(&self, header: impl Fn(&'static str) -> Option<&'a str>) -> Result<(), Refusal> {
        let mut got = self.got.lock().unwrap();
        let (tenant, encoding) = (header("x-tenant"), header("content-encoding").or(header("grpc-encoding")));
        if self.wants.user && header("authorization") != Some("Basic dXNlcjpwTDRudDNkLW90bHA=") {
            return Err(Refusal::Stranger);
        }
        if self.wants.tenant && tenant != Some("lab") {
            return Err(Refusal::Stranger);
        }
        if got.refused < self.wants.unavailable {
            got.refused += 1;
            return Err(Refusal::Busy);
        }
        got.tenant |= tenant == Some("lab");
        got.compressed |= encoding == Some("gzip");
        Ok(())
    }

    fn spans(&self, r: trace::ExportTraceServiceRequest) -> trace::ExportTraceServiceResponse {
        let spans = r.resource_spans.into_iter().flat_map(|r| r.scope_spans).flat_map(|s| s.spans);
        self.got.lock().unwrap().spans.extend(spans);
        let rejected_spans = self.wants.rejects;
        let error_message = String::new();
        let partial = trace::ExportTracePartialSuccess { rejected_spans, error_message };
        trace::ExportTraceServiceResponse { partial_success: (rejected_spans > 0).then_some(partial) }
    }

    fn logs(&self, r: logs::ExportLogsServiceRequest) -> logs::ExportLogsServiceResponse {
        self.got.lock().unwrap().resources.extend(r.resource_logs.iter().filter_map(|r| r.resource.clone()));
        let senders = r.resource_logs.iter().filter_map(|r| service(r.resource.as_ref()));
        self.got.lock().unwrap().services.extend(senders);
        let records = r.resource_logs.into_iter().flat_map(|r| r.scope_logs).flat_map(|s| s.log_records);
        self.got.lock().unwrap().logs.extend(records);
        logs::ExportLogsServiceResponse::default()
    }

    fn metrics(&self, r: metrics::ExportMetricsServiceRequest) -> metrics::ExportMetricsServiceResponse {
        let of = r.resource_metrics.iter().filter_map(|r| r.resource.clone());
        self.got.lock().unwrap().resources.extend(of);
        let senders = r.resource_metrics.iter().filter_map(|r| service(r.resource.as_ref()));
        self.got.lock().unwrap().services.extend(senders);
        let of = r.resource_metrics.into_iter().flat_map(|r| r.scope_metrics).flat_map(|s| s.metrics);
        self.got.lock().unwrap().metrics.extend(of);
        metrics::ExportMetricsServiceResponse::default()
    }

    fn rpc<T>(&self, request: Request<T>) -> Result<T, Status> {
        let header = |name| request.metadata().get(name).and_then(|v| v.to_str().ok());
        match self.admit(header) {
            Ok(()) => Ok(request.into_inner()),
            Err(Refusal::Busy) => Err(Status::unavailable("not now")),
            Err(Refusal::Stranger) => Err(Status::unauthenticated("who are you")),
        }
    }

    fn http<Q: Message + Default, A: Message>(
        &self,
        headers: &HeaderMap,
        body: &Bytes,
        take: impl Fn(&Self, Q) -> A,
    ) -> Response {
        let header = |name| headers.get(name).and_then(|v| v.to_str().ok());
        let encoding = header("content-encoding");
        match self.admit(header) {
            Ok(()) => {}
            Err(Refusal::Busy) => return StatusCode::SERVICE_UNAVAILABLE.into_response(),
            Err(Refusal::Stranger) => return StatusCode::UNAUTHORIZED.into_response(),
        }
        let mut plain = Vec::new();
        if encoding == Some("gzip") {
            flate2::read::GzDecoder::new(&body[..]).read_to_end(&mut plain).unwrap();
        } else {
            plain.extend_from_slice(body);
        }
        let answer = take(self, Q::decode(&plain[..]).unwrap());
        ([("content-type", "application/x-protobuf")], answer.encode_to_vec()).into_response()
    }
}

#[tonic::async_trait]
impl trace::trace_service_server::TraceService for Shared {
    async fn export(
        &self,
        request: Request<trace::ExportTraceServiceRequest>,
    ) -> Result<tonic::Response<trace::ExportTraceServiceResponse>, Status> {
        Ok(tonic::Response::new(self.spans(self.rpc(request)?)))
    }
}

#[tonic::async_trait]
impl logs::logs_service_server::LogsService for Shared {
    async fn export(
        &self,
        request: Request<logs::ExportLogsServiceRequest>,
    ) -> Result<tonic::Response<logs::ExportLogsServiceResponse>, Status> {
        Ok(tonic::Response::new(self.logs(self.rpc(request)?)))
    }
}

#[tonic::async_trait]
impl metrics::metrics_service_server::MetricsService for Shared {
    async fn export(
        &self,
        request: Request<metrics::ExportMetricsServiceRequest>,
    ) -> Result<tonic::Response<metrics::ExportMetricsServiceResponse>, Status> {
        Ok(tonic::Response::new(self.metrics(self.rpc(request)?)))
    }
}

/// The receiver, on threads of its own, so that it can be killed with all its connections.
pub(crate) struct Receiver {
    pub(crate) endpoint: String,
    pub(crate) port: u16,
    pub(crate) wants: Wants,
    /// Its certificate.
    pub(crate) ca: tempfile::NamedTempFile,
    shared: Shared,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Receiver {
    pub(crate) fn start(protocol: Protocol, wants: Wants, port: Option<u16>) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = listen(port.unwrap_or(0));
        let port = listener.local_addr().unwrap().port();
        let key = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let (cert, secret) = (key.cert.pem(), key.signing_key.serialize_pem());
        let ca = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(ca.path(), &cert).unwrap();
        let shared = Shared { wants, got: Arc::default() };
        let of = shared.clone();
        match protocol {
            Protocol::Grpc => runtime.spawn(async move {
                let mut server = Server::builder();
                if wants.tls {
                    let identity = Identity::from_pem(&cert, &secret);
                    server = server.tls_config(ServerTlsConfig::new().identity(identity)).unwrap();
                }
                let traces = trace::trace_service_server::TraceServiceServer::new(of.clone());
                let records = logs::logs_service_server::LogsServiceServer::new(of.clone());
                let points = metrics::metrics_service_server::MetricsServiceServer::new(of);
                let router = server
                    .add_service(traces.accept_compressed(CompressionEncoding::Gzip))
                    .add_service(records.accept_compressed(CompressionEncoding::Gzip))
                    .add_service(points.accept_compressed(CompressionEncoding::Gzip));
                let incoming = TcpIncoming::from(TcpListener::from_std(listener).unwrap());
                router.serve_with_incoming(incoming).await.unwrap();
            }),
            Protocol::Http => runtime.spawn(async move {
                let traces = |State(s): State<Shared>, h: HeaderMap, b: Bytes| async move {
                    s.http(&h, &b, Shared::spans)
                };
                let records = |State(s): State<Shared>, h: HeaderMap, b: Bytes| async move {
                    s.http(&h, &b, Shared::logs)
                };
                let points = |State(s): State<Shared>, h: HeaderMap, b: Bytes| async move {
                    s.http(&h, &b, Shared::metrics)
                };
                let app = axum::Router::new()
                    .route("/v1/traces", post(traces))
                    .route("/v1/logs", post(records))
                    .route("/v1/metrics", post(points))
                    .with_state(of);
                let listener = TcpListener::from_std(listener).unwrap();
                if wants.tls {
                    axum::serve(Tls::new(listener, &cert, &secret), app).await.unwrap();
                } else {
                    axum::serve(listener, app).await.unwrap();
                }
            }),
        };
        let (scheme, host) = if wants.tls { ("https", "localhost") } else { ("http", "127.0.0.1") };
        let endpoint = format!("{scheme}://{host}:{port}");
        Receiver { endpoint, port, wants, ca, shared, runtime: Some(runtime) }
    }

    pub(crate) fn got(&self) -> Got {
        self.shared.got.lock().unwrap().clone()
    }

    /// Kills it; what it had got.
    pub(crate) fn stop(self) -> Got {
        let shared = self.shared.clone();
        drop(self);
        let got = shared.got.lock().unwrap();
        got.clone()
    }
}

impl Drop for Receiver {
    fn drop(&mut self) {
        // Until the last of its threads has ended, it takes requests and answers them. Where a runtime runs, it may not
        // be waited for, so another thread does.
        if let Some(runtime) = self.runtime.take() {
            let end = std::thread::spawn(|| runtime.shutdown_timeout(std::time::Duration::from_secs(30)));
            end.join().unwrap();
        }
    }
}

/// A port that was in use a moment ago may still be.
fn listen(port: u16) -> std::net::TcpListener {
    let mut tries = 0;
    loop {
        match std::net::TcpListener::bind(("127.0.0.1", port)) {
            Ok(listener) => {
                listener.set_nonblocking(true).unwrap();
                return listener;
            }
            Err(e) => {
                tries += 1;
                assert!(tries < 100, "{e}");
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
        }
    }
}

/// TLS in front of axum.
struct Tls {
    listener: TcpListener,
    acceptor: tokio_rustls::TlsAcceptor,
}

impl Tls {
    fn new(listener: TcpListener, cert: &str, key: &str) -> Self {
        use rustls::pki_types::pem::PemObject;
        use rustls::pki_types::{CertificateDer, PrivateKeyDer};
        let cert = CertificateDer::from_pem_slice(cert.as_bytes()).unwrap();
        let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![cert], key)
            .unwrap();
        Tls { listener, acceptor: tokio_rustls::TlsAcceptor::from(Arc::new(config)) }
    }
}

impl axum::serve::Listener for Tls {
    type Io = tokio_rustls::server::TlsStream<tokio::net::TcpStream>;
    type Addr = std::net::SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        loop {
            let (stream, address) = self.listener.accept().await.unwrap();
            // A client that does not trust us goes away.
            if let Ok(stream) = self.acceptor.accept(stream).await {
                return (stream, address);
            }
        }
    }

    fn local_addr(&self) -> std::io::Result<Self::Addr> {
        self.listener.local_addr()
    }
}
