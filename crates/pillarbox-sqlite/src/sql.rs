//! The statements of this store: a file per noun, with a name for each statement.

macro_rules! nouns {
    ($($noun:ident),+ $(,)?) => {$(
        pub(crate) mod $noun {
            pub(crate) const FILE: &str = include_str!(concat!("sql/", stringify!($noun), ".sql"));
        }
    )+};
}

nouns! {
    connection, cursor, dead_range, delivery, diagnosis, event, home, inbox, instance, journal, meta, progress, publish, queue,
    retention, schema, skip, subscription,
}

/// A statement by its noun and name; an unknown one does not compile.
macro_rules! sql {
    ($noun:ident, $name:literal) => {
        const { pillarbox::store::sql::statement($crate::sql::$noun::FILE, $name) }
    };
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use pillarbox::store::sql::statement;
    use rusqlite::Connection;

    /// Tables that grow without end, and must be looked up in.
    const GROWING: [&str; 4] =
        ["pillarbox_event", "pillarbox_event_kept", "pillarbox_delivery", "pillarbox_dead_range"];

    /// Statements that go through a whole table or index, and why they may. Everything else has to find what it wants.
    const WHOLE: [(&str, &str); 12] = [
        ("diagnosis deliveries_without_event", "doctor checks every delivery"),
        ("diagnosis events_in_dead_ranges", "doctor checks every dead range; SQLite leaves hardly any"),
        ("dead_range ranges", "an audit reads all of them"),
        ("dead_range risen", "the ranges that are closed; SQLite leaves hardly any"),
        ("event count", "of a log with so few positions that status may count them"),
        ("event kept_count", "counts up to a limit"),
        ("event odd_ids", "doctor checks every id"),
        ("event version_id", "of what is kept aside; the log has an index"),
        ("home cut_dead_ranges", "an adopted log is looked through once"),
        ("home deliver_nothing", "a log that is declared fresh is emptied of deliveries"),
        ("home reset", "empties everything"),
        ("retention prune_dead_ranges", "the ranges that are closed; SQLite leaves hardly any"),
    ];

    #[test]
    fn every_statement_has_a_name_of_its_own_and_is_used() {
        pillarbox_testkit::check_statements(env!("CARGO_MANIFEST_DIR"));
    }

    /// All statements, by file and name.
    fn statements() -> BTreeMap<String, String> {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/sql");
        let mut found = BTreeMap::new();
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            let noun = path.file_stem().unwrap().to_str().unwrap();
            let text = std::fs::read_to_string(&path).unwrap();
            let mut names = text.lines().filter_map(|line| line.strip_prefix("-- name: ")).peekable();
            if names.peek().is_none() {
                found.insert(noun.to_owned(), text.clone());
            }
            for name in names {
                found.insert(format!("{noun} {name}"), statement(&text, name).to_owned());
            }
        }
        found
    }

    /// How SQLite goes about a statement, without those lines that find something.
    fn scans(connection: &Connection, sql: &str) -> Vec<String> {
        let mut statement = connection.prepare(&format!("explain query plan {sql}")).unwrap();
        let lines = statement.raw_query().mapped(|row| row.get::<_, String>(3)).collect::<Result<Vec<_>, _>>().unwrap();
        let grows = |line: &String| {
            let tables = GROWING.iter().any(|table| line.split_whitespace().any(|word| word == *table));
            line.starts_with("SCAN ") && (tables || is_alias(sql, line))
        };
        lines.into_iter().filter(grows).collect()
    }

    /// Whether a scan is of an alias of a table that grows.
    fn is_alias(sql: &str, line: &str) -> bool {
        let alias = line.split_whitespace().nth(1).unwrap_or_default();
        let is = |table: &&str| {
            sql.contains(&format!("{table} as {alias}\n")) || sql.contains(&format!("{table} as {alias} "))
        };
        GROWING.iter().any(is) || (sql.contains("pillarbox_delivery_state as") && alias == "d")
    }

    #[test]
    fn no_statement_reads_a_whole_table_that_grows() {
        let connection = Connection::open_in_memory().unwrap();
        crate::migrate_connection(&connection).unwrap();
        let statements = statements();
        let listed = statements.iter().filter(|(name, _)| name.starts_with("delivery rows_"));
        let listed: Vec<&String> = listed.map(|(_, rows)| rows).collect();
        let mut found = BTreeMap::<String, Vec<String>>::new();
        let apart = ["connection ", "schema record", "schema set_check"];
        let planned = |name: &str| !apart.iter().any(|beginning| name.starts_with(beginning));
        for (name, text) in statements.iter().filter(|(name, _)| planned(name)) {
            let variants = if text.contains("@rows@") { listed.clone() } else { vec![text] };
            for rows in variants {
                for sql in text
                    .replace("@rows@", rows)
                    .replace("@table@", "pillarbox_event")
                    .split(";\n")
                    .filter(|sql| !sql.trim().is_empty())
                {
                    let scans = scans(&connection, sql);
                    if !scans.is_empty() {
                        found.entry(name.clone()).or_default().extend(scans);
                    }
                }
            }
        }
        let allowed: BTreeMap<&str, &str> = WHOLE.into_iter().collect();
        found.retain(|name, _| !allowed.contains_key(name.as_str()));
        assert!(found.is_empty(), "{found:#?}");
    }
}
