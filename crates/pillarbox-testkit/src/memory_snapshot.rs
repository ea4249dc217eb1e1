//! What operators' commands look at in the log in memory, as `pillarbox::admin` takes it.
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use pillarbox::admin::retention::{Late, stored_time};
use pillarbox::admin::snapshot::{
    Figures, InstanceRow, LOST_SPOKEN_OF, LaneLedger, LaneRow, Ledger, Lost, Recorded, Snapshot, SubscriptionRow,
};
use pillarbox::admin::{BacklogRow, ClaimRecord, DeliveryRecord, Fate, REASON_HOLD, RecoveredCount, SettledBy, State};
use pillarbox::store::{DeliveryRow, InstanceId, SubscriptionId, lane_of};
use pillarbox::{Event, OnDead, Position, Timestamp};
use uuid::Uuid;

use crate::Broken;
use crate::memory_lane::{Covered, Lane, Row};
use crate::memory_log::{self, Inner, Instance};
use crate::memory_queue::Held;

/// An event that a subscription has not finished, with its delivery if it has one.
pub(crate) type Unfinished = (Arc<Event>, Option<DeliveryRecord>);

impl Inner {
    pub(crate) fn snapshot(&self) -> Snapshot {
        let mut subscriptions: Vec<_> = self.subscriptions.iter().map(memory_log::SubscriptionRow::row).collect();
        subscriptions.sort_by(|left, right| left.name.cmp(&right.name));
        Snapshot {
            log_id: self.options.log_id,
            incarnation: self.incarnation,
            schema_version: 1,
            now: self.now,
            horizon: self.next - 1,
            log_start: self.log_start,
            pruned_to: self.pruned_to,
            fresh_floor: 0,
            retention_keep: stored_time(self.retention.keep_ms),
            recovery_at: self.recovery_at,
            subscriptions,
            instances: self.instances.iter().map(|(id, instance)| instance.row(*id)).collect(),
        }
    }

    /// What became of an event for one subscription.
    pub(crate) fn fate(&self, snapshot: &Snapshot, subscription: &str, event: &Event) -> Option<Fate> {
        let row = snapshot.subscription(subscription).ok()?;
        let stored = self.subscriptions.iter().find(|stored| stored.id == row.id)?;
        snapshot.fate(row, event, self.recorded(stored, event))
    }

    fn recorded(&self, row: &memory_log::SubscriptionRow, event: &Event) -> Recorded {
        let lane = &row.lanes[lane_of(event.key_hash(), event.position, row.lanes.len() as u32) as usize];
        let entry = lane.entries.iter().find(|entry| entry.covered.contains(event.position));
        let by = |entry: &Covered| SettledBy { epoch: entry.epoch, after: entry.after, before: entry.before };
        Recorded {
            former_filters: row.formers.clone(),
            settled_by: entry.map(by),
            before_start: lane.before_start.contains(event.position),
            in_dead_range: self.closed.contains(event.position),
            delivery: lane.deliveries.get(&event.position).map(|found| self.delivery_record(row, lane, found)),
            skipped: lane.skipped.get(&event.position).cloned(),
        }
    }

    /// The event that a delivery waits for.
    pub(crate) fn head(
        &self,
        subscription: &memory_log::SubscriptionRow,
        lane: &Lane,
        row: &Row,
    ) -> Option<(Uuid, Position, State)> {
        let head = head_of(subscription, lane, row)?;
        Some((self.event_at(head.position)?.id, head.position, head.state))
    }

