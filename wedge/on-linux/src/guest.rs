//! vCPU of the wedge: runs the guest until an exit that the VMM handles.
//!
//! State shared by all vCPUs ([`VmShared`]) is on the stack of the first vCPU, which creates it and
//! starts the secondary ones. These wait for their start-up IPI like any application processor.
//! Linux's real-mode trampoline is not executed; [`LinuxVcpu::start_secondary`] has its effect.

use core::arch::x86_64::__cpuid_count;
use core::ops::Range;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use hw_x86::cpuid::{extended_b, extended_c, features_c, leaf};
use hw_x86::paging::{cr0, cr4, entry};
use linux_raw_sys::general as linux;
use proto::hosted::debug::reason;
use proto::hosted::{Start, counter, layout, option};
use spin::mutex::SpinMutex;
use vmm_cpu::vcpu::{InterruptWindow, Segment};
use vmm_cpu::walk::Intent;
use vmm_cpu::{Event, Exit, Gpr, MAX_VCPUS, MemoryFault, Reg, Seg, TscClock, Vcpu};
use vmm_machine::{Outcome, Pc, PcConfig, Slots, StopReason};
use vmm_mem::GuestMemory;
use wedge_core::cpu::rflags;
use wedge_core::{Flush, Host, Instruction, VirtualCpu, vector};
use wedge_x86::{Cause, Stub, decode_all};

use crate::backend::{self, HostEndpoint, LinuxHost, MAX_FUNCTIONS};
use crate::clock::{YieldRelax, serialize, tsc};
use crate::guest_space::GuestSpace;
use crate::isolation::user_process::Stop;
use crate::isolation::{pkeys, user_process};
use crate::linux::signals;
use crate::mmu::fill::Fault;
use crate::mmu::frames::write_by_device;
use crate::mmu::kernel_code::{MOST_POKED, close_kernel, close_poke, write_code};
use crate::mmu::ram::{PAGE, Ram, is_filled_in};
use crate::mmu::steps::Begin;
use crate::mmu::syscall_patch::SYSCALL;
use crate::sites::{FUNCTION, Sites};
use crate::state::config::{self, config, has, start};
use crate::state::current::{CurrentProcess, CurrentVcpu};
use crate::state::doorbell;
use crate::state::process::{own_index, process, slot};
use crate::state::shared::{EVERYTHING, event, events, shared, vcpu, vcpus};
use crate::state::statistics::{count, own_statistics};
use crate::{
    compat, cpu_affinity, debug, idle, processes, profile, report, signal, steal_time, timer,
    xstate,
};

/// Error code of a page fault: write access.
const WRITE: u64 = 1 << 1;
/// Error code of a page fault: instruction fetch.
const FETCH: u64 = 1 << 4;
/// Longest instruction in bytes.
const LONGEST: usize = 15;

type Machine<'m> = Pc<'m, YieldRelax, MAX_VCPUS, Slots<HostEndpoint, MAX_FUNCTIONS>>;

/// State shared by all vCPUs.
struct VmShared<'m> {
    start: &'m Start,
    ram: Ram,
    memory: &'m GuestMemory,
    machine: &'m Machine<'m>,
    /// Slots of the PCI functions.
    device_slots: &'m backend::DeviceSlots,
    sites: &'m SpinMutex<Sites, YieldRelax>,
}

/// vCPU of the VMM library.
pub struct LinuxVcpu<'m> {
    cpu: CurrentVcpu,
    space: GuestSpace,
    start: &'m Start,
    ram: Ram,
    memory: GuestMemory,
    sites: &'m SpinMutex<Sites, YieldRelax>,
    /// The VM has several vCPUs: another one may change code that this one executes.
    has_peers: bool,
    /// Event to deliver at the next entry.
    event: Event,
    window: InterruptWindow,
    deadline: u64,
    /// During an exit: address of the next instruction, and the bytes of the current one.
    next: u64,
    bytes: [u8; 16],
    length: usize,
    xcr0: u64,
    /// The profiler is enabled.
    profiles: bool,
    /// Last page fault injected into the guest.
    faulted: Option<(u64, Intent)>,
    /// Frequent system calls are rewritten.
    rewrites_calls: bool,
    /// Value of `STAR` that entry code uses.
    star: u64,
    /// A debugger may stop the vCPU.
    debugs: bool,
    /// State of a single step for the debugger.
    step: DebugStep,
}

/// Single step for the debugger.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DebugStep {
    /// No step.
    None,
    /// The instruction is to be executed.
    Wanted,
    /// The instruction was executed.
    Done,
}

/// Effects of emulated instructions on the host.
struct HostEffects<'a> {
    space: &'a mut GuestSpace,
}

impl Host for HostEffects<'_> {
    fn fs_base(&mut self) -> u64 {
        let base;
        // SAFETY: the loader has checked that user mode may execute it.
        unsafe { core::arch::asm!("rdfsbase {}", out(reg) base, options(nomem, nostack)) };
        base
    }

    fn set_fs_base(&mut self, base: u64) {
        // SAFETY: the wedge does not use FS. The caller has checked that the address is canonical.
        unsafe { core::arch::asm!("wrfsbase {}", in(reg) base, options(nomem, nostack)) };
    }

    fn gs_base(&mut self) -> u64 {
        let base;
        // SAFETY: as above.
        unsafe { core::arch::asm!("rdgsbase {}", out(reg) base, options(nomem, nostack)) };
        base
    }

    fn set_gs_base(&mut self, base: u64) {
        // SAFETY: the wedge does not use GS.
        unsafe { core::arch::asm!("wrgsbase {}", in(reg) base, options(nomem, nostack)) };
    }

    fn flush(&mut self, what: Flush) {
        match what {
            Flush::Page(linear) => self.space.mmu().flush_page(linear),
            Flush::PageOf { pcid, linear } => self.flush_space(pcid, Some(linear)),
            Flush::Space(pcid) => self.flush_space(pcid, None),
            Flush::Spaces | Flush::All => {
                for slot in &vcpu().slots {
                    slot.stale.store(true, Relaxed);
                }
                if what == Flush::All {
                    self.space.mmu().kernel_changed(EVERYTHING);
                }
                self.space.mmu().follow();
            }
        }
    }

    fn enter_space(&mut self, cr3: u64, keep: bool) {
        let pcid = (cr3 & 0xfff) as u16;
        let slot_index = config::slot_of(pcid);
        let slot = &vcpu().slots[slot_index];
        let known = slot.pcid.swap(pcid.into(), Relaxed) == u32::from(pcid);
        let is_same = slot_index == process().slot.load(Relaxed) as usize
            && slot.root.load(Relaxed) & entry::ADDRESS == cr3 & entry::ADDRESS;
        if !keep || !known {
            slot.stale.store(true, Relaxed);
        }
        slot.root.store(cr3, Relaxed);
        processes::switch_to_slot(self.space.process(), slot_index);
        // Reloading the same root continues the same address space: Linux has not reused its
        // tables.
        if !(known && (keep || is_same)) {
            self.space.user_process().replace();
        }
        self.space.mmu().follow();
    }
}

