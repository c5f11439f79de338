//! How the processes of one benchmark find each other: by what torchrun or Slurm tells them, over TCP.
//!
//! Rank 0 listens on the first free port behind `MASTER_PORT` (which torchrun's own store has), the others
//! try these ports. A greeting names protocol, job, epoch, number of ranks and rank; whatever else calls or
//! answers on these ports is left alone. After that every exchange goes over rank 0: all send, all get everything.

mod launch;
mod meeting;
#[cfg(test)]
mod tests;

pub use launch::Launch;
use launch::hash;
use meeting::{find, gather};
use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Ports behind `MASTER_PORT` that rank 0 may listen on.
const PORTS: u16 = 32;
/// More than any message of ours, in bytes: who claims to send more is not one of us.
const LONGEST: u32 = 1 << 30;
/// How far in the future the ranks of one host begin together.
const LEAD_NS: u64 = 200_000;

/// Why the ranks do not come together, or no longer are.
#[derive(Debug, Error)]
pub enum RendezvousError {
    /// The environment says that there are several processes, but not how to find them.
    #[error("{0}")]
    Environment(String),
    /// Rank 0 has no port.
    #[error("rank 0 can listen on none of the ports {first} to {last} of this host")]
    Listen {
        /// The first port tried.
        first: u16,
        /// The last one.
        last: u16,
        /// The last port's error.
        source: io::Error,
    },
    /// Not all came.
    #[error(
        "after {seconds} s ranks {missing:?} have not come to rank 0 (port {port}); they need the same MASTER_ADDR and MASTER_PORT"
    )]
    Missing {
        /// The missing ranks.
        missing: Vec<u32>,
        /// Where rank 0 listens.
        port: u16,
        /// How long it waited.
        seconds: u64,
    },
    /// Rank 0 was not found.
    #[error(
        "rank {rank} has not found rank 0 at {master}, ports {first} to {last}, in {seconds} s: {last_answer}"
    )]
    NotFound {
        /// The rank that looked.
        rank: u32,
        /// Where.
        master: String,
        /// The first port tried.
        first: u16,
        /// The last one.
        last: u16,
        /// How long it looked.
        seconds: u64,
        /// The result of the last try.
        last_answer: String,
    },
    /// A rank's process is gone, or its connection.
    #[error("rank {0} is lost: its process has ended or its connection broke")]
    Lost(u32),
    /// A rank gave up, and said why.
    #[error("rank {rank} gave up: {reason}")]
    GaveUp {
        /// Who.
        rank: u32,
        /// Its own words.
        reason: String,
    },
    /// A rank is silent.
    #[error("ranks {ranks:?} have sent nothing for {seconds} s")]
    Silent {
        /// The ranks that are waited for.
        ranks: Vec<u32>,
        /// How long.
        seconds: u64,
    },
    /// A rank sent something else than what it must send now.
    #[error("rank {rank} is out of step: do all ranks run the same version with the same options?")]
    OutOfStep {
        /// Who.
        rank: u32,
    },
}

/// A message of a peer.
#[derive(Debug)]
enum Message {
    Data { seq: u32, bytes: Vec<u8> },
    GaveUp(String),
    Lost,
}

const DATA: u32 = 0;
const GAVE_UP: u32 = 1;

/// All processes of one benchmark.
#[derive(Debug)]
pub struct Rendezvous {
    rank: u32,
    world: u32,
    /// By rank; rank 0 has everybody's, the others have rank 0's.
    peers: Vec<Option<TcpStream>>,
    inbox: Receiver<(u32, Message)>,
    /// Messages that came while nobody waited for them.
    early: VecDeque<(u32, u32, Vec<u8>)>,
    seq: u32,
    limit: Duration,
    boot: [u8; 16],
}