    fn delivery_record(&self, subscription: &memory_log::SubscriptionRow, lane: &Lane, row: &Row) -> DeliveryRecord {
        let head = self.head(subscription, lane, row);
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

    /// All events that a subscription has not finished, in log order.
    pub(crate) fn unfinished(&self, row: &SubscriptionRow) -> Vec<Unfinished> {
        let Some(stored) = self.subscriptions.iter().find(|stored| stored.id == row.id) else { return Vec::new() };
        let unfinished = |event: &Arc<Event>| {
            let lane = &stored.lanes[row.lane_of(event.key.as_deref(), event.position)?.lane as usize];
            let delivery = lane.deliveries.get(&event.position);
            let record = delivery.map(|found| self.delivery_record(stored, lane, found));
            (record.is_some() || backlog_row(event).awaits(row)).then(|| (event.clone(), record))
        };
        // What is kept aside has lower positions than the log.
        self.kept.values().chain(self.rows.values()).filter_map(unfinished).collect()
    }

    pub(crate) fn figures(&self, snapshot: &Snapshot) -> HashMap<SubscriptionId, Figures> {
        let figures = |row: &SubscriptionRow| (row.id, self.figures_of(snapshot, row));
        snapshot.subscriptions.iter().map(figures).collect()
    }

    fn figures_of(&self, snapshot: &Snapshot, row: &SubscriptionRow) -> Figures {
        let mut figures = Figures::default();
        let was_delayed = |position| {
            let stored = self.subscriptions.iter().find(|stored| stored.id == row.id);
            let mut lanes = stored.into_iter().flat_map(|stored| &stored.lanes);
            let found = lanes.find_map(|lane| lane.deliveries.get(&position));
            found.is_some_and(|found| found.delivery.state == State::Delayed)
        };
        for (event, record) in self.unfinished(row) {
            let Some(record) = record else {
                figures.take(event.created_at, event.deliver_at, snapshot.now);
                continue;
            };
            let is_forgotten = record.state == State::Dead && self.options.broken == Some(Broken::StatusForgetsDead);
            *figures.by_state.entry(record.state).or_default() += u64::from(!is_forgotten);
            let has_come_due = record.state == State::Pending && was_delayed(event.position);
            let since = if has_come_due { record.due_at } else { event.created_at };
            let since = event.deliver_at.map_or(since, |at| at.max(since));
            let moves = !matches!(record.state, State::Delayed | State::Dead);
            figures.oldest = figures.oldest.into_iter().chain(moves.then_some(since)).min();
            let due = (record.state == State::Retrying || has_come_due).then_some(record.due_at);
            figures.oldest_due = figures.oldest_due.into_iter().chain(due).min();
            figures.processing_since =
                figures.processing_since.into_iter().chain(record.claim.map(|claim| claim.since)).min();
        }
        if let Some(stored) = self.subscriptions.iter().find(|stored| stored.id == row.id) {
            let count = |(cause, (count, last_at)): (&_, &_)| RecoveredCount {
                cause: *cause,
                count: *count,
                last_at: *last_at,
            };
            figures.recovered = stored.recovered.iter().map(count).collect();
        }
        figures
    }

    /// What subscriptions have lost because their hold was over.
    pub(crate) fn lost(&self) -> Vec<Lost> {
        let lost = |row: &memory_log::SubscriptionRow| {
            let skipped = row.lanes.iter().flat_map(|lane| &lane.skipped);
            let is_lost = |reason: &str, at: Timestamp| reason == REASON_HOLD && self.now.since(at) <= LOST_SPOKEN_OF;
            let lost: Vec<_> = skipped.filter(|(_, (reason, at))| is_lost(reason, *at)).collect();
            let (to, (_, at)) = lost.iter().max_by_key(|(position, _)| **position)?;
            Some(Lost { subscription: row.name.clone(), events: lost.len() as i64, more: false, to: **to, at: *at })
        };
        self.subscriptions.iter().filter_map(lost).collect()
    }

    /// What the log has recorded.
    pub(crate) fn ledger(&self) -> Ledger {
        let mut ledger = Ledger { closed: self.closed.clone(), ..Ledger::default() };
        for row in &self.subscriptions {
            ledger.former_filters.insert(row.id, row.formers.clone());
            for (number, lane) in (0..).zip(&row.lanes) {
                ledger.lanes.insert((row.id, number), lane.ledger());
                ledger.deliveries.insert((row.id, number), lane.positions());
                let skipped = ledger.skipped.entry(row.id).or_default();
                lane.skipped.keys().for_each(|position| skipped.insert(*position));
            }
        }
        ledger
    }
}

impl memory_log::SubscriptionRow {
    /// An event that appeared at a position proven dead is delivered late, if at all.
    pub(crate) fn deliver_late(&mut self, row: &SubscriptionRow, line: &BacklogRow<'_>, now: Timestamp) {
        let position = line.position;
        match row.late(line, now) {
            None => {}
            Some(Late::Forget) => self.formers.forget(line.key_hash, position),
            Some(Late::ReadAgain(lane)) => self.lanes[lane.lane as usize].epoch += 1,
            Some(Late::Deliver { lane, state, due_at }) => {
                let lane = &mut self.lanes[lane.lane as usize];
                if lane.before_start.contains(position) {
                    return;
                }
                let (key, arrival) = (line.key.map(Into::into), lane.next_arrival());
                let delivery = DeliveryRow { position, key, arrival, state, attempts: 0, due_at, since: now };
                lane.deliveries.entry(position).or_insert_with(|| Row::new(delivery, now));
                lane.revision += 1;
                self.formers.replay(line.key_hash, position, &line.topic, &line.r#type);
            }
        }
    }

    fn row(&self) -> SubscriptionRow {
        let lane = |(number, lane): (u32, &Lane)| LaneRow {
            lane: number,
            cursor: lane.cursor.clone(),
            owner: lane.owner,
            epoch: lane.epoch,
            revision: lane.revision,
        };
        SubscriptionRow {
            id: self.id,
            name: self.name.clone(),
            filter: self.definition.filter.clone(),
            definition: self.definition.number,
            mode: self.mode,
            on_dead: self.definition.on_dead,
            hold: self.hold,
            retry: self.definition.retry,
            pause: self.pause.clone(),
            lanes: (0..).zip(&self.lanes).map(lane).collect(),
        }
    }
}

impl Instance {
    fn row(&self, id: InstanceId) -> InstanceRow {
        InstanceRow {
            id,
            host: self.hello.host.clone(),
            pid: self.hello.pid,
            version: self.hello.version.clone(),
            started_at: self.started_at,
            beat_at: self.beat_at,
            subscriptions: self.subscriptions.clone(),
            report: self.report.clone(),
            alive: !self.killed,
        }
    }
}

impl Lane {
    /// What its settlements have recorded.
    pub(crate) fn ledger(&self) -> LaneLedger {
        LaneLedger { covered: self.covered(), before_start: self.before_start.clone() }
    }
}

/// An event as operators' commands judge it.
pub(crate) fn backlog_row(event: &Event) -> BacklogRow<'_> {
    BacklogRow {
        position: event.position,
        topic: Cow::Borrowed(&event.topic),
        r#type: Cow::Borrowed(&event.r#type),
        key: event.key.as_deref(),
        key_hash: event.key_hash(),
        deliver_at: event.deliver_at,
        created_at: event.created_at,
    }
}

/// The unfinished delivery that arrived first among those of the same key, if it is another one. A delayed one is
/// outside its key's order; a dead one is too where dead events are skipped. Whatever is claimed in a queue comes before all.
fn head_of<'a>(subscription: &memory_log::SubscriptionRow, lane: &'a Lane, row: &Row) -> Option<&'a DeliveryRow> {
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
