use std::time::{SystemTime, UNIX_EPOCH};

use pillarbox::sink::{Attempt, CloudEvents};
use pillarbox::{Failure, Payload};
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};

use super::header::{Transport, attribute_value};
use super::signature::{Signer, batch_id};

/// How large the body of a batched request may grow, in bytes. An event that is larger travels alone.
const BATCH_BYTES_MAX: usize = 1024 * 1024;

/// What an event takes beside its payload, roughly; only to reserve room.
const EVENT_BYTES: usize = 400;

const WEBHOOK_ID: HeaderName = HeaderName::from_static("webhook-id");
const WEBHOOK_TIMESTAMP: HeaderName = HeaderName::from_static("webhook-timestamp");
const WEBHOOK_SIGNATURE: HeaderName = HeaderName::from_static("webhook-signature");
const SUBSCRIPTION: HeaderName = HeaderName::from_static("pillarbox-subscription");
const ATTEMPT: HeaderName = HeaderName::from_static("pillarbox-attempt");

const STRUCTURED: HeaderValue = HeaderValue::from_static("application/cloudevents+json; charset=utf-8");
const BATCHED: HeaderValue = HeaderValue::from_static("application/cloudevents-batch+json; charset=utf-8");

/// Writes events into requests.
pub(super) struct Writer {
    pub(super) format: CloudEvents,
    /// The headers of every request.
    pub(super) configured: HeaderMap,
    pub(super) signer: Signer,
}

/// A request without its URL.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) headers: HeaderMap,
    pub(super) body: Vec<u8>,
}

impl Writer {
    /// One event, all of it as JSON.
    pub(super) fn structured(&self, subscription: &str, attempt: &Attempt) -> Message {
        let event = &attempt.event;
        let mut body = Vec::with_capacity(event.payload.len() + EVENT_BYTES);
        self.format.write(event, &mut body);
        let mut headers = self.common(subscription, attempt.number);
        headers.insert(CONTENT_TYPE, STRUCTURED);
        let transport = Transport::of(&self.format, event, &self.configured);
        headers.extend(transport.trace.into_iter().chain(transport.carried.headers));
        self.sign(&mut headers, &event.id.to_string(), &body);
        Message { headers, body }
    }

    /// One event, its payload as the body.
    pub(super) fn binary(&self, subscription: &str, attempt: &Attempt) -> Result<Message, Failure> {
        let event = &attempt.event;
        let transport = Transport::of(&self.format, event, &self.configured);
        let binary = self.format.binary(event, |name| transport.carried.is_exact(name));
        let mut headers = self.common(subscription, attempt.number);
        for (name, value) in &binary.attributes {
            let name = HeaderName::from_bytes(format!("ce-{name}").as_bytes()).map_err(|_| no_header(name))?;
            headers.try_insert(name, attribute_value(value)).map_err(|_| no_header("ce-"))?;
        }
        if let Some(content_type) = &binary.content_type {
            let value = HeaderValue::from_str(content_type).map_err(|_| no_header("content-type"))?;
            headers.insert(CONTENT_TYPE, value);
        }
        headers.extend(transport.trace.into_iter().chain(transport.carried.headers));
        let body = match &event.payload {
            Payload::None => Vec::new(),
            Payload::Json(text) => text.as_bytes().to_vec(),
            Payload::Bytes(bytes) => bytes.to_vec(),
        };
        self.sign(&mut headers, &event.id.to_string(), &body);
        Ok(Message { headers, body })
    }

    /// As many events as fit, from the first on, as a JSON array; with how many they are.
    pub(super) fn batched(&self, subscription: &str, events: &[&Attempt]) -> (Message, usize) {
        let mut body = vec![b'['];
        let mut count = 0;
        for attempt in events {
            let before = body.len();
            if count > 0 {
                body.push(b',');
            }
            self.format.write(&attempt.event, &mut body);
            // One byte for the bracket.
            if count > 0 && body.len() + 1 > BATCH_BYTES_MAX {
                body.truncate(before);
                break;
            }
            count += 1;
        }
        body.push(b']');
        let events = &events[..count];
        let number = events.iter().map(|attempt| attempt.number).max().unwrap_or(1);
        let mut headers = self.common(subscription, number);
        headers.insert(CONTENT_TYPE, BATCHED);
        self.sign(&mut headers, &batch_id(events.iter().map(|attempt| attempt.event.id)), &body);
        (Message { headers, body }, count)
    }

    fn common(&self, subscription: &str, number: u32) -> HeaderMap {
        let mut headers = self.configured.clone();
        headers.insert(SUBSCRIPTION, attribute_value(subscription));
        headers.insert(ATTEMPT, HeaderValue::from(number));
        headers
    }

    /// Names the message and signs it, as of now.
    fn sign(&self, headers: &mut HeaderMap, id: &str, body: &[u8]) {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs().to_string();
        if let Some(signature) = self.signer.sign(id, &now, body) {
            headers.insert(WEBHOOK_SIGNATURE, attribute_like(&signature));
        }
        headers.insert(WEBHOOK_ID, attribute_like(id));
        headers.insert(WEBHOOK_TIMESTAMP, attribute_like(&now));
    }
}

fn attribute_like(text: &str) -> HeaderValue {
    HeaderValue::from_str(text).expect("letters, digits and base64 are a value")
}

fn no_header(name: &str) -> Failure {
    let message = format!(
        "the event cannot travel in binary mode: '{}' does not make a header of HTTP; use mode = \"structured\"",
        name.escape_debug()
    );
    Failure::unsendable("header", message)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use pillarbox_testkit::sink_suite::{batch_of, sink_event};

    use super::*;

    fn writer() -> Writer {
        let (format, configured) = (CloudEvents::new("urn:x"), HeaderMap::new());
        Writer { format, configured, signer: Signer::new(&[]).unwrap() }
    }

    /// An event whose JSON has this many bytes.
    fn sized(position: i64, bytes: usize) -> pillarbox::Event {
        let event =
            |payload: usize| sink_event(position, None, Payload::Json(format!("\"{}\"", "x".repeat(payload)).into()));
        let mut empty = Vec::new();
        writer().format.write(&event(0), &mut empty);
        event(bytes - empty.len())
    }

    fn fill(sizes: &[usize]) -> (usize, usize) {
        let batch = batch_of(sizes.iter().enumerate().map(|(index, size)| sized(index as i64, *size)));
        let (message, count) = writer().batched("s", &batch.events.iter().collect::<Vec<_>>());
        let parsed: Vec<serde_json::Value> = serde_json::from_slice(&message.body).unwrap();
        assert_eq!(parsed.len(), count);
        (count, message.body.len())
    }

    #[test]
    fn a_body_grows_to_the_limit_and_no_further() {
        let half = BATCH_BYTES_MAX / 2;
        assert_eq!(fill(&[half, half - 3]), (2, BATCH_BYTES_MAX));
        assert_eq!(fill(&[half, half - 2]), (1, half + 2));
        assert_eq!(fill(&[BATCH_BYTES_MAX * 2, 300]), (1, BATCH_BYTES_MAX * 2 + 2), "a large event travels alone");
    }

    #[test]
    fn a_content_type_that_is_no_header_is_refused_for_good() {
        let mut batch = batch_of([sink_event(1, None, Payload::Bytes(vec![1].into()))]);
        let event = Arc::make_mut(&mut batch.events[0].event);
        event.content_type = Some("a\nb: c".into());
        let failure = writer().binary("s", &batch.events[0]).unwrap_err();
        assert!(failure.permanent && failure.kind == "header", "{failure:?}");
    }
}
