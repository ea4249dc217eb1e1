use serde::Serialize;
use uuid::Uuid;

use crate::admin::snapshot::unknown_subscription;
use crate::{Books, Event, FormerFilters, KeyHash, LaneBook, Position, Result, lane_of, received_id};

/// Maximum number of missing events that are listed for each subscription; all are counted.
pub const MISSING_LISTED_MAX: usize = 1000;

/// Compares the log with the engine's ledger and, if requested, with what a receiver got.
///
/// Pass it the [`Books`] first, then every event of the log in position order, then, for the subscription named by
/// [`Auditor::expect_receipts`], every received line in order of arrival. Read them from the database and the receiver
/// in this order too, so that an event delivered meanwhile is not a finding.
///
/// It does not depend on how the engine moves a cursor. It uses about 50 bytes per event if receipts are expected, and
/// none otherwise.
#[derive(Debug)]
pub struct Auditor {
    books: Books,
    from: Position,
    to: Position,
    /// By subscription: its figures and its lanes in `books.lanes`, by number.
    subscriptions: Vec<(SubscriptionAudit, Vec<usize>)>,
    receipts: Option<Receipts>,
}

/// The result of an audit.
#[derive(Debug, Clone, Serialize)]
pub struct Audit {
    /// One result per subscription, in the order of the ledger.
    pub subscriptions: Vec<SubscriptionAudit>,
}

/// The result of an audit for one subscription.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct SubscriptionAudit {
    /// Its name.
    pub subscription: String,
    /// Number of events that it should get: wanted by the filter in force when they were settled; until then, by the
    /// current one.
    pub expected: u64,
    /// Number of expected events that are delivered according to the ledger; with receipts, that were received.
    pub delivered: u64,
    /// Number of expected events that are still to be delivered.
    pub waiting: u64,
    /// Number of expected events that were given up, by an operator or by retention.
    pub skipped: u64,
    /// Number of lost events: none of these.
    pub missing: u64,
    /// The first [`MISSING_LISTED_MAX`] lost events.
    pub missing_events: Vec<Missing>,
    /// Number of wanted events before its start: not expected, and not a finding if they were received.
    pub before_start: u64,
    /// Number of events that the current filter wants, passed under a former one that did not want them: not expected.
    pub passed_unwanted: u64,
    /// Number of events passed under a filter that is no longer recorded: it is unknown whether they were expected.
    pub not_recorded: u64,
    /// Number of received ids that the log never had.
    pub unexpected: u64,
    /// Number of received ids of events that the filter which judged them did not want: not expected, and not a loss.
    pub unwanted: u64,
    /// Number of received ids that are not in the log, of which retention has removed a part: it is unknown whether it
    /// had them.
    pub unknown: u64,
    /// Number of received lines whose id was received before.
    pub duplicates: u64,
    /// Number of first arrivals that came after a later event of their key.
    pub out_of_order: u64,
    /// Number of received lines that are neither an id nor a CloudEvents object.
    pub unreadable: u64,
}

/// An event that was not delivered and is not waiting.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Missing {
    /// The event.
    pub id: Uuid,
    /// Its position.
    pub position: Position,
    /// The evidence.
    pub reason: MissingReason,
}

/// The evidence that an event is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum MissingReason {
    /// The cursor is above it, and no settlement reports that it covered it.
    NotInBooks,
    /// It appeared in a range that had been closed.
    InDeadRange,
    /// It is delivered according to the ledger, but the receiver does not have it.
    NotReceived,
}

impl Audit {
    /// Number of missing events in all subscriptions.
    pub fn missing(&self) -> u64 {
        self.subscriptions.iter().map(|subscription| subscription.missing).sum()
    }
}

impl Auditor {
    /// An auditor of the whole log.
    pub fn new(books: Books) -> Self {
        let mut subscriptions: Vec<(SubscriptionAudit, Vec<usize>)> = Vec::new();
        for (index, book) in books.lanes.iter().enumerate() {
            let known = subscriptions.iter().position(|(audit, _)| audit.subscription == book.subscription);
            let known = known.unwrap_or_else(|| {
                let audit = SubscriptionAudit { subscription: book.subscription.clone(), ..Default::default() };
                subscriptions.push((audit, vec![usize::MAX; book.lanes as usize]));
                subscriptions.len() - 1
            });
            if let Some(lane) = subscriptions[known].1.get_mut(book.lane as usize) {
                *lane = index;
            }
        }
        Auditor { books, from: 1, to: Position::MAX, subscriptions, receipts: None }
    }

