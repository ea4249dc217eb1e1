use std::time::Duration;

/// The limits and intervals of a relay, as [`RelayConfig::engine`](crate::RelayConfig::engine). Each is documented with its default.
///
/// ```
/// use std::time::Duration;
/// use pillarbox::RelayConfig;
/// use pillarbox::config::{EngineConfig, Recovery, RecoveryProfile};
///
/// let mut config = RelayConfig::default();
/// config.engine.lease_ttl = Duration::from_secs(5);
/// config.engine.in_flight = 2_000;
/// config.engine.recovery = Recovery { profile: RecoveryProfile::Conservative, ..Recovery::default() };
/// assert_eq!(EngineConfig::default().lease_ttl, Duration::from_secs(10));
/// ```
#[derive(Debug, Clone)]
pub struct EngineConfig {
    /// How long an owner may be silent before its lanes are taken, where no lock proves its life; it stops by itself a fifth of
    /// that time earlier. Default: 10 s.
    pub lease_ttl: Duration,
    /// How often this instance beats and looks at the fleet. Default: 1 s, at most a third of the lease and of the
    /// `processing_timeout` of a queue.
    pub beat_interval: Duration,
    /// The watchdog: a poll happens at least this often, whatever the doorbell does. Default: 5 s.
    pub poll_interval: Duration,
    /// Gathers wake-ups for this long before a poll. Default: 0.
    pub debounce: Duration,
    /// How many positions one scan looks at. Default: 2,000.
    pub page_size: usize,
    /// Events of one subscription that are read and not yet settled in the database, at most; what a crash can deliver twice. Default: 10,000.
    pub in_flight: usize,
    /// The same in bytes held in memory. Default: 32 MiB.
    pub in_flight_bytes_max: usize,
    /// Holes asked for in one poll; beyond it neighbours are asked for as one. Default: 1,000, as many as a cursor may have.
    pub hole_scans_max: usize,
    /// Ranges of one cursor; with more holes than this a lane goes no higher until some close. Default: 1,000.
    pub ranges_max: usize,
    /// Failing keys of one subscription; at the limit it stops and says so. Default: 10,000.
    pub max_parked: usize,
    /// Deliveries of one subscription that wait behind failing keys; at the limit it stops and says so. Default: 1,000,000.
    pub max_blocked: usize,
    /// An idle lane's floor is written at least this often. Default: 5 s.
    pub floor_interval: Duration,
    /// Whether and how this instance takes back what others were working on in queues.
    pub recovery: Recovery,
    /// The seed of the jitter.
    pub seed: u64,
    /// For tests of the tests: a deliberately broken variant.
    #[doc(hidden)]
    pub mutant: Option<Mutant>,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            lease_ttl: Duration::from_secs(10),
            beat_interval: Duration::from_secs(1),
            poll_interval: Duration::from_secs(5),
            debounce: Duration::ZERO,
            page_size: 2_000,
            in_flight: 10_000,
            in_flight_bytes_max: 32 * 1024 * 1024,
            hole_scans_max: 1_000,
            ranges_max: 1_000,
            max_parked: 10_000,
            max_blocked: 1_000_000,
            floor_interval: Duration::from_secs(5),
            recovery: Recovery::default(),
            seed: 1,
            mutant: None,
        }
    }
}

/// How an instance takes back what others were working on in queues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recovery {
    /// Off: what a dead process was working on stays as it is until an operator or an outside monitor says `pillarbox recover`.
    /// Default: on.
    pub enabled: bool,
    /// How soon. Default: fast.
    pub profile: RecoveryProfile,
    /// How often claims are looked through for owners that have given no sign of life for `processing_timeout`. Default: 1 min.
    pub check_interval: Duration,
}

impl Default for Recovery {
    fn default() -> Self {
        Recovery { enabled: true, profile: RecoveryProfile::Fast, check_interval: Duration::from_secs(60) }
    }
}

/// How soon claims are recovered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecoveryProfile {
    /// As soon as the owner's lock is free or its lease is over: in milliseconds when a process dies. A process that was only cut
    /// off from the database may still be working then.
    Fast,
    /// Only after `processing_timeout` without a sign of life: for those to whom a duplicate is worse than a delay. Every event gets
    /// a row before it is worked on.
    Conservative,
}

/// Deliberately broken variants of the engine; the simulation must find each.
#[doc(hidden)]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mutant {
    /// The cursor jumps to the highest visible position.
    CursorAtHighestVisible,
    /// A gap is closed without waiting for the writers seen with it.
    CloseHolesBeforeReading,
    /// An event counts as settled when it is handed to the sink.
    SettleBeforeDeliver,
    /// A lane that joins behind the tail goes on at the tail.
    JoinWithoutRereading,
    /// The floor is written as the highest position delivered.
    AbsoluteCursor,
    /// What came out of turn is written as one range, with what is open between.
    OneRangeAboveFloor,
    /// What came out of turn is not written.
    NoRangesAboveFloor,
    /// An instance that cannot beat any more goes on delivering until it is told to stop.
    NoOwnDeadline,
    /// It sends nothing more, but lets what is at the sinks go on.
    CallsOutliveDeadline,
    /// One event that the sink fails to take holds every key back.
    SuspectStopsAll,
    /// The database's time counts as read when it was asked for.
    EarlyClock,
    /// A delayed event takes its place before what the owner before had read is read again.
    PromoteBeforeReading,
    /// A lane that is loaded again is read with the filter that the relay was started with.
    ReloadWithOldFilter,
}
