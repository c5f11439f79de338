//! The first fault in a file of another tool, and its position.

use std::fmt;

/// Why a file cannot be read, and where in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fault {
    at: At,
    why: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum At {
    File,
    Byte(usize),
    Line(usize, usize),
    Entry(usize),
}

impl Fault {
    pub(super) fn of_file(why: impl Into<String>) -> Self {
        Fault { at: At::File, why: why.into() }
    }

    pub(super) fn at_byte(byte: usize, why: impl Into<String>) -> Self {
        Fault { at: At::Byte(byte), why: why.into() }
    }

    pub(super) fn at_line(line: usize, column: usize, why: impl Into<String>) -> Self {
        // The parser's text ends with the position.
        let why: String = why.into();
        let position = format!(" at line {line} column {column}");
        Fault { at: At::Line(line, column), why: why.strip_suffix(&position).unwrap_or(&why).to_owned() }
    }

    pub(super) fn at_entry(entry: usize, why: impl Into<String>) -> Self {
        Fault { at: At::Entry(entry), why: why.into() }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.at {
            At::File => {}
            At::Byte(at) => write!(f, "byte {at}: ")?,
            At::Line(line, column) => write!(f, "line {line} column {column}: ")?,
            At::Entry(at) => write!(f, "entries[{at}]: ")?,
        }
        f.write_str(&self.why)
    }
}
