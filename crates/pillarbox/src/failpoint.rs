/// The steps of a relay at which a test can kill the process: every place where a crash could lose, repeat or reorder something.
///
/// With the feature `failpoints`, `PILLARBOX_FAILPOINT=settle:3` aborts the process when it reaches `settle` for the third time.
/// Without the feature nothing is compiled in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs, reason = "the names say it: before the call, or after it and before its answer is used")]
pub enum Failpoint {
    Joined,
    Observed,
    Take,
    Taken,
    Loaded,
    Polled,
    Fetched,
    Deliver,
    Delivered,
    Settle,
    Settled,
    Claimed,
    Finish,
    Finished,
    Wait,
    Leave,
}

impl Failpoint {
    /// All of them; a test goes through this list, so that a new one cannot be forgotten.
    pub const ALL: [Failpoint; 16] = [
        Failpoint::Joined,
        Failpoint::Observed,
        Failpoint::Take,
        Failpoint::Taken,
        Failpoint::Loaded,
        Failpoint::Polled,
        Failpoint::Fetched,
        Failpoint::Deliver,
        Failpoint::Delivered,
        Failpoint::Settle,
        Failpoint::Settled,
        Failpoint::Claimed,
        Failpoint::Finish,
        Failpoint::Finished,
        Failpoint::Wait,
        Failpoint::Leave,
    ];

    /// The name in `PILLARBOX_FAILPOINT`.
    pub fn name(self) -> &'static str {
        match self {
            Failpoint::Joined => "joined",
            Failpoint::Observed => "observed",
            Failpoint::Take => "take",
            Failpoint::Taken => "taken",
            Failpoint::Loaded => "loaded",
            Failpoint::Polled => "polled",
            Failpoint::Fetched => "fetched",
            Failpoint::Deliver => "deliver",
            Failpoint::Delivered => "delivered",
            Failpoint::Settle => "settle",
            Failpoint::Settled => "settled",
            Failpoint::Claimed => "claimed",
            Failpoint::Finish => "finish",
            Failpoint::Finished => "finished",
            Failpoint::Wait => "wait",
            Failpoint::Leave => "leave",
        }
    }

    /// Ends the process here if the environment asks for it.
    #[cfg(feature = "failpoints")]
    pub(crate) fn hit(self) {
        use std::sync::LazyLock;
        use std::sync::atomic::{AtomicU64, Ordering};
        static ARMED: LazyLock<Option<(String, u64)>> = LazyLock::new(|| {
            let text = std::env::var("PILLARBOX_FAILPOINT").ok()?;
            let (name, count) = text.split_once(':').unwrap_or((&text, "1"));
            Some((name.to_owned(), count.parse().expect("PILLARBOX_FAILPOINT is name:count")))
        });
        static HITS: AtomicU64 = AtomicU64::new(0);
        if let Some((name, count)) = &*ARMED
            && name == self.name()
            && HITS.fetch_add(1, Ordering::SeqCst) + 1 == *count
        {
            std::process::abort();
        }
    }

    /// Ends the process here if the environment asks for it.
    #[cfg(not(feature = "failpoints"))]
    #[inline(always)]
    pub(crate) fn hit(self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_is_complete_and_names_are_distinct() {
        // The last variant's number tells how many there are: a new one that is not in ALL fails here.
        assert_eq!(Failpoint::ALL.len(), Failpoint::Leave as usize + 1);
        let names: std::collections::BTreeSet<_> = Failpoint::ALL.map(Failpoint::name).into();
        assert_eq!(names.len(), Failpoint::ALL.len());
    }
}
