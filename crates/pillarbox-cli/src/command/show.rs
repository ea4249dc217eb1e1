use anyhow::Result;
use pillarbox::admin::plan::unknown_event;
use pillarbox::admin::{ClaimRecord, DeliveryRecord, EventRecord, Fate, Operator, State, Status, Why, why};
use pillarbox::{Event, Payload, counted};
use serde_json::value::RawValue;
use serde_json::{Map, Value, json};
use uuid::Uuid;

use super::Scope;
use crate::args::ShowArgs;
use crate::exit::Exit;
use crate::output::{Output, Style, dash};

/// Shows one event with its deliveries and attempts.
pub(super) async fn run(scope: &Scope, args: &ShowArgs) -> Result<Exit> {
    let (record, status) = find(scope, args.id).await?;
    if scope.output.json {
        let subscriptions: Vec<Value> = record
            .subscriptions
            .iter()
            .map(|fate| fate_json(fate, &why(&record, fate, &status)))
            .collect::<Result<_>>()?;
        scope.output.json_line(&event_json(&record.event, &subscriptions)?)?;
    } else {
        print(&scope.output, &record, &status)?;
    }
    Ok(Exit::Done)
}

/// The event of an id with all that is needed to explain it.
pub(super) async fn find(scope: &Scope, id: Uuid) -> Result<(EventRecord, Status)> {
    let store = scope.open().await?;
    match store.show(id).await? {
        Some(record) => Ok((record, store.status().await?)),
        None => Err(unknown_event(id).into()),
    }
}

/// The event with its payload exactly as it was published.
fn event_json(event: &Event, subscriptions: &[Value]) -> Result<String> {
    #[derive(serde::Serialize)]
    struct Shown<'a> {
        position: i64,
        id: Uuid,
        topic: &'a str,
        r#type: &'a str,
        key: Option<&'a str>,
        payload: Option<&'a RawValue>,
        #[serde(skip_serializing_if = "Option::is_none")]
        payload_bytes: Option<String>,
        content_type: Option<&'a str>,
        headers: Value,
        stream_version: Option<i64>,
        deliver_at: Option<pillarbox::Timestamp>,
        created_at: pillarbox::Timestamp,
        subscriptions: &'a [Value],
    }
    let (payload, payload_bytes) = match &event.payload {
        Payload::None => (None, None),
        Payload::Json(text) => (serde_json::from_str::<&RawValue>(text).ok(), None),
        Payload::Bytes(bytes) => (None, Some(hexadecimal(bytes))),
    };
    let shown = Shown {
        position: event.position,
        id: event.id,
        topic: &event.topic,
        r#type: &event.r#type,
        key: event.key.as_deref(),
        payload,
        payload_bytes,
        content_type: event.content_type.as_deref(),
        headers: serde_json::from_str(event.headers.as_json()).unwrap_or_else(|_| Value::Object(Map::new())),
        stream_version: event.stream_version,
        deliver_at: event.deliver_at,
        created_at: event.created_at,
        subscriptions,
    };
    Ok(serde_json::to_string(&shown)?)
}

fn fate_json(fate: &Fate, why: &Why) -> Result<Value> {
    let mut value = serde_json::to_value(fate)?;
    if let Value::Object(map) = &mut value {
        map.insert("why".to_owned(), why_json(why));
    }
    Ok(value)
}

/// What `why --json` says of one subscription.
pub(super) fn why_json(why: &Why) -> Value {
    let Why { subscription, cause, message, advice, detail } = why;
    json!({ "subscription": subscription, "cause": cause.name(), "message": message, "advice": advice, "detail": detail })
}

fn print(output: &Output, record: &EventRecord, status: &Status) -> Result<()> {
    let event = &record.event;
    let payload = match &event.payload {
        Payload::None => "none".to_owned(),
        Payload::Json(text) => text.to_string(),
        Payload::Bytes(bytes) => format!("{} bytes of {}", bytes.len(), dash(event.content_type.as_ref())),
    };
    for (name, value) in [
        ("id", event.id.to_string()),
        ("position", event.position.to_string()),
        ("topic", event.topic.to_string()),
        ("type", event.r#type.to_string()),
        ("key", dash(event.key.as_ref())),
        ("created", event.created_at.to_string()),
        ("deliver at", dash(event.deliver_at)),
        ("headers", event.headers.as_json().to_owned()),
        ("payload", payload),
    ] {
        output.styled(Style::Bold, &format!("{name:<12}"), &value)?;
    }
    for fate in &record.subscriptions {
        let why = why(record, fate, status);
        output.line("")?;
        output.styled(Style::Bold, &fate.subscription, &format!(": {}", why.message))?;
        if let Some(detail) = &why.detail {
            output.line(format!("  {detail}"))?;
        }
        if let Some(delivery) = &fate.delivery {
            print_delivery(output, delivery)?;
        }
    }
    Ok(())
}

/// The state of a delivery, who works on it, when it is tried next, and its last errors.
pub(super) fn print_delivery(output: &Output, delivery: &DeliveryRecord) -> Result<()> {
    let DeliveryRecord { state, attempts, due_at, since, .. } = delivery;
    let due = if *state == State::Dead { String::new() } else { format!("due {due_at}, ") };
    let attempts = counted(*attempts, "attempt");
    output.line(format!("  {}, {attempts}, {due}waits since {since}", state.name()))?;
    if let Some(claim) = &delivery.claim {
        output.line(format!("  {}", owner(claim)))?;
    }
    for error in &delivery.errors {
        output.line(format!("  {} attempt {}: {}: {}", error.at, error.attempt, error.kind, error.message))?;
    }
    Ok(())
}

fn owner(claim: &ClaimRecord) -> String {
    let ClaimRecord { instance, since, beat_at } = claim;
    let life = match beat_at {
        Some(at) => format!("its last sign of life was at {at}"),
        None => "that instance is gone".to_owned(),
    };
    format!("instance {} works on it since {since}; {life}", instance.0)
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
