use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::try_join;
use pillarbox::Position;
use pillarbox::store::InstanceId;
use tokio::sync::{Mutex, mpsc, watch};
use tokio_postgres::Notification;

use super::Shared;
use super::chime::Mode;
use crate::connection::{BELL, KEEPER, PgConfig, Session};
use crate::doorbell::announce;
use crate::error::Db;

/// A ring is passed on at most this often.
const PASS_INTERVAL: Duration = Duration::from_millis(10);

/// How soon a guest that was told of a change looks again whether there is a keeper, and how seldom in the end: who tells may be ahead of the
/// server, which frees the locks of a session when that has ended.
const GUEST_RETRY: (Duration, Duration) = (Duration::from_millis(10), Duration::from_secs(5));

/// How often an awake keeper looks by itself whether events move, for the others: it keeps the writers from ringing, and its own polls do not
/// see everything. And how often where there are none.
const PROBE_INTERVAL: Duration = Duration::from_millis(50);
const PROBE_ALONE_INTERVAL: Duration = Duration::from_secs(1);

/// The server ends the session of a keeper that asks nothing for so long: while it may have something to pass on, since one that stood
/// still would keep it from all others; and while it sleeps and has nothing, since every commit would ring for no relay.
const BUSY_IDLE_MAX: &str = "10s";
const ASLEEP_IDLE_MAX: &str = "10min";

/// A keeper that has been awake for so long and has not polled gives way to others, and does not come back for as long.
const PASSIVE_AFTER: Duration = Duration::from_secs(1);

/// How long one that does not poll leaves it to others to be the keeper.
const PASSIVE_PATIENCE: Duration = Duration::from_millis(100);

/// How often the writers that may have seen no relay asleep are looked for, at first and at the longest.
const LEFTOVERS_PAUSE: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(100));

/// How often it is looked whether writers wait for each other to ring.
const CONTENTION_INTERVAL: Duration = Duration::from_millis(100);

/// How often an awake keeper thinks about going to sleep.
const AWAKE_LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// How soon after a failure that was not the connection's it goes on.
const RETRY_AFTER: Duration = Duration::from_millis(100);

/// What an instance is to the doorbell.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// Another is the keeper, or there is none: it is woken by rings and by what the keeper passes on.
    Guest,
    /// The keeper, with the bell's lock: writers ring.
    Asleep,
    /// The keeper, without it: writers do not ring, and it looks by itself.
    Awake,
}

/// Looks after the doorbell of one instance. The keeper among all decides whether writers ring, passes on what it finds while they do not,
/// and watches those that may have seen no relay asleep. Both locks are the control session's: they end with it.
pub(super) struct Keeper {
    config: Arc<PgConfig>,
    id: InstanceId,
    control: Arc<Mutex<Session>>,
    shared: Arc<Shared>,
    neighbours: watch::Sender<Option<InstanceId>>,
    part: Part,
    awake_since: Instant,
    /// The bell's lock is this session's, or may be.
    has_bell: bool,
    /// The session may ask nothing for as long as that of a keeper that sleeps.
    may_idle: bool,
    try_at: Instant,
    retry: Duration,
    leftovers: Option<Leftovers>,
    passed_at: Option<Instant>,
    contention_at: Instant,
    probed_at: Instant,
    /// The horizon, and who was writing.
    probed: Option<(Position, HashSet<String>)>,
}

/// Writers that may have seen no relay asleep and have not ended.
struct Leftovers {
    writers: HashSet<String>,
    look_at: Instant,
    pause: Duration,
}

impl Keeper {
    pub(super) fn new(
        config: Arc<PgConfig>,
        id: InstanceId,
        control: Arc<Mutex<Session>>,
        shared: Arc<Shared>,
        neighbours: watch::Sender<Option<InstanceId>>,
    ) -> Self {
        let now = Instant::now();
        Keeper {
            config,
            id,
            control,
            shared,
            neighbours,
            part: Part::Guest,
            awake_since: now,
            has_bell: false,
            may_idle: false,
            try_at: now,
            retry: GUEST_RETRY.0,
            leftovers: None,
            passed_at: None,
            contention_at: now,
            probed_at: now,
            probed: None,
        }
    }

