//! Statements of a store, found by name in a file of statements.
//!
//! A file holds the statements about one noun. Each begins with a line `-- name: ` and its name; comments up to its first line of SQL
//! document it and are not sent.

/// What begins the line of a name.
const NAME: &str = "-- name: ";

/// The statement of this name, without the comments before it and the space around it: the same text each time, as caches of prepared
/// statements need it. Evaluate it at compile time: it panics if `file` has no such statement.
pub const fn statement<'a>(file: &'a str, name: &str) -> &'a str {
    let mut rest = file;
    while !rest.is_empty() {
        let (line, after) = split_line(rest);
        if begins_with(line, NAME) && equal(line.split_at(NAME.len()).1.trim_ascii(), name) {
            return body(after);
        }
        rest = after;
    }
    panic!("the file has no statement of this name")
}

/// What `text` begins with, up to the next name.
const fn body(mut text: &str) -> &str {
    while begins_with(text, "--") && !begins_with(text, NAME) {
        text = split_line(text).1;
    }
    let mut rest = text;
    while !rest.is_empty() && !begins_with(rest, NAME) {
        rest = split_line(rest).1;
    }
    let body = text.split_at(text.len() - rest.len()).0.trim_ascii();
    assert!(!body.is_empty(), "the statement of this name is empty");
    body
}

/// The first line of a text, and what follows it.
const fn split_line(text: &str) -> (&str, &str) {
    let bytes = text.as_bytes();
    let mut end = 0;
    while end < bytes.len() && bytes[end] != b'\n' {
        end += 1;
    }
    let next = if end < bytes.len() { end + 1 } else { end };
    (text.split_at(end).0, text.split_at(next).1)
}

const fn begins_with(text: &str, start: &str) -> bool {
    text.len() >= start.len() && equal_bytes(text.as_bytes().split_at(start.len()).0, start.as_bytes())
}

const fn equal(one: &str, other: &str) -> bool {
    equal_bytes(one.as_bytes(), other.as_bytes())
}

const fn equal_bytes(one: &[u8], other: &[u8]) -> bool {
    let mut at = 0;
    while at < one.len() && at < other.len() && one[at] == other[at] {
        at += 1;
    }
    at == one.len() && at == other.len()
}

#[cfg(test)]
mod tests {
    use super::statement;

    const FILE: &str = "-- Words about the file.\n\n-- name: put\n-- Why it is so.\n-- And so.\ninsert into t\n-- Inside.\n\
                        values (1)\n\n-- name: put_all\nselect 2\n";

    #[test]
    fn a_statement_is_found_by_its_whole_name_and_is_trimmed() {
        assert_eq!(const { statement(FILE, "put") }, "insert into t\n-- Inside.\nvalues (1)");
        assert_eq!(const { statement(FILE, "put_all") }, "select 2");
    }

    #[test]
    #[should_panic = "no statement of this name"]
    fn an_unknown_name_is_refused() {
        statement(FILE, "pu");
    }

    #[test]
    #[should_panic = "is empty"]
    fn an_empty_statement_is_refused() {
        statement("-- name: a\n-- Nothing.\n-- name: b\nselect 1", "a");
    }
}
