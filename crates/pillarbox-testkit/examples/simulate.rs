//! Runs seeds of the simulation by hand: `cargo run -p pillarbox-testkit --example simulate -- FROM COUNT`.
//! A single seed is printed step by step. The trace that is printed last is equal for two engines that decide the same.
use std::hash::{DefaultHasher, Hash, Hasher};

use pillarbox_testkit::{Plan, simulate};

fn main() {
    let mut arguments = std::env::args().skip(1).map(|text| text.parse::<u64>().expect("numbers: FROM COUNT"));
    let (from, count) = (arguments.next().unwrap_or(0), arguments.next().unwrap_or(1000));
    let (mut committed, mut duplicates, mut faults, mut failed) = (0, 0, 0, 0);
    let mut trace = DefaultHasher::new();
    for seed in from..from + count {
        let run = simulate(seed, Plan { calm: seed % 10 == 0, trace: true, print: count == 1, ..Plan::default() });
        run.trace.hash(&mut trace);
        committed += run.committed;
        duplicates += run.duplicates;
        faults += run.faults;
        if !run.violations.is_empty() {
            failed += 1;
            println!("seed {seed}: {:#?}", run.violations);
        }
    }
    println!("{count} seeds, {failed} failed: {committed} events, {duplicates} duplicates, {faults} faults");
    println!("trace {:016x}", trace.finish());
    std::process::exit(i32::from(failed > 0));
}
