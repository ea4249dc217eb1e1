use std::ops::Range;

/// What a secret is shown as.
pub(crate) const MASK: &str = "***";

/// A parameter whose name contains one of these is a secret, in whatever case it is written.
const SECRET_WORDS: [&str; 5] = ["pass", "pwd", "token", "secret", "key"];

/// What ends the host of a URL.
const HOST_ENDS: [char; 3] = ['/', '?', '#'];

/// A URL or a list of `key=value` without its secrets.
///
/// Where a text can be read in two ways, the one that hides more is taken: a password may contain `/`, `?` and `@`
/// although it should not, and so may a path contain `@`.
pub(crate) fn masked(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://") else { return masked_pairs(text) };
    if let Some(authority) = doubtful_authority(rest) {
        // The name of a user or of a host, either way; of what follows, nothing is sure to be no secret.
        let name = authority.split_once(':').map(|(name, _)| name).filter(|name| !name.contains('@'));
        return name.map_or_else(|| format!("{scheme}://{MASK}"), |name| format!("{scheme}://{name}:{MASK}"));
    }
    let (user, rest) = match rest.rsplit_once('@') {
        Some((user, rest)) => (masked_user(scheme, user), rest),
        None => (String::new(), rest),
    };
    let (address, query) = match rest.split_once('?') {
        Some((address, query)) => (address, Some(query)),
        None => (rest, None),
    };
    let query = query.map(|query| query.split('&').map(masked_pairs).collect::<Vec<_>>().join("&"));
    let query = query.map_or_else(String::new, |query| format!("?{query}"));
    format!("{scheme}://{user}{address}{query}")
}

/// The passwords and tokens within a URL, as they are written and as they are meant; of one that can be read in two ways,
/// those of both.
pub(crate) fn secrets_in(url: &str) -> Vec<String> {
    let Some((scheme, rest)) = url.split_once("://") else { return Vec::new() };
    let (user, address) = rest.rsplit_once('@').unwrap_or(("", rest));
    let mut written = vec![login(scheme, user)];
    written.extend(secret_parameters(address));
    if let Some(authority) = doubtful_authority(rest) {
        let user = authority.rsplit_once('@').map_or("", |(user, _)| user);
        let word = address.split(['/', '?', '#', '&']).next().unwrap_or_default();
        written.extend([login(scheme, user), address, word]);
        written.extend(secret_parameters(rest));
    }
    let written = written.into_iter().filter(|secret| !secret.is_empty());
    written.flat_map(|secret| [secret.to_owned(), percent_decoded(secret)]).collect()
}

/// The authority of a URL, given what follows its scheme, if there is an `@` behind it: that may as well be the end of a
/// password that should have been escaped.
fn doubtful_authority(rest: &str) -> Option<&str> {
    let (authority, behind) = rest.split_at(rest.find(HOST_ENDS)?);
    behind.contains('@').then_some(authority)
}

/// What the user of a URL has to keep secret. A user alone is a token, except for databases.
fn login<'a>(scheme: &str, user: &'a str) -> &'a str {
    match user.split_once(':') {
        Some((_, password)) => password,
        None if scheme.starts_with("postgres") => "",
        None => user,
    }
}

/// The values of the parameters that are secrets.
fn secret_parameters(address: &str) -> impl Iterator<Item = &str> {
    let query = address.split_once('?').map_or("", |(_, query)| query);
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs.filter(|(name, _)| is_secret(name)).map(|(_, value)| value)
}

/// What is not to be seen in what others say, and what is shown instead of it.
#[derive(Clone, Default)]
pub(crate) struct Redactions(Vec<(String, String)>);

/// What is shorter is no secret, and would be masked within words and numbers that have nothing to do with it.
const REDACTED_BYTES_MIN: usize = 4;

impl Redactions {
    pub(crate) fn new(pairs: impl IntoIterator<Item = (String, String)>) -> Self {
        let matters = |(secret, shown): &(String, String)| secret.len() >= REDACTED_BYTES_MIN && secret != shown;
        let mut redactions = Redactions::default();
        redactions.extend(pairs.into_iter().filter(matters));
        redactions
    }

    /// These and the others.
    pub(crate) fn add(&mut self, others: &Redactions) {
        self.extend(others.0.iter().cloned());
    }

