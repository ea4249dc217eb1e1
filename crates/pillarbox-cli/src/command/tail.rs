use std::time::Duration;

use anyhow::Result;
use pillarbox::admin::{LogStatus, Operator};
use pillarbox::sink::CloudEvents;
use pillarbox::store::{Grace, Page, PollRequest, RangeSet, ResumeToken, Scan, ScanRequest, Store};
use pillarbox::{Event, Filter, Position};
use serde_json::json;
use tokio::time::Instant;

use super::Scope;
use crate::args::TailArgs;
use crate::database::is_passing;
use crate::exit::{Exit, Stop, chain};
use crate::log::Log;
use crate::output::dash;
use crate::patience::Patience;

/// How many positions one read looks at.
const PAGE_POSITIONS: usize = 500;
/// How many positions one read looks at that only searches for holes.
const SEARCH_POSITIONS: usize = 50_000;
/// How many holes one read looks into.
const HOLES_READ_MAX: usize = 64;
/// With more open holes than this nothing above them is read: the token would have no end.
const HOLES_OPEN_MAX: usize = 1_000;
/// How many of the newest positions are shown when nothing says where to begin.
const TAIL_POSITIONS: Position = 10;
/// A lost wake-up is harmless after this time.
const WATCHDOG: Duration = Duration::from_secs(5);
/// While a hole is open it is looked into this often: the transaction that fills it may have rung long ago.
const HOLE_INTERVAL: Duration = Duration::from_millis(100);
/// So long the transactions that write just now may take to end before the log is searched for their holes.
const WRITERS_PATIENCE: Duration = Duration::from_millis(500);

/// Follows the log without being an instance.
pub(super) async fn run(scope: &Scope, args: &TailArgs) -> Result<Exit> {
    let mut store = scope.open().await?;
    let log = store.status().await?.log;
    let token = begin(&store, args.from.as_deref(), &log).await?;
    let mut tail = Tail {
        scope,
        args,
        token,
        grace: Grace::default(),
        next_hole: 0,
        writer: CloudEvents::of_log(log.log_id),
        left: args.limit.unwrap_or(u64::MAX),
        removed_to: 0,
        held_up: false,
    };
    loop {
        match tail.step(&store).await {
            Ok(false) => {}
            Ok(true) => return Ok(Exit::Done),
            Err(error) if is_passing(&error) => store = come_back(scope, &error, &log, &tail.token).await?,
            Err(error) => return Err(error),
        }
    }
}

/// Waits until the database answers again. It may have been replaced meanwhile by what the token does not belong to.
async fn come_back(scope: &Scope, error: &anyhow::Error, before: &LogStatus, token: &ResumeToken) -> Result<Log> {
    scope.output.say(format!("warning: {}; trying again until the database answers", chain(error)));
    let (store, log) = Patience::endless()
        .while_passing(async || {
            let store = scope.open().await?;
            let log = store.status().await?.log;
            Ok((store, log))
        })
        .await?;
    if log.log_id != before.log_id {
        return Err(Stop::with(
            Exit::Failed,
            format!("the database came back with another log, {} in place of {}", log.log_id, before.log_id),
        ));
    }
    check(token, &log)?;
    scope.output.say("the database answers again; going on where it was");
    Ok(store)
}

/// Where to begin. A bare position is safe on its own only below every open hole; a token says what was seen above it.
async fn begin(store: &Log, from: Option<&str>, log: &LogStatus) -> Result<ResumeToken> {
    let Some(from) = from else {
        let floor = log.horizon.saturating_sub(TAIL_POSITIONS).max(log.log_start - 1).clamp(0, log.horizon);
        // What is visible up to there is not shown; what becomes visible there later is.
        let mut token = ResumeToken::new(log.incarnation, 0);
        token.seen = open_holes(store, log, floor).await?.missing(1, floor);
        token.raise_floor(0);
        return Ok(token);
    };
    if let Ok(position) = from.parse::<Position>() {
        let position = position.clamp(0, log.horizon);
        let lowest = open_holes(store, log, position).await?.first();
        return Ok(ResumeToken::new(log.incarnation, lowest.map_or(position, |hole| hole - 1)));
    }
    let token: ResumeToken = from.parse().map_err(|error: pillarbox::Error| {
        Stop::usage(format!(
            "--from takes a position, 0 for the whole log, or a token that `pillarbox tail` printed: {error}"
        ))
    })?;
    check(&token, log)?;
    Ok(token)
}

