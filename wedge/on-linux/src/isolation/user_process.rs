//! User/kernel isolation without protection keys: a second process for each address space of the
//! guest, which maps the pages of guest user mode and nothing else
//! (`docs/design/0018-user-processes.md`).
//!
//! The *kernel process* runs the guest kernel and the wedge. To run user mode it resumes the *user
//! process* and waits until that has stopped. Both share the [`Mailbox`]: the kernel process writes
//! the [`Request`], which the user process can only read.
//!
//! The user process has two threads. The *user thread* runs user mode and, after each signal, the
//! stop handler below, which it leaves only by `rt_sigreturn` with the context that the kernel
//! process has written. Its seccomp filter permits only futex waits and wakes, and returns from
//! signals. The *mapper thread* performs the mapping system calls. Its code accesses no memory
//! except the request, so user mode, which can write all other memory of the process, cannot
//! control it.
//!
//! Invariant: the kernel process continues only when the host kernel reports that the user thread
//! waits for the next request ([`is_stopped`]). Whatever user mode has done to its process, it does
//! not run then, and resumes in the stop handler. Changes of its mappings are therefore queued
//! until it runs again.
//!
//! Invariant: the user thread is resumed only when the host kernel reports that the mapper waits
//! for the next batch, with all calls of this batch completed ([`await_mapper`]). No word of the
//! [`Response`] is evidence of either.

use core::arch::naked_asm;
use core::mem::offset_of;
use core::sync::atomic::AtomicU32;
use core::sync::atomic::Ordering::{Relaxed, SeqCst};

use host_linux::sys::{self, Backing, Errno};
use linux_raw_sys::general as linux;
use proto::hosted::layout::{self, EXTENDED_STATE};
use proto::hosted::option;
use vmm_x86::msr::is_canonical;
use wedge_core::VirtualCpu;
use wedge_core::cpu::rflags;

use crate::isolation::contract::{Isolation, Stop};
use crate::isolation::mailbox::{
    MAX_COMMANDS, Mailbox, RESPONSE, Request, Response, STACK, UserProcess, mailbox,
};
use crate::linux::signals::{self, KICK, SignalFrame};
use crate::mmu::ram::Ram;
use crate::report;
use crate::state::config::{self, has};
use crate::state::current::code_selector;
use crate::state::doorbell;
use crate::state::process::process;
use crate::state::shared::{events, vcpu};
use crate::{clock, compat, cpu_affinity, steal_time, xstate};

/// Largest number of waits of [`WAIT_TIME`] each, after which the user process counts as
/// unresponsive. Elapsed time is no criterion, because the VM may be paused.
const MAX_WAITS: u32 = 10_000;
/// Duration of one wait in nanoseconds.
const WAIT_TIME: u64 = 1_000_000;
/// Consecutive user processes with a failed mapping call after which the VM ends.
const MAX_FAILURES: u32 = 16;
/// Upper bound of the time between the user thread's notification and its futex wait in
/// microseconds, unless its CPU is busy.
const SETTLE_TIME: u64 = 200;

/// Returns the instructions in which a signal prevents the futex wait: start, and the address at
/// which the handler resumes.
pub fn wait_window() -> (u64, u64) {
    unsafe extern "C" {
        static parador_wedge_user_window: u8;
        static parador_wedge_user_window_end: u8;
    }
    (&raw const parador_wedge_user_window as u64, &raw const parador_wedge_user_window_end as u64)
}

/// Waits until `word` differs from `seen`, unless events are pending. A signal, whose handler posts
/// an event, ends the wait.
#[unsafe(naked)]
extern "sysv64" fn wait_unless(events: &AtomicU32, word: &AtomicU32, seen: u32) {
    naked_asm!(
        "mov r8, rdi",
        "mov rdi, rsi",
        "mov esi, {wait}",
        "xor r10d, r10d",
        "mov eax, {futex}",
        ".globl parador_wedge_user_window",
        "parador_wedge_user_window:",
        "cmp dword ptr [r8], 0",
        "jne 2f",
        "syscall",
        ".globl parador_wedge_user_window_end",
        "parador_wedge_user_window_end:",
        "2:",
        "ret",
        wait = const linux::FUTEX_WAIT,
        futex = const linux::__NR_futex,
    )
}

