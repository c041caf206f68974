//! Transfer of messages: words and delegations.

use core::sync::atomic::Ordering;

use abi::{Item, ItemKind, MessagePage, Status, Tag};

use crate::arch::{Arch, Context};
use crate::mdb::Delegation;
use crate::mdb::work::MESSAGE_WORK;
use crate::object::*;
use crate::{Kernel, Result};

/// Offsets in a [`MessagePage`], in words.
pub(super) const ITEMS_AT: usize = core::mem::offset_of!(MessagePage, items) / 8;
pub(super) const WINDOWS_AT: usize = core::mem::offset_of!(MessagePage, windows) / 8;

impl<A: Arch> Kernel<A> {
    /// Transfers a message from `sender` to `receiver`, which gets status `Ok` and the badge.
    #[inline(always)]
    pub(super) fn deliver(
        &self,
        sender: &Thread<A>,
        receiver: &Thread<A>,
        badge: u64,
        content: CallContent,
    ) -> Result<()> {
        let to = &receiver.context;
        if content == CallContent::Fault {
            Self::deliver_fault(sender, receiver);
        } else {
            let raw = sender.context.argument(1);
            if !Tag::is_in_registers(raw) {
                self.deliver_page(sender, receiver, Tag::unpack(raw))?;
            }
            Self::deliver_registers(sender, receiver, raw);
        }
        to.set_result(0, badge);
        to.set_status(Status::Ok);
        Ok(())
    }

    /// Transfers the part of a message in registers; `tag` is the sender's.
    #[inline(always)]
    pub(super) fn deliver_registers(sender: &Thread<A>, receiver: &Thread<A>, tag: u64) {
        receiver.context.set_result(1, tag);
        for index in 2..6 {
            receiver.context.set_result(index, sender.context.argument(index));
        }
    }

    #[cold]
    #[inline(never)]
    fn deliver_fault(sender: &Thread<A>, receiver: &Thread<A>) {
        let to = &receiver.context;
        to.set_result(1, Tag::label(abi::FAULT_LABEL).pack());
        for (index, word) in sender.fault.get().into_iter().enumerate() {
            to.set_result(2 + index, word);
        }
    }

    /// Transfers the part of a message in the message page: words and delegations.
    #[inline(never)]
    fn deliver_page(&self, sender: &Thread<A>, receiver: &Thread<A>, tag: Tag) -> Result<()> {
        let (words, items) = (tag.words as usize, tag.items as usize);
        if words > MessagePage::WORDS || items > MessagePage::ITEMS {
            return Err(Status::Overflow);
        }
        if items != 0 {
            self.deliver_items(sender, receiver, items)?;
        }
        let (from, to) = (self.memory.words(sender.message), self.memory.words(receiver.message));
        for index in 0..words {
            to[index].store(from[index].load(Ordering::Relaxed), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Delegates the items of a message: all or none.
    fn deliver_items(&self, sender: &Thread<A>, receiver: &Thread<A>, items: usize) -> Result<()> {
        let (from, to) = (self.memory.words(sender.message), self.memory.words(receiver.message));
        // A copy of the window bounds: user tasks may write the page at any time.
        let mut windows = [0, 2, 4].map(|at| {
            let [base, count] =
                [0, 1].map(|word| to[WINDOWS_AT + at + word].load(Ordering::Relaxed));
            (base, base.saturating_add(count))
        });
        let (mut placed, mut budget) = ([None; MessagePage::ITEMS], MESSAGE_WORK);
        let delivered = (0..items).try_for_each(|index| {
            let at = ITEMS_AT + 2 * index;
            let item = Item::unpack(from[at].load(Ordering::Relaxed)).ok_or(Status::BadArgument)?;
            let source = from[at + 1].load(Ordering::Relaxed);
            // What was granted cannot be given back.
            let is_capabilities = item.kind == ItemKind::Capability && item.order != 0;
            if item.grant && (is_capabilities || index + 1 != items) {
                return Err(Status::BadArgument);
            }
            let window = &mut windows[item.kind as usize];
            let size = 1u64 << item.order;
            let base = window.0.checked_next_multiple_of(size).ok_or(Status::Overflow)?;
            let end = base.checked_add(size).ok_or(Status::Overflow)?;
            if end > window.1 {
                return Err(Status::Overflow);
            }
            let (task, target) = (sender.task, SpaceRef::Task(receiver.task));
            let delegation = Delegation { from: task, item, source, to: target, destination: base };
            let mut done = 0;
            let is_done = self.delegate_part(&delegation, &mut done, &mut budget);
            // The range was free before.
            placed[index] = (done > size).then_some((item, base));
            is_done?.then_some(()).ok_or(Status::Overflow)?;
            window.0 = end;
            to[at].store(item.pack(), Ordering::Relaxed);
            to[at + 1].store(base, Ordering::Relaxed);
            Ok(())
        });
        delivered.inspect_err(|_| {
            for range in placed.into_iter().flatten() {
                // At most what this message has made: a bounded number of steps.
                let is_undone = self.unmap(receiver.task, range, true, &mut 0, &mut { u32::MAX });
                debug_assert_eq!(is_undone, Ok(true));
            }
        })
    }
}
