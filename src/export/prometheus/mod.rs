//! `/metrics`: OpenMetrics text, Prometheus' older text, or its protobuf with native histograms, as was asked for;
//! the older text where nothing was.

mod negotiate;
mod protobuf;
mod text;

pub use super::metrics::{Metrics, Own, Settings};
pub use negotiate::{Format, negotiated};

use super::metrics::{Analysis, Family};
use crate::join::Join;
use crate::model::Finding;

/// Why metrics cannot be written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The protobuf cannot be encoded.
    #[error("the metrics cannot be written as protobuf: {0}; ask for text, or turn native_histograms off")]
    Protobuf(#[from] prost::EncodeError),
}

impl Metrics {
    /// Answers a scrape in a format: content type and body.
    ///
    /// # Errors
    /// Why it cannot be written.
    pub fn render(
        &mut self,
        join: &Join,
        open: &[Finding],
        own: &Own,
        format: Format,
    ) -> Result<(String, Vec<u8>), Error> {
        let families = self.gather(join, open, own);
        self.write(&families, format)
    }

    /// The same of an analyser.
    ///
    /// # Errors
    /// Why it cannot be written.
    pub fn render_analysis(
        &mut self,
        analysis: &Analysis,
        own: &Own,
        format: Format,
    ) -> Result<(String, Vec<u8>), Error> {
        let families = self.gather_analysis(analysis, own);
        self.write(&families, format)
    }

    fn write(&mut self, families: &[Family], format: Format) -> Result<(String, Vec<u8>), Error> {
        let inspector = self.gather_inspector();
        let body = match format {
            Format::Protobuf => protobuf::write(families, inspector.as_deref().unwrap_or(&[]))?,
            Format::OpenMetrics => {
                text::open_metrics(families, inspector.as_deref().unwrap_or(&[])).into_bytes()
            }
            Format::Text => text::plain(families, inspector.as_deref().unwrap_or(&[])).into_bytes(),
        };
        Ok((format.content_type().to_owned(), body))
    }
}
