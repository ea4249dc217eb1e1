use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use pillarbox::admin::snapshot::Lost;
use pillarbox::admin::{
    Books, Change, Changed, Check, ClaimRecord, DeliveryRecord, EventRecord, Fate, InstanceStatus, LaneBook, Level,
    ListQuery, ListRow, LogStatus, Operator, Pause, PrunePolicy, Pruned, REASON_DEAD, REASON_HOLD, RecoveredCount,
    Selection, SettledBy, State, Status, SubscriptionStatus,
};
use pillarbox::limit::LANES_MAX;
use pillarbox::store::{
    Cursor, DeliveryRow, Epoch, InstanceId, KeyHash, RangeSet, RecoveryCause, SubscriptionReport, lane_of,
};
use pillarbox::{Error, ErrorKind, Event, Filter, NewEvent, OnDead, Position, Result, Start, Timestamp};
use uuid::Uuid;

use crate::memory_lane::{Covered, Lane, Row};
use crate::memory_log::{Inner, SubscriptionRow};
use crate::memory_queue::Held;
use crate::{Broken, MemoryLog, MemoryStore};

/// Operators. What is named like a function of [`Operator`] keeps its contract.
impl MemoryLog {
    /// See [`Operator::change`].
    pub fn change(&self, change: &Change, dry_run: bool) -> Result<Changed> {
        let mut inner = self.inner();
        let changed = inner.change(change, dry_run)?;
        inner.promote();
        drop(inner);
        self.ring();
        Ok(changed)
    }

    /// See [`Operator::books`].
    pub fn books(&self) -> Books {
        let inner = self.inner();
        Books {
            incarnation: inner.incarnation,
            log_start: inner.log_start,
            horizon: inner.next - 1,
            dead: inner.dead.clone(),
            lanes: inner.subscriptions.iter().flat_map(SubscriptionRow::books).collect(),
            former_filters: inner.subscriptions.iter().map(|row| (row.name.clone(), row.formers.clone())).collect(),
        }
    }

    /// The floor of every lane, by subscription and number; for auditors.
    pub fn floors(&self) -> Vec<((String, u32), Position)> {
        let inner = self.inner();
        let of = |row: &SubscriptionRow| {
            let lanes = row.lanes.iter().zip(0..);
            lanes.map(|(lane, number)| ((row.name.clone(), number), lane.cursor.floor)).collect::<Vec<_>>()
        };
        inner.subscriptions.iter().flat_map(of).collect()
    }

    /// See [`Operator::show`].
    pub fn show_event(&self, id: Uuid) -> Option<EventRecord> {
        let inner = self.inner();
        let event = inner.event_of(id)?;
        let subscriptions = inner.subscriptions.iter().map(|row| inner.fate(row, &event)).collect();
        Some(EventRecord { event: (*event).clone(), subscriptions })
    }

    /// What became of an event for one subscription; None if there is no such event or subscription.
    pub fn fate(&self, id: Uuid, subscription: &str) -> Option<Fate> {
        let inner = self.inner();
        let row = inner.subscriptions.iter().find(|row| row.name == subscription)?;
        Some(inner.fate(row, &*inner.event_of(id)?))
    }

    /// See [`Operator::status`].
    pub fn status(&self) -> Status {
        let inner = self.inner();
        let mut subscriptions: Vec<_> = inner.subscriptions.iter().map(|row| inner.subscription_status(row)).collect();
        subscriptions.sort_by(|left, right| left.name.cmp(&right.name));
        Status { at: inner.now, log: inner.log_status(), subscriptions, instances: inner.instance_status() }
    }

    /// See [`Operator::prune`].
    pub fn prune(&self, policy: &PrunePolicy) -> Pruned {
        self.inner().prune(policy)
    }

    /// See [`Operator::reset`].
    pub fn reset(&self) {
        self.inner().reset();
        self.ring_end();
    }

    /// Moves a cursor by hand, past the books and the fence: what an audit must notice.
    pub fn tamper_cursor(&self, subscription: &str, lane: u32, floor: Position) {
        let mut inner = self.inner();
        let row = inner.subscriptions.iter_mut().find(|row| row.name == subscription);
        if let Some(lane) = row.and_then(|row| row.lanes.get_mut(lane as usize)) {
            lane.cursor.floor = floor;
            lane.cursor.settled.remove_range(1, floor);
        }
    }

    /// Replaces the identity of the event at `position`, as a restored backup would: what an anchor must notice.
    pub fn tamper_event(&self, position: Position, id: Uuid) {
        let mut inner = self.inner();
        if let Some(event) = inner.rows.get_mut(&position) {
            *event = Arc::new(Event { id, ..(**event).clone() });
        }
    }
}

