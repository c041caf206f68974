//! A virtual CPU of the kernel as the VMM library wants it.
//!
//! State groups that an exit did not deliver are fetched on first use. A setter changes a group only after
//! it is valid, because the kernel takes back whole groups.

use abi::vcpu::{
    Segment as StateSegment, SharedSegment, SharedU8, SharedU64, VcpuState, exit, group, window,
};
use native_rt::{SchedContext, Vcpu, time};
use vmm_cpu::exit::Exit;
use vmm_cpu::{Event, Gpr, InterruptWindow, Reg, Seg, Segment, Vcpu as _, svm};

use crate::console::Console;
use crate::control::CONTROL;

/// A virtual CPU.
pub struct NativeVcpu<'a> {
    vcpu: Vcpu,
    /// Groups of the state page that are valid, taken from it once after each exit.
    valid: u64,
    console: &'a Console,
    /// When the machine wants the guest to be left, as a TSC value.
    deadline: u64,
    /// Ticks that the machine's time is behind the host's.
    behind: u64,
    /// Those of [`window::PERSISTENT`] that are asked for.
    window: u64,
    /// What the kernel is told of halts, if nothing else prevents it from waiting.
    halts: u64,
    stolen: Stolen,
}

/// Time that others took from the thread of a virtual CPU, in ticks.
#[derive(Default)]
struct Stolen {
    /// Which CPU it is, and what its thread runs on.
    of: Option<(usize, SchedContext)>,
    /// What the thread had missed when the machine started.
    before: u64,
    /// `preemptions` of the state page, and stolen time, when they were looked at.
    preemptions: u64,
    ticks: u64,
}

impl<'a> NativeVcpu<'a> {
    /// Wraps a virtual CPU that has not run yet. `console` is flushed when its output has waited long enough.
    pub fn new(vcpu: Vcpu, console: &'a Console) -> Self {
        Self {
            vcpu,
            // The kernel's state is zero, as the page is: everything in it is valid, and must be taken over.
            valid: group::ALL,
            console,
            deadline: abi::FOREVER,
            behind: 0,
            window: 0,
            halts: 1,
            stolen: Stolen::default(),
        }
    }

    /// The machine starts, with this as its virtual CPU `index`; its thread runs on `context`.
    pub fn start(&mut self, index: usize, context: SchedContext) {
        self.stolen = Stolen {
            of: Some((index, context)),
            before: CONTROL.missed(index, context).wrapping_sub(self.halted()),
            preemptions: self.vcpu.state().preemptions.get(),
            ticks: 0,
        };
    }

    /// World switches and exits that the kernel settled.
    pub fn counts(&mut self) -> (u64, u64) {
        let state = self.vcpu.state();
        (state.entries.get(), state.handled_in_kernel.get())
    }

    /// Ticks that the kernel has waited while the guest was halted.
    pub fn halted(&mut self) -> u64 {
        self.vcpu.state().halted.get()
    }

    /// From now on the machine's time is behind the host's by so many ticks. The guest's counter goes on where
    /// it was.
    pub fn set_behind(&mut self, ticks: u64) {
        if ticks != self.behind {
            let offset = self.get(Reg::TscOffset);
            self.behind = ticks;
            self.set(Reg::TscOffset, offset);
            // The kernel looks at a new deadline before the guest runs; this one is the machine's again.
            self.deadline = 0;
        }
    }

    /// The state page, with these groups valid.
    #[inline(always)]
    fn with(&mut self, groups: u64) -> &VcpuState {
        if self.valid & groups != groups {
            self.fetch(groups);
        }
        self.vcpu.state()
    }

    #[cold]
    fn fetch(&mut self, groups: u64) {
        let missing = groups & !self.valid;
        // The only ways to fail are wrong selectors and rights, which the next run reports.
        let _ = self.vcpu.fetch(missing);
        self.valid |= missing;
    }

    /// Asks for one of [`window::PERSISTENT`], or no longer.
    fn stand(&mut self, bit: u64, on: bool) {
        self.window = self.window & !bit | if on { bit } else { 0 };
        let state = self.vcpu.state();
        state.window.set(state.window.get() & !window::PERSISTENT | self.window);
    }

    /// The state page, with this group valid and marked as changed.
    #[inline(always)]
    fn change(&mut self, group: u64) -> &VcpuState {
        let state = self.with(group);
        state.dirty.set(state.dirty.get() | group);
        state
    }
}

