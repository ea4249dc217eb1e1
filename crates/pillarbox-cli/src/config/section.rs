use std::cell::RefCell;
use std::collections::{BTreeSet, HashSet};

use serde::de::DeserializeOwned;

use super::problem::{Problem, Problems, nearest};
use super::reading::{ReadError, Reading, address};
use super::tree::{Node, Origin, Value};

/// A table of the file, read into a type whose fields are its keys.
///
/// Serde stops at the first value that it cannot read. It is told as a problem and passed over when the table is read again, so that in the
/// end all problems are told, and everything else is read.
pub(super) struct Section<'n> {
    path: String,
    node: &'n Node,
    problems: &'n Problems,
    needs: Needs,
    /// The values that cannot be read and the keys that are unknown, by their addresses.
    passed_over: RefCell<HashSet<usize>>,
    /// The paths of the values that cannot be read.
    unread: RefCell<HashSet<String>>,
    /// The keys that have to be there and are missing, or cannot be read: their examples are read instead, so that the rest is checked.
    replaced: RefCell<BTreeSet<&'static str>>,
}

/// What a table has to have.
#[derive(Default)]
pub(super) struct Needs {
    /// Who needs it, for people.
    what: String,
    /// The keys that have to be there, with an example of each.
    examples: Vec<(&'static str, Node)>,
    /// The keys that are read without its type.
    aside: &'static [&'static str],
}

impl Needs {
    pub(super) fn new(what: String, required: &[(&'static str, &'static str)], aside: &'static [&'static str]) -> Self {
        let node = |text: &str| Node::new(Value::Text(text.to_owned()), Origin::Nowhere);
        Needs { what, examples: required.iter().map(|(key, example)| (*key, node(example))).collect(), aside }
    }

    fn example(&self, key: &str) -> Option<&str> {
        self.examples.iter().find(|(name, _)| *name == key).and_then(|(_, node)| match &node.value {
            Value::Text(text) => Some(text.as_str()),
            _ => None,
        })
    }
}

impl<'n> Section<'n> {
    pub(super) fn new(path: impl Into<String>, node: &'n Node, problems: &'n Problems) -> Self {
        Section {
            path: path.into(),
            node,
            problems,
            needs: Needs::default(),
            passed_over: RefCell::default(),
            unread: RefCell::default(),
            replaced: RefCell::default(),
        }
    }

    /// A table that has to have some keys, none of them empty.
    pub(super) fn needing(self, needs: Needs) -> Self {
        Section { needs, ..self }
    }

    /// Reads all of it. None: what is wrong was said.
    pub(super) fn read<T: DeserializeOwned>(&self) -> Option<T> {
        loop {
            match T::deserialize(Reading::new(self, self.node, self.path.clone())) {
                Ok(value) => return Some(value),
                Err(error) => {
                    if !self.goes_on_without(error) {
                        return None;
                    }
                }
            }
        }
    }

    /// Reads what stands at `key`, if there is anything.
    pub(super) fn value<T: DeserializeOwned>(&self, key: &str) -> Option<T> {
        let node = self.node.get(key)?;
        let read = T::deserialize(Reading::new(self, node, self.path_of(&self.path, key)));
        read.map_err(|error| self.goes_on_without(error)).ok()
    }

    /// The tables of the list at `key`, each with its path.
    pub(super) fn tables(&self, key: &str) -> Vec<(String, &'n Node)> {
        let path = self.path_of(&self.path, key);
        match self.node.get(key).map(|node| &node.value) {
            None => Vec::new(),
            Some(Value::List(items)) => {
                items.iter().enumerate().map(|(index, item)| (format!("{path}[{index}]"), item)).collect()
            }
            Some(other) => {
                self.problem_of(key, format!("must be a list of tables ([[…]]), not {}", other.kind()));
                Vec::new()
            }
        }
    }

    /// Says what is wrong, and whether it helps to read again.
    fn goes_on_without(&self, error: ReadError) -> bool {
        let Some(place) = error.place else { return false };
        if let Some(key) = error.missing {
            return self.replace(key);
        }
        self.problems.add(Problem::new(&place.path, place.origin, error.message));
        self.unread.borrow_mut().insert(place.path);
        self.passed_over.borrow_mut().insert(place.address) && place.address != address(self.node)
    }

    /// Puts an example where a key is missing.
    fn replace(&self, key: &'static str) -> bool {
        let Some(example) = self.needs.example(key) else { return false };
        if !self.is_unread(key) {
            let what = &self.needs.what;
            self.problem(format!("{what} needs `{key}`, for example {key} = \"{example}\""));
        }
        self.replaced.borrow_mut().insert(key)
    }

    /// Something is wrong with the table as a whole.
    pub(super) fn problem(&self, message: impl Into<String>) {
        self.problems.add(Problem::new(&self.path, self.node.origin.clone(), message));
    }

    /// Something is wrong with what stands at `key`, which may be below others: `retry.cap`.
    pub(super) fn problem_of(&self, key: &str, message: impl Into<String>) {
        let mut node = self.node;
        for part in key.split('.') {
            node = node.get(part).unwrap_or(node);
        }
        self.problems.add(Problem::new(self.path_of(&self.path, key), node.origin.clone(), message));
    }

    /// Whether the file has something at `key`.
    pub(super) fn has(&self, key: &str) -> bool {
        self.node.get(key).is_some()
    }

    /// Whether the file has something at `key` that cannot be read.
    pub(super) fn is_unread(&self, key: &str) -> bool {
        self.unread.borrow().contains(&self.path_of(&self.path, key))
    }

    /// Whether an example stands for what the file should have at `key`.
    pub(super) fn is_replaced(&self, key: &str) -> bool {
        self.replaced.borrow().contains(key)
    }

    /// Whether everything that has to be there could be read.
    pub(super) fn is_whole(&self) -> bool {
        self.replaced.borrow().is_empty()
    }
}

/// What [`Reading`] asks.
impl Section<'_> {
    pub(super) fn path_of(&self, path: &str, key: &str) -> String {
        if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
    }

    pub(super) fn passes_over(&self, node: &Node) -> bool {
        self.passed_over.borrow().contains(&address(node))
    }

    pub(super) fn reads_aside(&self, key: &str) -> bool {
        self.needs.aside.contains(&key)
    }

    /// The examples that stand for what is missing.
    pub(super) fn examples(&self) -> impl Iterator<Item = (&'static str, &Node)> {
        let replaced = self.replaced.borrow().clone();
        let examples = self.needs.examples.iter().filter(move |(key, _)| replaced.contains(key));
        examples.map(|(key, node)| (*key, node))
    }

    pub(super) fn wants_filled(&self) -> bool {
        !self.needs.what.is_empty()
    }

    /// What to say of an empty string.
    pub(super) fn empty(&self, path: &str) -> String {
        let key = path.rsplit('.').next().unwrap_or_default();
        match self.needs.example(key) {
            Some(example) => format!("must not be empty; for example {key} = \"{example}\""),
            None => "is empty; give it a value or leave it out".to_owned(),
        }
    }

    /// Reports a key that the type does not have, once.
    pub(super) fn unknown(&self, reading: &Reading<'_, '_>, key: &str, fields: &[&'static str]) {
        if !self.passed_over.borrow_mut().insert(address(reading.node)) {
            return;
        }
        let known: Vec<&str> = fields.iter().chain(self.needs.aside).copied().collect();
        let hint = match nearest(key, known.iter().copied()) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("known here: {}", known.join(", ")),
        };
        let message = format!("unknown key `{key}`; {hint}");
        self.problems.add(Problem::new(&reading.path, reading.node.origin.clone(), message));
    }
}