impl Operator for MemoryStore {
    async fn status(&self) -> Result<Status> {
        Ok(self.log().status())
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<ListRow>> {
        Ok(self.log().inner().list(query))
    }

    async fn show(&self, id: Uuid) -> Result<Option<EventRecord>> {
        Ok(self.log().show_event(id))
    }

    async fn change(&self, change: &Change, dry_run: bool) -> Result<Changed> {
        self.log().change(change, dry_run)
    }

    async fn publish(&self, events: &[NewEvent]) -> Result<Vec<Uuid>> {
        events.iter().try_for_each(|event| event.validate(pillarbox::limit::PAYLOAD_BYTES_MAX))?;
        let positions = self.log().publish(events.iter().cloned());
        Ok(self.log().fetch(&positions)?.iter().map(|event| event.id).collect())
    }

    async fn books(&self) -> Result<Books> {
        Ok(self.log().books())
    }

    async fn prune(&self, policy: &PrunePolicy) -> Result<Pruned> {
        Ok(self.log().prune(policy))
    }

    async fn doctor(&self) -> Result<Vec<Check>> {
        let finding = "the log is in memory and ends with the process".to_owned();
        Ok(vec![Check { name: "durability".to_owned(), level: Level::Warning, finding, fix: None }])
    }

    async fn reset(&self) -> Result<()> {
        self.log().reset();
        Ok(())
    }
}

impl Inner {
    fn change(&mut self, change: &Change, dry_run: bool) -> Result<Changed> {
        self.refuse_locked(change)?;
        match change {
            Change::Requeue { subscription, which, limit } => self.requeue(subscription, which, *limit, dry_run),
            Change::Recover { subscription, instance, silent_for } => {
                self.recover_by_operator(subscription.as_deref(), *instance, *silent_for, dry_run)
            }
            Change::Skip { subscription, event, reason } => self.skip(subscription, *event, reason, dry_run),
            Change::Pause { subscription, by, reason } => {
                let reason = reason.clone().filter(|_| self.options.broken != Some(Broken::PauseForgetsReason));
                let pause = Pause { by: *by, reason };
                let before = self.subscription(subscription)?.pause.clone();
                let pause =
                    if self.options.broken == Some(Broken::ReceiverPausesOver) { pause } else { pause.over(before) };
                self.set_paused(subscription, Some(pause), dry_run)
            }
            Change::Resume(name) => self.set_paused(name, None, dry_run),
            Change::Rewind { subscription, to, key: None } => self.rewind(subscription, *to, dry_run),
            Change::Rewind { subscription, to, key: Some(key) } => self.rewind_key(subscription, *to, key, dry_run),
            Change::Delete(name) => {
                let index = self.unused(name)?;
                if !dry_run {
                    self.subscriptions.remove(index);
                }
                Ok(changed(1, Vec::new(), format!("subscription '{name}' is deleted")))
            }
            Change::Rename { from, to } => {
                let index = self.unused(from)?;
                if self.subscriptions.iter().any(|row| row.name == *to) {
                    return invalid(format!("a subscription '{to}' exists already; choose another name"));
                }
                if !dry_run {
                    self.subscriptions[index].name.clone_from(to);
                }
                Ok(changed(1, Vec::new(), format!("subscription '{from}' is now '{to}'")))
            }
            Change::Relane { subscription, lanes } => self.relane(subscription, *lanes, dry_run),
        }
    }

    /// What changes lanes or their deliveries waits for whoever has locked them, and gives up after a while.
    fn refuse_locked(&self, change: &Change) -> Result<()> {
        let (Change::Requeue { subscription, .. }
        | Change::Skip { subscription, .. }
        | Change::Rewind { subscription, .. }
        | Change::Relane { subscription, .. }) = change
        else {
            return Ok(());
        };
        let row = self.subscriptions.iter().find(|row| row.name == *subscription);
        let Some(holder) = row.and_then(|row| self.holder_of(row)) else { return Ok(()) };
        Err(Error::new(ErrorKind::Busy, format!("instance {} holds the lock of a lane", holder.0)))
    }

    fn subscription(&mut self, name: &str) -> Result<&mut SubscriptionRow> {
        self.subscriptions.iter_mut().find(|row| row.name == name).ok_or_else(|| unknown(name))
    }

    fn unused(&self, name: &str) -> Result<usize> {
        let index = self.subscriptions.iter().position(|row| row.name == name).ok_or_else(|| unknown(name))?;
        let id = self.subscriptions[index].id;
        if self.instances.values().any(|row| !row.killed && row.subscriptions.contains(&id)) {
            return invalid(format!("a living instance runs subscription '{name}'; stop it first"));
        }
        Ok(index)
    }

    fn set_paused(&mut self, name: &str, pause: Option<Pause>, dry_run: bool) -> Result<Changed> {
        let row = self.subscription(name)?;
        let count = u64::from(row.pause.is_some() != pause.is_some());
        let what = if pause.is_some() { "paused" } else { "running" };
        if !dry_run {
            row.pause = pause;
        }
        Ok(changed(count, Vec::new(), format!("subscription '{name}' is {what}")))
    }

