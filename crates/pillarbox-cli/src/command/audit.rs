use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;

use anyhow::{Context, Result};
use pillarbox::admin::{Audit, Auditor, Books, Operator, SubscriptionAudit};
use pillarbox::store::{PollRequest, ScanRequest, Store};
use pillarbox::{Filter, Position, counted};

use super::Scope;
use crate::args::AuditArgs;
use crate::exit::{Exit, Stop};
use crate::log::Log;
use crate::output::{Output, Style};

/// How many positions are read at once.
const PAGE_POSITIONS: usize = 5_000;
/// How many missing events are printed for each subscription; `--json` has more.
const MISSING_PRINTED_MAX: usize = 20;

/// Compares the log with the engine's books and, if asked, with what a receiver got.
pub(super) async fn run(scope: &Scope, args: &AuditArgs) -> Result<Exit> {
    if let (Some(from), Some(to)) = (args.from, args.to)
        && from > to
    {
        return Err(Stop::usage(format!(
            "--from {from} is above --to {to}, so that nothing would be audited; exchange the two"
        )));
    }
    let store = scope.open().await?;
    let books = store.books().await?;
    let horizon = books.horizon;
    let mut auditor = auditor(books, args)?;
    feed_log(&store, &mut auditor, horizon, &scope.output).await?;
    if let Some(path) = &args.received {
        feed_received(&mut auditor, path, &scope.output)?;
    }
    let audit = auditor.finish();
    let unreadable: u64 = audit.subscriptions.iter().map(|one| one.unreadable).sum();
    if unreadable > 0 {
        scope.output.say(format!(
            "{} of --received {} no readable id; write one event a line, as its id (a uuid) alone or as the \
             CloudEvents object (with \"id\") that the sinks file and stdout write",
            counted(unreadable, "line"),
            if unreadable == 1 { "has" } else { "have" }
        ));
    }
    if scope.output.json {
        scope.output.json(&audit)?;
    } else {
        print(&scope.output, &audit, args.received.is_some())?;
    }
    Ok(if audit.missing() > 0 { Exit::Missing } else { Exit::Done })
}

fn auditor(books: Books, args: &AuditArgs) -> Result<Auditor> {
    let mut names: Vec<String> = books.lanes.iter().map(|book| book.subscription.clone()).collect();
    names.dedup();
    let subscription = match (&args.subscription, &args.received) {
        (Some(name), _) => Some(name.clone()),
        (None, None) => None,
        (None, Some(_)) if names.len() == 1 => names.pop(),
        (None, Some(_)) => {
            return Err(Stop::usage(match names.is_empty() {
                true => "no subscription exists yet, so that --received is of no receiver".to_owned(),
                false => {
                    format!(
                        "--received is of one receiver; name its subscription by --subscription: {}",
                        names.join(", ")
                    )
                }
            }));
        }
    };
    let mut auditor = Auditor::new(books).range(args.from.unwrap_or(1), args.to.unwrap_or(Position::MAX));
    if let Some(name) = &subscription {
        auditor = auditor.only(name)?;
        if args.received.is_some() {
            auditor = auditor.expect_receipts(name)?;
        }
    }
    Ok(auditor)
}

/// Every event of the log, in pages.
async fn feed_log(store: &Log, auditor: &mut Auditor, horizon: Position, output: &Output) -> Result<()> {
    let bar = output.progress(Some(horizon.max(0) as u64), "reading the log");
    let mut after = 0;
    while after < horizon {
        let scan = ScanRequest { after, to: horizon, limit: PAGE_POSITIONS };
        let page = store
            .poll(&PollRequest { scans: vec![scan], wanted: vec![Filter::default()], without_writers: true })
            .await?;
        let Some(scan) = page.scans.into_iter().next() else { break };
        scan.events.iter().for_each(|event| auditor.event(event));
        if scan.covered_to <= after {
            break;
        }
        after = scan.covered_to;
        bar.set_position(after as u64);
    }
    bar.finish_and_clear();
    Ok(())
}

/// Every received line, in order of arrival.
fn feed_received(auditor: &mut Auditor, path: &Path, output: &Output) -> Result<()> {
    let mut reader: Box<dyn BufRead> = if path == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        Box::new(BufReader::new(
            File::open(path)
                .map_err(|error| Stop::usage(format!("cannot read --received {}: {error}", path.display())))?,
        ))
    };
    let bar = output.progress(None, "reading what was received");
    let mut line = Vec::new();
    while reader.read_until(b'\n', &mut line).context("cannot read what was received")? > 0 {
        // A line that is not UTF-8 has no readable id, and the auditor counts it as such.
        auditor.line(String::from_utf8_lossy(&line).trim_end());
        line.clear();
        bar.inc(1);
    }
    bar.finish_and_clear();
    Ok(())
}

fn print(output: &Output, audit: &Audit, received: bool) -> Result<()> {
    let mut headings = vec!["SUBSCRIPTION", "EXPECTED", "DELIVERED", "WAITING", "SKIPPED", "MISSING", "BEFORE START"];
    if received {
        headings.extend(["UNEXPECTED", "UNWANTED", "UNKNOWN", "DUPLICATES", "OUT OF ORDER", "UNREADABLE"]);
    }
    output.table(&headings, audit.subscriptions.iter().map(|one| row(one, received)).collect())?;
    for one in &audit.subscriptions {
        for missing in one.missing_events.iter().take(MISSING_PRINTED_MAX) {
            let reason = serde_json::to_value(missing.reason)?;
            let text = format!(
                "missing from {}: {} at position {} ({})",
                one.subscription,
                missing.id,
                missing.position,
                reason.as_str().unwrap_or_default().replace('_', " ")
            );
            output.styled(Style::Red, &text, "")?;
        }
        if one.missing as usize > MISSING_PRINTED_MAX {
            output.line(format!("… and {} more; --json lists them", one.missing as usize - MISSING_PRINTED_MAX))?;
        }
        if one.passed_unwanted > 0 {
            output.line(format!(
                "{}: {} that its filter wants now {} passed under one that did not; see `why`; `rewind` delivers what was passed",
                one.subscription,
                counted(one.passed_unwanted, "event"),
                if one.passed_unwanted == 1 { "was" } else { "were" }
            ))?;
        }
        if one.not_recorded > 0 {
            output.line(format!(
                "{}: {}: whether the filter of that time wanted them is no longer recorded",
                one.subscription,
                counted(one.not_recorded, "event")
            ))?;
        }
    }
    Ok(())
}

fn row(one: &SubscriptionAudit, received: bool) -> Vec<String> {
    let mut figures = vec![one.expected, one.delivered, one.waiting, one.skipped, one.missing, one.before_start];
    if received {
        figures.extend([one.unexpected, one.unwanted, one.unknown, one.duplicates, one.out_of_order, one.unreadable]);
    }
    std::iter::once(one.subscription.clone()).chain(figures.iter().map(ToString::to_string)).collect()
}