    fn extend(&mut self, pairs: impl Iterator<Item = (String, String)>) {
        for pair in pairs {
            if !self.0.contains(&pair) {
                self.0.push(pair);
            }
        }
        // A secret that contains another one goes first, or its rest would stay.
        self.0.sort_by_key(|(secret, _)| std::cmp::Reverse(secret.len()));
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The text without the secrets.
    pub(crate) fn apply(&self, text: &str) -> String {
        self.0.iter().fold(text.to_owned(), |text, (secret, shown)| text.replace(secret, shown))
    }
}

/// `%41` as `A`; what is no such thing as it is.
fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let digits =
            (*first == b'%').then(|| tail.get(..2)).flatten().and_then(|digits| std::str::from_utf8(digits).ok());
        match digits.and_then(|digits| u8::from_str_radix(digits, 16).ok()) {
            Some(byte) => {
                bytes.push(byte);
                rest = &tail[2..];
            }
            None => {
                bytes.push(*first);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A database's URL for people. One that no version of Pillarbox can read may be anything, so nothing but its scheme is shown.
pub(crate) fn masked_database(url: &str) -> String {
    let known = ["sqlite:", "postgres://", "postgresql://"].iter().any(|scheme| url.starts_with(scheme));
    match (known, scheme_of(url)) {
        (true, _) => masked(url),
        (false, Some(scheme)) => format!("{scheme}://{MASK}"),
        (false, None) => MASK.to_owned(),
    }
}

/// The scheme of a URL. What stands before a colon alone may as well be a user's name before a password.
pub(crate) fn scheme_of(url: &str) -> Option<&str> {
    let (scheme, _) = url.split_once("://")?;
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte);
    (!scheme.is_empty() && scheme.bytes().all(plain)).then_some(scheme)
}

/// What a program says about its arguments, without the secrets in them.
pub(crate) fn masked_arguments(said: &str, arguments: impl IntoIterator<Item = String>) -> String {
    let values = arguments.into_iter().flat_map(|argument| {
        // `--database=URL` is quoted whole or by its value.
        let value = argument.split_once('=').map(|(_, value)| value.to_owned());
        [Some(argument), value]
    });
    values.flatten().filter(|value| !value.is_empty()).fold(said.to_owned(), |said, value| {
        let shown = masked(&value);
        if shown == value { said } else { said.replace(&value, &shown) }
    })
}

/// The user of a URL with the `@`, without the password. A user alone is a token, except for databases.
fn masked_user(scheme: &str, user: &str) -> String {
    match user.split_once(':') {
        Some((name, _)) => format!("{name}:{MASK}@"),
        None if scheme.starts_with("postgres") => format!("{user}@"),
        None => format!("{MASK}@"),
    }
}

/// `key=value …` up to the first secret. What follows it is hidden too: the end of an unquoted value is unknown.
fn masked_pairs(text: &str) -> String {
    let equals = text.match_indices('=').map(|(at, _)| at);
    match equals.map(|at| name_before(text, at)).find(|name| is_secret(&text[name.clone()])) {
        None => text.to_owned(),
        Some(name) => format!("{}={MASK}", &text[..name.end]),
    }
}

/// Where the name stands that the `=` at this place gives a value to.
fn name_before(text: &str, equals: usize) -> Range<usize> {
    let end = text[..equals].trim_end().len();
    let plain = |character: char| character.is_alphanumeric() || "_-.%".contains(character);
    let start = text[..end].trim_end_matches(plain).len();
    start..end
}

fn is_secret(name: &str) -> bool {
    let name = name.to_lowercase();
    // An escaped name is one that somebody took pains to write; whatever it is, its value is not shown.
    name.contains('%') || SECRET_WORDS.iter().any(|word| name.contains(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_secret_is_shown() {
        for text in [
            "redis://h/0",
            "postgres://app@localhost/app?sslmode=verify-full&application_name=x",
            "host=h user=u dbname=d",
            "sqlite:app.db",
            "out.ndjson",
        ] {
            assert_eq!(masked(text), text);
        }
    }

    #[test]
    fn passwords_are_masked() {
        for (text, shown) in [
            ("postgres://u:canary@h/d?x=1", "postgres://u:***@h/d?x=1"),
            ("unix:///run/redis.sock?user=u&pass=canary", "unix:///run/redis.sock?user=u&pass=***"),
            ("host=h passphrase=canary", "host=h passphrase=***"),
            (
                "postgres://h/d?user=u&password=canary&sslmode=require",
                "postgres://h/d?user=u&password=***&sslmode=require",
            ),
            ("postgres://h/d?PassWord=canary", "postgres://h/d?PassWord=***"),
            ("postgres://h/d?pass%77ord=canary", "postgres://h/d?pass%77ord=***"),
            ("redis://:canary@h/0", "redis://:***@h/0"),
            ("nats://canary@h", "nats://***@h"),
            ("https://h/x?access_token=canary&a=b", "https://h/x?access_token=***&a=b"),
            ("host=h password=canary user=u", "host=h password=***"),
            ("host=h password = 'canary canary'", "host=h password=***"),
            ("Server=h;Pwd=canary canary;", "Server=h;Pwd=***"),
            ("api_key=canary", "api_key=***"),
            ("client_secret=canary", "client_secret=***"),
        ] {
            assert_eq!(masked(text), shown);
        }
    }

    /// An `@` behind the host: the end of a password that should have been escaped, or a part of the path.
    #[test]
    fn of_a_url_that_can_be_read_in_two_ways_no_reading_shows_a_secret() {
        for (url, shown) in [
            ("postgres://u:can@ary/can?ary#canary@h/d", "postgres://u:***"),
            ("postgres://u:canary@h/d?options=a@b", "postgres://u:***"),
            ("https://h/x?to=a@b.c&token=canary", "https://***"),
            ("https://h/hooks/@canary", "https://***"),
            ("https://h:8080/hooks/@canary", "https://h:***"),
            ("https://canary@h:8080/hooks/@canary", "https://***"),
            ("nats://cana/ry@h", "nats://***"),
        ] {
            assert_eq!(masked(url), shown);
            assert_eq!(masked(shown), shown, "what is masked stays so");
        }
    }

    #[test]
    fn secrets_in_urls_are_found_as_written_and_as_meant() {
        for (url, secrets) in [
            ("redis://u:ca%6Eary@h/0", &["ca%6Eary", "canary"][..]),
            ("redis://:can@ary@h/0", &["can@ary", "can@ary"]),
            ("nats://canary@h", &["canary", "canary"]),
            ("postgres://user@h/d?sslmode=require&password=canary", &["canary", "canary"]),
            ("unix:///run/redis.sock?user=u&pass=canary", &["canary", "canary"]),
            ("https://h/x?a=b", &[]),
            ("host=h", &[]),
        ] {
            assert_eq!(secrets_in(url), secrets, "{url}");
        }
        assert_eq!(percent_decoded("100%-%4-%41%"), "100%-%4-A%");
    }

    #[test]
    fn secrets_of_both_readings_of_a_url_are_found() {
        for (url, secrets) in [
            ("https://h/x?to=a@b.c&token=canary", &["canary"][..]),
            ("https://h/x?token=canary&to=a@b.c", &["canary"]),
            ("https://h/hooks/@canary?x=1", &["canary"]),
            ("https://token@h/hooks/@canary", &["token", "canary"]),
            ("https://u:word@h/hooks/@canary", &["word", "canary"]),
            ("postgres://u:can/ary@h/d?password=canary", &["can/ary", "canary"]),
        ] {
            let found = secrets_in(url);
            assert!(secrets.iter().all(|secret| found.iter().any(|one| one == secret)), "{url}: {found:?}");
        }
    }

    #[test]
    fn a_secret_within_a_longer_one_leaves_no_rest() {
        let pair = |secret: &str| (secret.to_owned(), MASK.to_owned());
        let redactions = Redactions::new([pair("canary"), pair("canary-long"), pair("abc")]);
        assert_eq!(redactions.apply("canary-long and canary, abc"), "*** and ***, abc");
        assert!(Redactions::new([pair("abc")]).is_empty());
    }

    #[test]
    fn of_an_unknown_database_only_the_scheme_is_shown() {
        assert_eq!(masked_database("mysql://h/canary"), "mysql://***");
        assert_eq!(masked_database("u:canary@h"), "***");
        assert_eq!(masked_database("canary"), "***");
        assert_eq!(masked_database("postgres://u:canary@h/d"), "postgres://u:***@h/d");
        assert_eq!(masked_database("sqlite:app.db"), "sqlite:app.db");
    }

    #[test]
    fn arguments_are_masked_where_they_are_quoted() {
        let arguments =
            || ["status", "postgres://u:canary@h/d", "--databas=postgres://u:canary@h/e"].map(str::to_owned);
        let said = "unexpected 'postgres://u:canary@h/d' and 'postgres://u:canary@h/e' after 'status'";
        assert_eq!(
            masked_arguments(said, arguments()),
            "unexpected 'postgres://u:***@h/d' and 'postgres://u:***@h/e' after 'status'"
        );
    }
}
