use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

/// The root of the repository that cargo was called in.
///
/// Asked at run time: a target folder that was copied to another checkout holds a program that was compiled for the first.
pub(crate) fn root() -> PathBuf {
    let manifest = std::env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
    let xtask = manifest.unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    xtask.parent().expect("xtask lies in the repository").to_owned()
}

/// A command that runs at the root of the repository.
pub(crate) fn command(program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).current_dir(root());
    command
}

/// A cargo command, with the cargo that runs this program.
pub(crate) fn cargo(arguments: &[&str]) -> Command {
    command(&std::env::var("CARGO").unwrap_or_else(|_| "cargo".into()), arguments)
}

/// Runs a command to its end; its output goes where ours goes.
pub(crate) fn run(mut command: Command) -> Result<()> {
    let text = text(&command);
    let status = command.status().with_context(|| format!("`{text}` could not be started"))?;
    if !status.success() {
        bail!("`{text}` failed ({status})");
    }
    Ok(())
}

/// Runs a command to its end and returns what it printed on standard output.
pub(crate) fn output(mut command: Command) -> Result<String> {
    let text = text(&command);
    let output = command.output().with_context(|| format!("`{text}` could not be started"))?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        bail!("`{text}` failed ({}):\n{printed}{}", output.status, String::from_utf8_lossy(&output.stderr));
    }
    Ok(printed)
}

/// A command that runs an example of the testkit.
pub(crate) fn example(name: &str, options: &[&str], arguments: &[&str]) -> Command {
    example_of("pillarbox-testkit", name, options, arguments)
}

/// A command that runs an example of a package.
pub(crate) fn example_of(package: &str, name: &str, options: &[&str], arguments: &[&str]) -> Command {
    let before = ["run", "--quiet", "--package", package, "--example", name];
    cargo(&[&before, options, &["--"], arguments].concat())
}

/// A command as it would be typed.
fn text(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let program = Path::new(command.get_program()).file_name();
    words
        .enumerate()
        .map(|(index, word)| if index == 0 { program.unwrap_or(word) } else { word })
        .map(|word| word.to_string_lossy().into_owned())
        .collect::<Vec<_>>()
        .join(" ")
}
