use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use pillarbox_testkit::postgres::{Database, Server};
use serde_json::Value;
use tempfile::TempDir;

use crate::sql::Sql;

/// Far longer than anything here takes; only a failing test waits for it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Runs each of these functions as a test on every database; those behind the semicolon are async.
macro_rules! on_each {
    ($($test:ident),+ $(; $($later:ident),+)? $(,)?) => {
        mod sqlite {
            $(#[test] fn $test() { super::$test($crate::place::On::Sqlite); })+
            $($(#[tokio::test(flavor = "multi_thread")]
            async fn $later() { super::$later($crate::place::On::Sqlite).await; })+)?
        }
        mod postgres {
            $(#[test] fn $test() { super::$test($crate::place::On::Postgres); })+
            $($(#[tokio::test(flavor = "multi_thread")]
            async fn $later() { super::$later($crate::place::On::Postgres).await; })+)?
        }
    };
}
pub(crate) use on_each;

/// A database to run a test on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum On {
    Sqlite,
    Postgres,
}

/// A directory, a database in it or on a server, and the binary run there without the surrounding environment.
pub(crate) struct Place {
    directory: TempDir,
    /// Where the database is.
    url: String,
    /// Dropped with the place.
    database: Option<Database>,
}

impl Place {
    /// Nothing but an empty directory, and a database without a schema, or none.
    pub(crate) fn empty(on: On) -> Self {
        match on {
            On::Sqlite => Place::at("sqlite:app.db"),
            On::Postgres => Place::on(Server::shared()),
        }
    }

    /// The same, on a server of the test's own.
    pub(crate) fn on(server: &Server) -> Self {
        let database = server.create_database().unwrap();
        Place { database: Some(database), ..Place::at("") }
            .with_url(|place| place.database.as_ref().unwrap().url().to_owned())
    }

    /// An empty directory, and a database that is not this test's business.
    pub(crate) fn at(url: &str) -> Self {
        Place { directory: tempfile::tempdir().unwrap(), url: url.to_owned(), database: None }
    }

    /// Reaches the database in another way.
    pub(crate) fn with_url(mut self, url: impl FnOnce(&Place) -> String) -> Self {
        self.url = url(&self);
        self
    }

    /// Where the database is.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// A directory with a current schema.
    pub(crate) fn new(on: On) -> Self {
        Place::empty(on).migrated()
    }

    /// With a current schema, and the doorbell that a server which allows prepared transactions would not have.
    pub(crate) fn migrated(self) -> Self {
        self.ok(&["migrate", "--doorbell", "on"]);
        self
    }

    /// A current schema and a config with one `file` subscription named `out`, writing `out.ndjson`.
    pub(crate) fn with_file_sink(on: On) -> Self {
        Place::new(on).file_sink()
    }

    /// With a config with one `file` subscription named `out`, writing `out.ndjson`.
    pub(crate) fn file_sink(self) -> Self {
        let place = self;
        place.write(
            "pillarbox.toml",
            "[[subscription]]\nname = \"out\"\nsink = { kind = \"file\", path = \"out.ndjson\" }\n",
        );
        place
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    pub(crate) fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap()
    }

    /// The lines of a file as JSON.
    pub(crate) fn lines(&self, name: &str) -> Vec<Value> {
        self.read(name).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    pub(crate) fn sql(&self) -> Sql {
        match &self.database {
            None => Sql::sqlite(&self.path("app.db")),
            Some(database) => Sql::postgres(database.url()),
        }
    }

    /// For what is SQLite's alone.
    pub(crate) fn rusqlite(&self) -> rusqlite::Connection {
        let Sql::Sqlite(connection) = self.sql() else { panic!("not on SQLite") };
        connection
    }

    /// Waits until the relay has written so many deliveries; then nothing but a due time touches them.
    pub(crate) fn until_deliveries(&self, count: i64) {
        let deadline = Instant::now() + PATIENCE;
        let sql = self.sql();
        while sql.number("select count(*) from pillarbox_delivery") != count {
            assert!(Instant::now() < deadline, "there are not {count} deliveries");
            thread::yield_now();
        }
    }

    /// The binary, with the database named by the environment.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = self.bare(args);
        command.env("DATABASE_URL", &self.url);
        command
    }

    /// The binary, without anything that names a database.
    pub(crate) fn bare(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_pillarbox"));
        command.args(args).current_dir(self.directory.path()).env_clear().stdin(Stdio::null());
        if let Some(path) = std::env::var_os("PATH") {
            command.env("PATH", path);
        }
        command
    }

    /// Runs it; it must succeed. Its standard output.
    pub(crate) fn ok(&self, args: &[&str]) -> String {
        let output = self.command(args).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr(&output));
        stdout(&output)
    }

    /// Runs it with --json; it must succeed.
    pub(crate) fn json(&self, args: &[&str]) -> Value {
        let mut args = args.to_vec();
        args.push("--json");
        let text = self.ok(&args);
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{args:?}: {error}: {text}"))
    }

    /// Runs it; it must end with `code`. What it said on standard error.
    pub(crate) fn fails(&self, code: i32, args: &[&str]) -> String {
        let output = self.command(args).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {}{}", stdout(&output), stderr(&output));
        stderr(&output)
    }

    /// Runs it with this standard input.
    pub(crate) fn pipe(&self, args: &[&str], input: &[u8]) -> Output {
        let mut command = self.command(args);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let input = input.to_vec();
        let writer = thread::spawn(move || drop(stdin.write_all(&input)));
        let output = child.wait_with_output().unwrap();
        writer.join().unwrap();
        output
    }

    /// Publishes one event; its id.
    pub(crate) fn publish(&self, args: &[&str]) -> String {
        let mut all = vec!["publish", "--topic", "orders", "--type", "order.placed"];
        all.extend(args);
        self.ok(&all).trim().to_owned()
    }

    /// Starts it in the background.
    pub(crate) fn start(&self, args: &[&str]) -> Running {
        Running::spawn(self.command(args))
    }

    /// Starts it in the background; nobody reads its standard output before [`Running::read_output`], so that it blocks in the
    /// middle of whatever is longer than a pipe holds.
    pub(crate) fn start_unread(&self, args: &[&str]) -> Running {
        Running::spawn_unread(self.command(args))
    }

    /// Starts it in the background by a shell that first does as `script` says.
    pub(crate) fn start_after(&self, script: &str, args: &[&str]) -> Running {
        self.start_by(&["sh", "-c", &format!("{script}; exec \"$0\" \"$@\"")], args)
    }

    /// Starts it in the background by another command, which gets it as its last arguments.
    pub(crate) fn start_by(&self, starter: &[&str], args: &[&str]) -> Running {
        let binary = self.command(args);
        let mut command = Command::new(starter[0]);
        command.args(&starter[1..]).arg(binary.get_program()).args(binary.get_args());
        command.env_clear().envs(binary.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command.current_dir(self.directory.path()).stdin(Stdio::null());
        Running::spawn(command)
    }

    /// Asks again and again until `found` says that the answer is the one waited for.
    pub(crate) fn until(&self, args: &[&str], found: impl Fn(&Value) -> bool) -> Value {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let answer = self.json(args);
            if found(&answer) {
                return answer;
            }
            assert!(Instant::now() < deadline, "{args:?} still says {answer}");
        }
    }
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Whether every thread of a process has stopped; the signal returns before. Where there is no /proc nobody can tell.
pub(crate) fn is_frozen(process: u32) -> bool {
    let Ok(tasks) = fs::read_dir(format!("/proc/{process}/task")) else { return true };
    tasks.map(|task| task.unwrap().path().join("stat")).all(|stat| {
        // The state follows the name, which may hold anything but ends with the last parenthesis. A thread may have ended.
        let Ok(stat) = fs::read_to_string(stat) else { return true };
        stat.rsplit(')').next().unwrap().trim_start().starts_with(['T', 'Z', 'X'])
    })
}

/// A process in the background; killed when the test is over.
pub(crate) struct Running {
    child: Child,
    errors: Receiver<String>,
    output: Receiver<String>,
    /// Its standard output, as long as nobody reads it.
    unread: Option<ChildStdout>,
}

impl Running {
    fn spawn(command: Command) -> Self {
        let mut running = Running::spawn_unread(command);
        running.read_output();
        running
    }

    fn spawn_unread(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let errors = read_lines(child.stderr.take().unwrap());
        let unread = child.stdout.take();
        Running { child, errors, output: channel().1, unread }
    }

    /// From now on somebody reads its standard output.
    pub(crate) fn read_output(&mut self) {
        self.output = read_lines(self.unread.take().unwrap());
    }

    /// What is on its standard output by now and was not looked at yet.
    pub(crate) fn output_lines(&self) -> impl Iterator<Item = String> {
        self.output.try_iter()
    }

    /// What is on its standard error by now and was not looked at yet.
    pub(crate) fn log_lines(&self) -> impl Iterator<Item = String> {
        self.errors.try_iter()
    }

    /// The first line on standard error that contains `text`.
    pub(crate) fn wait_for(&self, text: &str) -> String {
        wait(&self.errors, text)
    }

    /// The first line on standard output that contains `text`.
    pub(crate) fn wait_for_output(&self, text: &str) -> String {
        wait(&self.output, text)
    }

    /// The process.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }

    /// Waits for its end; what it said on standard error and was not looked at yet.
    pub(crate) fn log_to_end(&mut self) -> Vec<String> {
        let deadline = Instant::now() + PATIENCE;
        let next = || self.errors.recv_timeout(deadline.saturating_duration_since(Instant::now())).ok();
        std::iter::from_fn(next).collect()
    }

    /// Waits for its end; the exit code.
    pub(crate) fn end(&mut self) -> Option<i32> {
        let deadline = Instant::now() + PATIENCE;
        // Both channels close when the process is gone, so this wakes at its end and not by the clock.
        while self.errors.recv_timeout(deadline.saturating_duration_since(Instant::now())).is_ok() {}
        self.child.wait().unwrap().code()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn wait(lines: &Receiver<String>, text: &str) -> String {
    let deadline = Instant::now() + PATIENCE;
    let mut seen = String::new();
    loop {
        match lines.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(line) if line.contains(text) => return line,
            Ok(line) => seen.push_str(&format!("{line}\n")),
            Err(error) => panic!("no line with '{text}' ({error}) in:\n{seen}"),
        }
    }
}

fn read_lines(stream: impl std::io::Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        for line in BufReader::new(stream).lines().map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}
