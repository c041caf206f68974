//! Native back end of a vCPU: [`vmm_cpu::Vcpu`] over a vCPU object of the kernel.
//!
//! State groups that an exit did not deliver are fetched on first use. A setter changes a group
//! only after it is valid, because the kernel takes over whole groups.

use abi::vcpu::{Segment as StateSegment, VcpuState, exit, group, window};
use native_rt::{SchedContext, Vcpu, time};
use vmm_cpu::exit::Exit;
use vmm_cpu::{Event, Gpr, InterruptWindow, Reg, Seg, Segment, Vcpu as _, svm};

use crate::console::Console;
use crate::control::CONTROL;

/// A vCPU of the kernel.
pub struct NativeVcpu<'a> {
    vcpu: Vcpu,
    console: &'a Console,
    /// Deadline that the VM set for its next timer, as a TSC value.
    deadline: u64,
    /// Ticks during which the VM was paused: its time is this much less than the host's.
    paused_ticks: u64,
    /// Requested bits of [`window::PERSISTENT`].
    window: u64,
    /// Halt mode for the kernel, unless pending output requires an exit.
    halt_mode: u64,
    steal_time: StealTime,
}

/// Steal time of a vCPU, in ticks.
#[derive(Default)]
struct StealTime {
    /// Index of the vCPU, and scheduling context of its thread.
    vcpu: Option<(usize, SchedContext)>,
    /// Missed time of the thread when the VM started.
    before: u64,
    /// `preemptions` of the state page, and steal time, at the last update.
    preemptions: u64,
    ticks: u64,
}

impl<'a> NativeVcpu<'a> {
    /// Wraps a vCPU that has not run yet. [`run`](vmm_cpu::Vcpu::run) flushes `console` when its
    /// output has waited long enough.
    pub fn new(mut vcpu: Vcpu, console: &'a Console) -> Self {
        // All state in the kernel is zero: every group is valid here, and must be written back.
        let state = vcpu.state();
        state.valid = group::ALL;
        Self {
            vcpu,
            console,
            deadline: abi::FOREVER,
            paused_ticks: 0,
            window: 0,
            halt_mode: 1,
            steal_time: StealTime::default(),
        }
    }

    /// Starts the VM with this as its vCPU `index`, whose thread runs on `context`.
    pub fn start(&mut self, index: usize, context: SchedContext) {
        self.steal_time = StealTime {
            vcpu: Some((index, context)),
            before: CONTROL.missed_ticks(index, context).wrapping_sub(self.halted()),
            preemptions: self.vcpu.state().preemptions,
            ticks: 0,
        };
    }

    /// Returns the number of world switches, and of exits handled in the kernel.
    pub fn counts(&mut self) -> (u64, u64) {
        let state = self.vcpu.state();
        (state.entries, state.handled_in_kernel)
    }

    /// Returns the ticks that the kernel has waited while the guest was halted.
    pub fn halted(&mut self) -> u64 {
        self.vcpu.state().halted
    }

    /// Sets the time of all pauses, in ticks. The guest's counter continues from its value before
    /// the pause.
    pub fn set_paused_ticks(&mut self, ticks: u64) {
        if ticks != self.paused_ticks {
            let offset = self.get(Reg::TscOffset);
            self.paused_ticks = ticks;
            self.set(Reg::TscOffset, offset);
            // The kernel checks a new deadline before the guest runs; this one is in VM time again.
            self.deadline = 0;
        }
    }

    /// Returns the state page, with these groups valid.
    #[inline(always)]
    fn state_with(&mut self, groups: u64) -> &mut VcpuState {
        if self.vcpu.state().valid & groups != groups {
            self.fetch(groups);
        }
        self.vcpu.state()
    }

    #[cold]
    fn fetch(&mut self, groups: u64) {
        let missing = groups & !self.vcpu.state().valid;
        // It fails only for a wrong selector or right, which the next run reports.
        let _ = self.vcpu.fetch(missing);
        self.vcpu.state().valid |= missing;
    }

    /// Sets or clears one of [`window::PERSISTENT`].
    fn set_persistent(&mut self, bit: u64, on: bool) {
        self.window = self.window & !bit | if on { bit } else { 0 };
        let state = self.vcpu.state();
        state.window = state.window & !window::PERSISTENT | self.window;
    }

