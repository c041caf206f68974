//! vCPU of the VMM library: registers, events, and the loop that runs the guest until an exit that
//! the VMM handles.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use hw_walk::Intent;
use hw_x86::paging::cr0;
use proto::hosted::debug::reason;
use proto::hosted::{Start, layout};
use spin::mutex::SpinMutex;
use vmm_mem::GuestMemory;
use vmm_vcpu::Vcpu;
use vmm_x86::{Event, Exit, Gpr, InterruptWindow, Reg, Seg, Segment, X86Vcpu};
use wedge_core::cpu::rflags;
use wedge_core::{Flush, Host, VirtualCpu};

use crate::clock::{YieldRelax, tsc};
use crate::effects::HostEffects;
use crate::guest_space::GuestSpace;
use crate::isolation::contract::Isolation;
use crate::mmu::kernel_code::close_kernel;
use crate::mmu::ram::Ram;
use crate::sites::Sites;
use crate::state::current::CurrentVcpu;
use crate::state::process::{process, slot};
use crate::state::shared::{event, events, shared, vcpu};
use crate::{compat, cpu_affinity, kick, profile, steal_time, timer};

/// vCPU of the VMM library.
pub struct LinuxVcpu<'m> {
    pub(super) cpu: CurrentVcpu,
    pub(super) isolation: &'static dyn Isolation,
    pub(super) space: GuestSpace,
    pub(super) start: &'m Start,
    pub(super) ram: Ram,
    pub(super) memory: GuestMemory,
    pub(super) sites: &'m SpinMutex<Sites, YieldRelax>,
    /// The VM has several vCPUs: another one may change code that this one executes.
    pub(super) has_peers: bool,
    /// Event to deliver at the next entry.
    pub(super) event: Event,
    pub(super) window: InterruptWindow,
    pub(super) deadline: u64,
    /// During an exit: address of the next instruction, and the bytes of the current one.
    pub(super) next: u64,
    pub(super) bytes: [u8; 16],
    pub(super) length: usize,
    pub(super) xcr0: u64,
    /// The profiler is enabled.
    pub(super) profiles: bool,
    /// Last page fault injected into the guest.
    pub(super) faulted: Option<(u64, Intent)>,
    /// Frequent system calls are rewritten.
    pub(super) rewrites_calls: bool,
    /// Value of `STAR` that entry code uses.
    pub(super) star: u64,
    /// Number of changes of the guest's TLS descriptors, from 1 on.
    pub(super) descriptor_changes: u64,
    /// A debugger may stop the vCPU.
    pub(super) debugs: bool,
    /// State of a single step for the debugger.
    pub(super) step: DebugStep,
}

/// Action after a stop of the guest.
pub enum StopAction {
    /// Continue the guest.
    Resume,
    /// Exit to the VMM.
    Exit(Exit),
}

/// Single step for the debugger.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DebugStep {
    /// No step.
    None,
    /// The instruction is to be executed.
    Wanted,
    /// The instruction was executed.
    Done,
}

impl LinuxVcpu<'_> {
    /// Returns the place of a register that is kept as it is.
    fn place(&mut self, register: Reg) -> Option<&mut u64> {
        let cpu = &mut *self.cpu;
        Some(match register {
            Reg::Rip => &mut cpu.frame.rip,
            Reg::Cr0 => &mut cpu.cr0,
            Reg::Cr2 => &mut cpu.cr2,
            Reg::Cr3 => &mut cpu.cr3,
            Reg::Cr4 => &mut cpu.cr4,
            Reg::Efer => &mut cpu.efer,
            Reg::Star => &mut cpu.star,
            Reg::Lstar => &mut cpu.lstar,
            Reg::Cstar => &mut cpu.cstar,
            Reg::Sfmask => &mut cpu.sfmask,
            Reg::KernelGsBase => &mut cpu.kernel_gs_base,
            Reg::SysenterCs => &mut cpu.sysenter[0],
            Reg::SysenterEsp => &mut cpu.sysenter[1],
            Reg::SysenterEip => &mut cpu.sysenter[2],
            Reg::Pat => &mut cpu.pat,
            Reg::Dr6 => &mut cpu.dr[6],
            Reg::Dr7 => &mut cpu.dr[7],
            Reg::Xcr0 => &mut self.xcr0,
            // The TSC has no offset, and there is no interrupt shadow.
            Reg::InterruptShadow | Reg::TscOffset | Reg::Rflags | Reg::Cpl => return None,
        })
    }
}

