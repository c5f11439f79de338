//! Turns: several benchmarks are alive on the same GPUs, and one of them works at a time.
//!
//! Whoever compares starts them all, waits until each is ready, and then tells one after the other to measure one
//! size once. What they are compared in lies a fraction of a second apart, so that clocks, temperatures and
//! neighbours touch all of them alike. One byte down the socket gives a turn, one byte back ends it; the first one
//! back says that the benchmark is ready.

use super::error::BenchError;
use super::shared::lock;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// Between looks at whether something else has failed.
const LOOK: Duration = Duration::from_millis(20);

/// The turns that were told so far.
#[derive(Debug, Default)]
struct Told {
    turns: u64,
    over: bool,
}

/// The end of a benchmark that is given turns.
#[derive(Debug)]
pub struct Turns {
    stream: UnixStream,
    told: Arc<(Mutex<Told>, Condvar)>,
}

impl Turns {
    /// Listens to whoever gives the turns.
    ///
    /// # Errors
    /// The socket's, and that of starting a thread.
    pub fn listen(stream: UnixStream) -> io::Result<Self> {
        let told = Arc::new((Mutex::new(Told::default()), Condvar::new()));
        let (mut from, tell) = (stream.try_clone()?, told.clone());
        std::thread::Builder::new().name("turns".to_owned()).spawn(move || {
            let mut byte = [0];
            loop {
                let more = from.read_exact(&mut byte).is_ok();
                let mut told = lock(&tell.0);
                told.turns += u64::from(more);
                told.over |= !more;
                tell.1.notify_all();
                if !more {
                    break;
                }
            }
        })?;
        Ok(Turns { stream, told })
    }

    /// Waits for a turn, asleep: others work on the same CPUs. `nth` counts from 0.
    pub(super) fn wait(&self, nth: u64, failed: &AtomicBool) -> Result<(), BenchError> {
        let mut told = lock(&self.told.0);
        while told.turns <= nth {
            if told.over {
                return Err(BenchError::TurnsOver);
            }
            if failed.load(Ordering::Acquire) {
                return Err(BenchError::Cancelled);
            }
            let waited = self.told.1.wait_timeout(told, LOOK);
            told = waited.unwrap_or_else(std::sync::PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Says that it is ready, or that its turn has ended.
    pub(super) fn ended(&self) -> Result<(), BenchError> {
        (&self.stream).write_all(&[0]).map_err(|_| BenchError::TurnsOver)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_is_waited_for_and_ended() {
        let (mut giver, taker) = UnixStream::pair().unwrap();
        let turns = Arc::new(Turns::listen(taker).unwrap());
        let own = turns.clone();
        let worker = std::thread::spawn(move || {
            let failed = AtomicBool::new(false);
            own.ended().unwrap();
            for nth in 0..2 {
                own.wait(nth, &failed).unwrap();
                own.ended().unwrap();
            }
        });
        let mut byte = [0];
        giver.read_exact(&mut byte).unwrap();
        giver.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        assert!(giver.read_exact(&mut byte).is_err(), "nobody works without a turn");
        giver.set_read_timeout(None).unwrap();
        for _ in 0..2 {
            giver.write_all(&[0]).unwrap();
            giver.read_exact(&mut byte).unwrap();
        }
        worker.join().unwrap();
    }

    #[test]
    fn without_a_giver_it_is_over_and_a_failure_ends_the_waiting() {
        let (giver, taker) = UnixStream::pair().unwrap();
        let turns = Turns::listen(taker).unwrap();
        assert!(matches!(turns.wait(0, &AtomicBool::new(true)), Err(BenchError::Cancelled)));
        drop(giver);
        assert!(matches!(turns.wait(0, &AtomicBool::new(false)), Err(BenchError::TurnsOver)));
    }
}
