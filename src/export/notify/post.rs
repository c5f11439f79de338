//! Requests to webhooks.

use super::settings::{Webhook, host};
use http_body_util::{BodyExt, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use opentelemetry_http::Bytes;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of an answer that are read at most, and the time for them.
const ANSWER_MAX: usize = 64 << 10;
const BODY_TIME: Duration = Duration::from_secs(1);

/// Why a request was not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The receiver was not reached, or is busy: it may take the same request later.
    Later(String),
    /// It refuses the request.
    Refused(String),
}

/// Sends requests. It needs a tokio runtime.
#[derive(Debug, Clone)]
pub struct Poster {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    /// The system has certificates to check others against.
    has_roots: bool,
}

impl Poster {
    /// A client that trusts the system's certificates. A system may have none; then only `http://` can be reached.
    ///
    /// # Errors
    /// TLS cannot be set up.
    pub fn new() -> Result<Self, String> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = rustls::RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        let has_roots = !roots.is_empty();
        let builder =
            rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
        let tls = builder.map_err(|e| e.to_string())?.with_root_certificates(roots).with_no_client_auth();
        let https = HttpsConnectorBuilder::new().with_tls_config(tls).https_or_http().enable_http1().build();
        Ok(Poster { client: Client::builder(TokioExecutor::new()).build(https), has_roots })
    }

    /// True where a webhook can be reached: `https://` needs certificates of the system.
    pub fn can_reach(&self, hook: &Webhook) -> bool {
        self.has_roots || hook.url.exposed().starts_with("http://")
    }

    /// Sends one request.
    ///
    /// # Errors
    /// It was not taken. No text holds the URL, which is a secret.
    pub async fn post(&self, hook: &Webhook, body: Vec<u8>) -> Result<(), Failure> {
        let mut request =
            hyper::http::Request::post(hook.url.exposed()).header("content-type", "application/json");
        for (name, value) in &hook.headers {
            request = request.header(name, value.exposed());
        }
        let request = request
            .body(Full::new(Bytes::from(body)))
            .map_err(|_| Failure::Refused("no request can be made".to_owned()))?;
        let name = host(hook.url.exposed()).unwrap_or_default();
        let later = |why: String| Failure::Later(format!("{name}: {why}"));
        let answer =
            tokio::time::timeout(Duration::from_millis(hook.timeout_ms), self.client.request(request));
        let answer = answer.await.map_err(|_| later("no answer in time".to_owned()))?;
        let (head, body) = answer.map_err(|e| later(cause(&e)))?.into_parts();
        // The status decides. A connection whose body is read to its end is used again.
        let rest = Limited::new(body, ANSWER_MAX).collect();
        drop(tokio::time::timeout(BODY_TIME, rest).await);
        let status = head.status;
        match status.as_u16() {
            200..=299 => Ok(()),
            408 | 429 | 500..=599 => Err(later(status.to_string())),
            _ => Err(Failure::Refused(format!("{name}: {status}"))),
        }
    }
}

/// The innermost reason of an error: the outer ones say only that the request failed.
fn cause(e: &dyn std::error::Error) -> String {
    let mut inner = e;
    while let Some(next) = inner.source() {
        inner = next;
    }
    inner.to_string()
}
