use std::collections::{BTreeSet, HashMap};
use std::ops::Deref;
use std::str::FromStr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use pillarbox::store::InstanceId;
use pillarbox::{Error, ErrorKind, Result};
use tokio::sync::{MutexGuard, mpsc, watch};
use tokio_postgres::config::Host;
use tokio_postgres::error::{Severity, SqlState};
use tokio_postgres::{AsyncMessage, CancelToken, Client, Config, Notification, SimpleQueryMessage, Statement};
use xxhash_rust::xxh3::xxh3_64;

use crate::error::{Db, DbError, kind_of_code, message_of_ended};

/// The schema of the log unless the URL says `?schema=…`.
pub(crate) const SCHEMA: &str = "pillarbox";

/// PostgreSQL's port unless the URL says another.
const PORT: u16 = 5432;

/// How long a connection may take to be made, unless the URL says `connect_timeout`.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// How long a relay waits for an answer before it gives the connection up.
const CALL_TIMEOUT: Duration = Duration::from_secs(30);

/// What every session is pinned to, whatever the database, the role or the environment say. No statement of ours waits for long on a
/// lock unless it says so itself. What the owner of a lane has locked when it freezes is freed by the instance that takes the lane over.
/// Others lock lanes too: relays that join, retention, commands. Those are not taken over, so the server ends a transaction of theirs that
/// stands still for a second, of a command about many rows for ten; what is between two statements of ours is never more than a look at
/// what the first one said. Compiling a statement of ours takes longer than it takes.
const SETTINGS: &str = "-c synchronous_commit=on -c statement_timeout=0 -c lock_timeout=10s \
    -c idle_in_transaction_session_timeout=1s -c idle_session_timeout=0 -c default_transaction_isolation=read\\ committed \
    -c default_transaction_read_only=off -c client_encoding=UTF8 -c TimeZone=UTC -c client_min_messages=warning \
    -c tcp_keepalives_idle=5 -c tcp_keepalives_interval=2 -c tcp_keepalives_count=3 -c tcp_user_timeout=10000 -c jit=off";

/// Ends a statement whose client has gone; not every server's system can tell.
const CHECK_CLIENT: &str = sql!(session, "check_client");

/// The same for what older servers do not know and would refuse; that a database which does not check its text sends it as it is; and whether what was asked for has arrived, or was dropped on the way.
const LATER_SETTINGS: &str = sql!(session, "later_settings");

/// What to do about a pooler.
pub(crate) const DIRECTLY: &str =
    "give relays and commands a direct connection to the server (publishers may use the pooler)";

/// Schemas that belong to others, besides those that begin with `pg_`.
const FOREIGN_SCHEMAS: [&str; 2] = ["public", "information_schema"];

/// The words that cannot be a schema's name without quotes: `pg_get_keywords()`, `catcode` R and T, of PostgreSQL 14 to 18.
const RESERVED: &str = "all analyse analyze and any array as asc asymmetric authorization binary both case cast check \
    collate collation column concurrently constraint create cross current_catalog current_date current_role \
    current_schema current_time current_timestamp current_user default deferrable desc distinct do else end except false \
    fetch for foreign freeze from full grant group having ilike in initially inner intersect into is isnull join lateral \
    leading left like limit localtime localtimestamp natural not notnull null offset on only or order outer overlaps \
    placing primary references returning right select session_user similar some symmetric system_user table tablesample \
    then to trailing true union unique user using variadic verbose when where window with";

/// How the connection is secured; the names and meanings of libpq.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SslMode {
    /// Never.
    Disable,
    /// If the server can; the certificate is not looked at. The default.
    Prefer,
    /// Always; the certificate is not looked at, unless `sslrootcert` names an authority: then as [`VerifyCa`](SslMode::VerifyCa).
    Require,
    /// Always, with a certificate of a trusted authority.
    VerifyCa,
    /// Always, with a certificate of a trusted authority for this host.
    VerifyFull,
}

