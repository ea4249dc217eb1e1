//! Publishes in transactions of sqlx and of SeaORM to the database file that is named, and runs the relay in the same process.
use std::sync::Arc;

use pillarbox::testing::Capture;
use pillarbox::{Relay, Subscription};
use pillarbox_sqlite::SqliteStore;
use sea_orm::{ConnectionTrait, Database, TransactionTrait};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const PUBLISH: &str = r#"insert into pillarbox_event (topic, key, type, payload) values ('orders', 'one', 'order.placed', '{"total":42}')"#;

#[tokio::main]
async fn main() -> Result<()> {
    let path = std::env::args().nth(1).ok_or("name a file")?;
    pillarbox_sqlite::migrate(&path)?;
    let url = format!("sqlite://{path}");

    let pool = sqlx::SqlitePool::connect(&url).await?;
    let mut transaction = pool.begin().await?;
    sqlx::query("create table orders (id text primary key)").execute(&mut *transaction).await?;
    sqlx::query("insert into orders values ('sqlx')").execute(&mut *transaction).await?;
    sqlx::query(PUBLISH).execute(&mut *transaction).await?;
    transaction.commit().await?;

    let database = Database::connect(&url).await?;
    let transaction = database.begin().await?;
    transaction.execute_unprepared("insert into orders values ('sea-orm')").await?;
    transaction.execute_unprepared(PUBLISH).await?;
    transaction.commit().await?;

    let capture = Arc::new(Capture::default());
    let relay = Relay::builder(SqliteStore::open(&path)?).subscribe(Subscription::new("all"), capture.clone());
    let relay = relay.start().await?;
    relay.until_idle().await?;
    relay.drain().await?;
    println!("{}", capture.events().len());
    Ok(())
}
