mod fleet;
mod lanes;
mod locks;
mod subscriptions;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::try_join3;
use pillarbox::store::{Epoch, Fleet, Hello, InstanceId, Joined, Lock, Report, Take, TakeCause, Wake, Writer};
use pillarbox::{ErrorKind, Position, Subscription};
use tokio::sync::{mpsc, watch};

use self::fleet::{Look, holders, look};
pub(crate) use self::lanes::load;
use self::lanes::{check_anchors, take};
use self::locks::LockBook;
pub(crate) use self::subscriptions::{
    Events, first_since, former_filters, put_former_filters, record_progress, start_floor,
};
use self::subscriptions::{define, fence};
use crate::connection::{DIRECTLY, PgConfig, SCHEMA, Session, lock_class};
use crate::doorbell::{Doorbell, announce};
use crate::error::{Db, DbError};
use crate::types::Time;

/// An instance whose lock cannot be seen, which owns nothing and has not beaten for so long, is forgotten.
const SILENT_BURIED_AFTER: Duration = Duration::from_secs(600);

/// The longest answer to wait for on the control connection. A database that is silent for longer may have been left behind:
/// others seize the lanes after their lease.
const CONTROL_TIMEOUT: Duration = Duration::from_secs(10);

/// How often a beat waits for the disk, which tells how long a commit takes; the others need not survive anything.
const DURABLE_BEAT_INTERVAL: Duration = Duration::from_secs(1);

/// How many changes of what is dead or delayed are added up with one beat.
const ADDED_UP_MAX: i64 = 10_000;

/// How long a take-over waits before it looks for commands that hold the lanes, and how long such a command may stand still then.
const HOLDER_PATIENCE: Duration = Duration::from_millis(250);

/// How soon an instance that lost its lock and still works is looked at again; it doubles up to the maximum.
const LOOK_AGAIN_MIN: Duration = Duration::from_millis(20);
const LOOK_AGAIN_MAX: Duration = Duration::from_secs(1);

/// The sessions of a relay by what they are for; all carry the instance's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Holds the instance's lock, beats and listens; its end is the instance's end.
    Control,
    /// Waits for locks.
    Waiter,
    Reader,
    Writer,
    /// Claims rows of queues.
    Claimer,
    Operator,
    /// Runs a transactional handler; named so for as long as its transaction lasts.
    Transaction,
}

impl Role {
    /// The sessions whose life shows that an instance is still at work: without one of them it can neither read what to deliver
    /// nor settle. The waiter's and the operator's do not: the server notices only after a while that a client which waits for a lock, or
    /// for an answer that takes long, is gone; and retention does nothing that the owner of a lane alone may do.
    pub(crate) const AT_WORK: [Role; 3] = [Role::Control, Role::Reader, Role::Writer];
    const ALL: [Role; 7] =
        [Role::Control, Role::Waiter, Role::Reader, Role::Writer, Role::Claimer, Role::Operator, Role::Transaction];

    fn name(self) -> &'static str {
        match self {
            Role::Control => "control",
            Role::Waiter => "waiter",
            Role::Reader => "reader",
            Role::Writer => "writer",
            Role::Claimer => "claimer",
            Role::Operator => "operator",
            Role::Transaction => "transaction",
        }
    }
}

/// How many numbers a new instance tries before it gives up.
const NUMBERS_TRIED_MAX: usize = 100;

/// The `application_name` of an instance's session. A log in a schema of another name is another fleet with the same numbers.
pub(crate) fn session_name(config: &PgConfig, id: InstanceId, role: Role) -> String {
    name_in(config.schema(), id, role)
}

/// The `application_name` of a transaction that handles events, on whatever connection.
pub(crate) fn transaction_name(schema: &str, id: InstanceId) -> String {
    name_in(schema, id, Role::Transaction)
}

fn name_in(schema: &str, id: InstanceId, role: Role) -> String {
    format!("pillarbox relay {}{}", id.0, name_ending(schema, role))
}

/// What follows the instance's number in the name.
fn name_ending(schema: &str, role: Role) -> String {
    let name = role.name();
    if schema == SCHEMA { format!(" {name}") } else { format!(" {name} {:x}", lock_class(schema)) }
}

/// What the names of all sessions of an instance end with.
pub(crate) fn name_endings(config: &PgConfig) -> Vec<String> {
    Role::ALL.iter().map(|role| name_ending(config.schema(), *role)).collect()
}

