//! AArch64: the board `virt` and its vCPU.

mod backend;

use core::sync::atomic::{AtomicU64, Ordering};

use abi::vcpu::arm64::{CPU_INTERFACE, CPU_INTERFACE_LENGTH, virq};
use heapless::Vec;
use hw_arm64::gic::{Version, v2};
use native_rt::device::{DeviceRegisters, configuration, function_registers, register_place};
use native_rt::random::Generator;
use native_rt::start::file;
use native_rt::{Vcpu, Vm, error, time, warn};
use proto::channel::MAX_VM_CHANNELS;
use proto::control::code;
use proto::start::{GUEST_RAM, PassThrough, PassThroughKind, RangeKind, Start, Vmm};
use proto::system::{MAX_VM_DEVICES, VirtioTransport};
use proto::vtlb::Vtlb;
pub use vmm_arm64::VcpuLoop;
use vmm_arm64::{Arm64Vcpu as _, StartRequest, System, Width};
use vmm_boot::BootError;
use vmm_boot::virt::{self as layout, DeviceKind, PassThroughNode, RAM, SlotNode, VirtBoot};
pub use vmm_machine::VirtBus as GuestBus;
use vmm_machine::{Host, Model, PassThroughFunction, Virt, VirtConfig};
use vmm_mem::GuestMemory;
use vmm_vcpu::{CounterClock, MAX_VCPUS};

pub use self::backend::{NativeVcpu, put_virqs, set_event_virq, set_sgis};
use crate::console::Console;
use crate::control::CONTROL;
use crate::devices::{MAX_DEVICES, RandomSource};
use crate::{Cell, Devices, YieldRelax};

/// Guest-physical addresses where windows of channels may be: first address and length.
pub const CHANNEL_WINDOWS: (u64, u64) =
    (layout::channel_memory(0), layout::MAX_CHANNELS * layout::CHANNEL_STRIDE);
const _: () = assert!(MAX_DEVICES <= layout::MAX_SLOTS);
const _: () = assert!(MAX_VM_DEVICES <= layout::MAX_PASS_THROUGH);
const _: () = assert!(layout::CPU_INTERFACE == CPU_INTERFACE);
const _: () = assert!(layout::RAM == GUEST_RAM);
const _: () = assert!(MAX_VM_CHANNELS <= virq::COUNT);
const _: () = assert!(v2::cpu_interface::LENGTH == CPU_INTERFACE_LENGTH);
/// The board.
pub type GuestBoard<'m> = Virt<'m, YieldRelax, MAX_VCPUS, Option<&'m Devices>>;

/// Way to the guest's virtio devices.
pub fn bus(plan: &Vmm) -> GuestBus {
    match plan.transport {
        VirtioTransport::Pci => GuestBus::Pci,
        VirtioTransport::Mmio => GuestBus::Fixed,
    }
}

/// Ranges of `bytes` bytes of guest memory: guest-physical address and length. `identity`: address
/// that is not the board's.
pub fn ram_ranges(identity: Option<u64>, bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    core::iter::once((identity.unwrap_or(RAM), bytes))
}

/// Guest-physical address of the page with the registers of a device that the guest drives itself.
pub fn pass_through_page(number: usize) -> u64 {
    layout::pass_through(number)
}

/// Passes the interrupt of such a device to the guest.
pub fn interrupt(
    board: &GuestBoard,
    (number, device): (usize, PassThrough),
    cpu: &VcpuLoop,
    host: &mut impl Host,
) {
    board.pass_through_interrupt(number, device.is_level, Some(cpu), host);
}

/// Returns the mode of the VM: stage 2 translates.
pub fn vm_mode(_: Option<Vtlb>) -> u64 {
    abi::vm_mode::NESTED
}

/// Wraps a vCPU that has not run yet. The kernel delivers the SGIs that it gets.
pub fn create_vcpu<'a>(
    (vcpu, index): (Vcpu, usize),
    plan: &Vmm,
    (console, _): (&'a Console, &'a GuestMemory),
    (vm, _): (Vm, bool),
) -> NativeVcpu<'a> {
    if let Err(status) = vcpu.become_sgi_target(vm, index) {
        warn!("the kernel does not deliver SGIs to vCPU {index}: {status:?}");
    }
    let random = RandomSource::new(plan, VCPU_STREAM | index as u64);
    NativeVcpu::new(vcpu, console, random)
}

/// Version of the guest's interrupt controller.
fn gic_version(plan: &Vmm) -> Version {
    if plan.gicv2 { Version::V2 } else { Version::V3 }
}

/// Stream of the seed that the first vCPU has ([`RandomSource`]); those of others follow.
const VCPU_STREAM: u64 = 1 << 32;
/// Stream for the place of the guest's kernel at its first boot; those of other boots follow.
const KASLR_STREAM: u64 = 1 << 33;
/// Number of boots of the guest.
static BOOTS: AtomicU64 = AtomicU64::new(0);

/// 32-bit kernels decompress themselves to a multiple of this, which must be the start of RAM.
const ZIMAGE_ALIGN: u64 = 128 << 20;

/// Describes a device that the guest drives itself.
fn node_of(start: &Start, (number, device): (usize, &PassThrough)) -> PassThroughNode {
    let (offset, length) = register_place(start, number as u64).unwrap_or_default();
    let kind = match device.kind {
        PassThroughKind::Pl011 => DeviceKind::Pl011,
        PassThroughKind::Virtio => DeviceKind::Virtio,
        PassThroughKind::Pci => DeviceKind::Pci,
    };
    PassThroughNode { kind, offset, length, is_level: device.is_level }
}

