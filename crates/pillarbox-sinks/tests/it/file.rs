use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use pillarbox::Payload;
use pillarbox::sink::{BoxFuture, CLOUD_EVENT_START, Fault, Outcome, Sink};
use pillarbox_sinks::FileSink;
use pillarbox_testkit::sink_suite::{Received, SinkFixture, batch_of, check_sink, sink_event};
use tempfile::TempDir;

use crate::example;

const SOURCE: &str = "urn:pillarbox:test";

struct Fixture {
    directory: TempDir,
}

impl Fixture {
    fn new() -> Self {
        Fixture { directory: tempfile::tempdir().unwrap() }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("events.jsonl")
    }

    fn open(&self) -> FileSink {
        FileSink::new(self.path(), SOURCE)
    }

    /// Delivers events with these positions and no key.
    async fn deliver(&self, sink: &FileSink, positions: &[i64]) -> Vec<Outcome> {
        sink.deliver(batch_of(positions.iter().map(|position| sink_event(*position, None, Payload::None)))).await
    }

    /// The positions in the file; fails on a line that is not whole.
    fn positions(&self) -> Vec<i64> {
        let text = fs::read_to_string(self.path()).unwrap();
        assert!(text.is_empty() || text.ends_with('\n'), "a torn line: {text}");
        let event = |line: &str| Received::from_cloud_event(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        text.lines().map(event).map(|event| event.id.as_u64_pair().1 as i64).collect()
    }

    fn append(&self, bytes: &[u8]) {
        OpenOptions::new().append(true).create(true).open(self.path()).unwrap().write_all(bytes).unwrap();
    }
}

impl SinkFixture for Fixture {
    fn sink(&self) -> Arc<dyn Sink> {
        Arc::new(self.open())
    }

