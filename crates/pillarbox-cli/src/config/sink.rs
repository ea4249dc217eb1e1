use std::collections::BTreeMap;
use std::time::Duration;

use pillarbox_sinks::CHAIN_STEPS_MAX;
use serde::ser::SerializeMap;
use serde::{Serialize, Serializer};

use super::duration;
use super::section::{Section, Text};
use super::sink_kind::{Key, Shape, SinkKind};
use crate::secret::{MASK, Redactions, masked, secrets_in};

/// How deep a chain may contain chains.
const CHAIN_DEPTH_MAX: usize = 4;

/// A sink as the user wrote it. Every kind of the contract is read, whether or not this build has it.
#[derive(Debug, Clone)]
pub(crate) struct SinkSettings {
    /// The kind.
    pub(crate) kind: &'static SinkKind,
    pub(super) settings: BTreeMap<&'static str, Setting>,
    /// The keys at which something stands that could not be read.
    pub(super) unread: Vec<&'static Key>,
}

/// What stands at one of its keys.
#[derive(Debug, Clone)]
pub(super) enum Setting {
    Text(Text),
    Texts(Vec<Text>),
    Word(&'static str),
    Count(i64),
    Duration(Duration),
    Flag(bool),
    Map(BTreeMap<String, Text>),
    Sinks(Vec<SinkSettings>),
}

impl SinkSettings {
    /// The sink of a relay without a config.
    pub(crate) fn stdout() -> Self {
        SinkSettings::empty(SinkKind::stdout())
    }

    pub(super) fn empty(kind: &'static SinkKind) -> Self {
        SinkSettings { kind, settings: BTreeMap::new(), unread: Vec::new() }
    }

    /// None: what is wrong was said.
    pub(crate) fn read(section: Section<'_>) -> Option<Self> {
        SinkSettings::read_nested(section, 0)
    }

    fn read_nested(mut section: Section<'_>, depth: usize) -> Option<Self> {
        if !section.has("kind") {
            section.problem(format!("a sink needs a kind: one of {}", SinkKind::names()));
            return None;
        }
        let kind = section.parsed("kind", SinkKind::named)?;
        let problems_before = section.problem_count();
        let mut sink = SinkSettings::empty(kind);
        for key in kind.keys {
            if let (Some(example), false) = (key.example, section.has(key.name)) {
                section.problem(needed(kind, key, example));
            }
            match read_key(&mut section, key, depth) {
                Some(setting) => _ = sink.settings.insert(key.name, setting),
                None if section.is_written(key.name) => sink.unread.push(key),
                None => {}
            }
        }
        // What is wrong within a chain would be found a second time by the chain.
        let is_known = kind.is_chain() && section.problem_count() > problems_before;
        if !kind.is_built() {
            section.problem(kind.absence());
        } else if !is_known {
            sink.say_faults(&section);
        }
        section.finish();
        Some(sink)
    }
}

/// What stands at its keys, for those who build the sink.
#[cfg_attr(
    not(all(feature = "http", feature = "redis")),
    allow(dead_code, reason = "the sinks that ask are not in this build")
)]
impl SinkSettings {
    /// One of its strings, or words.
    pub(crate) fn text(&self, key: &str) -> Option<&str> {
        match self.settings.get(key) {
            Some(Setting::Text(text)) => Some(&text.value),
            Some(Setting::Word(word)) => Some(word),
            _ => None,
        }
    }

    /// One of its lists.
    pub(crate) fn texts(&self, key: &str) -> impl Iterator<Item = &str> {
        let texts = match self.settings.get(key) {
            Some(Setting::Texts(texts)) => texts.as_slice(),
            _ => &[],
        };
        texts.iter().map(|text| text.value.as_str())
    }

    /// One of its tables.
    pub(crate) fn map(&self, key: &str) -> impl Iterator<Item = (&str, &str)> {
        let map = match self.settings.get(key) {
            Some(Setting::Map(map)) => Some(map),
            _ => None,
        };
        map.into_iter().flatten().map(|(name, text)| (name.as_str(), text.value.as_str()))
    }

    /// One of its numbers.
    pub(crate) fn count(&self, key: &str) -> Option<u64> {
        match self.settings.get(key) {
            Some(Setting::Count(count)) => u64::try_from(*count).ok(),
            _ => None,
        }
    }

    /// One of its times.
    pub(crate) fn duration(&self, key: &str) -> Option<Duration> {
        match self.settings.get(key) {
            Some(Setting::Duration(duration)) => Some(*duration),
            _ => None,
        }
    }

    /// One of its switches.
    pub(crate) fn flag(&self, key: &str) -> Option<bool> {
        match self.settings.get(key) {
            Some(Setting::Flag(flag)) => Some(*flag),
            _ => None,
        }
    }