/// Where a log is: a server, a database, a schema, and how to get there. The password never shows.
#[derive(Clone)]
pub struct PgConfig {
    pub(crate) postgres: Config,
    pub(crate) schema: String,
    pub(crate) ssl_mode: SslMode,
    #[cfg_attr(not(feature = "tls"), allow(dead_code, reason = "only TLS looks at it"))]
    pub(crate) ssl_root_cert: Option<String>,
}

impl std::fmt::Debug for PgConfig {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PgConfig").field("place", &self.place()).finish_non_exhaustive()
    }
}

impl FromStr for PgConfig {
    type Err = Error;

    /// Reads `postgres://user:password@host:port/database?…` with libpq's parameters, and `schema`. What it leaves out comes from where
    /// libpq takes it: a service file (`service`, `PGSERVICE`), the variables `PGHOST`, `PGPORT`, `PGUSER`, `PGPASSWORD`, `PGDATABASE`,
    /// `PGSSLMODE` and so on, and for the password `~/.pgpass`.
    fn from_str(url: &str) -> Result<Self> {
        let invalid = |message: String| Error::new(ErrorKind::Invalid, message);
        if !["postgres://", "postgresql://"].iter().any(|scheme| url.starts_with(scheme)) {
            return Err(invalid(
                "the database URL cannot be read; write it like postgres://user@host:5432/database".to_owned(),
            ));
        }
        let Completed { url, mut own, passfile } = Surroundings::of_process().complete(url)?;
        let schema = own.remove("schema").unwrap_or_else(|| SCHEMA.to_owned());
        check_schema(&schema)?;
        let ssl_root_cert = own.remove("sslrootcert");
        let ssl_mode = ssl_mode_of(own.get("sslmode").map(String::as_str), ssl_root_cert.as_deref())?;
        let mut postgres: Config = url.parse().map_err(|source: tokio_postgres::Error| {
            // The source may quote the URL, and with it the password.
            let what = std::error::Error::source(&source).map_or_else(|| source.to_string(), ToString::to_string);
            invalid(format!(
                "the database URL cannot be read ({what}); write it like postgres://user@host:5432/database"
            ))
        })?;
        if postgres.get_connect_timeout().is_none() {
            postgres.connect_timeout(CONNECT_TIMEOUT);
        }
        postgres.ssl_mode(match ssl_mode {
            SslMode::Disable => tokio_postgres::config::SslMode::Disable,
            SslMode::Prefer => tokio_postgres::config::SslMode::Prefer,
            _ => tokio_postgres::config::SslMode::Require,
        });
        postgres
            .keepalives_idle(Duration::from_secs(5))
            .keepalives_interval(Duration::from_secs(2))
            .keepalives_retries(3);
        postgres.tcp_user_timeout(Duration::from_secs(10));
        let mut config = PgConfig { postgres, schema, ssl_mode, ssl_root_cert };
        config.look_up_password(passfile.as_deref())?;
        Ok(config)
    }
}

impl PgConfig {
    /// The schema of the log.
    pub fn schema(&self) -> &str {
        &self.schema
    }

    /// The server and database for people: no user, no password.
    pub fn place(&self) -> String {
        let (host, port) = self.servers().into_iter().next().unwrap_or(("localhost".into(), PORT));
        let database = self.postgres.get_dbname().or(self.postgres.get_user()).unwrap_or("");
        format!("postgres://{host}:{port}/{database}")
    }

