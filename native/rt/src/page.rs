//! The message page of the running thread.

use core::marker::PhantomData;

use abi::{Item, ItemKind, MessagePage, Selector, TypedItem, Window as Accept};

use crate::memory::Window;
use crate::thread;

/// Message page of the running thread, accessed by copying.
///
/// It carries every message that does not fit registers, log texts too: compose a message directly
/// before sending it, and read a message directly after receiving it.
#[derive(Clone, Copy)]
pub struct Page {
    page: *mut MessagePage,
    /// A page belongs to one thread.
    _not_send: PhantomData<*mut ()>,
}

impl Page {
    /// Words in a page.
    pub const WORDS: usize = MessagePage::WORDS;

    /// Returns the running thread's page.
    pub fn current() -> Self {
        let address = thread::message_page();
        Self {
            page: core::ptr::with_exposed_provenance_mut(address as usize),
            _not_send: PhantomData,
        }
    }

    /// Writes words at the start of the page; ignores words beyond its end.
    pub fn set_words(self, words: &[u64]) {
        for (index, &word) in words.iter().enumerate().take(Self::WORDS) {
            // SAFETY: the kernel mapped the page for this thread and no reference to it exists; the
            // index is within the array.
            unsafe { (&raw mut (*self.page).words[index]).write_volatile(word) };
        }
    }

    /// Copies words from the start of the page.
    pub fn words(self, words: &mut [u64]) {
        for (index, word) in words.iter_mut().enumerate().take(Self::WORDS) {
            // SAFETY: as in `set_words`.
            *word = unsafe { (&raw const (*self.page).words[index]).read_volatile() };
        }
    }

    /// Writes bytes into the words at the start of the page; returns the number of words used.
    /// Ignores bytes beyond the end.
    pub fn set_bytes(self, bytes: &[u8]) -> u8 {
        let mut words = [0; Self::WORDS];
        let used = proto::bytes::pack(bytes, &mut words);
        self.set_words(&words[..used]);
        used as u8
    }

    /// Copies `length` bytes, limited to the buffer, out of the words of a message with `words`
    /// words.
    pub fn bytes(self, words: u8, length: u64, bytes: &mut [u8]) -> &mut [u8] {
        let mut copy = [0; Self::WORDS];
        let words = (words as usize).min(Self::WORDS);
        self.words(&mut copy[..words]);
        proto::bytes::unpack(&copy[..words], usize::try_from(length).unwrap_or(usize::MAX), bytes)
    }

    fn set_item(self, index: usize, item: TypedItem) {
        if index < MessagePage::ITEMS {
            // SAFETY: as in `set_words`.
            unsafe { (&raw mut (*self.page).items[index]).write_volatile(item) };
        }
    }

    /// Makes item `index` a capability to delegate, with a subset of its rights.
    pub fn set_capability(self, index: usize, capability: Selector, rights: u8) {
        self.set_item(index, TypedItem { item: Item::capability(rights).pack(), base: capability });
    }

    /// Makes item `index` memory to share, or with `grant` to transfer: the first naturally aligned
    /// block of the window. Returns its length in bytes.
    pub fn set_memory(self, index: usize, window: Window, rights: u8, grant: bool) -> u64 {
        let Some((block, order)) = window.blocks(window.base()).next() else { return 0 };
        let item = Item { grant, ..Item::memory(order, window.allowed_rights(rights)) };
        self.set_item(index, TypedItem { item: item.pack(), base: block >> abi::PAGE_SHIFT });
        abi::PAGE_SIZE << order
    }

    /// Returns item `index` of a received message: the item and its destination.
    pub fn item(self, index: usize) -> Option<(Item, u64)> {
        if index >= MessagePage::ITEMS {
            return None;
        }
        // SAFETY: as in `set_words`.
        let item = unsafe { (&raw const (*self.page).items[index]).read_volatile() };
        Some((Item::unpack(item.item)?, item.base))
    }

    /// Accepts capabilities of received messages in the free slots `base..base + count`; 0 refuses
    /// them.
    pub fn accept_capabilities(self, base: Selector, count: u64) {
        self.accept(ItemKind::Capability, Accept { base, count });
    }

    /// Accepts memory, within [`crate::accept_memory`]'s range.
    pub(crate) fn accept(self, kind: ItemKind, accept: Accept) {
        // SAFETY: as in `set_words`; `kind` is an index into the array.
        unsafe { (&raw mut (*self.page).windows[kind as usize]).write_volatile(accept) };
    }
}
