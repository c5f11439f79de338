//! How rank 0 and the others find each other.

use super::{Launch, PORTS, RendezvousError};
use std::io::{self, Read, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

pub(super) const MAGIC: u64 = u64::from_be_bytes(*b"RWBENCH\n");

pub(super) const VERSION: u32 = 1;

/// How long somebody may take to greet or to answer.
const GREETING: Duration = Duration::from_secs(2);

/// Between two rounds over the ports.
const PAUSE: Duration = Duration::from_millis(50);

/// Rank 0's answer to a greeting.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
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

/// The answer to a greeting; with the rank where it is welcome, `None` where it is no greeting of ours.
pub(super) fn judge(own: &Launch, greeting: &[u8; 40], here: &[Option<TcpStream>]) -> Option<(Answer, u32)> {
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
pub(super) fn gather(launch: &Launch, limit: Duration) -> Result<Vec<Option<TcpStream>>, RendezvousError> {
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
pub(super) fn find(launch: &Launch, limit: Duration) -> Result<Vec<Option<TcpStream>>, RendezvousError> {
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

pub(super) fn greet(launch: &Launch, address: SocketAddr) -> io::Result<(Answer, TcpStream)> {
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
