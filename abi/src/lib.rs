//! Kernel ABI: operations, capabilities, message page, vCPU state page, boot page.
//!
//! This crate is the only definition of the interface between the kernel and user tasks. `cargo
//! xtask spec` generates `docs/spec/system-calls.md` from it. It contains data only: no behaviour
//! beyond packing and unpacking.
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
//!
//! # Register convention (AArch64, `SVC`)
//!
//! | register | in | out |
//! |---|---|---|
//! | `x8` | [`Op`] | [`Status`] |
//! | `x0` | first argument, usually a selector | first result |
//! | `x1` to `x5` | further arguments | further results |
//!
//! Every other register is preserved. Texts that name x86's registers mean these.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

pub mod args;
pub mod boot;
pub mod bundle;
pub mod ops;
pub mod vcpu;

pub use ops::{OPERATIONS, Op, OpDoc, SHARE_OF_CPU};

/// Version of the ABI, passed in the boot page. Incremented by every incompatible change.
pub const ABI_VERSION: u32 = 3;

/// Index of a slot in a task's capability space.
pub type Selector = u64;

/// Smallest page size in bytes, the same on every supported architecture.
pub const PAGE_SIZE: u64 = 4096;
/// `log2(PAGE_SIZE)`.
pub const PAGE_SHIFT: u32 = 12;
/// End of the user half of the address space: tasks own `0..USER_END`.
pub const USER_END: u64 = 0x0000_8000_0000_0000;
/// Deadline that is never reached.
pub const FOREVER: u64 = u64::MAX;

/// Status of a system call, in `rax`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum Status {
    /// Success.
    Ok = 0,
    /// The deadline passed first; for a poll, no event was pending.
    Timeout = 1,
    /// The partner was destroyed or stopped before it replied.
    Aborted = 2,
    /// No such operation, or not for this kind of object.
    BadOperation = 3,
    /// No capability at this selector, or one to another kind of object.
    BadCapability = 4,
    /// The capability lacks the right that this operation needs.
    BadRights = 5,
    /// An argument is out of range, misaligned, or refers to nothing.
    BadArgument = 6,
    /// The object is bound to another CPU, or there is no such CPU.
    BadCpu = 7,
    /// The operation exceeds the factory's quota.
    NoQuota = 8,
    /// The slot, page or binding is in use.
    Busy = 9,
    /// The message or delegation exceeds a limit or the receiver's windows.
    Overflow = 10,
    /// The machine lacks the feature (e.g. nested paging for VMs).
    Unsupported = 11,
}

impl Status {
    /// Status with this code; unknown codes yield [`Status::BadOperation`].
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

/// Kinds of kernel object. `Platform` represents the machine; only root initially has a capability
/// to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Kind {
    /// Address space, capability space and (x86) I/O ports.
    Task = 1,
    /// Thread of execution in a task, bound to a CPU.
    Thread = 2,
    /// IPC endpoint for synchronous call and reply, served by one thread; carries a badge.
    Gate = 3,
    /// 64 sticky event bits.
    Notification = 4,
    /// One hardware interrupt line or message.
    Irq = 5,
    /// Quota of kernel memory and CPU time, from which objects are created.
    Factory = 6,
    /// Scheduling context: priority, budget, period.
    SchedContext = 7,
    /// Address space of a guest.
    Vm = 8,
    /// Virtual CPU of a [`Kind::Vm`].
    Vcpu = 9,
    /// Platform control: creates [`Kind::Irq`]s, writes the kernel log, resets the machine.
    Platform = 10,
}

