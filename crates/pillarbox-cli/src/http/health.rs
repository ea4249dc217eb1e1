use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use pillarbox::Relay;
use pillarbox::admin::Status;
use tokio::sync::{Notify, watch};
use tokio::time::{Instant, sleep_until};

use crate::recorder::Recorder;

/// A status that is younger than this is not read again, however often it is asked for.
const STATUS_AGE_MIN: Duration = Duration::from_secs(1);
/// How often the status is read while pages are asked for, so that a probe finds one in memory that is hardly older than this.
const STATUS_INTERVAL: Duration = Duration::from_secs(10);
/// For how long after a page was asked for the status is kept young: longer than probes and scrapers pause.
const ASKED_WITHIN: Duration = Duration::from_secs(120);
/// After reading a status for some time nothing is read for this many times as long, so that probes of a large log cost little.
const STATUS_REST: u32 = 4;
/// How long a page waits for a status that is being read before it answers with the one before.
const STATUS_WAIT: Duration = Duration::from_millis(50);
/// How long `/progressz` waits for it where the one before is late. Less than the second that a probe waits by default.
const STATUS_WAIT_LATE: Duration = Duration::from_millis(800);
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
    attempt: Mutex<Attempt>,
    /// When a page that shows the status was asked for last.
    asked_at: Mutex<Option<Instant>>,
    /// A younger status was asked for.
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

/// The reading that comes next.
#[derive(Debug, Clone, Copy)]
enum Attempt {
    /// It began at this moment.
    UnderWay(Instant),
    /// It begins when it is asked for, but not before this moment.
    NotBefore(Instant),
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
    /// Whether a younger one should have been there by now, if it had been asked for.
    pub(super) fn is_old(&self) -> bool {
        self.began.elapsed() >= STATUS_AGE_MAX.max(self.took * STATUS_AGE_READINGS)
    }

    /// When the next one begins if pages were asked for lately and none asks for it earlier.
    fn next_at(&self) -> Instant {
        self.began + STATUS_INTERVAL.max(self.took * STATUS_REST)
    }

    /// Whether no page was asked for lately: else a younger one would be there by now, with some time to spare.
    fn is_late(&self) -> bool {
        Instant::now() >= self.next_at() + STATUS_AGE_MIN.max(self.took * 2)
    }
}

impl Known {
    fn is_young(&self, joined_at: Instant) -> bool {
        self.error.is_none() && self.since(joined_at).is_some_and(|reading| reading.began.elapsed() < STATUS_AGE_MIN)
    }

    fn is_late(&self) -> bool {
        self.reading.as_ref().is_some_and(Reading::is_late)
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
            attempt: Mutex::new(Attempt::NotBefore(Instant::now())),
            asked_at: Mutex::new(None),
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
        self.known_within(|_| STATUS_WAIT).await
    }

    /// The same, for a probe that judges by it. Where none was asked for in a while, what was known then says little, so that a young
    /// answer is waited for as long as a probe can wait; but not by each probe again while a database does not answer.
    pub(super) async fn known_in_time(&self) -> Known {
        self.known_within(|known| if known.is_late() { self.wait_late().max(STATUS_WAIT) } else { STATUS_WAIT }).await
    }

    async fn known_within(&self, wait: impl Fn(&Known) -> Duration) -> Known {
        *self.asked_at.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        let mut news = self.known.subscribe();
        if !news.borrow().is_young(self.part().1) {
            let wait = wait(&news.borrow());
            self.wanted.notify_one();
            // Without news, what was known before is the answer.
            let _ = tokio::time::timeout(wait, news.changed()).await;
        }
        news.borrow_and_update().clone()
    }

    /// How long the next reading is worth waiting for.
    fn wait_late(&self) -> Duration {
        match *self.attempt.lock().unwrap_or_else(PoisonError::into_inner) {
            Attempt::UnderWay(since) => STATUS_WAIT_LATE.saturating_sub(since.elapsed()),
            Attempt::NotBefore(moment) if moment > Instant::now() => Duration::ZERO,
            Attempt::NotBefore(_) => STATUS_WAIT_LATE,
        }
    }