    /// The sinks of a chain, in order.
    pub(crate) fn chain(&self) -> &[SinkSettings] {
        match self.settings.get("sinks") {
            Some(Setting::Sinks(sinks)) => sinks,
            _ => &[],
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
        let required = self.kind.keys.iter().filter(|key| key.example.is_some());
        let shown = required.filter_map(|key| match self.settings.get(key.name) {
            // Tokens in the paths of webhooks are common.
            Some(Setting::Text(text)) if key.name == "url" && !text.from_file => Some(without_http_path(&text.value)),
            Some(Setting::Text(text)) => Some(shown(text, false)),
            _ => None,
        });
        shown.collect::<Vec<_>>().join(" ")
    }

    /// What is not to be seen in a message about this sink, whoever made it.
    pub(crate) fn redactions(&self) -> Redactions {
        let of_text = |(text, hidden): (&Text, bool)| {
            let within = secrets_in(&text.value).into_iter().map(|secret| (secret, MASK.to_owned()));
            std::iter::once((text.value.clone(), shown(text, hidden))).chain(within).collect::<Vec<_>>()
        };
        Redactions::new(self.texts_with_secrecy().into_iter().flat_map(of_text))
    }

    /// Every string, those of a chain's sinks too, and whether it is a secret.
    fn texts_with_secrecy(&self) -> Vec<(&Text, bool)> {
        let of_key = |key: &'static Key| match self.settings.get(key.name) {
            Some(Setting::Text(text)) => vec![(text, key.is_hidden())],
            Some(Setting::Texts(texts)) => texts.iter().map(|text| (text, key.is_hidden())).collect(),
            Some(Setting::Map(map)) => map.iter().map(|(name, text)| (text, key.hides(name))).collect(),
            Some(Setting::Sinks(sinks)) => sinks.iter().flat_map(SinkSettings::texts_with_secrecy).collect(),
            _ => Vec::new(),
        };
        self.kind.keys.iter().flat_map(of_key).collect()
    }
}

fn needed(kind: &SinkKind, key: &Key, example: &str) -> String {
    let (kind, key, quote) = (kind.name, key.name, if matches!(key.shape, Shape::Text) { "\"" } else { "" });
    format!("sink kind '{kind}' needs `{key}`, for example {key} = {quote}{example}{quote}")
}

/// None: there is nothing, or what is wrong was said.
fn read_key(section: &mut Section<'_>, key: &Key, depth: usize) -> Option<Setting> {
    let name = key.name;
    Some(match key.shape {
        Shape::Text => Setting::Text(section.text(name).filter(|text| is_filled(section, key, text))?),
        Shape::Texts => {
            let texts = section.texts(name)?;
            Setting::Texts(texts.into_iter().filter(|text| is_filled(section, key, text)).collect())
        }
        Shape::Word(words) => {
            let words: Vec<(&str, &'static str)> = words.iter().map(|word| (*word, *word)).collect();
            Setting::Word(section.one_of(name, &words)?)
        }
        Shape::Count(most) => Setting::Count(section.count(name, 1..=most)?),
        Shape::Duration => {
            let duration = section.duration(name)?;
            if duration.is_zero() {
                section.problem_of(name, "must be longer than 0: no receiver could answer in time");
                return None;
            }
            Setting::Duration(duration)
        }
        Shape::Flag => Setting::Flag(section.flag(name)?),
        Shape::Map => Setting::Map(section.map(name)?),
        Shape::Sinks => Setting::Sinks(read_chain(section, name, depth)),
    })
}

fn is_filled(section: &Section<'_>, key: &Key, text: &Text) -> bool {
    if text.value.is_empty() {
        let problem = match key.example {
            Some(example) => format!("must not be empty; for example {} = \"{example}\"", key.name),
            None => "is empty; give it a value or leave it out".to_owned(),
        };
        section.problem_of(key.name, problem);
    }
    !text.value.is_empty()
}

fn read_chain(section: &mut Section<'_>, key: &'static str, depth: usize) -> Vec<SinkSettings> {
    let written = section.has(key);
    let sections = section.sections(key);
    if written && sections.is_empty() {
        section.problem_of(key, "a chain needs at least one sink");
    }
    if sections.len() > CHAIN_STEPS_MAX {
        let count = sections.len();
        section.problem_of(key, format!("a chain of {count} sinks is longer than chain_steps_max = {CHAIN_STEPS_MAX}"));
    }
    if depth >= CHAIN_DEPTH_MAX {
        section.problem(format!("chains may be nested at most chain_depth_max = {CHAIN_DEPTH_MAX} deep"));
        return Vec::new();
    }
    sections.into_iter().filter_map(|sink| SinkSettings::read_nested(sink, depth + 1)).collect()
}

/// A string for people: secrets, what came out of a file, and passwords in URLs are masked.
fn shown(text: &Text, hidden: bool) -> String {
    if hidden || text.from_file { MASK.to_owned() } else { masked(&text.value) }
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

impl Serialize for SinkSettings {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        map.serialize_entry("kind", self.kind.name)?;
        for key in self.kind.keys {
            let hidden = key.is_hidden();
            match self.settings.get(key.name) {
                None => {}
                Some(Setting::Text(text)) => map.serialize_entry(key.name, &shown(text, hidden))?,
                Some(Setting::Texts(texts)) => {
                    let texts: Vec<String> = texts.iter().map(|text| shown(text, hidden)).collect();
                    map.serialize_entry(key.name, &texts)?;
                }
                Some(Setting::Word(word)) => map.serialize_entry(key.name, word)?,
                Some(Setting::Count(count)) => map.serialize_entry(key.name, count)?,
                Some(Setting::Duration(time)) => map.serialize_entry(key.name, &duration::format(*time))?,
                Some(Setting::Flag(flag)) => map.serialize_entry(key.name, flag)?,
                Some(Setting::Map(values)) => {
                    let shown = values.iter().map(|(name, text)| (name, shown(text, key.hides(name))));
                    map.serialize_entry(key.name, &shown.collect::<BTreeMap<_, _>>())?;
                }
                Some(Setting::Sinks(sinks)) => map.serialize_entry(key.name, sinks)?,
            }
        }
        map.end()
    }
}
