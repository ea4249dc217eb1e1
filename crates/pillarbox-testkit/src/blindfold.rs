use std::sync::Arc;
use std::time::Duration;

use pillarbox::admin::{
    Audit, Auditor, Books, Cause, Change, Changed, Check, EventRecord, ListQuery, ListRow, Operator, PrunePolicy,
    Pruned, Status, Why, why,
};
use pillarbox::journal::{Appended, Expected, StreamHead};
use pillarbox::store::{
    ClaimEnd, ClaimRequest, Claims, Epoch, Fleet, Hello, Joined, LaneRef, LaneState, Page, PollRequest, RecoverRequest,
    Recovered, Report, Settlement, Store, StoreFeatures, Take, Wake,
};
use pillarbox::testing::Capture;
use pillarbox::{Event, NewEvent, Position, Relay, Result, Subscription};
use tokio::sync::watch;
use uuid::Uuid;

use crate::eventually;

/// Only a failing test waits for so long.
const PATIENCE: Duration = Duration::from_secs(30);

/// A store whose looks at the fleet can be held up, as by a slow connection for them: everything else goes on.
#[derive(Debug)]
pub struct Blindfold<S> {
    store: S,
    worn: watch::Receiver<bool>,
    floor: watch::Sender<Position>,
}

/// Puts a [`Blindfold`] on and off, and sees what its store has tried to settle.
#[derive(Debug)]
pub struct BlindfoldKnot {
    worn: watch::Sender<bool>,
    floor: watch::Receiver<Position>,
}

impl<S: Store> Blindfold<S> {
    /// Around a store; not worn yet.
    pub fn new(store: S) -> (Self, BlindfoldKnot) {
        let (knot, worn) = watch::channel(false);
        let (floor, seen) = watch::channel(0);
        (Blindfold { store, worn, floor }, BlindfoldKnot { worn: knot, floor: seen })
    }
}

impl BlindfoldKnot {
    /// Looks at the fleet are not answered from now on, or are again.
    pub fn wear(&self, worn: bool) {
        self.worn.send_replace(worn);
    }

    /// Waits until a settlement with this floor or a higher one has been answered, whatever the answer was.
    ///
    /// # Panics
    /// If it does not come in time.
    pub async fn tried_to_settle(&mut self, floor: Position) {
        let tried = self.floor.wait_for(|tried| *tried >= floor);
        tokio::time::timeout(PATIENCE, tried).await.expect("it settles").expect("the store is there");
    }
}

impl<S: Store> Store for Blindfold<S> {
    fn features(&self) -> StoreFeatures {
        self.store.features()
    }

    async fn join(&self, hello: Hello) -> Result<Joined> {
        self.store.join(hello).await
    }

    async fn observe(&self, report: &Report) -> Result<Fleet> {
        // Who holds the knot may be gone.
        let _ = self.worn.clone().wait_for(|worn| !worn).await;
        self.store.observe(report).await
    }

    async fn take(&self, lanes: &[Take]) -> Result<Vec<Option<Epoch>>> {
        self.store.take(lanes).await
    }

    async fn load(&self, lanes: &[(LaneRef, Epoch)]) -> Result<Vec<Option<LaneState>>> {
        self.store.load(lanes).await
    }

    async fn poll(&self, request: &PollRequest) -> Result<Page> {
        self.store.poll(request).await
    }

    async fn fetch(&self, positions: &[Position]) -> Result<Vec<Arc<Event>>> {
        self.store.fetch(positions).await
    }

    async fn settle(&self, settlement: &Settlement) -> Result<Vec<bool>> {
        let answer = self.store.settle(settlement).await;
        let floor = settlement.lanes.iter().map(|write| write.cursor.floor).max().unwrap_or(0);
        self.floor.send_modify(|tried| *tried = floor.max(*tried));
        answer
    }

    async fn claim(&self, requests: &[ClaimRequest]) -> Result<Vec<Claims>> {
        self.store.claim(requests).await
    }

    async fn finish(&self, ends: &[ClaimEnd]) -> Result<Vec<bool>> {
        self.store.finish(ends).await
    }

    async fn recover(&self, request: &RecoverRequest) -> Result<Recovered> {
        self.store.recover(request).await
    }

    async fn wait(&self, timeout: Duration) -> Result<Wake> {
        self.store.wait(timeout).await
    }

    async fn leave(&self) -> Result<()> {
        self.store.leave().await
    }
}

impl<S: Store + Operator> Operator for Blindfold<S> {
    async fn status(&self) -> Result<Status> {
        self.store.status().await
    }

    async fn list(&self, query: &ListQuery) -> Result<Vec<ListRow>> {
        self.store.list(query).await
    }

    async fn show(&self, id: Uuid) -> Result<Option<EventRecord>> {
        self.store.show(id).await
    }

    async fn change(&self, change: &Change, dry_run: bool) -> Result<Changed> {
        self.store.change(change, dry_run).await
    }

    async fn publish(&self, events: &[NewEvent]) -> Result<Vec<Uuid>> {
        self.store.publish(events).await
    }

    async fn append(&self, stream: &str, expected: Expected, events: &[NewEvent]) -> Result<Appended> {
        self.store.append(stream, expected, events).await
    }