    /// Returns the state page, with this group valid and marked as changed.
    #[inline(always)]
    fn change(&mut self, group: u64) -> &mut VcpuState {
        let state = self.state_with(group);
        state.dirty |= group;
        state
    }
}

/// Returns the group of a register.
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

/// Returns the group of a segment register.
#[inline(always)]
const fn group_of_segment(segment: Seg) -> u64 {
    match segment {
        Seg::Cs => group::CODE,
        _ => group::SEGMENTS,
    }
}

/// Returns a register's field in the state page.
#[inline(always)]
fn register(state: &mut VcpuState, register: Reg) -> &mut u64 {
    match register {
        Reg::Rip => &mut state.rip,
        Reg::Rflags => &mut state.rflags,
        Reg::InterruptShadow => &mut state.interrupt_shadow,
        Reg::Cr0 => &mut state.cr0,
        Reg::Cr2 => &mut state.cr2,
        Reg::Cr3 => &mut state.cr3,
        Reg::Cr4 => &mut state.cr4,
        Reg::Efer => &mut state.efer,
        Reg::Cpl => &mut state.cpl,
        Reg::Star => &mut state.star,
        Reg::Lstar => &mut state.lstar,
        Reg::Cstar => &mut state.cstar,
        Reg::Sfmask => &mut state.sfmask,
        Reg::KernelGsBase => &mut state.kernel_gs_base,
        Reg::SysenterCs => &mut state.sysenter_cs,
        Reg::SysenterEsp => &mut state.sysenter_esp,
        Reg::SysenterEip => &mut state.sysenter_eip,
        Reg::Pat => &mut state.pat,
        Reg::Dr6 => &mut state.dr6,
        Reg::Dr7 => &mut state.dr7,
        Reg::TscOffset => &mut state.tsc_offset,
        Reg::Xcr0 => &mut state.xcr0,
    }
}

#[inline(always)]
fn segment(state: &mut VcpuState, segment: Seg) -> &mut StateSegment {
    match segment {
        Seg::Gdtr => &mut state.gdtr,
        Seg::Ldtr => &mut state.ldtr,
        Seg::Idtr => &mut state.idtr,
        Seg::Tr => &mut state.tr,
        Seg::Es => &mut state.segments[0],
        Seg::Cs => &mut state.segments[1],
        Seg::Ss => &mut state.segments[2],
        Seg::Ds => &mut state.segments[3],
        Seg::Fs => &mut state.segments[4],
        Seg::Gs => &mut state.segments[5],
    }
}

