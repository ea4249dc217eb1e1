//! What a user writes for a sink, and the parts that such configurations are made of.

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use pillarbox::sink::Sink;
use pillarbox::{Error, ErrorKind, Result};
use serde::Deserialize;
use serde::de::{self, Deserializer, Visitor};

use crate::Secret;

/// The configuration of one kind of sink: a struct with `#[derive(Deserialize)]` and `#[serde(deny_unknown_fields)]`, whose fields are
/// the keys that a user writes. A [`Secret`] among them is never printed.
///
/// Nothing here connects to anything.
pub trait SinkConfig: Any + fmt::Debug + Send + Sync {
    /// The keys without which there is no sink, with an example of each. Their values say where the sink delivers to.
    fn required() -> &'static [(&'static str, &'static str)]
    where
        Self: Sized;

    /// All that is wrong with it, key by key.
    fn faults(&self) -> Vec<ConfigFault> {
        Vec::new()
    }

    /// How long one delivery of so many events may take by its time-outs; None if it has none.
    fn delivery_time(&self, _batch_size: usize) -> Option<DeliveryTime> {
        None
    }

    /// The sink, for events of this `source`, a URI like `urn:pillarbox:<log_id>`.
    fn build(&self, source: String) -> Result<Arc<dyn Sink>>;
}

/// What is wrong with one key of a sink's configuration.
#[derive(Debug)]
pub struct ConfigFault {
    /// The key at fault.
    pub key: &'static str,
    /// The key that it does not go together with. If that one is wrong itself, this one is not to blame.
    pub beside: Option<&'static str>,
    /// What is wrong, and what to do.
    pub error: Error,
}

impl ConfigFault {
    /// A key that is wrong by itself.
    pub fn new(key: &'static str, error: Error) -> Self {
        ConfigFault { key, beside: None, error }
    }

    /// A key that does not go together with another one.
    pub fn beside(self, other: &'static str) -> Self {
        ConfigFault { beside: Some(other), ..self }
    }

    /// The entries of a list that are wrong, told as one fault: the first one's, with the numbers of the others.
    pub fn of_list<T>(
        key: &'static str,
        entries: &[T],
        check: impl Fn(usize, &T) -> Result<()>,
    ) -> Option<ConfigFault> {
        let refused = entries.iter().enumerate().filter_map(|(at, entry)| Some((at + 1, check(at, entry).err()?)));
        let (numbers, mut errors): (Vec<usize>, Vec<Error>) = refused.unzip();
        if numbers.len() < 2 {
            return errors.pop().map(|error| ConfigFault::new(key, error));
        }
        let numbers: Vec<String> = numbers.iter().map(usize::to_string).collect();
        let message = format!("{}; refused are the entries {} of this list", errors[0], numbers.join(", "));
        Some(ConfigFault::new(key, Error::new(ErrorKind::Invalid, message)))
    }
}

/// How long one delivery may take by the time-outs of its sink, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeliveryTime {
    /// The longest time.
    pub max: Duration,
    /// The reason, for people.
    pub why: String,
}

/// Reads a string, or a number as its digits, with `parse`.
pub fn parsed<'de, D: Deserializer<'de>, T>(
    deserializer: D,
    parse: impl FnOnce(&str) -> std::result::Result<T, String>,
) -> std::result::Result<T, D::Error> {
    deserializer.deserialize_any(Parsed(parse))
}

struct Parsed<F>(F);

impl<'de, T, F: FnOnce(&str) -> std::result::Result<T, String>> Visitor<'de> for Parsed<F> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> std::result::Result<T, E> {
        (self.0)(text).map_err(E::custom)
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> std::result::Result<T, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> std::result::Result<T, E> {
        self.visit_str(&number.to_string())
    }
}

/// Reads a whole number from 1 to `MAX`.
pub fn count<'de, const MAX: u64, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<usize, D::Error> {
    let number = i64::deserialize(deserializer)?;
    match usize::try_from(number) {
        Ok(count) if (1..=MAX).contains(&(count as u64)) => Ok(count),
        _ => Err(de::Error::custom(format!("{number} is outside 1 to {MAX}"))),
    }
}

/// Reads a whole number from 1 to `MAX` that may be left out.
pub fn maybe_count<'de, const MAX: u64, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<Option<usize>, D::Error> {
    count::<MAX, D>(deserializer).map(Some)
}

/// Reads a URL, of which only the password and what else is secret in it is hidden where it is printed.
pub fn url<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Secret, D::Error> {
    String::deserialize(deserializer).map(Secret::new)
}

/// `true`, for `#[serde(default = "…")]`.
pub fn yes() -> bool {
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Keys {
        #[serde(default, deserialize_with = "maybe_count::<5, _>")]
        count: Option<usize>,
        #[serde(default, deserialize_with = "crate::duration::positive::deserialize_some")]
        time: Option<Duration>,
        #[serde(default)]
        secret: Option<Secret>,
    }

    fn refused(text: &str, part: &str) {
        let error = serde_json::from_str::<Keys>(text).unwrap_err().to_string();
        assert!(error.contains(part), "{text}: {error}");
    }

    #[test]
    fn the_parts_of_a_configuration_have_limits_in_any_format() {
        let keys: Keys = serde_json::from_str(r#"{"count": 5, "time": "1ms", "secret": "canary"}"#).unwrap();
        assert_eq!((keys.count, keys.time), (Some(5), Some(Duration::from_millis(1))));
        assert_eq!(keys.secret, Some(Secret::new("canary")));
        refused(r#"{"count": 6}"#, "6 is outside 1 to 5");
        refused(r#"{"count": 0}"#, "0 is outside 1 to 5");
        refused(r#"{"time": "0s"}"#, "longer than 0");
        refused(r#"{"time": 5}"#, "'5' has no unit");
        refused(r#"{"tiem": "1s"}"#, "unknown field `tiem`");
    }

    #[test]
    fn a_list_has_one_fault_that_names_all_its_wrong_entries() {
        let check = |at: usize, entry: &u32| match entry {
            0 => Err(Error::new(ErrorKind::Invalid, format!("entry {} is 0", at + 1))),
            _ => Ok(()),
        };
        let of = |entries: &[u32]| ConfigFault::of_list("key", entries, check).map(|fault| fault.error.to_string());
        assert_eq!(of(&[1, 2]), None);
        assert_eq!(of(&[1, 0]).as_deref(), Some("entry 2 is 0"));
        assert_eq!(of(&[0, 1, 0]).as_deref(), Some("entry 1 is 0; refused are the entries 1, 3 of this list"));
    }
}