    pub(super) async fn run(
        mut self,
        mut notifications: mpsc::UnboundedReceiver<Notification>,
        mut ended: mpsc::UnboundedReceiver<InstanceId>,
    ) {
        // Who leaves frees all locks of the session, and tells the others then.
        while !self.shared.state().closing {
            let deadline = match self.step().await {
                Ok(deadline) => deadline,
                Err(error) => {
                    tracing::debug!(?error, "the doorbell could not be looked after");
                    Some(Instant::now() + RETRY_AFTER)
                }
            };
            let timer = async {
                match deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                notification = notifications.recv() => {
                    // The control connection has ended, and with it the instance.
                    let Some(notification) = notification else { return };
                    self.heard(&notification);
                    while let Ok(notification) = notifications.try_recv() {
                        self.heard(&notification);
                    }
                    self.shared.woken.notify_waiters();
                }
                Some(_) = ended.recv() => {
                    self.try_soon(Duration::ZERO);
                    self.shared.ring_for_the_fleet();
                }
                () = self.shared.stirred.notified() => {}
                () = timer => {}
            }
        }
        if self.part == Part::Awake {
            // Leaving may take a while, and meanwhile nobody would tell the others.
            let _ = self.give_way(Instant::now()).await;
        }
    }

    /// Does what is due; until when there is nothing more to do.
    async fn step(&mut self) -> Db<Option<Instant>> {
        let now = Instant::now();
        let (on, wanted, passive, rang, neighbour) = {
            let mut state = self.shared.state();
            let wanted = state.governor.wants_awake(now, self.part == Part::Awake);
            let polled = state.polled_at.is_some_and(|at| at >= self.awake_since);
            let passive = state.others && !polled && now >= self.awake_since + PASSIVE_AFTER;
            (state.on, wanted, passive, std::mem::take(&mut state.rang), state.neighbour)
        };
        self.neighbours.send_if_modified(|before| std::mem::replace(before, neighbour) != neighbour);
        if rang && !wanted && self.part == Part::Asleep && now >= self.contention_at {
            self.look_for_contention(now).await?;
        }
        match self.part {
            Part::Guest if on && now >= self.try_at => self.become_keeper(now).await?,
            Part::Guest => {}
            Part::Asleep | Part::Awake if !on => self.give_way(now).await?,
            Part::Asleep if wanted => self.wake(now).await?,
            Part::Asleep => {}
            Part::Awake if !wanted => self.fall_asleep().await?,
            Part::Awake if passive => self.give_way(now).await?,
            // It could not be let go of when it woke.
            Part::Awake if self.has_bell => self.let_bell_go().await?,
            Part::Awake => {}
        }
        self.set_mode();
        self.look_again(now);
        self.watch_leftovers().await?;
        self.probe(now).await?;
        self.pass_on().await?;
        self.allow_idleness().await?;
        self.set_mode();
        Ok(self.deadline(on))
    }

    /// Rings for a look at the fleet that was asked for.
    fn look_again(&self, now: Instant) {
        let due = self.shared.state().look_again_at.take_if(|at| *at <= now).is_some();
        if due {
            self.shared.ring_for_the_fleet();
        }
    }

    /// If there is none. What came while there was none is passed on.
    async fn become_keeper(&mut self, now: Instant) -> Db<()> {
        if !self.lock(KEEPER).await? {
            self.try_at = now + self.retry;
            self.retry = (self.retry * 2).min(GUEST_RETRY.1);
            return Ok(());
        }
        (self.part, self.awake_since, self.retry) = (Part::Awake, now, GUEST_RETRY.0);
        self.shared.state().pass = true;
        self.shared.ring();
        self.fall_asleep().await
    }

    /// Looks for a keeper again, and more often for a while.
    fn try_soon(&mut self, after: Duration) {
        (self.try_at, self.retry) = (Instant::now() + after, GUEST_RETRY.0);
    }

    /// Another may be the keeper.
    async fn give_way(&mut self, now: Instant) -> Db<()> {
        self.part = Part::Awake;
        self.let_bell_go().await?;
        self.unlock(KEEPER).await?;
        self.limit_idleness("0").await?;
        (self.part, self.try_at, self.leftovers) = (Part::Guest, now + PASSIVE_AFTER, None);
        self.tell_all("free").await
    }

    /// It counts as awake before writers stop to ring: whatever it finds from then on is passed on.
    async fn wake(&mut self, now: Instant) -> Db<()> {
        (self.part, self.awake_since) = (Part::Awake, now);
        self.set_mode();
        self.limit_idleness(BUSY_IDLE_MAX).await?;
        self.let_bell_go().await
    }

    async fn let_bell_go(&mut self) -> Db<()> {
        self.unlock(BELL).await?;
        self.has_bell = false;
        Ok(())
    }

