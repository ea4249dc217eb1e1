use std::collections::HashMap;

use pillarbox::sink::{Batch, Fault, Outcome};
use pillarbox::{Event, Failure};
use redis::{Cmd, Pipeline, Value};

use super::refusal::too_large;
use super::server::Server;

/// No server's `proto-max-bulk-len` is less. A longer argument may make it close the connection, so its command goes alone.
const LARGE_BYTES: usize = 1024 * 1024;

/// What delivers one event.
pub(super) struct Command {
    /// The command.
    pub(super) command: Cmd,
    /// The length of its longest argument.
    pub(super) longest: usize,
}

/// Sends a command for each event, most in one pipeline, and judges the replies one by one.
pub(super) async fn deliver(
    server: &Server,
    batch: &Batch,
    mut command: impl FnMut(&Event) -> Result<Command, Failure>,
    judge: impl Fn(Value) -> Outcome,
) -> Vec<Outcome> {
    let mut outcomes = vec![Outcome::NotTried; batch.events.len()];
    let mut groups = vec![Group::default()];
    for (index, attempt) in batch.events.iter().enumerate() {
        match command(&attempt.event) {
            Ok(command) if command.longest > LARGE_BYTES => groups.push(Group::of(index, command)),
            Ok(command) => groups[0].add(index, command),
            Err(failure) => outcomes[index] = Outcome::Failed(failure),
        }
    }
    for group in groups.into_iter().filter(|group| !group.events.is_empty()) {
        match send(server, &group).await {
            Ok(replies) => group.events.iter().zip(replies).for_each(|(index, reply)| outcomes[*index] = judge(reply)),
            Err(failure) => {
                group.fail(&failure, &mut outcomes);
                if failure.fault != Fault::Event {
                    break;
                }
            }
        }
    }
    outcomes
}

/// Commands that go together, and the places of their events in the batch.
struct Group {
    pipeline: Pipeline,
    events: Vec<usize>,
    longest: usize,
}

impl Default for Group {
    fn default() -> Self {
        Group { pipeline: Pipeline::new(), events: Vec::new(), longest: 0 }
    }
}

impl Group {
    fn of(index: usize, command: Command) -> Group {
        let mut group = Group::default();
        group.add(index, command);
        group
    }

    fn add(&mut self, index: usize, command: Command) {
        self.pipeline.add_command(command.command);
        self.events.push(index);
        self.longest = self.longest.max(command.longest);
    }

    fn fail(&self, failure: &Failure, outcomes: &mut [Outcome]) {
        self.events.iter().for_each(|index| outcomes[*index] = Outcome::Failed(failure.clone()));
    }
}

async fn send(server: &Server, group: &Group) -> Result<Vec<Value>, Failure> {
    let sent = server.exchange(&group.pipeline).await;
    match sent {
        // The server says that it is too large and closes, but what it says is often lost with the connection.
        Err(failure) if failure.kind == "lost" && group.longest > LARGE_BYTES => {
            let bytes_max = bulk_bytes_max(server).await;
            Err(if bytes_max.is_some_and(|max| group.longest as u64 > max) { too_large() } else { failure })
        }
        sent => sent,
    }
}

/// The longest argument that the server takes, if it tells.
async fn bulk_bytes_max(server: &Server) -> Option<u64> {
    let mut command = redis::cmd("CONFIG");
    command.arg("GET").arg("proto-max-bulk-len");
    let reply = server.command(command).await.ok()?;
    let settings: HashMap<String, u64> = redis::from_redis_value(reply).ok()?;
    settings.into_values().next()
}
