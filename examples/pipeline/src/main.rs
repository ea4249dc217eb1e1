//! Six people talk, one of them is late: `cargo run -p pillarbox-example-pipeline [DATABASE]`.
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use pillarbox::RelayConfig;
use pillarbox_example_pipeline::{Chat, Client, PEOPLE, Sockets, Tally, post_at_once};

/// How many transactions everybody posts.
const TRANSACTIONS: usize = 5;

/// How long the pipeline may take.
const PATIENCE: Duration = Duration::from_secs(60);

#[tokio::main]
async fn main() -> Result<ExitCode> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("chat.db").display().to_string();
    let database = std::env::args().nth(1).unwrap_or(file);
    let problems = tokio::time::timeout(PATIENCE, run(&database)).await.context("not everybody was told in time")??;
    problems.iter().for_each(|problem| println!("{problem}"));
    Ok(if problems.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Lets everybody talk and returns what went wrong.
async fn run(database: &str) -> Result<Vec<String>> {
    let [late, present @ ..] = PEOPLE;
    Chat::prepare(database).await?;
    let sockets = Sockets::default();
    let mut clients: Vec<Client> = present.iter().map(|person| sockets.connect(person)).collect();
    let relay = Chat::pipeline(database, &sockets, RelayConfig::default()).await?;

    let mut tally = post_at_once(database, TRANSACTIONS).await?;
    println!("{} people have posted, with {} mentions; {late} is not there", PEOPLE.len(), tally.expected());
    for client in &mut clients {
        listen(&mut tally, client).await;
    }
    println!("{late} comes: {} mentions are waiting", tally.owed(late));
    clients.push(sockets.connect(late));
    listen(&mut tally, clients.last_mut().context("somebody came")?).await;

    relay.until_idle().await?;
    relay.drain().await?;
    sockets.close();
    for client in &mut clients {
        tally.listen_to_the_end(client).await;
    }
    println!("{} of {} mentions arrived once", tally.told_once(), tally.expected());
    Ok(tally.problems())
}

async fn listen(tally: &mut Tally, client: &mut Client) {
    let owed = tally.owed(client.person());
    tally.listen(client).await;
    println!("{} was told of {owed} mentions", client.person());
}