impl HostEffects<'_> {
    /// Drops user-mode mappings of an address space: one page, or all. An address space that is not
    /// active drops all of them later.
    fn flush_space(&mut self, pcid: u16, linear: Option<u64>) {
        let slot_index = config::slot_of(pcid);
        let slot = &vcpu().slots[slot_index];
        if slot.pcid.load(Relaxed) != u32::from(pcid) {
            return;
        }
        match linear {
            Some(linear) if slot_index == process().slot.load(Relaxed) as usize => {
                self.space.mmu().drop_page(linear);
            }
            _ => {
                slot.stale.store(true, Relaxed);
                self.space.mmu().follow();
            }
        }
    }
}

/// Action after a stop of the guest.
enum StopAction {
    /// Continue the guest.
    Resume,
    /// Exit to the VMM.
    Exit(Exit),
}

impl LinuxVcpu<'_> {
    /// Runs the guest until it stops, and emulates the CPU's own reaction.
    fn step(&mut self) -> StopAction {
        let begin = if pkeys::is_enabled() {
            self.space.mmu().begin_step(&mut self.cpu)
        } else {
            Begin::Free
        };
        if begin == Begin::Instead {
            return self.step_instead();
        }
        let cause = self.enter();
        if compat::has_selectors(&self.cpu) {
            let selectors = match user_process::is_enabled() {
                true => self.space.user_process().selectors,
                false => compat::selectors(),
            };
            compat::save_selectors(&mut self.cpu, selectors);
        }
        if self.step != DebugStep::None {
            // Clear the trap flag, which the guest did not set and may have stored.
            self.cpu.frame.rflags &= !rflags::TF;
        }
        if begin == Begin::Step {
            let signal = vcpu().signal.get();
            let trapped = matches!(cause, Cause::Signal)
                && signal.number == linux::SIGTRAP
                && signal.vector == u64::from(vector::DEBUG);
            if self.space.mmu().end_step(&mut self.cpu, trapped) {
                return StopAction::Resume;
            }
        }
        match cause {
            Cause::Events => StopAction::Resume,
            Cause::Site(stub) => self.site(stub),
            Cause::Signal => self.signal(),
        }
    }

    /// Runs the guest until it stops.
    fn enter(&mut self) -> Cause {
        if pkeys::is_enabled() {
            // The kernel may return to user mode without the wedge.
            signal::scrub();
        }
        let is_user = self.cpu.cpl == 3;
        if is_user && user_process::is_enabled() {
            return match self.space.user_process().run(&mut self.cpu) {
                Stop::Events => Cause::Events,
                Stop::Signal => Cause::Signal,
                Stop::Unmapped => {
                    self.space.mmu().drop_user_pages();
                    Cause::Events
                }
            };
        }
        let is_closed = is_user && has(option::REMAP);
        let check = |result| {
            if let Err(error) = result {
                report::fatal(format_args!("cannot map the guest kernel: {error}"));
            }
        };
        if is_closed {
            check(self.ram.close());
        }
        let cause = self.cpu.enter();
        if is_closed {
            check(self.ram.open());
        }
        cause
    }

    /// Stops for the debugger.
    fn halt_for_debugger(&mut self, why: u32) {
        let step = debug::halt(&mut self.cpu, why);
        self.step = if step { DebugStep::Wanted } else { DebugStep::None };
    }

    /// Executes one guest instruction for the debugger. Nothing is delivered before it except for
    /// its own exceptions.
    fn debug_step(&mut self) -> StopAction {
        let held = events().swap(0, SeqCst);
        let rip = self.cpu.frame.rip;
        self.cpu.set_attention(false);
        self.cpu.frame.rflags |= rflags::TF;
        let step = self.step();
        events().fetch_or(held, SeqCst);
        // The instruction is executed again after a page was mapped for it.
        let is_on = self.cpu.frame.rip != rip
            || self.event.is_some()
            || matches!(step, StopAction::Exit(_));
        if self.step == DebugStep::Wanted && is_on {
            self.step = DebugStep::Done;
        }
        step
    }

    /// Starts a secondary vCPU after its start-up IPI, in place of Linux's real-mode trampoline:
    /// applies the effect of `secondary_startup_64` up to the call of C code, with the tables that
    /// it loads.
    fn start_secondary(&mut self) {
        let cpu = &mut *self.cpu;
        *cpu = VirtualCpu::new();
        set_shared_range(cpu, self.start);
        cpu.segments[1].selector = self.start.cs as u16;
        cpu.cr4 |= cr4::PGE;
        cpu.cr3 = self.start.initial_cr3;
        slot().root.store(cpu.cr3, Relaxed);
        let word = |at: u64| {
            let mut bytes = [0; 8];
            // The image is always mapped; damage to the guest's own tables is harmless to the host.
            let _ = cpu.read(&self.memory, at, &mut bytes);
            u64::from_le_bytes(bytes)
        };
        let [rip, stack, gs] =
            [self.start.initial_code, self.start.initial_stack, self.start.initial_gs].map(word);
        let limit = word(self.start.early_gdt) as u16;
        let base = word(self.start.early_gdt + size_of::<u16>() as u64);
        cpu.gdtr = wedge_core::DescriptorTable { base, limit };
        cpu.frame.rip = rip;
        // As after a call, whose return address is unused.
        cpu.frame.gpr[4] = stack.wrapping_sub(8);
        compat::set_bases(0, gs);
        let mut effects = HostEffects { space: &mut self.space };
        effects.flush(Flush::All);
        effects.enter_space(cpu.cr3, false);
    }

    fn site(&mut self, at: u64) -> StopAction {
        // SAFETY: entry code passes the address of the stub that was entered; stubs in use do not
        // change.
        let stub = unsafe { &*(at as *const Stub) };
        own_statistics().sites[usize::from(stub.kind)].fetch_add(1, Relaxed);
        let cpu = &mut *self.cpu;
        cpu.frame.rip = stub.site;
        cpu.sync_flags(cpu.frame.rflags);
        if stub.kind == FUNCTION {
            self.text_poke();
            return StopAction::Resume;
        }
        if Sites::is_marker(stub) {
            self.sites.lock().marker(stub, cpu, &self.memory);
            return StopAction::Resume;
        }
        match decode_all(stub.instructions()) {
            Ok((all, used)) => self.execute_all(&all[..used], stub.instructions(), stub.resume()),
            // Sites were decoded before they were rewritten.
            Err(error) => report::fatal(format_args!(
                "cannot decode the patch site at {:#x}: {error:?}",
                stub.site
            )),
        }
    }

    /// Replaces Linux's `__text_poke`, which changes kernel code. Linux switches to a temporary
    /// address space for each change, thousands of times during boot; the wedge can write code
    /// directly. Arguments that crash Linux's own function raise the same exception here, so that
    /// [`close_poke`] sees every change.
    fn text_poke(&mut self) {
        let cpu = &mut *self.cpu;
        let [how, to, from, length] = [7, 6, 2, 1].map(|register| cpu.frame.gpr[register]);
        let is_copy = how == self.start.text_poke_memcpy;
        let mut bytes = [0; MOST_POKED];
        let bytes = usize::try_from(length).ok().and_then(|length| bytes.get_mut(..length));
        let poked = match bytes {
            Some(bytes) => poke(cpu, &self.memory, to, from, is_copy, bytes),
            None => Err(Event::exception(vector::UNDEFINED)),
        };
        match poked {
            Ok(back) => {
                cpu.frame.gpr[0] = to;
                cpu.frame.gpr[4] += 8;
                cpu.frame.rip = back;
                serialize();
            }
            Err(event) => self.event = event,
        }
    }

    /// Emulates a sequence of instructions; the guest resumes at `resume`.
    fn execute_all(&mut self, all: &[Instruction], bytes: &[u8], resume: u64) -> StopAction {
        let mut bytes = bytes;
        for (number, instruction) in all.iter().enumerate() {
            let last = number + 1 == all.len();
            let cpu = &mut *self.cpu;
            let next =
                if last { resume } else { cpu.frame.rip.wrapping_add(instruction.length as u64) };
            match cpu.execute(
                &self.memory,
                &mut HostEffects { space: &mut self.space },
                instruction,
            ) {
                wedge_core::Outcome::Next => cpu.complete(next),
                wedge_core::Outcome::Jump => {
                    if instruction.op == wedge_core::Op::Iret {
                        self.prefault();
                        self.space.mmu().show_refused(&self.cpu);
                        if self.has_peers && self.cpu.cpl == 0 {
                            // Linux relies on IRET to execute code written by another CPU.
                            serialize();
                        }
                    }
                    return StopAction::Resume;
                }
                wedge_core::Outcome::Raise(event) => {
                    self.event = event;
                    return StopAction::Resume;
                }
                wedge_core::Outcome::Exit(exit) => {
                    self.next = next;
                    self.length = instruction.length.min(bytes.len());
                    self.bytes = [0; 16];
                    self.bytes[..self.length].copy_from_slice(&bytes[..self.length]);
                    return StopAction::Exit(match exit {
                        Exit::Io(io) => Exit::Io(vmm_cpu::IoExit { next_rip: next, ..io }),
                        other => other,
                    });
                }
            }
            bytes = &bytes[instruction.length.min(bytes.len())..];
        }
        StopAction::Resume
    }

    /// Maps the page of the last page fault when the kernel returns from its handler, because it is
    /// accessed next.
    fn prefault(&mut self) {
        if let Some((linear, intent)) = self.faulted.take()
            && self.cpu.cr2 == linear
            && !has(option::NO_BATCHES)
        {
            // On failure the access faults again.
            let _ = self.space.mmu().fill(&self.cpu, linear, intent);
        }
    }

    fn signal(&mut self) -> StopAction {
        let signal = vcpu().signal.get();
        let cpu = &mut *self.cpu;
        match signal.number {
            linux::SIGSYS if signal.vector == u64::from(signals::INT_80) => {
                const INT_80: [u8; 2] = [0xcd, signals::INT_80];
                count(counter::CALLS);
                let mut bytes = [0; INT_80.len()];
                let at = cpu.frame.rip.wrapping_sub(INT_80.len() as u64);
                if cpu.read(&self.memory, at, &mut bytes).is_err() || bytes != INT_80 {
                    // `SYSENTER`, or `SYSCALL` in 32-bit code: CPUID reports neither.
                    self.event = Event::exception(vector::UNDEFINED);
                    return StopAction::Resume;
                }
                match cpu.deliver_software(&self.memory, signals::INT_80, INT_80.len() as u64) {
                    Ok(()) => StopAction::Resume,
                    Err(exit) => StopAction::Exit(exit),
                }
            }
            linux::SIGSYS => {
                count(counter::CALLS);
                if self.rewrites_calls {
                    self.space.mmu().on_syscall_trap(cpu, wedge_x86::call_entry());
                }
                cpu.system_call();
                StopAction::Resume
            }
            linux::SIGSEGV if signal.vector == u64::from(vector::PAGE_FAULT) => {
                self.page_fault(signal.address, signal.code)
            }
            linux::SIGSEGV if signal.vector == u64::from(vector::PROTECTION) => {
                let fault = Event::exception_code(vector::PROTECTION, signal.code as u32);
                self.emulate_or_fault(fault)
            }
            linux::SIGILL => self.emulate_or_fault(Event::exception(vector::UNDEFINED)),
            linux::SIGTRAP if signal.vector == u64::from(vector::BREAKPOINT) => {
                if self.debugs && cpu.cpl == 0 {
                    match debug::trap(cpu, &self.memory) {
                        debug::Trap::Debugger => {
                            self.halt_for_debugger(reason::BREAKPOINT);
                            return StopAction::Resume;
                        }
                        debug::Trap::Removed => return StopAction::Resume,
                        debug::Trap::Guest => {}
                    }
                }
                match cpu.deliver_software(&self.memory, vector::BREAKPOINT, 1) {
                    Ok(()) => StopAction::Resume,
                    Err(exit) => StopAction::Exit(exit),
                }
            }
            linux::SIGSEGV | linux::SIGBUS | linux::SIGFPE | linux::SIGTRAP => {
                let exception = signal.vector as u8;
                if exception == vector::DEBUG && self.profiles && profile::is_stepping() {
                    profile::stepped(cpu, &self.memory);
                    return StopAction::Resume;
                }
                if exception == vector::DEBUG && self.step != DebugStep::None {
                    // A jump to itself is a complete step, too.
                    self.step = DebugStep::Done;
                    return StopAction::Resume;
                }
                if exception == vector::DEBUG
                    && cpu.cpl == 3
                    && self.space.mmu().is_on_way(cpu.frame.rip)
                {
                    // Inside of a rewritten system call: the step ends after it.
                    return StopAction::Resume;
                }
                if exception == vector::DEBUG {
                    // Single step: the breakpoint registers are the host's.
                    cpu.dr[6] |= 1 << 14;
                }
                self.event = match exception {
                    8 | 10..=14 | 17 => Event::exception_code(exception, signal.code as u32),
                    _ => Event::exception(exception),
                };
                StopAction::Resume
            }
            // Timer and device process have posted their events.
            _ => {
                if cpu.cpl == 3 {
                    // The rewritten page may be replaced before user mode resumes.
                    self.space.mmu().step_back(cpu);
                }
                StopAction::Resume
            }
        }
    }

    /// Emulates a call of Linux's vsyscall page on a host without that page: the system call, then
    /// a return. On hosts with that page, its calls reach the seccomp filter with the same result.
    fn emulate_vsyscall(&mut self, linear: u64) -> Option<()> {
        let cpu = &mut *self.cpu;
        let offset = linear.checked_sub(layout::VSYSCALL)?;
        let number = layout::VSYSCALL_CALLS.get(usize::try_from(offset / 0x400).ok()?)?;
        let stack = cpu.frame.gpr[4];
        let is_whole = offset % 0x400 == 0 && stack % PAGE <= PAGE - 8;
        let paging = cpu.paging(stack, true);
        let found = is_whole.then(|| paging.translate(&self.memory, stack, Intent::Read, true));
        let back = self.memory.read::<u64>(found?.ok()?.0).ok()?;
        count(counter::CALLS);
        cpu.frame.gpr[0] = u64::from(*number);
        cpu.frame.gpr[4] = stack.wrapping_add(8);
        cpu.frame.rip = back;
        cpu.system_call();
        Some(())
    }

    fn page_fault(&mut self, linear: u64, code: u64) -> StopAction {
        let intent = if code & FETCH != 0 {
            Intent::Fetch
        } else if code & WRITE != 0 {
            Intent::Write
        } else {
            Intent::Read
        };
        if self.profiles && intent == Intent::Write {
            let (sites, memory) = (self.sites, &self.memory);
            let annotated =
                |cpu: &VirtualCpu| sites.lock().is_page_table_store(cpu, memory, cpu.frame.rip);
            if profile::write_fault(&mut self.cpu, memory, linear, annotated) {
                return StopAction::Resume;
            }
        }
        if intent == Intent::Fetch && self.cpu.cpl == 3 && self.emulate_vsyscall(linear).is_some() {
            return StopAction::Resume;
        }
        let cpu = &mut *self.cpu;
        if intent == Intent::Fetch && cpu.cpl == 0 && self.space.mmu().fill_image(cpu, linear) {
            return StopAction::Resume;
        }
        if intent == Intent::Write && cpu.cpl == 0 && self.space.mmu().write_by_kernel(linear) {
            return StopAction::Resume;
        }
        if !is_filled_in(linear) {
            // Not mapped, or a violation of the rights in the image or the direct map, which have
            // all rights.
            count(counter::FAULTS);
            let user = if cpu.cpl == 3 { 4 } else { 0 };
            cpu.cr2 = linear;
            self.event =
                Event::exception_code(vector::PAGE_FAULT, (code & (WRITE | FETCH)) as u32 | user);
            return StopAction::Resume;
        }
        match self.space.mmu().fill(cpu, linear, intent) {
            Fault::Filled => StopAction::Resume,
            Fault::Guest(fault) => {
                count(counter::FAULTS);
                self.faulted = Some((linear, intent));
                self.event = cpu.page_fault(fault);
                StopAction::Resume
            }
            Fault::Device(gpa) => {
                if self.profiles {
                    profile::count(cpu.frame.rip, profile::Watched::Device, || false);
                }
                self.copy_kernel_root();
                // The emulator fetches the instruction itself.
                self.next = 0;
                self.length = 0;
                let (write, fetch) = (intent == Intent::Write, intent == Intent::Fetch);
                StopAction::Exit(Exit::MemoryFault(MemoryFault { gpa, write, fetch, walk: false }))
            }
            Fault::Sequence if self.space.mmu().open_steps(cpu) => StopAction::Resume,
            Fault::OwnCode if self.space.mmu().open_writing_step(cpu, linear) => StopAction::Resume,
            Fault::Sequence | Fault::OwnCode => {
                self.emulate_or_fault(Event::exception(vector::UNDEFINED))
            }
            Fault::Full(error) => {
                report::warn(format_args!("cannot map guest memory: {error}"));
                StopAction::Exit(Exit::HostError(error.0 as u64))
            }
        }
    }

    /// Copies the kernel's upper root entries to the root that the VMM walks: only the current
    /// tables contain them.
    fn copy_kernel_root(&self) {
        const ENTRY: u64 = 1 << 39;
        let cpu = &*self.cpu;
        let current = cpu.cr3 & entry::ADDRESS;
        for at in (layout::DIRECT / ENTRY..layout::GUEST_END / ENTRY).map(|index| index * 8) {
            // Tables outside of memory have no entries.
            let value = self.memory.read::<u64>(current + at).unwrap_or(0);
            let _ = self.memory.write(cpu.shared.root + at, value);
        }
    }

    /// Emulates an instruction in stepped pages that the CPU must not execute: a sequence is
    /// undefined or emulated, and so is an instruction after which the CPU could execute another
    /// one before the trap.
    fn step_instead(&mut self) -> StopAction {
        let (rip, traps) = (self.cpu.frame.rip, self.cpu.frame.rflags & rflags::TF != 0);
        let step = self.emulate_or_fault(Event::exception(vector::UNDEFINED));
        let cpu = &mut *self.cpu;
        if traps
            && cpu.frame.rip != rip
            && !self.event.is_some()
            && matches!(step, StopAction::Resume)
        {
            // User mode single-steps itself.
            cpu.dr[6] |= 1 << 14;
            self.event = Event::exception(vector::DEBUG);
        }
        step
    }

    /// Emulates an instruction in stepped pages that pops flags, if user mode may read the stack.
    fn pop_flags(&mut self, instruction: Instruction, bytes: &[u8]) -> StopAction {
        /// Length of the frame that `IRETQ` pops in bytes.
        const MOST: u64 = 40;
        let cpu = &mut *self.cpu;
        let length = match instruction.op {
            wedge_core::Op::Iret => MOST,
            _ => instruction.size.into(),
        };
        for at in [cpu.frame.gpr[4], cpu.frame.gpr[4].wrapping_add(length - 1)] {
            let found = cpu.paging(at, true).translate(&self.memory, at, Intent::Read, true);
            if let Err(fault) = found {
                self.faulted = Some((at, Intent::Read));
                self.event = cpu.page_fault(fault);
                return StopAction::Resume;
            }
        }
        let resume = cpu.frame.rip.wrapping_add(instruction.length as u64);
        self.execute_all(&[instruction], &bytes[..instruction.length], resume)
    }

    /// Handles `#GP` or `#UD` of the host: emulates a privileged instruction without a patch site
    /// (in an alternative's text), or injects `fault`.
    fn emulate_or_fault(&mut self, fault: Event) -> StopAction {
        let cpu = &mut *self.cpu;
        let mut bytes = [0; LONGEST];
        let read = (1..=LONGEST)
            .rev()
            .find(|&length| cpu.read(&self.memory, cpu.frame.rip, &mut bytes[..length]).is_ok());
        if !cpu.is_64_bit() {
            return self.emulate_or_fault_32(&bytes[..read.unwrap_or(0)], fault);
        }
        if cpu.cpl == 3
            && bytes.starts_with(&SYSCALL)
            && self.space.mmu().space.calls.is_rewritten(cpu.frame.rip)
        {
            // Second part of a rewritten system call: guest memory has the original instruction.
            cpu.frame.rip += SYSCALL.len() as u64;
            cpu.system_call();
            return StopAction::Resume;
        }
        let decoded = wedge_core::decode(&bytes[..read.unwrap_or(0)]);
        match decoded {
            Ok(Instruction { op: wedge_core::Op::Xrstor { area, marked }, length, .. })
                if pkeys::is_enabled() && (cpu.cpl == 0 || !marked) =>
            {
                let linear = cpu.address(&mut HostEffects { space: &mut self.space }, area, length);
                let mask = self.xcr0;
                match xstate::emulate_xrstor(cpu, &self.memory, linear, mask) {
                    Ok(()) => cpu.complete(cpu.frame.rip + length as u64),
                    Err(xstate::XrstorError::Fault(fault)) => self.event = cpu.page_fault(fault),
                    Err(xstate::XrstorError::Protection) => {
                        self.event = Event::exception_code(vector::PROTECTION, 0);
                    }
                }
                StopAction::Resume
            }
            Ok(instruction) if is_for_steps(cpu, &mut self.space, &instruction) => {
                self.pop_flags(instruction, &bytes)
            }
            Ok(instruction) if cpu.cpl == 0 || is_user_emulated(&instruction) => {
                count(counter::UNRECORDED);
                let resume = cpu.frame.rip.wrapping_add(instruction.length as u64);
                self.execute_all(&[instruction], &bytes[..instruction.length], resume)
            }
            _ => {
                self.event = fault;
                StopAction::Resume
            }
        }
    }
}

