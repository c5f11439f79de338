//! Screens: what the model knows, as a terminal shows it.
//!
//! The way of a frame: `input` turns a key into a [`Msg`], [`App::update`] applies it, [`draw()`] paints
//! the state. State and drawing are pure; only [`term`] touches the terminal and only
//! [`Theme::from_env`] reads the environment. Every screen is built as lines first (`page`), so the
//! same code serves an 80x24 terminal, a wall display and the text of `--once`.
//!
//! Strings of a snapshot come from watched jobs and are hostile. [`App::set_snapshot`] cleans them
//! once, on the way in, so that no widget can forget to.

mod app;
mod clean;
mod draw;
mod filter;
mod format;
pub mod input;
mod page;
mod table;
pub mod term;
mod text;
mod theme;
mod widgets;

pub use app::{App, Msg, Screen};
pub use draw::draw;
pub use text::render_text;
pub use theme::Theme;
