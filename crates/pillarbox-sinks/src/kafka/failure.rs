use pillarbox::Failure;
use pillarbox::sink::Outcome;
use rdkafka::error::RDKafkaErrorCode as Code;

use crate::Template;

/// What became of one record.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Verdict {
    Over(Outcome),
    /// The producer was taken out of service; another one can send it.
    Purged,
    /// The broker refused the request it was part of, with this failure if it was alone.
    Refused(Failure),
}

/// What is known around a record that failed.
pub(super) struct Place<'a> {
    pub(super) topic: &'a str,
    /// Whether all events go to this topic.
    pub(super) is_only_topic: bool,
    /// The payload's length.
    pub(super) bytes: usize,
    /// The record never left librdkafka.
    pub(super) local: bool,
    /// What keeps the producer from its brokers.
    pub(super) trouble: Option<Trouble>,
    /// Why the producer can no longer be used.
    pub(super) fatal: Option<Code>,
}

/// What last kept a producer from its brokers.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Trouble {
    pub(super) kind: TroubleKind,
    /// In librdkafka's words, without secrets.
    pub(super) reason: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TroubleKind {
    Unreachable,
    Tls,
    Unauthorized,
}

impl TroubleKind {
    pub(super) fn of(code: Code) -> Option<Self> {
        match code {
            Code::BrokerTransportFailure | Code::AllBrokersDown | Code::Resolve => Some(TroubleKind::Unreachable),
            Code::SSL => Some(TroubleKind::Tls),
            Code::Authentication
            | Code::SaslAuthenticationFailed
            | Code::UnsupportedSASLMechanism
            | Code::IllegalSASLState => Some(TroubleKind::Unauthorized),
            _ => None,
        }
    }
}

impl Trouble {
    pub(super) fn failure(&self) -> Failure {
        let (kind, hint) = match self.kind {
            TroubleKind::Unreachable => ("unreachable", "; see that the brokers run and `brokers` names them"),
            TroubleKind::Tls => ("tls", "; look at the properties `security.protocol` and `ssl.…`"),
            TroubleKind::Unauthorized => ("unauthorized", "; look at the properties `sasl.…`"),
        };
        sink(kind, format!("kafka cannot be reached: {}{hint}", self.reason))
    }
}

/// Judges a record that was reported to have failed.
pub(super) fn verdict(code: Code, place: &Place<'_>) -> Verdict {
    match code {
        Code::PurgeQueue | Code::PurgeInflight => match place.fatal {
            // Another producer would be stopped as well.
            Some(fatal) if is_refused_by_cluster(fatal) => {
                Verdict::Over(Outcome::Failed(of_cluster(fatal, place.topic)))
            }
            _ => Verdict::Purged,
        },
        // What was never sent failed for its own sake.
        _ if is_refusal(code) && !place.local => Verdict::Refused(failure(code, place)),
        _ => Verdict::Over(Outcome::Failed(failure(code, place))),
    }
}

/// A record for which no report came in time.
pub(super) fn no_report(place: &Place<'_>) -> Failure {
    failure(Code::MessageTimedOut, place)
}

/// An event whose topic cannot be one.
pub(super) fn no_topic(template: &Template, why: &str) -> Failure {
    let message = format!("'{}' makes a name for this event that is no topic: {why}", template.as_str());
    Failure::unsendable("destination", message)
}

fn is_refusal(code: Code) -> bool {
    matches!(
        code,
        Code::MessageSizeTooLarge
            | Code::MessageBatchTooLarge
            | Code::InvalidRecord
            | Code::InvalidDifferentRecord
            | Code::InvalidMessage
            | Code::PolicyViolation
    )
}