/// Returns whether a thread of the user process waits on `word` while that has the value `value`,
/// according to the host kernel (`FUTEX_CMP_REQUEUE`). If so, the thread waits on `parked` from
/// then on, without having been woken.
fn is_waiting(word: &AtomicU32, parked: &AtomicU32, value: u32) -> bool {
    let (none, one) = (0, 1);
    let arguments = [
        word.as_ptr() as u64,
        linux::FUTEX_CMP_REQUEUE.into(),
        none,
        one,
        parked.as_ptr() as u64,
        value.into(),
    ];
    // SAFETY: the call moves a thread from one futex queue to the other.
    let moved = unsafe { sys::call(linux::__NR_futex, arguments) };
    moved == Ok(1)
}

/// Returns whether the user thread waits for the next request, according to the host kernel. If so,
/// it waits on [`Request::parked`] from then on, without having been woken.
fn is_stopped() -> bool {
    let Request { turn, parked, .. } = &mailbox().request;
    is_waiting(turn, parked, turn.load(SeqCst))
}

/// Resumes the user thread.
fn resume_thread() {
    let Request { turn, parked, .. } = &mailbox().request;
    turn.fetch_add(1, SeqCst);
    if !sys::wake_one(parked) {
        // A pause of the VM has restarted its wait on `turn`.
        sys::wake(turn);
    }
}

/// Waits until a word differs from `seen`, for [`WAIT_TIME`] at most; ends the VM after
/// [`MAX_WAITS`] waits. Not for the device process, with whose end the VM ends: it may be slow.
fn wait_limited(word: &AtomicU32, seen: u32, times: &mut u32) {
    *times += 1;
    if *times > MAX_WAITS {
        report::fatal(format_args!("the user process does not stop"));
    }
    sys::wait(word, seen, Some(WAIT_TIME));
}

/// Index of the address of the extended state in a signal context.
const EXTENDED: usize = 28;
/// Index of the signal mask in a signal context.
const MASK: usize = signals::CONTEXT as usize / 8 - 1;

/// Waits until the mapper has finished this batch; returns whether each of its calls has succeeded.
///
/// The host kernel reports the futex queue in which the mapper waits. A thread enters the queue of
/// `batch` only while that has the value that the thread has read. The mapper does so only after
/// completing the batch of this number, and [`UserProcess::commit`] has woken all earlier waiters.
/// The user thread cannot be in that queue, because it waits for its turn.
fn await_mapper(batch: u32) -> bool {
    let Mailbox { request, response } = mailbox();
    let (mut times, mut settled_by) = (0, None);
    loop {
        // A hint only, because user mode can write it. A forged value makes the query too early or
        // slightly late.
        let seen = response.batch.load(SeqCst);
        if seen != batch || settled_by.is_some_and(|until| clock::tsc() >= until) {
            sys::wait(&response.batch, seen, Some(WAIT_TIME));
            times += 1;
        }
        if is_waiting(&request.batch, &request.batch_parked, batch) {
            return true;
        }
        if times > MAX_WAITS || is_waiting(&request.failed, &request.failed_parked, 0) {
            return false;
        }
        if seen == batch {
            settled_by.get_or_insert_with(|| clock::tsc() + clock::ticks(SETTLE_TIME));
            // The mapper may need this CPU.
            sys::yield_now();
        }
    }
}

/// Waits until the device process has sent the stop signal, if one was requested.
fn wait_until_stop_sent() {
    let vcpu = vcpu();
    let asked = vcpu.stop_requests.load(SeqCst);
    loop {
        let told = vcpu.stops_sent.load(SeqCst);
        if told == asked {
            break;
        }
        sys::wait(&vcpu.stops_sent, told, None);
    }
}

/// Returns whether the device process has sent the stop signals that were requested.
fn is_stop_sent() -> bool {
    let vcpu = vcpu();
    vcpu.stops_sent.load(SeqCst) == vcpu.stop_requests.load(SeqCst)
}

/// `FP_XSTATE_MAGIC2`.
const MAGIC_2: u32 = 0x4650_5845;

/// Isolation by processes.
pub struct UserProcesses;

