use std::fmt;
use std::io;
use std::process::ExitCode;

use pillarbox::{Error, ErrorKind, visible, visible_json};
use serde_json::json;

use crate::secret::masked_arguments;

/// How a command ends; the numbers are part of the contract with scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exit {
    /// Done.
    Done = 0,
    /// It was tried and failed.
    Failed = 1,
    /// It was called wrongly; nothing was tried.
    Usage = 2,
    /// The schema is missing, old, too new, or belongs to another log.
    Schema = 3,
    /// Something that should move does not.
    Unhealthy = 4,
    /// The audit found something missing.
    Missing = 5,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        ExitCode::from(exit as u8)
    }
}

/// A failure that names its own exit code.
#[derive(Debug)]
pub(crate) struct Stop {
    exit: Exit,
    message: String,
    /// Each on a line of its own.
    details: Vec<String>,
    /// The name of the failure for programs, if it is not that of the exit code.
    code: Option<&'static str>,
    /// What to do about it, if that is not the last clause of the message.
    fix: Option<String>,
}

impl Stop {
    /// Ends the command with `exit`, saying `message`.
    pub(crate) fn with(exit: Exit, message: impl Into<String>) -> anyhow::Error {
        Stop::new(exit, message).into()
    }

    fn new(exit: Exit, message: impl Into<String>) -> Self {
        Stop { exit, message: message.into(), details: Vec::new(), code: None, fix: None }
    }

    /// The same, with what to do about it, which the message says too.
    pub(crate) fn with_fix(exit: Exit, message: impl Into<String>, fix: impl Into<String>) -> anyhow::Error {
        Stop { fix: Some(fix.into()), ..Stop::new(exit, message) }.into()
    }

    /// The command was called with an event that no log takes. Programs are told the same as where the log refuses it.
    pub(crate) fn invalid(message: impl Into<String>) -> anyhow::Error {
        Stop { code: Some("invalid"), ..Stop::new(Exit::Usage, message) }.into()
    }

    /// The same, with details that have a line each.
    pub(crate) fn with_details(exit: Exit, message: impl Into<String>, details: Vec<String>) -> anyhow::Error {
        Stop { details, ..Stop::new(exit, message) }.into()
    }

    /// The command was called wrongly.
    pub(crate) fn usage(message: impl Into<String>) -> anyhow::Error {
        Stop::with(Exit::Usage, message)
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&visible(&self.message))?;
        self.details.iter().try_for_each(|detail| write!(f, "\n  {}", visible(detail)))
    }
}

impl std::error::Error for Stop {}

/// The reader of standard output has ended (`| head`): no failure; there is nothing left to do.
#[derive(Debug)]
pub(crate) struct OutputClosed;

impl fmt::Display for OutputClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("standard output was closed")
    }
}

impl std::error::Error for OutputClosed {}

/// Turns the end of a command into its exit code, and says on standard error what went wrong.
pub(crate) fn finish(result: anyhow::Result<Exit>, json: bool) -> ExitCode {
    let error = match result {
        Ok(exit) => return exit.into(),
        Err(error) => error,
    };
    let exit = exit_of(&error);
    if exit != Exit::Done {
        let message = chain(&error);
        let known = error.downcast_ref::<Stop>().and_then(|stop| stop.fix.as_deref());
        say(code_of(&error), &message, known.or_else(|| fix_of(&message)), json);
    }
    exit.into()
}

/// What our messages say behind their last semicolon: what to do about it. Details have lines of their own.
fn fix_of(message: &str) -> Option<&str> {
    let (_, fix) = message.lines().next()?.rsplit_once("; ")?;
    Some(fix).filter(|fix| !fix.ends_with(':'))
}

/// Says what went wrong: as a line for people, or as an object for programs.
fn say(code: &str, message: &str, fix: Option<&str>, json: bool) {
    let text = if json {
        let error = json!({ "error": { "code": code, "message": message, "fix": fix } });
        visible_json(&error.to_string()).into_owned()
    } else {
        format!("error: {message}")
    };
    // A failing write to standard error leaves nobody to be told.
    let _ = io::Write::write_all(&mut io::stderr(), format!("{text}\n").as_bytes());
}

/// Ends a command line that cannot be read: wrong usage with 2, help and version with 0.
pub(crate) fn refuse(error: &clap::Error) -> ! {
    let said = error.to_string();
    // A URL at the wrong place is repeated by the message, and may contain a password.
    let arguments = || std::env::args_os().skip(1).map(|argument| argument.to_string_lossy().into_owned());
    let told = match negative_number(&said, &arguments().collect::<Vec<_>>()) {
        Some(told) if error.use_stderr() => told,
        _ => said.clone(),
    };
    let shown = on_one_line_if_hostile(masked_arguments(&told, arguments()), arguments());
    if error.use_stderr() && std::env::args_os().any(|argument| argument == "--json") {
        let message = shown.trim_end();
        let message = message.strip_prefix("error: ").unwrap_or(message);
        say("usage", message, fix_of(message), true);
        std::process::exit(error.exit_code())
    }
    if shown == said {
        error.exit();
    }
    let _ = io::Write::write_all(&mut io::stderr(), shown.as_bytes());
    std::process::exit(error.exit_code())
}

/// The options whose value is a number, a position or a span of time.
const NUMBERS: [&str; 10] = [
    "--delay",
    "--from",
    "--instance",
    "--keep",
    "--lanes",
    "--limit",
    "--seconds",
    "--silent-for",
    "--to",
    "--version",
];

