use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs;
use std::io;
use std::path::Path;

use anyhow::{Context, Result};
use pillarbox::admin::State;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::publisher::{PAID, Published};
use super::relay::{INVOICES, MAIL, POISON_KEY};

/// What one receiver got, held against what was committed. Knows nothing of cursors: it reads the receiver's file.
#[derive(Debug, Serialize)]
pub(super) struct Account {
    pub(super) subscription: &'static str,
    wanted: usize,
    delivered: usize,
    waiting: usize,
    dead: usize,
    pub(super) duplicates: usize,
    pub(super) out_of_order: usize,
    pub(super) lost: usize,
    #[serde(skip)]
    ids: HashSet<Uuid>,
}

#[derive(Deserialize)]
struct Line {
    id: Uuid,
    subject: Option<String>,
    sequence: String,
}

impl Account {
    pub(super) fn of(
        name: &'static str,
        file: &Path,
        published: &[Published],
        listed: &[(Uuid, State)],
    ) -> Result<Self> {
        let wanted: Vec<Uuid> =
            published.iter().filter(|event| name != INVOICES || event.r#type == PAID).map(|event| event.id).collect();
        let listed: HashMap<Uuid, State> = listed.iter().copied().collect();
        let mut account = Account::read(name, file)?;
        account.wanted = wanted.len();
        for id in wanted.iter().filter(|id| !account.ids.contains(id)) {
            match listed.get(id) {
                Some(State::Dead) => account.dead += 1,
                Some(_) => account.waiting += 1,
                None => account.lost += 1,
            }
        }
        let committed: HashSet<&Uuid> = wanted.iter().collect();
        // An event of a transaction that rolled back must never arrive: it counts against the engine like a loss.
        account.lost += account.ids.iter().filter(|id| !committed.contains(id)).count();
        Ok(account)
    }

    fn read(name: &'static str, file: &Path) -> Result<Self> {
        let text = match fs::read_to_string(file) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
            text => text.with_context(|| format!("cannot read {}", file.display()))?,
        };
        let (mut ids, mut duplicates, mut out_of_order) = (HashSet::new(), 0, 0);
        let mut newest: BTreeMap<String, i64> = BTreeMap::new();
        for line in text.lines() {
            let line: Line = serde_json::from_str(line).with_context(|| format!("{}: a torn line", file.display()))?;
            let position: i64 = line.sequence.parse().context("a sequence that is no number")?;
            if !ids.insert(line.id) {
                duplicates += 1;
                continue;
            }
            let newest = newest.entry(line.subject.unwrap_or_default()).or_default();
            out_of_order += usize::from(position < *newest);
            *newest = position.max(*newest);
        }
        let delivered = ids.len();
        Ok(Account {
            subscription: name,
            wanted: 0,
            delivered,
            waiting: 0,
            dead: 0,
            duplicates,
            out_of_order,
            lost: 0,
            ids,
        })
    }

    /// What was not delivered here and is not lost. Only the receiver that refuses a key is meant to have that.
    pub(super) fn held_back(&self) -> Option<String> {
        let Account { subscription, waiting, dead, .. } = self;
        if waiting + dead == 0 {
            return None;
        }
        let meant =
            if self.subscription == MAIL { format!(", as intended: it refuses {POISON_KEY}") } else { String::new() };
        Some(format!(
            "{subscription}: {dead} dead, {waiting} waiting{meant}; delivered below is what at least one receiver got"
        ))
    }

    pub(super) fn row(&self) -> Vec<String> {
        let figures =
            [self.wanted, self.delivered, self.waiting, self.dead, self.duplicates, self.out_of_order, self.lost];
        let name = std::iter::once(self.subscription.to_owned());
        name.chain(figures.iter().map(ToString::to_string)).collect()
    }
}

/// How many events at least one receiver got.
pub(super) fn delivered_anywhere(accounts: &[Account]) -> usize {
    accounts.iter().flat_map(|account| &account.ids).collect::<BTreeSet<_>>().len()
}
