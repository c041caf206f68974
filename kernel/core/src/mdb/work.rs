//! Work budgets that bound the length of kernel entries, during which interrupts are off.
//!
//! One unit is about a hundred instructions. A step begins only if the budget covers its worst-case
//! cost, as measured by `cargo xtask bench` (`kernel_max`). The full budget covers every single
//! step, so each attempt makes progress.

/// Work budget of one system call, after which it restarts.
pub const WORK: u32 = 80;
/// Work budget of the delegations in one message: the maximum number of items, each of one page,
/// capability or port.
pub const MESSAGE_WORK: u32 = abi::MessagePage::ITEMS as u32 * (LOOKUP + NODE);

/// Visiting a mapping or slot.
pub(super) const LOOKUP: u32 = 3;
/// Creating a mapping or capability.
pub(super) const NODE: u32 = 14;
/// Removing a mapping.
pub(super) const LEAF: u32 = 20;
/// Removing a capability, including destruction of its object.
pub(super) const CAPABILITY: u32 = 26;
/// Finding and freeing a page table.
pub(super) const TABLE: u32 = 50;
/// Scanning a page of capability slots.
pub(super) const SLOT_PAGE: u32 = 10;
/// Detaching a thread from its task.
pub(super) const THREAD: u32 = 20;
/// Page-table entries written per unit of work.
const ENTRIES: u64 = 8;
/// Port-map words written per unit of work.
const WORDS: u64 = 32;

/// Charges the cost of a step to a budget; returns `false` if the budget does not cover it.
pub(super) fn charge(budget: &mut u32, cost: u32) -> bool {
    debug_assert!(cost <= WORK, "a step must fit the full budget");
    let left = budget.checked_sub(cost);
    *budget = left.unwrap_or(*budget);
    left.is_some()
}

/// Cost of writing page-table entries.
pub(super) fn of_entries(entries: u64) -> u32 {
    (entries / ENTRIES) as u32
}

/// Cost of writing port-map words.
pub(super) fn of_words(words: u64) -> u32 {
    (words / WORDS) as u32
}
