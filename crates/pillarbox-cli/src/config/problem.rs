use std::cell::RefCell;
use std::fmt;

use serde::{Serialize, Serializer};

use super::tree::Origin;

/// One thing that is wrong with a config.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Problem {
    /// The setting, like `relay.workers`; empty for the file as a whole.
    pub(crate) key: String,
    /// Where it was written.
    #[serde(rename = "where", serialize_with = "in_words")]
    origin: Origin,
    /// What is wrong, and what to do.
    pub(crate) message: String,
}

impl Problem {
    pub(crate) fn new(key: impl Into<String>, origin: Origin, message: impl Into<String>) -> Self {
        Problem { key: key.into(), origin, message: message.into() }
    }

    /// What is wrong with a subscription as a whole.
    pub(crate) fn of_subscription(name: &str, message: impl Into<String>) -> Self {
        Problem::new(format!("subscription '{name}'"), Origin::Nowhere, message)
    }

    /// The section at the root of the file that it belongs to.
    pub(crate) fn section(&self) -> &str {
        self.key.split(['.', '[', ' ']).next().unwrap_or_default()
    }
}

fn in_words<S: Serializer>(origin: &Origin, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(origin)
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.origin)?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.message)
    }
}

/// All that is wrong, gathered so that a user sees everything at once.
#[derive(Debug, Default)]
pub(crate) struct Problems(RefCell<Vec<Problem>>);

impl Problems {
    pub(crate) fn add(&self, problem: Problem) {
        self.0.borrow_mut().push(problem);
    }

    pub(crate) fn count(&self) -> usize {
        self.0.borrow().len()
    }

    /// In the order of the file, whichever was found first.
    pub(crate) fn into_vec(self) -> Vec<Problem> {
        let mut problems = self.0.into_inner();
        problems.sort_by(|left, right| left.origin.cmp(&right.origin));
        problems
    }
}

/// The candidate that was probably meant by `word`.
pub(crate) fn nearest<'a>(word: &str, candidates: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let limit = (word.chars().count() / 2).clamp(1, 4);
    let distances = candidates.into_iter().map(|candidate| (distance(word, candidate), candidate));
    distances.filter(|(distance, _)| *distance <= limit).min().map(|(_, candidate)| candidate)
}

/// The number of letters to insert, remove or replace (Levenshtein).
fn distance(left: &str, right: &str) -> usize {
    let right: Vec<char> = right.chars().collect();
    let mut row: Vec<usize> = (0..=right.len()).collect();
    for (i, a) in left.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, b) in right.iter().enumerate() {
            let replaced = diagonal + usize::from(a != *b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_neighbour_is_what_was_meant() {
        let keys = ["workers", "batch_size", "poll_interval"];
        assert_eq!(nearest("batchsize", keys), Some("batch_size"));
        assert_eq!(nearest("wokers", keys), Some("workers"));
        assert_eq!(nearest("colour", keys), None);
        assert_eq!(distance("kitten", "sitting"), 3);
    }
}