impl vmm_cpu::Vcpu for NativeVcpu<'_> {
    #[inline(always)]
    fn gpr(&mut self, register: Gpr) -> u64 {
        match register {
            Gpr::Rsp => self.state_with(group::IP).rsp,
            _ => self.vcpu.state().gpr[register as usize],
        }
    }

    #[inline(always)]
    fn set_gpr(&mut self, register: Gpr, value: u64) {
        match register {
            Gpr::Rsp => self.change(group::IP).rsp = value,
            _ => self.vcpu.state().gpr[register as usize] = value,
        }
    }

    #[inline(always)]
    fn get(&mut self, name: Reg) -> u64 {
        let value = *register(self.state_with(group_of(name)), name);
        // The guest's counter is the VM's time plus an offset.
        if name == Reg::TscOffset { value.wrapping_add(self.paused_ticks) } else { value }
    }

    #[inline(always)]
    fn set(&mut self, name: Reg, value: u64) {
        let value =
            if name == Reg::TscOffset { value.wrapping_sub(self.paused_ticks) } else { value };
        *register(self.change(group_of(name)), name) = value;
    }

    #[inline(always)]
    fn segment(&mut self, name: Seg) -> Segment {
        let StateSegment { selector, attrib, limit, base } =
            *segment(self.state_with(group_of_segment(name)), name);
        Segment { selector, attrib, limit, base }
    }

    fn set_segment(&mut self, name: Seg, value: Segment) {
        let Segment { selector, attrib, limit, base } = value;
        *segment(self.change(group_of_segment(name)), name) =
            StateSegment { selector, attrib, limit, base };
    }

    fn vector(&mut self, register: u8) -> Option<[u64; 2]> {
        self.state_with(group::VECTORS).xmm.get(usize::from(register)).copied()
    }

    fn set_vector(&mut self, register: u8, value: [u64; 2]) {
        if let Some(place) = self.change(group::VECTORS).xmm.get_mut(usize::from(register)) {
            *place = value;
        }
    }

    #[inline(always)]
    fn next_rip(&mut self) -> u64 {
        self.vcpu.state().next_rip
    }

    fn instruction_bytes(&mut self) -> ([u8; 16], usize) {
        let state = self.vcpu.state();
        (state.bytes, (state.bytes_len as usize).min(state.bytes.len()))
    }

    #[inline(always)]
    fn event(&mut self) -> Event {
        Event(self.vcpu.state().inject)
    }

    #[inline(always)]
    fn set_event(&mut self, event: Event) {
        self.vcpu.state().inject = event.0;
    }

    #[inline(always)]
    fn set_window(&mut self, wanted: InterruptWindow) {
        self.vcpu.state().window = self.window
            | match wanted {
                InterruptWindow::Nothing => 0,
                InterruptWindow::Exit => window::EXIT,
                InterruptWindow::DeliverVirq(vector) => window::DELIVER_VIRQ | u64::from(vector),
            };
    }

    #[inline(always)]
    fn has_window(&mut self) -> bool {
        self.vcpu.state().window & !window::PERSISTENT != 0
    }

    const KEEPS_CR8: bool = true;

    #[inline(always)]
    fn cr8(&mut self) -> u8 {
        self.vcpu.state().cr8 as u8
    }

    fn set_cr8(&mut self, value: u8) {
        self.change(group::PRIORITY).cr8 = value.into();
    }

    fn set_cr8_exits(&mut self, exit: bool) {
        self.set_persistent(window::PRIORITY, exit);
    }

    fn set_iret_exits(&mut self, exit: bool) -> bool {
        self.set_persistent(window::IRET, exit);
        true
    }

    #[inline(always)]
    fn set_deadline(&mut self, tsc: u64) {
        self.deadline = tsc.saturating_add(self.paused_ticks);
    }

    #[inline]
    fn stolen(&mut self) -> u64 {
        let (preemptions, halted) = (self.vcpu.state().preemptions, self.halted());
        let steal_time = &mut self.steal_time;
        // Reading the used CPU time takes a system call.
        if let (true, Some((index, context))) =
            (preemptions != steal_time.preemptions, steal_time.vcpu)
        {
            steal_time.preemptions = preemptions;
            let missed = CONTROL.missed_ticks(index, context).wrapping_sub(halted);
            let missed = missed.wrapping_sub(steal_time.before);
            // It is the difference of several clocks, which all advance meanwhile.
            steal_time.ticks = steal_time.ticks.max(missed);
        }
        steal_time.ticks
    }

    fn set_hlt_exits(&mut self, exit: bool) {
        self.halt_mode = u64::from(!exit);
    }

    fn flush_tlb(&mut self) {
        // The kernel flushes the TLB when control registers change, even to the same values.
        self.change(group::CONTROL);
    }

    /// Runs the guest. Flushes overdue output first: a guest that computes without ever being idle
    /// gives the VMM no other occasion.
    #[inline(always)]
    fn run(&mut self) -> Exit {
        loop {
            let state = self.vcpu.state();
            let flush_at = self.console.flush_at();
            state.deadline = self.deadline.min(flush_at);
            // A halt must not delay pending output.
            state.halt = if flush_at == abi::FOREVER { self.halt_mode } else { 0 };
            if let Err(status) = self.vcpu.run() {
                return Exit::HostError(status as u64);
            }
            let state = self.vcpu.state();
            if state.exit_code < exit::RECALL {
                return svm::decode(state.exit_code, state.exit_info1, state.exit_info2);
            }
            match state.exit_code {
                exit::RECALL => return Exit::Recall { events: state.events },
                exit::HALTED => return Exit::Halted { events: state.events },
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
                code => return svm::decode(code, state.exit_info1, state.exit_info2),
            }
        }
    }
}
