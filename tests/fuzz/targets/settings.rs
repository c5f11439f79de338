//! The agent's settings: files, and keys that override them.

use ringwatch::config::{Config, Error, Overrides, load, print};
use std::io::Write;

/// Longer inputs are not tried, in bytes: the file is the administrator's, and the kernel takes no longer options.
const INPUT_MAX: usize = 128 << 10;
/// The longest message, in bytes: it quotes a line.
const MESSAGE_MAX: usize = 4 * INPUT_MAX;

fn of_file(bytes: &[u8]) -> Result<Config, Error> {
    let mut file = tempfile::Builder::new().prefix("rw-fuzz-").tempfile_in("/dev/shm").unwrap();
    file.write_all(bytes).unwrap();
    load(Some(file.path()), &Overrides::default())
}

/// What is printed is read, and is the same. Where secrets are masked in it, the error says that they are missing.
fn printed(config: &Config) {
    let text = print(config).unwrap();
    match of_file(text.as_bytes()) {
        Ok(again) => assert_eq!(again, *config),
        Err(e) => assert!(text.contains("***") && e.to_string().contains("is a mask"), "{e}\n{text}"),
    }
}

fn wrong(e: &Error) {
    let message = e.to_string();
    assert!(!message.is_empty() && message.len() <= MESSAGE_MAX, "{} bytes", message.len());
}

pub(super) fn file(bytes: &[u8]) {
    if bytes.len() > INPUT_MAX {
        return;
    }
    match of_file(bytes) {
        Ok(config) => printed(&config),
        Err(e) => wrong(&e),
    }
}

/// Lines of KEY=VALUE, as options and as variables.
pub(super) fn overrides(bytes: &[u8]) {
    if bytes.len() > INPUT_MAX {
        return;
    }
    let text = String::from_utf8_lossy(bytes);
    let options: Vec<String> = text.lines().take(16).map(str::to_owned).collect();
    let variables = options.iter().filter_map(|o| o.split_once('=')).map(|(key, value)| {
        (format!("RINGWATCH_AGENT_{}", key.to_ascii_uppercase().replace('.', "__")), value.to_owned())
    });
    let by_variables = load(None, &Overrides::default().environment(variables));
    for set in [Overrides::default().options(&options).and_then(|o| load(None, &o)), by_variables] {
        match set {
            Ok(config) => printed(&config),
            Err(e) => wrong(&e),
        }
    }
}
