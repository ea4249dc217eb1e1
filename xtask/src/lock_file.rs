use std::collections::BTreeSet;

use anyhow::{Result, bail};

use crate::cargo::{cargo, output};

/// Crates that must not be in the build, with the reason.
const BANNED: [(&str, &str); 3] = [
    ("openssl-sys", "TLS is rustls, without OpenSSL"),
    ("native-tls", "TLS is rustls, without OpenSSL"),
    ("ring", "rustls's provider is aws-lc-rs; a second one doubles the build and may panic at run time"),
];

/// Crates that may be there in one version only.
const SINGLE: [&str; 3] = ["rustls", "aws-lc-rs", "libsqlite3-sys"];

/// The bans of `deny.toml` that matter most, for machines without cargo-deny. Looks at what can be built and not at Cargo.lock,
/// which also names what only a feature that nobody turns on would bring.
pub(crate) fn check() -> Result<()> {
    let tree = ["tree", "--workspace", "--all-features", "--target", "all", "--prefix", "none", "--format", "{p}"];
    let problems = problems(&output(cargo(&tree))?);
    if !problems.is_empty() {
        bail!("{}; `cargo tree --all-features --target all --invert NAME` shows who brings it", problems.join("; "));
    }
    Ok(())
}

fn problems(tree: &str) -> Vec<String> {
    let packages = packages(tree);
    let mut problems = Vec::new();
    if packages.is_empty() {
        problems.push("the tree names no package".into());
    }
    for (name, reason) in BANNED {
        if packages.iter().any(|package| package.0 == name) {
            problems.push(format!("{name} is banned ({reason})"));
        }
    }
    for name in SINGLE {
        let versions = packages.iter().filter(|package| package.0 == name).count();
        if versions > 1 {
            problems.push(format!("{name} is there in {versions} versions"));
        }
    }
    problems
}

/// The names and versions of all packages.
fn packages(tree: &str) -> BTreeSet<(&str, &str)> {
    tree.lines().filter_map(|line| line.split_once(' ')).map(|(name, rest)| (name, version(rest))).collect()
}

fn version(rest: &str) -> &str {
    rest.split(' ').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sound_tree_has_no_problems() {
        assert!(problems("rustls v0.23.1\nserde v1.0.0\nserde v1.0.0 (*)\nrustls v0.23.1 (*)\n").is_empty());
    }

    #[test]
    fn banned_and_double_crates_are_named() {
        let found = problems("openssl-sys v0.9.0\nrustls v0.23.1\nrustls v0.22.0 (*)\n");
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("openssl-sys") && found[1].contains("rustls is there in 2 versions"), "{found:?}");
        assert!(!problems("").is_empty());
    }
}
