//! System-call dispatch and argument checks. Other modules implement the operations.

use core::cell::Cell;
use core::sync::atomic::Ordering;

use abi::boot::KernelStats;
use abi::{Binding, Item, Kind, Op, PlatformAction, Status, rights};

use crate::arch::{Arch, Context, IrqSource};
use crate::mdb::Delegation;
use crate::mdb::work::WORK;
use crate::object::*;
use crate::pool::Handle;
use crate::thread::Next;
use crate::{FIRST_IRQ_VECTOR, Kernel, count};

/// Result of a system call that did not fail.
enum CallResult {
    /// Completed with status `Ok`.
    Done,
    /// The status has been set, or will be set when the thread resumes.
    StatusSet,
    /// Out of work budget: the thread repeats the system call.
    Restart,
}

/// Maximum length of a log message, in bytes.
const LOG_BYTES: usize = 512;

macro_rules! typed {
    ($($name:ident -> $variant:ident($object:ty);)+) => {
        $(#[inline(always)]
        fn $name(&self, task: &Task<A>, selector: u64, right: u8) -> Result<Handle<$object>, Status> {
            let capability = self.capability(task, selector)?;
            match capability.object {
                ObjectRef::$variant(handle) if capability.rights & right == right => Ok(handle),
                ObjectRef::$variant(_) => Err(Status::BadRights),
                _ => Err(Status::BadCapability),
            }
        })+
    };
}

impl<A: Arch> Kernel<A> {
    typed! {
        task_cap -> Task(Task<A>);
        thread_cap -> Thread(Thread<A>);
        gate_cap -> Gate(Gate<A>);
        notification_cap -> Notification(Notification<A>);
        irq_cap -> Irq(Irq<A>);
        factory_cap -> Factory(crate::pool::Factory);
        sched_cap -> SchedContext(crate::sched::SchedContext<A>);
        vm_cap -> Vm(Vm<A>);
        vcpu_cap -> Vcpu(Vcpu<A>);
    }

    fn platform(&self, task: &Task<A>, selector: u64, right: u8) -> Result<(), Status> {
        let capability = self.capability(task, selector)?;
        match capability.object {
            ObjectRef::Platform if capability.rights & right == right => Ok(()),
            ObjectRef::Platform => Err(Status::BadRights),
            _ => Err(Status::BadCapability),
        }
    }