/// Ends the sessions of instances that have ended, as far as this role may. What is left ends by itself, a little later.
pub(crate) async fn end_sessions(session: &Session, ids: &[InstanceId]) {
    let names = session_names(session.config(), ids, &Role::ALL);
    let names: Vec<&str> = names.iter().map(|(name, _)| name.as_str()).collect();
    if let Err(error) = session.query(sql!(instance, "end_sessions"), &[&names]).await {
        tracing::debug!(%error, "sessions of an ended instance could not be ended");
    }
}

fn session_names(config: &PgConfig, ids: &[InstanceId], roles: &[Role]) -> Vec<(String, InstanceId)> {
    let of = |id: InstanceId| roles.iter().map(move |role| (session_name(config, id, *role), id));
    ids.iter().flat_map(|id| of(*id)).collect()
}

/// This process as an instance, for as long as its control connection lives. Dropping it is what a crash looks like to others.
pub(crate) struct Membership {
    id: InstanceId,
    config: Arc<PgConfig>,
    control: Arc<tokio::sync::Mutex<Session>>,
    closed: watch::Receiver<bool>,
    over: AtomicBool,
    seen: Mutex<Seen>,
    doorbell: Doorbell,
}

/// What this control session has seen.
#[derive(Default)]
struct Seen {
    locks: LockBook,
    durable_beat: Option<Instant>,
    look_again: Option<Duration>,
}

impl Membership {
    /// Lock first, then the row: a row whose lock was seen and is gone is an instance that has ended.
    pub(crate) async fn join(config: &Arc<PgConfig>, hello: &Hello) -> Db<(Membership, Joined)> {
        hello.subscriptions.iter().try_for_each(Subscription::validate)?;
        let (sender, notifications) = mpsc::unbounded_channel();
        let mut control = Session::connect(config, "pillarbox control", Some(sender)).await?;
        let id = number_with_lock(&control, config).await?;
        let joined = enroll(&mut control, id, hello).await?;
        let mut locks = LockBook::default();
        let rows = control.query(sql!(instance, "locks"), &[&i64::from(config.lock_class())]).await?;
        let (held, _) = holders(&rows)?;
        locks.note(&held, &held);
        let doorbell_on: bool = control.query_one(sql!(meta, "after_look"), &[]).await?.try_get("doorbell")?;
        // From here on its writes are beats and rings, which need not survive a crash of the server.
        control.batch_execute(sql!(session, "relaxed")).await?;
        let closed = control.closed();
        let control = Arc::new(tokio::sync::Mutex::new(control));
        let doorbell = Doorbell::start(config.clone(), id, control.clone(), notifications, doorbell_on);
        let seen = Mutex::new(Seen { locks, ..Seen::default() });
        let over = AtomicBool::new(false);
        Ok((Membership { id, config: config.clone(), control, closed, over, seen, doorbell }, joined))
    }

    /// Refuses once the control connection is lost: its lock is free, and others may have taken the lanes.
    pub(crate) fn check(&self) -> Db<()> {
        if self.over.load(Ordering::SeqCst) || *self.closed.borrow() { Err(self.ended()) } else { Ok(()) }
    }

    fn ended(&self) -> DbError {
        DbError::own(
            ErrorKind::Ended,
            format!(
                "instance {} has ended: its control connection to PostgreSQL was lost, or it has left; join again under a \
                 new number",
                self.id.0
            ),
        )
    }

    /// This instance.
    pub(crate) fn instance(&self) -> InstanceId {
        self.id
    }

    /// Beats, and looks at the fleet.
    pub(crate) async fn observe(&self, report: &Report) -> Db<Fleet> {
        let durable = self.seen().durable_beat.is_none_or(|last| last.elapsed() >= DURABLE_BEAT_INTERVAL);
        self.controlled(async |control: &Session| {
            let look = look(control, self.id, self.config.lock_class(), report, durable).await?;
            self.judge(control, look).await
        })
        .await
    }

