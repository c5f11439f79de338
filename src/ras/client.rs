//! RAS's protocol: lines of text over TCP.

use super::Status;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::Duration;

/// Where RAS listens unless NCCL_RAS_ADDR says otherwise.
pub const DEFAULT_ADDRESS: &str = "localhost:28028";
/// More than this of an answer is not read, in bytes: a rank of a communicator takes about 500.
const BYTES_MAX: u64 = 256 << 20;
/// A line that is no answer but a greeting has at most this.
const LINE_MAX: u64 = 4096;
/// A connection has to be made within this, and each answer has to come within the other.
const CONNECT: Duration = Duration::from_secs(5);
const PATIENCE: Duration = Duration::from_secs(60);

/// Why RAS could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing listens, or it did not answer.
    #[error("{address}: {why}")]
    Connection {
        /// The address.
        address: String,
        /// What happened.
        why: io::Error,
    },
    /// Something else listens there.
    #[error("{address}: no RAS of NCCL answers there, but something that said {said:?}")]
    Stranger {
        /// The address.
        address: String,
        /// What it said.
        said: String,
    },
    /// This NCCL's RAS does not speak JSON.
    #[error("{address}: this RAS has no JSON (NCCL before 2.28): it said {said:?}")]
    NoJson {
        /// The address.
        address: String,
        /// What it said.
        said: String,
    },
    /// The answer is no status.
    #[error("{address}: its status cannot be read: {why}")]
    Status {
        /// The address.
        address: String,
        /// The fault and its position.
        why: String,
    },
}

/// One connection: RAS answers one request, and ends it.
#[derive(Debug)]
pub struct Client {
    address: String,
    stream: BufReader<TcpStream>,
}

impl Client {
    /// Connects to RAS and greets it.
    ///
    /// # Errors
    /// Nothing listens there, or it is no RAS.
    pub fn connect(address: &str) -> Result<Self, Error> {
        let fault = |why| Error::Connection { address: address.to_owned(), why };
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for place in address.to_socket_addrs().map_err(fault)? {
            match TcpStream::connect_timeout(&place, CONNECT) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(PATIENCE)).map_err(fault)?;
                    stream.set_write_timeout(Some(CONNECT)).map_err(fault)?;
                    let mut client = Client { address: address.to_owned(), stream: BufReader::new(stream) };
                    client.send("CLIENT PROTOCOL 2")?;
                    let said = client.line()?;
                    if said.starts_with("SERVER PROTOCOL") {
                        return Ok(client);
                    }
                    return Err(Error::Stranger { address: address.to_owned(), said });
                }
                Err(why) => last = why,
            }
        }
        Err(fault(last))
    }

    /// Asks for something, and returns the answer as text.
    ///
    /// # Errors
    /// The connection broke, or the answer did not come.
    pub fn ask(mut self, request: &str) -> Result<String, Error> {
        self.send(request)?;
        self.rest()
    }

    /// Asks for the status of the job.
    ///
    /// # Errors
    /// As [`Client::ask`]; or this RAS has no JSON, or it cannot be read.
    pub fn status(mut self) -> Result<Status, Error> {
        self.send("SET FORMAT json")?;
        let said = self.line()?;
        let address = self.address.clone();
        if said != "OK" {
            return Err(Error::NoJson { address, said });
        }
        self.send("VERBOSE STATUS")?;
        let text = self.rest()?;
        Status::parse(&text).map_err(|why| Error::Status { address, why })
    }

    fn fault(&self, why: io::Error) -> Error {
        Error::Connection { address: self.address.clone(), why }
    }

    fn send(&mut self, line: &str) -> Result<(), Error> {
        let text = format!("{line}\n");
        self.stream.get_mut().write_all(text.as_bytes()).map_err(|why| self.fault(why))
    }

    fn line(&mut self) -> Result<String, Error> {
        let mut line = String::new();
        let read = (&mut self.stream).take(LINE_MAX).read_line(&mut line);
        match read {
            Ok(_) => Ok(line.trim().to_owned()),
            // Bytes that are no text are no greeting.
            Err(why) if why.kind() == io::ErrorKind::InvalidData => Ok(String::new()),
            Err(why) => Err(self.fault(why)),
        }
    }

    fn rest(mut self) -> Result<String, Error> {
        let mut bytes = Vec::new();
        let read = (&mut self.stream).take(BYTES_MAX + 1).read_to_end(&mut bytes);
        read.map_err(|why| self.fault(why))?;
        if bytes.len() as u64 > BYTES_MAX {
            let why = format!("it has more than {} MiB", BYTES_MAX >> 20);
            return Err(Error::Status { address: self.address, why });
        }
        Ok(String::from_utf8_lossy(&bytes).trim().to_owned())
    }
}
