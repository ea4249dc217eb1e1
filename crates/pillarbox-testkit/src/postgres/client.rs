use anyhow::{Context, Result};
use tokio_postgres::{Client, NoTls, SimpleQueryMessage};

/// Connects without TLS. The connection ends with the client.
pub async fn connect(url: &str) -> Result<Client> {
    let connected = tokio_postgres::connect(url, NoTls).await;
    let (client, connection) = connected.with_context(|| format!("cannot connect to {url}"))?;
    // How it ended is what the client's next call says.
    tokio::spawn(async { drop(connection.await) });
    Ok(client)
}

/// Runs statements on a connection of their own. Blocks, and may be called inside and outside of a runtime.
pub(super) fn run(url: &str, sql: &str) -> Result<String> {
    block_on(async {
        let client = connect(url).await?;
        let messages = client.simple_query(sql).await.with_context(|| format!("PostgreSQL refused: {sql}"))?;
        let rows = messages.iter().filter_map(|message| match message {
            SimpleQueryMessage::Row(row) => Some(row),
            _ => None,
        });
        let lines =
            rows.map(|row| (0..row.len()).map(|at| row.get(at).unwrap_or_default()).collect::<Vec<_>>().join("|"));
        Ok(lines.collect::<Vec<_>>().join("\n"))
    })
}

/// Waits for a future on a thread of its own, for a runtime cannot wait inside another one.
pub(super) fn block_on<T: Send>(future: impl Future<Output = Result<T>> + Send) -> Result<T> {
    let here = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context("no runtime")?;
        runtime.block_on(future)
    };
    std::thread::scope(|scope| scope.spawn(here).join().expect("the thread does not panic"))
}
