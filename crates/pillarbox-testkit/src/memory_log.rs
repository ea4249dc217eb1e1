use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use pillarbox::admin::Pause;
use pillarbox::admin::retention::StoredRetention;
use pillarbox::limit::PAYLOAD_BYTES_MAX;
use pillarbox::store::{
    Cursor, Definition, Epoch, Fleet, FormerFilters, Hello, InstanceId, InstanceView, Joined, LaneRef, LaneState,
    LaneView, Lock, PAGE_BYTES_MAX, RangeSet, RecoveryCause, Report, Settlement, SubscriptionId, SubscriptionView,
    Take, TakeCause, Writer,
};
use pillarbox::{Error, ErrorKind, Event, Headers, Mode, NewEvent, Position, Result, Start, Subscription, Timestamp};
use tokio::sync::watch;
use uuid::Uuid;

use crate::Broken;
use crate::memory_lane::Lane;

/// A log in memory, with everything that a real database can do to its readers: positions that are drawn long
/// before they are visible, transactions that abort, rows that are visible and not yet durable, instances that die
/// or freeze.
///
/// All functions are synchronous and deterministic: no clock (see [`MemoryLog::set_time`]), no randomness. Those
/// named like a function of [`Store`](pillarbox::store::Store) keep its contract. A clone is the same log.
#[derive(Clone)]
pub struct MemoryLog {
    shared: Arc<Shared>,
}

struct Shared {
    inner: Mutex<Inner>,
    hook: Mutex<Option<Hook>>,
    bell: watch::Sender<Bell>,
}

type Hook = Box<dyn FnMut(usize) + Send>;

/// How often something was committed, and how often an instance ended or was thawed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Bell {
    pub(crate) commits: u64,
    pub(crate) ends: u64,
}

/// What kind of log it is.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryOptions {
    /// The identity of the log.
    pub log_id: Uuid,
    /// See [`StoreFeatures`](pillarbox::store::StoreFeatures). Default: true.
    pub lock_proves_life: bool,
    /// See [`StoreFeatures`](pillarbox::store::StoreFeatures). Default: zero.
    pub settle_interval: Duration,
    /// Whether instances can see each other's locks; if not, all are shown as unknown. Default: true.
    pub lock_visible: bool,
    /// The database's clock is that of the machine, and [`MemoryLog::set_time`] does nothing: for real relays. Default: false.
    pub real_time: bool,
    /// See [`QUEUED_KEYS_MAX`](pillarbox::store::QUEUED_KEYS_MAX), which is the default; of each lane.
    pub queued_keys_max: usize,
    /// What is deliberately wrong. Default: nothing.
    pub broken: Option<Broken>,
}

impl Default for MemoryOptions {
    fn default() -> Self {
        MemoryOptions {
            log_id: Uuid::from_u128(0x0070_696c_6c61_7262_6f78),
            lock_proves_life: true,
            settle_interval: Duration::ZERO,
            lock_visible: true,
            real_time: false,
            queued_keys_max: pillarbox::store::QUEUED_KEYS_MAX,
            broken: None,
        }
    }
}

/// A publisher's open transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tx(pub u64);

pub(crate) struct Inner {
    pub(crate) options: MemoryOptions,
    pub(crate) now: Timestamp,
    /// Raised when everything that was under way is lost.
    pub(crate) generation: u64,
    pub(crate) incarnation: i64,
    /// The position that is drawn next.
    pub(crate) next: Position,
    ids: u64,
    pub(crate) rows: BTreeMap<Position, Arc<Event>>,
    /// Where events were when they became visible, to find them sooner.
    pub(crate) positions: HashMap<Uuid, Position>,
    /// Visible rows that a power loss takes back.
    unflushed: BTreeSet<Position>,
    /// The positions up to here are never drawn again, whatever happens.
    flushed_to: Position,
    /// Copies of pruned rows that deliveries still need.
    pub(crate) kept: BTreeMap<Position, Arc<Event>>,
    pub(crate) log_start: Position,
    /// Retention has been this far; events of journals stay below.
    pub(crate) pruned_to: Position,
    pub(crate) closed: RangeSet,
    /// What the log demands of retention, whatever a call asks for.
    pub(crate) retention: StoredRetention,
    transactions: BTreeMap<Tx, Transaction>,
    tx_next: u64,
    pub(crate) instances: BTreeMap<InstanceId, Instance>,
    /// Whose process is gone, whether or not their row is still there.
    gone: BTreeSet<InstanceId>,
    /// Who stands still in the middle of a transaction that has locked its lanes.
    holding: BTreeSet<InstanceId>,
    instance_next: i64,
    pub(crate) subscriptions: Vec<SubscriptionRow>,
    subscription_next: i64,
    /// The number of the next turn in a queue.
    pub(crate) turn_next: u64,
    /// When claims were last swept.
    pub(crate) recovery_at: Option<Timestamp>,
    settle_fails: bool,
    joins_fail: Option<ErrorKind>,
    joins: u64,
}

