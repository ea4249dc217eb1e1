use std::time::{SystemTime, UNIX_EPOCH};

use aws_lc_rs::hmac;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use super::*;

const OLD: [u8; 24] = [1; 24];
const NEW: [u8; 32] = [2; 32];

fn secret(key: &[u8]) -> pillarbox_sinks::Secret {
    format!("whsec_{}", STANDARD.encode(key)).into()
}

/// Whether a receiver that knows this key takes the request, by the text of the specification.
fn is_authentic(key: &[u8], request: &HttpRequest) -> bool {
    let header = |name: &str| request.header(name).unwrap_or_else(|| panic!("there is no {name}"));
    let signed = [header("webhook-id").as_bytes(), b".", header("webhook-timestamp").as_bytes(), b".", &request.body];
    let key = hmac::Key::new(hmac::HMAC_SHA256, key);
    let good = |signature: &str| {
        let tag = STANDARD.decode(signature.strip_prefix("v1,").expect("version 1")).unwrap();
        hmac::verify(&key, &signed.concat(), &tag).is_ok()
    };
    header("webhook-signature").split(' ').any(good)
}

async fn request(secrets: &[&[u8]], mode: HttpMode) -> HttpRequest {
    let receiver = HttpReceiver::start().unwrap();
    let secrets = secrets.iter().map(|key| secret(key)).collect();
    let sink = sink(HttpConfig { secrets, mode, ..config(&receiver) });
    assert_eq!(deliver(&sink, [event(1, "k")]).await, [Outcome::Delivered]);
    receiver.requests().remove(0)
}

#[tokio::test]
async fn a_receiver_verifies_and_notices_changes() {
    for mode in [HttpMode::Structured, HttpMode::Binary, HttpMode::Batched] {
        let genuine = request(&[&OLD], mode).await;
        assert!(is_authentic(&OLD, &genuine), "{mode:?}");
        assert!(!is_authentic(&NEW, &genuine), "{mode:?}");
        let mut tampered = genuine.clone();
        *tampered.body.last_mut().unwrap() = b' ';
        assert!(!is_authentic(&OLD, &tampered), "{mode:?}");
        for name in ["webhook-id", "webhook-timestamp"] {
            let mut tampered = genuine.clone();
            tampered.headers.iter_mut().find(|(there, _)| there == name).unwrap().1 = b"1".to_vec();
            assert!(!is_authentic(&OLD, &tampered), "{mode:?}: {name}");
        }
    }
}

#[tokio::test]
async fn during_a_rotation_receivers_with_either_secret_verify() {
    let both = request(&[&OLD, &NEW], HttpMode::Structured).await;
    assert!(is_authentic(&OLD, &both) && is_authentic(&NEW, &both));
    assert_eq!(both.header("webhook-signature").unwrap().split(' ').count(), 2);
    assert!(!is_authentic(&[3; 32], &both));
}

#[tokio::test]
async fn the_timestamp_is_of_the_attempt() {
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let before = now();
    let timestamp: u64 =
        request(&[&OLD], HttpMode::Structured).await.header("webhook-timestamp").unwrap().parse().unwrap();
    assert!((before..=now()).contains(&timestamp), "{timestamp}, not of the event's time");
}

#[test]
fn the_request_in_the_guide_is_genuine() {
    let guide = include_str!("../../../../../docs/guides/sinks/http.md");
    let (_, from) = guide.split_once("```http\n").unwrap();
    let (request, rest) = from.split_once("\n```").unwrap();
    let (head, body) = request.split_once("\n\n").unwrap();
    let header = |line: &str| line.split_once(": ").map(|(name, value)| (name.to_owned(), value.as_bytes().to_vec()));
    let request = HttpRequest {
        method: "POST".into(),
        target: "/events".into(),
        headers: head.lines().filter_map(header).collect(),
        body: body.as_bytes().to_vec(),
        connection: 1,
        answered: None,
    };
    let (_, from) = rest.split_once("secret `whsec_").unwrap();
    let (secret, _) = from.split_once('`').unwrap();
    assert!(is_authentic(&STANDARD.decode(secret).unwrap(), &request));
    assert_eq!(read(&request)[0].id.to_string(), request.header("webhook-id").unwrap());
}
