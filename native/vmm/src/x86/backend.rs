//! Native back end of a vCPU: [`X86Vcpu`] over a vCPU object of the kernel.
//!
//! State groups that an exit did not deliver are fetched on first use. A setter changes a group
//! only after it is valid, because the kernel takes over whole groups.

use abi::vcpu::x86::{
    Segment as StateSegment, SharedSegment, VcpuState, event as state_event, group, vtlb_counter,
    window,
};
use abi::vcpu::{SharedU8, SharedU64, exit};
use native_rt::{SchedContext, Vcpu, time};
use vmm_x86::exit::Exit;
use vmm_x86::registers::Group;
use vmm_x86::{Event, Gpr, InterruptWindow, Reg, Seg, Segment, X86Vcpu};

use super::exit::decode;
use super::guest_virtual::GuestVirtual;
use crate::console::Console;
use crate::steal::StealTime;

/// A vCPU of the kernel.
pub struct NativeVcpu<'a> {
    vcpu: Vcpu,
    /// Groups of the state page that are valid, taken from it once after each exit.
    valid: u64,
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
    has_vtlb: bool,
    /// Its space, if that is guest-virtual.
    space: Option<GuestVirtual<'a>>,
}

impl<'a> NativeVcpu<'a> {
    /// Wraps a vCPU that has not run yet. [`run`](vmm_vcpu::Vcpu::run) flushes `console` when its
    /// output has waited long enough.
    ///
    /// `optimisations`: of its vTLB ([`abi::vcpu::x86::vtlb`]); `None`: it has none. `space`: its
    /// space, if that is guest-virtual.
    pub fn new(
        vcpu: Vcpu,
        console: &'a Console,
        optimisations: Option<u64>,
        space: Option<GuestVirtual<'a>>,
    ) -> Self {
        vcpu.state().vtlb.set(optimisations.unwrap_or(0));
        Self {
            vcpu,
            // The kernel's state is zero, as the page is: everything in it is valid, and must be
            // taken over.
            valid: group::ALL,
            console,
            deadline: abi::FOREVER,
            paused_ticks: 0,
            window: 0,
            halt_mode: 1,
            steal_time: StealTime::default(),
            has_vtlb: optimisations.is_some(),
            space,
        }
    }

    /// Starts the VM with this as its vCPU `index`, whose thread runs on `context`.
    pub fn start(&mut self, index: usize, context: SchedContext) {
        self.steal_time = StealTime::start(index, context, &self.vcpu.state().run);
    }

    /// Returns the number of world switches, and of exits handled in the kernel.
    pub fn counts(&mut self) -> (u64, u64) {
        let state = self.vcpu.state();
        (state.run.entries.get(), state.run.handled_in_kernel.get())
    }

    /// Returns the counters of the vTLB.
    pub fn vtlb_counters(&mut self) -> [u64; vtlb_counter::COUNT] {
        match &self.space {
            Some(space) => space.counters(),
            None => self.vcpu.state().vtlb_counters.each_ref().map(SharedU64::get),
        }
    }

    /// Returns the ticks that the kernel has waited while the guest was halted.
    pub fn halted(&mut self) -> u64 {
        self.vcpu.state().run.halted.get()
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
    fn state_with(&mut self, groups: u64) -> &VcpuState {
        if self.valid & groups != groups {
            self.fetch(groups);
        }
        self.vcpu.state()
    }

    #[cold]
    fn fetch(&mut self, groups: u64) {
        let missing = groups & !self.valid;
        // It fails only for a wrong selector or right, which the next run reports.
        let _ = self.vcpu.fetch(missing);
        self.valid |= missing;
    }

    /// A control register changes.
    #[cold]
    fn control_written(&mut self, name: Reg, new: u64) {
        if self.space.is_some() {
            let old = self.get(name);
            self.space.iter_mut().for_each(|space| space.control_written(name, old, new));
        }
    }

    /// Sets or clears one of [`window::PERSISTENT`].
    fn set_persistent(&mut self, bit: u64, on: bool) {
        self.window = self.window & !bit | if on { bit } else { 0 };
        let state = self.vcpu.state();
        state.window.set(state.window.get() & !window::PERSISTENT | self.window);
    }

    /// Returns the state page, with this group valid and marked as changed.
    #[inline(always)]
    fn change(&mut self, group: u64) -> &VcpuState {
        let state = self.state_with(group);
        state.run.dirty.set(state.run.dirty.get() | group);
        state
    }
}

/// Returns the state page's group of these registers.
#[inline(always)]
const fn state_group(registers: Group) -> u64 {
    match registers {
        Group::General => 0,
        Group::Ip => group::IP,
        Group::Control => group::CONTROL,
        Group::Msrs => group::MSRS,
        Group::Debug => group::DEBUG,
        Group::Tsc => group::TSC,
        Group::Xcr0 => group::XCR0,
        Group::Code => group::CODE,
        Group::Segments => group::SEGMENTS,
    }
}

/// Returns a register's field in the state page.
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

impl X86Vcpu for NativeVcpu<'_> {
    fn vtlb_events(&mut self, index: u32) -> Option<u64> {
        self.vtlb_counters().get(index as usize).copied().filter(|_| self.has_vtlb)
    }

