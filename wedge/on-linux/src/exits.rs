//! Stops of the guest, and the emulation of the CPU's own reaction to them.

use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use hw_walk::Intent;
use hw_x86::paging::{cr4, entry, fault};
use linux_raw_sys::general as linux;
use proto::hosted::debug::reason;
use proto::hosted::{counter, layout, option};
use vmm_mem::GuestMemory;
use vmm_vcpu::MemoryFault;
use vmm_x86::walk::GuestTables;
use vmm_x86::{Event, Exit};
use wedge_core::cpu::rflags;
use wedge_core::{Flush, Host, Instruction, VirtualCpu, vector};
use wedge_x86::{Cause, Stub, decode_all};

use crate::clock::serialize;
use crate::effects::HostEffects;
use crate::guest_space::GuestSpace;
use crate::isolation;
use crate::isolation::contract::Stop;
use crate::linux::signals;
use crate::mmu::fill::Fault;
use crate::mmu::kernel_code::{MOST_POKED, close_poke, write_code};
use crate::mmu::ram::{PAGE, is_filled_in};
use crate::mmu::steps::Begin;
use crate::mmu::syscall_patch::{SYSCALL, is_stub};
use crate::sites::{FUNCTION, Sites};
use crate::state::config::has;
use crate::state::process::slot;
use crate::state::shared::{events, shared, vcpu};
use crate::state::statistics::{count, own_statistics};
use crate::vcpu::{DebugStep, LinuxVcpu, StopAction, set_shared_range};
use crate::{compat, debug, profile, report, xstate};

/// Longest instruction in bytes.
const LONGEST: usize = 15;

