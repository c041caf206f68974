//! A virtual CPU: runs the guest until something has to be decided that is not the processor's.
//!
//! What several of them use ([`All`]) is on the stack of the first, which makes it and lets the others begin. They wait for their start-up message
//! like any application processor; Linux' code for processors in real mode is never carried out: what it comes to is done here.

use core::arch::x86_64::{__cpuid_count, _rdtsc};
use core::ops::Range;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use hw_x86::cpuid::{extended_b, extended_c, features_c, leaf};
use hw_x86::paging::{cr0, cr4, entry};
use linux_raw_sys::general as linux;
use proto::wedge::debug::reason;
use proto::wedge::{Start, layout, option};
use spin::mutex::SpinMutex;
use spin::relax::RelaxStrategy;
use vmm_cpu::vcpu::{InterruptWindow, Segment};
use vmm_cpu::walk::Intent;
use vmm_cpu::{Event, Exit, Gpr, MAX_VCPUS, MemoryFault, Reg, Seg, TscClock, Vcpu};
use vmm_machine::{Outcome, Pc, PcConfig, Slots, StopReason};
use vmm_mem::GuestMemory;
use wedge_core::cpu::rflags;
use wedge_core::{Flush, Host, Instruction, VirtualCpu, vector};
use wedge_x86::{CODE_32, CODE_64, Cause, Stub, decode_all};

use crate::config::{self, config};
use crate::memory::{self, Fault, Ram};
use crate::outside::{self, Link, LinuxHost, MAX_FUNCTIONS};
use crate::shared::{
    cell, count, event, events, has, mine, own_statistics, shared, start, vcpu, vcpus,
};
use crate::sites::{FUNCTION, MOST_POKED, Sites, write_code};
use crate::{
    apart, calls, code, compat, debug, extended, frames, idle, keys, place, processes, profile,
    report, signal, steal,
};

/// Error code of a page fault: the access was a write.
const WRITE: u64 = 1 << 1;
/// Error code of a page fault: it was an instruction fetch.
const FETCH: u64 = 1 << 4;
/// Longest instruction.
const LONGEST: usize = 15;

/// Time-stamp counter.
pub fn tsc() -> u64 {
    // SAFETY: programs may read it.
    unsafe { _rdtsc() }
}

/// Lets others run while it waits for a lock: who has it may wait for this host CPU.
pub struct Yielding;

impl RelaxStrategy for Yielding {
    fn relax() {
        /// Looks before the host is asked, some microseconds: a lock is held for less, unless its owner does not run.
        const LOOKS: u32 = 64;
        for _ in 0..LOOKS {
            core::hint::spin_loop();
        }
        crate::sys::yield_now();
    }
}

type Machine<'m> = Pc<'m, Yielding, MAX_VCPUS, Slots<Link, MAX_FUNCTIONS>>;

/// What all virtual CPUs use.
struct All<'m> {
    start: &'m Start,
    ram: Ram,
    memory: &'m GuestMemory,
    machine: &'m Machine<'m>,
    /// Which functions its devices are.
    filled: &'m outside::Filled,
    sites: &'m SpinMutex<Sites, Yielding>,
}

/// The virtual CPU as the VMM library drives it.
pub struct LinuxVcpu<'m> {
    start: &'m Start,
    ram: Ram,
    memory: GuestMemory,
    sites: &'m SpinMutex<Sites, Yielding>,
    /// There are others: they may change code that this one runs.
    has_peers: bool,
    /// What is delivered at the next entry.
    event: Event,
    window: InterruptWindow,
    deadline: u64,
    /// While an instruction is carried out elsewhere: where the guest goes on, and its bytes.
    next: u64,
    bytes: [u8; 16],
    length: usize,
    xcr0: u64,
    /// Writes to tables are counted.
    profiles: bool,
    /// The guest's last page fault.
    faulted: Option<(u64, Intent)>,
    /// System calls that come often are rewritten.
    rewrites_calls: bool,
    /// `STAR` as entry code knows it.
    star: u64,
    /// A debugger may stop it.
    debugs: bool,
    /// For the debugger, it carries out one instruction and stops.
    step: DebugStep,
}

/// Where a step for the debugger is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum DebugStep {
    /// There is none.
    None,
    /// The instruction is to be carried out.
    Wanted,
    /// It has been.
    Done,
}

/// The host's side of the virtual CPU's effects.
struct Effects;

impl Host for Effects {
    fn fs_base(&mut self) -> u64 {
        let base;
        // SAFETY: `main` has checked that programs may.
        unsafe { core::arch::asm!("rdfsbase {}", out(reg) base, options(nomem, nostack)) };
        base
    }

    fn set_fs_base(&mut self, base: u64) {
        // SAFETY: this program does not use FS. The caller has checked that the address is canonical.
        unsafe { core::arch::asm!("wrfsbase {}", in(reg) base, options(nomem, nostack)) };
    }

