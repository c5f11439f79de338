//! How the processes of one benchmark find each other: by what torchrun or Slurm tells them, over TCP.
//!
//! Rank 0 listens on the first free port behind `MASTER_PORT` (which torchrun's own store has), the others
//! try these ports. A greeting names protocol, job, epoch, number of ranks and rank; whatever else calls or
//! answers on these ports is left alone. After that every exchange goes over rank 0: all send, all get everything.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, TryRecvError, channel};
use std::time::{Duration, Instant};
use thiserror::Error;

const MAGIC: u64 = u64::from_be_bytes(*b"RWBENCH\n");
const VERSION: u32 = 1;
/// Ports behind `MASTER_PORT` that rank 0 may listen on.
const PORTS: u16 = 32;
/// How long somebody may take to greet or to answer.
const GREETING: Duration = Duration::from_secs(2);
/// Between two rounds over the ports.
const PAUSE: Duration = Duration::from_millis(50);
/// More than any message of ours, in bytes: who claims to send more is not one of us.
const LONGEST: u32 = 1 << 30;
/// Slurm's jobs have no port of their own by default: PyTorch's.
const DEFAULT_PORT: u16 = 29_500;
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
        /// Who is missing.
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
        /// Who looked.
        rank: u32,
        /// Where.
        master: String,
        /// The first port tried.
        first: u16,
        /// The last one.
        last: u16,
        /// How long it looked.
        seconds: u64,
        /// What the last try came to.
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
        /// Who is waited for.
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

/// What a launcher told this process about its place among the others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launch {
    /// This process.
    pub rank: u32,
    /// How many processes.
    pub world: u32,
    /// This process among those of its host.
    pub local_rank: u32,
    /// Rank 0's host.
    pub master: String,
    /// The port behind which rank 0 listens.
    pub port: u16,
    /// Names the job: a hash of its launcher's id.
    pub key: u64,
    /// Which of several benchmarks of one job.
    pub epoch: u64,
}

impl Launch {
    /// Reads what torchrun (`WORLD_SIZE`, `RANK`, ...) or srun (`SLURM_NTASKS`, `SLURM_PROCID`, ...) has set. `None`
    /// where neither tells of more than one process.
    ///
    /// # Errors
    /// [`RendezvousError::Environment`] names the variable that is missing or makes no sense.
    pub fn read(
        variable: impl Fn(&str) -> Option<String>,
        epoch: u64,
    ) -> Result<Option<Self>, RendezvousError> {
        let get = |name: &str| variable(name).filter(|v| !v.trim().is_empty());
        let number = |name: &str| -> Result<Option<u32>, RendezvousError> {
            let Some(text) = get(name) else { return Ok(None) };
            let wrong = |_| RendezvousError::Environment(format!("{name} is {text:?}, which is no number"));
            text.trim().parse().map(Some).map_err(wrong)
        };
        let need = |name: &str, who: &str| {
            let wrong = || RendezvousError::Environment(format!("{who}, but {name} is not set"));
            number(name).and_then(|n| n.ok_or_else(wrong))
        };
        let torch = number("WORLD_SIZE")?;
        let tasks = || Ok::<_, RendezvousError>(number("SLURM_STEP_NUM_TASKS")?.or(number("SLURM_NTASKS")?));
        let (world, rank, local_rank, job) = if let Some(world) = torch {
            if world <= 1 {
                return Ok(None);
            }
            let who = format!("WORLD_SIZE is {world} (torchrun)");
            let rank = need("RANK", &who)?;
            (world, rank, need("LOCAL_RANK", &who)?, get("TORCHELASTIC_RUN_ID"))
        } else if let (Some(world), Some(rank)) = (tasks()?.filter(|n| *n > 1), number("SLURM_PROCID")?) {
            let who = format!("there are {world} Slurm tasks");
            (world, rank, need("SLURM_LOCALID", &who)?, get("SLURM_JOB_ID"))
        } else {
            return Ok(None);
        };
        if rank >= world {
            let text = format!("rank {rank} of {world} processes: ranks go from 0 to {}", world - 1);
            return Err(RendezvousError::Environment(text));
        }
        let Some(master) = get("MASTER_ADDR") else {
            return Err(RendezvousError::Environment(format!(
                "there are {world} processes, and MASTER_ADDR is not set. torchrun sets it; under srun set it to the \
                 host of rank 0: MASTER_ADDR=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1)"
            )));
        };
        let port = match number("MASTER_PORT")? {
            None => DEFAULT_PORT,
            Some(p) => u16::try_from(p).ok().filter(|p| p.checked_add(PORTS).is_some()).ok_or_else(|| {
                RendezvousError::Environment(format!("MASTER_PORT is {p}: up to {}", u16::MAX - PORTS))
            })?,
        };
        let job = job.unwrap_or_default();
        Ok(Some(Launch {
            rank,
            world,
            local_rank,
            master: master.trim().to_owned(),
            port,
            key: hash(&job),
            epoch,
        }))
    }