#[derive(Debug, Default)]
struct Transaction {
    writing: bool,
    events: Vec<Event>,
}

pub(crate) struct Instance {
    pub(crate) hello: Hello,
    pub(crate) beat: i64,
    pub(crate) started_at: Timestamp,
    pub(crate) beat_at: Timestamp,
    pub(crate) killed: bool,
    pub(crate) frozen: bool,
    pub(crate) report: Report,
    pub(crate) subscriptions: Vec<SubscriptionId>,
    /// Only for [`Broken::StaleLoad`].
    stale: BTreeMap<LaneRef, LaneState>,
}

#[derive(Clone)]
pub(crate) struct SubscriptionRow {
    pub(crate) id: SubscriptionId,
    pub(crate) name: String,
    pub(crate) definition: Arc<Definition>,
    /// By which filters events were judged before.
    pub(crate) formers: FormerFilters,
    pub(crate) mode: Mode,
    /// How many claims were recovered, and when last.
    pub(crate) recovered: BTreeMap<RecoveryCause, (u64, Timestamp)>,
    pub(crate) pause: Option<Pause>,
    /// How long it may hold retention back.
    pub(crate) hold: Option<Duration>,
    pub(crate) lanes: Vec<Lane>,
}

impl MemoryLog {
    /// An empty log with the default options.
    pub fn new() -> Self {
        MemoryLog::with(MemoryOptions::default())
    }

    /// An empty log.
    pub fn with(options: MemoryOptions) -> Self {
        let inner = Inner {
            options,
            now: Timestamp(0),
            generation: 0,
            incarnation: 1,
            next: 1,
            ids: 0,
            rows: BTreeMap::new(),
            positions: HashMap::new(),
            unflushed: BTreeSet::new(),
            flushed_to: 0,
            retention: StoredRetention { keep_ms: 0, dead_ms: 0, inbox_ms: 0 },
            kept: BTreeMap::new(),
            log_start: 1,
            pruned_to: 0,
            closed: RangeSet::new(),
            transactions: BTreeMap::new(),
            tx_next: 1,
            instances: BTreeMap::new(),
            gone: BTreeSet::new(),
            holding: BTreeSet::new(),
            instance_next: 1,
            subscriptions: Vec::new(),
            subscription_next: 1,
            turn_next: 0,
            recovery_at: None,
            settle_fails: false,
            joins_fail: None,
            joins: 0,
        };
        let bell = watch::Sender::new(Bell::default());
        MemoryLog { shared: Arc::new(Shared { inner: Mutex::new(inner), hook: Mutex::new(None), bell }) }
    }

    /// What kind of log it is.
    pub fn options(&self) -> MemoryOptions {
        self.inner().options
    }

    /// Sets the database's clock; it may go backwards.
    pub fn set_time(&self, now: Timestamp) {
        self.inner().now = now;
    }

    /// The database's clock.
    pub fn time(&self) -> Timestamp {
        self.inner().now
    }

    /// Everything that is visible now, ascending; for auditors.
    pub fn visible(&self) -> Vec<Arc<Event>> {
        self.inner().rows.values().cloned().collect()
    }

    /// The highest position drawn.
    pub fn horizon(&self) -> Position {
        self.inner().next - 1
    }

    /// Calls `hook` after each but the last step of every [`MemoryLog::poll`] from now on, with the number of steps
    /// done. No lock is held, so it may do anything to the log.
    pub fn between_poll_steps(&self, hook: impl FnMut(usize) + Send + 'static) {
        *self.hook() = Some(Box::new(hook));
    }

    pub(crate) fn run_hook(&self, done: usize) {
        // Taken out meanwhile: a poll inside the hook must not call it again.
        let taken = self.hook().take();
        let Some(mut hook) = taken else { return };
        hook(done);
        self.hook().get_or_insert(hook);
    }

    pub(crate) fn inner(&self) -> MutexGuard<'_, Inner> {
        let mut inner = self.shared.inner.lock().expect("no thread panics while it holds the log");
        if inner.options.real_time {
            inner.now = Timestamp::now();
        }
        inner
    }

    fn hook(&self) -> MutexGuard<'_, Option<Hook>> {
        self.shared.hook.lock().expect("no thread panics while it holds the hook")
    }

    pub(crate) fn bell(&self) -> watch::Receiver<Bell> {
        self.shared.bell.subscribe()
    }

    pub(crate) fn ring(&self) {
        self.shared.bell.send_modify(|bell| bell.commits += 1);
    }

    pub(crate) fn ring_end(&self) {
        self.shared.bell.send_modify(|bell| bell.ends += 1);
    }
}

impl Default for MemoryLog {
    fn default() -> Self {
        MemoryLog::new()
    }
}

impl fmt::Debug for MemoryLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryLog").field("horizon", &self.horizon()).finish_non_exhaustive()
    }
}

