use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;

use pillarbox_sinks::config::parsed;
use pillarbox_sinks::{CHAIN_STEPS_MAX, ConfigFault, DeliveryTime, SinkConfig};
use serde::de::IgnoredAny;
use serde::ser::SerializeMap;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::problem::Problems;
use super::reading::{flattened, is_reference};
use super::section::Section;
use super::sink_kind::{Form, SinkKind, Typed};
use super::tree::{Node, Origin, Text, Value};
use crate::secret::{MASK, Redactions, masked, secrets_in};
use crate::sink;

/// How deep a chain may contain chains.
const CHAIN_DEPTH_MAX: usize = 4;

/// A sink as the user wrote it. Every kind of the contract is kept, whether or not this build has it.
#[derive(Debug, Clone)]
pub(crate) struct SinkSettings {
    /// The kind.
    pub(crate) kind: &'static SinkKind,
    /// The CloudEvents source; none given: `urn:pillarbox:<log_id>`.
    pub(crate) source: Option<String>,
    pub(crate) parts: Parts,
    /// What was written, with what is not to be seen marked.
    written: Node,
}

/// What a sink is built of.
#[derive(Debug, Clone)]
pub(crate) enum Parts {
    /// Its own configuration.
    Own(OwnParts),
    /// The sinks of a chain, in order.
    Chain(Vec<SinkSettings>),
    /// Nothing: this build cannot read it.
    Unknown,
}

/// The configuration of a sink that is not a chain.
#[derive(Clone)]
pub(crate) struct OwnParts {
    config: Arc<dyn SinkConfig>,
    /// Nothing is missing.
    is_whole: bool,
    is_timeout_unread: bool,
}

/// Any string of a config may be a secret.
impl std::fmt::Debug for OwnParts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OwnParts").field("is_whole", &self.is_whole).finish_non_exhaustive()
    }
}

/// The kind by its name.
struct Kind(&'static SinkKind);

impl<'de> Deserialize<'de> for Kind {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        parsed(deserializer, SinkKind::named).map(Kind)
    }
}

impl SinkSettings {
    /// The sink of a relay without a config.
    pub(crate) fn stdout() -> Self {
        let parts = OwnParts {
            config: Arc::new(pillarbox_sinks::StdoutConfig::default()),
            is_whole: true,
            is_timeout_unread: false,
        };
        let kind = ("kind".to_owned(), Node::new(Value::Text("stdout".to_owned()), Origin::Nowhere));
        let written = Node::new(Value::Table(BTreeMap::from([kind])), Origin::Nowhere);
        SinkSettings { kind: SinkKind::stdout(), source: None, parts: Parts::Own(parts), written }
    }

    /// None: what is wrong was said.
    pub(super) fn read(path: &str, node: &Node, problems: &Problems) -> Option<Self> {
        SinkSettings::read_nested(path, node, problems, 0)
    }

    fn read_nested(path: &str, node: &Node, problems: &Problems, depth: usize) -> Option<Self> {
        let section = Section::new(path, node, problems);
        if !matches!(node.value, Value::Table(_)) {
            section.problem(format!("must be a table, not {}", node.value.kind()));
            return None;
        }
        if !section.has("kind") {
            section.problem(format!("a sink needs a kind: one of {}", SinkKind::names()));
            return None;
        }
        let Kind(kind) = section.value("kind")?;
        let problems_before = problems.count();
        let section = section.needing(kind.needs());
        let (source, parts) = match &kind.form {
            Form::Typed(typed) => (section.value("source"), read_own(typed, &section)),
            Form::Chain => (None, Parts::Chain(read_chain(&section, problems, depth))),
            Form::NotBuilt(_) | Form::Later => {
                section.problem(kind.absence());
                (None, Parts::Unknown)
            }
        };
        let sink = SinkSettings { kind, source, parts, written: node.clone() };
        sink.say_faults(&section);
        // What is wrong with a key was said, and would be found again.
        if problems.count() == problems_before {
            sink.say_refusal(&section);
        }
        Some(sink)
    }
}

/// What a chain has; its sinks are read one by one.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct ChainKeys {
    #[serde(rename = "kind")]
    _kind: IgnoredAny,
    #[serde(rename = "sinks")]
    _sinks: IgnoredAny,
}

