use anyhow::Result;
use tokio::task::JoinSet;

use crate::{Chat, Mention, Tally};

/// Six people who talk to each other.
pub const PEOPLE: [&str; 6] = ["ada", "alan", "barbara", "donald", "edsger", "grace"];

const CONVERSATIONS: [&str; 3] = ["compilers", "machines", "proofs"];

/// Everybody posts at the same time, each so many transactions of two messages with two mentions. Returns what they should be
/// told.
pub async fn post_at_once(database: &str, transactions: usize) -> Result<Tally> {
    let mut posting = JoinSet::new();
    for place in 0..PEOPLE.len() {
        let database = database.to_owned();
        posting.spawn(async move { post_one_by_one(&database, place, transactions).await });
    }
    let mut tally = Tally::default();
    while let Some(posted) = posting.join_next().await {
        tally.expect_all_of(posted??);
    }
    Ok(tally)
}

async fn post_one_by_one(database: &str, place: usize, transactions: usize) -> Result<Tally> {
    let mut chat = Chat::open(database).await?;
    let mut tally = Tally::default();
    for round in 0..transactions {
        let conversation = CONVERSATIONS[(place + round) % CONVERSATIONS.len()];
        let others = [1, 2, 3].map(|further| PEOPLE[(place + round % 3 + further) % PEOPLE.len()]);
        let pairs = [[others[0], others[1]], [others[2], others[0]]];
        let bodies = pairs.map(|[one, two]| format!("@{one} and @{two}, what about round {round}?"));
        let messages = chat.post(conversation, PEOPLE[place], &bodies).await?;
        for (message, pair) in messages.iter().zip(pairs) {
            for person in pair {
                tally.expect(Mention {
                    person: person.into(),
                    conversation: conversation.into(),
                    message: message.number,
                });
            }
        }
    }
    Ok(tally)
}