    /// Handles a system call of `thread`, the current thread of `cpu`. Returns the CPU's current
    /// thread if it is known; it resumes unless the CPU has other work ([`Kernel::has_work`]).
    #[inline(always)]
    pub fn system_call<'a>(
        &'a self,
        cpu: usize,
        handle: Handle<Thread<A>>,
        thread: &'a Thread<A>,
    ) -> Option<Next<'a, A>> {
        count(&self.counters.system_calls);
        let context = &thread.context;
        const VCPU_RUN: u64 = Op::VcpuRun as u64;
        // The operation of a VM exit is inlined here and sets the status itself.
        if context.operation() != VCPU_RUN {
            return self.slow_call(cpu, handle, thread);
        }
        self.vcpu_run_by_selector(handle, thread).unwrap_or_else(|status| {
            context.set_status(status);
            None
        })
    }

    fn gate_call_by_selector(
        &self,
        cpu: usize,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
    ) -> Result<Option<Next<'_, A>>, Status> {
        let gate =
            self.gate_cap(self.task_of(thread)?, thread.context.argument(0), rights::CALL)?;
        self.gate_call(cpu, handle, thread, gate, CallContent::Message)
    }

    #[inline(always)]
    fn vcpu_run_by_selector<'a>(
        &'a self,
        handle: Handle<Thread<A>>,
        thread: &'a Thread<A>,
    ) -> Result<Option<Next<'a, A>>, Status> {
        let selector = thread.context.argument(0);
        let lookup = &thread.vcpu_lookup;
        let vcpu = match self.memory.cached(lookup.vcpu.get()) {
            Some(vcpu) if lookup.selector.get() == selector => vcpu,
            _ => self.look_up_vcpu(thread, selector)?,
        };
        self.vcpu_run(handle, thread, vcpu)?;
        Ok(Some(Next { thread, vcpu: Some(vcpu) }))
    }

    #[cold]
    #[inline(never)]
    fn look_up_vcpu(&self, thread: &Thread<A>, selector: u64) -> Result<&Vcpu<A>, Status> {
        let vcpu = self.vcpu_cap(self.task_of(thread)?, selector, rights::RUN)?;
        thread.vcpu_lookup.selector.set(selector);
        thread.vcpu_lookup.vcpu.set(self.memory.cache(vcpu).ok_or(Status::BadCapability)?);
        self.memory.get(vcpu).ok_or(Status::BadCapability)
    }

    #[inline(always)]
    fn task_of(&self, thread: &Thread<A>) -> Result<&Task<A>, Status> {
        self.memory.get(thread.task).ok_or(Status::Aborted)
    }

    #[inline(never)]
    fn slow_call(
        &self,
        cpu: usize,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
    ) -> Option<Next<'_, A>> {
        let context = &thread.context;
        let done = match Op::from_code(context.operation()) {
            // IPC sets the status itself.
            Some(Op::GateCall) => self.gate_call_by_selector(cpu, handle, thread),
            Some(Op::GateReplyWait) => {
                self.gate_reply_wait(cpu, handle, thread, context.argument(0))
            }
            Some(operation) => self
                .task_of(thread)
                .and_then(|task| self.dispatch(cpu, operation, handle, thread, task))
                .map(|result| {
                    match result {
                        CallResult::Done => context.set_status(Status::Ok),
                        CallResult::StatusSet => {}
                        CallResult::Restart => context.restart(),
                    }
                    None
                }),
            None => Err(Status::BadOperation),
        };
        done.unwrap_or_else(|status| {
            context.set_status(status);
            None
        })
    }

    fn dispatch(
        &self,
        cpu: usize,
        operation: Op,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
        task: &Task<A>,
    ) -> Result<CallResult, Status> {
        let arg = |index| thread.context.argument(index);
        match operation {
            Op::GateCall | Op::GateReplyWait | Op::VcpuRun => return Err(Status::BadOperation),
            Op::NotificationSignal => {
                self.signal(self.notification_cap(task, arg(0), rights::SIGNAL)?, arg(1));
            }
            Op::NotificationWait => {
                let notification = self.notification_cap(task, arg(0), rights::WAIT)?;
                self.notification_wait(handle, notification, arg(1))?;
                return Ok(CallResult::StatusSet);
            }
            Op::Create => self.create(thread.task, task, arg)?,
            Op::Delegate => {
                let item = Item::unpack(arg(1)).ok_or(Status::BadArgument)?;
                let to = self.target(thread.task, task, arg(0))?;
                let (source, destination) = (arg(2), arg(3));
                let delegation = Delegation { from: thread.task, item, source, to, destination };
                let (mut done, mut budget) = (arg(4), WORK);
                if !self.delegate_part(&delegation, &mut done, &mut budget)? {
                    thread.context.set_result(4, done);
                    return Ok(CallResult::Restart);
                }
            }
            Op::Unmap => {
                let item = Item::unpack(arg(0)).ok_or(Status::BadArgument)?;
                if arg(2) & !abi::ops::UNMAP_SELF != 0 {
                    return Err(Status::BadArgument);
                }
                let own = arg(2) & abi::ops::UNMAP_SELF != 0;
                let (mut done, mut budget) = (arg(3), WORK);
                let range = (item, arg(1));
                let all = self.unmap(thread.task, range, own, &mut done, &mut budget)?;
                if !all || !self.reap(&mut budget) {
                    thread.context.set_result(3, done);
                    return Ok(CallResult::Restart);
                }
            }
            Op::ThreadStart => {
                let target = self.thread_cap(task, arg(0), rights::CONTROL)?;
                self.start_thread(target, arg(1), arg(2), arg(3))?;
            }
            Op::ThreadStop => {
                let target = self.thread_cap(task, arg(0), rights::CONTROL)?;
                self.stop_thread(target);
            }
            Op::ThreadBind => self.bind(task, arg)?,
            Op::VcpuState => {
                let vcpu = self.memory.at(self.vcpu_cap(task, arg(0), rights::RUN)?);
                if vcpu.runner.get().is_some() {
                    return Err(Status::Busy);
                }
                A::vcpu_state(&self.memory, vcpu, arg(1));
            }
            Op::IrqControl => self.irq_control(task, thread, arg)?,
            Op::SchedControl => {
                let sched = self.sched_cap(task, arg(0), rights::SCHEDULE)?;
                if arg(2) != 0 {
                    self.change_sched(sched, arg(1), arg(2), arg(3))?;
                }
                thread.context.set_result(0, self.used(sched));
            }
            Op::PlatformControl => self.platform_control(task, thread, arg)?,
            Op::Yield => self.yield_now(cpu),
            Op::VmDoorbell => self.bind_doorbell(task, arg)?,
        }
        Ok(CallResult::Done)
    }

    fn target(
        &self,
        own: Handle<Task<A>>,
        task: &Task<A>,
        selector: u64,
    ) -> Result<SpaceRef<A>, Status> {
        if selector == abi::ops::SELF {
            return Ok(SpaceRef::Task(own));
        }
        let capability = self.capability(task, selector)?;
        let space = match capability.object {
            ObjectRef::Task(handle) => SpaceRef::Task(handle),
            ObjectRef::Vm(handle) => SpaceRef::Vm(handle),
            _ => return Err(Status::BadCapability),
        };
        if capability.rights & rights::MAP == 0 { Err(Status::BadRights) } else { Ok(space) }
    }

    fn create(
        &self,
        own: Handle<Task<A>>,
        task: &Task<A>,
        arg: impl Fn(usize) -> u64,
    ) -> Result<(), Status> {
        let factory = Some(self.factory_cap(task, arg(0), rights::CREATE)?);
        let kind = Kind::from_code(arg(1)).ok_or(Status::BadArgument)?;
        let slot = arg(2);
        if slot >= task.slots {
            return Err(Status::BadArgument);
        }
        if self.capability(task, slot).is_ok() {
            return Err(Status::Busy);
        }
        let memory = &self.memory;
        let object = match kind {
            Kind::Task => ObjectRef::Task(self.new_task(factory, arg(3))?),
            Kind::Thread => {
                let target = self.task_cap(task, arg(3), rights::THREAD)?;
                ObjectRef::Thread(self.new_thread(factory, target, arg(4) as usize, arg(5))?)
            }
            Kind::Gate => {
                let thread = self.thread_cap(task, arg(3), rights::SERVE)?;
                let gate = Gate { caps: Cell::new(0), thread, badge: arg(4) };
                ObjectRef::Gate(memory.alloc(factory, gate)?)
            }
            Kind::Notification => ObjectRef::Notification(memory.alloc(
                factory,
                Notification {
                    caps: Cell::new(0),
                    bits: Cell::new(0),
                    waiter: Cell::new(None),
                    thread: Cell::new(None),
                    vcpu: Cell::new(None),
                },
            )?),
            Kind::Irq => {
                self.platform(task, arg(3), rights::MAKE_IRQ)?;
                ObjectRef::Irq(self.new_irq(factory, arg(4), arg(5))?)
            }
            Kind::Factory => {
                let quota = u32::try_from(arg(3)).map_err(|_| Status::NoQuota)?;
                ObjectRef::Factory(memory.new_factory(factory, quota, arg(4), arg(5))?)
            }
            Kind::SchedContext => {
                ObjectRef::SchedContext(self.new_sched(factory, arg(3), arg(4), arg(5))?)
            }
            Kind::Vm => {
                if arg(3) != 0 {
                    return Err(Status::BadArgument);
                }
                ObjectRef::Vm(self.new_vm(factory)?)
            }
            Kind::Vcpu => {
                let vm = self.vm_cap(task, arg(3), rights::VCPU)?;
                let notification = self.notification_cap(task, arg(5), rights::WAIT)?;
                ObjectRef::Vcpu(self.new_vcpu(factory, own, vm, arg(4), notification)?)
            }
            Kind::Platform => return Err(Status::BadArgument),
        };
        self.insert_capability(own, slot, object, rights::ALL, None)
            .inspect_err(|_| self.destroy(object))
    }

    fn new_irq(
        &self,
        factory: Option<Handle<crate::pool::Factory>>,
        gsi: u64,
        flags: u64,
    ) -> Result<Handle<Irq<A>>, Status> {
        let source = if flags & 4 != 0 {
            IrqSource::Message
        } else {
            let gsi = u32::try_from(gsi).map_err(|_| Status::BadArgument)?;
            IrqSource::Line { gsi, level: flags & 1 != 0, active_low: flags & 2 != 0 }
        };
        if flags & !7 != 0 || !A::irq_valid(source) {
            return Err(Status::BadArgument);
        }
        let same_line = |irq: &Irq<A>| match (irq.source, source) {
            (IrqSource::Line { gsi: a, .. }, IrqSource::Line { gsi: b, .. }) => a == b,
            _ => false,
        };
        let mut taken = self.irqs.iter().filter_map(|slot| self.memory.get(slot.get()?));
        if taken.any(same_line) {
            return Err(Status::Busy);
        }
        let index =
            self.irqs.iter().position(|slot| slot.get().is_none()).ok_or(Status::NoQuota)?;
        let handle = self.memory.alloc(
            factory,
            Irq {
                caps: Cell::new(0),
                source,
                cpu: 0,
                vector: FIRST_IRQ_VECTOR + index as u8,
                notification: Cell::new(None),
                bit: Cell::new(0),
            },
        )?;
        self.irqs[index].set(Some(handle));
        Ok(handle)
    }

    fn bind(&self, task: &Task<A>, arg: impl Fn(usize) -> u64) -> Result<(), Status> {
        let handle = self.thread_cap(task, arg(0), rights::CONTROL)?;
        let thread = self.memory.at(handle);
        if arg(1) == Binding::SchedContext as u64 {
            let sched = self.sched_cap(task, arg(2), rights::SCHEDULE)?;
            self.bind_sched(handle, sched)
        } else if arg(1) == Binding::FaultGate as u64 {
            thread.fault_gate.set(Some(self.gate_cap(task, arg(2), rights::CALL)?));
            Ok(())
        } else if arg(1) == Binding::Notification as u64 {
            let name = self.notification_cap(task, arg(2), rights::WAIT)?;
            let notification = self.memory.at(name);
            let taken = notification.thread.get().is_some_and(|t| self.memory.get(t).is_some())
                || thread.bound.get().is_some_and(|n| self.memory.get(n).is_some());
            if taken {
                return Err(Status::Busy);
            }
            notification.thread.set(Some(handle));
            thread.bound.set(Some(name));
            if notification.bits.get() != 0 {
                self.signal(name, 0);
            }
            Ok(())
        } else {
            Err(Status::BadArgument)
        }
    }

    fn bind_doorbell(&self, task: &Task<A>, arg: impl Fn(usize) -> u64) -> Result<(), Status> {
        let vm = self.memory.at(self.vm_cap(task, arg(0), rights::VCPU)?);
        let doorbell = usize::try_from(arg(1)).ok().and_then(|index| vm.doorbells.get(index));
        let doorbell = doorbell.ok_or(Status::BadArgument)?;
        doorbell.set(match arg(3) {
            0 => None,
            bits => {
                let notification = self.notification_cap(task, arg(2), rights::SIGNAL)?;
                Some(Doorbell { notification, bits })
            }
        });
        Ok(())
    }

    fn irq_control(
        &self,
        task: &Task<A>,
        thread: &Thread<A>,
        arg: impl Fn(usize) -> u64,
    ) -> Result<(), Status> {
        let irq = self.memory.at(self.irq_cap(task, arg(0), rights::IRQ)?);
        match arg(1) {
            0 => {
                let notification = self.notification_cap(task, arg(2), rights::SIGNAL)?;
                if arg(3) >= 64 {
                    return Err(Status::BadArgument);
                }
                irq.notification.set(Some(notification));
                irq.bit.set(arg(3) as u8);
                A::irq_set(irq, false);
            }
            1 => A::irq_set(irq, false),
            2 => A::irq_set(irq, true),
            3 => {
                let (address, data) = A::irq_message(irq);
                thread.context.set_result(0, address);
                thread.context.set_result(1, data);
            }
            _ => return Err(Status::BadArgument),
        }
        Ok(())
    }

    fn platform_control(
        &self,
        task: &Task<A>,
        thread: &Thread<A>,
        arg: impl Fn(usize) -> u64,
    ) -> Result<(), Status> {
        let page = self.memory.words(thread.message);
        if arg(1) == PlatformAction::Log as u64 {
            self.platform(task, arg(0), rights::LOG)?;
            let length = arg(2) as usize;
            if length > LOG_BYTES {
                return Err(Status::Overflow);
            }
            let mut text = [0; LOG_BYTES];
            for (bytes, word) in text.chunks_mut(8).zip(page) {
                bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
            }
            let waiting = A::log_text(&text[..length]);
            thread.context.set_result(0, waiting as u64);
            Ok(())
        } else if arg(1) == PlatformAction::Reset as u64 {
            self.platform(task, arg(0), rights::MACHINE)?;
            A::reset()
        } else if arg(1) == PlatformAction::Stats as u64 {
            self.platform(task, arg(0), rights::MACHINE)?;
            let counters = &self.counters;
            let total = self.memory.total_frames() as u64;
            let stats = KernelStats {
                system_calls: counters.system_calls.get(),
                interrupts: counters.interrupts.get(),
                vm_entries: counters.vm_entries.get(),
                exits_handled: counters.handled_in_kernel.get(),
                pages_used: total - self.memory.free_frames() as u64,
                pages_total: total,
                switches: counters.switches.get(),
                shootdowns: counters.shootdowns.get(),
            };
            for (word, value) in page.iter().zip(stats.words()) {
                word.store(value, Ordering::Relaxed);
            }
            Ok(())
        } else {
            Err(Status::BadArgument)
        }
    }
}

#[cfg(test)]
mod tests;
