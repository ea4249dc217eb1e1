/// Makes the list with the type, so that a test which goes through the list cannot forget one.
macro_rules! failpoints {
    ($($point:ident => $name:literal),*) => {
        /// The steps of a relay at which a test can kill the process: every place where a crash could lose, repeat or reorder something.
        ///
        /// With the feature `failpoints`, `PILLARBOX_FAILPOINT=settle:3` aborts the process when it reaches `settle` for the third time.
        /// Without the feature nothing is compiled in.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[allow(missing_docs, reason = "the names say it: before the call, or after it and before its answer is used")]
        pub enum Failpoint {
            $($point),*
        }

        impl Failpoint {
            /// All of them.
            pub const ALL: &[Failpoint] = &[$(Failpoint::$point),*];

            /// The name in `PILLARBOX_FAILPOINT`.
            pub fn name(self) -> &'static str {
                match self {
                    $(Failpoint::$point => $name),*
                }
            }
        }
    };
}

failpoints! {
    Joined => "joined",
    Observed => "observed",
    Take => "take",
    Taken => "taken",
    Loaded => "loaded",
    Polled => "polled",
    Fetched => "fetched",
    Deliver => "deliver",
    Delivered => "delivered",
    Settle => "settle",
    Settled => "settled",
    Claimed => "claimed",
    Finish => "finish",
    Finished => "finished",
    Wait => "wait",
    Leave => "leave"
}

impl Failpoint {
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