/// The group that a register belongs to.
#[inline(always)]
const fn group_of(register: Reg) -> u64 {
    match register {
        Reg::Rip | Reg::Rflags | Reg::InterruptShadow => group::IP,
        Reg::Cr0 | Reg::Cr2 | Reg::Cr3 | Reg::Cr4 | Reg::Efer | Reg::Cpl => group::CONTROL,
        Reg::Star
        | Reg::Lstar
        | Reg::Cstar
        | Reg::Sfmask
        | Reg::KernelGsBase
        | Reg::SysenterCs
        | Reg::SysenterEsp
        | Reg::SysenterEip
        | Reg::Pat => group::MSRS,
        Reg::Dr6 | Reg::Dr7 => group::DEBUG,
        Reg::TscOffset => group::TSC,
        Reg::Xcr0 => group::XCR0,
    }
}

/// The group that a segment register belongs to.
#[inline(always)]
const fn group_of_segment(segment: Seg) -> u64 {
    match segment {
        Seg::Cs => group::CODE,
        _ => group::SEGMENTS,
    }
}

/// Where a register is in the state page.
#[inline(always)]
fn register(state: &VcpuState, register: Reg) -> &SharedU64 {
    match register {
        Reg::Rip => &state.rip,
        Reg::Rflags => &state.rflags,
        Reg::InterruptShadow => &state.interrupt_shadow,
        Reg::Cr0 => &state.cr0,
        Reg::Cr2 => &state.cr2,
        Reg::Cr3 => &state.cr3,
        Reg::Cr4 => &state.cr4,
        Reg::Efer => &state.efer,
        Reg::Cpl => &state.cpl,
        Reg::Star => &state.star,
        Reg::Lstar => &state.lstar,
        Reg::Cstar => &state.cstar,
        Reg::Sfmask => &state.sfmask,
        Reg::KernelGsBase => &state.kernel_gs_base,
        Reg::SysenterCs => &state.sysenter_cs,
        Reg::SysenterEsp => &state.sysenter_esp,
        Reg::SysenterEip => &state.sysenter_eip,
        Reg::Pat => &state.pat,
        Reg::Dr6 => &state.dr6,
        Reg::Dr7 => &state.dr7,
        Reg::TscOffset => &state.tsc_offset,
        Reg::Xcr0 => &state.xcr0,
    }
}

#[inline(always)]
fn segment(state: &VcpuState, segment: Seg) -> &SharedSegment {
    match segment {
        Seg::Gdtr => &state.gdtr,
        Seg::Ldtr => &state.ldtr,
        Seg::Idtr => &state.idtr,
        Seg::Tr => &state.tr,
        Seg::Es => &state.segments[0],
        Seg::Cs => &state.segments[1],
        Seg::Ss => &state.segments[2],
        Seg::Ds => &state.segments[3],
        Seg::Fs => &state.segments[4],
        Seg::Gs => &state.segments[5],
    }
}