/// Refuses a token that means something else in this log.
fn check(token: &ResumeToken, log: &LogStatus) -> Result<()> {
    if token.incarnation != log.incarnation {
        return Err(Stop::with(
            Exit::Failed,
            format!(
                "the token is of incarnation {} and the log of {}: it was restored, copied or reset, and positions \
                 mean something else now; begin again with --from 0",
                token.incarnation, log.incarnation
            ),
        ));
    }
    let top = token.seen.last().unwrap_or(token.floor).max(token.floor);
    if top > log.horizon {
        return Err(Stop::with(
            Exit::Failed,
            format!(
                "the token says that position {top} was seen and the log ends at {}: it is not a token of this log, or was \
                 changed; use one that `pillarbox tail` printed, or begin again with --from 0",
                log.horizon
            ),
        ));
    }
    Ok(())
}

/// The positions up to `to` at which an event may still appear.
///
/// Transactions that write are mostly over at once, and then there are none. Only while one goes on is the log searched for
/// what was not shown of it.
async fn open_holes(store: &Log, log: &LogStatus, to: Position) -> Result<RangeSet> {
    let mut grace = Grace::default();
    let deadline = Instant::now() + WRITERS_PATIENCE;
    loop {
        // Above every position: it shows nothing, and yet says which writers there are.
        let page = store.poll(&blind(log.horizon, SEARCH_POSITIONS)).await?;
        grace.observe(&page);
        let scan = Scan { covered_to: to, ..Scan::default() };
        if grace.closed(&scan, 1).contains(to) || to <= 0 {
            return Ok(RangeSet::new());
        }
        if Instant::now() > deadline {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let (mut holes, mut after) = (RangeSet::new(), log.log_start - 1);
    while after < to {
        let page = store.poll(&blind(after, SEARCH_POSITIONS)).await?;
        grace.observe(&page);
        let Some(scan) = page.scans.first().filter(|scan| scan.covered_to > after) else { break };
        let end = scan.covered_to.min(to);
        holes.union(&scan.visible.missing((after + 1).max(page.log_start), end));
        holes.subtract(&grace.closed(scan, page.log_start));
        after = end;
    }
    Ok(holes)
}

/// Positions alone: no filter wants anything.
fn blind(after: Position, limit: usize) -> PollRequest {
    let scans = vec![ScanRequest { after, to: Position::MAX, limit }];
    PollRequest { scans, wanted: Vec::new(), without_writers: false }
}

struct Tail<'a> {
    scope: &'a Scope,
    args: &'a TailArgs,
    token: ResumeToken,
    /// Which positions that were not shown never will be.
    grace: Grace,
    /// Holes above this position are looked into first.
    next_hole: Position,
    writer: CloudEvents,
    left: u64,
    /// Up to here it was said what retention has removed.
    removed_to: Position,
    /// It was said that too many holes are open.
    held_up: bool,
}

impl Tail<'_> {
    /// Reads once and waits if there is nothing more now; true at the end.
    async fn step(&mut self, store: &Log) -> Result<bool> {
        let before = self.token.clone();
        let page = store.poll(&self.request()).await?;
        self.grace.observe(&page);
        self.say_removed(&page);
        let at_end = self.take(&page)?;
        if self.left == 0 || (at_end && self.args.no_follow) {
            return Ok(true);
        }
        if at_end && before == self.token {
            let open = !self.token.seen.is_empty() || self.top() < page.horizon;
            store.wait(if open { HOLE_INTERVAL } else { WATCHDOG }).await?;
        }
        Ok(false)
    }

    /// The holes between what was seen, then what lies above.
    fn request(&mut self) -> PollRequest {
        let top = self.top();
        let holes = self.token.seen.missing(self.token.floor + 1, top);
        let mut scans = self.next_holes(&holes);
        if holes.len() <= HOLES_OPEN_MAX {
            self.held_up = false;
            scans.push(ScanRequest { after: top, to: Position::MAX, limit: PAGE_POSITIONS });
        } else if !std::mem::replace(&mut self.held_up, true) {
            self.scope.output.say(format!(
                "warning: more than {HOLES_OPEN_MAX} holes are open and nothing above position {top} is read until they \
                 close; `pillarbox status` says which transaction keeps them open"
            ));
        }
        let wanted = vec![Filter { topics: self.args.topic.clone().into_iter().collect(), types: vec![] }];
        PollRequest { scans, wanted, without_writers: false }
    }

    /// The holes whose turn it is: all of them, or as many as one read may look into.
    fn next_holes(&mut self, holes: &RangeSet) -> Vec<ScanRequest> {
        let scan = |low: Position, high: Position| ScanRequest { after: low - 1, to: high, limit: PAGE_POSITIONS };
        let (later, earlier): (Vec<_>, Vec<_>) = holes.iter().partition(|hole| *hole.start() > self.next_hole);
        let turn: Vec<_> = later.into_iter().chain(earlier).take(HOLES_READ_MAX).collect();
        self.next_hole = turn.last().map_or(0, |hole| *hole.end());
        turn.iter().map(|hole| scan(*hole.start(), *hole.end())).collect()
    }

    fn top(&self) -> Position {
        self.token.seen.last().unwrap_or(self.token.floor)
    }

    /// A reader that was away for long must learn that there is something it will never see.
    fn say_removed(&mut self, page: &Page) {
        let log_start = page.log_start;
        let end = log_start - 1;
        if end <= self.removed_to {
            return;
        }
        self.removed_to = end;
        let mut unseen = self.token.seen.missing(self.token.floor.saturating_add(1), end);
        // It may have been removed just after it was read, or be kept.
        page.scans.iter().for_each(|scan| unseen.subtract(&scan.visible));
        if !unseen.is_empty() {
            // Which of the two it was is not recorded. A token of before a reset is refused, a bare position is not.
            let by = if self.token.incarnation > 1 { "retention or a reset" } else { "retention" };
            self.scope.output.say(format!(
                "warning: {by} has removed positions {unseen} before they were seen here; the log starts at {log_start}"
            ));
        }
    }

    /// Prints what is new; true if nothing more is there now.
    fn take(&mut self, page: &Page) -> Result<bool> {
        let top = self.top();
        for scan in &page.scans {
            // What was shown, what never will be, and what retention took: the floor stays below everything else.
            let mut known = scan.visible.clone();
            known.union(&self.grace.closed(scan, page.log_start));
            known.insert_range(scan.after + 1, scan.covered_to.min(page.log_start - 1));
            let mut from = scan.after;
            for event in &scan.events {
                self.see(&known, from, event.position);
                from = event.position;
                if self.wants(event) {
                    self.print(event)?;
                    self.left -= 1;
                    if self.left == 0 {
                        return Ok(true);
                    }
                }
            }
            self.see(&known, from, scan.covered_to);
        }
        let tail = page.scans.last().map_or(top, |scan| scan.covered_to);
        Ok(tail >= page.horizon || tail <= top)
    }

    /// Marks what is known in `after < position <= to`.
    fn see(&mut self, known: &RangeSet, after: Position, to: Position) {
        self.token.seen.union(&known.within(after + 1, to));
        self.token.raise_floor(self.token.floor);
    }

    fn wants(&self, event: &Event) -> bool {
        self.args.key.is_none() || self.args.key.as_deref() == event.key.as_deref()
    }

    fn print(&self, event: &Event) -> Result<()> {
        if self.args.short {
            let Event { position, id, topic, r#type, created_at, .. } = event;
            if self.scope.output.json {
                let key = event.key.as_deref();
                let token = self.token.to_string();
                return self.scope.output.json(&json!({
                    "position": position, "created_at": created_at, "topic": &**topic, "type": &**r#type, "key": key, "id": id,
                    "resumetoken": token,
                }));
            }
            let key = dash(event.key.as_ref());
            return self
                .scope
                .output
                .line(format!("{position}  {created_at}  {topic}  {type}  {key}  {id}  {}", self.token));
        }
        let mut line = Vec::new();
        self.writer.write(event, &mut line);
        // The token is one more attribute of the object: cut its last brace and close it again.
        line.truncate(line.len().saturating_sub(1));
        line.extend_from_slice(format!(",\"resumetoken\":\"{}\"}}", self.token).as_bytes());
        self.scope.output.json_line(&String::from_utf8_lossy(&line))
    }
}
