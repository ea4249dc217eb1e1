use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::problem::Problems;
use super::reading::is_reference;
use super::tree::PREFIX;
use super::tree::{self, Node, Origin, Value};
use crate::secret::masked;

/// A key whose name contains one of these has a secret as its value.
const SECRET_KEYS: [&str; 4] = ["secret", "password", "token", "authorization"];

/// The bit of a file's mode by which every user can read it.
const READABLE_BY_ALL: u32 = 0o004;

/// What Pillarbox's own variables begin with that are no settings, as well as those that are.
const OWN_PREFIX: &str = "PILLARBOX_";

/// What is not wrong, and most likely not meant.
pub(super) fn warnings(file: Option<&Path>, text: &str, variables: impl Iterator<Item = String>) -> Vec<String> {
    let mut warnings = file.map(|file| readable_secrets(file, text)).unwrap_or_default();
    warnings.extend(misspelt(variables));
    warnings
}

/// Secrets that every user of this host can read: in the config itself, and in the files that it names for them.
fn readable_secrets(file: &Path, text: &str) -> Vec<String> {
    let mut secrets = Secrets::default();
    secrets.collect("", &tree::parse(text, &Problems::default()));
    let own = secrets.written.filter(|_| is_readable_by_all(file)).map(|line| {
        let file = file.display();
        format!(
            "every user of this host can read {file}, and line {line} holds a secret; write {{ env = \"NAME\" }} or \
             {{ file = \"PATH\" }} there, or run `chmod o-r {file}`"
        )
    });
    let named = secrets.files.iter().map(|(file, line)| {
        format!(
            "every user of this host can read {file}, in which line {line} looks for a secret; run `chmod o-r {file}`, or mount it \
             with such a mode"
        )
    });
    own.into_iter().chain(named).collect()
}

fn is_readable_by_all(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|metadata| metadata.permissions().mode() & READABLE_BY_ALL != 0)
}

/// Where a config has its secrets.
#[derive(Default)]
struct Secrets {
    /// The first line with one that is written out.
    written: Option<usize>,
    /// The files with secrets that every user can read, with the first line that names each.
    files: BTreeMap<String, usize>,
}

impl Secrets {
    /// Looks at everything below this key.
    fn collect(&mut self, key: &str, node: &Node) {
        let line = match node.origin {
            Origin::Line(line, _) => Some(line),
            _ => None,
        };
        match &node.value {
            Value::Text(text) if is_secret(key, text) => {
                self.written = self.written.into_iter().chain(line).min();
            }
            Value::List(items) => items.iter().for_each(|item| self.collect(key, item)),
            Value::Table(entries) if is_reference(entries) => {
                if let (Some(Value::Text(file)), Some(line)) = (entries.get("file").map(|node| &node.value), line) {
                    self.collect_file(key, file, line);
                }
            }
            // An inner name like `tokens.name` is no secret.
            Value::Table(entries) => entries.iter().for_each(|(name, node)| self.collect(name, node)),
            _ => {}
        }
    }

    fn collect_file(&mut self, key: &str, file: &str, line: usize) {
        let holds_secret = || fs::read_to_string(file).is_ok_and(|text| is_secret(key, text.trim_end()));
        if is_readable_by_all(Path::new(file)) && holds_secret() {
            let known = self.files.entry(file.to_owned()).or_insert(line);
            *known = line.min(*known);
        }
    }
}

/// Whether a text at this key has something to hide.
fn is_secret(key: &str, text: &str) -> bool {
    let named = SECRET_KEYS.iter().any(|word| key.to_lowercase().contains(word));
    !text.is_empty() && (named || masked(text) != text)
}

/// Variables that look like a setting and are none, since it takes two underscores.
fn misspelt(variables: impl Iterator<Item = String>) -> Vec<String> {
    let settings = settings();
    let setting_of = |name: &String| {
        let rest = name.strip_prefix(OWN_PREFIX).filter(|_| !name.starts_with(PREFIX))?;
        settings.iter().find(|setting| setting.replace('.', "_").eq_ignore_ascii_case(rest))
    };
    let said = |name: String| {
        let meant = format!("{PREFIX}{}", setting_of(&name)?.replace('.', "__").to_uppercase());
        Some(format!("the environment variable {name} is not read; if it is meant as a setting, call it {meant}"))
    };
    variables.filter_map(said).collect()
}

