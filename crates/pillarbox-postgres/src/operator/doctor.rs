use pillarbox::Error;
use pillarbox::admin::snapshot::{Snapshot, spoken};
use pillarbox::admin::{Check, Level};
use tokio_postgres::types::Type;
use tokio_postgres::{Row, Transaction};
use uuid::Uuid;

use super::{holders, load_snapshot, premises, read_only};
use crate::SchemaState;
use crate::connection::Session;
use crate::error::{Db, DbError};
use crate::home;
use crate::migrate::{CREATE_UTF8, SCHEMA_VERSION, UNCHECKED_ENCODING, applied_at, state_of};

/// No session of Pillarbox keeps a snapshot for longer.
const OWN_SNAPSHOT_SECONDS_MAX: f64 = 5.0;

/// Above this share of the server's connections in use there is hardly room for another relay.
const CONNECTIONS_SHARE_MAX: f64 = 0.9;

/// Checks every premise, each with its fix. Where one does not hold, what builds on it may not be there to be looked at;
/// without a schema that this build knows nothing is.
pub(super) async fn doctor(session: &mut Session) -> Db<Vec<Check>> {
    let schema = schema(session).await?;
    if schema.level == Level::Failed {
        return Ok(vec![schema]);
    }
    let mut checks = vec![schema];
    checks.extend(premises::checks(session).await?);
    let broken = checks.iter().any(|check| check.level == Level::Failed);
    match examine(session).await {
        Ok(more) => checks.extend(more),
        Err(error) if broken => tracing::debug!(error = text(error), "doctor could not look at everything"),
        Err(error) => return Err(error),
    }
    Ok(checks)
}

async fn examine(session: &mut Session) -> Db<Vec<Check>> {
    let home = Check::home(home::check(session).await.map_err(Error::from));
    let tx = read_only(session, "").await?;
    let snapshot = load_snapshot(&tx).await?;
    let mut checks = vec![
        encoding(&tx).await?,
        home,
        anchors(&tx, &snapshot).await?,
        dead_ranges(&tx).await?,
        deliveries(&tx).await?,
    ];
    checks.extend([leaves(&tx).await?, snapshot.check_subscriptions(), snapshot.check_instances()]);
    checks.extend([floor(&tx).await?, vacuum_horizon(&tx).await?, own_sessions(&tx).await?]);
    let server = tx.query_typed_one(sql!(diagnosis, "server"), &[]).await?;
    let publishing = tx.query_typed_one(sql!(meta, "publishing"), &[]).await?;
    checks.extend([grants(&tx, &server).await?, heirs(&tx).await?, limits(&publishing)?]);
    checks.push(doorbell(&publishing, &server)?);
    checks.extend([durability(&server)?, autovacuum(&server)?, connections(&server)?]);
    Ok(checks)
}

async fn schema(session: &Session) -> Db<Check> {
    let state = state_of(session).await?;
    let since = match state {
        SchemaState::Current => applied_at(&**session).await?,
        _ => None,
    };
    Ok(Check::schema(state, SCHEMA_VERSION, since.map(|at| at.to_string())))
}

/// The log of a database whose text is not checked goes on, but an event that is no text is dead.
async fn encoding(tx: &Transaction<'_>) -> Db<Check> {
    let name: String = tx.query_typed_one(sql!(schema, "encoding"), &[]).await?.try_get(0)?;
    Ok(match name == UNCHECKED_ENCODING {
        false => Check::ok("encoding", name),
        true => Check::bad(
            "encoding",
            Level::Failed,
            format!(
                "{name}: any bytes pass for text; an event of which something is no text in UTF-8 is not delivered, it is dead at once"
            ),
            CREATE_UTF8,
        ),
    })
}

fn text(error: DbError) -> String {
    pillarbox::Error::from(error).to_string()
}

/// The event at each anchor must still be the one that was settled, unless retention has passed it.
async fn anchors(tx: &Transaction<'_>, snapshot: &Snapshot) -> Db<Check> {
    let anchors = snapshot.lanes().filter_map(|lane| lane.cursor.anchor);
    let (positions, ids): (Vec<i64>, Vec<Uuid>) =
        anchors.filter(|(position, _)| *position > snapshot.pruned_to).unzip();
    let broken = tx
        .query_typed_opt(sql!(diagnosis, "broken_anchor"), &[(&positions, Type::INT8_ARRAY), (&ids, Type::UUID_ARRAY)])
        .await?;
    let Some(row) = broken else { return Ok(Check::anchors(Ok(()))) };
    let (position, id): (i64, Uuid) = (row.try_get("position")?, row.try_get("id")?);
    let what = format!("event {id} was settled at position {position} and is no longer there");
    Ok(Check::anchors(Err(DbError::not_itself(&what).into())))
}

