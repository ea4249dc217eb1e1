use std::collections::BTreeSet;

use anyhow::{Result, bail};

use crate::cargo::{cargo, output};

/// Crates that must not be in the build, with the one that may depend on them all the same, and the reason.
const BANNED: [(&str, Option<&str>, &str); 4] = [
    ("openssl", None, "TLS is rustls, without OpenSSL"),
    ("openssl-sys", Some("rdkafka-sys"), "TLS is rustls, without OpenSSL; only librdkafka knows no other"),
    ("native-tls", None, "TLS is rustls, without OpenSSL"),
    ("ring", None, "rustls's provider is aws-lc-rs; a second one doubles the build and may panic at run time"),
];

/// Crates that may be there in one version only.
const SINGLE: [&str; 3] = ["rustls", "aws-lc-rs", "libsqlite3-sys"];

/// The bans of `deny.toml` that matter most, for machines without cargo-deny. Looks at what can be built and not at Cargo.lock,
/// which also names what only an unused feature would bring.
pub(crate) fn check() -> Result<()> {
    let tree = ["tree", "--workspace", "--all-features", "--target", "all", "--prefix", "depth", "--format", "{p}"];
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
    for (name, wrapper, reason) in BANNED {
        let is_brought = |package: &&Package| package.name == name && (wrapper.is_none() || package.parent != wrapper);
        if let Some(package) = packages.iter().find(is_brought) {
            let parent = package.parent.unwrap_or("the workspace");
            problems.push(format!("{name} is banned ({reason}), but {parent} depends on it"));
        }
    }
    for name in SINGLE {
        let of_name = packages.iter().filter(|package| package.name == name);
        let versions = of_name.map(|package| package.version).collect::<BTreeSet<_>>().len();
        if versions > 1 {
            problems.push(format!("{name} is there in {versions} versions"));
        }
    }
    problems
}

/// A package and one that depends on it.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Package<'a> {
    name: &'a str,
    version: &'a str,
    parent: Option<&'a str>,
}

/// All packages, once for each that depends on them. A line is a depth, a name, a version; what a package depends on is only
/// under the first of its lines.
fn packages(tree: &str) -> BTreeSet<Package<'_>> {
    let mut packages = BTreeSet::new();
    let mut above: Vec<&str> = Vec::new();
    for line in tree.lines() {
        let digits = line.bytes().take_while(u8::is_ascii_digit).count();
        let (depth, rest) = line.split_at(digits);
        let (Ok(depth), Some((name, rest))) = (depth.parse::<usize>(), rest.split_once(' ')) else { continue };
        above.truncate(depth);
        let version = rest.split(' ').next().unwrap_or_default();
        packages.insert(Package { name, version, parent: above.last().copied() });
        above.push(name);
    }
    packages
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sound_tree_has_no_problems() {
        let tree = "0pillarbox v0.1.0 (/x)\n1rustls v0.23.1\n2serde v1.0.0\n1serde v1.0.0 (*)\n\n0xtask v0.1.0\n1rustls v0.23.1 (*)\n";
        assert_eq!(problems(tree), [""; 0]);
    }

    #[test]
    fn banned_and_double_crates_are_named() {
        let found = problems("0pillarbox v0.1.0\n1ring v0.17.0\n1rustls v0.23.1\n1other v1.0.0\n2rustls v0.22.0 (*)\n");
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found[0].contains("ring is banned") && found[0].contains("pillarbox depends on it"), "{found:?}");
        assert!(found[1].contains("rustls is there in 2 versions"), "{found:?}");
        assert!(!problems("").is_empty());
    }

    #[test]
    fn openssl_may_come_with_librdkafka_and_with_nothing_else() {
        let kafka = "0sinks v0.1.0\n1rdkafka v0.39.0\n2rdkafka-sys v4.10.0+2.12.1\n3openssl-sys v0.9.0\n";
        assert_eq!(problems(kafka), [""; 0]);
        let both = format!("{kafka}1native v1.0.0\n2openssl-sys v0.9.0 (*)\n");
        let found = problems(&both);
        assert!(found.len() == 1 && found[0].contains("but native depends on it"), "{found:?}");
    }
}