/// The settings that have one value for the whole config, like `relay.workers`.
fn settings() -> Vec<String> {
    let defaults = serde_json::to_value(super::read("", []).0).unwrap_or_default();
    let mut settings = vec!["database".to_owned()];
    for (section, keys) in defaults.as_object().into_iter().flatten() {
        settings.extend(keys.as_object().into_iter().flatten().map(|(key, _)| format!("{section}.{key}")));
    }
    settings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_in_a_file_that_everybody_can_read_is_told_with_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("pillarbox.toml");
        let found = |text: &str, mode| {
            std::fs::write(&file, text).unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(mode)).unwrap();
            warnings(Some(&file), text, std::iter::empty())
        };
        let sink = |sink: &str| format!("\n[[subscription]]\nname = \"s\"\nsink = {{ kind = \"http\", {sink} }}\n");
        for (text, line) in [
            ("database = \"postgres://u:p@h/d\"".to_owned(), "line 1"),
            (sink("url = \"https://h\", secret = \"whsec_x\""), "line 4"),
            (sink("url = \"https://h\", headers = { Authorization = \"Bearer x\" }"), "line 4"),
            (sink("url = \"redis://:p@h\""), "line 4"),
        ] {
            let said = found(&text, 0o644);
            assert!(said.len() == 1 && said[0].contains(line) && !said[0].contains("whsec_x"), "{said:?}");
            assert!(found(&text, 0o640).is_empty());
        }
        for text in [
            "database = \"postgres://u@h/d\"".to_owned(),
            "database = { env = \"SECRET\" }".to_owned(),
            sink("url = \"https://h\", secret = { file = \"/none/secrets/x\" }"),
        ] {
            assert!(found(&text, 0o644).is_empty(), "{text}");
        }
    }

    #[test]
    fn a_secret_in_a_named_file_that_everybody_can_read_is_told_with_its_line() {
        let folder = tempfile::tempdir().unwrap();
        let (config, named) = (folder.path().join("pillarbox.toml"), folder.path().join("named"));
        let found = |setting: &str, content: &str, mode| {
            let text = setting.replace("NAMED", named.to_str().unwrap());
            std::fs::write(&config, &text).unwrap();
            std::fs::write(&named, content).unwrap();
            std::fs::set_permissions(&named, std::fs::Permissions::from_mode(mode)).unwrap();
            warnings(Some(&config), &text, std::iter::empty())
        };
        let secret = "[[subscription]]\nsink = { kind = \"http\", secret = { file = \"NAMED\" } }\n";
        let headers = "[[subscription]]\nsink.headers.Authorization = { file = \"NAMED\" }\n";
        let several = "[[subscription]]\nsink = { secrets = [{ file = \"NAMED\" }, { file = \"NAMED\" }] }\n";
        let database = "\ndatabase = { file = \"NAMED\" }\n";
        for (setting, content) in [
            (secret, "whsec_canary\n"),
            (headers, "canary"),
            (several, "canary"),
            (database, "postgres://u:canary@h/d\n"),
        ] {
            let said = found(setting, content, 0o644);
            assert!(said.len() == 1 && said[0].contains("line 2") && said[0].contains("chmod o-r"), "{said:?}");
            assert!(!said[0].contains("canary"), "{said:?}");
            assert!(found(setting, content, 0o640).is_empty(), "{setting}");
        }
        assert!(found(database, "postgres://u@h/d\n", 0o644).is_empty(), "there is no password in it");
    }

    #[test]
    fn a_setting_with_one_underscore_is_told() {
        let said = |name: &str| warnings(None, "", std::iter::once(name.to_owned()));
        assert!(said("PILLARBOX_RELAY_WORKERS")[0].contains("call it PILLARBOX__RELAY__WORKERS"));
        assert!(said("PILLARBOX_RELAY_BATCH_SIZE")[0].contains("PILLARBOX__RELAY__BATCH_SIZE"));
        assert!(said("PILLARBOX_DATABASE")[0].contains("PILLARBOX__DATABASE"));
        for other in
            ["PILLARBOX_CONFIG", "PILLARBOX_LOG", "PILLARBOX_TOKEN", "PILLARBOX__RELAY__WORKERS", "RELAY_WORKERS"]
        {
            assert!(said(other).is_empty(), "{other}");
        }
    }
}
