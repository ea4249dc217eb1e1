//! Publishes in a transaction of SeaORM.
use pillarbox::NewEvent;
use pillarbox_postgres::{EventSql, Parameter};
use sea_orm::{ConnectionTrait, Database, DatabaseBackend, Statement, TransactionTrait, Value};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let database = Database::connect(std::env::var("DATABASE_URL")?).await?;
    database.execute_unprepared("create table if not exists orders (id text primary key, total integer)").await?;

    let transaction = database.begin().await?;
    transaction.execute_unprepared("insert into orders values ('sea-orm', 42)").await?;
    let placed = NewEvent::new("orders", "order.placed").key("sea-orm").json_text(r#"{"total":42}"#);
    let id = publish(&transaction, &placed).await?;
    transaction.commit().await?;
    println!("{id}");
    Ok(())
}

async fn publish(transaction: &impl ConnectionTrait, event: &NewEvent) -> Result<String, Box<dyn std::error::Error>> {
    let statement = event.to_sql()?;
    let values = statement.parameters.into_iter().map(|parameter| match parameter {
        Parameter::Text(text) => Value::from(text),
        Parameter::Bytes(bytes) => Value::from(bytes),
    });
    let statement = Statement::from_sql_and_values(DatabaseBackend::Postgres, statement.sql, values);
    let row = transaction.query_one_raw(statement).await?.ok_or("publishing returns the id")?;
    Ok(row.try_get("", "id")?)
}
