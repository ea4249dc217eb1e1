use crate::{Mode, Position};

/// Whether this owner of a lane has come through what those before it may have died of, and whether it works in quarantine until then.
#[derive(Debug)]
pub(super) struct Probation {
    /// How often the lane was seized, as it is in the database.
    takeovers: u32,
    /// Seized twice without progress: one event at a time, its attempt written first, until some have gone well.
    quarantined: bool,
    left: u32,
    /// The lowest event that this owner has read and not yet settled.
    first: Option<Position>,
    /// What has been due for longest when the lane was loaded, until it comes back from the sink.
    due: Option<Position>,
    /// The lowest event is settled, or there is none.
    passed: bool,
    /// A delivery came back from the sink.
    returned: bool,
    /// A poll that may have begun before the lane was loaded has been answered.
    polled: bool,
}

/// A lane in quarantine that has delivered this many events goes on at full speed.
const QUARANTINE_EVENTS: u32 = 20;

/// A lane of a queue that has given this many events a row in quarantine, more than can have been in memory, handles some from memory again.
const QUARANTINE_ROWS: u32 = 20_000;

impl Probation {
    /// For a lane that was seized so often, and is in quarantine after so many times.
    pub(super) fn new(takeovers: u32, quarantine_after: u32, mode: Mode) -> Self {
        Probation {
            takeovers,
            quarantined: takeovers >= quarantine_after,
            left: if mode == Mode::Queue { QUARANTINE_ROWS } else { QUARANTINE_EVENTS },
            first: None,
            due: None,
            passed: false,
            returned: false,
            polled: false,
        }
    }

    pub(super) fn is_quarantined(&self) -> bool {
        self.quarantined
    }

    /// An attempt was under way when the last owner died.
    pub(super) fn quarantine(&mut self) {
        self.quarantined = true;
    }

    /// One more event has gone well, or has a row.
    pub(super) fn note_success(&mut self) {
        self.left = self.left.saturating_sub(1);
        self.quarantined &= self.left > 0;
    }

    /// This may be what the last owner died of.
    pub(super) fn begin(&mut self, due: Option<Position>) {
        self.due = due;
        self.returned = false;
    }

    pub(super) fn admit(&mut self, position: Position) {
        self.first = Some(self.first.map_or(position, |first| first.min(position)));
    }

    pub(super) fn settle(&mut self, position: Position) {
        self.passed |= self.first == Some(position);
    }

    pub(super) fn note_return(&mut self, position: Position) {
        self.returned = true;
        self.due.take_if(|due| *due == position);
    }

    /// A poll was answered. If nothing is left up to the horizon, there is no event that could end the process.
    pub(super) fn note_poll(&mut self, all_read: bool) {
        self.passed |= self.polled && self.first.is_none() && all_read;
        self.polled = true;
    }

    /// Whether the count of take-overs is to be reset, since the lane has made progress. It has when the lowest event is passed and the
    /// first due delivery is done: the next owner then begins with another event. In quarantine, where every attempt is counted before
    /// it begins, an event that was passed or that came back is enough.
    pub(super) fn resets_takeovers(&self) -> bool {
        let passed = if self.quarantined { self.passed || self.returned } else { self.passed && self.due.is_none() };
        self.takeovers > 0 && passed
    }

    /// The reset is written.
    pub(super) fn end(&mut self) {
        self.takeovers = 0;
    }
}
