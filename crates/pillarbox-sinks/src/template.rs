use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use pillarbox::{Error, ErrorKind, Event, Failure, Result};
use serde::{Deserialize, Deserializer};

/// The longest name that a template makes, in bytes.
pub const TEMPLATE_BYTES_MAX: usize = 4096;

/// The name of a destination with placeholders for what an event says: `{topic}`, `{type}`, `{key}`, `{header.NAME}`.
///
/// `{key|none}` is `none` for an event without a key. Without such a fallback the event is refused for good: it would go somewhere
/// that was not meant. `{{` and `}}` are braces.
#[derive(Clone, PartialEq, Eq)]
pub struct Template {
    text: String,
    parts: Vec<Part>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Place { field: Field, fallback: Option<String> },
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Field {
    Topic,
    Type,
    Key,
    Header(String),
}

impl Template {
    /// The name for this event.
    pub fn render<'a>(&'a self, event: &'a Event) -> std::result::Result<Cow<'a, str>, Failure> {
        self.render_with(event, |value| Cow::Borrowed(value))
    }

    /// The name for this event, with what comes from the event escaped.
    pub fn render_with<'a>(
        &'a self,
        event: &'a Event,
        escape: impl Fn(&str) -> Cow<'_, str>,
    ) -> std::result::Result<Cow<'a, str>, Failure> {
        if let [Part::Text(text)] = self.parts.as_slice() {
            return Ok(Cow::Borrowed(text));
        }
        let mut name = String::with_capacity(self.text.len() + 32);
        for part in &self.parts {
            match part {
                Part::Text(text) => name.push_str(text),
                Part::Place { field, fallback } => match (field.of(event), fallback) {
                    (Some(value), _) => name.push_str(&escape(&value)),
                    (None, Some(fallback)) => name.push_str(fallback),
                    (None, None) => return Err(self.missing(field)),
                },
            }
        }
        if name.is_empty() || name.len() > TEMPLATE_BYTES_MAX {
            let message = format!(
                "'{}' makes a name of {} bytes for this event; it must have 1 to template_bytes_max = {TEMPLATE_BYTES_MAX}",
                self.text,
                name.len()
            );
            return Err(Failure::unsendable("destination", message));
        }
        Ok(Cow::Owned(name))
    }

    /// As it was written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The text before the first placeholder.
    pub fn literal_start(&self) -> &str {
        match self.parts.first() {
            Some(Part::Text(text)) => text,
            _ => "",
        }
    }

    /// What an event would make of it that fills every placeholder with `x`, and one that fills those without a fallback alone.
    pub fn samples(&self) -> [String; 2] {
        let filled = |fall_back: bool| {
            let part = |part: &Part| match part {
                Part::Text(text) => text.clone(),
                Part::Place { fallback: Some(fallback), .. } if fall_back => fallback.clone(),
                Part::Place { .. } => "x".to_owned(),
            };
            self.parts.iter().map(part).collect()
        };
        [filled(false), filled(true)]
    }

    /// Whether all events go to the same name.
    pub fn is_constant(&self) -> bool {
        matches!(self.parts.as_slice(), [Part::Text(_)])
    }

    fn missing(&self, field: &Field) -> Failure {
        let message = format!(
            "the event has no {field}, which '{}' needs; publish it with one, or write a fallback like {{{field}|none}}",
            self.text
        );
        Failure::unsendable("destination", message)
    }
}

impl fmt::Debug for Template {
    /// Without the text, which may hold a token.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Template").field("is_constant", &self.is_constant()).finish_non_exhaustive()
    }
}

impl Field {
    fn of<'a>(&self, event: &'a Event) -> Option<Cow<'a, str>> {
        match self {
            Field::Topic => Some(Cow::Borrowed(&*event.topic)),
            Field::Type => Some(Cow::Borrowed(&*event.r#type)),
            Field::Key => event.key.as_deref().map(Cow::Borrowed),
            Field::Header(name) => event.headers.get(name).map(|value| Cow::Owned(value.to_string())),
        }
    }
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Field::Topic => f.write_str("topic"),
            Field::Type => f.write_str("type"),
            Field::Key => f.write_str("key"),
            Field::Header(name) => write!(f, "header.{name}"),
        }
    }
}

