use anyhow::{Context, Result};
use pillarbox::admin::{Check, Level, Operator, SubscriptionStatus};
use pillarbox::{Error, ErrorKind, counted};
use serde_json::json;

use super::Scope;
use crate::args::{MigrateArgs, Switch};
use crate::database::{Database, Declaration};
use crate::exit::{Exit, Stop};

/// How many subscriptions are named that would not receive events.
const TOLD_MAX: usize = 5;

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
    let events = status.log.events;
    let given_up = given_up(&status.subscriptions);
    if events == 0 && given_up.is_none() {
        return Ok(());
    }
    let given_up = given_up.map(|told| format!("give up {told}, and ")).unwrap_or_default();
    Err(Stop::usage(format!(
        "{} is no copy but the log itself: --fresh would {given_up}deliver none of the {} in it to a new subscription; pass --fresh \
         --yes to do so",
        database.url(),
        counted(events, "event")
    )))
}

/// What each subscription would not receive, of those that would miss most. An event that several of them want is one for each, so that
/// there is no sum to tell.
fn given_up(subscriptions: &[SubscriptionStatus]) -> Option<String> {
    let figures = |one: &SubscriptionStatus| (one.undelivered(), one.dead);
    let mut concerned: Vec<&SubscriptionStatus> = subscriptions.iter().filter(|one| figures(one) != (0, 0)).collect();
    concerned.sort_by_key(|one| std::cmp::Reverse(figures(one)));
    let tell = |one: &&SubscriptionStatus| {
        let (undelivered, dead) = figures(one);
        format!("{} and {dead} dead of '{}'", counted(undelivered, "undelivered event"), one.name)
    };
    let mut told: Vec<String> = concerned.iter().take(TOLD_MAX).map(tell).collect();
    let others = concerned.len().saturating_sub(TOLD_MAX);
    if others > 0 {
        told.push(format!("events of {}", counted(others, "other subscription")));
    }
    (!told.is_empty()).then(|| told.join(", "))
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
