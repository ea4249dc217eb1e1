use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use pillarbox::store::{KeyHash, RangeSet, lane_of};
use pillarbox_testkit::{Committed, Verdict};
use serde_json::Value;
use uuid::Uuid;

use crate::place::{PATIENCE, Place};
use crate::sql::{Row, Sql};

/// The lanes of every subscription that a ledger looks at.
pub(crate) const LANES: u32 = 8;

/// Between two looks at a condition, so that waiting does not take the processor from what is waited for.
const LOOK_PAUSE: Duration = Duration::from_millis(2);

/// One receiver's file beside the log that feeds it, read straight from the disk: no part of the engine takes part.
pub(crate) struct Ledger {
    sql: Sql,
    subscription: String,
    file: PathBuf,
    /// Up to here the file was taken in; always the end of a whole line.
    read: u64,
    received: Vec<Uuid>,
    /// What has arrived, by position.
    arrived: BTreeMap<i64, Arrived>,
}

struct Arrived {
    lane: u32,
    /// How often it came.
    times: usize,
    /// How many of these times its owner ended before it was settled.
    charged: usize,
}

/// What may come again because its owner ended, by the path it took.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Charge {
    pub(crate) fast: usize,
    pub(crate) slow: usize,
}

impl Charge {
    pub(crate) fn total(self) -> usize {
        self.fast + self.slow
    }
}

/// One lane as the database has it.
pub(crate) struct Cursor {
    pub(crate) owner: Option<i64>,
    pub(crate) epoch: i64,
    floor: i64,
    settled: RangeSet,
}

impl Cursor {
    fn has_settled(&self, position: i64) -> bool {
        position <= self.floor || self.settled.contains(position)
    }
}

impl Ledger {
    /// For the subscription whose file sink writes `subscription.ndjson`.
    pub(crate) fn new(place: &Place, subscription: &str) -> Self {
        Ledger {
            sql: place.sql(),
            subscription: subscription.to_owned(),
            file: place.path(&format!("{subscription}.ndjson")),
            read: 0,
            received: Vec::new(),
            arrived: BTreeMap::new(),
        }
    }

