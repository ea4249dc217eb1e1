use std::borrow::Cow;

use pillarbox::{Error, ErrorKind, Result};
use redis::io::tcp::{TcpSettings, socket2::TcpKeepalive};
use redis::{Client, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, RedisResult, TlsCertificates};

use super::RedisConfig;
use crate::Secret;
use crate::config::ConfigFault;

/// How many sentinels may be named.
const SENTINELS_MAX: usize = 32;

/// The port of a sentinel whose entry has none.
const SENTINEL_PORT: u16 = 26_379;

const URL_FORM: &str = "write redis://user:password@host:port/database, rediss:// with TLS, or unix:///path; what is special in a user or a password is percent-encoded";

/// How the server is found.
pub(super) enum Route {
    /// Its address.
    Direct(Client),
    /// Its sentinels, which name the server.
    Sentinels(Sentinels),
}

/// Who knows where the master is, and how it is then talked to.
pub(super) struct Sentinels {
    /// At least one.
    pub(super) nodes: Vec<Client>,
    /// The master's name.
    pub(super) master: String,
    login: ConnectionInfo,
    authority: Option<Vec<u8>>,
}

impl Route {
    /// Reads the configuration and connects to nothing.
    pub(super) fn of(config: &RedisConfig) -> Result<Route> {
        if let Some(fault) = faults(config).into_iter().next() {
            return Err(fault.error);
        }
        let login = login(config)?;
        let authority = authority(config, is_tls(&login))?;
        if config.sentinels.is_empty() {
            return Ok(Route::Direct(client(login, authority.as_deref()).map_err(refused)?));
        }
        sentinels(config, login, authority).map(Route::Sentinels)
    }
}

/// What is wrong with a configuration, key by key.
pub(super) fn faults(config: &RedisConfig) -> Vec<ConfigFault> {
    let mut faults = Vec::new();
    if config.timeout.is_zero() {
        let message = "the timeout of a Redis sink is 0; give it some time, for example 10s";
        faults.push(ConfigFault::new("timeout", invalid(message)));
    }
    match login(config) {
        Ok(login) => faults.extend(faults_beside_url(config, &login)),
        Err(error) => faults.push(ConfigFault::new("url", error)),
    }
    faults.extend(sentinel_faults(config));
    faults
}

/// Whether the certificates go with the URL, and both can be used.
fn faults_beside_url(config: &RedisConfig, login: &ConnectionInfo) -> Option<ConfigFault> {
    if is_tls(login) {
        provide_cryptography();
    }
    let authority = match authority(config, is_tls(login)) {
        Ok(authority) => authority,
        Err(error) => return Some(ConfigFault::new("ca_file", error).beside("url")),
    };
    let refusal = client(login.clone(), authority.as_deref()).err()?;
    // Without certificates of its own, the URL alone can be wrong.
    let key = if authority.is_some() && client(login.clone(), None).is_ok() { "ca_file" } else { "url" };
    Some(ConfigFault::new(key, refused(refusal)))
}

/// Whether the sentinels are complete, and each can be used.
fn sentinel_faults(config: &RedisConfig) -> Vec<ConfigFault> {
    if config.sentinels.is_empty() {
        let alone = [("master", config.master.is_some()), ("sentinel_password", config.sentinel_password.is_some())];
        let message = "master and sentinel_password are for sentinels, and there are none; name sentinels";
        let fault = |(key, _)| ConfigFault::new(key, invalid(message)).beside("sentinels");
        return alone.into_iter().filter(|(_, is_there)| *is_there).map(fault).collect();
    }
    let mut faults = Vec::new();
    if config.master.as_ref().is_none_or(String::is_empty) {
        let message = "there are sentinels, and no master; name it as the sentinels do";
        faults.push(ConfigFault::new("sentinels", invalid(message)).beside("master"));
    }
    if config.sentinels.len() > SENTINELS_MAX {
        let count = config.sentinels.len();
        let message = format!("there are {count} sentinels, more than sentinels_max = {SENTINELS_MAX}");
        faults.push(ConfigFault::new("sentinels", invalid(message)));
    }
    let check = |_, entry: &String| sentinel_address(entry).map(drop);
    faults.extend(ConfigFault::of_list("sentinels", &config.sentinels, check));
    faults
}