/// Publishers.
impl MemoryLog {
    /// Begins a transaction. It is no writer before it is about to insert.
    pub fn begin(&self) -> Tx {
        let mut inner = self.inner();
        let tx = Tx(inner.tx_next);
        inner.tx_next += 1;
        inner.transactions.insert(tx, Transaction::default());
        tx
    }

    /// Makes the transaction a writer without drawing a position yet. [`MemoryLog::insert`] does it too.
    ///
    /// # Panics
    /// If the transaction is not open.
    pub fn enter(&self, tx: Tx) {
        self.inner().transaction(tx).writing = true;
    }

    /// Inserts an event; its position is drawn now and visible to others after the commit. The deduplication key is
    /// not looked at.
    ///
    /// # Panics
    /// If the transaction is not open.
    pub fn insert(&self, tx: Tx, event: NewEvent) -> Position {
        let mut inner = self.inner();
        let event = inner.event(event);
        let position = event.position;
        inner.write(tx, event);
        position
    }

    /// Commits: first the rows become visible, then the transaction stops being a writer.
    ///
    /// # Panics
    /// If the transaction is not open.
    pub fn commit(&self, tx: Tx) {
        self.show(tx);
        self.end(tx);
    }

    /// The first half of a commit: the rows are visible and the transaction is still a writer.
    ///
    /// # Panics
    /// If the transaction is not open.
    pub fn show(&self, tx: Tx) {
        let mut inner = self.inner();
        if inner.options.broken == Some(Broken::WriterGoneBeforeVisible) && inner.transaction(tx).writing {
            inner.transaction(tx).writing = false;
            return;
        }
        inner.show(tx);
    }

    /// The second half of a commit: the transaction is over.
    ///
    /// # Panics
    /// If the transaction is not open.
    pub fn end(&self, tx: Tx) {
        let mut inner = self.inner();
        inner.show(tx);
        inner.transactions.remove(&tx);
        drop(inner);
        self.ring();
    }

    /// Gives the transaction up; its positions are dead.
    pub fn abort(&self, tx: Tx) {
        self.inner().transactions.remove(&tx);
        self.ring();
    }

    /// One transaction that inserts and commits; the positions.
    pub fn publish(&self, events: impl IntoIterator<Item = NewEvent>) -> Vec<Position> {
        let tx = self.begin();
        let positions = events.into_iter().map(|event| self.insert(tx, event)).collect();
        self.commit(tx);
        positions
    }

    /// Inserts an event at this position, as a publisher may that names it; the id.
    pub fn fill(&self, position: Position) -> Uuid {
        let mut inner = self.inner();
        let next = inner.next;
        let event = Event { position, ..inner.event(NewEvent::new("t", "y").key("a")) };
        inner.next = next;
        inner.positions.insert(event.id, position);
        let id = event.id;
        inner.rows.insert(position, Arc::new(event));
        drop(inner);
        self.ring();
        id
    }

    /// Makes everything that is visible durable.
    pub fn flush(&self) {
        self.inner().flush();
    }

    /// The power fails: what is visible but not flushed vanishes (its positions may be drawn again), open transactions
    /// abort, and no instance lives on.
    pub fn power_loss(&self) {
        self.inner().power_loss();
        self.ring_end();
    }
}

/// Instances. What is named like a function of [`Store`](pillarbox::store::Store) keeps its contract.
impl MemoryLog {
    /// See [`Store::join`](pillarbox::store::Store::join).
    pub fn join(&self, hello: Hello) -> Result<Joined> {
        self.inner().join(hello)
    }

    /// See [`Store::observe`](pillarbox::store::Store::observe).
    pub fn observe(&self, instance: InstanceId, report: &Report) -> Result<Fleet> {
        self.inner().observe(instance, report)
    }

    /// See [`Store::take`](pillarbox::store::Store::take).
    pub fn take(&self, instance: InstanceId, lanes: &[Take]) -> Result<Vec<Option<Epoch>>> {
        self.inner().take(instance, lanes)
    }

    /// See [`Store::load`](pillarbox::store::Store::load).
    pub fn load(&self, instance: InstanceId, lanes: &[(LaneRef, Epoch)]) -> Result<Vec<Option<LaneState>>> {
        let inner = self.inner();
        lanes.iter().map(|(lane, epoch)| inner.load(instance, *lane, *epoch)).collect()
    }

    /// See [`Store::fetch`](pillarbox::store::Store::fetch).
    pub fn fetch(&self, positions: &[Position]) -> Result<Vec<Arc<Event>>> {
        let inner = self.inner();
        let mut seen = BTreeSet::new();
        let find = |position: &Position| inner.rows.get(position).or_else(|| inner.kept.get(position)).cloned();
        let mut room = PAGE_BYTES_MAX;
        let fits = |(index, event): &(usize, Arc<Event>)| {
            let fits = event.size() <= room || *index == 0;
            room = room.saturating_sub(event.size());
            fits
        };
        let found = positions.iter().filter(|position| seen.insert(**position)).filter_map(find);
        let mut events: Vec<_> = found.enumerate().take_while(fits).map(|(_, event)| event).collect();
        events.sort_unstable_by_key(|event| event.position);
        Ok(events)
    }

