//! A real HTTP server that answers as a test tells it, or not at all.
mod serve;
mod tls;

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result};
use pillarbox::sink::BoxFuture;
use tokio::sync::{oneshot, watch};

use crate::loopback::on_free_port;
use crate::sink_suite::ServerControl;
use tls::Tls;

/// How long a test waits for requests before it fails.
const WAIT_MAX: Duration = Duration::from_secs(30);

/// An HTTP/1.1 server on a port of the loopback interface. It runs on a thread of its own, can be killed and started again on
/// the same port, and ends with the value. What it has recorded survives that.
pub struct HttpReceiver {
    port: u16,
    tls: Option<Tls>,
    state: Arc<State>,
    running: Mutex<Option<Running>>,
}

/// A request as it came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpRequest {
    /// `POST` and so on.
    pub method: String,
    /// Path and query.
    pub target: String,
    /// Names in lower case, in order.
    pub headers: Vec<(String, Vec<u8>)>,
    /// The body.
    pub body: Vec<u8>,
    /// The number of its connection, from 1 on.
    pub connection: usize,
    /// The status of the answer; None: there was none.
    pub answered: Option<u16>,
}

/// What becomes of a request, once all of it was read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HttpAnswer {
    /// This status, with headers and a body.
    Answer {
        /// The status.
        status: u16,
        /// Headers of the answer.
        headers: Vec<(&'static str, String)>,
        /// Its body.
        body: Vec<u8>,
    },
    /// No answer; the connection stays open.
    Hang,
    /// No answer; the connection is closed.
    Close,
    /// An answer that promises this body and stops before its end; the connection stays open.
    Stall {
        /// The status.
        status: u16,
    },
}

impl HttpAnswer {
    /// A status alone.
    pub fn status(status: u16) -> Self {
        HttpAnswer::Answer { status, headers: Vec::new(), body: Vec::new() }
    }

    /// A status with one header.
    pub fn with_header(status: u16, name: &'static str, value: impl Into<String>) -> Self {
        HttpAnswer::Answer { status, headers: vec![(name, value.into())], body: Vec::new() }
    }
}

impl HttpRequest {
    /// The first header of this name, if it is text.
    pub fn header(&self, name: &str) -> Option<&str> {
        let (_, value) = self.headers.iter().find(|(there, _)| there == name)?;
        std::str::from_utf8(value).ok()
    }

    /// The body as text.
    ///
    /// # Panics
    /// If it is none.
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).expect("the body is text")
    }
}

type Script = dyn Fn(&HttpRequest) -> HttpAnswer + Send + Sync;

struct State {
    requests: Mutex<Vec<HttpRequest>>,
    script: Mutex<Arc<Script>>,
    count: watch::Sender<usize>,
    connections: AtomicUsize,
    /// Connections that are yet to be closed as soon as they are accepted.
    close_unread: AtomicUsize,
}

struct Running {
    stop: oneshot::Sender<()>,
    thread: JoinHandle<()>,
}

impl HttpReceiver {
    /// A server that answers everything with 204.
    pub fn start() -> Result<Self> {
        HttpReceiver::with(None)
    }

    /// The same over TLS, for `localhost`, with a certificate that [`HttpReceiver::authority`] has signed.
    pub fn start_tls() -> Result<Self> {
        HttpReceiver::with(Some(Tls::make()?))
    }

    fn with(tls: Option<Tls>) -> Result<Self> {
        let state = State {
            requests: Mutex::default(),
            script: Mutex::new(Arc::new(|_| HttpAnswer::status(204))),
            count: watch::Sender::new(0),
            connections: AtomicUsize::new(0),
            close_unread: AtomicUsize::new(0),
        };
        let mut receiver = HttpReceiver { port: 0, tls, state: Arc::new(state), running: Mutex::default() };
        on_free_port(|port| {
            receiver.port = port;
            receiver.restart()
        })?;
        Ok(receiver)
    }