fn failure(code: Code, place: &Place<'_>) -> Failure {
    let topic = place.topic;
    match code {
        Code::MessageSizeTooLarge | Code::MessageBatchTooLarge => {
            let message = format!(
                "topic '{topic}' takes no record as large as this one, whose payload has {} bytes: raise the topic's \
                 max.message.bytes, or publish less",
                place.bytes
            );
            Failure { kind: "too_large", ..Failure::permanent(message) }
        }
        _ if is_refusal(code) => {
            let message = format!(
                "topic '{topic}' does not take this record: {code}; a compacted topic needs a key, for example"
            );
            // Brokers say the others of what was damaged on its way and of what their settings forbid: that can change.
            let permanent = matches!(code, Code::InvalidRecord | Code::InvalidDifferentRecord);
            Failure { kind: "invalid_record", permanent, ..Failure::event(message) }
        }
        Code::InvalidTimestamp => {
            sink("clock", format!("topic '{topic}' refuses the time of this machine: {code}; set its clock"))
        }
        Code::InvalidTopic
        | Code::UnknownTopic
        | Code::UnknownTopicOrPartition
        | Code::UnknownPartition
        | Code::UnknownTopicId => {
            let message = format!("topic '{topic}' does not exist ({code}); create it");
            of_topic(place, "unknown_topic", message)
        }
        Code::TopicAuthorizationFailed => {
            let message = format!("the producer may not write to topic '{topic}'; allow it to");
            of_topic(place, "topic_unauthorized", message)
        }
        Code::QueueFull => sink(
            "overloaded",
            format!(
                "records for topic '{topic}' found no room in the producer's queue; the brokers are too slow or away"
            ),
        ),
        Code::MessageTimedOut | Code::OperationTimedOut | Code::TimedOutQueue | Code::RequestTimedOut => {
            timed_out(place)
        }
        Code::Fatal => fatal(place.fatal.unwrap_or(Code::Fatal), topic),
        _ if place.fatal.is_some() => fatal(place.fatal.unwrap_or(code), topic),
        _ => of_cluster(code, topic),
    }
}

/// Other topics may work, unless there is only this one.
fn of_topic(place: &Place<'_>, kind: &'static str, message: String) -> Failure {
    if place.is_only_topic { sink(kind, message) } else { Failure { kind, ..Failure::event(message) } }
}

/// It is unknown whether the record was sent before its time was over. With a reason at hand it is the brokers' fault.
fn timed_out(place: &Place<'_>) -> Failure {
    match &place.trouble {
        Some(trouble) => trouble.failure(),
        None => {
            let message =
                format!("topic '{}' did not acknowledge in time; look at its leaders and replicas", place.topic);
            Failure::unclear("timeout", message)
        }
    }
}

/// The producer can no longer be used; the next batch gets a new one.
fn fatal(code: Code, topic: &str) -> Failure {
    if is_refused_by_cluster(code) {
        return of_cluster(code, topic);
    }
    let message = format!("the kafka producer stopped while a record for topic '{topic}' was under way: {code}");
    Failure::unclear("fatal", message)
}

/// Whether the brokers take no records from an idempotent producer like this one.
fn is_refused_by_cluster(code: Code) -> bool {
    matches!(
        code,
        Code::ClusterAuthorizationFailed
            | Code::TransactionalIdAuthorizationFailed
            | Code::UnsupportedFeature
            | Code::UnsupportedVersion
    )
}

fn of_cluster(code: Code, topic: &str) -> Failure {
    match code {
        Code::ClusterAuthorizationFailed | Code::TransactionalIdAuthorizationFailed => sink(
            "unauthorized",
            format!(
                "the producer may not write to the cluster ({code}); allow it IdempotentWrite, or Write to its topics"
            ),
        ),
        Code::UnsupportedFeature | Code::UnsupportedVersion | Code::UnsupportedForMessageFormat => sink(
            "unsupported",
            format!("the brokers are too old for idempotent producers: Kafka 0.11 is the first ({code})"),
        ),
        Code::UnsupportedCompressionType => sink(
            "unsupported",
            format!("topic '{topic}' does not take this compression ({code}); change `compression.type`"),
        ),
        Code::NotEnoughReplicas | Code::NotEnoughReplicasAfterAppend | Code::ISRInsufficient => {
            sink("unavailable", format!("topic '{topic}' has too few replicas in sync ({code}); bring brokers back"))
        }
        Code::LeaderNotAvailable
        | Code::NotLeaderForPartition
        | Code::BrokerNotAvailable
        | Code::ReplicaNotAvailable
        | Code::KafkaStorageError
        | Code::NotController
        | Code::CoordinatorLoadInProgress
        | Code::CoordinatorNotAvailable => {
            sink("unavailable", format!("topic '{topic}' cannot be written to now: {code}"))
        }
        Code::ThrottlingQuotaExceeded => sink("overloaded", format!("the brokers hold the producer back: {code}")),
        _ => match TroubleKind::of(code) {
            Some(kind) => Trouble { kind, reason: code.to_string() }.failure(),
            None => Failure::unclear("kafka", format!("a record for topic '{topic}' failed: {code}")),
        },
    }
}

