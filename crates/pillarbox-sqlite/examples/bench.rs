//! scratch
use pillarbox::*;
use std::time::{Duration, Instant};
fn main() {
    let folder = tempfile::tempdir_in("/tmp").unwrap();
    let path = folder.path().join("a.db");
    pillarbox_sqlite::migrate(&path).unwrap();
    let mut c = rusqlite::Connection::open(&path).unwrap();
    c.execute_batch("create table bare (position integer primary key autoincrement, id text not null, topic text not null, key text, type text not null, payload any, content_type text, headers text not null, stream_version integer, deliver_at any, created_at integer not null) strict; create index bare_id on bare(id);").unwrap();
    let n = 100_000;
    let evs: Vec<NewEvent> = (0..n).map(|i| NewEvent::new("orders", "order.placed").key(format!("k{}", i % 1000)).json_text(format!("{{\"order\":{i},\"total\":42,\"text\":\"hello world\"}}"))).collect();
    let ids: Vec<String> = (0..n).map(|_| uuid::Uuid::now_v7().to_string()).collect();
    for round in 0..4 {
        let t = Instant::now();
        let tx = c.transaction().unwrap();
        { let mut s = tx.prepare_cached("insert into bare (id, topic, key, type, payload, content_type, headers, deliver_at, created_at) values (?1,?2,?3,?4,?5,?6,?7,?8,?9)").unwrap();
        for (e, id) in evs.iter().zip(&ids) {
            let p = match &e.payload { Payload::Json(p) => p, _ => unreachable!() };
            s.execute(rusqlite::params![id, e.topic, e.key, e.r#type, &**p, e.content_type, "{}", None::<i64>, 1_700_000_000_000i64]).unwrap();
        }}
        tx.commit().unwrap();
        let bare = t.elapsed();
        let t = Instant::now();
        let tx = c.transaction().unwrap();
        for e in &evs { pillarbox_sqlite::publish(&tx, e).unwrap(); }
        tx.commit().unwrap();
        let ours = t.elapsed();
        println!("publish round {round}: bare {bare:?} ours {ours:?} ratio {:.3}", bare.as_secs_f64() / ours.as_secs_f64());
    }
    let t = Instant::now(); for _ in 0..n { std::hint::black_box(uuid::Uuid::now_v7()); } println!("uuid v7 {:?} each", t.elapsed() / n);
    // more rows
    let rt = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let total: i64 = c.query_row("select count(*) from pillarbox_event", [], |r| r.get(0)).unwrap();
    let store = pillarbox_sqlite::SqliteStore::open(&path).unwrap();
    for _ in 0..3 {
        let t = Instant::now();
        let mut after = 0i64; let mut got = 0;
        loop {
            let mut s = c.prepare_cached("select position, topic, type, id, key, payload, content_type, headers, stream_version, deliver_at, created_at from pillarbox_event where position > ?1 order by position limit 1000").unwrap();
            let rows: Vec<(i64, String, String, String, Option<String>, Option<String>, Option<String>, String, Option<i64>, Option<i64>, i64)> = s.query_map([after], |r| Ok((r.get(0)?, r.get(1)?, r.get(2)?, r.get(3)?, r.get(4)?, r.get(5)?, r.get(6)?, r.get(7)?, r.get(8)?, r.get(9)?, r.get(10)?))).unwrap().collect::<Result<_, _>>().unwrap();
            if rows.is_empty() { break } got += rows.len(); after = rows.last().unwrap().0;
        }
        let plain = t.elapsed(); assert_eq!(got as i64, total);
        let t = Instant::now();
        let mut after = 0; let mut got = 0;
        rt.block_on(async { loop {
            let page = store.poll(&PollRequest { scans: vec![ScanRequest { after, to: i64::MAX, limit: 1000 }], wanted: vec![Filter::default()] }).await.unwrap();
            if page.scans[0].events.is_empty() { break } got += page.scans[0].events.len(); after = page.scans[0].covered_to;
        }});
        let ours = t.elapsed(); assert_eq!(got as i64, total);
        println!("scan {total}: plain {plain:?} ours {ours:?} ratio {:.3}", plain.as_secs_f64() / ours.as_secs_f64());
    }
    // idle cpu
    let cpu = || { let s = std::fs::read_to_string("/proc/self/stat").unwrap(); let f: Vec<&str> = s.rsplit(')').next().unwrap().split_whitespace().collect(); f[11].parse::<u64>().unwrap() + f[12].parse::<u64>().unwrap() };
    let before = cpu();
    let wall = Instant::now();
    rt.block_on(async {
        store.join(Hello { subscriptions: vec![Subscription::new("s")], ..Hello::default() }).await.unwrap();
        for _ in 0..10 { store.observe(&Report::default()).await.unwrap(); store.wait(Duration::from_secs(1)).await.unwrap(); }
    });
    println!("idle: {} ticks of 10 ms in {:?}", cpu() - before, wall.elapsed());
    // latency
    for sync in ["full", "normal"] {
        c.pragma_update(None, "synchronous", sync).unwrap();
        let mut bare: Vec<Duration> = Vec::new();
        for i in 0..500 { let t = Instant::now(); let tx = c.transaction().unwrap(); tx.execute("insert into bare (id, topic, type, headers, created_at) values (?1, 't','y','{}',1)", [i.to_string()]).unwrap(); tx.commit().unwrap(); bare.push(t.elapsed()); }
        let mut lat: Vec<Duration> = Vec::new(); let mut com: Vec<Duration> = Vec::new(); let mut wk: Vec<Duration> = Vec::new();
        let mut after = total + 100000; let _ = &mut after;
        let mut seen = rt.block_on(store.poll(&PollRequest { scans: vec![], wanted: vec![] })).unwrap().horizon;
        for _ in 0..500 {
            let (t, committed) = (|| {
                let (tx_c, rx_c) = tokio::sync::oneshot::channel();
                let p2 = &mut c;
                std::thread::scope(|sc| {
                    let h = sc.spawn(move || { std::thread::sleep(Duration::from_millis(3)); let t = Instant::now(); let tx = p2.transaction().unwrap(); pillarbox_sqlite::publish(&tx, &NewEvent::new("t", "y")).unwrap(); tx.commit().unwrap(); let e = Instant::now(); let _ = tx_c.send(()); (t, e) });
                    futures_block(&rt, async { store.wait(Duration::from_secs(5)).await.unwrap(); });
                    let woke = Instant::now();
                    let page = futures_block(&rt, async { store.poll(&PollRequest { scans: vec![ScanRequest { after: seen, to: i64::MAX, limit: 100 }], wanted: vec![Filter::default()] }).await.unwrap() });
                    assert_eq!(page.scans[0].events.len(), 1);
                    seen = page.horizon;
                    let end = Instant::now();
                    let (t, e) = h.join().unwrap();
                    com.push(e - t); lat.push(end - t); wk.push(woke.saturating_duration_since(e));
                    let _ = rx_c;
                    (t, e)
                })
            })();
            let _ = (t, committed);
        }
        bare.sort(); lat.sort(); com.sort(); wk.sort();
        println!("{sync}: bare commit p50 {:?} p99 {:?}; publish+commit p50 {:?}; begin-to-polled p50 {:?} p99 {:?}; wake after commit p50 {:?} p99 {:?}", bare[250], bare[495], com[250], lat[250], lat[495], wk[250], wk[495]);
    }
}
fn futures_block<T>(rt: &tokio::runtime::Runtime, f: impl std::future::Future<Output = T>) -> T {
    rt.block_on(f)
}
