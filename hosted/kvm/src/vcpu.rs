//! KVM vCPU as an [`X86Vcpu`] of the VMM library.
//!
//! General registers lie in memory shared with KVM; all others are read on demand. The result of a
//! device access is written to shared memory, too; KVM completes the instruction at the next entry.
//! Code that changes registers in between must complete the instruction first
//! ([`KvmVcpu::complete`]).

use std::io;
use std::sync::atomic::{Ordering::SeqCst, compiler_fence};
use std::time::Duration;

use hw_x86::paging::cr4;
use kvm_bindings::kvm_sregs;
use kvm_ioctls::{VcpuExit, VcpuFd};
use nix::sys::signal::{SigEvent, SigevNotify};
use nix::sys::time::TimeSpec;
use nix::sys::timer::{Expiration, Timer, TimerSetTimeFlags};
use nix::time::ClockId;
use rustix::io::Errno;
use vmm_mem::GuestMemory;
use vmm_vcpu::{CounterClock, Vcpu};
use vmm_x86::{Event, Exit, InterruptWindow};

use crate::Error;
use crate::debug::{self, DebugStops};
use crate::error::report_failure;
use crate::kick;
use crate::vcpu_thread::{VcpuThread, tsc};
use crate::vm::forgets_shadows;

mod events;
mod exits;
mod registers;
mod stops;

/// State of an instruction that KVM has not completed.
#[derive(Clone, Copy)]
enum Pending {
    /// No such instruction.
    Nothing,
    /// The instruction can be completed.
    Answered,
    /// KVM expects this many bytes at this address.
    Bytes(*mut u8, usize),
    /// KVM expects the value of an MSR.
    Msr,
}

/// Accesses of one `INS` or `OUTS` that KVM reports together.
struct Ports {
    port: u16,
    size: u8,
    write: bool,
    /// Next value and end of the values.
    next: *mut u8,
    left: usize,
}

/// A KVM vCPU.
pub struct KvmVcpu<'s> {
    fd: VcpuFd,
    vcpu_thread: &'s VcpuThread,
    /// Guest memory, to read code.
    memory: &'s GuestMemory,
    clock: CounterClock,
    /// The host CPU does not preserve interrupt shadows.
    is_forgetful: bool,
    timer: Timer,
    /// Deadline of the armed timer as a time-stamp counter value; 0: it may have expired.
    armed: u64,
    /// Number of handled kicks; the timer causes kicks, too.
    kicks: u64,
    deadline: u64,
    sregs: Option<kvm_sregs>,
    /// Special registers have been changed here.
    sregs_changed: bool,
    tsc_offset: u64,
    /// `CR8` as the VM's local APIC knows it.
    known_cr8: u8,
    pending: Pending,
    ports: Option<Ports>,
    event: Event,
    window: InterruptWindow,
    /// Address after the `HLT` that caused the exit.
    next_rip: u64,
    /// Error outside of [`Vcpu::run`].
    failed: Option<io::Error>,
    /// Debugger stops, if they are enabled.
    stops: Option<DebugStops<'s>>,
    /// A stop is requested at the next instruction boundary.
    is_asked: bool,
    /// State of a single step.
    step: StepState,
}

/// State of a single step.
#[derive(Clone, Copy, PartialEq, Eq)]
enum StepState {
    /// No step.
    Nothing,
    /// Requested. The guest takes no interrupts until it is executed.
    Wanted,
    /// Executed.
    Done,
}

impl<'s> KvmVcpu<'s> {
    /// Creates the vCPU from one that has not run. The calling thread must be the one that runs it.
    pub fn new(
        mut fd: VcpuFd,
        vcpu_thread: &'s VcpuThread,
        memory: &'s GuestMemory,
        clock: CounterClock,
        stops: Option<DebugStops<'s>>,
    ) -> Result<Self, Error> {
        let notify = SigevNotify::SigevThreadId {
            signal: kick::KICK,
            thread_id: rustix::thread::gettid().as_raw_nonzero().get(),
            si_value: 0,
        };
        let timer = Timer::new(ClockId::CLOCK_MONOTONIC, SigEvent::new(notify))
            .map_err(Error::host("create a timer"))?;
        if stops.is_some() {
            fd.set_guest_debug(&debug::control(false))
                .map_err(Error::host("enable debug exits of a vCPU"))?;
        }
        kick::set_immediate_exit(&raw mut fd.get_kvm_run().immediate_exit);
        Ok(Self {
            fd,
            vcpu_thread,
            memory,
            clock,
            is_forgetful: forgets_shadows(),
            timer,
            armed: 0,
            kicks: 0,
            deadline: u64::MAX,
            sregs: None,
            sregs_changed: false,
            tsc_offset: 0,
            known_cr8: 0,
            pending: Pending::Nothing,
            ports: None,
            event: Event::NONE,
            window: InterruptWindow::Nothing,
            next_rip: 0,
            failed: None,
            stops,
            is_asked: false,
            step: StepState::Nothing,
        })
    }

