use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use tempfile::TempDir;

/// Far longer than anything here takes; only a failing test waits for it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A directory with a database in it, and the binary run there without the surrounding environment.
pub(crate) struct Place {
    directory: TempDir,
}

impl Place {
    /// Nothing but an empty directory.
    pub(crate) fn empty() -> Self {
        Place { directory: tempfile::tempdir().unwrap() }
    }

    /// A directory with a current schema.
    pub(crate) fn new() -> Self {
        let place = Place::empty();
        place.ok(&["migrate"]);
        place
    }

    /// A current schema and a config with one `file` subscription named `out`, writing `out.ndjson`.
    pub(crate) fn with_file_sink() -> Self {
        let place = Place::new();
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

    pub(crate) fn sql(&self) -> rusqlite::Connection {
        let connection = rusqlite::Connection::open(self.path("app.db")).unwrap();
        connection.busy_timeout(PATIENCE).unwrap();
        connection
    }

    /// Waits until the relay has written so many deliveries; then nothing but a due time touches them.
    pub(crate) fn until_deliveries(&self, count: i64) {
        let deadline = Instant::now() + PATIENCE;
        let connection = self.sql();
        let mut rows = connection.prepare("select count(*) from pillarbox_delivery").unwrap();
        while rows.query_row([], |row| row.get::<_, i64>(0)).unwrap() != count {
            assert!(Instant::now() < deadline, "there are not {count} deliveries");
            thread::yield_now();
        }
    }

    /// The binary, with the database named by the environment.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = self.bare(args);
        command.env("DATABASE_URL", "sqlite:app.db");
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

    /// Starts it in the background by a shell that first does as `script` says.
    pub(crate) fn start_after(&self, script: &str, args: &[&str]) -> Running {
        let binary = self.command(args);
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("{script}; exec \"$0\" \"$@\"")]).arg(binary.get_program()).args(binary.get_args());
        shell.env_clear().envs(binary.get_envs().filter_map(|(name, value)| Some((name, value?))));
        shell.current_dir(self.directory.path()).stdin(Stdio::null());
        Running::spawn(shell)
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

/// A process in the background; killed when the test is over.
pub(crate) struct Running {
    child: Child,
    errors: Receiver<String>,
    output: Receiver<String>,
}

impl Running {
    fn spawn(mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let errors = read_lines(child.stderr.take().unwrap());
        let output = read_lines(child.stdout.take().unwrap());
        Running { child, errors, output }
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