    fn set_attempt(&self, attempt: Attempt) {
        *self.attempt.lock().unwrap_or_else(PoisonError::into_inner) = attempt;
    }

    /// Waits until a page asks for a younger status, or until `next` if pages were asked for not long before.
    async fn wanted_or(&self, next: Instant) {
        let asked_at = *self.asked_at.lock().unwrap_or_else(PoisonError::into_inner);
        let keeps_young = asked_at.is_some_and(|asked_at| next < asked_at + ASKED_WITHIN);
        tokio::select! {
            () = self.wanted.notified() => {}
            () = sleep_until(next), if keeps_young => {}
        }
    }

    /// Reads the status whenever a page has asked for a younger one, and at intervals while pages are asked for; until the process ends.
    pub(crate) async fn refresh<Answer>(self: Arc<Self>, read_status: impl Fn() -> Answer)
    where
        Answer: Future<Output = pillarbox::Result<Status>>,
    {
        loop {
            let began = Instant::now();
            self.set_attempt(Attempt::UnderWay(began));
            let read = tokio::time::timeout(STATUS_TIMEOUT, read_status()).await;
            let rest = (began.elapsed() * STATUS_REST).max(STATUS_AGE_MIN);
            self.set_attempt(Attempt::NotBefore(began + rest));
            self.known.send_modify(|known| match read {
                Ok(Ok(status)) => {
                    let reading = Reading { began, took: began.elapsed(), status: Arc::new(status) };
                    *known = Known { reading: Some(reading), error: None };
                }
                Ok(Err(error)) => known.error = Some(error.to_string()),
                Err(_) => known.error = Some(format!("its status could not be read within {STATUS_TIMEOUT:?}")),
            });
            tokio::select! {
                () = async {
                    sleep_until(began + rest).await;
                    self.wanted_or(began + rest.max(STATUS_INTERVAL)).await;
                } => {}
                // What was read before says nothing of the part that this process takes now.
                () = self.changed.notified() => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicI64, Ordering};

    use pillarbox::Timestamp;
    use pillarbox::admin::LogStatus;
    use uuid::Uuid;

    use super::*;

    const MS: Duration = Duration::from_millis(1);

    fn status(horizon: i64) -> Status {
        let log = LogStatus {
            log_id: Uuid::nil(),
            incarnation: 1,
            schema_version: 1,
            log_start: 1,
            horizon,
            events: 0,
            bytes: 0,
            kept: 0,
            holders: Vec::new(),
            held_seconds: None,
            recovery_at: None,
            alarms: Vec::new(),
        };
        Status { at: Timestamp(0), log, subscriptions: Vec::new(), instances: Vec::new() }
    }

    /// A relay that joined this long ago; its status was read then, which took 10 ms.
    fn health(age: Duration) -> Arc<Health> {
        let joined = Instant::now().checked_sub(age).unwrap();
        let health = Health::new(Recorder::detached(), Duration::from_secs(5));
        *health.part.lock().unwrap() = (Part::Working { silence: Duration::ZERO }, joined);
        let reading = Reading { began: joined, took: 10 * MS, status: Arc::new(status(1)) };
        health.known.send_replace(Known { reading: Some(reading), error: None });
        health
    }

    /// Answers the first who asks after so long; the position that is told then is 2.
    fn answer_after(health: &Arc<Health>, wait: Duration) {
        let health = health.clone();
        tokio::spawn(async move {
            health.wanted.notified().await;
            tokio::time::sleep(wait).await;
            let reading = Reading { began: Instant::now(), took: wait, status: Arc::new(status(2)) };
            health.known.send_replace(Known { reading: Some(reading), error: None });
        });
    }

    async fn told(health: &Health) -> (i64, Duration) {
        let asked = Instant::now();
        let known = health.known_in_time().await;
        (known.reading.unwrap().status.log.horizon, asked.elapsed())
    }

    #[tokio::test(start_paused = true)]
    async fn an_old_status_is_not_told_where_a_new_one_comes_in_time() {
        let health = health(Duration::from_secs(600));
        answer_after(&health, STATUS_WAIT_LATE - MS);
        assert_eq!(told(&health).await.0, 2);
        assert_eq!(told(&health).await, (2, Duration::ZERO), "young");
    }

    #[tokio::test(start_paused = true)]
    async fn no_probe_waits_longer_than_it_can_and_only_the_first_that_long() {
        let health = health(Duration::from_secs(600));
        answer_after(&health, Duration::from_secs(20));
        let (position, waited) = told(&health).await;
        assert!(position == 1 && waited >= STATUS_WAIT_LATE && waited < STATUS_WAIT_LATE + 5 * MS, "{waited:?}");
        health.set_attempt(Attempt::UnderWay(Instant::now().checked_sub(STATUS_WAIT_LATE).unwrap()));
        let (position, waited) = told(&health).await;
        assert!(position == 1 && waited < STATUS_WAIT + 5 * MS, "{waited:?}");
        health.set_attempt(Attempt::NotBefore(Instant::now() + Duration::from_secs(60)));
        assert!(told(&health).await.1 < STATUS_WAIT + 5 * MS, "reading has failed and rests");
    }

    /// A relay whose status takes this long to be read, and how often it was read; each reading tells its own number.
    fn refreshing(took: Duration) -> (Arc<Health>, Arc<AtomicI64>) {
        let health = Health::new(Recorder::detached(), Duration::from_secs(5));
        *health.part.lock().unwrap() = (Part::Working { silence: Duration::ZERO }, Instant::now());
        let readings = Arc::new(AtomicI64::new(0));
        let (count, reader) = (readings.clone(), health.clone());
        tokio::spawn(reader.refresh(move || {
            let number = count.fetch_add(1, Ordering::Relaxed) + 1;
            async move {
                tokio::time::sleep(took).await;
                Ok(status(number))
            }
        }));
        (health, readings)
    }

    const PROBE_INTERVAL: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn a_probe_every_30_s_of_a_log_that_is_slow_to_read_is_answered_from_memory() {
        let took = 2 * STATUS_WAIT_LATE;
        let (health, _) = refreshing(took);
        tokio::time::sleep(ASKED_WITHIN * 5).await;
        let (number, waited) = told(&health).await;
        assert!(number == 1 && waited >= STATUS_WAIT_LATE, "the first one waits: {waited:?}");
        for _ in 0..20 {
            tokio::time::sleep(PROBE_INTERVAL).await;
            let known = health.known.borrow().clone();
            let reading = known.reading.as_ref().unwrap();
            let age = reading.began.elapsed();
            assert!(!known.is_late() && age < PROBE_INTERVAL / 2, "{age:?}");
            let (_, waited) = told(&health).await;
            assert!(waited < STATUS_WAIT + 5 * MS, "{waited:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_status_that_nobody_asks_for_is_not_read() {
        let (health, readings) = refreshing(MS);
        tokio::time::sleep(ASKED_WITHIN).await;
        assert_eq!(readings.load(Ordering::Relaxed), 1, "at the start");
        told(&health).await;
        tokio::time::sleep(ASKED_WITHIN + STATUS_INTERVAL).await;
        let read = readings.load(Ordering::Relaxed);
        let intervals = ASKED_WITHIN.as_secs() / STATUS_INTERVAL.as_secs();
        assert!(read > 2 && read <= 2 + i64::try_from(intervals).unwrap(), "{read}");
        tokio::time::sleep(ASKED_WITHIN * 10).await;
        assert_eq!(readings.load(Ordering::Relaxed), read);
    }
}
