//! The HTTP server: metrics and health.
//!
//! Anyone who reaches the port may connect, so a connection carries one request, and its head, its whole life and the
//! number of connections are bounded. Where all places are taken a new connection displaces one of the peer that has the
//! most: a flood of half-sent or of whole requests cannot keep Prometheus out. Answers that nobody reads are memory, so
//! beyond a number of bytes a new answer displaces older ones. No request makes the state work but for metrics, which all
//! who ask within a moment share.

use super::Heartbeat;
use super::connections::{Closed, Connections, is_exhausted};
use super::http_connections::{Bounds, HttpConnections};
use super::shared_metrics::{SharedMetrics, Unanswered};
use super::state_queue::StateSender;
use super::tcp_peer::PeerLookup;
use axum::body::HttpBody;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Extension, Router};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{Id, JoinSet};

/// The pause before the next accept where descriptors or memory are exhausted.
const EXHAUSTED: Duration = Duration::from_millis(100);
/// The longest head of a request, in bytes.
const HEAD: usize = 16 << 10;

/// The sources of HTTP answers.
#[derive(Debug, Clone)]
pub(in crate::runtime) struct Answers {
    /// The thread that owns the state.
    pub(in crate::runtime) state: StateSender,
    /// Its signs of life.
    pub(in crate::runtime) heartbeat: Arc<Heartbeat>,
    /// Metrics may have native histograms.
    pub(in crate::runtime) native_histograms: bool,
}

/// The number of the render that a response carries.
#[derive(Debug, Clone, Copy)]
struct RenderNumber(u64);

/// Serves until it is dropped, and closes all connections with it.
pub(in crate::runtime) async fn serve(
    listener: TcpListener,
    answers: Answers,
    bounds: Bounds,
    counters: Arc<Connections>,
) {
    let metrics = Arc::new(SharedMetrics::new(answers.state, answers.native_histograms));
    let app = Router::new()
        .route("/", get(index))
        .route("/metrics", get(serve_metrics).with_state(metrics))
        .route("/livez", get(livez).with_state(Arc::clone(&answers.heartbeat)))
        .route("/readyz", get(readyz).with_state(answers.heartbeat));
    let connections = Arc::new(HttpConnections::new(bounds, counters));
    let mut open = Open { connections, app, lookup: PeerLookup::new(), tasks: JoinSet::new(), count: 0 };
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
    connections: Arc<HttpConnections>,
    app: Router,
    lookup: PeerLookup,
    tasks: JoinSet<()>,
    count: u64,
}

impl Open {
    async fn accepted(&mut self, accepted: io::Result<(TcpStream, SocketAddr)>) {
        match accepted {
            Ok((stream, remote)) => {
                while let Some(displaced) = self.connections.displaced() {
                    self.wait_for(displaced).await;
                }
                self.start(stream, remote);
                // The one that has just come is read before the next may displace it.
                tokio::task::yield_now().await;
            }
            Err(e) if is_exhausted(&e) => {
                self.connections.counters.closed(Closed::HttpExhausted);
                tokio::time::sleep(EXHAUSTED).await;
            }
            // It went away before it was accepted.
            Err(_) => {}
        }
    }

    fn start(&mut self, stream: TcpStream, remote: SocketAddr) {
        // Without an address of its own the connection is already closed.
        let Ok(local) = stream.local_addr() else { return };
        let peer = self.lookup.of(local, remote);
        self.count += 1;
        let served = serve_one(stream, self.app.clone(), self.count, Arc::clone(&self.connections));
        // Until it is in the table its task waits.
        let mut table = self.connections.lock();
        let task = self.tasks.spawn(served);
        table.insert(self.count, task, peer);
    }

    /// Waits for the end of a task: its descriptor is free then, and not before.
    async fn wait_for(&mut self, task: Id) {
        while self.connections.has(task) {
            match self.tasks.join_next_with_id().await {
                Some(ended) => self.ended(ended),
                None => return,
            }
        }
    }

    fn ended(&mut self, ended: Result<(Id, ()), tokio::task::JoinError>) {
        self.connections.ended(ended.map_or_else(|e| e.id(), |(id, ())| id));
    }
}

/// Serves one request.
async fn serve_one(stream: TcpStream, app: Router, number: u64, connections: Arc<HttpConnections>) {
    let (app, of_all) = (TowerToHyperService::new(app), Arc::clone(&connections));
    let service = service_fn(move |request: hyper::Request<Incoming>| {
        of_all.requested(number);
        let (answer, of_all) = (app.call(request), Arc::clone(&of_all));
        async move {
            let answer = answer.await;
            if let Ok(answer) = &answer
                && let Some(RenderNumber(render)) = answer.extensions().get()
            {
                of_all.answers(number, *render, answer.body().size_hint().lower());
            }
            answer
        }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(connections.bounds.head)
        .max_buf_size(HEAD)
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    match tokio::time::timeout(connections.bounds.deadline, served).await {
        Err(_) => connections.counters.closed(Closed::Deadline),
        Ok(Err(e)) if e.is_timeout() => connections.counters.closed(Closed::SlowRequest),
        // A client that goes away, or that does not speak HTTP, is no news.
        Ok(_) => {}
    }
}

async fn index() -> &'static str {
    "ringwatch: /metrics, /livez, /readyz\n"
}

/// Metrics, in the format that is requested. The tag names the moment of which they are.
async fn serve_metrics(State(metrics): State<Arc<SharedMetrics>>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|a| a.to_str().ok());
    let Some(render) = metrics.get(accept).await else { return unanswered() };
    match &render.rendered {
        Ok(Ok(rendered)) => {
            let tag = format!("\"{}\"", render.unix_ms);
            let head = [(header::CONTENT_TYPE, rendered.content_type.clone()), (header::ETAG, tag)];
            (Extension(RenderNumber(render.number)), head, rendered.body.clone()).into_response()
        }
        Ok(Err(why)) => (StatusCode::INTERNAL_SERVER_ERROR, why.clone()).into_response(),
        Err(Unanswered) => unanswered(),
    }
}

