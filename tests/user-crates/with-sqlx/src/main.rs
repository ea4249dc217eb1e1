//! Publishes in a transaction of sqlx.
use pillarbox::NewEvent;
use sqlx::Connection;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut connection = sqlx::PgConnection::connect(&std::env::var("DATABASE_URL")?).await?;
    sqlx::query("create table if not exists orders (id text primary key, total integer)").execute(&mut connection).await?;

    let mut transaction = connection.begin().await?;
    sqlx::query("insert into orders values ('sqlx', 42)").execute(&mut *transaction).await?;
    let placed = NewEvent::new("orders", "order.placed").key("sqlx").json_text(r#"{"total":42}"#).dedup_key("sqlx");
    let id = pillarbox_postgres::publish(&mut transaction, &placed).await?;
    assert_eq!(pillarbox_postgres::publish(&mut transaction, &placed).await?, id, "once");
    transaction.commit().await?;
    println!("{id}");
    Ok(())
}
