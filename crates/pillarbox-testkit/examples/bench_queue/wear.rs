use std::time::{Duration, Instant};

use tokio_postgres::Client;

use crate::Result;
use crate::database::connect;
use crate::process::Figures;

/// Between two looks at who is connected.
const PAUSE: Duration = Duration::from_millis(10);
/// Nobody takes that long to disconnect.
const PATIENCE: Duration = Duration::from_secs(30);

const WAL: &str = "select (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::float8";

/// Every update and every delete leaves a dead tuple behind, whether or not it has been vacuumed away since.
const TUPLES: &str = "select coalesce(sum(n_tup_upd + n_tup_del), 0)::float8,
        coalesce(sum(n_tup_ins) filter (where schemaname = 'pillarbox' and relname = 'delivery'), 0)::float8
    from pg_stat_user_tables";

/// What work does to a database: dead tuples of all its tables, and write-ahead log.
pub(crate) struct Wear {
    client: Client,
    wal: f64,
    dead: f64,
    rows: f64,
}

impl Wear {
    /// From now on.
    pub(crate) async fn begin(url: &str) -> Result<Wear> {
        let client = connect(url).await?;
        let (dead, rows) = tuples(&client).await?;
        let wal = client.query_one(WAL, &[]).await?.get(0);
        Ok(Wear { client, wal, dead, rows })
    }

    /// Adds what each of `count` events cost: write-ahead log (`wal`), dead tuples (`dead`) and rows of the queue (`rows`).
    pub(crate) async fn end(self, count: usize, figures: Figures) -> Result<Figures> {
        let wal: f64 = self.client.query_one(WAL, &[]).await?.get(0);
        let (dead, rows) = tuples(&self.client).await?;
        let each = |before: f64, after: f64| (after - before) / count as f64;
        Ok(figures
            .with("wal", each(self.wal, wal))
            .with("dead", each(self.dead, dead))
            .with("rows", each(self.rows, rows)))
    }
}

/// Dead tuples so far, and inserts into the delivery table.
async fn tuples(client: &Client) -> Result<(f64, f64)> {
    until_alone(client).await?;
    let row = client.query_one(TUPLES, &[]).await?;
    Ok((row.get(0), row.get(1)))
}

/// Waits until nobody else is connected: a session tells the statistics all that it has done when it ends.
async fn until_alone(client: &Client) -> Result<()> {
    let sql = "select count(*) from pg_stat_activity
        where datname = current_database() and backend_type = 'client backend' and pid <> pg_backend_pid()";
    let asked = Instant::now();
    while client.query_one(sql, &[]).await?.get::<_, i64>(0) > 0 {
        if asked.elapsed() > PATIENCE {
            return Err("somebody does not disconnect".into());
        }
        tokio::time::sleep(PAUSE).await;
    }
    Ok(())
}