impl Kind {
    /// Kind with this code.
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

/// Mode of a VM: how its memory is virtualized.
pub mod vm_mode {
    /// Nested paging, by the processor.
    pub const NESTED: u64 = 0;
    /// vTLB: the kernel translates, and each vCPU has a pool of frames for the translations.
    pub const VTLB: u64 = 1;
    /// The space is guest-virtual: the processor translates by what was delegated, and by nothing
    /// else. The VMM walks the guest's page tables, delegates pages, and unmaps them where the
    /// guest drops translations. The low 48 bits of a guest-virtual address count.
    pub const GUEST_VIRTUAL: u64 = 2;
    /// Mask of the kind.
    pub const KIND: u64 = 0xff;
    /// Lowest bit of the size of the pool of each vCPU, in pages.
    pub const POOL_SHIFT: u32 = 8;
    /// Smallest pool in pages: an instruction may need the tables of seven pages at a time.
    pub const MIN_POOL: u64 = 64;
    /// Largest pool in pages.
    pub const MAX_POOL: u64 = 256;
}

/// Rights of a capability. The meaning of a bit depends on the kind of object. Delegation can only
/// remove rights.
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
    /// Platform: reset the machine, read kernel statistics.
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
    /// Memory: guest user mode may access the page. It limits only mappings in guest-virtual
    /// spaces ([`crate::vm_mode::GUEST_VIRTUAL`]); elsewhere user mode may access every page.
    pub const USER: u8 = 1 << 3;
    /// Memory, in guest-virtual spaces: the translation is global (`G`).
    pub const GLOBAL: u8 = 1 << 4;
}

/// Kind of a delegation item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum ItemKind {
    /// Pages; `base` is a virtual (task) or guest-physical (VM) page number.
    Memory = 0,
    /// Capabilities; `base` is a selector.
    Capability = 1,
    /// I/O ports; `base` is a port number.
    Port = 2,
}

/// Delegation item: 2^`order` units of a kind, naturally aligned in both address spaces.
///
/// Packed: bits 1:0 kind, bit 2 grant, bits 8:3 order, bits 23:16 rights mask.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Item {
    /// Kind of the units.
    pub kind: ItemKind,
    /// Move instead of share: the sender loses the units.
    pub grant: bool,
    /// `log2` of the number of units (pages, selectors, ports); at most [`Item::MAX_ORDER`].
    pub order: u8,
    /// Mask of the rights that the receiver gets, limited to the sender's.
    pub rights: u8,
}

impl Item {
    /// Maximum order of a delegation: 2^26 pages are 256 GiB.
    pub const MAX_ORDER: u8 = 26;

    /// Item that shares memory.
    pub const fn memory(order: u8, rights: u8) -> Self {
        Self { kind: ItemKind::Memory, grant: false, order, rights }
    }

    /// Item that shares one capability.
    pub const fn capability(rights: u8) -> Self {
        Self { kind: ItemKind::Capability, grant: false, order: 0, rights }
    }

    /// Item that shares I/O ports.
    pub const fn ports(order: u8) -> Self {
        Self { kind: ItemKind::Port, grant: false, order, rights: rights::ALL }
    }

    /// Packed form.
    pub const fn pack(self) -> u64 {
        self.kind as u64
            | (self.grant as u64) << 2
            | (self.order as u64) << 3
            | (self.rights as u64) << 16
    }

    /// Unpacks an item. `None` for an unknown kind, an order above the maximum, or reserved bits
    /// set.
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

/// Message descriptor, in `rsi` of a call or reply.
///
/// Packed: bits 7:0 words in the message page, bits 12:8 delegation items there, bits 63:16 label.
/// Four more words always travel in registers; with `words == items == 0` the message page is not
/// accessed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Tag {
    /// Number of words in [`MessagePage::words`], at most [`MessagePage::WORDS`].
    pub words: u8,
    /// Number of items in [`MessagePage::items`], at most [`MessagePage::ITEMS`].
    pub items: u8,
    /// 48 bits that the kernel does not interpret: operation or status of the protocol.
    pub label: u64,
}

impl Tag {
    /// Descriptor of a message in registers only.
    pub const fn label(label: u64) -> Self {
        Self { words: 0, items: 0, label }
    }

