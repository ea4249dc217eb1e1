use std::time::Duration;

use anyhow::Result;
use pillarbox::{
    CloudEvents, Event, Filter, Operator, PollRequest, Position, ResumeToken, Scan, ScanRequest, Status, Store,
};

use super::Scope;
use crate::args::TailArgs;
use crate::exit::{Exit, Stop};
use crate::output::dash;

/// How many positions one read looks at.
const PAGE_POSITIONS: usize = 500;
/// How many holes one read looks into.
const HOLES_READ_MAX: usize = 64;
/// How many of the newest positions are shown when nothing says where to begin.
const TAIL_POSITIONS: Position = 10;
/// A lost wake-up is harmless after this time.
const WATCHDOG: Duration = Duration::from_secs(5);

/// Follows the log without being an instance.
pub(super) async fn run(scope: &Scope, args: &TailArgs) -> Result<Exit> {
    let store = scope.open()?;
    let status = store.status().await?;
    let mut tail = Tail {
        scope,
        args,
        token: begin(args.from.as_deref(), &status)?,
        writer: CloudEvents::of_log(status.log.log_id),
        left: args.limit.unwrap_or(u64::MAX),
        removed_to: 0,
    };
    loop {
        let before = tail.token.clone();
        let page = store.poll(&tail.request()).await?;
        tail.say_removed(page.log_start);
        let at_end = tail.take(&page)?;
        if tail.left == 0 || (at_end && args.no_follow) {
            return Ok(Exit::Done);
        }
        if at_end && before == tail.token {
            store.wait(WATCHDOG).await?;
        }
    }
}

/// Where to begin. A bare position is safe on its own only below every open hole; a token says what was seen above it.
fn begin(from: Option<&str>, status: &Status) -> Result<ResumeToken> {
    let log = &status.log;
    let Some(from) = from else {
        let floor = log.horizon.saturating_sub(TAIL_POSITIONS).max(log.log_start - 1);
        return Ok(ResumeToken::new(log.incarnation, floor.clamp(0, log.horizon)));
    };
    if let Ok(position) = from.parse::<Position>() {
        return Ok(ResumeToken::new(log.incarnation, position.clamp(0, log.horizon)));
    }
    let token: ResumeToken = from.parse().map_err(|error: pillarbox::Error| Stop::usage(format!("--from: {error}")))?;
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
    Ok(token)
}

struct Tail<'a> {
    scope: &'a Scope,
    args: &'a TailArgs,
    token: ResumeToken,
    writer: CloudEvents,
    left: u64,
    /// Up to here it was said what retention has removed.
    removed_to: Position,
}

impl Tail<'_> {
    /// The holes between what was seen, then what lies above.
    fn request(&self) -> PollRequest {
        let top = self.top();
        let holes = self.token.seen.missing(self.token.floor + 1, top);
        let mut scans: Vec<ScanRequest> = holes
            .iter()
            .take(HOLES_READ_MAX)
            .map(|hole| ScanRequest { after: hole.start() - 1, to: *hole.end(), limit: PAGE_POSITIONS })
            .collect();
        scans.push(ScanRequest { after: top, to: Position::MAX, limit: PAGE_POSITIONS });
        PollRequest {
            scans,
            wanted: vec![Filter { topics: self.args.topic.clone().into_iter().collect(), types: vec![] }],
            without_writers: false,
        }
    }

    fn top(&self) -> Position {
        self.token.seen.last().unwrap_or(self.token.floor)
    }

    /// A reader that was away for long must learn that there is something it will never see.
    fn say_removed(&mut self, log_start: Position) {
        let end = log_start - 1;
        if end <= self.removed_to {
            return;
        }
        self.removed_to = end;
        let unseen = self.token.seen.missing(self.token.floor.saturating_add(1), end);
        if !unseen.is_empty() {
            self.scope.output.say(format!(
                "warning: retention has removed positions {unseen} before they were seen here; the log starts at {log_start}"
            ));
        }
    }

    /// Prints what is new; true if nothing more is there now.
    fn take(&mut self, page: &pillarbox::Page) -> Result<bool> {
        let top = self.top();
        // While somebody writes, a position that was not shown may still appear: the floor stays below it.
        let closes = page.writers.as_ref().is_some_and(Vec::is_empty);
        for scan in &page.scans {
            let mut from = scan.after;
            for event in &scan.events {
                self.see(scan, from, event.position, closes);
                from = event.position;
                if self.wants(event) {
                    self.print(event)?;
                    self.left -= 1;
                    if self.left == 0 {
                        return Ok(true);
                    }
                }
            }
            self.see(scan, from, scan.covered_to, closes);
        }
        let tail = page.scans.last().map_or(top, |scan| scan.covered_to);
        Ok(tail >= page.horizon || tail <= top)
    }

    /// Marks what a scan showed in `after < position <= to`.
    fn see(&mut self, scan: &Scan, after: Position, to: Position, closes: bool) {
        if closes {
            self.token.seen.insert_range(after + 1, to);
        } else {
            self.token.seen.union(&scan.visible.within(after + 1, to));
        }
        self.token.raise_floor(self.token.floor);
    }

    fn wants(&self, event: &Event) -> bool {
        self.args.key.is_none() || self.args.key.as_deref() == event.key.as_deref()
    }

    fn print(&self, event: &Event) -> Result<()> {
        if self.args.short {
            let Event { position, id, topic, r#type, created_at, .. } = event;
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
        line.extend_from_slice(format!(",\"resumetoken\":\"{}\"}}\n", self.token).as_bytes());
        self.scope.output.write(&line)
    }
}
