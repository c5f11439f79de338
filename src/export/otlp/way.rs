//! What lies under the exporters: a gRPC channel or an HTTP client, and what their failures mean.

use super::exporter::Error;
use super::http::{Http, read};
use super::settings::Settings;
use std::collections::BTreeMap;
use std::time::Duration;
use tonic::metadata::MetadataMap;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

/// One of the two.
#[derive(Debug)]
pub(super) enum Way {
    Grpc(Channel),
    Http(Box<Http>),
}

/// What OTLP says may be sent again: a receiver that is not there, is busy or asks for patience. The exporters give
/// the code in their words alone.
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

pub(super) fn channel(endpoint: &str, settings: &Settings) -> Result<Channel, Error> {
    check(endpoint)?;
    let wrong =
        |e: tonic::transport::Error| Error::Endpoint { endpoint: endpoint.to_owned(), why: chain(&e) };
    let timeout = Duration::from_millis(settings.timeout_ms);
    let mut channel = Endpoint::from_shared(endpoint.to_owned()).map_err(wrong)?;
    channel = channel.timeout(timeout).connect_timeout(timeout);
    if endpoint.starts_with("https://") {
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

pub(super) fn check(endpoint: &str) -> Result<(), Error> {
    let host = endpoint.strip_prefix("http://").or_else(|| endpoint.strip_prefix("https://"));
    if host.is_some_and(|h| !h.is_empty()) {
        return Ok(());
    }
    let why = "it does not begin with http:// or https:// and a host".to_owned();
    Err(Error::Endpoint { endpoint: endpoint.to_owned(), why })
}

pub(super) fn metadata(headers: &BTreeMap<String, String>) -> Result<MetadataMap, Error> {
    let mut map = MetadataMap::new();
    for (name, value) in headers {
        let wrong = || Error::Header(name.clone());
        let key: tonic::metadata::AsciiMetadataKey =
            name.to_ascii_lowercase().parse().map_err(|_| wrong())?;
        map.insert(key, value.parse().map_err(|_| wrong())?);
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
