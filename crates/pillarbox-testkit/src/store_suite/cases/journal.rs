use pillarbox::admin::{Operator, PrunePolicy};
use pillarbox::journal::{Appended, Expected, StreamHead};
use pillarbox::store::TakeCause;
use pillarbox::{ErrorKind, Event, NewEvent, Payload};

use super::retention::{prune_all, weekly};
use super::{DAY, NOTHING, join, join_with, of_keys, one_lane, write};
use crate::store_suite::{Case, Fixture, Outcome, Tried};

cases! {
    NOTHING:
        versions_of_a_stream_are_dense_and_a_conflict_writes_nothing,
        appended_events_are_events_of_the_log,
        an_appended_event_reads_as_it_was_written,
        a_stream_has_one_topic,
        what_is_not_of_a_stream_is_refused,
        a_refused_event_leaves_no_trace_of_its_append,
        of_many_who_append_at_once_one_wins,
        a_stream_is_read_from_a_version_on_a_page_at_a_time,
        streams_are_listed_by_name,
        events_of_a_stream_are_never_pruned,
        a_reset_empties_the_journal;
}

fn rolled(number: usize) -> NewEvent {
    NewEvent::new("games", "dice.rolled").json(&number)
}

fn versions(events: &[Event]) -> Vec<i64> {
    events.iter().filter_map(|event| event.stream_version).collect()
}

/// The kind and the words of what refused it.
async fn refused<O: Operator>(
    operator: &O,
    stream: &str,
    expected: Expected,
    events: &[NewEvent],
) -> Tried<(ErrorKind, String)> {
    match operator.append(stream, expected, events).await {
        Ok(appended) => Err(format!("{stream}: {appended:?} was appended").into()),
        Err(error) => Ok((error.kind(), error.to_string())),
    }
}

async fn versions_of_a_stream_are_dense_and_a_conflict_writes_nothing<F: Fixture>(fixture: &F) -> Outcome {
    let operator = fixture.operator().await?;
    let conflict = refused(&operator, "s", Expected::Version(1), &[rolled(0)]).await?;
    ensure_eq!(conflict.0, ErrorKind::Conflict, "{}", conflict.1);
    ensure!(operator.streams("", None, 10).await?.is_empty(), "a conflict made a stream");
    ensure_eq!(operator.append("s", Expected::New, &[rolled(1), rolled(2)]).await?, Appended { first: 1, version: 2 });
    for expected in [Expected::New, Expected::Version(0), Expected::Version(1), Expected::Version(3)] {
        let (kind, said) = refused(&operator, "s", expected, &[rolled(3)]).await?;
        ensure_eq!(kind, ErrorKind::Conflict, "{expected:?}: {said}");
        ensure!(said.starts_with("PB409: stream \"s\" is at version 2, not at "), "{said}");
        ensure!(said.contains("load the stream"), "{said}");
    }
    ensure_eq!(operator.append("s", 2.into(), &[rolled(3)]).await?, Appended { first: 3, version: 3 });
    ensure_eq!(operator.append("s", Expected::Any, &[rolled(4)]).await?, Appended { first: 4, version: 4 });
    ensure_eq!(operator.append("other", Expected::Any, &[rolled(1)]).await?.version, 1);
    ensure_eq!(versions(&operator.read_stream("s", 1, 10).await?), [1, 2, 3, 4]);
    Ok(())
}

async fn appended_events_are_events_of_the_log<F: Fixture>(fixture: &F) -> Outcome {
    let member = join(fixture).await?;
    let operator = fixture.operator().await?;
    operator.append("s", Expected::New, &[rolled(1), rolled(2)]).await?;
    fixture.publish(vec![NewEvent::new("t", "y").key("s")]).await?;
    operator.append("s", 2.into(), &[rolled(3)]).await?;
    let events = member.poll_from(0).await?.1.events;
    let seen: Vec<_> = events.iter().map(|event| (&*event.topic, event.key.as_deref(), event.stream_version)).collect();
    let of = |version| ("games", Some("s"), Some(version));
    ensure_eq!(seen, [of(1), of(2), ("t", Some("s"), None), of(3)]);
    Ok(())
}

