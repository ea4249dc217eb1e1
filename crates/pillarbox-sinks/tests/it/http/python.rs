use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::*;
use pillarbox::sink::Fault;
use tempfile::TempDir;

const SECRET: &str = "whsec_AQIDBAUGBwgJCgsMDQ4PEBESExQVFhcYGRobHB0eHyA=";
const OTHER_SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// The example receiver, running.
struct Example {
    process: Child,
    url: String,
    directory: TempDir,
}

impl Example {
    fn start(secrets: &str) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/python/webhook_receiver.py");
        let mut process = Command::new("python3")
            .arg(script)
            .arg(directory.path().join("receiver.db"))
            .env("WEBHOOK_SECRET", secrets)
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 can be started (`apt-get install -y python3`)");
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let url =
            line.trim().strip_prefix("listening on ").unwrap_or_else(|| panic!("it did not start: {line}")).to_owned();
        Example { process, url, directory }
    }

    fn sink(&self, secret: &str, mode: HttpMode) -> HttpSink {
        let config = HttpConfig::new(self.url.parse().unwrap());
        sink(HttpConfig { secrets: vec![secret.into()], mode, ..config })
    }

    /// How many events had an effect.
    fn effects(&self) -> String {
        let query = "import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute(\
                     'select coalesce(sum(count), 0) from event_count').fetchone()[0])";
        let database = self.directory.path().join("receiver.db");
        let output = Command::new("python3").args(["-c", query]).arg(database).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().trim().to_owned()
    }
}

impl Drop for Example {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn events() -> Vec<Event> {
    (1..=20).map(|position| event(position, &(position % 4).to_string())).collect()
}

#[tokio::test]
async fn the_example_gives_each_event_its_effect_once() {
    for mode in [HttpMode::Structured, HttpMode::Batched] {
        let example = Example::start(SECRET);
        let sink = example.sink(SECRET, mode);
        assert_eq!(sink.check().await, Ok(()), "it does not know OPTIONS, and is well");
        for _ in 0..2 {
            assert_eq!(deliver(&sink, events()).await, vec![Outcome::Delivered; 20], "{mode:?}");
            assert_eq!(example.effects(), "20", "{mode:?}");
        }
    }
}

#[tokio::test]
async fn the_example_refuses_a_wrong_signature() {
    let example = Example::start(SECRET);
    let failure = fail(&example.sink(OTHER_SECRET, HttpMode::Structured)).await;
    assert_eq!((failure.fault, failure.kind), (Fault::Sink, "unauthorized"));
    assert!(failure.message.contains("401"), "{failure:?}");
    let unsigned = sink(HttpConfig::new(example.url.parse().unwrap()));
    assert!(fail(&unsigned).await.message.contains("401"));
    assert_eq!(example.effects(), "0");
}

#[tokio::test]
async fn the_example_takes_both_secrets_during_a_rotation() {
    let example = Example::start(&format!("{OTHER_SECRET} {SECRET}"));
    for secret in [SECRET, OTHER_SECRET] {
        assert_eq!(deliver(&example.sink(secret, HttpMode::Structured), events()).await, vec![Outcome::Delivered; 20]);
    }
    assert_eq!(example.effects(), "20");
}
