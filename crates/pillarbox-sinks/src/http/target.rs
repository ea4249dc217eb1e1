use std::borrow::Cow;

use pillarbox::{Error, ErrorKind, Event, Failure, Result};
use reqwest::Url;

use super::address::is_public;
use crate::Template;

/// Where requests go: one host, and below it whatever the event says.
pub(super) struct Target {
    template: Template,
    /// What all events have in common; without placeholders all of it.
    base: Url,
    origin: String,
}

impl Target {
    pub(super) fn new(template: Template, block_private_addresses: bool) -> Result<Self> {
        // The URL itself is not shown: tokens in paths and queries are common among webhooks.
        let invalid = |why: &str| Error::new(ErrorKind::Invalid, format!("the url of an http sink {why}"));
        let start = template.literal_start();
        let base = Url::parse(start).map_err(|error| invalid(&format!("cannot be read: {error}")))?;
        if !matches!(base.scheme(), "http" | "https") {
            return Err(invalid("must begin with http:// or https://"));
        }
        if !template.is_constant() && !has_whole_host(start) {
            return Err(invalid(
                "has a placeholder in its host; write it as https://host/path, with placeholders in the path or after it",
            ));
        }
        if !base.username().is_empty() || base.password().is_some() {
            return Err(invalid("holds a user or a password; set the header Authorization in headers instead"));
        }
        if base.fragment().is_some() {
            return Err(invalid("has a part behind '#', which is never sent; leave it away"));
        }
        if block_private_addresses && literal_address(&base).is_some_and(|address| !is_public(address)) {
            return Err(invalid("is an address that is not public, and block_private_addresses is on"));
        }
        if template.samples().iter().any(|sample| has_dot_segment(sample)) {
            return Err(invalid("has a part '.' or '..' in its path; write the path that is meant"));
        }
        let origin = base.origin().ascii_serialization();
        Ok(Target { template, base, origin })
    }

    /// Where this event goes.
    pub(super) fn url(&self, event: &Event) -> std::result::Result<Url, Failure> {
        if self.template.is_constant() {
            return Ok(self.base.clone());
        }
        let text = self.template.render_with(event, escape).map_err(|failure| self.without_path(failure))?;
        let url = Url::parse(&text).ok().filter(|url| url.origin() == self.base.origin());
        let url = url.filter(|_| !has_dot_segment(&text));
        url.ok_or_else(|| {
            let message = format!(
                "the event does not make a path below {}: what fills a placeholder is '.' or '..'; \
                 publish it with another value, or take the placeholder out of the url",
                self.origin
            );
            Failure::unsendable("destination", message)
        })
    }

    /// Where the receiver is asked whether it is well.
    pub(super) fn base(&self) -> &Url {
        &self.base
    }

    pub(super) fn is_constant(&self) -> bool {
        self.template.is_constant()
    }

    /// Scheme, host and port: what may be shown.
    pub(super) fn origin(&self) -> &str {
        &self.origin
    }

    fn without_path(&self, failure: Failure) -> Failure {
        let message = failure.message.replace(self.template.as_str(), &shown(&self.template));
        Failure { message, ..failure }
    }
}

/// What may be shown of a URL: not its path, which may hold a token.
pub(super) fn shown(template: &Template) -> String {
    match Url::parse(template.literal_start()) {
        Ok(url) => format!("{}/…", url.origin().ascii_serialization()),
        Err(_) => "…".to_owned(),
    }
}

/// The host that a URL itself names by its address, in any of the ways that one can be written.
fn literal_address(url: &Url) -> Option<std::net::IpAddr> {
    let host = url.host_str()?;
    host.trim_start_matches('[').trim_end_matches(']').parse().ok()
}

fn has_whole_host(start: &str) -> bool {
    start.split_once("://").is_some_and(|(_, rest)| rest.contains(['/', '?']))
}

/// Whether a part of the path is one that changes the path before it.
fn has_dot_segment(text: &str) -> bool {
    let path = text.split(['?', '#']).next().unwrap_or(text);
    path.split('/').any(|segment| matches!(&*segment.to_ascii_lowercase().replace("%2e", "."), "." | ".."))
}

