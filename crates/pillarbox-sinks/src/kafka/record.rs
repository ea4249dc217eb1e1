use pillarbox::Payload;
use pillarbox::sink::{Attempt, CloudEvents};
use rdkafka::message::{Header, OwnedHeaders};

/// What the names of attributes begin with, by the Kafka binding of CloudEvents.
const ATTRIBUTE: &str = "ce_";
const CONTENT_TYPE: &str = "content-type";
/// What the names of this sink's own headers begin with.
const OWN: &str = "pillarbox-";
const SUBSCRIPTION: &str = "pillarbox-subscription";
const ATTEMPT: &str = "pillarbox-attempt";
/// Attributes that tracing libraries look for under their plain names.
const TRACING: [&str; 2] = ["traceparent", "tracestate"];

/// The headers of an event's record.
pub(super) fn headers(format: &CloudEvents, subscription: &str, attempt: &Attempt) -> OwnedHeaders {
    let binary = format.binary(&attempt.event, carries);
    let mut headers = OwnedHeaders::new_with_capacity(binary.attributes.len() + binary.headers.len() + 5);
    let mut name = String::from(ATTRIBUTE);
    for (attribute, value) in &binary.attributes {
        name.truncate(ATTRIBUTE.len());
        name.push_str(attribute);
        headers = add(headers, &name, value);
        if TRACING.contains(&&**attribute) {
            headers = add(headers, attribute, value);
        }
    }
    if let Some(content_type) = &binary.content_type {
        headers = add(headers, CONTENT_TYPE, content_type);
    }
    for (name, value) in &binary.headers {
        headers = add(headers, name, value);
    }
    headers = add(headers, SUBSCRIPTION, subscription);
    add(headers, ATTEMPT, &attempt.number.to_string())
}

/// The value of an event's record: null if there is no payload, which is a tombstone.
pub(super) fn value(payload: &Payload) -> Option<&[u8]> {
    match payload {
        Payload::None => None,
        // No JSON text is empty: there is nothing, as CloudEvents says it too.
        Payload::Json(text) if text.is_empty() => None,
        Payload::Json(text) => Some(text.as_bytes()),
        Payload::Bytes(bytes) => Some(bytes),
    }
}

/// Whether a header of an event can stand beside the attributes under its own name.
fn carries(name: &str) -> bool {
    let starts_with = |start: &str| name.get(..start.len()).is_some_and(|head| head.eq_ignore_ascii_case(start));
    let reserved = starts_with(ATTRIBUTE) || starts_with(OWN) || name.eq_ignore_ascii_case(CONTENT_TYPE);
    // Clients written in C end a name at a zero byte.
    !reserved && !name.is_empty() && !name.contains('\0')
}

fn add(headers: OwnedHeaders, key: &str, value: &str) -> OwnedHeaders {
    headers.insert(Header { key, value: Some(value) })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use pillarbox::Headers as EventHeaders;
    use pillarbox_testkit::sink_suite::{batch_of, sink_event};
    use rdkafka::message::Headers;

    use super::*;

    fn pairs(names: &[&str]) -> BTreeMap<String, String> {
        let map = names.iter().map(|name| ((*name).to_owned(), format!("of {name}"))).collect();
        let mut event = sink_event(7, Some("k"), Payload::Json("1".into()));
        event.headers = EventHeaders::from_map(&map);
        let batch = batch_of([event]);
        let headers = headers(&CloudEvents::new("urn:x"), "to-kafka", &batch.events[0]);
        let pair = |header: Header<'_, &[u8]>| {
            (header.key.to_owned(), String::from_utf8(header.value.unwrap().to_vec()).unwrap())
        };
        headers.iter().map(pair).collect()
    }

    #[test]
    fn attributes_and_our_own_headers_are_there() {
        let headers = pairs(&[]);
        for (name, value) in [
            ("ce_specversion", "1.0"),
            ("ce_source", "urn:x"),
            ("ce_type", "order.placed"),
            ("ce_subject", "k"),
            ("ce_topic", "orders"),
            ("ce_sequence", "7"),
            ("content-type", "application/json"),
            ("pillarbox-subscription", "to-kafka"),
            ("pillarbox-attempt", "1"),
        ] {
            assert_eq!(headers.get(name).map(String::as_str), Some(value), "{name}");
        }
        assert!(!headers.contains_key("ce_datacontenttype"), "the binding says content-type instead");
    }

    #[test]
    fn a_header_that_would_collide_goes_into_the_attribute_headers() {
        let headers = pairs(&["CE_id", "Content-Type", "Pillarbox-Attempt", "", "a\0b", "X-Tenant", "traceparent"]);
        let others: BTreeMap<String, String> = serde_json_of(&headers["ce_headers"]);
        assert_eq!(
            others.keys().map(String::as_str).collect::<Vec<_>>(),
            ["", "CE_id", "Content-Type", "Pillarbox-Attempt", "a\0b"]
        );
        assert_eq!(headers["X-Tenant"], "of X-Tenant");
        assert_eq!((&*headers["traceparent"], &*headers["ce_traceparent"]), ("of traceparent", "of traceparent"));
        assert_eq!(headers["pillarbox-attempt"], "1");
    }

    /// Reads the JSON text of an object of strings as an event's headers do.
    fn serde_json_of(text: &str) -> BTreeMap<String, String> {
        EventHeaders::from_json(text).to_map()
    }

    #[test]
    fn only_what_is_missing_is_null() {
        assert_eq!(value(&Payload::None), None);
        assert_eq!(value(&Payload::Bytes(Box::default())), Some(&b""[..]));
        assert_eq!(value(&Payload::Json("null".into())), Some(&b"null"[..]));
    }
}
