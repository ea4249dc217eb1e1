use std::collections::VecDeque;
use std::time::Duration;

use pillarbox::engine::{Action, Engine, EngineConfig, Input, work};
use pillarbox::sink::{Attempt, BatchId, Outcome, SinkFeatures};
use pillarbox::store::{Fleet, Hello, Report, Settlement, Store};
use pillarbox::{Failure, Position, Result, Subscription, Timestamp};

/// An engine over a store, stepped by hand: calls to the store are carried out at once, what is sent to sinks waits for the test to
/// answer it, and time passes only when the test says so.
#[derive(Debug)]
pub struct Driver<S> {
    store: S,
    engine: Engine,
    now: Duration,
    began: Timestamp,
    inputs: VecDeque<Input>,
    at_sink: VecDeque<Sent>,
    settlements: Vec<Settlement>,
    reports: Vec<Report>,
    steps: Vec<u64>,
    left: bool,
}

/// A batch at a sink.
pub type Sent = ((usize, BatchId), Vec<Attempt>);

impl<S: Store> Driver<S> {
    /// Joins and goes on until nothing is under way.
    pub async fn start(
        store: S,
        config: EngineConfig,
        subscriptions: Vec<(Subscription, SinkFeatures)>,
    ) -> Result<Driver<S>> {
        let wishes = subscriptions.iter().map(|entry| entry.0.clone()).collect();
        let joined = store.join(Hello { subscriptions: wishes, ..Hello::default() }).await?;
        let engine = Engine::new(config, Duration::ZERO, &joined, store.features(), subscriptions);
        let mut driver = Driver {
            store,
            engine,
            now: Duration::ZERO,
            began: joined.time,
            inputs: VecDeque::new(),
            at_sink: VecDeque::new(),
            settlements: Vec::new(),
            reports: Vec::new(),
            steps: Vec::new(),
            left: false,
        };
        driver.go_on(Input::Tick).await?;
        Ok(driver)
    }

    /// One step, and those that follow from the store's answers.
    pub async fn go_on(&mut self, input: Input) -> Result<()> {
        self.inputs.push_back(input);
        while let Some(input) = self.inputs.pop_front() {
            self.now += Duration::from_micros(10);
            let before = work();
            let actions = self.engine.step(self.now, input);
            let deadline = self.engine.deadline(self.now);
            self.steps.push(work() - before);
            assert!(deadline > self.now, "a deadline lies ahead");
            for action in actions {
                self.act(action).await?;
            }
        }
        Ok(())
    }

    /// Lets time pass, with a step at least every 20 ms.
    pub async fn pass(&mut self, time: Duration) -> Result<()> {
        let until = self.now + time;
        while self.now < until {
            self.now += Duration::from_millis(20);
            self.go_on(Input::Tick).await?;
        }
        Ok(())
    }

    async fn act(&mut self, action: Action) -> Result<()> {
        let answer = match action {
            Action::Observe(report) => {
                let fleet = self.store.observe(&report).await?;
                self.reports.push(report);
                // Time passes only here.
                Input::Observed(Fleet { time: self.began.plus(self.now), ..fleet })
            }
            Action::Take(lanes) => Input::Taken(self.store.take(&lanes).await?),
            Action::Load(lanes) => Input::Loaded(self.store.load(&lanes).await?),
            Action::Poll(request) => Input::Polled(self.store.poll(&request).await?),
            Action::Fetch(positions) => Input::Fetched(self.store.fetch(&positions).await?),
            Action::Settle(settlement) => {
                let written = self.store.settle(&settlement).await?;
                self.settlements.push(settlement);
                Input::Settled(written)
            }
            Action::Claim(requests) => Input::Claimed(self.store.claim(&requests).await?),
            Action::Finish(ends) => Input::Finished(self.store.finish(&ends).await?),
            Action::Recover(request) => Input::Recovered(self.store.recover(&request).await?),
            Action::Deliver { batch, events } => {
                self.at_sink.push_back((batch, events));
                return Ok(());
            }
            Action::Leave => {
                self.left = true;
                return self.store.leave().await;
            }
            Action::Pause { .. } | Action::Abort => return Ok(()),
        };
        self.inputs.push_back(answer);
        Ok(())
    }

    /// The sink takes a batch, the `index`-th of those that are there.
    pub async fn deliver(&mut self, index: usize) -> Result<Vec<Position>> {
        self.answer(index, None).await
    }

    /// The sink refuses a batch.
    pub async fn fail(&mut self, index: usize, failure: &Failure) -> Result<Vec<Position>> {
        self.answer(index, Some(failure)).await
    }

    async fn answer(&mut self, index: usize, failure: Option<&Failure>) -> Result<Vec<Position>> {
        let Some((batch, events)) = self.at_sink.remove(index) else { return Ok(Vec::new()) };
        let outcome = failure.map_or(Outcome::Delivered, |failure| Outcome::Failed(failure.clone()));
        self.go_on(Input::Delivered { batch, outcomes: vec![outcome; events.len()] }).await?;
        Ok(events.iter().map(|attempt| attempt.event.position).collect())
    }

    /// What is at the sinks, oldest first.
    pub fn at_sink(&self) -> &VecDeque<Sent> {
        &self.at_sink
    }

    /// The settlements since this was last asked.
    pub fn take_settlements(&mut self) -> Vec<Settlement> {
        std::mem::take(&mut self.settlements)
    }

    /// What the engine looked at in each step since this was last asked.
    pub fn take_steps(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.steps)
    }

    /// The last report.
    pub fn report(&self) -> Report {
        self.engine.report()
    }

    /// Whether it has drained.
    pub fn has_left(&self) -> bool {
        self.left
    }

    /// The store.
    pub fn store(&self) -> &S {
        &self.store
    }
}
