//! What crosses the kernel boundary: operations, capabilities, message page, vCPU state page, boot page.
//!
//! This crate is the only definition of the interface between the kernel and deprivileged
//! programs (STYLE, lesson 8). `docs/spec/system-calls.md` is generated from it by
//! `cargo xtask spec`. It holds data only: no behaviour beyond packing and unpacking.
//!
//! # Register convention (x86-64, `SYSCALL`)
//!
//! | register | in | out |
//! |---|---|---|
//! | `rax` | [`Op`] | [`Status`] |
//! | `rdi` | first argument, usually a selector | first result |
//! | `rsi`, `rdx`, `r10`, `r8`, `r9` | further arguments | further results |
//! | `rcx`, `r11` | – | clobbered |
//!
//! Every other register is preserved.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod boot;
pub mod bundle;
pub mod ops;
pub mod vcpu;

pub use ops::{OPERATIONS, Op, OpDoc, SHARE_OF_CPU};

/// Version of this interface; the boot page carries it. Incremented by every incompatible change.
pub const ABI_VERSION: u32 = 2;

/// Index of a slot in a task's capability space.
pub type Selector = u64;

/// Bytes in the smallest page, on every architecture that Parador runs on.
pub const PAGE_SIZE: u64 = 4096;
/// `log2(PAGE_SIZE)`.
pub const PAGE_SHIFT: u32 = 12;
/// First user address that is not usable: tasks own the lower half, `0..USER_END`.
pub const USER_END: u64 = 0x0000_8000_0000_0000;
/// A deadline that never comes.
pub const FOREVER: u64 = u64::MAX;

/// Outcome of a system call, in `rax`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum Status {
    /// Done.
    Ok = 0,
    /// The deadline passed first (or, for a poll, nothing was there).
    Timeout = 1,
    /// The partner died or was stopped before it answered.
    Aborted = 2,
    /// No such operation, or not on this kind of object.
    BadOperation = 3,
    /// No capability at this selector, or one of another kind.
    BadCapability = 4,
    /// The capability lacks the right that this operation needs.
    BadRights = 5,
    /// An argument is out of range, misaligned, or names nothing.
    BadArgument = 6,
    /// The object is bound to another CPU, or there is no such CPU.
    BadCpu = 7,
    /// The factory's quota does not cover what the operation needs.
    NoQuota = 8,
    /// The slot, page or binding is taken.
    Busy = 9,
    /// The message or delegation does not fit what the receiver offers.
    Overflow = 10,
    /// The machine lacks the feature (e.g. a nested VM without SVM).
    Unsupported = 11,
}

impl Status {
    /// The status with this code; an unknown code reads as [`Status::BadOperation`].
    pub const fn from_code(code: u64) -> Self {
        match code {
            0 => Self::Ok,
            1 => Self::Timeout,
            2 => Self::Aborted,
            4 => Self::BadCapability,
            5 => Self::BadRights,
            6 => Self::BadArgument,
            7 => Self::BadCpu,
            8 => Self::NoQuota,
            9 => Self::Busy,
            10 => Self::Overflow,
            11 => Self::Unsupported,
            _ => Self::BadOperation,
        }
    }
}

/// Kinds of kernel object. `Platform` stands for the machine itself and exists once, with root.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Address space, capability space and (x86) I/O ports.
    Task = 1,
    /// Execution in a task, bound to a CPU.
    Thread = 2,
    /// Endpoint for synchronous call and reply, served by one thread; carries a badge.
    Gate = 3,
    /// Sticky 64-bit event word.
    Notification = 4,
    /// One hardware interrupt line or message.
    Irq = 5,
    /// Quota of kernel memory from which objects are made.
    Factory = 6,
    /// Right to CPU time: priority, budget, period.
    SchedContext = 7,
    /// Guest-physical space.
    Vm = 8,
    /// Virtual CPU of a [`Kind::Vm`].
    Vcpu = 9,
    /// The machine: makes [`Kind::Irq`]s, writes the kernel log, switches the machine off.
    Platform = 10,
}

impl Kind {
    /// The kind with this number.
    pub const fn from_code(code: u64) -> Option<Self> {
        Some(match code {
            1 => Self::Task,
            2 => Self::Thread,
            3 => Self::Gate,
            4 => Self::Notification,
            5 => Self::Irq,
            6 => Self::Factory,
            7 => Self::SchedContext,
            8 => Self::Vm,
            9 => Self::Vcpu,
            10 => Self::Platform,
            _ => return None,
        })
    }
}

