use std::collections::BTreeMap;
use std::fmt;
use std::fs;

use serde::de::value::{SeqDeserializer, StrDeserializer};
use serde::de::{self, DeserializeSeed, Deserializer, IntoDeserializer, MapAccess, Unexpected, Visitor};
use serde::forward_to_deserialize_any;

use super::section::Section;
use super::tree::{Node, Origin, Text, Value};
use crate::secret::MASK;

/// A value of the file that serde reads, with the types of the sections and sinks telling what it has to be.
#[derive(Clone)]
pub(super) struct Reading<'s, 'n> {
    pub(super) section: &'s Section<'n>,
    pub(super) node: &'s Node,
    /// The name that people know it by, like `relay.workers`.
    pub(super) path: String,
    /// A [`Secret`](pillarbox_sinks::Secret) reads it.
    is_secret: bool,
    /// It has a name of the user's choice, and may be empty.
    is_entry: bool,
}

/// The newtype that marks secrets.
const SECRET: &str = "Secret";

/// Why a value cannot be read, and which.
#[derive(Debug)]
pub(super) struct ReadError {
    pub(super) message: String,
    /// The key that is not there.
    pub(super) missing: Option<&'static str>,
    pub(super) place: Option<Place>,
}

/// The value at fault: its path, where it was written, and its address, by which it is passed over from now on.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) path: String,
    pub(super) origin: Origin,
    pub(super) address: usize,
}

impl fmt::Display for ReadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for ReadError {}

impl de::Error for ReadError {
    fn custom<T: fmt::Display>(message: T) -> Self {
        ReadError { message: message.to_string(), missing: None, place: None }
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn de::Expected) -> Self {
        ReadError::custom(format!("must be {expected}, not {found}"))
    }

    fn unknown_variant(found: &str, expected: &'static [&'static str]) -> Self {
        ReadError::custom(not_one_of(found, expected))
    }

    fn missing_field(field: &'static str) -> Self {
        ReadError { missing: Some(field), ..ReadError::custom(format!("needs `{field}`")) }
    }
}

/// What to say of a word that is none of these.
pub(super) fn not_one_of(found: &str, words: &[&str]) -> String {
    let words: Vec<String> = words.iter().map(|word| format!("\"{word}\"")).collect();
    format!("'{found}' is none of its values; write {}", words.join(" or "))
}

/// The address of a value, which stands for it while the file is read.
pub(super) fn address(node: &Node) -> usize {
    std::ptr::from_ref(node).addr()
}

impl<'s, 'n> Reading<'s, 'n> {
    pub(super) fn new(section: &'s Section<'n>, node: &'s Node, path: String) -> Self {
        Reading { section, node, path, is_secret: false, is_entry: false }
    }

    fn below(&self, node: &'s Node, path: String) -> Self {
        Reading { is_entry: false, ..Reading { node, path, ..self.clone() } }
    }

    /// An error belongs to the innermost value in which it arose.
    fn placed(&self, error: ReadError) -> ReadError {
        if error.place.is_some() {
            return error;
        }
        let place = Place { path: self.path.clone(), origin: self.node.origin.clone(), address: address(self.node) };
        ReadError { place: Some(place), ..error }
    }

    fn error(&self, message: impl fmt::Display) -> ReadError {
        self.placed(de::Error::custom(message))
    }

    fn wrong(&self, wanted: &str) -> ReadError {
        self.error(format!("must be {wanted}, not {}", self.node.value.kind()))
    }

