//! The core in a simulated world: several workers, a network that delays and cuts, a server that freezes, dies, forgets and
//! refuses, clocks that step; in virtual time and by seeds. The script is the real one.
//!
//! After every step: no request waits past its deadline, none hears another's answer, none is charged twice, no bucket gives
//! more than it holds and what is refilled; and soon after the last fault service is normal.
//!
//! A failure names its seed; SIMULATION_SEED repeats it. `make simulate` goes on for as long as it is let
//! (SIMULATION_SEEDS).

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]

#[allow(dead_code)]
#[path = "simulation/server.rs"]
mod server;
#[path = "simulation/world.rs"]
mod world;

use std::sync::atomic::{AtomicU64, Ordering};

use meshquota::script::SOURCE;

use world::World;

/// How many worlds there are in one run of the tests.
const SEEDS: u64 = 10_000;

fn from_environment(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Runs worlds until one is wrong. Returns its seed, and what was.
fn search(first: u64, seeds: u64, source: &str) -> Option<(u64, String)> {
    let (next, end) = (AtomicU64::new(first), first.saturating_add(seeds));
    let run = || loop {
        let seed = next.fetch_add(1, Ordering::Relaxed);
        if seed >= end {
            return None;
        }
        if let Err(violation) = World::new(seed, source).run() {
            next.store(end, Ordering::Relaxed);
            return Some((seed, violation));
        }
    };
    std::thread::scope(|scope| {
        let threads = (0..2).map(|_| scope.spawn(run)).collect::<Vec<_>>();
        threads.into_iter().filter_map(|thread| thread.join().expect("a world panicked")).min()
    })
}

#[test]
fn nothing_that_happens_between_proxies_and_server_makes_the_count_wrong() {
    let seed = from_environment("SIMULATION_SEED");
    let first = seed.unwrap_or_else(|| fastrand::u64(..1 << 48));
    let seeds = if seed.is_some() { 1 } else { from_environment("SIMULATION_SEEDS").unwrap_or(SEEDS) };
    if let Some((seed, violation)) = search(first, seeds, SOURCE) {
        panic!("SIMULATION_SEED={seed}: {violation}");
    }
}

/// That worlds find out about a change of the script.
fn check_found(what: &str, from: &str, to: &str) {
    assert!(SOURCE.contains(from), "{what}: the script has no {from} any more");
    let found = search(1, 3000, &SOURCE.replace(from, to));
    assert!(found.is_some(), "{what}: no world is wrong");
}

#[test]
fn a_time_that_moves_back_is_found() {
    check_found("a time that moves back", "      ts = now\n    end\n", "    end\n    ts = now\n");
}

#[test]
fn a_key_that_dies_too_early_is_found() {
    check_found("a life that is too short", "life = life + SLACK", "life = (until_full - until_full % 4) / 4");
}
