use std::io::{self, BufRead, IsTerminal, Write};
use std::time::Duration;

use anyhow::Result;
use comfy_table::{Table, presets};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pillarbox::{visible, visible_json};
use serde::Serialize;

use crate::exit::{OutputClosed, Stop};

/// Standard output, which carries data alone, and the few things that are said to a person beside it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    /// Data as JSON, not as tables.
    pub(crate) json: bool,
    /// Nothing but errors on standard error.
    pub(crate) quiet: bool,
    /// Standard output is a terminal that wants colours.
    colors: bool,
    /// Standard error is a terminal.
    talks: bool,
    /// Standard output is a terminal.
    shows: bool,
}

/// Where terms are explained, as outputs and the help of commands say it.
pub(crate) const EXPLAIN: &str = "`pillarbox explain WORD` says what a term means";

/// A style of text on a terminal.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Style {
    /// Headings.
    Bold,
    /// All is well.
    Green,
    /// Look at it.
    Yellow,
    /// Act on it.
    Red,
    /// Beside the point.
    Dim,
}

impl Output {
    /// Looks at the terminal and at `NO_COLOR`.
    pub(crate) fn new(json: bool, quiet: bool) -> Self {
        let shows = io::stdout().is_terminal();
        Output { json, quiet, colors: shows && !no_color(), talks: io::stderr().is_terminal(), shows }
    }

    /// One line of data; what a terminal would act on is escaped.
    pub(crate) fn line(&self, text: impl AsRef<str>) -> Result<()> {
        self.write(format!("{}\n", visible(text.as_ref())).as_bytes())
    }

    /// One line that begins in a style.
    pub(crate) fn styled(&self, style: Style, beginning: &str, rest: &str) -> Result<()> {
        let beginning = self.paint(style, &visible(beginning));
        self.write(format!("{beginning}{}\n", visible(rest)).as_bytes())
    }

    /// One line of JSON, which may hold JSON of others.
    pub(crate) fn json_line(&self, json: &str) -> Result<()> {
        self.write(format!("{}\n", visible_json(json)).as_bytes())
    }

    /// Data as it is.
    pub(crate) fn write(&self, bytes: &[u8]) -> Result<()> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(bytes).and_then(|()| stdout.flush()).map_err(|error| match error.kind() {
            io::ErrorKind::BrokenPipe => OutputClosed.into(),
            _ => anyhow::Error::new(error).context("cannot write to standard output"),
        })
    }

    /// A value as JSON, indented for people on a terminal and on one line otherwise.
    pub(crate) fn json(&self, value: &impl Serialize) -> Result<()> {
        if !io::stdout().is_terminal() {
            return self.json_line(&serde_json::to_string(value)?);
        }
        let text = serde_json::to_string_pretty(value)?;
        text.lines().try_for_each(|line| self.json_line(line))
    }

    /// A table; nothing but its headings if there are no rows.
    pub(crate) fn table(&self, headings: &[&str], rows: Vec<Vec<String>>) -> Result<()> {
        let mut table = Table::new();
        table.load_style(presets::NOTHING).set_header(headings.to_vec());
        for row in rows {
            table.add_row(row.iter().map(|cell| visible(cell).into_owned()));
        }
        for column in table.column_iter_mut() {
            column.set_padding((0, 2));
        }
        let text = table.to_string();
        for (index, line) in text.lines().enumerate() {
            let line = line.trim_end();
            if index == 0 { self.styled(Style::Bold, line, "")? } else { self.line(line)? }
        }
        Ok(())
    }

    /// Text in a style, where colours are wanted.
    fn paint(&self, style: Style, text: &str) -> String {
        let code = match style {
            Style::Bold => "1",
            Style::Green => "32",
            Style::Yellow => "33",
            Style::Red => "31",
            Style::Dim => "2",
        };
        if self.colors { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
    }

    /// One line for people, on standard error.
    pub(crate) fn say(&self, text: impl AsRef<str>) {
        if !self.quiet {
            // A closed standard error is no reason to stop working.
            let _ = writeln!(io::stderr(), "{}", visible(text.as_ref()));
        }
    }

    /// Where the terms of what was just shown are explained: for a person who sees both, not for a script.
    pub(crate) fn say_where_terms_are(&self) {
        if self.shows && self.talks && !self.json {
            self.say(EXPLAIN);
        }
    }

    /// A progress bar on standard error, hidden where no person would see it.
    pub(crate) fn progress(&self, total: Option<u64>, what: &'static str) -> ProgressBar {
        if !self.talks || self.quiet {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::with_draw_target(total, ProgressDrawTarget::stderr());
        let template = match total {
            Some(_) => "{msg} [{bar:30}] {pos}/{len} {per_sec}",
            None => "{msg} {spinner} {pos} {per_sec}",
        };
        bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message(what);
        bar
    }

    /// A bar for work that takes a known time; its message says what was done so far.
    pub(crate) fn clock(&self, time: Duration) -> ProgressBar {
        let bar = self.progress(Some(u64::try_from(time.as_millis()).unwrap_or(u64::MAX)), "");
        bar.set_style(
            ProgressStyle::with_template("[{bar:40}] {msg}").unwrap_or_else(|_| ProgressStyle::default_bar()),
        );
        bar
    }

    /// Asks before something that concerns many events; `--yes` answers in advance.
    pub(crate) fn confirm(&self, yes: bool, question: &str) -> Result<bool> {
        if yes {
            return Ok(true);
        }
        if !io::stdin().is_terminal() {
            return Err(Stop::usage(format!(
                "refusing without confirmation: {question}; pass --yes to do it, or --dry-run to only look"
            )));
        }
        let _ = write!(io::stderr(), "This {}. Do it? [y/N] ", visible(question));
        let mut answer = String::new();
        io::stdin().lock().read_line(&mut answer)?;
        Ok(matches!(answer.trim(), "y" | "Y" | "yes"))
    }
}

/// Whether the user asked for text without colours (<https://no-color.org>).
pub(crate) fn no_color() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

/// A value, or a dash where there is none.
pub(crate) fn dash(value: Option<impl ToString>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// A span of time in the two largest units that matter to a person.
pub(crate) fn age(seconds: f64) -> String {
    let whole = seconds.max(0.0) as u64;
    match whole {
        0..=9 => format!("{:.1}s", seconds.max(0.0)),
        10..=119 => format!("{whole}s"),
        120..=7199 => units(whole / 60, 'm', whole % 60, 's'),
        7200..=172_799 => units(whole / 3600, 'h', whole % 3600 / 60, 'm'),
        _ => units(whole / 86_400, 'd', whole % 86_400 / 3600, 'h'),
    }
}

fn units(large: u64, of_large: char, small: u64, of_small: char) -> String {
    if small == 0 { format!("{large}{of_large}") } else { format!("{large}{of_large}{small}{of_small}") }
}

/// A number of bytes for people.
pub(crate) fn bytes(count: i64) -> String {
    const STEP: f64 = 1024.0;
    let mut value = count as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < STEP {
            return if unit == "B" { format!("{count} B") } else { format!("{value:.1} {unit}") };
        }
        value /= STEP;
    }
    format!("{value:.1} TiB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_for_people() {
        assert_eq!(age(0.25), "0.2s");
        assert_eq!(age(61.0), "61s");
        assert_eq!([120.0, 7200.0, 604_800.0].map(age), ["2m", "2h", "7d"]);
        assert_eq!(age(3_661.0), "61m1s");
        assert_eq!(age(200_000.0), "2d7h");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
    }
}