    /// The string that stands here, `{ env = "X" }` and `{ file = "PATH" }` resolved; a number or a switch as it is written.
    fn text(&self) -> Result<&'s Text, ReadError> {
        if let Some(text) = self.node.read.get() {
            return Ok(text);
        }
        let (value, from_file) = self.resolve()?;
        let is_optional = !self.section.wants_filled() || self.is_entry;
        if value.is_empty() && !is_optional {
            return Err(self.error(self.section.empty(&self.path)));
        }
        Ok(self.node.read.get_or_init(|| Text { value, is_hidden: from_file || self.is_secret }))
    }

    fn resolve(&self) -> Result<(String, bool), ReadError> {
        let plain = |value: &dyn fmt::Display| Ok((value.to_string(), false));
        match &self.node.value {
            Value::Text(value) => plain(value),
            Value::Integer(number) => plain(number),
            Value::Bool(value) => plain(value),
            Value::Table(entries) if is_reference(entries) => {
                let source = entries.iter().find_map(|(name, node)| match &node.value {
                    Value::Text(text) => Some((name.as_str(), text)),
                    _ => None,
                });
                let (name, text) = source.ok_or_else(|| self.wrong(STRING))?;
                self.refer(name, text)
            }
            _ => Err(self.wrong(STRING)),
        }
    }

    fn refer(&self, name: &str, text: &str) -> Result<(String, bool), ReadError> {
        if name == "env" {
            let unset =
                |_| self.error(format!("the environment variable {text} is not set; set it or write the value here"));
            return std::env::var(text).map(|value| (value, false)).map_err(unset);
        }
        let read = fs::read_to_string(text).map(|value| (value.trim_end_matches(['\r', '\n']).to_owned(), true));
        read.map_err(|error| self.error(format!("cannot read the file {text}: {error}")))
    }

    /// What comes of the string here. What refuses it does not repeat it if it is not to be seen.
    fn with_text<T>(&self, take: impl FnOnce(&str) -> Result<T, ReadError>) -> Result<T, ReadError> {
        let text = self.text()?;
        take(&text.value).map_err(|mut error| {
            if text.is_hidden && !text.value.is_empty() {
                error.message = error.message.replace(&text.value, MASK);
            }
            self.placed(error)
        })
    }

    fn is_from_environment(&self) -> bool {
        matches!(self.node.origin, Origin::Environment(_))
    }

    fn number(&self) -> Result<i64, ReadError> {
        let number = match &self.node.value {
            Value::Integer(number) => Some(*number),
            Value::Text(text) if self.is_from_environment() => text.trim().parse().ok(),
            _ => None,
        };
        let number = number.ok_or_else(|| self.wrong("a whole number"))?;
        self.text().map(|_| number)
    }

    fn flag(&self) -> Result<bool, ReadError> {
        let flag = match &self.node.value {
            Value::Bool(value) => Some(*value),
            Value::Text(text) if self.is_from_environment() => match text.as_str() {
                "true" | "1" => Some(true),
                "false" | "0" => Some(false),
                _ => None,
            },
            _ => None,
        };
        let flag = flag.ok_or_else(|| self.wrong("true or false"))?;
        self.text().map(|_| flag)
    }
}

/// What a string may look like.
const STRING: &str = "a string, { env = \"NAME\" } or { file = \"PATH\" }";

/// Whether a table is `{ env = "NAME" }` or `{ file = "PATH" }`.
pub(super) fn is_reference(entries: &BTreeMap<String, Node>) -> bool {
    let mut names = entries.iter();
    matches!((names.next(), names.next()), (Some((name, Node { value: Value::Text(_), .. })), None) if name == "env" || name == "file")
}

/// The entries of a table of strings with names of the user's choice: `a.b = "…"` is the same as `"a.b" = "…"`, whichever of them
/// TOML makes a table of.
pub(super) fn flattened(entries: &BTreeMap<String, Node>) -> Vec<(String, &Node)> {
    let mut all = Vec::new();
    for (name, node) in entries {
        match &node.value {
            Value::Table(inner) if !is_reference(inner) && !inner.is_empty() => {
                let inner = flattened(inner).into_iter().map(|(rest, node)| (format!("{name}.{rest}"), node));
                all.extend(inner);
            }
            _ => all.push((name.clone(), node)),
        }
    }
    all
}

macro_rules! numbers {
    ($($method:ident)*) => {$(
        fn $method<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
            let number = self.number()?;
            visitor.visit_i64(number).map_err(|error| self.placed(error))
        }
    )*};
}

impl<'de> Deserializer<'de> for Reading<'_, '_> {
    type Error = ReadError;

