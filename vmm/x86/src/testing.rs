//! A vCPU back end that plays a script of exits, for tests.

extern crate std;

use std::collections::VecDeque;
use std::vec::Vec;

use hw_x86::msr::efer;
use hw_x86::paging::{cr0, cr4};
use vmm_vcpu::Vcpu;

use crate::exit::Exit;
use crate::registers::{Gpr, Reg, Registers, Seg, Segment};
use crate::vcpu::{Event, InterruptWindow, X86Vcpu};

/// State of the back end at one entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ScriptEntry {
    /// The event in the slot, which the entry delivers.
    pub event: Event,
    /// The interrupt window.
    pub window: InterruptWindow,
    /// True if the guest could take a maskable interrupt.
    pub open: bool,
    /// The instruction pointer.
    pub rip: u64,
}

/// One step of a script: changes to the guest's state, and the exit.
pub type ScriptStep = std::boxed::Box<dyn FnMut(&mut ScriptedVcpu) -> Exit>;

/// A vCPU whose guest is a script.
#[derive(Default)]
pub struct ScriptedVcpu {
    /// Registers.
    pub registers: Registers,
    /// SSE registers, if the back end provides them.
    pub vectors: Option<[[u64; 2]; 16]>,
    /// Result of [`X86Vcpu::next_rip`].
    pub next_rip: u64,
    /// The injection slot.
    pub slot: Event,
    /// The window. A step that takes the interrupt in it closes it.
    pub window: InterruptWindow,
    /// The deadline.
    pub deadline: u64,
    /// Result of [`Vcpu::stolen`].
    pub stolen: u64,
    /// `CR8`, which the guest changes without an exit.
    pub cr8: u8,
    /// Last value of [`X86Vcpu::set_cr8_exits`].
    pub cr8_exits: bool,
    /// Last value of [`X86Vcpu::set_iret_exits`]; `None`: the back end masks NMIs by itself.
    pub iret_exits: Option<bool>,
    /// Result of [`X86Vcpu::vtlb_events`].
    pub vtlb_events: Option<u64>,
    /// Last value of [`Vcpu::set_wait_exits`].
    pub halts: bool,
    /// Values passed to [`X86Vcpu::complete_access`].
    pub answers: Vec<Option<u64>>,
    /// Addresses passed to [`X86Vcpu::invalidate`].
    pub invalidated: Vec<u64>,
    /// Number of TLB flushes.
    pub flushes: u32,
    /// Steps still to play.
    pub script: VecDeque<ScriptStep>,
    /// All entries so far.
    pub entries: Vec<ScriptEntry>,
}

impl ScriptedVcpu {
    /// All registers 0.
    pub fn new() -> Self {
        Self::default()
    }

    /// Flat 32-bit protected mode without paging: linear addresses are physical.
    pub fn flat32() -> Self {
        let mut vcpu = Self::new();
        vcpu.registers[Reg::Cr0] = cr0::PE | cr0::ET;
        vcpu.registers[Reg::Rflags] = 2;
        for segment in [Seg::Es, Seg::Ss, Seg::Ds, Seg::Fs, Seg::Gs, Seg::Cs] {
            vcpu.registers[segment] =
                Segment { selector: 8, attrib: 0xc93, limit: u32::MAX, base: 0 };
        }
        vcpu.registers[Seg::Cs].attrib = 0xc9b;
        vcpu
    }

    /// 64-bit mode with the tables at `cr3`.
    pub fn long(cr3: u64) -> Self {
        let mut vcpu = Self::flat32();
        vcpu.registers[Reg::Cr0] = cr0::PE | cr0::ET | cr0::PG | cr0::WP;
        vcpu.registers[Reg::Cr4] = cr4::PAE;
        vcpu.registers[Reg::Cr3] = cr3;
        vcpu.registers[Reg::Efer] = efer::LME | efer::LMA | efer::NXE | efer::SCE;
        vcpu.registers[Seg::Cs].attrib = 0xa9b;
        vcpu
    }

    /// Adds a step.
    pub fn then(&mut self, step: impl FnMut(&mut Self) -> Exit + 'static) {
        self.script.push_back(std::boxed::Box::new(step));
    }
}

impl X86Vcpu for ScriptedVcpu {
    fn vtlb_events(&mut self, _: u32) -> Option<u64> {
        self.vtlb_events
    }

    const KEEPS_CR8: bool = true;

    fn cr8(&mut self) -> u8 {
        self.cr8
    }

    fn set_cr8(&mut self, value: u8) {
        self.cr8 = value;
    }

    fn set_cr8_exits(&mut self, exit: bool) {
        self.cr8_exits = exit;
    }

    fn set_iret_exits(&mut self, exit: bool) -> bool {
        self.iret_exits.as_mut().map(|place| *place = exit).is_some()
    }

    fn gpr(&mut self, register: Gpr) -> u64 {
        self.registers[register]
    }

    fn set_gpr(&mut self, register: Gpr, value: u64) {
        self.registers[register] = value;
    }

    fn get(&mut self, register: Reg) -> u64 {
        self.registers[register]
    }

    fn set(&mut self, register: Reg, value: u64) {
        self.registers[register] = value;
    }

    fn segment(&mut self, segment: Seg) -> Segment {
        self.registers[segment]
    }

    fn set_segment(&mut self, segment: Seg, value: Segment) {
        self.registers[segment] = value;
    }

    fn vector(&mut self, register: u8) -> Option<[u64; 2]> {
        Some(self.vectors?[usize::from(register)])
    }

    fn set_vector(&mut self, register: u8, value: [u64; 2]) {
        if let Some(vectors) = &mut self.vectors {
            vectors[usize::from(register)] = value;
        }
    }

    fn next_rip(&mut self) -> u64 {
        self.next_rip
    }

    fn instruction_bytes(&mut self) -> ([u8; 16], usize) {
        ([0; 16], 0)
    }

    fn invalidate(&mut self, address: u64) {
        self.invalidated.push(address);
    }

    fn complete_access(&mut self, value: Option<u64>) {
        self.answers.push(value);
    }

    fn event(&mut self) -> Event {
        self.slot
    }

    fn set_event(&mut self, event: Event) {
        self.slot = event;
    }

    fn set_window(&mut self, wanted: InterruptWindow) {
        self.window = wanted;
    }

    fn has_window(&mut self) -> bool {
        self.window != InterruptWindow::Nothing
    }
}

impl Vcpu for ScriptedVcpu {
    type Exit = Exit;

    fn set_deadline(&mut self, ticks: u64) {
        self.deadline = ticks;
    }

    fn stolen(&mut self) -> u64 {
        self.stolen
    }

    fn set_wait_exits(&mut self, exit: bool) {
        self.halts = exit;
    }

    fn flush_tlb(&mut self) {
        self.flushes += 1;
    }

    /// An empty script ends with [`Exit::HostError`] 0.
    fn run(&mut self) -> Exit {
        const RFLAGS_IF: u64 = 1 << 9;
        let entry = ScriptEntry {
            event: self.slot,
            window: self.window,
            open: self.registers[Reg::Rflags] & RFLAGS_IF != 0
                && self.registers[Reg::InterruptShadow] == 0,
            rip: self.registers[Reg::Rip],
        };
        self.entries.push(entry);
        // The entry delivers the event in the slot.
        self.slot = Event::NONE;
        match self.script.pop_front() {
            Some(mut step) => {
                let exit = step(self);
                if exit == Exit::InterruptWindow {
                    self.window = InterruptWindow::Nothing;
                }
                exit
            }
            None => Exit::HostError(0),
        }
    }
}
