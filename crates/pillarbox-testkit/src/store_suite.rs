use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::time::Duration;

use pillarbox::admin::Operator;
use pillarbox::sink::BoxFuture;
use pillarbox::store::{InstanceId, Store};
use pillarbox::{NewEvent, Position, Result};

mod cases;

/// What the suite needs of a store under test: an empty log of its own, and ways to do to it what happens in the world.
///
/// The functions that need a feature are called only where that is true.
pub trait Fixture: Send + Sync + 'static {
    /// The store.
    type Store: Store;
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
        async { unreachable!("a fixture without concurrent_writers is not asked") }
    }

    /// Inserts in an open transaction; the position.
    fn insert(&self, _transaction: u64, _event: NewEvent) -> impl Future<Output = Position> + Send {
        async { unreachable!("a fixture without concurrent_writers is not asked") }
    }

    /// Commits.
    fn commit(&self, _transaction: u64) -> impl Future<Output = ()> + Send {
        async { unreachable!("a fixture without concurrent_writers is not asked") }
    }

    /// Aborts.
    fn abort(&self, _transaction: u64) -> impl Future<Output = ()> + Send {
        async { unreachable!("a fixture without concurrent_writers is not asked") }
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

/// What a fixture can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FixtureFeatures {
    /// Several publishers' transactions may be open at once, and while stores write.
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
    cases
}

/// Runs every case that the fixture can try, each with a fixture of its own.
pub async fn check_all<F: Fixture, M: Future<Output = F>>(fixture: impl Fn() -> M) -> SuiteReport {
    let mut report = SuiteReport::default();
    for case in cases::<F>() {
        let fixture = fixture().await;
        if !case.needs.within(fixture.features()) {
            report.skipped.push(case.name);
            continue;
        }
        match (case.run)(&fixture).await {
            Ok(()) => report.passed.push(case.name),
            Err(how) => report.failed.push((case.name, how.to_string())),
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
    }
}
