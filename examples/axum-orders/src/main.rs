//! Serves until SIGTERM or Ctrl-C: `cargo run -p pillarbox-example-axum-orders -- DATABASE [HOST:PORT]`.
use anyhow::{Context, Result};
use pillarbox_example_axum_orders::{Mailbox, Service};
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let url = arguments.next().context("which database? postgres://user@host/database")?;
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:3000".into());
    let service = Service::start(&url, Mailbox::default()).await?;
    let listener = TcpListener::bind(address).await?;
    let mut terminate = signal(SignalKind::terminate())?;
    println!("listening on {}", listener.local_addr()?);
    let stop = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = tokio::signal::ctrl_c() => {}
        }
    };
    service.serve(listener, stop).await?;
    println!("stopped");
    Ok(())
}