fn read_own(typed: &Typed, section: &Section<'_>) -> Parts {
    match (typed.read)(section) {
        Some(config) => Parts::Own(OwnParts {
            config: config.into(),
            is_whole: section.is_whole(),
            is_timeout_unread: section.is_unread("timeout"),
        }),
        None => Parts::Unknown,
    }
}

fn read_chain(section: &Section<'_>, problems: &Problems, depth: usize) -> Vec<SinkSettings> {
    section.read::<ChainKeys>();
    if depth >= CHAIN_DEPTH_MAX {
        section.problem(format!("chains may be nested at most chain_depth_max = {CHAIN_DEPTH_MAX} deep"));
        return Vec::new();
    }
    if !section.has("sinks") {
        section.problem("sink kind 'chain' needs `sinks`, for example sinks = [{ kind = \"…\" }, …]");
    }
    let sinks = section.tables("sinks");
    if section.has("sinks") && sinks.is_empty() {
        section.problem_of("sinks", "a chain needs at least one sink");
    }
    if sinks.len() > CHAIN_STEPS_MAX {
        let count = sinks.len();
        section.problem_of(
            "sinks",
            format!("a chain of {count} sinks is longer than chain_steps_max = {CHAIN_STEPS_MAX}"),
        );
    }
    let read = |(path, node): (String, &Node)| SinkSettings::read_nested(&path, node, problems, depth + 1);
    sinks.into_iter().filter_map(read).collect()
}

/// What only the sink itself knows to be wrong.
impl SinkSettings {
    fn say_faults(&self, section: &Section<'_>) {
        let faults = match &self.parts {
            Parts::Own(own) => own.config.faults(),
            _ => Vec::new(),
        };
        let redactions = self.redactions();
        let is_wrong = |key: &str| {
            let has_fault = faults.iter().any(|fault| fault.key == key && fault.beside.is_none());
            has_fault || section.is_unread(key) || section.is_replaced(key)
        };
        let is_to_blame = |fault: &&ConfigFault| {
            let is_known = section.is_unread(fault.key) || section.is_replaced(fault.key);
            !is_known && !fault.beside.is_some_and(is_wrong)
        };
        let blamed: Vec<bool> = faults.iter().map(|fault| is_to_blame(&fault)).collect();
        for (fault, _) in faults.into_iter().zip(blamed).filter(|(_, is_blamed)| *is_blamed) {
            section.problem_of(fault.key, redactions.apply(&sink::text_of(fault.error)));
        }
    }

    /// Tries to build it, without connecting to anything: what is wrong with the whole.
    fn say_refusal(&self, section: &Section<'_>) {
        if let Err(refusal) = sink::try_to_build(self) {
            section.problem(self.redactions().apply(&refusal.to_string()));
        }
    }
}

/// What it is built of.
impl SinkSettings {
    /// The sinks of a chain, in order.
    pub(crate) fn chain(&self) -> &[SinkSettings] {
        match &self.parts {
            Parts::Chain(sinks) => sinks,
            _ => &[],
        }
    }

    /// Its own configuration, if nothing is missing.
    pub(crate) fn config(&self) -> Option<&dyn SinkConfig> {
        match &self.parts {
            Parts::Own(own) if own.is_whole => Some(&*own.config),
            _ => None,
        }
    }

    /// Its own configuration, if it is of this type.
    pub(crate) fn config_of<T: SinkConfig>(&self) -> Option<&T> {
        self.config().and_then(|config| (config as &dyn Any).downcast_ref())
    }

    /// How long one delivery of so many events may take by its time-outs, if they could be read.
    pub(super) fn delivery_time(&self, batch_size: usize) -> Option<DeliveryTime> {
        match &self.parts {
            Parts::Own(own) if !own.is_timeout_unread => own.config.delivery_time(batch_size),
            Parts::Chain(steps) => {
                let times: Vec<DeliveryTime> = steps.iter().filter_map(|step| step.delivery_time(batch_size)).collect();
                let why = times.iter().map(|time| time.why.as_str()).collect::<Vec<_>>().join(", then ");
                (!times.is_empty()).then(|| DeliveryTime { max: times.iter().map(|time| time.max).sum(), why })
            }
            _ => None,
        }
    }
}

