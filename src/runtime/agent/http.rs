//! What is asked over HTTP: metrics and health.

use super::state::{self, Asked};
use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use std::sync::mpsc::SyncSender;
use tokio::net::TcpListener;

type Ask = State<SyncSender<Asked>>;

/// Serves until it is dropped.
pub(super) async fn serve(listener: TcpListener, ask: SyncSender<Asked>) {
    let app = Router::new()
        .route("/", get(index))
        .route("/livez", get(livez))
        .route("/readyz", get(readyz))
        .with_state(ask);
    if let Err(e) = axum::serve(listener, app).await {
        eprintln!("ringwatch: the HTTP server has ended: {e}");
    }
}

async fn index() -> &'static str {
    "ringwatch agent: /metrics, /livez, /readyz\n"
}

/// Whether it is worth going on: the state answers.
async fn livez(State(ask): Ask) -> (StatusCode, &'static str) {
    if state::alive(&ask).await {
        (StatusCode::OK, "ok\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the state does not answer\n")
    }
}

/// Whether it has data: the state reads segments.
async fn readyz(State(ask): Ask) -> (StatusCode, &'static str) {
    match state::ask(&ask, Asked::Ready).await {
        Some(true) => (StatusCode::OK, "ok\n"),
        Some(false) => (StatusCode::SERVICE_UNAVAILABLE, "segments were not read for five seconds\n"),
        None => (StatusCode::SERVICE_UNAVAILABLE, "the state does not answer\n"),
    }
}