impl Rendezvous {
    /// Finds the others. `limit` is how long to wait for them, here and in every exchange.
    ///
    /// # Errors
    /// Who did not come, or where rank 0 was not found.
    pub fn join(launch: &Launch, limit: Duration) -> Result<Self, RendezvousError> {
        let (send, inbox) = channel();
        let peers = if launch.rank == 0 { gather(launch, limit)? } else { find(launch, limit)? };
        for (rank, peer) in (0..).zip(&peers) {
            let Some(stream) = peer.as_ref().and_then(|p| p.try_clone().ok()) else { continue };
            let send = send.clone();
            std::thread::spawn(move || listen(rank, stream, &send));
        }
        let (rank, world) = (launch.rank, launch.world);
        Ok(Rendezvous { rank, world, peers, inbox, early: VecDeque::new(), seq: 0, limit, boot: boot_id() })
    }

    /// This process.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// How many there are.
    #[must_use]
    pub fn world(&self) -> u32 {
        self.world
    }

    /// Everybody gives some bytes and gets everybody's, by rank.
    ///
    /// # Errors
    /// Who is lost, gave up, is silent or out of step.
    pub fn all_gather(&mut self, own: &[u8]) -> Result<Vec<Vec<u8>>, RendezvousError> {
        self.seq += 1;
        if self.rank != 0 {
            self.send(0, DATA, own)?;
            return unpack(&self.receive(&[0])?.remove(0)).ok_or(RendezvousError::OutOfStep { rank: 0 });
        }
        let others: Vec<u32> = (1..self.world).collect();
        let mut all = vec![own.to_vec()];
        all.extend(self.receive(&others)?);
        let packed = pack(&all);
        for rank in others {
            self.send(rank, DATA, &packed)?;
        }
        Ok(all)
    }

    /// Waits for everybody.
    ///
    /// # Errors
    /// As [`Self::all_gather`].
    pub fn barrier(&mut self) -> Result<(), RendezvousError> {
        self.all_gather(&[]).map(|_| ())
    }

    /// Waits for everybody, however long others have their turns; whoever is lost is noticed.
    ///
    /// # Errors
    /// As [`Self::all_gather`].
    pub fn barrier_of_a_turn(&mut self) -> Result<(), RendezvousError> {
        const DAY: Duration = Duration::from_secs(86_400);
        let limit = std::mem::replace(&mut self.limit, DAY);
        let met = self.barrier();
        self.limit = limit;
        met
    }