/// Loads the guest; returns the start of its first vCPU and the kind of all. The error is an exit
/// code.
pub fn load(
    start: &Start,
    plan: &Vmm,
    memory: &GuestMemory,
    vcpus: &[Cell<NativeVcpu>],
    devices: Option<&Devices>,
) -> Result<(StartRequest, Width), u64> {
    if plan.vtlb.is_some() {
        error!("this processor has no vTLB");
        return Err(code::BAD_CONFIG);
    }
    let node = |slot| match devices?.model(slot)? {
        Model::Channel(info) => Some(SlotNode::Channel(info.number)),
        _ if plan.transport == VirtioTransport::Pci => Some(SlotNode::Pci),
        _ => Some(SlotNode::Virtio),
    };
    if plan.identity.is_some_and(|address| address < RAM) {
        error!(
            "the VM's memory is where the board has devices: it needs an address of 1 GiB or more"
        );
        return Err(code::BAD_CONFIG);
    }
    let pass_through: Vec<_, MAX_VM_DEVICES> =
        plan.devices.iter().enumerate().map(|device| node_of(start, device)).collect();
    let slots: [_; layout::MAX_SLOTS] = core::array::from_fn(node);
    // Each boot has a seed of its own. The entropy source has stream 0.
    let boot = 1 + BOOTS.fetch_add(1, Ordering::Relaxed);
    let random = |stream| plan.seed.map(|seed| Generator::new(seed, stream).seed());
    let (seed, kaslr_seed) = (random(boot), random(KASLR_STREAM | boot));
    let guest = VirtBoot {
        vcpus: vcpus.len() as u8,
        kernel: file(start, RangeKind::Kernel).unwrap_or(&[]),
        initrd: file(start, RangeKind::Initrd),
        command_line: plan.command_line,
        slots: &slots,
        pass_through: &pass_through,
        gic: gic_version(plan),
        seed: seed.as_ref(),
        kaslr_seed: kaslr_seed.and_then(|seed| seed.first_chunk().copied()).map(u64::from_le_bytes),
    };
    match vmm_boot::virt::load(memory, &guest) {
        Ok(loaded) if loaded.is_32_bit && !plan.aarch32 => {
            error!(
                "the kernel is a 32-bit one (zImage), but the processor has no AArch32 at EL1: \
                 use a 64-bit kernel, or another processor"
            );
            Err(code::BAD_CONFIG)
        }
        Ok(loaded)
            if loaded.is_32_bit && plan.identity.is_some_and(|at| at % ZIMAGE_ALIGN != 0) =>
        {
            error!("a 32-bit kernel cannot have a virtio device of the machine");
            Err(code::BAD_CONFIG)
        }
        Ok(loaded) => {
            let width = if loaded.is_32_bit { Width::Bits32 } else { Width::Bits64 };
            Ok((StartRequest { entry: loaded.entry, argument: loaded.tree }, width))
        }
        Err(error) => {
            log_load_error(error);
            Err(code::BAD_CONFIG)
        }
    }
}

/// Logs the reason why a guest is not loaded.
#[cold]
fn log_load_error(error: BootError) {
    match error {
        BootError::BigEndian => error!("cannot load the guest: {error}"),
        // Other texts name the formats of x86-64.
        _ => error!("cannot load the guest: {error:?}"),
    }
}

/// Creates the board of a loaded guest.
#[inline(always)]
pub fn create_board<'m>(
    page: &Start,
    plan: &Vmm,
    memory: &'m GuestMemory,
    (start, width): (StartRequest, Width),
    devices: Option<&'m Devices>,
) -> GuestBoard<'m> {
    let counter = time::tsc().wrapping_sub(CONTROL.paused_ticks());
    let config = VirtConfig {
        vcpus: plan.cpus.len() as u8,
        clock: CounterClock::new(page.clock.tsc_khz, counter),
        start_unix: time::unix_time(&page.clock),
        start,
        gic: gic_version(plan),
        width,
    };
    let mut board = GuestBoard::new(config, memory, devices);
    for (number, device) in plan.devices.iter().enumerate() {
        if device.kind == PassThroughKind::Pci
            && let Some(real) = configuration(page, number)
        {
            board.add_function(number, function_of(page, number, real));
        }
    }
    board
}

/// Returns the configuration space that the guest sees of a PCI function, device `number` that it
/// drives itself.
fn function_of(start: &Start, number: usize, real: DeviceRegisters) -> PassThroughFunction {
    let length = |index| {
        let registers = function_registers(start, number, index as u8);
        registers.map_or(0, |registers| registers.length())
    };
    PassThroughFunction::new(|at| real.read32(at.into()), core::array::from_fn(length))
}

/// Logs the state of a vCPU that the kernel refuses to enter.
#[cold]
pub fn log_vcpu_state(index: usize, vcpu: &mut NativeVcpu) {
    let (pc, state) = (vcpu.pc(), vcpu.state());
    error!("vCPU {index} failed: pc {pc:#x} state {state:#x}");
    let [sctlr, vbar, esr, elr] =
        [System::Sctlr, System::Vbar, System::Esr, System::Elr].map(|name| vcpu.system(name));
    error!("  sctlr {sctlr:#x} vbar {vbar:#x} esr {esr:#x} elr {elr:#x}");
}
