//! Guest processes: each vCPU has one Linux process per guest address space, created by the device
//! process on demand or slightly ahead of it.
//!
//! Exactly one process of a vCPU runs it at a time. The vCPU's state consists of shared memory
//! (guest registers, the wedge's stack) and of state in the host CPU (extended state, bases of `FS`
//! and `GS`), which is transferred on a switch to another process. Processes of different vCPUs run
//! in parallel. The mappings of a process are the TLB of its vCPU for one address space, and follow
//! the flushes of that vCPU.

use core::arch::asm;
use core::arch::naked_asm;
use core::mem::offset_of;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use host_linux::sys::{self, Backing, Errno};
use linux_raw_sys::general as linux;
use proto::hosted::{Filters, VCPU_NAME, counter, layout, option};
use vmm_vcpu::MAX_VCPUS;

use crate::isolation;
use crate::linux::signals::ALL_SIGNALS;
use crate::mmu::ram::Ram;
use crate::report::HOST;
use crate::state::config::{config, has};
use crate::state::current::CurrentProcess;
use crate::state::doorbell;
use crate::state::process::{process, slot};
use crate::state::setup::{self, Kind};
use crate::state::shared::{
    OWN_VCPU, PRIVATE_LENGTH, PRIVATE_STACK_TOP, SharedVcpu, VCPU_LENGTH, stack_top, vcpu,
    vcpu_offset, vcpus,
};
use crate::state::statistics::count;
use crate::{
    children, compat, cpu_affinity, guest_space, kick, monitor, report, signal, steal_time, timer,
    xstate,
};

/// Switches the vCPU to the process of slot `slot_index`, which continues in this function. The
/// caller applies the changes of mappings there; it has lent no list of the previous process.
pub fn switch_to_slot(_process: &mut CurrentProcess, slot_index: usize) {
    let vcpu = vcpu();
    if slot_index == vcpu.running.load(Relaxed) as usize {
        return;
    }
    count(counter::SWITCHES);
    // The timer that limits the deferral is this process's.
    kick::wake_deferred();
    let slot = &vcpu.slots[slot_index];
    if slot.process.load(SeqCst) == 0 {
        vcpu.wanted.store(slot_index as u32 + 1, SeqCst);
        doorbell::notify();
        while slot.process.load(SeqCst) == 0 {
            sys::wait(&slot.process, 0, None);
        }
    }
    save_cpu_state(vcpu);
    cpu_affinity::on_hand_over();
    steal_time::on_hand_over();
    vcpu.running.store(slot_index as u32, SeqCst);
    // SAFETY: the stack is the vCPU's, and the process that takes it over has its slot index.
    unsafe { hand_over() };
    // Runs in the next process from here on.
    cpu_affinity::on_take_over();
    steal_time::on_take_over();
    restore_cpu_state(vcpu);
    timer::arm_timer();
}

/// Leaves the vCPU's stack to the process that runs it now, waits for this process's turn, and
/// returns on that stack.
///
/// # Safety
/// To be called on the vCPU's stack.
#[unsafe(naked)]
unsafe extern "sysv64" fn hand_over() {
    naked_asm!(
        "push rbp",
        "push rbx",
        "push r12",
        "push r13",
        "push r14",
        "push r15",
        "mov [{rsp}], rsp",
        "mov rsp, {private}",
        "call {wake_next_and_wait}",
        "jmp {take}",
        rsp = const RSP,
        private = const PRIVATE_STACK_TOP,
        wake_next_and_wait = sym wake_next_and_wait,
        take = sym take,
    )
}

/// Switches to the vCPU's stack.
///
/// # Safety
/// It must be this process's turn.
#[unsafe(naked)]
unsafe extern "sysv64" fn take() {
    naked_asm!(
        "mov rsp, [{rsp}]",
        "pop r15",
        "pop r14",
        "pop r13",
        "pop r12",
        "pop rbx",
        "pop rbp",
        "ret",
        rsp = const RSP,
    )
}

const RSP: u64 = OWN_VCPU + offset_of!(SharedVcpu, rsp) as u64;

extern "sysv64" fn wake_next_and_wait() {
    let vcpu = vcpu();
    let next = &vcpu.slots[vcpu.running.load(Relaxed) as usize];
    let turn = own_turn();
    next.turn.fetch_add(1, SeqCst);
    sys::wake(&next.turn);
    wait_for_turn(turn);
}

fn own_turn() -> u32 {
    slot().turn.load(SeqCst)
}

/// Waits until the turn differs from `seen`.
fn wait_for_turn(seen: u32) {
    let slot = slot();
    while slot.turn.load(SeqCst) == seen {
        sys::wait(&slot.turn, seen, None);
    }
}

/// Saves the state in the host CPU to shared memory.
fn save_cpu_state(vcpu: &SharedVcpu) {
    // SAFETY: the area is aligned and large enough for all extended state
    // (`layout::EXTENDED_STATE`; the loader checks).
    unsafe { xstate::save(vcpu.xsave.0.at() as u64, u64::MAX) };
    let (fs, gs) = compat::bases();
    vcpu.fs_base.set(fs);
    vcpu.gs_base.set(gs);
}

fn restore_cpu_state(vcpu: &SharedVcpu) {
    // SAFETY: `save_cpu_state` has filled the area.
    unsafe { xstate::load(vcpu.xsave.0.at() as u64, u64::MAX) };
    compat::set_bases(vcpu.fs_base.get(), vcpu.gs_base.get());
}

