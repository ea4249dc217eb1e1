use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, RwLock, Weak};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use pillarbox::Position;
use pillarbox::store::{ClaimRequest, SubscriptionId, Wake};
use rusqlite::Connection;
use tokio::sync::Notify;
use uuid::Uuid;

use crate::error::Db;
use crate::ownership::{LockFolder, Probe};
use crate::worker::Ending;

/// The name of the thread that looks.
pub(crate) const DOORBELL_THREAD: &str = "pillarbox-doorbell";

/// How often a sleeping store looks for commits of other processes, and at its neighbour's lock.
pub const DOORBELL_INTERVAL: Duration = Duration::from_millis(10);

/// How long a ring that was not answered waits before it rings again; it doubles up to the maximum.
const RING_AGAIN_MIN: Duration = Duration::from_millis(10);
const RING_AGAIN_MAX: Duration = Duration::from_secs(1);

/// How long the first look of a wait may take, even if the wait itself is shorter.
const FIRST_LOOK_MAX: Duration = Duration::from_secs(1);

/// How many durable commits of this process are remembered.
const SYNCED_KEPT_MAX: usize = 64;

/// After a publisher in this process began: look without pause, then ever less often.
const SPIN_FOR: Duration = Duration::from_millis(1);
const SPIN_PAUSE: Duration = Duration::from_micros(10);
const FINE_FOR: Duration = Duration::from_millis(5);
const FINE_PAUSE: Duration = Duration::from_micros(50);
const COARSE_FOR: Duration = Duration::from_millis(100);
const COARSE_PAUSE: Duration = Duration::from_millis(1);

/// How a sleeping relay is woken.
///
/// SQLite has no signal across processes, so a thread looks at `pragma data_version` while a wait is under way. A commit
/// rings only if it raised the horizon, the log's revision, or that of the queues (for those who claim): beats, claims and
/// most settlements do nothing of it, so a relay never wakes itself. A ring counts until a poll has seen the horizon, an
/// observation the revision, and claims of each queue that of the queues.
pub(crate) struct Bell {
    state: Mutex<BellState>,
    rang: Notify,
    thread: OnceLock<Thread>,
    waiters: AtomicUsize,
    asked: AtomicU64,
    looked: AtomicU64,
    alert: AtomicBool,
    /// Publishers of this process say when they have committed, as far as is known.
    announced: AtomicBool,
    stop: AtomicBool,
}

#[derive(Default)]
struct BellState {
    horizon: Position,
    horizon_polled: Position,
    revision: i64,
    revision_observed: i64,
    queue_revision: i64,
    /// What the last claim has seen, per queue that this store claims from and has room for.
    queue_revision_claimed: HashMap<SubscriptionId, i64>,
    neighbour: Option<Probe>,
    neighbour_ended: bool,
    rung: Option<Rung>,
    /// Events of this process whose commits are durable when they become visible.
    synced: VecDeque<(Position, Uuid)>,
}

/// What the bell last rang for, and when it rings for the same again.
struct Rung {
    reason: Reason,
    again_at: Instant,
    pause: Duration,
}

/// What there is to ring for.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Reason {
    horizon: Position,
    revision: i64,
    queue_revision: i64,
    neighbour_ended: bool,
}

impl BellState {
    fn unanswered(&self) -> bool {
        self.horizon > self.horizon_polled
            || self.revision > self.revision_observed
            || self.queue_revision_claimed.values().any(|claimed| self.queue_revision > *claimed)
            || self.neighbour_ended
    }

    fn reason(&self) -> Reason {
        let BellState { horizon, revision, neighbour_ended, .. } = *self;
        // To those who do not claim it is always the same.
        let queue_revision = if self.queue_revision_claimed.is_empty() { 0 } else { self.queue_revision };
        Reason { horizon, revision, queue_revision, neighbour_ended }
    }

    /// Whether a waiter is to be woken now.
    fn due(&self, now: Instant) -> bool {
        let rung_for_this = |rung: &Rung| rung.reason == self.reason();
        self.unanswered() && !self.rung.as_ref().is_some_and(|rung| rung_for_this(rung) && now < rung.again_at)
    }

    /// Wakes a waiter; for the same thing again only after a pause, so that no waiter spins on what it cannot answer.
    fn take(&mut self, now: Instant) -> bool {
        if !self.due(now) {
            return false;
        }
        let reason = self.reason();
        let same = |before: Reason| Reason { neighbour_ended: reason.neighbour_ended, ..before } == reason;
        let pause = match &self.rung {
            Some(rung) if rung.again_at <= now && same(rung.reason) => (rung.pause * 2).min(RING_AGAIN_MAX),
            _ => RING_AGAIN_MIN,
        };
        self.rung = Some(Rung { reason, again_at: now + pause, pause });
        true
    }
}