    /// See [`Store::settle`](pillarbox::store::Store::settle).
    pub fn settle(&self, instance: InstanceId, settlement: &Settlement) -> Result<Vec<bool>> {
        let settled = self.inner().settle(instance, settlement)?;
        if settlement.lanes.iter().any(|write| !write.queue.is_empty()) {
            self.ring();
        }
        Ok(settled)
    }

    /// The next settlement fails half way, as if the connection had been lost.
    pub fn fail_next_settle(&self) {
        self.inner().settle_fails = true;
    }

    /// All joins fail so from now on, or do not any more.
    pub fn fail_joins(&self, kind: Option<ErrorKind>) {
        self.inner().joins_fail = kind;
    }

    /// How many joins were tried.
    pub fn joins(&self) -> u64 {
        self.inner().joins
    }

    /// See [`Store::leave`](pillarbox::store::Store::leave).
    pub fn leave(&self, instance: InstanceId) -> Result<()> {
        self.inner().leave(instance);
        self.ring_end();
        Ok(())
    }

    /// The instance's process is gone, or its connection lost: its lock is free, its row and lanes stay until others take them.
    pub fn kill(&self, instance: InstanceId) {
        self.inner().kill(instance);
        self.ring_end();
    }

    /// Another instance has taken this one for dead, though it lives: its row goes, its lanes stay until others take them.
    pub fn bury(&self, instance: InstanceId) {
        self.inner().instances.remove(&instance);
    }

    /// The instance stops: its lock is held and it does not beat. Its [`MemoryStore`](crate::MemoryStore) answers no
    /// call until [`MemoryLog::thaw`].
    pub fn freeze(&self, instance: InstanceId) {
        self.set_frozen(instance, true);
    }

    /// The instance goes on.
    pub fn thaw(&self, instance: InstanceId) {
        self.set_frozen(instance, false);
        self.ring_end();
    }

    fn set_frozen(&self, instance: InstanceId, frozen: bool) {
        if let Some(instance) = self.inner().instances.get_mut(&instance) {
            instance.frozen = frozen;
        }
    }

    /// The instance stands still in the middle of a transaction that has locked its lanes, until [`MemoryLog::release`] or until
    /// somebody ends its sessions. One whose connection is lost holds nothing.
    pub fn hold(&self, instance: InstanceId) {
        let mut inner = self.inner();
        if !inner.gone.contains(&instance) {
            inner.holding.insert(instance);
        }
    }

    /// The transaction of [`MemoryLog::hold`] has ended, if it had not before.
    pub fn release(&self, instance: InstanceId) {
        self.inner().holding.remove(&instance);
    }

    /// Whether the instance's process is gone, or its connection.
    pub fn is_killed(&self, instance: InstanceId) -> bool {
        self.inner().gone.contains(&instance)
    }

    pub(crate) fn is_frozen(&self, instance: InstanceId) -> bool {
        self.inner().instances.get(&instance).is_some_and(|instance| instance.frozen)
    }
}

impl Inner {
    fn transaction(&mut self, tx: Tx) -> &mut Transaction {
        self.transactions.get_mut(&tx).expect("the transaction is open")
    }

    pub(crate) fn write(&mut self, tx: Tx, event: Event) {
        let transaction = self.transaction(tx);
        transaction.writing = true;
        transaction.events.push(event);
    }

    /// The version of a stream in an open transaction that has appended to it.
    pub(crate) fn appended(&self, tx: Tx, stream: &str) -> Option<i64> {
        let of_stream = |event: &&Event| event.stream_version.is_some() && event.key.as_deref() == Some(stream);
        self.transactions.get(&tx)?.events.iter().filter(of_stream).filter_map(|event| event.stream_version).max()
    }

    /// Whether another open transaction has appended to the stream.
    pub(crate) fn appends_elsewhere(&self, tx: Tx, stream: &str) -> bool {
        self.transactions.keys().any(|other| *other != tx && self.appended(*other, stream).is_some())
    }

    pub(crate) fn event(&mut self, new: NewEvent) -> Event {
        new.validate(PAYLOAD_BYTES_MAX).expect("a test publishes valid events");
        let position = self.next;
        self.next += 1;
        self.ids += 1;
        let (high, _) = self.options.log_id.as_u64_pair();
        Event {
            position,
            id: new.id.unwrap_or_else(|| Uuid::from_u64_pair(high | 1, self.ids)),
            topic: new.topic.into(),
            key: new.key.map(Into::into),
            r#type: new.r#type.into(),
            payload: new.payload,
            content_type: new.content_type.map(Into::into),
            headers: Headers::from_map(&new.headers),
            stream_version: None,
            deliver_at: new.deliver_at,
            created_at: self.now,
            malformed: None,
        }
    }