    /// Expects only the events of `from..=to`. It must still be given all events, because it must know every id.
    pub fn range(mut self, from: Position, to: Position) -> Self {
        (self.from, self.to) = (from, to);
        self
    }

    /// Audits only this subscription.
    ///
    /// # Panics
    /// If [`Auditor::expect_receipts`] was called before.
    pub fn only(mut self, subscription: &str) -> Result<Self> {
        assert!(self.receipts.is_none(), "the subscription is chosen before receipts are expected");
        self.index(subscription)?;
        self.subscriptions.retain(|(audit, _)| audit.subscription == subscription);
        Ok(self)
    }

    /// Expects received lines of this subscription after the events.
    pub fn expect_receipts(mut self, subscription: &str) -> Result<Self> {
        let subscription = self.index(subscription)?;
        self.receipts = Some(Receipts { subscription, ..Receipts::default() });
        Ok(self)
    }

    fn index(&self, subscription: &str) -> Result<usize> {
        let index = self.subscriptions.iter().position(|(audit, _)| audit.subscription == subscription);
        index.ok_or_else(|| {
            unknown_subscription(subscription, self.subscriptions.iter().map(|(audit, _)| audit.subscription.as_str()))
        })
    }

    /// Takes the next event of the log.
    pub fn event(&mut self, event: &Event) {
        // What was published after the books were read cannot be in them.
        let in_range = (self.from..=self.to).contains(&event.position) && event.position <= self.books.horizon;
        for (index, (audit, lanes)) in self.subscriptions.iter_mut().enumerate() {
            let lane = lane_of(event.key_hash(), event.position, lanes.len() as u32) as usize;
            let book = lanes.get(lane).and_then(|book| self.books.lanes.get(*book));
            let former = self.books.former_filters.get(&audit.subscription);
            let verdict = book.filter(|_| in_range).and_then(|book| {
                let in_dead_range = self.books.closed.contains(event.position);
                verdict(book, former, in_dead_range, event, audit)
            });
            if let Some(verdict) = verdict {
                audit.count(event, verdict);
            }
            if let Some(receipts) = self.receipts.as_mut().filter(|receipts| receipts.subscription == index) {
                receipts.expect(event, verdict);
            }
        }
    }

    /// Takes the next received line: an id, or a line of the `file` sink. Empty lines are ignored.
    ///
    /// # Panics
    /// If [`Auditor::expect_receipts`] was not called.
    pub fn line(&mut self, line: &str) {
        let receipts = self.receipts.as_mut().expect("receipts are expected");
        let audit = &mut self.subscriptions[receipts.subscription].0;
        if line.trim().is_empty() {
            return;
        }
        match received_id(line) {
            None => audit.unreadable += 1,
            Some(id) => match receipts.receive(id) {
                Receipt::First => {}
                Receipt::Duplicate => audit.duplicates += 1,
                Receipt::Unknown if self.books.pruned_to > 0 => audit.unknown += 1,
                Receipt::Unknown => audit.unexpected += 1,
            },
        }
    }

    /// The result.
    pub fn finish(mut self) -> Audit {
        if let Some(receipts) = self.receipts {
            let audit = &mut self.subscriptions[receipts.subscription].0;
            receipts.finish(audit);
        }
        Audit { subscriptions: self.subscriptions.into_iter().map(|(audit, _)| audit).collect() }
    }
}

/// What the books say of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    Delivered,
    Waiting,
    Skipped,
    BeforeStart,
    Unwanted,
    Missing(MissingReason),
}