    /// First the bell's lock, so that writers ring from now on; then who is writing, since those may have looked before; then a poll of
    /// all relays, which sees what has ended by then. If a writer looks at this very moment it is tried again.
    async fn fall_asleep(&mut self) -> Db<()> {
        if !self.lock(KEEPER).await? {
            // An answer was lost when it gave way.
            return self.give_way(Instant::now()).await;
        }
        (self.has_bell, self.may_idle) = (true, false);
        if self.lock(BELL).await? {
            self.part = Part::Asleep;
            let mut state = self.shared.state();
            (state.leftovers, state.pass) = (true, true);
            state.fell_asleep();
        }
        Ok(())
    }

    /// A keeper that sleeps may ask nothing for longer, as soon as it has passed on what it knew and watches no writer.
    async fn allow_idleness(&mut self) -> Db<()> {
        let has_nothing = {
            let state = self.shared.state();
            self.leftovers.is_none() && !state.leftovers && !(state.others && state.pass)
        };
        if self.part == Part::Asleep && has_nothing && !self.may_idle {
            self.limit_idleness(ASLEEP_IDLE_MAX).await?;
            self.may_idle = true;
        }
        Ok(())
    }

    async fn limit_idleness(&self, limit: &str) -> Db<()> {
        let control = self.control.lock().await;
        let statement = control.statement(sql!(session, "limit_idleness")).await?;
        control.query_one(&statement, &[&limit]).await?;
        Ok(())
    }

    /// Whether this session has the lock now. If so, it may be idle only as long as a keeper that has something to pass on.
    async fn lock(&self, number: i32) -> Db<bool> {
        let control = self.control.lock().await;
        let statement = control.statement(sql!(doorbell, "try")).await?;
        Ok(control.query_one(&statement, &[&self.config.lock_class(), &number, &BUSY_IDLE_MAX]).await?.try_get(0)?)
    }

    async fn unlock(&self, number: i32) -> Db<()> {
        let control = self.control.lock().await;
        let statement = control.statement(sql!(doorbell, "release")).await?;
        control.query(&statement, &[&self.config.lock_class(), &number]).await?;
        Ok(())
    }

    async fn begin_leftovers(&mut self) -> Db<()> {
        let mut writers = self.writers().await?;
        let now = Instant::now();
        if let Some(before) = self.leftovers.take() {
            writers.extend(before.writers);
        }
        if !writers.is_empty() {
            let pause = LEFTOVERS_PAUSE.0;
            self.leftovers = Some(Leftovers { writers, look_at: now + pause, pause });
        }
        Ok(())
    }

    /// Rings for each writer that ended and did not ring itself.
    async fn watch_leftovers(&mut self) -> Db<()> {
        if self.shared.state().leftovers {
            if !self.shared.is_broken() {
                self.begin_leftovers().await?;
            }
            self.shared.state().leftovers = false;
            self.shared.ring();
        }
        let now = Instant::now();
        if self.leftovers.as_ref().is_none_or(|leftovers| now < leftovers.look_at) {
            return Ok(());
        }
        let writers = self.writers().await?;
        let Some(leftovers) = &mut self.leftovers else { return Ok(()) };
        let before = leftovers.writers.len();
        leftovers.writers.retain(|writer| writers.contains(writer));
        let (left, now) = (leftovers.writers.len(), Instant::now());
        leftovers.pause = (leftovers.pause * 3 / 2).min(LEFTOVERS_PAUSE.1);
        leftovers.look_at = now + leftovers.pause;
        if left < before {
            leftovers.pause = LEFTOVERS_PAUSE.0;
            let mut state = self.shared.state();
            state.heard(now);
            state.pass = true;
            drop(state);
            self.shared.ring();
        }
        if left == 0 {
            self.leftovers = None;
        }
        Ok(())
    }

    async fn writers(&self) -> Db<HashSet<String>> {
        let control = self.control.lock().await;
        let statement = control.statement(sql!(event, "writers")).await?;
        control.query(&statement, &[]).await?.iter().map(|row| Ok(row.try_get(0)?)).collect()
    }