impl X86Vcpu for LinuxVcpu<'_> {
    fn gpr(&mut self, register: Gpr) -> u64 {
        self.cpu.frame.gpr[register as usize]
    }

    fn set_gpr(&mut self, register: Gpr, value: u64) {
        self.cpu.frame.gpr[register as usize] = value;
    }

    fn get(&mut self, register: Reg) -> u64 {
        match register {
            Reg::Rflags => self.cpu.rflags(),
            Reg::Cpl => self.cpu.cpl.into(),
            // The VMM walks kernel addresses only.
            Reg::Cr3 if self.cpu.cpl == 0 => self.cpu.shared.root,
            _ => self.place(register).map_or(0, |value| *value),
        }
    }

    fn set(&mut self, register: Reg, value: u64) {
        match register {
            Reg::Rflags => self.cpu.set_rflags(value),
            Reg::Cpl => self.cpu.cpl = value as u8 & 3,
            _ => {
                if let Some(place) = self.place(register) {
                    *place = value;
                }
            }
        }
        if register == Reg::Cr3 {
            slot().root.store(value, Relaxed);
        }
    }

    fn segment(&mut self, segment: Seg) -> Segment {
        let cpu = &mut *self.cpu;
        let table = |table: wedge_core::DescriptorTable| Segment {
            selector: 0,
            attrib: 0,
            limit: table.limit.into(),
            base: table.base,
        };
        match segment {
            Seg::Fs => Segment { base: compat::bases().0, ..cpu.segments[4] },
            Seg::Gs => Segment { base: compat::bases().1, ..cpu.segments[5] },
            Seg::Es | Seg::Cs | Seg::Ss | Seg::Ds => cpu.segments[segment as usize],
            Seg::Gdtr => table(cpu.gdtr),
            Seg::Idtr => table(cpu.idtr),
            Seg::Ldtr => cpu.ldtr,
            Seg::Tr => cpu.tr,
        }
    }

    fn set_segment(&mut self, segment: Seg, value: Segment) {
        let cpu = &mut *self.cpu;
        let table = wedge_core::DescriptorTable { base: value.base, limit: value.limit as u16 };
        match segment {
            Seg::Fs | Seg::Gs | Seg::Es | Seg::Cs | Seg::Ss | Seg::Ds => {
                cpu.segments[segment as usize] = value;
            }
            Seg::Gdtr => cpu.gdtr = table,
            Seg::Idtr => cpu.idtr = table,
            Seg::Ldtr => cpu.ldtr = value,
            Seg::Tr => cpu.tr = value,
        }
    }

    fn next_rip(&mut self) -> u64 {
        self.next
    }

    fn instruction_bytes(&mut self) -> ([u8; 16], usize) {
        (self.bytes, self.length)
    }

    fn event(&mut self) -> Event {
        self.event
    }

    fn set_event(&mut self, event: Event) {
        self.event = event;
    }

    fn set_window(&mut self, wanted: InterruptWindow) {
        self.window = wanted;
    }

    fn has_window(&mut self) -> bool {
        self.window != InterruptWindow::Nothing
    }
}

impl Vcpu for LinuxVcpu<'_> {
    type Exit = Exit;

    fn set_deadline(&mut self, ticks: u64) {
        self.deadline = ticks;
        vcpu().deadline.store(ticks, Relaxed);
        timer::arm_timer();
    }

    fn stolen(&mut self) -> u64 {
        steal_time::stolen_ticks()
    }

    fn set_wait_exits(&mut self, _: bool) {
        // Every HLT exits.
    }

    fn flush_tlb(&mut self) {
        HostEffects { space: &mut self.space }.flush(Flush::All);
    }

    fn run(&mut self) -> Exit {
        self.next = 0;
        self.length = 0;
        let exit = self.run_guest();
        let is_quiet = self.window == InterruptWindow::Nothing;
        vcpu().may_defer.store(is_quiet && !self.accepts_interrupts(), Relaxed);
        exit
    }
}