impl LinuxVcpu<'_> {
    /// Variant of [`Self::emulate_or_fault`] for 32-bit user code: `INT n` and port accesses have
    /// the same encoding as in 64-bit code.
    fn emulate_or_fault_32(&mut self, bytes: &[u8], fault: Event) -> StopAction {
        /// Prefixes in 64-bit code only.
        const REX: core::ops::RangeInclusive<u8> = 0x40..=0x4f;
        let is_rex = |byte: &u8| REX.contains(byte);
        match wedge_core::decode(bytes) {
            // In 32-bit code it pops four bytes.
            Ok(instruction)
                if instruction.op == wedge_core::Op::Popf
                    && is_stepped(&self.cpu, &mut self.space)
                    && !bytes[..instruction.length].iter().any(is_rex) =>
            {
                let size = instruction.size.min(4);
                self.pop_flags(Instruction { size, ..instruction }, bytes)
            }
            Ok(instruction)
                if is_user_emulated(&instruction)
                    && !bytes[..instruction.length].iter().any(is_rex) =>
            {
                count(counter::UNRECORDED);
                let resume = self.cpu.frame.rip.wrapping_add(instruction.length as u64);
                self.execute_all(&[instruction], &bytes[..instruction.length], resume)
            }
            _ => {
                self.event = fault;
                StopAction::Resume
            }
        }
    }
}

