use crate::place::{On, Place, on_each, stderr, stdout};

/// Texts that a careless path would change.
const PAYLOADS: [&str; 6] = [
    r#"{"quote":"\"","backslash":"\\","slash":"\/"}"#,
    r#"{"newline":"a\nb","tab":"\t","nul":"\u0000"}"#,
    r#"{"emoji":"🦀 \ud83e\udd80","umlaut":"äöü"}"#,
    r#"{"huge":123456789012345678901234567890.000000000000000001,"small":1e-400}"#,
    r#"{ "spaces" :  1,"twice":1,"twice":2 }"#,
    r#""just text""#,
];

/// What a line of the file sink says the payload is, byte for byte.
fn data(line: &str) -> String {
    #[derive(serde::Deserialize)]
    struct Line<'a> {
        #[serde(borrow)]
        data: &'a serde_json::value::RawValue,
    }
    serde_json::from_str::<Line<'_>>(line).unwrap().data.get().to_owned()
}

fn what_arrives_equals_what_was_sent(on: On) {
    let place = Place::with_file_sink(on);
    for payload in PAYLOADS {
        place.publish(&["--", payload]);
        let output = place.pipe(&["publish", "--topic", "t", "--type", "y", "-"], format!("{payload}\n").as_bytes());
        assert!(output.status.success(), "{}", stderr(&output));
    }
    let lines: String = PAYLOADS.iter().map(|payload| format!("{payload}\n")).collect();
    let output = place.pipe(&["publish", "--topic", "t", "--type", "y", "--ndjson"], lines.as_bytes());
    assert_eq!(stdout(&output).lines().count(), PAYLOADS.len(), "{}", stderr(&output));
    place.ok(&["run", "--until-idle"]);
    let mut arrived: Vec<String> = place.read("out.ndjson").lines().map(data).collect();
    let mut sent: Vec<String> =
        PAYLOADS.iter().flat_map(|payload| [payload.to_string(), payload.to_string(), payload.to_string()]).collect();
    arrived.sort();
    sent.sort();
    assert_eq!(arrived, sent);
}

fn bytes_keep_their_content_type(on: On) {
    let place = Place::with_file_sink(on);
    let output =
        place.pipe(&["publish", "--topic", "t", "--type", "y", "--content-type", "image/x", "-"], &[0, 255, 10, 13]);
    assert!(output.status.success(), "{}", stderr(&output));
    place.publish(&["--content-type", "text/plain", "hello"]);
    place.publish(&[]);
    place.ok(&["run", "--until-idle"]);
    let lines = place.lines("out.ndjson");
    let find = |kind: &str| lines.iter().find(|line| line["datacontenttype"] == kind).unwrap();
    assert_eq!(find("image/x")["data_base64"], "AP8KDQ==");
    assert_eq!(find("text/plain")["data_base64"], "aGVsbG8=");
    assert!(
        lines
            .iter()
            .any(|line| line.get("data").is_none_or(|data| data.is_null()) && line.get("data_base64").is_none())
    );
}

fn all_attributes_arrive(on: On) {
    let place = Place::with_file_sink(on);
    let id = place.publish(&["--key", "customer 1", "--header", "correlationid=c-1", "--header", "a=b=c", "{}"]);
    place.ok(&["run", "--until-idle"]);
    let line = &place.lines("out.ndjson")[0];
    assert_eq!(line["id"], id.as_str());
    assert_eq!(line["specversion"], "1.0");
    assert_eq!(
        (&line["topic"], &line["type"], &line["subject"]),
        (&"orders".into(), &"order.placed".into(), &"customer 1".into())
    );
    assert_eq!((&line["correlationid"], &line["a"]), (&"c-1".into(), &"b=c".into()));
    assert!(line["source"].as_str().unwrap().starts_with("urn:pillarbox:"), "{line}");
    let shown = place.json(&["show", &id]);
    assert_eq!((&shown["key"], &shown["headers"]["a"]), (&"customer 1".into(), &"b=c".into()));
    assert_eq!(shown["subscriptions"][0]["why"]["cause"], "delivered");
}

fn what_is_not_json_is_refused_with_the_way_out(on: On) {
    let place = Place::new(on);
    let text = place.fails(2, &["publish", "--topic", "t", "--type", "y", "hello"]);
    assert!(text.contains("--content-type"), "{text}");
    let text = place.fails(2, &["publish", "--topic", "t", "--type", "y", ""]);
    assert!(text.contains("the payload is empty") && !text.contains("EOF"), "{text}");
    assert_eq!(place.json(&["list"]).as_array().unwrap().len(), 0);
}

