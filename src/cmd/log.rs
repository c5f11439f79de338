//! The log: every message of the program goes through `tracing`, and here is where it is written.
//!
//! Daemons write time and level, as text or as JSON; verbs that people type write `ringwatch: ` and the message. Whoever
//! writes it, a line holds no password of a URL and no control character: names of files and jobs are users' own.

use crate::cli::{Log, LogFormat};
use crate::secret::mask_urls;
use std::fmt::{self, Write as _};
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::os::unix::io::{AsFd, OwnedFd};
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, Registry, fmt as layer};

/// How a line of text begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Text {
    /// With the program's name.
    Plain,
    /// With time and level.
    Timed,
    /// With the level, and its number for the journal, which knows the time itself.
    Journal,
}

/// Starts the log of a verb that people type.
pub(super) fn plain() {
    start(text(Text::Plain), LevelFilter::INFO);
}

/// Starts a daemon's log.
pub(super) fn daemon(o: &Log) {
    let level = LevelFilter::from_level(o.log_level.into());
    match o.log_format {
        LogFormat::Text if is_journal() => start(text(Text::Journal), level),
        LogFormat::Text => start(text(Text::Timed), level),
        LogFormat::Json => {
            start(layer::layer().json().flatten_event(true).with_writer(Masked).boxed(), level)
        }
    }
}

type Boxed = Box<dyn Layer<Registry> + Send + Sync>;

fn text(text: Text) -> Boxed {
    layer::layer().event_format(text).with_writer(Masked).boxed()
}

/// Libraries speak only of what is wrong, at any level: they know secrets, and say much.
fn start(layer: Boxed, level: LevelFilter) {
    let ours = Targets::new().with_default(level.min(LevelFilter::WARN)).with_target("ringwatch", level);
    // A second one, where a test calls two verbs in one process, is left out.
    drop(tracing_subscriber::registry().with(layer.with_filter(ours)).try_init());
}

/// True where standard error is the journal, which `JOURNAL_STREAM` names by device and inode.
fn is_journal() -> bool {
    let stderr = || {
        let file: OwnedFd = io::stderr().as_fd().try_clone_to_owned().ok()?;
        std::fs::File::from(file).metadata().ok()
    };
    let named = std::env::var("JOURNAL_STREAM").ok();
    named.zip(stderr()).is_some_and(|(named, m)| named == format!("{}:{}", m.dev(), m.ino()))
}

impl<S, N> FormatEvent<S, N> for Text
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut out: Writer<'_>, event: &Event<'_>) -> fmt::Result {
        let level = *event.metadata().level();
        match self {
            Text::Plain => write!(out, "ringwatch: ")?,
            Text::Timed => {
                SystemTime.format_time(&mut out)?;
                write!(out, " {level:>5} ")?;
            }
            Text::Journal => write!(out, "<{}>{level}: ", severity(level))?,
        }
        let mut fields = Fields::default();
        event.record(&mut fields);
        escape(&fields.message, &mut out)?;
        escape(&fields.others, &mut out)?;
        writeln!(out)
    }
}

/// A level's number in syslog.
fn severity(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

/// Control characters would let the name of a file write lines of its own. A line of a message of several lines is
/// indented.
fn escape(text: &str, out: &mut Writer<'_>) -> fmt::Result {
    for c in text.chars() {
        match c {
            '\n' => out.write_str("\n    ")?,
            c if c.is_control() => write!(out, "{}", c.escape_default())?,
            c => out.write_char(c)?,
        }
    }
    Ok(())
}

/// The message of an event, and its other fields.
#[derive(Debug, Default)]
struct Fields {
    message: String,
    others: String,
}

impl Visit for Fields {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a text does not fail.
        match field.name() {
            "message" => write!(self.message, "{value:?}").ok(),
            name => write!(self.others, " {name}={value:?}").ok(),
        };
    }
}

/// Standard error behind a mask. A line comes as one piece.
#[derive(Debug, Clone, Copy)]
struct Masked;

impl<'a> MakeWriter<'a> for Masked {
    type Writer = Masked;

    fn make_writer(&'a self) -> Masked {
        Masked
    }
}

impl Write for Masked {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(line);
        io::stderr().write_all(mask_urls(&text).as_bytes())?;
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_cannot_be_forged_by_a_name() {
        let mut out = String::new();
        escape("removed a\n2026 INFO all is well\u{1b}[2J\r", &mut Writer::new(&mut out)).expect("written");
        assert_eq!(out, "removed a\n    2026 INFO all is well\\u{1b}[2J\\r");
    }

    #[test]
    fn levels_have_syslogs_numbers() {
        let all = [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE];
        assert_eq!(all.map(severity), [3, 4, 6, 7, 7]);
    }
}
