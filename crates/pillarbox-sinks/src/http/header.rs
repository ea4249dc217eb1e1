use std::collections::{BTreeMap, HashSet};

use pillarbox::sink::{BinaryEvent, CloudEvents};
use pillarbox::{Error, ErrorKind, Event, Result};
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use serde::{Deserialize, Deserializer};

use super::target::push_percent;
use crate::Secret;

/// The longest value of an event's header that travels as a header of HTTP, in bytes.
const CARRIED_VALUE_BYTES_MAX: usize = 1024;
/// What an event's headers may take as headers of HTTP, all together, in bytes; receivers refuse requests with many.
const CARRIED_BYTES_MAX: usize = 4096;

/// Headers that belong to HTTP, or that a proxy or a receiver trusts: an event does not set them, nor those of [`OWN`].
const RESERVED: [&str; 20] = [
    "accept",
    "accept-charset",
    "accept-encoding",
    "accept-language",
    "authorization",
    "baggage",
    "cache-control",
    "cookie",
    "date",
    "forwarded",
    "from",
    "max-forwards",
    "origin",
    "pragma",
    "range",
    "referer",
    "set-cookie",
    "user-agent",
    "via",
    "x-real-ip",
];
const RESERVED_PREFIXES: [&str; 7] =
    ["access-control-", "if-", "sec-", "x-forwarded-", "x-http-method", "x-original-", "x-rewrite-"];

/// Headers that this sink sets itself; the configuration cannot.
const OWN: [&str; 10] = [
    "connection",
    "expect",
    "host",
    "keep-alive",
    "te",
    "traceparent",
    "tracestate",
    "trailer",
    "transfer-encoding",
    "upgrade",
];
const OWN_PREFIXES: [&str; 5] = ["ce-", "content-", "pillarbox-", "proxy-", "webhook-"];

/// Reads headers as a user writes them: a table.
pub(super) fn deserialize<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<Vec<(String, Secret)>, D::Error> {
    Ok(BTreeMap::deserialize(deserializer)?.into_iter().collect())
}

/// The headers of every request, as they were configured.
pub(super) fn configured(headers: &[(String, Secret)]) -> Result<HeaderMap> {
    let mut map = HeaderMap::with_capacity(headers.len());
    headers.iter().try_for_each(|header| configure(&mut map, header))?;
    Ok(map)
}

/// What is wrong with each of the headers that cannot be used.
pub(super) fn faults(headers: &[(String, Secret)]) -> Vec<Error> {
    let mut map = HeaderMap::new();
    headers.iter().filter_map(|header| configure(&mut map, header).err()).collect()
}

fn configure(map: &mut HeaderMap, (name, value): &(String, Secret)) -> Result<()> {
    let invalid = |message: String| Error::new(ErrorKind::Invalid, message);
    let parsed = HeaderName::from_bytes(name.as_bytes())
        .map_err(|_| invalid(format!("'{}' is not a name for a header of an http sink", name.escape_debug())))?;
    if is_own(parsed.as_str()) {
        return Err(invalid(format!("an http sink sets the header '{parsed}' itself; take it out of headers")));
    }
    let mut value = HeaderValue::from_str(value.expose())
        .map_err(|_| invalid(format!("the value of the header '{parsed}' has a line break or a control character")))?;
    value.set_sensitive(true);
    let before =
        map.try_insert(parsed.clone(), value).map_err(|_| invalid("an http sink has too many headers".into()))?;
    match before {
        Some(_) => Err(invalid(format!("an http sink has the header '{parsed}' twice"))),
        None => Ok(()),
    }
}

/// The headers of an event that travel as headers of HTTP.
#[derive(Default)]
pub(super) struct Carried {
    pub(super) headers: Vec<(HeaderName, HeaderValue)>,
    /// Those of them that lose nothing by it: HTTP does not know upper case.
    exact: HashSet<String>,
}

impl Carried {
    /// Chooses among the headers that are no attributes of CloudEvents.
    pub(super) fn of(headers: &[(String, String)], configured: &HeaderMap) -> Self {
        let mut carried = Carried::default();
        let mut bytes = 0;
        // By lower-case name, those that are lower-case already first.
        let by_name: BTreeMap<(String, bool), &(String, String)> = headers
            .iter()
            .map(|header| (header.0.to_ascii_lowercase(), header))
            .map(|(lower, header)| ((lower.clone(), lower != header.0), header))
            .collect();
        for ((lower, changed), (_, value)) in by_name {
            let Some((name, value)) = as_header(&lower, value) else { continue };
            let size = lower.len() + value.len();
            let taken = carried.headers.last().is_some_and(|(last, _)| *last == name);
            let reserved = configured.contains_key(&name) || is_reserved(&lower);
            if taken || reserved || bytes + size > CARRIED_BYTES_MAX {
                continue;
            }
            bytes += size;
            carried.headers.push((name, value));
            if !changed {
                carried.exact.insert(lower);
            }
        }
        carried
    }

    /// Whether a receiver gets this header back as it was from the headers of HTTP alone.
    pub(super) fn is_exact(&self, name: &str) -> bool {
        self.exact.contains(name)
    }
}

/// An event's trace, and its headers that are no attributes.
pub(super) struct Transport {
    pub(super) trace: Vec<(HeaderName, HeaderValue)>,
    pub(super) carried: Carried,
}

