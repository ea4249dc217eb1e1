use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::ops::RangeInclusive;
use std::time::Duration;

use super::duration;
use super::problem::{Problem, Problems, nearest};
use super::tree::{Node, Origin, Value};
use crate::secret::MASK;

/// One table of the file, read key by key. What was never asked for is unknown and becomes a problem.
pub(crate) struct Section<'p> {
    path: String,
    origin: Origin,
    entries: BTreeMap<String, Node>,
    /// The keys that were asked for, and where the file has them.
    asked: Vec<(&'static str, Option<Origin>)>,
    problems: &'p Problems,
}

/// A string and whether it came out of a file of secrets.
#[derive(Clone)]
pub(crate) struct Text {
    pub(crate) value: String,
    pub(crate) from_file: bool,
}

/// Any string of a config may be a secret.
impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MASK)
    }
}

impl<'p> Section<'p> {
    pub(crate) fn new(path: impl Into<String>, node: Option<Node>, problems: &'p Problems) -> Self {
        let path = path.into();
        let (origin, entries) = match node {
            Some(Node { value: Value::Table(entries), origin }) => (origin, entries),
            Some(Node { value, origin }) => {
                let message = format!("must be a table, not {}", value.kind());
                problems.add(Problem::new(&path, origin.clone(), message));
                (origin, BTreeMap::new())
            }
            None => (Origin::Nowhere, BTreeMap::new()),
        };
        Section { path, origin, entries, asked: Vec::new(), problems }
    }

    /// The table below `key`.
    pub(crate) fn section(&mut self, key: &'static str) -> Section<'p> {
        let node = self.take(key);
        Section::new(self.path_of(key), node, self.problems)
    }

    /// The tables of the list below `key`.
    pub(crate) fn sections(&mut self, key: &'static str) -> Vec<Section<'p>> {
        let path = self.path_of(key);
        match self.take(key) {
            None => Vec::new(),
            Some(Node { value: Value::List(items), .. }) => {
                let section = |(index, item)| Section::new(format!("{path}[{index}]"), Some(item), self.problems);
                items.into_iter().enumerate().map(section).collect()
            }
            Some(node) => {
                self.wrong(key, &node, "a list of tables ([[…]])");
                Vec::new()
            }
        }
    }

    /// A string, `{ env = "X" }` or `{ file = "PATH" }`.
    pub(crate) fn text(&mut self, key: &'static str) -> Option<Text> {
        let node = self.take(key)?;
        self.resolve(key, node)
    }

    /// A list of strings; in an environment variable, with commas.
    pub(crate) fn texts(&mut self, key: &'static str) -> Option<Vec<Text>> {
        let node = self.take(key)?;
        match (node.value, node.origin) {
            (Value::List(items), _) => Some(items.into_iter().filter_map(|item| self.resolve(key, item)).collect()),
            (Value::Text(text), Origin::Environment(_)) => {
                let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
                Some(parts.map(|part| Text { value: part.to_owned(), from_file: false }).collect())
            }
            (value, origin) => {
                self.wrong(key, &Node { value, origin }, "a list of strings");
                None
            }
        }
    }

    /// A table of strings with names of the user's choice. A number or a switch is read as it is written, and `a.b = "…"` is the
    /// same as `"a.b" = "…"`, whichever of them TOML makes a table of.
    pub(crate) fn map(&mut self, key: &'static str) -> Option<BTreeMap<String, Text>> {
        let node = self.take(key)?;
        let Value::Table(entries) = node.value else {
            self.wrong(key, &node, "a table of strings");
            return None;
        };
        let mut map = BTreeMap::new();
        self.flatten(key, "", entries, &mut map);
        Some(map)
    }

    fn flatten(&self, key: &str, prefix: &str, entries: BTreeMap<String, Node>, map: &mut BTreeMap<String, Text>) {
        for (name, node) in entries {
            let name = format!("{prefix}{name}");
            let plain = |value: String| Some(Text { value, from_file: false });
            let text = match node.value {
                Value::Integer(number) => plain(number.to_string()),
                Value::Bool(value) => plain(value.to_string()),
                Value::Table(inner) if !is_reference(&inner) && !inner.is_empty() => {
                    self.flatten(key, &format!("{name}."), inner, map);
                    continue;
                }
                _ => self.resolve(&format!("{key}.{name}"), node),
            };
            if let Some(text) = text {
                map.insert(name, text);
            }
        }
    }

    /// A whole number within limits.
    pub(crate) fn count(&mut self, key: &'static str, limits: RangeInclusive<i64>) -> Option<i64> {
        let node = self.take(key)?;
        let number = match (&node.value, &node.origin) {
            (Value::Integer(number), _) => Some(*number),
            (Value::Text(text), Origin::Environment(_)) => text.trim().parse().ok(),
            _ => None,
        };
        match number {
            Some(number) if limits.contains(&number) => Some(number),
            Some(number) => {
                let (low, high) = limits.into_inner();
                self.problem_at(key, node.origin, format!("{number} is outside {low} to {high}"));
                None
            }
            None => {
                self.wrong(key, &node, "a whole number");
                None
            }
        }
    }

    /// True or false.
    pub(crate) fn flag(&mut self, key: &'static str) -> Option<bool> {
        let node = self.take(key)?;
        match (&node.value, &node.origin) {
            (Value::Bool(value), _) => Some(*value),
            (Value::Text(text), Origin::Environment(_)) if text == "true" || text == "1" => Some(true),
            (Value::Text(text), Origin::Environment(_)) if text == "false" || text == "0" => Some(false),
            _ => {
                self.wrong(key, &node, "true or false");
                None
            }
        }
    }

    /// A duration.
    pub(crate) fn duration(&mut self, key: &'static str) -> Option<Duration> {
        self.parsed(key, duration::parse)
    }

    /// A duration or `forever` (None).
    pub(crate) fn duration_or_forever(&mut self, key: &'static str) -> Option<Option<Duration>> {
        self.parsed(key, |text| match text {
            "forever" => Ok(None),
            _ => duration::parse(text).map(Some).map_err(|message| format!("{message}, or \"forever\"")),
        })
    }

    /// A string that `parse` turns into something.
    pub(crate) fn parsed<T>(&mut self, key: &'static str, parse: impl FnOnce(&str) -> Result<T, String>) -> Option<T> {
        let node = self.take(key)?;
        let origin = node.origin.clone();
        // A number is read as its digits, so that `start = 42` and a duration without a unit reach `parse`.
        let text = match node.value {
            Value::Integer(number) => Text { value: number.to_string(), from_file: false },
            value => self.resolve(key, Node { value, origin: node.origin })?,
        };
        match parse(&text.value) {
            Ok(value) => Some(value),
            Err(message) => {
                let message = if text.from_file { message.replace(&text.value, MASK) } else { message };
                self.problem_at(key, origin, message);
                None
            }
        }
    }

    /// One of a few words.
    pub(crate) fn one_of<T: Copy>(&mut self, key: &'static str, words: &[(&str, T)]) -> Option<T> {
        self.parsed(key, |text| match words.iter().find(|(word, _)| *word == text) {
            Some((_, value)) => Ok(*value),
            None => {
                let all: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
                let hint = nearest(text, all.iter().copied()).map(|word| format!("; did you mean \"{word}\"?"));
                Err(format!("'{text}' is not one of {}{}", all.join(", "), hint.unwrap_or_default()))
            }
        })
    }

    /// Whether the file says anything at `key`.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.entries.contains_key(key)
    }

    /// Something is wrong with the table as a whole.
    pub(crate) fn problem(&self, message: impl Into<String>) {
        self.problems.add(Problem::new(&self.path, self.origin.clone(), message));
    }

    /// Something is wrong with what stands at `key`.
    pub(crate) fn problem_of(&self, key: &str, message: impl Into<String>) {
        let written = self.asked.iter().find(|(asked, _)| *asked == key).and_then(|(_, origin)| origin.clone());
        self.problem_at(key, written.unwrap_or_else(|| self.origin.clone()), message);
    }

    /// Whether there is something at `key` that was asked for and could not be read: `value` is what came of it.
    pub(crate) fn is_unread<T>(&self, key: &str, value: &Option<T>) -> bool {
        value.is_none() && self.is_written(key)
    }

    /// Whether what was asked for at `key` was there.
    pub(crate) fn is_written(&self, key: &str) -> bool {
        self.asked.iter().any(|(asked, origin)| *asked == key && origin.is_some())
    }

    /// How much is wrong so far, anywhere.
    pub(crate) fn problem_count(&self) -> usize {
        self.problems.count()
    }

    /// Calls the table by what people know it by.
    pub(crate) fn rename(&mut self, path: String) {
        self.path = path;
    }

    /// Reports what was never asked for.
    pub(crate) fn finish(self) {
        for (key, node) in &self.entries {
            let asked: Vec<&str> = self.asked.iter().map(|(asked, _)| *asked).collect();
            let hint = match nearest(key, asked.iter().copied()) {
                Some(near) => format!("did you mean `{near}`?"),
                None => format!("known here: {}", asked.join(", ")),
            };
            self.problem_at(key, node.origin.clone(), format!("unknown key `{key}`; {hint}"));
        }
    }

    fn take(&mut self, key: &'static str) -> Option<Node> {
        let node = self.entries.remove(key);
        self.asked.push((key, node.as_ref().map(|node| node.origin.clone())));
        node
    }

    fn path_of(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_owned() } else { format!("{}.{key}", self.path) }
    }