fn sink(kind: &'static str, message: String) -> Failure {
    Failure { kind, ..Failure::sink(message) }
}

#[cfg(test)]
mod tests {
    use pillarbox::sink::Fault;

    use super::*;

    const PLACE: Place<'static> =
        Place { topic: "orders", is_only_topic: true, bytes: 7, local: false, trouble: None, fatal: None };

    fn failed(code: Code, place: &Place<'_>) -> Failure {
        match verdict(code, place) {
            Verdict::Over(Outcome::Failed(failure)) | Verdict::Refused(failure) => failure,
            other => panic!("{code} is {other:?}"),
        }
    }

    fn check(code: Code, fault: Fault, kind: &str) {
        let failure = failed(code, &PLACE);
        assert_eq!((failure.fault, failure.kind), (fault, kind), "{code}");
    }

    #[test]
    fn a_record_is_refused_for_good_only_when_it_was_alone() {
        for code in [Code::MessageSizeTooLarge, Code::InvalidRecord, Code::InvalidDifferentRecord] {
            assert!(matches!(verdict(code, &PLACE), Verdict::Refused(failure) if failure.permanent), "{code}");
            let local = Place { local: true, ..PLACE };
            assert!(
                matches!(verdict(code, &local), Verdict::Over(Outcome::Failed(failure)) if failure.permanent),
                "{code}"
            );
        }
    }

    #[test]
    fn the_only_topic_is_the_receiver_and_one_of_several_is_not() {
        for code in [Code::UnknownTopic, Code::UnknownTopicOrPartition, Code::TopicAuthorizationFailed] {
            assert_eq!(failed(code, &PLACE).fault, Fault::Sink, "{code}");
            let one = failed(code, &Place { is_only_topic: false, ..PLACE });
            assert!(one.fault == Fault::Event && !one.permanent, "{code}");
        }
    }

    #[test]
    fn what_is_wrong_with_the_cluster_is_not_the_events_fault() {
        check(Code::NotEnoughReplicas, Fault::Sink, "unavailable");
        check(Code::ClusterAuthorizationFailed, Fault::Sink, "unauthorized");
        check(Code::AllBrokersDown, Fault::Sink, "unreachable");
        check(Code::QueueFull, Fault::Sink, "overloaded");
        check(Code::ThrottlingQuotaExceeded, Fault::Sink, "overloaded");
        check(Code::OutOfOrderSequenceNumber, Fault::Unclear, "kafka");
    }

    #[test]
    fn a_time_out_is_unclear_unless_the_brokers_were_out_of_reach() {
        check(Code::MessageTimedOut, Fault::Unclear, "timeout");
        let trouble = Trouble { kind: TroubleKind::Unauthorized, reason: "no such user".to_owned() };
        let failure = failed(Code::MessageTimedOut, &Place { trouble: Some(trouble), ..PLACE });
        assert_eq!((failure.fault, failure.kind), (Fault::Sink, "unauthorized"));
        assert!(failure.message.contains("no such user"), "{}", failure.message);
    }

    #[test]
    fn what_was_under_way_when_the_producer_stopped_is_unclear() {
        for code in [Code::Fatal, Code::OutOfOrderSequenceNumber] {
            let failure = failed(code, &Place { fatal: Some(Code::OutOfOrderSequenceNumber), ..PLACE });
            assert_eq!((failure.fault, failure.kind), (Fault::Unclear, "fatal"));
        }
        for code in [Code::Fatal, Code::PurgeQueue] {
            let refused = failed(code, &Place { fatal: Some(Code::ClusterAuthorizationFailed), ..PLACE });
            assert_eq!((refused.fault, refused.kind), (Fault::Sink, "unauthorized"));
        }
    }

    #[test]
    fn what_was_taken_back_is_sent_by_the_next_producer() {
        for fatal in [None, Some(Code::OutOfOrderSequenceNumber)] {
            for code in [Code::PurgeQueue, Code::PurgeInflight] {
                assert_eq!(verdict(code, &Place { fatal, ..PLACE }), Verdict::Purged);
            }
        }
    }
}