    /// Waits for everybody; the processes on rank 0's host then go on at the same moment of their common clock.
    ///
    /// # Errors
    /// As [`Self::all_gather`].
    pub fn start_together(&mut self) -> Result<(), RendezvousError> {
        self.barrier()?;
        // A second round: its news are younger than what the slowest has to read of the first.
        let mut own = self.boot.to_vec();
        own.extend((monotonic_ns() + LEAD_NS).to_be_bytes());
        let all = self.all_gather(&own)?;
        let first = all.first().filter(|f| f.len() == 24 && f[..16] == self.boot);
        let Some(moment) = first.and_then(|f| f[16..].try_into().ok()).map(u64::from_be_bytes) else {
            return Ok(());
        };
        // Clocks of different time namespaces are not comparable: never wait long.
        let far = monotonic_ns() + 10 * LEAD_NS;
        while monotonic_ns() < moment.min(far) {
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// Notices whoever is lost or gave up, without waiting.
    ///
    /// # Errors
    /// Who, and why.
    pub fn check(&mut self) -> Result<(), RendezvousError> {
        loop {
            match self.inbox.try_recv() {
                Ok((rank, message)) => self.take(rank, message)?,
                Err(TryRecvError::Empty | TryRecvError::Disconnected) => return Ok(()),
            }
        }
    }

    /// Tells everybody that this process gives up. Those who are gone are not told.
    pub fn give_up(&mut self, reason: &str) {
        for rank in 0..self.world {
            self.send(rank, GAVE_UP, reason.as_bytes()).ok();
        }
    }

    fn take(&mut self, rank: u32, message: Message) -> Result<(), RendezvousError> {
        match message {
            Message::Data { seq, bytes } => self.early.push_back((rank, seq, bytes)),
            Message::GaveUp(reason) => return Err(RendezvousError::GaveUp { rank, reason }),
            Message::Lost => return Err(RendezvousError::Lost(rank)),
        }
        Ok(())
    }

    /// One message of each of these, in their order.
    fn receive(&mut self, from: &[u32]) -> Result<Vec<Vec<u8>>, RendezvousError> {
        let until = Instant::now() + self.limit;
        let mut got: Vec<Option<Vec<u8>>> = from.iter().map(|_| None).collect();
        loop {
            while let Some((rank, seq, bytes)) = self.early.pop_front() {
                let place = from.iter().position(|f| *f == rank).filter(|_| seq == self.seq);
                match place.and_then(|p| got.get_mut(p)).filter(|g| g.is_none()) {
                    Some(g) => *g = Some(bytes),
                    None => return Err(RendezvousError::OutOfStep { rank }),
                }
            }
            if got.iter().all(Option::is_some) {
                return Ok(got.into_iter().flatten().collect());
            }
            match self.inbox.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok((rank, message)) => self.take(rank, message)?,
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {
                    let ranks = from.iter().zip(&got).filter(|(_, g)| g.is_none()).map(|(f, _)| *f).collect();
                    return Err(RendezvousError::Silent { ranks, seconds: self.limit.as_secs() });
                }
            }
        }
    }

    fn send(&mut self, rank: u32, kind: u32, bytes: &[u8]) -> Result<(), RendezvousError> {
        let Some(Some(stream)) = self.peers.get_mut(rank as usize) else { return Ok(()) };
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        let mut frame = Vec::with_capacity(12 + bytes.len());
        for word in [length, self.seq, kind] {
            frame.extend(word.to_be_bytes());
        }
        frame.extend(bytes);
        stream.write_all(&frame).map_err(|_| RendezvousError::Lost(rank))
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        for peer in self.peers.iter().flatten() {
            // Wakes our own reading thread; the peer may be gone already.
            peer.shutdown(std::net::Shutdown::Both).ok();
        }
    }
}

/// Reads a peer's messages until it is gone.
fn listen(rank: u32, mut stream: TcpStream, to: &Sender<(u32, Message)>) {
    loop {
        let mut head = [0; 12];
        let message = stream.read_exact(&mut head).ok().and_then(|()| {
            let word = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
            let length = Some(word(0)).filter(|l| *l <= LONGEST)?;
            // No more memory than what really comes.
            let mut bytes = Vec::new();
            let got = (&mut stream).take(u64::from(length)).read_to_end(&mut bytes).ok()?;
            if got as u64 != u64::from(length) {
                return None;
            }
            Some(match word(8) {
                GAVE_UP => Message::GaveUp(String::from_utf8_lossy(&bytes).into_owned()),
                _ => Message::Data { seq: word(4), bytes },
            })
        });
        let last = message.is_none();
        if to.send((rank, message.unwrap_or(Message::Lost))).is_err() || last {
            return;
        }
    }
}

fn pack(all: &[Vec<u8>]) -> Vec<u8> {
    let mut packed = Vec::new();
    for bytes in all {
        packed.extend((bytes.len() as u64).to_be_bytes());
        packed.extend(bytes);
    }
    packed
}

fn unpack(mut packed: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut all = Vec::new();
    while !packed.is_empty() {
        let (length, rest) = packed.split_first_chunk::<8>()?;
        let length = usize::try_from(u64::from_be_bytes(*length)).ok()?;
        let (bytes, rest) = rest.split_at_checked(length)?;
        all.push(bytes.to_vec());
        packed = rest;
    }
    Some(all)
}

/// The id that distinguishes one running kernel from every other.
fn boot_id() -> [u8; 16] {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    // Where it cannot be read nobody is on the same host: a process's own.
    let text = if text.is_empty() { format!("{} {}", std::process::id(), monotonic_ns()) } else { text };
    let mut id = [0; 16];
    id[..8].copy_from_slice(&hash(&text).to_be_bytes());
    id[8..].copy_from_slice(&hash(&format!("{text}.")).to_be_bytes());
    id
}

fn monotonic_ns() -> u64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    u64::try_from(t.tv_sec).unwrap_or(0) * 1_000_000_000 + u64::try_from(t.tv_nsec).unwrap_or(0)
}
