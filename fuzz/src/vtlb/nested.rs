//! Nested tables of the model: memory of the VM by guest page, in large leaves where it can be.

use std::sync::atomic::Ordering::Relaxed;

use super::guest::{Delegation, PAGES};
use hw_x86::paging::entry;
use kernel_x86::shadow::testing::page;

/// Physical pages of the tables: root, level 2, level 1, and level 0 for each 2 MiB.
const ROOT: u64 = 1;
const UPPER: u64 = 2;
const MIDDLE: u64 = 3;
const LOWEST: u64 = 4;
/// Pages of a large leaf.
const LARGE: u64 = 512;

/// The tables.
pub struct Nested(());

fn leaf(memory: Delegation) -> u64 {
    let bit = |set: bool, bits: u64| if set { bits } else { 0 };
    memory.host << 12
        | entry::PRESENT
        | entry::USER
        | entry::ACCESSED
        | entry::DIRTY
        | bit(memory.write, entry::WRITE)
        | bit(!memory.execute, entry::NX)
        | bit(memory.is_device, entry::UNCACHED)
}

impl Nested {
    /// Tables for this memory.
    pub fn new(memory: &[Option<Delegation>]) -> Self {
        let this = Self(());
        let table = |page: u64| page << 12 | entry::PRESENT | entry::USER | entry::WRITE;
        page(ROOT << 12)[0].store(table(UPPER), Relaxed);
        page(UPPER << 12)[0].store(table(MIDDLE), Relaxed);
        this.write(memory);
        this
    }

    /// Physical address of the root.
    pub fn root(&self) -> u64 {
        ROOT << 12
    }

    /// Writes what has changed.
    pub fn write(&self, memory: &[Option<Delegation>]) {
        for part in 0..PAGES / LARGE {
            let pages = &memory[(part * LARGE) as usize..][..LARGE as usize];
            let first = pages[0];
            let is_whole = first.is_some_and(|first| {
                let follows = |(offset, page): (usize, &Option<Delegation>)| {
                    *page == Some(Delegation { host: first.host + offset as u64, ..first })
                };
                first.host.is_multiple_of(LARGE) && pages.iter().enumerate().all(follows)
            });
            let table = LOWEST + part;
            for (word, one) in page(table << 12).iter().zip(pages) {
                word.store(one.map_or(0, leaf), Relaxed);
            }
            let value = match first {
                Some(first) if is_whole => leaf(first) | entry::LARGE,
                _ => table << 12 | entry::PRESENT | entry::USER | entry::WRITE,
            };
            page(MIDDLE << 12)[part as usize].store(value, Relaxed);
        }
    }
}