/// Creates the process of slot `slot_index` of a vCPU; returns its id. For the device process.
pub fn create(vcpu: usize, slot_index: usize, ram: Ram) -> Result<u32, Errno> {
    // Its first turn may come before it reads the word itself.
    let turn = vcpus()[vcpu].slots[slot_index].turn.load(SeqCst);
    setup::words().confined(Kind::Guest, vcpu, slot_index).store(false, SeqCst);
    let child = children::fork()?;
    if child != 0 {
        return Ok(child);
    }
    let parent = if has(option::TRACED) { monitor::begin() } else { Ok(children::device()) };
    match parent.and_then(|parent| become_guest(vcpu, slot_index, turn, parent, ram)) {
        Ok(never) => match never {},
        Err(error) => {
            report::warn(format_args!("cannot set up a guest process: {error}"));
            sys::exit(HOST)
        }
    }
}

/// Sets up a new guest process and waits for its first turn. Until its seccomp filter is installed
/// it trusts nothing in shared memory, and blocks all signals.
fn become_guest(
    index: usize,
    slot_index: usize,
    turn: u32,
    parent: u32,
    ram: Ram,
) -> Result<core::convert::Infallible, Errno> {
    sys::set_signal_mask(ALL_SIGNALS)?;
    map_vcpu_memory(index)?;
    let isolation = isolation::current();
    isolation.protect_process()?;
    ram.map_image(&config().start)?;
    isolation.map_process(&ram, index, slot_index)?;
    xstate::detect();
    process().slot.store(slot_index as u32, Relaxed);
    process().vcpu.store(index as u32, Relaxed);
    guest_space::map_call_stubs()?;
    children::die_with_parent(parent)?;
    set_vcpu_name(index)?;
    timer::create_timer()?;
    signal::set_up()?;
    for (first, last) in [
        (layout::INPUT_FD, layout::OUTPUT_FD),
        (layout::SHARED_FD, layout::SHARED_FD),
        (layout::DISKS_FD, u32::MAX),
    ] {
        sys::close(first, last)?;
    }
    let slot = slot();
    let id = u64::from(sys::process_id());
    children::confine(&config().filters, children::filter_index(Filters::GUEST))?;
    setup::finish(Kind::Guest, index, slot_index)?;
    // From here on the guest may control everything.
    sys::set_signal_mask(0)?;
    if slot_index != 0 {
        // Earlier changes of kernel mappings do not apply: nothing is mapped yet.
        slot.followed.store(vcpu().changes.load(SeqCst), Relaxed);
    }
    // SAFETY: it never returns: this function's stack is abandoned for the process's own, then for
    // the vCPU's.
    unsafe {
        asm!(
            "mov rsp, {private}",
            "call {first_turn}",
            "jmp {take}",
            in("rdi") u64::from(turn),
            in("rsi") id,
            private = const PRIVATE_STACK_TOP,
            first_turn = sym first_turn,
            take = sym take,
            options(noreturn),
        )
    }
}

/// Names this process after its vCPU. Its filter forbids a change.
pub fn set_vcpu_name(index: usize) -> Result<(), Errno> {
    const { assert!(MAX_VCPUS <= 10) };
    const LENGTH: usize = VCPU_NAME.len();
    let mut name = [0; LENGTH + 2];
    name[..LENGTH].copy_from_slice(VCPU_NAME.as_bytes());
    name[LENGTH] = b'0' + index as u8;
    core::ffi::CStr::from_bytes_until_nul(&name).map_or(Ok(()), sys::set_name)
}

/// Maps the memory of a vCPU, private memory and the stubs.
fn map_vcpu_memory(index: usize) -> Result<(), Errno> {
    // SAFETY: the range holds no memory of this program, except for memory inherited from the
    // device process.
    unsafe {
        let rights = linux::PROT_READ | linux::PROT_WRITE;
        sys::map(layout::PRIVATE, PRIVATE_LENGTH, rights, Backing::Own)?;
        let own = Backing::Shared(layout::SHARED_FD, vcpu_offset(index));
        sys::map(OWN_VCPU, VCPU_LENGTH, rights, own)?;
        // Only stubs are executable: the guest can write all other shared memory.
        let stubs = Backing::Shared(layout::SHARED_FD, layout::STUBS - layout::SHARED);
        sys::map(layout::STUBS, layout::STUBS_LENGTH, rights | linux::PROT_EXEC, stubs)?;
    }
    Ok(())
}

extern "sysv64" fn first_turn(seen: u64, id: u64) {
    let slot = slot();
    slot.process.store(id as u32, SeqCst);
    sys::wake(&slot.process);
    wait_for_turn(seen as u32);
}

/// Prepares a vCPU's stack so that its first process runs `main`, and starts it.
pub fn start_vcpu(index: usize, main: extern "sysv64" fn() -> !) {
    let vcpu = &vcpus()[index];
    // Six registers, the return address, and the alignment at a function's entry.
    let frame = stack_top(index) - 8 * 8;
    // SAFETY: the stack is shared memory without a user yet.
    unsafe { core::ptr::write_volatile((frame + 6 * 8) as *mut u64, main as *const () as u64) };
    vcpu.rsp.set(frame);
    vcpu.slots[0].turn.fetch_add(1, SeqCst);
    sys::wake(&vcpu.slots[0].turn);
}
