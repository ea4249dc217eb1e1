use std::collections::BTreeMap;
use std::fmt::Write;

use serde_json::{Value, json};

use crate::Result;
use crate::summary::{Row, Rows};

/// What was found: rows with a goal, figures without one, and who could not be measured.
#[derive(Default)]
pub(crate) struct Report {
    rows: Rows,
    told: Vec<Told>,
    unmeasured: BTreeMap<String, String>,
}

/// A figure without a goal, one value a round.
struct Told {
    name: &'static str,
    unit: &'static str,
    ours: Vec<f64>,
    theirs: Vec<f64>,
}

impl Report {
    pub(crate) fn add(&mut self, row: Row, ours: f64, bare: Option<f64>) {
        self.rows.add(row, ours, bare);
    }

    pub(crate) fn tell(&mut self, name: &'static str, unit: &'static str, ours: f64, theirs: Option<f64>) {
        let index = self.told.iter().position(|told| told.name == name).unwrap_or_else(|| {
            self.told.push(Told { name, unit, ours: Vec::new(), theirs: Vec::new() });
            self.told.len() - 1
        });
        self.told[index].ours.push(ours);
        self.told[index].theirs.extend(theirs);
    }

    pub(crate) fn not_measured(&mut self, name: &str, reason: String) {
        self.unmeasured.insert(name.into(), reason);
    }

    pub(crate) fn to_table(&self) -> String {
        let mut table = self.rows.to_table();
        table += if self.told.is_empty() { "\n" } else { "\n\nwithout a goal:\n" };
        for told in &self.told {
            let theirs = told.theirs().map_or_else(|| "-".into(), number);
            let ratio = told.ratio().map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}"));
            let ours = number(median(&told.ours));
            writeln!(table, "{:<32} {ours:>12} {theirs:>12} {:<12} {ratio:>6}", told.name, told.unit)
                .expect("a string takes everything");
        }
        for (name, reason) in &self.unmeasured {
            writeln!(table, "{name}: not measured ({reason})").expect("a string takes everything");
        }
        table.trim_end().to_owned()
    }

    pub(crate) fn to_json(&self) -> Result<String> {
        let mut all: Vec<Value> = serde_json::from_str(&self.rows.to_json())?;
        all.extend(self.told.iter().map(Told::to_json));
        let unmeasured = |(name, reason)| json!({"measurement": name, "not_measured": reason});
        all.extend(self.unmeasured.iter().map(unmeasured));
        Ok(serde_json::to_string_pretty(&all)?)
    }
}

impl Told {
    fn theirs(&self) -> Option<f64> {
        (!self.theirs.is_empty()).then(|| median(&self.theirs))
    }

    /// None where one of the rounds had nothing to compare with.
    fn ratio(&self) -> Option<f64> {
        let ratios: Vec<f64> = self.ours.iter().zip(&self.theirs).map(|(ours, theirs)| ours / theirs).collect();
        (ratios.len() == self.ours.len()).then(|| median(&ratios))
    }

    fn to_json(&self) -> Value {
        json!({
            "measurement": self.name, "unit": self.unit, "pillarbox": median(&self.ours), "bare": self.theirs(),
            "ratio": self.ratio(), "target": null, "rounds": {"pillarbox": self.ours, "bare": self.theirs},
        })
    }
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

/// Whole numbers where they are large, three places where they are small.
fn number(value: f64) -> String {
    if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.3}") }
}