impl Sentinels {
    /// A client of the master, which is at this address.
    pub(super) fn client_of(&self, host: String, port: u16) -> RedisResult<Client> {
        let address = address(host, port, is_tls(&self.login));
        client(self.login.clone().set_addr(address), self.authority.as_deref())
    }
}

/// All that must not be shown.
pub(super) fn secrets(config: &RedisConfig) -> Vec<Secret> {
    let decoded = login(config).ok().and_then(|login| login.redis_settings().password().map(Secret::new));
    let url = config.url.expose();
    let authority = url.split_once("://").map_or(url, |(_, rest)| rest);
    let written = authority
        .rsplit_once('@')
        .and_then(|(user, _)| user.split_once(':'))
        .map(|(_, password)| Secret::new(password));
    [Some(config.url.clone()), written, decoded, config.sentinel_password.clone()].into_iter().flatten().collect()
}

fn login(config: &RedisConfig) -> Result<ConnectionInfo> {
    let url = with_host(config.url.expose(), !config.sentinels.is_empty());
    let url = redis::parse_redis_url(&url).ok_or_else(|| invalid(format!("not a Redis URL; {URL_FORM}")))?;
    // A password with such a character, not encoded, would be taken for a host and then shown.
    if url.fragment().is_some() {
        return Err(invalid(format!("the url of Redis has a '#', and certificates are always verified; {URL_FORM}")));
    }
    let is_unix = url.scheme().ends_with("unix");
    let known: &[&str] = if is_unix { &["db", "user", "pass"] } else { &[] };
    if url.query_pairs().any(|(name, _)| !known.contains(&&*name)) {
        return Err(invalid(format!("the url of Redis has a '?' with something unknown behind it; {URL_FORM}")));
    }
    if is_unix && !config.sentinels.is_empty() {
        return Err(invalid(
            "the master that sentinels know is not reached by a unix socket; write redis:// or rediss://",
        ));
    }
    let info = url.into_connection_info().map_err(refused)?;
    let settings = info.redis_settings().clone().set_lib_name("pillarbox", env!("CARGO_PKG_VERSION"));
    if settings.username().is_some() && settings.password().is_none() {
        return Err(invalid(format!(
            "the url of Redis has a user and no password, or the ':' before it is missing; {URL_FORM}"
        )));
    }
    let tcp = TcpSettings::default().set_nodelay(true).set_keepalive(TcpKeepalive::new());
    Ok(info.set_redis_settings(settings).set_tcp_settings(tcp))
}

/// The URL with some host where sentinels let it be left out; URLs in general want one after an `@`.
fn with_host(url: &str, may_lack: bool) -> Cow<'_, str> {
    let Some((scheme, rest)) = url.split_once("://").filter(|_| may_lack) else { return Cow::Borrowed(url) };
    let end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let (authority, path) = rest.split_at(end);
    if authority.is_empty() || authority.ends_with('@') {
        return Cow::Owned(format!("{scheme}://{authority}sentinels{path}"));
    }
    Cow::Borrowed(url)
}

fn authority(config: &RedisConfig, is_tls: bool) -> Result<Option<Vec<u8>>> {
    let Some(path) = &config.ca_file else { return Ok(None) };
    if !is_tls {
        return Err(invalid("ca_file is for TLS, and the url of Redis does not begin with rediss://"));
    }
    let cannot =
        |error| Error::with_source(ErrorKind::Invalid, format!("the ca_file {} cannot be read", path.display()), error);
    let pem = std::fs::read(path).map_err(cannot)?;
    if !String::from_utf8_lossy(&pem).contains("BEGIN CERTIFICATE") {
        return Err(invalid(format!("the ca_file {} has no certificate in it; it must be PEM", path.display())));
    }
    Ok(Some(pem))
}

