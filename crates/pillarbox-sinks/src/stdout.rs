use std::io::{self, ErrorKind, Write};
use std::sync::Arc;
use std::time::Duration;

use pillarbox::sink::{Batch, BoxFuture, CloudEvents, Outcome, Sink, SinkFeatures};
use pillarbox::{Failure, visible_json};
use serde::Deserialize;

use crate::config::SinkConfig;
use crate::lines::{Cancelled, deliver_whole, lines_of};

/// Writes CloudEvents to the standard output, one JSON object per line, one write per batch.
///
/// What a terminal would act on (control characters, separators of lines, controls of direction) is written as a JSON escape: the value
/// is the same.
///
/// A reader that has gone is a failure of the sink with the kind `broken_pipe`: a command that only prints may end then.
#[derive(Debug, Clone)]
pub struct Stdout {
    format: CloudEvents,
}

/// What a user writes for [`Stdout`]: no keys.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StdoutConfig {}

impl SinkConfig for StdoutConfig {
    fn required() -> &'static [(&'static str, &'static str)] {
        &[]
    }

    fn build(&self, source: String) -> pillarbox::Result<Arc<dyn Sink>> {
        Ok(Arc::new(Stdout::new(source)))
    }
}

/// The wait before a terminal or pipe that takes nothing at the moment is tried again.
const FULL_PIPE_WAIT: Duration = Duration::from_millis(1);

impl Stdout {
    /// A sink whose events are of this `source`, a URI like `urn:pillarbox:<log_id>`.
    pub fn new(source: impl Into<String>) -> Self {
        Stdout { format: CloudEvents::new(source) }
    }
}

impl Sink for Stdout {
    fn features(&self) -> SinkFeatures {
        SinkFeatures { ordered_batch: true, ..SinkFeatures::default() }
    }

    fn deliver(&self, batch: Batch) -> BoxFuture<'_, Vec<Outcome>> {
        Box::pin(async move {
            let lines = visible_lines(lines_of(&self.format, &batch));
            deliver_whole(&batch, move |cancelled| write(&lines, cancelled)).await
        })
    }
}

/// The lines without anything that a terminal acts on.
fn visible_lines(lines: Vec<u8>) -> Vec<u8> {
    let text = String::from_utf8(lines).expect("events are text");
    let mut out = String::with_capacity(text.len());
    for line in text.lines() {
        out.push_str(&visible_json(line));
        out.push('\n');
    }
    out.into_bytes()
}

fn write(lines: &[u8], cancelled: &Cancelled) -> Result<(), Failure> {
    let mut stdout = io::stdout().lock();
    cancelled.check()?;
    write_whole(&mut stdout, lines).map_err(|error| match error.kind() {
        ErrorKind::BrokenPipe => Failure {
            kind: "broken_pipe",
            ..Failure::sink("the reader of the standard output has ended; start it again, or use another sink")
        },
        _ => Failure { kind: "stdout", ..Failure::sink(format!("the standard output cannot be written: {error}")) },
    })
}

/// Like `write_all` and `flush`, and patient with a pipe that was set not to block.
fn write_whole(out: &mut impl Write, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match out.write(bytes) {
            Ok(0) => return Err(ErrorKind::WriteZero.into()),
            Ok(written) => bytes = &bytes[written..],
            Err(error) => wait_or_fail(error)?,
        }
    }
    loop {
        match out.flush() {
            Ok(()) => return Ok(()),
            Err(error) => wait_or_fail(error)?,
        }
    }
}

fn wait_or_fail(error: io::Error) -> io::Result<()> {
    match error.kind() {
        ErrorKind::Interrupted => Ok(()),
        ErrorKind::WouldBlock => {
            std::thread::sleep(FULL_PIPE_WAIT);
            Ok(())
        }
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes at most three bytes, and only every other time.
    struct Reluctant {
        got: Vec<u8>,
        willing: bool,
    }

    impl Write for Reluctant {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.willing = !self.willing;
            if self.willing {
                return Err(ErrorKind::WouldBlock.into());
            }
            let taken = bytes.len().min(3);
            self.got.extend_from_slice(&bytes[..taken]);
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_terminal_acts_on_nothing_and_the_values_are_the_same() {
        let values = ["plain", "\u{9b}2J\u{7f}\u{202e}\u{2028}ü"];
        let lines: String = values.iter().map(|value| format!("{{\t\"key\": \"{value}\"}}\n")).collect();
        let shown = String::from_utf8(visible_lines(lines.into_bytes())).unwrap();
        assert_eq!(shown, "{ \"key\": \"plain\"}\n{ \"key\": \"\\u009b2J\\u007f\\u202e\\u2028ü\"}\n");
    }

    #[test]
    fn a_pipe_that_is_full_for_a_while_gets_every_byte_once() {
        let mut out = Reluctant { got: Vec::new(), willing: false };
        write_whole(&mut out, b"one line\nand another\n").unwrap();
        assert_eq!(out.got, b"one line\nand another\n");
    }
}
