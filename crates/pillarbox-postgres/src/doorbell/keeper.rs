use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pillarbox::InstanceId;
use tokio::sync::{Mutex, mpsc, watch};
use tokio_postgres::Notification;

use super::Shared;
use super::chime::Mode;
use super::waiter::{News, Orders};
use crate::connection::{BELL, PgConfig, Session};
use crate::doorbell::announce;
use crate::error::Db;
use crate::reader::writer_of;

/// A ring is passed on at most this often.
const PASS_INTERVAL: Duration = Duration::from_millis(10);

/// How often a relay that found the bell with another tries again.
const GUEST_RETRY: Duration = Duration::from_millis(500);

/// A relay that has not polled for this long looks itself whether events move while it keeps the writers from ringing.
const PROBE_INTERVAL: Duration = Duration::from_millis(50);

/// A relay that has not polled for so long leaves the bell to others for a while.
const PASSIVE_AFTER: Duration = Duration::from_secs(1);
const PASSIVE_PATIENCE: Duration = Duration::from_millis(500);

/// How often the writers that saw the bell held are looked for, at first and at the longest.
const LEFTOVERS_PAUSE: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(100));

/// How often it is looked whether writers wait for each other to ring.
const CONTENTION_INTERVAL: Duration = Duration::from_millis(100);

/// How often an awake relay thinks about going to sleep.
const AWAKE_LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// How long a withdrawal from the queue may take.
const WITHDRAW_MAX: Duration = Duration::from_secs(5);

/// How soon after a failure that was not the connection's it goes on.
const RETRY_AFTER: Duration = Duration::from_millis(100);

/// Who has the doorbell's lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bell {
    /// Not this relay: writers ring, or another relay is awake.
    Free,
    /// The control session.
    Held,
    /// The waiter's session queues for it, which silences writers too.
    Queued,
    /// The waiter's session.
    Granted,
}

/// Keeps the doorbell of one instance: takes its lock when ringing would cost the writers too much, lets go of it when nothing
/// comes, passes rings on, and watches writers that saw it held and so will not ring.
pub(super) struct Keeper {
    config: Arc<PgConfig>,
    id: InstanceId,
    control: Arc<Mutex<Session>>,
    shared: Arc<Shared>,
    orders: watch::Sender<Orders>,
    bell: Bell,
    try_at: Instant,
    wanted_since: Option<Instant>,
    leftovers: Option<Leftovers>,
    passed_at: Option<Instant>,
    contention_at: Instant,
    probed_at: Instant,
}