impl FromStr for Template {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        // Not the text itself: that of a webhook may hold a token.
        let invalid = |why: String| Error::new(ErrorKind::Invalid, format!("this is not a template: {why}"));
        let mut parts = Vec::new();
        let mut literal = String::new();
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            literal.push_str(&rest[..at]);
            let from = &rest[at..];
            if from.starts_with("{{") || from.starts_with("}}") {
                literal.push_str(&from[..1]);
                rest = &from[2..];
                continue;
            }
            let end = from.find('}').filter(|end| *end > 0);
            let end = end.ok_or_else(|| invalid("a brace stands alone; write {{ or }} for a brace".to_owned()))?;
            if !literal.is_empty() {
                parts.push(Part::Text(std::mem::take(&mut literal)));
            }
            parts.push(place(&from[1..end]).map_err(invalid)?);
            rest = &from[end + 1..];
        }
        literal.push_str(rest);
        if !literal.is_empty() || parts.is_empty() {
            parts.push(Part::Text(literal));
        }
        if text.is_empty() {
            return Err(invalid("it is empty".to_owned()));
        }
        Ok(Template { text: text.to_owned(), parts })
    }
}

impl<'de> Deserialize<'de> for Template {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
    }
}

fn place(inner: &str) -> std::result::Result<Part, String> {
    let (name, fallback) = match inner.split_once('|') {
        Some((name, fallback)) => (name, Some(fallback.to_owned())),
        None => (inner, None),
    };
    let field = match name {
        "topic" => Field::Topic,
        "type" => Field::Type,
        "key" => Field::Key,
        _ => match name.strip_prefix("header.").filter(|header| !header.is_empty()) {
            Some(header) => Field::Header(header.to_owned()),
            None => {
                return Err(format!(
                    "there is no {{{name}}}; known are {{topic}}, {{type}}, {{key}} and {{header.NAME}}"
                ));
            }
        },
    };
    Ok(Part::Place { field, fallback })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use pillarbox::{Headers, Payload};
    use pillarbox_testkit::sink_suite::sink_event;

    use super::*;

    fn event() -> Event {
        let headers = BTreeMap::from([("tenant".to_owned(), "acme".to_owned())]);
        Event { headers: Headers::from_map(&headers), ..sink_event(1, Some("k/1"), Payload::None) }
    }

    fn check(template: &str, expected: &str) {
        let template: Template = template.parse().unwrap();
        assert_eq!(template.render(&event()).unwrap(), expected);
    }

    #[test]
    fn places_are_filled() {
        check("plain", "plain");
        check("{topic}", "orders");
        check("a.{type}.{header.tenant}/{key}", "a.order.placed.acme/k/1");
        check("{{{topic}}}", "{orders}");
        check("{header.no|none}-{key|none}", "none-k/1");
    }

    #[test]
    fn what_comes_from_the_event_can_be_escaped() {
        let template: Template = "https://h/{key}/x".parse().unwrap();
        let event = event();
        let name = template.render_with(&event, |value| value.replace('/', "%2F").into()).unwrap();
        assert_eq!(name, "https://h/k%2F1/x");
        assert_eq!(template.literal_start(), "https://h/");
    }

    #[test]
    fn an_event_without_what_is_needed_is_refused_for_good() {
        let without = Event { key: None, ..event() };
        let template: Template = "c-{key}".parse().unwrap();
        let failure = template.render(&without).unwrap_err();
        assert!(failure.permanent && failure.message.contains("{key|none}"), "{failure:?}");
        let long = Event { topic: "x".repeat(TEMPLATE_BYTES_MAX).as_str().into(), ..event() };
        let template: Template = "{topic}y".parse().unwrap();
        assert!(template.render(&long).unwrap_err().message.contains("template_bytes_max"));
        let template: Template = "{topic}".parse().unwrap();
        assert_eq!(template.render(&long).unwrap().len(), TEMPLATE_BYTES_MAX);
    }

    #[test]
    fn a_token_in_a_template_is_not_shown() {
        let template: Template = "https://h/canary/{key}".parse().unwrap();
        assert!(!format!("{template:?}").contains("canary"));
        assert!(!"https://h/canary/{".parse::<Template>().unwrap_err().to_string().contains("canary"));
    }

    #[test]
    fn wrong_templates_say_why() {
        for (template, why) in
            [("", "empty"), ("{", "alone"), ("a}b", "alone"), ("{tpoic}", "no {tpoic}"), ("{header.}", "known are")]
        {
            let error = template.parse::<Template>().unwrap_err().to_string();
            assert!(error.contains(why), "{template}: {error}");
        }
    }
}
