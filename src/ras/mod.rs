//! NCCL's own RAS, which runs in every job since NCCL 2.24: a client, its status, and the verdict that this allows.
//!
//! RAS counts the operations that each rank has launched. It knows neither when one ended nor what it moves, and counts no
//! sends, receives and replays of graphs. Two answers distinguish ranks that go on from ranks that stand still.

mod client;
mod status;
mod verdict;

pub use client::{Client, DEFAULT_ADDRESS, Error};
pub use status::{Communicator, MissingRank, RankStatus, Status};
pub use verdict::{Process, Verdict, judge};
