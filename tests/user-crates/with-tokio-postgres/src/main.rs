//! Publishes in a transaction of tokio-postgres: one event, and several by one statement.
use pillarbox::NewEvent;
use pillarbox_postgres::{publish, publish_all};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let (mut client, connection) = tokio_postgres::connect(&std::env::var("DATABASE_URL")?, tokio_postgres::NoTls).await?;
    tokio::spawn(connection);
    client.batch_execute("create table if not exists orders (id text primary key, total integer)").await?;

    let transaction = client.transaction().await?;
    transaction.execute("insert into orders values ('tokio-postgres', 42)", &[]).await?;
    let placed = NewEvent::new("orders", "order.placed").key("tokio-postgres").json_text(r#"{"total":42}"#);
    let id = publish(&transaction, &placed).await?;
    let others = [NewEvent::new("orders", "order.paid").key("tokio-postgres"), NewEvent::new("audit", "seen")];
    publish_all(&transaction, &others).await?;
    transaction.commit().await?;
    println!("{id}");
    Ok(())
}
