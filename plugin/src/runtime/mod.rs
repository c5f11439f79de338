//! The plugin's access to its process and its system: system calls, clock, settings, files in shared memory, NCCL's and
//! CUDA's libraries. Nothing here knows an event or a communicator.

pub(crate) mod clock;
pub(crate) mod cuda;
pub(crate) mod directory;
pub(crate) mod log;
pub(crate) mod names;
pub(crate) mod nccl;
pub mod parsers;
pub(crate) mod prefetch;
pub(crate) mod process;
mod reap;
pub(crate) mod segment_name;
pub(crate) mod settings;
pub(crate) mod shm;
pub(crate) mod statics;
pub(crate) mod sys;
pub(crate) mod thread_word;
