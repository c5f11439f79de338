//! Ringwatch tells the people who run NCCL jobs which rank, which operation, and why.
#![doc = include_str!("ARCHITECTURE.md")]

pub mod advise;
pub mod bench;
pub mod bundle;
mod columns;
pub mod explain;
pub mod model;
pub mod replay;
pub mod secret;
pub mod tune;

pub mod import;
pub mod ingest;

pub mod join;

pub mod detect;

pub mod diff;
pub mod steps;
pub mod timeline;

pub mod doctor;
pub mod ras;

pub mod cluster;
pub mod recording;

pub mod export;

pub mod report;
pub mod view;

pub mod runtime;

pub mod cli;
pub mod cmd;
pub mod config;
