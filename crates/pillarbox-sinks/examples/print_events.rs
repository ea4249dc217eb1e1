//! Writes events as the `stdout` or the `file` sink does: `print_events COUNT [PATH]`. Exits 0 as well when nobody reads
//! any more.
use std::process::ExitCode;
use std::sync::Arc;

use pillarbox::sink::{Attempt, Batch, Origin, Outcome, Sink};
use pillarbox::store::SubscriptionId;
use pillarbox::{Event, Headers, Payload, Timestamp};
use pillarbox_sinks::{FileSink, Stdout};
use uuid::Uuid;

const SOURCE: &str = "urn:pillarbox:example";

const ORIGIN: Origin = Origin { log_id: Uuid::nil(), incarnation: 1, subscription: SubscriptionId(1) };

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let count = std::env::args().nth(1).and_then(|count| count.parse().ok()).unwrap_or(3);
    let sink: Box<dyn Sink> = match std::env::args_os().nth(2) {
        Some(path) => Box::new(FileSink::new(path, SOURCE)),
        None => Box::new(Stdout::new(SOURCE)),
    };
    for first in (1..=count).step_by(100) {
        let batch = (first..=count.min(first + 99)).map(attempt).collect();
        let outcomes = sink.deliver(Batch { subscription: "example".into(), origin: ORIGIN, events: batch }).await;
        let failure = outcomes.iter().find_map(|outcome| match outcome {
            Outcome::Failed(failure) => Some(failure),
            _ => None,
        });
        match failure {
            Some(failure) if failure.kind == "broken_pipe" => return ExitCode::SUCCESS,
            Some(failure) => {
                eprintln!("{}", failure.message);
                return ExitCode::FAILURE;
            }
            None => {}
        }
    }
    ExitCode::SUCCESS
}

fn attempt(position: i64) -> Attempt {
    let event = Event {
        position,
        id: uuid::Uuid::from_u64_pair(1, position as u64),
        topic: "orders".into(),
        key: Some("order \"1\"\n".into()),
        r#type: "order.placed".into(),
        payload: Payload::Json(format!("{{\n\"n\": {position}}}").into()),
        content_type: None,
        headers: Headers::default(),
        stream_version: None,
        deliver_at: None,
        created_at: Timestamp(0),
        malformed: None,
    };
    Attempt { event: Arc::new(event), number: 1, lane: Some(0), epoch: 1, claim: None }
}