/// Writers that saw the bell held and have not ended.
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
        orders: watch::Sender<Orders>,
    ) -> Self {
        let now = Instant::now();
        Keeper {
            config,
            id,
            control,
            shared,
            orders,
            bell: Bell::Free,
            try_at: now,
            wanted_since: None,
            leftovers: None,
            passed_at: None,
            contention_at: now,
            probed_at: now,
        }
    }

    pub(super) async fn run(
        mut self,
        mut notifications: mpsc::UnboundedReceiver<Notification>,
        mut news: mpsc::UnboundedReceiver<News>,
    ) {
        loop {
            if self.shared.state().closing {
                // Others are told by who asked for this; failing that, the end of the sessions frees the bell.
                let _ = self.let_go(&mut news).await;
                return;
            }
            let deadline = match self.step(&mut news).await {
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
                Some(news) = news.recv() => self.told(news),
                () = self.shared.stirred.notified() => {}
                () = timer => {}
            }
        }
    }

    /// Does what is due; until when there is nothing more to do.
    async fn step(&mut self, news: &mut mpsc::UnboundedReceiver<News>) -> Db<Option<Instant>> {
        let now = Instant::now();
        let awake = self.bell != Bell::Free;
        let (wanted, neighbour, passive, contention) = {
            let mut state = self.shared.state();
            let passive = state.polled_at.is_none_or(|at| now.saturating_duration_since(at) >= PASSIVE_AFTER);
            let given_up = std::mem::take(&mut state.asked_for) && passive;
            let wanted = state.on && state.governor.wants_awake(now, awake) && !given_up;
            (wanted, state.neighbour, passive, std::mem::take(&mut state.rang))
        };
        self.orders.send_if_modified(|orders| std::mem::replace(&mut orders.neighbour, neighbour) != neighbour);
        self.wanted_since = wanted.then(|| self.wanted_since.unwrap_or(now));
        if !awake && contention && !wanted && now >= self.contention_at {
            self.look_for_contention(now).await?;
        }
        let patient = passive && self.wanted_since.is_some_and(|since| now < since + PASSIVE_PATIENCE);
        if wanted && !awake && !patient && now >= self.try_at {
            self.take_bell(now, passive).await?;
        }
        if !wanted && awake {
            self.let_go(news).await?;
        }
        self.look_again(now);
        self.watch_leftovers().await?;
        self.probe(now).await?;
        self.pass_on().await?;
        self.set_mode();
        Ok(self.deadline(wanted))
    }

    /// Rings for a look at the fleet that was asked for.
    fn look_again(&self, now: Instant) {
        let due = self.shared.state().look_again_at.take_if(|at| *at <= now).is_some();
        if due {
            self.shared.ring_for_the_fleet();
        }
    }

    async fn take_bell(&mut self, now: Instant, passive: bool) -> Db<()> {
        let class = self.config.lock_class();
        let (got, other) = {
            let control = self.control.lock().await;
            let statement = control.statement(include_str!("../sql/bell_try.sql")).await?;
            let row = control.query_one(&statement, &[&class, &BELL]).await?;
            (row.try_get::<_, bool>(0)?, row.try_get::<_, bool>(1)?)
        };
        if got {
            self.bell = Bell::Held;
        } else if other {
            self.try_at = now + GUEST_RETRY;
            if !passive {
                // The one who has it may have nothing to do, and then gives it away.
                self.tell_all("want").await?;
            }
        } else {
            // Only writers that ring have it: a queued lock keeps others from joining them.
            self.bell = Bell::Queued;
            self.orders.send_modify(|orders| orders.bell = true);
        }
        Ok(())
    }

    /// Neither holds the bell nor queues for it when this returns, unless the withdrawal was not confirmed. Whoever saw it held
    /// and has not ended is watched from then on; whoever has is seen by the poll that is rung for after that.
    async fn let_go(&mut self, news: &mut mpsc::UnboundedReceiver<News>) -> Db<()> {
        match self.bell {
            Bell::Free => return Ok(()),
            Bell::Held => {
                let control = self.control.lock().await;
                let statement = control.statement(include_str!("../sql/bell_release.sql")).await?;
                control.query(&statement, &[&self.config.lock_class(), &BELL]).await?;
            }
            Bell::Queued | Bell::Granted => {
                self.orders.send_modify(|orders| orders.bell = false);
                let withdrawn = async {
                    while let Some(news) = news.recv().await {
                        match news {
                            News::Released | News::Lost => return,
                            News::Granted => {}
                            News::Ended(_) => self.shared.ring_for_the_fleet(),
                        }
                    }
                };
                if tokio::time::timeout(WITHDRAW_MAX, withdrawn).await.is_err() {
                    // Still queued, so still awake.
                    self.orders.send_modify(|orders| orders.bell = true);
                    return Ok(());
                }
            }
        }
        self.freed();
        Ok(())
    }

    /// The bell is not this relay's any more: [`Keeper::watch_leftovers`] has work.
    fn freed(&mut self) {
        self.bell = Bell::Free;
        let mut state = self.shared.state();
        state.pass = true;
        state.leftovers = true;
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
            self.shared.state().pass = true;
            self.shared.ring();
        }
        if left == 0 {
            self.leftovers = None;
        }
        Ok(())
    }

    async fn writers(&self) -> Db<HashSet<String>> {
        let control = self.control.lock().await;
        let statement = control.statement(include_str!("../sql/writers.sql")).await?;
        control.query(&statement, &[]).await?.iter().map(|row| Ok(row.try_get(0)?)).collect()
    }

    /// An awake relay that does not poll, since it owns nothing or its sinks are down, still has to tell the others.
    async fn probe(&mut self, now: Instant) -> Db<()> {
        let polled_at = self.shared.state().polled_at;
        let last = polled_at.map_or(self.probed_at, |at| at.max(self.probed_at));
        if self.bell == Bell::Free || now < last + PROBE_INTERVAL {
            return Ok(());
        }
        self.probed_at = now;
        let (horizon, writers) = {
            let control = self.control.lock().await;
            let horizon = control.statement(include_str!("../sql/horizon.sql")).await?;
            let writers = control.statement(include_str!("../sql/writers.sql")).await?;
            futures_util::future::try_join(control.query_one(&horizon, &[]), control.query(&writers, &[])).await?
        };
        let writers: Vec<_> = writers.iter().map(|row| writer_of(row.get(0))).collect();
        self.shared.state().note(now, horizon.try_get(0)?, Some(&writers), 0);
        Ok(())
    }

    async fn look_for_contention(&mut self, now: Instant) -> Db<()> {
        self.contention_at = now + CONTENTION_INTERVAL;
        let awaited: bool = {
            let control = self.control.lock().await;
            let statement = control.statement(include_str!("../sql/notify_awaited.sql")).await?;
            control.query_one(&statement, &[]).await?.try_get(0)?
        };
        if awaited {
            self.shared.state().governor.contended(now);
            self.shared.stirred.notify_one();
        }
        Ok(())
    }

    async fn pass_on(&mut self) -> Db<()> {
        let now = Instant::now();
        let due = self.passed_at.is_none_or(|at| now >= at + PASS_INTERVAL);
        let (pass, made_ready) = {
            let mut state = self.shared.state();
            state.pass &= state.others;
            state.made_ready &= state.others;
            (due && std::mem::take(&mut state.pass), due && std::mem::take(&mut state.made_ready))
        };
        if pass || made_ready {
            self.passed_at = Some(now);
            self.tell_all(if pass { "pass" } else { "ready" }).await?;
        }
        Ok(())
    }

    async fn tell_all(&self, what: &str) -> Db<()> {
        announce(&**self.control.lock().await, &format!("{what} {}", self.id.0)).await
    }

    fn set_mode(&self) {
        let mut state = self.shared.state();
        state.awake = self.bell != Bell::Free;
        state.keep_silence_in_mind(Instant::now());
        let mode = match (state.on, state.awake, state.silent) {
            (false, _, _) => Mode::Off,
            (true, true, _) => Mode::Awake,
            (true, false, true) => Mode::Silent,
            (true, false, false) => Mode::Asleep,
        };
        if state.chime.set_mode(mode) {
            tracing::debug!(?mode, "the doorbell's mode changed");
            drop(state);
            self.shared.woken.notify_waiters();
        }
    }

    fn deadline(&self, wanted: bool) -> Option<Instant> {
        let now = Instant::now();
        let state = self.shared.state();
        let awake = self.bell != Bell::Free;
        let patience = self.wanted_since.map(|since| since + PASSIVE_PATIENCE);
        let due = [
            awake.then_some(now + AWAKE_LOOK_INTERVAL),
            (wanted && !awake).then(|| self.try_at.max(now + Duration::from_millis(1))),
            patience.filter(|at| !awake && *at > now),
            self.leftovers.as_ref().map(|leftovers| leftovers.look_at),
            self.passed_at.filter(|_| state.pass || state.made_ready).map(|at| at + PASS_INTERVAL),
            state.look_again_at,
            state.silent.then_some(now + super::BELL_SILENT_AFTER),
        ];
        due.into_iter().flatten().min()
    }

    fn told(&mut self, news: News) {
        match news {
            News::Granted if self.bell == Bell::Queued => self.bell = Bell::Granted,
            News::Granted | News::Released => {}
            News::Lost if matches!(self.bell, Bell::Queued | Bell::Granted) => {
                self.orders.send_modify(|orders| orders.bell = false);
                self.freed();
            }
            News::Lost => {}
            News::Ended(_) => self.shared.ring_for_the_fleet(),
        }
    }

    /// Takes a notification in. Without words it is a writer's; else it says who tells what.
    fn heard(&self, notification: &Notification) {
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
            "want" => {
                state.asked_for = true;
                return;
            }
            // Writers that saw the bell in the hands of one that has ended ring nobody.
            "ended" => (state.leftovers, state.fleet) = (true, true),
            _ => state.fleet = true,
        }
        state.chime.ring();
    }
}
