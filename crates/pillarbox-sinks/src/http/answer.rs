use std::error::Error;
use std::time::{Duration, SystemTime};

use pillarbox::Failure;
use reqwest::header::{HeaderMap, LOCATION, RETRY_AFTER};
use reqwest::{StatusCode, Url};

use super::address::Blocked;

/// What an answer means for the events of its request. Of what the receiver says only the status is repeated: the rest may
/// echo a payload or a secret.
pub(super) fn judge(url: &Url, status: StatusCode, headers: &HeaderMap) -> Result<(), Failure> {
    let origin = url.origin().ascii_serialization();
    let said = match status.canonical_reason() {
        Some(reason) => format!("{origin} answered {} {reason}", status.as_u16()),
        None => format!("{origin} answered {}", status.as_u16()),
    };
    let named = |kind: &'static str, failure: Failure| Failure { kind, ..failure };
    Err(match status.as_u16() {
        200..=299 => return Ok(()),
        300..=399 => named("redirect", Failure::sink(format!("{said}{}", redirect_hint(url, headers)))),
        400 | 413 | 415 | 422 => named("refused", Failure::permanent(format!("{said}: it will never take this event"))),
        401 | 403 | 407 => named(
            "unauthorized",
            Failure::sink(format!("{said}; check the headers and secrets of the sink, and what the receiver allows")),
        ),
        404 | 405 => named("not_found", Failure::sink(format!("{said}; check the url of the sink"))),
        410 => Failure::gone(format!(
            "{said}; run `pillarbox resume` for the subscription when the receiver accepts events again"
        )),
        408 | 425 | 429 | 503 => Failure {
            retry_after: retry_after(headers, SystemTime::now()),
            ..named("overloaded", Failure::sink(format!("{said}; it is tried again")))
        },
        400..=499 => named("http_status", Failure::event(said)),
        500..=599 => named("server_error", Failure::sink(format!("{said}; look at the receiver's log"))),
        _ => named("http_status", Failure::sink(format!("{said}, which says nothing; is this the right url?"))),
    })
}

/// What it means that there was no answer.
pub(super) fn no_answer(origin: &str, timeout: Duration, error: reqwest::Error) -> Failure {
    // The URL may hold a token.
    let error = error.without_url();
    if causes(&error).any(|cause| cause.is::<Blocked>()) {
        let message = format!(
            "{origin} has no public address, and block_private_addresses is on; \
             turn it off if this receiver is one of yours"
        );
        return Failure { kind: "blocked_address", ..Failure::sink(message) };
    }
    let cause = causes(&error).last().map(ToString::to_string).unwrap_or_default();
    if error.is_connect() {
        return Failure::unreachable("connect", format!("{origin} cannot be reached: {cause}"));
    }
    if error.is_timeout() {
        let message = format!("{origin} did not answer within {timeout:?}; whether it has the event is not known");
        return Failure::unclear("timeout", message);
    }
    if error.is_builder() {
        return Failure::unsendable("destination", format!("no request can be made of the event: {cause}"));
    }
    let message = format!(
        "the connection to {origin} was lost before it answered ({cause}); whether it has the event is not known"
    );
    Failure::unclear("connection_lost", message)
}

/// An error and what caused it, down to the first cause.
fn causes<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |error| (*error).source())
}

/// How long the receiver asks to be left alone: seconds, or a date.
fn retry_after(headers: &HeaderMap, now: SystemTime) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // More digits than fit are as long as the engine allows.
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let date = httpdate::parse_http_date(text).ok()?;
    Some(date.duration_since(now).unwrap_or_default())
}

fn redirect_hint(url: &Url, headers: &HeaderMap) -> String {
    let location = headers.get(LOCATION).and_then(|location| location.to_str().ok());
    let host = location.and_then(|location| url.join(location).ok()).map(|to| to.origin().ascii_serialization());
    match host {
        Some(host) => {
            format!(
                ", which points to {host}; redirects are not followed: change the url of the sink, if you trust that host"
            )
        }
        None => "; redirects are not followed: change the url of the sink".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use pillarbox::sink::Fault;
    use reqwest::header::HeaderValue;

    use super::*;

    fn answer(status: u16, name: &'static str, value: &str) -> Result<(), Failure> {
        let url = Url::parse("https://h/canary").unwrap();
        let headers = HeaderMap::from_iter([(name.parse().unwrap(), HeaderValue::from_str(value).unwrap())]);
        judge(&url, StatusCode::from_u16(status).unwrap(), &headers)
    }

    #[test]
    fn every_status_has_a_meaning() {
        for status in 100..1000 {
            let judged = answer(status, "x", "canary");
            assert_eq!(judged.is_ok(), (200..300).contains(&status), "{status}");
            let Err(failure) = judged else { continue };
            let fault = match status {
                401 | 403 | 404 | 405 | 407 | 408 | 410 | 425 | 429 => Fault::Sink,
                400..=499 => Fault::Event,
                _ => Fault::Sink,
            };
            assert_eq!(failure.fault, fault, "{status}");
            assert_eq!(failure.permanent, [400, 413, 415, 422].contains(&status), "{status}");
            assert_eq!(failure.pause, status == 410, "{status}");
            assert!(
                failure.message.contains(&status.to_string()) && !failure.message.contains("canary"),
                "{failure:?}"
            );
        }
    }

    #[test]
    fn retry_after_is_heard_where_it_means_something() {
        for status in [408, 425, 429, 503] {
            let failure = answer(status, "retry-after", "7").unwrap_err();
            assert_eq!(failure.retry_after, Some(Duration::from_secs(7)), "{status}");
        }
        for status in [400, 401, 500, 502] {
            assert_eq!(answer(status, "retry-after", "7").unwrap_err().retry_after, None, "{status}");
        }
    }

    #[test]
    fn retry_after_is_seconds_or_a_date() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(784_111_777);
        let check = |text: &str, expected: Option<u64>| {
            let headers = HeaderMap::from_iter([(RETRY_AFTER, HeaderValue::from_str(text).unwrap())]);
            assert_eq!(retry_after(&headers, now), expected.map(Duration::from_secs), "{text}");
        };
        check("120", Some(120));
        check("0", Some(0));
        check("99999999999999999999999", Some(u64::MAX));
        check("Sun, 06 Nov 1994 08:50:37 GMT", Some(60));
        check("Sunday, 06-Nov-94 08:50:37 GMT", Some(60));
        check("Sun Nov  6 08:50:37 1994", Some(60));
        check("Sun, 06 Nov 1994 08:49:00 GMT", Some(0));
        for nonsense in ["", "-1", "soon", "1.5", "+3"] {
            check(nonsense, None);
        }
    }

    #[test]
    fn a_redirect_names_the_host_alone() {
        let message = |to: &str| answer(302, "location", to).unwrap_err().message;
        assert!(message("https://other:81/canary?canary").contains("points to https://other:81;"));
        assert!(message("/canary").contains("points to https://h;"));
        assert!(message("http://[canary").contains("not followed"));
        assert!(!message("https://other:81/canary?canary").contains("canary"));
    }
}