impl Isolation for UserProcesses {
    fn map_process(&self, _ram: &Ram, vcpu: usize, slot: usize) -> Result<(), Errno> {
        let rights = linux::PROT_READ | linux::PROT_WRITE;
        let mailbox = Backing::Shared(layout::SHARED_FD, layout::mailbox(vcpu, slot));
        // SAFETY: nothing is mapped there.
        unsafe { sys::map(layout::MAILBOX, layout::MAILBOX_LENGTH, rights, mailbox) }
    }

    fn run_user(&self, user: &mut UserProcess, cpu: &mut VirtualCpu) -> Option<Stop> {
        Some(user.run(cpu))
    }

    fn selectors(&self, user: &UserProcess) -> [u16; 4] {
        user.selectors
    }
}

impl UserProcess {
    /// Requests a new user process, waits for its first stop, before user mode runs, and records
    /// the layout of the host's signal frames.
    fn connect(&mut self) {
        /// Offset of `struct _fpx_sw_bytes` in the extended state.
        const LAYOUT: u64 = 464;
        let request = &mailbox().request;
        // The mapper waits for another value; neither 0 nor 1 is the number of a batch.
        request.batch.store(0, SeqCst);
        request.used.store(0, Relaxed);
        let wanted = &vcpu().user_wanted;
        wanted.store(1 + process().slot.load(Relaxed), SeqCst);
        doorbell::notify();
        while let number @ 1.. = wanted.load(SeqCst) {
            sys::wait(wanted, number, None);
        }
        let mut times = 0;
        let response = &mailbox().response;
        while !is_stopped() {
            if response.context.load(Relaxed) == 0 {
                wait_limited(&response.turn, response.turn.load(SeqCst), &mut times);
            } else {
                // Between its notification and its futex wait.
                sys::yield_now();
            }
        }
        // The mapper unmaps the memory of the handshake before user mode runs.
        let until = clock::tsc() + clock::ticks(SETTLE_TIME);
        while !is_waiting(&request.batch, &request.batch_parked, 0) {
            if clock::tsc() < until {
                sys::yield_now();
            } else {
                wait_limited(&response.turn, response.turn.load(SeqCst), &mut times);
            }
        }
        self.context = response.context.load(Relaxed);
        let stack = RESPONSE + offset_of!(Response, stack) as u64;
        let stack = stack..stack + STACK as u64;
        // SAFETY: a context written by the host kernel is complete.
        let is_whole = stack.contains(&self.context)
            && unsafe {
                self.template = (self.context as *const [u64; 38]).read_volatile();
                // All signals were blocked until now.
                self.template[MASK] = 0;
                let area = self.template[EXTENDED];
                stack.contains(&area) && {
                    self.layout = ((area + LAYOUT) as *const [u64; 6]).read_volatile();
                    self.end = self.layout[2] as u32;
                    stack.contains(&(area + u64::from(self.end)))
                }
            };
        if !is_whole || self.end as usize > EXTENDED_STATE {
            report::fatal(format_args!("unknown format of the host's signal frames"));
        }
        self.process = response.process.load(Relaxed) as u32;
        self.cpu = 0;
        // Unknown, so that they are loaded.
        self.loaded = [u16::MAX; 4];
        request.batch.store(1, SeqCst);
    }

    /// Queues a mapping change, which the mapper executes before user mode runs again.
    fn push(&mut self, command: [u64; 7]) {
        if self.process == 0 {
            // The next process starts with nothing mapped.
            return;
        }
        let request = &mailbox().request;
        if request.used.load(Relaxed) as usize >= MAX_COMMANDS {
            self.commit();
        }
        let used = request.used.load(Relaxed);
        let Some(place) = request.commands.get(used as usize) else { return };
        for (to, word) in place.iter().zip(command) {
            to.store(word, Relaxed);
        }
        request.used.store(used + 1, Relaxed);
    }

    /// Lets the mapper execute the queued changes while user mode is stopped. Unless the host
    /// kernel confirms that each call has succeeded, the process is abandoned: its mappings are
    /// unknown, so user mode never runs in it again, and [`UserProcess::run`] replaces it.
    fn commit(&mut self) {
        let request = &mailbox().request;
        if request.used.load(Relaxed) == 0 {
            return;
        }
        // Neither 0 (no batch) nor 1 (ready).
        let batch = request.batch.load(Relaxed).checked_add(1).unwrap_or(2);
        request.batch.store(batch, SeqCst);
        // Wake both queues: a thread that waits on `batch` from here on has read its new value.
        sys::wake(&request.batch_parked);
        sys::wake(&request.batch);
        let is_done = await_mapper(batch);
        request.used.store(0, Relaxed);
        if !is_done {
            self.replace();
            self.is_unmapped = true;
        }
    }