/// Rights of a capability. The meaning of a bit depends on the kind of object.
/// A delegation can only take rights away.
pub mod rights {
    /// Task, Vm: delegate memory, capabilities or ports into it, and unmap there.
    pub const MAP: u8 = 1 << 0;
    /// Task: create threads in it.
    pub const THREAD: u8 = 1 << 1;
    /// Vm: create vCPUs in it, bind its doorbells.
    pub const VCPU: u8 = 1 << 1;
    /// Thread: start, stop, bind scheduling context, fault gate and notification.
    pub const CONTROL: u8 = 1 << 0;
    /// Thread: create gates that it serves.
    pub const SERVE: u8 = 1 << 1;
    /// Gate: call it, or name it as a fault gate.
    pub const CALL: u8 = 1 << 0;
    /// Notification: signal it, or bind an interrupt or a doorbell to it.
    pub const SIGNAL: u8 = 1 << 0;
    /// Notification: wait for it, poll it, bind it to a thread or vCPU.
    pub const WAIT: u8 = 1 << 1;
    /// Irq: bind, acknowledge, mask.
    pub const IRQ: u8 = 1 << 0;
    /// Factory: create objects from it.
    pub const CREATE: u8 = 1 << 0;
    /// SchedContext: bind it to a thread, change it.
    pub const SCHEDULE: u8 = 1 << 0;
    /// Vcpu: run it and read its state.
    pub const RUN: u8 = 1 << 0;
    /// Platform: write to the kernel log.
    pub const LOG: u8 = 1 << 0;
    /// Platform: create interrupt objects.
    pub const MAKE_IRQ: u8 = 1 << 1;
    /// Platform: reset or switch off the machine, read kernel statistics.
    pub const MACHINE: u8 = 1 << 2;
    /// Any kind: the capability may be delegated further.
    pub const DELEGATE: u8 = 1 << 7;
    /// Every right.
    pub const ALL: u8 = 0xff;

    /// Memory: the page may be read (always implied).
    pub const READ: u8 = 1 << 0;
    /// Memory: the page may be written.
    pub const WRITE: u8 = 1 << 1;
    /// Memory: the page may be executed.
    pub const EXECUTE: u8 = 1 << 2;
}

/// What a delegation item names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum ItemKind {
    /// Pages; `base` is a virtual (task) or guest-physical (Vm) address shifted right by [`PAGE_SHIFT`].
    Memory = 0,
    /// Capabilities; `base` is a selector.
    Capability = 1,
    /// I/O ports; `base` is a port number.
    Port = 2,
}

/// What to delegate: 2^`order` units of a kind, naturally aligned in both spaces.
///
/// Packed: bits 1:0 kind, bit 2 grant, bits 8:3 order, bits 23:16 rights mask.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Item {
    /// What is delegated.
    pub kind: ItemKind,
    /// Move instead of share: the giver loses what it gives.
    pub grant: bool,
    /// `log2` of the number of units (pages, selectors, ports); at most [`Item::MAX_ORDER`].
    pub order: u8,
    /// Rights that the receiver keeps, of those the giver has.
    pub rights: u8,
}

impl Item {
    /// Largest order of a delegation: 2^26 pages is 256 GiB.
    pub const MAX_ORDER: u8 = 26;

    /// Memory to share.
    pub const fn memory(order: u8, rights: u8) -> Self {
        Self { kind: ItemKind::Memory, grant: false, order, rights }
    }

    /// One capability to share.
    pub const fn capability(rights: u8) -> Self {
        Self { kind: ItemKind::Capability, grant: false, order: 0, rights }
    }

    /// I/O ports to share.
    pub const fn ports(order: u8) -> Self {
        Self { kind: ItemKind::Port, grant: false, order, rights: rights::ALL }
    }

    /// The packed form.
    pub const fn pack(self) -> u64 {
        self.kind as u64
            | (self.grant as u64) << 2
            | (self.order as u64) << 3
            | (self.rights as u64) << 16
    }

    /// Reads the packed form; `None` for an unknown kind, an order too large, or reserved bits set.
    pub const fn unpack(raw: u64) -> Option<Self> {
        if raw & !0xff_01ff != 0 {
            return None;
        }
        let kind = match raw & 3 {
            0 => ItemKind::Memory,
            1 => ItemKind::Capability,
            2 => ItemKind::Port,
            _ => return None,
        };
        let order = (raw >> 3 & 0x3f) as u8;
        if order > Self::MAX_ORDER {
            return None;
        }
        Some(Self { kind, grant: raw & 4 != 0, order, rights: (raw >> 16) as u8 })
    }
}

/// Description of a message, in `rsi` of a call or reply.
///
/// Packed: bits 7:0 words in the message page, bits 12:8 delegation items there, bits 63:16 label.
/// Four more words always travel in registers; with `words == items == 0` the message page is not touched.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tag {
    /// Words in [`MessagePage::words`] that belong to the message, at most [`MessagePage::WORDS`].
    pub words: u8,
    /// Items in [`MessagePage::items`] to delegate, at most [`MessagePage::ITEMS`].
    pub items: u8,
    /// 48 bits that the kernel passes on unread: the protocol's operation or status.
    pub label: u64,
}