    /// The password of libpq's password file, where nothing else has named one. All servers of a URL are offered the same one, so
    /// that no server is shown the password of another.
    fn look_up_password(&mut self, passfile: Option<&std::path::Path>) -> Result<()> {
        let Some(file) = passfile.filter(|_| self.postgres.get_password().is_none()) else { return Ok(()) };
        let user = self.postgres.get_user().map(str::to_owned);
        let user = user.or_else(|| std::env::var("USER").or_else(|_| std::env::var("LOGNAME")).ok());
        let Some(user) = user else { return Ok(()) };
        let database = self.postgres.get_dbname().unwrap_or(&user).to_owned();
        let of = |(host, port): (String, u16)| surroundings::password(file, &host, port, &database, &user);
        let passwords: BTreeSet<Option<String>> = self.servers().into_iter().map(of).collect();
        if passwords.len() > 1 {
            return Err(Error::new(
                ErrorKind::Invalid,
                format!(
                    "{} has not the same password for all hosts of the database URL; give them one, or name one host",
                    file.display()
                ),
            ));
        }
        if let Some(password) = passwords.into_iter().flatten().next() {
            self.postgres.password(password);
        }
        Ok(())
    }

    /// The hosts and ports that are tried, in order.
    pub(crate) fn servers(&self) -> Vec<(String, u16)> {
        let ports = self.postgres.get_ports();
        // One port is for all hosts.
        let port = |at: usize| ports.get(at).or(ports.first()).copied().unwrap_or(PORT);
        let name = |host: &Host| match host {
            Host::Tcp(name) => name.clone(),
            #[allow(unreachable_patterns, reason = "sockets are not everywhere")]
            Host::Unix(path) => path.display().to_string(),
        };
        let hosts = self.postgres.get_hosts().iter().map(name);
        let addresses = self.postgres.get_hostaddrs().iter().map(ToString::to_string);
        let mut named: Vec<String> = hosts.collect();
        if named.is_empty() {
            named.extend(addresses);
        }
        named.into_iter().enumerate().map(|(at, host)| (host, port(at))).collect()
    }

    /// A connection of an application's own, secured as the URL says. It ends with the client.
    pub async fn connect(&self, application_name: &str) -> Result<Client> {
        Ok(self.connect_with_driver(application_name).await?.0)
    }

    /// As [`connect`](PgConfig::connect), with the task that keeps the connection going, and what it hears of commits that did not wait for
    /// the standbys. The task ends with the client, after the server has answered what it still owes; aborted, it ends the connection
    /// at once, also that to a server which stands still.
    pub async fn connect_with_driver(
        &self,
        application_name: &str,
    ) -> Result<(Client, tokio::task::JoinHandle<()>, Unreplicated)> {
        let mut postgres = self.postgres.clone();
        postgres.application_name(application_name);
        let unasked = Unasked::default();
        let unreplicated = unasked.unreplicated.clone();
        let (client, driver) = tls::connect(&postgres, &Arc::new(self.clone()), unasked).await?;
        Ok((client, tokio::spawn(driver), unreplicated))
    }

    /// How long a connection may take to be made: each address of each host has the time that is set.
    fn patience(&self) -> Duration {
        const ADDRESSES_A_HOST: u32 = 2;
        let each = self.postgres.get_connect_timeout().copied().unwrap_or(CONNECT_TIMEOUT);
        each * (self.postgres.get_hosts().len().max(1) as u32 * ADDRESSES_A_HOST)
    }

    /// The first half of the keys of all advisory locks of this log; the second is [`BELL`], [`KEEPER`], or an
    /// instance's number.
    pub(crate) fn lock_class(&self) -> i32 {
        lock_class(&self.schema)
    }
}

/// See [`PgConfig::lock_class`]; above 0 and even, since the next one is that of ordered keys.
pub(crate) fn lock_class(schema: &str) -> i32 {
    (xxh3_64(format!("pillarbox {schema}").as_bytes()) as i32) & 0x7fff_fffc
}

/// The second half of the key of the lock that a sleeping relay has.
pub(crate) const BELL: i32 = 0;

/// The same of the lock of the relay that looks after the doorbell: no instance gets this number.
pub(crate) const KEEPER: i32 = i32::MAX;