    fn greeting(&self) -> [u8; 40] {
        let mut g = [0; 40];
        g[..8].copy_from_slice(&MAGIC.to_be_bytes());
        g[8..12].copy_from_slice(&VERSION.to_be_bytes());
        g[12..16].copy_from_slice(&self.rank.to_be_bytes());
        g[16..24].copy_from_slice(&self.key.to_be_bytes());
        g[24..32].copy_from_slice(&self.epoch.to_be_bytes());
        g[32..36].copy_from_slice(&self.world.to_be_bytes());
        g
    }
}

/// FNV-1a, 64 bits: the same on every host.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3))
}

/// Rank 0's answer to a greeting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Welcome = 0,
    OtherVersion = 1,
    OtherJob = 2,
    OtherEpoch = 3,
    OtherWorld = 4,
    Taken = 5,
}

impl Answer {
    fn text(self) -> &'static str {
        match self {
            Self::Welcome => "welcome",
            Self::OtherVersion => "another version of ringwatch answers there",
            Self::OtherJob => "another job's benchmark answers there",
            Self::OtherEpoch => "another benchmark of this job answers there",
            Self::OtherWorld => "rank 0 expects another number of processes",
            Self::Taken => "rank 0 has this rank already, or there is no such rank",
        }
    }

    fn of(code: u32) -> Option<Self> {
        let all = [
            Self::Welcome,
            Self::OtherVersion,
            Self::OtherJob,
            Self::OtherEpoch,
            Self::OtherWorld,
            Self::Taken,
        ];
        all.into_iter().find(|a| *a as u32 == code)
    }
}

/// What a greeting deserves; with the rank where it is welcome, `None` where it is no greeting of ours.
fn judge(own: &Launch, greeting: &[u8; 40], here: &[Option<TcpStream>]) -> Option<(Answer, u32)> {
    let word =
        |at: usize| u32::from_be_bytes([greeting[at], greeting[at + 1], greeting[at + 2], greeting[at + 3]]);
    let long = |at: usize| u64::from(word(at)) << 32 | u64::from(word(at + 4));
    if long(0) != MAGIC {
        return None;
    }
    let rank = word(12);
    let answer = if word(8) != VERSION {
        Answer::OtherVersion
    } else if long(16) != own.key {
        Answer::OtherJob
    } else if long(24) != own.epoch {
        Answer::OtherEpoch
    } else if word(32) != own.world {
        Answer::OtherWorld
    } else if rank == own.rank || here.get(rank as usize).is_none_or(Option::is_some) {
        Answer::Taken
    } else {
        Answer::Welcome
    };
    Some((answer, rank))
}

/// What comes from a peer.
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
    /// What came while nobody waited for it.
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

/// A master on this host's loopback needs no port that others can reach.
fn is_loopback(master: &str) -> bool {
    master == "localhost" || master.parse::<IpAddr>().is_ok_and(|a| a.is_loopback())
}

fn bind(launch: &Launch) -> Result<TcpListener, RendezvousError> {
    let addresses: [IpAddr; 2] = if is_loopback(&launch.master) {
        [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]
    } else {
        // Both families where the host has both.
        [Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()]
    };
    // "localhost" may lead the others to ::1 first; they try all its addresses.
    let wanted = launch.master.parse::<IpAddr>().ok().filter(IpAddr::is_loopback);
    let mut last = io::Error::from(io::ErrorKind::AddrInUse);
    for port in launch.port + 1..=launch.port + PORTS {
        for address in wanted.map_or(addresses.to_vec(), |w| vec![w]) {
            match TcpListener::bind(SocketAddr::new(address, port)) {
                Ok(listener) => return Ok(listener),
                Err(e) => last = e,
            }
        }
    }
    Err(RendezvousError::Listen { first: launch.port + 1, last: launch.port + PORTS, source: last })
}