impl Bell {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Bell {
            state: Mutex::default(),
            rang: Notify::new(),
            thread: OnceLock::new(),
            waiters: AtomicUsize::new(0),
            asked: AtomicU64::new(0),
            looked: AtomicU64::new(0),
            alert: AtomicBool::new(false),
            announced: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        })
    }

    /// A poll has seen everything up to here.
    pub(crate) fn polled(&self, horizon: Position) {
        self.state().horizon_polled = horizon;
    }

    /// Whether this event, being visible, was made durable by its own commit, and everything before it in the
    /// write-ahead log with it.
    pub(crate) fn is_synced(&self, position: Position, id: Uuid) -> bool {
        self.state().synced.contains(&(position, id))
    }

    /// A transaction of this process has committed, and everything up to here with it.
    pub(crate) fn committed(&self, horizon: Position) {
        {
            let mut state = self.state();
            if horizon <= state.horizon {
                return;
            }
            state.horizon = horizon;
        }
        self.rang.notify_waiters();
        self.alert.store(false, Ordering::SeqCst);
        self.announced.store(true, Ordering::Relaxed);
    }

    /// An observation has seen this revision and this neighbour.
    pub(crate) fn observed(&self, revision: i64, neighbour: Option<Probe>) {
        let mut state = self.state();
        state.revision_observed = state.revision_observed.max(revision);
        state.neighbour_ended = false;
        // The same neighbour, found free already, is not rung for again: the caller has just been told.
        state.neighbour = neighbour;
    }

    /// This store itself raised the revision by one; no waiter has to be told, unless it missed an earlier change.
    pub(crate) fn raised(&self, revision: i64) {
        let mut state = self.state();
        if state.revision_observed == revision - 1 {
            state.revision_observed = revision;
        }
    }

    /// Claims were asked for and have seen this revision of the queues. A relay without room for more is not rung for.
    pub(crate) fn claimed(&self, requests: &[ClaimRequest], revision: i64) {
        let seen = &mut self.state().queue_revision_claimed;
        for request in requests {
            match request.limit {
                0 => drop(seen.remove(&request.subscription)),
                _ => drop(seen.insert(request.subscription, revision)),
            }
        }
    }

    /// This store itself has left something to be claimed; it knows, unless it missed what others left.
    pub(crate) fn filled(&self, revision: i64) {
        let mut state = self.state();
        state
            .queue_revision_claimed
            .values_mut()
            .filter(|seen| **seen == revision - 1)
            .for_each(|seen| *seen = revision);
    }

    /// A new instance has not claimed anything yet.
    pub(crate) fn forget_claims(&self) {
        self.state().queue_revision_claimed.clear();
    }

    /// See [`pillarbox::store::Store::wait`].
    pub(crate) async fn wait(self: &Arc<Self>, timeout: Duration) -> Wake {
        let _waiting = Waiting::begin(self);
        let look = self.asked.fetch_add(1, Ordering::SeqCst) + 1;
        self.wake_thread();
        let started = Instant::now();
        loop {
            let notified = self.rang.notified();
            tokio::pin!(notified);
            notified.as_mut().enable();
            if self.state().take(Instant::now()) {
                return Wake::Rang;
            }
            let looked = self.looked.load(Ordering::SeqCst) >= look;
            let limit = if looked { timeout } else { timeout.max(FIRST_LOOK_MAX) };
            let Some(left) = limit.checked_sub(started.elapsed()).filter(|left| !left.is_zero()) else {
                return Wake::Timeout;
            };
            // Over or woken: the next turn decides.
            drop(tokio::time::timeout(left, notified).await);
        }
    }

    fn state(&self) -> MutexGuard<'_, BellState> {
        self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn wake_thread(&self) {
        if let Some(thread) = self.thread.get() {
            thread.unpark();
        }
    }
}

/// Counts a waiter for as long as it lives, also when its future is dropped.
struct Waiting<'a>(&'a Bell);

