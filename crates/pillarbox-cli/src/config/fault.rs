use std::collections::BTreeMap;

use super::section::{Section, Text};
use super::sink::{Setting, SinkSettings};
use super::sink_kind::{Key, Shape};
use crate::sink::{self, Refusal};

/// What only the sink itself knows to be wrong.
struct Fault {
    /// Where; None: nobody knows.
    key: Option<&'static str>,
    message: String,
}

/// What stands at a key, or one entry of a table.
type Piece = (&'static str, Setting);

/// What is believed to stand where nothing can be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Doubt {
    /// The example of what has to be there.
    Plain,
    /// What other keys may need.
    Helpful,
}

impl SinkSettings {
    /// Tries to build the sink, without connecting to anything, and says which keys keep it from being built.
    pub(super) fn say_faults(&self, section: &Section<'_>) {
        let redactions = self.redactions();
        for Fault { key, message } in self.faults() {
            match key {
                Some(key) => section.problem_of(key, redactions.apply(&message)),
                None => section.problem(redactions.apply(&message)),
            }
        }
    }

    /// What is missing or cannot be read was said already, and is not to hide the rest: something that would do is taken in its place.
    /// Of what would do, that is taken which leaves the least to blame.
    fn faults(&self) -> Vec<Fault> {
        let plain = self.faults_given(Doubt::Plain);
        if plain.is_empty() {
            return plain;
        }
        let helpful = self.faults_given(Doubt::Helpful);
        let believes_helpful = if self.is_whole() { helpful.len() < plain.len() } else { helpful.len() <= plain.len() };
        if believes_helpful { helpful } else { plain }
    }

    /// The pieces that are wrong: the one without which the sink can be built, else those that a sink which can be built does not
    /// bear.
    fn faults_given(&self, doubt: Doubt) -> Vec<Fault> {
        let pieces = self.pieces();
        let whole = pieces.iter().fold(self.completion(doubt), SinkSettings::with);
        let Err(refusal) = sink::try_to_build(&whole) else { return Vec::new() };
        if let Some((piece, sound)) = self.only_fault(&pieces, doubt) {
            return vec![Fault::of(piece, &sound, &refusal)];
        }
        let sound = self.stand_in(doubt);
        match sink::try_to_build(&sound) {
            Ok(()) => refused(sound, pieces),
            Err(_) => vec![Fault { key: None, message: refusal.to_string() }],
        }
    }

    /// The one piece that may be left out and without which all is well, and the sink without it. Two pieces that need each other are
    /// not put apart here.
    fn only_fault<'a>(&self, pieces: &'a [Piece], doubt: Doubt) -> Option<(&'a Piece, SinkSettings)> {
        let is_optional = |name: &str| self.kind.keys.iter().any(|key| key.name == name && key.example.is_none());
        let without = |at: usize| {
            let others = pieces.iter().enumerate().filter(|(other, _)| *other != at).map(|(_, piece)| piece);
            let sound = others.fold(self.completion(doubt), SinkSettings::with);
            sink::try_to_build(&sound).is_ok().then_some((&pieces[at], sound))
        };
        let mut faults = (0..pieces.len()).filter(|at| is_optional(pieces[*at].0)).filter_map(without);
        // Where two pieces do not go together, leaving out either one helps.
        faults.next().filter(|_| faults.next().is_none())
    }

    /// What has to be there and is not, and what may be missed by other keys.
    fn completion(&self, doubt: Doubt) -> Self {
        self.example(doubt, |key| {
            !self.settings.contains_key(key.name) && (key.example.is_some() || self.has_unread(key))
        })
    }

    /// A sink of the same kind that has nothing of its own, but what has to be there and what other keys may need.
    fn stand_in(&self, doubt: Doubt) -> Self {
        self.example(doubt, |key| key.example.is_some() || self.settings.contains_key(key.name) || self.has_unread(key))
    }

    fn has_unread(&self, key: &Key) -> bool {
        self.unread.iter().any(|unread| unread.name == key.name)
    }

    /// A sink of the same kind whose keys have what would do there.
    fn example(&self, doubt: Doubt, wanted: impl Fn(&Key) -> bool) -> Self {
        let mut sink = SinkSettings::empty(self.kind);
        for key in self.kind.keys.iter().filter(|key| wanted(key)) {
            let value = match doubt {
                Doubt::Plain => key.example,
                Doubt::Helpful => key.helpful.or(key.example),
            };
            let text = value.map(|value| Text { value: value.to_owned(), from_file: false });
            let setting = match key.shape {
                Shape::Text => text.map(Setting::Text),
                Shape::Texts => text.map(|text| Setting::Texts(vec![text])),
                // No example could stand for the sinks of a chain.
                Shape::Sinks => self.settings.get(key.name).cloned(),
                _ => None,
            };
            sink.settings.extend(setting.map(|setting| (key.name, setting)));
        }
        sink
    }

    /// Whether everything is there and could be read.
    fn is_whole(&self) -> bool {
        let mut needed = self.kind.keys.iter().filter(|key| key.example.is_some());
        self.unread.is_empty() && needed.all(|key| self.settings.contains_key(key.name))
    }

    fn pieces(&self) -> Vec<Piece> {
        let of_setting = |(key, setting): (&&'static str, &Setting)| -> Vec<Piece> {
            match setting {
                Setting::Map(map) => {
                    let one = |(name, text): (&String, &Text)| BTreeMap::from([(name.clone(), text.clone())]);
                    map.iter().map(|entry| (*key, Setting::Map(one(entry)))).collect()
                }
                whole => vec![(*key, whole.clone())],
            }
        };
        self.settings.iter().flat_map(of_setting).collect()
    }

    fn with(mut self, (key, setting): &Piece) -> Self {
        match (self.settings.get_mut(key), setting) {
            (Some(Setting::Map(map)), Setting::Map(more)) => map.extend(more.clone()),
            _ => _ = self.settings.insert(key, setting.clone()),
        }
        self
    }
}

impl Fault {
    /// A piece that `sound` does not bear. Of a list, a sink tells the first entry that is wrong.
    fn of(piece: &Piece, sound: &SinkSettings, refusal: &Refusal) -> Self {
        let (key, mut message) = (piece.0, refusal.to_string());
        if let Setting::Texts(texts) = &piece.1 {
            let is_refused = |text: &Text| {
                sink::try_to_build(&sound.clone().with(&(key, Setting::Texts(vec![text.clone()])))).is_err()
            };
            let entries = texts.iter().enumerate().filter(|(_, text)| is_refused(text));
            let numbers: Vec<String> = entries.map(|(at, _)| (at + 1).to_string()).collect();
            if numbers.len() > 1 {
                message.push_str(&format!("; refused are the entries {} of this list", numbers.join(", ")));
            }
        }
        Fault { key: Some(key), message }
    }
}

/// The pieces that `sound` does not bear. One may need another, so that those which are refused are tried again beside those which
/// are not.
fn refused(mut sound: SinkSettings, mut suspects: Vec<Piece>) -> Vec<Fault> {
    loop {
        let mut left = Vec::new();
        for piece in &suspects {
            let with = sound.clone().with(piece);
            match sink::try_to_build(&with) {
                Ok(()) => sound = with,
                Err(refusal) => left.push((piece.clone(), refusal)),
            }
        }
        if left.len() == suspects.len() {
            return left.iter().map(|(piece, refusal)| Fault::of(piece, &sound, refusal)).collect();
        }
        suspects = left.into_iter().map(|(piece, _)| piece).collect();
    }
}
