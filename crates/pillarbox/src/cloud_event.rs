use std::collections::BTreeMap;
use std::io::Write;

use serde::Deserialize;
use uuid::Uuid;

use crate::{Event, Payload};

/// Writes events as CloudEvents 1.0 in JSON, one object without a line break each.
///
/// - A JSON payload goes in as `data`, byte for byte, except that raw line breaks (in JSON they can only be white space
///   between tokens) become spaces. It is never parsed. Bytes go in as `data_base64` with their `datacontenttype`.
/// - `subject` and `partitionkey` are the key, `sequence` is the position as a string, `topic` is the topic.
/// - A header becomes an extension attribute if its name can be one: 1 to [`EXTENSION_NAME_MAX`] lower-case letters and
///   digits, and none of the attributes above. So do `correlationid`, `traceparent` and `tracestate`. All other headers
///   go, as the JSON text of one object, into the string attribute `headers`: nothing is dropped.
#[derive(Debug, Clone)]
pub struct CloudEvents {
    source: String,
    /// `","source":"…","type":"`, made once.
    source_member: Box<[u8]>,
}

/// The longest name of a CloudEvents extension attribute.
pub const EXTENSION_NAME_MAX: usize = 20;

/// How every line begins that [`CloudEvents::write`] makes; a torn last line is known by it.
pub const CLOUD_EVENT_START: &str = "{\"specversion\":\"1.0\",\"id\":\"";

/// The attributes that a header cannot replace.
const DEFINED: [&str; 13] = [
    "specversion",
    "id",
    "source",
    "type",
    "subject",
    "time",
    "datacontenttype",
    "dataschema",
    "data",
    "topic",
    "partitionkey",
    "sequence",
    "headers",
];

const JSON: &str = "application/json";
const BYTES: &str = "application/octet-stream";

impl CloudEvents {
    /// A writer for events of this `source`, a URI.
    pub fn new(source: impl Into<String>) -> Self {
        let source = source.into();
        let mut member = b"\",\"source\":\"".to_vec();
        escape(&source, &mut member);
        member.extend_from_slice(b"\",\"type\":\"");
        CloudEvents { source, source_member: member.into() }
    }

    /// A writer with the default source of a log: `urn:pillarbox:<log_id>`.
    pub fn of_log(log_id: Uuid) -> Self {
        CloudEvents::new(format!("urn:pillarbox:{log_id}"))
    }

