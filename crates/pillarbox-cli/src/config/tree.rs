use std::collections::BTreeMap;
use std::fmt;
use std::sync::OnceLock;

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::problem::{Problem, Problems};
use crate::secret::MASK;

/// A value and where it was written.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    pub(crate) value: Value,
    pub(crate) origin: Origin,
    /// What it was read as, once it was: without this, no key asked for it.
    pub(crate) read: OnceLock<Text>,
}

impl Node {
    pub(crate) fn new(value: Value, origin: Origin) -> Self {
        Node { value, origin, read: OnceLock::new() }
    }

    /// What stands at `key`, if this is a table.
    pub(crate) fn get(&self, key: &str) -> Option<&Node> {
        match &self.value {
            Value::Table(entries) => entries.get(key),
            _ => None,
        }
    }
}

/// A string, and whether people may see it.
#[derive(Clone)]
pub(crate) struct Text {
    pub(crate) value: String,
    /// It is a secret, or came out of a file.
    pub(crate) is_hidden: bool,
}

/// Any string of a config may be a secret.
impl fmt::Debug for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(MASK)
    }
}

/// What was written.
#[derive(Clone)]
pub(crate) enum Value {
    Text(String),
    Integer(i64),
    Float,
    Bool(bool),
    List(Vec<Node>),
    Table(BTreeMap<String, Node>),
}

impl Value {
    /// What kind of value this is, for people.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Value::Text(_) => "a string",
            Value::Integer(_) => "a number",
            Value::Float => "a number with a fraction",
            Value::Bool(_) => "true or false",
            Value::List(_) => "a list",
            Value::Table(_) => "a table",
        }
    }
}

/// Any string of a config may be a secret.
impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind())
    }
}

/// Where something was written; in the order in which people read.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Origin {
    /// In the file, on this line, at this byte of the file.
    Line(usize, usize),
    /// In an environment variable.
    Environment(String),
    /// Nowhere: the file says nothing of it.
    Nowhere,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Line(line, _) => write!(f, "line {line}"),
            Origin::Environment(name) => write!(f, "environment variable {name}"),
            Origin::Nowhere => f.write_str("config"),
        }
    }
}

/// Reads the text of a file; every syntax error is a problem.
pub(crate) fn parse(text: &str, problems: &Problems) -> Node {
    let (table, errors) = DeTable::parse_recoverable(text);
    for error in errors {
        let at = error.span().map_or(0, |span| span.start);
        problems.add(Problem::new("", origin_of(text, at), error.message().replace('\n', ", ")));
    }
    let entries = entries(table.get_ref(), text);
    Node::new(Value::Table(entries), Origin::Line(1, 0))
}

/// The other names of settings, for those who come from elsewhere.
const ALIASES: [(&str, &str); 3] = [
    ("OUTBOX_WORKER_COUNT", "relay.workers"),
    ("OUTBOX_BATCH_SIZE", "relay.batch_size"),
    ("OUTBOX_POLL_INTERVAL", "relay.poll_interval"),
];

/// What the variables begin with that are settings.
pub(crate) const PREFIX: &str = "PILLARBOX__";

/// Lays the environment's settings over the file's; the contract's own names win over the aliases.
pub(crate) fn overlay(root: &mut Node, environment: impl IntoIterator<Item = (String, String)>, problems: &Problems) {
    let mut own = Vec::new();
    for (name, value) in environment {
        if let Some((_, path)) = ALIASES.iter().find(|(alias, _)| *alias == name) {
            put(root, path, &name, value, problems);
        } else if let Some(path) = name.strip_prefix(PREFIX) {
            own.push((name.clone(), path.to_ascii_lowercase().replace("__", "."), value));
        }
    }
    for (name, path, value) in own {
        put(root, &path, &name, value, problems);
    }
}

fn put(root: &mut Node, path: &str, name: &str, value: String, problems: &Problems) {
    let origin = Origin::Environment(name.to_owned());
    let mut parts: Vec<&str> = path.split('.').collect();
    let (first, last) = (parts[0], parts.pop().unwrap_or_default());
    if first == "subscription" || last.is_empty() || parts.contains(&"") {
        problems.add(Problem::new(path, origin, "only the settings outside of subscriptions can be set like this"));
        return;
    }
    let table = parts.iter().try_fold(root, |node, part| match &mut node.value {
        Value::Table(entries) => Some(
            entries
                .entry((*part).to_owned())
                .or_insert_with(|| Node::new(Value::Table(BTreeMap::new()), origin.clone())),
        ),
        _ => None,
    });
    // Where the file has something other than a table, that is the problem, and the file's section says so.
    if let Some(Node { value: Value::Table(entries), .. }) = table {
        entries.insert(last.to_owned(), Node::new(Value::Text(value), origin));
    }
}

fn entries(table: &DeTable<'_>, text: &str) -> BTreeMap<String, Node> {
    table.iter().map(|(key, value)| (key.get_ref().to_string(), node(value, key.span().start, text))).collect()
}

fn node(spanned: &Spanned<DeValue<'_>>, at: usize, text: &str) -> Node {
    let value = match spanned.get_ref() {
        DeValue::String(text) => Value::Text(text.to_string()),
        DeValue::Datetime(time) => Value::Text(time.to_string()),
        DeValue::Integer(number) => match i64::from_str_radix(number.as_str(), number.radix()) {
            Ok(number) => Value::Integer(number),
            Err(_) => Value::Text(number.to_string()),
        },
        DeValue::Float(_) => Value::Float,
        DeValue::Boolean(value) => Value::Bool(*value),
        DeValue::Array(items) => Value::List(items.iter().map(|item| node(item, item.span().start, text)).collect()),
        DeValue::Table(table) => Value::Table(entries(table, text)),
    };
    Node::new(value, origin_of(text, at))
}

fn origin_of(text: &str, at: usize) -> Origin {
    let line = text.as_bytes()[..at.min(text.len())].iter().filter(|byte| **byte == b'\n').count() + 1;
    Origin::Line(line, at)
}
