use std::path::{Path, PathBuf};
use std::process::Command;

use pillarbox::sink::Outcome;
use pillarbox::{Event, Payload};
use pillarbox_testkit::redis::Server;
use pillarbox_testkit::sink_suite::sink_event;

use super::{deliver, event, own_name, stream};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Runs the example until there is nothing left to read; what it says.
fn consume(server: &Server, stream: &str) -> String {
    let python = root().join("target/venv/bin/python3");
    let mut command = Command::new(&python);
    command.arg(root().join("examples/python/redis_consumer.py")).args([&server.url(), stream, "--once"]);
    let output = command.output().unwrap_or_else(|error| panic!("{} cannot be run: {error}", python.display()));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "the example failed; `cargo xtask test` installs what it needs\n{said}");
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn the_example_for_python_takes_each_event_once() {
    let server = Server::shared();
    let name = own_name();
    let sink = stream(&server.url(), &name);
    let priced = |position: i64, total: i64| Event {
        payload: Payload::Json(format!("{{\"total\":{total}}}").into()),
        key: Some("ada".into()),
        ..event(position)
    };
    for event in [priced(1, 10), priced(2, 5), priced(1, 10)] {
        assert_eq!(deliver(&sink, [event]).await, [Outcome::Delivered]);
    }
    assert_eq!(server.cli(&["XLEN", &name]).unwrap(), "3", "one of them is a duplicate");
    let said = consume(server, &name);
    assert_eq!(said.matches("duplicate").count(), 1, "{said}");
    let totals = format!("{name}:totals");
    assert_eq!(server.cli(&["HGET", &totals, "ada"]).unwrap(), "15");
    assert!(server.cli(&["XPENDING", &name, "totals"]).unwrap().starts_with('0'), "all are acknowledged");

    // A duplicate that comes later, something new, a tombstone, and an entry that a consumer took and did not live to acknowledge.
    let tombstone = sink_event(4, Some("ada"), Payload::None);
    for event in [priced(2, 5), priced(3, 100), tombstone] {
        assert_eq!(deliver(&sink, [event]).await, [Outcome::Delivered]);
    }
    let take = ["XREADGROUP", "GROUP", "totals", "gone", "COUNT", "2", "STREAMS", &name, ">"];
    assert!(server.cli(&take).unwrap().contains("ce_id"));
    consume(server, &name);
    assert_eq!(server.cli(&["HGET", &totals, "ada"]).unwrap(), "115");
    assert!(server.cli(&["XPENDING", &name, "totals"]).unwrap().starts_with('0'), "all are acknowledged");
}
