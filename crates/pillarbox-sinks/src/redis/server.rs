use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pillarbox::{Failure, Result};
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, Cmd, ErrorKind, Pipeline, RedisError, Value};
use tokio::time::timeout;

use super::RedisConfig;
use super::refusal::{needs_new_connection, refusal_of_all, text_of};
use super::route::{Route, Sentinels, secrets};
use crate::Secret;

/// What a library says is cut to this many characters.
const SAID_CHARS_MAX: usize = 300;

/// One Redis and the connection to it, which is made on first use and again when it is broken.
pub(super) struct Server {
    route: Route,
    timeout: Duration,
    secrets: Vec<Secret>,
    current: Mutex<Current>,
    /// Held while a connection is made, so that one is made for all who wait.
    connecting: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Current {
    link: Option<Link>,
    made: u64,
}

/// A connection, known by its number.
#[derive(Clone)]
struct Link {
    connection: MultiplexedConnection,
    number: u64,
}

/// Why a pipeline has no replies.
enum Broken {
    /// The connection is lost.
    Lost(String),
    /// There was no answer in time.
    Silent,
}

impl Server {
    /// Reads the configuration and connects to nothing.
    pub(super) fn new(config: &RedisConfig) -> Result<Server> {
        Ok(Server {
            route: Route::of(config)?,
            timeout: config.timeout,
            secrets: secrets(config),
            current: Mutex::default(),
            connecting: tokio::sync::Mutex::default(),
        })
    }

    /// Sends commands at once and returns a reply for each, refusals among them.
    ///
    /// A connection from earlier that turns out to be lost is replaced once: most likely it was closed while it was not used. What was sent
    /// may then arrive twice.
    pub(super) async fn exchange(&self, pipeline: &Pipeline) -> std::result::Result<Vec<Value>, Failure> {
        let (mut link, is_new) = self.link().await?;
        let mut replies = self.ask(&link, pipeline).await;
        if !is_new && matches!(replies, Err(Broken::Lost(_))) {
            self.discard(&link);
            // If there is no other, the first one's loss is what is told: something was sent.
            if let Ok((other, _)) = self.link().await {
                link = other;
                replies = self.ask(&link, pipeline).await;
            }
        }
        let is_over = match &replies {
            Ok(replies) => replies.iter().any(needs_new_connection),
            Err(_) => true,
        };
        if is_over {
            self.discard(&link);
        }
        replies.map_err(|broken| self.unanswered(broken))
    }

    /// The reply to one command.
    pub(super) async fn command(&self, command: Cmd) -> std::result::Result<Value, Failure> {
        let mut pipeline = Pipeline::with_capacity(1);
        pipeline.add_command(command);
        let replies = self.exchange(&pipeline).await?;
        Ok(replies.into_iter().next().unwrap_or(Value::Nil))
    }

    /// Whether it answers.
    pub(super) async fn ping(&self) -> std::result::Result<(), Failure> {
        self.command(redis::cmd("PING")).await.and_then(|reply| self.greeted(&reply))
    }

    /// Gives the connection up.
    pub(super) fn close(&self) {
        self.current().link = None;
    }

    async fn ask(&self, link: &Link, pipeline: &Pipeline) -> std::result::Result<Vec<Value>, Broken> {
        let mut connection = link.connection.clone();
        let asked = connection.send_packed_commands(pipeline, 0, pipeline.len());
        match timeout(self.timeout, asked).await {
            Ok(Ok(replies)) if replies.len() == pipeline.len() => Ok(replies),
            Ok(Ok(_)) => Err(Broken::Lost("there are not as many replies as commands".to_owned())),
            Ok(Err(error)) => Err(Broken::Lost(self.said(&error))),
            Err(_) => Err(Broken::Silent),
        }
    }

    /// The connection, and whether it was made just now.
    async fn link(&self) -> std::result::Result<(Link, bool), Failure> {
        if let Some(link) = self.existing() {
            return Ok((link, false));
        }
        let made = timeout(self.timeout, async {
            let _turn = self.connecting.lock().await;
            match self.existing() {
                Some(link) => Ok((link, false)),
                None => self.connect().await.map(|connection| (self.keep(connection), true)),
            }
        });
        made.await.unwrap_or_else(|_| {
            Err(not_connected(format!(
                "no connection to Redis at {} within {:?}; is it reachable?",
                self.address(),
                self.timeout
            )))
        })
    }

    fn existing(&self) -> Option<Link> {
        self.current().link.clone()
    }

    fn keep(&self, connection: MultiplexedConnection) -> Link {
        let mut current = self.current();
        current.made += 1;
        let link = Link { connection, number: current.made };
        current.link = Some(link.clone());
        tracing::debug!(address = %self.address(), "connected to Redis");
        link
    }

    /// Forgets a connection, unless there is another already.
    fn discard(&self, link: &Link) {
        let mut current = self.current();
        if current.link.as_ref().is_some_and(|current| current.number == link.number) {
            current.link = None;
        }
    }

    async fn connect(&self) -> std::result::Result<MultiplexedConnection, Failure> {
        match &self.route {
            Route::Direct(client) => self.open(client).await,
            Route::Sentinels(sentinels) => self.open_master(sentinels).await,
        }
    }