impl Transport {
    pub(super) fn of(format: &CloudEvents, event: &Event, configured: &HeaderMap) -> Self {
        if event.headers.is_empty() {
            return Transport { trace: Vec::new(), carried: Carried::default() };
        }
        let BinaryEvent { attributes, headers, .. } = format.binary(event, |_| true);
        let is_trace = |name: &str| matches!(name, "traceparent" | "tracestate");
        let trace = attributes.iter().filter(|(name, _)| is_trace(name));
        Transport {
            trace: trace.filter_map(|(name, value)| as_header(name, value)).collect(),
            carried: Carried::of(&headers, configured),
        }
    }
}

/// The value of an attribute as the HTTP binding of CloudEvents writes it.
pub(super) fn attribute_value(value: &str) -> HeaderValue {
    let plain = |byte: u8| matches!(byte, 0x21..=0x7e) && !matches!(byte, b'"' | b'%');
    let mut text = String::with_capacity(value.len());
    for byte in value.bytes() {
        if plain(byte) {
            text.push(char::from(byte));
        } else {
            push_percent(byte, &mut text);
        }
    }
    HeaderValue::from_str(&text).expect("visible ASCII is a value")
}

/// None if it cannot travel without being changed.
fn as_header(name: &str, value: &str) -> Option<(HeaderName, HeaderValue)> {
    let visible = value.bytes().all(|byte| matches!(byte, 0x20..=0x7e));
    if value.len() > CARRIED_VALUE_BYTES_MAX || !visible || value.trim() != value {
        return None;
    }
    Some((HeaderName::from_bytes(name.as_bytes()).ok()?, HeaderValue::from_str(value).ok()?))
}

fn is_own(name: &str) -> bool {
    OWN.contains(&name) || OWN_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

fn is_reserved(name: &str) -> bool {
    is_own(name) || RESERVED.contains(&name) || RESERVED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn carried(headers: &[(&str, &str)]) -> Carried {
        let headers: Vec<(String, String)> =
            headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let configured = configured(&[("X-Configured".to_owned(), Secret::new("v"))]).unwrap();
        Carried::of(&headers, &configured)
    }

    fn names(carried: &Carried) -> Vec<&str> {
        carried.headers.iter().map(|(name, _)| name.as_str()).collect()
    }

    #[test]
    fn an_event_sets_no_header_that_somebody_trusts() {
        let safe = carried(&[("x-tenant", "acme"), ("X-Region", "eu"), ("data", "x")]);
        assert_eq!(names(&safe), ["data", "x-region", "x-tenant"]);
        assert!(safe.is_exact("x-tenant") && !safe.is_exact("x-region") && !safe.is_exact("X-Region"));
        for name in [
            "Host",
            "content-length",
            "Content-Type",
            "transfer-encoding",
            "Connection",
            "authorization",
            "Cookie",
            "webhook-id",
            "ce-id",
            "pillarbox-attempt",
            "proxy-authorization",
            "te",
            "upgrade",
            "expect",
            "forwarded",
            "X-Forwarded-For",
            "x-http-method-override",
            "x-configured",
            "with space",
            "",
            "🦀",
        ] {
            assert_eq!(names(&carried(&[(name, "v")])), [""; 0], "{name}");
        }
    }

    #[test]
    fn a_value_that_would_change_on_its_way_is_not_carried() {
        for value in ["a\r\nb: c", "é", " a", "a ", "\t", "\u{7f}"] {
            assert_eq!(names(&carried(&[("x-a", value)])), [""; 0], "{value:?}");
        }
        assert_eq!(names(&carried(&[("x-a", ""), ("x-b", "a b~")])), ["x-a", "x-b"]);
    }

    #[test]
    fn what_is_carried_has_limits() {
        assert_eq!(names(&carried(&[("x-a", &"v".repeat(CARRIED_VALUE_BYTES_MAX))])), ["x-a"]);
        assert_eq!(names(&carried(&[("x-a", &"v".repeat(CARRIED_VALUE_BYTES_MAX + 1))])), [""; 0]);
        let value = "v".repeat(CARRIED_BYTES_MAX / 4 - 3);
        let all = [("x-1", &*value), ("x-2", &*value), ("x-3", &*value), ("x-4", &*value)];
        assert_eq!(names(&carried(&all)), ["x-1", "x-2", "x-3", "x-4"]);
        assert_eq!(names(&carried(&[&all[..], &[("x-5", "")]].concat())), ["x-1", "x-2", "x-3", "x-4"]);
    }

    #[test]
    fn of_two_names_that_differ_in_case_one_is_carried() {
        let both = carried(&[("X-A", "upper"), ("x-a", "lower")]);
        assert_eq!(both.headers.len(), 1);
        assert_eq!(both.headers[0].1, "lower");
        assert!(both.is_exact("x-a") && !both.is_exact("X-A"));
    }

    #[test]
    fn attributes_are_escaped_as_the_binding_says() {
        assert_eq!(attribute_value("Euro € 😀"), "Euro%20%E2%82%AC%20%F0%9F%98%80");
        assert_eq!(attribute_value("\"100%\"\n~!"), "%22100%25%22%0A~!");
    }

    #[test]
    fn configured_headers_are_checked_and_never_shown() {
        let check = |name: &str, value: &str, why: &str| {
            let error = configured(&[("ok".into(), "v".into()), (name.into(), value.into())]).unwrap_err().to_string();
            assert!(error.contains(why) && !error.contains("canary"), "{name}: {error}");
        };
        check("with space", "canary", "is not a name");
        check("Content-Type", "canary", "itself");
        check("Webhook-Signature", "canary", "itself");
        check("host", "canary", "itself");
        check("Authorization", "canary\nx: y", "line break");
        check("OK", "canary", "twice");
        let map = configured(&[("Authorization".into(), "Bearer canary".into())]).unwrap();
        assert!(!format!("{map:?}").contains("canary"));
    }
}
