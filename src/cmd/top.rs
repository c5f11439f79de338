//! `ringwatch top`: the screen.

use super::playback::{self, Playing, Seek};
use super::{baselines, block_on, monitor};
use crate::cli::Top;
use crate::ingest::{Segments, now_ns};
use crate::model::Snapshot;
use crate::runtime::cluster::Live;
use crate::runtime::signals::Signals;
use crate::runtime::{Monitor, Remote, ask};
use crate::view;
use crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind};
use std::io::{self, Write};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// How often segments are read.
const STEP: Duration = Duration::from_millis(20);
/// How often the screen changes by itself: as fast as a person can read it.
const FRAME: Duration = Duration::from_millis(250);
/// How long --once watches before it prints: rates need a whole second.
const ONCE: Duration = Duration::from_millis(2200);

/// The source of the screen: what is read here, or what an agent or a cluster's analysers send.
pub(super) enum Shown {
    Here(Box<Monitor<Segments>>),
    Agent(Box<Remote>),
    Cluster(Box<Live>),
    Recording(Box<Playing>),
}

impl Shown {
    fn step(&mut self) -> anyhow::Result<()> {
        match self {
            Shown::Here(monitor) => drop(monitor.step(now_ns())),
            Shown::Recording(playing) => playing.step()?,
            Shown::Agent(_) | Shown::Cluster(_) => {}
        }
        Ok(())
    }

    /// Takes a key that moves a recording. False where it is none.
    fn seek(&mut self, key: KeyEvent, app: &view::App) -> anyhow::Result<bool> {
        let (Shown::Recording(playing), KeyCode::Char(c)) = (self, key.code) else { return Ok(false) };
        let is_for_it = !app.editing() && key.kind != KeyEventKind::Release && key.modifiers.is_empty();
        let Some(seek) = Seek::of(c).filter(|_| is_for_it) else { return Ok(false) };
        playing.seek(seek)?;
        Ok(true)
    }

    fn snapshot(&mut self) -> Snapshot {
        match self {
            Shown::Here(monitor) => monitor.snapshot(now_ns()),
            Shown::Agent(remote) => remote.snapshot(),
            Shown::Cluster(live) => live.snapshot(),
            Shown::Recording(playing) => playing.snapshot(),
        }
    }

    /// Of a cluster only what is looked at is asked for.
    fn want(&self, app: &view::App) {
        if let Shown::Cluster(live) = self {
            let (at, search) = app.question();
            live.want(at, search);
        }
    }
}

pub(super) fn run(o: &Top) -> anyhow::Result<u8> {
    if let Some(socket) = &o.agent {
        if o.once {
            return print(ask(socket)?, o.width);
        }
        return block_on(watch(Shown::Agent(Box::new(Remote::connect(socket, FRAME)?)), None, ""));
    }
    if let Some(settings) = super::cluster::settings(&o.at) {
        let mut live = Live::connect(&settings)?;
        if o.once {
            return print(live.snapshot(), o.width);
        }
        return block_on(watch(Shown::Cluster(Box::new(live)), None, ""));
    }
    if let Some(dir) = &o.replay {
        if o.once {
            let (monitor, at_ns) = playback::play(dir, None)?;
            return print(monitor.snapshot(at_ns), o.width);
        }
        return block_on(watch(Shown::Recording(Box::new(Playing::open(dir)?)), None, ""));
    }
    let mut monitor = monitor(o.dir.clone()).with_baselines(baselines(&o.baseline)?);
    if o.once {
        let until = Instant::now() + ONCE;
        monitor.step(now_ns());
        let searched = |m: &Monitor<Segments>| m.source().is_searched() && m.source().is_empty();
        while !searched(&monitor) && Instant::now() < until {
            std::thread::sleep(STEP);
            monitor.step(now_ns());
        }
        return print(monitor.snapshot(now_ns()), o.width);
    }
    block_on(watch(Shown::Here(Box::new(monitor)), None, ""))
}

/// Prints one frame.
fn print(snapshot: Snapshot, width: u16) -> anyhow::Result<u8> {
    let mut app = view::App::new();
    app.set_snapshot(snapshot);
    writeln!(io::stdout().lock(), "{}", view::render_text(&app, width, u16::MAX))?;
    Ok(0)
}

/// Shows it until the user quits, a signal asks for it, or a time has come.
pub(super) async fn watch(mut shown: Shown, until: Option<Instant>, source: &str) -> anyhow::Result<u8> {
    let mut signals = Signals::new()?;
    let mut keys = keys();
    let mut terminal = view::term::Terminal::enter()?;
    let mut app = view::App::with_theme(view::Theme::from_env());
    let mut step = tokio::time::interval(STEP);
    step.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut drawn: Option<Instant> = None;
    while !app.quit() && until.is_none_or(|u| Instant::now() < u) {
        let mut changed = false;
        tokio::select! {
            _ = step.tick() => shown.step()?,
            asked = signals.next() => {
                if asked.to_end() {
                    break;
                }
            }
            event = keys.recv() => match event {
                Some(Event::Key(key)) => {
                    if shown.seek(key, &app)? {
                        changed = true;
                    } else if let Some(message) = view::input::message(key, &app) {
                        match message {
                            view::Msg::Suspend => suspend(&mut terminal)?,
                            view::Msg::Redraw => terminal.clear()?,
                            _ => {}
                        }
                        app.update(message);
                        changed = true;
                    }
                }
                Some(_) => changed = true,
                // The terminal is gone.
                None => break,
            }
        }
        shown.want(&app);
        if changed || drawn.is_none_or(|t| t.elapsed() >= FRAME) {
            let mut snapshot = shown.snapshot();
            if !source.is_empty() {
                snapshot.source = source.to_owned();
            }
            app.set_snapshot(snapshot);
            terminal.draw(&app)?;
            drawn = Some(Instant::now());
        }
    }
    Ok(0)
}

/// Gives the terminal back and stops, as any program does on Ctrl-Z; the shell's fg goes on from here.
fn suspend(terminal: &mut view::term::Terminal) -> anyhow::Result<()> {
    terminal.suspend()?;
    rustix::process::kill_current_process_group(rustix::process::Signal::TSTP)?;
    Ok(terminal.resume()?)
}

/// Keys and resizes, read on a thread of their own: reading a terminal blocks.
fn keys() -> mpsc::Receiver<Event> {
    let (send, receive) = mpsc::channel(64);
    std::thread::spawn(move || {
        while let Ok(event) = crossterm::event::read() {
            if send.blocking_send(event).is_err() {
                break;
            }
        }
    });
    receive
}
