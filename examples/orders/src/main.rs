//! Runs the shop for a moment: `cargo run -p pillarbox-example-orders [DATABASE]`.
use anyhow::Result;
use pillarbox_example_orders::{Mailbox, NewOrder, Revenue, connect, place_order, prepare, relay};
use rusqlite::TransactionBehavior::Immediate;

#[tokio::main]
async fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = std::env::args().nth(1).map_or_else(|| folder.path().join("shop.db"), Into::into);
    prepare(&path)?;

    let mailbox = Mailbox::default();
    let relay = relay(&path, &mailbox)?.start().await?;

    let mut connection = connect(&path)?;
    for (customer, cents) in [("ada@example.org", 4200), ("grace@example.org", 1999), ("ada@example.org", 350)] {
        let transaction = connection.transaction_with_behavior(Immediate)?;
        let order = place_order(&transaction, &NewOrder { customer: customer.into(), cents })?;
        pillarbox_sqlite::commit(transaction)?;
        println!("placed order {order}");
    }
    let transaction = connection.transaction_with_behavior(Immediate)?;
    place_order(&transaction, &NewOrder { customer: "nobody@example.org".into(), cents: 1_000_000 })?;
    transaction.rollback()?;
    println!("rolled one back: nobody will hear of it");

    relay.until_idle().await?;
    relay.drain().await?;
    mailbox.sent().iter().for_each(|text| println!("sent {text}"));
    println!("revenue: {} cents", Revenue::new(&path).cents()?);
    Ok(())
}
