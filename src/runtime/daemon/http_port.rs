//! The port of the HTTP server: a socket of the service manager, or the address of the settings.
//!
//! A port that somebody else has is not fatal: the daemon does its work, and tries again. A user could otherwise keep an
//! agent from starting by taking its port while it restarts.

use super::{Answers, Bounds, Connections, Error, http};
use crate::config::Config;
use listenfd::ListenFd;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpSocket};
use tracing::{info, warn};

/// The first and the longest pause before a taken port is tried again.
const AGAIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));
/// Connections that wait to be accepted, as far as the kernel allows.
const BACKLOG: u32 = 4096;

/// The sockets that the service manager passed. They are taken out of the environment: call this before there are threads.
pub(in crate::runtime) fn inherited_sockets() -> ListenFd {
    ListenFd::from_env()
}

/// A port that is served, or tried until it can be.
#[derive(Debug)]
pub(in crate::runtime) struct HttpPort {
    address: SocketAddr,
    listener: Option<TcpListener>,
}

impl HttpPort {
    /// Opens the port; `None` where the settings want no server.
    ///
    /// # Errors
    /// What waiting cannot cure.
    pub(in crate::runtime) fn open(
        config: &Config,
        inherited: ListenFd,
        counters: &Connections,
    ) -> Result<Option<Self>, Error> {
        let inherited = inherited_port(inherited);
        let Some(address) = config.http.listen else {
            if inherited.is_some() {
                warn!("http.listen is null: the socket of the service manager is closed");
            }
            return Ok(None);
        };
        if let Some(listener) = inherited {
            let listener = TcpListener::from_std(listener)?;
            let address = listener.local_addr()?;
            info!("listening on http://{address}, a socket of the service manager");
            return Ok(Some(HttpPort { address, listener: Some(listener) }));
        }
        match bind(address) {
            Ok(listener) => Ok(Some(HttpPort { address, listener: Some(listener) })),
            Err(why) if is_taken(&why) => {
                counters.listen_failed();
                warn!("http.listen: {address}: {why}; without metrics and probes until it is free");
                Ok(Some(HttpPort { address, listener: None }))
            }
            Err(why) => Err(Error::Listen { address, why }),
        }
    }

    /// Serves until it is dropped, as soon as the port can be had.
    pub(in crate::runtime) async fn serve(
        self,
        answers: Answers,
        bounds: Bounds,
        counters: Arc<Connections>,
    ) {
        let listener = match self.listener {
            Some(listener) => listener,
            None => bind_again(self.address, &counters).await,
        };
        http::serve(listener, answers, bounds, counters).await;
    }
}

/// The first socket that was passed, where it listens for TCP.
fn inherited_port(mut inherited: ListenFd) -> Option<std::net::TcpListener> {
    let listener = inherited.take_tcp_listener(0).and_then(|listener| {
        listener.as_ref().map_or(Ok(()), |l| l.set_nonblocking(true))?;
        Ok(listener)
    });
    let listener = listener.unwrap_or_else(|e| {
        warn!("the socket of the service manager cannot be used: {e}");
        None
    });
    if inherited.len() > 1 {
        warn!("of {} sockets of the service manager only the first one is served", inherited.len());
    }
    // No other program that the daemon starts may have one.
    (0..inherited.len()).for_each(|n| close(&mut inherited, n));
    listener
}

/// Closes a socket, whichever kind it is; one that was taken is left alone.
fn close(inherited: &mut ListenFd, n: usize) {
    let is_closed = inherited.take_tcp_listener(n).is_ok() || inherited.take_unix_listener(n).is_ok();
    if !is_closed && inherited.take_unix_datagram(n).is_err() && inherited.take_udp_socket(n).is_err() {
        warn!(
            "descriptor {n} of the service manager is no socket, and programs that the daemon starts inherit it"
        );
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // A port is free again as soon as its server has ended.
    socket.set_reuseaddr(true)?;
    socket.bind(address)?;
    let listener = socket.listen(BACKLOG)?;
    info!("listening on http://{}", listener.local_addr()?);
    Ok(listener)
}

async fn bind_again(address: SocketAddr, counters: &Connections) -> TcpListener {
    let mut pause = AGAIN.0;
    loop {
        tokio::time::sleep(pause).await;
        match bind(address) {
            Ok(listener) => return listener,
            Err(why) => {
                counters.listen_failed();
                pause = (2 * pause).min(AGAIN.1);
                warn!("http.listen: {address}: {why}; it is tried again in {} s", pause.as_secs());
            }
        }
    }
}

/// True where somebody else has the address, or the host does not have it yet.
fn is_taken(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::AddrInUse | io::ErrorKind::AddrNotAvailable)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(listen: &str) -> Config {
        serde_yaml::from_str(&format!("http: {{listen: {listen:?}}}")).unwrap()
    }

    #[tokio::test]
    async fn a_port_that_is_taken_is_counted_and_no_error() {
        let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let counters = Connections::default();
        let address = taken.local_addr().unwrap().to_string();
        let port = HttpPort::open(&config(&address), ListenFd::empty(), &counters).unwrap().unwrap();
        assert!(port.listener.is_none() && counters.listen_failures() == 1);
        drop(taken);
        let listener = bind_again(port.address, &counters).await;
        assert_eq!((listener.local_addr().unwrap(), counters.listen_failures()), (port.address, 1));
    }

    #[test]
    fn what_waiting_does_not_cure_is_an_error() {
        for (code, taken) in [(libc::EADDRINUSE, true), (libc::EADDRNOTAVAIL, true), (libc::EACCES, false)] {
            assert_eq!(is_taken(&io::Error::from_raw_os_error(code)), taken, "{code}");
        }
    }
}