    fn requeue(&mut self, name: &str, which: &Selection, limit: usize, dry_run: bool) -> Result<Changed> {
        let now = self.now;
        let events = self.events();
        let row = self.subscription(name)?;
        let chosen = |row: &Row| {
            let event = events.get(&row.delivery.position);
            let dead = row.delivery.state == State::Dead;
            match which {
                Selection::Event(id) => event.is_some_and(|event| event.id == *id),
                Selection::Version(stream, version) => event.is_some_and(|event| {
                    event.key.as_deref() == Some(stream) && event.stream_version == Some(*version)
                }),
                Selection::Key(key) => dead && row.delivery.key.as_deref() == Some(key),
                Selection::All => dead,
            }
        };
        let lanes = row.lanes.iter().enumerate();
        let rows = lanes.flat_map(|(lane, state)| state.deliveries.values().map(move |row| (lane, row)));
        let mut positions: Vec<(Position, usize)> =
            rows.filter(|(_, row)| chosen(row)).map(|(lane, row)| (row.delivery.position, lane)).collect();
        positions.sort_unstable();
        positions.truncate(limit);
        for (position, lane) in positions.iter().filter(|_| !dry_run) {
            let lane = &mut row.lanes[*lane];
            lane.revision += 1;
            let row = lane.deliveries.get_mut(position).expect("it was just found");
            row.set(DeliveryRow { state: State::Pending, attempts: 0, due_at: now, ..row.delivery.clone() }, now);
            row.free();
        }
        let ids: Vec<Uuid> = positions.iter().filter_map(|(position, _)| Some(events.get(position)?.id)).collect();
        Ok(changed(positions.len() as u64, ids, format!("{} deliveries are due now", positions.len())))
    }

    fn skip(&mut self, name: &str, id: Uuid, reason: &str, dry_run: bool) -> Result<Changed> {
        let now = self.now;
        let position = self.event_of(id).map(|event| event.position);
        let row = self.subscription(name)?;
        let has = |lane: &&mut Lane| position.is_some_and(|position| lane.deliveries.contains_key(&position));
        let (Some(position), Some(lane)) = (position, row.lanes.iter_mut().find(has)) else {
            let message = format!("event {id} has no delivery in subscription '{name}'; see `pillarbox why {id}`");
            return Err(Error::new(ErrorKind::NotFound, message));
        };
        if !dry_run {
            lane.deliveries.remove(&position);
            lane.skipped.insert(position, (reason.to_owned(), now));
            lane.revision += 1;
        }
        Ok(changed(1, vec![id], format!("event {id} is given up")))
    }

    fn recover_by_operator(
        &mut self,
        name: Option<&str>,
        instance: Option<InstanceId>,
        silent_for: Duration,
        dry_run: bool,
    ) -> Result<Changed> {
        if let Some(name) = name {
            self.subscription(name)?;
        }
        let (now, beats) = (self.now, self.beats());
        let silent = |owner| beats.get(&owner).is_none_or(|(_, beat_at)| now.since(*beat_at) >= silent_for);
        let recovered = self.recover_where(dry_run, |row, held| {
            let meant = name.is_none_or(|name| row.name == name) && instance.is_none_or(|id| held.owner == id);
            (meant && silent(held.owner)).then_some(RecoveryCause::Operator)
        });
        let count = recovered.claims.iter().map(|(.., count)| count).sum();
        Ok(changed(count, Vec::new(), format!("{count} claims were taken from their owners")))
    }

    fn rewind(&mut self, name: &str, to: Start, dry_run: bool) -> Result<Changed> {
        let broken = self.options.broken;
        let target = self.target(to)?;
        let count = self.subscription(name)?.lanes.len();
        for index in (0..count).filter(|_| !dry_run) {
            let lane = &mut self.subscription(name)?.lanes[index];
            lane.rewind(target, broken);
            let cursor = lane.cursor.clone();
            let anchor = self.anchor(&cursor);
            self.subscription(name)?.lanes[index].cursor.anchor = anchor;
        }
        if !dry_run {
            self.subscription(name)?.formers.rewind(&RangeSet::from_iter([1..=target]));
        }
        Ok(changed(
            count as u64,
            Vec::new(),
            format!("subscription '{name}' replays the events above position {target}"),
        ))
    }