impl LinuxVcpu<'_> {
    /// Returns whether the guest has interrupts enabled.
    fn accepts_interrupts(&self) -> bool {
        self.cpu.held_flags & rflags::IF != 0
    }

    /// Runs the guest until an exit that the VMM handles.
    fn run_guest(&mut self) -> Exit {
        if self.cpu.cr0 & cr0::PE == 0 {
            self.start_secondary();
        }
        if self.profiles {
            profile::watch_descriptors(&self.cpu, &self.memory, slot());
        }
        loop {
            if self.profiles && profile::is_stepping() {
                match self.profile_step() {
                    StopAction::Resume => continue,
                    StopAction::Exit(exit) => return exit,
                }
            }
            if self.step == DebugStep::Done {
                // The step ends at the guest's handler.
                if let Err(exit) = self.deliver_event() {
                    return exit;
                }
                self.halt_for_debugger(reason::STEP);
            }
            if self.accepts_interrupts() || events().load(Relaxed) != 0 {
                kick::wake_deferred();
            }
            let steps = self.step == DebugStep::Wanted;
            if !steps && let Some(exit) = self.take_events() {
                return exit;
            }
            let delivered = self.deliver_event();
            if let Err(exit) = delivered.and_then(|()| self.open_window(steps)) {
                return exit;
            }
            self.prepare_entry();
            let step = if steps { self.debug_step() } else { self.step() };
            if let StopAction::Exit(exit) = step {
                return exit;
            }
        }
    }

    /// Executes one instruction of the profiler with its page writable. Nothing is delivered during
    /// the step but its own fault.
    fn profile_step(&mut self) -> StopAction {
        let held = events().swap(0, SeqCst);
        let step = self.step();
        events().fetch_or(held, SeqCst);
        if profile::is_stepping() {
            profile::stepped(&mut self.cpu, &self.memory);
        }
        step
    }

    /// Takes the pending events. Returns an exit if one concerns the VMM.
    fn take_events(&mut self) -> Option<Exit> {
        let pending = events().load(SeqCst);
        if pending == 0 {
            return None;
        }
        events().fetch_and(!pending, SeqCst);
        let others = pending & !event::TIMER;
        if pending & event::TIMER != 0 {
            // The timer must be set again in any case.
            process().armed.store(u64::MAX, Relaxed);
            if tsc() < self.deadline {
                timer::arm_timer();
            } else if others == 0 {
                cpu_affinity::on_timer_tick();
                return Some(Exit::Deadline);
            } else {
                events().fetch_or(event::TIMER, SeqCst);
            }
        }
        (others != 0).then_some(Exit::Recall { events: others.into() })
    }

    fn deliver_event(&mut self) -> Result<(), Exit> {
        if self.event.is_some() {
            let event = core::mem::take(&mut self.event);
            self.cpu.deliver(&self.memory, event)?;
        }
        Ok(())
    }

    /// Opens the interrupt window if the guest accepts interrupts.
    fn open_window(&mut self, steps: bool) -> Result<(), Exit> {
        if !self.accepts_interrupts() || steps {
            return Ok(());
        }
        match core::mem::replace(&mut self.window, InterruptWindow::Nothing) {
            InterruptWindow::Nothing => Ok(()),
            InterruptWindow::Exit => Err(Exit::InterruptWindow),
            InterruptWindow::DeliverVirq(number) => {
                self.cpu.deliver(&self.memory, Event::interrupt(number))
            }
        }
    }

    /// Updates what the entry to the guest depends on.
    fn prepare_entry(&mut self) {
        let has_deferred = vcpu().deferred.load(Relaxed) != 0;
        self.cpu.set_attention(self.window != InterruptWindow::Nothing || has_deferred);
        if self.cpu.star != self.star {
            self.star = self.cpu.star;
            self.cpu.update_call_segments();
        }
        self.cpu.prepare_entry();
        let cpu = &mut *self.cpu;
        if cpu.cpl == 3 && self.isolation.scans_code() && !shared().closed.load(Relaxed) {
            // The kernel has finished patching its code before it first enters user mode.
            close_kernel(cpu, &self.memory, self.start.code, self.start.code_end);
            shared().closed.store(true, Relaxed);
        }
        compat::load_segments(cpu, &self.memory, self.descriptor_changes);
        self.space.sync_before_entry();
    }
}

/// Sets the range that every address space shares: the kernel image and its modules.
pub fn set_shared_range(cpu: &mut VirtualCpu, start: &Start) {
    cpu.shared = wedge_core::cpu::SharedRange {
        start: layout::IMAGE,
        end: layout::LOW_END,
        root: start.kernel_root,
    };
}
