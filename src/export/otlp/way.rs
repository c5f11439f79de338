//! The transport under the exporters: a gRPC channel or an HTTP client, and the meaning of their failures.

use super::exporter::Error;
use super::http::{Http, read};
use super::settings::Settings;
use crate::secret::{SecretText, SecretUrl};
use base64::prelude::{BASE64_STANDARD, Engine as _};
use std::collections::BTreeMap;
use std::time::Duration;
use tonic::codegen::http::Uri;
use tonic::metadata::{AsciiMetadataValue, MetadataMap};
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

/// One of the two.
#[derive(Debug)]
pub(super) enum Way {
    Grpc(Channel),
    Http(Box<Http>),
}

/// Returns whether OTLP lets a request be sent again: a receiver that is not there, is busy or asks for patience. The
/// exporters give the code in their words alone.
pub(super) fn may_come_again(why: &str) -> bool {
    const GRPC: [&str; 7] = [
        "Cancelled",
        "DeadlineExceeded",
        "Aborted",
        "OutOfRange",
        "Unavailable",
        "DataLoss",
        "ResourceExhausted",
    ];
    const HTTP: [&str; 5] = ["0", "429", "502", "503", "504"];
    if let Some((_, code)) = why.split_once("gRPC code: ") {
        let code = code.split(|c: char| !c.is_ascii_alphabetic()).next().unwrap_or("");
        // What tonic could not send at all is Unknown, with the cause behind it.
        return GRPC.contains(&code) || why.contains("Unknown: ");
    }
    match why.split_once("status code: ") {
        Some((_, code)) => HTTP.contains(&code.trim()),
        None => true,
    }
}

pub(super) fn channel(endpoint: &SecretUrl, settings: &Settings) -> Result<Channel, Error> {
    check(endpoint, settings)?;
    let wrong = |e: tonic::transport::Error| Error::Endpoint {
        endpoint: endpoint.clone(),
        why: endpoint.hide_in(&chain(&e)),
    };
    let timeout = Duration::from_millis(settings.timeout_ms);
    let mut channel = Endpoint::from_shared(endpoint.exposed().to_owned()).map_err(wrong)?;
    channel = channel.timeout(timeout).connect_timeout(timeout);
    if endpoint.has_scheme("https://") {
        let mut tls = ClientTlsConfig::new();
        tls = match &settings.ca {
            Some(ca) => tls.ca_certificate(Certificate::from_pem(read(ca)?)),
            None => tls.with_native_roots(),
        };
        tls = match (&settings.cert, &settings.key) {
            (Some(cert), Some(key)) => tls.identity(Identity::from_pem(read(cert)?, read(key)?)),
            (None, None) => tls,
            _ => return Err(Error::Tls("cert and key belong together: give both or none".to_owned())),
        };
        channel = channel.tls_config(tls).map_err(|e| Error::Tls(chain(&e)))?;
    }
    Ok(channel.connect_lazy())
}

pub(super) fn check(endpoint: &SecretUrl, settings: &Settings) -> Result<(), Error> {
    let url = endpoint.exposed();
    let certificates = settings.ca.is_some() || settings.cert.is_some();
    if certificates && !endpoint.has_scheme("https://") {
        let endpoint = endpoint.clone();
        return Err(Error::Tls(format!(
            "certificates are set, and {endpoint} goes without TLS; write https://"
        )));
    }
    let host = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
    let uri = url.parse::<Uri>().ok().filter(|_| host.is_some_and(|h| !h.is_empty()));
    let authority = uri.as_ref().and_then(Uri::authority);
    let why = match authority {
        // A port that is none is part of an authority all the same.
        Some(a) if a.port_u16().is_some() || a.as_str() == a.host() => return Ok(()),
        Some(_) => "its port is none".to_owned(),
        None => "it does not begin with http:// or https:// and a host".to_owned(),
    };
    Err(Error::Endpoint { endpoint: endpoint.clone(), why })
}

/// The headers of every request; those that are set, and the user of the endpoint where none sets `authorization`.
pub(super) fn headers(
    settings: &Settings,
    user: Option<&(SecretText, SecretText)>,
) -> BTreeMap<String, SecretText> {
    let mut all = settings.headers.clone();
    let set = all.keys().any(|name| name.eq_ignore_ascii_case("authorization"));
    if let Some((name, password)) = user.filter(|_| !set) {
        let both = BASE64_STANDARD.encode(format!("{}:{}", name.exposed(), password.exposed()));
        all.insert("authorization".to_owned(), format!("Basic {both}").into());
    }
    all
}

pub(super) fn metadata(headers: &BTreeMap<String, SecretText>) -> Result<MetadataMap, Error> {
    let mut map = MetadataMap::new();
    for (name, value) in headers {
        let wrong = || Error::Header(name.clone());
        let key: tonic::metadata::AsciiMetadataKey =
            name.to_ascii_lowercase().parse().map_err(|_| wrong())?;
        let mut value: AsciiMetadataValue = value.exposed().parse().map_err(|_| wrong())?;
        // It prints as such, and stays out of HTTP/2's table of headers.
        value.set_sensitive(true);
        map.insert(key, value);
    }
    Ok(map)
}

fn chain(e: &dyn std::error::Error) -> String {
    let mut text = e.to_string();
    let mut next = e.source();
    while let Some(cause) = next {
        text = format!("{text}: {cause}");
        next = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_come_again_is_what_otlp_says() {
        for (why, again) in [
            ("TonicTracesClient export failed with gRPC code: Unavailable: tcp connect error", true),
            ("TonicTracesClient export failed with gRPC code: InvalidArgument", false),
            ("TonicTracesClient export failed with gRPC code: ResourceExhausted", true),
            ("TonicTracesClient export failed with gRPC code: Unauthenticated", false),
            ("TonicTracesClient export failed with gRPC code: Unknown: transport error", true),
            ("HTTP export failed with status code: 503", true),
            ("HTTP export failed with status code: 400", false),
            ("HTTP export failed: network error", true),
        ] {
            assert_eq!(may_come_again(why), again, "{why}");
        }
    }
}
