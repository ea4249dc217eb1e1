//! Operators' changes of the log in memory: it looks up what a plan needs and applies the plan's edits.
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use pillarbox::admin::plan::{Edit, Facts, KeyEvent, Lookup, Place, Plan, Target, plan};
use pillarbox::admin::snapshot::{LaneLedger, Snapshot, SubscriptionRow};
use pillarbox::admin::{Change, Changed, Pause, Selection, State};
use pillarbox::store::{
    Cursor, DeliveryRow, Epoch, InstanceId, KeyHash, RangeSet, RecoveryCause, SubscriptionId, lane_of,
};
use pillarbox::{Error, ErrorKind, Event, Position, Result, Start, Timestamp};
use uuid::Uuid;

use crate::Broken;
use crate::memory_lane::{Covered, Lane, Row};
use crate::memory_log::{self, Inner};

impl Inner {
    pub(crate) fn change(&mut self, change: &Change, dry_run: bool) -> Result<Changed> {
        self.refuse_locked(change)?;
        let snapshot = self.snapshot();
        let subject = change.subject().map(|name| snapshot.subscription(name)).transpose()?;
        let facts = self.look_up(&snapshot, subject, &change.lookup());
        let mut plan = plan(change, &snapshot, facts)?;
        self.break_plan(change, &mut plan);
        let before = dry_run.then(|| self.subscriptions.clone());
        let count = plan.edits.iter().map(|edit| self.apply(subject.map(|row| row.id), edit)).sum();
        if let Some(before) = before {
            self.subscriptions = before;
        }
        Ok(plan.answer(count))
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

    fn look_up(&self, snapshot: &Snapshot, subject: Option<&SubscriptionRow>, lookup: &Lookup<'_>) -> Facts {
        let stored = subject.and_then(|row| self.subscriptions.iter().find(|stored| stored.id == row.id));
        let Some(stored) = stored else { return Facts::Nothing };
        match lookup {
            Lookup::Nothing => Facts::Nothing,
            Lookup::Deliveries { which, limit } => {
                let event = self.selected(which).map(|event| event.id);
                let targets = self.targets(stored, which, event, *limit);
                let head = match targets.as_slice() {
                    [only] if event.is_some() => self.head_once_due(stored, only),
                    _ => None,
                };
                Facts::Deliveries { event, targets, head }
            }
            Lookup::Rewind { to, key } => {
                let place = self.place(snapshot, *to);
                let is_kept = |row: &Row| {
                    let DeliveryRow { position, state, key: of, .. } = &row.delivery;
                    let is_meant = key.is_none_or(|key| of.as_deref() == Some(key));
                    *position > place.kept && is_meant && *state != State::Delayed && self.kept.contains_key(position)
                };
                let kept = self.found(stored, is_kept);
                let events = key.map_or(Vec::new(), |key| self.key_events(stored, key, place.position()));
                Facts::Rewind { place, kept, events, former_filters: stored.formers.clone() }
            }
            Lookup::Ledger => Facts::Ledger {
                lanes: stored.lanes.iter().map(Lane::ledger).collect(),
                is_claimed: stored.rows().any(|row| row.claim.is_some()),
            },
        }
    }

    /// The event that a selection of one names.
    fn selected(&self, which: &Selection) -> Option<Arc<Event>> {
        match which {
            Selection::Event(id) => self.event_of(*id),
            Selection::Version(stream, version) => {
                let is_it = |event: &&Arc<Event>| {
                    event.key.as_deref() == Some(stream.as_str()) && event.stream_version == Some(*version)
                };
                self.kept.values().chain(self.rows.values()).find(is_it).cloned()
            }
            Selection::Key(_) | Selection::All => None,
        }
    }

    fn targets(
        &self,
        stored: &memory_log::SubscriptionRow,
        which: &Selection,
        event: Option<Uuid>,
        limit: usize,
    ) -> Vec<Target> {
        let is_chosen = |row: &Row| {
            let is_dead = row.delivery.state == State::Dead;
            match which {
                Selection::Event(_) | Selection::Version(..) => {
                    event.is_some() && self.event_at(row.delivery.position).map(|event| event.id) == event
                }
                Selection::Key(key) => is_dead && row.delivery.key.as_deref() == Some(key),
                Selection::All => is_dead,
            }
        };
        let mut targets = self.found(stored, is_chosen);
        targets.truncate(limit);
        targets
    }

    /// The event that a delivery waits for once it is due.
    fn head_once_due(&self, stored: &memory_log::SubscriptionRow, target: &Target) -> Option<(Uuid, Position, State)> {
        let lane = &stored.lanes[target.lane as usize];
        let row = lane.deliveries.get(&target.position)?;
        let delivery = DeliveryRow { state: State::Pending, ..row.delivery.clone() };
        self.head(stored, lane, &Row { delivery, claim: None, ..row.clone() })
    }

    /// The deliveries of a subscription that are chosen, in log order.
    fn found(&self, stored: &memory_log::SubscriptionRow, is_chosen: impl Fn(&Row) -> bool) -> Vec<Target> {
        let lanes = (0..).zip(&stored.lanes);
        let rows = lanes.flat_map(|(number, lane)| lane.deliveries.values().map(move |row| (number, row)));
        let target = |(lane, row): (u32, &Row)| {
            let DeliveryRow { position, key, .. } = &row.delivery;
            let id = self.event_at(*position).map_or(Uuid::nil(), |event| event.id);
            Target { position: *position, lane, id, key: key.as_deref().map(str::to_owned) }
        };
        let mut found: Vec<Target> = rows.filter(|(_, row)| is_chosen(row)).map(target).collect();
        found.sort_unstable_by_key(|target| target.position);
        found
    }

    fn place(&self, snapshot: &Snapshot, to: Start) -> Place {
        let (lowest, horizon) = (self.log_start - 1, self.next - 1);
        let floor = match to {
            Start::Beginning => lowest,
            Start::Position(position) => position.min(horizon),
            Start::Now => horizon,
            Start::Time(time) => {
                let first = self.rows.values().find(|event| event.created_at >= time);
                first.map_or(horizon, |event| event.position - 1)
            }
        };
        let kept = |time: Timestamp| self.kept.values().find(|event| event.created_at >= time);
        let oldest_kept = match to {
            Start::Time(time) => kept(time).map(|event| event.position),
            Start::Beginning | Start::Position(_) | Start::Now => None,
        };
        Place::new(to, floor.max(lowest), RangeSet::new(), oldest_kept, snapshot)
    }

    fn key_events(&self, stored: &memory_log::SubscriptionRow, key: &str, above: Position) -> Vec<KeyEvent> {
        let lane = &stored.lanes[lane_of(Some(KeyHash::of(key)), 0, stored.lanes.len() as u32) as usize];
        let events = self.rows.range(above + 1..).map(|(_, event)| event);
        let of_key = events.filter(|event| event.key.as_deref() == Some(key));
        let found = |event: &Arc<Event>| KeyEvent {
            position: event.position,
            id: event.id,
            topic: event.topic.to_string(),
            r#type: event.r#type.to_string(),
            has_delivery: lane.deliveries.contains_key(&event.position),
        };
        of_key.map(found).collect()
    }

    /// What a deliberately broken store makes of a plan.
    fn break_plan(&self, change: &Change, plan: &mut Plan) {
        match (self.options.broken, change) {
            (Some(Broken::RewindKeyWithoutFence), _) => plan.edits.retain(|edit| !matches!(edit, Edit::Fence { .. })),
            (Some(Broken::PauseForgetsReason), Change::Pause { by, .. }) => {
                plan.edits = vec![Edit::SetPause(Some(Pause { by: *by, reason: None }))];
            }
            (Some(Broken::ReceiverPausesOver), Change::Pause { by, reason, .. }) => {
                plan.edits = vec![Edit::SetPause(Some(Pause { by: *by, reason: reason.clone() }))];
            }
            _ => {}
        }
    }

    /// Applies one edit; how many claims or deliveries it concerned, if it counts them.
    fn apply(&mut self, subject: Option<SubscriptionId>, edit: &Edit) -> u64 {
        if let Edit::Recover { subscription, instance, silent_for } = edit {
            return self.recover_by_operator(*subscription, *instance, *silent_for);
        }
        let (now, broken) = (self.now, self.options.broken);
        let Inner { subscriptions, rows, kept, .. } = self;
        let index = subscriptions.iter().position(|row| Some(row.id) == subject);
        let index = index.expect("an edit has a subscription, which nothing has removed since the snapshot");
        let row = &mut subscriptions[index];
        match edit {
            Edit::Recover { .. } => {}
            Edit::MakeDue(targets) => {
                targets.iter().for_each(|target| row.lanes[target.lane as usize].make_due(target.position, now))
            }
            Edit::GiveUp { targets, reason } => {
                for target in targets {
                    let lane = &mut row.lanes[target.lane as usize];
                    lane.deliveries.remove(&target.position);
                    lane.skipped.insert(target.position, (reason.clone(), now));
                }
            }
            Edit::Reload(lanes) => lanes.iter().for_each(|lane| row.lanes[*lane as usize].revision += 1),
            Edit::SetCursor { lane, epoch, floor, settled } => {
                let lane = row.lane_at_epoch(*lane, *epoch);
                lane.cursor = Cursor { floor: *floor, settled: settled.clone(), anchor: None };
                lane.epoch += 1;
                lane.revision += 1;
            }
            Edit::Fence { lane, epoch } => row.lane_at_epoch(*lane, *epoch).epoch += 1,
            Edit::ReadAgain { floor, settled } => {
                let stays = |position: &Position| settled.contains(*position) || kept.contains_key(position);
                row.lanes.iter_mut().for_each(|lane| lane.read_again(*floor, stays, broken));
            }
            Edit::Replay { lane, positions, .. } => {
                let events = positions.iter().filter_map(|position| rows.get(position));
                row.lanes[*lane as usize].replay(events.map(|event| waiting(event, now)), now);
            }
            Edit::Restore(positions) => row.lanes.iter_mut().for_each(|lane| {
                lane.skipped.retain(|position, _| !positions.contains(*position));
            }),
            Edit::Account { lane, epoch, positions } => row.lanes[*lane as usize].account(*epoch, positions, now),
            Edit::SetFormerFilters(formers) => row.formers = formers.clone(),
            Edit::SetPause(pause) => row.pause = pause.clone(),
            Edit::Rename(to) => row.name.clone_from(to),
            Edit::Delete => return subscriptions.remove(index).rows().count() as u64,
            Edit::Relane { lanes, floor, epoch, revision, ledger } => {
                return row.relane(*lanes, (*floor, *epoch, *revision), ledger, now, broken);
            }
        }
        0
    }

    fn recover_by_operator(
        &mut self,
        subscription: Option<SubscriptionId>,
        instance: Option<InstanceId>,
        silent_for: Duration,
    ) -> u64 {
        let (now, beats) = (self.now, self.beats());
        let is_silent = |owner| beats.get(&owner).is_none_or(|(_, beat_at)| now.since(*beat_at) >= silent_for);
        let recovered = self.recover_where(|row, held| {
            let is_meant =
                subscription.is_none_or(|id| row.id == id) && instance.is_none_or(|instance| held.owner == instance);
            (is_meant && is_silent(held.owner)).then_some(RecoveryCause::Operator)
        });
        recovered.claims.iter().map(|(.., count)| count).sum()
    }
}

impl memory_log::SubscriptionRow {
    pub(crate) fn floor(&self) -> Position {
        self.lanes.iter().map(|lane| lane.cursor.floor).min().unwrap_or(0)
    }

