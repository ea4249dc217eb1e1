mod chime;
mod governor;
mod keeper;
mod waiter;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pillarbox::Position;
use pillarbox::store::{InstanceId, Wake, Writer};
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;
use tokio_postgres::{GenericClient, Notification};

use self::chime::Chime;
use self::governor::Governor;
use self::keeper::Keeper;
use self::waiter::Waiter;
use crate::connection::{PgConfig, Session};
use crate::error::{Db, DbError};

/// Events have come without a ring for this long: then the bell is not relied on.
const BELL_SILENT_AFTER: Duration = Duration::from_secs(5);

/// Events that come without a ring count together if there is no more time between them: a relay asleep looks every few seconds.
const BELL_SILENT_GAP: Duration = Duration::from_secs(15);

/// How long an end in order may take.
const STOP_MAX: Duration = Duration::from_secs(2);

/// How often one that only follows the log looks, whether or not it was rung for.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(100);

/// How a relay is woken.
///
/// Every ring takes a lock of the whole server through a commit, so writers ring only when a relay sleeps: a relay that does holds the
/// bell's advisory lock alone, and a default of the log, which tries that lock shared and lets go at once, rings if it does not get it. One
/// that is awake polls by itself. To go to sleep it takes the lock, then looks who is writing: those may have looked before and will not
/// ring, so it watches them end. The [`Governor`] decides which of the two costs less, the [`Chime`] when a wait ends.
///
/// One of several relays is the keeper, by a second lock; the others hear the rings too, and it passes on to them what it finds while it is
/// awake. A relay that ends frees both locks; one that stands still while it sleeps lets writers ring, and never keeps them from it.
/// `tests/it/bell_model.rs` walks through all interleavings. Without it (`migrate --doorbell off`) a relay polls every 50 ms
/// while events move, and at least twice a second.
pub(crate) struct Doorbell {
    shared: Arc<Shared>,
    tasks: Mutex<JoinSet<()>>,
}

impl Doorbell {
    pub(crate) fn start(
        config: Arc<PgConfig>,
        id: InstanceId,
        control: Arc<tokio::sync::Mutex<Session>>,
        notifications: mpsc::UnboundedReceiver<Notification>,
        on: bool,
    ) -> Self {
        let shared = Arc::new(Shared::new(on));
        let (asked, neighbours) = watch::channel(None);
        let (told, ended) = mpsc::unbounded_channel();
        let waiter = Waiter { config: config.clone(), id, neighbours, ended: told };
        let keeper = Keeper::new(config, id, control, shared.clone(), asked);
        let mut tasks = JoinSet::new();
        tasks.spawn(waiter.run());
        tasks.spawn(keeper.run(notifications, ended));
        Doorbell { shared, tasks: Mutex::new(tasks) }
    }

    /// See [`pillarbox::store::Store::wait`].
    pub(crate) async fn wait(&self, timeout: Duration) -> Wake {
        let deadline = Instant::now() + timeout;
        loop {
            let woken = self.shared.woken.notified();
            tokio::pin!(woken);
            woken.as_mut().enable();
            let now = Instant::now();
            let due = {
                let mut state = self.shared.state();
                let fleet = std::mem::take(&mut state.fleet);
                if state.chime.take(now) || fleet {
                    return if fleet { Wake::Rang } else { Wake::Published };
                }
                state.chime.due(now)
            };
            if now >= deadline {
                return Wake::Timeout;
            }
            let until = due.map_or(deadline, |due| due.min(deadline));
            tokio::select! {
                () = woken => {}
                () = pause(until.saturating_duration_since(now)) => {}
            }
        }
    }

    pub(crate) fn poll_begins(&self) {
        self.shared.state().chime.poll_begins();
    }

    pub(crate) fn polled(&self, horizon: Position, writers: Option<&[Writer]>, events: usize) {
        let now = Instant::now();
        let mut state = self.shared.state();
        let moved = state.note(now, horizon, writers, events);
        state.polled_at = Some(now);
        state.chime.polled(now, moved, events);
        let wanted = state.on && state.governor.wants_awake(now, state.awake);
        let silent = state.silent;
        state.keep_silence_in_mind(now);
        if (state.pass && state.others) || wanted != state.awake || silent != state.silent {
            self.shared.stirred.notify_one();
        }
    }

