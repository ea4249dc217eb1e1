use serde_json::Value;

use crate::place::{On, Place, on_each};

fn cause(place: &Place, id: &str) -> Value {
    place.json(&["why", id, "--subscription", "out"])["subscriptions"][0].clone()
}

fn check(place: &Place, id: &str, expected: &str) {
    let answer = cause(place, id);
    assert_eq!(answer["cause"], expected, "{answer}");
    assert!(!answer["message"].as_str().unwrap().is_empty());
}

fn delivered_not_matched_and_no_owner(on: On) {
    let place = Place::new(on);
    place.write(
        "pillarbox.toml",
        "[[subscription]]\nname = \"out\"\ntopics = [\"orders\"]\nsink = { kind = \"file\", path = \"out.ndjson\" }\n",
    );
    let delivered = place.publish(&[]);
    let other = place.ok(&["publish", "--topic", "other", "--type", "y"]).trim().to_owned();
    place.ok(&["run", "--until-idle"]);
    check(&place, &delivered, "delivered");
    check(&place, &other, "not_matched");
    let waiting = place.publish(&[]);
    check(&place, &waiting, "no_owner");
    let text = place.ok(&["why", &delivered]);
    assert!(text.contains("out: delivered: it was delivered by 20") && !text.contains("lane"), "{text}");
    for text in [place.ok(&["why", &delivered, "-v"]), place.ok(&["show", &delivered])] {
        assert!(text.contains("settled by lane ") && text.contains(" in epoch "), "{text}");
    }
    assert!(cause(&place, &delivered)["detail"].as_str().unwrap().starts_with("settled by lane "));
    let text = place.fails(1, &["why", &delivered, "--subscription", "nobody"]);
    assert!(text.contains("no subscription is named 'nobody'; use one of: out"), "{text}");
}

fn where_there_is_no_subscription_none_is_listed(on: On) {
    let place = Place::new(on);
    let id = place.publish(&[]);
    for args in [&["why", &id, "--subscription", "x"][..], &["audit", "--subscription", "x"]] {
        let text = place.fails(1, args);
        assert!(text.contains("no subscription is named 'x', and none exists yet"), "{args:?}: {text}");
    }
    place.write("received", "");
    let text = place.fails(2, &["audit", "--received", "received"]);
    assert!(text.contains("no subscription exists yet") && !text.contains("there are"), "{text}");
}

fn before_start(on: On) {
    let place = Place::new(on);
    place.write(
        "pillarbox.toml",
        "[[subscription]]\nname = \"out\"\nstart = \"now\"\nsink = { kind = \"file\", path = \"out.ndjson\" }\n",
    );
    let id = place.publish(&[]);
    place.ok(&["run", "--until-idle"]);
    check(&place, &id, "before_start");
    assert!(!place.path("out.ndjson").exists());
}

fn paused(on: On) {
    let place = Place::with_file_sink(on);
    place.ok(&["run", "--until-idle"]);
    place.ok(&["pause", "out"]);
    check(&place, &place.publish(&[]), "paused");
}

fn delayed_retry_at_behind_key_head_dead_and_skipped(on: On) {
    let place = Place::with_file_sink(on);
    let ids: Vec<String> = (0..2).map(|_| place.publish(&["--key", "k", "--delay", "1h"])).collect();
    let relay = place.start(&["run", "--listen", "off"]);
    relay.wait_for("relay started");
    place.until_deliveries(2);
    check(&place, &ids[0], "delayed");
    let far = 4_102_444_800_000i64;
    let sql = place.sql();
    let far = sql.time(far);
    sql.execute(&format!("update pillarbox_delivery set state = 'retrying', attempts = 1, due_at = {far}"));
    check(&place, &ids[0], "retry_at");
    check(&place, &ids[1], "behind_key_head");
    assert!(cause(&place, &ids[1])["message"].as_str().unwrap().contains(&ids[0]), "the head is named");
    sql.execute("update pillarbox_delivery set state = 'dead'");
    check(&place, &ids[0], "dead");
    place.ok(&["skip", "--subscription", "out", "--event", &ids[0], "--reason", "not needed"]);
    check(&place, &ids[0], "skipped");
    assert!(cause(&place, &ids[0])["message"].as_str().unwrap().contains("not needed"));
}

fn sink_down(on: On) {
    let place = Place::new(on);
    place.write(
        "pillarbox.toml",
        "[[subscription]]\nname = \"out\"\nsink = { kind = \"file\", path = \"no/such/directory/out.ndjson\" }\n",
    );
    let id = place.publish(&[]);
    let relay = place.start(&["run", "--listen", "off"]);
    relay.wait_for("relay started");
    let answer = place.until(&["why", &id], |answer| answer["subscriptions"][0]["cause"] == "sink_down");
    assert!(answer["subscriptions"][0]["message"].as_str().unwrap().contains("no/such/directory"), "{answer}");
}

on_each!(
    delivered_not_matched_and_no_owner,
    where_there_is_no_subscription_none_is_listed,
    before_start,
    paused,
    delayed_retry_at_behind_key_head_dead_and_skipped,
    sink_down,
);
