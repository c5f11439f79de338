#![doc = include_str!("FORMAT.md")]
#![cfg_attr(not(loom), no_std)]
#![deny(missing_docs)]

pub mod codes;
pub mod cost_log;
pub mod layout;
pub mod lines;
pub mod reader;
pub mod ring;
pub mod sync;
pub mod tuning;
