use std::io::Write;
use std::process::Stdio;

use anyhow::{Context, Result};

use super::Server;
use super::process::run;

/// What `pg_dump` made of a database.
#[derive(Debug, Clone)]
pub struct Dump(Vec<u8>);

impl Server {
    /// `pg_dump` of a database. Needs a server made by [`Builder::with_dump`](super::Builder::with_dump), or one whose
    /// programs are complete.
    pub fn dump(&self, database: &str) -> Result<Dump> {
        let mut command = self.folder.command(&self.binaries.client_program("pg_dump")?);
        command.args(["--format", "custom", "--dbname", &self.url(database)]);
        run(command).map(Dump)
    }

    /// `pg_restore` into a database, which should be empty.
    pub fn restore(&self, database: &str, dump: &Dump) -> Result<()> {
        let mut command = self.folder.command(&self.binaries.client_program("pg_restore")?);
        command.args(["--exit-on-error", "--dbname", &self.url(database)]);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().context("cannot start pg_restore")?;
        let mut input = child.stdin.take().expect("piped");
        let written = input.write_all(&dump.0);
        drop(input);
        let output = child.wait_with_output().context("cannot wait for pg_restore")?;
        anyhow::ensure!(output.status.success(), "pg_restore failed: {}", String::from_utf8_lossy(&output.stderr));
        written.context("pg_restore did not read all")
    }
}
