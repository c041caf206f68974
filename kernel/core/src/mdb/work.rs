//! How much the kernel does before it lets interrupts in: budgets of work for what a program can make long.
//!
//! One unit is about a hundred instructions. A step is begun if the budget has its cost, which is that of the worst case,
//! measured by `cargo xtask bench` (`kernel_max`). The whole budget has the cost of each, so that every try gets further.

/// Work of one system call, before it is made to start again.
pub const WORK: u32 = 80;
/// Work of the delegations in one message: as many items as it can have, of a page, a capability or a port each.
pub const MESSAGE_WORK: u32 = abi::MessagePage::ITEMS as u32 * (LOOKUP + NODE);

/// A look at a mapping or slot.
pub(super) const LOOKUP: u32 = 3;
/// A mapping or capability that is made.
pub(super) const NODE: u32 = 14;
/// A mapping that is removed.
pub(super) const LEAF: u32 = 20;
/// A capability that is removed, and maybe its object.
pub(super) const CAPABILITY: u32 = 26;
/// A page table that is freed, after a search for it.
pub(super) const TABLE: u32 = 50;
/// A page of capability slots that is looked through.
pub(super) const SLOT_PAGE: u32 = 10;
/// A thread that leaves its task.
pub(super) const THREAD: u32 = 20;
/// Entries of page tables that are written by a unit of work.
const ENTRIES: u64 = 8;
/// Words of port maps that are written by a unit of work.
const WORDS: u64 = 32;

/// Takes the cost of a step from a budget; `false` if there is too little left for it.
pub(super) fn charge(budget: &mut u32, cost: u32) -> bool {
    debug_assert!(cost <= WORK, "it could never be done");
    let left = budget.checked_sub(cost);
    *budget = left.unwrap_or(*budget);
    left.is_some()
}

/// The cost of writing entries of page tables.
pub(super) fn of_entries(entries: u64) -> u32 {
    (entries / ENTRIES) as u32
}

/// The cost of writing words of port maps.
pub(super) fn of_words(words: u64) -> u32 {
    (words / WORDS) as u32
}
