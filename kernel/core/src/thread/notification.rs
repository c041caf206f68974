//! Notifications and doorbells.

use core::cell::Cell;

use abi::Status;
use abi::vcpu::doorbell;

use crate::arch::{Arch, Context};
use crate::object::*;
use crate::pool::Handle;
use crate::{Kernel, Result};

impl<A: Arch> Kernel<A> {
    /// Sets event bits and wakes the waiting thread.
    pub fn signal(&self, handle: Handle<Notification<A>>, bits: u64) {
        if let Some(notification) = self.memory.get(handle) {
            self.notify(notification, bits);
        }
    }

    #[inline(always)]
    fn notify(&self, notification: &Notification<A>, bits: u64) {
        let old = notification.bits.replace(notification.bits.get() | bits);
        // For bits already pending the receiver has been woken before.
        if old != notification.bits.get() {
            self.wake_waiter(notification);
        }
    }

    /// Wakes the thread that waits for events, some of which are pending.
    #[inline(never)]
    fn wake_waiter(&self, notification: &Notification<A>) {
        if let Some(waiter) = notification.waiter.get() {
            notification.waiter.set(None);
            self.end_blocking(waiter, Status::Ok, &notification.bits);
        } else if let Some(bound) = notification.thread.get()
            && let Some(thread) = self.memory.get(bound)
            && matches!(thread.state.get(), ThreadState::Receiving)
        {
            Self::deliver_events(thread, notification.bits.take());
            self.wake(bound);
        } else if let Some(vcpu) = notification.vcpu.get().and_then(|vcpu| self.memory.get(vcpu))
            && let (Some(runner), Some(cpu)) = (vcpu.runner.get(), vcpu.cpu.get())
        {
            self.interrupt_if_other(cpu);
            // Its guest may have caused the event, and is not to continue without the VMM.
            let (own, here) = (cpu == A::this_cpu(), &self.cpus[cpu]);
            here.resched.set(here.resched.get() || own && here.current.get() == Some(runner));
        }
    }

    /// Makes a thread runnable that was blocked on a notification and is not its waiter any more.
    /// `NotificationWait` returns `status` and takes `bits`.
    #[inline(never)]
    pub(crate) fn end_blocking(&self, waiter: Handle<Thread<A>>, status: Status, bits: &Cell<u64>) {
        let thread = self.memory.at(waiter);
        // A thread in `VcpuRun` reads the bits itself, or fails if the notification is destroyed.
        if let ThreadState::Halted { vcpu, deadline } = thread.state.get() {
            return self.end_halt(waiter, thread, (vcpu, deadline));
        }
        self.clear_timeout(waiter, thread, thread.state.get().deadline());
        thread.context.set_status(status);
        thread.context.set_result(0, bits.take());
        thread.state.set(ThreadState::Ready);
        self.enqueue_thread(waiter, thread);
    }

    /// Makes a thread runnable that was `Halted { vcpu, deadline }`, and is not the notification's
    /// waiter any more.
    #[inline(always)]
    pub(crate) fn end_halt(
        &self,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
        (vcpu, deadline): (Handle<Vcpu<A>>, u64),
    ) {
        self.clear_timeout(handle, thread, deadline);
        thread.state.set(ThreadState::InGuest { vcpu });
        self.enqueue_thread(handle, thread);
    }

    /// Signals a doorbell of a VM. Returns the result of `HYPERCALL_DOORBELL`.
    #[inline(always)]
    pub fn ring_doorbell(&self, vm: &Vm<A>, index: u64) -> u64 {
        let index = usize::try_from(index).unwrap_or(usize::MAX);
        if let Some(bell) = vm.doorbells.get(index).and_then(Cell::get)
            && let Some(notification) = self.memory.get(bell.notification)
        {
            self.notify(notification, bell.bits);
            doorbell::RUNG
        } else {
            doorbell::UNBOUND
        }
    }

    /// `NotificationWait`, whose status is `Ok` unless the thread blocks.
    pub fn notification_wait(
        &self,
        handle: Handle<Thread<A>>,
        name: Handle<Notification<A>>,
        deadline: u64,
    ) -> Result<()> {
        let thread = self.memory.at(handle);
        let notification = self.memory.get(name).ok_or(Status::BadCapability)?;
        let bits = notification.bits.take();
        thread.context.set_result(0, bits);
        if bits != 0 {
            return Ok(());
        }
        if deadline == 0 || deadline <= A::now() {
            return Err(Status::Timeout);
        }
        if notification.waiter.get().is_some() {
            return Err(Status::Busy);
        }
        let state = ThreadState::Blocked { on: name, deadline };
        self.block_on(handle, thread, notification, state);
        Ok(())
    }

    /// Blocks a thread in `VcpuRun`, whose guest executed HLT, until the vCPU's notification has
    /// events or the deadline passes. Returns `false` if events are pending or another thread is
    /// blocked there.
    #[inline(always)]
    pub fn halt(
        &self,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
        notification: &Notification<A>,
        deadline: u64,
    ) -> bool {
        if notification.bits.get() == 0
            && notification.waiter.get().is_none()
            && let ThreadState::InGuest { vcpu } = thread.state.get()
        {
            let state = ThreadState::Halted { vcpu, deadline };
            self.block_on(handle, thread, notification, state);
            return true;
        }
        false
    }

    #[inline(always)]
    fn block_on(
        &self,
        handle: Handle<Thread<A>>,
        thread: &Thread<A>,
        notification: &Notification<A>,
        state: ThreadState<A>,
    ) {
        notification.waiter.set(Some(handle));
        thread.state.set(state);
        self.set_timeout(handle, thread, state.deadline());
        // The current thread: the scheduler dequeues its context when it picks another.
        self.cpus[thread.cpu].resched.set(true);
    }

    /// Binds a notification to a thread, which it then also wakes while the thread is receiving.
    pub(crate) fn bind_notification(
        &self,
        handle: Handle<Thread<A>>,
        name: Handle<Notification<A>>,
    ) -> Result<()> {
        let (thread, notification) = (self.memory.at(handle), self.memory.at(name));
        let taken = notification.thread.get().is_some_and(|t| self.memory.get(t).is_some())
            || thread.bound.get().is_some_and(|n| self.memory.get(n).is_some());
        if taken {
            return Err(Status::Busy);
        }
        notification.thread.set(Some(handle));
        thread.bound.set(Some(name));
        if notification.bits.get() != 0 {
            self.wake_waiter(notification);
        }
        Ok(())
    }

    /// Ends a thread's wait for a notification, if it is blocked on one. The caller sets another
    /// state at once.
    pub(crate) fn end_wait(&self, handle: Handle<Thread<A>>, thread: &Thread<A>) {
        self.leave_notification(thread);
        self.clear_timeout(handle, thread, thread.state.get().deadline());
    }

    /// Makes a thread no waiter any more of the notification that it is blocked on, if any.
    pub(crate) fn leave_notification(&self, thread: &Thread<A>) {
        let on = match thread.state.get() {
            ThreadState::Blocked { on, .. } => Some(on),
            ThreadState::Halted { vcpu, .. } => self.memory.get(vcpu).map(|vcpu| vcpu.notification),
            _ => None,
        };
        if let Some(on) = on.and_then(|on| self.memory.get(on)) {
            on.waiter.set(None);
        }
    }

    pub(crate) fn destroy_notification(&self, handle: Handle<Notification<A>>) {
        let notification = self.memory.at(handle);
        if let Some(waiter) = notification.waiter.take() {
            self.end_blocking(waiter, Status::Aborted, &notification.bits);
        }
        self.memory.free(handle);
    }
}
