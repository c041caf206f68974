//! x86: the board `pc`, its vCPU, and its devices in processes of servers.

mod backend;
mod exit;
mod guest_virtual;
mod vtlb;

use core::arch::x86_64::__cpuid_count;

use hw_x86::cpuid::leaf;
use native_rt::start::file;
use native_rt::{SharedVcpu, Vcpu, Vm, error, time};
use proto::control::code;
use proto::start::{PassThrough, RangeKind, Start, Vmm};
use vmm_boot::BootConfig;
use vmm_machine::{Host, Pc, PcConfig, Sgis, Virq, layout};
use vmm_mem::GuestMemory;
use vmm_vcpu::{CounterClock, MAX_VCPUS};
pub use vmm_x86::Cpu as VcpuLoop;
use vmm_x86::{Gpr, Reg, Seg, X86Vcpu as _};

pub use self::backend::NativeVcpu;
use self::guest_virtual::GuestVirtual;
pub use self::vtlb::mode as vm_mode;
use crate::console::Console;
use crate::control::CONTROL;
use crate::{Cell, Devices, YieldRelax};

pub use vmm_machine::functions::PciBus as GuestBus;

/// Guest-physical addresses where windows of channels may be: first address and length.
pub const CHANNEL_WINDOWS: (u64, u64) =
    (layout::PCI_WINDOW as u64, layout::PCI_WINDOW_LENGTH as u64);
/// The board.
pub type GuestBoard<'m> = Pc<'m, YieldRelax, MAX_VCPUS, Option<&'m Devices>>;

/// Way to the guest's virtio devices: all are on PCI.
pub fn bus(_: &Vmm) -> GuestBus {
    GuestBus
}

/// Ranges of `bytes` bytes of guest memory: guest-physical address and length.
pub fn ram_ranges(_: Option<u64>, bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    vmm_boot::ram_ranges(bytes, vmm_machine::layout().hole_start)
}

/// Guest-physical address of the registers of a device that the guest drives itself. Root gives PCs
/// none.
pub fn pass_through_page(_: usize) -> u64 {
    0
}

/// Passes the interrupt of such a device to the guest.
pub fn interrupt(_: &GuestBoard, _: (usize, PassThrough), _: &VcpuLoop, _: &mut impl Host) {}

/// Wraps a vCPU that has not run yet. `is_virtual`: its space `vm` is guest-virtual.
pub fn create_vcpu<'a>(
    (vcpu, _): (Vcpu, usize),
    plan: &Vmm,
    (console, memory): (&'a Console, &'a GuestMemory),
    (vm, is_virtual): (Vm, bool),
) -> NativeVcpu<'a> {
    let optimisations = plan.vtlb.map(|vtlb| vtlb::optimisations(vtlb, plan.cpus.len()));
    let space = is_virtual.then(|| GuestVirtual::new(vm, memory, physical_bits()));
    NativeVcpu::new(vcpu, console, optimisations, space)
}

/// A guest in its memory, whose first vCPU has its initial state.
pub struct LoadedGuest;

/// Creates the board of a loaded guest. Inlined: a copy of it would not fit the stack.
#[inline(always)]
pub fn create_board<'m>(
    start: &Start,
    plan: &Vmm,
    memory: &'m GuestMemory,
    LoadedGuest: LoadedGuest,
    devices: Option<&'m Devices>,
) -> GuestBoard<'m> {
    let config = board_config(start, plan, plan.cpus.len() as u8);
    GuestBoard::with_functions(config, memory, host_cpuid, devices)
}

/// Loads the guest and sets the first vCPU to its initial state. The error is an exit code.
pub fn load(
    start: &Start,
    plan: &Vmm,
    memory: &GuestMemory,
    vcpus: &[Cell<NativeVcpu>],
    devices: Option<&Devices>,
) -> Result<LoadedGuest, u64> {
    let has_pci = devices.is_some();
    let layout = if has_pci { vmm_machine::layout_with_pci() } else { vmm_machine::layout() };
    let config = BootConfig {
        layout: &layout,
        vcpus: vcpus.len() as u8,
        kernel: file(start, RangeKind::Kernel).unwrap_or(&[]),
        initrd: file(start, RangeKind::Initrd),
        command_line: plan.command_line.as_bytes(),
    };
    match vmm_boot::load(memory, &config) {
        Ok(state) => vmm_machine::registers::set(&mut *vcpus[0].lock(), &state),
        Err(error) => {
            error!("cannot load the guest: {error:?}");
            return Err(code::BAD_CONFIG);
        }
    }
    Ok(LoadedGuest)
}

fn board_config(start: &Start, plan: &Vmm, count: u8) -> PcConfig {
    PcConfig {
        vcpus: count,
        clock: CounterClock::new(
            start.clock.tsc_khz,
            time::tsc().wrapping_sub(CONTROL.paused_ticks()),
        ),
        xcr0_mask: plan.xcr0_mask,
        start_unix: time::unix_time(&start.clock),
        kvmclock: plan.kvmclock,
        // Linux reads it at every context switch: too expensive for its use on a single CPU.
        steal_time: count > 1,
        pv_flush: plan.vtlb.is_none(),
        pv_ipi: true,
        nested_paging: plan.vtlb.is_none(),
        id: plan.id,
    }
}

/// Puts no interrupts: a vCPU of x86 gets them from its own thread.
pub fn put_virqs(_: SharedVcpu, _: &mut dyn FnMut() -> Option<Virq>) -> bool {
    false
}

/// Sets no SGIs: the local APICs are the board's.
pub fn set_sgis(_: SharedVcpu, _: Sgis) {}

/// Sets no interrupt: a vCPU of x86 is recalled for all events.
pub fn set_event_virq(_: SharedVcpu, _: usize, _: u64, _: Option<Virq>) {}

/// Logs the state of a vCPU after a triple fault or an error.
#[cold]
pub fn log_vcpu_state(index: usize, vcpu: &mut NativeVcpu) {
    let [rip, rflags] = [Reg::Rip, Reg::Rflags].map(|register| vcpu.get(register));
    let rsp = vcpu.gpr(Gpr::Rsp);
    let [cr0, cr2, cr3, cr4] =
        [Reg::Cr0, Reg::Cr2, Reg::Cr3, Reg::Cr4].map(|register| vcpu.get(register));
    error!("vCPU {index} failed: rip {rip:#x} rsp {rsp:#x} rflags {rflags:#x}");
    error!("  cr0 {cr0:#x} cr2 {cr2:#x} cr3 {cr3:#x} cr4 {cr4:#x}");
    let [cs, ss, idtr] = [Seg::Cs, Seg::Ss, Seg::Idtr].map(|segment| vcpu.segment(segment));
    error!(
        "  cs {:#x} ss {:#x} idt {:#x}+{:#x} delivering {:?}",
        cs.selector,
        ss.selector,
        idtr.base,
        idtr.limit,
        vcpu.event()
    );
}

/// Returns the width of physical addresses.
fn physical_bits() -> u32 {
    (host_cpuid(leaf::SIZES, 0)[0] & 0xff).clamp(36, 52)
}

fn host_cpuid(leaf: u32, subleaf: u32) -> [u32; 4] {
    let values = __cpuid_count(leaf, subleaf);
    [values.eax, values.ebx, values.ecx, values.edx]
}
