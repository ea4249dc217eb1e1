use std::collections::HashMap;
use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use pillarbox::admin::Operator;
use pillarbox::sink::BoxFuture;
use pillarbox::store::{InstanceId, Store, Transact};
use pillarbox::{Event, Failure, NewEvent, Position, Relay, Result};
use tokio::task::JoinSet;
use uuid::Uuid;

mod cases;

/// What the suite needs of a store under test: an empty log of its own, and ways to do to it what happens in the world.
///
/// The functions that need a feature are called only where that is true.
pub trait Fixture: Send + Sync + 'static {
    /// The store, as a relay takes it.
    type Store: Store + Operator;
    /// What operators use on the same log.
    type Operator: Operator;

    /// What this fixture can do.
    fn features(&self) -> FixtureFeatures;

    /// Another store on the same log, which has not joined yet.
    fn open(&self) -> impl Future<Output = Result<Self::Store>> + Send;

    /// An operator on the same log.
    fn operator(&self) -> impl Future<Output = Result<Self::Operator>> + Send;

    /// Publishes in one transaction and commits it; the positions.
    fn publish(&self, events: Vec<NewEvent>) -> impl Future<Output = Result<Vec<Position>>> + Send;

    /// Ends the store as a killed process would: nothing is written, the lock is freed.
    fn kill(&self, store: Self::Store) -> impl Future<Output = ()> + Send;

    /// Ends a relay as a killed process would.
    fn end(&self, relay: Relay) -> impl Future<Output = ()> + Send {
        async { drop(relay) }
    }

    /// Lets the database's clock run with that of the machine, which relays go by. Needed only where it does not anyway.
    fn run_clock(&self) {}

    /// Makes the events up to this position older.
    fn age(&self, through: Position, by: Duration) -> impl Future<Output = ()> + Send;

    /// Puts the deaths of the dead deliveries further into the past.
    fn age_deaths(&self, by: Duration) -> impl Future<Output = ()> + Send;

    /// Divides the log into tables of so many positions. Needed only where retention removes whole tables.
    fn divide(&self, _positions: u32) -> impl Future<Output = ()> + Send {
        async {}
    }

    /// Moves the floor of a lane by hand, past its books and its fence.
    fn move_floor(&self, subscription: &str, lane: u32, floor: Position) -> impl Future<Output = ()> + Send;

    /// How many rows there are about subscriptions, in all tables.
    fn rows(&self) -> impl Future<Output = u64> + Send;

    /// Draws the next position for no event.
    fn leave_gap(&self) -> impl Future<Output = Position> + Send {
        async { unreachable!("a fixture without fill is not asked") }
    }

    /// Inserts an event at a position that was left out, as nothing but a publisher can who sets positions by hand; its id.
    fn fill(&self, _position: Position) -> impl Future<Output = Uuid> + Send {
        async { unreachable!("a fixture without fill is not asked") }
    }

    /// Stores that no call of retention removes what is younger than this; None: nothing at all.
    fn allow_retention(&self, _limit: Option<Duration>) -> impl Future<Output = ()> + Send {
        async { unreachable!("a fixture without stored_policy is not asked") }
    }

    /// A transactional handler with batches of this size. In its transaction it writes an effect, publishes an event of topic
    /// `effects`, and then fails if the function says so.
    fn transactional(&self, _batch_size: usize, _verdict: Verdict) -> impl Future<Output = Arc<dyn Transact>> + Send {
        async { unreachable!("a fixture without transact is not asked") }
    }

    /// The positions of the events whose effects are committed, in the order in which they were written.
    fn effects(&self) -> impl Future<Output = Vec<Position>> + Send {
        async { unreachable!("a fixture without transact is not asked") }
    }

    /// Accepts an id for a consumer in a transaction of its own; whether it was the first time.
    fn accept(&self, _consumer: &str, _id: Uuid) -> impl Future<Output = Result<bool>> + Send {
        async { unreachable!("a fixture without inbox is not asked") }
    }

    /// Puts what was accepted further into the past, but for this id.
    fn age_inbox(&self, _but: Uuid, _by: Duration) -> impl Future<Output = ()> + Send {
        async { unreachable!("a fixture without inbox is not asked") }
    }

    /// Removes the row of an instance that lives, as another does that has taken it for dead. Nothing else changes.
    fn bury(&self, _instance: InstanceId) -> impl Future<Output = ()> + Send {
        async { unreachable!("a fixture without bury is not asked") }
    }

    /// A session of an instance stands still in the middle of a transaction that has locked its lanes.
    fn hold(&self, _instance: InstanceId) -> impl Future<Output = ()> + Send {
        async { unreachable!("a fixture without hold is not asked") }
    }

    /// Lets so much time pass on the database's clock.
    fn pass(&self, time: Duration) -> impl Future<Output = ()> + Send {
        tokio::time::sleep(time)
    }

    /// Begins a publisher's transaction and gives it a number.
    fn begin(&self) -> impl Future<Output = u64> + Send {
        async { unreachable!("a fixture without transactions is not asked") }
    }

    /// Inserts in an open transaction; the position.
    fn insert(&self, _transaction: u64, _event: NewEvent) -> impl Future<Output = Position> + Send {
        async { unreachable!("a fixture without transactions is not asked") }
    }

    /// Commits.
    fn commit(&self, _transaction: u64) -> impl Future<Output = ()> + Send {
        async { unreachable!("a fixture without transactions is not asked") }
    }

    /// Aborts.
    fn abort(&self, _transaction: u64) -> impl Future<Output = ()> + Send {
        async { unreachable!("a fixture without transactions is not asked") }
    }

    /// Lets something happen in the middle of the next poll, after so many of its steps.
    fn during_poll(&self, _steps: usize, _action: DuringPoll) {
        unreachable!("a fixture without during_poll is not asked")
    }

    /// The power fails: what is not durable is gone, and so is every open store.
    fn power_loss(&self) {
        unreachable!("a fixture without power_loss is not asked")
    }

    /// Makes the next settlement fail in the middle.
    fn fail_next_settle(&self) {
        unreachable!("a fixture without fail_settle is not asked")
    }
}

