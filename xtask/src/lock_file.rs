use anyhow::{Context, Result, bail};

use crate::cargo::root;

/// Crates that must not be in the build, with the reason.
const BANNED: [(&str, &str); 3] = [
    ("openssl-sys", "TLS is rustls, without OpenSSL"),
    ("native-tls", "TLS is rustls, without OpenSSL"),
    ("ring", "rustls's provider is aws-lc-rs; a second one doubles the build and may panic at run time"),
];

/// Crates that may be there in one version only.
const SINGLE: [&str; 3] = ["rustls", "aws-lc-rs", "libsqlite3-sys"];

/// The bans of `deny.toml` that matter most, for machines without cargo-deny.
pub(crate) fn check() -> Result<()> {
    let text = std::fs::read_to_string(root().join("Cargo.lock")).context("Cargo.lock could not be read")?;
    let problems = problems(&text);
    if !problems.is_empty() {
        bail!("Cargo.lock: {}; `cargo tree --invert NAME` shows who brings it", problems.join("; "));
    }
    Ok(())
}

fn problems(text: &str) -> Vec<String> {
    let packages = packages(text);
    let mut problems = Vec::new();
    if packages.is_empty() {
        problems.push("it names no package".into());
    }
    for (name, reason) in BANNED {
        if packages.contains(&name) {
            problems.push(format!("{name} is banned ({reason})"));
        }
    }
    for name in SINGLE {
        let versions = packages.iter().filter(|package| **package == name).count();
        if versions > 1 {
            problems.push(format!("{name} is there in {versions} versions"));
        }
    }
    problems
}

/// The names of all packages, one entry a version.
fn packages(text: &str) -> Vec<&str> {
    text.lines().filter_map(|line| line.strip_prefix("name = \"")?.strip_suffix('"')).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lock(names: &[&str]) -> String {
        names.iter().map(|name| format!("[[package]]\nname = \"{name}\"\nversion = \"1.0.0\"\n\n")).collect()
    }

    #[test]
    fn a_sound_file_has_no_problems() {
        assert!(problems(&lock(&["rustls", "serde", "serde"])).is_empty());
    }

    #[test]
    fn banned_and_double_crates_are_named() {
        let found = problems(&lock(&["openssl-sys", "rustls", "rustls"]));
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("openssl-sys") && found[1].contains("rustls is there in 2 versions"), "{found:?}");
        assert!(!problems("").is_empty());
    }
}