impl Tag {
    /// A message in registers only.
    pub const fn label(label: u64) -> Self {
        Self { words: 0, items: 0, label }
    }

    /// The packed form.
    pub const fn pack(self) -> u64 {
        self.words as u64 | (self.items as u64) << 8 | self.label << 16
    }

    /// Reads the packed form. The counts may still exceed the page's limits; the kernel answers `Overflow` then.
    pub const fn unpack(raw: u64) -> Self {
        Self { words: raw as u8, items: (raw >> 8 & 0x1f) as u8, label: raw >> 16 }
    }
}

/// One delegation in a message: an [`Item`] and the base in the sender's space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct TypedItem {
    /// [`Item::pack`].
    pub item: u64,
    /// Base in the sender's space, in units of the item's kind.
    pub base: u64,
}

/// Where a receiver is ready to take delegations of one kind: `base..base + count` units of its space.
/// Items are placed one after the other, each aligned to its size. `count == 0` refuses all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Window {
    /// First unit.
    pub base: u64,
    /// Number of units.
    pub count: u64,
}

/// The page that a thread shares with the kernel for messages that do not fit registers.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(4096))]
pub struct MessagePage {
    /// Untyped words.
    pub words: [u64; Self::WORDS],
    /// Delegations to send; in a received message, what arrived (`base` is then the receiver's).
    pub items: [TypedItem; Self::ITEMS],
    /// Receive windows by [`ItemKind`]: memory, capabilities, ports.
    pub windows: [Window; 3],
}

impl MessagePage {
    /// Words in the page.
    pub const WORDS: usize = 64;
    /// Delegation items in the page.
    pub const ITEMS: usize = 4;
}

const _: () = assert!(core::mem::size_of::<MessagePage>() == PAGE_SIZE as usize);

/// Flags of [`Op::GateReplyWait`], in `rdi`.
pub mod reply_wait {
    /// Answer the caller that is being served.
    pub const REPLY: u64 = 1 << 0;
    /// Then wait for the next caller or for the bound notification.
    pub const WAIT: u64 = 1 << 1;
}

/// Badge that [`Op::GateReplyWait`] returns when the thread's bound notification woke it;
/// the first message word holds the events.
pub const NOTIFICATION_BADGE: u64 = u64::MAX;

/// Label of the message that the kernel sends to a thread's fault gate.
/// Words: exception vector, error code, address (page fault: `CR2`), instruction pointer.
pub const FAULT_LABEL: u64 = 0xffff_ffff_ffff;

/// First word of the reply to a fault message: what becomes of the thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum FaultAction {
    /// It stays stopped.
    Stop = 0,
    /// It repeats the instruction.
    Resume = 1,
}

/// What [`Op::ThreadBind`] binds to a thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum Binding {
    /// The scheduling context it runs on. A thread without one only runs on its callers'.
    SchedContext = 0,
    /// The gate that is called when it faults. Without one a fault stops the thread and is logged.
    FaultGate = 1,
    /// The notification that also wakes [`Op::GateReplyWait`].
    Notification = 2,
}

/// What [`Op::PlatformControl`] does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum PlatformAction {
    /// Append `rdx` bytes (at most 512) of the caller's message page to the kernel log, in whole or, if the log's buffer
    /// is full, not at all. Returns the number of bytes that wait to be sent; with 0 bytes it does no more than that.
    /// Right `LOG`.
    Log = 0,
    /// Reset the machine. Right `MACHINE`.
    Reset = 1,
    /// Fill the caller's message page with kernel counters ([`boot::KernelStats`]). Right `MACHINE`.
    Stats = 2,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn item_round_trip() {
        for kind in [ItemKind::Memory, ItemKind::Capability, ItemKind::Port] {
            for grant in [false, true] {
                for order in [0, 9, Item::MAX_ORDER] {
                    let item = Item { kind, grant, order, rights: 0xa5 };
                    assert_eq!(Item::unpack(item.pack()), Some(item));
                }
            }
        }
    }

    #[test]
    fn item_refuses_nonsense() {
        assert_eq!(Item::unpack(3), None, "no fourth kind");
        assert_eq!(Item::unpack(27 << 3), None, "order too large");
        assert_eq!(Item::unpack(1 << 9), None, "reserved bit");
        assert_eq!(Item::unpack(1 << 63), None, "reserved bit");
    }

    #[test]
    fn tag_round_trip() {
        let tag = Tag { words: 64, items: 16, label: 0x1234_5678_9abc };
        assert_eq!(Tag::unpack(tag.pack()), tag);
    }
}
