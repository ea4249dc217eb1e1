use crate::process::Figures;

/// What a measurement calls its `number`-th kill.
pub(crate) fn kill_name(number: usize) -> String {
    format!("kill_{number:02}")
}

/// How long it took after each kill, in milliseconds.
#[derive(Default)]
pub(crate) struct Distribution(Vec<f64>);

impl Distribution {
    /// Adds the kills of one measurement.
    pub(crate) fn extend(&mut self, figures: &Figures, kills: usize) {
        self.0.extend((0..kills).map(|number| figures[&kill_name(number)]));
        self.0.sort_by(f64::total_cmp);
    }

    /// The least time that this share of the kills did not exceed.
    pub(crate) fn quantile(&self, share: f64) -> f64 {
        let rank = (self.0.len() as f64 * share).ceil() as usize;
        self.0.get(rank.max(1) - 1).copied().unwrap_or(f64::NAN)
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}