/// What to say where a negative number was given as the value of an option, which the parser takes for an option that it does not know.
fn negative_number(said: &str, arguments: &[String]) -> Option<String> {
    let is_negative = |value: &str| {
        let is_number =
            value.strip_prefix('-').is_some_and(|rest| rest.starts_with(|first: char| first.is_ascii_digit()));
        // The parser repeats no more than the first two characters.
        is_number && said.contains(&format!("'{}", &value[..2]))
    };
    let pairs = arguments.windows(2).map(|pair| (pair[0].as_str(), pair[1].as_str()));
    let joined = arguments.iter().filter_map(|argument| argument.split_once('='));
    let (option, value) = pairs.chain(joined).find(|(option, value)| NUMBERS.contains(option) && is_negative(value))?;
    Some(format!("error: {option} cannot be negative, and is '{value}'; write a value without a minus sign\n"))
}

/// A message that repeats an argument which a terminal would act on is shown as one line without any of that: which of its line breaks are
/// the message's own cannot be told.
fn on_one_line_if_hostile(said: String, mut arguments: impl Iterator<Item = String>) -> String {
    if arguments.any(|argument| visible(&argument) != argument) {
        format!("{}\n", visible(said.trim_end()))
    } else {
        said
    }
}

/// The exit code of a failure.
fn exit_of(error: &anyhow::Error) -> Exit {
    if error.is::<OutputClosed>() {
        return Exit::Done;
    }
    if let Some(stop) = error.downcast_ref::<Stop>() {
        return stop.exit;
    }
    match error.downcast_ref::<Error>().map(Error::kind) {
        Some(ErrorKind::Schema | ErrorKind::Foreign) => Exit::Schema,
        _ => Exit::Failed,
    }
}

/// The stable name of a failure, for programs.
fn code_of(error: &anyhow::Error) -> &'static str {
    if let Some(stop) = error.downcast_ref::<Stop>() {
        return stop.code.unwrap_or(match stop.exit {
            Exit::Done | Exit::Failed => "failed",
            Exit::Usage => "usage",
            Exit::Schema => "schema",
            Exit::Unhealthy => "unhealthy",
            Exit::Missing => "missing",
        });
    }
    match error.downcast_ref::<Error>().map(Error::kind) {
        Some(ErrorKind::Busy) => "busy",
        Some(ErrorKind::Unavailable | ErrorKind::Ended) => "unavailable",
        Some(ErrorKind::Full) => "full",
        Some(ErrorKind::Invalid) => "invalid",
        Some(ErrorKind::Conflict) => "conflict",
        Some(ErrorKind::NotFound) => "not_found",
        Some(ErrorKind::Schema) => "schema",
        Some(ErrorKind::Foreign) => "foreign",
        _ => "failed",
    }
}

/// The message and its causes, leaving out a cause that the message says already. What servers say is on one line and acts on no
/// terminal; only a [`Stop`] has lines of its own.
pub(crate) fn chain(error: &anyhow::Error) -> String {
    let text = |cause: &(dyn std::error::Error + 'static)| match cause.downcast_ref::<Stop>() {
        Some(stop) => stop.to_string(),
        None => visible(&cause.to_string()).into_owned(),
    };
    error.chain().map(text).fold(String::new(), |text, cause| match text.as_str() {
        "" => cause,
        said if said.contains(&cause) => text,
        _ => format!("{text}: {cause}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_class_has_its_code() {
        let kinds = |kind| exit_of(&Error::new(kind, "x").into());
        assert_eq!(kinds(ErrorKind::Schema), Exit::Schema);
        assert_eq!(kinds(ErrorKind::Foreign), Exit::Schema);
        assert_eq!(kinds(ErrorKind::NotFound), Exit::Failed);
        assert_eq!(exit_of(&OutputClosed.into()), Exit::Done);
        assert_eq!(exit_of(&Stop::usage("x").context("more")), Exit::Usage);
    }

    #[test]
    fn a_fix_is_what_the_message_says_last() {
        assert_eq!(fix_of("it is old; it has holes; run `pillarbox migrate`"), Some("run `pillarbox migrate`"));
        assert_eq!(fix_of("change the config:\n  line 3: unknown key; did you mean `key`?"), None);
        assert_eq!(fix_of("no database was given; name it; this may be why:\n  line 1"), None);
        assert_eq!(fix_of("it failed"), None);
    }

    #[test]
    fn a_negative_number_is_told_by_its_option() {
        let told = |said: &str, arguments: &[&str]| {
            negative_number(said, &arguments.iter().map(|argument| (*argument).to_owned()).collect::<Vec<_>>())
        };
        let unknown = "error: unexpected argument '-5' found";
        let delay = "error: --delay cannot be negative, and is '-5s'; write a value without a minus sign\n";
        assert_eq!(told(unknown, &["publish", "--delay", "-5s"]).as_deref(), Some(delay));
        assert_eq!(told("error: '-5s' is not a duration", &["publish", "--delay=-5s"]).as_deref(), Some(delay));
        assert_eq!(told(unknown, &["publish", "--key", "-5s"]), None, "it is a text");
        assert_eq!(told("error: unexpected argument '-x' found", &["tail", "--from", "-5", "-x"]), None);
        assert_eq!(told("error: unexpected argument '-x' found", &["tail", "--from", "-é"]), None);
    }

    #[test]
    fn a_cause_is_said_once() {
        let error = anyhow::anyhow!("disk is full").context("cannot write: disk is full").context("publish");
        assert_eq!(chain(&error), "publish: cannot write: disk is full");
    }
}