    fn gs_base(&mut self) -> u64 {
        let base;
        // SAFETY: as above.
        unsafe { core::arch::asm!("rdgsbase {}", out(reg) base, options(nomem, nostack)) };
        base
    }

    fn set_gs_base(&mut self, base: u64) {
        // SAFETY: this program does not use GS.
        unsafe { core::arch::asm!("wrgsbase {}", in(reg) base, options(nomem, nostack)) };
    }

    fn flush(&mut self, what: Flush) {
        match what {
            Flush::Page(linear) if memory::is_shared(linear) => memory::kernel_changed(linear),
            Flush::Page(linear) => memory::drop_page(linear),
            Flush::PageOf { pcid, linear } => self.flush_space(pcid, Some(linear)),
            Flush::Space(pcid) => self.flush_space(pcid, None),
            Flush::Spaces | Flush::All => {
                for slot in &vcpu().slots {
                    slot.stale.store(true, Relaxed);
                }
                if what == Flush::All {
                    memory::kernel_changed(crate::shared::EVERYTHING);
                }
                memory::follow();
            }
        }
    }

    fn enter_space(&mut self, cr3: u64, keep: bool) {
        let pcid = (cr3 & 0xfff) as u16;
        let number = config::slot_of(pcid);
        let slot = &vcpu().slots[number];
        let known = slot.pcid.swap(pcid.into(), Relaxed) == u32::from(pcid);
        let is_same = number == mine().slot.load(Relaxed) as usize
            && slot.root.load(Relaxed) & entry::ADDRESS == cr3 & entry::ADDRESS;
        if !keep || !known {
            slot.stale.store(true, Relaxed);
        }
        slot.root.store(cr3, Relaxed);
        processes::move_to(number);
        // A space that is loaded once more is the same one; Linux has not given its tables to another one meanwhile.
        if !(known && (keep || is_same)) {
            apart::renew();
        }
        memory::follow();
    }
}

impl Effects {
    /// Drops what a space has mapped of programs: a page, or all of it. A space that has not the virtual CPU drops everything, later.
    fn flush_space(&mut self, pcid: u16, linear: Option<u64>) {
        let number = config::slot_of(pcid);
        let slot = &vcpu().slots[number];
        if slot.pcid.load(Relaxed) != u32::from(pcid) {
            return;
        }
        match linear {
            Some(linear) if number == mine().slot.load(Relaxed) as usize => {
                memory::drop_page(linear);
            }
            _ => {
                slot.stale.store(true, Relaxed);
                memory::follow();
            }
        }
    }
}

/// The virtual CPU's state.
fn cpu() -> &'static mut VirtualCpu {
    // SAFETY: this process has the virtual CPU, and the guest does not run while the wedge does; each use ends before the next begins.
    unsafe { &mut (*cell()).cpu }
}

/// Makes the processor forget what it has fetched: code was written by another address than its own (APM vol. 2, 7.6.1).
pub fn serialize() {
    // SAFETY: `IRET` to the next instruction, with the stack, flags and segments of now.
    unsafe {
        core::arch::asm!(
            "mov {stack}, rsp",
            "mov {segment:e}, ss",
            "push {segment}",
            "push {stack}",
            "pushfq",
            "mov {segment:e}, cs",
            "push {segment}",
            "lea {segment}, [rip + 2f]",
            "push {segment}",
            "iretq",
            "2:",
            stack = out(reg) _,
            segment = out(reg) _,
        );
    }
}

/// What a stop of the guest leads to.
enum Step {
    /// The guest goes on.
    On,
    /// The machine decides.
    Exit(Exit),
}

