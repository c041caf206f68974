//! System-call dispatch and argument checks. Other modules implement the operations.

use core::cell::Cell;
use core::sync::atomic::Ordering;

use abi::args::{self, IrqAction, IrqSource, NewObject};
use abi::boot::KernelStats;
use abi::{Binding, Op, PlatformAction, Status, rights};

use crate::arch::{Arch, Context};
use crate::mdb::Delegation;
use crate::mdb::work::WORK;
use crate::object::*;
use crate::pool::{Account, Factory, Handle};
use crate::thread::Next;
use crate::{Kernel, Result, count};

/// Maximum length of a log message, in bytes.
const LOG_BYTES: usize = 512;

macro_rules! typed {
    ($($name:ident -> $variant:ident($object:ty);)+) => {
        $(#[inline(always)]
        fn $name(&self, task: &Task<A>, selector: u64, right: u8) -> Result<Handle<$object>> {
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
        factory_cap -> Factory(Factory);
        sched_cap -> SchedContext(crate::sched::SchedContext<A>);
        vm_cap -> Vm(Vm<A>);
        vcpu_cap -> Vcpu(Vcpu<A>);
    }

    fn platform(&self, task: &Task<A>, selector: u64, right: u8) -> Result<()> {
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
    ) -> Result<Option<Next<'_, A>>> {
        let args = args::GateCall::read(|index| thread.context.argument(index));
        let gate = self.gate_cap(self.task_of(thread)?, args.gate, rights::CALL)?;
        self.gate_call(cpu, handle, thread, gate, CallContent::Message)
    }

    #[inline(always)]
    fn vcpu_run_by_selector<'a>(
        &'a self,
        handle: Handle<Thread<A>>,
        thread: &'a Thread<A>,
    ) -> Result<Option<Next<'a, A>>> {
        let selector = args::VcpuRun::read(|index| thread.context.argument(index)).vcpu;
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
    fn look_up_vcpu(&self, thread: &Thread<A>, selector: u64) -> Result<&Vcpu<A>> {
        let vcpu = self.vcpu_cap(self.task_of(thread)?, selector, rights::RUN)?;
        thread.vcpu_lookup.selector.set(selector);
        thread.vcpu_lookup.vcpu.set(self.memory.cache(vcpu).ok_or(Status::BadCapability)?);
        self.memory.get(vcpu).ok_or(Status::BadCapability)
    }

    #[inline(always)]
    fn task_of(&self, thread: &Thread<A>) -> Result<&Task<A>> {
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
                let args = args::GateReplyWait::read(|index| context.argument(index));
                self.gate_reply_wait(cpu, handle, thread, args)
            }
            Some(operation) => self.dispatch(operation, handle, thread).map(|is_done| {
                if is_done {
                    context.set_status(Status::Ok);
                } else {
                    context.restart();
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

    /// Executes an operation other than IPC and `VcpuRun`. `Ok(false)`: out of work budget, the
    /// thread repeats the system call.
    fn dispatch(&self, op: Op, handle: Handle<Thread<A>>, thread: &Thread<A>) -> Result<bool> {
        let task = self.task_of(thread)?;
        let argument = |index| thread.context.argument(index);
        let set = |result| thread.context.set_result(0, result);
        match op {
            Op::GateCall | Op::GateReplyWait | Op::VcpuRun => return Err(Status::BadOperation),
            Op::NotificationSignal => {
                let args = args::NotificationSignal::read(argument);
                let target = self.notification_cap(task, args.notification, rights::SIGNAL)?;
                self.signal(target, args.bits);
            }
            Op::NotificationWait => {
                let args = args::NotificationWait::read(argument);
                let notification = self.notification_cap(task, args.notification, rights::WAIT)?;
                // If the thread blocks, it gets another status when it is woken.
                self.notification_wait(handle, notification, args.deadline)?;
            }
            Op::Create => self.create(thread.task, task, args::Create::read(argument))?,
            Op::Delegate => return self.delegate_by_selector(thread, task),
            Op::Unmap => return self.unmap_own(thread),
            Op::ThreadStart => {
                let args = args::ThreadStart::read(argument);
                let target = self.thread_cap(task, args.thread, rights::CONTROL)?;
                self.start_thread(target, args.ip, args.sp, args.argument)?;
            }
            Op::ThreadStop => {
                let args = args::ThreadStop::read(argument);
                self.stop_thread(self.thread_cap(task, args.thread, rights::CONTROL)?);
            }
            Op::ThreadBind => self.bind(task, args::ThreadBind::read(argument))?,
            Op::VcpuState => {
                let args = args::VcpuState::read(argument);
                let vcpu = self.memory.at(self.vcpu_cap(task, args.vcpu, rights::RUN)?);
                if vcpu.runner.get().is_some() {
                    return Err(Status::Busy);
                }
                A::vcpu_state(&self.memory, vcpu, args.groups);
            }
            Op::VcpuNotify => {
                let vcpu =
                    self.vcpu_cap(task, args::VcpuNotify::read(argument).vcpu, rights::RUN)?;
                set(self.vcpu_notify(self.memory.at(vcpu)).into());
            }
            Op::IrqControl => self.irq_control(thread, args::IrqControl::read(argument))?,
            Op::SchedControl => set(self.sched_control(task, args::SchedControl::read(argument))?),
            Op::PlatformControl => {
                self.platform_control(thread, args::PlatformControl::read(argument))?;
            }
            Op::Yield => self.yield_now(thread.cpu),
            Op::VmDoorbell => self.bind_doorbell(task, args::VmDoorbell::read(argument))?,
            Op::UnmapAt => return self.unmap_at_by_selector(thread, task),
            Op::VmSgiTarget => self.set_sgi_target(task, args::VmSgiTarget::read(argument))?,
        }
        Ok(true)
    }

    /// `Delegate`: one part. The progress is an argument and the result.
    fn delegate_by_selector(&self, thread: &Thread<A>, task: &Task<A>) -> Result<bool> {
        const PROGRESS: usize = 4;
        let args = args::Delegate::read(|index| thread.context.argument(index));
        let item = args.item()?;
        let to = self.target(thread.task, task, args.target)?;
        let (source, destination) = (args.source, args.destination);
        let delegation = Delegation { from: thread.task, item, source, to, destination };
        let (mut done, mut budget) = (args.done, WORK);
        let is_done = self.delegate_part(&delegation, &mut done, &mut budget)?;
        if !is_done {
            thread.context.set_result(PROGRESS, done);
        }
        Ok(is_done)
    }

    /// `Unmap`: one part. The progress is an argument and the result.
    fn unmap_own(&self, thread: &Thread<A>) -> Result<bool> {
        const PROGRESS: usize = 3;
        let args = args::Unmap::read(|index| thread.context.argument(index));
        let (item, own) = args.item()?;
        let (mut done, mut budget) = (args.done, WORK);
        let all = self.unmap(thread.task, (item, args.base), own, &mut done, &mut budget)?;
        // The quota of what was destroyed is free when the operation is done.
        let is_done = all && self.reap(&mut budget) && !self.memory.has_retired_frames();
        if !is_done {
            thread.context.set_result(PROGRESS, done);
        }
        Ok(is_done)
    }

    /// `UnmapAt`: one part. The progress is an argument and the result.
    fn unmap_at_by_selector(&self, thread: &Thread<A>, task: &Task<A>) -> Result<bool> {
        const PROGRESS: usize = 4;
        let args = args::UnmapAt::read(|index| thread.context.argument(index));
        let (item, free_tables) = args.item()?;
        let at = self.target(thread.task, task, args.target)?;
        let (mut done, mut budget) = (args.done, WORK);
        let range = (item, args.destination, free_tables);
        let is_done = self.unmap_at(thread.task, at, range, &mut done, &mut budget)?;
        if !is_done {
            thread.context.set_result(PROGRESS, done);
        }
        Ok(is_done)
    }

    fn target(&self, own: Handle<Task<A>>, task: &Task<A>, selector: u64) -> Result<SpaceRef<A>> {
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

    fn create(&self, own: Handle<Task<A>>, task: &Task<A>, args: args::Create) -> Result<()> {
        let factory = Some(self.factory_cap(task, args.factory, rights::CREATE)?);
        // Revoking it removes all that was made with it, in all tasks.
        let maker = self.capability(task, args.factory)?.node;
        let new = args.object()?;
        if args.slot >= task.slots {
            return Err(Status::BadArgument);
        }
        if self.capability(task, args.slot).is_ok() {
            return Err(Status::Busy);
        }
        let object = self.new_object(factory, own, task, new)?;
        self.insert_capability(own, args.slot, object, rights::ALL, Some(maker))
            .inspect_err(|_| self.destroy(object))
    }

    fn new_object(
        &self,
        factory: Account,
        own: Handle<Task<A>>,
        task: &Task<A>,
        new: NewObject,
    ) -> Result<ObjectRef<A>> {
        let memory = &self.memory;
        Ok(match new {
            NewObject::Task { slots } => ObjectRef::Task(self.new_task(factory, slots)?),
            NewObject::Thread { task: target, cpu, message_page } => {
                let target = self.task_cap(task, target, rights::THREAD)?;
                ObjectRef::Thread(self.new_thread(factory, target, cpu as usize, message_page)?)
            }
            NewObject::Gate { thread, badge } => {
                let thread = self.thread_cap(task, thread, rights::SERVE)?;
                let gate = Gate { caps: Cell::new(0), thread, badge };
                ObjectRef::Gate(memory.alloc(factory, gate)?)
            }
            NewObject::Notification => {
                ObjectRef::Notification(memory.alloc(factory, Notification::default())?)
            }
            NewObject::Irq { platform, gsi, flags } => {
                self.platform(task, platform, rights::MAKE_IRQ)?;
                ObjectRef::Irq(self.new_irq(factory, IrqSource::decode(gsi, flags)?)?)
            }
            NewObject::Factory { quota, max_priority, share } => {
                let quota = u32::try_from(quota).map_err(|_| Status::NoQuota)?;
                ObjectRef::Factory(memory.new_factory(factory, quota, max_priority, share)?)
            }
            NewObject::SchedContext { priority, budget, period } => {
                ObjectRef::SchedContext(self.new_sched(factory, priority, budget, period)?)
            }
            NewObject::Vm { mode } => ObjectRef::Vm(self.new_vm(factory, mode)?),
            NewObject::Vcpu { vm, state_page, notification } => {
                let vm = self.vm_cap(task, vm, rights::VCPU)?;
                let notification = self.notification_cap(task, notification, rights::WAIT)?;
                ObjectRef::Vcpu(self.new_vcpu(factory, own, vm, state_page, notification)?)
            }
        })
    }

    fn bind(&self, task: &Task<A>, args: args::ThreadBind) -> Result<()> {
        let handle = self.thread_cap(task, args.thread, rights::CONTROL)?;
        match args.binding()? {
            Binding::SchedContext => {
                self.bind_sched(handle, self.sched_cap(task, args.object, rights::SCHEDULE)?)
            }
            Binding::FaultGate => {
                let gate = self.gate_cap(task, args.object, rights::CALL)?;
                self.memory.at(handle).fault_gate.set(Some(gate));
                Ok(())
            }
            Binding::Notification => {
                let notification = self.notification_cap(task, args.object, rights::WAIT)?;
                self.bind_notification(handle, notification)
            }
        }
    }

    fn bind_doorbell(&self, task: &Task<A>, args: args::VmDoorbell) -> Result<()> {
        let vm = self.memory.at(self.vm_cap(task, args.vm, rights::VCPU)?);
        let doorbell = usize::try_from(args.index).ok().and_then(|index| vm.doorbells.get(index));
        let doorbell = doorbell.ok_or(Status::BadArgument)?;
        doorbell.set(match args.bits {
            0 => None,
            bits => {
                let notification =
                    self.notification_cap(task, args.notification, rights::SIGNAL)?;
                Some(Doorbell { notification, bits })
            }
        });
        Ok(())
    }

    fn set_sgi_target(&self, task: &Task<A>, args: args::VmSgiTarget) -> Result<()> {
        let vm = self.vm_cap(task, args.vm, rights::VCPU)?;
        let vcpu = self.vcpu_cap(task, args.vcpu, rights::RUN)?;
        let targets = &self.memory.at(vm).sgi_targets;
        let target = usize::try_from(args.index).ok().and_then(|index| targets.get(index));
        let target = target.filter(|_| self.memory.at(vcpu).vm == vm).ok_or(Status::BadArgument)?;
        target.set(Some(vcpu));
        Ok(())
    }

    /// Changes a scheduling context, unless the budget is 0; returns the time used.
    fn sched_control(&self, task: &Task<A>, args: args::SchedControl) -> Result<u64> {
        let sched = self.sched_cap(task, args.sched_context, rights::SCHEDULE)?;
        if args.budget != 0 {
            self.change_sched(sched, args.priority, args.budget, args.period)?;
        }
        Ok(self.used(sched))
    }

    fn irq_control(&self, thread: &Thread<A>, args: args::IrqControl) -> Result<()> {
        let task = self.task_of(thread)?;
        let irq = self.memory.at(self.irq_cap(task, args.irq, rights::IRQ)?);
        match args.action()? {
            IrqAction::Bind => {
                let notification =
                    self.notification_cap(task, args.notification, rights::SIGNAL)?;
                irq.bit.set(args.bit()?);
                irq.notification.set(Some(notification));
                A::irq_set(irq, false);
            }
            IrqAction::Unmask => A::irq_set(irq, false),
            IrqAction::Mask => A::irq_set(irq, true),
            IrqAction::Message => {
                let (address, data) = A::irq_message(irq);
                thread.context.set_result(0, address);
                thread.context.set_result(1, data);
            }
        }
        Ok(())
    }

    fn platform_control(&self, thread: &Thread<A>, args: args::PlatformControl) -> Result<()> {
        let action = args.action()?;
        let right = match action {
            PlatformAction::Log => rights::LOG,
            PlatformAction::Reset | PlatformAction::Stats => rights::MACHINE,
        };
        self.platform(self.task_of(thread)?, args.platform, right)?;
        match action {
            PlatformAction::Log => self.log_message(thread, args.argument),
            PlatformAction::Reset => A::reset(),
            PlatformAction::Stats => {
                let page = self.memory.words(thread.message);
                for (word, value) in page.iter().zip(self.stats().words()) {
                    word.store(value, Ordering::Relaxed);
                }
                Ok(())
            }
        }
    }

    /// Appends `length` bytes of the thread's message page to the kernel log.
    fn log_message(&self, thread: &Thread<A>, length: u64) -> Result<()> {
        let length = length as usize;
        if length > LOG_BYTES {
            return Err(Status::Overflow);
        }
        let mut text = [0; LOG_BYTES];
        for (bytes, word) in text.chunks_mut(8).zip(self.memory.words(thread.message)) {
            bytes.copy_from_slice(&word.load(Ordering::Relaxed).to_le_bytes());
        }
        let waiting = A::log_text(&text[..length]);
        thread.context.set_result(0, waiting as u64);
        Ok(())
    }

    fn stats(&self) -> KernelStats {
        let counters = &self.counters;
        let total = self.memory.total_frames() as u64;
        KernelStats {
            system_calls: counters.system_calls.get(),
            interrupts: counters.interrupts.get(),
            vm_entries: counters.vm_entries.get(),
            exits_handled: counters.handled_in_kernel.get(),
            pages_used: total - self.memory.free_frames() as u64,
            pages_total: total,
            switches: counters.switches.get(),
            shootdowns: counters.shootdowns.get(),
        }
    }
}

#[cfg(test)]
mod tests;
