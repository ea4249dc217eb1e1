use std::fmt;
use std::io;
use std::process::ExitCode;

use pillarbox::{Error, ErrorKind};

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
}

impl Stop {
    /// Ends the command with `exit`, saying `message`.
    pub(crate) fn with(exit: Exit, message: impl Into<String>) -> anyhow::Error {
        Stop { exit, message: message.into() }.into()
    }

    /// The command was called wrongly.
    pub(crate) fn usage(message: impl Into<String>) -> anyhow::Error {
        Stop::with(Exit::Usage, message)
    }
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Stop {}

/// Nobody reads standard output any more (`| head`): not a failure, there is just nothing left to do.
#[derive(Debug)]
pub(crate) struct OutputClosed;

impl fmt::Display for OutputClosed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("standard output was closed")
    }
}

impl std::error::Error for OutputClosed {}

/// Turns the end of a command into its exit code, and says on standard error what went wrong.
pub(crate) fn finish(result: anyhow::Result<Exit>) -> ExitCode {
    let error = match result {
        Ok(exit) => return exit.into(),
        Err(error) => error,
    };
    let exit = exit_of(&error);
    if exit != Exit::Done {
        // A failing write to standard error leaves nobody to be told.
        let _ = io::Write::write_all(&mut io::stderr(), format!("error: {}\n", chain(&error)).as_bytes());
    }
    exit.into()
}

/// Ends a command line that cannot be read: wrong usage with 2, help and version with 0.
pub(crate) fn refuse(error: &clap::Error) -> ! {
    let said = error.to_string();
    // A URL at the wrong place is repeated by the message, and may contain a password.
    let arguments = std::env::args_os().skip(1).map(|argument| argument.to_string_lossy().into_owned());
    let shown = masked_arguments(&said, arguments);
    if shown == said {
        error.exit();
    }
    let _ = io::Write::write_all(&mut io::stderr(), shown.as_bytes());
    std::process::exit(error.exit_code())
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

/// The message and its causes, leaving out a cause that the message says already.
pub(crate) fn chain(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| match text.as_str() {
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
    fn a_cause_is_said_once() {
        let error = anyhow::anyhow!("disk is full").context("cannot write: disk is full").context("publish");
        assert_eq!(chain(&error), "publish: cannot write: disk is full");
    }
}
