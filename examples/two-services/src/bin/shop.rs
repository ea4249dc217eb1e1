//! The publishing service: `shop DATABASE HOST:PORT ORDERS` places orders until there are so many, and relays them for ever.
use anyhow::{Context, Result};
use pillarbox_example_two_services::{Sender, Shop};

#[tokio::main]
async fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let database = arguments.next().context("which database?")?;
    let address = arguments.next().context("which HOST:PORT of billing?")?;
    let orders = arguments.next().context("how many orders?")?.parse()?;
    let mut shop = Shop::open(&database).await?;
    let relay = Shop::relay(&database, Sender::new(address)).await?;
    while shop.place(orders).await? {}
    Err(relay.failed().await.into())
}
