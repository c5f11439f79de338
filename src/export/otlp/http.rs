//! HTTP/1.1 with TLS by rustls, for the exporters that travel so.

use super::exporter::Error;
use super::settings::Settings;
use async_trait::async_trait;
use http_body_util::{BodyExt, Full, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use opentelemetry_http::{Bytes, HttpClient, HttpError, Request, Response};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// An answer says little; a longer one is none of a receiver's.
const ANSWER: usize = 1 << 20;

/// A client for all signals.
#[derive(Debug, Clone)]
pub(super) struct Http {
    client: Client<HttpsConnector<HttpConnector>, Full<Bytes>>,
    timeout: Duration,
}

impl Http {
    pub(super) fn new(settings: &Settings) -> Result<Self, Error> {
        let https = HttpsConnectorBuilder::new()
            .with_tls_config(tls(settings)?)
            .https_or_http()
            .enable_http1()
            .build();
        Ok(Http {
            client: Client::builder(TokioExecutor::new()).build(https),
            timeout: Duration::from_millis(settings.timeout_ms),
        })
    }
}

#[async_trait]
impl HttpClient for Http {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let answer = tokio::time::timeout(self.timeout, async {
            let answer = self.client.request(request.map(Full::new)).await?;
            let (head, body) = answer.into_parts();
            let body = Limited::new(body, ANSWER).collect().await?.to_bytes();
            Ok::<_, HttpError>(Response::from_parts(head, body))
        });
        answer.await?
    }
}

/// The trusted certificates and our own. The provider is named, since other crates may bring another one.
fn tls(settings: &Settings) -> Result<ClientConfig, Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let wrong = |e: rustls::Error| Error::Tls(e.to_string());
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let mut roots = RootCertStore::empty();
    match &settings.ca {
        Some(path) => {
            for cert in certificates(path)? {
                roots.add(cert).map_err(wrong)?;
            }
        }
        None => {
            // A system may have none; then only what needs none can be reached, and says so.
            for cert in rustls_native_certs::load_native_certs().certs {
                roots.add_parsable_certificates([cert]);
            }
        }
    }
    let builder = builder.map_err(wrong)?.with_root_certificates(roots);
    match (&settings.cert, &settings.key) {
        (Some(cert), Some(key)) => {
            let key = PrivateKeyDer::from_pem_slice(&read(key)?)
                .map_err(|e| Error::Tls(format!("{}: {e}", key.display())))?;
            builder.with_client_auth_cert(certificates(cert)?, key).map_err(wrong)
        }
        (None, None) => Ok(builder.with_no_client_auth()),
        _ => Err(Error::Tls("cert and key belong together: give both or none".to_owned())),
    }
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, Error> {
    let pem = read(path)?;
    let certs: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    match certs {
        Ok(certs) if !certs.is_empty() => Ok(certs),
        Ok(_) => Err(Error::Tls(format!("{}: no certificate in it", path.display()))),
        Err(e) => Err(Error::Tls(format!("{}: {e}", path.display()))),
    }
}

pub(super) fn read(path: &Path) -> Result<Vec<u8>, Error> {
    std::fs::read(path).map_err(|source| Error::File { path: path.to_owned(), source })
}