    /// The log is locked since the snapshot was read, so the epoch can be no other.
    fn lane_at_epoch(&mut self, lane: u32, epoch: Epoch) -> &mut Lane {
        let lane = &mut self.lanes[lane as usize];
        assert_eq!(lane.epoch, epoch, "a lane has changed since it was read");
        lane
    }

    /// Gives each delivery its new lane, and keeps the order of arrival within each key.
    fn relane(
        &mut self,
        lanes: u32,
        (floor, epoch, revision): (Position, Epoch, i64),
        ledger: &LaneLedger,
        now: Timestamp,
        broken: Option<Broken>,
    ) -> u64 {
        let skipped = self.lanes.iter().flat_map(|lane| lane.skipped.clone()).collect::<BTreeMap<_, _>>();
        let mut rows: Vec<Row> = self.lanes.iter().flat_map(|lane| lane.deliveries.values().cloned()).collect();
        rows.sort_by_key(|row| (row.delivery.arrival, row.delivery.position));
        let lane = Lane {
            cursor: Cursor { floor, ..Cursor::default() },
            epoch,
            revision,
            before_start: ledger.before_start.clone(),
            skipped,
            entries: vec![Covered { covered: ledger.covered.clone(), epoch, after: now, before: now }],
            wrote_at: now,
            ..Lane::default()
        };
        let before = std::mem::replace(&mut self.lanes, vec![lane; lanes as usize]);
        if broken == Some(Broken::RelaneKeepsEpoch) {
            let kept = self.lanes.iter_mut().zip(&before);
            kept.for_each(|(lane, before)| (lane.epoch, lane.owner) = (before.epoch, before.owner));
        }
        let moved = rows.len() as u64;
        for (arrival, mut row) in (1..).zip(rows) {
            row.delivery.arrival = arrival;
            let (hash, position) = (row.delivery.key_hash(), row.delivery.position);
            let before = lane_of(hash, position, before.len() as u32).min(lanes - 1);
            let lane = if broken == Some(Broken::RelaneLeavesRows) { before } else { lane_of(hash, position, lanes) };
            self.lanes[lane as usize].deliveries.insert(position, row);
        }
        moved
    }
}

impl Lane {
    fn make_due(&mut self, position: Position, now: Timestamp) {
        let Some(row) = self.deliveries.get_mut(&position) else { return };
        row.set(DeliveryRow { state: State::Pending, attempts: 0, due_at: now, ..row.delivery.clone() }, now);
        row.free();
    }

