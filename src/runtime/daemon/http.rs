//! The HTTP server: metrics and health.
//!
//! Anyone who reaches the port may connect, so a connection carries one request, and its head, its whole life and the
//! number of connections are bounded. Where all places are taken a new connection displaces the oldest one that has not
//! finished its request: a flood of half-sent requests cannot keep Prometheus out. Answers that nobody reads are memory, so
//! beyond a number of bytes a new answer displaces the oldest one.

use super::connections::{Closed, Connections, is_exhausted};
use super::{Asked, alive, ask as question};
use axum::Router;
use axum::body::HttpBody;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::collections::BTreeMap;
use std::io;
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, Id, JoinSet};

/// The pause before the next accept where descriptors or memory are exhausted.
const EXHAUSTED: Duration = Duration::from_millis(100);
/// The longest head of a request, in bytes.
const HEAD: usize = 16 << 10;

type Ask = State<SyncSender<Asked>>;

/// The bounds of a server.
#[derive(Debug, Clone, Copy)]
pub(in crate::runtime) struct Bounds {
    /// Connections at once.
    connections: usize,
    /// Bytes of all answers that are being sent.
    answer_bytes: u64,
    /// The longest that the head of a request may take to come.
    head: Duration,
    /// The longest that a connection lives.
    deadline: Duration,
}

impl Bounds {
    /// The usual times, and so many connections.
    pub(in crate::runtime) fn new(connections: usize) -> Self {
        let (head, deadline) = (Duration::from_secs(5), Duration::from_secs(30));
        Bounds { connections, answer_bytes: 16 << 20, head, deadline }
    }
}

/// Serves until it is dropped, and closes all connections with it.
pub(in crate::runtime) async fn serve(
    listener: TcpListener,
    ask: SyncSender<Asked>,
    bounds: Bounds,
    connections: Arc<Connections>,
) {
    let app = Router::new()
        .route("/", get(index))
        .route("/metrics", get(metrics))
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .with_state(ask);
    let places = Arc::new(Places { bounds, connections, open: Mutex::default() });
    let mut open = Open { places, app, tasks: JoinSet::new(), count: 0 };
    loop {
        tokio::select! {
            // Those that ended give their places back before the next one takes one.
            biased;
            Some(ended) = open.tasks.join_next_with_id() => open.ended(ended),
            accepted = listener.accept() => open.accepted(accepted).await,
        }
    }
}

/// The tasks that serve connections.
struct Open {
    places: Arc<Places>,
    app: Router,
    tasks: JoinSet<()>,
    count: u64,
}

/// What is known of the open connections.
struct Places {
    bounds: Bounds,
    connections: Arc<Connections>,
    /// By age, the oldest first.
    open: Mutex<BTreeMap<u64, Place>>,
}

struct Place {
    task: AbortHandle,
    /// True once the request's head has come.
    requested: bool,
    /// The length of its answer, from when that is known.
    answer_bytes: u64,
}

impl Open {
    async fn accepted(&mut self, accepted: io::Result<(TcpStream, std::net::SocketAddr)>) {
        match accepted {
            Ok((stream, _)) => {
                while let Some(displaced) = self.places.displaced() {
                    self.wait_for(displaced).await;
                }
                self.start(stream);
                // The one that has just come is read before the next may displace it.
                tokio::task::yield_now().await;
            }
            Err(e) if is_exhausted(&e) => {
                self.places.connections.closed(Closed::HttpExhausted);
                tokio::time::sleep(EXHAUSTED).await;
            }
            // It went away before it was accepted.
            Err(_) => {}
        }
    }

    fn start(&mut self, stream: TcpStream) {
        self.count += 1;
        let served = serve_one(stream, self.app.clone(), self.count, Arc::clone(&self.places));
        // Until it is among them its task waits.
        let mut open = self.places.open();
        let task = self.tasks.spawn(served);
        open.insert(self.count, Place { task, requested: false, answer_bytes: 0 });
    }

