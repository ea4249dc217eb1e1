use std::fmt::Write;

use serde_json::json;

/// What is measured, and how well it should do.
#[derive(Clone, Copy)]
pub(crate) struct Row {
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) goal: Goal,
}

/// When a row passes.
#[derive(Clone, Copy)]
pub(crate) enum Goal {
    /// Ours divided by the baseline.
    RatioAtLeast(f64),
    /// Ours divided by the baseline.
    RatioAtMost(f64),
    /// Ours alone.
    Below(f64),
}

/// All rows with what each round found.
#[derive(Default)]
pub(crate) struct Rows(Vec<(Row, Vec<Round>)>);

struct Round {
    ours: f64,
    bare: Option<f64>,
}

struct Medians {
    ours: f64,
    bare: Option<f64>,
    ratio: Option<f64>,
    passed: bool,
}

impl Rows {
    pub(crate) fn add(&mut self, row: Row, ours: f64, bare: Option<f64>) {
        let round = Round { ours, bare };
        match self.0.iter_mut().find(|(known, _)| known.name == row.name) {
            Some((_, rounds)) => rounds.push(round),
            None => self.0.push((row, vec![round])),
        }
    }

    pub(crate) fn to_table(&self) -> String {
        let mut table = format!(
            "{:<28} {:>12} {:>12} {:<12} {:>6}  {:<12} {}\n",
            "measurement", "pillarbox", "bare", "unit", "ratio", "target", "result"
        );
        for (row, rounds) in &self.0 {
            let medians = medians(row.goal, rounds);
            let bare = medians.bare.map_or_else(|| "-".into(), number);
            let ratio = medians.ratio.map_or_else(|| "-".into(), |ratio| format!("{ratio:.2}"));
            let result = if medians.passed { "pass" } else { "MISSED" };
            writeln!(
                table,
                "{:<28} {:>12} {:>12} {:<12} {:>6}  {:<12} {}",
                row.name,
                number(medians.ours),
                bare,
                row.unit,
                ratio,
                row.goal.text(),
                result
            )
            .expect("a string takes everything");
        }
        table + &format!("medians of {} rounds", self.0.first().map_or(0, |(_, rounds)| rounds.len()))
    }

    pub(crate) fn to_json(&self) -> String {
        let row = |(row, rounds): &(Row, Vec<Round>)| {
            let medians = medians(row.goal, rounds);
            let rounds: Vec<_> =
                rounds.iter().map(|round| json!({"pillarbox": round.ours, "bare": round.bare})).collect();
            json!({
                "measurement": row.name, "unit": row.unit, "pillarbox": medians.ours, "bare": medians.bare,
                "ratio": medians.ratio, "target": row.goal.text(), "passed": medians.passed, "rounds": rounds,
            })
        };
        let rows: Vec<_> = self.0.iter().map(row).collect();
        serde_json::to_string_pretty(&rows).expect("numbers and texts are JSON")
    }
}

impl Goal {
    fn text(self) -> String {
        match self {
            Goal::RatioAtLeast(limit) => format!("ratio >= {limit}"),
            Goal::RatioAtMost(limit) => format!("ratio <= {limit}"),
            Goal::Below(limit) => format!("< {limit}"),
        }
    }
}

fn medians(goal: Goal, rounds: &[Round]) -> Medians {
    let ours = median(rounds.iter().map(|round| round.ours));
    let bare = rounds.iter().map(|round| round.bare).collect::<Option<Vec<f64>>>().map(|bare| median(bare.into_iter()));
    let ratios = rounds.iter().map(|round| round.bare.map(|bare| round.ours / bare)).collect::<Option<Vec<f64>>>();
    let ratio = ratios.map(|ratios| median(ratios.into_iter()));
    let passed = match (goal, ratio) {
        (Goal::RatioAtLeast(limit), Some(ratio)) => ratio >= limit,
        (Goal::RatioAtMost(limit), Some(ratio)) => ratio <= limit,
        (Goal::Below(limit), _) => ours < limit,
        (_, None) => false,
    };
    Medians { ours, bare, ratio, passed }
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.len() % 2 == 1 { values[middle] } else { (values[middle - 1] + values[middle]) / 2.0 }
}

/// Whole numbers where they are large, two places where they are small.
fn number(value: f64) -> String {
    if value >= 100.0 { format!("{value:.0}") } else { format!("{value:.2}") }
}
