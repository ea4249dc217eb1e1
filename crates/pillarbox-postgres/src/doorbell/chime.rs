use std::time::{Duration, Instant};

/// How long a ring that was not answered waits before it rings again; it doubles up to the maximum.
const RING_AGAIN: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(1));

/// An awake relay pauses between polls for a quarter of the time between what comes, within these limits; when nothing has
/// come for a while, ever longer.
const AWAKE_PAUSE: (Duration, Duration) = (Duration::from_micros(500), Duration::from_millis(10));
const AWAKE_CLOSELY_MAX: Duration = Duration::from_millis(1);
const AWAKE_CLOSELY_FOR: Duration = Duration::from_millis(20);
const GAP_PART: u32 = 4;

/// When so many events came with one poll, the next one waits for more: publishers need the processors too.
const BUSY_EVENTS: usize = 8;
const BUSY_PAUSE: Duration = Duration::from_millis(10);

/// How often a relay polls whose bell is silent though events move.
const SILENT_PAUSE: Duration = Duration::from_millis(100);

/// How often a relay polls without a doorbell, while events move and at the longest.
const OFF_PAUSE: (Duration, Duration) = (Duration::from_millis(50), Duration::from_millis(500));

/// What a relay is woken by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Rings.
    Asleep,
    /// Its own pauses: it keeps the writers from ringing.
    Awake,
    /// Its own pauses: rings should come and do not.
    Silent,
    /// Its own pauses: no writer rings.
    Off,
}

/// Says when a wait ends. A ring counts until a poll has begun after it.
#[derive(Debug)]
pub(super) struct Chime {
    /// Rings heard, and how many of them the last poll answers.
    rings: u64,
    answered: u64,
    /// Which ring a wait was last ended for, when it would be again, and the pause until then.
    rung: Option<(u64, Instant, Duration)>,
    mode: Mode,
    pause: Duration,
    /// The last poll's end or the last wait's, and when something last came.
    paced_at: Instant,
    moved_at: Instant,
    /// The usual time between what comes.
    gap: Duration,
}

impl Chime {
    /// There was no poll yet: what is there already counts as a ring.
    pub(super) fn new(now: Instant) -> Self {
        Chime {
            rings: 1,
            answered: 0,
            rung: None,
            mode: Mode::Asleep,
            pause: AWAKE_PAUSE.0,
            paced_at: now,
            moved_at: now,
            gap: Duration::ZERO,
        }
    }

    /// Something may have been committed.
    pub(super) fn ring(&mut self) {
        self.rings += 1;
    }

    /// Whether it changed.
    pub(super) fn set_mode(&mut self, mode: Mode) -> bool {
        let changed = self.mode != mode;
        if changed {
            self.mode = mode;
            self.pause = self.pauses().map_or(AWAKE_PAUSE.0, |pauses| pauses.0);
        }
        changed
    }

    pub(super) fn poll_begins(&mut self) {
        self.answered = self.rings;
    }

    pub(super) fn polled(&mut self, now: Instant, moved: bool, events: usize) {
        self.paced_at = now;
        let Some((shortest, longest)) = self.pauses() else { return };
        if moved {
            let gap = now.saturating_duration_since(self.moved_at).min(AWAKE_CLOSELY_FOR);
            self.gap = (self.gap * 3 + gap) / 4;
            self.moved_at = now;
            self.pause = match self.mode {
                Mode::Awake if events >= BUSY_EVENTS => BUSY_PAUSE,
                Mode::Awake => (self.gap / GAP_PART).clamp(shortest, AWAKE_CLOSELY_MAX),
                _ => shortest,
            };
        } else if self.mode != Mode::Awake || now.saturating_duration_since(self.moved_at) >= AWAKE_CLOSELY_FOR {
            self.pause = (self.pause * 3 / 2).min(longest);
        }
    }

    /// When a wait is to end.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        let ring = (self.rings > self.answered).then_some(match self.rung {
            Some((ring, again_at, _)) if ring == self.rings => again_at,
            _ => now,
        });
        let paced = self.pauses().map(|_| self.paced_at + self.pause);
        ring.into_iter().chain(paced).min()
    }

    /// Ends a wait, if it is time to.
    pub(super) fn take(&mut self, now: Instant) -> bool {
        if self.due(now).is_none_or(|due| due > now) {
            return false;
        }
        let pause = match self.rung {
            Some((ring, again_at, pause)) if ring == self.rings && again_at <= now => (pause * 2).min(RING_AGAIN.1),
            _ => RING_AGAIN.0,
        };
        self.rung = Some((self.rings, now + pause, pause));
        // No poll may come of it; then this is what the next pause begins with.
        self.paced_at = now;
        true
    }

    fn pauses(&self) -> Option<(Duration, Duration)> {
        match self.mode {
            Mode::Asleep => None,
            Mode::Awake => Some(AWAKE_PAUSE),
            Mode::Silent => Some((SILENT_PAUSE, SILENT_PAUSE)),
            Mode::Off => Some(OFF_PAUSE),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ring_counts_until_a_poll_began_after_it_and_ever_less_often() {
        let start = Instant::now();
        let mut chime = Chime::new(start);
        assert!(chime.take(start), "nobody has polled yet");
        chime.poll_begins();
        chime.ring();
        chime.polled(start, true, 1);
        assert!(chime.take(start), "it rang while the poll was under way");
        assert!(!chime.take(start + RING_AGAIN.0 / 2));
        assert!(chime.take(start + RING_AGAIN.0));
        assert!(!chime.take(start + RING_AGAIN.0 * 2), "the second pause is longer");
        chime.ring();
        assert!(chime.take(start + RING_AGAIN.0 * 2), "another ring");
        chime.poll_begins();
        assert_eq!(chime.due(start), None);
    }

    #[test]
    fn awake_it_polls_closely_and_ever_less_often_when_nothing_comes() {
        let mut now = Instant::now();
        let mut chime = Chime::new(now);
        chime.set_mode(Mode::Awake);
        let mut round = |chime: &mut Chime, moved| {
            chime.poll_begins();
            chime.polled(now, moved, 1);
            let pause = chime.due(now).unwrap() - now;
            now += pause;
            assert!(chime.take(now));
            pause
        };
        assert_eq!(round(&mut chime, true), AWAKE_PAUSE.0);
        assert_eq!(round(&mut chime, false), AWAKE_PAUSE.0);
        let longest = (0..100).map(|_| round(&mut chime, false)).max();
        assert_eq!(longest, Some(AWAKE_PAUSE.1));
        assert!(round(&mut chime, true) <= AWAKE_CLOSELY_MAX, "something came");
        let last = (0..100).map(|_| round(&mut chime, true)).last();
        assert_eq!(last, Some(AWAKE_PAUSE.0), "much comes");
        chime.set_mode(Mode::Asleep);
        assert_eq!(chime.due(now), None);
    }
}
