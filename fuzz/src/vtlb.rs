//! Target `vtlb`: a guest without nested paging, its page tables and the memory of its VM.
//!
//! The bytes choose the size of the pool and the options, then operations: stores to page tables by
//! the guest's map of memory, by other aliases and by devices; `INVLPG`, loads of CR3, changes of
//! control registers and of the mode of paging; delegations and revocations of pages; accesses. A
//! processor with a TLB that is tagged by ASID walks the shadow tables. Each access must end as the
//! guest's tables and the memory of the VM have said since the last flush of its address, in a
//! bounded number of steps, with accessed and dirty bits as a processor sets them.
//!
//! The same model with pseudo-random choices is the test `tests/vtlb.rs`.

mod choices;
mod guest;
mod nested;
mod processor;
mod world;

use crate::input::{Input, Random, Seed};
use choices::Choices;
use world::World;
pub use world::{Found, STEPS};

/// Figures of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    /// Most steps of an operation.
    pub steps: u64,
    /// ASIDs that were assigned.
    pub asids: u64,
}

/// Runs an input.
pub fn run(bytes: &[u8]) {
    let mut world = World::new(Choices::Bytes(Input::new(bytes)));
    while !world.is_done() {
        world.step().unwrap_or_else(|error| panic!("{error}"));
    }
}

/// Runs pseudo-random operations of a start value.
///
/// # Errors
/// What differs from the model.
pub fn run_random(start: u64, operations: u32) -> Found<Figures> {
    // Neighbours begin with different numbers.
    let start = (start + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut world = World::new(Choices::Random(Random::new(start)));
    for operation in 0..operations {
        world.step().map_err(|error| format!("start {start}, operation {operation}: {error}"))?;
    }
    Ok(Figures { steps: world.most_steps(), asids: world.asids() })
}

/// Returns an input with pseudo-random choices of a start value, after those for the pool and the
/// options: a number of tables ([`World::new`]) and an index of a rung.
fn recorded(start: u64, tables: u8, rung: u8, operations: u32) -> Seed {
    let chosen = [2, tables, rung, 3, 0];
    let mut world = World::new(Choices::recorded(Random::new(start), &chosen));
    for _ in 0..operations {
        world.step().unwrap_or_else(|error| panic!("start {start}: {error}"));
    }
    Seed::new().bytes(&world.into_choices())
}

/// Initial inputs: rungs, with different sizes of the pool.
pub fn seeds() -> Vec<(&'static str, Seed)> {
    vec![
        ("kernel-rung", recorded(1, 20, 0, 600)),
        ("global", recorded(2, 4, 1, 600)),
        ("sync", recorded(3, 50, 3, 600)),
        ("trace", recorded(4, 20, 5, 600)),
        ("asid", recorded(5, 30, 7, 600)),
        ("top", recorded(6, 56, 9, 600)),
        ("top-small-pool", recorded(7, 0, 9, 600)),
    ]
}