impl LinuxVcpu<'_> {
    /// Runs the guest's code until it stops, and sees to what the processor itself does then.
    fn step(&mut self) -> Step {
        let steps = keys::are_on() && code::begin_step(cpu());
        let cause = processes::enter(&self.ram);
        if compat::concerns(cpu()) {
            compat::note(cpu());
        }
        if self.step != DebugStep::None {
            // No part of the guest's own flags, which an instruction may store.
            cpu().frame.rflags &= !rflags::TF;
        }
        if steps {
            let signal = vcpu().signal.get();
            let trapped = matches!(cause, Cause::Signal)
                && signal.number == linux::SIGTRAP
                && signal.vector == u64::from(vector::DEBUG);
            if code::end_step(cpu(), &self.memory, trapped) {
                return Step::On;
            }
        }
        match cause {
            Cause::Events => Step::On,
            Cause::Site(stub) => self.site(stub),
            Cause::Signal => self.signal(),
        }
    }

    /// Stops for the debugger.
    fn halt(&mut self, why: u32) {
        let step = debug::halt(cpu(), why);
        self.step = if step { DebugStep::Wanted } else { DebugStep::None };
    }

    /// Carries out one instruction of the guest for the debugger. Nothing comes between but what the instruction itself leads to.
    fn debug_step(&mut self) -> Step {
        let cpu = cpu();
        let held = events().swap(0, SeqCst);
        let rip = cpu.frame.rip;
        cpu.attention = 0;
        cpu.frame.rflags |= rflags::TF;
        let step = self.step();
        events().fetch_or(held, SeqCst);
        // It is carried out again once what it needs has been mapped.
        let is_on = cpu.frame.rip != rip || self.event.is_some() || matches!(step, Step::Exit(_));
        if self.step == DebugStep::Wanted && is_on {
            self.step = DebugStep::Done;
        }
        step
    }

    /// The virtual CPU has had its start-up message: it is in real mode, at Linux' trampoline. It goes on where that leads to: what
    /// `secondary_startup_64` does until it calls C code, with the tables that it loads.
    fn start_further(&mut self) {
        let cpu = cpu();
        let attention = cpu.attention;
        *cpu = VirtualCpu::new();
        cpu.attention = attention;
        share_kernel(cpu, self.start);
        cpu.segments[1].selector = self.start.cs as u16;
        cpu.cr4 |= cr4::PGE;
        cpu.cr3 = self.start.initial_cr3;
        memory::slot().root.store(cpu.cr3, Relaxed);
        let word = |at: u64| {
            let mut bytes = [0; 8];
            // The image is always mapped; what the guest does to its tables is its own.
            let _ = cpu.read(&self.memory, at, &mut bytes);
            u64::from_le_bytes(bytes)
        };
        let [rip, stack, gs] =
            [self.start.initial_code, self.start.initial_stack, self.start.initial_gs].map(word);
        let limit = word(self.start.early_gdt) as u16;
        let base = word(self.start.early_gdt + size_of::<u16>() as u64);
        cpu.gdtr = wedge_core::Table { base, limit };
        cpu.frame.rip = rip;
        // As after a call, whose return address nobody uses.
        cpu.frame.gpr[4] = stack.wrapping_sub(8);
        Effects.set_fs_base(0);
        Effects.set_gs_base(gs);
        Effects.flush(Flush::All);
        Effects.enter_space(cpu.cr3, false);
    }

    fn site(&mut self, at: u64) -> Step {
        // SAFETY: entry code gives the address of the stub that it came from; stubs in use are not changed.
        let stub = unsafe { &*(at as *const Stub) };
        own_statistics().sites[usize::from(stub.kind)].fetch_add(1, Relaxed);
        let cpu = cpu();
        cpu.frame.rip = stub.site;
        cpu.found_flags(cpu.frame.rflags);
        if stub.kind == FUNCTION {
            self.text_poke();
            return Step::On;
        }
        if Sites::is_marker(stub) {
            self.sites.lock().marker(stub, cpu, &self.memory);
            return Step::On;
        }
        match decode_all(stub.instructions()) {
            Ok((all, used)) => self.carry_out(&all[..used], stub.instructions(), stub.resume()),
            // Sites are decoded before they are rewritten.
            Err(error) => {
                report::fatal(format_args!("cannot decode the site {:#x}: {error:?}", stub.site))
            }
        }
    }

    /// Does the work of Linux' `__text_poke`, which changes the kernel's code. Linux switches to an
    /// address space of its own and back for each change, thousands of times when it starts; here
    /// code is memory that the wedge can write. Arguments that Linux' own function does not survive
    /// lead to the exception that it ends with, so that no change is ever made that
    /// [`code::close_poke`] has not seen.
    fn text_poke(&mut self) {
        let cpu = cpu();
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

    /// Carries out instructions that follow each other; the guest goes on at `resume`.
    fn carry_out(&mut self, all: &[Instruction], bytes: &[u8], resume: u64) -> Step {
        let mut bytes = bytes;
        for (number, instruction) in all.iter().enumerate() {
            let last = number + 1 == all.len();
            let cpu = cpu();
            let next =
                if last { resume } else { cpu.frame.rip.wrapping_add(instruction.length as u64) };
            match cpu.execute(&self.memory, &mut Effects, instruction) {
                wedge_core::Outcome::Next => cpu.complete(next),
                wedge_core::Outcome::Jump => {
                    if instruction.op == wedge_core::Op::Iret {
                        self.fill_in_advance();
                        calls::show_refused(cpu, &self.memory);
                        if self.has_peers && cpu.cpl == 0 {
                            // Linux' way to run what another processor has written.
                            serialize();
                        }
                    }
                    return Step::On;
                }
                wedge_core::Outcome::Raise(event) => {
                    self.event = event;
                    return Step::On;
                }
                wedge_core::Outcome::Exit(exit) => {
                    self.next = next;
                    self.length = instruction.length.min(bytes.len());
                    self.bytes = [0; 16];
                    self.bytes[..self.length].copy_from_slice(&bytes[..self.length]);
                    return Step::Exit(match exit {
                        Exit::Io(io) => Exit::Io(vmm_cpu::IoExit { next_rip: next, ..io }),
                        other => other,
                    });
                }
            }
            bytes = &bytes[instruction.length.min(bytes.len())..];
        }
        Step::On
    }

    /// The kernel returns from a page fault: what it has mapped is most often touched at once.
    fn fill_in_advance(&mut self) {
        if let Some((linear, intent)) = self.faulted.take()
            && cpu().cr2 == linear
            && !has(option::NO_BATCHES)
        {
            // What is not there, or cannot be mapped, faults again.
            let _ = memory::fill(cpu(), &self.ram, &self.memory, linear, intent);
        }
    }

    fn signal(&mut self) -> Step {
        let signal = vcpu().signal.get();
        let cpu = cpu();
        match signal.number {
            linux::SIGSYS if signal.vector == u64::from(signal::INT_80) => {
                const INT_80: [u8; 2] = [0xcd, signal::INT_80];
                count(count::CALLS);
                let mut bytes = [0; INT_80.len()];
                let at = cpu.frame.rip.wrapping_sub(INT_80.len() as u64);
                if cpu.read(&self.memory, at, &mut bytes).is_err() || bytes != INT_80 {
                    // `SYSENTER`, or `SYSCALL` in 32-bit code: the kernel has been told that there is neither.
                    self.event = Event::exception(vector::UNDEFINED);
                    return Step::On;
                }
                match cpu.deliver_software(&self.memory, signal::INT_80, INT_80.len() as u64) {
                    Ok(()) => Step::On,
                    Err(exit) => Step::Exit(exit),
                }
            }
            linux::SIGSYS => {
                count(count::CALLS);
                if self.rewrites_calls {
                    calls::made(cpu, &self.memory);
                }
                cpu.system_call();
                Step::On
            }
            linux::SIGSEGV if signal.vector == u64::from(vector::PAGE_FAULT) => {
                self.page_fault(signal.address, signal.code)
            }
            linux::SIGSEGV if signal.vector == u64::from(vector::PROTECTION) => {
                let fault = Event::exception_code(vector::PROTECTION, signal.code as u32);
                self.refused(fault)
            }
            linux::SIGILL => self.refused(Event::exception(vector::UNDEFINED)),
            linux::SIGTRAP if signal.vector == u64::from(vector::BREAKPOINT) => {
                if self.debugs && cpu.cpl == 0 {
                    match debug::trap(cpu, &self.memory) {
                        debug::Trap::Its => {
                            self.halt(reason::BREAKPOINT);
                            return Step::On;
                        }
                        debug::Trap::Gone => return Step::On,
                        debug::Trap::Guests => {}
                    }
                }
                match cpu.deliver_software(&self.memory, vector::BREAKPOINT, 1) {
                    Ok(()) => Step::On,
                    Err(exit) => Step::Exit(exit),
                }
            }
            linux::SIGSEGV | linux::SIGBUS | linux::SIGFPE | linux::SIGTRAP => {
                let number = signal.vector as u8;
                if number == vector::DEBUG && self.profiles && profile::is_stepping() {
                    profile::stepped(cpu, &self.memory);
                    return Step::On;
                }
                if number == vector::DEBUG && self.step != DebugStep::None {
                    // A jump to itself is a step, too.
                    self.step = DebugStep::Done;
                    return Step::On;
                }
                if number == vector::DEBUG && cpu.cpl == 3 && calls::is_on_way(cpu.frame.rip) {
                    // It is no instruction of the program: the step ends behind the system call.
                    return Step::On;
                }
                if number == vector::DEBUG {
                    // Single step: breakpoint registers are the host's.
                    cpu.dr[6] |= 1 << 14;
                }
                self.event = match number {
                    8 | 10..=14 | 17 => Event::exception_code(number, signal.code as u32),
                    _ => Event::exception(number),
                };
                Step::On
            }
            // Timer and device process have left their events.
            _ => {
                if cpu.cpl == 3 {
                    // Its page may be another one's when the program goes on.
                    calls::step_back(cpu);
                }
                Step::On
            }
        }
    }

    /// A program calls Linux' old page of calls, which this host does not have: it comes to the system call, and a return. Of hosts that have it,
    /// the filter of system calls makes the same.
    fn old_call(&mut self, linear: u64) -> Option<()> {
        let cpu = cpu();
        let offset = linear.checked_sub(layout::VSYSCALL)?;
        let number = layout::VSYSCALL_CALLS.get(usize::try_from(offset / 0x400).ok()?)?;
        let stack = cpu.frame.gpr[4];
        let is_whole = offset % 0x400 == 0 && stack % memory::PAGE <= memory::PAGE - 8;
        let paging = cpu.paging(stack, true);
        let found = is_whole.then(|| paging.translate(&self.memory, stack, Intent::Read, true));
        let back = self.memory.read::<u64>(found?.ok()?.0).ok()?;
        count(count::CALLS);
        cpu.frame.gpr[0] = u64::from(*number);
        cpu.frame.gpr[4] = stack.wrapping_add(8);
        cpu.frame.rip = back;
        cpu.system_call();
        Some(())
    }

    fn page_fault(&mut self, linear: u64, code: u64) -> Step {
        let cpu = cpu();
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
            if profile::write_fault(cpu, memory, linear, annotated) {
                return Step::On;
            }
        }
        if intent == Intent::Fetch && cpu.cpl == 3 && self.old_call(linear).is_some() {
            return Step::On;
        }
        if intent == Intent::Fetch && cpu.cpl == 0 && memory::fill_image(cpu, &self.memory, linear)
        {
            return Step::On;
        }
        if intent == Intent::Write
            && cpu.cpl == 0
            && let Some(offset) = frames::written_by_kernel(&self.ram, linear)
        {
            frames::write(offset, memory::PAGE);
            return Step::On;
        }
        if !memory::is_filled_in(linear) {
            // Outside of everything, or a right of the image and the direct map, which have all rights.
            count(count::FAULTS);
            let user = if cpu.cpl == 3 { 4 } else { 0 };
            cpu.cr2 = linear;
            self.event =
                Event::exception_code(vector::PAGE_FAULT, (code & (WRITE | FETCH)) as u32 | user);
            return Step::On;
        }
        match memory::fill(cpu, &self.ram, &self.memory, linear, intent) {
            Fault::Filled => Step::On,
            Fault::Guest(fault) => {
                count(count::FAULTS);
                self.faulted = Some((linear, intent));
                self.event = cpu.page_fault(fault);
                Step::On
            }
            Fault::Device(gpa) => {
                if self.profiles {
                    profile::count(cpu.frame.rip, profile::What::Device, || false);
                }
                self.show_kernel();
                // The emulator fetches the instruction itself.
                self.next = 0;
                self.length = 0;
                let (write, fetch) = (intent == Intent::Write, intent == Intent::Fetch);
                Step::Exit(Exit::MemoryFault(MemoryFault { gpa, write, fetch, walk: false }))
            }
            Fault::Sequence if code::open_steps(cpu, &self.memory) => Step::On,
            Fault::Sequence => self.refused(Event::exception(vector::UNDEFINED)),
            Fault::Full(error) => {
                report::say(format_args!("cannot map guest memory: {error}"));
                Step::Exit(Exit::HostError(error.0 as u64))
            }
        }
    }

    /// Makes all of the kernel's addresses known to the root that the machine follows: those above programs are in the current tables only.
    fn show_kernel(&self) {
        const ENTRY: u64 = 1 << 39;
        let cpu = cpu();
        let current = cpu.cr3 & entry::ADDRESS;
        for at in (layout::DIRECT / ENTRY..layout::GUEST_END / ENTRY).map(|index| index * 8) {
            // Tables that are not memory show nothing.
            let value = self.memory.read::<u64>(current + at).unwrap_or(0);
            let _ = self.memory.write(cpu.shared.root + at, value);
        }
    }

    /// `#GP` or `#UD` of the host: an instruction that only the wedge may carry out, without a site (in the text of an alternative); or `fault`, the
    /// guest's own.
    fn refused(&mut self, fault: Event) -> Step {
        let cpu = cpu();
        let mut bytes = [0; LONGEST];
        let read = (1..=LONGEST)
            .rev()
            .find(|&length| cpu.read(&self.memory, cpu.frame.rip, &mut bytes[..length]).is_ok());
        if !cpu.is_64_bit() {
            return self.refused_32(&bytes[..read.unwrap_or(0)], fault);
        }
        if cpu.cpl == 3 && bytes.starts_with(&calls::SYSCALL) && calls::is_rewritten(cpu.frame.rip)
        {
            // The second part of a place that was rewritten: guest memory has what was there.
            cpu.frame.rip += calls::SYSCALL.len() as u64;
            cpu.system_call();
            return Step::On;
        }
        let decoded = wedge_core::decode(&bytes[..read.unwrap_or(0)]);
        match decoded {
            Ok(Instruction { op: wedge_core::Op::Xrstor { area, marked }, length, .. })
                if keys::are_on() && (cpu.cpl == 0 || !marked) =>
            {
                let linear = cpu.address(&mut Effects, area, length);
                let mask = self.xcr0;
                match extended::carry_out(cpu, &self.memory, linear, mask) {
                    Ok(()) => cpu.complete(cpu.frame.rip + length as u64),
                    Err(extended::Refused::Fault(fault)) => self.event = cpu.page_fault(fault),
                    Err(extended::Refused::Protection) => {
                        self.event = Event::exception_code(vector::PROTECTION, 0);
                    }
                }
                Step::On
            }
            Ok(instruction) if cpu.cpl == 0 || is_for_programs(&instruction) => {
                count(count::UNRECORDED);
                let resume = cpu.frame.rip.wrapping_add(instruction.length as u64);
                self.carry_out(&[instruction], &bytes[..instruction.length], resume)
            }
            _ => {
                self.event = fault;
                Step::On
            }
        }
    }
}