    pub(crate) fn writers(&self) -> Vec<Writer> {
        self.transactions.iter().filter(|(_, open)| open.writing).map(|(tx, _)| Writer(tx.0)).collect()
    }

    fn show(&mut self, tx: Tx) {
        std::mem::take(&mut self.transaction(tx).events).into_iter().for_each(|event| self.make_visible(event));
    }

    pub(crate) fn make_visible(&mut self, event: Event) {
        self.unflushed.insert(event.position);
        self.positions.insert(event.id, event.position);
        self.rows.insert(event.position, Arc::new(event));
    }

    pub(crate) fn flush(&mut self) {
        self.unflushed.clear();
        self.flushed_to = self.next - 1;
    }

    fn power_loss(&mut self) {
        for position in std::mem::take(&mut self.unflushed) {
            self.rows.remove(&position);
        }
        self.transactions.clear();
        self.next = self.flushed_to + 1;
        self.generation += 1;
        let instances: Vec<InstanceId> = self.instances.keys().copied().collect();
        instances.into_iter().for_each(|instance| self.kill(instance));
    }

    fn kill(&mut self, instance: InstanceId) {
        self.gone.insert(instance);
        self.holding.remove(&instance);
        if let Some(row) = self.instances.get_mut(&instance) {
            row.killed = true;
        }
    }

    /// Empties everything but the count of incarnations and the numbers that are never used twice.
    /// What living instances run stays, and so do positions: none is drawn again.
    pub(crate) fn reset(&mut self) {
        self.rows.clear();
        self.positions.clear();
        self.unflushed.clear();
        self.kept.clear();
        self.transactions.clear();
        self.closed = RangeSet::new();
        self.recovery_at = None;
        let floor = self.next - 1;
        (self.log_start, self.pruned_to, self.flushed_to) = (self.next, self.next - 1, floor);
        self.instances.retain(|_, instance| !instance.killed);
        let run: BTreeSet<_> = self.instances.values().flat_map(|instance| &instance.subscriptions).collect();
        self.subscriptions.retain(|row| run.contains(&row.id));
        for row in &mut self.subscriptions {
            (row.formers, row.recovered) = (FormerFilters::default(), BTreeMap::new());
            for lane in &mut row.lanes {
                let (epoch, revision) = (lane.epoch + 1, lane.revision + 1);
                let empty = Lane::starting_at(Cursor { floor, ..Cursor::default() }, self.now);
                *lane = Lane { epoch, revision, ..empty };
            }
        }
        self.generation += 1;
        self.incarnation += 1;
    }

    fn join(&mut self, hello: Hello) -> Result<Joined> {
        self.joins += 1;
        if let Some(kind) = self.joins_fail {
            return Err(Error::new(kind, "joins were told to fail"));
        }
        hello.subscriptions.iter().try_for_each(Subscription::validate)?;
        hello.subscriptions.iter().try_for_each(|wish| self.check_mode(wish))?;
        if !hello.rejoin {
            hello.subscriptions.iter().try_for_each(|wish| self.refuse_locked_fence(wish))?;
        }
        self.flush();
        let instance = InstanceId(self.instance_next);
        self.instance_next += 1;
        let subscriptions: Vec<_> = hello.subscriptions.iter().map(|wish| self.subscribe(wish, hello.rejoin)).collect();
        let row = Instance {
            beat: 1,
            started_at: self.now,
            beat_at: self.now,
            killed: false,
            frozen: false,
            report: Report::default(),
            subscriptions: subscriptions.iter().map(|view| view.id).collect(),
            stale: BTreeMap::new(),
            hello,
        };
        self.instances.insert(instance, row);
        self.promote();
        Ok(Joined {
            instance,
            log_id: self.options.log_id,
            incarnation: self.incarnation,
            subscriptions,
            time: self.now,
        })
    }

    fn check_mode(&self, wish: &Subscription) -> Result<()> {
        let name = &wish.name;
        let other = |row: &&SubscriptionRow| row.name == *name && row.mode != wish.mode;
        if self.options.broken == Some(Broken::ModeChanges) || !self.subscriptions.iter().any(|row| other(&row)) {
            return Ok(());
        }
        let message = format!(
            "subscription '{name}' was made with another mode, and that is fixed; delete it with `pillarbox subscription delete \
             {name}` or use another name"
        );
        Err(Error::new(ErrorKind::Invalid, message))
    }

    /// Another filter is a fence for all lanes, and waits for whoever has locked one.
    fn refuse_locked_fence(&self, wish: &Subscription) -> Result<()> {
        let known = self.subscriptions.iter().find(|row| row.name == wish.name);
        let changed = known.filter(|row| row.definition.filter != wish.filter);
        let Some(holder) = changed.and_then(|row| self.holder_of(row)) else { return Ok(()) };
        Err(Error::new(ErrorKind::Busy, format!("instance {} holds the lock of a lane of '{}'", holder.0, wish.name)))
    }

