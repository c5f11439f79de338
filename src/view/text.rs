//! One frame as plain text, for `--once`, pipes and logs.

use super::app::App;
use super::draw;
use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

/// Draws one frame of the screen shown as text, without what only a keyboard can use.
///
/// Lines have no spaces at their ends, and the frame no empty lines. It is at most `height` lines long;
/// `u16::MAX` gives everything the screen knows.
pub fn render_text(app: &App, width: u16, height: u16) -> String {
    let height = height.min(draw::text_height(app, width));
    let area = Rect::new(0, 0, width, height);
    let mut buffer = Buffer::empty(area);
    draw::paint(&mut buffer, area, app, draw::Chrome::Text);
    let mut lines: Vec<String> = Vec::with_capacity(usize::from(height));
    for y in 0..height {
        let mut line = String::new();
        let mut x = 0;
        while x < width {
            let cell = &buffer[(x, y)];
            line.push_str(cell.symbol());
            // A wide character fills the cells after it.
            x = x.saturating_add(super::page::width(cell.symbol()).clamp(1, 2) as u16);
        }
        lines.push(line.trim_end().to_owned());
    }
    while lines.last().is_some_and(String::is_empty) {
        lines.pop();
    }
    let mut text = lines.join("\n");
    text.push('\n');
    text
}