    /// Says of each instance whether it lives, ends what is left of those that do not, and forgets those that own nothing.
    async fn judge(&self, control: &Session, look: Look) -> Db<Fleet> {
        if !look.alive {
            return Err(self.buried());
        }
        if !look.own_lock {
            self.end();
            return Err(pooled());
        }
        check_anchors(&look.missing, look.kept_from)?;
        let rows: HashSet<InstanceId> = look.fleet.instances.iter().map(|instance| instance.id).collect();
        let lost = self.seen().locks.note(&rows, &look.held);
        let working = if lost.is_empty() { HashSet::new() } else { self.at_work(control, &lost).await? };
        let Look { mut fleet, held, doorbell, commit, uncounted, .. } = look;
        let ended: Vec<InstanceId> = {
            let mut seen = self.seen();
            fleet.instances.iter_mut().for_each(|view| view.lock = seen.locks.state(view.id, &held, &working));
            let free = fleet.instances.iter().filter(|view| view.lock == Lock::Free).map(|view| view.id);
            let ended = free.filter(|id| seen.locks.is_news(*id)).collect();
            seen.durable_beat = commit.map(|_| Instant::now()).or(seen.durable_beat);
            let pause = seen.look_again.map_or(LOOK_AGAIN_MIN, |pause| (pause * 2).min(LOOK_AGAIN_MAX));
            seen.look_again = (!working.is_empty()).then_some(pause);
            self.doorbell.look_again(seen.look_again);
            ended
        };
        self.doorbell.observed(
            pillarbox::store::neighbour_of(self.id, held.intersection(&rows).copied()),
            rows.len() > 1,
            doorbell,
            commit,
        );
        if !ended.is_empty() {
            self.clear_away(control, &ended).await?;
        }
        self.bury(control, &fleet).await?;
        if uncounted && let Err(error) = control.execute(sql!(retention, "add_up_some"), &[&ADDED_UP_MAX]).await {
            // It is only `status` that takes longer.
            tracing::debug!(%error, "how much is dead or delayed was not added up");
        }
        Ok(fleet)
    }

    /// Those that have a session left, by which they may still deliver.
    async fn at_work(&self, control: &Session, ids: &[InstanceId]) -> Db<HashSet<InstanceId>> {
        let names = session_names(&self.config, ids, &Role::AT_WORK);
        let wanted: Vec<&str> = names.iter().map(|(name, _)| name.as_str()).collect();
        let statement = control.statement(sql!(instance, "backends")).await?;
        let mut working = HashSet::new();
        for row in control.query(&statement, &[&wanted]).await? {
            let name: &str = row.try_get("application_name")?;
            working.extend(names.iter().find(|(own, _)| own == name).map(|(_, id)| *id));
        }
        Ok(working)
    }

    /// Ends the sessions of instances that have ended, and tells all relays once: there may be events for which no ring came.
    async fn clear_away(&self, control: &Session, ids: &[InstanceId]) -> Db<()> {
        end_sessions(control, ids).await;
        for id in ids {
            tracing::info!(instance = id.0, "another instance has ended");
            announce(&**control, &format!("ended {}", id.0)).await?;
        }
        self.seen().locks.told(ids);
        Ok(())
    }

    /// Removes the rows of instances that ended and own no lane and no claim any more. Where the lock says nothing, they have ended when
    /// they have not beaten for long.
    async fn bury(&self, control: &Session, fleet: &Fleet) -> Db<()> {
        let owns = |id: InstanceId| fleet.lanes.iter().any(|lane| lane.owner == Some(id));
        let of = |lock: Lock| -> Vec<i32> {
            let instances = fleet.instances.iter().filter(|instance| instance.lock == lock && !owns(instance.id));
            instances.map(|instance| instance.id.0 as i32).collect()
        };
        let (ended, unknown) = (of(Lock::Free), of(Lock::Unknown));
        if !ended.is_empty() || !unknown.is_empty() {
            let statement = control.statement(sql!(instance, "bury")).await?;
            control.execute(&statement, &[&ended, &unknown, &SILENT_BURIED_AFTER.as_secs_f64()]).await?;
        }
        Ok(())
    }

    /// Takes each lane whose epoch is still the expected one; committed when it returns. Who is seized for his silence loses
    /// his sessions first, since one of them may hold the lane's lock, and with them the doorbell.
    pub(crate) async fn take(&self, writer: &mut Session, lanes: &[Take]) -> Db<Vec<Option<Epoch>>> {
        self.check()?;
        let name = session_name(writer.config(), self.id, Role::Writer);
        let taken = tokio::select! {
            taken = take(writer, self.id, lanes) => taken?,
            // It never ends.
            held = self.end_holders(&name) => held?,
        };
        if !taken.alive {
            return Err(self.buried());
        }
        let seized = lanes.iter().zip(&taken.owners).filter(|(take, _)| take.cause == TakeCause::Lease);
        let mut silent: Vec<InstanceId> = seized.filter_map(|(_, owner)| *owner).filter(|id| *id != self.id).collect();
        silent.sort_unstable();
        silent.dedup();
        silent.retain(|id| self.seen().locks.is_news(*id));
        if !silent.is_empty() {
            let cleared = self.controlled(async |control: &Session| self.clear_away(control, &silent).await).await;
            // The lanes are taken all the same; what is left of their owner is found by later looks.
            cleared.unwrap_or_else(|error| tracing::debug!(?error, "a silent instance could not be cleared away"));
        }
        Ok(taken.epochs)
    }

