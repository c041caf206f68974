//! Where on the host a virtual CPU runs: all of its processes follow the one that has it.
//!
//! Who wakes a process by a futex cannot say that it is about to wait itself, so the host looks for an idle CPU, which has to be woken and has
//! nothing of the virtual CPU in its caches. A process that finds itself on another CPU than the one before it therefore binds itself to that
//! CPU. It is free again when the virtual CPU stays with it, waits for events, or had to wait for a CPU that others use: then it goes on where
//! the host puts it, and the others follow. Where there is but one CPU nothing is binding.

use core::arch::x86_64::{__cpuid, __rdtscp};
use hw_x86::cpuid::leaf;
use linux_raw_sys::general as linux;
use proto::wedge::layout;

use crate::config::config;
use crate::shared::{Owned, mine, vcpu};
use crate::{clock, sys};

/// Words of a set of CPUs; `CPU_SETSIZE` of Linux' libraries is 1024.
const WORDS: usize = (layout::CPU_SET_LENGTH / 8) as usize;
/// A set of CPUs, as bits.
type Cpus = [u64; WORDS];

const _: () = assert!(layout::CPU_SET_CPUS == 64 * WORDS as u64);
const _: () =
    assert!((layout::CPU_SET_CPUS + 1) * layout::CPU_SET_LENGTH <= layout::CPU_SETS_LENGTH);

/// A process that had to wait longer than this for its turn has waited for a CPU, in microseconds. Others' time slices are longer.
const LONG_WAIT: u64 = 1_000;
/// For so long it is left where the host puts it, in microseconds.
const UNBOUND_TIME: u64 = 20_000;

/// What a virtual CPU remembers.
#[repr(C)]
pub struct VcpuPlacement {
    /// CPU on which it was when it was handed over.
    cpu: Owned<u32>,
    /// Time-stamp counter then.
    handed_over: Owned<u64>,
    /// Until then it goes where the host puts it.
    unbound_until: Owned<u64>,
}

/// What a process remembers.
#[repr(C)]
pub struct ProcessBinding {
    /// The CPU that it is bound to, plus 1.
    cpu: Owned<u32>,
    /// [`VcpuPlacement::handed_over`] at the last tick of the guest's clock.
    seen_hand_over: Owned<u64>,
    /// When it was last set free.
    unbound_at: Owned<u64>,
}

/// Finds out which CPUs there are, and writes the sets of them that the VM's processes may choose; `false`: there is but one, or
/// a process cannot tell on which it is. For the device process, before there are others, with [`layout::CPU_SETS`] mapped.
pub fn detect() -> bool {
    /// `RDTSCP` (APM vol. 3, CPUID Fn8000_0001_EDX).
    const RDTSCP: u32 = 1 << 27;
    let mut all: Cpus = [0; WORDS];
    let arguments = [0, size_of_val(&all) as u64, all.as_mut_ptr() as u64, 0, 0, 0];
    // SAFETY: the kernel writes the set. It fails if the host has more CPUs than that.
    let known = unsafe { sys::call(linux::__NR_sched_getaffinity, arguments) }.is_ok();
    let several = all.iter().map(|word| word.count_ones()).sum::<u32>() > 1;
    if !known || !several || __cpuid(leaf::AMD_FEATURES).edx & RDTSCP == 0 {
        return false;
    }
    let write = |number: u64, set: Cpus| {
        // SAFETY: there is room for as many sets, which nothing refers to yet.
        unsafe { (address_of(number) as *mut Cpus).write(set) }
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

/// Where a set is: that of one CPU by its number, behind these that of all.
fn address_of(number: u64) -> u64 {
    layout::CPU_SETS + number * layout::CPU_SET_LENGTH
}

/// Whether the VM was started on several CPUs, and a process can tell on which it is.
pub fn has_several_cpus() -> bool {
    config().has_cpu_sets
}

/// The time-stamp counter, and the CPU, which Linux has in the low bits of `TSC_AUX`.
fn now() -> (u64, u32) {
    let mut aux = 0;
    // SAFETY: the processor has it (`detect`).
    let tsc = unsafe { __rdtscp(&raw mut aux) };
    (tsc, aux & 0xfff)
}

/// The CPU that this process is on, if there are several.
pub fn current_cpu() -> Option<u32> {
    has_several_cpus().then(|| now().1)
}

/// Address of the set of one CPU, for sched_setaffinity(2); of an empty one, which the host refuses, if the VM was not
/// started on it.
pub fn set_of_cpu(cpu: u32) -> u64 {
    // The set of all is not one CPU's.
    address_of(u64::from(cpu).min(layout::CPU_SET_CPUS - 1))
}

/// This process is about to hand the virtual CPU over.
pub fn on_hand_over() {
    if !has_several_cpus() {
        return;
    }
    let placement = &vcpu().placement;
    let (tsc, cpu) = now();
    placement.handed_over.set(tsc);
    placement.cpu.set(cpu);
}

/// This process has got it.
pub fn on_take_over() {
    if !has_several_cpus() {
        return;
    }
    let (placement, binding) = (&vcpu().placement, &mine().binding);
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

/// The guest's clock ticks: a virtual CPU that has stayed with this process since the last time is no longer binding.
pub fn on_timer_tick() {
    let binding = &mine().binding;
    if binding.cpu.get() == 0 {
        return;
    }
    let handed_over = vcpu().placement.handed_over.get();
    if binding.seen_hand_over.get() == handed_over {
        unbind(now().0);
    }
    binding.seen_hand_over.set(handed_over);
}

/// The virtual CPU is about to wait for events: it may be that its CPU is another's when it goes on. Not each time, since it is a call of the
/// host.
pub fn on_idle() {
    let binding = &mine().binding;
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
        mine().binding.cpu.set(cpu + 1);
    }
}

fn unbind(tsc: u64) {
    let binding = &mine().binding;
    binding.unbound_at.set(tsc);
    binding.cpu.set(0);
    let _ = set_affinity(address_of(layout::CPU_SET_CPUS));
}

/// Says on which CPUs this process may run: the set at one of the addresses that its seccomp filter lets through. `false`: none
/// of them is left to it, so that it stays where it may be.
fn set_affinity(set: u64) -> bool {
    let arguments = [0, layout::CPU_SET_LENGTH, set, 0, 0, 0];
    // SAFETY: the set is read.
    unsafe { sys::call(linux::__NR_sched_setaffinity, arguments) }.is_ok()
}