    async fn open(&self, client: &Client) -> std::result::Result<MultiplexedConnection, Failure> {
        // Answers are waited for with a time-out of our own, for all commands of a pipeline together.
        let config = AsyncConnectionConfig::new().set_connection_timeout(Some(self.timeout)).set_response_timeout(None);
        let opened = client.get_multiplexed_async_connection_with_config(&config).await;
        let mut connection = opened.map_err(|error| self.cannot_open(client, &error))?;
        // Who lacks a login is told so now; in the middle of a pipeline the server may just close.
        let reply = connection.send_packed_command(&redis::cmd("PING")).await;
        self.greeted(&reply.map_err(|error| self.cannot_open(client, &error))?)?;
        Ok(connection)
    }

    /// Whether the reply to a greeting is a good one. A user who may not greet is let through: the login was right.
    fn greeted(&self, reply: &Value) -> std::result::Result<(), Failure> {
        match reply {
            Value::ServerError(error) if error.code() == "NOPERM" => Ok(()),
            Value::ServerError(error) => Err(refusal_of_all(error).unwrap_or_else(|| not_connected(text_of(error)))),
            _ => Ok(()),
        }
    }

    /// Asks the sentinels in turn, each with its share of the time: one may be down, or not know of a failover yet.
    async fn open_master(&self, sentinels: &Sentinels) -> std::result::Result<MultiplexedConnection, Failure> {
        let share = self.timeout / u32::try_from(sentinels.nodes.len()).unwrap_or(u32::MAX);
        let mut failure = not_connected("there is no sentinel");
        for node in &sentinels.nodes {
            match timeout(share, self.open_by(node, sentinels)).await {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(why)) => failure = why,
                Err(_) => {
                    let sentinel = node.get_connection_info().addr();
                    failure = not_connected(format!(
                        "the sentinel {sentinel}, or the master '{}' that it names, did not answer within {share:?}",
                        sentinels.master
                    ));
                }
            }
        }
        Err(failure)
    }

    async fn open_by(
        &self,
        node: &Client,
        sentinels: &Sentinels,
    ) -> std::result::Result<MultiplexedConnection, Failure> {
        let (host, port) = self.ask_sentinel(node, &sentinels.master).await?;
        let client = sentinels.client_of(host, port).map_err(|error| not_connected(self.said(&error)))?;
        let mut connection = self.open(&client).await?;
        // A user who may not ask is let through: a replica refuses writes by itself.
        let role = connection.send_packed_command(&redis::cmd("ROLE")).await;
        if let Ok(Value::Array(role)) = role
            && role.first() != Some(&Value::BulkString(b"master".to_vec()))
        {
            let address = client.get_connection_info().addr();
            return Err(not_connected(format!(
                "the sentinel {} names {address} as the master '{}', which it is not (yet); a failover may be under way",
                node.get_connection_info().addr(),
                sentinels.master
            )));
        }
        Ok(connection)
    }

    async fn ask_sentinel(&self, node: &Client, master: &str) -> std::result::Result<(String, u16), Failure> {
        let sentinel = node.get_connection_info().addr();
        let mut connection = self.open(node).await?;
        let mut command = redis::cmd("SENTINEL");
        command.arg("GET-MASTER-ADDR-BY-NAME").arg(master);
        let known: std::result::Result<Option<(String, u16)>, RedisError> = command.query_async(&mut connection).await;
        match known {
            Ok(Some(address)) => Ok(address),
            Ok(None) => {
                Err(not_connected(format!("the sentinel {sentinel} knows no master '{master}'; check its name")))
            }
            Err(error) => Err(not_connected(format!(
                "the sentinel {sentinel} does not say where '{master}' is: {}",
                self.said(&error)
            ))),
        }
    }

    fn cannot_open(&self, client: &Client, error: &RedisError) -> Failure {
        let address = client.get_connection_info().addr();
        if error.kind() == ErrorKind::AuthenticationFailed {
            let message = format!("Redis at {address} refused the user or the password; check them in the url");
            return Failure { kind: "auth", ..Failure::sink(message) };
        }
        not_connected(format!(
            "no connection to Redis at {address}: {}; is it running and reachable?",
            self.said(error)
        ))
    }

    fn unanswered(&self, broken: Broken) -> Failure {
        match broken {
            Broken::Lost(why) => {
                let address = self.address();
                Failure::unclear(
                    "lost",
                    format!("the connection to Redis at {address} was lost before it answered: {why}"),
                )
            }
            Broken::Silent => {
                let (address, timeout) = (self.address(), self.timeout);
                Failure::unclear("timeout", format!("Redis at {address} did not answer within {timeout:?}"))
            }
        }
    }

    /// What the library or the server says, without what is not to be shown.
    fn said(&self, error: &RedisError) -> String {
        let text = match error.clone().into_server_errors().as_deref() {
            Some([(_, error), ..]) => text_of(error),
            _ => error.to_string(),
        };
        let text = self.secrets.iter().fold(text, |text, secret| secret.redact(&text));
        text.chars().take(SAID_CHARS_MAX).collect()
    }

    fn address(&self) -> String {
        match &self.route {
            Route::Direct(client) => client.get_connection_info().addr().to_string(),
            Route::Sentinels(sentinels) => format!("the master '{}' of the sentinels", sentinels.master),
        }
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("address", &self.address())
            .field("timeout", &self.timeout)
            .finish_non_exhaustive()
    }
}

fn not_connected(message: impl Into<String>) -> Failure {
    Failure::unreachable("connect", message)
}
