use std::io::{self, IsTerminal, Write};

use pillarbox::{visible, visible_json};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::args::{Args, Command, LogFormat};
use crate::output::no_color;

/// How a style begins that the formatter writes: `ESC [ numbers m`.
const STYLE_START: &str = "\x1b[";

/// Starts logging on standard error. `PILLARBOX_LOG`, else `RUST_LOG`, else the flags decide how much.
pub(crate) fn start(args: &Args) {
    let named =
        ["PILLARBOX_LOG", "RUST_LOG"].iter().find_map(|name| std::env::var(name).ok().filter(|text| !text.is_empty()));
    let filter = named.unwrap_or_else(|| default_filter(args).to_owned());
    // A filter that cannot be read is no reason to run without a log.
    let filter = EnvFilter::try_new(&filter).unwrap_or_else(|_| EnvFilter::new("info"));
    let colors = io::stderr().is_terminal() && !no_color();
    let records = match args.log_format {
        LogFormat::Json => Records::Json,
        LogFormat::Text if colors => Records::Styled,
        LogFormat::Text => Records::Plain,
    };
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(records).with_target(false);
    let started = match records {
        Records::Json => builder.json().try_init(),
        Records::Styled | Records::Plain => builder.with_ansi(colors).try_init(),
    };
    started.expect("nothing else sets a subscriber in this process");
}

fn default_filter(args: &Args) -> &'static str {
    let works = matches!(args.command, Command::Run(_));
    match (args.quiet, args.verbose, works) {
        (true, ..) => "error",
        (_, 0, true) => "info",
        (_, 0, false) => "warn",
        // Of Pillarbox: what its libraries say at these levels is about connections, and may hold what they send.
        (_, 1, _) => "info,pillarbox=debug",
        _ => "info,pillarbox=trace",
    }
}

/// What the records of the log look like, and how they are written: one line each, in which a terminal acts on nothing that came from an
/// event or a server.
#[derive(Debug, Clone, Copy)]
enum Records {
    Json,
    /// Text with the formatter's own styles, which stay.
    Styled,
    Plain,
}

impl Records {
    /// One record on one line, without its end.
    fn shown(self, record: &str) -> String {
        match self {
            Records::Json => visible_json(record).into_owned(),
            Records::Plain => visible(record).into_owned(),
            Records::Styled => styled(record),
        }
    }
}

impl<'a> MakeWriter<'a> for Records {
    type Writer = Records;

    fn make_writer(&'a self) -> Records {
        *self
    }
}

impl Write for Records {
    /// The formatter hands over a whole record at a time.
    fn write(&mut self, record: &[u8]) -> io::Result<usize> {
        let text = String::from_utf8_lossy(record);
        let line = self.shown(text.strip_suffix('\n').unwrap_or(&text));
        io::stderr().write_all(format!("{line}\n").as_bytes())?;
        Ok(record.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

/// A record without what a terminal acts on, but for styles. Those are the formatter's: in what it is given it escapes their beginning.
fn styled(record: &str) -> String {
    let mut parts = record.split(STYLE_START);
    let mut out = visible(parts.next().unwrap_or_default()).into_owned();
    for part in parts {
        let numbers = part.trim_start_matches(|digit: char| digit.is_ascii_digit() || digit == ';');
        let is_style = numbers.starts_with('m');
        out.push_str(if is_style { STYLE_START } else { "\\u{1b}[" });
        out.push_str(&visible(part));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_one_line_that_acts_on_no_terminal() {
        let record = "WARN failed error=a\nFORGED \u{1b}[2J\u{9b}\u{202e}\u{2028}";
        assert_eq!(Records::Plain.shown(record), r"WARN failed error=a\nFORGED \u{1b}[2J\u{9b}\u{202e}\u{2028}");
        let json = "{\"error\":\"\u{9b}\u{7f}\u{202e}\"}";
        assert_eq!(Records::Json.shown(json), r#"{"error":"\u009b\u007f\u202e"}"#);
    }

    #[test]
    fn the_styles_of_the_formatter_stay() {
        let record = "\u{1b}[33m WARN\u{1b}[0m a\n\u{1b}[1;31mb\u{1b}[2J\u{1b}]0;title\u{7}";
        assert_eq!(
            Records::Styled.shown(record),
            "\u{1b}[33m WARN\u{1b}[0m a\\n\u{1b}[1;31mb\\u{1b}[2J\\u{1b}]0;title\\u{7}"
        );
    }
}