    async fn read_stream(&self, stream: &str, from: i64, limit: usize) -> Result<Vec<Event>> {
        self.store.read_stream(stream, from, limit).await
    }

    async fn streams(&self, prefix: &str, after: Option<&str>, limit: usize) -> Result<Vec<StreamHead>> {
        self.store.streams(prefix, after, limit).await
    }

    async fn books(&self) -> Result<Books> {
        self.store.books().await
    }

    async fn prune(&self, policy: &PrunePolicy) -> Result<Pruned> {
        self.store.prune(policy).await
    }

    async fn doctor(&self) -> Result<Vec<Check>> {
        self.store.doctor().await
    }

    async fn reset(&self) -> Result<()> {
        self.store.reset().await
    }
}

/// A relay that owns its lane reads with the filter it was started with, while another is started with a wider one and the first has not
/// heard of it: nothing is passed over that the wider one wants, and everybody says so. For every store; the two
/// and the operator's are on one log.
///
/// # Panics
/// If a promise is broken.
pub(crate) async fn check_widened_filter<S: Store + Operator>(first: S, second: S, operator: impl Operator) {
    let capture = Capture::new();
    let wanting = |topics: &[&str]| Subscription { lanes: 1, ..Subscription::new("s").topics(topics.iter().copied()) };
    let (first, mut knot) = Blindfold::new(first);
    let narrow = Relay::builder(first).subscribe(wanting(&["orders"]), Arc::new(capture.clone()));
    let narrow = narrow.start().await.expect("the first relay starts");
    let before = publish(&operator, &["billing", "orders"]).await;
    arrives(&capture, before[1].0).await;
    knot.tried_to_settle(before[1].1).await;

    knot.wear(true);
    let wide = Relay::builder(second).subscribe(wanting(&["orders", "billing"]), Arc::new(capture.clone()));
    let wide = wide.start().await.expect("the second relay starts");
    let after = publish(&operator, &["billing", "orders"]).await;
    arrives(&capture, after[1].0).await;
    knot.tried_to_settle(after[1].1).await;
    knot.wear(false);
    arrives(&capture, after[0].0).await;

    let settled = async || Some(explain(&operator, after[0].0).await).filter(|why| why.cause == Cause::Delivered);
    eventually("the event that only the wider filter wants is settled", settled).await;
    let passed = explain(&operator, before[0].0).await;
    assert_eq!(passed.cause, Cause::NotMatched, "{passed:?}");
    assert!(passed.message.contains("when it was passed"), "{passed:?}");
    assert!(!capture.events().iter().any(|event| event.id == before[0].0), "it was not wanted then");
    let audit = audit(&operator, &capture, &[&before[..], &after].concat()).await;
    let figures = &audit.subscriptions[0];
    assert_eq!((figures.expected, figures.passed_unwanted, figures.missing), (3, 1, 0), "{figures:?}");
    let instances = [(narrow.instance(), true), (wide.instance(), false)];
    eventually("both relays tell which definition they run", async || {
        let status = operator.status().await.expect("the status is read");
        let told = |(id, differs): &(pillarbox::store::InstanceId, bool)| {
            let instance = status.instances.iter().find(|instance| instance.id == *id);
            let report = instance.and_then(|instance| instance.report.subscriptions.get("s"));
            report.is_some_and(|report| report.definition == 2 && report.differs == *differs)
        };
        (status.subscriptions[0].definition == 2 && instances.iter().all(told)).then_some(())
    })
    .await;
    narrow.stop().await;
    wide.stop().await;
}

/// One event of each topic, one after the other; their ids and positions.
async fn publish(operator: &impl Operator, topics: &[&str]) -> Vec<(Uuid, Position)> {
    let mut published = Vec::new();
    for topic in topics {
        let id = operator.publish(&[NewEvent::new(*topic, "happened").key("k")]).await.expect("it is published")[0];
        let record = operator.show(id).await.expect("it is read").expect("it is there");
        published.push((id, record.event.position));
    }
    published
}

async fn arrives(capture: &Capture, id: Uuid) {
    let arrives = async {
        let mut count = 0;
        loop {
            let events = capture.wait_for(count).await;
            if events.iter().any(|event| event.id == id) {
                return;
            }
            count = events.len() + 1;
        }
    };
    tokio::time::timeout(PATIENCE, arrives).await.expect("a wanted event arrives");
}

async fn explain(operator: &impl Operator, id: Uuid) -> Why {
    let record = operator.show(id).await.expect("it is read").expect("it is there");
    why(&record, &record.subscriptions[0], &operator.status().await.expect("the status is read"))
}

async fn audit(operator: &impl Operator, capture: &Capture, published: &[(Uuid, Position)]) -> Audit {
    let books = operator.books().await.expect("the books are read");
    let mut auditor = Auditor::new(books).expect_receipts("s").expect("the subscription is there");
    for (id, _) in published {
        auditor.event(&operator.show(*id).await.expect("it is read").expect("it is there").event);
    }
    capture.events().iter().for_each(|event| auditor.line(&event.id.to_string()));
    auditor.finish()
}
