use std::sync::Arc;
use std::sync::mpsc;
use std::time::Instant;

use axum::Router;
use axum::body::Bytes;
use axum::http::StatusCode;
use futures_util::{StreamExt, TryStreamExt, stream};
use pillarbox::sink::Sink;
use pillarbox_sinks::{HttpConfig, HttpSink};
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::Result;
use crate::latency;
use crate::process::Figures;
use crate::throughput::{SOURCE, events, pipelined, structured};

const STRUCTURED: &str = "application/cloudevents+json; charset=utf-8";

pub(crate) fn sink(url: &str) -> Result<Arc<dyn Sink>> {
    Ok(Arc::new(HttpSink::new(HttpConfig::new(url.parse()?), SOURCE)?))
}

/// Requests under way for a batch, as in the sink.
fn concurrency() -> Result<usize> {
    Ok(HttpConfig::new("http://localhost/".parse()?).concurrency)
}

pub(crate) async fn bare(url: &str, count: usize) -> Result<Figures> {
    let (client, concurrency) = (client()?, concurrency()?);
    let bodies: Vec<Bytes> = events(count).map(|event| structured(&event).into()).collect();
    let url = url.to_owned();
    pipelined(bodies, move |batch| {
        let (client, url) = (client.clone(), url.clone());
        async move {
            let requests = batch.into_iter().map(|body| post(&client, &url, body));
            stream::iter(requests).buffer_unordered(concurrency).try_collect::<()>().await
        }
    })
    .await
}

fn client() -> Result<reqwest::Client> {
    Ok(reqwest::Client::builder().no_proxy().build()?)
}

async fn post(client: &reqwest::Client, url: &str, body: Bytes) -> Result<()> {
    let response = client.post(url).header("content-type", STRUCTURED).body(body).send().await?;
    response.error_for_status()?.bytes().await?;
    Ok(())
}

pub(crate) async fn latency(samples: usize) -> Result<Figures> {
    let (url, arrivals) = consume().await?;
    latency::relay(sink(&url)?, arrivals, samples).await
}

pub(crate) async fn latency_bare(samples: usize) -> Result<Figures> {
    let (url, arrivals) = consume().await?;
    let client = client()?;
    let bodies: Vec<Bytes> = events(1_000).map(|event| structured(&event).into()).collect();
    latency::sample(samples, arrivals, |number| {
        let (client, url, body) = (client.clone(), url.clone(), bodies[number % bodies.len()].clone());
        async move {
            let began = Instant::now();
            post(&client, &url, body).await?;
            Ok(began)
        }
    })
    .await
}

/// A receiver in this process that tells when something came.
async fn consume() -> Result<(String, UnboundedReceiver<Instant>)> {
    let (sender, arrivals) = unbounded_channel();
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/", listener.local_addr()?);
    tokio::spawn(async move { axum::serve(listener, router(Some(sender))).await });
    Ok((url, arrivals))
}

/// Takes everything and says so.
fn router(arrivals: Option<UnboundedSender<Instant>>) -> Router {
    Router::new().fallback(move |_body: Bytes| {
        if let Some(sender) = &arrivals {
            // Nobody listens after the last sample.
            let _ = sender.send(Instant::now());
        }
        std::future::ready(StatusCode::NO_CONTENT)
    })
}

/// A receiver on threads of its own.
pub(crate) struct Receiver {
    url: String,
    _runtime: tokio::runtime::Runtime,
}

impl Receiver {
    pub(crate) fn start() -> Result<Receiver> {
        let runtime = tokio::runtime::Runtime::new()?;
        let (sender, address) = mpsc::channel();
        runtime.spawn(async move {
            let listener = TcpListener::bind("127.0.0.1:0").await?;
            let _ = sender.send(listener.local_addr()?);
            axum::serve(listener, router(None)).await
        });
        let url = format!("http://{}/", address.recv()?);
        Ok(Receiver { url, _runtime: runtime })
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }
}
