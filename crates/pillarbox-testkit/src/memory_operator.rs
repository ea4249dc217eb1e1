use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use pillarbox::admin::retention::{ExpiringHold, RISEN_MAX, log_risen};
use pillarbox::admin::snapshot::{self, Lost, Snapshot};
use pillarbox::admin::{
    Books, Change, Changed, Check, DeliveryRecord, EventRecord, Fate, Level, ListQuery, ListRow, ListedDelivery,
    LogStatus, Operator, PrunePolicy, Pruned, REASON_DEAD, Status,
};
use pillarbox::journal::{Appended, Expected, StreamHead};
use pillarbox::store::{RangeSet, lane_of};
use pillarbox::{Event, NewEvent, Position, Result, Timestamp};
use uuid::Uuid;

use crate::memory_lane::Row;
use crate::memory_log::{Inner, SubscriptionRow};
use crate::memory_snapshot::{Unfinished, backlog_row};
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
        inner.snapshot().books(inner.ledger())
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
        Some(inner.record(&inner.snapshot(), &event))
    }

    /// The same of every event that is visible, ascending; for auditors.
    pub fn show_visible(&self) -> Vec<EventRecord> {
        let inner = self.inner();
        let snapshot = inner.snapshot();
        inner.rows.values().map(|event| inner.record(&snapshot, event)).collect()
    }

    /// What became of an event for one subscription; None if there is no such event or subscription.
    pub fn fate(&self, id: Uuid, subscription: &str) -> Option<Fate> {
        let inner = self.inner();
        let event = inner.event_of(id)?;
        inner.fate(&inner.snapshot(), subscription, &event)
    }

    /// The same of many events, for auditors.
    pub fn fates(&self, ids: &[Uuid], subscription: &str) -> Vec<Option<Fate>> {
        let inner = self.inner();
        let snapshot = inner.snapshot();
        let fate = |id: &Uuid| inner.fate(&snapshot, subscription, &*inner.event_of(*id)?);
        ids.iter().map(fate).collect()
    }

    /// See [`Operator::status`].
    pub fn status(&self) -> Status {
        let inner = self.inner();
        let snapshot = inner.snapshot();
        let figures = inner.figures(&snapshot);
        let mut log = inner.log_status();
        log.alarms.extend(snapshot.hold_alarms(&figures));
        log.alarms.extend(inner.lost().iter().map(Lost::alarm));
        let bytes_each = log.bytes / log.events.max(1);
        let subscriptions = snapshot.subscription_statuses(&figures, bytes_each);
        Status { at: snapshot.now, log, subscriptions, instances: snapshot.instance_statuses() }
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
        self.log().inner().list(query)
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

    async fn append(&self, stream: &str, expected: Expected, events: &[NewEvent]) -> Result<Appended> {
        events.iter().try_for_each(|event| event.validate(pillarbox::limit::PAYLOAD_BYTES_MAX))?;
        self.log().append(stream, expected, events)
    }

    async fn read_stream(&self, stream: &str, from: i64, limit: usize) -> Result<Vec<Event>> {
        let inner = self.log().inner();
        let events = inner.stream(stream).filter(|event| event.stream_version >= Some(from));
        Ok(events.take(limit).map(|event| (**event).clone()).collect())
    }

    async fn streams(&self, prefix: &str, after: Option<&str>, limit: usize) -> Result<Vec<StreamHead>> {
        let streams = self.log().inner().streams().into_iter();
        let streams = streams.filter(|head| head.stream.starts_with(prefix) && Some(&*head.stream) > after);
        Ok(streams.take(limit).collect())
    }

    async fn books(&self) -> Result<Books> {
        Ok(self.log().books())
    }

    async fn prune(&self, policy: &PrunePolicy) -> Result<Pruned> {
        Ok(self.log().prune(policy))
    }

    async fn doctor(&self) -> Result<Vec<Check>> {
        let finding = "the log is in memory and ends with the process".to_owned();
        let durability = Check { name: "durability".to_owned(), level: Level::Warning, finding, fix: None };
        let inner = self.log().inner();
        let snapshot = inner.snapshot();
        let risen = inner.rows.keys().filter(|position| inner.closed.contains(**position)).count();
        Ok(vec![
            durability,
            Check::dead_ranges(risen as i64),
            snapshot.check_subscriptions(),
            snapshot.check_instances(),
        ])
    }

    async fn reset(&self) -> Result<()> {
        self.log().reset();
        Ok(())
    }
}

impl Inner {
    pub(crate) fn event_of(&self, id: Uuid) -> Option<Arc<Event>> {
        let at = self.positions.get(&id).and_then(|at| self.rows.get(at)).filter(|event| event.id == id);
        at.or_else(|| self.rows.values().chain(self.kept.values()).find(|event| event.id == id)).cloned()
    }