async fn an_appended_event_reads_as_it_was_written<F: Fixture>(fixture: &F) -> Outcome {
    let operator = fixture.operator().await?;
    let id = uuid::Uuid::from_u128(7);
    let text = "{\"b\": 1.50,  \"a\": 1e2}";
    let events = [
        NewEvent::new("games", "json").json_text(text).header("by", "me").id(id),
        NewEvent::new("games", "bytes").bytes([0, 255], "image/png"),
        NewEvent::new("games", "nothing"),
    ];
    operator.append("s", Expected::New, &events).await?;
    let read = operator.read_stream("s", 1, 10).await?;
    let payloads: Vec<&Payload> = read.iter().map(|event| &event.payload).collect();
    ensure_eq!(payloads, [&Payload::Json(text.into()), &Payload::Bytes([0, 255].into()), &Payload::None]);
    ensure_eq!((read[0].id, read[0].headers.get("by").as_deref()), (id, Some("me")));
    ensure_eq!(read[1].content_type.as_deref(), Some("image/png"));
    let logged = join(fixture).await?.poll_from(0).await?.1.events;
    ensure_eq!(read, logged.iter().map(|event| Event::clone(event)).collect::<Vec<_>>(), "the log has other events");
    Ok(())
}

async fn a_stream_has_one_topic<F: Fixture>(fixture: &F) -> Outcome {
    let operator = fixture.operator().await?;
    operator.append("s", Expected::Any, &[rolled(1)]).await?;
    for expected in [Expected::Any, Expected::Version(1)] {
        let (kind, said) = refused(&operator, "s", expected, &[NewEvent::new("others", "y")]).await?;
        ensure_eq!(kind, ErrorKind::Invalid, "{said}");
        ensure!(said.contains("'games', not 'others'"), "{said}");
    }
    ensure_eq!(operator.append("s", 1.into(), &[rolled(2)]).await?.version, 2);
    Ok(())
}

async fn what_is_not_of_a_stream_is_refused<F: Fixture>(fixture: &F) -> Outcome {
    let operator = fixture.operator().await?;
    for (stream, events) in [
        ("s", vec![]),
        ("", vec![rolled(1)]),
        ("a\0b", vec![rolled(1)]),
        ("s", vec![rolled(1).key("t")]),
        ("s", vec![rolled(1).dedup_key("d")]),
    ] {
        let (kind, said) = refused(&operator, stream, Expected::Any, &events).await?;
        ensure_eq!(kind, ErrorKind::Invalid, "{said}");
    }
    ensure!(operator.streams("", None, 10).await?.is_empty(), "what was refused made a stream");
    Ok(())
}

async fn a_refused_event_leaves_no_trace_of_its_append<F: Fixture>(fixture: &F) -> Outcome {
    let operator = fixture.operator().await?;
    operator.append("s", Expected::New, &[rolled(1)]).await?;
    let bad = NewEvent::new("games", "y").json_text("no JSON");
    refused(&operator, "s", 1.into(), &[rolled(2), bad]).await?;
    ensure_eq!(versions(&operator.read_stream("s", 1, 10).await?), [1]);
    ensure_eq!(operator.append("s", 1.into(), &[rolled(2)]).await?, Appended { first: 2, version: 2 });
    Ok(())
}

async fn of_many_who_append_at_once_one_wins<F: Fixture>(fixture: &F) -> Outcome {
    const APPENDERS: usize = 4;
    const ROUNDS: i64 = 10;
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..APPENDERS {
        let operator = fixture.operator().await?;
        tasks.spawn(async move {
            let mut won = 0;
            for round in 0..ROUNDS {
                match operator.append("s", (round * 2).into(), &[rolled(1), rolled(2)]).await {
                    Ok(_) => won += 1,
                    Err(error) if error.kind() == ErrorKind::Conflict => {}
                    Err(error) => return Err(error),
                }
            }
            Ok(won)
        });
    }
    let mut won = 0;
    while let Some(ended) = tasks.join_next().await {
        won += ended??;
    }
    ensure_eq!(won, ROUNDS);
    let events = fixture.operator().await?.read_stream("s", 1, 100).await?;
    ensure_eq!(versions(&events), (1..=ROUNDS * 2).collect::<Vec<_>>());
    ensure!(events.is_sorted_by_key(|event| event.position), "versions do not follow positions");
    Ok(())
}