/// Refuses a name that would have to be quoted, and a schema in which others may create what we then call by name.
pub(crate) fn check_schema(schema: &str) -> Result<()> {
    let foreign = FOREIGN_SCHEMAS.contains(&schema) || schema.starts_with("pg_");
    if is_plain(schema) && !foreign && !RESERVED.split_whitespace().any(|word| word == schema) {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::Invalid,
        format!(
            "'{schema}' cannot be the schema's name; use 1 to 48 small letters, digits and '_', not beginning with a digit or \
             'pg_', no word of SQL, and not public: the log has its schema for itself"
        ),
    ))
}

fn is_plain(name: &str) -> bool {
    let first = name.chars().next().is_some_and(|c| c.is_ascii_lowercase() || c == '_');
    first && name.len() <= 48 && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_')
}

/// The mode, with what an authority that is named makes of it: as with libpq, `require` then verifies as `verify-ca` does, and the
/// authorities of the system, which give certificates to every applicant, are for `verify-full` alone.
fn ssl_mode_of(mode: Option<&str>, root_cert: Option<&str>) -> Result<SslMode> {
    let refuse = |message: String| Err(Error::new(ErrorKind::Invalid, message));
    let of_system = root_cert == Some("system");
    Ok(match mode {
        None if of_system => SslMode::VerifyFull,
        Some("verify-full") => SslMode::VerifyFull,
        Some(weak @ ("disable" | "allow" | "prefer" | "require" | "verify-ca")) if of_system => {
            return refuse(format!("sslmode={weak} is too weak for sslrootcert=system; use sslmode=verify-full"));
        }
        None | Some("allow" | "prefer") => SslMode::Prefer,
        Some("disable") => SslMode::Disable,
        Some("require") if root_cert.is_some() => SslMode::VerifyCa,
        Some("require") => SslMode::Require,
        Some("verify-ca") => SslMode::VerifyCa,
        Some(other) => {
            return refuse(format!(
                "sslmode={other} is not known; use disable, prefer, require, verify-ca or verify-full"
            ));
        }
    })
}