/// Executes a call of `__text_poke`: fills `bytes` from a linear address, or with the one byte
/// there, and writes them to `to`. Returns the call's return address.
///
/// # Errors
/// A page fault at the source or the stack, or `#UD` if `to` is not mapped, like Linux's `BUG_ON`.
/// Nothing was written.
fn poke(
    cpu: &mut VirtualCpu,
    memory: &GuestMemory,
    to: u64,
    from: u64,
    is_copy: bool,
    bytes: &mut [u8],
) -> Result<u64, Event> {
    // `text_poke_memset` repeats the first byte.
    let given = if is_copy { bytes.len() } else { bytes.len().min(1) };
    let mut at = from;
    for part in bytes[..given].chunks_mut(PAGE as usize) {
        if let Err(fault) = cpu.read(memory, at, part) {
            return Err(cpu.page_fault(fault));
        }
        at = at.wrapping_add(part.len() as u64);
    }
    if !is_copy {
        bytes.fill(bytes.first().copied().unwrap_or(0));
    }
    let mut back = [0; 8];
    if let Err(fault) = cpu.read(memory, cpu.frame.gpr[4], &mut back) {
        return Err(cpu.page_fault(fault));
    }
    if pkeys::is_enabled() {
        close_poke(cpu, memory, to, bytes);
    }
    match write_code(cpu, memory, to, bytes) {
        Some(()) => Ok(u64::from_le_bytes(back)),
        None => Err(Event::exception(vector::UNDEFINED)),
    }
}

