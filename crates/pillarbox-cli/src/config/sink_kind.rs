use pillarbox_sinks::SinkConfig;
use serde::de::DeserializeOwned;

use super::problem::nearest;
use super::section::{Needs, Section};

/// A kind of sink: a new one is a row in [`pillarbox_sinks::sink_kinds`], with the type that a user's configuration is read into.
#[derive(Debug)]
pub(crate) struct SinkKind {
    /// As it is written in the config.
    pub(crate) name: &'static str,
    pub(super) form: Form,
}

/// How a kind is read.
#[derive(Debug)]
pub(super) enum Form {
    /// Into its own type.
    Typed(Typed),
    /// As a list of other sinks.
    Chain,
    /// Not at all: this build was made without the feature of this name.
    #[cfg_attr(feature = "full", allow(dead_code, reason = "a full build has all kinds"))]
    NotBuilt(&'static str),
    /// Not at all: a later version will.
    Later,
}

/// What is known of the type of a kind.
#[derive(Debug, Clone, Copy)]
pub(super) struct Typed {
    /// The keys that have to be there, with an example of each.
    pub(super) required: fn() -> &'static [(&'static str, &'static str)],
    /// Reads it, and says what is wrong.
    pub(super) read: fn(&Section<'_>) -> Option<Box<dyn SinkConfig>>,
}

const fn typed<T: SinkConfig + DeserializeOwned>() -> Form {
    Form::Typed(Typed { required: T::required, read: |section| Some(Box::new(section.read::<T>()?)) })
}

/// A kind of the feature with this name.
macro_rules! kind {
    ($name:literal, $feature:literal, $config:ident) => {{
        #[cfg(feature = $feature)]
        const FORM: Form = typed::<pillarbox_sinks::$config>();
        #[cfg(not(feature = $feature))]
        const FORM: Form = Form::NotBuilt($feature);
        SinkKind { name: $name, form: FORM }
    }};
}

const fn later(name: &'static str) -> SinkKind {
    SinkKind { name, form: Form::Later }
}

macro_rules! all_kinds {
    ($($name:literal $feature:literal $config:ident,)*) => {
        &[
            SinkKind { name: "stdout", form: typed::<pillarbox_sinks::StdoutConfig>() },
            SinkKind { name: "file", form: typed::<pillarbox_sinks::FileConfig>() },
            $(kind!($name, $feature, $config),)*
            SinkKind { name: "chain", form: Form::Chain },
            later("nats"),
            later("rabbitmq"),
            later("sqs"),
            later("websocket"),
        ]
    };
}

/// All kinds of the contract, whether or not this build has them.
static KINDS: &[SinkKind] = pillarbox_sinks::sink_kinds!(all_kinds);

/// The keys of every sink that are not its type's.
const COMMON_KEYS: [&str; 2] = ["kind", "source"];

impl SinkKind {
    /// The kind of this name; else what to say.
    pub(super) fn named(name: &str) -> Result<&'static SinkKind, String> {
        KINDS.iter().find(|kind| kind.name == name).ok_or_else(|| {
            let near = nearest(name, KINDS.iter().map(|kind| kind.name));
            let hint = near.map(|near| format!("; did you mean \"{near}\"?")).unwrap_or_default();
            format!("there is no sink kind '{name}'{hint}")
        })
    }

    /// The names of all kinds, with commas between.
    pub(super) fn names() -> String {
        names(|_| true)
    }

    /// The sink of a relay without a config.
    pub(super) fn stdout() -> &'static SinkKind {
        &KINDS[0]
    }

    /// The keys that have to be there, with an example of each; they say where it delivers to.
    pub(super) fn required(&self) -> &'static [(&'static str, &'static str)] {
        match &self.form {
            Form::Typed(typed) => (typed.required)(),
            _ => &[],
        }
    }

    /// What its table has to have, beside what the type says.
    pub(super) fn needs(&self) -> Needs {
        if !matches!(self.form, Form::Typed(_)) {
            return Needs::default();
        }
        Needs::new(format!("sink kind '{}'", self.name), self.required(), &COMMON_KEYS)
    }

    /// Why this build does not have it, and what to do.
    pub(crate) fn absence(&self) -> String {
        let name = self.name;
        match self.form {
            Form::NotBuilt(feature) => format!(
                "sink kind '{name}' is not in this build, which was made without the feature `{feature}`: \
                 cargo build --release --features {feature}"
            ),
            _ => {
                let built = names(|kind| matches!(kind.form, Form::Typed(_) | Form::Chain));
                format!(
                    "sink kind '{name}' is not in this version of pillarbox; a later one will have it. This build has {built}"
                )
            }
        }
    }
}

fn names(wanted: impl Fn(&SinkKind) -> bool) -> String {
    let names: Vec<&str> = KINDS.iter().filter(|kind| wanted(kind)).map(|kind| kind.name).collect();
    names.join(", ")
}