impl<'a> Waiting<'a> {
    fn begin(bell: &'a Bell) -> Self {
        bell.waiters.fetch_add(1, Ordering::SeqCst);
        Waiting(bell)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiters.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The thread behind a [`Bell`]; it ends when this value is dropped.
pub(crate) struct Doorbell {
    bell: Arc<Bell>,
    path: String,
    thread: Ending,
}

impl Doorbell {
    pub(crate) fn spawn(bell: Arc<Bell>, connection: Connection, folder: LockFolder) -> Db<Self> {
        let path = connection.path().unwrap_or_default().to_owned();
        let listener = Listener { bell: bell.clone(), connection, folder, version: None, probed_at: None };
        let thread = Ending::spawn(DOORBELL_THREAD, move || listener.run())?;
        let handle = thread.thread().expect("it was started just now").clone();
        bell.thread.set(handle).expect("a bell has one thread");
        register(&path, &bell);
        Ok(Doorbell { bell, path, thread })
    }

    /// Tells the thread to end.
    pub(crate) fn stop(&self) {
        self.bell.stop.store(true, Ordering::SeqCst);
        self.bell.wake_thread();
    }

    /// Waits for the thread's end after [`Doorbell::stop`].
    pub(crate) fn join(&mut self, deadline: Instant) {
        self.thread.join(deadline);
    }
}

impl Drop for Doorbell {
    fn drop(&mut self) {
        self.stop();
        unregister(&self.path, &self.bell);
    }
}

struct Listener {
    bell: Arc<Bell>,
    connection: Connection,
    folder: LockFolder,
    version: Option<i64>,
    probed_at: Option<Instant>,
}

/// A publisher in this process has begun.
struct Alerted {
    at: Instant,
    /// The horizon at that time: a higher one is the commit that was waited for.
    horizon: Position,
}

impl Listener {
    fn run(mut self) {
        let mut alerted: Option<Alerted> = None;
        let mut answered = 0;
        while !self.bell.stop.load(Ordering::SeqCst) {
            if self.bell.waiters.load(Ordering::SeqCst) == 0 {
                thread::park();
                continue;
            }
            if self.bell.alert.swap(false, Ordering::SeqCst) {
                alerted = Some(Alerted { at: Instant::now(), horizon: self.bell.state().horizon });
            }
            let asked = self.bell.asked.load(Ordering::SeqCst);
            match self.look() {
                // What was expected has come; the publisher's next event expects anew.
                Ok(true) => {
                    if alerted.take().is_some() {
                        self.bell.announced.store(false, Ordering::Relaxed);
                    }
                }
                Ok(false) => alerted = alerted.filter(|alerted| self.bell.state().horizon <= alerted.horizon),
                // The relay's own polls run into the same failure and report it.
                Err(error) => tracing::debug!(error = ?error, "the doorbell could not look at the database"),
            }
            self.bell.looked.store(asked, Ordering::SeqCst);
            if asked != answered || self.bell.state().due(Instant::now()) {
                answered = asked;
                self.bell.rang.notify_waiters();
            }
            pause(alerted.as_ref().map(|alerted| alerted.at.elapsed()), self.bell.announced.load(Ordering::Relaxed));
        }
    }

    /// Looks for commits and at the neighbour's lock; whether there are new events.
    fn look(&mut self) -> Db<bool> {
        let mut statement = self.connection.prepare_cached(sql!(connection, "data_version"))?;
        // The version first: a commit after it is found by the next look.
        let version: i64 = statement.query_row([], |row| row.get(0))?;
        let mut new_events = false;
        if self.version != Some(version) {
            let mut statement = self.connection.prepare_cached(sql!(meta, "signature"))?;
            let (horizon, revision, queue_revision) = statement
                .query_row([], |row| Ok((row.get("horizon")?, row.get("revision")?, row.get("queue_revision")?)))?;
            let mut state = self.bell.state();
            new_events = horizon > state.horizon;
            state.horizon = horizon;
            state.revision = revision;
            state.queue_revision = queue_revision;
            self.version = Some(version);
        }
        let now = Instant::now();
        if self.probed_at.is_none_or(|at| now - at >= DOORBELL_INTERVAL) {
            self.probed_at = Some(now);
            let mut state = self.bell.state();
            if let Some(neighbour) = &state.neighbour
                && self.folder.is_free(neighbour)
            {
                state.neighbour = None;
                state.neighbour_ended = true;
            }
        }
        Ok(new_events)
    }
}

/// Waits until the next look; `alerted` is how long ago a publisher in this process began, `announced` whether such a one
/// will say when it has committed.
fn pause(alerted: Option<Duration>, announced: bool) {
    match alerted {
        Some(since) if announced && since < COARSE_FOR => thread::park_timeout(COARSE_PAUSE),
        // Not without any pause: looking takes locks that the commit takes too.
        Some(since) if since < SPIN_FOR => {
            let until = Instant::now() + SPIN_PAUSE;
            while Instant::now() < until {
                std::hint::spin_loop();
            }
            thread::yield_now();
        }
        // Not a park: the publisher that we are waiting for would end it with each of its events.
        Some(since) if since < FINE_FOR => thread::sleep(FINE_PAUSE),
        Some(since) if since < COARSE_FOR => thread::park_timeout(COARSE_PAUSE),
        _ => thread::park_timeout(DOORBELL_INTERVAL),
    }
}

/// The bells of this process, by the database's path as SQLite reports it.
static BELLS: RwLock<Option<HashMap<String, Vec<Weak<Bell>>>>> = RwLock::new(None);

/// How many there are, so that a process without a relay pays nothing for publishing.
static BELL_COUNT: AtomicUsize = AtomicUsize::new(0);

fn register(path: &str, bell: &Arc<Bell>) {
    let mut bells = BELLS.write().unwrap_or_else(|poisoned| poisoned.into_inner());
    bells.get_or_insert_default().entry(path.to_owned()).or_default().push(Arc::downgrade(bell));
    BELL_COUNT.fetch_add(1, Ordering::SeqCst);
}

fn unregister(path: &str, bell: &Arc<Bell>) {
    let mut bells = BELLS.write().unwrap_or_else(|poisoned| poisoned.into_inner());
    let bells = bells.get_or_insert_default();
    if let Some(here) = bells.get_mut(path) {
        here.retain(|other| !std::ptr::eq(other.as_ptr(), Arc::as_ptr(bell)));
        if here.is_empty() {
            bells.remove(path);
        }
    }
    BELL_COUNT.fetch_sub(1, Ordering::SeqCst);
}

/// Says that a transaction of this process is about to commit events, so that the doorbell looks more closely.
/// `last` is the newest of them, if its id is no other event's.
pub(crate) fn expect_commit(connection: &Connection, last: Option<(Position, Uuid)>) {
    for bell in bells_of(connection) {
        if bell.waiters.load(Ordering::Relaxed) > 0 && last.is_some() && commits_durably(connection) {
            let mut state = bell.state();
            if state.synced.len() == SYNCED_KEPT_MAX {
                state.synced.pop_front();
            }
            state.synced.extend(last);
        }
        if !bell.alert.swap(true, Ordering::SeqCst) {
            bell.wake_thread();
        }
    }
}

/// The bells of this process that commits on this connection are for.
pub(crate) fn bells_of(connection: &Connection) -> Vec<Arc<Bell>> {
    if BELL_COUNT.load(Ordering::Relaxed) == 0 {
        return Vec::new();
    }
    let Some(path) = connection.path() else { return Vec::new() };
    let bells = BELLS.read().unwrap_or_else(|poisoned| poisoned.into_inner());
    let here = bells.as_ref().and_then(|bells| bells.get(path));
    here.map_or_else(Vec::new, |here| here.iter().filter_map(Weak::upgrade).collect())
}

/// Whether this connection syncs the write-ahead log before a commit becomes visible. SQLite refuses to change that
/// inside a transaction, so it holds for the commit too. Not a cached statement: the answer is part of its program.
fn commits_durably(connection: &Connection) -> bool {
    const FULL: i64 = 2;
    connection.pragma_query_value(None, "synchronous", |row| row.get::<_, i64>(0)).is_ok_and(|level| level >= FULL)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_commit_of_this_process_rings_without_the_thread() {
        // A bell without a thread: nobody looks.
        let bell = Bell::new();
        let (wake, ()) = tokio::join!(bell.wait(Duration::from_secs(60)), async { bell.committed(3) });
        assert_eq!(wake, Wake::Rang);
        bell.polled(3);
        bell.committed(3);
        assert!(!bell.state().unanswered(), "that was polled already");
    }

    #[test]
    fn rings_at_once_for_something_new_and_ever_less_often_for_the_same() {
        let mut state = BellState { horizon: 1, ..BellState::default() };
        let start = Instant::now();
        assert!(state.take(start));
        assert!(!state.take(start + RING_AGAIN_MIN / 2));
        assert!(state.take(start + RING_AGAIN_MIN));
        assert!(!state.take(start + RING_AGAIN_MIN * 2), "the second pause is longer");
        state.horizon = 2;
        assert!(state.take(start + RING_AGAIN_MIN * 2), "a new commit rings at once");
        state.horizon_polled = 2;
        assert!(!state.take(start + RING_AGAIN_MAX * 9), "a poll has seen it");
    }
}