/// Rank 0: everybody's connection.
fn gather(launch: &Launch, limit: Duration) -> Result<Vec<Option<TcpStream>>, RendezvousError> {
    let listener = bind(launch)?;
    let port = listener.local_addr().map(|a| a.port()).unwrap_or(launch.port);
    let mut peers: Vec<Option<TcpStream>> = (0..launch.world).map(|_| None).collect();
    let (send, greeted) = channel();
    let until = Instant::now() + limit;
    listener.set_nonblocking(true).ok();
    while peers.iter().skip(1).any(Option::is_none) {
        while let Ok((stream, _)) = listener.accept() {
            // Whoever connects and then is silent holds nobody up.
            let send = send.clone();
            std::thread::spawn(move || greeted_by(stream, &send));
        }
        if let Ok((mut stream, greeting)) = greeted.recv_timeout(Duration::from_millis(5))
            && let Some((answer, rank)) = judge(launch, &greeting, &peers)
        {
            let told = stream.write_all(&[MAGIC.to_be_bytes(), (answer as u64).to_be_bytes()].concat());
            if answer == Answer::Welcome && told.is_ok() {
                peers[rank as usize] = Some(stream);
            }
        }
        if Instant::now() > until {
            let missing = (1..launch.world).filter(|r| peers[*r as usize].is_none()).collect();
            return Err(RendezvousError::Missing { missing, port, seconds: limit.as_secs() });
        }
    }
    Ok(peers)
}

fn greeted_by(mut stream: TcpStream, to: &Sender<(TcpStream, [u8; 40])>) {
    let mut greeting = [0; 40];
    let ready = stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(GREETING)));
    let read = ready.and_then(|()| stream.read_exact(&mut greeting));
    let open = read.and_then(|()| stream.set_read_timeout(None)).and_then(|()| stream.set_nodelay(true));
    if open.is_ok() {
        // When rank 0 waits no more, the connection just closes.
        to.send((stream, greeting)).ok();
    }
}

/// Another rank: the connection to rank 0.
fn find(launch: &Launch, limit: Duration) -> Result<Vec<Option<TcpStream>>, RendezvousError> {
    let until = Instant::now() + limit;
    let (first, last) = (launch.port + 1, launch.port + PORTS);
    let mut last_answer = "nobody answers".to_owned();
    loop {
        match (launch.master.as_str(), first).to_socket_addrs() {
            Err(e) => last_answer = e.to_string(),
            Ok(addresses) => {
                let addresses: Vec<SocketAddr> = addresses.collect();
                for port in first..=last {
                    for address in &addresses {
                        match greet(launch, SocketAddr::new(address.ip(), port)) {
                            Ok((Answer::Welcome, stream)) => return Ok(vec![Some(stream)]),
                            Ok((answer, _)) => last_answer = format!("port {port}: {}", answer.text()),
                            // Most ports are closed, which says nothing; neither does one that isn't ours.
                            Err(_) => {}
                        }
                    }
                }
            }
        }
        if Instant::now() > until {
            return Err(RendezvousError::NotFound {
                rank: launch.rank,
                master: launch.master.clone(),
                first,
                last,
                seconds: limit.as_secs(),
                last_answer,
            });
        }
        std::thread::sleep(PAUSE);
    }
}

fn greet(launch: &Launch, address: SocketAddr) -> io::Result<(Answer, TcpStream)> {
    let mut stream = TcpStream::connect_timeout(&address, GREETING)?;
    stream.set_read_timeout(Some(GREETING))?;
    stream.set_nodelay(true)?;
    stream.write_all(&launch.greeting())?;
    let mut reply = [0; 16];
    stream.read_exact(&mut reply)?;
    let foreign = || io::Error::from(io::ErrorKind::InvalidData);
    if reply[..8] != MAGIC.to_be_bytes() {
        return Err(foreign());
    }
    let answer =
        Answer::of(u32::from_be_bytes([reply[12], reply[13], reply[14], reply[15]])).ok_or_else(foreign)?;
    stream.set_read_timeout(None)?;
    Ok((answer, stream))
}