    #[inline(always)]
    fn gpr(&mut self, register: Gpr) -> u64 {
        match register {
            Gpr::Rsp => self.state_with(group::IP).rsp.get(),
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
        let value = register(self.state_with(state_group(name.group())), name).get();
        // The guest's counter is the VM's time plus an offset.
        if name == Reg::TscOffset { value.wrapping_add(self.paused_ticks) } else { value }
    }

    #[inline(always)]
    fn set(&mut self, name: Reg, value: u64) {
        let value =
            if name == Reg::TscOffset { value.wrapping_sub(self.paused_ticks) } else { value };
        if matches!(name, Reg::Cr0 | Reg::Cr3 | Reg::Cr4 | Reg::Efer) {
            self.control_written(name, value);
        }
        register(self.change(state_group(name.group())), name).set(value);
    }

    #[inline(always)]
    fn segment(&mut self, name: Seg) -> Segment {
        let StateSegment { selector, access_rights, limit, base } =
            segment(self.state_with(state_group(name.group())), name).get();
        Segment { selector, attrib: access_rights, limit, base }
    }

    fn set_segment(&mut self, name: Seg, value: Segment) {
        let Segment { selector, attrib, limit, base } = value;
        segment(self.change(state_group(name.group())), name).set(StateSegment {
            selector,
            access_rights: attrib,
            limit,
            base,
        });
    }

    fn vector(&mut self, register: u8) -> Option<[u64; 2]> {
        let [low, high] = self.state_with(group::VECTORS).xmm.get(usize::from(register))?;
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

    fn invalidate(&mut self, address: u64) {
        if let Some(space) = &mut self.space {
            return space.invalidate(address);
        }
        let state = self.vcpu.state();
        state.invalidate.set(address);
        state.run.dirty.set(state.run.dirty.get() | group::INVALIDATE);
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
        self.set_persistent(window::PRIORITY, exit);
    }

    fn set_iret_exits(&mut self, exit: bool) -> bool {
        self.set_persistent(window::IRET, exit);
        true
    }
}

impl vmm_vcpu::Vcpu for NativeVcpu<'_> {
    type Exit = Exit;

    #[inline(always)]
    fn set_deadline(&mut self, ticks: u64) {
        self.deadline = ticks.saturating_add(self.paused_ticks);
    }

    #[inline]
    fn stolen(&mut self) -> u64 {
        self.steal_time.ticks(&self.vcpu.state().run)
    }

    fn set_wait_exits(&mut self, exit: bool) {
        self.halt_mode = u64::from(!exit);
    }

    fn flush_tlb(&mut self) {
        if let Some(space) = &mut self.space {
            space.flush();
        }
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
            state.run.deadline.set(self.deadline.min(flush_at));
            // A halt must not delay pending output.
            state.run.halt.set(if flush_at == abi::FOREVER { self.halt_mode } else { 0 });
            if let Err(status) = self.vcpu.run() {
                return Exit::HostError(status as u64);
            }
            let state = self.vcpu.state();
            self.valid = state.run.valid.get();
            let reason = state.run.exit_reason.get();
            if reason != exit::DEADLINE {
                return decode(reason, state, &mut self.space);
            }
            let now = time::tsc();
            if self.console.flush_at() <= now {
                self.console.flush();
            }
            if self.deadline <= now {
                return Exit::Deadline;
            }
        }
    }
}

/// [`Event`] has the layout of the state page's `inject`.
const _: () = {
    const CODE: u64 = state_event::VALID | state_event::EXCEPTION | state_event::HAS_CODE;
    assert!(Event::NONE.0 == 0);
    assert!(Event::NMI.0 == state_event::VALID | state_event::NMI | 2);
    assert!(Event::interrupt(0x41).0 == state_event::VALID | state_event::INTERRUPT | 0x41);
    assert!(Event::exception(6).0 == state_event::VALID | state_event::EXCEPTION | 6);
    assert!(Event::exception_code(14, 5).0 == CODE | 14 | 5 << state_event::CODE_SHIFT);
};
