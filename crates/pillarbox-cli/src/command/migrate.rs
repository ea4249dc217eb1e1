use anyhow::{Context, Result};
use pillarbox::admin::{Check, Level, Operator, SubscriptionStatus};
use pillarbox::{Error, ErrorKind, counted};
use serde_json::json;

use super::Scope;
use crate::args::{MigrateArgs, Switch};
use crate::database::{Database, Declaration};
use crate::exit::{Exit, Stop};

/// Creates or upgrades the schema, or declares what a copied database is.
pub(super) async fn run(scope: &Scope, args: &MigrateArgs) -> Result<Exit> {
    // The database's kind says in which language to print; nothing is connected to.
    let database = scope.database()?;
    if args.print {
        scope.output.write(database.print_sql(args.doorbell != Some(Switch::Off)).as_bytes())?;
        return Ok(Exit::Done);
    }
    if args.print_roles {
        scope.output.write(database.print_roles().as_bytes())?;
        return Ok(Exit::Done);
    }
    if args.check { check(scope, &database).await } else { migrate(scope, &database, args).await }
}

async fn migrate(scope: &Scope, database: &Database, args: &MigrateArgs) -> Result<Exit> {
    let declaration = match (args.adopt, args.fresh) {
        (true, _) => Some(Declaration::Adopt),
        (_, true) => Some(Declaration::Fresh),
        _ => None,
    };
    if let (Some(_), Database::Sqlite(path)) = (declaration, database)
        && !path.exists()
    {
        return Err(Stop::usage(format!("there is no database at {} to declare anything about", path.display())));
    }
    let schema = database.migrate().await.with_context(|| format!("cannot migrate {}", database.url()))?;
    if let Some(switch) = args.doorbell {
        scope.output.say(database.set_doorbell(switch == Switch::On).await?);
    }
    if let Some(declaration) = declaration {
        if declaration == Declaration::Fresh && !args.yes {
            refuse_at_home(database).await?;
        }
        database.declare(declaration).await?;
    }
    if scope.output.json {
        let declared = declaration.map(|declaration| match declaration {
            Declaration::Adopt => "adopted",
            Declaration::Fresh => "fresh",
        });
        scope.output.json(&json!({
            "database": database.url(), "created": schema.created, "applied": schema.applied, "declared": declared,
        }))?;
        return Ok(Exit::Done);
    }
    let done = match schema.applied.as_slice() {
        [] => "the schema is current".to_owned(),
        steps => format!("applied {}", steps.join(", ")),
    };
    let created = if schema.created { "created; " } else { "" };
    scope.output.line(format!("{}: {created}{done}", database.url()))?;
    match declaration {
        Some(Declaration::Adopt) => {
            scope.output.line("adopted: this is the log itself; relays go on where they were")?;
        }
        Some(Declaration::Fresh) => {
            scope.output.line("fresh: this is a copy with an identity of its own; nothing in it now is delivered")?;
        }
        None => {}
    }
    Ok(Exit::Done)
}

/// `--fresh` is for copies. On the log itself it would give up, for good, what is not delivered yet.
async fn refuse_at_home(database: &Database) -> Result<()> {
    let foreign =
        |error: &anyhow::Error| error.downcast_ref::<Error>().is_some_and(|error| error.kind() == ErrorKind::Foreign);
    let store = match database.open().await {
        Err(error) if foreign(&error) => return Ok(()),
        opened => opened?,
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
        "{} is no copy but the log itself: --fresh would give up {} and {} (delayed, retrying, blocked or dead), and none of the \
         {} in it would ever be delivered to a new subscription; pass --fresh --yes to do so",
        database.url(),
        counted(undelivered, "undelivered event"),
        counted(deliveries, "delivery"),
        counted(events, "event")
    )))
}

async fn check(scope: &Scope, database: &Database) -> Result<Exit> {
    let (state, message, exit) = database.check().await?;
    if scope.output.json {
        scope.output.json(&json!({ "database": database.url(), "state": state, "message": message }))?;
    } else {
        scope.output.line(format!("{}: {message}", database.url()))?;
    }
    Ok(exit)
}