    fn received(&self) -> BoxFuture<'_, Vec<Received>> {
        let text = fs::read_to_string(self.path()).unwrap_or_default();
        Box::pin(async move { text.lines().map(|line| Received::from_cloud_event(line).unwrap()).collect() })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_file_sink_conforms() {
    check_sink(Fixture::new).await;
}

#[tokio::test]
async fn a_torn_line_is_cut_before_the_next_append() {
    let line = {
        let fixture = Fixture::new();
        fixture.deliver(&fixture.open(), &[7]).await;
        fs::read(fixture.path()).unwrap()
    };
    for cut in [1, 5, CLOUD_EVENT_START.len(), 60, line.len() - 2] {
        let fixture = Fixture::new();
        let sink = fixture.open();
        fixture.deliver(&sink, &[1, 2]).await;
        fixture.append(&line[..cut]);
        assert_eq!(fixture.deliver(&sink, &[3]).await, [Outcome::Delivered], "cut at {cut}");
        assert_eq!(fixture.positions(), [1, 2, 3], "cut at {cut}");
    }
}

#[tokio::test]
async fn a_whole_line_that_lacks_only_its_line_break_is_kept() {
    let deep = format!("{}{}", "[".repeat(500), "]".repeat(500));
    for payload in [Payload::None, Payload::Json("{\"a\":\"}\\n{\"}".into()), Payload::Json(deep.into())] {
        let fixture = Fixture::new();
        let sink = fixture.open();
        sink.deliver(batch_of([sink_event(1, None, payload)])).await;
        let length = fs::metadata(fixture.path()).unwrap().len();
        OpenOptions::new().write(true).open(fixture.path()).unwrap().set_len(length - 1).unwrap();
        assert_eq!(fixture.deliver(&sink, &[2]).await, [Outcome::Delivered]);
        let text = fs::read_to_string(fixture.path()).unwrap();
        assert_eq!(text.lines().filter(|line| line.starts_with(CLOUD_EVENT_START) && line.ends_with('}')).count(), 2);
        assert_eq!(text.lines().count(), 2, "{text}");
    }
}

#[tokio::test]
async fn a_torn_line_longer_than_a_block_is_cut() {
    let fixture = Fixture::new();
    fixture.append(format!("{CLOUD_EVENT_START}{}", "x".repeat(300_000)).as_bytes());
    fixture.deliver(&fixture.open(), &[1]).await;
    assert_eq!(fixture.positions(), [1]);
}

#[tokio::test]
async fn zeroes_left_by_a_power_failure_are_cut() {
    let fixture = Fixture::new();
    fixture.deliver(&fixture.open(), &[1]).await;
    fixture.append(&[0; 5000]);
    fixture.deliver(&fixture.open(), &[2]).await;
    assert_eq!(fixture.positions(), [1, 2]);
}

#[tokio::test]
async fn a_last_line_of_somebody_else_is_kept() {
    let fixture = Fixture::new();
    fixture.append(b"notes of mine, without a line break");
    fixture.deliver(&fixture.open(), &[1]).await;
    let text = fs::read_to_string(fixture.path()).unwrap();
    assert!(text.starts_with("notes of mine, without a line break\n{\"specversion\""), "{text}");
}

#[tokio::test]
async fn after_a_rotation_the_new_file_is_written() {
    let fixture = Fixture::new();
    let sink = fixture.open();
    fixture.deliver(&sink, &[1]).await;
    fs::rename(fixture.path(), fixture.directory.path().join("old")).unwrap();
    fixture.deliver(&sink, &[2]).await;
    assert_eq!(fixture.positions(), [2]);
    fs::remove_file(fixture.path()).unwrap();
    fixture.deliver(&sink, &[3]).await;
    assert_eq!(fixture.positions(), [3]);
    File::create(fixture.path()).unwrap();
    fixture.deliver(&sink, &[4]).await;
    assert_eq!(fixture.positions(), [4], "truncated by copytruncate");
}

#[tokio::test]
async fn a_missing_directory_is_the_sinks_fault_and_named() {
    let fixture = Fixture::new();
    let sink = FileSink::new(fixture.directory.path().join("no/events.jsonl"), SOURCE);
    let keyed = |position, key| sink_event(position, Some(key), Payload::None);
    let outcomes = sink.deliver(batch_of([keyed(1, "a"), keyed(2, "a"), keyed(3, "b")])).await;
    let [Outcome::Failed(failure), Outcome::NotTried, Outcome::Failed(_)] = &outcomes[..] else {
        panic!("the first of each key fails, the others are not tried: {outcomes:?}")
    };
    assert_eq!(failure.fault, Fault::Sink);
    assert!(failure.message.contains("create it"), "{}", failure.message);
    fs::create_dir(fixture.directory.path().join("no")).unwrap();
    assert_eq!(fixture.deliver(&sink, &[1]).await, [Outcome::Delivered], "it recovers");
}

#[tokio::test]
async fn what_is_no_regular_file_is_refused() {
    let fixture = Fixture::new();
    let sink = FileSink::new(fixture.directory.path(), SOURCE);
    let outcomes = fixture.deliver(&sink, &[1]).await;
    let [Outcome::Failed(failure)] = &outcomes[..] else { panic!("{outcomes:?}") };
    assert!(failure.message.contains("not a regular file"), "{}", failure.message);
}

/// A limit of the file's size stands for a full disk: a write is cut short, the next one fails.
#[cfg(unix)]
#[test]
fn a_write_that_fails_half_way_leaves_whole_lines_and_goes_on_once_there_is_room() {
    let fixture = Fixture::new();
    let append = |limit: &str| {
        let script = format!("trap '' XFSZ; ulimit -f {limit}; exec \"$0\" 1000 \"$1\"");
        let mut shell = Command::new("sh");
        shell.args(["-c", &script]).arg(example("print_events")).arg(fixture.path()).output().unwrap()
    };
    let full = append("100");
    assert!(!full.status.success(), "{full:?}");
    let talk = String::from_utf8(full.stderr).unwrap();
    assert!(talk.contains("cannot write to") && talk.contains("events.jsonl"), "{talk}");
    let written = fixture.positions().len();
    assert!((1..1000).contains(&written), "{written} whole lines");
    assert!(append("unlimited").status.success());
    assert_eq!(fixture.positions().len(), written + 1000);
}

#[tokio::test]
async fn without_fsync_batches_are_written_too() {
    let fixture = Fixture::new();
    let sink = FileSink::new(fixture.path(), SOURCE).fsync(false);
    fixture.deliver(&sink, &[1, 2]).await;
    assert_eq!(fixture.positions(), [1, 2]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_waits_for_the_lock_and_writes_nothing_once_it_is_cancelled() {
    let fixture = Fixture::new();
    let sink = Arc::new(fixture.open());
    fixture.deliver(&sink, &[1]).await;
    let other = OpenOptions::new().append(true).open(fixture.path()).unwrap();
    other.lock().unwrap();
    let given_up = tokio::spawn({
        let sink = sink.clone();
        async move { sink.deliver(batch_of([sink_event(2, None, Payload::None)])).await }
    });
    let waiting = tokio::spawn({
        let sink = sink.clone();
        async move { sink.deliver(batch_of([sink_event(3, None, Payload::None)])).await }
    });
    tokio::task::yield_now().await;
    given_up.abort();
    assert!(given_up.await.unwrap_err().is_cancelled());
    assert_eq!(fixture.positions(), [1], "nothing is written without the lock");
    other.unlock().unwrap();
    assert_eq!(waiting.await.unwrap(), [Outcome::Delivered]);
    assert_eq!(fixture.positions(), [1, 3]);
}

#[cfg(unix)]
#[tokio::test]
async fn a_new_file_is_for_its_owner_and_group() {
    use std::os::unix::fs::PermissionsExt;
    let fixture = Fixture::new();
    assert_eq!(fixture.deliver(&fixture.open(), &[1]).await, [Outcome::Delivered]);
    let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(fixture.path()) & 0o007, 0, "others can read payloads");
    fs::set_permissions(fixture.path(), fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(fixture.deliver(&fixture.open(), &[2]).await, [Outcome::Delivered]);
    assert_eq!(mode(fixture.path()), 0o644, "what somebody has decided stays");
}

/// Somebody else could let the relay write wherever the relay may.
#[cfg(unix)]
#[tokio::test]
async fn a_link_in_a_shared_folder_is_not_followed() {
    use std::os::unix::fs::{PermissionsExt, symlink};
    let (fixture, elsewhere) = (Fixture::new(), tempfile::tempdir().unwrap());
    let target = elsewhere.path().join("target");
    fs::write(&target, "").unwrap();
    symlink(&target, fixture.path()).unwrap();
    let sink = fixture.open();
    assert_eq!(
        fixture.deliver(&sink, &[1]).await,
        [Outcome::Delivered],
        "in a folder of one's own a link is one's own"
    );
    fs::set_permissions(fixture.directory.path(), fs::Permissions::from_mode(0o1777)).unwrap();
    let sink = fixture.open();
    let outcomes = fixture.deliver(&sink, &[2]).await;
    assert!(
        matches!(&outcomes[..], [Outcome::Failed(failure)] if failure.message.contains("is a link")),
        "{outcomes:?}"
    );
    assert!(sink.check().await.is_err());
    assert_eq!(fs::read_to_string(&target).unwrap().lines().count(), 1);
}
