//! Interrupt controllers: local APIC in both modes, I/O APIC, and the timer chip that feeds it.

use crate::port;
use crate::trap::{self, FIRST_INTERRUPT, TrapFrame};
use crate::{cpu, smp};
use core::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};
use hw_x86::apic::{io, local};
use hw_x86::cpuid::kvm_a;
use hw_x86::msr::{self, apic_base, kvm};

const LOCAL: u64 = 0xfee0_0000;
const IO: u64 = 0xfec0_0000;
/// Global interrupt of the timer chip.
const PIT_GSI: u32 = 2;
/// Place of an id in the xAPIC's registers.
const ID_SHIFT: u32 = 24;
/// `ICR_LOW`: to the sender.
const ICR_SELF: u32 = 1 << 18;

static X2APIC: AtomicBool = AtomicBool::new(false);

/// Reads a register of the local APIC, in the present mode.
pub fn read(register: u32) -> u32 {
    if X2APIC.load(Relaxed) {
        cpu::read_msr(x2apic_msr(register)).unwrap_or(u32::MAX.into()) as u32
    } else {
        read_memory(LOCAL + u64::from(register))
    }
}

/// Writes a register of the local APIC, in the present mode.
pub fn write(register: u32, value: u32) {
    if X2APIC.load(Relaxed) {
        // SAFETY: local APIC registers cause interrupts at most, for which handlers exist.
        let _ = unsafe { cpu::write_msr(x2apic_msr(register), value.into()) };
    } else {
        write_memory(LOCAL + u64::from(register), value);
    }
}

/// MSR of a local APIC register.
pub fn x2apic_msr(register: u32) -> u32 {
    msr::X2APIC + register / 16
}

/// Reads a 32-bit device register.
fn read_memory(address: u64) -> u32 {
    // SAFETY: start-up maps the addresses of the two APICs.
    unsafe { (address as *const u32).read_volatile() }
}

/// Writes a 32-bit device register.
fn write_memory(address: u64, value: u32) {
    // SAFETY: as in `read_memory`; APICs write to no memory.
    unsafe { (address as *mut u32).write_volatile(value) };
}

/// Turns the local APIC on, everything in it masked, and silences the 8259 pair.
pub fn enable() {
    const PIC_DATA: [u16; 2] = [0x21, 0xa1];
    for port in PIC_DATA {
        port::write8(port, 0xff);
    }
    for entry in [local::LVT_TIMER, local::LVT_LINT0, local::LVT_LINT1, local::LVT_ERROR] {
        write(entry, local::LVT_MASKED);
    }
    write(local::TPR, 0);
    write(local::SVR, local::SVR_ENABLE | 0xff);
}

/// Switches the local APIC to x2APIC mode, after those of all other processors. `Err`: the vector
/// of the exception.
pub fn enter_x2apic() -> Result<(), u8> {
    switch_to_x2apic()?;
    X2APIC.store(true, Relaxed);
    Ok(())
}

/// Switches the local APIC to x2APIC mode. It must not be used until [`enter_x2apic`] on the last
/// processor.
pub fn switch_to_x2apic() -> Result<(), u8> {
    let base = cpu::read_msr(msr::APIC_BASE)?;
    // SAFETY: only the mode changes.
    unsafe { cpu::write_msr(msr::APIC_BASE, base | apic_base::X2APIC) }
}

/// Switches the local APIC from x2APIC mode off, and on again in xAPIC mode: there is no direct
/// way.
pub fn leave_x2apic() -> Result<(), u8> {
    let base = cpu::read_msr(msr::APIC_BASE)?;
    // SAFETY: without a local APIC there are no interrupts; nothing waits for one.
    unsafe {
        cpu::write_msr(msr::APIC_BASE, base & !(apic_base::X2APIC | apic_base::ENABLE))?;
        cpu::write_msr(msr::APIC_BASE, base & !apic_base::X2APIC)?;
    }
    X2APIC.store(false, Relaxed);
    Ok(())
}

/// For each processor, the word whose bit 0 says that an interrupt may be ended by clearing it.
static EOI_WORDS: [AtomicU32; smp::MOST] = [const { AtomicU32::new(0) }; smp::MOST];
/// Interrupts that were ended in memory.
static QUIET_ENDS: AtomicU32 = AtomicU32::new(0);

