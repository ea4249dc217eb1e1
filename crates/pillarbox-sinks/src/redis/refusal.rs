use pillarbox::Failure;
use pillarbox::sink::Outcome;
use redis::{ServerError, Value};

use crate::Template;

/// Errors of a server whose next answer may be another on a new connection: after a failover, or with a login that was changed.
const NEEDS_NEW_CONNECTION: [&str; 4] = ["READONLY", "MASTERDOWN", "NOAUTH", "WRONGPASS"];

/// Where a server's error begins to quote the command.
const QUOTE: &str = "with args beginning with";

/// What a server says about an argument that is too long for it.
const TOO_LARGE: [&str; 2] = ["invalid bulk length", "exceeds maximum allowed size"];

/// What an error means for an event that was to go to this destination.
///
/// An error about one key or channel is the event's, if events go to several: the others can go on. If all go to the same, no event can
/// be delivered, and it is the sink's.
pub(super) fn refusal(error: &ServerError, destination: &Template) -> Failure {
    if let Some(failure) = refusal_of_all(error) {
        return failure;
    }
    let text = text_of(error);
    let of_destination = |kind, advice: &str| {
        let message = format!("Redis refused '{}': {text}; {advice}", destination.as_str());
        let failure = if destination.is_constant() { Failure::sink(message) } else { Failure::event(message) };
        Failure { kind, ..failure }
    };
    let details = error.details().unwrap_or_default();
    match error.code() {
        "WRONGTYPE" => of_destination("wrong_type", "something else lies under that key: delete it or choose another"),
        "NOPERM" => of_destination("permission", "give the user the right to that key or channel"),
        "ERR" if TOO_LARGE.iter().any(|said| details.contains(said)) => too_large(),
        "ERR" => Failure { kind: "refused", ..Failure::event(format!("Redis refused the event: {text}")) },
        // Mostly something that a newer server says about itself.
        _ => Failure::unclear("refused", format!("Redis refused: {text}")),
    }
}

/// The failure of an error that every event would meet, wherever it was to go.
pub(super) fn refusal_of_all(error: &ServerError) -> Option<Failure> {
    let details = error.details().unwrap_or_default();
    let (kind, advice) = match error.code() {
        // Without the right to a command nothing can be delivered; without the right to a key, other keys may do.
        "NOPERM" if details.contains("command") => ("permission", "give the user the right to that command"),
        "NOAUTH" | "WRONGPASS" => ("auth", "check the user and the password in the url"),
        "ERR" if details.contains("unauthenticated") => ("auth", "check the user and the password in the url"),
        "LOADING" | "BUSY" | "TRYAGAIN" => ("busy", "it is tried again"),
        "READONLY" => ("read_only", "this is a replica; name its master, or sentinels that know it"),
        "MASTERDOWN" => ("read_only", "this is a replica without its master"),
        "OOM" => ("out_of_memory", "raise maxmemory, or limit streams by maxlen"),
        "MISCONF" => ("not_durable", "its disk may be full; see its log"),
        "NOREPLICAS" => ("not_durable", "it has fewer replicas than min-replicas-to-write"),
        "MOVED" | "ASK" | "CROSSSLOT" | "CLUSTERDOWN" => {
            ("cluster", "this is Redis Cluster, which is not supported; name a server that is not part of one")
        }
        "ERR" if details.contains("unknown command") => {
            ("refused", "is it Redis 5 or later, and is the command enabled?")
        }
        "ERR" if details.contains("max number of clients") => ("busy", "raise maxclients"),
        _ => return None,
    };
    Some(Failure { kind, ..Failure::sink(format!("Redis refused: {}; {advice}", text_of(error))) })
}

/// The event is longer than the server takes.
pub(super) fn too_large() -> Failure {
    let message = "the event is larger than Redis takes; raise proto-max-bulk-len there, then retry it by hand";
    Failure { kind: "too_large", ..Failure::permanent(message) }
}

/// For a reply that the command cannot have.
pub(super) fn strange(destination: &Template) -> Outcome {
    let message = format!("Redis gave an answer about '{}' that is none; is it Redis?", destination.as_str());
    Outcome::Failed(Failure::unclear("protocol", message))
}

