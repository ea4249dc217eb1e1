use std::path::Path;
use std::process::{Command, Stdio};

/// A small application with sqlx and SeaORM on the same file, built as a user would build it.
#[test]
#[ignore = "builds some 150 crates; `cargo xtask test --full` runs it"]
fn an_application_with_sqlx_and_sea_orm_builds_and_publishes() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(root.join("tests/sqlite-user")).args(["run", "--quiet", "--locked", "--"]);
    command.arg(folder.path().join("app.db")).env("CARGO_TARGET_DIR", root.join("target/user-crates"));
    let output = command.stderr(Stdio::inherit()).output().unwrap();
    assert!(output.status.success(), "it failed");
    assert_eq!(String::from_utf8(output.stdout).unwrap().trim(), "2", "events that its relay has delivered");
}