    /// Queues the mapping of guest memory in the user process.
    pub fn map(&mut self, linear: u64, size: u64, rights: u32, offset: u64) {
        let flags = linux::MAP_SHARED | linux::MAP_FIXED | linux::MAP_POPULATE;
        let arguments =
            [linear, size, rights.into(), flags.into(), layout::MEMORY_FD.into(), offset];
        self.call(linux::__NR_mmap, arguments);
    }

    /// Queues an unmapping in the user process.
    pub fn unmap(&mut self, start: u64, end: u64) {
        self.call(linux::__NR_munmap, [start, end - start, 0, 0, 0, 0]);
    }

    /// Queues a reduction of rights in the user process.
    pub fn narrow(&mut self, start: u64, end: u64, rights: u32) {
        self.call(linux::__NR_mprotect, [start, end - start, rights.into(), 0, 0, 0]);
    }

    fn call(&mut self, number: u32, [a, b, c, d, e, f]: [u64; 6]) {
        self.push([number.into(), a, b, c, d, e, f]);
    }

    /// Marks the user process for replacement: the next user code belongs to another address space.
    pub fn replace(&mut self) {
        self.process = 0;
    }

    /// Runs user mode until it stops, by a signal or for events.
    fn run(&mut self, cpu: &mut VirtualCpu) -> Stop {
        self.selectors = compat::selectors();
        if self.process == 0 {
            self.connect();
        }
        self.follow_cpu();
        self.commit();
        if core::mem::take(&mut self.is_unmapped) {
            // The host is out of memory or mappings. The next process has nothing mapped, and all
            // pages can be faulted in again.
            self.failures += 1;
            if self.failures > MAX_FAILURES {
                report::fatal(format_args!(
                    "cannot map or unmap user memory in {MAX_FAILURES} consecutive user processes"
                ));
            }
            return Stop::Unmapped;
        }
        if events().load(SeqCst) != 0 {
            return Stop::Events;
        }
        self.write_context(cpu);
        cpu_affinity::on_hand_over();
        steal_time::on_idle();
        self.failures = 0;
        resume_thread();
        self.wait();
        steal_time::on_resume();
        cpu_affinity::on_take_over();
        self.read_context(cpu);
        Stop::Signal
    }

    /// Moves the user process to this CPU: a switch to a thread on another CPU costs several times
    /// as much.
    fn follow_cpu(&mut self) {
        let Some(cpu) = cpu_affinity::current_cpu() else { return };
        let request = &mailbox().request;
        let is_elsewhere = self.cpu != cpu + 1;
        let set = if is_elsewhere { cpu_affinity::set_of_cpu(cpu) } else { 0 };
        request.cpu_set.store(set, Relaxed);
        if is_elsewhere {
            self.cpu = cpu + 1;
            self.call(linux::__NR_sched_setaffinity, [0, layout::CPU_SET_LENGTH, set, 0, 0, 0]);
        }
    }

    /// Waits until user mode has stopped.
    fn wait(&self) {
        let Mailbox { request, response } = mailbox();
        let turn = request.turn.load(Relaxed);
        // Number of stop signals, and the time until which the user thread may be on its way to its
        // futex wait.
        let (mut times, mut settled_by) = (0, None);
        let mut is_stop_requested = false;
        loop {
            let seen = response.turn.load(SeqCst);
            if seen == turn && is_stopped() {
                if !is_stop_requested {
                    return;
                }
                // User mode that has jumped to the stop handler may still receive the signal, which
                // writes to memory; after another wait it cannot.
                is_stop_requested = false;
                wait_until_stop_sent();
                sys::wake(&request.parked);
                settled_by = Some(clock::tsc() + clock::ticks(SETTLE_TIME));
                continue;
            }
            if seen == turn {
                let until =
                    *settled_by.get_or_insert_with(|| clock::tsc() + clock::ticks(SETTLE_TIME));
                if clock::tsc() < until {
                    // The user thread may need this CPU.
                    sys::yield_now();
                    continue;
                }
            }
            if seen != turn && !is_stop_requested && events().load(SeqCst) == 0 {
                wait_unless(events(), &response.turn, seen);
                continue;
            }
            // Events are pending, or the notification was forged.
            is_stop_requested = true;
            if is_stop_sent() {
                self.stop();
                wait_limited(&response.turn, seen, &mut times);
            } else {
                sys::wait(&response.turn, seen, Some(WAIT_TIME));
            }
        }
    }

