//! The terminal: raw mode and the alternate screen, given back whatever happens.
//!
//! The guard restores the terminal when it is dropped and, by a panic hook that goes before the one
//! installed until then, on a panic. Signals are the caller's: on SIGTERM, SIGINT or SIGHUP it leaves its
//! loop and drops the guard, or calls [`restore`] where it cannot.

use super::{App, draw};
use crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode};
use crossterm::{cursor, execute};
use ratatui::backend::CrosstermBackend;
use ratatui::layout::{Position, Rect};
use std::fs::File;
use std::io::{self, BufWriter, IsTerminal, Write};
use std::os::fd::AsFd;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

/// True while the terminal is ours and has to be given back.
static HELD: AtomicBool = AtomicBool::new(false);

/// Why the terminal could not be taken.
#[derive(Debug, thiserror::Error)]
pub enum TermError {
    /// Input or output is a file or a pipe.
    #[error("standard input and output are not a terminal; use --once for one frame as text")]
    NotATerminal,
    /// The terminal cannot place a cursor.
    #[error("TERM=dumb cannot show screens; use --once for one frame as text")]
    Dumb,
    /// The terminal refused.
    #[error("cannot prepare the terminal: {0}")]
    Io(#[from] io::Error),
}

/// The terminal while it shows screens.
#[derive(Debug)]
pub struct Terminal {
    inner: ratatui::Terminal<CrosstermBackend<BufWriter<File>>>,
}

impl Terminal {
    /// Takes the terminal: raw mode, alternate screen, no cursor.
    pub fn enter() -> Result<Terminal, TermError> {
        if !io::stdout().is_terminal() || !io::stdin().is_terminal() {
            return Err(TermError::NotATerminal);
        }
        if std::env::var_os("TERM").is_some_and(|t| t == "dumb") {
            return Err(TermError::Dumb);
        }
        install_hook();
        // A handle of its own: a panic while drawing then finds standard output unlocked.
        let out = File::from(io::stdout().as_fd().try_clone_to_owned()?);
        let inner = ratatui::Terminal::new(CrosstermBackend::new(BufWriter::new(out)))?;
        let mut terminal = Terminal { inner };
        terminal.resume()?;
        Ok(terminal)
    }

    /// Draws one frame. Fails once the terminal has been given back.
    pub fn draw(&mut self, app: &App) -> io::Result<()> {
        if !HELD.load(Ordering::SeqCst) {
            return Err(io::Error::other("the terminal has been given back"));
        }
        self.inner.draw(|frame| draw(frame, app)).map(|_| ())
    }

    /// Forgets what is on the screen, so that the next frame is drawn whole.
    pub fn clear(&mut self) -> io::Result<()> {
        // ratatui's own `clear` asks the terminal where its cursor is and waits for the answer, which a
        // reader of keys may take away. A resize forgets as well and asks nothing.
        let size = self.inner.size()?;
        self.inner.resize(Rect::from((Position::ORIGIN, size)))
    }

    /// Gives the terminal back for a while. The caller then stops the process (SIGTSTP to itself).
    pub fn suspend(&mut self) -> io::Result<()> {
        self.inner.backend_mut().flush()?;
        give_back()
    }

    /// Takes the terminal again after [`Terminal::suspend`].
    pub fn resume(&mut self) -> io::Result<()> {
        HELD.store(true, Ordering::SeqCst);
        enable_raw_mode()?;
        execute!(self.inner.backend_mut(), EnterAlternateScreen, cursor::Hide)?;
        self.clear()
    }

    /// Gives the terminal back for good; dropping does the same.
    pub fn restore(&mut self) -> io::Result<()> {
        self.suspend()
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        // Nobody is left to tell when the terminal is gone.
        self.restore().ok();
    }
}

/// Gives the terminal back if it is held, from wherever it is called.
pub fn restore() {
    give_back().ok();
}

fn give_back() -> io::Result<()> {
    if !HELD.swap(false, Ordering::SeqCst) {
        return Ok(());
    }
    // Both are tried even if one fails.
    let screen = execute!(io::stdout(), LeaveAlternateScreen, cursor::Show);
    disable_raw_mode().and(screen)
}

fn install_hook() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            restore();
            before(info);
        }));
    });
}