    /// Forgets what lies above the floor, so that it is read again; what `stays` does not come again.
    fn read_again(&mut self, floor: Position, stays: impl Fn(&Position) -> bool, broken: Option<Broken>) {
        let above = |set: &mut RangeSet| set.remove_range(floor.saturating_add(1), Position::MAX);
        above(&mut self.before_start);
        self.entries.iter_mut().for_each(|entry| above(&mut entry.covered));
        self.entries.retain(|entry| !entry.covered.is_empty());
        let is_spared = |row: &Row| row.claim.is_some() && broken == Some(Broken::RewindSparesClaims);
        self.deliveries.retain(|position, row| *position <= floor || stays(position) || is_spared(row));
    }

    /// Settled events are to be delivered once more, or after all: behind all others. A delayed one is outside its key's order until it
    /// is due.
    fn replay(&mut self, events: impl Iterator<Item = DeliveryRow>, now: Timestamp) {
        for (arrival, delivery) in (self.next_arrival()..).zip(events) {
            let delivery = DeliveryRow { arrival, ..delivery };
            let row = self.deliveries.entry(delivery.position).or_insert_with(|| Row::new(delivery.clone(), now));
            if row.delivery.state != State::Delayed {
                row.set(delivery, now);
                row.free();
            }
        }
    }

    /// From this epoch on its settlements account for positions that it was never to deliver.
    fn account(&mut self, epoch: Epoch, positions: &RangeSet, now: Timestamp) {
        let mut elsewhere = positions.clone();
        elsewhere.subtract(&self.before_start);
        let mut covered = positions.clone();
        covered.subtract(&elsewhere);
        if !covered.is_empty() {
            self.before_start.subtract(&covered);
            self.entries.push(Covered { covered, epoch, after: now, before: now });
        }
    }
}

/// An event's delivery: pending, or delayed if its time has not come.
fn waiting(event: &Event, now: Timestamp) -> DeliveryRow {
    let due_at = event.deliver_at.filter(|due_at| *due_at > now);
    DeliveryRow {
        position: event.position,
        key: event.key.clone(),
        arrival: 0,
        state: if due_at.is_some() { State::Delayed } else { State::Pending },
        attempts: 0,
        due_at: due_at.unwrap_or(now),
        since: now,
    }
}
