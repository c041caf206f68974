//! Virtual CPUs.

use core::cell::Cell;

use abi::Status;

use crate::arch::{Arch, ArchVcpu as _, Context};
use crate::object::*;
use crate::pool::Handle;
use crate::pool::{Account, Frame};
use crate::{Kernel, Result};

impl<A: Arch> Kernel<A> {
    /// Creates a vCPU of `vm` and maps its state page at `address` of `task`.
    pub fn new_vcpu(
        &self,
        factory: Account,
        task: Handle<Task<A>>,
        vm: Handle<Vm<A>>,
        address: u64,
        notification: Handle<Notification<A>>,
    ) -> Result<Handle<Vcpu<A>>> {
        let events = self.memory.get(notification).ok_or(Status::BadCapability)?;
        if events.vcpu.get().is_some_and(|vcpu| self.memory.get(vcpu).is_some()) {
            return Err(Status::Busy);
        }
        let state: Frame = self.memory.alloc_raw(factory, 1)?;
        let undo_state = || self.memory.free_raw(state, 1);
        let state_node =
            self.map_fixed(task, address, state, true).inspect_err(|_| undo_state())?;
        let undo_node = || {
            self.remove_fixed(state_node);
            undo_state();
        };
        let mode = self.memory.get(vm).ok_or(Status::BadCapability).map(|vm| vm.translation);
        let arch = mode.and_then(|mode| A::Vcpu::new(&self.memory, factory, state, mode));
        let arch = arch.inspect_err(|_| undo_node())?;
        let spare = arch.clone();
        let vcpu = Vcpu {
            caps: Cell::new(0),
            vm,
            notification,
            factory,
            state,
            state_node,
            cpu: Cell::new(None),
            handle: Cell::new(None),
            runner: Cell::new(None),
            arch,
        };
        match self.memory.alloc(factory, vcpu) {
            Ok(handle) => {
                self.memory.at(handle).handle.set(Some(handle));
                events.vcpu.set(Some(handle));
                Ok(handle)
            }
            Err(status) => {
                spare.free(&self.memory);
                undo_node();
                Err(status)
            }
        }
    }

    /// `VcpuRun`: binds the thread to the vCPU, which it enters when next dispatched. The existence
    /// of the VM is checked then.
    #[inline(always)]
    pub fn vcpu_run(
        &self,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
        vcpu: &Vcpu<A>,
    ) -> Result<()> {
        let name = vcpu.handle.get().ok_or(Status::BadCapability)?;
        if vcpu.cpu.get().is_some_and(|cpu| cpu != thread.cpu) {
            return Err(Status::BadCpu);
        }
        if vcpu.runner.get().is_some() {
            return Err(Status::Busy);
        }
        vcpu.cpu.set(Some(thread.cpu));
        vcpu.runner.set(Some(handle));
        thread.state.set(ThreadState::InGuest { vcpu: name });
        Ok(())
    }

    /// vCPU of a thread in the state `InGuest { vcpu }`; `None` if it has been destroyed.
    #[inline(always)]
    pub fn vcpu_of(&self, thread: &Thread<A>, vcpu: Handle<Vcpu<A>>) -> Option<&Vcpu<A>> {
        // Its last `VcpuRun` has looked it up.
        match self.memory.cached(thread.vcpu_lookup.vcpu.get()) {
            Some(found) if found.handle.get() == Some(vcpu) => Some(found),
            _ => self.memory.get(vcpu),
        }
    }

    /// `VcpuNotify`: the vCPU is prepared again before its guest continues. Returns whether a
    /// thread is in `VcpuRun`.
    pub fn vcpu_notify(&self, vcpu: &Vcpu<A>) -> bool {
        let Some(name) = vcpu.runner.get() else { return false };
        let Some(runner) = self.memory.get(name) else { return false };
        if let ThreadState::Halted { vcpu: halted, deadline } = runner.state.get() {
            if let Some(notification) = self.memory.get(vcpu.notification) {
                notification.waiter.set(None);
            }
            self.end_halt(name, runner, (halted, deadline));
        } else if runner.cpu != A::this_cpu() {
            A::kick(runner.cpu);
        }
        true
    }

    /// Ends the thread's `VcpuRun` with `status`.
    pub fn vcpu_return(&self, thread: &Thread<A>, vcpu: Option<&Vcpu<A>>, status: Status) {
        // The thread may have been stopped meanwhile.
        if matches!(thread.state.get(), ThreadState::InGuest { .. }) {
            thread.state.set(ThreadState::Ready);
        }
        if let Some(vcpu) = vcpu {
            vcpu.runner.set(None);
        }
        thread.context.set_status(status);
    }

    pub(crate) fn destroy_vcpu(&self, handle: Handle<Vcpu<A>>) {
        let vcpu = self.memory.at(handle);
        if let Some(name) = vcpu.runner.take()
            && let Some(runner) = self.memory.get(name)
        {
            // The CPU must leave the guest before the processor structures are freed.
            if runner.cpu != A::this_cpu() {
                A::shootdown(1 << runner.cpu);
                self.cpus[runner.cpu].space.set(None);
            }
            if matches!(runner.state.get(), ThreadState::Halted { .. }) {
                self.end_wait(name, runner);
                runner.context.set_status(Status::Aborted);
                self.wake(name);
            } else {
                self.vcpu_return(runner, None, Status::Aborted);
            }
        }
        vcpu.arch.free(&self.memory);
        self.remove_fixed(vcpu.state_node);
        self.memory.free_raw(vcpu.state, 1);
        self.memory.free(handle);
    }
}
