//! vCPU of the wedge: runs the guest until an exit that the VMM handles.
//!
//! State shared by all vCPUs ([`VmShared`]) is on the stack of the first vCPU, which creates it and
//! starts the secondary ones. These wait for their start-up IPI like any application processor.
//! Linux's real-mode trampoline is not executed; [`LinuxVcpu::start_secondary`] has its effect.

use core::arch::x86_64::__cpuid_count;
use core::ops::Range;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};
use core::time::Duration;

use hw_x86::cpuid::{extended_b, extended_c, features_c, leaf};
use proto::hosted::debug::reason;
use proto::hosted::{Start, option};
use spin::mutex::SpinMutex;
use vmm_machine::{Outcome, Pc, PcConfig, StopReason};
use vmm_mem::GuestMemory;
use vmm_vcpu::{CounterClock, MAX_VCPUS};
use vmm_x86::{Event, InterruptWindow};
use wedge_core::VirtualCpu;

use crate::backend::{self, BusSlots, LinuxHost};
use crate::clock::YieldRelax;
use crate::guest_space::GuestSpace;
use crate::isolation;
use crate::mmu::frames::write_by_device;
use crate::mmu::ram::Ram;
use crate::sites::Sites;
use crate::state::config::{config, start};
use crate::state::current::{self, CurrentProcess, CurrentVcpu};
use crate::state::doorbell;
use crate::state::process::{self, own_index, slot};
use crate::state::shared::{event, shared, vcpus};
use crate::vcpu::{DebugStep, LinuxVcpu, set_shared_range};
use crate::{compat, debug, idle, kick, processes, profile, report, steal_time};

type Machine<'m> = Pc<'m, YieldRelax, MAX_VCPUS, Option<&'m BusSlots>>;

/// State shared by all vCPUs.
struct VmShared<'m> {
    start: &'m Start,
    ram: Ram,
    memory: &'m GuestMemory,
    machine: &'m Machine<'m>,
    /// Slots of the PCI functions.
    device_slots: &'m backend::DeviceSlots,
    sites: &'m SpinMutex<Sites, YieldRelax>,
}

/// Returns the guest's CPUID values: the host's, without features that the wedge does not support,
/// with PCID, which it implements.
fn guest_cpuid(function: u32, subleaf: u32) -> [u32; 4] {
    let values = __cpuid_count(function, subleaf);
    let [a, mut b, mut c, mut d] = [values.eax, values.ebx, values.ecx, values.edx];
    match function {
        leaf::FEATURES => c |= features_c::PCID,
        leaf::EXTENDED_FEATURES if subleaf == 0 => {
            b &= !(extended_b::SMEP | extended_b::SMAP);
            b |= extended_b::INVPCID | extended_b::FSGSBASE;
            c &= !(extended_c::UMIP | extended_c::PKU | extended_c::RDPID);
        }
        // XSAVES.
        leaf::XSAVE if subleaf == 1 => return [a & !(1 << 3), b, c, d],
        // RDTSCP would read the host's `TSC_AUX`.
        leaf::AMD_FEATURES => d &= !(1 << 27),
        _ => {}
    }
    [a, b, c, d]
}

/// Creates the VM on the stack of its first vCPU, and runs that vCPU.
pub extern "sysv64" fn main() -> ! {
    let Some(start) = start() else {
        report::fatal(format_args!("the loader's record has another version"));
    };
    let ram = Ram::new(&start);
    let Some(memory) = ram.memory() else {
        report::fatal(format_args!("invalid size of guest memory: {} bytes", start.memory));
    };
    // SAFETY: this process runs the vCPU, in its event loop, which begins here.
    let (mut cpu, process) = unsafe { current::take() };
    power_on(&mut cpu, &start);
    let mut sites = Sites::new(start.options);
    if let Err(problem) = sites.rewrite_table(&cpu, &memory, start.sites, start.sites_length) {
        report::warn(format_args!("cannot rewrite the kernel's patch sites: {problem}"));
        doorbell::end_vm(65);
    }
    if start.options & option::NO_FUNCTIONS == 0
        && start.text_poke != 0
        && let Err(problem) = sites.replace_function(&cpu, &memory, start.text_poke)
    {
        report::warn(format_args!("cannot replace `__text_poke`: {problem}"));
        if isolation::current().scans_code() {
            // The kernel could change its code without a scan.
            doorbell::end_vm(65);
        }
    }
    let config = PcConfig {
        vcpus: start.vcpus as u8,
        clock: CounterClock::new(config().tsc_khz, 0),
        xcr0_mask: process::process().xsave_layout.get().enabled_of(start.xcr0),
        start_unix: Duration::from_nanos(config().unix_at_zero),
        kvmclock: true,
        steal_time: true,
        // An idle vCPU would drop all its address spaces, that is, their mappings.
        pv_flush: false,
        // Linux patches `VMMCALL` over a site. It does not fault in user mode of a virtualized
        // host.
        pv_ipi: false,
        nested_paging: true,
        id: 1,
    };
    let mut slots = BusSlots::new();
    let device_slots = backend::add_devices(&mut slots, &start);
    // The devices access no other memory.
    let of_devices = memory.observed(write_by_device);
    // By reference: a second copy of all slots would take memory.
    let machine = Machine::with_functions(config, &of_devices, guest_cpuid, Some(&slots));
    let sites = SpinMutex::new(sites);
    let (memory, machine, sites) = (&memory, &machine, &sites);
    let all = VmShared { start: &start, ram, memory, machine, device_slots: &device_slots, sites };
    shared().machine.store(&raw const all as u64, SeqCst);
    for index in 1..vcpus().len() {
        processes::start_vcpu(index, secondary_main);
    }
    drive(&all, 0, cpu, process)
}

