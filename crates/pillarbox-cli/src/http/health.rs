use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use pillarbox::{Operator, Relay, Status};
use tokio::sync::{Notify, watch};

use crate::log::Log;
use crate::recorder::Recorder;

/// A status that is younger than this is not read anew, however often somebody asks.
const STATUS_AGE_MIN: Duration = Duration::from_secs(1);
/// After reading a status for some time nothing is read for this many times as long, so that probes of a large log cost little.
const STATUS_REST: u32 = 4;
/// How long a page waits for a status that is being read before it answers with the one before.
const STATUS_WAIT: Duration = Duration::from_millis(50);
/// How long reading a status may take.
const STATUS_TIMEOUT: Duration = Duration::from_secs(30);
/// Figures that are older than this are not shown any more, and a status that is older says nothing once reading fails; unless
/// reading takes so long that a younger one cannot be expected.
const STATUS_AGE_MAX: Duration = Duration::from_secs(60);
/// How many times as old as its reading took a status may be: the rest, the next reading, and some time to spare.
const STATUS_AGE_READINGS: u32 = STATUS_REST + 2;

/// What the listener can tell of this process. Every answer comes from memory: a database that does not answer delays none.
pub(crate) struct Health {
    pub(super) recorder: Recorder,
    /// How long the database may leave this relay's beat without an answer.
    silence_max: Duration,
    part: Mutex<(Part, Instant)>,
    known: watch::Sender<Known>,
    /// Somebody has asked for a younger status.
    wanted: Notify,
    /// The part has changed.
    changed: Notify,
}

/// Which part this process takes in the fleet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// It has not joined yet.
    Starting,
    /// It has joined.
    Working {
        /// For how long the database has not answered its beat.
        silence: Duration,
    },
    /// It has lost the database and tries to join again.
    Lost,
    /// It ends.
    Draining,
}

impl Part {
    /// The part of a relay that has started.
    pub(crate) fn of(relay: &Relay) -> Self {
        if relay.ready() { Part::Working { silence: relay.silence() } } else { Part::Lost }
    }
}

/// What was read of the database last.
#[derive(Debug, Clone, Default)]
pub(super) struct Known {
    reading: Option<Reading>,
    /// Why the last reading failed, if it did.
    pub(super) error: Option<String>,
}

/// One reading of the status.
#[derive(Debug, Clone)]
pub(super) struct Reading {
    pub(super) began: Instant,
    took: Duration,
    pub(super) status: Arc<Status>,
}

impl Reading {
    /// Whether a younger one should have been there by now, if somebody had asked.
    pub(super) fn is_old(&self) -> bool {
        self.began.elapsed() >= STATUS_AGE_MAX.max(self.took * STATUS_AGE_READINGS)
    }
}

impl Known {
    fn is_young(&self, joined_at: Instant) -> bool {
        self.error.is_none() && self.since(joined_at).is_some_and(|reading| reading.began.elapsed() < STATUS_AGE_MIN)
    }

    /// The status, unless it is too old to be shown.
    pub(super) fn youngest(&self) -> Option<(Instant, &Status)> {
        let reading = self.reading.as_ref().filter(|reading| !reading.is_old())?;
        Some((reading.began, &*reading.status))
    }

    /// The last reading, unless it began before this moment.
    pub(super) fn since(&self, moment: Instant) -> Option<&Reading> {
        self.reading.as_ref().filter(|reading| reading.began >= moment)
    }
}

impl Health {
    pub(crate) fn new(recorder: Recorder, silence_max: Duration) -> Arc<Self> {
        Arc::new(Health {
            recorder,
            silence_max,
            part: Mutex::new((Part::Starting, Instant::now())),
            known: watch::channel(Known::default()).0,
            wanted: Notify::new(),
            changed: Notify::new(),
        })
    }

    /// Says which part this process takes from now on.
    pub(crate) fn set_part(&self, part: Part) {
        let mut now = self.part.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::discriminant(&now.0) != std::mem::discriminant(&part) {
            now.1 = Instant::now();
            self.changed.notify_one();
        }
        now.0 = part;
    }

    /// The part, and since when it is that one.
    pub(super) fn part(&self) -> (Part, Instant) {
        *self.part.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Why this process cannot work now.
    pub(super) fn hindrance(&self) -> Option<String> {
        let error = || self.known.borrow().error.clone().map(|error| format!(": {error}")).unwrap_or_default();
        match self.part().0 {
            Part::Starting => Some("this instance has not joined yet".to_owned()),
            Part::Draining => Some("this instance is draining".to_owned()),
            Part::Lost => Some(format!("the database cannot be reached{}; joining again once it can", error())),
            Part::Working { silence } if silence >= self.silence_max => {
                Some(format!("the database cannot be reached: it has not answered for {} s", silence.as_secs()))
            }
            Part::Working { .. } => None,
        }
    }

    /// What is known of the database. A young answer is waited for, for a moment.
    pub(super) async fn known(&self) -> Known {
        let mut news = self.known.subscribe();
        if !news.borrow().is_young(self.part().1) {
            self.wanted.notify_one();
            // Without news, what was known before is the answer.
            let _ = tokio::time::timeout(STATUS_WAIT, news.changed()).await;
        }
        news.borrow_and_update().clone()
    }

    /// Reads the status whenever somebody has asked for a younger one; until the process ends.
    pub(crate) async fn refresh(self: Arc<Self>, operator: Arc<Log>) {
        loop {
            let began = Instant::now();
            let read = tokio::time::timeout(STATUS_TIMEOUT, operator.status()).await;
            self.known.send_modify(|known| match read {
                Ok(Ok(status)) => {
                    let reading = Reading { began, took: began.elapsed(), status: Arc::new(status) };
                    *known = Known { reading: Some(reading), error: None };
                }
                Ok(Err(error)) => known.error = Some(error.to_string()),
                Err(_) => known.error = Some(format!("its status could not be read within {STATUS_TIMEOUT:?}")),
            });
            let rest = (began.elapsed() * STATUS_REST).max(STATUS_AGE_MIN);
            tokio::select! {
                () = tokio::time::sleep_until((began + rest).into()) => self.wanted.notified().await,
                // What was read before says nothing of the part that this process takes now.
                () = self.changed.notified() => {}
            }
        }
    }
}
