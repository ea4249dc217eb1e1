use std::convert::Infallible;
use std::future::pending;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::SyncSender;
use std::task::{Context, Poll};

use anyhow::Result;
use http_body_util::{BodyExt, Either, Full};
use hyper::body::{Body, Bytes, Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio_rustls::TlsAcceptor;

use super::{HttpAnswer, HttpRequest, State};

/// Serves until it is told to stop; then the runtime ends, and with it every connection.
pub(super) fn run(
    port: u16,
    acceptor: Option<TlsAcceptor>,
    state: Arc<State>,
    stopped: oneshot::Receiver<()>,
    listening: SyncSender<Result<()>>,
) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.expect("a runtime can be built");
    runtime.block_on(async move {
        let listener = match TcpListener::bind(("127.0.0.1", port)).await {
            Ok(listener) => listener,
            Err(error) => {
                let _ = listening.send(Err(error.into()));
                return;
            }
        };
        let _ = listening.send(Ok(()));
        tokio::select! {
            _ = stopped => {}
            () = accept(listener, acceptor, state) => {}
        }
    });
}

async fn accept(listener: TcpListener, acceptor: Option<TlsAcceptor>, state: Arc<State>) {
    loop {
        // What cannot be accepted has gone already.
        let Ok((stream, _)) = listener.accept().await else { continue };
        let connection = state.connections.fetch_add(1, Ordering::SeqCst) + 1;
        if state.closes_unread() {
            continue;
        }
        let (acceptor, state) = (acceptor.clone(), state.clone());
        tokio::spawn(async move { open(stream, acceptor, state, connection).await });
    }
}

async fn open(stream: TcpStream, acceptor: Option<TlsAcceptor>, state: Arc<State>, connection: usize) {
    // Small answers go at once.
    let _ = stream.set_nodelay(true);
    match acceptor {
        None => serve(stream, state, connection).await,
        Some(acceptor) => {
            // A client that does not trust the certificate is not served.
            if let Ok(stream) = acceptor.accept(stream).await {
                serve(stream, state, connection).await;
            }
        }
    }
}

async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, state: Arc<State>, connection: usize) {
    let service = service_fn(|request| answer(request, state.clone(), connection));
    // An error is what tests are made of: a client that went away, or an answer that was not to be given.
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

async fn answer(
    request: Request<Incoming>,
    state: Arc<State>,
    connection: usize,
) -> io::Result<Response<Either<Full<Bytes>, Stalled>>> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map_err(io::Error::other)?.to_bytes().to_vec();
    let header = |(name, value): (&hyper::header::HeaderName, &hyper::header::HeaderValue)| {
        (name.as_str().to_owned(), value.as_bytes().to_vec())
    };
    let request = HttpRequest {
        method: parts.method.to_string(),
        target: parts.uri.to_string(),
        headers: parts.headers.iter().map(header).collect(),
        body,
        connection,
        answered: None,
    };
    match state.take(request) {
        HttpAnswer::Hang => pending().await,
        HttpAnswer::Close => Err(io::ErrorKind::ConnectionAborted.into()),
        HttpAnswer::Stall { status } => {
            Response::builder().status(status).body(Either::Right(Stalled)).map_err(io::Error::other)
        }
        HttpAnswer::Answer { status, headers, body } => {
            let response = headers
                .iter()
                .fold(Response::builder().status(status), |response, (name, value)| response.header(*name, value));
            response.body(Either::Left(Full::from(body))).map_err(io::Error::other)
        }
    }
}

/// A body that is promised and never comes.
struct Stalled;

impl Body for Stalled {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Pending
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(10)
    }
}
