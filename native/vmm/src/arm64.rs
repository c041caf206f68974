//! AArch64: the board `virt` and its vCPU.

mod backend;

use native_rt::start::file;
use native_rt::{Vcpu, Vm, error, time};
use proto::control::code;
use proto::start::{RangeKind, Start, Vmm, event};
use proto::vtlb::Vtlb;
pub use vmm_arm64::VcpuLoop;
use vmm_arm64::{Arm64Vcpu as _, StartRequest, System};
use vmm_boot::virt::{RAM, VirtBoot};
use vmm_machine::{Virt, VirtConfig};
use vmm_mem::GuestMemory;
use vmm_vcpu::{CounterClock, MAX_VCPUS};

pub use self::backend::{NativeVcpu, put_virqs};
use crate::console::Console;
use crate::control::CONTROL;
use crate::host::NativeHost;
use crate::{Cell, Devices, YieldRelax, serve};

/// The board.
pub type GuestBoard<'m> = Virt<'m, YieldRelax, MAX_VCPUS>;

/// Mapping from events to devices: the board has none.
#[derive(Clone, Copy)]
pub struct Listeners;

impl Listeners {
    /// Creates the mapping for a VM.
    pub fn new(_: &Vmm) -> Self {
        Self
    }
}

/// Runs the VM; returns its exit code.
pub fn main(start: &Start<'static>, plan: &Vmm) -> u64 {
    let devices = plan.attachments.len() + plan.channels.len();
    if devices != 0 || plan.virtio_console || plan.vtlb.is_some() {
        error!("this board has no disks, network cards, channels, virtio consoles and no vTLB");
        return code::BAD_CONFIG;
    }
    serve(start, plan, None)
}

/// Ranges of `bytes` bytes of guest memory: guest-physical address and length.
pub fn ram_ranges(bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    core::iter::once((RAM, bytes))
}

/// Returns the mode of the VM: stage 2 translates.
pub fn vm_mode(_: Option<Vtlb>) -> u64 {
    abi::vm_mode::NESTED
}

/// Wraps a vCPU that has not run yet.
pub fn create_vcpu<'a>(
    vcpu: Vcpu,
    _: &Vmm,
    (console, _): (&'a Console, &'a GuestMemory),
    _: (Vm, bool),
) -> NativeVcpu<'a> {
    NativeVcpu::new(vcpu, console)
}

/// Loads the guest; returns the start of its first vCPU. The error is an exit code.
pub fn load(
    start: &Start,
    plan: &Vmm,
    memory: &GuestMemory,
    vcpus: &[Cell<NativeVcpu>],
    _: bool,
) -> Result<StartRequest, u64> {
    let guest = VirtBoot {
        vcpus: vcpus.len() as u8,
        kernel: file(start, RangeKind::Kernel).unwrap_or(&[]),
        initrd: file(start, RangeKind::Initrd),
        command_line: plan.command_line,
    };
    match vmm_boot::virt::load(memory, &guest) {
        Ok(loaded) => Ok(StartRequest { entry: loaded.entry, argument: loaded.tree }),
        Err(error) => {
            error!("cannot load the guest: {error:?}");
            Err(code::BAD_CONFIG)
        }
    }
}

/// Creates the board of a loaded guest.
#[inline(always)]
pub fn create_board<'m>(
    page: &Start,
    plan: &Vmm,
    memory: &'m GuestMemory,
    start: StartRequest,
    _: Option<&'m Devices>,
) -> GuestBoard<'m> {
    let counter = time::tsc().wrapping_sub(CONTROL.paused_ticks());
    let config = VirtConfig {
        vcpus: plan.cpus.len() as u8,
        clock: CounterClock::new(page.clock.tsc_khz, counter),
        start_unix: time::unix_seconds(&page.clock),
        start,
    };
    GuestBoard::new(config, memory)
}

/// Passes input of the console to the board.
pub fn notify_devices(board: &GuestBoard, cpu: &VcpuLoop, events: u64, host: &mut NativeHost) {
    if events & event::CONSOLE != 0 {
        board.input(Some(cpu), host);
    }
}

/// The board has no power button: the order is logged.
pub fn press_power_button(_: &GuestBoard, _: &mut NativeHost) {
    error!("this board has no power button: end the guest from inside, or with `kill`");
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