    /// Waits for the end of a task: its descriptor is free then, and not before.
    async fn wait_for(&mut self, task: Id) {
        while self.places.open().values().any(|p| p.task.id() == task) {
            match self.tasks.join_next_with_id().await {
                Some(ended) => self.ended(ended),
                None => return,
            }
        }
    }

    fn ended(&mut self, ended: Result<(Id, ()), tokio::task::JoinError>) {
        let id = ended.map_or_else(|e| e.id(), |(id, ())| id);
        self.places.open().retain(|_, p| p.task.id() != id);
    }
}

impl Places {
    fn open(&self) -> MutexGuard<'_, BTreeMap<u64, Place>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where all places are taken, closes the oldest connection without a whole request, or the oldest.
    fn displaced(&self) -> Option<Id> {
        let open = self.open();
        if open.len() < self.bounds.connections {
            return None;
        }
        let place = open.values().find(|p| !p.requested).or_else(|| open.values().next())?;
        Some(self.displace(place))
    }

    fn displace(&self, place: &Place) -> Id {
        self.connections.closed(Closed::Displaced);
        place.task.abort();
        place.task.id()
    }

    fn requested(&self, connection: u64) {
        if let Some(place) = self.open().get_mut(&connection) {
            place.requested = true;
        }
    }

    /// Takes note of an answer, and closes the oldest ones where all together are too long.
    fn answers(&self, connection: u64, bytes: u64) {
        let mut open = self.open();
        if let Some(place) = open.get_mut(&connection) {
            place.answer_bytes = bytes;
        }
        let mut all: u64 = open.values().map(|p| p.answer_bytes).sum();
        for (other, place) in &mut *open {
            if all <= self.bounds.answer_bytes {
                return;
            }
            if *other != connection && place.answer_bytes > 0 {
                all -= std::mem::take(&mut place.answer_bytes);
                self.displace(place);
            }
        }
    }
}

/// Serves one request.
async fn serve_one(stream: TcpStream, app: Router, connection: u64, places: Arc<Places>) {
    let (app, of_all) = (TowerToHyperService::new(app), Arc::clone(&places));
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        of_all.requested(connection);
        let (answer, of_all) = (app.call(request), Arc::clone(&of_all));
        async move {
            let answer = answer.await;
            of_all.answers(connection, answer.as_ref().map_or(0, |a| a.body().size_hint().lower()));
            answer
        }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(places.bounds.head)
        .max_buf_size(HEAD)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(places.bounds.deadline, served).await {
        Err(_) => places.connections.closed(Closed::Deadline),
        Ok(Err(e)) if e.is_timeout() => places.connections.closed(Closed::SlowRequest),
        // A client that goes away, or that does not speak HTTP, is no news.
        Ok(_) => {}
    }
}

async fn index() -> &'static str {
    "ringwatch: /metrics, /livez, /readyz\n"
}

/// Metrics, in the format that is asked for.
async fn metrics(State(ask): Ask, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|a| a.to_str().ok()).map(str::to_owned);
    match question(&ask, |reply| Asked::Metrics { accept, reply }).await {
        Some(Ok((content_type, body))) => ([(header::CONTENT_TYPE, content_type)], body).into_response(),
        Some(Err(why)) => (StatusCode::INTERNAL_SERVER_ERROR, why).into_response(),
        None => (StatusCode::SERVICE_UNAVAILABLE, "the state does not answer\n").into_response(),
    }
}

/// Whether it is worth going on: the state answers.
async fn livez(State(ask): Ask) -> (StatusCode, &'static str) {
    if alive(&ask).await {
        (StatusCode::OK, "ok\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the state does not answer\n")
    }
}

