use std::time::Duration;

use crate::budget::{Budget, Reservation};
use crate::{AttemptError, DeliveryRow, LaneWrite, Position, Queued};

/// What a lane has to write besides its cursor, and what it wrote last.
#[derive(Debug)]
pub(crate) struct WriteBuffer {
    put: Vec<DeliveryRow>,
    queue: Vec<Queued>,
    change: Vec<(DeliveryRow, Option<AttemptError>)>,
    finish: Vec<Position>,
    /// The room of events that were handed on and are not settled.
    window: Reservation,
    /// The room of those that were settled in memory since the last write was built: they take it until they are written.
    done: Reservation,
    /// The floor of the last write, and when it was written.
    written: (Position, Duration),
}

impl WriteBuffer {
    /// For a lane whose floor is written, and whose events take their room from `window`.
    pub(crate) fn new(floor: Position, window: &Budget) -> Self {
        WriteBuffer {
            put: Vec::new(),
            queue: Vec::new(),
            change: Vec::new(),
            finish: Vec::new(),
            window: window.reserve(0),
            done: window.reserve(0),
            written: (floor, Duration::ZERO),
        }
    }

    /// Whether there is nothing to write.
    pub(crate) fn is_empty(&self) -> bool {
        let rows = self.put.is_empty() && self.change.is_empty() && self.finish.is_empty();
        self.done.amount() == 0 && self.queue.is_empty() && rows
    }

    /// Events that are settled and not written as such.
    pub(crate) fn done(&self) -> usize {
        self.done.amount()
    }

    /// Events are handed on.
    pub(crate) fn admit(&mut self, count: usize) {
        self.window.grow(count);
    }

    /// An event that was handed on comes back: it takes no room any more.
    pub(crate) fn release(&mut self) {
        self.window.shrink(1);
    }

    /// An event is settled, or a delivery is over.
    pub(crate) fn note_done(&mut self) {
        self.window.move_to(&mut self.done, 1);
    }

    /// Whether a floor was not written for so long that it is to be written for its own sake.
    pub(crate) fn is_old(&self, floor: Position, now: Duration, interval: Duration) -> bool {
        now >= self.written.1 + interval && self.written.0 < floor
    }

    /// The floor that is written, and since when.
    pub(crate) fn note_written(&mut self, floor: Position, now: Duration) {
        self.written = (floor, now);
    }

    /// The floor was loaded now.
    pub(crate) fn note_loaded(&mut self, now: Duration) {
        self.written.1 = now;
    }

    /// A delivery is new.
    pub(crate) fn put(&mut self, row: DeliveryRow) {
        self.put.push(row);
    }

    /// A delivery has changed, by an attempt that failed or otherwise.
    pub(crate) fn change(&mut self, row: DeliveryRow, error: Option<AttemptError>) {
        self.change.push((row, error));
    }

    /// A delivery is over.
    pub(crate) fn finish(&mut self, position: Position) {
        self.finish.push(position);
    }

    /// An event gets a row in the queue.
    pub(crate) fn enqueue(&mut self, row: Queued) {
        self.queue.push(row);
    }

    /// Rows in the queue that are to be written.
    pub(crate) fn queued(&self) -> &[Queued] {
        &self.queue
    }

    /// Moves everything into a write; the room that its events take until it is written.
    pub(crate) fn fill(&mut self, write: &mut LaneWrite) -> Reservation {
        write.put = std::mem::take(&mut self.put);
        write.queue = std::mem::take(&mut self.queue);
        write.change = std::mem::take(&mut self.change);
        write.finish = std::mem::take(&mut self.finish);
        let done = self.done.amount();
        self.done.split(done)
    }

    /// Puts back what could not be written, before anything that came since.
    pub(crate) fn restore(&mut self, mut write: LaneWrite, done: Reservation) {
        write.put.append(&mut self.put);
        write.queue.append(&mut self.queue);
        write.change.append(&mut self.change);
        write.finish.append(&mut self.finish);
        (self.put, self.queue) = (write.put, write.queue);
        (self.change, self.finish) = (write.change, write.finish);
        self.done.merge(done);
    }
}