impl LinuxVcpu<'_> {
    /// Runs the guest until it stops, and emulates the CPU's own reaction.
    pub fn step(&mut self) -> StopAction {
        let begin = self.space.begin_step(&mut self.cpu);
        if begin == Begin::Instead {
            return self.step_instead();
        }
        let cause = self.enter();
        let selectors = match self.cpu.cpl {
            3 => self.isolation.selectors(self.space.user_process()),
            // User mode may have loaded selectors before a rewritten system call.
            _ => compat::selectors(),
        };
        compat::save_selectors(&mut self.cpu, selectors);
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
        self.isolation.before_entry();
        let is_user = self.cpu.cpl == 3;
        let stopped = match is_user {
            true => self.isolation.run_user(self.space.user_process(), &mut self.cpu),
            false => None,
        };
        match stopped {
            None => {}
            Some(Stop::Events) => return Cause::Events,
            Some(Stop::Signal) => return Cause::Signal,
            Some(Stop::Unmapped) => {
                self.space.mmu().drop_user_pages();
                return Cause::Events;
            }
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
    pub fn halt_for_debugger(&mut self, why: u32) {
        let step = debug::halt(&mut self.cpu, why);
        self.step = if step { DebugStep::Wanted } else { DebugStep::None };
    }

    /// Executes one guest instruction for the debugger. Nothing is delivered before it except for
    /// its own exceptions.
    pub fn debug_step(&mut self) -> StopAction {
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
    pub fn start_secondary(&mut self) {
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
                wedge_core::Outcome::Next => {
                    cpu.complete(next);
                    if matches!(instruction.op, wedge_core::Op::Lldt(_)) {
                        // The guest kernel announces changed TLS descriptors.
                        self.descriptor_changes += 1;
                    }
                }
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
                        Exit::Io(io) => Exit::Io(vmm_x86::IoExit { next_rip: next, ..io }),
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
        if cpu.cpl == 3 && !matches!(signal.number, linux::SIGSYS | linux::SIGTRAP) {
            self.space.mmu().step_back(cpu);
        }
        match signal.number {
            linux::SIGSYS if signal.vector == u64::from(signals::INT_80) => self.compat_call(),
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
            linux::SIGTRAP if signal.vector == u64::from(vector::BREAKPOINT) => self.breakpoint(),
            linux::SIGSEGV | linux::SIGBUS | linux::SIGFPE | linux::SIGTRAP => {
                if signal.vector == u64::from(vector::PAGE_FAULT) {
                    // The host has no memory for the page.
                    self.cpu.cr2 = signal.address;
                }
                self.exception(signal.vector as u8, signal.code as u32);
                StopAction::Resume
            }
            // Timer and device process have posted their events.
            _ => StopAction::Resume,
        }
    }

    /// Handles `INT 0x80` of user mode.
    fn compat_call(&mut self) -> StopAction {
        const INT_80: [u8; 2] = [0xcd, signals::INT_80];
        let cpu = &mut *self.cpu;
        count(counter::CALLS);
        let mut bytes = [0; INT_80.len()];
        let at = cpu.frame.rip.wrapping_sub(INT_80.len() as u64);
        if cpu.read(&self.memory, at, &mut bytes).is_err() || bytes != INT_80 {
            // `SYSENTER`, or `SYSCALL` in 32-bit code: CPUID reports neither.
            self.event = Event::exception(vector::UNDEFINED);
            return StopAction::Resume;
        }
        self.software_interrupt(signals::INT_80, INT_80.len() as u64)
    }

    fn software_interrupt(&mut self, number: u8, length: u64) -> StopAction {
        match self.cpu.deliver_software(&self.memory, number, length) {
            Ok(()) => StopAction::Resume,
            Err(exit) => StopAction::Exit(exit),
        }
    }

    fn breakpoint(&mut self) -> StopAction {
        if self.debugs && self.cpu.cpl == 0 {
            match debug::trap(&mut self.cpu, &self.memory) {
                debug::Trap::Debugger => {
                    self.halt_for_debugger(reason::BREAKPOINT);
                    return StopAction::Resume;
                }
                debug::Trap::Removed => return StopAction::Resume,
                debug::Trap::Guest => {}
            }
        }
        self.software_interrupt(vector::BREAKPOINT, 1)
    }

    /// Reflects an exception to the guest, unless it ends a single step of the wedge.
    fn exception(&mut self, exception: u8, code: u32) {
        let cpu = &mut *self.cpu;
        if exception == vector::DEBUG {
            if cpu.cpl == 3 && is_stub(cpu.frame.rip) {
                // Inside of a rewritten system call: the step ends after it.
                return;
            }
            if self.profiles && profile::is_stepping() {
                return profile::stepped(cpu, &self.memory);
            }
            if self.step != DebugStep::None {
                // A jump to itself is a complete step, too.
                self.step = DebugStep::Done;
                return;
            }
            if cpu.cpl == 3 && self.space.mmu().is_on_way(cpu.frame.rip) {
                // Inside of a rewritten system call: the step ends after it.
                return;
            }
            cpu.dr[6] |= signals::debug_status(code.into());
        }
        self.event = match exception {
            8 | 10..=14 | 17 => Event::exception_code(exception, code),
            _ => Event::exception(exception),
        };
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
        let found = is_whole
            .then(|| paging.translate(&GuestTables(&self.memory), stack, Intent::Read, true));
        let back = self.memory.read::<u64>(found?.ok()?.address).ok()?;
        count(counter::CALLS);
        cpu.frame.gpr[0] = u64::from(*number);
        cpu.frame.gpr[4] = stack.wrapping_add(8);
        cpu.frame.rip = back;
        cpu.system_call();
        Some(())
    }

    fn page_fault(&mut self, linear: u64, code: u64) -> StopAction {
        let intent = if code & fault::FETCH != 0 {
            Intent::Fetch
        } else if code & fault::WRITE != 0 {
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
            self.event = Event::exception_code(
                vector::PAGE_FAULT,
                (code & (fault::WRITE | fault::FETCH)) as u32 | user,
            );
            return StopAction::Resume;
        }
        self.fill(linear, intent)
    }

    /// Maps the page of an access, or reports why not.
    fn fill(&mut self, linear: u64, intent: Intent) -> StopAction {
        let cpu = &mut *self.cpu;
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
            let found =
                cpu.paging(at, true).translate(&GuestTables(&self.memory), at, Intent::Read, true);
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
                if self.isolation.scans_code() && (cpu.cpl == 0 || !marked) =>
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
    if isolation::current().scans_code()
        && close_poke(cpu, memory, to, bytes)
        && !shared().has_changed_code.swap(true, Relaxed)
    {
        report::warn(format_args!(
            "the guest kernel has generated code with the bytes of WRPKRU or XRSTOR, at {to:#x}: \
             the wedge has changed them, and the code may do something else (docs/CAVEATS.md)"
        ));
    }
    match write_code(cpu, memory, to, bytes) {
        Some(()) => Ok(u64::from_le_bytes(back)),
        None => Err(Event::exception(vector::UNDEFINED)),
    }
}

/// Returns whether user mode is in stepped pages.
fn is_stepped(cpu: &VirtualCpu, space: &mut GuestSpace) -> bool {
    cpu.cpl == 3 && space.is_stepped(cpu.frame.rip)
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
