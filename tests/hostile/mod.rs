//! An unprivileged user against an agent that runs as root.
//!
//! The attacker has no capability on the host. It writes what it likes into its own segments, makes user, mount and pid
//! namespaces, and connects to the agent's sockets. The agent is the real program, in a memory cgroup of 96 MiB. Each test
//! shows from outside that the agent lives on, harms no other user's files, and still serves the others.

mod blocked;
mod cgroup;
mod connections;
mod forged;
mod fuse;
mod ground;
mod identity;
mod many;
mod memory;
mod places;
mod processes;
mod shares;
mod unread;