    /// The settled events of one key become deliveries again, before or between those that it has.
    fn rewind_key(&mut self, name: &str, to: Start, key: &str, dry_run: bool) -> Result<Changed> {
        let (now, broken, target) = (self.now, self.options.broken, self.target(to)?);
        let of_key = |event: &&Arc<Event>| event.key.as_deref() == Some(key);
        let events: Vec<Arc<Event>> =
            self.rows.range(target + 1..).map(|(_, event)| event).filter(of_key).cloned().collect();
        let row = self.subscription(name)?;
        let lanes = row.lanes.len() as u32;
        let filter = row.definition.filter.clone();
        let lane = &mut row.lanes[lane_of(Some(KeyHash::of(key)), 0, lanes) as usize];
        // A cursor that was cut at its limit does not count all that have a delivery.
        let passed = |position| lane.settled(position) || lane.deliveries.contains_key(&position);
        let replayed = |event: &&Arc<Event>| filter.wants(event) && passed(event.position);
        let replayed: Vec<Arc<Event>> = events.iter().filter(replayed).cloned().collect();
        if !dry_run && !replayed.is_empty() {
            // What the owner puts behind deliveries that it knows would stand before those that it does not know.
            lane.epoch += Epoch::from(broken != Some(Broken::RewindKeyWithoutFence));
            lane.revision += 1;
            for (arrival, event) in (lane.next_arrival()..).zip(&replayed) {
                row.formers.replay(event.key_hash(), event.position, &event.topic, &event.r#type);
                lane.replay(DeliveryRow { arrival, ..waiting(event, now) }, now);
            }
        }
        let ids: Vec<Uuid> = replayed.iter().map(|event| event.id).collect();
        Ok(changed(ids.len() as u64, ids, format!("key '{key}' replays the events above position {target}")))
    }

    /// Only when nothing is between the lanes: equal floors, nothing settled above, nobody working.
    fn relane(&mut self, name: &str, lanes: u32, dry_run: bool) -> Result<Changed> {
        if lanes == 0 || lanes > LANES_MAX {
            return invalid(format!("lanes = {lanes} is outside 1 to lanes_max = {LANES_MAX}"));
        }
        self.refuse_unquiet(name)?;
        let (now, broken) = (self.now, self.options.broken);
        let row = self.subscription(name)?;
        let before = row.lanes.len();
        if !dry_run {
            row.relane(lanes, now, broken);
        }
        Ok(changed(u64::from(lanes), Vec::new(), format!("subscription '{name}' has {lanes} lanes (it had {before})")))
    }

    fn refuse_unquiet(&mut self, name: &str) -> Result<()> {
        let working: BTreeSet<InstanceId> = self
            .instances
            .iter()
            .filter(|(_, instance)| !instance.killed)
            .filter(|(_, instance)| instance.report.subscriptions.get(name).is_some_and(|report| report.in_flight > 0))
            .map(|(id, _)| *id)
            .collect();
        let row = self.subscription(name)?;
        let floor = row.floor();
        let level = |lane: &Lane| lane.cursor.floor == floor && lane.cursor.settled.is_empty();
        let why = if row.pause.is_none() {
            "it is running; pause it first"
        } else if !row.lanes.iter().all(level) {
            "its lanes are not at the same place"
        } else if row.lanes.iter().filter_map(|lane| lane.owner).any(|owner| working.contains(&owner)) {
            "events are still in flight"
        } else if row.rows().any(|row| row.claim.is_some()) {
            "deliveries are being worked on"
        } else {
            return Ok(());
        };
        invalid(format!("the lanes of '{name}' cannot be changed now: {why}"))
    }

    fn target(&self, to: Start) -> Result<Position> {
        let lowest = self.log_start - 1;
        match to {
            Start::Beginning => Ok(lowest),
            Start::Position(position) => Ok(position.max(lowest)),
            Start::Time(time) => {
                let first = self.rows.values().find(|event| event.created_at >= time);
                Ok(first.map_or(self.next, |event| event.position) - 1)
            }
            Start::Now => invalid("a rewind goes back; give a position, a time or the start".to_owned()),
        }
    }

    fn anchor(&self, cursor: &pillarbox::store::Cursor) -> Option<(Position, Uuid)> {
        let settled = cursor.positions();
        let visible = self.rows.values().rev().find(|event| settled.contains(event.position))?;
        Some((visible.position, visible.id))
    }

    fn lives(&self, id: pillarbox::store::InstanceId) -> bool {
        self.instances.get(&id).is_some_and(|instance| !instance.killed)
    }

    fn event_of(&self, id: Uuid) -> Option<Arc<Event>> {
        let at = self.positions.get(&id).and_then(|at| self.rows.get(at)).filter(|event| event.id == id);
        at.or_else(|| self.rows.values().chain(self.kept.values()).find(|event| event.id == id)).cloned()
    }

    fn events(&self) -> BTreeMap<Position, Arc<Event>> {
        self.kept.iter().chain(&self.rows).map(|(position, event)| (*position, event.clone())).collect()
    }

    fn fate(&self, row: &SubscriptionRow, event: &Event) -> Fate {
        let lane_number = lane_of(event.key_hash(), event.position, row.lanes.len() as u32);
        let lane = &row.lanes[lane_number as usize];
        let entry = lane.entries.iter().find(|entry| entry.covered.contains(event.position));
        let by = |entry: &crate::memory_lane::Covered| SettledBy {
            epoch: entry.epoch,
            after: entry.after,
            before: entry.before,
        };
        Fate {
            subscription: row.name.clone(),
            wanted: row.formers.wants(&row.definition.filter, event).unwrap_or(true),
            passed_under: row.formers.passed_under(event),
            lane: lane_number,
            owner: lane.owner.map(|owner| (owner, self.lives(owner))),
            floor: lane.cursor.floor,
            settled: lane.settled(event.position),
            settled_by: entry.map(by),
            before_start: lane.before_start.contains(event.position),
            in_dead_range: self.dead.contains(event.position),
            delivery: lane.deliveries.get(&event.position).map(|found| self.delivery_record(row, lane, found)),
            skipped: lane.skipped.get(&event.position).cloned(),
        }
    }

    fn delivery_record(&self, subscription: &SubscriptionRow, lane: &Lane, row: &Row) -> DeliveryRecord {
        let head = head_of(subscription, lane, row);
        let id_of = |position| self.rows.get(&position).or_else(|| self.kept.get(&position)).map(|event| event.id);
        let head = head.and_then(|head| Some((id_of(head.position)?, head.position, head.state)));
        let state = match row.delivery.state {
            _ if head.is_some() => State::Blocked,
            State::Delayed if row.delivery.due_at <= self.now => State::Pending,
            state => state,
        };
        DeliveryRecord {
            state,
            attempts: row.delivery.attempts,
            due_at: row.delivery.due_at,
            since: row.delivery.since,
            claim: row.claim.map(|held| self.claim_record(held)),
            errors: row.errors.clone(),
            head,
        }
    }

    fn claim_record(&self, held: Held) -> ClaimRecord {
        let beat_at = self.instances.get(&held.owner).map(|instance| instance.beat_at);
        ClaimRecord { instance: held.owner, since: held.since, beat_at }
    }

    /// The states of all unfinished events of a subscription, in log order.
    fn unfinished(&self, row: &SubscriptionRow) -> Vec<(Arc<Event>, Option<DeliveryRecord>)> {
        let lanes = row.lanes.len() as u32;
        let lane = |event: &Event| &row.lanes[lane_of(event.key_hash(), event.position, lanes) as usize];
        let unfinished = |event: Arc<Event>| {
            let lane = lane(&event);
            let delivery = lane.deliveries.get(&event.position);
            let record = delivery.map(|found| self.delivery_record(row, lane, found));
            let waiting = record.is_some() || (row.definition.filter.wants(&event) && !lane.settled(event.position));
            waiting.then_some((event, record))
        };
        self.events().into_values().filter_map(unfinished).collect()
    }

    fn subscription_status(&self, row: &SubscriptionRow) -> SubscriptionStatus {
        let unfinished = self.unfinished(row);
        let state = |record: &Option<DeliveryRecord>| record.as_ref().map_or(State::Pending, |record| record.state);
        let count = |wanted: State| unfinished.iter().filter(|(_, record)| state(record) == wanted).count() as u64;
        let mut owners: Vec<_> =
            row.lanes.iter().filter_map(|lane| lane.owner).filter(|owner| self.lives(*owner)).collect();
        let lanes_owned = owners.len() as u32;
        owners.sort_unstable();
        owners.dedup();
        let moving = |record: &Option<DeliveryRecord>| !matches!(state(record), State::Delayed | State::Dead);
        let since = |event: &Event| event.deliver_at.map_or(event.created_at, |at| at.max(event.created_at));
        let oldest = unfinished.iter().filter(|(_, record)| moving(record)).map(|(event, _)| since(event)).min();
        let retrying = unfinished.iter().filter_map(|(_, record)| record.as_ref());
        let floor = row.lanes.iter().map(|lane| lane.cursor.floor).min().unwrap_or(0);
        let claimed_at = row.rows().filter_map(|row| Some(row.claim?.since)).min();
        SubscriptionStatus {
            id: row.id,
            name: row.name.clone(),
            mode: row.mode,
            filter: row.definition.filter.clone(),
            definition: row.definition.number,
            lanes: row.lanes.len() as u32,
            on_dead: row.definition.on_dead,
            retry: row.definition.retry,
            paused: row.pause.is_some(),
            paused_by: row.pause.as_ref().map(|pause| pause.by),
            paused_reason: row.pause.as_ref().and_then(|pause| pause.reason.clone()),
            orphaned: !self.instances.values().any(|living| !living.killed && living.subscriptions.contains(&row.id)),
            pending: count(State::Pending),
            delayed: count(State::Delayed),
            processing: count(State::Processing),
            retrying: count(State::Retrying),
            blocked: count(State::Blocked),
            dead: if self.options.broken == Some(Broken::StatusForgetsDead) { 0 } else { count(State::Dead) },
            oldest_age_seconds: oldest.map(|oldest| self.now.since(oldest).as_secs_f64()),
            oldest_due: retrying.filter(|record| record.state == State::Retrying).map(|record| record.due_at).min(),
            lag: (self.next - 1 - floor).max(0),
            lanes_owned,
            owners,
            floor,
            holds_bytes: self.rows.range(floor + 1..).map(|(_, event)| event.size() as i64).sum(),
            oldest_processing_seconds: claimed_at.map(|since| self.now.since(since).as_secs_f64()),
            recovered: row.recovered.iter().map(recovered_count).collect(),
            report: self.subscription_report(&row.name),
        }
    }

    fn subscription_report(&self, name: &str) -> SubscriptionReport {
        let mut whole = SubscriptionReport::default();
        let living = self.instances.values().filter(|instance| !instance.killed);
        for part in living.filter_map(|instance| instance.report.subscriptions.get(name)) {
            whole.in_flight += part.in_flight;
            whole.delivered += part.delivered;
            whole.delivered_at = whole.delivered_at.max(part.delivered_at);
            whole.breaker = whole.breaker.or_else(|| part.breaker.clone());
            whole.flood_guard |= part.flood_guard;
            whole.stopped = whole.stopped.or_else(|| part.stopped.clone());
            whole.definition = whole.definition.max(part.definition);
            whole.differs |= part.differs;
        }
        whole
    }

    fn log_status(&self) -> LogStatus {
        LogStatus {
            log_id: self.options.log_id,
            incarnation: self.incarnation,
            schema_version: 1,
            log_start: self.log_start,
            horizon: self.next - 1,
            events: self.rows.len() as i64,
            bytes: self.rows.values().map(|event| event.size() as i64).sum(),
            kept: self.kept.len() as i64,
            holders: Vec::new(),
            held_seconds: None,
            recovery_at: self.recovery_at,
            alarms: self.subscriptions.iter().filter_map(lost).map(|lost| lost.alarm()).collect(),
        }
    }

    fn instance_status(&self) -> Vec<InstanceStatus> {
        let owned = |id| self.lanes().filter(|(_, lane)| lane.owner == Some(id)).count() as u32;
        let status = |(id, row): (&pillarbox::store::InstanceId, &crate::memory_log::Instance)| InstanceStatus {
            id: *id,
            host: row.hello.host.clone(),
            pid: row.hello.pid,
            version: row.hello.version.clone(),
            started_at: row.started_at,
            beat_at: row.beat_at,
            alive: !row.killed,
            lanes: owned(*id),
            report: row.report.clone(),
        };
        self.instances.iter().map(status).collect()
    }

    fn list(&self, query: &ListQuery) -> Vec<ListRow> {
        let mut rows: Vec<ListRow> = Vec::new();
        if query.subscription.is_none() && query.state.is_none() {
            rows.extend(self.rows.values().map(|event| list_row(event, None, None)));
        }
        for subscription in &self.subscriptions {
            let named = query.subscription.as_ref().is_some_and(|name| *name == subscription.name);
            if named || (query.subscription.is_none() && query.state.is_some()) {
                let unfinished = self.unfinished(subscription).into_iter();
                rows.extend(unfinished.map(|(event, record)| list_row(&event, Some(&subscription.name), record)));
            }
        }
        let topics = Filter { topics: query.topic.iter().cloned().collect(), types: Vec::new() };
        let correlated = |row: &ListRow| {
            query.correlation_id.is_none()
                || self.rows.get(&row.position).is_some_and(|event| event.correlation_id() == query.correlation_id)
        };
        rows.retain(|row| {
            query.state.is_none_or(|state| row.state == Some(state))
                && query.key.as_ref().is_none_or(|key| row.key.as_ref() == Some(key))
                && topics.matches(&row.topic, &row.r#type)
                && correlated(row)
        });
        rows.sort_by_key(|row| row.position);
        rows.truncate(query.limit);
        rows
    }

    fn prune(&mut self, policy: &PrunePolicy) -> Pruned {
        let mut pruned = Pruned::default();
        // What it commits makes everything durable that it has seen.
        self.flush();
        if let Some(dead) = policy.dead {
            let old = |row: &Row, now: Timestamp| row.died_at.is_some_and(|died_at| now.since(died_at) > dead);
            let now = self.now;
            let locked = self.locked();
            let rows = self.subscriptions.iter_mut().filter(|row| !locked.contains(&row.id));
            for lane in rows.flat_map(|row| &mut row.lanes) {
                let gone: Vec<Position> =
                    lane.deliveries.iter().filter(|(_, row)| old(row, now)).map(|(position, _)| *position).collect();
                pruned.dead += gone.len() as u64;
                let gone = if policy.dry_run { Vec::new() } else { gone };
                lane.revision += i64::from(!gone.is_empty());
                for position in gone {
                    lane.deliveries.remove(&position);
                    lane.skipped.insert(position, (REASON_DEAD.to_owned(), now));
                }
            }
        }
        let unreceived = self.options.broken == Some(Broken::RetentionTakesUnreceived);
        let takes_events = unreceived || policy.takes_events(!self.subscriptions.is_empty());
        if let Some(keep) = policy.keep.filter(|_| takes_events) {
            if !policy.dry_run && policy.held {
                let skipped = |log: &Self| log.lanes().map(|(_, lane)| lane.skipped.len() as u64).sum::<u64>();
                let before = skipped(self);
                self.expire_holds(keep, policy.slice);
                pruned.undelivered = skipped(self) - before;
            }
            self.prune_events(keep, policy, &mut pruned);
        }
        let needed = self.needed();
        self.kept.retain(|position, _| needed.contains(*position));
        let log_start = self.log_start;
        self.subscriptions.iter_mut().for_each(|row| _ = row.formers.prune(log_start));
        self.promote();
        pruned
    }

    /// Moves subscriptions on whose hold is over for some of what they have not settled, and records what they lose.
    fn expire_holds(&mut self, keep: Duration, slice: usize) {
        let (now, broken, locked) = (self.now, self.options.broken, self.locked());
        for row in self.subscriptions.iter_mut().filter(|row| !locked.contains(&row.id)) {
            let Some(hold) = row.hold.map(|hold| hold.max(keep)) else { continue };
            let next = self.rows.range(row.floor() + 1..).take(slice);
            let over = next.take_while(|(_, event)| now.since(event.created_at) > hold).last();
            let Some((&end, _)) = over else { continue };
            // What was settled when a filter ended was received, also where the cursor was cut since.
            let received = |event: &Event| row.formers.judge_of(event.key_hash(), event.position).is_some();
            let wanted = |event: &Event| row.definition.filter.wants(event) && !received(event);
            let awaited: Vec<&Arc<Event>> =
                self.rows.range(..=end).map(|(_, event)| event).filter(|event| wanted(event)).collect();
            // What is not visible and not proven dead may come from whoever writes now.
            let mut unknown: RangeSet = [1..=end].into_iter().collect();
            unknown.subtract(&self.rows.range(..=end).map(|(position, _)| *position..=*position).collect());
            unknown.subtract(&self.dead);
            let count = row.lanes.len() as u32;
            for (number, lane) in (0..).zip(&mut row.lanes).filter(|(_, lane)| lane.cursor.floor < end) {
                let passed = row.formers.passed_by(number, count as usize);
                let own = awaited.iter().filter(|event| lane_of(event.key_hash(), event.position, count) == number);
                let own: RangeSet = own.map(|event| event.position..=event.position).collect();
                lane.jump(end, passed, &own, &unknown, now, broken);
            }
        }
    }

    fn prune_events(&mut self, keep: Duration, policy: &PrunePolicy, pruned: &mut Pruned) {
        let slowest = self.subscriptions.iter().map(|row| (row.floor(), row.name.clone())).min();
        let ignores_floors = self.options.broken == Some(Broken::RetentionIgnoresFloors);
        let floor = slowest.as_ref().filter(|_| !ignores_floors).map_or(self.next - 1, |(floor, _)| *floor);
        let old: Vec<Position> = self
            .rows
            .iter()
            .take_while(|(_, event)| self.now.since(event.created_at) > keep)
            .map(|row| *row.0)
            .collect();
        if old.last().is_some_and(|last| *last > floor) {
            pruned.held_by = slowest.map(|(_, name)| name);
        }
        let passed = old.iter().take_while(|position| **position <= floor).count();
        let removed = if policy.dry_run { passed } else { passed.min(policy.slice) };
        pruned.events = removed as u64;
        pruned.more = removed < passed;
        if policy.dry_run && self.options.broken != Some(Broken::DryRunRemoves) {
            return;
        }
        let needed = self.needed();
        for position in &old[..removed] {
            let Some(event) = self.rows.remove(position) else { continue };
            self.log_start = position + 1;
            if needed.contains(*position) {
                self.kept.insert(*position, event);
                pruned.kept += 1;
            }
        }
    }

    fn needed(&self) -> RangeSet {
        let lanes = self.lanes().flat_map(|(_, lane)| lane.deliveries.keys());
        lanes.map(|position| *position..=*position).collect()
    }
}

impl SubscriptionRow {
    /// Gives each delivery its new lane, and keeps the order of arrival within each key.
    fn relane(&mut self, lanes: u32, now: Timestamp, broken: Option<Broken>) {
        let floor = self.floor();
        let top = |figure: fn(&Lane) -> i64| self.lanes.iter().map(figure).max().unwrap_or(0) + 1;
        let (epoch, revision) = (top(|lane| lane.epoch), top(|lane| lane.revision));
        let in_all = |set: fn(&Lane) -> RangeSet| {
            let mut all: RangeSet = [1..=floor].into_iter().collect();
            self.lanes.iter().for_each(|lane| all.subtract(&set(lane).missing(1, floor)));
            all
        };
        let before_start = in_all(|lane| lane.before_start.clone());
        let mut covered = in_all(|lane| {
            let mut accounted = lane.covered();
            accounted.union(&lane.before_start);
            accounted
        });
        covered.subtract(&before_start);
        let skipped = self.lanes.iter().flat_map(|lane| lane.skipped.clone()).collect::<BTreeMap<_, _>>();
        let mut rows: Vec<Row> = self.lanes.iter().flat_map(|lane| lane.deliveries.values().cloned()).collect();
        rows.sort_by_key(|row| (row.delivery.arrival, row.delivery.position));
        let lane = Lane {
            cursor: Cursor { floor, ..Cursor::default() },
            epoch,
            revision,
            before_start,
            skipped,
            entries: vec![Covered { covered, epoch, after: now, before: now }],
            wrote_at: now,
            ..Lane::default()
        };
        let before = std::mem::replace(&mut self.lanes, vec![lane; lanes as usize]);
        if broken == Some(Broken::RelaneKeepsEpoch) {
            let kept = self.lanes.iter_mut().zip(&before);
            kept.for_each(|(lane, before)| (lane.epoch, lane.owner) = (before.epoch, before.owner));
        }
        for (arrival, mut row) in (1..).zip(rows) {
            row.delivery.arrival = arrival;
            let DeliveryRow { position, key, .. } = &row.delivery;
            let hash = key.as_deref().map(KeyHash::of);
            let before = lane_of(hash, *position, before.len() as u32).min(lanes - 1);
            let lane = if broken == Some(Broken::RelaneLeavesRows) { before } else { lane_of(hash, *position, lanes) };
            self.lanes[lane as usize].deliveries.insert(*position, row);
        }
    }

    fn floor(&self) -> Position {
        self.lanes.iter().map(|lane| lane.cursor.floor).min().unwrap_or(0)
    }

    fn books(&self) -> Vec<LaneBook> {
        fn set<'a>(positions: impl Iterator<Item = &'a Position>) -> RangeSet {
            positions.map(|position| *position..=*position).collect()
        }
        let book = |(number, lane): (usize, &Lane)| LaneBook {
            subscription: self.name.clone(),
            filter: self.definition.filter.clone(),
            lanes: self.lanes.len() as u32,
            lane: number as u32,
            floor: lane.cursor.floor,
            settled: lane.cursor.settled.clone(),
            covered: lane.covered(),
            before_start: lane.before_start.clone(),
            deliveries: set(lane.deliveries.keys()),
            skipped: set(lane.skipped.keys()),
        };
        self.lanes.iter().enumerate().map(book).collect()
    }
}

/// The unfinished delivery that arrived first among those of the same key, if it is another one. A delayed one is
/// outside its key's order; a dead one is too where dead events are skipped. Whatever is claimed in a queue comes before all.
fn head_of<'a>(subscription: &SubscriptionRow, lane: &'a Lane, row: &Row) -> Option<&'a DeliveryRow> {
    let delivery = &row.delivery;
    delivery.key.as_ref()?;
    let in_order = |other: &&DeliveryRow| {
        other.state != State::Delayed
            && (other.state != State::Dead || subscription.definition.on_dead == OnDead::Block)
    };
    if !in_order(&delivery) || row.claim.is_some() {
        return None;
    }
    let claimed = lane.deliveries.values().find(|other| other.claim.is_some() && other.delivery.key == delivery.key);
    if let Some(claimed) = claimed {
        return Some(&claimed.delivery);
    }
    let others = lane.deliveries.values().map(|row| &row.delivery);
    let before = others.filter(|other| other.key == delivery.key && other.arrival < delivery.arrival).filter(in_order);
    before.min_by_key(|other| other.arrival)
}