    /// Stops user mode.
    fn stop(&self) {
        if config::kicks() {
            sys::kill(self.process, KICK);
        } else {
            vcpu().stop_requests.fetch_add(1, SeqCst);
            doorbell::notify();
        }
    }

    /// Writes the vCPU's registers to the user thread's signal context. All of the context is
    /// written, because user mode may have changed it.
    fn write_context(&mut self, cpu: &VirtualCpu) {
        let peer = &*self;
        let request = &mailbox().request;
        let mut words = peer.template;
        for (word, register) in words[5..].iter_mut().zip(signals::ORDER) {
            *word = cpu.frame.gpr[register];
        }
        words[21] = cpu.frame.rip;
        words[22] = cpu.frame.rflags;
        words[23] = words[23] & !0xffff | code_selector(cpu);
        let area = words[EXTENDED];
        let features = peer.layout[1] & !xstate::PKRU;
        // SAFETY: `connect` has validated the addresses; the memory has no other use, and the
        // thread waits.
        unsafe {
            (peer.context as *mut [u64; 38]).write_volatile(words);
            ((area + 464) as *mut [u64; 6]).write_volatile(peer.layout);
            ((area + u64::from(peer.end)) as *mut u32).write_unaligned(MAGIC_2);
            xstate::save(area, features);
        }
        request.context.store(peer.context, Relaxed);
        let (fs, gs) = compat::bases();
        request.bases[0].store(fs, Relaxed);
        request.bases[1].store(gs, Relaxed);
        let areas = compat::areas();
        let is_changed = self.loaded != self.selectors || self.areas != areas;
        let is_compat = has(option::COMPAT) && (compat::has_selectors(cpu) || is_changed);
        if is_compat {
            self.areas = areas;
            for (to, area) in request.areas.iter().zip(areas) {
                to.iter().zip(area).for_each(|(to, word)| to.store(word, Relaxed));
            }
            for (to, selector) in request.selectors.iter().zip(self.selectors) {
                to.store(selector.into(), Relaxed);
            }
        }
        request.is_compat.store(is_compat.into(), Relaxed);
    }

    /// Reads the vCPU's registers from the user thread's signal context, restricted to values that
    /// user mode can have.
    fn read_context(&mut self, cpu: &mut VirtualCpu) {
        let response = &mailbox().response;
        let vcpu = vcpu();
        // SAFETY: `connect` has validated the address; nothing writes this memory while the thread
        // waits.
        let frame = unsafe { (self.context as *const SignalFrame).read_volatile() };
        let context = &frame.context;
        for (value, place) in context.registers.iter().zip(signals::ORDER) {
            cpu.frame.gpr[place] = *value;
        }
        cpu.frame.rip = context.rip;
        cpu.frame.rflags = context.rflags & u64::from(wedge_x86::USER_FLAGS) | rflags::IF | 2;
        cpu.sync_code_segment(context.is_64_bit());
        let mut signal = signals::sanitize(response.number.load(Relaxed), &frame);
        if signal.number == linux::SIGSYS {
            signal.vector = frame.call_vector();
        }
        vcpu.signal.set(signal);
        self.selectors =
            core::array::from_fn(|index| match response.selectors[index].load(Relaxed) as u16 {
                none @ 0..4 => none,
                selector => selector | 3,
            });
        self.loaded = self.selectors;
        let area = vcpu.xsave.0.at();
        // SAFETY: as above. The copy has this length, and is used otherwise only during a switch of
        // the process.
        unsafe {
            let from = self.template[EXTENDED] as *const u8;
            core::ptr::copy_nonoverlapping(from, area.cast(), self.end as usize);
        }
        xstate::restore(area as u64, EXTENDED_STATE as u64);
        let base = |index: usize| {
            let base = response.bases[index].load(Relaxed);
            // User mode can set no other, but write any word of the response.
            if is_canonical(base) { base } else { 0 }
        };
        compat::set_bases(base(0), base(1));
    }
}