    /// Ends, for as long as it is polled, commands that keep a session of this instance waiting and stand still inside their transaction:
    /// one about many rows may do so for longer than others if nobody waits for it.
    async fn end_holders<T>(&self, name: &str) -> Db<T> {
        let patience = HOLDER_PATIENCE.as_millis() as i64;
        loop {
            tokio::time::sleep(HOLDER_PATIENCE).await;
            let ended = self.controlled(async |control: &Session| {
                let statement = control.statement(sql!(instance, "end_holders")).await?;
                Ok(control.query_one(&statement, &[&name, &patience]).await?.try_get::<_, i64>(0)?)
            });
            match ended.await {
                Ok(0) => {}
                Ok(ended) => tracing::warn!(ended, "commands that stood still and held lanes were ended"),
                Err(error) => tracing::debug!(?error, "what holds lanes could not be looked for"),
            }
        }
    }

    /// See [`pillarbox::store::Store::wait`].
    pub(crate) async fn wait(&self, timeout: Duration) -> Db<Wake> {
        let mut closed = self.closed.clone();
        tokio::select! {
            wake = self.doorbell.wait(timeout) => Ok(wake),
            _ = closed.wait_for(|closed| *closed) => self.check().map(|()| Wake::Rang),
        }
    }

    /// A poll is about to begin.
    pub(crate) fn poll_begins(&self) {
        self.doorbell.poll_begins();
    }

    /// What the poll saw.
    pub(crate) fn polled(&self, horizon: Position, writers: Option<&[Writer]>, events: usize) {
        self.doorbell.polled(horizon, writers, events);
    }

    /// There are rows of queues that others can claim.
    pub(crate) fn made_ready(&self) {
        self.doorbell.made_ready();
    }

    /// Breaks the doorbell, or lets it fall asleep at another pace.
    #[cfg(feature = "mutants")]
    pub(crate) fn experiment(&self, mutant: Option<crate::Mutant>, doze_after: Option<Duration>) {
        self.doorbell.experiment(mutant, doze_after);
    }

    /// How often the doorbell has fallen asleep.
    #[cfg(feature = "mutants")]
    pub(crate) fn sleeps(&self) -> usize {
        self.doorbell.sleeps()
    }

    /// Ends this instance.
    pub(crate) async fn leave(&self) -> Db<()> {
        self.check()?;
        self.doorbell.stop().await;
        let number = self.id.0 as i32;
        self.controlled(async |control: &Session| {
            let free = control.statement(sql!(cursor, "give_back")).await?;
            let give_back = control.statement(sql!(queue, "give_back")).await?;
            let delete = control.statement(sql!(instance, "remove")).await?;
            try_join3(
                control.batch_execute(sql!(session, "begin_durable")),
                try_join3(
                    control.execute(&free, &[&self.id.0]),
                    control.execute(&give_back, &[&number]),
                    control.execute(&delete, &[&number]),
                ),
                control.batch_execute(sql!(session, "commit_and_unlock")),
            )
            .await?;
            // After the locks are free: another may become the keeper of the doorbell.
            announce(&**control, &format!("ended {number}")).await
        })
        .await?;
        self.end();
        Ok(())
    }

    /// Takes part no more.
    pub(crate) fn end(&self) {
        self.over.store(true, Ordering::SeqCst);
    }

    /// That another has removed this instance's row.
    pub(crate) fn buried(&self) -> DbError {
        self.end();
        DbError::own(
            ErrorKind::Ended,
            format!("instance {} was buried by another that saw it end; join again under a new number", self.id.0),
        )
    }

