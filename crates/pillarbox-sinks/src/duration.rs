//! Durations as people write them. The module is for `#[serde(with = "…")]`; those below it are for keys that allow less or more.

use std::time::Duration;

use serde::{Deserializer, Serializer};

use crate::config::parsed;

const UNITS: [(&str, u64); 6] =
    [("ms", 1), ("s", 1_000), ("m", 60_000), ("h", 3_600_000), ("d", 86_400_000), ("w", 604_800_000)];

/// Reads `5s`, `250ms`, `1m30s`, `7d`.
pub fn parse(text: &str) -> Result<Duration, String> {
    let refuse = || Err(format!("'{text}' is not a duration; write it like 250ms, 5s, 1m, 24h or 7d"));
    let mut rest = text.trim();
    let mut total: u64 = 0;
    if rest.is_empty() {
        return refuse();
    }
    // Which unit was meant nobody can guess: seven days of events are not seven seconds of them.
    if rest.chars().all(|c| c.is_ascii_digit()) {
        return Err(format!("'{rest}' has no unit; write {rest}ms, {rest}s, {rest}m, {rest}h or {rest}d"));
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len());
        let (number, tail) = rest.split_at(digits);
        let letters = tail.find(|c: char| c.is_ascii_digit()).unwrap_or(tail.len());
        let (unit, tail) = tail.split_at(letters);
        let Ok(number) = number.parse::<u64>() else { return refuse() };
        let Some((_, millis)) = UNITS.iter().find(|(name, _)| *name == unit.trim()) else { return refuse() };
        match number.checked_mul(*millis).and_then(|part| total.checked_add(part)) {
            Some(sum) => total = sum,
            None => return refuse(),
        }
        rest = tail;
    }
    Ok(Duration::from_millis(total))
}

/// Writes a duration in its largest whole unit.
pub fn format(duration: Duration) -> String {
    let millis = u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
    let whole = UNITS.iter().rev().skip(1).find(|(_, unit)| millis != 0 && millis % unit == 0);
    match whole {
        Some((name, unit)) => format!("{}{name}", millis / unit),
        None => format!("{millis}ms"),
    }
}

/// Reads a duration.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    parsed(deserializer, parse)
}

/// Writes a duration.
pub fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format(*duration))
}

/// A duration that may be left out.
pub mod maybe {
    use super::*;

    /// Reads a duration that is there.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
        super::deserialize(deserializer).map(Some)
    }
}

/// A duration longer than 0.
pub mod positive {
    use super::*;

    fn parse_positive(text: &str) -> Result<Duration, String> {
        parse(text).and_then(|time| if time.is_zero() { Err("must be longer than 0".to_owned()) } else { Ok(time) })
    }

    /// Reads a duration and refuses 0.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        parsed(deserializer, parse_positive)
    }

    /// Reads a duration that may be left out, and refuses 0.
    pub fn deserialize_some<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
        deserialize(deserializer).map(Some)
    }

    pub use super::serialize;
}

/// A duration or `forever`, which is None.
pub mod or_forever {
    use super::*;

    fn parse_or_forever(text: &str) -> Result<Option<Duration>, String> {
        match text {
            "forever" => Ok(None),
            _ => parse(text).map(Some).map_err(|message| format!("{message}, or \"forever\"")),
        }
    }

    /// Reads a duration or `forever`.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
        parsed(deserializer, parse_or_forever)
    }

    /// Writes a duration or `forever`.
    pub fn serialize<S: Serializer>(duration: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&duration.map_or_else(|| "forever".to_owned(), format))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_it_writes() {
        for text in ["0ms", "250ms", "5s", "1m", "24h", "7d", "90s"] {
            let duration = parse(text).unwrap();
            assert_eq!(parse(&format(duration)).unwrap(), duration, "{text}");
        }
        assert_eq!(parse("1m30s").unwrap(), Duration::from_secs(90));
        assert_eq!(format(Duration::from_secs(7 * 86_400)), "7d");
        assert_eq!(format(Duration::ZERO), "0ms");
    }

    #[test]
    fn refuses_with_the_right_form() {
        assert_eq!(parse("7").unwrap_err(), "'7' has no unit; write 7ms, 7s, 7m, 7h or 7d");
        for text in ["", "s", "-5s", "5 parsecs", "1m30", "99999999999999999999d"] {
            assert!(parse(text).unwrap_err().contains("like 250ms"), "{text}");
        }
    }
}
