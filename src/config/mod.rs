//! Every stage's settings in one file, the agent's: YAML, in which what is left out has its default.
//!
//! What is wrong in it is told with file, line and key. The environment and the command line override single keys.

mod changes;
mod excerpt;
mod load;
mod settings;

pub use changes::{Change, changes};
pub use load::{Error, Overrides, load, print, schema};
pub use settings::{Config, FindingSettings, HttpSettings, LimitSettings, SegmentSettings, SocketSettings};