fn recovered_count((cause, (count, last_at)): (&RecoveryCause, &(u64, Timestamp))) -> RecoveredCount {
    RecoveredCount { cause: *cause, count: *count, last_at: *last_at }
}

fn pending(event: &Event, now: Timestamp) -> DeliveryRow {
    DeliveryRow {
        position: event.position,
        key: event.key.clone(),
        arrival: 0,
        state: State::Pending,
        attempts: 0,
        due_at: now,
        since: now,
    }
}

/// Pending, or delayed if its time has not come.
fn waiting(event: &Event, now: Timestamp) -> DeliveryRow {
    let delivery = pending(event, now);
    match event.deliver_at {
        Some(due_at) if due_at > now => DeliveryRow { state: State::Delayed, due_at, ..delivery },
        _ => delivery,
    }
}

fn list_row(event: &Event, subscription: Option<&String>, record: Option<DeliveryRecord>) -> ListRow {
    ListRow {
        id: event.id,
        position: event.position,
        topic: event.topic.to_string(),
        r#type: event.r#type.to_string(),
        key: event.key.as_deref().map(str::to_owned),
        created_at: event.created_at,
        subscription: subscription.cloned(),
        state: subscription.map(|_| record.as_ref().map_or(State::Pending, |record| record.state)),
        attempts: record.as_ref().map(|record| record.attempts),
        due_at: record.as_ref().map(|record| record.due_at),
        claim: record.as_ref().and_then(|record| record.claim.clone()),
        error: record.and_then(|record| record.errors.last().map(|error| error.message.clone())),
    }
}

fn changed(count: u64, events: Vec<Uuid>, message: String) -> Changed {
    Changed { count, events, message }
}

fn invalid<T>(message: String) -> Result<T> {
    Err(Error::new(ErrorKind::Invalid, message))
}

fn unknown(name: &str) -> Error {
    Error::new(ErrorKind::NotFound, format!("there is no subscription '{name}'; see `pillarbox subscription list`"))
}

/// What a subscription has lost because its hold was over.
fn lost(row: &SubscriptionRow) -> Option<Lost> {
    let skipped = row.lanes.iter().flat_map(|lane| &lane.skipped);
    let lost: Vec<_> = skipped.filter(|(_, (reason, _))| reason == REASON_HOLD).collect();
    let (to, (_, at)) = lost.iter().max_by_key(|(position, _)| **position)?;
    Some(Lost { subscription: row.name.clone(), events: lost.len() as i64, more: false, to: **to, at: *at })
}