/// Entry point of a secondary vCPU.
extern "sysv64" fn secondary_main() -> ! {
    let all = shared().machine.load(SeqCst) as *const VmShared<'static>;
    // SAFETY: `main` has created it in memory shared by all guest processes, and never returns.
    let all = unsafe { &*all };
    // It has no state before its start-up IPI.
    // SAFETY: this process runs the vCPU, in its event loop, which begins here.
    let (mut cpu, process) = unsafe { current::take() };
    *cpu = VirtualCpu::new();
    drive(all, own_index(), cpu, process)
}

/// Runs a vCPU until the VM ends.
fn drive(all: &VmShared<'_>, index: usize, cpu: CurrentVcpu, process: CurrentProcess) -> ! {
    let VmShared { start, ram, memory, machine, sites, .. } = *all;
    let mut host = LinuxHost::new(start);
    let mut state = machine.cpu(index);
    let mut vcpu = LinuxVcpu {
        cpu,
        isolation: isolation::current(),
        space: GuestSpace::new(process, start, ram, *memory),
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
        descriptor_changes: 1,
        debugs: start.options & option::DEBUG != 0,
        step: DebugStep::None,
    };
    crate::state::shared::vcpu().deadline.store(u64::MAX, Relaxed);
    steal_time::on_resume();
    if index == 0 {
        doorbell::await_start();
        if vcpu.debugs && debug::shared().is_wanted() {
            vcpu.halt_for_debugger(reason::WANTED);
        }
    }
    loop {
        let events = match machine.run(&mut state, &mut vcpu, &mut host) {
            StopReason::Recall(events) => events as u32,
            StopReason::Idle { deadline_ticks } => {
                kick::wake_deferred();
                idle::wait(deadline_ticks)
            }
            StopReason::End(outcome) => {
                if outcome == Outcome::TripleFault {
                    report_triple_fault(&vcpu.cpu);
                }
                doorbell::end_vm(outcome.exit_code());
            }
        };
        vcpu.space.sync_before_entry();
        if events & event::STOP != 0 {
            doorbell::end_vm(Outcome::PowerOff.exit_code());
        }
        if events & event::DEBUG != 0 && vcpu.debugs && debug::shared().is_wanted() {
            vcpu.halt_for_debugger(reason::WANTED);
        }
        serve_events(all, &state, &mut host, events);
    }
}

/// Serves the events that concern the VM's devices.
fn serve_events(all: &VmShared<'_>, state: &vmm_x86::run::Cpu, host: &mut LinuxHost, events: u32) {
    let VmShared { machine, device_slots, .. } = *all;
    if events & event::POWER_BUTTON != 0 {
        machine.press_power_button(host);
    }
    if events & event::CONSOLE != 0 {
        machine.input(Some(state), host);
    }
    let slots_of = |bit, slots: &Range<usize>| if events & bit != 0 { slots.clone() } else { 0..0 };
    for slot in slots_of(event::DISK, &device_slots.disks)
        .chain(slots_of(event::SHARE, &device_slots.shares))
        .chain(slots_of(event::NET, &device_slots.nets))
        .chain(slots_of(event::BALLOON, &device_slots.balloon))
        .chain(slots_of(event::CONSOLE, &device_slots.console))
    {
        machine.function_input(slot, Some(state), host);
        device_slots.set_target(slot, machine.target(slot));
    }
}

/// Sets the initial state of the first vCPU from the loader's record.
fn power_on(cpu: &mut VirtualCpu, start: &Start) {
    *cpu = VirtualCpu::new();
    cpu.frame.rip = start.rip;
    cpu.frame.gpr[4] = start.rsp;
    cpu.frame.gpr[7] = start.rdi;
    cpu.cr3 = start.cr3;
    slot().root.store(start.cr3, Relaxed);
    cpu.gdtr = wedge_core::DescriptorTable { base: start.gdt, limit: start.gdt_limit as u16 };
    cpu.segments[1].selector = start.cs as u16;
    set_shared_range(cpu, start);
    compat::set_bases(0, start.gs_base);
}

/// Prints the vCPU's state after a triple fault.
#[cold]
fn report_triple_fault(cpu: &VirtualCpu) {
    report::warn(format_args!(
        "guest triple fault: rip {:#x} rsp {:#x} rflags {:#x} cr2 {:#x} cr3 {:#x} cpl {}",
        cpu.frame.rip,
        cpu.frame.gpr[4],
        cpu.rflags(),
        cpu.cr2,
        cpu.cr3,
        cpu.cpl
    ));
}
