use serde::Serialize;

pub use crate::cloud_event::write_journal_line as write_line;
use crate::{Error, ErrorKind, NAME_BYTES_MAX, NewEvent, Result};

/// The topic of a stream to which events are appended without a topic, by the SQL function `append` and the command line.
pub const JOURNAL_TOPIC: &str = "journal";

/// The version that a stream of the journal must have for an append to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expected {
    /// Any: the events are put behind those that are there.
    Any,
    /// None: the stream has no event yet.
    New,
    /// This one: the stream has exactly so many events.
    Version(i64),
}

impl Expected {
    /// The version; None: any.
    pub fn version(self) -> Option<i64> {
        match self {
            Expected::Any => None,
            Expected::New => Some(0),
            Expected::Version(version) => Some(version),
        }
    }
}

impl From<i64> for Expected {
    fn from(version: i64) -> Self {
        Expected::Version(version)
    }
}

/// What an append has written, if its transaction commits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Appended {
    /// The version of the first appended event.
    pub first: i64,
    /// The version of the last appended event: the version of the stream.
    pub version: i64,
}

/// A stream of the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct StreamHead {
    /// Its name: the key of its events.
    pub stream: String,
    /// The topic of all its events.
    pub topic: String,
    /// Its version: how many events it has.
    pub version: i64,
}

/// An append that a store can carry out: the cheap checks, the same for every store.
#[derive(Debug, Clone, Copy)]
pub struct Append<'a> {
    /// The stream.
    pub stream: &'a str,
    /// The version that it must have.
    pub expected: Option<i64>,
    /// The topic of the stream.
    pub topic: &'a str,
    /// What is appended.
    pub events: &'a [NewEvent],
}

impl<'a> Append<'a> {
    /// Refuses what no stream can have.
    pub fn new(stream: &'a str, expected: Expected, events: &'a [NewEvent]) -> Result<Self> {
        check_name(stream)?;
        let Some(first) = events.first() else {
            return Err(invalid(format!("nothing is appended to stream \"{stream}\"; give at least one event")));
        };
        if let Some(version) = expected.version().filter(|version| *version < 0) {
            return Err(invalid(format!("a stream has no version {version}; expect 0 for a new stream")));
        }
        for event in events {
            let not_of_a_stream = match event {
                event if event.key.as_deref().is_some_and(|key| key != stream) => {
                    Some("a key of its own; leave the key out, it is the name of the stream")
                }
                event if event.deliver_at.is_some() => Some(
                    "deliver_at; the events of a stream are delivered in its order, publish a delayed event beside it",
                ),
                event if event.dedup_key.is_some() => {
                    Some("a dedup_key; expect a version instead, which refuses the same append a second time")
                }
                event if event.topic != first.topic => {
                    Some("another topic than those before it; give all events of a stream one topic")
                }
                _ => None,
            };
            if let Some(what) = not_of_a_stream {
                return Err(invalid(format!("an event of stream \"{stream}\" has {what}")));
            }
        }
        Ok(Append { stream, expected: expected.version(), topic: &first.topic, events })
    }

    /// The version of the stream before, if it is as expected. `head` is the stream as it is; None: it has no event.
    pub fn check(&self, head: Option<&StreamHead>) -> Result<i64> {
        let version = head.map_or(0, |head| head.version);
        if self.expected.is_some_and(|expected| expected != version) {
            return Err(self.conflict(version));
        }
        match head.filter(|head| head.topic != self.topic) {
            None => Ok(version),
            Some(head) => Err(invalid(format!(
                "stream \"{}\" has the topic '{}', not '{}'; append with the topic of the stream",
                self.stream, head.topic, self.topic
            ))),
        }
    }

    fn conflict(&self, version: i64) -> Error {
        let (stream, expected) = (self.stream, self.expected.unwrap_or(version));
        conflict(&format!("stream \"{stream}\" is at version {version}, not at {expected}"))
    }

    /// What is written behind `before`.
    pub fn appended(&self, before: i64) -> Appended {
        Appended { first: before + 1, version: before + self.events.len() as i64 }
    }
}

/// That a stream is not at the expected version, with what to do.
pub fn conflict(what: &str) -> Error {
    Error::new(
        ErrorKind::Conflict,
        format!("PB409: {what}; roll back, load the stream, decide again, and append with its version"),
    )
}

fn check_name(stream: &str) -> Result<()> {
    let bytes = stream.len();
    if !(1..=NAME_BYTES_MAX).contains(&bytes) {
        return Err(invalid(format!(
            "the name of the stream has {bytes} bytes, which is not 1 to name_bytes_max = {NAME_BYTES_MAX}"
        )));
    }
    if stream.contains('\0') {
        return Err(invalid("the name of the stream contains the character 0; leave it out".to_owned()));
    }
    Ok(())
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Timestamp;

    fn event() -> NewEvent {
        NewEvent::new("games", "dice.rolled")
    }

    #[test]
    fn what_is_not_of_a_stream_is_refused_with_what_to_do() {
        let refusals = [
            (vec![], "nothing is appended"),
            (vec![event(), NewEvent::new("others", "y")], "one topic"),
            (vec![event().key("other")], "leave the key out"),
            (vec![event().deliver_at(Timestamp(0))], "publish a delayed event beside it"),
            (vec![event().dedup_key("d")], "expect a version instead"),
        ];
        for (events, said) in refusals {
            let error = Append::new("s", Expected::Any, &events).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains(said), "{error}");
        }
        for stream in ["", "a\0b", &"x".repeat(NAME_BYTES_MAX + 1)] {
            Append::new(stream, Expected::Any, &[event()]).unwrap_err();
        }
        Append::new("s", Expected::Version(-1), &[event()]).unwrap_err();
        Append::new("s", Expected::New, &[event().key("s")]).unwrap();
    }

    #[test]
    fn a_head_that_is_not_as_expected_is_a_conflict() {
        let events = [event(), event()];
        let head = StreamHead { stream: "s".into(), topic: "games".into(), version: 4 };
        let check = |expected, head| Append::new("s", expected, &events).unwrap().check(head);
        assert_eq!(check(Expected::Any, Some(&head)).unwrap(), 4);
        assert_eq!(check(4.into(), Some(&head)).unwrap(), 4);
        assert_eq!(check(Expected::New, None).unwrap(), 0);
        for (expected, head) in [(Expected::New, Some(&head)), (3.into(), Some(&head)), (1.into(), None)] {
            assert_eq!(check(expected, head).unwrap_err().kind(), ErrorKind::Conflict);
        }
        let other = StreamHead { topic: "others".into(), ..head.clone() };
        assert_eq!(check(4.into(), Some(&other)).unwrap_err().kind(), ErrorKind::Invalid);
        assert_eq!(Append::new("s", Expected::Any, &events).unwrap().appended(4), Appended { first: 5, version: 6 });
    }
}