fn a_payload_over_the_limit_is_refused_by_name(on: On) {
    let place = Place::new(on);
    let payload = format!("\"{}\"", "x".repeat(pillarbox::limit::PAYLOAD_BYTES_MAX));
    let output = place.pipe(&["publish", "--topic", "t", "--type", "y", "-"], payload.as_bytes());
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(text.contains("has 1048578 bytes") && text.contains("payload_bytes_max = 1048576"), "{text}");
    let lines = format!("1\n{payload}\n2\n");
    let output = place.pipe(&["publish", "--topic", "t", "--type", "y", "--ndjson"], lines.as_bytes());
    let text = stderr(&output);
    assert!(text.contains("line 2: the payload has 1048578 bytes") && text.contains("1 event was published"), "{text}");
    place.publish(&["{}"]);
    assert_eq!(place.json(&["list"]).as_array().unwrap().len(), 2);
}

/// A service may allow more: then the command line does too.
#[tokio::test]
async fn the_limit_of_a_payload_is_the_logs() {
    let place = Place::new(On::Sqlite);
    let store = pillarbox_sqlite::SqliteStore::open(place.path("app.db")).unwrap();
    let limit = |bytes| pillarbox_sqlite::Limits { payload_bytes_max: Some(bytes), ..Default::default() };
    let payload = format!("\"{}\"", "x".repeat(pillarbox::limit::PAYLOAD_BYTES_MAX));
    for args in
        [&["publish", "--topic", "t", "--type", "y", "-"][..], &["publish", "--topic", "t", "--type", "y", "--ndjson"]]
    {
        store.set_limits(limit(pillarbox::limit::PAYLOAD_BYTES_MAX + 2)).await.unwrap();
        let output = place.pipe(args, payload.as_bytes());
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        store.set_limits(limit(pillarbox::limit::PAYLOAD_BYTES_MAX + 1)).await.unwrap();
        let output = place.pipe(args, payload.as_bytes());
        assert!(stderr(&output).contains("payload_bytes_max = 1048577"), "{}", stderr(&output));
    }
}

fn a_bad_line_stops_with_its_number_and_the_count(on: On) {
    let place = Place::new(on);
    let good: String = (0..1_500).map(|number| format!("{number}\n")).collect();
    let output =
        place.pipe(&["publish", "--topic", "t", "--type", "y", "--ndjson"], format!("{good}oops\n7\n").as_bytes());
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(text.contains("line 1501") && text.contains("1500 events were published"), "{text}");
    assert_eq!(stdout(&output).lines().count(), 1_500);
    assert_eq!(place.json(&["status"])["log"]["events"], 1_500);
}

fn a_dedup_key_publishes_once(on: On) {
    let place = Place::new(on);
    let first = place.publish(&["--dedup-key", "d"]);
    assert_eq!(place.publish(&["--dedup-key", "d"]), first);
    assert_ne!(place.publish(&["--dedup-key", "d", "--key", "k"]), first);
    assert_eq!(place.json(&["list"]).as_array().unwrap().len(), 2);
}

fn a_negative_number_is_a_payload(on: On) {
    let place = Place::new(on);
    for payload in ["-0.0", "-5", "-1e3"] {
        let id = place.publish(&[payload]);
        assert!(place.ok(&["show", &id]).contains(&format!("payload     {payload}\n")), "{payload}");
    }
    place.fails(2, &["publish", "--topic", "t", "--type", "y", "--paylod"]);
}

/// What would be dropped or overwritten without a word.
fn what_cannot_be_meant_is_refused(on: On) {
    let place = Place::new(on);
    let publish = ["publish", "--topic", "t", "--type", "y"];
    let output = place.pipe(&publish, b"{\"total\":42}");
    assert_eq!(output.status.code(), Some(2));
    let text = crate::place::stderr(&output);
    assert!(text.contains("standard input is a pipe") && text.contains("</dev/null"), "{text}");
    assert!(place.pipe(&[&publish[..], &["-"]].concat(), b"{\"total\":42}").status.success());
    assert!(place.pipe(&[&publish[..], &["1"]].concat(), b"").status.success());
    let text = place.fails(2, &[&publish[..], &["--header", "a=1", "--header", "b=1", "--header", "a=2"]].concat());
    assert!(text.contains("'a' is given twice"), "{text}");
    let text = place.fails(2, &["publish", "--topic", "", "--type", "y"]);
    assert!(text.contains("the topic must not be empty"), "{text}");
    assert_eq!(place.json(&["status"])["log"]["events"], 2);
}

on_each!(
    a_negative_number_is_a_payload,
    what_cannot_be_meant_is_refused,
    what_arrives_equals_what_was_sent,
    bytes_keep_their_content_type,
    all_attributes_arrive,
    what_is_not_json_is_refused_with_the_way_out,
    a_payload_over_the_limit_is_refused_by_name,
    a_bad_line_stops_with_its_number_and_the_count,
    a_dedup_key_publishes_once,
);