/// What a transactional handler answers once it has written its effect.
pub type Verdict = Arc<dyn Fn(&Event) -> std::result::Result<(), Failure> + Send + Sync>;

/// What a fixture can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FixtureFeatures {
    /// A publisher's transaction may be open while others read: [`Fixture::begin`] and what follows it work.
    pub transactions: bool,
    /// Several publishers' transactions may be open at once, and while stores write. Needs `transactions`.
    pub concurrent_writers: bool,
    /// [`Fixture::during_poll`] works.
    pub during_poll: bool,
    /// [`Fixture::power_loss`] works.
    pub power_loss: bool,
    /// [`Fixture::fail_next_settle`] works.
    pub fail_settle: bool,
    /// [`Fixture::bury`] works.
    pub bury: bool,
    /// [`Fixture::hold`] works: silence alone lets lanes be taken.
    pub hold: bool,
    /// [`Fixture::leave_gap`] and [`Fixture::fill`] work: publishers can choose positions.
    pub fill: bool,
    /// [`Fixture::allow_retention`] works: the database limits what calls of retention remove.
    pub stored_policy: bool,
    /// Deduplication keys are looked at.
    pub dedup: bool,
    /// [`Fixture::transactional`] and [`Fixture::effects`] work.
    pub transact: bool,
    /// [`Fixture::accept`] and [`Fixture::age_inbox`] work.
    pub inbox: bool,
    /// Not a demand: retention removes whole tables of the log, and none that is in use.
    pub whole_tables: bool,
}

/// What happens in the middle of a poll.
#[derive(Debug, Clone)]
pub enum DuringPoll {
    /// This transaction inserts an event.
    Insert(u64, Box<NewEvent>),
    /// The rows of this transaction become visible: the first half of its commit, where a commit has halves.
    Show(u64),
    /// This transaction commits.
    Commit(u64),
}

/// One behaviour that every store has.
pub struct Case<F> {
    /// What is promised.
    pub name: &'static str,
    needs: FixtureFeatures,
    run: for<'a> fn(&'a F) -> BoxFuture<'a, Outcome>,
}

type Tried<T> = std::result::Result<T, Box<dyn StdError + Send + Sync>>;
type Outcome = Tried<()>;

/// How long a call that must return at once may take.
const AT_ONCE: Duration = Duration::from_secs(2);

/// What a run of the suite showed.
#[derive(Debug, Clone, Default)]
pub struct SuiteReport {
    /// The cases that held.
    pub passed: Vec<&'static str>,
    /// The cases that the fixture cannot try.
    pub skipped: Vec<&'static str>,
    /// The cases that did not hold, and how.
    pub failed: Vec<(&'static str, String)>,
}

impl SuiteReport {
    /// # Panics
    /// If a case failed.
    #[track_caller]
    pub fn assert_sound(&self) {
        assert!(self.failed.is_empty(), "{self}");
        assert!(!self.passed.is_empty(), "no case was run");
    }
}

impl fmt::Display for SuiteReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} skipped, {} failed", self.passed.len(), self.skipped.len(), self.failed.len())?;
        self.failed.iter().try_for_each(|(name, how)| write!(f, "\n  {name}: {how}"))
    }
}

