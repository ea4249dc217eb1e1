use pillarbox::engine::EngineConfig;

use super::{Plan, Random, World};

/// What a run is put under besides faults: many keys, bursts, slow sinks and small limits.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pressure {
    /// So many keys.
    pub(super) keys: u64,
    /// How likely a transaction goes on after an event, in percent.
    pub(super) burst: u64,
    /// How long a sink takes at most that is not held up, in microseconds.
    pub(super) answer_max: u64,
    /// Windows, ranges, failing keys and rows have limits that are reached.
    limits: bool,
}

impl Pressure {
    /// Every fourth run is under pressure, calm ones too.
    pub(super) fn of(seed: u64, plan: Plan) -> Self {
        if seed % 4 != 3 && seed % 20 != 10 {
            return Pressure { keys: 6, burst: 40, answer_max: 10_000, limits: false };
        }
        let mut random = Random(seed ^ 0x7072_6573_7375_7265);
        Pressure {
            keys: random.between(10, 400),
            burst: 75,
            answer_max: random.between(50_000, 200_000),
            limits: !plan.calm,
        }
    }

    /// Whether limits may stop a subscription.
    pub(super) fn stops(self, healed: bool) -> bool {
        self.limits && !healed
    }

    /// Limits that stop a subscription are lifted in the end, as somebody does who is told of them.
    pub(super) fn squeeze(self, random: &mut Random, healed: bool, config: EngineConfig) -> EngineConfig {
        if !self.limits {
            return config;
        }
        let config = EngineConfig {
            in_flight: random.between(8, 300) as usize,
            ranges_max: random.between(2, 30) as usize,
            ..config
        };
        if healed {
            return config;
        }
        EngineConfig {
            max_parked: random.between(5, 60) as usize,
            max_blocked: random.between(10, 100) as usize,
            ..config
        }
    }
}

impl World {
    /// The relays are started anew with limits that stop nobody.
    pub(super) fn lift_limits(&mut self) {
        if self.pressure.limits {
            (0..self.nodes.len()).for_each(|node| self.kill(node));
        }
    }
}
