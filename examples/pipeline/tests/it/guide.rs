use std::path::Path;

/// Every piece of Rust in the guide stands in the example, line by line; how far it is indented does not matter.
#[test]
fn the_guide_quotes_what_is_tested() {
    let example = Path::new(env!("CARGO_MANIFEST_DIR"));
    let guide = std::fs::read_to_string(example.join("../../docs/guides/pipelines.md")).unwrap();
    let sources: Vec<String> = std::fs::read_dir(example.join("src"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.is_file())
        .map(|path| unindented(&std::fs::read_to_string(path).unwrap()))
        .collect();
    let quotes: Vec<String> =
        guide.split("```rust,ignore\n").skip(1).map(|rest| unindented(rest.split("```").next().unwrap())).collect();
    assert!(!quotes.is_empty());
    for quote in quotes {
        assert!(sources.iter().any(|source| source.contains(&quote)), "not in the example any more:\n{quote}");
    }
}

fn unindented(text: &str) -> String {
    text.lines().map(|line| line.trim().to_owned() + "\n").collect()
}