/// What of it people may see.
impl SinkSettings {
    /// Where it delivers to, for people: no secret.
    pub(crate) fn destination(&self) -> String {
        if !self.chain().is_empty() {
            let steps = self.chain().iter().map(|step| format!("{} {}", step.kind.name, step.destination()));
            return steps.map(|step| step.trim_end().to_owned()).collect::<Vec<_>>().join(", then ");
        }
        let shown = self.kind.required().iter().filter_map(|(key, _)| {
            let text = self.written.get(key)?.read.get()?;
            // Tokens in the paths of webhooks are common.
            let is_url = *key == "url" && !text.is_hidden;
            Some(if is_url { without_http_path(&text.value) } else { shown(text) })
        });
        shown.collect::<Vec<_>>().join(" ")
    }

    /// What is not to be seen in any message about this sink.
    pub(crate) fn redactions(&self) -> Redactions {
        let mut texts = Vec::new();
        collect_texts(&self.written, &mut texts);
        let of_text = |text: &Text| {
            let within = secrets_in(&text.value).into_iter().map(|secret| (secret, MASK.to_owned()));
            std::iter::once((text.value.clone(), shown(text))).chain(within).collect::<Vec<_>>()
        };
        Redactions::new(texts.into_iter().flat_map(of_text))
    }

    /// The string that stands at `key`.
    #[cfg(test)]
    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        let node = self.written.get(key)?;
        match (node.read.get(), &node.value) {
            (Some(text), _) => Some(&text.value),
            (None, Value::Text(text)) => Some(text),
            _ => None,
        }
    }
}

/// Every string that was read, those of a chain's sinks too.
fn collect_texts<'n>(node: &'n Node, texts: &mut Vec<&'n Text>) {
    texts.extend(node.read.get());
    match &node.value {
        Value::List(items) => items.iter().for_each(|item| collect_texts(item, texts)),
        Value::Table(entries) => entries.values().for_each(|node| collect_texts(node, texts)),
        _ => {}
    }
}

/// A string for people: secrets, what came out of a file, and passwords in URLs are masked.
fn shown(text: &Text) -> String {
    if text.is_hidden { MASK.to_owned() } else { masked(&text.value) }
}

/// `https://host/…` of a URL of a webhook, other URLs whole; without secrets.
fn without_http_path(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://").filter(|(scheme, _)| scheme.starts_with("http")) else {
        return masked(url);
    };
    let Some(end) = rest.find(['/', '?', '#', '{']) else { return masked(url) };
    let (host, path) = rest.split_at(end);
    // With an `@` in the path, what looks like a port may be the beginning of a password that should have been escaped.
    let host = if path.contains('@') { host.split(':').next().unwrap_or_default() } else { host };
    format!("{}/…", masked(&format!("{scheme}://{host}")))
}

/// What people may see of what was read.
fn printed(node: &Node) -> Option<serde_json::Value> {
    if let Some(text) = node.read.get() {
        return Some(match node.value {
            Value::Integer(number) if !text.is_hidden => number.into(),
            Value::Bool(value) if !text.is_hidden => value.into(),
            _ => shown(text).into(),
        });
    }
    match &node.value {
        Value::List(items) => Some(items.iter().filter_map(printed).collect()),
        Value::Table(entries) if !is_reference(entries) => {
            let entries = flattened(entries).into_iter();
            let entries = entries.filter_map(|(name, node)| Some((name, shown(node.read.get()?).into())));
            Some(serde_json::Value::Object(entries.collect()))
        }
        _ => None,
    }
}

impl Serialize for SinkSettings {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("kind", self.kind.name)?;
        if let Parts::Chain(sinks) = &self.parts {
            map.serialize_entry("sinks", sinks)?;
            return map.end();
        }
        if let Value::Table(entries) = &self.written.value {
            let others = entries.iter().filter(|(key, _)| *key != "kind");
            let known = others.filter_map(|(key, node)| Some((key, printed(node)?)));
            known.into_iter().try_for_each(|(key, value)| map.serialize_entry(key, &value))?;
        }
        map.end()
    }
}