    /// Takes in the whole lines that were appended since the last time; how many have arrived by now.
    pub(crate) fn arrivals(&mut self) -> usize {
        let Ok(mut file) = File::open(&self.file) else { return 0 };
        let mut bytes = Vec::new();
        file.seek(SeekFrom::Start(self.read)).unwrap();
        file.read_to_end(&mut bytes).unwrap();
        // What stands behind the last line break may be half a line, or be cut by the next append.
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        self.read += whole as u64;
        for line in bytes[..whole].split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let line: Value = serde_json::from_slice(line)
                .unwrap_or_else(|error| panic!("a torn line: {error}: {}", String::from_utf8_lossy(line)));
            let position = line["sequence"].as_str().unwrap().parse().unwrap();
            self.received.push(line["id"].as_str().unwrap().parse().unwrap());
            let lane = lane_of(line["subject"].as_str().map(KeyHash::of), position, LANES);
            self.arrived.entry(position).or_insert(Arrived { lane, times: 0, charged: 0 }).times += 1;
        }
        self.received.len()
    }

    /// The lanes of the subscription, by number; empty before a relay has joined.
    pub(crate) fn cursors(&self) -> HashMap<u32, Cursor> {
        let rows = self.of_subscription("lane, owner, epoch, floor, settled", "cursor");
        let cursor = |row: &Row| {
            let number = |at: usize| row[at].as_deref().map(|text| text.parse::<i64>().unwrap());
            let settled = range_set(row[4].as_deref().unwrap());
            let cursor = Cursor { owner: number(1), epoch: number(2).unwrap(), floor: number(3).unwrap(), settled };
            (number(0).unwrap() as u32, cursor)
        };
        rows.iter().map(cursor).collect()
    }

    /// The rows of this subscription in a table.
    fn of_subscription(&self, columns: &str, table: &str) -> Vec<Row> {
        let name = &self.subscription;
        self.sql.rows(&format!(
            "select {columns} from pillarbox_{table} \
             where subscription = (select id from pillarbox_subscription where name = '{name}')"
        ))
    }

    /// The owners named here (all, if none are) have ended: the arrivals that they have not settled, each counted once. So
    /// often, and not once more, an event may come again. Nobody else may own those lanes while this looks.
    pub(crate) fn charge(&mut self, owners: Option<&[i64]>) -> Charge {
        self.arrivals();
        let parked = self.parked();
        let cursors = self.cursors();
        let ended =
            |cursor: &&Cursor| owners.is_none_or(|owners| cursor.owner.is_some_and(|owner| owners.contains(&owner)));
        let mut charge = Charge::default();
        for (position, arrived) in &mut self.arrived {
            let Some(cursor) = cursors.get(&arrived.lane).filter(ended) else { continue };
            let path = match (cursor.has_settled(*position), parked.contains(*position)) {
                (_, true) => &mut charge.slow,
                (false, false) => &mut charge.fast,
                (true, false) => continue,
            };
            *path += arrived.times - arrived.charged;
            arrived.charged = arrived.times;
        }
        charge
    }

    /// Whether every committed event is settled and none waits.
    pub(crate) fn is_settled(&self) -> bool {
        let cursors = self.cursors();
        if cursors.is_empty() || !self.parked().is_empty() {
            return false;
        }
        let floor = cursors.values().map(|cursor| cursor.floor).min().unwrap_or(0);
        let events = self.sql.rows(&format!("select position, key from pillarbox_event where position > {floor}"));
        events.iter().all(|row| {
            let position = position(&row[0]);
            cursors[&lane_of(row[1].as_deref().map(KeyHash::of), position, LANES)].has_settled(position)
        })
    }

    /// The positions of the slow path.
    fn parked(&self) -> RangeSet {
        let rows = self.of_subscription("position", "delivery");
        rows.iter().map(|row| position(&row[0])).map(|position| position..=position).collect()
    }

    /// What was committed against what was received.
    pub(crate) fn verdict(&mut self) -> Verdict {
        self.arrivals();
        let length = std::fs::metadata(&self.file).map_or(0, |metadata| metadata.len());
        assert_eq!(length, self.read, "a torn line was left at the end of {}", self.file.display());
        let event = |row: Row| {
            let id = row[0].as_deref().unwrap().parse().expect("an id is a uuid");
            Committed { id, position: position(&row[2]), key: row[1].clone() }
        };
        // On PostgreSQL an id that nobody brought is not stored.
        let log = if matches!(self.sql, Sql::Sqlite(_)) { "pillarbox_event" } else { "pillarbox_event_view" };
        let rows = self.sql.rows(&format!("select id, key, position from {log}"));
        let committed: Vec<Committed> = rows.into_iter().map(event).collect();
        Verdict::of(&committed, &self.received)
    }
}

fn position(text: &Option<String>) -> i64 {
    text.as_deref().unwrap().parse().unwrap()
}

/// Ranges as SQLite's column has them, `1-3,5`, or as PostgreSQL prints them, `{[1,4),[5,6)}`.
fn range_set(text: &str) -> RangeSet {
    let Some(ranges) = text.strip_prefix('{') else { return text.parse().expect("a list of ranges") };
    let ranges = ranges.trim_end_matches('}').split("),").filter(|range| !range.is_empty());
    let range = |range: &str| {
        let (low, high) = range.trim_start_matches('[').trim_end_matches(')').split_once(',').unwrap();
        low.parse::<i64>().unwrap()..=high.parse::<i64>().unwrap() - 1
    };
    ranges.map(range).collect()
}

/// Waits until `met` says so.
#[track_caller]
pub(crate) fn until(what: &str, mut met: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !met() {
        assert!(Instant::now() < deadline, "waited in vain: {what}");
        thread::park_timeout(LOOK_PAUSE);
    }
}