/// Undoes the per cent signs of a URL.
fn decode(text: &str) -> String {
    let (bytes, mut out, mut at) = (text.as_bytes(), Vec::new(), 0);
    while at < bytes.len() {
        let code = (bytes[at] == b'%').then(|| text.get(at + 1..at + 3)).flatten();
        match code.and_then(|code| u8::from_str_radix(code, 16).ok()) {
            Some(byte) => {
                out.push(byte);
                at += 3;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// Where the server says that a commit no longer waits for the synchronous standbys, since it was cancelled: the commit succeeds
/// nevertheless, with a warning. The text of the warning depends on the server's language, this name does not.
const STANDBY_WAIT: &str = "SyncRepWaitForLSN";

/// Where messages go that the server sends unasked.
#[derive(Default)]
pub(crate) struct Unasked {
    notifications: Option<mpsc::UnboundedSender<Notification>>,
    unreplicated: Unreplicated,
    /// The code and the words with which the server ended the session while nothing was asked.
    farewell: Arc<OnceLock<(String, String)>>,
}

/// Counts the commits of a connection that were cancelled while they waited for the synchronous standbys: they succeed nevertheless, and what
/// they wrote may be lost in a failover. The server says so in a warning, which `client_min_messages` must not hide.
#[derive(Debug, Clone, Default)]
pub struct Unreplicated(Arc<AtomicU64>);

impl Unreplicated {
    /// How many there were. It is complete when the answer to a commit is there.
    pub fn count(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// One session with the server. Dropping it ends it.
pub(crate) struct Session {
    client: Client,
    unreplicated: Unreplicated,
    farewell: Arc<OnceLock<(String, String)>>,
    /// Never used twice in this process; see `Page::session`.
    pub(crate) number: u64,
    statements: Mutex<HashMap<&'static str, Statement>>,
    /// True once the connection has ended, for whatever reason.
    closed: watch::Receiver<bool>,
    driver: tokio::task::JoinHandle<()>,
    /// For cancelling what it waits for.
    cancel: CancelToken,
    config: Arc<PgConfig>,
}

impl Drop for Session {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Deref for Session {
    type Target = Client;

    fn deref(&self) -> &Client {
        &self.client
    }
}

impl Session {
    /// Connects. `name` becomes the `application_name`, which begins with `pillarbox`; notifications go to `notifications`.
    pub(crate) async fn connect(
        config: &Arc<PgConfig>,
        name: &str,
        notifications: Option<mpsc::UnboundedSender<Notification>>,
    ) -> Db<Self> {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        let mut postgres = config.postgres.clone();
        let own = postgres.get_options().unwrap_or_default().to_owned();
        // PostgreSQL's own schema comes before all; temporary tables would too, if they were not named last.
        let search_path = format!("{},pg_temp", config.schema);
        postgres.options(format!("{own} {SETTINGS} -c search_path={search_path}"));
        postgres.application_name(name);
        // The client's own time-out ends with the first packet, and a frozen server sends no second one.
        let patience = config.patience();
        let unasked = Unasked { notifications, ..Unasked::default() };
        let (unreplicated, farewell) = (unasked.unreplicated.clone(), unasked.farewell.clone());
        let connecting = tls::connect(&postgres, config, unasked);
        let unanswered = |_| {
            let message = format!("PostgreSQL did not answer within {patience:?} to a new connection");
            DbError::own(ErrorKind::Unavailable, message)
        };
        let connected = tokio::time::timeout(patience, connecting).await.map_err(unanswered)?;
        let (client, driver) = connected.map_err(refused_by_pooler)?;
        let (sender, closed) = watch::channel(false);
        let driver = tokio::spawn(async move {
            driver.await;
            sender.send_replace(true);
        });
        let cancel = client.cancel_token();
        let session = Session {
            client,
            unreplicated,
            farewell,
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            statements: Mutex::default(),
            closed,
            driver,
            cancel,
            config: config.clone(),
        };
        let settings =
            tokio::time::timeout(patience, session.simple_query(LATER_SETTINGS)).await.map_err(unanswered)??;
        check_settings(&settings, &search_path)?;
        let checked = tokio::time::timeout(patience, session.batch_execute(CHECK_CLIENT)).await.map_err(unanswered)?;
        if let Err(error) = checked {
            tracing::debug!(%error, "the server cannot tell when a client has gone");
        }
        Ok(session)
    }

    /// A statement, prepared once per session.
    pub(crate) async fn statement(&self, sql: &'static str) -> Db<Statement> {
        let known = self.statements.lock().unwrap_or_else(PoisonError::into_inner).get(sql).cloned();
        if let Some(statement) = known {
            return Ok(statement);
        }
        let statement = self.client.prepare(sql).await?;
        self.statements.lock().unwrap_or_else(PoisonError::into_inner).insert(sql, statement.clone());
        Ok(statement)
    }

    /// A transaction. Dropping the returned value without committing rolls it back.
    pub(crate) async fn begin(&mut self) -> Db<tokio_postgres::Transaction<'_>> {
        Ok(self
            .client
            .build_transaction()
            .isolation_level(tokio_postgres::IsolationLevel::ReadCommitted)
            .start()
            .await?)
    }

    /// What the session was made for.
    pub(crate) fn config(&self) -> &PgConfig {
        &self.config
    }

    /// See [`Unreplicated`].
    pub(crate) fn unreplicated(&self) -> u64 {
        self.unreplicated.count()
    }

    /// Lets a command say why the server ended it, also where that was between two statements: the client knows only that the connection
    /// is closed.
    pub(crate) fn explain<T>(&self, done: Db<T>) -> Db<T> {
        done.map_err(|error| {
            let DbError::Postgres(lost) = &error else { return error };
            let said = match lost.as_db_error() {
                Some(said) if said.parsed_severity() == Some(Severity::Fatal) => {
                    // The connection closes a moment later; it is not used any more.
                    let _ = self.farewell.set((said.code().code().to_owned(), said.message().to_owned()));
                    Some((said.code().code(), said.message()))
                }
                Some(_) => None,
                None => self.farewell.get().filter(|_| lost.is_closed()).map(|(code, said)| (&**code, &**said)),
            };
            match said {
                Some((code, said)) => DbError::own(kind_of_code(code), message_of_ended(code, said)),
                None => error,
            }
        })
    }

    /// Becomes true when the connection has ended.
    pub(crate) fn closed(&self) -> watch::Receiver<bool> {
        self.closed.clone()
    }

    /// Cancels the statement that this session is waiting for.
    pub(crate) fn canceller(&self) -> Canceller {
        Canceller { token: self.cancel.clone(), config: self.config.clone() }
    }
}

/// Cancels what a session waits for, from elsewhere.
#[derive(Clone)]
pub(crate) struct Canceller {
    token: CancelToken,
    config: Arc<PgConfig>,
}

impl Canceller {
    pub(crate) async fn cancel(&self) -> Db<()> {
        tls::cancel(&self.token, &self.config).await
    }
}

/// A connection that is made when it is needed, and made again when it was lost.
pub(crate) struct Link {
    config: Arc<PgConfig>,
    name: Mutex<String>,
    /// What is run first in every session.
    setup: &'static str,
    /// The instance that this is a connection of. Its lock is held on the server that it joined, and nowhere else.
    instance: Mutex<Option<InstanceId>>,
    used: Mutex<Instant>,
    session: tokio::sync::Mutex<Option<Session>>,
}

impl Link {
    pub(crate) fn new(config: Arc<PgConfig>, name: &str, setup: &'static str) -> Self {
        Link {
            config,
            name: Mutex::new(name.to_owned()),
            setup,
            instance: Mutex::new(None),
            used: Mutex::new(Instant::now()),
            session: tokio::sync::Mutex::new(None),
        }
    }

    /// Under which name the next connection is made.
    pub(crate) fn rename(&self, name: String) {
        *self.name.lock().unwrap_or_else(PoisonError::into_inner) = name;
    }

    /// Sets the instance that this connection belongs to, and its name. This includes the present connection, unless it is in use or was
    /// lost.
    pub(crate) async fn belongs_to(&self, instance: InstanceId, name: String) -> Db<()> {
        self.rename(name.clone());
        *self.instance.lock().unwrap_or_else(PoisonError::into_inner) = Some(instance);
        let Ok(session) = self.session.try_lock() else { return Ok(()) };
        if let Some(session) = session.as_ref().filter(|session| !session.is_closed()) {
            session.execute(sql!(session, "set_name"), &[&name]).await?;
        }
        Ok(())
    }

    /// Ends a session that was not used for this long.
    pub(crate) fn close_if_idle(&self, since: Duration) {
        let idle = self.used.lock().unwrap_or_else(PoisonError::into_inner).elapsed() >= since;
        if let Ok(mut session) = self.session.try_lock()
            && idle
        {
            *session = None;
        }
    }

    /// Makes this the connection of no instance, and ends the present one.
    pub(crate) async fn belongs_to_nobody(&self) {
        *self.instance.lock().unwrap_or_else(PoisonError::into_inner) = None;
        self.close().await;
    }

    /// After a failover a name may lead to another server, which has a past of its own.
    async fn check_server(&self, session: &Session) -> Db<()> {
        let Some(instance) = *self.instance.lock().unwrap_or_else(PoisonError::into_inner) else { return Ok(()) };
        let rows = session.query(sql!(instance, "locks"), &[&i64::from(self.config.lock_class())]).await?;
        if rows.iter().any(|row| row.get::<_, i64>("instance") == instance.0) {
            return Ok(());
        }
        let message = format!(
            "instance {} has ended: a new connection led to a server that does not know it; joining again",
            instance.0
        );
        Err(DbError::own(ErrorKind::Ended, message))
    }

    /// The session, for one caller at a time.
    pub(crate) async fn session(&self) -> Db<MappedSession<'_>> {
        let mut slot = self.session.lock().await;
        *self.used.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        if slot.as_ref().is_none_or(|session| session.client.is_closed() || session.farewell.get().is_some()) {
            *slot = None;
            let name = self.name.lock().unwrap_or_else(PoisonError::into_inner).clone();
            let session = Session::connect(&self.config, &name, None).await?;
            session.batch_execute(self.setup).await?;
            self.check_server(&session).await?;
            *slot = Some(session);
        }
        Ok(MutexGuard::map(slot, |slot| slot.as_mut().expect("made above")))
    }

    /// Waits for work that uses this link, but not for ever: a server or a network that is frozen says nothing at all.
    pub(crate) async fn bounded<T>(&self, work: impl Future<Output = Db<T>>) -> Db<T> {
        match tokio::time::timeout(CALL_TIMEOUT, work).await {
            Ok(done) => done,
            Err(_) => {
                self.close().await;
                let message = format!("PostgreSQL did not answer within {CALL_TIMEOUT:?}; the connection was given up");
                Err(DbError::own(ErrorKind::Unavailable, message))
            }
        }
    }

    /// Ends the session, if there is one; the next call makes another.
    pub(crate) async fn close(&self) {
        *self.session.lock().await = None;
    }
}

/// PgBouncer refuses settings that it does not know with a code that otherwise means a broken connection.
fn refused_by_pooler(error: DbError) -> DbError {
    match &error {
        DbError::Postgres(refused) if refused.code() == Some(&SqlState::PROTOCOL_VIOLATION) => {
            let said = refused.as_db_error().map_or_else(|| refused.to_string(), |said| said.message().to_owned());
            let message = format!("a pooler refused the settings of a session ({said}); {DIRECTLY}");
            DbError::own(ErrorKind::Invalid, message)
        }
        _ => error,
    }
}

/// A pooler can also be told to drop them in silence.
fn check_settings(rows: &[SimpleQueryMessage], search_path: &str) -> Db<()> {
    let arrived = rows.iter().any(|message| match message {
        SimpleQueryMessage::Row(row) => row.get("search_path") == Some(search_path),
        _ => false,
    });
    if arrived {
        return Ok(());
    }
    let message = format!("something between here and PostgreSQL drops the settings of a session; {DIRECTLY}");
    Err(DbError::own(ErrorKind::Invalid, message))
}

/// The session of a [`Link`] while it is used.
pub(crate) type MappedSession<'a> = tokio::sync::MappedMutexGuard<'a, Session>;

/// Polls the connection until it ends, handing on what the server sends unasked.
async fn drive<S, T>(mut connection: tokio_postgres::Connection<S, T>, unasked: Unasked)
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
    T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
{
    loop {
        match std::future::poll_fn(|context| connection.poll_message(context)).await {
            Some(Ok(AsyncMessage::Notification(notification))) => {
                if let Some(sender) = &unasked.notifications {
                    // Nobody may be listening any more.
                    let _ = sender.send(notification);
                }
            }
            Some(Ok(AsyncMessage::Notice(notice))) => {
                if notice.routine() == Some(STANDBY_WAIT) {
                    unasked.unreplicated.0.fetch_add(1, Ordering::Relaxed);
                }
                tracing::debug!(notice = notice.message(), "PostgreSQL says");
            }
            Some(Ok(_)) => {}
            Some(Err(error)) => {
                if let Some(said) = error.as_db_error() {
                    let _ = unasked.farewell.set((said.code().code().to_owned(), said.message().to_owned()));
                }
                tracing::debug!(%error, "a connection to PostgreSQL was lost");
                return;
            }
            None => return,
        }
    }
}

mod surroundings;
mod tls;

use surroundings::{Completed, Surroundings};
