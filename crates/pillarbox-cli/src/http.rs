use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use axum::Router;
use axum::extract::State;
use axum::http::{Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use pillarbox::{HealthLimits, Level, Operator, Status, problems};
use serde_json::json;
use tokio::net::TcpListener;
use tokio::sync::Mutex;

use crate::command::sentence;
use crate::log::Log;
use crate::recorder::Recorder;

/// How many ports are tried beside the one that was asked for.
const PORTS_TRIED_MAX: u16 = 100;
/// A status is counted anew at most this often, however often somebody asks.
const STATUS_AGE_MAX: Duration = Duration::from_secs(1);

/// What the listener can tell of this process.
pub(crate) struct Health {
    operator: Arc<Log>,
    recorder: Recorder,
    ready: AtomicBool,
    /// When it was read, whether this instance took part then, and the status.
    cached: Mutex<Option<(Instant, bool, Status)>>,
}

impl Health {
    pub(crate) fn new(operator: Arc<Log>, recorder: Recorder) -> Arc<Self> {
        Arc::new(Health { operator, recorder, ready: AtomicBool::new(false), cached: Mutex::new(None) })
    }

    /// Whether this instance takes part: it has joined and is not draining.
    pub(crate) fn set_ready(&self, ready: bool) {
        self.ready.store(ready, Ordering::Release);
    }

    async fn status(&self) -> pillarbox::Result<Status> {
        let mut cached = self.cached.lock().await;
        let ready = self.is_ready();
        // What was read before this instance joined says that nobody runs its subscriptions.
        if let Some((at, was_ready, status)) = &*cached
            && at.elapsed() < STATUS_AGE_MAX
            && *was_ready == ready
        {
            return Ok(status.clone());
        }
        let status = self.operator.status().await?;
        *cached = Some((Instant::now(), ready, status.clone()));
        Ok(status)
    }

    fn is_ready(&self) -> bool {
        self.ready.load(Ordering::Acquire)
    }
}

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

/// Answers until the process ends.
pub(crate) async fn serve(listener: TcpListener, health: Arc<Health>) -> Result<()> {
    let router = Router::new()
        .route("/livez", get(live))
        .route("/healthz", get(live))
        .route("/readyz", get(ready))
        .route("/progressz", get(progress))
        .route("/metrics", get(metrics))
        .fallback(unknown)
        .method_not_allowed_fallback(not_allowed)
        .with_state(health);
    axum::serve(listener, router).await.context("the listener ended")
}

/// Depends on nothing: whoever can read this lives.
async fn live() -> Response {
    text("ok\n".to_owned())
}

async fn ready(State(health): State<Arc<Health>>) -> Response {
    if !health.is_ready() {
        return problem("not ready", "this instance has not joined yet, or is draining");
    }
    match health.status().await {
        Ok(_) => text("ok\n".to_owned()),
        Err(error) => problem("not ready", &format!("the database cannot be worked on: {error}")),
    }
}

async fn progress(State(health): State<Arc<Health>>) -> Response {
    let ready = health.is_ready();
    let status = match health.status().await {
        Ok(status) => status,
        Err(error) => return problem("no progress", &format!("the database cannot be read: {error}")),
    };
    if !ready {
        // A relay that starts has taken no lane yet and one that drains has given them back: nothing has to move here.
        return text("ok: this instance has not joined yet, or is draining\n".to_owned());
    }
    let serious: Vec<String> = problems(&status, &HealthLimits::default())
        .iter()
        .filter(|problem| problem.level == Level::Failed)
        .map(sentence)
        .collect();
    if serious.is_empty() { text("ok\n".to_owned()) } else { problem("no progress", &serious.join("; ")) }
}

async fn metrics(State(health): State<Arc<Health>>) -> Response {
    match health.status().await {
        Ok(status) => {
            let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
            (kind, health.recorder.render(&status)).into_response()
        }
        Err(error) => problem("no metrics", &format!("the database cannot be read: {error}")),
    }
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
    (status, [(header::CONTENT_TYPE, "application/problem+json")], format!("{body}\n")).into_response()
}
