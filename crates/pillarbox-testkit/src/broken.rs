/// A way in which a [`MemoryLog`](crate::MemoryLog) can be deliberately wrong. The conformance suite must notice
/// each of them; a suite that does not is the thing that is broken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Broken {
    /// A poll reads the writers before the horizon: a writer that comes between is in neither.
    WritersBeforeHorizon,
    /// A poll reads the rows before the horizon: a commit between looks like a hole that nobody can fill.
    RowsBeforeHorizon,
    /// A transaction stops being a writer before its rows are visible.
    WriterGoneBeforeVisible,
    /// An event that nobody wants is not even reported as visible.
    FilterLooksLikeHole,
    /// A full page claims to have covered its whole stretch.
    FullPageCoversAll,
    /// What a poll returns may still be lost by a crash of the database.
    NoBarrier,
    /// A settlement does not look at the epoch.
    FenceIgnored,
    /// A take does not look at the epoch.
    TakeWithoutCompare,
    /// A take for want of a sign of life does not look whether there has been one since.
    TakeFromTheLiving,
    /// An instance that joins again brings its own definitions of the subscriptions back.
    RejoinRedefines,
    /// A load shows the lane as it was when the fleet was last observed, before the take was committed.
    StaleLoad,
    /// A settlement that fails has written the cursor but not the deliveries.
    SettleNotAtomic,
    /// A change of a delivery that is finished puts it back.
    ChangeResurrects,
    /// A settlement overwrites what an operator changed since the lane was loaded.
    RevisionIgnored,
    /// A delivery that is there already cannot be put again.
    PutFailsOnExisting,
    /// A subscription that starts now takes the horizon as its floor, with the holes below it.
    StartNowSkipsHoles,
    /// The anchor of a cursor is not compared with the log.
    AnchorIgnored,
    /// What was committed before the wait began is not noticed by it.
    WaitForgetsThePast,
    /// What a claim that was not answered has claimed is not told when it is asked for again.
    UnansweredClaimsAreLost,
    /// A row that somebody works on is claimed again.
    ClaimsWhatIsTaken,
    /// Rows behind their key's head are claimed.
    ClaimsBehindTheHead,
    /// Rows are claimed before they are due.
    ClaimsBeforeDue,
    /// A delayed row that becomes due goes before what its key has got meanwhile.
    DelayedKeepsItsPlace,
    /// Rows are claimed in order of arrival, so that a key with many keeps the others waiting.
    KeysTakeNoTurns,
    /// A dead row of a queue holds nobody back, whatever the subscription says.
    DeadNeverBlocks,
    /// The end of a claim does not look whose claim it is.
    FinishIgnoresClaim,
    /// A claim that is given back counts as an attempt.
    BackCountsAttempt,
    /// A failed row does not wait for its time.
    FailedIsDueAtOnce,
    /// An event that has a row in the queue gets a new one.
    QueueReplaces,
    /// A settlement that is repeated brings back what was done since.
    QueueRepeats,
    /// A recovery for want of a sign of life does not look whether there has been one since.
    RecoverFromTheLiving,
    /// A recovery does not count as an attempt.
    RecoveryCountsNoAttempt,
    /// A sweep leaves the claims of those who have no row any more.
    SweepForgetsTheBuried,
    /// A sweep takes an instance for silent by the database's clock alone.
    SweepByDatabaseClock,
    /// Rows that were recovered from crashes are claimed like all others.
    SuspectsTogether,
    /// An instance that leaves keeps its claims.
    LeaveStrandsClaims,
    /// A lane's load does not tell the keys of which a row is being worked on.
    LoadForgetsClaimedKeys,
    /// A load brings every dead delivery of the lane.
    LoadsAllDead,
    /// A load does not tell which keys a dead event holds back.
    LoadForgetsDeadHeads,
    /// A rewind leaves the rows that somebody works on.
    RewindSparesClaims,
    /// A subscription that has a mode can be joined with another.
    ModeChanges,
    /// The reason of a pause is not kept.
    PauseForgetsReason,
    /// A receiver's pause replaces an operator's.
    ReceiverPausesOver,
    /// A settlement that is repeated brings back what an operator has given up since.
    SkipUndone,
    /// Whoever takes a lane from a silent owner waits for the locks that this one holds.
    HeirWaits,
    /// Retention removes what a subscription has not passed.
    RetentionIgnoresFloors,
    /// Retention removes the events of a log without subscriptions, which nobody has received.
    RetentionTakesUnreceived,
    /// Retention removes the events of journals.
    RetentionTakesJournals,
    /// A dry run of retention removes what it counts.
    DryRunRemoves,
    /// A filter changes without raising the epochs: whoever read with the old one goes on settling.
    DefineWithoutFence,
    /// What was passed under a former filter counts as judged by the one of now.
    FormerFiltersForgotten,
    /// A change of anything but the filter does not raise the definition's number.
    DefinitionKeepsNumber,
    /// A settlement that announces an attempt is answered as written where the attempt was not counted.
    AnnouncesUncounted,
    /// A hold that is over moves floors without raising the epochs: owners go on settling from where they were.
    HoldWithoutFence,
    /// What a hold that is over drops is not recorded.
    HoldLeavesNoRecord,
    /// Lanes are changed in number without raising their epochs: who owned one goes on settling it.
    RelaneKeepsEpoch,
    /// Lanes are changed in number, and deliveries stay in the lane that was theirs.
    RelaneLeavesRows,
    /// A key is replayed without raising the epoch of its lane: its owner puts deliveries of the key between the replayed ones.
    RewindKeyWithoutFence,
    /// The status does not count what is dead.
    StatusForgetsDead,
}