/// What tells one running kernel from every other.
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;
    use std::sync::atomic::{AtomicU16, Ordering};

    const SHORT: Duration = Duration::from_millis(400);
    const LONG: Duration = Duration::from_secs(20);

    /// A port behind which 32 belong to one test alone, below those that the system gives away.
    fn port() -> u16 {
        static NEXT: AtomicU16 = AtomicU16::new(0);
        let process = u16::try_from(std::process::id() % 16).unwrap();
        10_000 + process * 1320 + NEXT.fetch_add(1, Ordering::Relaxed) * 33
    }

    fn launch(rank: u32, world: u32, port: u16) -> Launch {
        let master = "127.0.0.1".to_owned();
        Launch { rank, world, local_rank: rank, master, port, key: u64::from(port), epoch: 7 }
    }

    /// Every rank on a thread of its own.
    fn all<T: Send + 'static>(world: u32, work: impl Fn(Rendezvous) -> T + Send + Clone + 'static) -> Vec<T> {
        let port = port();
        let threads: Vec<_> = (0..world)
            .map(|rank| {
                let work = work.clone();
                std::thread::spawn(move || work(Rendezvous::join(&launch(rank, world, port), LONG).unwrap()))
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    }

    #[test]
    fn everybody_gets_everybodys_bytes_in_order() {
        let got = all(5, |mut r| {
            for round in 0..50u32 {
                let own = vec![u8::try_from(r.rank()).unwrap(); round as usize * 100];
                let all = r.all_gather(&own).unwrap();
                for (rank, bytes) in (0u8..).zip(&all) {
                    assert_eq!(bytes, &vec![rank; round as usize * 100]);
                }
                r.start_together().unwrap();
            }
            (r.rank(), r.world())
        });
        assert_eq!(got, [(0, 5), (1, 5), (2, 5), (3, 5), (4, 5)]);
    }

    #[test]
    fn a_lost_peer_is_named_to_all_who_can_hear() {
        let said = all(3, |mut r| {
            r.barrier().unwrap();
            if r.rank() == 2 {
                return String::new();
            }
            let error = r.all_gather(b"on").unwrap_err();
            r.give_up(&error.to_string());
            error.to_string()
        });
        assert!(said[0].contains("rank 2 is lost"), "{said:?}");
        assert!(said[1].contains("rank 0 gave up") && said[1].contains("rank 2 is lost"), "{said:?}");
    }

    #[test]
    fn who_gives_up_says_why_also_to_those_who_do_not_wait() {
        let said = all(2, |mut r| {
            r.barrier().unwrap();
            if r.rank() == 1 {
                r.give_up("my GPU is on fire");
                return String::new();
            }
            let until = Instant::now() + LONG;
            loop {
                if let Err(e) = r.check() {
                    return e.to_string();
                }
                assert!(Instant::now() < until);
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        assert_eq!(said[0], "rank 1 gave up: my GPU is on fire");
    }

    #[test]
    fn wrong_greetings_are_refused_and_the_right_one_is_heard_among_them() {
        let port = port();
        let root = std::thread::spawn(move || Rendezvous::join(&launch(0, 2, port), LONG));
        let right = launch(1, 2, port);
        let address = || {
            (1..=PORTS).find_map(|p| {
                let a = SocketAddr::from(([127, 0, 0, 1], port + p));
                TcpStream::connect(a).ok().map(|s| (a, s))
            })
        };
        let until = Instant::now() + LONG;
        // Somebody who connects and says nothing stays on the line meanwhile.
        let (address, _silent) = loop {
            if let Some(found) = address() {
                break found;
            }
            assert!(Instant::now() < until);
        };
        for (wrong, answer) in [
            (Launch { key: 1, ..right.clone() }, Answer::OtherJob),
            (Launch { epoch: 8, ..right.clone() }, Answer::OtherEpoch),
            (Launch { world: 3, ..right.clone() }, Answer::OtherWorld),
            (Launch { rank: 0, ..right.clone() }, Answer::Taken),
            (Launch { rank: 9, ..right.clone() }, Answer::Taken),
        ] {
            assert_eq!(greet(&wrong, address).unwrap().0, answer);
        }
        let mut old = right.greeting();
        old[11] = 99;
        assert_eq!(judge(&launch(0, 2, port), &old, &[None, None]), Some((Answer::OtherVersion, 1)));
        // A browser that has lost its way is not even answered.
        let mut browser = TcpStream::connect(address).unwrap();
        browser.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n").unwrap();
        let mut answer = Vec::new();
        browser.read_to_end(&mut answer).ok();
        assert!(answer.is_empty(), "{answer:?}");
        let mut me = Rendezvous::join(&right, LONG).unwrap();
        let mut root = root.join().unwrap().unwrap();
        let other = std::thread::spawn(move || root.all_gather(b"a").unwrap());
        assert_eq!(me.all_gather(b"b").unwrap(), [b"a", b"b"]);
        assert_eq!(other.join().unwrap(), [b"a", b"b"]);
    }

    #[test]
    fn a_port_that_is_taken_is_passed_over() {
        let port = port();
        let _torch = TcpListener::bind(("127.0.0.1", port + 1));
        let root = std::thread::spawn(move || Rendezvous::join(&launch(0, 2, port), LONG).map(|_| ()));
        assert!(Rendezvous::join(&launch(1, 2, port), LONG).is_ok());
        assert!(root.join().unwrap().is_ok());
    }

    #[test]
    fn who_does_not_come_is_named() {
        let port = port();
        let said = Rendezvous::join(&launch(0, 3, port), SHORT).unwrap_err().to_string();
        assert!(said.contains("ranks [1, 2] have not come"), "{said}");
        let said = Rendezvous::join(&launch(1, 3, port), SHORT).unwrap_err().to_string();
        assert!(said.contains("has not found rank 0 at 127.0.0.1"), "{said}");
    }

    #[test]
    fn a_silent_rank_is_named() {
        let port = port();
        let root = std::thread::spawn(move || Rendezvous::join(&launch(0, 2, port), SHORT * 20));
        let _other = Rendezvous::join(&launch(1, 2, port), LONG).unwrap();
        let mut root = root.join().unwrap().unwrap();
        root.limit = SHORT;
        assert!(root.barrier().unwrap_err().to_string().contains("ranks [1] have sent nothing"));
    }

    #[test]
    fn launchers_are_read_by_what_they_set() {
        let read = |set: &[(&str, &str)]| {
            let set: HashMap<String, String> =
                set.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
            Launch::read(|name| set.get(name).cloned(), 3).map_err(|e| e.to_string())
        };
        let torch = [
            ("WORLD_SIZE", "4"),
            ("RANK", "2"),
            ("LOCAL_RANK", "0"),
            ("MASTER_ADDR", "node1"),
            ("MASTER_PORT", "29400"),
            ("TORCHELASTIC_RUN_ID", "job"),
        ];
        let l = read(&torch).unwrap().unwrap();
        assert_eq!((l.rank, l.world, l.local_rank, l.master.as_str(), l.port), (2, 4, 0, "node1", 29_400));
        assert_eq!((l.key, l.epoch), (hash("job"), 3));
        let slurm = [
            ("SLURM_NTASKS", "2"),
            ("SLURM_PROCID", "1"),
            ("SLURM_LOCALID", "1"),
            ("SLURM_JOB_ID", "77"),
            ("MASTER_ADDR", "node1"),
        ];
        let l = read(&slurm).unwrap().unwrap();
        assert_eq!((l.rank, l.world, l.local_rank, l.port, l.key), (1, 2, 1, DEFAULT_PORT, hash("77")));
        // Alone.
        assert_eq!(read(&[]), Ok(None));
        assert_eq!(read(&[("WORLD_SIZE", "1"), ("RANK", "0")]), Ok(None));
        assert_eq!(read(&[("SLURM_NTASKS", "8")]), Ok(None));
        // torchrun with one process, whatever Slurm has set around it.
        let mut inside = slurm.to_vec();
        inside.push(("WORLD_SIZE", "1"));
        assert_eq!(read(&inside), Ok(None));
        for (change, named) in [
            (("MASTER_ADDR", ""), "MASTER_ADDR is not set"),
            (("RANK", ""), "RANK is not set"),
            (("RANK", "4"), "rank 4 of 4"),
            (("LOCAL_RANK", "x"), "LOCAL_RANK is \"x\""),
            (("MASTER_PORT", "65530"), "MASTER_PORT"),
        ] {
            let mut set = torch.to_vec();
            set.retain(|(k, _)| *k != change.0);
            set.push(change);
            let said = read(&set).unwrap_err();
            assert!(said.contains(named), "{said}");
        }
    }

    #[test]
    fn bytes_that_are_no_list_are_no_list() {
        assert_eq!(unpack(&pack(&[vec![1, 2], vec![], vec![3]])), Some(vec![vec![1, 2], vec![], vec![3]]));
        assert_eq!(unpack(&[0, 0]), None);
        assert_eq!(unpack(&u64::MAX.to_be_bytes()), None);
    }
}