async fn dead_ranges(tx: &Transaction<'_>) -> Db<Check> {
    Ok(Check::dead_ranges(tx.query_typed_one(sql!(diagnosis, "events_in_dead_ranges"), &[]).await?.try_get(0)?))
}

async fn deliveries(tx: &Transaction<'_>) -> Db<Check> {
    let row = tx.query_typed_one(sql!(diagnosis, "deliveries_without_event"), &[]).await?;
    Ok(Check::deliveries(row.try_get(0)?))
}

async fn leaves(tx: &Transaction<'_>) -> Db<Check> {
    Ok(match crate::leaves::warning(tx).await? {
        None => Check::ok("leaves", "the next events have their leaf"),
        Some(finding) => {
            Check::bad("leaves", Level::Warning, finding, "run a relay, or `pillarbox prune`: it lays leaves ahead")
        }
    })
}

/// Who keeps the floors from rising.
async fn floor(tx: &Transaction<'_>) -> Db<Check> {
    let holders = holders::of_floor(tx).await?;
    Ok(match holders.first() {
        None => Check::ok("writers", "no transaction that published is open"),
        Some(first) => Check::bad(
            "writers",
            Level::Warning,
            holders.iter().map(holders::Holder::of_floor).collect::<Vec<_>>().join("; "),
            format!("if it does not end by itself: {}", first.end()),
        ),
    })
}

/// Who keeps vacuum from its work.
async fn vacuum_horizon(tx: &Transaction<'_>) -> Db<Check> {
    let holders = holders::of_snapshots(tx).await?;
    Ok(match holders.first() {
        None => Check::ok("snapshots", format!("none is older than {}", spoken(holders::SNAPSHOT_SECONDS_MAX))),
        Some(first) => Check::bad(
            "snapshots",
            Level::Warning,
            holders.iter().map(holders::Holder::of_snapshot).collect::<Vec<_>>().join("; "),
            format!("if it does not end by itself: {}", first.end()),
        ),
    })
}

async fn own_sessions(tx: &Transaction<'_>) -> Db<Check> {
    let seconds = [(&OWN_SNAPSHOT_SECONDS_MAX as _, Type::FLOAT8)];
    let rows = tx.query_typed(sql!(diagnosis, "old_snapshots"), &seconds).await?;
    let pids: Vec<String> = rows.iter().map(|row| row.get::<_, i32>(0).to_string()).collect();
    Ok(match pids.first() {
        None => Check::ok(
            "own sessions",
            format!("none of Pillarbox's keeps a snapshot for over {OWN_SNAPSHOT_SECONDS_MAX} s"),
        ),
        Some(pid) => Check::bad(
            "own sessions",
            Level::Warning,
            format!(
                "sessions of Pillarbox keep a snapshot for over {OWN_SNAPSHOT_SECONDS_MAX} s: pid {}",
                pids.join(", ")
            ),
            format!("a large audit, list or prune may do so; otherwise `select pg_terminate_backend({pid})`"),
        ),
    })
}

/// Who could insert an event where no reader looks for it.
async fn grants(tx: &Transaction<'_>, server: &Row) -> Db<Check> {
    let name = "grants";
    let rows = tx.query_typed(sql!(diagnosis, "grants"), &[]).await?;
    let grants: Vec<(&str, &str, &str)> =
        rows.iter().map(|row| (row.get("relation"), row.get("grantee"), row.get("privilege"))).collect();
    if let Some((relation, grantee, privilege)) = grants.first() {
        let all: Vec<String> = grants
            .iter()
            .map(|(relation, grantee, privilege)| format!("{grantee} may {privilege} on {relation}"))
            .collect();
        let revoke = format!("revoke {privilege} on {relation} from {grantee}");
        let finding = format!("positions or times can be chosen, or leaves written to, by hand: {}", all.join(", "));
        let fix = format!("run `{revoke}`, and grant what `pillarbox migrate --print-roles` prints");
        return Ok(Check::bad(name, Level::Warning, finding, fix));
    }
    let (user, owns): (&str, bool) = (server.try_get("role")?, server.try_get("owns_log")?);
    Ok(match owns {
        false => Check::ok(name, "only the owner could choose a position"),
        true => Check::bad(
            name,
            Level::Warning,
            format!("{user} owns the log and could choose positions; nothing in PostgreSQL keeps an owner from it"),
            "let publishers and relays use roles of their own, as `pillarbox migrate --print-roles` prints them",
        ),
    })
}