impl LinuxVcpu<'_> {
    /// [`Self::refused`] in 32-bit code of a program: `INT n` and port accesses are encoded as in 64-bit code.
    fn refused_32(&mut self, bytes: &[u8], fault: Event) -> Step {
        /// What is a prefix in 64-bit code only.
        const REX: core::ops::RangeInclusive<u8> = 0x40..=0x4f;
        let is_rex = |byte: &u8| REX.contains(byte);
        match wedge_core::decode(bytes) {
            Ok(instruction)
                if is_for_programs(&instruction)
                    && !bytes[..instruction.length].iter().any(is_rex) =>
            {
                count(count::UNRECORDED);
                let resume = cpu().frame.rip.wrapping_add(instruction.length as u64);
                self.carry_out(&[instruction], &bytes[..instruction.length], resume)
            }
            _ => {
                self.event = fault;
                Step::On
            }
        }
    }
}

/// Carries out a call of `__text_poke`: fills `bytes` from a linear address, or with the one byte
/// there, and writes them to `to`. Returns the call's return address.
///
/// # Errors
/// A page fault at the source or the stack, or `#UD` if `to` is not mapped, as of Linux' `BUG_ON`.
/// Nothing has been written.
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
    for part in bytes[..given].chunks_mut(memory::PAGE as usize) {
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
    if keys::are_on() {
        code::close_poke(cpu, memory, to, bytes);
    }
    match write_code(cpu, memory, to, bytes) {
        Some(()) => Ok(u64::from_le_bytes(back)),
        None => Err(Event::exception(vector::UNDEFINED)),
    }
}