    /// The port on `127.0.0.1`.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Its URL with this path, which begins with a slash.
    pub fn url(&self, path: &str) -> String {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        format!("{scheme}://localhost:{}{path}", self.port)
    }

    /// The certificate (PEM) of the authority that signed the server's.
    ///
    /// # Panics
    /// Without TLS.
    pub fn authority(&self) -> &Path {
        self.tls.as_ref().expect("the server was started with TLS").authority()
    }

    /// How requests are answered from now on.
    pub fn answer(&self, script: impl Fn(&HttpRequest) -> HttpAnswer + Send + Sync + 'static) {
        *lock(&self.state.script) = Arc::new(script);
    }

    /// Closes the next connections without reading from them.
    pub fn close_unread(&self, connections: usize) {
        self.state.close_unread.store(connections, Ordering::SeqCst);
    }

    /// All requests so far that were read whole, in order of arrival.
    pub fn requests(&self) -> Vec<HttpRequest> {
        lock(&self.state.requests).clone()
    }

    /// The requests that were answered with 200 to 299.
    pub fn accepted(&self) -> Vec<HttpRequest> {
        let accepted = |request: &HttpRequest| matches!(request.answered, Some(200..=299));
        self.requests().into_iter().filter(accepted).collect()
    }

    /// How many connections were accepted so far.
    pub fn connections(&self) -> usize {
        self.state.connections.load(Ordering::SeqCst)
    }

    /// Returns when there were this many requests.
    ///
    /// # Panics
    /// If they do not come.
    pub async fn until_requests(&self, count: usize) {
        let mut arrived = self.state.count.subscribe();
        let reached = tokio::time::timeout(WAIT_MAX, arrived.wait_for(|arrived| *arrived >= count)).await;
        let there = *self.state.count.borrow();
        assert!(reached.is_ok(), "{there} of {count} requests came within {WAIT_MAX:?}");
    }

    /// Closes the port and all connections at once, whatever they are doing. All are closed when this returns.
    pub fn kill(&self) {
        let running = lock(&self.running).take();
        if let Some(Running { stop, thread }) = running {
            let _ = stop.send(());
            // It panics only if a test's script did, which the test hears of by the missing answer.
            let _ = thread.join();
        }
    }

    /// Listens again, on the same port, if it does not.
    pub fn restart(&self) -> Result<()> {
        let mut running = lock(&self.running);
        if running.is_some() {
            return Ok(());
        }
        let acceptor = self.tls.as_ref().map(Tls::acceptor).transpose()?;
        let (stop, stopped) = oneshot::channel();
        let (state, port) = (self.state.clone(), self.port);
        let (listening, started) = std::sync::mpsc::sync_channel(1);
        let thread = std::thread::spawn(move || serve::run(port, acceptor, state, stopped, listening));
        started.recv().context("the HTTP server ended")??;
        *running = Some(Running { stop, thread });
        Ok(())
    }
}

impl ServerControl for HttpReceiver {
    fn kill(&self) -> BoxFuture<'_, ()> {
        HttpReceiver::kill(self);
        Box::pin(async {})
    }

    fn restart(&self) -> BoxFuture<'_, ()> {
        HttpReceiver::restart(self).expect("the port is still free");
        Box::pin(async {})
    }
}

impl Drop for HttpReceiver {
    fn drop(&mut self) {
        self.kill();
    }
}

impl State {
    /// Asks the script and records the request with its answer.
    fn take(&self, mut request: HttpRequest) -> HttpAnswer {
        let script = lock(&self.script).clone();
        let answer = script(&request);
        request.answered = match &answer {
            HttpAnswer::Answer { status, .. } | HttpAnswer::Stall { status } => Some(*status),
            HttpAnswer::Hang | HttpAnswer::Close => None,
        };
        lock(&self.requests).push(request);
        self.count.send_modify(|count| *count += 1);
        answer
    }

    fn closes_unread(&self) -> bool {
        let less = |left: usize| left.checked_sub(1);
        self.close_unread.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less).is_ok()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
