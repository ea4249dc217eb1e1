use std::process::{Command, Output};

use rusqlite::Connection;

use crate::place::Place;

fn run(arguments: &[String]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_pillarbox-example-pipeline")).args(arguments).output().unwrap()
}

fn check(arguments: &[String]) {
    let output = run(arguments);
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(said.lines().last(), Some("120 of 120 mentions arrived once"), "{said}");
}

#[test]
fn it_runs_with_nothing_set_up() {
    check(&[]);
}

#[tokio::test(flavor = "multi_thread")]
async fn it_runs_again_in_the_same_database() {
    for place in [Place::sqlite().await, Place::postgres().await] {
        check(&[place.database()]);
        check(&[place.database()]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn it_fails_when_a_mention_arrives_twice() {
    let place = Place::sqlite().await;
    let twice = "create trigger twice after insert on pillarbox_event when new.type = 'mention.created' begin
        insert into pillarbox_event (topic, key, type, payload) values (new.topic, new.key, new.type, new.payload);
    end";
    Connection::open(place.database()).unwrap().execute_batch(twice).unwrap();
    let output = run(&[place.database()]);
    let said = String::from_utf8_lossy(&output.stdout);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(
        said.contains("0 of 120 mentions arrived once") && said.contains("was told 2 times of message 1 of"),
        "{said}"
    );
}