    /// Looks whether events move, for the others: a commit shows by its position, or by its writer's end.
    async fn probe(&mut self, now: Instant) -> Db<()> {
        let (others, polled_at) = {
            let state = self.shared.state();
            (state.others, state.polled_at)
        };
        let interval = if others { PROBE_INTERVAL } else { PROBE_ALONE_INTERVAL };
        if self.part != Part::Awake || now < self.probed_at + interval {
            return Ok(());
        }
        let (horizon, writers) = {
            let control = self.control.lock().await;
            let horizon = control.statement(sql!(event, "horizon")).await?;
            let writers = control.statement(sql!(event, "writers")).await?;
            try_join(control.query_one(&horizon, &[]), control.query(&writers, &[])).await?
        };
        let writers: HashSet<String> = writers.iter().map(|row| row.get("virtualtransaction")).collect();
        let (count, found) = (writers.len(), (horizon.try_get("horizon")?, writers));
        let before = std::mem::replace(&mut self.probed_at, now);
        if self.probed.as_ref() != Some(&found) {
            self.probed = Some(found);
            let mut state = self.shared.state();
            state.pass = true;
            if polled_at.is_none_or(|at| at < before) {
                state.governor.moved(now, count);
            }
        }
        Ok(())
    }

    async fn look_for_contention(&mut self, now: Instant) -> Db<()> {
        self.contention_at = now + CONTENTION_INTERVAL;
        let awaited: bool = {
            let control = self.control.lock().await;
            let statement = control.statement(sql!(doorbell, "contended")).await?;
            control.query_one(&statement, &[]).await?.try_get(0)?
        };
        if awaited {
            self.shared.state().governor.contended(now);
            self.shared.stirred.notify_one();
        }
        Ok(())
    }

    /// What is to be passed on waits until there is another relay.
    async fn pass_on(&mut self) -> Db<()> {
        let now = Instant::now();
        let due = self.passed_at.is_none_or(|at| now >= at + PASS_INTERVAL);
        let (pass, made_ready) = {
            let mut state = self.shared.state();
            let due = due && state.others;
            (due && std::mem::take(&mut state.pass), due && std::mem::take(&mut state.made_ready))
        };
        if pass || made_ready {
            self.passed_at = Some(now);
            let told = self.tell_all(if pass { "pass" } else { "ready" }).await;
            if told.is_err() {
                let mut state = self.shared.state();
                (state.pass, state.made_ready) = (state.pass || pass, state.made_ready || made_ready);
            }
            return told;
        }
        Ok(())
    }

    async fn tell_all(&self, what: &str) -> Db<()> {
        announce(&**self.control.lock().await, &format!("{what} {}", self.id.0)).await
    }

    fn set_mode(&self) {
        let mut state = self.shared.state();
        state.awake = self.part == Part::Awake;
        state.keep_silence_in_mind(Instant::now());
        let mode = match (state.on, state.awake, state.silent) {
            (false, _, _) => Mode::Off,
            (true, true, _) => Mode::Awake,
            (true, false, true) => Mode::Silent,
            (true, false, false) => Mode::Asleep,
        };
        if state.chime.set_mode(mode) {
            tracing::debug!(?mode, part = ?self.part, "the doorbell's mode changed");
            drop(state);
            self.shared.woken.notify_waiters();
        }
    }

    fn deadline(&self, on: bool) -> Option<Instant> {
        let now = Instant::now();
        let state = self.shared.state();
        let passes = state.others && (state.pass || state.made_ready);
        let due = [
            (self.part == Part::Awake).then_some(now + AWAKE_LOOK_INTERVAL),
            (on && self.part == Part::Guest).then_some(self.try_at),
            self.leftovers.as_ref().map(|leftovers| leftovers.look_at),
            self.passed_at.filter(|_| passes).map(|at| at + PASS_INTERVAL),
            state.look_again_at,
            state.silent.then_some(now + super::BELL_SILENT_AFTER),
        ];
        due.into_iter().flatten().min()
    }

    /// Takes a notification in. Without words it is a writer's; else it says who tells what.
    fn heard(&mut self, notification: &Notification) {
        let now = Instant::now();
        let (what, who) = notification.payload().split_once(' ').unwrap_or((notification.payload(), ""));
        if who.parse() == Ok(self.id.0) && what != "ended" {
            return;
        }
        let mut state = self.shared.state();
        match what {
            "" => {
                state.heard(now);
                state.rang = true;
                state.governor.rang(now);
            }
            "pass" => state.heard(now),
            // Says nothing about whether writers ring.
            "ready" => {}
            "free" => {
                // The one who gave way does not poll; whoever does not either leaves it to others for a moment.
                let polls = state.polled_at.is_some_and(|at| now.saturating_duration_since(at) < PASSIVE_AFTER);
                drop(state);
                return self.try_soon(if polls { Duration::ZERO } else { PASSIVE_PATIENCE });
            }
            // Whoever has ended may have been the keeper.
            _ => {
                state.fleet = true;
                state.chime.ring();
                drop(state);
                return self.try_soon(Duration::ZERO);
            }
        }
        state.chime.ring();
    }
}
