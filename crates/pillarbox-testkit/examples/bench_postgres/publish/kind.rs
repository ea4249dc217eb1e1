use crate::database::BARE_COLUMNS;

/// What an INSERT should reach of one into a plain table.
const INSERT_RATIO_MIN: f64 = 0.85;

/// What `publish()` should reach of an INSERT into a plain table.
const FUNCTION_RATIO_MIN: f64 = 0.8;

/// How many events a transaction of [`Kind::BareBatch`] and [`Kind::InsertBatch`] has.
const BATCH_EVENTS: u64 = 100;

/// Ways to publish. Each statement takes a key and a payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Into a plain table.
    Bare,
    /// Into a plain table that somebody reads meanwhile.
    Watched,
    /// Into a table with a trigger that always notifies.
    Ringing,
    /// Into the log.
    Insert,
    /// By the log's `publish()`.
    Function,
    /// Many into a plain table.
    BareBatch,
    /// Many into the log.
    InsertBatch,
}

impl Kind {
    /// What it is called where it is measured.
    pub(super) fn name(self) -> &'static str {
        match self {
            Kind::Bare | Kind::BareBatch => "bare",
            Kind::Watched => "watched",
            Kind::Ringing => "ringing",
            Kind::Insert | Kind::InsertBatch => "insert",
            Kind::Function => "function",
        }
    }

    /// What it is called in the table.
    pub(super) fn text(self) -> &'static str {
        match self {
            Kind::Watched => "a read table",
            Kind::Ringing => "NOTIFY",
            Kind::Function => "publish()",
            _ => self.name(),
        }
    }

    /// What it is compared with, and what it should reach of that.
    pub(super) fn target(self) -> Option<(Kind, f64)> {
        match self {
            Kind::Insert => Some((Kind::Bare, INSERT_RATIO_MIN)),
            Kind::InsertBatch => Some((Kind::BareBatch, INSERT_RATIO_MIN)),
            Kind::Function => Some((Kind::Bare, FUNCTION_RATIO_MIN)),
            _ => None,
        }
    }

    /// Whether a relay delivers it.
    pub(super) fn is_ours(self) -> bool {
        matches!(self, Kind::Insert | Kind::InsertBatch | Kind::Function)
    }

    /// How many events a transaction has.
    pub(super) fn events(self) -> u64 {
        match self {
            Kind::BareBatch | Kind::InsertBatch => BATCH_EVENTS,
            _ => 1,
        }
    }

    fn table(self) -> &'static str {
        if self.is_ours() { "pillarbox.event" } else { self.name() }
    }

    /// The statements that make its table, if the log's migrations do not.
    pub(super) fn setup(self) -> String {
        let table = format!("create table {} {BARE_COLUMNS};", self.table());
        match self {
            Kind::Insert | Kind::Function | Kind::InsertBatch => String::new(),
            Kind::Bare | Kind::BareBatch | Kind::Watched => table,
            Kind::Ringing => {
                table
                    + "create function ring() returns trigger language plpgsql as
                        $$ begin perform pg_notify('ringing', ''); return null; end $$;
                    create trigger ring after insert on ringing for each statement execute function ring()"
            }
        }
    }

    /// The statement that publishes. What an event need not bring, it does not bring: no id, no headers, no time.
    pub(super) fn sql(self) -> String {
        let (table, columns) = (self.table(), "(topic, key, type, payload)");
        let values = "'orders', $1::text, 'order.placed', $2::text::json";
        match self {
            Kind::Bare | Kind::Watched | Kind::Ringing | Kind::Insert => {
                format!("insert into {table} {columns} values ({values})")
            }
            Kind::BareBatch | Kind::InsertBatch => {
                format!("insert into {table} {columns} select {values} from generate_series(1, {BATCH_EVENTS})")
            }
            Kind::Function => "select pillarbox.publish(topic => 'orders', type => 'order.placed', \
                               payload => $2::text::jsonb, key => $1::text)"
                .into(),
        }
    }
}
