use std::sync::Arc;

use pillarbox::journal::{Append, Appended, Expected, StreamHead};
use pillarbox::{Event, NewEvent, Position, Result};

use crate::memory_log::Inner;
use crate::{MemoryLog, Tx};

impl MemoryLog {
    /// Appends events to a stream in a transaction of its own.
    pub(crate) fn append(&self, stream: &str, expected: Expected, events: &[NewEvent]) -> Result<Appended> {
        let append = Append::new(stream, expected, events)?;
        let appended = self.inner().append(&append)?;
        self.ring();
        Ok(appended)
    }
}

impl MemoryLog {
    /// Appends an event to the stream of its key in an open transaction; its position. None: another open transaction has appended to
    /// the stream, and this one would wait for it.
    ///
    /// # Panics
    /// If the transaction is not open.
    pub fn append_in(&self, tx: Tx, event: NewEvent) -> Option<Position> {
        let mut inner = self.inner();
        let stream = event.key.clone().unwrap_or_default();
        if inner.appends_elsewhere(tx, &stream) {
            return None;
        }
        let own = inner.appended(tx, &stream);
        let version = own.or_else(|| inner.stream(&stream).last()?.stream_version).unwrap_or_default() + 1;
        let event = Event { stream_version: Some(version), ..inner.event(event) };
        let position = event.position;
        inner.write(tx, event);
        Some(position)
    }
}

impl Inner {
    fn append(&mut self, append: &Append<'_>) -> Result<Appended> {
        let before = append.check(self.stream(append.stream).last().map(head).as_ref())?;
        let appended = append.appended(before);
        for (version, event) in (appended.first..).zip(append.events) {
            let event = self.event(event.clone().key(append.stream));
            self.make_visible(Event { stream_version: Some(version), ..event });
        }
        Ok(appended)
    }

    /// The events of a stream, in order.
    pub(crate) fn stream<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Arc<Event>> {
        self.rows.values().filter(move |event| event.stream_version.is_some() && event.key.as_deref() == Some(name))
    }

    /// The streams, by name.
    pub(crate) fn streams(&self) -> Vec<StreamHead> {
        let mut streams = std::collections::BTreeMap::new();
        for event in self.rows.values().filter(|event| event.stream_version.is_some()) {
            let head = head(event);
            streams.insert(head.stream.clone(), head);
        }
        streams.into_values().collect()
    }
}

/// The stream with this as its last event.
fn head(event: &Arc<Event>) -> StreamHead {
    let stream = event.key.as_deref().unwrap_or_default().to_owned();
    StreamHead { stream, topic: event.topic.to_string(), version: event.stream_version.unwrap_or_default() }
}