/// From now on, [`end_of_interrupt`] on this processor uses the paravirtual way if it can. Gives
/// whether there is one.
pub fn use_paravirtual_eoi() -> bool {
    const ENABLE: u64 = 1;
    let word = EOI_WORDS[smp::index()].as_ptr().addr() as u64;
    // SAFETY: the word is the hypervisor's from now on, and atomic.
    cpu::kvm_features() & kvm_a::PV_EOI != 0
        && unsafe { cpu::write_msr(kvm::EOI, word | ENABLE) }.is_ok()
}

/// Interrupts that were ended in the paravirtual way so far.
pub fn quiet_ends() -> u32 {
    QUIET_ENDS.load(Relaxed)
}

/// For programs that an interrupt only wakes: ends it. An exception is unexpected.
pub fn acknowledge(frame: &mut TrapFrame) {
    if u64::from(frame.vector()) < FIRST_INTERRUPT {
        trap::unexpected(frame);
    }
    end_of_interrupt();
}

/// Ends the interrupt in service.
pub fn end_of_interrupt() {
    if EOI_WORDS[smp::index()].fetch_and(!1, Relaxed) & 1 != 0 {
        QUIET_ENDS.fetch_add(1, Relaxed);
    } else {
        write(local::EOI, 0);
    }
}

/// Sends an interrupt to this processor.
pub fn send_self(vector: u8) {
    write(local::ICR_LOW, ICR_SELF | local::ICR_ASSERT | u32::from(vector));
}

/// Sends an interrupt command: `command` is the low half of the register, `destination` an APIC id.
pub fn send(destination: u32, command: u32) {
    if X2APIC.load(Relaxed) {
        let value = u64::from(destination) << 32 | u64::from(command);
        // SAFETY: interrupts, for which handlers exist, or a start of another processor, whose code
        // exists.
        let _ = unsafe { cpu::write_msr(x2apic_msr(local::ICR_LOW), value) };
        return;
    }
    write(local::ICR_HIGH, destination << ID_SHIFT);
    write(local::ICR_LOW, command);
    while read(local::ICR_LOW) & local::ICR_PENDING != 0 {
        core::hint::spin_loop();
    }
}

/// This processor's id.
pub fn id() -> u32 {
    let id = read(local::ID);
    if X2APIC.load(Relaxed) { id } else { id >> ID_SHIFT }
}

/// Returns true if a vector is requested but not in service yet.
pub fn requested(vector: u8) -> bool {
    read(local::IRR + u32::from(vector / 32) * 16) & 1 << (vector % 32) != 0
}

/// Starts the local timer: `mode` is one of the `TIMER_` modes, `count` in ticks (0 stops).
pub fn start_timer(mode: u32, vector: u8, count: u32) {
    write(local::TIMER_DIVIDE, local::DIVIDE_BY_1);
    write(local::LVT_TIMER, mode | u32::from(vector));
    write(local::TIMER_INITIAL, count);
}

/// Stops the local timer.
pub fn stop_timer() {
    write(local::LVT_TIMER, local::LVT_MASKED);
    write(local::TIMER_INITIAL, 0);
}

/// Routes the timer chip to a vector (edge-triggered, to this processor), or nowhere.
pub fn route_pit(vector: Option<u8>) {
    route(PIT_GSI, vector.map(u32::from));
}

/// Routes a global interrupt to a vector (level-triggered, active high, to this processor).
pub fn route_level(interrupt: u32, vector: u8) {
    route(interrupt, Some(io::LEVEL | u32::from(vector)));
}

/// Sets the redirection entry of a global interrupt, with this processor as its destination.
fn route(interrupt: u32, low: Option<u32>) {
    let entry = io::REDIRECTION + 2 * interrupt;
    write_io(entry, io::MASKED);
    write_io(entry + 1, id() << io::DESTINATION_SHIFT);
    if let Some(low) = low {
        write_io(entry, low);
    }
}

fn write_io(register: u32, value: u32) {
    write_memory(IO + io::SELECT, register);
    write_memory(IO + io::WINDOW, value);
}

/// Makes the timer chip raise its line once, after `count` ticks of 838 ns.
pub fn start_pit(count: u16) {
    const COMMAND: u16 = 0x43;
    const CHANNEL_0: u16 = 0x40;
    /// Channel 0, low and high byte, interrupt on terminal count.
    const ONE_SHOT: u8 = 0x30;
    let [low, high] = count.to_le_bytes();
    port::write8(COMMAND, ONE_SHOT);
    port::write8(CHANNEL_0, low);
    port::write8(CHANNEL_0, high);
}
