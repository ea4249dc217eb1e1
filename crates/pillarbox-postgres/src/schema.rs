use std::fmt;
use std::sync::LazyLock;

use pillarbox::Result;

use crate::connection::{PgConfig, SCHEMA, check_schema};

pub(crate) static DEFAULT: LazyLock<Schema> = LazyLock::new(|| Schema { name: SCHEMA.to_owned() });

/// The schema of a log: what an application names a log by that is not in the schema `pillarbox`.
///
/// Everything that an application does with a log has two forms: a free function, like [`publish`](crate::publish()) and
/// [`accept`](crate::accept()), for the schema `pillarbox`, and the method of the same name here for any other. The store and the commands get the
/// name with their URL (`?schema=orders_log`), a transactional handler on a pool of the application's by
/// [`Transactional::schema`](crate::Transactional::schema).
///
/// ```
/// # async fn place(transaction: &tokio_postgres::Transaction<'_>, id: uuid::Uuid) -> pillarbox::Result<()> {
/// use pillarbox::NewEvent;
/// use pillarbox_postgres::Schema;
///
/// let log = Schema::new("orders_log")?;
/// if log.accept(transaction, "billing", id).await? {
///     log.publish(transaction, &NewEvent::new("orders", "order.placed")).await?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Schema {
    name: String,
}

impl Schema {
    /// The schema of this name; a name that could not be that of a log is refused.
    pub fn new(name: &str) -> Result<Self> {
        check_schema(name)?;
        Ok(Schema { name: name.to_owned() })
    }

    pub(crate) fn of(config: &PgConfig) -> Self {
        Schema { name: config.schema().to_owned() }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn fill_in(&self, sql: &str) -> String {
        sql.replace("@schema@", &self.name)
    }
}

/// The schema `pillarbox`.
impl Default for Schema {
    fn default() -> Self {
        DEFAULT.clone()
    }
}

impl fmt::Display for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}
