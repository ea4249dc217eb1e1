use std::collections::BTreeMap;

use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::problem::nearest;
use super::section::{Section, Text};
use crate::secret::{MASK, masked};

/// How deep a chain may contain chains.
const CHAIN_DEPTH_MAX: usize = 4;

/// A sink as the user wrote it. Every kind of the contract is read, whether or not this build has it.
#[derive(Debug, Clone)]
pub(crate) struct SinkSettings {
    /// The kind.
    pub(crate) kind: &'static str,
    /// Its strings.
    texts: BTreeMap<&'static str, Text>,
    /// Its switches.
    flags: BTreeMap<&'static str, bool>,
    /// The sinks of a chain, in order.
    chain: Vec<SinkSettings>,
}

struct Kind {
    name: &'static str,
    required: &'static [&'static str],
    optional: &'static [&'static str],
    flags: &'static [&'static str],
    built_in: bool,
}

const fn kind(name: &'static str, required: &'static [&'static str], optional: &'static [&'static str]) -> Kind {
    Kind { name, required, optional, flags: &[], built_in: false }
}

/// All kinds. `source` is the CloudEvents source; none given: `urn:pillarbox:<log_id>`.
const KINDS: [Kind; 12] = [
    Kind { built_in: true, ..kind("stdout", &[], &["source"]) },
    Kind { built_in: true, flags: &["fsync"], ..kind("file", &["path"], &["source"]) },
    kind("http", &["url"], &["secret", "source"]),
    kind("kafka", &["brokers", "topic"], &["source"]),
    kind("redis_pubsub", &["url", "channel"], &["source"]),
    kind("redis_stream", &["url", "stream"], &["source"]),
    kind("nats", &["url", "subject"], &["source"]),
    kind("rabbitmq", &["url", "exchange", "routing_key"], &["source"]),
    kind("sqs", &["queue_url"], &["source"]),
    kind("websocket", &["room"], &["source"]),
    kind("postgres", &["url", "table"], &["source"]),
    kind("chain", &[], &[]),
];

impl SinkSettings {
    /// The sink of a relay without a config.
    pub(crate) fn stdout() -> Self {
        SinkSettings { kind: "stdout", texts: BTreeMap::new(), flags: BTreeMap::new(), chain: Vec::new() }
    }

    /// None: what is wrong was said.
    pub(crate) fn read(section: Section<'_>) -> Option<Self> {
        SinkSettings::read_nested(section, 0)
    }

    fn read_nested(mut section: Section<'_>, depth: usize) -> Option<Self> {
        let names = KINDS.iter().map(|kind| kind.name);
        if !section.has("kind") {
            let all: Vec<&str> = names.collect();
            section.problem(format!("a sink needs a kind: one of {}", all.join(", ")));
            return None;
        }
        let kind = section.parsed("kind", |text| {
            KINDS.iter().find(|kind| kind.name == text).ok_or_else(|| {
                let hint = nearest(text, names).map(|name| format!("; did you mean \"{name}\"?")).unwrap_or_default();
                format!("there is no sink kind '{text}'{hint}")
            })
        })?;
        if !kind.built_in {
            section.problem(format!(
                "sink kind '{}' is not in this build; built in: {}. A later version of pillarbox will have it",
                kind.name,
                built_in().join(", ")
            ));
        }
        let mut texts = BTreeMap::new();
        for key in kind.required.iter().chain(kind.optional) {
            let written = section.has(key);
            match section.text(key) {
                Some(text) if text.value.is_empty() => section.problem(format!("`{key}` is empty")),
                Some(text) => drop(texts.insert(*key, text)),
                None if !written && kind.required.contains(key) => {
                    section.problem(format!("sink kind '{}' needs `{key}`", kind.name));
                }
                None => {}
            }
        }
        let flags = kind.flags.iter().filter_map(|key| section.flag(key).map(|value| (*key, value))).collect();
        let chain = if kind.name == "chain" { read_chain(&mut section, depth) } else { Vec::new() };
        section.finish();
        Some(SinkSettings { kind: kind.name, texts, flags, chain })
    }

    /// One of its strings.
    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        self.texts.get(key).map(|text| text.value.as_str())
    }

    /// One of its switches.
    pub(crate) fn flag(&self, key: &str) -> Option<bool> {
        self.flags.get(key).copied()
    }
}

fn read_chain(section: &mut Section<'_>, depth: usize) -> Vec<SinkSettings> {
    let sections = section.sections("sinks");
    if sections.is_empty() {
        section.problem("a chain needs its sinks, in order: sinks = [{ kind = \"…\" }, …]");
    }
    if depth >= CHAIN_DEPTH_MAX {
        section.problem(format!("chains may be nested at most chain_depth_max = {CHAIN_DEPTH_MAX} deep"));
        return Vec::new();
    }
    sections.into_iter().filter_map(|sink| SinkSettings::read_nested(sink, depth + 1)).collect()
}

/// The kinds that this build has.
pub(crate) fn built_in() -> Vec<&'static str> {
    KINDS.iter().filter(|kind| kind.built_in).map(|kind| kind.name).collect()
}

/// Secrets, what came out of a file, and passwords in URLs are masked.
impl Serialize for SinkSettings {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("kind", self.kind)?;
        for (key, text) in &self.texts {
            if text.from_file || key.contains("secret") || key.contains("password") || key.contains("token") {
                map.serialize_entry(key, MASK)?;
            } else {
                map.serialize_entry(key, &masked(&text.value))?;
            }
        }
        for (key, value) in &self.flags {
            map.serialize_entry(key, value)?;
        }
        if !self.chain.is_empty() {
            map.serialize_entry("sinks", &self.chain)?;
        }
        map.end()
    }
}
