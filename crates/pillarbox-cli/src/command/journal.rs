use std::io::{self, BufRead};

use anyhow::{Context, Result};
use pillarbox::admin::Operator;
use pillarbox::journal::{Expected, StreamHead, write_line};
use pillarbox::{Error, ErrorKind, NewEvent};
use serde_json::json;

use super::Scope;
use super::publish::{json_text, refuse_repeated, with_payload};
use crate::args::{AppendArgs, JournalCommand, ReadArgs, StreamsArgs};
use crate::exit::{Exit, Stop};

/// How many events one read takes.
const PAGE_EVENTS: usize = 500;

/// Appends to, reads and lists the streams of the journal.
pub(super) async fn run(scope: &Scope, command: JournalCommand) -> Result<Exit> {
    match command {
        JournalCommand::Append(args) => append(scope, &args).await,
        JournalCommand::Read(args) => read(scope, &args).await,
        JournalCommand::Streams(args) => streams(scope, &args).await,
    }
}

async fn append(scope: &Scope, args: &AppendArgs) -> Result<Exit> {
    refuse_repeated(&args.header)?;
    let database = scope.database()?;
    let mut outlet = database.outlet().await?;
    let events = match args.ndjson {
        true => lines(args)?,
        false => vec![with_payload(event(args), args.payload.as_deref(), args.content_type.as_deref())?],
    };
    let limit = outlet.payload_bytes_max().await;
    for event in &events {
        event.validate(usize::MAX).map_err(|error| Stop::invalid(error.to_string()))?;
        event.validate(limit)?;
    }
    let expected = args.expect.unwrap_or(Expected::Any);
    let appended = outlet.append(&args.stream, expected, &events).await.map_err(|error| database.explain(error))?;
    let line = match scope.output.json {
        true => format!("{}\n", json!({ "stream": args.stream, "version": appended.version })),
        false => format!("{}\n", appended.version),
    };
    scope.output.write(line.as_bytes())?;
    Ok(Exit::Done)
}

/// The event as the flags describe it, without a payload.
fn event(args: &AppendArgs) -> NewEvent {
    let mut event = NewEvent::new(&args.topic, &args.event_type);
    event.headers = args.header.iter().cloned().collect();
    event
}

/// An event per line of standard input; all of them are appended, or none.
fn lines(args: &AppendArgs) -> Result<Vec<NewEvent>> {
    let (mut events, mut input, mut line, mut number) = (Vec::new(), io::stdin().lock(), Vec::new(), 0);
    loop {
        line.clear();
        if input.read_until(b'\n', &mut line).context("cannot read standard input")? == 0 {
            return Ok(events);
        }
        number += 1;
        if line.trim_ascii().is_empty() {
            continue;
        }
        let text = json_text(&line).map_err(|message| {
            Stop::invalid(format!(
                "line {number}: {message}, so that nothing was appended; correct it and append again"
            ))
        })?;
        events.push(event(args).json_text(text));
    }
}

async fn read(scope: &Scope, args: &ReadArgs) -> Result<Exit> {
    let log = scope.open().await?;
    let (mut from, mut left) = (args.from, args.limit.unwrap_or(u64::MAX));
    while left > 0 {
        let limit = PAGE_EVENTS.min(usize::try_from(left).unwrap_or(usize::MAX));
        let events = log.read_stream(&args.stream, from, limit).await?;
        if events.is_empty() {
            let nothing_read = from == args.from;
            let unknown = nothing_read && log.read_stream(&args.stream, 1, 1).await?.is_empty();
            if unknown {
                return Err(no_stream(&args.stream));
            }
            break;
        }
        let mut lines = Vec::new();
        for event in &events {
            from = event.stream_version.map_or(from, |version| version + 1);
            write_line(event, &mut lines);
        }
        scope.output.write(&lines)?;
        left -= events.len() as u64;
    }
    Ok(Exit::Done)
}

fn no_stream(stream: &str) -> anyhow::Error {
    let message = format!("the journal has no stream '{stream}'; see the streams by `pillarbox journal streams`");
    Error::new(ErrorKind::NotFound, message).into()
}

async fn streams(scope: &Scope, args: &StreamsArgs) -> Result<Exit> {
    let log = scope.open().await?;
    let limit = args.limit as usize;
    let streams = log.streams(&args.prefix, args.after.as_deref(), limit).await?;
    if scope.output.json {
        scope.output.json(&streams)?;
        return Ok(Exit::Done);
    }
    let row = |head: &StreamHead| vec![head.stream.clone(), head.topic.clone(), head.version.to_string()];
    scope.output.table(&["STREAM", "TOPIC", "VERSION"], streams.iter().map(row).collect())?;
    if streams.len() == limit {
        scope.output.say(format!("showing the first {limit}; use --limit N for more, or --after STREAM to go on"));
    }
    Ok(Exit::Done)
}