fn unanswered() -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, "the state does not answer\n").into_response()
}

/// Answers whether it is worth going on: the thread that owns the state does not hang.
async fn livez(State(heartbeat): State<Arc<Heartbeat>>) -> (StatusCode, &'static str) {
    if heartbeat.is_alive() {
        (StatusCode::OK, "ok\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the state hangs: no sign of life for ten seconds\n")
    }
}

/// Answers whether it has data: the state reads its sources.
async fn readyz(State(heartbeat): State<Arc<Heartbeat>>) -> (StatusCode, &'static str) {
    if heartbeat.is_ready() {
        (StatusCode::OK, "ok\n")
    } else {
        (
            StatusCode::SERVICE_UNAVAILABLE,
            "not every source is known yet, or none was read for five seconds\n",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::super::requests::{Asked, Rendered};
    use super::super::state_queue::{Received, StateReceiver, state_queue};
    use super::*;
    use std::time::Instant;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    /// A server whose state never answers.
    async fn server(bounds: Bounds) -> (JoinSet<()>, SocketAddr, Arc<Connections>, StateReceiver) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (state, questions) = state_queue();
        let answers = Answers { state, heartbeat: Arc::new(Heartbeat::new()), native_histograms: true };
        let connections = Arc::new(Connections::default());
        let mut tasks = JoinSet::new();
        tasks.spawn(serve(listener, answers, bounds, Arc::clone(&connections)));
        (tasks, address, connections, questions)
    }

    async fn asked(address: SocketAddr, path: &str) -> TcpStream {
        let mut s = TcpStream::connect(address).await.unwrap();
        s.write_all(format!("GET {path} HTTP/1.1\r\nHost: agent\r\n\r\n").as_bytes()).await.unwrap();
        s
    }

    async fn text(mut s: TcpStream) -> String {
        let mut text = String::new();
        s.read_to_string(&mut text).await.unwrap();
        text
    }

    #[tokio::test]
    async fn a_connection_that_lives_too_long_is_closed() {
        let bounds = Bounds { deadline: Duration::from_millis(100), ..Bounds::new(2) };
        let (_tasks, address, connections, _questions) = server(bounds).await;
        assert_eq!(text(asked(address, "/metrics").await).await, "", "it was not answered");
        assert_eq!(connections.counts()[&("http", "deadline")], 1);
    }

    #[tokio::test]
    async fn health_needs_no_answer_of_the_state() {
        let (_tasks, address, ..) = server(Bounds::new(2)).await;
        let began = Instant::now();
        let (live, ready) =
            (text(asked(address, "/livez").await).await, text(asked(address, "/readyz").await).await);
        assert!(live.starts_with("HTTP/1.1 200 "), "{live}");
        assert!(ready.starts_with("HTTP/1.1 503 "), "no pass is finished: {ready}");
        assert!(began.elapsed() < Duration::from_secs(1));
    }

    #[tokio::test]
    async fn where_all_wait_for_answers_the_oldest_goes() {
        let (_tasks, address, connections, _questions) = server(Bounds::new(2)).await;
        let (first, second) = (asked(address, "/metrics").await, asked(address, "/metrics").await);
        let third = asked(address, "/").await;
        let texts = [text(third).await, text(first).await, text(second).await];
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
            let later = || Instant::now() + Duration::from_secs(60);
            while let Received::Asked(Asked::Metrics { reply, .. }) = questions.receive(later()) {
                let body = vec![b'x'; LENGTH].into();
                let took = Duration::ZERO;
                reply.send(Ok(Rendered { content_type: "text/plain".to_owned(), body, took })).ok();
            }
        });
        let mut unread = Vec::new();
        for _ in 0..6 {
            let mut s = asked(address, "/metrics").await;
            // It has its answer, and reads no more than its beginning.
            s.read_exact(&mut [0; 16]).await.unwrap();
            unread.push(s);
            // The next one has a render of its own.
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        let text = text(asked(address, "/metrics").await).await;
        assert!(text.len() > LENGTH, "{} bytes", text.len());
        assert_eq!(connections.counts()[&("http", "displaced by a newer one")], 4, "three of seven are left");
        drop((tasks, unread));
    }
}
