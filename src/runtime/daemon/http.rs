//! What is asked over HTTP: metrics and health.

use super::{Asked, alive, ask as question};
use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use std::sync::mpsc::SyncSender;
use tokio::net::TcpListener;

type Ask = State<SyncSender<Asked>>;

/// Serves until it is dropped.
pub(in crate::runtime) async fn serve(listener: TcpListener, ask: SyncSender<Asked>) {
    let app = Router::new()
        .route("/", get(index))
        .route("/metrics", get(metrics))
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .with_state(ask);
    if let Err(e) = axum::serve(listener, app).await {
        eprintln!("ringwatch: the HTTP server has ended: {e}");
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