    /// Packed form.
    pub const fn pack(self) -> u64 {
        self.words as u64 | (self.items as u64) << 8 | self.label << 16
    }

    /// Returns whether a packed descriptor names no words or items in the message page.
    pub const fn is_in_registers(raw: u64) -> bool {
        raw & 0xffff == 0
    }

    /// Unpacks a descriptor. Counts above the page's limits fail with `Overflow` in the kernel.
    pub const fn unpack(raw: u64) -> Self {
        Self { words: raw as u8, items: (raw >> 8 & 0x1f) as u8, label: raw >> 16 }
    }
}

/// One delegation in a message: an [`Item`] and its base in the sender's address space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct TypedItem {
    /// [`Item::pack`].
    pub item: u64,
    /// Base in the sender's address space, in units of the item's kind.
    pub base: u64,
}

/// Receive window for delegations of one kind: `base..base + count` units of the receiver's address
/// space. Items are placed consecutively, each aligned to its size. `count == 0` refuses all items.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Window {
    /// First unit.
    pub base: u64,
    /// Number of units.
    pub count: u64,
}

/// Page that a thread shares with the kernel, for messages that do not fit registers.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(4096))]
pub struct MessagePage {
    /// Untyped words.
    pub words: [u64; Self::WORDS],
    /// Delegations to send; in a received message, the received ones, with `base` in the receiver.
    pub items: [TypedItem; Self::ITEMS],
    /// Receive windows by [`ItemKind`]: memory, capabilities, ports.
    pub windows: [Window; 3],
}

impl MessagePage {
    /// Maximum number of words of a message.
    pub const WORDS: usize = 64;
    /// Maximum number of delegation items of a message.
    pub const ITEMS: usize = 4;
}

const _: () = assert!(core::mem::size_of::<MessagePage>() == PAGE_SIZE as usize);

/// Flags of [`Op::GateReplyWait`], in `rdi`.
pub mod reply_wait {
    /// Reply to the caller being served.
    pub const REPLY: u64 = 1 << 0;
    /// Then wait for the next caller or for the bound notification.
    pub const WAIT: u64 = 1 << 1;
}

/// Badge that [`Op::GateReplyWait`] returns when the bound notification woke the thread. The first
/// message word holds the events.
pub const NOTIFICATION_BADGE: u64 = u64::MAX;

/// Label of the message that the kernel sends to a thread's fault gate.
/// Words: exception vector, error code, address (page fault: `CR2`), instruction pointer.
pub const FAULT_LABEL: u64 = 0xffff_ffff_ffff;

/// First word of the reply to a fault message: action on the faulting thread.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum FaultAction {
    /// The thread stays stopped.
    Stop = 0,
    /// The thread repeats the instruction.
    Resume = 1,
}

/// Kind of binding made by [`Op::ThreadBind`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum Binding {
    /// Scheduling context of the thread. Without one, it runs only on contexts donated by its
    /// callers.
    SchedContext = 0,
    /// Gate called when the thread faults. Without one, a fault is logged and stops the thread.
    FaultGate = 1,
    /// Notification that also wakes [`Op::GateReplyWait`].
    Notification = 2,
}

/// Action of [`Op::PlatformControl`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum PlatformAction {
    /// Append `rdx` bytes (at most 512) of the caller's message page to the kernel log, completely
    /// or, if the log buffer is full, not at all. Returns the number of buffered bytes not sent
    /// yet; with 0 bytes it only does that. Right `LOG`.
    Log = 0,
    /// Reset the machine. Right `MACHINE`.
    Reset = 1,
    /// Write kernel counters ([`boot::KernelStats`]) to the caller's message page. Right `MACHINE`.
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
        assert!(!Tag::is_in_registers(tag.pack()));
        assert!(!Tag::is_in_registers(Tag { words: 0, items: 1, label: 0 }.pack()));
        assert!(Tag::is_in_registers(Tag::label(u64::MAX >> 16).pack()));
    }
}
