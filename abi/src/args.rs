//! Arguments of system calls, by name. The kernel reads them from the argument registers, native
//! programs write them there. Values with few valid cases are decoded by methods, which fail with
//! the status that the system call returns.

use crate::ops::{FREE_TABLES, UNMAP_SELF};
use crate::{Binding, Item, Kind, PlatformAction, Selector, Status, reply_wait};

macro_rules! arguments {
    ($(
        $(#[doc = $text:literal])+
        $public:vis struct $name:ident { $($(#[doc = $field_text:literal])+ $field:ident),+ }
    )+) => {
        $($(#[doc = $text])+
        #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
        $public struct $name {
            $($(#[doc = $field_text])+ pub $field: u64,)+
        }

        impl $name {
            /// Reads the arguments; `argument(index)` returns that of an index.
            #[inline(always)]
            pub fn read(argument: impl Fn(usize) -> u64) -> Self {
                let mut indices = 0..;
                let mut next = || argument(indices.next().unwrap_or_default());
                Self { $($field: next(),)+ }
            }

            /// Argument registers.
            pub fn words(self) -> [u64; 6] {
                let mut words = [0; 6];
                for (word, value) in words.iter_mut().zip([$(self.$field,)+]) {
                    *word = value;
                }
                words
            }
        })+
    };
}

arguments! {
    /// Arguments of [`crate::Op::GateCall`] before the message.
    pub struct GateCall {
        /// Selector of the gate.
        gate
    }
    /// Arguments of [`crate::Op::GateReplyWait`] before the message.
    pub struct GateReplyWait {
        /// Flags of [`crate::reply_wait`].
        flags
    }
    /// Arguments of [`crate::Op::NotificationSignal`].
    pub struct NotificationSignal {
        /// Selector of the notification.
        notification,
        /// Event bits.
        bits
    }
    /// Arguments of [`crate::Op::NotificationWait`].
    pub struct NotificationWait {
        /// Selector of the notification.
        notification,
        /// Absolute time in ticks; 0 polls.
        deadline
    }
    /// Arguments of [`crate::Op::Create`].
    pub struct Create {
        /// Selector of the factory.
        factory,
        /// Code of a [`Kind`].
        kind,
        /// Free slot for the capability.
        slot,
        /// First argument of the kind.
        first,
        /// Second argument of the kind.
        second,
        /// Third argument of the kind.
        third
    }
    /// Arguments of [`crate::Op::Delegate`].
    pub struct Delegate {
        /// Selector of a task or VM, or [`crate::ops::SELF`].
        target,
        /// [`Item::pack`].
        item,
        /// First unit in the caller's space.
        source,
        /// First unit in the target's space.
        destination,
        /// Progress; initially 0.
        done
    }
    /// Arguments of [`crate::Op::Unmap`].
    pub struct Unmap {
        /// [`Item::pack`].
        item,
        /// First unit.
        base,
        /// 0 or [`UNMAP_SELF`].
        flags,
        /// Progress; initially 0.
        done
    }
    /// Arguments of [`crate::Op::ThreadStart`].
    pub struct ThreadStart {
        /// Selector of the thread.
        thread,
        /// Instruction pointer.
        ip,
        /// Stack pointer.
        sp,
        /// Value of the first argument register.
        argument
    }
    /// Arguments of [`crate::Op::ThreadStop`].
    pub struct ThreadStop {
        /// Selector of the thread.
        thread
    }
    /// Arguments of [`crate::Op::ThreadBind`].
    pub struct ThreadBind {
        /// Selector of the thread.
        thread,
        /// Code of a [`Binding`].
        binding,
        /// Selector of the object.
        object
    }
    /// Arguments of [`crate::Op::VcpuRun`].
    pub struct VcpuRun {
        /// Selector of the vCPU.
        vcpu
    }
    /// Arguments of [`crate::Op::VcpuState`].
    pub struct VcpuState {
        /// Selector of the vCPU.
        vcpu,
        /// State groups ([`crate::vcpu::group`]).
        groups
    }
    /// Arguments of [`crate::Op::IrqControl`].
    pub struct IrqControl {
        /// Selector of the interrupt.
        irq,
        /// Code of an [`IrqAction`].
        action,
        /// To bind: selector of the notification.
        notification,
        /// To bind: index of the event bit.
        bit
    }
    /// Arguments of [`crate::Op::SchedControl`].
    pub struct SchedControl {
        /// Selector of the scheduling context.
        sched_context,
        /// Priority.
        priority,
        /// Budget in ns; 0 changes nothing.
        budget,
        /// Period in ns.
        period
    }
    /// Arguments of [`crate::Op::PlatformControl`].
    pub struct PlatformControl {
        /// Selector of the platform.
        platform,
        /// Code of a [`PlatformAction`].
        action,
        /// Argument of the action.
        argument
    }
    /// Arguments of [`crate::Op::VmDoorbell`].
    pub struct VmDoorbell {
        /// Selector of the VM.
        vm,
        /// Index of the doorbell.
        index,
        /// Selector of the notification.
        notification,
        /// Event bits; 0 unbinds the doorbell.
        bits
    }
    /// Arguments of [`crate::Op::VmSgiTarget`].
    pub struct VmSgiTarget {
        /// Selector of the VM.
        vm,
        /// Index of the target.
        index,
        /// Selector of the vCPU.
        vcpu
    }
    /// Arguments of [`crate::Op::VcpuNotify`].
    pub struct VcpuNotify {
        /// Selector of the vCPU.
        vcpu
    }
    /// Arguments of [`crate::Op::UnmapAt`].
    pub struct UnmapAt {
        /// Selector of a task or VM, or [`crate::ops::SELF`].
        target,
        /// [`Item::pack`].
        item,
        /// First unit in the target's space.
        destination,
        /// 0 or [`FREE_TABLES`].
        flags,
        /// Progress; initially 0.
        done
    }
}

impl GateReplyWait {
    /// Returns whether the thread replies to the caller being served.
    #[inline(always)]
    pub const fn replies(self) -> bool {
        self.flags & reply_wait::REPLY != 0
    }

    /// Returns whether the thread waits for the next caller.
    #[inline(always)]
    pub const fn waits(self) -> bool {
        self.flags & reply_wait::WAIT != 0
    }
}

/// Flags of an interrupt to be created.
pub mod irq_flags {
    /// Level-triggered; else edge-triggered.
    pub const LEVEL: u64 = 1 << 0;
    /// Active low; else active high.
    pub const ACTIVE_LOW: u64 = 1 << 1;
    /// Message-signalled: the number of the interrupt is ignored.
    pub const MESSAGE: u64 = 1 << 2;
    /// Every flag.
    pub const ALL: u64 = LEVEL | ACTIVE_LOW | MESSAGE;
}

/// Source of a hardware interrupt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum IrqSource {
    /// An input of the interrupt controllers.
    Line {
        /// Global system interrupt number.
        gsi: u32,
        /// Level-triggered; else edge-triggered.
        level: bool,
        /// Active low.
        active_low: bool,
    },
    /// A message-signalled interrupt.
    Message,
}

/// Object to be created by [`crate::Op::Create`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NewObject {
    /// [`Kind::Task`].
    Task {
        /// Number of capability slots.
        slots: u64,
    },
    /// [`Kind::Thread`].
    Thread {
        /// Task that it runs in.
        task: Selector,
        /// Index of its CPU.
        cpu: u64,
        /// Address of its message page.
        message_page: u64,
    },
    /// [`Kind::Gate`].
    Gate {
        /// Thread that serves it.
        thread: Selector,
        /// Its badge.
        badge: u64,
    },
    /// [`Kind::Notification`].
    Notification,
    /// [`Kind::Irq`].
    Irq {
        /// The platform.
        platform: Selector,
        /// Global system interrupt number.
        gsi: u64,
        /// [`irq_flags`].
        flags: u64,
    },
    /// [`Kind::Factory`].
    Factory {
        /// Quota in pages.
        quota: u64,
        /// Maximum priority of scheduling contexts created from it.
        max_priority: u64,
        /// Share of CPU time.
        share: u64,
    },
    /// [`Kind::SchedContext`].
    SchedContext {
        /// Priority.
        priority: u64,
        /// Budget in ns.
        budget: u64,
        /// Period in ns.
        period: u64,
    },
    /// [`Kind::Vm`].
    Vm {
        /// [`crate::vm_mode`].
        mode: u64,
    },
    /// [`Kind::Vcpu`].
    Vcpu {
        /// VM that it belongs to.
        vm: Selector,
        /// Address of its state page.
        state_page: u64,
        /// Notification whose events make `VcpuRun` return.
        notification: Selector,
    },
}

impl Create {
    /// Object to be created. Fails with `BadArgument` if there is no such kind.
    pub fn object(self) -> Result<NewObject, Status> {
        let Self { first, second, third, .. } = self;
        Ok(match Kind::from_code(self.kind).ok_or(Status::BadArgument)? {
            Kind::Task => NewObject::Task { slots: first },
            Kind::Thread => NewObject::Thread { task: first, cpu: second, message_page: third },
            Kind::Gate => NewObject::Gate { thread: first, badge: second },
            Kind::Notification => NewObject::Notification,
            Kind::Irq => NewObject::Irq { platform: first, gsi: second, flags: third },
            Kind::Factory => {
                NewObject::Factory { quota: first, max_priority: second, share: third }
            }
            Kind::SchedContext => {
                NewObject::SchedContext { priority: first, budget: second, period: third }
            }
            Kind::Vm => NewObject::Vm { mode: first },
            Kind::Vcpu => NewObject::Vcpu { vm: first, state_page: second, notification: third },
            Kind::Platform => return Err(Status::BadArgument),
        })
    }
}

impl IrqSource {
    /// Source with this number and these [`irq_flags`]. Fails with `BadArgument` for other flags or
    /// a number above 32 bits.
    pub fn decode(gsi: u64, flags: u64) -> Result<Self, Status> {
        if flags & !irq_flags::ALL != 0 {
            return Err(Status::BadArgument);
        }
        if flags & irq_flags::MESSAGE != 0 {
            return Ok(Self::Message);
        }
        Ok(Self::Line {
            gsi: u32::try_from(gsi).map_err(|_| Status::BadArgument)?,
            level: flags & irq_flags::LEVEL != 0,
            active_low: flags & irq_flags::ACTIVE_LOW != 0,
        })
    }
}

impl Delegate {
    /// Item to be delegated. Fails with `BadArgument` if it is none.
    pub fn item(self) -> Result<Item, Status> {
        Item::unpack(self.item).ok_or(Status::BadArgument)
    }
}

impl Unmap {
    /// Item to be unmapped, and whether the range itself is unmapped, too. Fails with `BadArgument`
    /// if it is no item, or for other flags than [`UNMAP_SELF`].
    pub fn item(self) -> Result<(Item, bool), Status> {
        item_and_flag(self.item, self.flags, UNMAP_SELF)
    }
}

impl UnmapAt {
    /// Item to be unmapped, and whether page tables are freed, too. Fails with `BadArgument` if it
    /// is no item, or for other flags than [`FREE_TABLES`].
    pub fn item(self) -> Result<(Item, bool), Status> {
        item_and_flag(self.item, self.flags, FREE_TABLES)
    }
}

/// Unpacks an item and flags, of which there is one.
fn item_and_flag(item: u64, flags: u64, flag: u64) -> Result<(Item, bool), Status> {
    let item = Item::unpack(item).ok_or(Status::BadArgument)?;
    if flags & !flag != 0 { Err(Status::BadArgument) } else { Ok((item, flags == flag)) }
}

impl ThreadBind {
    /// Kind of the binding. Fails with `BadArgument` if there is no such kind.
    pub fn binding(self) -> Result<Binding, Status> {
        const ALL: [Binding; 3] =
            [Binding::SchedContext, Binding::FaultGate, Binding::Notification];
        ALL.into_iter().find(|kind| *kind as u64 == self.binding).ok_or(Status::BadArgument)
    }
}

/// Action of [`crate::Op::IrqControl`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u64)]
pub enum IrqAction {
    /// Bind the interrupt to a bit of a notification, and unmask it.
    Bind = 0,
    /// Acknowledge and unmask it.
    Unmask = 1,
    /// Mask it.
    Mask = 2,
    /// Return the address and data of its message.
    Message = 3,
}

impl IrqControl {
    /// The action. Fails with `BadArgument` if there is none with this code.
    pub fn action(self) -> Result<IrqAction, Status> {
        const ALL: [IrqAction; 4] =
            [IrqAction::Bind, IrqAction::Unmask, IrqAction::Mask, IrqAction::Message];
        ALL.into_iter().find(|action| *action as u64 == self.action).ok_or(Status::BadArgument)
    }

    /// Index of the event bit. Fails with `BadArgument` if a notification has no such bit.
    pub fn bit(self) -> Result<u8, Status> {
        if self.bit < u64::BITS as u64 { Ok(self.bit as u8) } else { Err(Status::BadArgument) }
    }
}

impl PlatformControl {
    /// The action. Fails with `BadArgument` if there is none with this code.
    pub fn action(self) -> Result<PlatformAction, Status> {
        const ALL: [PlatformAction; 3] =
            [PlatformAction::Log, PlatformAction::Reset, PlatformAction::Stats];
        ALL.into_iter().find(|action| *action as u64 == self.action).ok_or(Status::BadArgument)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_are_read_in_the_order_of_the_registers() {
        let args = Create::read(|index| 10 + index as u64);
        assert_eq!(args.words(), [10, 11, 12, 13, 14, 15]);
        assert_eq!((args.factory, args.kind, args.slot, args.third), (10, 11, 12, 15));
        let args = IrqControl { irq: 1, action: 2, notification: 3, bit: 4 };
        assert_eq!(args.words(), [1, 2, 3, 4, 0, 0]);
        assert_eq!(IrqControl::read(|index| args.words()[index]), args);
    }

    #[test]
    fn codes_without_a_meaning_are_bad_arguments() {
        let bad = Err(Status::BadArgument);
        let irq = |action, bit| IrqControl { action, bit, ..IrqControl::default() };
        assert_eq!(irq(3, 0).action(), Ok(IrqAction::Message));
        assert_eq!(irq(4, 0).action().map(drop), bad);
        assert_eq!(irq(0, 63).bit(), Ok(63));
        assert_eq!(irq(0, 64).bit().map(drop), bad);
        let bind = |binding| ThreadBind { binding, ..ThreadBind::default() }.binding();
        assert_eq!(bind(2), Ok(Binding::Notification));
        assert_eq!(bind(3).map(drop), bad);
        let action = |action| PlatformControl { action, ..PlatformControl::default() }.action();
        assert_eq!(action(2), Ok(PlatformAction::Stats));
        assert_eq!(action(3).map(drop), bad);
        let unmap = |flags| Unmap { flags, ..Unmap::default() }.item().map(|(_, own)| own);
        assert_eq!((unmap(0), unmap(UNMAP_SELF)), (Ok(false), Ok(true)));
        assert_eq!(unmap(2).map(drop), bad);
        let unmap_at = |flags| UnmapAt { flags, ..UnmapAt::default() }.item().map(|(_, free)| free);
        assert_eq!((unmap_at(0), unmap_at(FREE_TABLES)), (Ok(false), Ok(true)));
        assert_eq!(unmap_at(3).map(drop), bad);
        let create = |kind| Create { kind, first: 7, ..Create::default() }.object();
        assert_eq!(create(Kind::Vm as u64), Ok(NewObject::Vm { mode: 7 }));
        assert_eq!(create(Kind::Platform as u64).map(drop), bad);
        assert_eq!(create(0).map(drop), bad);
    }

    #[test]
    fn interrupts_have_a_number_or_a_message() {
        let line = IrqSource::Line { gsi: 9, level: true, active_low: false };
        assert_eq!(IrqSource::decode(9, irq_flags::LEVEL), Ok(line));
        assert_eq!(IrqSource::decode(u64::MAX, irq_flags::MESSAGE), Ok(IrqSource::Message));
        assert_eq!(IrqSource::decode(1 << 32, 0), Err(Status::BadArgument));
        assert_eq!(IrqSource::decode(1, 1 << 3), Err(Status::BadArgument));
    }
}
