//! Ringwatch tells the people who run NCCL jobs which rank, which operation, and why.
//!
//! The modules stand in the order of the data; `ARCHITECTURE.md` beside this file says why.

pub mod bundle;
pub mod model;

pub mod replay;

pub mod ingest;

pub mod join;

pub mod detect;

pub mod report;
pub mod view;

pub mod runtime;

pub mod cli;
pub mod cmd;
