use std::collections::BTreeMap;

use pillarbox::Payload;
use serde_json::Value;
use serde_json::value::RawValue;
use uuid::Uuid;

/// One event as a receiver got it.
#[derive(Debug, Clone, PartialEq)]
pub struct Received {
    /// The event's id.
    pub id: Uuid,
    /// Its key.
    pub key: Option<String>,
    /// Its payload, byte for byte.
    pub payload: Payload,
    /// Its headers, put together again.
    pub headers: BTreeMap<String, String>,
    /// The attributes of CloudEvents by their names: `topic`, `type`, `source`, `time`, `sequence`, and `datacontenttype` if the event
    /// has one. A protocol may show more.
    pub attributes: BTreeMap<String, String>,
}

/// The names of attributes; every other one is a header of the event that became an extension.
const ATTRIBUTES: [&str; 11] = [
    "specversion",
    "id",
    "source",
    "type",
    "subject",
    "time",
    "datacontenttype",
    "topic",
    "partitionkey",
    "sequence",
    "headers",
];

impl Received {
    /// Reads a CloudEvents JSON object as [`CloudEvents::write`](pillarbox::sink::CloudEvents::write) makes it.
    pub fn from_cloud_event(line: &str) -> serde_json::Result<Received> {
        let mut members: BTreeMap<String, Box<RawValue>> = serde_json::from_str(line)?;
        let payload = match (members.remove("data"), members.remove("data_base64")) {
            (Some(json), _) => Payload::Json(json.get().into()),
            (None, Some(text)) => Payload::Bytes(from_base64(&serde_json::from_str::<String>(text.get())?).into()),
            (None, None) => Payload::None,
        };
        let text = |(name, value): (String, Box<RawValue>)| Ok((name, serde_json::from_str::<String>(value.get())?));
        let attributes = members.into_iter().map(text).collect::<serde_json::Result<Vec<_>>>()?;
        Received::of(attributes, [], payload)
    }

    /// Puts an event together that came in binary mode, as [`CloudEvents::binary`](pillarbox::sink::CloudEvents::binary) takes it apart.
    ///
    /// `attributes` are named without their prefix (`ce_`, `ce-`), with the media type as `datacontenttype` wherever the protocol has
    /// it. `headers` are what travels beside them; leave out what the sink and the transport add themselves. A payload is JSON if its
    /// media type says so (`application/json`, `…+json`); without a media type there is none.
    pub fn from_binary(
        attributes: impl IntoIterator<Item = (String, String)>,
        headers: impl IntoIterator<Item = (String, String)>,
        payload: Option<Vec<u8>>,
    ) -> serde_json::Result<Received> {
        let attributes: BTreeMap<String, String> = attributes.into_iter().collect();
        let is_json = |media: &String| media == "application/json" || media.ends_with("+json");
        let payload = match (attributes.get("datacontenttype"), payload) {
            (None, None) => Payload::None,
            (None, Some(bytes)) if bytes.is_empty() => Payload::None,
            (Some(media), Some(bytes)) if is_json(media) => match String::from_utf8(bytes) {
                Ok(text) => Payload::Json(text.into()),
                Err(no_text) => Payload::Bytes(no_text.into_bytes().into()),
            },
            (_, bytes) => Payload::Bytes(bytes.unwrap_or_default().into()),
        };
        Received::of(attributes, headers, payload)
    }

    fn of(
        attributes: impl IntoIterator<Item = (String, String)>,
        headers: impl IntoIterator<Item = (String, String)>,
        payload: Payload,
    ) -> serde_json::Result<Received> {
        let known = |(name, _): &(String, String)| ATTRIBUTES.contains(&name.as_str());
        let (mut attributes, mut all): (BTreeMap<_, _>, BTreeMap<_, _>) = attributes.into_iter().partition(known);
        if let Some(others) = attributes.remove("headers") {
            all.extend(serde_json::from_str::<BTreeMap<String, String>>(&others)?);
        }
        all.extend(headers);
        let id = serde_json::from_value(attributes.get("id").map_or(Value::Null, |id| Value::String(id.clone())))?;
        Ok(Received { id, key: attributes.get("subject").cloned(), payload, headers: all, attributes })
    }
}

fn from_base64(text: &str) -> Vec<u8> {
    let digit = |byte: u8| match byte {
        b'A'..=b'Z' => byte - b'A',
        b'a'..=b'z' => byte - b'a' + 26,
        b'0'..=b'9' => byte - b'0' + 52,
        b'+' => 62,
        _ => 63,
    };
    let digits: Vec<u8> = text.bytes().filter(|byte| *byte != b'=').map(digit).collect();
    let bits =
        |chunk: &[u8]| chunk.iter().fold(0u32, |bits, digit| bits << 6 | u32::from(*digit)) << (6 * (4 - chunk.len()));
    let bytes = |chunk: &[u8]| bits(chunk).to_be_bytes()[1..chunk.len()].to_vec();
    digits.chunks(4).flat_map(bytes).collect()
}

#[cfg(test)]
mod tests {
    use pillarbox::sink::CloudEvents;
    use pillarbox::{Event, Headers};

    use super::*;
    use crate::sink_suite::sink_event;

    fn events() -> Vec<Event> {
        let payloads = [Payload::None, Payload::Json("{\"a\": 1}".into()), Payload::Bytes(vec![0, 255, 10].into())];
        let event = |(index, payload): (usize, Payload)| {
            let key = (index > 0).then_some("key");
            let names = ["traceparent", "X-Tenant", "ce_id"];
            let headers = names.iter().map(|name| ((*name).to_owned(), format!("of {name}"))).collect();
            Event { headers: Headers::from_map(&headers), ..sink_event(index as i64, key, payload) }
        };
        payloads.into_iter().enumerate().map(event).collect()
    }

    #[test]
    fn an_event_reads_the_same_in_structured_and_in_binary_mode() {
        let writer = CloudEvents::new("urn:x");
        for event in events() {
            let mut line = Vec::new();
            writer.write(&event, &mut line);
            let structured = Received::from_cloud_event(std::str::from_utf8(&line).unwrap()).unwrap();
            let binary = writer.binary(&event, |name| !name.starts_with("ce_"));
            let mut attributes: Vec<(String, String)> =
                binary.attributes.into_iter().map(|(name, value)| (name.into(), value)).collect();
            attributes.extend(binary.content_type.map(|media| ("datacontenttype".to_owned(), media.into())));
            let payload = match &event.payload {
                Payload::None => None,
                Payload::Json(text) => Some(text.as_bytes().to_vec()),
                Payload::Bytes(bytes) => Some(bytes.to_vec()),
            };
            let binary = Received::from_binary(attributes, binary.headers, payload).unwrap();
            assert_eq!(binary, structured);
            assert_eq!(structured.payload, event.payload);
            assert_eq!(structured.key.as_deref(), event.key.as_deref());
            assert_eq!(structured.headers, event.headers.to_map());
            assert_eq!(structured.attributes["sequence"], event.position.to_string());
        }
    }
}
