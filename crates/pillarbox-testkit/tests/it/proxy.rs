use std::time::Duration;

use pillarbox_testkit::postgres::{Server, connect};
use pillarbox_testkit::proxy::Proxy;

/// How long it is waited for what must not come.
const SILENCE: Duration = Duration::from_millis(200);

/// How long it is waited for what must come.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

fn proxy() -> (Proxy, String) {
    let proxy = Proxy::start(Server::shared().port()).unwrap();
    let url = proxy.url(&Server::shared().url("postgres"));
    (proxy, url)
}

#[tokio::test]
async fn a_cut_ends_all_connections_and_refuses_new_ones_until_resumed() {
    let (proxy, url) = proxy();
    let client = connect(&url).await.unwrap();
    client.simple_query("select 1").await.unwrap();
    proxy.cut().unwrap();
    client.simple_query("select 1").await.unwrap_err();
    assert!(client.is_closed());
    let refused = connect(&url).await.unwrap_err();
    // Somebody else may have got the port meanwhile.
    assert!(["refused", "reset"].iter().any(|word| format!("{refused:#}").contains(word)), "{refused:#}");
    proxy.resume().unwrap();
    connect(&url).await.unwrap().simple_query("select 1").await.unwrap();
}

#[tokio::test]
async fn a_stall_holds_every_byte_and_loses_none() {
    let (proxy, url) = proxy();
    let client = connect(&url).await.unwrap();
    proxy.stall().unwrap();
    let held = client.query_one("select 42", &[]);
    let accepted = connect(&url);
    tokio::pin!(held, accepted);
    assert!(tokio::time::timeout(SILENCE, &mut held).await.is_err(), "a byte came through");
    assert!(tokio::time::timeout(SILENCE, &mut accepted).await.is_err(), "the new connection got an answer");
    proxy.resume().unwrap();
    let row = tokio::time::timeout(ANSWER_TIMEOUT, held).await.unwrap().unwrap();
    assert_eq!(row.get::<_, i32>(0), 42);
    tokio::time::timeout(ANSWER_TIMEOUT, accepted).await.unwrap().unwrap();
}

#[tokio::test]
async fn a_mute_proxy_holds_the_answers_alone() {
    let (proxy, _) = proxy();
    let database = Server::shared().create_database().unwrap();
    let client = connect(&proxy.url(database.url())).await.unwrap();
    proxy.mute().unwrap();
    let held = client.simple_query("create table made ()");
    tokio::pin!(held);
    assert!(tokio::time::timeout(SILENCE, &mut held).await.is_err(), "an answer came through");
    while database.psql("select to_regclass('made')").unwrap() != "made" {}
    proxy.resume().unwrap();
    tokio::time::timeout(ANSWER_TIMEOUT, held).await.unwrap().unwrap();
}

#[tokio::test]
async fn an_answer_is_lost_although_the_server_has_done_the_work() {
    let (proxy, _) = proxy();
    let database = Server::shared().create_database().unwrap();
    let url = proxy.url(database.url());
    let client = connect(&url).await.unwrap();
    proxy.cut_after_bytes_from_server(0);
    client.simple_query("create table made ()").await.unwrap_err();
    tokio::time::timeout(ANSWER_TIMEOUT, proxy.until_cut()).await.unwrap();
    assert_eq!(database.psql("select to_regclass('made')").unwrap(), "made");
    connect(&url).await.unwrap_err();
    proxy.resume().unwrap();
    connect(&url).await.unwrap();
}

#[tokio::test]
async fn exactly_so_many_bytes_come_through() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let proxy = Proxy::start(listener.local_addr().unwrap().port()).unwrap();
    proxy.cut_after_bytes_from_server(5);
    let mut client = std::net::TcpStream::connect(("127.0.0.1", proxy.port())).unwrap();
    let (mut server, _) = listener.accept().unwrap();
    std::io::Write::write_all(&mut server, b"1234").unwrap();
    let mut got = [0; 4];
    std::io::Read::read_exact(&mut client, &mut got).unwrap();
    std::io::Write::write_all(&mut server, b"5678").unwrap();
    let mut rest = Vec::new();
    // The end may be a reset.
    let _ = std::io::Read::read_to_end(&mut client, &mut rest);
    assert_eq!((got, rest), (*b"1234", b"5".to_vec()));
}

#[test]
fn a_url_keeps_everything_but_its_port() {
    let proxy = Proxy::start(1).unwrap();
    let port = proxy.port();
    let check = |url: &str, wanted: String| assert_eq!(proxy.url(url), wanted);
    check("postgres://localhost/app", format!("postgres://localhost:{port}/app"));
    check(
        "postgres://a:b@c@localhost:5432/app?sslmode=require",
        format!("postgres://a:b@c@localhost:{port}/app?sslmode=require"),
    );
    check("postgres://app@127.0.0.1:5432", format!("postgres://app@127.0.0.1:{port}"));
    check("postgres://app@localhost?user=x@y:1", format!("postgres://app@localhost:{port}?user=x@y:1"));
}
