use super::crew::Slice;

/// What is made of a slice. More is better but for WAL, so that times are told as what is done in a second of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Figure {
    /// Events in a second.
    Rate,
    /// Commits in a second of waiting for them: one divided by the mean latency.
    Latency,
    /// Transactions in a second of the publishing backends' processor time.
    Processor,
    /// Bytes for an event.
    Wal,
}

impl Figure {
    /// What it is called where it is measured.
    pub(super) fn name(self) -> &'static str {
        match self {
            Figure::Rate => "rate",
            Figure::Latency => "latency",
            Figure::Processor => "processor",
            Figure::Wal => "wal",
        }
    }

    /// What it is called in the table, after the name of a row.
    pub(super) fn suffix(self) -> &'static str {
        match self {
            Figure::Rate => "",
            Figure::Latency => ", latency",
            Figure::Processor => ", CPU",
            Figure::Wal => ", WAL",
        }
    }

    pub(super) fn unit(self) -> &'static str {
        match self {
            Figure::Rate => "events/s",
            Figure::Latency => "1/s waited",
            Figure::Processor => "1/s of CPU",
            Figure::Wal => "B/event",
        }
    }

    pub(super) fn of(self, slice: &Slice) -> f64 {
        let (events, transactions) = ((slice.transactions * slice.kind.events()) as f64, slice.transactions as f64);
        let value = match self {
            Figure::Rate => events / slice.elapsed.as_secs_f64(),
            Figure::Latency => transactions / slice.waited.as_secs_f64(),
            Figure::Processor => transactions / slice.processor_seconds,
            Figure::Wal => slice.wal_bytes / events,
        };
        // A tenth is more than enough, and can be read.
        (value * 10.0).round() / 10.0
    }
}