/// What the ledger says of an event; None: unknown.
fn verdict(
    book: &LaneBook,
    former: Option<&FormerFilters>,
    in_dead_range: bool,
    event: &Event,
    audit: &mut SubscriptionAudit,
) -> Option<Verdict> {
    let wanted = former.map_or_else(|| Some(book.filter.wants(event)), |former| former.wants(&book.filter, event));
    match wanted {
        Some(true) => Some(judge(book, in_dead_range, event.position)),
        Some(false) => {
            audit.passed_unwanted += u64::from(book.filter.wants(event));
            Some(Verdict::Unwanted)
        }
        None => {
            audit.not_recorded += 1;
            None
        }
    }
}

fn judge(book: &LaneBook, in_dead_range: bool, position: Position) -> Verdict {
    if book.skipped.contains(position) {
        return Verdict::Skipped;
    }
    if book.deliveries.contains(position) {
        return Verdict::Waiting;
    }
    if book.before_start.contains(position) {
        return Verdict::BeforeStart;
    }
    if in_dead_range {
        return Verdict::Missing(MissingReason::InDeadRange);
    }
    if book.settled.contains(position) {
        return Verdict::Delivered;
    }
    match (position <= book.floor, book.covered.contains(position)) {
        (false, _) => Verdict::Waiting,
        (true, true) => Verdict::Delivered,
        (true, false) => Verdict::Missing(MissingReason::NotInBooks),
    }
}

impl SubscriptionAudit {
    fn count(&mut self, event: &Event, verdict: Verdict) {
        self.expected += u64::from(!matches!(verdict, Verdict::BeforeStart | Verdict::Unwanted));
        match verdict {
            Verdict::Unwanted => {}
            Verdict::BeforeStart => self.before_start += 1,
            Verdict::Delivered => self.delivered += 1,
            Verdict::Waiting => self.waiting += 1,
            Verdict::Skipped => self.skipped += 1,
            Verdict::Missing(reason) => self.miss(event.id, event.position, reason),
        }
    }

    fn miss(&mut self, id: Uuid, position: Position, reason: MissingReason) {
        self.missing += 1;
        if self.missing_events.len() < MISSING_LISTED_MAX {
            self.missing_events.push(Missing { id, position, reason });
        }
    }
}

/// What one receiver got. Flat vectors, because a million events must fit into 100 MB.
#[derive(Debug, Default)]
struct Receipts {
    subscription: usize,
    events: Vec<Expected>,
    /// Indexes of `events`, by id; made when the first line comes.
    by_id: Vec<u32>,
    arrivals: u32,
    /// The number of ids that arrived and that no subscription wanted.
    unwanted: u64,
}

#[derive(Debug)]
struct Expected {
    id: [u8; 16],
    position: Position,
    key: u64,
    /// The number of its first arrival, from 1; 0: none.
    arrival: u32,
    has_key: bool,
    verdict: Option<Verdict>,
}

enum Receipt {
    First,
    Duplicate,
    Unknown,
}

impl Receipts {
    fn expect(&mut self, event: &Event, verdict: Option<Verdict>) {
        let key = event.key_hash();
        self.events.push(Expected {
            id: *event.id.as_bytes(),
            position: event.position,
            key: key.map_or(0, |KeyHash(hash)| hash),
            arrival: 0,
            has_key: key.is_some(),
            verdict,
        });
    }

    fn receive(&mut self, id: Uuid) -> Receipt {
        if self.by_id.len() != self.events.len() {
            self.by_id = (0..self.events.len() as u32).collect();
            self.by_id.sort_unstable_by_key(|index| (self.events[*index as usize].id, *index));
        }
        let from = self.by_id.partition_point(|index| self.events[*index as usize].id < *id.as_bytes());
        // Nobody can tell events apart that share an id, so that one receipt is a receipt of all of them. They arrive in
        // position order, and only the first of them can say something about order.
        let mut receipt = Receipt::Unknown;
        let mut unwanted = true;
        for (number, index) in self.by_id[from..].iter().enumerate() {
            let event = &mut self.events[*index as usize];
            if event.id != *id.as_bytes() {
                break;
            }
            if event.arrival > 0 {
                return Receipt::Duplicate;
            }
            event.arrival = self.arrivals + 1;
            event.has_key &= number == 0;
            unwanted &= event.verdict == Some(Verdict::Unwanted);
            receipt = Receipt::First;
        }
        let is_first = matches!(receipt, Receipt::First);
        self.arrivals += u32::from(is_first);
        self.unwanted += u64::from(is_first && unwanted);
        receipt
    }

