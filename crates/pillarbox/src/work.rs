use std::cell::Cell;

thread_local! {
    static LOOKED_AT: Cell<u64> = const { Cell::new(0) };
}

/// Notes that so many things (lanes, rows, events, ranges) were looked at one after the other.
pub(crate) fn looked_at(count: usize) {
    LOOKED_AT.set(LOOKED_AT.get() + count as u64);
}

/// How many things the engines of this thread have looked at in loops, for tests of how the cost of a step grows.
#[doc(hidden)]
pub fn work() -> u64 {
    LOOKED_AT.get()
}
