use pillarbox_example_pipeline::{Mention, Message, Tally, postgres};
use pillarbox_testkit::postgres::connect;
use tokio_postgres::Transaction;

use crate::place::{Place, patient};

/// The positions of what the transaction has published.
async fn positions(transaction: &Transaction<'_>, message: &Message) -> Vec<i64> {
    let sql = "select position from pillarbox.event where key in ($1, $2) order by position";
    let rows = transaction.query(sql, &[&message.conversation, &message.author]).await.unwrap();
    rows.iter().map(|row| row.get(0)).collect()
}

fn mention(message: &Message) -> Mention {
    Mention { person: "ada".into(), conversation: message.conversation.clone(), message: message.number }
}

/// One transaction draws position 42 and is slow, another draws 43 and commits first.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_committed_late_is_not_lost_and_delays_nobody() {
    let place = Place::postgres().await;
    let mut ada = place.connect(&["ada"]);
    let relay = place.pipeline().await;
    let (mut slow, mut quick) = (connect(&place.database()).await.unwrap(), connect(&place.database()).await.unwrap());
    let mut messages = [Message::new("proofs", "grace", "@ada?"), Message::new("machines", "alan", "@ada!")];
    let [earlier, later] = &mut messages;

    let slow = slow.transaction().await.unwrap();
    postgres::post(&slow, std::slice::from_mut(earlier)).await.unwrap();
    let quick = quick.transaction().await.unwrap();
    postgres::post(&quick, std::slice::from_mut(later)).await.unwrap();
    let (low, high) = (positions(&slow, earlier).await, positions(&quick, later).await);
    assert_eq!((low.len(), high.len()), (2, 2));
    assert!(low.last() < high.first(), "{low:?} {high:?}");

    quick.commit().await.unwrap();
    let told = patient("the later one is told while the earlier one is open", ada[0].next()).await.unwrap();
    assert_eq!((told.number, &told.mention), (1, &mention(later)));
    slow.commit().await.unwrap();
    let told_late = patient("the earlier one is told", ada[0].next()).await.unwrap();
    assert_eq!((told_late.number, &told_late.mention), (2, &mention(earlier)));

    let mut tally = Tally::default();
    for told in [&told, &told_late] {
        tally.expect(told.mention.clone());
        tally.arrived(told);
    }
    assert_eq!(place.check_all_is_done_once(relay, &mut tally, &mut ada).await, 0);
}
