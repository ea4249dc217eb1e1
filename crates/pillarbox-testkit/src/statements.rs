use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// What begins the line of a statement's name.
const NAME: &str = "-- name: ";

/// What a statement in a string begins with. Control statements (`begin`, `set local`) may be in strings.
const BEGINNINGS: [&str; 5] = ["select ", "insert ", "update ", "delete from ", "with "];

/// Checks the statements of a store, which are in `src/sql`, a file per noun: names are unique in a file, each statement is used, and none
/// is in a string.
pub fn check_statements(crate_folder: &str) {
    let folder = Path::new(crate_folder).join("src");
    let sources: Vec<(String, String)> = files(&folder, "rs").into_iter().map(|path| source(&folder, &path)).collect();
    let code: String = sources.iter().flat_map(|(_, text)| text.split_whitespace()).collect();
    let mut faults = Vec::new();
    for path in files(&folder.join("sql"), "sql") {
        let noun = path.file_stem().expect("a file has a name").to_string_lossy().into_owned();
        let text = fs::read_to_string(&path).expect("a file that was listed");
        let names: Vec<&str> = text.lines().filter_map(|line| line.strip_prefix(NAME)).collect();
        if names.is_empty() && !code.contains(&format!("sql/{noun}.sql\"")) {
            faults.push(format!("{noun}.sql has no statement with a name, and nothing includes it"));
        }
        let mut seen = BTreeSet::new();
        for name in names {
            if !seen.insert(name) {
                faults.push(format!("{noun}.sql has two statements `{name}`"));
            }
            if !code.contains(&format!("sql!({noun},\"{name}\")")) {
                faults.push(format!("nothing uses `{name}` of {noun}.sql"));
            }
        }
    }
    for (name, text) in &sources {
        faults.extend(statements_in(text).map(|line| format!("{name} has a statement in a string: {}", line.trim())));
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}

/// The lines of a source that have a statement in a string. What the unit tests at its end do is theirs.
fn statements_in(text: &str) -> impl Iterator<Item = &str> {
    let code = text.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let lines = code.lines().filter(|line| !line.trim_start().starts_with("//"));
    lines.filter(|line| BEGINNINGS.iter().any(|beginning| line.contains(&format!("\"{beginning}"))))
}

/// The name of a source in its folder, and its text.
fn source(folder: &Path, path: &Path) -> (String, String) {
    let name = path.strip_prefix(folder).expect("it is in the folder").to_string_lossy().into_owned();
    (name, fs::read_to_string(path).expect("a file that was listed"))
}

/// All files below a folder whose names end so.
fn files(folder: &Path, ending: &str) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).expect("a folder of the sources").map(|entry| entry.expect("an entry").path());
    let mut found = Vec::new();
    for path in entries {
        if path.is_dir() {
            found.extend(files(&path, ending));
        } else if path.extension().is_some_and(|extension| extension == ending) {
            found.push(path);
        }
    }
    found.sort();
    found
}
