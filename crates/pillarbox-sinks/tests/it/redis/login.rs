use pillarbox::Failure;
use pillarbox::sink::{Fault, Outcome, Sink};
use pillarbox_sinks::{RedisConfig, RedisPubSub, Secret};
use pillarbox_testkit::redis::Server;

use super::{SOURCE, deliver, deliver_one, event, event_for, own_name, positions, pubsub, refused, stream, stream_of};

const CANARY: &str = "canary-of-a-password";

/// Makes a user with a password and these rights.
fn add_user(server: &Server, name: &str, rights: &[&str]) {
    let password = format!(">{CANARY}");
    server.cli(&[&["ACL", "SETUSER", name, "reset", "on", &password], rights].concat()).unwrap();
}

fn url_of(server: &Server, user: &str) -> String {
    server.url_as(&format!("{user}:{CANARY}"))
}

#[track_caller]
fn assert_tells_nothing(failure: &Failure) {
    assert!(!format!("{failure:?}").contains("canary"), "{failure:?}");
}

#[tokio::test]
async fn a_user_needs_no_more_than_the_right_to_add_to_its_streams() {
    let server = Server::shared();
    let own = own_name();
    add_user(server, &own, &[&format!("~{own}.*"), "+xadd"]);
    let sink = stream(&url_of(server, &own), "{topic}");
    assert_eq!(sink.check().await, Ok(()), "what it may not ask is not held against it");
    let (mine, other) = (format!("{own}.orders"), own_name());
    let outcomes = deliver(&sink, [event_for(1, &mine), event_for(2, &other)]).await;
    let [Outcome::Delivered, Outcome::Failed(failure)] = &outcomes[..] else { panic!("{outcomes:?}") };
    assert_eq!((failure.fault, failure.kind, failure.permanent), (Fault::Event, "permission", false));
    assert_tells_nothing(failure);
    assert_eq!(positions(server, &mine).await, [1]);
    let constant = refused(&stream(&url_of(server, &own), &other), event(3)).await;
    assert_eq!((constant.fault, constant.kind), (Fault::Sink, "permission"), "no event can go there");
}

#[tokio::test]
async fn a_user_needs_no_more_than_the_right_to_publish_to_its_channels() {
    let server = Server::shared();
    let own = own_name();
    add_user(server, &own, &[&format!("&{own}.*"), "+publish"]);
    let sink = pubsub(&url_of(server, &own), "{topic}");
    assert_eq!(sink.check().await, Ok(()));
    let outcomes = deliver(&sink, [event_for(1, &format!("{own}.news")), event_for(2, &own_name())]).await;
    let [Outcome::Delivered, Outcome::Failed(failure)] = &outcomes[..] else { panic!("{outcomes:?}") };
    assert_eq!((failure.fault, failure.kind), (Fault::Event, "permission"));
    let careful = pubsub(&url_of(server, &own), &format!("{own}.news")).require_receivers(true);
    assert_eq!(careful.check().await, Ok(()), "it may not ask who is subscribed");
}

#[tokio::test]
async fn without_the_right_to_the_command_nothing_is_blamed_on_an_event() {
    let server = Server::shared();
    let own = own_name();
    add_user(server, &own, &["~*", "&*", "+ping"]);
    let url = url_of(server, &own);
    let (streams, channels) = (stream(&url, "{topic}"), pubsub(&url, "{topic}"));
    let sinks: [&dyn Sink; 2] = [&streams, &channels];
    for sink in sinks {
        let failure = refused(sink, event(1)).await;
        assert_eq!((failure.fault, failure.kind), (Fault::Sink, "permission"), "{failure:?}");
        assert_tells_nothing(&failure);
    }
    add_user(server, &own, &["~*", "&*", "+ping", "+xadd", "+publish"]);
    for sink in sinks {
        assert_eq!(deliver_one(sink, event(1)).await, Outcome::Delivered, "once it is given");
    }
}

#[tokio::test]
async fn a_wrong_password_is_the_sinks_and_never_told() {
    let server = Server::shared();
    let own = own_name();
    add_user(server, &own, &["~*", "+@all"]);
    let sink = stream(&server.url_as(&format!("{own}:canary-that-is-wrong")), &own);
    let failures = [refused(&sink, event(1)).await, sink.check().await.unwrap_err()];
    for failure in &failures {
        assert_eq!((failure.fault, failure.kind), (Fault::Sink, "auth"), "{failure:?}");
        assert_tells_nothing(failure);
    }
}

#[tokio::test]
async fn without_the_password_that_is_wanted_it_says_so() {
    let server = Server::builder().setting("requirepass", CANARY).start().unwrap();
    let sink = stream(&server.url(), "events");
    for outcome in deliver(&sink, (1..=50).map(event)).await {
        let Outcome::Failed(failure) = outcome else { panic!("{outcome:?}") };
        assert_eq!((failure.fault, failure.kind), (Fault::Sink, "auth"), "{failure:?}");
    }
    assert_eq!(sink.check().await.unwrap_err().kind, "auth");
    let sink = stream(&server.url_as(&format!(":{CANARY}")), "events");
    assert_eq!(deliver_one(&sink, event(1)).await, Outcome::Delivered);
}

#[tokio::test]
async fn tls_is_verified_against_the_given_authority() {
    let server = Server::builder().tls().start().unwrap();
    let trusting = |url: String| RedisConfig { ca_file: Some(server.authority()), ..RedisConfig::new(url) };
    let sink = stream_of(trusting(server.tls_url()), "events");
    assert_eq!(sink.check().await, Ok(()));
    assert_eq!(deliver_one(&sink, event(1)).await, Outcome::Delivered);
    assert_eq!(positions(&server, "events").await, [1]);
    let unknown = refused(&stream(&server.tls_url(), "events"), event(2)).await;
    assert_eq!((unknown.fault, unknown.kind), (Fault::Sink, "connect"));
    assert!(unknown.message.contains("certificate"), "{}", unknown.message);
    let other_name = server.tls_url().replace("localhost", "127.0.0.1");
    let wrong_name = refused(&stream_of(trusting(other_name), "events"), event(3)).await;
    assert_eq!((wrong_name.fault, wrong_name.kind), (Fault::Sink, "connect"));
    assert!(wrong_name.message.contains("certificate"), "{}", wrong_name.message);
    let no_tls =
        refused(&stream_of(trusting(format!("rediss://localhost:{}", server.port())), "events"), event(4)).await;
    assert_eq!((no_tls.fault, no_tls.kind), (Fault::Sink, "connect"), "{no_tls:?}");
    assert_eq!(positions(&server, "events").await, [1]);
}

#[tokio::test]
async fn nothing_shows_a_secret() {
    let config = RedisConfig {
        sentinels: vec!["127.0.0.1:1".to_owned()],
        master: Some("main".to_owned()),
        sentinel_password: Some(Secret::new("canary-of-sentinels")),
        ..RedisConfig::new(format!("redis://user:{CANARY}@/0"))
    };
    let channels = RedisPubSub::new(config.clone(), "events".parse().unwrap(), SOURCE).unwrap();
    let streams = stream_of(config.clone(), "events");
    let sinks: [&dyn Sink; 2] = [&streams, &channels];
    for sink in sinks {
        assert_tells_nothing(&refused(sink, event(1)).await);
        assert_tells_nothing(&sink.check().await.unwrap_err());
    }
    let shown = format!("{config:?} {config:#?} {channels:?} {channels:#?} {streams:?} {streams:#?}");
    assert!(!shown.contains("canary"), "{shown}");
}