    /// For values that are written in several ways.
    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match &self.node.value {
            Value::Integer(_) => self.deserialize_i64(visitor),
            _ => self.deserialize_str(visitor),
        }
    }

    fn deserialize_str<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        let may_be_plain = self.is_entry || !matches!(self.node.value, Value::Integer(_) | Value::Bool(_));
        if !may_be_plain {
            return Err(self.wrong(STRING));
        }
        self.with_text(|text| visitor.visit_str(text))
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        self.deserialize_str(visitor)
    }

    fn deserialize_bool<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        let flag = self.flag()?;
        visitor.visit_bool(flag).map_err(|error| self.placed(error))
    }

    numbers! { deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64 deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64 }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        visitor.visit_newtype_struct(Reading { is_secret: self.is_secret || name == SECRET, ..self })
    }

    /// A list of strings; in an environment variable, with commas.
    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        match &self.node.value {
            Value::List(items) => {
                let items = items.iter().filter(|item| !self.section.passes_over(item));
                // The path is the key's: entries may be on one line.
                visitor.visit_seq(SeqDeserializer::new(items.map(|item| self.below(item, self.path.clone()))))
            }
            Value::Text(text) if self.is_from_environment() => {
                let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
                visitor.visit_seq(SeqDeserializer::new(parts))
            }
            _ => Err(self.wrong("a list of strings")),
        }
        .map_err(|error| self.placed(error))
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        let Value::Table(entries) = &self.node.value else { return Err(self.wrong("a table of strings")) };
        let entries = flattened(entries).into_iter();
        let entries = entries.map(|(name, node)| {
            let path = format!("{}.{name}", self.path);
            (name, Reading { is_entry: true, ..self.below(node, path) })
        });
        self.visit(visitor, entries.collect())
    }

    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        fields: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        let Value::Table(entries) = &self.node.value else { return Err(self.wrong("a table")) };
        let mut known = Vec::new();
        for (name, node) in entries {
            let reading = self.below(node, self.section.path_of(&self.path, name));
            if fields.contains(&name.as_str()) {
                known.push((name.clone(), reading));
            } else if !self.section.reads_aside(name) {
                self.section.unknown(&reading, name, fields);
            }
        }
        let examples = self.section.examples().map(|(name, node)| (name.to_owned(), self.below(node, name.to_owned())));
        known.extend(examples);
        self.visit(visitor, known)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, ReadError> {
        self.with_text(|text| visitor.visit_enum(StrDeserializer::new(text)))
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, ReadError> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        f32 f64 char bytes byte_buf unit unit_struct tuple tuple_struct identifier i128 u128
    }
}

impl Reading<'_, '_> {
    fn visit<'de, V: Visitor<'de>>(
        &self,
        visitor: V,
        entries: Vec<(String, Reading<'_, '_>)>,
    ) -> Result<V::Value, ReadError> {
        let entries = entries.into_iter().filter(|(_, reading)| !self.section.passes_over(reading.node));
        let entries: Vec<_> = entries.collect();
        visitor.visit_map(Entries { entries: entries.into_iter(), value: None }).map_err(|error| self.placed(error))
    }
}

impl<'de> IntoDeserializer<'de, ReadError> for Reading<'_, '_> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// The entries of a table. An error that a type makes of a value after it was read belongs to that value.
struct Entries<'s, 'n> {
    entries: std::vec::IntoIter<(String, Reading<'s, 'n>)>,
    value: Option<Reading<'s, 'n>>,
}

impl<'de> MapAccess<'de> for Entries<'_, '_> {
    type Error = ReadError;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> Result<Option<K::Value>, ReadError> {
        let Some((name, reading)) = self.entries.next() else { return Ok(None) };
        self.value = Some(reading);
        seed.deserialize(IntoDeserializer::<ReadError>::into_deserializer(name)).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> Result<V::Value, ReadError> {
        let reading = self.value.take().ok_or_else(|| de::Error::custom("a value before its key"))?;
        seed.deserialize(reading.clone()).map_err(|error| reading.placed(error))
    }
}
