//! Keys to messages.

use super::app::{App, Msg, Screen};
use crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

/// The message of a key, or `None` for a key without meaning here and now.
pub fn message(key: KeyEvent, app: &App) -> Option<Msg> {
    if key.kind == KeyEventKind::Release {
        return None;
    }
    if key.modifiers.intersects(KeyModifiers::CONTROL | KeyModifiers::ALT) {
        return with_control(key, app);
    }
    if app.editing() {
        return typed(key.code);
    }
    Some(match key.code {
        KeyCode::Char('q') => Msg::Quit,
        KeyCode::Char('?') | KeyCode::F(1) => Msg::Help,
        KeyCode::Esc => Msg::Escape,
        KeyCode::Char(c @ '0'..='5') => Msg::Show(Screen::OF_CLUSTER[c as usize - '0' as usize]),
        KeyCode::Enter => Msg::Into,
        KeyCode::Backspace => Msg::Out,
        KeyCode::Tab => Msg::NextScreen,
        KeyCode::BackTab => Msg::PreviousScreen,
        KeyCode::Down | KeyCode::Char('j') => Msg::Move(1),
        KeyCode::Up | KeyCode::Char('k') => Msg::Move(-1),
        KeyCode::PageDown => Msg::Page(1),
        KeyCode::PageUp => Msg::Page(-1),
        KeyCode::Home | KeyCode::Char('g') => Msg::Top,
        KeyCode::End | KeyCode::Char('G') => Msg::Bottom,
        KeyCode::Right | KeyCode::Char('l') => Msg::NextComm,
        KeyCode::Left | KeyCode::Char('h') => Msg::PreviousComm,
        KeyCode::Char('s') => Msg::SortNext,
        KeyCode::Char('S') => Msg::SortReverse,
        KeyCode::Char('p' | ' ') => Msg::Pause,
        KeyCode::Char('/') => Msg::FilterStart,
        _ => return None,
    })
}

fn with_control(key: KeyEvent, app: &App) -> Option<Msg> {
    if !key.modifiers.contains(KeyModifiers::CONTROL) {
        return None;
    }
    match key.code {
        KeyCode::Char('c') => Some(Msg::Quit),
        KeyCode::Char('z') => Some(Msg::Suspend),
        KeyCode::Char('l') => Some(Msg::Redraw),
        KeyCode::Char('u') if app.editing() => Some(Msg::FilterClear),
        KeyCode::Char('f') if !app.editing() => Some(Msg::Page(1)),
        KeyCode::Char('b') if !app.editing() => Some(Msg::Page(-1)),
        _ => None,
    }
}

fn typed(code: KeyCode) -> Option<Msg> {
    match code {
        KeyCode::Enter => Some(Msg::FilterKeep),
        KeyCode::Esc => Some(Msg::FilterClear),
        KeyCode::Backspace => Some(Msg::FilterPop),
        KeyCode::Char(c) => Some(Msg::FilterPush(c)),
        KeyCode::Down => Some(Msg::Move(1)),
        KeyCode::Up => Some(Msg::Move(-1)),
        KeyCode::PageDown => Some(Msg::Page(1)),
        KeyCode::PageUp => Some(Msg::Page(-1)),
        _ => None,
    }
}
