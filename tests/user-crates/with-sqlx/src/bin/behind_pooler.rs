//! Publishes by two connections of sqlx whose transactions a pooler puts on one server connection, in turn.
use pillarbox::NewEvent;
use sqlx::Connection;

const ROUNDS: usize = 10;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::var("DATABASE_URL")?;
    let mut connections = [sqlx::PgConnection::connect(&url).await?, sqlx::PgConnection::connect(&url).await?];
    for round in 0..ROUNDS {
        for connection in &mut connections {
            let mut transaction = connection.begin().await?;
            let event = NewEvent::new("t", "y").key("sqlx").json_text("{}");
            pillarbox_postgres::publish(&mut transaction, &event).await?;
            // The second connection gets the id of the first one's.
            let once = NewEvent::new("t", "y").dedup_key(format!("{round}"));
            pillarbox_postgres::publish(&mut transaction, &once).await?;
            transaction.commit().await?;
        }
    }
    Ok(())
}
