mod health;
mod host;
mod server;

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context, Result};
use axum::Router;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri, header};
use axum::middleware::from_fn;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use pillarbox::admin::{HealthLimits, Level, problems};
use pillarbox::visible_json;
use serde_json::json;
use tokio::net::TcpListener;

use crate::command::sentence;

use health::Reading;
pub(crate) use health::{Health, Part};

/// How many ports are tried beside the one that was asked for.
const PORTS_TRIED_MAX: u16 = 100;

/// Binds the address, or the next free port above it.
pub(crate) async fn bind(address: SocketAddr) -> Result<TcpListener> {
    let mut refused = None;
    for step in 0..=PORTS_TRIED_MAX {
        let Some(port) = address.port().checked_add(step) else { break };
        match TcpListener::bind(SocketAddr::new(address.ip(), port)).await {
            Ok(listener) => return Ok(listener),
            Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => refused = Some(error),
            Err(error) => return Err(error).with_context(|| format!("cannot listen on {address}; change http.listen")),
        }
    }
    let error = refused.unwrap_or_else(|| std::io::ErrorKind::AddrInUse.into());
    Err(error)
        .with_context(|| format!("{address} and the {PORTS_TRIED_MAX} ports above it are taken; change http.listen"))
}

/// Answers at most so many connections at a time, until the process ends.
pub(crate) async fn serve(listener: TcpListener, health: Arc<Health>, connections_max: usize) -> Infallible {
    let router = Router::new()
        .route("/livez", get(live))
        .route("/healthz", get(live))
        .route("/readyz", get(ready))
        .route("/progressz", get(progress))
        .route("/metrics", get(metrics))
        // Whatever comes beside the open pages belongs in here.
        .fallback_service(Router::new().fallback(unknown).layer(from_fn(host::own)))
        .method_not_allowed_fallback(not_allowed)
        .with_state(health);
    server::serve(listener, router, connections_max).await
}

/// Depends on nothing: a process that answers is alive.
async fn live() -> Response {
    text("ok\n".to_owned())
}

async fn ready(State(health): State<Arc<Health>>) -> Response {
    match health.hindrance() {
        None => text("ok\n".to_owned()),
        Some(hindrance) => problem("not ready", &hindrance),
    }
}

async fn progress(State(health): State<Arc<Health>>) -> Response {
    let (part, since) = health.part();
    match part {
        // A relay that starts has taken no lane yet and one that drains has given them back: nothing has to move here.
        Part::Starting => return text("ok: this instance has not joined yet\n".to_owned()),
        Part::Draining => return text("ok: this instance is draining\n".to_owned()),
        Part::Working { .. } | Part::Lost => {}
    }
    if let Some(hindrance) = health.hindrance() {
        return problem("no progress", &hindrance);
    }
    let known = health.known_in_time().await;
    // What was read before this instance joined says that nobody runs its subscriptions.
    let reading = known.since(since);
    if let Some(error) = known.error.as_ref().filter(|_| reading.is_none_or(Reading::is_old)) {
        return problem("no progress", &format!("the database cannot be read: {error}"));
    }
    // Without an error the last reading holds, however old: the next one is under way, and takes longer than a probe waits.
    let Some(reading) = reading else { return text("ok: this instance has just joined\n".to_owned()) };
    let serious: Vec<String> = problems(&reading.status, &HealthLimits::default())
        .iter()
        .filter(|problem| problem.level == Level::Failed)
        .map(sentence)
        .collect();
    if serious.is_empty() { text("ok\n".to_owned()) } else { problem("no progress", &serious.join("; ")) }
}

async fn metrics(State(health): State<Arc<Health>>) -> Response {
    let known = health.known().await;
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    // What this process counts itself is told also while the database is away.
    (kind, health.recorder.render(known.youngest())).into_response()
}

async fn unknown(uri: Uri) -> Response {
    let detail = format!("there is nothing at {}; see /livez, /readyz, /progressz, /metrics", uri.path());
    document(StatusCode::NOT_FOUND, "not found", &detail)
}

async fn not_allowed(method: Method, uri: Uri) -> Response {
    let detail = format!("{} is only read: GET or HEAD, not {method}", uri.path());
    document(StatusCode::METHOD_NOT_ALLOWED, "method not allowed", &detail)
}

fn text(body: String) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], body).into_response()
}

fn problem(title: &str, detail: &str) -> Response {
    document(StatusCode::SERVICE_UNAVAILABLE, title, detail)
}

/// A problem document of RFC 9457.
fn document(status: StatusCode, title: &str, detail: &str) -> Response {
    let body = json!({ "type": "about:blank", "title": title, "status": status.as_u16(), "detail": detail });
    let body = format!("{}\n", visible_json(&body.to_string()));
    (status, [(header::CONTENT_TYPE, "application/problem+json")], body).into_response()
}
