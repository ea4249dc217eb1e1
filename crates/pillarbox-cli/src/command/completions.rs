use anyhow::Result;
use clap::CommandFactory;
use clap_complete::Shell;

use super::Scope;
use crate::args::Args;
use crate::exit::Exit;

/// Prints the completion script of a shell.
pub(super) fn run(scope: &Scope, shell: Shell) -> Result<Exit> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Args::command(), "pillarbox", &mut script);
    scope.output.write(&script)?;
    Ok(Exit::Done)
}
