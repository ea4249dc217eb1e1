use std::collections::BTreeMap;
use std::sync::Arc;

use pillarbox::store::{Page, PollRequest, Scan, ScanRequest};
use pillarbox::{Event, Filter, Position, Result};

use crate::memory_log::{Inner, unavailable};
use crate::{Broken, MemoryLog};

/// A poll that is carried out one step at a time, so that a test can let others act in between: the horizon,
/// then the writers, then the rows, then the barrier that makes them durable.
#[derive(Debug)]
pub struct PollSteps {
    request: PollRequest,
    steps: [Step; 4],
    done: usize,
    generation: u64,
    page: Page,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Horizon,
    Writers,
    Rows,
    Barrier,
}

impl MemoryLog {
    /// Begins a poll; nothing is read before the first step.
    pub fn poll_steps(&self, request: &PollRequest) -> PollSteps {
        let inner = self.inner();
        let steps = match inner.options.broken {
            Some(Broken::WritersBeforeHorizon) => [Step::Writers, Step::Horizon, Step::Rows, Step::Barrier],
            Some(Broken::RowsBeforeHorizon) => [Step::Rows, Step::Horizon, Step::Writers, Step::Barrier],
            _ => [Step::Horizon, Step::Writers, Step::Rows, Step::Barrier],
        };
        PollSteps { request: request.clone(), steps, done: 0, generation: inner.generation, page: Page::default() }
    }

    /// See [`Store::poll`](pillarbox::store::Store::poll). Calls what [`MemoryLog::between_poll_steps`] set after each step.
    pub fn poll(&self, request: &PollRequest) -> Result<Page> {
        let mut steps = self.poll_steps(request);
        loop {
            if let Some(page) = steps.step(self)? {
                return Ok(page);
            }
            self.run_hook(steps.done);
        }
    }
}

impl PollSteps {
    /// Takes the next step; the page after the last one.
    pub fn step(&mut self, log: &MemoryLog) -> Result<Option<Page>> {
        let mut inner = log.inner();
        if inner.generation != self.generation {
            return Err(unavailable("the database went down in the middle of the poll"));
        }
        match self.steps[self.done] {
            Step::Horizon => self.page.horizon = inner.next - 1,
            Step::Writers => self.page.writers = (!self.request.without_writers).then(|| inner.writers()),
            Step::Rows => {
                let scan = |scan: &ScanRequest| inner.scan(scan, &self.request.wanted);
                self.page.scans = self.request.scans.iter().map(scan).collect();
                self.page.log_start = inner.log_start;
            }
            Step::Barrier if inner.options.broken == Some(Broken::NoBarrier) => {}
            Step::Barrier => inner.flush(),
        }
        self.done += 1;
        if self.done < self.steps.len() {
            return Ok(None);
        }
        cover(&mut self.page, &self.request);
        Ok(Some(std::mem::take(&mut self.page)))
    }
}

/// A scan that was not cut short has covered its stretch, as far as positions were handed out.
fn cover(page: &mut Page, request: &PollRequest) {
    for (scan, asked) in page.scans.iter_mut().zip(&request.scans) {
        let reached = scan.visible.last().unwrap_or(scan.after).max(page.horizon).max(scan.after);
        scan.covered_to = scan.covered_to.min(asked.to).min(reached);
    }
}

impl Inner {
    fn scan(&self, asked: &ScanRequest, wanted: &[Filter]) -> Scan {
        let mut scan = Scan { after: asked.after, covered_to: asked.to, ..Scan::default() };
        if asked.limit == 0 {
            scan.covered_to = asked.after;
            return scan;
        }
        for (looked_at, (position, event)) in self.stretch(&self.rows, asked).enumerate() {
            let is_wanted = wanted.iter().any(|filter| filter.wants(event));
            if is_wanted || self.options.broken != Some(Broken::FilterLooksLikeHole) {
                scan.visible.insert(*position);
            }
            if is_wanted {
                scan.events.push(event.clone());
            }
            if looked_at + 1 == asked.limit {
                if self.options.broken != Some(Broken::FullPageCoversAll) {
                    scan.covered_to = *position;
                }
                break;
            }
        }
        scan
    }

    fn stretch<'a>(
        &self,
        rows: &'a BTreeMap<Position, Arc<Event>>,
        asked: &ScanRequest,
    ) -> impl Iterator<Item = (&'a Position, &'a Arc<Event>)> + use<'a> {
        let to = asked.to;
        rows.range(asked.after.saturating_add(1)..).take_while(move |(position, _)| **position <= to)
    }
}
