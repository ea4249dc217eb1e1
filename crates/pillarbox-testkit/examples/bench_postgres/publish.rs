pub(crate) mod beside;
mod crew;
mod figure;
mod kind;
mod situation;

use tokio_postgres::Client;

use crate::Result;
use crate::database::{BACKLOG, migrated};
use crate::process::Figures;
use crate::summary::{Goal, Row, Rows};
use beside::Beside;
use crew::Crew;
use figure::Figure;
use kind::Kind;
use situation::Situation;

/// How many bytes of WAL an event may cost, as a share of a plain row's.
const WAL_RATIO_MAX: f64 = 1.05;

/// What an INSERT should reach of one into a table that somebody reads meanwhile.
const READ_TABLE_RATIO_MIN: f64 = 0.9;

/// What an INSERT should reach of one with a trigger that always notifies.
const NOTIFY_RATIO_MIN: f64 = 2.0;

/// Nothing else writes WAL here, and many transactions share a flush, as they do in an application.
const WAL_CONNECTIONS: usize = 8;

/// With fewer events left, a relay may have had nothing to do in some slice.
const BACKLOG_LEFT_MIN: i64 = 10_000;

/// Whether a relay sleeps: it holds the doorbell's lock, so that writers ring.
const IS_ASLEEP: &str = "select exists (
    select from pg_locks
    where locktype = 'advisory' and objid = 0 and objsubid = 2 and mode = 'ExclusiveLock' and granted
        and database = (select oid from pg_database where datname = current_database())
)";

/// The ways to publish beside plain tables, in one situation and from so many connections at once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Comparison {
    situation: Situation,
    connections: usize,
}

/// A row of the table: one figure of two kinds.
struct Line {
    row: Row,
    figure: Figure,
    ours: Kind,
    bare: Kind,
}

impl Comparison {
    /// All that are made.
    pub(crate) fn all() -> impl Iterator<Item = Comparison> {
        Situation::ALL.into_iter().flat_map(|situation| {
            situation.connections().iter().map(move |connections| Comparison { situation, connections: *connections })
        })
    }

    /// The one that is measured under this name.
    pub(crate) fn named(name: &str) -> Option<Comparison> {
        Comparison::all().find(|comparison| comparison.name() == name)
    }

    /// What it is measured as, like `publish_awake_8`.
    pub(crate) fn name(self) -> String {
        format!("publish_{}_{}", self.situation.name(), self.connections)
    }

    /// So many rounds of short slices, one of each kind in a round; each round begins with another kind.
    pub(crate) async fn measure(self, url: &str, rounds: usize) -> Result<Figures> {
        let (client, kinds) = (migrated(url).await?, self.situation.kinds(self.connections));
        for kind in kinds {
            client.batch_execute(&kind.setup()).await?;
        }
        let _beside = Beside::start(self.situation, kinds, url).await?;
        let crew = Crew::assemble(url, self.connections, kinds).await?;
        crew.warm_up(kinds, self.situation.pace()).await?;
        let mut figures = Figures::default();
        let mut looks = Vec::new();
        for round in 0..rounds {
            for kind in (0..kinds.len()).map(|index| kinds[(index + round) % kinds.len()]) {
                let slice = crew.slice(kind, self.situation).await?;
                if kind.is_ours() {
                    looks.push(client.query_one(IS_ASLEEP, &[]).await?.try_get::<_, bool>(0)?);
                }
                for figure in self.figures() {
                    figures = figures.with(&key(kind, *figure, round), figure.of(&slice));
                }
            }
        }
        match self.situation {
            Situation::Asleep => require_most(&looks, true)?,
            // One publisher waits for no other, and a relay decides from time to time whether it sleeps.
            Situation::Awake if self.connections > 1 => require_most(&looks, false)?,
            Situation::Backlog => require_backlog(&client).await?,
            Situation::Alone | Situation::Awake | Situation::Batch => {}
        }
        Ok(figures)
    }

    /// Adds what was measured to the table.
    pub(crate) fn report(self, found: &Figures, rounds: usize, rows: &mut Rows) {
        for Line { row, figure, ours, bare } in self.lines() {
            for round in 0..rounds {
                rows.add(row, found[&key(ours, figure, round)], Some(found[&key(bare, figure, round)]));
            }
        }
    }

    /// What of a slice is reported.
    fn figures(self) -> &'static [Figure] {
        match (self.situation, self.connections) {
            (Situation::Asleep, _) => &[Figure::Latency, Figure::Processor],
            (Situation::Alone, WAL_CONNECTIONS) => &[Figure::Rate, Figure::Processor, Figure::Wal],
            _ => &[Figure::Rate, Figure::Processor],
        }
    }

    fn lines(self) -> Vec<Line> {
        let kinds = self.situation.kinds(self.connections);
        let line = |name: String, figure: Figure, goal, (ours, bare)| {
            // A name is kept until the table is printed, which is the end.
            Line { row: Row { name: name.leak(), unit: figure.unit(), goal }, figure, ours, bare }
        };
        let mut lines = Vec::new();
        for ours in kinds {
            let Some((bare, ratio_min)) = ours.target() else { continue };
            for figure in self.figures() {
                let goal = match figure {
                    Figure::Wal => Goal::RatioAtMost(WAL_RATIO_MAX),
                    _ => Goal::RatioAtLeast(ratio_min),
                };
                let (connections, situation) = (self.connections, self.situation.text());
                let name = format!("{} x{connections}, {situation}{}", ours.text(), figure.suffix());
                lines.push(line(name, *figure, goal, (*ours, bare)));
            }
        }
        for (bare, ratio_min) in [(Kind::Watched, READ_TABLE_RATIO_MIN), (Kind::Ringing, NOTIFY_RATIO_MIN)] {
            if kinds.contains(&bare) {
                let name = format!("insert x{} over {}", self.connections, bare.text());
                lines.push(line(name, Figure::Rate, Goal::RatioAtLeast(ratio_min), (Kind::Insert, bare)));
            }
        }
        lines
    }
}

/// What a figure of a slice is called.
fn key(kind: Kind, figure: Figure, round: usize) -> String {
    format!("{}_{}_{round}", kind.name(), figure.name())
}

/// Refuses what was measured beside a relay that did not sleep, or was not awake, after most of the slices.
fn require_most(looks: &[bool], asleep: bool) -> Result<()> {
    let as_expected = looks.iter().filter(|look| **look == asleep).count();
    if as_expected * 2 <= looks.len() {
        let state = if asleep { "asleep" } else { "awake" };
        return Err(format!("the relay was {state} after {as_expected} of {} slices only", looks.len()).into());
    }
    Ok(())
}

/// Refuses what was measured beside a relay that had come to the end.
async fn require_backlog(client: &Client) -> Result<()> {
    let left: i64 = client.query_one(BACKLOG, &[]).await?.try_get(0)?;
    if left < BACKLOG_LEFT_MIN {
        return Err(format!("the relay has only {left} events left: it did not drain a backlog all the time").into());
    }
    Ok(())
}
