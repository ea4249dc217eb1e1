use std::sync::{Arc, Mutex};

use pillarbox_testkit::redis::Server;
use pillarbox_testkit::sink_suite::Received;
use redis::aio::MultiplexedConnection;
use redis::{AsyncConnectionConfig, Client, PushInfo, PushKind, RedisResult};
use tokio::sync::{Notify, mpsc, watch};

use super::{PATIENCE, own_name};

/// Fields of an entry, in order.
pub(super) type Fields = Vec<(String, Vec<u8>)>;

/// A client that is subscribed to a channel, and subscribes again when its server was restarted.
pub(super) struct Subscriber {
    channel: String,
    messages: Arc<Mutex<Vec<String>>>,
    /// How many messages have come.
    count: watch::Receiver<usize>,
    /// How often the channel was subscribed to.
    subscribed: watch::Receiver<usize>,
    /// The server, which ended the connection, runs again.
    restarted: Arc<Notify>,
    task: tokio::task::JoinHandle<()>,
}

impl Subscriber {
    pub(super) fn start(url: &str, channel: &str) -> Self {
        let client = Client::open(format!("{url}/?protocol=resp3")).unwrap();
        let (count_sender, count) = watch::channel(0);
        let (subscribed_sender, subscribed) = watch::channel(0);
        let messages = Arc::new(Mutex::new(Vec::new()));
        let restarted = Arc::<Notify>::default();
        let (kept, runs, channel) = (messages.clone(), restarted.clone(), channel.to_owned());
        let name = channel.clone();
        let task = tokio::spawn(async move {
            loop {
                let (_connection, mut pushes) = subscribe(&client, &name).await.unwrap();
                subscribed_sender.send_modify(|count| *count += 1);
                while let Some(message) = next_message(&mut pushes).await {
                    kept.lock().unwrap().push(message);
                    count_sender.send_modify(|count| *count += 1);
                }
                runs.notified().await;
            }
        });
        Subscriber { channel, messages, count, subscribed, restarted, task }
    }

    /// Subscribes again, to a server that was restarted and answers.
    pub(super) async fn subscribe_again(&self) {
        let before = *self.subscribed.borrow();
        self.restarted.notify_one();
        self.until_subscribed(before + 1).await;
    }

    pub(super) async fn until_subscribed(&self, times: usize) {
        let mut subscribed = self.subscribed.clone();
        let waited = tokio::time::timeout(PATIENCE, subscribed.wait_for(|count| *count >= times)).await;
        waited.expect("the channel is subscribed to in time").unwrap();
    }

    /// All messages that were published before this call.
    pub(super) async fn received(&self, server: &Server) -> Vec<String> {
        let fence = own_name();
        assert_eq!(server.cli(&["PUBLISH", &self.channel, &fence]).unwrap(), "1", "somebody is subscribed");
        let is_there = |_: &usize| self.messages.lock().unwrap().contains(&fence);
        let waited = tokio::time::timeout(PATIENCE, self.count.clone().wait_for(is_there)).await.map(drop);
        waited.expect("what was published arrives");
        let messages = self.messages.lock().unwrap();
        messages.iter().filter(|message| message.starts_with('{')).cloned().collect()
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn subscribe(
    client: &Client,
    channel: &str,
) -> RedisResult<(MultiplexedConnection, mpsc::UnboundedReceiver<PushInfo>)> {
    let (sender, pushes) = mpsc::unbounded_channel();
    let config = AsyncConnectionConfig::new().set_push_sender(sender);
    let mut connection = client.get_multiplexed_async_connection_with_config(&config).await?;
    connection.subscribe(channel).await?;
    Ok((connection, pushes))
}

/// None if the connection is lost.
async fn next_message(pushes: &mut mpsc::UnboundedReceiver<PushInfo>) -> Option<String> {
    loop {
        let push = pushes.recv().await?;
        match push.kind {
            PushKind::Message => return Some(redis::from_redis_value(push.data.into_iter().nth(1)?).unwrap()),
            PushKind::Disconnection => return None,
            _ => {}
        }
    }
}

/// The entries of a stream, as fields.
pub(super) async fn raw_entries(url: String, stream: &str) -> Vec<Fields> {
    let mut connection = Client::open(url).unwrap().get_multiplexed_async_connection().await.unwrap();
    connection.set_response_timeout(PATIENCE);
    let mut command = redis::cmd("XRANGE");
    command.arg(stream).arg("-").arg("+");
    let entries: Vec<(String, Fields)> = command.query_async(&mut connection).await.unwrap();
    entries.into_iter().map(|(_, fields)| fields).collect()
}

/// The events in a stream, put together again.
pub(super) async fn entries(url: String, stream: &str) -> Vec<Received> {
    raw_entries(url, stream).await.into_iter().map(received).collect()
}

fn received(fields: Fields) -> Received {
    let (mut attributes, mut headers, mut payload) = (Vec::new(), Vec::new(), None);
    for (name, value) in fields {
        if name == "data" {
            assert_eq!(payload.replace(value), None, "the payload is there twice");
            continue;
        }
        let value = String::from_utf8(value).unwrap();
        match name.strip_prefix("ce_") {
            Some(attribute) => attributes.push((attribute.to_owned(), value)),
            None => headers.push((name, value)),
        }
    }
    Received::from_binary(attributes, headers, payload).unwrap()
}
