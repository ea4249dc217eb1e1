use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::response::Response;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tracing::warn;

/// How long a connection may take to send the head of a request, the first one as well as the next one.
const HEAD_TIMEOUT: Duration = Duration::from_secs(20);
/// After this long a connection is closed once it has its answer. What comes again opens another one.
const LIFETIME_MAX: Duration = Duration::from_secs(300);
/// How long a connection that is over may take to fetch its last answer.
const LAST_ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The largest head of a request.
const HEAD_BYTES_MAX: usize = 16 * 1024;
/// The shortest and the longest wait after the system refused to accept a connection.
const ACCEPT_BACKOFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// Serves the pages to at most `connections_max` connections at a time. One more closes the oldest that has no request under way, so
/// that silent connections never keep a health check out, nor take the file descriptors that sinks need.
pub(super) async fn serve(listener: TcpListener, router: Router, connections_max: usize) -> Infallible {
    let mut connections = Connections::new(connections_max);
    let mut backoff = ACCEPT_BACKOFF.0;
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    backoff = ACCEPT_BACKOFF.0;
                    connections.open(stream, router.clone());
                }
                // The client has gone again before it was accepted.
                Err(error) if is_of_one_client(&error) => {}
                Err(error) => {
                    warn!(%error, again_in = ?backoff, "cannot accept a connection; trying again");
                    tokio::time::sleep(backoff).await;
                    backoff = (backoff * 2).min(ACCEPT_BACKOFF.1);
                }
            },
            Some(_) = connections.tasks.join_next() => connections.forget_ended(),
        }
    }
}

fn is_of_one_client(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

/// The open connections, the oldest first.
struct Connections {
    max: usize,
    open: VecDeque<Connection>,
    tasks: JoinSet<()>,
}

struct Connection {
    /// A request is being answered.
    busy: Arc<AtomicBool>,
    task: AbortHandle,
}

impl Connections {
    fn new(max: usize) -> Self {
        Connections { max: max.max(1), open: VecDeque::new(), tasks: JoinSet::new() }
    }

    fn open(&mut self, stream: TcpStream, router: Router) {
        self.forget_ended();
        if self.open.len() >= self.max {
            self.close_one();
        }
        let busy = Arc::new(AtomicBool::new(false));
        let pages = Pages { router: TowerToHyperService::new(router), busy: busy.clone() };
        let task = self.tasks.spawn(answer(stream, pages));
        self.open.push_back(Connection { busy, task });
    }

    /// Closes the oldest connection without a request, or if all have one, the oldest.
    fn close_one(&mut self) {
        let idle = self.open.iter().position(|connection| !connection.busy.load(Ordering::Relaxed));
        if let Some(connection) = self.open.remove(idle.unwrap_or(0)) {
            connection.task.abort();
        }
    }

    fn forget_ended(&mut self) {
        while self.tasks.try_join_next().is_some() {}
        self.open.retain(|connection| !connection.task.is_finished());
    }
}

/// Answers one connection for as long as it may last.
async fn answer(stream: TcpStream, pages: Pages) {
    let mut connection = pin!(
        http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(HEAD_TIMEOUT)
            .max_buf_size(HEAD_BYTES_MAX)
            .serve_connection(TokioIo::new(stream), pages)
    );
    // How a connection ends is its client's business.
    tokio::select! {
        _ = connection.as_mut() => return,
        () = tokio::time::sleep(LIFETIME_MAX) => connection.as_mut().graceful_shutdown(),
    }
    let _ = tokio::time::timeout(LAST_ANSWER_TIMEOUT, connection).await;
}

/// The pages, as one connection asks for them.
struct Pages {
    router: TowerToHyperService<Router>,
    busy: Arc<AtomicBool>,
}

impl Service<Request<Incoming>> for Pages {
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        self.busy.store(true, Ordering::Relaxed);
        let (answer, busy) = (self.router.call(request), self.busy.clone());
        Box::pin(async move {
            let answer = answer.await;
            busy.store(false, Ordering::Relaxed);
            answer
        })
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::time::Instant;

    use super::*;

    /// A listener with one page, for at most so many connections.
    async fn listener(connections_max: usize) -> std::net::SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().route("/", get(|| async { "well" }));
        tokio::spawn(serve(listener, router, connections_max));
        address
    }

    /// Asks for the page on a connection that is kept; whether there was an answer.
    async fn ask(stream: &mut TcpStream) -> bool {
        if stream.write_all(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n").await.is_err() {
            return false;
        }
        let mut answer = Vec::new();
        while !answer.ends_with(b"well") {
            match stream.read_buf(&mut answer).await {
                Ok(1..) => {}
                Ok(0) | Err(_) => return false,
            }
        }
        true
    }

    #[tokio::test]
    async fn as_many_connections_as_allowed_stay_and_one_more_closes_the_oldest() {
        let address = listener(2).await;
        let (mut first, mut second) =
            (TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap());
        for _ in 0..2 {
            assert!(ask(&mut first).await && ask(&mut second).await, "two are allowed");
        }
        let mut third = TcpStream::connect(address).await.unwrap();
        assert!(ask(&mut third).await);
        assert!(!ask(&mut first).await, "the oldest");
        assert!(ask(&mut second).await && ask(&mut third).await);
    }

    #[tokio::test(start_paused = true)]
    async fn a_head_that_does_not_end_in_time_ends_its_connection_the_first_as_well_as_the_next() {
        let address = listener(9).await;
        for (asked_before, sent) in [(false, ""), (false, "GET / HTTP/1.1\r\nHost: "), (true, ""), (true, "GET /")] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            assert!(!asked_before || ask(&mut stream).await);
            stream.write_all(sent.as_bytes()).await.unwrap();
            let began = Instant::now();
            // Whoever began a head may be told that it took too long.
            while matches!(stream.read(&mut [0; 1024]).await, Ok(1..)) {}
            let lasted = began.elapsed();
            let in_time = HEAD_TIMEOUT..HEAD_TIMEOUT + Duration::from_secs(1);
            assert!(in_time.contains(&lasted), "{asked_before} {sent:?}: {lasted:?}");
        }
    }
}
