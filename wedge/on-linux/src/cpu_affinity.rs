//! Host CPU of a vCPU: all of its processes follow the one that runs it.
//!
//! A futex wake does not indicate that the waker is about to sleep, so the host places the woken
//! process on an idle CPU, which must be woken and has a cold cache. A process that finds itself on
//! another CPU than its predecessor therefore binds itself to that CPU. It is unbound when the vCPU
//! stays in this process, waits for events, or had to wait for a busy CPU: then it continues where
//! the host places it, and the other processes follow. On a host with one CPU nothing is bound.

use core::arch::x86_64::{__cpuid, __rdtscp};
use host_linux::sys;
use hw_x86::cpuid::leaf;
use linux_raw_sys::general as linux;
use proto::hosted::layout;

use crate::clock;
use crate::state::config::config;
use crate::state::process::process;
use crate::state::shared::vcpu;

/// Words of a CPU set; `CPU_SETSIZE` of Linux's C libraries is 1024.
const WORDS: usize = (layout::CPU_SET_LENGTH / 8) as usize;
/// CPU set, one bit per CPU.
type Cpus = [u64; WORDS];

const _: () = assert!(layout::CPU_SET_CPUS == 64 * WORDS as u64);
const _: () =
    assert!((layout::CPU_SET_CPUS + 1) * layout::CPU_SET_LENGTH <= layout::CPU_SETS_LENGTH);

/// Time in microseconds after which a wait for the turn counts as a wait for a busy CPU. Time
/// slices of other processes are longer.
const LONG_WAIT: u64 = 1_000;
/// Time in microseconds during which the process then stays unbound.
const UNBOUND_TIME: u64 = 20_000;

/// Detects the host CPUs and writes the CPU sets that the VM's processes may use. `false`: there is
/// one CPU, or a process cannot determine its CPU. For the device process, before it forks, with
/// [`layout::CPU_SETS`] mapped.
pub fn detect() -> bool {
    /// `RDTSCP` (APM vol. 3, CPUID Fn8000_0001_EDX).
    const RDTSCP: u32 = 1 << 27;
    let mut all: Cpus = [0; WORDS];
    // The call fails if the host has more CPUs than that.
    let known = sys::affinity(&mut all).is_ok();
    let several = all.iter().map(|word| word.count_ones()).sum::<u32>() > 1;
    if !known || !several || __cpuid(leaf::AMD_FEATURES).edx & RDTSCP == 0 {
        return false;
    }
    let write = |index: u64, set: Cpus| {
        // SAFETY: the area has room for all sets, and no reference to it exists yet.
        unsafe { (address_of(index) as *mut Cpus).write(set) }
    };
    write(layout::CPU_SET_CPUS, all);
    for cpu in
        (0..layout::CPU_SET_CPUS).filter(|cpu| all[*cpu as usize / 64] >> (cpu % 64) & 1 != 0)
    {
        let mut only = [0; WORDS];
        only[cpu as usize / 64] = 1 << (cpu % 64);
        write(cpu, only);
    }
    true
}

/// Returns the address of a CPU set: that of one CPU by its number, then that of all CPUs.
fn address_of(index: u64) -> u64 {
    layout::CPU_SETS + index * layout::CPU_SET_LENGTH
}

/// Returns whether the VM was started on several CPUs, and a process can determine its CPU.
pub fn has_several_cpus() -> bool {
    config().has_cpu_sets
}

/// Reads the TSC, and the CPU number from the low bits of `TSC_AUX`, where Linux stores it.
fn now() -> (u64, u32) {
    let mut aux = 0;
    // SAFETY: the CPU supports RDTSCP (`detect`).
    let tsc = unsafe { __rdtscp(&raw mut aux) };
    (tsc, aux & 0xfff)
}

/// Returns the CPU of this process, if there are several.
pub fn current_cpu() -> Option<u32> {
    has_several_cpus().then(|| now().1)
}

/// Returns the address of the set of one CPU, for sched_setaffinity(2). The set is empty, and
/// refused by the host, if the VM was not started on that CPU.
pub fn set_of_cpu(cpu: u32) -> u64 {
    // The last set is that of all CPUs.
    address_of(u64::from(cpu).min(layout::CPU_SET_CPUS - 1))
}

/// Records the CPU before the vCPU is handed over to another process.
pub fn on_hand_over() {
    if !has_several_cpus() {
        return;
    }
    let placement = &vcpu().placement;
    let (tsc, cpu) = now();
    placement.handed_over.set(tsc);
    placement.cpu.set(cpu);
}

/// Follows the previous process after taking over the vCPU.
pub fn on_take_over() {
    if !has_several_cpus() {
        return;
    }
    let (placement, binding) = (&vcpu().placement, &process().binding);
    let (tsc, cpu) = now();
    if cpu != placement.cpu.get() {
        if binding.cpu.get() != 0 || tsc >= placement.unbound_until.get() {
            bind(placement.cpu.get());
        }
    } else if binding.cpu.get() != 0
        && tsc.saturating_sub(placement.handed_over.get()) > clock::ticks(LONG_WAIT)
    {
        placement.unbound_until.set(tsc + clock::ticks(UNBOUND_TIME));
        unbind(tsc);
    }
}

/// Unbinds a vCPU that has stayed in this process since the last timer tick of the guest.
pub fn on_timer_tick() {
    let binding = &process().binding;
    if binding.cpu.get() == 0 {
        return;
    }
    let handed_over = vcpu().placement.handed_over.get();
    if binding.seen_hand_over.get() == handed_over {
        unbind(now().0);
    }
    binding.seen_hand_over.set(handed_over);
}

/// Unbinds a vCPU that is about to wait for events, since its CPU may be busy when it resumes.
/// Rate-limited, because it is a system call.
pub fn on_idle() {
    let binding = &process().binding;
    if binding.cpu.get() == 0 {
        return;
    }
    let (tsc, _) = now();
    if tsc.saturating_sub(binding.unbound_at.get()) > clock::ticks(UNBOUND_TIME) {
        unbind(tsc);
    }
}

fn bind(cpu: u32) {
    if set_affinity(set_of_cpu(cpu)) {
        process().binding.cpu.set(cpu + 1);
    }
}

fn unbind(tsc: u64) {
    let binding = &process().binding;
    binding.unbound_at.set(tsc);
    binding.cpu.set(0);
    let _ = set_affinity(address_of(layout::CPU_SET_CPUS));
}

/// Binds this process to the CPU set at an address that its seccomp filter permits. `false`: the
/// host permits none of these CPUs, and the process stays where it is.
fn set_affinity(set: u64) -> bool {
    let arguments = [0, layout::CPU_SET_LENGTH, set, 0, 0, 0];
    // SAFETY: the set is only read.
    unsafe { sys::call(linux::__NR_sched_setaffinity, arguments) }.is_ok()
}
