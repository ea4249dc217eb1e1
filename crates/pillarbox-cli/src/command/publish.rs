use std::collections::HashSet;
use std::fs::File;
use std::io::{self, BufRead, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::FileTypeExt;

use anyhow::{Context, Result};
use pillarbox::{Error, ErrorKind, NewEvent, Timestamp, counted};
use serde_json::json;
use uuid::Uuid;

use super::Scope;
use crate::args::PublishArgs;
use crate::database::{Database, Outlet};
use crate::exit::{Exit, OutputClosed, Stop};

/// How many lines are published in one transaction.
const BATCH_LINES: usize = 1_000;

/// Publishes one event or many, and prints their ids.
pub(super) async fn run(scope: &Scope, args: &PublishArgs) -> Result<Exit> {
    refuse_repeated(&args.header)?;
    let database = scope.database()?;
    let mut outlet = database.outlet().await?;
    if args.ndjson {
        return lines(scope, &database, &mut outlet, args).await;
    }
    let event = with_payload(event(args), args.payload.as_deref(), args.content_type.as_deref())?;
    event.validate(usize::MAX).map_err(|error| Stop::invalid(error.to_string()))?;
    // The database would refuse it too, and not every one of them says how large it is.
    event.validate(outlet.payload_bytes_max().await)?;
    let ids = outlet.publish(&[event]).await.map_err(|error| database.explain(error))?;
    print(scope, &ids)?;
    Ok(Exit::Done)
}

/// The event as the flags describe it, without a payload.
fn event(args: &PublishArgs) -> NewEvent {
    let mut event = NewEvent::new(&args.topic, &args.event_type);
    event.key = args.key.clone();
    event.headers = args.header.iter().cloned().collect();
    event.deliver_at = args.deliver_at.or_else(|| args.delay.map(|delay| Timestamp::now().plus(delay)));
    event.dedup_key = args.dedup_key.clone();
    event
}

/// The event with the payload of the command line, or of standard input.
pub(super) fn with_payload(event: NewEvent, payload: Option<&str>, content_type: Option<&str>) -> Result<NewEvent> {
    let bytes = match payload {
        None => return refuse_forgotten_input().map(|()| event),
        Some("-") => {
            let mut bytes = Vec::new();
            io::stdin().lock().read_to_end(&mut bytes).context("cannot read standard input")?;
            bytes
        }
        Some(text) => text.as_bytes().to_vec(),
    };
    if content_type.is_none() && bytes.trim_ascii().is_empty() {
        return Err(Stop::invalid(
            "the payload is empty, which is not JSON; leave it out to publish an event without a payload, write null or \"\", or pass \
             --content-type to send it as bytes",
        ));
    }
    match content_type {
        Some(content_type) => Ok(event.bytes(bytes, content_type)),
        None => json_text(&bytes).map(|text| event.json_text(text)).map_err(|message| {
            Stop::invalid(format!(
                "{message}; quote it as JSON, or pass --content-type (for example text/plain) to send \
                 the bytes as they are"
            ))
        }),
    }
}

/// The last one would win, without a message.
pub(super) fn refuse_repeated(headers: &[(String, String)]) -> Result<()> {
    let mut seen = HashSet::new();
    match headers.iter().find(|(name, _)| !seen.insert(name)) {
        Some((name, _)) => Err(Stop::usage(format!(
            "an event has one value for each header, and '{name}' is given twice; give it once"
        ))),
        None => Ok(()),
    }
}

/// Input from a pipe is meant to be published. It is not read unasked: in a loop over the lines of a file that would be the
/// loop's own input, and a pipe that is never closed would never end.
fn refuse_forgotten_input() -> Result<()> {
    let Ok(input) = io::stdin().as_fd().try_clone_to_owned() else { return Ok(()) };
    let kind = File::from(input).metadata().map(|metadata| metadata.file_type());
    match kind {
        Ok(kind) if kind.is_fifo() || kind.is_file() => Err(Stop::usage(
            "no payload is given, and standard input is a pipe or a file; write - to publish what is in it, or add </dev/null for an \
             event without a payload",
        )),
        _ => Ok(()),
    }
}

/// JSON exactly as it was given, without the line's end that `echo` and files add.
pub(super) fn json_text(bytes: &[u8]) -> Result<String, String> {
    let text = std::str::from_utf8(bytes).map_err(|error| format!("the payload is not UTF-8 ({error})"))?;
    let text = text.strip_suffix('\n').unwrap_or(text);
    let text = text.strip_suffix('\r').unwrap_or(text);
    serde_json::from_str::<serde::de::IgnoredAny>(text)
        .map_err(|error| format!("the payload is not JSON ({error})"))?;
    Ok(text.to_owned())
}

/// One event per line of standard input. Lines before a bad one are published, so that its number says where to go on.
async fn lines(scope: &Scope, database: &Database, outlet: &mut Outlet, args: &PublishArgs) -> Result<Exit> {
    let bar = scope.output.progress(None, "publishing");
    let limit = outlet.payload_bytes_max().await;
    let mut input = io::stdin().lock();
    let (mut batch, mut line, mut number, mut published) = (Vec::new(), Vec::new(), 0u64, 0u64);
    loop {
        line.clear();
        let more = input.read_until(b'\n', &mut line).context("cannot read standard input")? > 0;
        number += u64::from(more);
        let parsed = match more && !line.trim_ascii().is_empty() {
            true => Some(line_event(args, &line, limit)),
            false => None,
        };
        let bad = match parsed {
            Some(Ok(event)) => {
                batch.push(event);
                None
            }
            Some(Err(message)) => Some(message),
            None => None,
        };
        if !batch.is_empty() && (batch.len() >= BATCH_LINES || !more || bad.is_some()) {
            let sent = outlet.publish(&batch).await.map_err(|error| database.explain(error));
            let ids = sent.with_context(|| stopped(published, number, "the database refused the lines before it"))?;
            published += ids.len() as u64;
            bar.set_position(published);
            batch.clear();
            // Lines are waiting to be published whether or not somebody reads the ids.
            match print(scope, &ids) {
                Err(error) if error.is::<OutputClosed>() => {}
                printed => printed.with_context(|| stopped(published, number, "the ids could not be printed"))?,
            }
        }
        if let Some(message) = bad {
            return Err(Error::new(ErrorKind::Invalid, stopped(published, number, &message)).into());
        }
        if !more {
            bar.finish_and_clear();
            return Ok(Exit::Done);
        }
    }
}

fn line_event(args: &PublishArgs, line: &[u8], payload_bytes_max: usize) -> Result<NewEvent, String> {
    let text = json_text(line)
        .map_err(|message| format!("{message}; write one JSON value per line, and publish again from this line on"))?;
    let event = event(args).json_text(text);
    event.validate(payload_bytes_max).map_err(|error| error.to_string())?;
    Ok(event)
}

fn stopped(published: u64, number: u64, message: &str) -> String {
    let were = if published == 1 { "was" } else { "were" };
    format!("{} {were} published, and then it stopped at line {number}: {message}", counted(published, "event"))
}

fn print(scope: &Scope, ids: &[Uuid]) -> Result<()> {
    let line = |id: &Uuid| if scope.output.json { format!("{}\n", json!({ "id": id })) } else { format!("{id}\n") };
    scope.output.write(ids.iter().map(line).collect::<String>().as_bytes())
}