    fn subscribe(&mut self, wish: &Subscription, rejoin: bool) -> SubscriptionView {
        if let Some(row) = self.subscriptions.iter_mut().find(|row| row.name == wish.name) {
            if !rejoin || self.options.broken == Some(Broken::RejoinRedefines) {
                row.redefine(wish, self.now, self.options.broken);
            }
            return row.view();
        }
        let cursor = self.start(wish.start);
        let row = SubscriptionRow {
            id: SubscriptionId(self.subscription_next),
            name: wish.name.clone(),
            definition: Arc::new(Definition::of(wish, 1)),
            formers: FormerFilters::default(),
            mode: wish.mode,
            recovered: BTreeMap::new(),
            pause: None,
            hold: wish.hold,
            lanes: vec![Lane::starting_at(cursor, self.now); wish.lanes as usize],
        };
        self.subscription_next += 1;
        let view = SubscriptionView { created: true, ..row.view() };
        self.subscriptions.push(row);
        view
    }

    /// Exactly what one snapshot shows is settled: a position that is not visible now may still become so.
    fn start(&self, start: Start) -> Cursor {
        let horizon = self.next - 1;
        let pruned = self.log_start - 1;
        let before = |is_before: &dyn Fn(&Event) -> bool| {
            let mut settled: RangeSet = self
                .rows
                .values()
                .filter(|event| is_before(event))
                .map(|event| event.position..=event.position)
                .collect();
            settled.insert_range(1, pruned);
            self.cursor(settled)
        };
        match start {
            Start::Beginning => Cursor { floor: pruned, ..Cursor::default() },
            Start::Position(position) => Cursor { floor: position.min(horizon).max(pruned), ..Cursor::default() },
            Start::Now if self.writers().is_empty() || self.options.broken == Some(Broken::StartNowSkipsHoles) => {
                Cursor { floor: horizon, ..before(&|_| true) }.above_floor()
            }
            Start::Now => before(&|_| true),
            Start::Time(time) => before(&|event| event.created_at < time),
        }
    }

    fn cursor(&self, mut settled: RangeSet) -> Cursor {
        let anchor = settled.last().and_then(|last| self.rows.get(&last)).map(|event| (event.position, event.id));
        let floor = if settled.contains(1) { settled.missing(1, Position::MAX).first().unwrap_or(1) - 1 } else { 0 };
        settled.remove_range(1, floor);
        Cursor { floor, settled, anchor }
    }

    fn observe(&mut self, instance: InstanceId, report: &Report) -> Result<Fleet> {
        let now = self.now;
        let row = self.instances.get_mut(&instance).ok_or_else(|| buried(instance))?;
        row.beat += 1;
        row.beat_at = now;
        row.report = report.clone();
        for (_, lane) in self.lanes().filter(|(_, lane)| lane.owner == Some(instance)) {
            self.check_anchor(&lane.cursor)?;
        }
        let fleet = self.fleet();
        if self.options.broken == Some(Broken::StaleLoad) {
            let stale = self.lanes().map(|(lane, row)| (lane, self.state_of(lane, row))).collect();
            self.instances.get_mut(&instance).ok_or_else(|| buried(instance))?.stale = stale;
        }
        self.bury(|row| row.killed);
        Ok(fleet)
    }

    fn fleet(&self) -> Fleet {
        let lock = |row: &Instance| match (self.options.lock_visible, row.killed) {
            (false, _) => Lock::Unknown,
            (true, true) => Lock::Free,
            (true, false) => Lock::Held,
        };
        let instance = |(id, row): (&InstanceId, &Instance)| InstanceView {
            id: *id,
            beat: row.beat,
            lock: lock(row),
            draining: row.report.draining,
            subscriptions: row.subscriptions.clone(),
        };
        let lane = |(lane, row): (LaneRef, &Lane)| LaneView {
            lane,
            owner: row.owner,
            epoch: row.epoch,
            revision: row.revision,
            takeovers: row.takeovers,
        };
        Fleet {
            instances: self.instances.iter().map(instance).collect(),
            subscriptions: self.subscriptions.iter().map(SubscriptionRow::view).collect(),
            lanes: self.lanes().map(lane).collect(),
            time: self.now,
        }
    }

    /// Removes the rows of instances that are `gone` and own nothing any more.
    fn bury(&mut self, gone: impl Fn(&Instance) -> bool) {
        let owners = self.owners();
        self.instances.retain(|id, row| owners.contains(id) || !gone(row));
    }

    /// Who owns a lane or works on a row of a queue.
    fn owners(&self) -> BTreeSet<InstanceId> {
        let claims =
            |lane: &Lane| lane.deliveries.values().filter_map(|row| Some(row.claim?.owner)).collect::<Vec<_>>();
        self.lanes().flat_map(|(_, lane)| claims(lane).into_iter().chain(lane.owner)).collect()
    }