    fn problem_at(&self, key: &str, origin: Origin, message: impl Into<String>) {
        self.problems.add(Problem::new(self.path_of(key), origin, message));
    }

    fn wrong(&self, key: &str, node: &Node, wanted: &str) {
        self.problem_at(key, node.origin.clone(), format!("must be {wanted}, not {}", node.value.kind()));
    }

    fn resolve(&self, key: &str, node: Node) -> Option<Text> {
        let Node { value, origin } = node;
        let reference = match value {
            Value::Text(value) => return Some(Text { value, from_file: false }),
            Value::Table(ref entries) if entries.len() == 1 => {
                entries.iter().next().map(|(name, node)| (name.clone(), node.value.clone()))
            }
            _ => None,
        };
        let resolved = match reference {
            Some((name, Value::Text(variable))) if name == "env" => std::env::var(&variable)
                .map(|value| Text { value, from_file: false })
                .map_err(|_| format!("the environment variable {variable} is not set; set it or write the value here")),
            Some((name, Value::Text(path))) if name == "file" => fs::read_to_string(&path)
                .map(|value| Text { value: value.trim_end_matches(['\r', '\n']).to_owned(), from_file: true })
                .map_err(|error| format!("cannot read the file {path}: {error}")),
            _ => Err(format!("must be a string, {{ env = \"NAME\" }} or {{ file = \"PATH\" }}, not {}", value.kind())),
        };
        resolved.map_err(|message| self.problem_at(key, origin, message)).ok()
    }
}

/// Whether a table is `{ env = "NAME" }` or `{ file = "PATH" }`.
pub(super) fn is_reference(entries: &BTreeMap<String, Node>) -> bool {
    let mut names = entries.iter();
    matches!((names.next(), names.next()), (Some((name, Node { value: Value::Text(_), .. })), None) if name == "env" || name == "file")
}
