//! The receiving service: `billing DATABASE HOST:PORT`.
use anyhow::{Context, Result};
use pillarbox_example_two_services::Billing;
use tokio::net::TcpListener;

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let database = arguments.next().context("which database?")?;
    let address = arguments.next().context("which HOST:PORT?")?;
    let crash = std::env::var_os("CRASH_BEFORE_ANSWER").is_some();
    Billing::prepare(&database).await?;
    Billing::serve(&database, TcpListener::bind(address).await?, crash).await
}