/// All cases.
pub fn cases<F: Fixture>() -> Vec<Case<F>> {
    let mut cases = cases::all();
    cases.extend(cases::queue::all());
    cases.extend(cases::retention::all());
    cases.extend(cases::definition::all());
    cases.extend(cases::lanes::all());
    cases.extend(cases::journal::all());
    cases.extend(cases::operating::all());
    cases.extend(cases::rewinding::all());
    cases.extend(cases::ownership::all());
    cases.extend(cases::publishing::all());
    cases.extend(cases::transactional::all());
    cases.extend(cases::why::all());
    cases
}

/// How many cases are run at once.
const AT_ONCE_MAX: usize = 4;

/// Runs every case that the fixture can try, each with a fixture of its own.
pub async fn check_all<F: Fixture, M: Future<Output = F> + Send + 'static>(fixture: impl Fn() -> M) -> SuiteReport {
    run_all(fixture, false).await
}

/// The same, up to the first case that does not hold.
pub async fn first_failure<F: Fixture, M: Future<Output = F> + Send + 'static>(
    fixture: impl Fn() -> M,
) -> Option<(&'static str, String)> {
    run_all(fixture, true).await.failed.pop()
}

/// What became of a case.
enum Ended {
    Passed,
    Skipped,
    Failed(String),
}

async fn run_all<F: Fixture, M: Future<Output = F> + Send + 'static>(
    fixture: impl Fn() -> M,
    stops_at_failure: bool,
) -> SuiteReport {
    let (mut waiting, mut running) = (cases::<F>().into_iter().enumerate(), JoinSet::new());
    let (mut done, mut names) = (Vec::new(), HashMap::new());
    loop {
        while running.len() < AT_ONCE_MAX
            && let Some((number, case)) = waiting.next()
        {
            let name = case.name;
            names.insert(running.spawn(run(number, case, fixture())).id(), (number, name));
        }
        match running.join_next_with_id().await {
            None => break,
            Some(Ok((_, ended))) => done.push(ended),
            Some(Err(panicked)) => {
                let (number, name) = names[&panicked.id()];
                done.push((number, name, Ended::Failed(panicked.to_string())));
            }
        }
        let failed = matches!(done.last(), Some((_, _, Ended::Failed(_))));
        if failed && stops_at_failure {
            break;
        }
    }
    report(done)
}

async fn run<F: Fixture>(
    number: usize,
    case: Case<F>,
    fixture: impl Future<Output = F>,
) -> (usize, &'static str, Ended) {
    let fixture = fixture.await;
    if !case.needs.within(fixture.features()) {
        return (number, case.name, Ended::Skipped);
    }
    match (case.run)(&fixture).await {
        Ok(()) => (number, case.name, Ended::Passed),
        Err(how) => (number, case.name, Ended::Failed(how.to_string())),
    }
}

/// In the order of the cases.
fn report(mut done: Vec<(usize, &'static str, Ended)>) -> SuiteReport {
    done.sort_by_key(|(number, ..)| *number);
    let mut report = SuiteReport::default();
    for (_, name, ended) in done {
        match ended {
            Ended::Passed => report.passed.push(name),
            Ended::Skipped => report.skipped.push(name),
            Ended::Failed(how) => report.failed.push((name, how)),
        }
    }
    report
}

/// Runs one case.
///
/// # Panics
/// If there is no case of this name, or the fixture cannot try it.
pub async fn check_named<F: Fixture, M: Future<Output = F>>(name: &str, fixture: impl Fn() -> M) -> SuiteReport {
    let case = cases::<F>().into_iter().find(|case| case.name == name).unwrap_or_else(|| panic!("no case {name}"));
    let fixture = fixture().await;
    assert!(case.needs.within(fixture.features()), "the fixture cannot try {name}");
    let mut report = SuiteReport::default();
    match (case.run)(&fixture).await {
        Ok(()) => report.passed.push(case.name),
        Err(how) => report.failed.push((case.name, how.to_string())),
    }
    report
}

impl FixtureFeatures {
    fn within(self, has: FixtureFeatures) -> bool {
        (!self.concurrent_writers || has.concurrent_writers)
            && (!self.during_poll || has.during_poll)
            && (!self.power_loss || has.power_loss)
            && (!self.fail_settle || has.fail_settle)
            && (!self.bury || has.bury)
            && (!self.hold || has.hold)
            && (!self.transactions || has.transactions)
            && (!self.fill || has.fill)
            && (!self.stored_policy || has.stored_policy)
            && (!self.dedup || has.dedup)
            && (!self.transact || has.transact)
            && (!self.inbox || has.inbox)
    }
}
