use std::net::TcpListener;
use std::time::Duration;

use pillarbox::sink::{Fault, Outcome, Sink};
use pillarbox_sinks::{RedisConfig, Secret};
use pillarbox_testkit::redis::Server;

use super::receivers::entries;
use super::{deliver_one, event, insist, refused, stream_of, until};

/// After which a server that says nothing is down.
const SILENCE: Duration = Duration::from_millis(300);

const PASSWORD: &str = "canary-of-servers";
const SENTINEL_PASSWORD: &str = "canary-of-sentinels";

/// A master, a replica and a sentinel, each with passwords.
struct Trio {
    master: Server,
    replica: Server,
    sentinel: Server,
}

impl Trio {
    async fn start() -> Self {
        let server = || Server::builder().setting("requirepass", PASSWORD).setting("masterauth", PASSWORD);
        let master = server().start().unwrap();
        let replica = server().replica_of(&master).start().unwrap();
        let is_in_step = || master.cli(&["INFO", "replication"]).unwrap().contains("state=online");
        until("the replica is in step", is_in_step).await;
        let sentinel =
            Server::builder().sentinel_of("main", &master, SILENCE).setting("requirepass", SENTINEL_PASSWORD);
        let sentinel = sentinel.setting("sentinel auth-pass", format!("main {PASSWORD}")).start().unwrap();
        let knows = || {
            let replicas = sentinel.cli(&["SENTINEL", "REPLICAS", "main"]).unwrap();
            replicas.contains("master-link-status\nok") && !replicas.contains("disconnected")
        };
        until("the sentinel knows the replica", knows).await;
        Trio { master, replica, sentinel }
    }

    /// Waits until the replica has the first event.
    async fn until_replicated(&self) {
        until("the replica has it", || self.replica.cli(&["XLEN", "events"]).unwrap() == "1").await;
    }

    /// By way of sentinels of which the first is not there.
    fn config(&self) -> RedisConfig {
        let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        RedisConfig {
            sentinels: vec![nobody, self.sentinel.address()],
            master: Some("main".to_owned()),
            sentinel_password: Some(Secret::new(SENTINEL_PASSWORD)),
            ..RedisConfig::new(format!("redis://:{PASSWORD}@/0"))
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_failover_events_go_to_the_new_master() {
    let trio = Trio::start().await;
    let sink = stream_of(trio.config(), "events");
    assert_eq!(sink.check().await, Ok(()));
    assert_eq!(deliver_one(&sink, event(1)).await, Outcome::Delivered);
    trio.until_replicated().await;
    trio.master.kill();
    let failure = refused(&sink, event(2)).await;
    assert_ne!(failure.fault, Fault::Event, "{failure:?}");
    assert!(!failure.message.contains("canary"), "{}", failure.message);
    insist(&sink, event(2)).await;
    insist(&sink, event(3)).await;
    let url = trio.replica.url_as(&format!(":{PASSWORD}"));
    let positions: Vec<u64> = entries(url, "events").await.iter().map(|received| received.id.as_u64_pair().1).collect();
    assert_eq!(positions, [1, 2, 3], "on the one that was the replica");
    assert!(trio.replica.cli(&["ROLE"]).unwrap().starts_with("master"));
}

/// The old master lives on as a replica, with the sink's connection.
#[tokio::test(flavor = "multi_thread")]
async fn after_a_planned_failover_events_go_to_the_new_master() {
    let trio = Trio::start().await;
    let sink = stream_of(trio.config(), "events");
    assert_eq!(deliver_one(&sink, event(1)).await, Outcome::Delivered);
    trio.until_replicated().await;
    // Refused as long as the sentinel has not heard of the replica's state.
    let begins = || trio.sentinel.cli(&["SENTINEL", "FAILOVER", "main"]).is_ok_and(|said| said == "OK");
    until("the failover begins", begins).await;
    let is_over = || {
        // Both close all connections when their roles change, also the one that asks.
        let role = |server: &Server| server.cli(&["ROLE"]).unwrap_or_default();
        role(&trio.replica).starts_with("master") && role(&trio.master).starts_with("slave")
    };
    until("the roles are changed", is_over).await;
    insist(&sink, event(2)).await;
    assert_eq!(trio.replica.cli(&["XLEN", "events"]).unwrap(), "2");
}

#[tokio::test]
async fn a_master_that_no_sentinel_knows_is_named() {
    let trio = Trio::start().await;
    let sink = stream_of(RedisConfig { master: Some("mian".to_owned()), ..trio.config() }, "events");
    let failure = refused(&sink, event(1)).await;
    assert_eq!((failure.fault, failure.kind), (Fault::Sink, "connect"));
    assert!(failure.message.contains("knows no master 'mian'"), "{}", failure.message);
    let sink = stream_of(RedisConfig { sentinel_password: Some("canary-wrong".into()), ..trio.config() }, "events");
    let failure = refused(&sink, event(1)).await;
    assert_eq!((failure.fault, failure.kind), (Fault::Sink, "auth"), "{failure:?}");
    assert!(!failure.message.contains("canary"), "{}", failure.message);
}