    /// What a look at the fleet showed: whose end is to be told, whether there are others, whether writers ring at all, and how
    /// long a commit took.
    pub(crate) fn observed(&self, neighbour: Option<InstanceId>, others: bool, on: bool, commit: Option<Duration>) {
        let mut state = self.shared.state();
        let stir = state.neighbour != neighbour || state.on != on;
        state.neighbour = neighbour;
        state.others = others;
        state.on = on;
        commit.into_iter().for_each(|took| state.governor.committed(took));
        if stir {
            self.shared.stirred.notify_one();
        }
    }

    /// Rings after this pause, so that the fleet is looked at again.
    pub(crate) fn look_again(&self, after: Option<Duration>) {
        self.shared.state().look_again_at = after.map(|after| Instant::now() + after);
        if after.is_some() {
            self.shared.stirred.notify_one();
        }
    }

    /// There are rows of queues that others can claim: they are told.
    pub(crate) fn made_ready(&self) {
        let mut state = self.shared.state();
        state.made_ready |= state.others;
        if state.made_ready {
            self.shared.stirred.notify_one();
        }
    }

    /// Lets go of everything.
    pub(crate) async fn stop(&self) {
        self.shared.state().closing = true;
        self.shared.stirred.notify_one();
        let mut tasks = std::mem::take(&mut *self.tasks.lock().unwrap_or_else(PoisonError::into_inner));
        // Whatever has not ended then is ended with the value.
        let _ = tokio::time::timeout(STOP_MAX, async { while tasks.join_next().await.is_some() {} }).await;
    }

    /// Breaks it, or lets it fall asleep at another pace.
    #[cfg(feature = "mutants")]
    pub(crate) fn experiment(&self, mutant: Option<crate::Mutant>, doze_after: Option<Duration>) {
        let mut state = self.shared.state();
        state.broken = mutant == Some(crate::Mutant::SleepWithoutWriters);
        doze_after.into_iter().for_each(|after| state.governor.doze_after(after));
    }

    /// How often it has fallen asleep.
    #[cfg(feature = "mutants")]
    pub(crate) fn sleeps(&self) -> usize {
        self.shared.state().sleeps
    }
}

/// What the parts of a doorbell know together.
struct Shared {
    state: Mutex<State>,
    /// Ends waits.
    woken: Notify,
    /// Lets the keeper look at the state.
    stirred: Notify,
}

struct State {
    chime: Chime,
    governor: Governor,
    /// Writers ring.
    on: bool,
    /// This relay is the keeper, and keeps writers from ringing.
    awake: bool,
    /// Rings should come and do not.
    silent: bool,
    /// There are other instances.
    others: bool,
    /// Something is to be passed on to them.
    pass: bool,
    /// They are to be told that there are rows of queues to be claimed.
    made_ready: bool,
    /// Writers are to be watched that may have seen no relay asleep.
    leftovers: bool,
    /// The fleet may have changed since a wait last ended.
    fleet: bool,
    /// The instance leaves.
    closing: bool,
    /// A writer rang since the keeper last looked.
    rang: bool,
    neighbour: Option<InstanceId>,
    look_again_at: Option<Instant>,
    heard_at: Instant,
    /// The first and the last time at which events came without the ring that should have come.
    unheard: Option<(Instant, Instant)>,
    /// The warning that the bell is silent was logged.
    told_silent: bool,
    polled_at: Option<Instant>,
    horizon: Option<Position>,
    writers: Vec<Writer>,
    #[cfg(feature = "mutants")]
    broken: bool,
    #[cfg(feature = "mutants")]
    sleeps: usize,
}