fn sentinels(config: &RedisConfig, login: ConnectionInfo, authority: Option<Vec<u8>>) -> Result<Sentinels> {
    let master = config.master.clone().unwrap_or_default();
    let node = |entry: &String| {
        let node = sentinel(entry, &login, config.sentinel_password.as_ref())?;
        client(node, authority.as_deref()).map_err(refused)
    };
    let nodes = config.sentinels.iter().map(node).collect::<Result<Vec<_>>>()?;
    Ok(Sentinels { nodes, master, login, authority })
}

fn sentinel(entry: &str, login: &ConnectionInfo, password: Option<&Secret>) -> Result<ConnectionInfo> {
    let (host, port) = sentinel_address(entry)?;
    let mut settings = redis::RedisConnectionInfo::default().set_lib_name("pillarbox", env!("CARGO_PKG_VERSION"));
    if let Some(password) = password {
        settings = settings.set_password(password.expose());
    }
    Ok(login.clone().set_addr(address(host, port, is_tls(login))).set_redis_settings(settings))
}

fn sentinel_address(entry: &str) -> Result<(String, u16)> {
    let wrong = || invalid("a sentinel is written host:port, without a scheme, a user or a password");
    let url = redis::parse_redis_url(&format!("redis://{entry}")).ok_or_else(wrong)?;
    let is_bare =
        url.username().is_empty() && url.password().is_none() && url.query().is_none() && url.fragment().is_none();
    if !is_bare || !url.path().is_empty() {
        return Err(wrong());
    }
    let port = url.port().unwrap_or(SENTINEL_PORT);
    match url.into_connection_info().map_err(|_| wrong())?.addr().clone() {
        ConnectionAddr::Tcp(host, _) => Ok((host, port)),
        _ => Err(wrong()),
    }
}

fn address(host: String, port: u16, is_tls: bool) -> ConnectionAddr {
    if is_tls {
        return ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None };
    }
    ConnectionAddr::Tcp(host, port)
}

fn client(info: ConnectionInfo, authority: Option<&[u8]>) -> RedisResult<Client> {
    match authority {
        Some(pem) => Client::build_with_tls(info, TlsCertificates { client_tls: None, root_cert: Some(pem.to_vec()) }),
        None => Client::open(info),
    }
}

fn is_tls(info: &ConnectionInfo) -> bool {
    matches!(info.addr(), ConnectionAddr::TcpTls { .. })
}

