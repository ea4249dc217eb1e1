use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use pillarbox::Payload;
use pillarbox_testkit::sink_suite::Received;

use crate::example;

fn print_events(count: usize) -> Child {
    Command::new(example("print_events")).arg(count.to_string()).stdout(Stdio::piped()).spawn().unwrap()
}

#[test]
fn prints_one_whole_line_an_event_in_order() {
    let output = print_events(1234).wait_with_output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    let events: Vec<Received> = text.lines().map(|line| Received::from_cloud_event(line).unwrap()).collect();
    let positions: Vec<u64> = events.iter().map(|event| event.id.as_u64_pair().1).collect();
    assert_eq!(positions, (1..=1234).collect::<Vec<_>>());
    assert_eq!(events[0].payload, Payload::Json("{ \"n\": 1}".into()));
    assert_eq!(events[0].key.as_deref(), Some("order \"1\"\n"));
}

#[test]
fn a_reader_that_has_gone_is_a_broken_pipe() {
    let mut child = print_events(1_000_000);
    let mut first = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert!(Received::from_cloud_event(&first).is_ok(), "{first}");
    assert!(child.wait().unwrap().success(), "it ends quietly, and long before the last event");
}