    fn record(&self, snapshot: &Snapshot, event: &Event) -> EventRecord {
        let fate = |row: &SubscriptionRow| self.fate(snapshot, &row.name, event);
        EventRecord { event: event.clone(), subscriptions: self.subscriptions.iter().filter_map(fate).collect() }
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
            alarms: Vec::new(),
        }
    }

    fn list(&self, query: &ListQuery) -> Result<Vec<ListRow>> {
        let snapshot = self.snapshot();
        let mut rows: Vec<ListRow> = match query.lists_the_log() {
            true => self.rows.values().map(|event| backlog_row(event).list_row(event.id)).collect(),
            false => snapshot.listed(query)?.into_iter().flat_map(|row| self.unfinished_rows(row)).collect(),
        };
        rows.retain(|row| {
            let headers = || self.event_at(row.position).map(|event| event.headers.clone()).unwrap_or_default();
            query.state.is_none_or(|state| row.state == Some(state))
                && query.matches(&row.topic, row.key.as_deref(), headers)
        });
        Ok(query.in_order(rows))
    }

    fn unfinished_rows(&self, subscription: &snapshot::SubscriptionRow) -> Vec<ListRow> {
        let row = |(event, record): Unfinished| match record {
            None => backlog_row(&event).unsettled_row(event.id, subscription, None, self.now),
            Some(record) => {
                let DeliveryRecord { state, attempts, due_at, claim, errors, .. } = record;
                let delivery = ListedDelivery { state: Some(state), attempts, due_at, claim, errors };
                Some(backlog_row(&event).delivery_row(event.id, subscription, delivery))
            }
        };
        self.unfinished(subscription).into_iter().filter_map(row).collect()
    }

    fn prune(&mut self, policy: &PrunePolicy) -> Pruned {
        let mut pruned = Pruned::default();
        let policy = &policy.at_least(self.retention);
        // What it commits makes everything durable that it has seen.
        self.flush();
        if !policy.dry_run {
            self.deliver_risen();
        }
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
            if policy.held {
                let lanes: Vec<_> = self.subscriptions.iter().map(|row| row.lanes.clone()).collect();
                self.expire_holds(keep, policy.slice, &mut pruned);
                if policy.dry_run {
                    self.subscriptions.iter_mut().zip(lanes).for_each(|(row, before)| row.lanes = before);
                }
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

    /// Delivers late what has appeared at positions that were closed.
    fn deliver_risen(&mut self) {
        if self.closed.is_empty() || !self.locked().is_empty() {
            return;
        }
        let is_closed = |event: &&Arc<Event>| self.closed.contains(event.position);
        let found: Vec<Arc<Event>> = self.rows.values().filter(is_closed).take(RISEN_MAX as usize).cloned().collect();
        let (snapshot, mut risen) = (self.snapshot(), RangeSet::new());
        for event in &found {
            for row in &mut self.subscriptions {
                let Some(of) = snapshot.subscriptions.iter().find(|of| of.id == row.id) else { continue };
                row.deliver_late(of, &backlog_row(event), snapshot.now);
            }
            self.closed.remove(event.position);
            risen.insert(event.position);
        }
        if !risen.is_empty() {
            log_risen(&risen);
        }
    }

    /// Moves subscriptions on whose hold is over for some of what they have not settled, and records what they lose.
    fn expire_holds(&mut self, keep: Duration, slice: usize, pruned: &mut Pruned) {
        let (snapshot, locked) = (self.snapshot(), self.locked());
        let Inner { rows, subscriptions, closed, options, now, .. } = self;
        for row in subscriptions.iter_mut().filter(|row| !locked.contains(&row.id)) {
            let Some(of) = snapshot.subscriptions.iter().find(|of| of.id == row.id) else { continue };
            let Some(mut hold) = ExpiringHold::new(of, &row.formers, keep, *now) else { continue };
            let next = rows.range(of.floor() + 1..).take(slice);
            next.take_while(|(_, event)| hold.take(&backlog_row(event))).for_each(drop);
            // What is not visible and not closed may come from whoever writes now.
            let unknown = hold.unknown(closed);
            let mut left_out = BTreeMap::new();
            for lane in hold.lanes() {
                let jump = hold.jump(lane, &row.lanes[lane.lane as usize].positions());
                left_out.insert(lane.lane, jump.left_out.clone());
                row.lanes[lane.lane as usize].jump(jump, *now, options.broken);
            }
            let count = row.lanes.len() as u32;
            let lane_at = |position| lane_of(rows[&position].key_hash(), position, count);
            let lost = hold.lost().iter().flatten().map(|position| (lane_at(position), position));
            let open = left_out.iter().flat_map(|(lane, left_out)| {
                let mut settled = unknown.clone();
                settled.subtract(left_out);
                let mut open = unknown.clone();
                open.subtract(&settled);
                open.iter().flatten().map(|position| (*lane, position)).collect::<Vec<_>>()
            });
            for (lane, position) in lost.chain(open) {
                row.lanes[lane as usize].give_up(position, *now, options.broken);
            }
            pruned.undelivered += hold.lost().count();
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
        // Those of a journal stay, and the log still begins with the first of them.
        let takes_journals = self.options.broken == Some(Broken::RetentionTakesJournals);
        let stays = |position: &Position| {
            let event = self.rows.get(position).filter(|_| !takes_journals);
            event.is_some_and(|event| event.stream_version.is_some())
        };
        pruned.events = old[..removed].iter().filter(|position| !stays(position)).count() as u64;
        pruned.more = removed < passed;
        if policy.dry_run && self.options.broken != Some(Broken::DryRunRemoves) {
            return;
        }
        let (gone, needed) = (old[..removed].iter().filter(|position| !stays(position)), self.needed());
        let gone: Vec<Position> = gone.copied().collect();
        for position in gone {
            let Some(event) = self.rows.remove(&position) else { continue };
            if needed.contains(position) {
                self.kept.insert(position, event);
                pruned.kept += 1;
            }
        }
        if let Some(last) = old[..removed].last() {
            let first = self.rows.keys().next().copied();
            self.log_start = first.filter(|first| first <= last).unwrap_or(last + 1);
            self.pruned_to = self.pruned_to.max(*last);
        }
    }

    fn needed(&self) -> RangeSet {
        let lanes = self.lanes().flat_map(|(_, lane)| lane.deliveries.keys());
        lanes.map(|position| *position..=*position).collect()
    }
}