impl Shared {
    fn new(on: bool) -> Self {
        let now = Instant::now();
        let state = State {
            chime: Chime::new(now),
            governor: Governor::new(now),
            on,
            awake: false,
            silent: false,
            others: false,
            pass: false,
            made_ready: false,
            leftovers: false,
            fleet: true,
            closing: false,
            rang: false,
            neighbour: None,
            look_again_at: None,
            heard_at: now,
            unheard: None,
            told_silent: false,
            polled_at: None,
            horizon: None,
            writers: Vec::new(),
            #[cfg(feature = "mutants")]
            broken: false,
            #[cfg(feature = "mutants")]
            sleeps: 0,
        };
        Shared { state: Mutex::new(state), woken: Notify::new(), stirred: Notify::new() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Something may have been committed.
    fn ring(&self) {
        self.state().chime.ring();
        self.woken.notify_waiters();
    }

    /// An instance may have ended, or lanes may have changed hands.
    fn ring_for_the_fleet(&self) {
        self.state().fleet = true;
        self.ring();
    }

    fn is_broken(&self) -> bool {
        #[cfg(feature = "mutants")]
        return self.state().broken;
        #[cfg(not(feature = "mutants"))]
        false
    }
}

impl State {
    /// Takes in what was seen of the log; whether anything has been written since.
    fn note(&mut self, now: Instant, horizon: Position, writers: Option<&[Writer]>, events: usize) -> bool {
        let rose = self.horizon.replace(horizon).is_some_and(|before| before != horizon);
        let mut writers_now = writers.map_or_else(Vec::new, <[Writer]>::to_vec);
        writers_now.sort_unstable();
        let changed = self.writers != writers_now;
        self.writers = writers_now;
        // A commit shows by its position or by its writer's end; where nobody looked for writers, by its events.
        let moved = rose || if writers.is_some() { changed } else { events > 0 };
        // Rolled back transactions ring nobody, nor does a backlog: only what was written and committed since the last poll counts.
        if rose && events > 0 {
            self.expect_a_ring(now);
        }
        if moved {
            // At once; what polls do not see is found by the keeper.
            self.pass |= self.awake;
            self.governor.moved(now, writers.map_or(0, <[Writer]>::len));
        }
        moved
    }

    /// Events have come with a poll: a writer has rung since the poll before, or will in a moment, unless this relay is awake and keeps
    /// them from it.
    fn expect_a_ring(&mut self, now: Instant) {
        let rung = self.polled_at.is_none_or(|before| self.heard_at > before);
        self.unheard = match self.unheard {
            _ if rung || self.awake => None,
            Some((first, last)) if now.saturating_duration_since(last) <= BELL_SILENT_GAP => Some((first, now)),
            _ => Some((now, now)),
        };
    }

    /// This relay has fallen asleep.
    fn fell_asleep(&mut self) {
        #[cfg(feature = "mutants")]
        {
            self.sleeps += 1;
        }
    }

    /// A ring came.
    fn heard(&mut self, now: Instant) {
        self.heard_at = now;
        self.unheard = None;
        if std::mem::take(&mut self.told_silent) {
            tracing::info!("the doorbell rings again");
        }
    }

    /// The bell is silent while events come without a ring.
    fn keep_silence_in_mind(&mut self, now: Instant) {
        if self.awake {
            self.unheard = None;
        }
        let for_long = |(first, last): (Instant, Instant)| last.saturating_duration_since(first) >= BELL_SILENT_AFTER;
        let still = |last: Instant| now.saturating_duration_since(last) < BELL_SILENT_AFTER;
        self.silent = self.unheard.is_some_and(|unheard| for_long(unheard) && still(unheard.1));
        if self.silent && self.on && !std::mem::replace(&mut self.told_silent, true) {
            tracing::warn!(
                "the doorbell is silent though events are committed: the default of event.created_at, which rings, may have been \
                 changed, or this relay's connection may lead through a pooler that loses notifications; polling every 100 ms \
                 while events come (`pillarbox doctor` looks at the default)"
            );
        }
    }
}

/// The runtime's own timers count whole milliseconds: for less than this they are too coarse.
const TIMER_MIN: Duration = Duration::from_millis(2);

/// Sleeps, also for less than the runtime's timers can tell.
async fn pause(time: Duration) {
    if time >= TIMER_MIN {
        return tokio::time::sleep(time).await;
    }
    // It cannot fail but by the end of the runtime.
    let _ = tokio::task::spawn_blocking(move || std::thread::sleep(time)).await;
}

/// Tells every relay of this log, when the transaction commits; `what` is `fleet` if lanes, instances or subscriptions changed,
/// with the number of the instance that did it, if one did.
pub(crate) async fn announce(client: &impl GenericClient, what: &str) -> Db<()> {
    client.execute(sql!(doorbell, "announce"), &[&what]).await?;
    Ok(())
}

/// For one that only follows the log and never joins. Others may keep the writers from ringing, so it looks by itself as well.
pub(crate) struct Listener {
    session: Session,
    notifications: mpsc::UnboundedReceiver<Notification>,
}

impl Listener {
    pub(crate) async fn connect(config: &Arc<PgConfig>) -> Db<Self> {
        let (sender, notifications) = mpsc::unbounded_channel();
        let session = Session::connect(config, "pillarbox listener", Some(sender)).await?;
        session.batch_execute(&sql!(doorbell, "listen").replace("@schema@", &config.schema)).await?;
        Ok(Listener { session, notifications })
    }

    /// See [`pillarbox::store::Store::wait`].
    pub(crate) async fn wait(&mut self, timeout: Duration) -> Db<Wake> {
        match tokio::time::timeout(timeout.min(FOLLOW_INTERVAL), self.notifications.recv()).await {
            Ok(None) => Err(lost(&self.session)),
            Ok(Some(_)) => {
                while self.notifications.try_recv().is_ok() {}
                Ok(Wake::Rang)
            }
            Err(_) if timeout > FOLLOW_INTERVAL => Ok(Wake::Rang),
            Err(_) => Ok(Wake::Timeout),
        }
    }
}

fn lost(session: &Session) -> DbError {
    debug_assert!(*session.closed().borrow() || session.is_closed(), "its notifications have ended");
    DbError::own(pillarbox::ErrorKind::Unavailable, "the connection that listens to PostgreSQL was lost")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A relay that polled at this second for the first time and saw position 1.
    fn polled_at(start: Instant) -> State {
        let shared = Shared::new(true);
        let mut state = shared.state.into_inner().unwrap();
        state.heard_at = start;
        poll(&mut state, start, 1);
        state
    }

    /// A poll that shows events up to this position; whether the bell counts as silent afterwards.
    fn poll(state: &mut State, at: Instant, horizon: Position) -> bool {
        state.note(at, horizon, None, 1);
        state.polled_at = Some(at);
        state.keep_silence_in_mind(at);
        state.silent
    }

    #[test]
    fn an_awake_relay_that_falls_asleep_has_missed_no_ring() {
        let start = Instant::now();
        let mut state = polled_at(start);
        state.awake = true;
        (1..=10).for_each(|second| _ = poll(&mut state, start + Duration::from_secs(second), second as Position + 1));
        state.awake = false;
        state.keep_silence_in_mind(start + Duration::from_secs(10));
        assert!(!state.silent && !state.told_silent);
    }

    #[test]
    fn a_ring_that_comes_before_or_after_its_poll_is_heard() {
        let start = Instant::now();
        let mut state = polled_at(start);
        for round in 1..10 {
            let at = start + Duration::from_secs(60 * round);
            if round % 2 == 0 {
                state.heard(at);
            }
            assert!(!poll(&mut state, at + Duration::from_millis(3), round as Position * 10), "round {round}");
            if round % 2 == 1 {
                state.heard(at + Duration::from_millis(9));
            }
        }
        assert!(!state.told_silent);
    }

    #[test]
    fn neither_a_backlog_nor_what_was_rolled_back_is_a_missing_ring() {
        let start = Instant::now();
        let mut state = polled_at(start);
        for second in 1..60 {
            let at = start + Duration::from_secs(second);
            state.note(at, 100 + second as Position, None, 0);
            state.polled_at = Some(at);
            assert!(!poll(&mut state, at, 100 + second as Position), "second {second}");
        }
    }

    #[test]
    fn a_bell_that_nobody_rings_is_silent_until_somebody_does() {
        let start = Instant::now();
        let mut state = polled_at(start);
        let second = |second| start + Duration::from_secs(second);
        let silent = [5, 10, 15].map(|at| poll(&mut state, second(at), at as Position));
        assert_eq!(silent, [false, true, true]);
        state.keep_silence_in_mind(second(30));
        assert!(!state.silent && state.told_silent, "nothing comes: it need not be looked at so often");
        assert!(!poll(&mut state, second(60), 60), "that was long ago");
        assert!(poll(&mut state, second(66), 66));
        state.heard(second(67));
        state.keep_silence_in_mind(second(67));
        assert!(!state.silent && !state.told_silent);
    }
}
