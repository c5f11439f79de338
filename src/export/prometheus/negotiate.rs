//! The format that a scraper wants, by its `Accept` header.

/// The formats there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Format {
    /// OpenMetrics 1.0 text.
    OpenMetrics,
    /// Prometheus' text 0.0.4: no exemplars, no units.
    Text,
    /// Prometheus' protobuf, each family behind its length.
    Protobuf,
}

impl Format {
    /// Its `Content-Type`.
    pub const fn content_type(self) -> &'static str {
        match self {
            Format::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Format::Text => "text/plain; version=0.0.4; charset=utf-8",
            Format::Protobuf => {
                "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
            }
        }
    }
}

/// The wanted format that is offered: the one of highest weight, the first of equals. A scraper that names none of them, as
/// curl does not, gets Prometheus' text, which every tool reads (`promtool check metrics` reads nothing else).
pub fn negotiated(accept: Option<&str>, protobuf: bool) -> Format {
    let mut best: Option<(f64, Format)> = None;
    for part in accept.unwrap_or("").split(',') {
        let mut fields = part.split(';').map(str::trim);
        let media = fields.next().unwrap_or("").to_ascii_lowercase();
        let parameters: Vec<(String, String)> = fields
            .filter_map(|f| f.split_once('='))
            .map(|(k, v)| (k.trim().to_ascii_lowercase(), v.trim().trim_matches('"').to_owned()))
            .collect();
        let parameter = |name: &str| parameters.iter().find(|(k, _)| k == name).map(|(_, v)| v.as_str());
        let format = match media.as_str() {
            "application/openmetrics-text" => Format::OpenMetrics,
            "text/plain" => Format::Text,
            "application/vnd.google.protobuf"
                if protobuf
                    && parameter("proto") == Some("io.prometheus.client.MetricFamily")
                    && parameter("encoding") == Some("delimited") =>
            {
                Format::Protobuf
            }
            _ => continue,
        };
        let weight = parameter("q").map_or(1.0, |q| q.parse().unwrap_or(0.0));
        if weight > 0.0 && best.is_none_or(|(w, _)| weight > w) {
            best = Some((weight, format));
        }
    }
    best.map_or(Format::Text, |(_, f)| f)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scraper_gets_what_it_weighs_most_among_what_is_offered() {
        // What Prometheus 2.42 sends with and without native histograms.
        let native = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited,\
            application/openmetrics-text;version=1.0.0;q=0.8,application/openmetrics-text;version=0.0.1;q=0.75,\
            text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        let classic = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
            text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        for (accept, offered, want) in [
            (Some(native), true, Format::Protobuf),
            (Some(native), false, Format::OpenMetrics),
            (Some(classic), true, Format::OpenMetrics),
            (Some("text/plain;q=0.5"), true, Format::Text),
            (Some("application/vnd.google.protobuf;encoding=text, text/plain"), true, Format::Text),
            (Some("text/plain;q=0, */*"), true, Format::Text),
            (Some("*/*"), true, Format::Text),
            (Some("text/html"), true, Format::Text),
            (Some(";;=,,q="), true, Format::Text),
            (None, true, Format::Text),
        ] {
            assert_eq!(negotiated(accept, offered), want, "{accept:?}");
        }
    }
}
