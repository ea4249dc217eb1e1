use std::collections::HashSet;

use crate::{KeyHash, work::looked_at};

/// What the owner of a queue's lane knows of the keys that have rows.
#[derive(Debug)]
pub(crate) struct RowKeys {
    /// The keys that have rows, or may have.
    keys: HashSet<KeyHash>,
    /// Every key may have rows: which do is not known yet.
    unknown: bool,
    /// The look for keys with rows that is under way, and the keys that were given rows since it began.
    look: Option<u64>,
    given: HashSet<KeyHash>,
}

impl RowKeys {
    /// Some keys, and whether there may be others.
    pub(crate) fn new(keys: HashSet<KeyHash>, unknown: bool) -> Self {
        RowKeys { keys, unknown, look: None, given: HashSet::new() }
    }

    /// Whether it is not known yet which keys have rows.
    pub(crate) fn is_unknown(&self) -> bool {
        self.unknown
    }

    /// Whether a key may have rows.
    pub(crate) fn may_have(&self, key: KeyHash) -> bool {
        self.unknown || self.keys.contains(&key)
    }

    /// A key gets a row.
    pub(crate) fn insert(&mut self, key: KeyHash) {
        self.keys.insert(key);
        if self.look.is_some() {
            self.given.insert(key);
        }
    }

    /// A look for all keys with rows begins, under this number. What is `unwritten` may escape it.
    pub(crate) fn begin_look(&mut self, number: u64, unwritten: impl Iterator<Item = KeyHash>) {
        (self.look, self.given) = (Some(number), unwritten.collect());
    }

    /// The look of this number is over: these are the only keys that have rows, besides those that were given some meanwhile. Says
    /// nothing to a lane that was loaded after the look had begun.
    pub(crate) fn end_look(&mut self, number: u64, mut found: HashSet<KeyHash>) {
        if self.look == Some(number) {
            looked_at(self.given.len());
            found.extend(&self.given);
            self.keys = found;
            self.unknown = false;
        }
    }
}