    fn state_of(&self, lane: LaneRef, row: &Lane) -> LaneState {
        let subscription = self.subscriptions.iter().find(|row| row.id == lane.subscription).expect("of this lane");
        let definition = subscription.definition.clone();
        let on_dead = definition.on_dead;
        LaneState {
            definition,
            ..row.state(subscription.mode, on_dead, self.options.queued_keys_max, self.options.broken)
        }
    }

    fn take(&mut self, instance: InstanceId, takes: &[Take]) -> Result<Vec<Option<Epoch>>> {
        if !self.instances.contains_key(&instance) {
            return Err(buried(instance));
        }
        self.flush();
        let blind = self.options.broken == Some(Broken::TakeWithoutCompare);
        let ruthless = self.options.broken == Some(Broken::TakeFromTheLiving);
        let beats: BTreeMap<InstanceId, i64> = self.instances.iter().map(|(id, row)| (*id, row.beat)).collect();
        self.end_silent(takes, &beats)?;
        let mut victims = BTreeSet::new();
        let mut take = |take: &Take| {
            let lane = self.lane_mut(take.lane)?;
            let beat = lane.owner.and_then(|owner| beats.get(&owner)).filter(|_| !ruthless);
            let has_beaten = take.beat.is_some_and(|seen| beat.is_some_and(|beat| *beat != seen));
            if (lane.epoch != take.expected && !blind) || has_beaten {
                return None;
            }
            if take.cause != TakeCause::Free {
                victims.extend(lane.owner.filter(|owner| *owner != instance));
            }
            Some(lane.take(instance))
        };
        let taken = takes.iter().map(&mut take).collect();
        let owners = self.owners();
        self.instances.retain(|id, _| owners.contains(id) || !victims.contains(id));
        Ok(taken)
    }

    /// Who is about to lose lanes for his silence loses his sessions first, and with them what they have locked.
    fn end_silent(&mut self, takes: &[Take], beats: &BTreeMap<InstanceId, i64>) -> Result<()> {
        for take in takes {
            let at_epoch = |lane: &&Lane| lane.epoch == take.expected;
            let Some(owner) = self.lane(take.lane).filter(at_epoch).and_then(|lane| lane.owner) else { continue };
            // Who has beaten since keeps its lane, and nobody asks for the lock.
            let has_beaten = take.beat.is_some() && take.beat != beats.get(&owner).copied();
            if has_beaten || !self.holding.contains(&owner) {
                continue;
            }
            if take.beat.is_none() || self.options.broken == Some(Broken::HeirWaits) {
                return Err(Error::new(ErrorKind::Busy, format!("instance {} holds the lock of its lane", owner.0)));
            }
            self.holding.remove(&owner);
        }
        Ok(())
    }

    fn load(&self, instance: InstanceId, lane: LaneRef, epoch: Epoch) -> Result<Option<LaneState>> {
        let Some(row) = self.lane(lane).filter(|row| row.epoch == epoch) else { return Ok(None) };
        self.check_anchor(&row.cursor)?;
        if self.options.broken == Some(Broken::StaleLoad) {
            let stale = self.instances.get(&instance).and_then(|row| row.stale.get(&lane));
            return Ok(Some(stale.cloned().unwrap_or_else(|| self.state_of(lane, row))));
        }
        Ok(Some(self.state_of(lane, row)))
    }

    fn check_anchor(&self, cursor: &Cursor) -> Result<()> {
        let Some((position, id)) = cursor.anchor else { return Ok(()) };
        if position <= self.pruned_to || self.options.broken == Some(Broken::AnchorIgnored) {
            return Ok(());
        }
        match self.rows.get(&position) {
            Some(event) if event.id == id => Ok(()),
            _ => Err(Error::new(
                ErrorKind::Foreign,
                format!(
                    "the log is not the one that was delivered from: position {position} was event {id} and is not any more; \
                     say what this database is with `pillarbox migrate --adopt` or `--fresh`"
                ),
            )),
        }
    }

    fn settle(&mut self, instance: InstanceId, settlement: &Settlement) -> Result<Vec<bool>> {
        let (now, broken) = (self.now, self.options.broken);
        let fails = std::mem::take(&mut self.settle_fails);
        if fails && broken != Some(Broken::SettleNotAtomic) {
            return Err(unavailable("the connection was lost before the settlement was committed"));
        }
        if broken == Some(Broken::PutFailsOnExisting) {
            self.refuse_existing(settlement)?;
        }
        self.flush();
        // What retention has removed is not dead; between the events of a journal it looks alike.
        let mut closed = settlement.closed.clone();
        closed.remove_range(0, self.pruned_to);
        self.closed.union(&closed);
        let mut settled = Vec::with_capacity(settlement.lanes.len());
        for write in &settlement.lanes {
            let owns = |lane: &&mut Lane| lane.epoch == write.epoch && lane.owner == Some(instance);
            let fenced = |lane: &&mut Lane| broken == Some(Broken::FenceIgnored) || owns(lane);
            let announces = write.announces() && broken != Some(Broken::AnnouncesUncounted);
            let counted = |lane: &&mut Lane| lane.revision == write.revision || !announces;
            let Some(lane) = self.lane_mut(write.lane).filter(fenced).filter(counted) else {
                settled.push(false);
                continue;
            };
            let queue = lane.unqueued(&write.queue, broken);
            let before = lane.cursor.positions();
            lane.write_cursor(write, now);
            if fails {
                return Err(unavailable("the connection was lost in the middle of the settlement"));
            }
            lane.write_deliveries(write, &before, now, broken);
            lane.write_queue(queue, instance, now);
            if write.release {
                lane.release();
            }
            settled.push(true);
        }
        if settlement.lanes.iter().any(|write| !write.queue.is_empty()) {
            self.promote();
        }
        Ok(settled)
    }