/// Whether it has data: the state reads segments.
async fn readyz(State(ask): Ask) -> (StatusCode, &'static str) {
    match question(&ask, Asked::Ready).await {
        Some(true) => (StatusCode::OK, "ok\n"),
        Some(false) => (StatusCode::SERVICE_UNAVAILABLE, "nothing was read for five seconds\n"),
        None => (StatusCode::SERVICE_UNAVAILABLE, "the state does not answer\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// A server whose state never answers.
    async fn server(
        bounds: Bounds,
    ) -> (JoinSet<()>, std::net::SocketAddr, Arc<Connections>, std::sync::mpsc::Receiver<Asked>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (ask, questions) = std::sync::mpsc::sync_channel(8);
        let connections = Arc::new(Connections::default());
        let mut tasks = JoinSet::new();
        tasks.spawn(serve(listener, ask, bounds, Arc::clone(&connections)));
        (tasks, address, connections, questions)
    }

    /// A whole request for something that takes seconds to answer.
    async fn asked(address: std::net::SocketAddr) -> TcpStream {
        let mut s = TcpStream::connect(address).await.unwrap();
        s.write_all(b"GET /livez HTTP/1.1\r\nHost: agent\r\n\r\n").await.unwrap();
        s
    }

    #[tokio::test]
    async fn a_connection_that_lives_too_long_is_closed() {
        let bounds = Bounds { deadline: Duration::from_millis(100), ..Bounds::new(2) };
        let (_tasks, address, connections, _questions) = server(bounds).await;
        let mut text = String::new();
        asked(address).await.read_to_string(&mut text).await.unwrap();
        assert_eq!(text, "", "it was not answered");
        assert_eq!(connections.counts()[&("http", "deadline")], 1);
    }

    #[tokio::test]
    async fn where_all_wait_for_answers_the_oldest_goes() {
        let (_tasks, address, connections, _questions) = server(Bounds::new(2)).await;
        let (mut first, mut second) = (asked(address).await, asked(address).await);
        let mut third = TcpStream::connect(address).await.unwrap();
        third.write_all(b"GET / HTTP/1.1\r\nHost: agent\r\n\r\n").await.unwrap();
        let mut texts = [String::new(), String::new(), String::new()];
        for (s, text) in [&mut third, &mut first, &mut second].into_iter().zip(&mut texts) {
            s.read_to_string(text).await.unwrap();
        }
        assert!(texts[0].starts_with("HTTP/1.1 200 "), "{texts:?}");
        assert_eq!(texts[1], "", "displaced");
        assert!(texts[2].starts_with("HTTP/1.1 503 "), "{texts:?}");
        assert_eq!(connections.counts()[&("http", "displaced by a newer one")], 1);
    }

    #[tokio::test]
    async fn answers_that_nobody_reads_are_bounded_and_keep_nobody_out() {
        // More than two sockets hold between them.
        const LENGTH: usize = 24 << 20;
        let bounds = Bounds { answer_bytes: 3 * LENGTH as u64, ..Bounds::new(16) };
        let (tasks, address, connections, questions) = server(bounds).await;
        // It ends with the server.
        std::thread::spawn(move || {
            for asked in questions {
                if let Asked::Metrics { reply, .. } = asked {
                    reply.send(Ok(("text/plain".to_owned(), vec![b'x'; LENGTH]))).ok();
                }
            }
        });
        let request = b"GET /metrics HTTP/1.1\r\nHost: agent\r\n\r\n";
        let mut unread = Vec::new();
        for _ in 0..6 {
            let mut s = TcpStream::connect(address).await.unwrap();
            s.write_all(request).await.unwrap();
            // It has its answer, and reads no more than its beginning.
            s.read_exact(&mut [0; 16]).await.unwrap();
            unread.push(s);
        }
        let mut s = TcpStream::connect(address).await.unwrap();
        s.write_all(request).await.unwrap();
        let mut text = Vec::new();
        s.read_to_end(&mut text).await.unwrap();
        assert!(text.len() > LENGTH, "{} bytes", text.len());
        assert_eq!(connections.counts()[&("http", "displaced by a newer one")], 4, "three of seven are left");
        drop((tasks, unread));
    }
}
