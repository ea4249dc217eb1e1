use pillarbox::{Error, ErrorKind, Result};

/// The longest name of a schema or a table, in bytes: PostgreSQL cuts at 63, and the fence's name is longer by its ending.
pub const TABLE_NAME_BYTES_MAX: usize = 63 - FENCE.len();

/// What the fence's name has behind the table's.
const FENCE: &str = "_fence";

/// The same of the function that says how far the table can be read.
const END: &str = "_end";

/// The table that events are appended to, and the fence beside it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Table {
    schema: Option<String>,
    name: String,
}

impl Table {
    /// Reads `name` or `schema.name`. Capitals count, as if it stood in double quotes.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let (schema, name) = match text.split_once('.') {
            Some((schema, name)) => (Some(schema), name),
            None => (None, text),
        };
        if is_name(name) && schema.is_none_or(is_name) {
            return Ok(Table { schema: schema.map(str::to_owned), name: name.to_owned() });
        }
        Err(Error::new(
            ErrorKind::Invalid,
            format!(
                "'{text}' cannot be the table's name; write name or schema.name, each of 1 to {TABLE_NAME_BYTES_MAX} bytes, of \
                 letters, digits, '_', '-' and '$', without quotes"
            ),
        ))
    }

    /// The quoted name of the schema, if it was given.
    pub(super) fn schema(&self) -> Option<String> {
        self.schema.as_deref().map(quoted)
    }

    /// The quoted name.
    pub(super) fn name(&self) -> String {
        self.qualified(&self.name)
    }

    /// The quoted name of the fence.
    pub(super) fn fence(&self) -> String {
        self.qualified(&format!("{}{FENCE}", self.name))
    }

    /// A statement with the names filled in.
    pub(super) fn sql(&self, sql: &str) -> String {
        let end = self.qualified(&format!("{}{END}", self.name));
        sql.replace("@table@", &self.name()).replace("@fence@", &self.fence()).replace("@end@", &end)
    }

    fn qualified(&self, name: &str) -> String {
        self.schema().map_or_else(|| quoted(name), |schema| format!("{schema}.{}", quoted(name)))
    }
}

fn is_name(name: &str) -> bool {
    let fits = |c: char| c.is_alphanumeric() || matches!(c, '_' | '-' | '$');
    (1..=TABLE_NAME_BYTES_MAX).contains(&name.len()) && name.chars().all(fits) && !name.contains("$$")
}

/// Safe because of what [`is_name`] lets through.
fn quoted(name: &str) -> String {
    format!("\"{name}\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_and_capitals_kept() {
        let table = Table::parse("Store.order-events").unwrap();
        assert_eq!(table.name(), "\"Store\".\"order-events\"");
        assert_eq!(table.fence(), "\"Store\".\"order-events_fence\"");
        assert_eq!(table.sql("@fence@ @table@ x"), format!("{} {} x", table.fence(), table.name()));
        assert_eq!(table.sql("@end@()"), "\"Store\".\"order-events_end\"()");
        assert_eq!(Table::parse("events").unwrap().name(), "\"events\"");
    }

    #[test]
    fn what_would_have_to_be_escaped_is_refused() {
        let longest = "x".repeat(TABLE_NAME_BYTES_MAX);
        assert!(Table::parse(&longest).is_ok());
        let too_long = format!("{longest}x");
        for text in
            ["", ".", "a.", ".a", "a.b.c", "a\"b", "\"a\"", "a b", "a$$b", "a;b", "@fence@", "a\0", "a'", &too_long]
        {
            let error = Table::parse(text).expect_err(text);
            assert!(error.to_string().contains("schema.name"), "{error}");
        }
    }
}