/// The client takes what the process has chosen for TLS; without a choice it is made here.
fn provide_cryptography() {
    if rustls::crypto::CryptoProvider::get_default().is_none() {
        // Fails only if somebody was quicker, and then there is one.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    }
}

/// What the client's library says about a configuration, without its details.
fn refused(error: redis::RedisError) -> Error {
    let text = error.to_string();
    let (what, _) = text.split_once(" - ").unwrap_or((&text, ""));
    invalid(format!("the url or the ca_file of Redis was refused ({what}); {URL_FORM}"))
}

fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorKind::Invalid, message.into())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn check(config: RedisConfig, why: &str) {
        let error = match Route::of(&config) {
            Ok(_) => panic!("taken, in spite of: {why}"),
            Err(error) => format!("{error} {error:?}"),
        };
        assert!(error.contains(why), "{error}");
        assert!(!error.contains("canary"), "{error}");
    }

    fn of_url(url: &str) -> RedisConfig {
        RedisConfig::new(url)
    }

    fn with_sentinels(url: &str, sentinels: &[&str]) -> RedisConfig {
        let sentinels = sentinels.iter().map(|entry| (*entry).to_owned()).collect();
        RedisConfig { sentinels, master: Some("main".to_owned()), ..of_url(url) }
    }

    #[test]
    fn wrong_urls_say_what_to_write_and_show_nothing() {
        for (url, why) in [
            ("", "not a Redis URL"),
            ("http://canary@h/", "not a Redis URL"),
            ("redis://user:can#ary@h", "not a Redis URL"),
            ("redis://user:12#canary@h", "'#'"),
            ("rediss://h/#insecure", "always verified"),
            ("redis://user:12?canary@h", "'?'"),
            ("redis://user:12/canary@h", "Invalid database number"),
            ("redis:///0", "Missing hostname"),
            ("redis://canary@h", "no password"),
            ("redis://0.0.0.0", "wildcard"),
        ] {
            check(of_url(url), why);
        }
        check(RedisConfig { timeout: Duration::ZERO, ..of_url("redis://h") }, "timeout");
    }

    #[test]
    fn servers_have_an_address_a_login_and_a_database() {
        let Ok(Route::Direct(client)) = Route::of(&of_url("redis://me:p%40ss@[::1]:7000/3")) else {
            panic!("not direct")
        };
        let info = client.get_connection_info();
        assert_eq!(info.addr().to_string(), "::1:7000");
        let settings = info.redis_settings();
        assert_eq!((settings.username(), settings.password(), settings.db()), (Some("me"), Some("p@ss"), 3));
        assert!(Route::of(&of_url("unix:///run/redis.sock?db=2")).is_ok());
        assert!(Route::of(&of_url("rediss://h")).is_ok());
    }

    #[test]
    fn sentinels_and_a_master_go_together() {
        check(RedisConfig { master: None, ..with_sentinels("redis://", &["h"]) }, "no master");
        check(RedisConfig { sentinels: Vec::new(), ..with_sentinels("redis://h", &[]) }, "name sentinels");
        check(RedisConfig { sentinel_password: Some("canary".into()), ..of_url("redis://h") }, "name sentinels");
        for entry in ["", "redis://h:1", "user:canary@h", "h:1/0", "h:port"] {
            check(with_sentinels("redis://", &[entry]), "host:port");
        }
        check(with_sentinels("unix:///run/redis.sock", &["h"]), "unix socket");
        check(with_sentinels("redis://", &vec!["h"; SENTINELS_MAX + 1]), "sentinels_max");
        assert!(Route::of(&with_sentinels("redis://", &vec!["h"; SENTINELS_MAX])).is_ok());
    }

    #[test]
    fn with_sentinels_the_host_may_be_left_out() {
        for url in ["redis://me:pass@/4", "redis://me:pass@ignored:1/4"] {
            let Ok(Route::Sentinels(sentinels)) = Route::of(&with_sentinels(url, &["s1", "s2:1"])) else {
                panic!("no sentinels")
            };
            let nodes: Vec<_> = sentinels.nodes.iter().map(|node| node.get_connection_info()).collect();
            assert_eq!(nodes[0].addr().to_string(), "s1:26379");
            assert_eq!(nodes[1].addr().to_string(), "s2:1");
            assert_eq!(nodes[1].redis_settings().password(), None, "the master's password is not for sentinels");
            let master = sentinels.client_of("10.0.0.1".to_owned(), 6380).unwrap();
            let info = master.get_connection_info();
            assert_eq!(info.addr().to_string(), "10.0.0.1:6380");
            assert_eq!((info.redis_settings().password(), info.redis_settings().db()), (Some("pass"), 4));
        }
    }

    #[test]
    fn a_file_of_authorities_must_be_there_and_be_for_tls() {
        let folder = tempfile::tempdir().unwrap();
        let empty = folder.path().join("empty.pem");
        std::fs::write(&empty, "").unwrap();
        let with = |url, path| RedisConfig { ca_file: Some(path), ..of_url(url) };
        check(with("redis://h", empty.clone()), "rediss://");
        check(with("rediss://h", empty), "no certificate");
        check(with("rediss://h", folder.path().join("none.pem")), "cannot be read");
    }

    #[test]
    fn every_form_of_a_password_is_known_as_a_secret() {
        let config =
            RedisConfig { sentinel_password: Some("third".into()), ..with_sentinels("redis://me:fir%2Fst@/0", &["h"]) };
        let redact = |text: &str| secrets(&config).iter().fold(text.to_owned(), |text, secret| secret.redact(&text));
        assert_eq!(redact("fir%2Fst fir/st third redis://me:fir%2Fst@/0"), "*** *** *** ***");
    }
}
