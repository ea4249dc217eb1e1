//! scratch
use std::time::Instant;
fn main() {
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    let n = 100_000;
    let ids: Vec<String> = (0..n).map(|_| uuid::Uuid::now_v7().to_string()).collect();
    let schema = std::fs::read_to_string("crates/pillarbox-sqlite/migrations/001_init.sql").unwrap();
    let strip = |s: &str, names: &[&str]| { // remove named constraints
        let mut out = s.to_string();
        for n in names { let at = out.find(&format!("constraint {n} ")).unwrap(); let rest = &out[at..]; let mut depth = 0; let mut end = 0; for (i, ch) in rest.char_indices() { if ch == '(' { depth += 1 } if ch == ')' { depth -= 1; if depth == 0 { end = i + 1; break } } }
            let start = out[..at].rfind(',').unwrap(); out.replace_range(start..at + end, ""); }
        out };
    let all = ["id_has_36_characters", "topic_has_1_to_1024_bytes", "type_has_1_to_1024_bytes", "key_has_1_to_1024_bytes", "payload_is_json_text_or_a_blob", "headers_is_a_json_object", "deliver_at_is_integer_milliseconds_since_1970"];
    let notrig = "drop trigger pillarbox_event_payload_limit;";
    let variants: Vec<(&str, String)> = vec![
        ("full", schema.clone()), ("no trigger", schema.clone() + notrig), ("no trigger no checks", strip(&schema, &all) + notrig),
        ("no trigger, no payload check", strip(&schema, &all[4..5]) + notrig),
        ("no trigger, only payload check", strip(&schema, &[all[0], all[1], all[2], all[3], all[5], all[6]]) + notrig),
        ("trigger no checks", strip(&schema, &all)),
        ("no trigger, no name checks", strip(&schema, &all[0..4]) + notrig),
    ];
    for round in 0..3 { for (name, sql) in &variants {
        let mut c = rusqlite::Connection::open(folder.path().join(format!("{name}{round}.db"))).unwrap();
        c.execute_batch("pragma journal_mode=wal;").unwrap(); c.execute_batch(sql).unwrap();
        let t = Instant::now();
        let tx = c.transaction().unwrap();
        { let mut s = tx.prepare_cached("insert into pillarbox_event (id, topic, key, type, payload, content_type, headers, deliver_at, created_at) values (?1,?2,?3,?4,?5,?6,?7,?8,?9)").unwrap();
        for (i, id) in ids.iter().enumerate() {
            s.execute(rusqlite::params![id, "orders", format!("k{}", i % 1000), "order.placed", format!("{{\"order\":{i},\"total\":42,\"text\":\"hello world\"}}"), None::<String>, "{}", None::<i64>, 1_700_000_000_000i64]).unwrap();
        }}
        tx.commit().unwrap();
        println!("{round} {name}: {:?}", t.elapsed());
    }}
}