    /// The source.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Appends one event, without a line break.
    pub fn write(&self, event: &Event, out: &mut Vec<u8>) {
        out.extend_from_slice(CLOUD_EVENT_START.as_bytes());
        let mut id = Uuid::encode_buffer();
        out.extend_from_slice(event.id.as_hyphenated().encode_lower(&mut id).as_bytes());
        out.extend_from_slice(&self.source_member);
        escape(&event.r#type, out);
        out.push(b'"');
        if let Some(key) = event.key.as_deref().filter(|key| !key.is_empty()) {
            member("subject", key, out);
            member("partitionkey", key, out);
        }
        member("topic", &event.topic, out);
        display(out, format_args!(",\"time\":\"{}\",\"sequence\":\"{}\"", event.created_at, event.position));
        write_headers(event, out);
        write_payload(event, out);
        out.push(b'}');
    }

    /// The attributes of an event for a protocol that carries them beside the payload (binary mode).
    ///
    /// `carries` says whether the transport can carry a header of this name beside the attributes. Headers that are neither
    /// extensions nor carried go, as the JSON text of one object, into the attribute `headers`.
    pub fn binary(&self, event: &Event, carries: impl Fn(&str) -> bool) -> BinaryEvent {
        let mut binary = BinaryEvent::default();
        let mut attribute = |name: &str, value: String| binary.attributes.push((name.into(), value));
        attribute("specversion", "1.0".to_owned());
        attribute("id", event.id.to_string());
        attribute("source", self.source.clone());
        attribute("type", event.r#type.to_string());
        if let Some(key) = event.key.as_deref().filter(|key| !key.is_empty()) {
            attribute("subject", key.to_owned());
            attribute("partitionkey", key.to_owned());
        }
        attribute("topic", event.topic.to_string());
        attribute("time", event.created_at.to_string());
        attribute("sequence", event.position.to_string());
        binary.content_type = content_type(event).map(Into::into);
        let mut others = BTreeMap::new();
        for (name, value) in event.headers.to_map() {
            if is_extension(&name) {
                binary.attributes.push((name.into(), value));
            } else if carries(&name) {
                binary.headers.push((name, value));
            } else {
                others.insert(name, value);
            }
        }
        if !others.is_empty() {
            binary.attributes.push(("headers".into(), json_object(&others)));
        }
        binary
    }

    /// Appends one event and a line break.
    pub fn write_line(&self, event: &Event, out: &mut Vec<u8>) {
        self.write(event, out);
        out.push(b'\n');
    }
}

/// Appends an event of a journal as one line of JSON: its stream and version, then the rest. JSON payloads are written byte for byte
/// (line breaks between tokens become spaces), bytes as `data_base64`.
pub fn write_journal_line(event: &Event, out: &mut Vec<u8>) {
    out.extend_from_slice(b"{\"stream\":\"");
    escape(event.key.as_deref().unwrap_or_default(), out);
    display(out, format_args!("\",\"version\":{}", event.stream_version.unwrap_or_default()));
    let (id, time) = (event.id.to_string(), event.created_at.to_string());
    for (name, value) in [("type", &*event.r#type), ("topic", &*event.topic), ("id", &*id), ("time", &*time)] {
        member(name, value, out);
    }
    if !event.headers.is_empty() {
        out.extend_from_slice(b",\"headers\":");
        one_line(event.headers.as_json().as_bytes(), out);
    }
    write_payload(event, out);
    out.extend_from_slice(b"}\n");
}

/// The id of a received line: a bare id, or the `id` of a CloudEvents object. None if the line is neither, which a torn
/// line is not.
pub fn received_id(line: &str) -> Option<Uuid> {
    #[derive(Deserialize)]
    struct Received {
        id: Uuid,
    }
    let line = line.trim();
    if line.starts_with('{') {
        return serde_json::from_str::<Received>(line).ok().map(|received| received.id);
    }
    Uuid::try_parse(line).ok()
}

/// An event taken apart for a protocol that carries attributes beside the payload.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct BinaryEvent {
    /// The attributes without `datacontenttype`, in a fixed order, then the extensions by name.
    pub attributes: Vec<(Box<str>, String)>,
    /// The media type of the payload; None without a payload.
    pub content_type: Option<Box<str>>,
    /// The other headers that the transport carries, by name.
    pub headers: Vec<(String, String)>,
}

fn content_type(event: &Event) -> Option<&str> {
    let default = match &event.payload {
        Payload::None => return None,
        Payload::Json(text) if text.is_empty() => return None,
        Payload::Json(_) => JSON,
        Payload::Bytes(_) => BYTES,
    };
    Some(event.content_type.as_deref().unwrap_or(default))
}

fn json_object(headers: &BTreeMap<String, String>) -> String {
    serde_json::to_string(headers).expect("a map of strings is JSON")
}

fn write_headers(event: &Event, out: &mut Vec<u8>) {
    if event.headers.is_empty() {
        return;
    }
    let (fitting, others): (BTreeMap<_, _>, BTreeMap<_, _>) =
        event.headers.to_map().into_iter().partition(|(name, _)| is_extension(name));
    fitting.iter().for_each(|(name, value)| member(name, value, out));
    if !others.is_empty() {
        member("headers", &json_object(&others), out);
    }
}

fn is_extension(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    (1..=EXTENSION_NAME_MAX).contains(&name.len()) && name.bytes().all(fits) && !DEFINED.contains(&name)
}

fn write_payload(event: &Event, out: &mut Vec<u8>) {
    if let Some(content_type) = content_type(event) {
        member("datacontenttype", content_type, out);
    }
    match &event.payload {
        Payload::None => {}
        Payload::Json(text) if text.is_empty() => {}
        Payload::Json(text) => {
            out.extend_from_slice(b",\"data\":");
            one_line(text.as_bytes(), out);
        }
        Payload::Bytes(bytes) => {
            out.extend_from_slice(b",\"data_base64\":\"");
            base64(bytes, out);
            out.push(b'"');
        }
    }
}

fn member(name: &str, value: &str, out: &mut Vec<u8>) {
    out.extend_from_slice(b",\"");
    out.extend_from_slice(name.as_bytes());
    out.extend_from_slice(b"\":\"");
    escape(value, out);
    out.push(b'"');
}

fn display(out: &mut Vec<u8>, text: std::fmt::Arguments<'_>) {
    out.write_fmt(text).expect("a vector takes every write");
}

/// JSON text with its raw line breaks as spaces.
fn one_line(text: &[u8], out: &mut Vec<u8>) {
    let start = out.len();
    out.extend_from_slice(text);
    for byte in &mut out[start..] {
        if matches!(*byte, b'\n' | b'\r') {
            *byte = b' ';
        }
    }
}

/// The content of a JSON string, without its quotes.
fn escape(text: &str, out: &mut Vec<u8>) {
    let bytes = text.as_bytes();
    let is_special = |byte: u8| matches!(byte, b'"' | b'\\' | 0..=0x1f);
    // Without a way out of the loop it takes many bytes at a time, and there is hardly ever a special one.
    if !bytes.iter().fold(false, |found, byte| found | is_special(*byte)) {
        out.extend_from_slice(bytes);
        return;
    }
    let mut from = 0;
    for (at, byte) in bytes.iter().enumerate() {
        if !is_special(*byte) {
            continue;
        }
        out.extend_from_slice(&bytes[from..at]);
        from = at + 1;
        match byte {
            b'"' => out.extend_from_slice(b"\\\""),
            b'\\' => out.extend_from_slice(b"\\\\"),
            b'\n' => out.extend_from_slice(b"\\n"),
            b'\r' => out.extend_from_slice(b"\\r"),
            b'\t' => out.extend_from_slice(b"\\t"),
            control => display(out, format_args!("\\u{control:04x}")),
        }
    }
    out.extend_from_slice(&bytes[from..]);
}

/// Base64 of RFC 4648, section 4, with padding.
fn base64(bytes: &[u8], out: &mut Vec<u8>) {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    out.reserve(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |index: usize| u32::from(chunk.get(index).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        let digit = |index: usize| ALPHABET[(bits >> (18 - 6 * index) & 63) as usize];
        let filled = |index: usize| if index <= chunk.len() { digit(index) } else { b'=' };
        out.extend_from_slice(&[digit(0), digit(1), filled(2), filled(3)]);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::{Headers, Timestamp};

    fn event() -> Event {
        Event {
            position: 42,
            id: Uuid::from_u128(7),
            topic: "orders".into(),
            key: Some("order-1".into()),
            r#type: "order.placed".into(),
            payload: Payload::Json("{\"n\": 1}".into()),
            content_type: None,
            headers: Headers::default(),
            stream_version: None,
            deliver_at: None,
            created_at: Timestamp(1_000),
            malformed: None,
        }
    }

    fn line(event: &Event) -> String {
        let mut out = Vec::new();
        CloudEvents::new("urn:pillarbox:\"x\"").write(event, &mut out);
        String::from_utf8(out).unwrap()
    }

    fn parsed(event: &Event) -> Value {
        let line = line(event);
        assert!(!line.contains(['\n', '\r']), "more than one line: {line}");
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line}"))
    }

    #[test]
    fn writes_the_attributes_of_the_contract() {
        let value = parsed(&event());
        for (name, expected) in [
            ("specversion", "1.0"),
            ("id", "00000000-0000-0000-0000-000000000007"),
            ("source", "urn:pillarbox:\"x\""),
            ("type", "order.placed"),
            ("subject", "order-1"),
            ("partitionkey", "order-1"),
            ("topic", "orders"),
            ("sequence", "42"),
            ("time", "1970-01-01T00:00:01.000Z"),
            ("datacontenttype", "application/json"),
        ] {
            assert_eq!(value[name], expected, "{name}");
        }
        assert_eq!(value["data"]["n"], 1);
    }

    #[test]
    fn without_key_and_payload_there_are_no_empty_attributes() {
        let value = parsed(&Event { key: None, payload: Payload::None, ..event() });
        let absent = ["subject", "partitionkey", "data", "data_base64", "datacontenttype", "headers"];
        assert!(absent.iter().all(|name| value.get(name).is_none()), "{value}");
    }

    #[test]
    fn json_arrives_byte_for_byte_but_for_line_breaks() {
        for text in
            ["1e400", "12345678901234567890123", "\"\\u0000 \\n \\ud83d\\ude00 🦀\"", "{\"a\":1,\"a\":2}", "null"]
        {
            let line = line(&Event { payload: Payload::Json(text.into()), ..event() });
            assert!(line.ends_with(&format!(",\"data\":{text}}}")), "{line}");
        }
        let spread = line(&Event { payload: Payload::Json("{\r\n  \"a\": 1\n}".into()), ..event() });
        assert!(spread.ends_with(",\"data\":{    \"a\": 1 }}"), "{spread}");
    }

    #[test]
    fn strings_are_escaped() {
        let nasty: String = (0u8..0x20).map(char::from).chain("\"\\/\u{7f}\u{2028}🦀é".chars()).collect();
        let event = Event { key: Some(nasty.as_str().into()), topic: nasty.as_str().into(), ..event() };
        assert_eq!(parsed(&event)["subject"], nasty.as_str());
        assert_eq!(parsed(&event)["topic"], nasty.as_str());
    }

    #[test]
    fn bytes_are_base64_with_their_media_type() {
        let bytes = Event { payload: Payload::Bytes(b"\x00\xff\n".to_vec().into()), ..event() };
        assert_eq!(parsed(&bytes)["data_base64"], "AP8K");
        assert_eq!(parsed(&bytes)["datacontenttype"], "application/octet-stream");
        let typed = Event { content_type: Some("image/png".into()), ..bytes };
        assert_eq!(parsed(&typed)["datacontenttype"], "image/png");
    }

    #[test]
    fn base64_has_the_vectors_of_rfc_4648() {
        for (plain, coded) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            let mut out = Vec::new();
            base64(plain.as_bytes(), &mut out);
            assert_eq!(String::from_utf8(out).unwrap(), coded, "{plain}");
        }
    }

    #[test]
    fn no_header_is_dropped_and_none_replaces_an_attribute() {
        let long = "a".repeat(EXTENSION_NAME_MAX);
        let too_long = "a".repeat(EXTENSION_NAME_MAX + 1);
        let headers: BTreeMap<String, String> =
            ["correlationid", "traceparent", "id", "data", "topic", "headers", "X-Tenant", "", &long, &too_long]
                .iter()
                .map(|name| ((*name).to_owned(), format!("value of \"{name}\"\n")))
                .collect();
        let value = parsed(&Event { headers: Headers::from_map(&headers), ..event() });
        let rest: BTreeMap<String, String> = serde_json::from_str(value["headers"].as_str().unwrap()).unwrap();
        for name in ["correlationid", "traceparent", &long] {
            assert_eq!(value[name], headers[name].as_str(), "{name}");
            assert!(!rest.contains_key(name), "{name} is there twice");
        }
        for name in ["id", "data", "topic", "headers", "X-Tenant", "", &too_long] {
            assert_eq!(rest.get(name), headers.get(name), "{name}");
        }
        assert_eq!(value["id"], "00000000-0000-0000-0000-000000000007");
        assert_eq!(value["topic"], "orders");
    }

    #[test]
    fn binary_mode_has_the_same_attributes_and_no_header_is_dropped() {
        let headers: BTreeMap<String, String> = ["correlationid", "X-Tenant", "ce_id"]
            .iter()
            .map(|name| ((*name).to_owned(), format!("of {name}")))
            .collect();
        let event = Event { headers: Headers::from_map(&headers), ..event() };
        let binary = CloudEvents::new("urn:x").binary(&event, |name| !name.starts_with("ce_"));
        let structured = parsed(&event);
        for (name, value) in binary.attributes.iter().filter(|(name, _)| !matches!(&**name, "source" | "headers")) {
            assert_eq!(structured[&**name], value.as_str(), "{name}");
        }
        assert_eq!(binary.content_type.as_deref(), Some("application/json"));
        assert_eq!(binary.headers, [("X-Tenant".to_owned(), "of X-Tenant".to_owned())]);
        assert_eq!(binary.attributes.last(), Some(&("headers".into(), "{\"ce_id\":\"of ce_id\"}".to_owned())));
        let tombstone = CloudEvents::new("urn:x").binary(&Event { payload: Payload::None, ..event }, |_| true);
        assert_eq!(tombstone.content_type, None);
    }

    #[test]
    fn a_received_line_tells_its_id_unless_it_is_torn() {
        let line = line(&event());
        let id = Some(Uuid::from_u128(7));
        assert_eq!(received_id(&format!(" {line}\r\n")), id);
        assert_eq!(received_id("00000000-0000-0000-0000-000000000007"), id);
        assert_eq!(received_id(&line[..line.len() - 1]), None);
        for other in ["", "x", "{}", "{\"id\":\"x\"}", "[1]"] {
            assert_eq!(received_id(other), None, "{other}");
        }
    }
}
