use std::time::Duration;

use super::kind::Kind;

/// A relay averages over a second what ringing costs, and wakes when that is too much: after so long a flood it is awake.
const AWAKE_AFTER: Duration = Duration::from_secs(1);

/// What there is beside the publishers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Situation {
    /// No relay.
    Alone,
    /// A relay that sleeps but for the events of [`Pace::Steady`]: few enough that each may ring.
    Asleep,
    /// A relay that is awake and delivers what is published.
    Awake,
    /// A relay that is far behind and stays so.
    Backlog,
    /// No relay, and many events a transaction.
    Batch,
}

/// How events are published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pace {
    /// As fast as the server takes them.
    Flood,
    /// 500 a second by all connections together.
    Steady,
}

impl Situation {
    pub(super) const ALL: [Situation; 5] =
        [Situation::Alone, Situation::Asleep, Situation::Awake, Situation::Backlog, Situation::Batch];

    /// What it is called where it is measured.
    pub(super) fn name(self) -> &'static str {
        match self {
            Situation::Alone => "alone",
            Situation::Asleep => "asleep",
            Situation::Awake => "awake",
            Situation::Backlog => "backlog",
            Situation::Batch => "batch",
        }
    }

    /// What it is called in the table.
    pub(super) fn text(self) -> &'static str {
        match self {
            Situation::Alone => "no relay",
            Situation::Batch => "100 rows",
            _ => self.name(),
        }
    }

    /// How many connections publish at once.
    pub(super) fn connections(self) -> &'static [usize] {
        match self {
            Situation::Batch => &[8],
            _ => &[1, 8, 32],
        }
    }

    /// What is compared. A reader's and a bell's part is seen where many publish at once.
    pub(super) fn kinds(self, connections: usize) -> &'static [Kind] {
        match self {
            Situation::Batch => &[Kind::BareBatch, Kind::InsertBatch],
            Situation::Awake if connections > 1 => {
                &[Kind::Bare, Kind::Insert, Kind::Function, Kind::Watched, Kind::Ringing]
            }
            _ => &[Kind::Bare, Kind::Insert, Kind::Function],
        }
    }

    pub(super) fn pace(self) -> Pace {
        match self {
            Situation::Asleep => Pace::Steady,
            _ => Pace::Flood,
        }
    }

    /// How long events are published before a slice of them begins to count.
    pub(super) fn lead_in(self) -> Duration {
        match self {
            Situation::Awake => AWAKE_AFTER,
            _ => Duration::ZERO,
        }
    }
}
