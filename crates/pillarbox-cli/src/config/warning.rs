use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::problem::Problems;
use super::section::Section;
use super::tree::{self, Node, Origin, Value};
use super::{Config, tree::PREFIX};
use crate::secret::masked;

/// A key whose name contains one of these has a secret as its value.
const SECRET_KEYS: [&str; 4] = ["secret", "password", "token", "authorization"];

/// What Pillarbox's own variables begin with that are no settings, as well as those that are.
const OWN_PREFIX: &str = "PILLARBOX_";

/// What is not wrong, and most likely not meant.
pub(super) fn warnings(file: Option<&Path>, text: &str, variables: impl Iterator<Item = String>) -> Vec<String> {
    file.and_then(|file| readable_secret(file, text)).into_iter().chain(misspelt(variables)).collect()
}

/// A secret that stands in the file itself, if everybody on this host can read it.
fn readable_secret(file: &Path, text: &str) -> Option<String> {
    let mode = std::fs::metadata(file).ok()?.permissions().mode();
    if mode & 0o004 == 0 {
        return None;
    }
    let root = tree::parse(text, &Problems::default());
    let line = first_secret("", &root)?;
    let file = file.display();
    Some(format!(
        "everybody on this host can read {file}, and line {line} holds a secret; write {{ env = \"NAME\" }} or {{ file = \"PATH\" }} \
         there, or run `chmod o-r {file}`"
    ))
}

/// The line of the first secret that is written out, below this key.
fn first_secret(key: &str, node: &Node) -> Option<usize> {
    let named = SECRET_KEYS.iter().any(|word| key.to_lowercase().contains(word));
    match &node.value {
        Value::Text(text) if !text.is_empty() && (named || masked(text) != *text) => match node.origin {
            Origin::Line(line) => Some(line),
            _ => None,
        },
        Value::List(items) => items.iter().find_map(|item| first_secret(key, item)),
        // `{ env = "NAME" }` and `{ file = "PATH" }` name where a secret is; an inner name like `tokens.name` is no secret.
        Value::Table(entries) => {
            let inner = entries.iter().filter(|(name, _)| !["env", "file"].contains(&name.as_str()));
            inner.filter_map(|(name, node)| first_secret(name, node)).min()
        }
        _ => None,
    }
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
    let problems = Problems::default();
    let defaults = Config::read(Section::new("", None, &problems));
    let defaults = serde_json::to_value(&defaults).unwrap_or_default();
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
            sink("url = \"https://h\", secret = { file = \"/run/secrets/x\" }"),
        ] {
            assert!(found(&text, 0o644).is_empty(), "{text}");
        }
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
