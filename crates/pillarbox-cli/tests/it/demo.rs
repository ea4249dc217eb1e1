use crate::place::{On, Place, on_each, stderr, stdout};

fn the_demo_loses_nothing(on: On) {
    let place = Place::empty(on);
    let mut command = place.bare(&["demo", "--seconds", "2"]);
    if on == On::Postgres {
        command.args(["--database", place.url()]);
    }
    let output = command.output().unwrap();
    let text = stdout(&output);
    assert_eq!(output.status.code(), Some(0), "{text}{}", stderr(&output));
    let last = text.lines().last().unwrap();
    let numbers: Vec<u64> = last.split(|c: char| !c.is_ascii_digit()).filter_map(|part| part.parse().ok()).collect();
    let [published, delivered, duplicates, lost] = numbers[..] else { panic!("{last}") };
    assert_eq!(last, format!("published {published}, delivered {delivered}, duplicates {duplicates}, lost {lost}"));
    assert!(published > 100 && delivered == published && lost == 0, "{last}");
    let before = text.lines().rev().nth(1).unwrap();
    assert!(before.starts_with("mail: ") && before.contains("as intended: it refuses customer-13"), "{before}");
    assert!(text.contains("kill -9") && text.contains("pillarbox why"), "{text}");
    assert!(!text.contains('\x1b'));
    assert_eq!(std::fs::read_dir(place.path("")).unwrap().count(), 0, "the demo left files where it was started");
}

on_each!(the_demo_loses_nothing);

/// All schemas that are not the server's own.
const SCHEMAS: &str =
    "select nspname from pg_namespace where nspname !~ '^pg_' and nspname <> 'information_schema' order by 1";

#[test]
fn on_postgres_it_leaves_everything_as_it_was() {
    let place = Place::new(On::Postgres);
    let id = place.publish(&[]);
    let schemas = || place.sql().raw(SCHEMAS).unwrap();
    let before = schemas();
    let demo = ["demo", "--seconds", "1", "--database", place.url()];
    place.ok(&demo);
    assert_eq!(schemas(), before);
    assert_eq!(place.json(&["list"])[0]["id"], id.as_str());
    assert_eq!(place.json(&["subscription", "list"]).as_array().unwrap().len(), 0);

    // One that is ended on the way, too.
    let mut running = place.start(&["demo", "--seconds", "60", "--database", place.url()]);
    running.wait_for_output("publishers write orders");
    place.sql().raw("select count(*) from pillarbox_demo.cursor").unwrap();
    let text = place.fails(2, &demo);
    assert!(text.contains("drop schema pillarbox_demo cascade"), "{text}");
    place.sql().raw("select count(*) from pillarbox_demo.cursor").expect("another demo touches nothing");
    running.signal("-INT");
    assert_eq!(running.end(), Some(1));
    assert_eq!(schemas(), before);
}
