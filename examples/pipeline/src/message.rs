use pillarbox::NewEvent;
use serde::{Deserialize, Serialize};

use crate::stage::{ACTIVITIES, AUTHORS, MENTIONS, MESSAGES};

/// Something that somebody has said; the payload of `message.posted`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Message {
    /// Where.
    pub conversation: String,
    /// Its number there.
    pub number: i64,
    /// By whom.
    pub author: String,
    /// What was said.
    pub body: String,
}

impl Message {
    /// One that has no number yet.
    pub fn new(conversation: &str, author: &str, body: &str) -> Self {
        Message { conversation: conversation.into(), number: 0, author: author.into(), body: body.into() }
    }

    /// What is published with a message: two events of two topics.
    ///
    /// The first has the conversation as its key, so that mentions are found in the order in which people have talked.
    pub(crate) fn events(&self) -> [NewEvent; 2] {
        [
            NewEvent::new(MESSAGES, "message.posted").key(&self.conversation).json(self),
            NewEvent::new(AUTHORS, "author.wrote").key(&self.author),
        ]
    }

    /// Who is mentioned by `@name`, each once.
    pub fn mentions(&self) -> Vec<Mention> {
        let mut mentions: Vec<Mention> = Vec::new();
        for person in names_in(&self.body) {
            if mentions.iter().all(|mention| mention.person != person) {
                mentions.push(Mention {
                    person: person.to_owned(),
                    conversation: self.conversation.clone(),
                    message: self.number,
                });
            }
        }
        mentions
    }
}

/// Somebody's name in a message; the payload of `mention.created`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Mention {
    /// Who is mentioned.
    pub person: String,
    /// Where.
    pub conversation: String,
    /// In which message.
    pub message: i64,
}

impl Mention {
    /// The key is the person from here on: each has a stream of their own, in order, and nobody waits for anybody else.
    pub(crate) fn created(&self) -> NewEvent {
        NewEvent::new(MENTIONS, "mention.created").key(&self.person).json(self)
    }
}

/// A line in a person's list of what has happened; the payload of `activity.created`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Activity {
    /// Its number in the list: 1, 2, 3 and so on.
    pub number: i64,
    /// What has happened.
    pub mention: Mention,
}

impl Activity {
    pub(crate) fn created(&self) -> NewEvent {
        NewEvent::new(ACTIVITIES, "activity.created").key(&self.mention.person).json(self)
    }
}

/// The names behind each `@` that does not stand inside a word, as it does in a mail address.
fn names_in(body: &str) -> impl Iterator<Item = &str> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    body.match_indices('@').filter_map(move |(at, _)| {
        if body[..at].ends_with(is_part) {
            return None;
        }
        let rest = &body[at + 1..];
        let end = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
        (end > 0).then(|| &rest[..end])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(body: &str, expected: &[&str]) {
        let message = Message { number: 7, ..Message::new("c", "ada", body) };
        let mentions = message.mentions();
        let people: Vec<&str> = mentions.iter().map(|mention| &*mention.person).collect();
        assert_eq!(people, expected, "{body}");
        assert!(mentions.iter().all(|mention| (&*mention.conversation, mention.message) == ("c", 7)));
    }

    #[test]
    fn a_mention_is_a_name_behind_an_at_sign() {
        check("hello", &[]);
        check("@ada", &["ada"]);
        check("(@ada, @grace_h!) @alan2", &["ada", "grace_h", "alan2"]);
        check("@zoë@ada", &["zoë"]);
        check("ada@example.org @ @@ada", &["ada"]);
    }

    #[test]
    fn somebody_named_twice_is_mentioned_once() {
        check("@ada, are you there, @ada? @grace is", &["ada", "grace"]);
    }
}