/// Returns whether user mode is in stepped pages.
fn is_stepped(cpu: &VirtualCpu, space: &mut GuestSpace) -> bool {
    cpu.cpl == 3 && pkeys::is_enabled() && space.mmu().is_stepped(cpu.frame.rip)
}

/// Returns whether the wedge emulates a valid instruction in stepped pages: it changes the trap
/// flag.
fn is_for_steps(cpu: &VirtualCpu, space: &mut GuestSpace, instruction: &Instruction) -> bool {
    use wedge_core::Op;
    matches!(instruction.op, Op::Popf | Op::Iret) && is_stepped(cpu, space)
}

/// Returns whether the guest kernel may permit an instruction to user mode that the host does not
/// permit.
fn is_user_emulated(instruction: &Instruction) -> bool {
    use wedge_core::Op;
    matches!(instruction.op, Op::Int(_) | Op::In(_) | Op::Out(_) | Op::Ins | Op::Outs)
}

impl Vcpu for LinuxVcpu<'_> {
    fn gpr(&mut self, register: Gpr) -> u64 {
        self.cpu.frame.gpr[register as usize]
    }

    fn set_gpr(&mut self, register: Gpr, value: u64) {
        self.cpu.frame.gpr[register as usize] = value;
    }

    fn get(&mut self, register: Reg) -> u64 {
        let cpu = &mut *self.cpu;
        match register {
            Reg::Rip => cpu.frame.rip,
            Reg::Rflags => cpu.rflags(),
            Reg::InterruptShadow | Reg::TscOffset => 0,
            Reg::Cr0 => cpu.cr0,
            Reg::Cr2 => cpu.cr2,
            // The VMM walks kernel addresses only.
            Reg::Cr3 if cpu.cpl == 0 => cpu.shared.root,
            Reg::Cr3 => cpu.cr3,
            Reg::Cr4 => cpu.cr4,
            Reg::Efer => cpu.efer,
            Reg::Cpl => cpu.cpl.into(),
            Reg::Star => cpu.star,
            Reg::Lstar => cpu.lstar,
            Reg::Cstar => cpu.cstar,
            Reg::Sfmask => cpu.sfmask,
            Reg::KernelGsBase => cpu.kernel_gs_base,
            Reg::SysenterCs => cpu.sysenter[0],
            Reg::SysenterEsp => cpu.sysenter[1],
            Reg::SysenterEip => cpu.sysenter[2],
            Reg::Pat => cpu.pat,
            Reg::Dr6 => cpu.dr[6],
            Reg::Dr7 => cpu.dr[7],
            Reg::Xcr0 => self.xcr0,
        }
    }

    fn set(&mut self, register: Reg, value: u64) {
        let cpu = &mut *self.cpu;
        match register {
            Reg::Rip => cpu.frame.rip = value,
            Reg::Rflags => cpu.set_rflags(value),
            // The TSC has no offset, and there is no interrupt shadow.
            Reg::InterruptShadow | Reg::TscOffset => {}
            Reg::Cr0 => cpu.cr0 = value,
            Reg::Cr2 => cpu.cr2 = value,
            Reg::Cr3 => {
                cpu.cr3 = value;
                slot().root.store(value, Relaxed);
            }
            Reg::Cr4 => cpu.cr4 = value,
            Reg::Efer => cpu.efer = value,
            Reg::Cpl => cpu.cpl = value as u8 & 3,
            Reg::Star => cpu.star = value,
            Reg::Lstar => cpu.lstar = value,
            Reg::Cstar => cpu.cstar = value,
            Reg::Sfmask => cpu.sfmask = value,
            Reg::KernelGsBase => cpu.kernel_gs_base = value,
            Reg::SysenterCs => cpu.sysenter[0] = value,
            Reg::SysenterEsp => cpu.sysenter[1] = value,
            Reg::SysenterEip => cpu.sysenter[2] = value,
            Reg::Pat => cpu.pat = value,
            Reg::Dr6 => cpu.dr[6] = value,
            Reg::Dr7 => cpu.dr[7] = value,
            Reg::Xcr0 => self.xcr0 = value,
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

    fn set_deadline(&mut self, tsc: u64) {
        self.deadline = tsc;
        vcpu().deadline.store(tsc, Relaxed);
        timer::arm_timer();
    }

    fn stolen(&mut self) -> u64 {
        steal_time::stolen_ticks()
    }

    fn set_hlt_exits(&mut self, _: bool) {
        // Every HLT exits.
    }

    fn flush_tlb(&mut self) {
        HostEffects { space: &mut self.space }.flush(Flush::All);
    }

    fn run(&mut self) -> Exit {
        self.next = 0;
        self.length = 0;
        if self.cpu.cr0 & cr0::PE == 0 {
            self.start_secondary();
        }
        if self.profiles {
            profile::watch_descriptors(&self.cpu, &self.memory, slot());
        }
        loop {
            if self.profiles && profile::is_stepping() {
                // Deliver nothing during the step: one instruction, or its own fault.
                let held = events().swap(0, SeqCst);
                let step = self.step();
                events().fetch_or(held, SeqCst);
                if profile::is_stepping() {
                    profile::stepped(&mut self.cpu, &self.memory);
                }
                match step {
                    StopAction::Resume => continue,
                    StopAction::Exit(exit) => return exit,
                }
            }
            if self.step == DebugStep::Done {
                if self.event.is_some() {
                    // The step ends at the guest's handler.
                    let event = core::mem::take(&mut self.event);
                    if let Err(exit) = self.cpu.deliver(&self.memory, event) {
                        return exit;
                    }
                }
                self.halt_for_debugger(reason::STEP);
            }
            let steps = self.step == DebugStep::Wanted;
            let pending = if steps { 0 } else { events().load(SeqCst) };
            if pending != 0 {
                events().fetch_and(!pending, SeqCst);
                let others = pending & !event::TIMER;
                if pending & event::TIMER != 0 {
                    // The timer must be set again in any case.
                    process().armed.store(u64::MAX, Relaxed);
                    if tsc() < self.deadline {
                        timer::arm_timer();
                    } else if others == 0 {
                        cpu_affinity::on_timer_tick();
                        return Exit::Deadline;
                    } else {
                        events().fetch_or(event::TIMER, SeqCst);
                    }
                }
                if others != 0 {
                    return Exit::Recall { events: others.into() };
                }
            }
            if self.event.is_some() {
                let event = core::mem::take(&mut self.event);
                if let Err(exit) = self.cpu.deliver(&self.memory, event) {
                    return exit;
                }
            }
            if self.cpu.held_flags & rflags::IF != 0 && !steps {
                match self.window {
                    InterruptWindow::Nothing => {}
                    InterruptWindow::Exit => {
                        self.window = InterruptWindow::Nothing;
                        return Exit::InterruptWindow;
                    }
                    InterruptWindow::DeliverVirq(number) => {
                        self.window = InterruptWindow::Nothing;
                        if let Err(exit) = self.cpu.deliver(&self.memory, Event::interrupt(number))
                        {
                            return exit;
                        }
                    }
                }
            }
            self.cpu.set_attention(self.window != InterruptWindow::Nothing);
            if self.cpu.star != self.star {
                self.star = self.cpu.star;
                self.cpu.update_call_segments();
            }
            self.cpu.prepare_entry();
            let cpu = &mut *self.cpu;
            if cpu.cpl == 3 && pkeys::is_enabled() && !shared().closed.load(Relaxed) {
                // The kernel has finished patching its code before it first enters user mode.
                close_kernel(cpu, &self.memory, self.start.code, self.start.code_end);
                shared().closed.store(true, Relaxed);
            }
            if compat::has_selectors(cpu) {
                compat::load_segments(cpu, &self.memory);
            }
            self.space.mmu().sync_before_entry();
            let step = if steps { self.debug_step() } else { self.step() };
            if let StopAction::Exit(exit) = step {
                return exit;
            }
        }
    }
}

/// Returns the guest's CPUID values: the host's, without features that the wedge does not support,
/// with PCID, which it implements.
fn guest_cpuid(function: u32, subleaf: u32) -> [u32; 4] {
    let values = __cpuid_count(function, subleaf);
    let [a, mut b, mut c, mut d] = [values.eax, values.ebx, values.ecx, values.edx];
    match function {
        leaf::FEATURES => c |= features_c::PCID,
        leaf::EXTENDED_FEATURES if subleaf == 0 => {
            b &= !(extended_b::SMEP | extended_b::SMAP);
            b |= extended_b::INVPCID | extended_b::FSGSBASE;
            c &= !(extended_c::UMIP | extended_c::PKU | extended_c::RDPID);
        }
        // XSAVES.
        leaf::XSAVE if subleaf == 1 => return [a & !(1 << 3), b, c, d],
        // RDTSCP would read the host's `TSC_AUX`.
        leaf::AMD_FEATURES => d &= !(1 << 27),
        _ => {}
    }
    [a, b, c, d]
}

/// Creates the VM on the stack of its first vCPU, and runs that vCPU.
pub extern "sysv64" fn main() -> ! {
    let Some(start) = start() else {
        report::fatal(format_args!("the loader's record has another version"));
    };
    let ram = Ram::new(&start);
    let Some(memory) = ram.memory() else {
        report::fatal(format_args!("invalid size of guest memory: {} bytes", start.memory));
    };
    // SAFETY: this process runs the vCPU, in its event loop, which begins here.
    let mut cpu = unsafe { CurrentVcpu::take() };
    power_on(&mut cpu, &start);
    let mut sites = Sites::new(start.options);
    if let Err(problem) = sites.rewrite_table(&cpu, &memory, start.sites, start.sites_length) {
        report::warn(format_args!("cannot rewrite the kernel's patch sites: {problem}"));
        doorbell::end_vm(65);
    }
    if start.options & option::NO_FUNCTIONS == 0
        && start.text_poke != 0
        && let Err(problem) = sites.replace_function(&cpu, &memory, start.text_poke)
    {
        report::warn(format_args!("cannot replace `__text_poke`: {problem}"));
        if pkeys::is_enabled() {
            // The kernel could change its code without a scan.
            doorbell::end_vm(65);
        }
    }
    let config = PcConfig {
        vcpus: start.vcpus as u8,
        clock: TscClock::new(config().tsc_khz, 0),
        xcr0_mask: start.xcr0,
        start_unix: config().unix_at_zero,
        kvmclock: true,
        steal_time: true,
        // An idle vCPU would drop all its address spaces, that is, their mappings.
        pv_flush: false,
        // Linux patches `VMMCALL` over a site. It does not fault in user mode of a virtualized
        // host.
        pv_ipi: false,
        id: 1,
    };
    let mut slots = Slots::new();
    let device_slots = backend::add_devices(&mut slots, &start);
    // The devices access no other memory.
    let of_devices = memory.observed(write_by_device);
    let machine = Machine::with_functions(config, &of_devices, guest_cpuid, slots);
    let sites = SpinMutex::new(sites);
    let (memory, machine, sites) = (&memory, &machine, &sites);
    let all = VmShared { start: &start, ram, memory, machine, device_slots: &device_slots, sites };
    shared().machine.store(&raw const all as u64, SeqCst);
    for index in 1..vcpus().len() {
        processes::start_vcpu(index, secondary_main);
    }
    // SAFETY: as above.
    drive(&all, 0, cpu, unsafe { CurrentProcess::take() })
}

/// Entry point of a secondary vCPU.
extern "sysv64" fn secondary_main() -> ! {
    let all = shared().machine.load(SeqCst) as *const VmShared<'static>;
    // SAFETY: `main` has created it in memory shared by all guest processes, and never returns.
    let all = unsafe { &*all };
    // It has no state before its start-up IPI.
    // SAFETY: this process runs the vCPU, in its event loop, which begins here.
    let mut cpu = unsafe { CurrentVcpu::take() };
    *cpu = VirtualCpu::new();
    // SAFETY: as above.
    let process = unsafe { CurrentProcess::take() };
    drive(all, own_index(), cpu, process)
}

/// Runs a vCPU until the VM ends.
fn drive(all: &VmShared<'_>, index: usize, cpu: CurrentVcpu, process: CurrentProcess) -> ! {
    let VmShared { start, ram, memory, machine, device_slots, sites } = *all;
    let mut host = LinuxHost::new(start);
    let mut state = machine.cpu(index);
    let mut vcpu = LinuxVcpu {
        cpu,
        space: GuestSpace::new(process, start, ram, *memory),
        start,
        ram,
        memory: *memory,
        sites,
        has_peers: start.vcpus > 1,
        event: Event::NONE,
        window: InterruptWindow::Nothing,
        deadline: u64::MAX,
        next: 0,
        bytes: [0; 16],
        length: 0,
        xcr0: 1,
        profiles: profile::is_on(),
        faulted: None,
        rewrites_calls: start.options & option::NO_CALL_SITES == 0,
        star: 0,
        debugs: start.options & option::DEBUG != 0,
        step: DebugStep::None,
    };
    crate::state::shared::vcpu().deadline.store(u64::MAX, Relaxed);
    steal_time::on_resume();
    if index == 0 {
        doorbell::await_start();
        if vcpu.debugs && debug::shared().is_wanted() {
            vcpu.halt_for_debugger(reason::WANTED);
        }
    }
    loop {
        let events = match machine.run(&mut state, &mut vcpu, &mut host) {
            StopReason::Recall(events) => events as u32,
            StopReason::Idle { deadline_tsc } => idle::wait(deadline_tsc),
            StopReason::End(outcome) => {
                if outcome == Outcome::TripleFault {
                    report_triple_fault(&vcpu.cpu);
                }
                doorbell::end_vm(outcome.exit_code());
            }
        };
        vcpu.space.mmu().sync_before_entry();
        if events & event::STOP != 0 {
            doorbell::end_vm(Outcome::PowerOff.exit_code());
        }
        if events & event::POWER_BUTTON != 0 {
            machine.press_power_button(&mut host);
        }
        if events & event::DEBUG != 0 && vcpu.debugs && debug::shared().is_wanted() {
            vcpu.halt_for_debugger(reason::WANTED);
        }
        if events & event::CONSOLE != 0 {
            machine.input(Some(&state), &mut host);
        }
        let slots_of =
            |bit, slots: &Range<usize>| if events & bit != 0 { slots.clone() } else { 0..0 };
        for slot in slots_of(event::DISK, &device_slots.disks)
            .chain(slots_of(event::SHARE, &device_slots.shares))
            .chain(slots_of(event::NET, &device_slots.nets))
            .chain(slots_of(event::BALLOON, &device_slots.balloon))
            .chain(slots_of(event::CONSOLE, &device_slots.console))
        {
            machine.function_input(slot, Some(&state), &mut host);
        }
    }
}

/// Sets the initial state of the first vCPU from the loader's record.
fn power_on(cpu: &mut VirtualCpu, start: &Start) {
    *cpu = VirtualCpu::new();
    cpu.frame.rip = start.rip;
    cpu.frame.gpr[4] = start.rsp;
    cpu.frame.gpr[7] = start.rdi;
    cpu.cr3 = start.cr3;
    slot().root.store(start.cr3, Relaxed);
    cpu.gdtr = wedge_core::DescriptorTable { base: start.gdt, limit: start.gdt_limit as u16 };
    cpu.segments[1].selector = start.cs as u16;
    set_shared_range(cpu, start);
    compat::set_bases(0, start.gs_base);
}

/// Sets the range that every address space shares: the kernel image and its modules.
fn set_shared_range(cpu: &mut VirtualCpu, start: &Start) {
    cpu.shared = wedge_core::cpu::SharedRange {
        start: layout::IMAGE,
        end: layout::LOW_END,
        root: start.kernel_root,
    };
}

/// Prints the vCPU's state after a triple fault.
#[cold]
fn report_triple_fault(cpu: &VirtualCpu) {
    report::warn(format_args!(
        "guest triple fault: rip {:#x} rsp {:#x} rflags {:#x} cr2 {:#x} cr3 {:#x} cpl {}",
        cpu.frame.rip,
        cpu.frame.gpr[4],
        cpu.rflags(),
        cpu.cr2,
        cpu.cr3,
        cpu.cpl
    ));
}
