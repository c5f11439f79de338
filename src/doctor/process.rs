//! Other programs, with a limit for their time.

use std::io::{self, Read};
use std::process::{Command, ExitStatus, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Between two looks at whether a program has ended.
const POLL: Duration = Duration::from_millis(5);
/// More than this of what a program prints is not kept, in bytes.
const PRINTED_MAX: u64 = 4 << 20;

/// How a program ended, and what it printed.
pub(super) struct Ended {
    pub(super) status: ExitStatus,
    pub(super) out: String,
    pub(super) err: String,
}

/// Runs a program to its end, and kills it when its time is over.
///
/// # Errors
/// It cannot be started, or was killed.
pub(super) fn run(command: &mut Command, limit: Duration) -> io::Result<Ended> {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let (out, err) = (reader(child.stdout.take()), reader(child.stderr.take()));
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if begun.elapsed() > limit {
            child.kill()?;
            child.wait()?;
            let text = format!("it did not end within {} s", limit.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        std::thread::sleep(POLL);
    };
    Ok(Ended { status, out: text(out), err: text(err) })
}

type Reader = JoinHandle<Vec<u8>>;

fn reader(from: Option<impl Read + Send + 'static>) -> Reader {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        if let Some(from) = from {
            // What was read before an error counts.
            from.take(PRINTED_MAX).read_to_end(&mut bytes).ok();
        }
        bytes
    })
}

fn text(reader: Reader) -> String {
    String::from_utf8_lossy(&reader.join().unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_does_not_end_is_killed() {
        let begun = Instant::now();
        let ended = run(Command::new("sleep").arg("100"), Duration::from_millis(50));
        assert_eq!(ended.err().map(|e| e.kind()), Some(io::ErrorKind::TimedOut));
        assert!(begun.elapsed() < Duration::from_secs(50));
        let ended =
            run(Command::new("sh").args(["-c", "echo one; echo two >&2; exit 3"]), Duration::from_secs(30));
        let ended = ended.unwrap();
        assert_eq!(
            (ended.status.code(), ended.out.as_str(), ended.err.as_str()),
            (Some(3), "one\n", "two\n")
        );
    }
}