    fn note<T>(&mut self, result: Result<T, impl Into<io::Error>>) -> Option<T> {
        match result {
            Ok(value) => Some(value),
            Err(error) => {
                self.failed.get_or_insert(error.into());
                None
            }
        }
    }

    /// Lets KVM complete the pending instruction before registers are changed.
    fn complete(&mut self) {
        // Iterates for a string instruction, whose further accesses are discarded.
        while !matches!(self.pending, Pending::Nothing) {
            self.pending = Pending::Nothing;
            self.ports = None;
            self.fd.set_kvm_immediate_exit(1);
            let result = match self.fd.run() {
                Ok(
                    VcpuExit::IoIn(..)
                    | VcpuExit::IoOut(..)
                    | VcpuExit::MmioRead(..)
                    | VcpuExit::MmioWrite(..),
                ) => {
                    self.pending = Pending::Answered;
                    Ok(())
                }
                Ok(_) => Ok(()),
                Err(error) if error.errno() == Errno::INTR.raw_os_error() => Ok(()),
                Err(error) => Err(error),
            };
            self.note(result);
        }
    }

    /// Arms the timer if its current deadline is too late.
    fn arm(&mut self, now: u64) {
        let kicks = kick::count();
        if std::mem::replace(&mut self.kicks, kicks) != kicks {
            self.armed = 0;
        }
        if (now..=self.deadline).contains(&self.armed) {
            return;
        }
        let left = Duration::from_nanos(self.clock.duration(self.deadline - now) + 1);
        let expiration = Expiration::OneShot(TimeSpec::from_duration(left));
        let result = self.timer.set(expiration, TimerSetTimeFlags::empty());
        self.note(result);
        self.armed = self.deadline;
    }
}

impl Drop for KvmVcpu<'_> {
    fn drop(&mut self) {
        kick::set_immediate_exit(std::ptr::null_mut());
    }
}

impl Vcpu for KvmVcpu<'_> {
    type Exit = Exit;

    fn set_deadline(&mut self, ticks: u64) {
        self.deadline = ticks;
    }

    fn stolen(&mut self) -> u64 {
        // Guests of this back end have no stolen-time record.
        0
    }

    fn set_wait_exits(&mut self, _: bool) {
        // Every `HLT` exits.
    }

    fn flush_tlb(&mut self) {
        // KVM flushes at changes of control registers, and has no other interface.
        for _ in 0..2 {
            self.change_sregs(|sregs| sregs.cr4 ^= cr4::PGE);
            self.put_sregs();
        }
    }

    fn run(&mut self) -> Exit {
        if let Some(exit) = self.next_port() {
            return exit;
        }
        self.put_sregs();
        loop {
            self.service_debug_stop();
            if let Some(exit) = self.deliver() {
                return exit;
            }
            if let Some(error) = self.failed.take() {
                return report_failure(Exit::HostError(error.raw_os_error().unwrap_or(0) as u64));
            }
            // A kick is not lost from here on: its signal sets `immediate_exit`. A requested stop
            // lets KVM complete an instruction.
            self.fd.set_kvm_immediate_exit(self.is_asked.into());
            compiler_fence(SeqCst);
            self.vcpu_thread.is_in_guest.store(true, SeqCst);
            let events = self.vcpu_thread.take_events();
            let now = tsc();
            let exit = if events != 0 {
                Some(Exit::Recall { events })
            } else if now >= self.deadline {
                Some(Exit::Deadline)
            } else {
                if self.deadline != u64::MAX {
                    self.arm(now);
                }
                self.enter()
            };
            self.vcpu_thread.is_in_guest.store(false, SeqCst);
            if let Some(exit) = exit {
                return exit;
            }
            if self.present_cr8() != self.known_cr8 {
                // A pending event may have become obsolete.
                return Exit::Recall { events: 0 };
            }
        }
    }
}
