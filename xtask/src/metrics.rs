use std::collections::BTreeSet;

use anyhow::{Context, Result, bail};

use crate::cargo::root;

const SOURCE: &str = "crates/pillarbox/src/metric.rs";
const DOCUMENT: &str = "docs/metrics.md";

/// Every metric of the source is in the document, and no other.
pub(crate) fn check() -> Result<()> {
    let read = |path: &str| std::fs::read_to_string(root().join(path)).with_context(|| format!("{path} is missing"));
    compare(&read(SOURCE)?, &read(DOCUMENT)?)
}

fn compare(source: &str, document: &str) -> Result<()> {
    let (known, documented) = (names(source, '"'), names(document, '`'));
    if known.is_empty() {
        bail!("{SOURCE} names no metric");
    }
    let missing: Vec<_> = known.difference(&documented).copied().collect();
    let unknown: Vec<_> = documented.difference(&known).copied().collect();
    if !missing.is_empty() || !unknown.is_empty() {
        bail!("{DOCUMENT}: not documented: [{}], not in {SOURCE}: [{}]", missing.join(", "), unknown.join(", "));
    }
    Ok(())
}

/// What stands between two `quote`s and begins like a metric.
fn names(text: &str, quote: char) -> BTreeSet<&str> {
    text.split(quote).skip(1).step_by(2).filter(|name| name.starts_with("pillarbox_")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_lists_must_agree() {
        let source = r#"pub const A: &str = "pillarbox_a"; pub const B: &str = "pillarbox_b";"#;
        assert!(compare(source, "| `pillarbox_a` | by `topic` |\n| `pillarbox_b` |").is_ok());
        let error = compare(source, "`pillarbox_a` `pillarbox_c`").unwrap_err().to_string();
        assert!(error.contains("[pillarbox_b]") && error.contains("[pillarbox_c]"), "{error}");
    }
}