impl Broken {
    /// All of them.
    pub const ALL: [Broken; 59] = [
        Broken::WritersBeforeHorizon,
        Broken::RowsBeforeHorizon,
        Broken::WriterGoneBeforeVisible,
        Broken::FilterLooksLikeHole,
        Broken::FullPageCoversAll,
        Broken::NoBarrier,
        Broken::FenceIgnored,
        Broken::TakeWithoutCompare,
        Broken::TakeFromTheLiving,
        Broken::RejoinRedefines,
        Broken::StaleLoad,
        Broken::SettleNotAtomic,
        Broken::ChangeResurrects,
        Broken::RevisionIgnored,
        Broken::PutFailsOnExisting,
        Broken::StartNowSkipsHoles,
        Broken::AnchorIgnored,
        Broken::WaitForgetsThePast,
        Broken::UnansweredClaimsAreLost,
        Broken::ClaimsWhatIsTaken,
        Broken::ClaimsBehindTheHead,
        Broken::ClaimsBeforeDue,
        Broken::DelayedKeepsItsPlace,
        Broken::KeysTakeNoTurns,
        Broken::DeadNeverBlocks,
        Broken::FinishIgnoresClaim,
        Broken::BackCountsAttempt,
        Broken::FailedIsDueAtOnce,
        Broken::QueueReplaces,
        Broken::QueueRepeats,
        Broken::RecoverFromTheLiving,
        Broken::RecoveryCountsNoAttempt,
        Broken::SweepForgetsTheBuried,
        Broken::SweepByDatabaseClock,
        Broken::SuspectsTogether,
        Broken::LeaveStrandsClaims,
        Broken::LoadForgetsClaimedKeys,
        Broken::LoadsAllDead,
        Broken::LoadForgetsDeadHeads,
        Broken::RewindSparesClaims,
        Broken::ModeChanges,
        Broken::PauseForgetsReason,
        Broken::ReceiverPausesOver,
        Broken::SkipUndone,
        Broken::HeirWaits,
        Broken::RetentionIgnoresFloors,
        Broken::RetentionTakesUnreceived,
        Broken::RetentionTakesJournals,
        Broken::DryRunRemoves,
        Broken::DefineWithoutFence,
        Broken::FormerFiltersForgotten,
        Broken::DefinitionKeepsNumber,
        Broken::AnnouncesUncounted,
        Broken::HoldWithoutFence,
        Broken::HoldLeavesNoRecord,
        Broken::RelaneKeepsEpoch,
        Broken::RelaneLeavesRows,
        Broken::RewindKeyWithoutFence,
        Broken::StatusForgetsDead,
    ];
}