impl vmm_cpu::Vcpu for NativeVcpu<'_> {
    #[inline(always)]
    fn gpr(&mut self, register: Gpr) -> u64 {
        match register {
            Gpr::Rsp => self.with(group::IP).rsp.get(),
            _ => self.vcpu.state().gpr[register as usize].get(),
        }
    }

    #[inline(always)]
    fn set_gpr(&mut self, register: Gpr, value: u64) {
        match register {
            Gpr::Rsp => self.change(group::IP).rsp.set(value),
            _ => self.vcpu.state().gpr[register as usize].set(value),
        }
    }

    #[inline(always)]
    fn get(&mut self, name: Reg) -> u64 {
        let value = register(self.with(group_of(name)), name).get();
        // The guest's counter is the machine's time and an offset.
        if name == Reg::TscOffset { value.wrapping_add(self.behind) } else { value }
    }

    #[inline(always)]
    fn set(&mut self, name: Reg, value: u64) {
        let value = if name == Reg::TscOffset { value.wrapping_sub(self.behind) } else { value };
        register(self.change(group_of(name)), name).set(value);
    }

    #[inline(always)]
    fn segment(&mut self, name: Seg) -> Segment {
        let StateSegment { selector, attrib, limit, base } =
            segment(self.with(group_of_segment(name)), name).get();
        Segment { selector, attrib, limit, base }
    }

    fn set_segment(&mut self, name: Seg, value: Segment) {
        let Segment { selector, attrib, limit, base } = value;
        segment(self.change(group_of_segment(name)), name).set(StateSegment {
            selector,
            attrib,
            limit,
            base,
        });
    }

    fn vector(&mut self, register: u8) -> Option<[u64; 2]> {
        let [low, high] = self.with(group::VECTORS).xmm.get(usize::from(register))?;
        Some([low.get(), high.get()])
    }

    fn set_vector(&mut self, register: u8, value: [u64; 2]) {
        if let Some(place) = self.change(group::VECTORS).xmm.get(usize::from(register)) {
            place[0].set(value[0]);
            place[1].set(value[1]);
        }
    }

    #[inline(always)]
    fn next_rip(&mut self) -> u64 {
        self.vcpu.state().next_rip.get()
    }

    fn instruction_bytes(&mut self) -> ([u8; 16], usize) {
        let state = self.vcpu.state();
        (
            state.bytes.each_ref().map(SharedU8::get),
            (state.bytes_len.get() as usize).min(state.bytes.len()),
        )
    }

    #[inline(always)]
    fn event(&mut self) -> Event {
        Event(self.vcpu.state().inject.get())
    }

    #[inline(always)]
    fn set_event(&mut self, event: Event) {
        self.vcpu.state().inject.set(event.0);
    }

    #[inline(always)]
    fn set_window(&mut self, wanted: InterruptWindow) {
        let wanted = match wanted {
            InterruptWindow::Nothing => 0,
            InterruptWindow::Exit => window::EXIT,
            InterruptWindow::DeliverVirq(vector) => window::DELIVER_VIRQ | u64::from(vector),
        };
        self.vcpu.state().window.set(self.window | wanted);
    }

    #[inline(always)]
    fn has_window(&mut self) -> bool {
        self.vcpu.state().window.get() & !window::PERSISTENT != 0
    }

    const KEEPS_CR8: bool = true;

    #[inline(always)]
    fn cr8(&mut self) -> u8 {
        self.vcpu.state().cr8.get() as u8
    }

    fn set_cr8(&mut self, value: u8) {
        self.change(group::PRIORITY).cr8.set(value.into());
    }

    fn set_cr8_exits(&mut self, exit: bool) {
        self.stand(window::PRIORITY, exit);
    }

    fn set_iret_exits(&mut self, exit: bool) -> bool {
        self.stand(window::IRET, exit);
        true
    }

    #[inline(always)]
    fn set_deadline(&mut self, tsc: u64) {
        self.deadline = tsc.saturating_add(self.behind);
    }

    #[inline]
    fn stolen(&mut self) -> u64 {
        let (preemptions, halted) = (self.vcpu.state().preemptions.get(), self.halted());
        let stolen = &mut self.stolen;
        // To ask for the time used takes a system call.
        if let (true, Some((index, context))) = (preemptions != stolen.preemptions, stolen.of) {
            stolen.preemptions = preemptions;
            let missed = CONTROL.missed(index, context).wrapping_sub(halted);
            let missed = missed.wrapping_sub(stolen.before);
            // It is composed of several clocks, none of which stands still meanwhile.
            stolen.ticks = stolen.ticks.max(missed);
        }
        stolen.ticks
    }

    fn set_hlt_exits(&mut self, exit: bool) {
        self.halts = u64::from(!exit);
    }

    fn flush_tlb(&mut self) {
        // The kernel flushes it when control registers change, also if they become what they were.
        self.change(group::CONTROL);
    }

    /// Runs the guest. Output that has waited too long is flushed on the way: a guest that computes without ever
    /// being idle gives the VMM no other occasion.
    #[inline(always)]
    fn run(&mut self) -> Exit {
        loop {
            let state = self.vcpu.state();
            let flush_at = self.console.flush_at();
            state.deadline.set(self.deadline.min(flush_at));
            // Output does not wait until the guest goes on.
            state.halt.set(if flush_at == abi::FOREVER { self.halts } else { 0 });
            if let Err(status) = self.vcpu.run() {
                return Exit::HostError(status as u64);
            }
            let state = self.vcpu.state();
            self.valid = state.valid.get();
            let code = state.exit_code.get();
            if code < exit::RECALL {
                return svm::decode(code, state.exit_info1.get(), state.exit_info2.get());
            }
            match code {
                exit::RECALL => return Exit::Recall { events: state.events.get() },
                exit::HALTED => return Exit::Halted { events: state.events.get() },
                exit::WINDOW => return Exit::InterruptWindow,
                exit::DEADLINE => {
                    let now = time::tsc();
                    if self.console.flush_at() <= now {
                        self.console.flush();
                    }
                    if self.deadline <= now {
                        return Exit::Deadline;
                    }
                }
                code => return decode_invalid(code),
            }
        }
    }
}

/// Decodes an exit code that is neither below the kernel's codes nor one of them: the CPU rejected
/// the guest's state. It has no further information.
#[cold]
fn decode_invalid(code: u64) -> Exit {
    svm::decode(code, 0, 0)
}