    /// Uses the control connection. A failure of the connection, or no answer in time, is the end of this instance.
    async fn controlled<T>(&self, work: impl AsyncFnOnce(&Session) -> Db<T>) -> Db<T> {
        self.check()?;
        let answer = tokio::time::timeout(CONTROL_TIMEOUT, async {
            let control = self.control.lock().await;
            work(&control).await
        });
        let Ok(answer) = answer.await else {
            self.end();
            return Err(self.ended());
        };
        if answer.as_ref().is_err_and(|error| error.kind() == ErrorKind::Unavailable) {
            self.end();
        }
        // An answer that came counts; of a failure the end is the reason.
        answer.or_else(|error| self.check().and(Err(error)))
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A number that was never used, and the name that says it.
/// A number whose lock is this session's. Any role may hold any advisory lock, so one that is held already is passed over.
async fn number_with_lock(control: &Session, config: &PgConfig) -> Db<InstanceId> {
    for _ in 0..NUMBERS_TRIED_MAX {
        let id = number(control, config).await?;
        if hold_lock(control, config, id).await? {
            return Ok(id);
        }
        tracing::warn!(instance = id.0, "another session holds the advisory lock of this number; taking the next one");
    }
    Err(DbError::own(
        ErrorKind::Fatal,
        format!(
            "the advisory locks (class {}) of {NUMBERS_TRIED_MAX} new instances in a row are held by others; see who in pg_locks, and end it",
            config.lock_class()
        ),
    ))
}

async fn number(control: &Session, config: &PgConfig) -> Db<InstanceId> {
    let id = InstanceId(control.query_one(sql!(instance, "next"), &[]).await?.try_get(0)?);
    let name = session_name(config, id, Role::Control);
    control.execute(sql!(session, "set_name"), &[&name]).await?;
    control.batch_execute(&sql!(doorbell, "listen").replace("@schema@", &config.schema)).await?;
    Ok(id)
}

/// Takes the lock that shows this instance's life, and makes sure that it is kept from one transaction to the next. False: another
/// session has it.
async fn hold_lock(control: &Session, config: &PgConfig, id: InstanceId) -> Db<bool> {
    let (class, number) = (config.lock_class(), id.0 as i32);
    let row = control.query_one(sql!(instance, "hold_lock"), &[&class, &number]).await?;
    let (pid, got): (i32, bool) = (row.try_get("pid")?, row.try_get("held")?);
    if !got {
        return Ok(false);
    }
    let same: i32 = control.query_one(sql!(instance, "backend"), &[]).await?.try_get(0)?;
    let rows = control.query(sql!(instance, "locks"), &[&i64::from(class)]).await?;
    if same != pid || !holders(&rows)?.1.contains(&id) {
        return Err(pooled());
    }
    Ok(true)
}

fn pooled() -> DbError {
    let message = format!(
        "the session lock of this instance is not kept from one transaction to the next: a pooler in transaction mode stands \
         between the relay and PostgreSQL; {DIRECTLY}"
    );
    DbError::own(ErrorKind::Fatal, message)
}

/// Defines the subscriptions and writes the instance's row.
async fn enroll(control: &mut Session, me: InstanceId, hello: &Hello) -> Db<Joined> {
    let tx = control.begin().await?;
    // As everybody locks: the log's row, then subscriptions in the order of their names, then cursors.
    tx.query(sql!(meta, "share"), &[]).await?;
    let mut order: Vec<usize> = (0..hello.subscriptions.len()).collect();
    order.sort_by_key(|index| &hello.subscriptions[*index].name);
    let wishes: Vec<&Subscription> = order.iter().map(|index| &hello.subscriptions[*index]).collect();
    let defined = define(&tx, me, &wishes, hello.rejoin).await?;
    // After all of them, and before anything else: cursors are locked in the order of the subscriptions' numbers by everybody.
    fence(&tx, &defined).await?;
    let mut subscriptions: Vec<_> = order.into_iter().zip(defined).collect();
    subscriptions.sort_by_key(|(index, _)| *index);
    let subscriptions: Vec<_> = subscriptions.into_iter().map(|(_, defined)| defined.view).collect();
    let ids: Vec<i64> = subscriptions.iter().map(|subscription| subscription.id.0).collect();
    let pid = i32::try_from(hello.pid).unwrap_or(i32::MAX);
    tx.execute(sql!(instance, "enter"), &[&(me.0 as i32), &hello.host, &pid, &hello.version, &ids]).await?;
    announce(&tx, &format!("fleet {}", me.0)).await?;
    let meta = tx.query_one(sql!(meta, "identity"), &[]).await?;
    let (log_id, incarnation) = (meta.try_get("log_id")?, meta.try_get("incarnation")?);
    let time = meta.try_get::<_, Time>("now")?.0;
    tx.commit().await?;
    Ok(Joined { instance: me, log_id, incarnation, subscriptions, time })
}