/// Whether the connection should not be used again after this reply.
pub(super) fn needs_new_connection(reply: &Value) -> bool {
    matches!(reply, Value::ServerError(error) if NEEDS_NEW_CONNECTION.contains(&error.code()))
}

/// What the server says, without the part of the command that it quotes.
pub(super) fn text_of(error: &ServerError) -> String {
    let details = error.details().unwrap_or_default();
    let details = details.split(QUOTE).next().unwrap_or_default().trim_end_matches([',', ' ', '.']);
    format!("{} {details}", error.code()).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use pillarbox::sink::Fault;

    use super::*;

    fn error(line: &str) -> ServerError {
        let (code, details) = line.split_once(' ').unwrap_or((line, ""));
        let Ok(error) = redis::make_extension_error(code.to_owned(), Some(details.to_owned())).try_into() else {
            panic!("an error of a server is one")
        };
        error
    }

    fn check(line: &str, constant: (Fault, &str), templated: (Fault, &str)) {
        for (destination, expected) in [("orders", constant), ("{topic}", templated)] {
            let failure = refusal(&error(line), &destination.parse().unwrap());
            assert_eq!((failure.fault, failure.kind), expected, "{line}: {failure:?}");
            assert!(!failure.message.contains("canary"), "{failure:?}");
        }
    }

    #[test]
    fn what_is_wrong_with_one_destination_is_the_events_unless_there_is_but_one() {
        let wrong_type = "WRONGTYPE Operation against a key holding the wrong kind of value";
        check(wrong_type, (Fault::Sink, "wrong_type"), (Fault::Event, "wrong_type"));
        for line in [
            "NOPERM this user has no permissions to access one of the keys used as arguments",
            "NOPERM this user has no permissions to access one of the channels used as arguments",
            "NOPERM No permissions to access a key",
        ] {
            check(line, (Fault::Sink, "permission"), (Fault::Event, "permission"));
        }
    }

    #[test]
    fn what_is_wrong_with_the_server_is_the_sinks() {
        for (line, kind) in [
            ("NOPERM this user has no permissions to run the 'xadd' command", "permission"),
            ("NOAUTH Authentication required.", "auth"),
            ("ERR Protocol error: unauthenticated multibulk length", "auth"),
            ("WRONGPASS invalid username-password pair or user is disabled.", "auth"),
            ("LOADING Redis is loading the dataset in memory", "busy"),
            ("BUSY Redis is busy running a script", "busy"),
            ("READONLY You can't write against a read only replica.", "read_only"),
            ("MASTERDOWN Link with MASTER is down", "read_only"),
            ("OOM command not allowed when used memory > 'maxmemory'.", "out_of_memory"),
            ("MISCONF Redis is configured to save RDB snapshots", "not_durable"),
            ("NOREPLICAS Not enough good replicas to write.", "not_durable"),
            ("MOVED 3999 127.0.0.1:6381", "cluster"),
            ("CLUSTERDOWN The cluster is down", "cluster"),
            ("ERR unknown command 'XADD', with args beginning with: 'canary' ", "refused"),
        ] {
            check(line, (Fault::Sink, kind), (Fault::Sink, kind));
        }
    }

    #[test]
    fn the_rest_is_the_events_or_unclear() {
        let large = (Fault::Event, "too_large");
        check("ERR Protocol error: invalid bulk length", large, large);
        assert!(refusal(&error("ERR Protocol error: invalid bulk length"), &"x".parse().unwrap()).permanent);
        let other = (Fault::Event, "refused");
        check("ERR The stream has exhausted the last possible ID, unable to add more items", other, other);
        let unknown = (Fault::Unclear, "refused");
        check("TIRED not today", unknown, unknown);
    }

    #[test]
    fn a_replica_is_left_and_a_wrong_key_is_no_reason_to() {
        assert!(needs_new_connection(&Value::ServerError(error("READONLY x"))));
        assert!(!needs_new_connection(&Value::ServerError(error("WRONGTYPE x"))));
        assert!(!needs_new_connection(&Value::Okay));
    }
}
