use anyhow::{Context, Result};
use pillarbox::{Check, ErrorKind, Level, Operator, SubscriptionStatus};
use pillarbox_sqlite::{SchemaState, SqliteStore};
use serde_json::json;

use super::Scope;
use crate::args::{MigrateArgs, Switch};
use crate::database::Database;
use crate::exit::{Exit, Stop};

/// Creates or upgrades the schema, or declares what a copied database is.
pub(super) async fn run(scope: &Scope, args: &MigrateArgs) -> Result<Exit> {
    if args.print {
        scope.output.write(pillarbox_sqlite::print_sql().as_bytes())?;
        return Ok(Exit::Done);
    }
    if args.print_roles {
        scope.output.line(
            "-- SQLite has no roles: whoever may write the file may publish; grant that by the file's permissions",
        )?;
        return Ok(Exit::Done);
    }
    let database = scope.database()?;
    match args.doorbell {
        Some(Switch::On) => {
            scope.output.say("SQLite has no trigger to ring: a relay notices commits by itself; nothing to turn on")
        }
        Some(Switch::Off) => {
            scope.output.say("SQLite has no trigger to ring: a relay notices commits by itself; nothing to turn off")
        }
        None => {}
    }
    if args.check { check(scope, &database) } else { migrate(scope, &database, args).await }
}

async fn migrate(scope: &Scope, database: &Database, args: &MigrateArgs) -> Result<Exit> {
    let path = database.path();
    if (args.adopt || args.fresh) && !path.exists() {
        return Err(Stop::usage(format!("there is no database at {} to declare anything about", path.display())));
    }
    let migrated = pillarbox_sqlite::migrate(path).with_context(|| format!("cannot migrate {}", database.url()))?;
    let declared = match (args.adopt, args.fresh) {
        (true, _) => {
            pillarbox_sqlite::adopt(path)?;
            Some("adopted")
        }
        (_, true) => {
            if !args.yes {
                refuse_at_home(database).await?;
            }
            pillarbox_sqlite::fresh(path)?;
            Some("fresh")
        }
        _ => None,
    };
    if scope.output.json {
        scope.output.json(&json!({
            "database": database.url(), "created": migrated.created, "applied": migrated.applied, "declared": declared,
        }))?;
        return Ok(Exit::Done);
    }
    let done = match migrated.applied.as_slice() {
        [] => "the schema is current".to_owned(),
        steps => format!("applied {}", steps.join(", ")),
    };
    let created = if migrated.created { "created; " } else { "" };
    scope.output.line(format!("{}: {created}{done}", database.url()))?;
    match declared {
        Some("adopted") => scope.output.line("adopted: this is the log itself; relays go on where they were")?,
        Some(_) => {
            scope.output.line("fresh: this is a copy with an identity of its own; nothing in it now is delivered")?
        }
        None => {}
    }
    Ok(Exit::Done)
}

/// `--fresh` is for copies. On the log itself it would give up, for good, what is not delivered yet.
async fn refuse_at_home(database: &Database) -> Result<()> {
    let store = match SqliteStore::open(database.path()) {
        Err(error) if error.kind() == ErrorKind::Foreign => return Ok(()),
        opened => opened.map_err(|error| database.explain(error))?,
    };
    // A backup that was restored in place is at home and yet not the continuation of itself.
    let strange = |check: &Check| ["home", "anchors"].contains(&check.name.as_str()) && check.level == Level::Failed;
    if store.doctor().await?.iter().any(strange) {
        return Ok(());
    }
    let status = store.status().await?;
    let sum = |count: fn(&SubscriptionStatus) -> u64| status.subscriptions.iter().map(count).sum::<u64>();
    let undelivered = sum(|one| one.pending + one.processing);
    let deliveries = sum(|one| one.delayed + one.retrying + one.blocked + one.dead);
    let events = status.log.events;
    if events == 0 && deliveries == 0 {
        return Ok(());
    }
    Err(Stop::usage(format!(
        "{} is no copy but the log itself: --fresh would give up {undelivered} undelivered events and {deliveries} deliveries \
         (delayed, retrying, blocked or dead), and none of the {events} events in it would ever be delivered to a new \
         subscription; say --fresh --yes to do so",
        database.url()
    )))
}

fn check(scope: &Scope, database: &Database) -> Result<Exit> {
    let state = pillarbox_sqlite::check(database.path()).map_err(|error| database.explain(error))?;
    let command = format!("run `pillarbox migrate --database {}`", database.url());
    let (name, text, exit) = match state {
        SchemaState::Current => ("current", "the schema is current".to_owned(), Exit::Done),
        SchemaState::Missing => ("missing", format!("there is no schema; {command}"), Exit::Schema),
        SchemaState::Old { from, to } => {
            ("old", format!("the schema is of version {from}, this build needs {to}; {command}"), Exit::Schema)
        }
        SchemaState::NewerCompatible { .. } => {
            ("newer_compatible", "the schema is newer than this build and compatible with it".to_owned(), Exit::Done)
        }
        SchemaState::NewerBreaking { .. } => (
            "newer_breaking",
            "the schema is newer than this build can work with; upgrade pillarbox".to_owned(),
            Exit::Schema,
        ),
    };
    if scope.output.json {
        scope.output.json(&json!({ "database": database.url(), "state": name, "message": text }))?;
    } else {
        scope.output.line(format!("{}: {text}", database.url()))?;
    }
    Ok(exit)
}
