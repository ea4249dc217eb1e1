//! The statements of this store: a file per noun, with a name for each statement.

macro_rules! nouns {
    ($($noun:ident),+ $(,)?) => {$(
        pub(crate) mod $noun {
            pub(crate) const FILE: &str = include_str!(concat!("sql/", stringify!($noun), ".sql"));
        }
    )+};
}

nouns! {
    cursor, dead_range, delivery, diagnosis, doorbell, event, home, inbox, instance, journal, leaf, meta, own_anchors, progress,
    publish, queue, retention, scan, schema, session, skip, subscription, transaction,
}

/// A statement by its noun and name; an unknown one does not compile.
macro_rules! sql {
    ($noun:ident, $name:literal) => {
        const { pillarbox::store::sql::statement($crate::sql::$noun::FILE, $name) }
    };
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_statement_has_a_name_of_its_own_and_is_used() {
        pillarbox_testkit::check_statements(env!("CARGO_MANIFEST_DIR"));
    }
}
