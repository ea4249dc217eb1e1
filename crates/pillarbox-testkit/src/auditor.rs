use std::collections::{HashMap, HashSet};
use std::fmt;

use uuid::Uuid;

/// What a publisher committed: what a receiver must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// The event's id.
    pub id: Uuid,
    /// Its key.
    pub key: Option<String>,
    /// Its place in the order of its key; the position, or a count of the publisher's own.
    pub position: i64,
}

/// What a receiver got, compared with what was committed. Shares nothing with the engine, its cursors or its books.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Verdict {
    /// How many events were committed.
    pub committed: usize,
    /// How many of them came at least once.
    pub received: usize,
    /// Committed and never received.
    pub lost: Vec<Uuid>,
    /// Received and never committed.
    pub phantom: Vec<Uuid>,
    /// First arrivals that came after the first arrival of a later event of their key.
    pub out_of_order: Vec<Uuid>,
    /// Arrivals of an id that had come before.
    pub duplicates: usize,
}

impl Verdict {
    /// Compares `committed` with the ids that were `received`, in order of arrival.
    pub fn of(committed: &[Committed], received: &[Uuid]) -> Verdict {
        let known: HashMap<Uuid, &Committed> = committed.iter().map(|event| (event.id, event)).collect();
        let mut verdict = Verdict { committed: committed.len(), ..Verdict::default() };
        let mut seen = HashSet::new();
        let mut latest: HashMap<&str, i64> = HashMap::new();
        for id in received {
            let Some(event) = known.get(id) else {
                verdict.phantom.push(*id);
                continue;
            };
            if !seen.insert(*id) {
                verdict.duplicates += 1;
                continue;
            }
            let Some(key) = event.key.as_deref() else { continue };
            let latest = latest.entry(key).or_insert(i64::MIN);
            if event.position < *latest {
                verdict.out_of_order.push(*id);
            }
            *latest = event.position.max(*latest);
        }
        verdict.received = seen.len();
        verdict.lost = committed.iter().map(|event| event.id).filter(|id| !seen.contains(id)).collect();
        verdict
    }

    /// Compares with lines: bare ids or CloudEvents objects. A line that is neither is an error, with its number.
    pub fn of_lines<'a>(
        committed: &[Committed],
        lines: impl IntoIterator<Item = &'a str>,
    ) -> Result<Verdict, UnreadableLine> {
        let lines = lines.into_iter().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let id = |(index, line): (usize, &str)| id_of(line).ok_or(UnreadableLine { number: index + 1 });
        let received: Vec<Uuid> = lines.map(id).collect::<Result<_, _>>()?;
        Ok(Verdict::of(committed, &received))
    }

    /// Nothing lost, nothing invented, every key in order. Duplicates are allowed.
    pub fn is_sound(&self) -> bool {
        self.lost.is_empty() && self.phantom.is_empty() && self.out_of_order.is_empty()
    }

    /// # Panics
    /// If it is not sound, or if there are more than `duplicates_max` duplicates.
    #[track_caller]
    pub fn assert_sound(&self, duplicates_max: usize) {
        assert!(self.is_sound(), "{self}: {self:?}");
        assert!(self.duplicates <= duplicates_max, "{self}: more than {duplicates_max} duplicates");
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Verdict { committed, received, lost, phantom, out_of_order, duplicates } = self;
        write!(
            f,
            "committed {committed}, received {received}, lost {}, phantom {}, out of order {}, duplicates {duplicates}",
            lost.len(),
            phantom.len(),
            out_of_order.len()
        )
    }
}

/// A received line that is neither an id nor a whole JSON object with one: a torn line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnreadableLine {
    /// Its number, from 1.
    pub number: usize,
}

impl fmt::Display for UnreadableLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {} is neither an id nor a JSON object with one", self.number)
    }
}

impl std::error::Error for UnreadableLine {}

fn id_of(line: &str) -> Option<Uuid> {
    let line = line.trim();
    if let Ok(object) = serde_json::from_str::<serde_json::Value>(line) {
        return object.get("id")?.as_str()?.parse().ok();
    }
    line.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u128) -> Uuid {
        Uuid::from_u128(number)
    }

    fn committed(numbers: &[u128]) -> Vec<Committed> {
        let event = |number: &u128| Committed { id: id(*number), key: Some("k".to_owned()), position: *number as i64 };
        numbers.iter().map(event).collect()
    }

    #[track_caller]
    fn check(received: &[u128], expected: (usize, usize, usize, usize)) {
        let received: Vec<Uuid> = received.iter().map(|number| id(*number)).collect();
        let verdict = Verdict::of(&committed(&[1, 2, 3, 4]), &received);
        let found = (verdict.lost.len(), verdict.phantom.len(), verdict.out_of_order.len(), verdict.duplicates);
        assert_eq!(found, expected, "{verdict}");
    }

    #[test]
    fn tells_each_kind_of_wrong_apart() {
        check(&[1, 2, 3, 4], (0, 0, 0, 0));
        check(&[1, 2, 4], (1, 0, 0, 0));
        check(&[1, 2, 3, 4, 9], (0, 1, 0, 0));
        check(&[1, 3, 2, 4], (0, 0, 1, 0));
        check(&[1, 2, 1, 3, 2, 4], (0, 0, 0, 2));
    }

    #[test]
    fn without_a_key_there_is_no_order() {
        let events: Vec<Committed> =
            committed(&[1, 2]).into_iter().map(|event| Committed { key: None, ..event }).collect();
        assert!(Verdict::of(&events, &[id(2), id(1)]).is_sound());
    }

    #[test]
    fn reads_ids_and_objects_and_refuses_torn_lines() {
        let whole = format!("{{\"id\":\"{}\",\"data\":1}}", id(1));
        let bare = id(2).to_string();
        let lines = [whole.as_str(), "", bare.as_str()];
        assert!(Verdict::of_lines(&committed(&[1, 2]), lines).unwrap().is_sound());
        let torn = Verdict::of_lines(&committed(&[1]), ["", &whole[..whole.len() - 1]]);
        assert_eq!(torn, Err(UnreadableLine { number: 2 }));
    }
}