/// What the guest's kernel may let programs do, and the host does not.
fn is_for_programs(instruction: &Instruction) -> bool {
    use wedge_core::Op;
    matches!(instruction.op, Op::Int(_) | Op::In(_) | Op::Out(_) | Op::Ins | Op::Outs)
}

impl Vcpu for LinuxVcpu<'_> {
    fn gpr(&mut self, register: Gpr) -> u64 {
        cpu().frame.gpr[register as usize]
    }

    fn set_gpr(&mut self, register: Gpr, value: u64) {
        cpu().frame.gpr[register as usize] = value;
    }

    fn get(&mut self, register: Reg) -> u64 {
        let cpu = cpu();
        match register {
            Reg::Rip => cpu.frame.rip,
            Reg::Rflags => cpu.rflags(),
            Reg::InterruptShadow | Reg::TscOffset => 0,
            Reg::Cr0 => cpu.cr0,
            Reg::Cr2 => cpu.cr2,
            // The machine follows the kernel's addresses only.
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
        let cpu = cpu();
        match register {
            Reg::Rip => cpu.frame.rip = value,
            Reg::Rflags => cpu.set_rflags(value),
            // Time is the host's; there is no shadow.
            Reg::InterruptShadow | Reg::TscOffset => {}
            Reg::Cr0 => cpu.cr0 = value,
            Reg::Cr2 => cpu.cr2 = value,
            Reg::Cr3 => {
                cpu.cr3 = value;
                memory::slot().root.store(value, Relaxed);
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
        let cpu = cpu();
        let table = |table: wedge_core::Table| Segment {
            selector: 0,
            attrib: 0,
            limit: table.limit.into(),
            base: table.base,
        };
        match segment {
            Seg::Fs => Segment { base: Effects.fs_base(), ..cpu.segments[4] },
            Seg::Gs => Segment { base: Effects.gs_base(), ..cpu.segments[5] },
            Seg::Es | Seg::Cs | Seg::Ss | Seg::Ds => cpu.segments[segment as usize],
            Seg::Gdtr => table(cpu.gdtr),
            Seg::Idtr => table(cpu.idtr),
            Seg::Ldtr => cpu.ldtr,
            Seg::Tr => cpu.tr,
        }
    }

    fn set_segment(&mut self, segment: Seg, value: Segment) {
        let cpu = cpu();
        let table = wedge_core::Table { base: value.base, limit: value.limit as u16 };
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
        signal::arm();
    }

    fn stolen(&mut self) -> u64 {
        steal::stolen()
    }

    fn set_hlt_exits(&mut self, _: bool) {
        // Each is an exit.
    }

    fn flush_tlb(&mut self) {
        Effects.flush(Flush::All);
    }

    fn run(&mut self) -> Exit {
        self.next = 0;
        self.length = 0;
        if cpu().cr0 & cr0::PE == 0 {
            self.start_further();
        }
        if self.profiles {
            profile::watch_descriptors(cpu(), &self.memory, memory::slot());
        }
        loop {
            if self.profiles && profile::is_stepping() {
                // Nothing comes between: it is one instruction, or the fault of its own.
                let held = events().swap(0, SeqCst);
                let step = self.step();
                events().fetch_or(held, SeqCst);
                if profile::is_stepping() {
                    profile::stepped(cpu(), &self.memory);
                }
                match step {
                    Step::On => continue,
                    Step::Exit(exit) => return exit,
                }
            }
            if self.step == DebugStep::Done {
                if self.event.is_some() {
                    // The step ends where the guest handles what it has led to.
                    let event = core::mem::take(&mut self.event);
                    if let Err(exit) = cpu().deliver(&self.memory, event) {
                        return exit;
                    }
                }
                self.halt(reason::STEP);
            }
            let steps = self.step == DebugStep::Wanted;
            let pending = if steps { 0 } else { events().load(SeqCst) };
            if pending != 0 {
                events().fetch_and(!pending, SeqCst);
                let others = pending & !event::TIMER;
                if pending & event::TIMER != 0 {
                    // It has to be set again in any case.
                    mine().armed.store(u64::MAX, Relaxed);
                    if tsc() < self.deadline {
                        signal::arm();
                    } else if others == 0 {
                        place::tick();
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
                if let Err(exit) = cpu().deliver(&self.memory, event) {
                    return exit;
                }
            }
            if cpu().held_flags & rflags::IF != 0 && !steps {
                match self.window {
                    InterruptWindow::Nothing => {}
                    InterruptWindow::Exit => {
                        self.window = InterruptWindow::Nothing;
                        return Exit::InterruptWindow;
                    }
                    InterruptWindow::DeliverVirq(number) => {
                        self.window = InterruptWindow::Nothing;
                        if let Err(exit) = cpu().deliver(&self.memory, Event::interrupt(number)) {
                            return exit;
                        }
                    }
                }
            }
            let cpu = cpu();
            cpu.attention = u8::from(self.window != InterruptWindow::Nothing);
            let dispatch = u8::from(cpu.cpl == 3);
            if cpu.star != self.star {
                self.star = cpu.star;
                let [program, kernel] = cpu.call_segments();
                // SAFETY: only entry code uses them, while the guest runs.
                unsafe {
                    (*cell()).program = program;
                    (*cell()).kernel = kernel;
                }
            }
            if dispatch != 0 && keys::are_on() && !shared().closed.load(Relaxed) {
                // Before its first program the kernel has no more to do with its code than that.
                code::close_kernel(cpu, &self.memory, self.start.code, self.start.code_end);
                shared().closed.store(true, Relaxed);
            }
            let code = if cpu.is_64_bit() { CODE_64 } else { CODE_32 };
            // SAFETY: only entry code uses it, on the way to the guest.
            unsafe {
                (*cell()).dispatch = dispatch;
                (*cell()).close = dispatch & u8::from(keys::are_on());
                (*cell()).code = code.into();
            }
            if compat::concerns(cpu) {
                compat::load(cpu, &self.memory);
            }
            frames::settle();
            let step = if steps { self.debug_step() } else { self.step() };
            if let Step::Exit(exit) = step {
                return exit;
            }
        }
    }
}

/// What a program of the host may tell the guest of its processor: the host's answers without what the wedge does not have, and with
/// identifiers of address spaces, which it has.
fn host_cpuid(number: u32, subleaf: u32) -> [u32; 4] {
    let values = __cpuid_count(number, subleaf);
    let [a, mut b, mut c, mut d] = [values.eax, values.ebx, values.ecx, values.edx];
    match number {
        leaf::FEATURES => c |= features_c::PCID,
        leaf::EXTENDED_FEATURES if subleaf == 0 => {
            b &= !(extended_b::SMEP | extended_b::SMAP);
            b |= extended_b::INVPCID | extended_b::FSGSBASE;
            c &= !(extended_c::UMIP | extended_c::PKU | extended_c::RDPID);
        }
        // XSAVES.
        leaf::XSAVE if subleaf == 1 => return [a & !(1 << 3), b, c, d],
        // RDTSCP: what it reads beside the counter is the host's.
        leaf::AMD_FEATURES => d &= !(1 << 27),
        _ => {}
    }
    [a, b, c, d]
}

/// The machine, and its first virtual CPU, on whose stack it is.
pub extern "sysv64" fn main() -> ! {
    let Some(start) = start() else {
        report::fatal(format_args!("the loader's record is of another version"));
    };
    let ram = Ram::new(&start);
    let Some(memory) = ram.memory() else {
        report::fatal(format_args!("guest memory of {} bytes makes no layout", start.memory));
    };
    power_on(&start);
    let mut sites = Sites::new(start.options);
    if let Err(problem) = sites.rewrite_table(cpu(), &memory, start.sites, start.sites_length) {
        report::say(format_args!("the kernel's sites cannot be rewritten: {problem}"));
        processes::finish(65);
    }
    if start.options & option::NO_FUNCTIONS == 0
        && start.text_poke != 0
        && let Err(problem) = sites.replace_function(cpu(), &memory, start.text_poke)
    {
        report::say(format_args!("`__text_poke` is left as it is: {problem}"));
        if keys::are_on() {
            // The kernel would change its code unseen.
            processes::finish(65);
        }
    }
    let config = PcConfig {
        vcpus: start.vcpus as u8,
        clock: TscClock::new(config().tsc_khz, 0),
        xcr0_mask: start.xcr0,
        start_unix: config().unix_at_zero,
        kvmclock: true,
        steal_time: true,
        // An idle processor would forget all its spaces, each of which is a process.
        pv_flush: false,
        // Linux puts `VMMCALL` in the place of a site. In programs of a host that is itself a guest it does not fault.
        pv_ipi: false,
        id: 1,
    };
    let mut slots = Slots::new();
    let filled = outside::fill(&mut slots, &start);
    // Devices have no other memory.
    let of_devices = memory.observed(frames::write_by_device);
    let machine = Machine::with_functions(config, &of_devices, host_cpuid, slots);
    let sites = SpinMutex::new(sites);
    let (memory, machine, sites) = (&memory, &machine, &sites);
    let all = All { start: &start, ram, memory, machine, filled: &filled, sites };
    shared().machine.store(&raw const all as u64, SeqCst);
    for index in 1..vcpus().len() {
        processes::begin(index, main_of_further);
    }
    drive(&all, 0)
}

/// A virtual CPU that is not the first.
extern "sysv64" fn main_of_further() -> ! {
    let all = shared().machine.load(SeqCst) as *const All<'static>;
    // SAFETY: `main` has made it in memory that all processes of the guest share, and never returns.
    let all = unsafe { &*all };
    // It has no state before its start-up message.
    *cpu() = VirtualCpu::new();
    drive(all, mine().vcpu.load(Relaxed) as usize)
}

/// Runs a virtual CPU until the machine ends.
fn drive(all: &All<'_>, index: usize) -> ! {
    let All { start, ram, memory, machine, filled, sites } = *all;
    let mut host = LinuxHost::new(start);
    let mut state = machine.cpu(index);
    let mut vcpu = LinuxVcpu {
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
    crate::shared::vcpu().deadline.store(u64::MAX, Relaxed);
    steal::go_on();
    if index == 0 {
        processes::await_start();
        if vcpu.debugs && debug::shared().is_wanted() {
            vcpu.halt(reason::WANTED);
        }
    }
    loop {
        let events = match machine.run(&mut state, &mut vcpu, &mut host) {
            StopReason::Recall(events) => events as u32,
            StopReason::Idle { deadline_tsc } => idle::wait(deadline_tsc),
            StopReason::End(outcome) => {
                if outcome == Outcome::TripleFault {
                    describe();
                }
                processes::finish(outcome.exit_code());
            }
        };
        frames::settle();
        if events & event::STOP != 0 {
            processes::finish(Outcome::PowerOff.exit_code());
        }
        if events & event::POWER_BUTTON != 0 {
            machine.press_power_button(&mut host);
        }
        if events & event::DEBUG != 0 && vcpu.debugs && debug::shared().is_wanted() {
            vcpu.halt(reason::WANTED);
        }
        if events & event::CONSOLE != 0 {
            machine.input(Some(&state), &mut host);
        }
        let asked =
            |bit, slots: &Range<usize>| if events & bit != 0 { slots.clone() } else { 0..0 };
        for slot in asked(event::DISK, &filled.disks)
            .chain(asked(event::SHARE, &filled.shares))
            .chain(asked(event::NET, &filled.nets))
            .chain(asked(event::BALLOON, &filled.balloon))
            .chain(asked(event::CONSOLE, &filled.console))
        {
            machine.function_input(slot, Some(&state), &mut host);
        }
    }
}

/// The processor as the loader wants it.
fn power_on(start: &Start) {
    let cpu = cpu();
    *cpu = VirtualCpu::new();
    cpu.frame.rip = start.rip;
    cpu.frame.gpr[4] = start.rsp;
    cpu.frame.gpr[7] = start.rdi;
    cpu.cr3 = start.cr3;
    memory::slot().root.store(start.cr3, Relaxed);
    cpu.gdtr = wedge_core::Table { base: start.gdt, limit: start.gdt_limit as u16 };
    cpu.segments[1].selector = start.cs as u16;
    share_kernel(cpu, start);
    Effects.set_fs_base(0);
    Effects.set_gs_base(start.gs_base);
}

/// Where the kernel is in every address space.
fn share_kernel(cpu: &mut VirtualCpu, start: &Start) {
    cpu.shared = wedge_core::cpu::Shared {
        start: layout::IMAGE,
        end: layout::LOW_END,
        root: start.kernel_root,
    };
}

/// Where the virtual CPU was when it gave up.
#[cold]
fn describe() {
    let cpu = cpu();
    report::say(format_args!(
        "the guest's processor gave up: rip {:#x} rsp {:#x} rflags {:#x} cr2 {:#x} cr3 {:#x} cpl {}",
        cpu.frame.rip,
        cpu.frame.gpr[4],
        cpu.rflags(),
        cpu.cr2,
        cpu.cr3,
        cpu.cpl
    ));
}