/// Escapes everything but letters, digits and `-._~`: the value stays one part of the URL.
fn escape(value: &str) -> Cow<'_, str> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._~".contains(&byte);
    if value.bytes().all(plain) {
        return Cow::Borrowed(value);
    }
    let mut escaped = String::with_capacity(value.len() * 2);
    for byte in value.bytes() {
        if plain(byte) {
            escaped.push(char::from(byte));
        } else {
            push_percent(byte, &mut escaped);
        }
    }
    Cow::Owned(escaped)
}

/// One byte as `%XX`.
pub(super) fn push_percent(byte: u8, out: &mut String) {
    const DIGITS: &[u8; 16] = b"0123456789ABCDEF";
    out.push('%');
    out.push(char::from(DIGITS[usize::from(byte >> 4)]));
    out.push(char::from(DIGITS[usize::from(byte & 15)]));
}

#[cfg(test)]
mod tests {
    use pillarbox::Payload;
    use pillarbox_testkit::sink_suite::sink_event;

    use super::*;

    fn target(url: &str) -> Result<Target> {
        Target::new(url.parse().unwrap(), false)
    }

    fn check(template: &str, key: &str, expected: &str) {
        let event = sink_event(1, Some(key), Payload::None);
        assert_eq!(target(template).unwrap().url(&event).unwrap().as_str(), expected, "{template}");
    }

    #[test]
    fn what_fills_a_place_stays_one_part_of_the_url() {
        check("https://h/x", "k", "https://h/x");
        check("https://h/{topic}/{key}", "a/b?c#d", "https://h/orders/a%2Fb%3Fc%23d");
        check("https://h/x?k={key}", "a&b=c é", "https://h/x?k=a%26b%3Dc%20%C3%A9");
        check("https://h?k={key}", "\\@evil:1", "https://h/?k=%5C%40evil%3A1");
        check("https://h:8443/{key}", "-._~Az09", "https://h:8443/-._~Az09");
        check("https://h/{key}x", "..", "https://h/..x");
        check("https://h/?k={key}", "..", "https://h/?k=..");
    }

    #[test]
    fn no_value_climbs_out_of_the_path() {
        for (template, key) in [
            ("https://h/a/{key}/b", ".."),
            ("https://h/a/{key}", "."),
            ("https://h/a/.{key}", "."),
            ("https://h/%2e{key}?x", "."),
        ] {
            let event = sink_event(1, Some(key), Payload::None);
            let failure = target(template).unwrap().url(&event).unwrap_err();
            assert!(failure.permanent && failure.kind == "destination", "{template}: {failure:?}");
        }
    }

    #[test]
    fn wrong_urls_say_why_and_are_not_shown() {
        for (url, why) in [
            ("ftp://h/canary", "must begin"),
            ("h/canary", "cannot be read"),
            ("https:///{key}/canary", "cannot be read"),
            ("https://user:canary@h/", "Authorization"),
            ("https://canary@h/", "Authorization"),
            ("https://{header.h}/canary", "cannot be read"),
            ("https://h{key}/canary", "placeholder in its host"),
            ("https://h:80{key}/canary", "cannot be read"),
            ("https://h/canary#x", "'#'"),
        ] {
            let error = target(url).err().unwrap_or_else(|| panic!("{url}")).to_string();
            assert!(
                error.contains(why) || why == "cannot be read" && error.contains("placeholder in its host"),
                "{url}: {error}"
            );
            assert!(!error.contains("canary"), "{error}");
        }
    }

    #[test]
    fn the_failure_of_a_template_hides_the_path() {
        let event = sink_event(1, None, Payload::None);
        let failure = target("https://h/canary/{key}").unwrap().url(&event).unwrap_err();
        assert!(failure.message.contains("https://h/…") && !failure.message.contains("canary"), "{failure:?}");
    }

    #[test]
    fn private_literals_are_refused_in_every_spelling() {
        for host in [
            "127.0.0.1",
            "0x7f.1",
            "2130706433",
            "017700000001",
            "127.1",
            "[::1]",
            "[::ffff:127.0.0.1]",
            "169.254.169.254",
            "[fd00::1]",
        ] {
            let template: Template = format!("http://{host}/x").parse().unwrap();
            assert!(Target::new(template.clone(), true).is_err(), "{host}");
            assert!(Target::new(template, false).is_ok(), "{host}");
        }
        assert!(Target::new("https://1.1.1.1/".parse().unwrap(), true).is_ok());
    }
}
