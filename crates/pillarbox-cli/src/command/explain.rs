use anyhow::Result;
use serde::Serialize;

use super::Scope;
use crate::args::ExplainArgs;
use crate::exit::{Exit, Stop};
use crate::output::Style;

/// The page for people, whose tables define every term.
const PAGE: &str = include_str!("concepts.md");

/// A term that commands, configuration, log or messages use.
#[derive(Debug, Serialize)]
struct Term {
    word: &'static str,
    meaning: String,
    /// The heading of its table.
    #[serde(skip)]
    group: &'static str,
}

/// Prints what a term means, or all terms.
pub(super) fn run(scope: &Scope, args: &ExplainArgs) -> Result<Exit> {
    let terms = match &args.word {
        Some(word) => vec![find(word)?],
        None => terms().collect(),
    };
    if scope.output.json {
        scope.output.json(&terms)?;
        return Ok(Exit::Done);
    }
    let mut group = "";
    for term in &terms {
        if terms.len() > 1 && term.group != group {
            if !group.is_empty() {
                scope.output.line("")?;
            }
            group = term.group;
            scope.output.styled(Style::Bold, group, "")?;
        }
        scope.output.styled(Style::Bold, term.word, &format!(": {}", term.meaning))?;
    }
    Ok(Exit::Done)
}

/// The term that is written like this, in any case, in singular or plural, with spaces, dashes or underscores.
fn find(asked: &str) -> Result<Term> {
    let plain = |text: &str| text.to_lowercase().replace(['-', '_'], " ");
    let word = plain(asked);
    let singular = word.strip_suffix('s').unwrap_or(&word);
    let leaf = word.strip_suffix("ves").map(|stem| format!("{stem}f"));
    let is_it = |term: &Term| {
        let known = plain(term.word);
        known == word || known == singular || leaf.as_ref() == Some(&known)
    };
    if let Some(term) = terms().find(is_it) {
        return Ok(term);
    }
    let similar: Vec<&str> =
        terms().map(|term| term.word).filter(|known| known.contains(singular) || singular.contains(known)).collect();
    let hint = match similar.is_empty() {
        true => "`pillarbox explain` lists all terms".to_owned(),
        false => format!("did you mean {}?", similar.join(", ")),
    };
    Err(Stop::with(Exit::Usage, format!("'{asked}' is no term of Pillarbox; {hint}")))
}

/// The rows of the page's tables.
fn terms() -> impl Iterator<Item = Term> {
    let mut group = "";
    PAGE.lines().filter_map(move |line| {
        if let Some(heading) = line.strip_prefix("## ") {
            group = heading;
        }
        let (word, meaning) = line.strip_prefix("| ")?.strip_suffix(" |")?.split_once(" | ")?;
        (word != "word").then(|| Term { word, meaning: without_links(meaning), group })
    })
}

/// Markdown without the addresses of its links.
fn without_links(text: &str) -> String {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, link)) = rest.split_once('[')
        && let Some((label, after)) = link.split_once("](")
        && let Some((_, after)) = after.split_once(')')
    {
        plain.push_str(before);
        plain.push_str(label);
        rest = after;
    }
    plain + rest
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use pillarbox::admin::State;

    use super::*;

    #[test]
    fn every_term_stands_once() {
        let words: Vec<&str> = terms().map(|term| term.word).collect();
        assert!(words.len() > 50, "{words:?}");
        assert_eq!(words.iter().collect::<BTreeSet<_>>().len(), words.len(), "{words:?}");
    }

    #[test]
    fn states_conditions_and_words_of_messages_are_explained() {
        let conditions = ["paused", "orphaned", "stopped", "sink down"];
        let shown = ["lane", "owners", "lag", "definition", "hold", "epoch", "incarnation", "doorbell", "take-over"];
        for word in State::ALL.map(State::name).into_iter().chain(conditions).chain(shown) {
            find(word).unwrap();
        }
    }

    #[test]
    fn a_term_is_found_as_people_write_it() {
        assert_eq!(find("Take_Overs").unwrap().word, "take-over");
        assert_eq!(find("LEASE").unwrap().word, "lease");
        assert_eq!(find("leaves").unwrap().word, "leaf");
        let error = find("guard").unwrap_err().to_string();
        assert_eq!(error, "'guard' is no term of Pillarbox; did you mean flood guard?");
        assert!(find("zebra").unwrap_err().to_string().contains("`pillarbox explain` lists all terms"));
    }

    #[test]
    fn links_are_shown_by_their_text() {
        assert_eq!(without_links("was given up; [an operator](a.md#b) decides"), "was given up; an operator decides");
        assert_eq!(without_links("an array[1] is none"), "an array[1] is none");
    }
}