    fn finish(mut self, audit: &mut SubscriptionAudit) {
        audit.unwanted = self.unwanted;
        for event in &self.events {
            match (event.verdict, event.arrival) {
                (Some(Verdict::Delivered), 0) => {
                    audit.delivered -= 1;
                    audit.miss(Uuid::from_bytes(event.id), event.position, MissingReason::NotReceived);
                }
                (Some(Verdict::Waiting), 1..) => {
                    audit.waiting -= 1;
                    audit.delivered += 1;
                }
                _ => {}
            }
        }
        self.events.retain(|event| event.has_key && event.arrival > 0);
        self.events.sort_unstable_by_key(|event| (event.key, event.position));
        for events in self.events.chunk_by(|left, right| left.key == right.key) {
            let mut latest = 0;
            for event in events {
                audit.out_of_order += u64::from(event.arrival < latest);
                latest = latest.max(event.arrival);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::{Cursor, Definition, Filter, Headers, Payload, RangeSet, Timestamp};

    fn event(position: Position, key: &str) -> Event {
        Event {
            position,
            id: id(position),
            topic: "orders".into(),
            key: Some(key.into()),
            r#type: "placed".into(),
            payload: Payload::None,
            content_type: None,
            headers: Headers::default(),
            stream_version: None,
            deliver_at: None,
            created_at: Timestamp(0),
            malformed: None,
        }
    }

    fn id(position: Position) -> Uuid {
        // Not in the order of positions, as ids of the application's own are not.
        Uuid::from_u128((position as u128).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835))
    }

    fn ranges(text: &str) -> RangeSet {
        text.parse().unwrap()
    }

    /// One subscription with one lane that has delivered 1 to 10 and, above, 12.
    fn books() -> Books {
        let lane = LaneBook {
            subscription: "s".to_owned(),
            filter: Filter::default(),
            lanes: 1,
            lane: 0,
            floor: 10,
            settled: ranges("12"),
            covered: ranges("1-10,12"),
            before_start: RangeSet::new(),
            deliveries: RangeSet::new(),
            skipped: RangeSet::new(),
        };
        let closed = RangeSet::new();
        Books {
            incarnation: 1,
            log_start: 1,
            pruned_to: 0,
            horizon: 15,
            closed,
            lanes: vec![lane],
            former_filters: HashMap::new(),
        }
    }

    fn audit(books: Books) -> SubscriptionAudit {
        let mut auditor = Auditor::new(books);
        (1..=15).for_each(|position| auditor.event(&event(position, "k")));
        auditor.finish().subscriptions.remove(0)
    }

    fn audit_received(books: Books, received: &[Position]) -> SubscriptionAudit {
        let mut auditor = Auditor::new(books).expect_receipts("s").unwrap();
        let key = |position: Position| if position % 2 == 0 { "even" } else { "odd" };
        (1..=15).for_each(|position| auditor.event(&event(position, key(position))));
        received.iter().for_each(|position| auditor.line(&id(*position).to_string()));
        auditor.finish().subscriptions.remove(0)
    }

    #[test]
    fn sound_books_have_nothing_missing() {
        let mut books = books();
        books.lanes[0].deliveries = ranges("3");
        books.lanes[0].skipped = ranges("4");
        let audit = audit(books);
        let figures = (audit.expected, audit.delivered, audit.waiting, audit.skipped, audit.missing);
        assert_eq!(figures, (15, 9, 5, 1, 0), "{audit:?}");
    }

    /// The events up to 6 were passed under a filter that wanted none of them, those up to 8 under one that is not known any more.
    fn widened() -> Books {
        let cursor = |floor| Cursor { floor, ..Cursor::default() };
        let wanting = |topic: &str| Definition {
            filter: Filter { topics: vec![topic.into()], types: Vec::new() },
            ..Definition::default()
        };
        let mut former = FormerFilters::default();
        former.end(&wanting("other"), Timestamp(0), [&cursor(6)]);
        former.end(&wanting("t"), Timestamp(0), [&cursor(8)]);
        let former = FormerFilters::parse(&former.to_text().replace(r#"{"topics":["t"],"types":[]}"#, "null"));
        assert_eq!(former.wants(&Filter::default(), &event(7, "even")), None);
        Books { former_filters: HashMap::from([("s".to_owned(), former)]), ..books() }
    }

    #[test]
    fn what_a_former_filter_did_not_want_is_neither_delivered_nor_missing() {
        let audit = audit(widened());
        let figures = (audit.expected, audit.delivered, audit.passed_unwanted, audit.not_recorded, audit.missing);
        assert_eq!(figures, (7, 3, 6, 2, 0), "{audit:?}");
        let received = audit_received(widened(), &[9, 10, 12]);
        assert_eq!((received.delivered, received.missing), (3, 0), "no false loss: {received:?}");
        let received = audit_received(widened(), &[9, 12]);
        assert_eq!((received.missing, received.missing_events[0].position), (1, 10), "a real one is seen");
    }

    #[test]
    fn what_lay_before_the_start_is_neither_expected_nor_missing_nor_unexpected() {
        let mut books = books();
        books.lanes[0].before_start = ranges("1-6");
        books.lanes[0].covered = ranges("7-10,12");
        // One of them was skipped, another replayed by an operator: those are accounted for as such.
        (books.lanes[0].skipped, books.lanes[0].deliveries) = (ranges("2"), ranges("3"));
        for received in [&[7, 8, 9, 10, 12][..], &[5, 7, 8, 9, 10, 12]] {
            let audit = audit_received(books.clone(), received);
            assert_eq!(
                (audit.before_start, audit.expected, audit.missing, audit.unexpected),
                (4, 11, 0, 0),
                "{audit:?}"
            );
            assert_eq!((audit.delivered, audit.waiting, audit.skipped), (5, 5, 1), "{audit:?}");
        }
        assert_eq!(audit_received(books, &[7, 8, 9, 12]).missing, 1, "what lies after the start is still proven");
    }

    #[test]
    fn a_floor_moved_by_hand_is_missing_events() {
        let mut books = books();
        books.lanes[0].floor = 14;
        let audit = audit(books);
        let positions: Vec<_> = audit.missing_events.iter().map(|missing| missing.position).collect();
        assert_eq!((audit.missing, positions), (3, vec![11, 13, 14]));
        assert_eq!(audit.missing_events[0].reason, MissingReason::NotInBooks);
    }

    #[test]
    fn a_visible_event_in_a_dead_range_is_missing_unless_it_is_on_its_way() {
        let mut books = books();
        books.closed = ranges("5-6");
        books.lanes[0].deliveries = ranges("6");
        let audit = audit(books);
        let missing = Missing { id: id(5), position: 5, reason: MissingReason::InDeadRange };
        assert_eq!(audit.missing_events, [missing]);
    }

    #[test]
    fn only_wanted_events_of_the_range_and_of_the_time_of_the_books_count() {
        let mut unwanted = books();
        unwanted.lanes[0].filter.topics = vec!["billing".to_owned()];
        assert_eq!(audit(unwanted).expected, 0);
        let mut auditor = Auditor::new(Books { horizon: 8, ..books() }).range(5, 9);
        (1..=15).for_each(|position| auditor.event(&event(position, "k")));
        assert_eq!(auditor.finish().subscriptions[0].expected, 4);
    }

    #[test]
    fn events_go_by_their_lane() {
        let mut books = books();
        let lane = |number| LaneBook { lanes: 2, lane: number, ..books.lanes[0].clone() };
        let (mut first, second) = (lane(0), lane(1));
        first.covered = RangeSet::new();
        first.settled = RangeSet::new();
        books.lanes = vec![first, second];
        let mut auditor = Auditor::new(books);
        (1..=15).for_each(|position| auditor.event(&Event { key: None, ..event(position, "") }));
        assert_eq!(auditor.finish().missing(), 5, "the even ones up to the floor");
    }

    #[test]
    fn everything_received_in_order_is_clean() {
        let audit = audit_received(books(), &[2, 1, 3, 5, 4, 6, 7, 9, 8, 10, 12]);
        let bad = (audit.missing, audit.unexpected, audit.duplicates, audit.out_of_order, audit.unreadable);
        assert_eq!((audit.delivered, bad), (11, (0, 0, 0, 0, 0)), "{audit:?}");
    }

    #[test]
    fn one_line_deleted_is_one_event_missing() {
        let audit = audit_received(books(), &[1, 2, 3, 4, 5, 6, 8, 9, 10, 12]);
        assert_eq!(audit.missing_events, [Missing { id: id(7), position: 7, reason: MissingReason::NotReceived }]);
        assert_eq!((audit.expected, audit.delivered, audit.waiting, audit.missing), (15, 10, 4, 1));
    }

    #[test]
    fn what_came_after_the_books_were_read_is_no_finding() {
        let audit = audit_received(books(), &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]);
        assert_eq!((audit.delivered, audit.waiting, audit.missing, audit.unexpected), (12, 3, 0, 0));
    }

    #[test]
    fn duplicates_strangers_and_disorder_are_counted_apart() {
        let all = [1, 2, 3, 4, 7, 5, 6, 8, 9, 10, 12];
        let audit = audit_received(books(), &[&all[..], &[3, 99]].concat());
        assert_eq!((audit.duplicates, audit.unexpected, audit.out_of_order, audit.missing), (1, 1, 1, 0), "{audit:?}");
        let pruned = audit_received(Books { pruned_to: 1, ..books() }, &[&all[..], &[99]].concat());
        assert_eq!((pruned.unexpected, pruned.unknown), (0, 1));
    }

    #[test]
    fn events_that_share_an_id_are_all_received_by_it() {
        let check = |received: &[Position]| {
            let mut auditor = Auditor::new(books()).expect_receipts("s").unwrap();
            // 2, 5 and 7 were published with one id of the application's own.
            let shared = |position| if [2, 5, 7].contains(&position) { id(2) } else { id(position) };
            (1..=10).for_each(|position| auditor.event(&Event { id: shared(position), ..event(position, "k") }));
            received.iter().for_each(|position| auditor.line(&shared(*position).to_string()));
            let audit = auditor.finish().subscriptions.remove(0);
            (audit.delivered, audit.missing, audit.duplicates, audit.out_of_order)
        };
        assert_eq!(check(&[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]), (10, 0, 2, 0));
        assert_eq!(check(&[1, 2, 3, 4, 6, 8, 9, 10]), (10, 0, 0, 0), "the receiver keeps one of an id");
        assert_eq!(check(&[1, 3, 4, 6, 8, 9, 10]), (7, 3, 0, 0), "none of them came");
        assert_eq!(check(&[1, 3, 2, 4, 6, 8, 9, 10]), (10, 0, 0, 1), "the first of them takes part in the order");
    }

    #[test]
    fn a_torn_line_is_unreadable_and_its_event_missing() {
        let mut auditor = Auditor::new(books()).expect_receipts("s").unwrap();
        (1..=1).for_each(|position| auditor.event(&event(position, "k")));
        auditor.line("\n");
        auditor.line(&format!("{{\"specversion\":\"1.0\",\"id\":\"{}\",\"da", id(1)));
        let audit = auditor.finish().subscriptions.remove(0);
        assert_eq!((audit.unreadable, audit.missing), (1, 1));
    }

    #[test]
    fn the_list_of_missing_events_is_bounded_and_the_count_is_not() {
        let many = MISSING_LISTED_MAX as i64 + 1;
        let mut books = Books { horizon: many, ..books() };
        (books.lanes[0].floor, books.lanes[0].covered) = (many, RangeSet::new());
        books.lanes[0].settled = RangeSet::new();
        let mut auditor = Auditor::new(books);
        (1..=many).for_each(|position| auditor.event(&event(position, "k")));
        let audit = auditor.finish().subscriptions.remove(0);
        assert_eq!((audit.missing, audit.missing_events.len()), (many as u64, MISSING_LISTED_MAX));
    }

    #[test]
    fn a_million_events_fit_into_a_hundred_megabytes() {
        let per_event = size_of::<Expected>() + size_of::<u32>();
        assert!(per_event * 2 <= 100, "{per_event} bytes, and vectors may have twice the room that they need");
    }
}