    fn refuse_existing(&self, settlement: &Settlement) -> Result<()> {
        for write in &settlement.lanes {
            let rows = self.lane(write.lane).map(|lane| &lane.deliveries);
            if write.put.iter().any(|put| rows.is_some_and(|rows| rows.contains_key(&put.position))) {
                return Err(Error::new(ErrorKind::Invalid, "the delivery is there already"));
            }
        }
        Ok(())
    }

    fn leave(&mut self, instance: InstanceId) {
        let lanes = self.subscriptions.iter_mut().flat_map(|row| &mut row.lanes);
        lanes.filter(|lane| lane.owner == Some(instance)).for_each(Lane::release);
        self.give_back_claims(instance);
        self.promote();
        self.instances.remove(&instance);
    }

    /// Who stands still in the middle of a transaction that has locked lanes of a subscription.
    pub(crate) fn holder_of(&self, row: &SubscriptionRow) -> Option<InstanceId> {
        row.lanes.iter().filter_map(|lane| lane.owner).find(|owner| self.holding.contains(owner))
    }

    /// The subscriptions whose lanes somebody has locked who stands still.
    pub(crate) fn locked(&self) -> BTreeSet<SubscriptionId> {
        self.subscriptions.iter().filter(|row| self.holder_of(row).is_some()).map(|row| row.id).collect()
    }

    pub(crate) fn lanes(&self) -> impl Iterator<Item = (LaneRef, &Lane)> {
        self.subscriptions.iter().flat_map(|row| {
            let lane_ref = |lane| LaneRef { subscription: row.id, lane };
            row.lanes.iter().enumerate().map(move |(lane, state)| (lane_ref(lane as u32), state))
        })
    }

    pub(crate) fn lane(&self, lane: LaneRef) -> Option<&Lane> {
        let row = self.subscriptions.iter().find(|row| row.id == lane.subscription)?;
        row.lanes.get(lane.lane as usize)
    }

    fn lane_mut(&mut self, lane: LaneRef) -> Option<&mut Lane> {
        let row = self.subscriptions.iter_mut().find(|row| row.id == lane.subscription)?;
        row.lanes.get_mut(lane.lane as usize)
    }
}

impl SubscriptionRow {
    /// Takes what the newest started instance says. Another filter is a fence for all lanes.
    fn redefine(&mut self, wish: &Subscription, now: Timestamp, broken: Option<Broken>) {
        let before = self.definition.clone();
        let definition = Definition::of(wish, before.number);
        let other_hold = std::mem::replace(&mut self.hold, wish.hold) != wish.hold;
        if definition.says_the_same_as(&before) && !other_hold {
            return;
        }
        let other_filter = definition.filter != before.filter;
        let number = before.number + i64::from(other_filter || broken != Some(Broken::DefinitionKeepsNumber));
        self.definition = Arc::new(Definition { number, ..definition });
        if !other_filter {
            return;
        }
        if broken != Some(Broken::FormerFiltersForgotten) {
            self.formers.end(&before, now, self.lanes.iter().map(|lane| &lane.cursor));
        }
        if broken != Some(Broken::DefineWithoutFence) {
            self.lanes.iter_mut().for_each(|lane| lane.epoch += 1);
        }
    }

    pub(crate) fn view(&self) -> SubscriptionView {
        SubscriptionView {
            id: self.id,
            name: self.name.clone(),
            definition: (*self.definition).clone(),
            lanes: self.lanes.len() as u32,
            paused: self.pause.is_some(),
            created: false,
        }
    }
}

trait AboveFloor {
    fn above_floor(self) -> Self;
}

impl AboveFloor for Cursor {
    fn above_floor(mut self) -> Self {
        self.settled.remove_range(1, self.floor);
        self
    }
}

fn buried(instance: InstanceId) -> Error {
    Error::new(
        ErrorKind::Ended,
        format!(
            "instance {} was taken to have ended and its lanes have other owners; join again under a new id",
            instance.0
        ),
    )
}

pub(crate) fn unavailable(message: &str) -> Error {
    Error::new(ErrorKind::Unavailable, message)
}