async fn a_stream_is_read_from_a_version_on_a_page_at_a_time<F: Fixture>(fixture: &F) -> Outcome {
    fixture.divide(3).await;
    let operator = fixture.operator().await?;
    for number in 0..10 {
        operator.append("s", Expected::Any, &[rolled(number)]).await?;
        operator.append("other", Expected::Any, &[rolled(number)]).await?;
    }
    ensure_eq!(versions(&operator.read_stream("s", 4, 3).await?), [4, 5, 6]);
    ensure_eq!(versions(&operator.read_stream("s", 10, 3).await?), [10]);
    ensure!(operator.read_stream("s", 11, 3).await?.is_empty(), "there is nothing behind the head");
    ensure!(operator.read_stream("none", 1, 3).await?.is_empty(), "there is no such stream");
    Ok(())
}

async fn streams_are_listed_by_name<F: Fixture>(fixture: &F) -> Outcome {
    let operator = fixture.operator().await?;
    for stream in ["b-2", "a-1", "b-1", "b_1", "\u{e4}"] {
        operator.append(stream, Expected::New, &[rolled(1)]).await?;
    }
    operator.append("b-1", 1.into(), &[rolled(2)]).await?;
    let b1 = StreamHead { stream: "b-1".into(), topic: "games".into(), version: 2 };
    ensure_eq!(operator.streams("b-", None, 1).await?, [b1]);
    let names = |heads: Vec<StreamHead>| heads.into_iter().map(|head| head.stream).collect::<Vec<_>>();
    ensure_eq!(names(operator.streams("b-", None, 10).await?), ["b-1", "b-2"]);
    ensure_eq!(names(operator.streams("b-", Some("b-1"), 10).await?), ["b-2"]);
    // In the database's own order.
    let (mut all, mut after) = (Vec::new(), None);
    while let Some(head) = operator.streams("", after.as_deref(), 1).await?.pop() {
        after = Some(head.stream.clone());
        all.push(head.stream);
    }
    all.sort();
    ensure_eq!(all, ["a-1", "b-1", "b-2", "b_1", "\u{e4}"]);
    Ok(())
}

async fn events_of_a_stream_are_never_pruned<F: Fixture>(fixture: &F) -> Outcome {
    fixture.divide(4).await;
    let operator = fixture.operator().await?;
    let first = fixture.publish(of_keys(&["a"; 4])).await?;
    operator.append("s", Expected::New, &[rolled(1), rolled(2)]).await?;
    let last = fixture.publish(of_keys(&["a"; 10])).await?;
    fixture.age(last[9], 10 * DAY).await;
    let member = join_with(fixture, one_lane("all")).await?;
    let lane = member.first_lane();
    let epoch = member.take(lane, TakeCause::Free).await?;
    ensure!(member.settle(write(lane, epoch, last[9])).await?, "could not settle");
    let policy = PrunePolicy { slice: 3, ..weekly() };
    prune_all(&operator, &policy).await?;
    ensure_eq!(versions(&operator.read_stream("s", 1, 10).await?), [1, 2]);
    ensure_eq!(operator.append("s", 2.into(), &[rolled(3)]).await?.version, 3);
    let left = member.poll_from(0).await?.1.events;
    ensure!(!left.iter().any(|event| event.position == first[0]), "nothing else was pruned");
    Ok(())
}

async fn a_reset_empties_the_journal<F: Fixture>(fixture: &F) -> Outcome {
    let operator = fixture.operator().await?;
    operator.append("s", Expected::New, &[rolled(1), rolled(2)]).await?;
    operator.reset().await?;
    ensure!(operator.streams("", None, 10).await?.is_empty(), "a stream is left");
    ensure_eq!(operator.append("s", Expected::New, &[rolled(1)]).await?.version, 1);
    ensure_eq!(versions(&operator.read_stream("s", 1, 10).await?), [1]);
    Ok(())
}
