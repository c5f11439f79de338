//! The tests of the whole program, in one binary: each further one would link the program again.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod abi;
mod agent;
mod architecture;
mod attach;
mod bench;
mod bench_cost;
mod bench_targets;
mod bus;
mod chain;
mod cli;
mod cluster;
mod collectors;
mod config;
mod connections;
mod dashboards;
mod demo;
mod diagnose;
mod diff;
mod doctor;
mod export;
mod exported;
mod findings;
mod gpu;
mod hardware;
mod heartbeat;
mod hostile;
mod import;
mod ingest;
mod join;
mod log;
mod mcp;
mod mutations;
mod node;
mod notify;
mod otlp;
mod packages;
mod preload;
mod receiver;
mod recording;
mod replay;
mod report;
mod robustness;
mod run;
mod scenarios;
mod secrets;
mod service;
mod shipped;
#[allow(dead_code, unused_imports, reason = "the exam uses the rest")]
mod simulator;
mod steps;
mod support;
mod tune;
mod view;
mod watch;