/// Whether relays can end what is left of each other.
async fn heirs(tx: &Transaction<'_>) -> Db<Check> {
    let rows = tx.query_typed(sql!(diagnosis, "strangers"), &[]).await?;
    let pairs: Vec<(&str, &str)> = rows.iter().map(|row| (row.get("heir"), row.get("owner"))).collect();
    Ok(match pairs.first() {
        None => Check::ok("heirs", "running relays can end the sessions of one that is frozen or cut off"),
        Some((heir, owner)) => {
            let all: Vec<String> = pairs
                .iter()
                .map(|(heir, owner)| format!("a relay of {heir} may not end sessions of {owner}"))
                .collect();
            let finding = format!(
                "{}: lanes of one that is frozen inside a transaction are taken over only when the server ends that by itself",
                all.join(", ")
            );
            let fix = format!("let relays of one log use one role, or run `grant {owner} to {heir}`");
            Check::bad("heirs", Level::Warning, finding, fix)
        }
    })
}

/// The check of events is the predicate of an index, which to others may look unused.
fn limits(publishing: &Row) -> Db<Check> {
    let schema: &str = publishing.try_get("schema")?;
    Ok(match publishing.try_get("is_checked")? {
        true => Check::ok("limits", "events are checked when they are published"),
        false => Check::bad(
            "limits",
            Level::Warning,
            format!(
                "the index {schema}.event_id, whose predicate checks events, is missing, invalid or another one: events of any size and form are taken"
            ),
            format!(
                "drop what is left of the old one and run, as the owner of the log, `select \
                {schema}.set_payload_bytes_max(payload_bytes_max) from {schema}.meta`, so that what was published meanwhile is left \
                alone, and `create index event_id on {schema}.event (id) where {schema}.is_well_formed(topic, type, key, payload, \
                payload_bytes, content_type, headers, created_at) and id is not null`"
            ),
        ),
    })
}

fn doorbell(publishing: &Row, server: &Row) -> Db<Check> {
    let name = "doorbell";
    let (on, rings): (bool, bool) = (publishing.try_get("doorbell")?, publishing.try_get("rings")?);
    if on && !rings {
        let schema: &str = publishing.try_get("schema")?;
        return Ok(Check::bad(
            name,
            Level::Warning,
            "the default of event.created_at, which rings, was changed: a sleeping relay notices events only when it polls",
            format!("run `select {schema}.set_doorbell(true)` as the owner of the log"),
        ));
    }
    let prepared: i32 = server.try_get("max_prepared")?;
    Ok(match (on, prepared) {
        (true, 0) => Check::ok(name, "publishers ring while a relay sleeps"),
        (true, _) => Check::bad(
            name,
            Level::Warning,
            format!("a transaction that rang cannot be prepared, and max_prepared_transactions is {prepared}"),
            "if publishers prepare transactions, run `pillarbox migrate --doorbell off`",
        ),
        (false, 0) => Check::bad(
            name,
            Level::Warning,
            "it is off: a sleeping relay notices events only when it polls",
            "run `pillarbox migrate --doorbell on`, unless that is wanted",
        ),
        (false, _) => Check::ok(name, "off, as suits prepared transactions; relays notice events when they poll"),
    })
}

fn durability(server: &Row) -> Db<Check> {
    let (standbys, safe): (&str, bool) = (server.try_get("standbys")?, server.try_get("is_safe")?);
    Ok(match (safe, standbys) {
        (false, _) => Check::bad(
            "durability",
            Level::Warning,
            "fsync or full_page_writes is off: a crash of the machine can lose or damage what was committed",
            "turn both on, unless this is a test",
        ),
        (true, "") => Check::ok(
            "durability",
            "what is delivered is on this server's disk; a failover to an asynchronous standby can lose it",
        ),
        (true, names) => {
            Check::ok("durability", format!("what is delivered is on disk here and on the standbys of '{names}'"))
        }
    })
}

fn autovacuum(server: &Row) -> Db<Check> {
    let (on, off_for): (bool, Vec<&str>) = (server.try_get("autovacuum")?, server.try_get("autovacuum_off_for")?);
    Ok(match (on, off_for.as_slice()) {
        (true, []) => Check::ok("autovacuum", "on"),
        (true, names) => Check::bad(
            "autovacuum",
            Level::Warning,
            format!("off for {}: they grow without end", names.join(", ")),
            format!("run `alter table {} reset (autovacuum_enabled)`", names[0]),
        ),
        (false, _) => Check::bad(
            "autovacuum",
            Level::Warning,
            "off: the small tables that are rewritten all the time grow without end",
            "set `autovacuum = on`, or vacuum the schema often",
        ),
    })
}

fn connections(server: &Row) -> Db<Check> {
    let (used, own, max): (i64, i64, i64) =
        (server.try_get("connections")?, server.try_get("own_connections")?, server.try_get("connections_max")?);
    let finding = format!(
        "{used} of {max} are in use, {own} of them by Pillarbox (a relay takes 4, one with a queue 5, and one more while a command or retention runs)"
    );
    Ok(match used as f64 > max as f64 * CONNECTIONS_SHARE_MAX {
        false => Check::ok("connections", finding),
        true => Check::bad("connections", Level::Warning, finding, "raise max_connections, or run fewer relays"),
    })
}
