//! The device process: serves the console, makes processes for address spaces, and ends them all with the machine.

use core::sync::atomic::Ordering::SeqCst;

use linux_raw_sys::general as linux;

use crate::processes::{self, KICK};
use crate::report::HOST;
use crate::shared::{RING, event, events, shared};
use crate::sys;

/// Descriptor that the virtual CPU rings this process by.
pub const DOORBELL_FD: u32 = 5;
const INPUT_FD: u32 = 0;
const OUTPUT_FD: u32 = 1;

const READABLE: u16 = linux::POLLIN as u16;

/// Serves until the machine has ended; gives its exit code.
pub fn serve() -> u8 {
    let shared = shared();
    let mut input = true;
    loop {
        shared.rung.store(0, SeqCst);
        drain();
        let ended = shared.ended.load(SeqCst);
        if ended != 0 {
            drain();
            end_all();
            return (ended - 1) as u8;
        }
        let wanted = shared.wanted.swap(0, SeqCst);
        if wanted != 0
            && let Err(error) = processes::make(wanted as usize - 1)
        {
            crate::report::say(format_args!("the host makes no process: {error:?}"));
            end_all();
            return HOST;
        }
        if let Some(code) = dead_child() {
            drain();
            end_all();
            return code;
        }
        let room = shared.input.room();
        let (rung, typed) = wait(input && room > RING / 2);
        if rung {
            let mut count = [0; 8];
            // It has been readable, so there is something to take.
            let _ = sys::read(DOORBELL_FD, &mut count);
        }
        if typed {
            let mut bytes = [0; 4096];
            match sys::read(INPUT_FD, &mut bytes) {
                Ok(0) | Err(_) => input = false,
                Ok(count) => {
                    for &byte in &bytes[..count] {
                        // There is room: more than half of the ring.
                        shared.input.put(byte);
                    }
                    tell(event::CONSOLE);
                }
            }
        }
    }
}

/// Tells the virtual CPU of an event.
pub fn tell(what: u32) {
    let shared = shared();
    if events().fetch_or(what, SeqCst) & what != 0 {
        // Somebody else tells it.
        return;
    }
    if shared.idle.load(SeqCst) != 0 {
        sys::wake(events());
        return;
    }
    // If it is going from one process to another, the next one looks.
    let running = &shared.slots[shared.running.load(SeqCst) as usize];
    let process = running.process.load(SeqCst);
    if process != 0 {
        sys::kill(process, KICK);
    }
}

/// Prints what the guest has put.
fn drain() {
    let output = &shared().output;
    let mut bytes = [0; 4096];
    loop {
        let mut used = 0;
        while used < bytes.len() {
            let Some(byte) = output.take() else { break };
            bytes[used] = byte;
            used += 1;
        }
        if used == 0 {
            return;
        }
        let mut rest = &bytes[..used];
        while !rest.is_empty() {
            match sys::write(OUTPUT_FD, rest) {
                Ok(count) => rest = &rest[count..],
                Err(sys::Errno(4 | 11)) => {}
                // Nobody listens any longer.
                Err(_) => return,
            }
        }
        if output.room() <= RING / 2 {
            continue;
        }
        tell_room();
    }
}

/// The serial line may have had to wait for room.
fn tell_room() {
    tell(event::CONSOLE);
}

/// Waits for the doorbell or the console: which of them it was.
fn wait(with_input: bool) -> (bool, bool) {
    let entry = |fd: u32, events: u16| u64::from(fd) | u64::from(events) << 32;
    let mut entries = [entry(DOORBELL_FD, READABLE), entry(INPUT_FD, READABLE)];
    let count = if with_input { 2 } else { 1 };
    // Now and then it looks whether a process has died.
    let arguments = [entries.as_mut_ptr() as u64, count, 1000, 0, 0, 0];
    // SAFETY: the kernel writes the entries' results.
    let result = unsafe { sys::call(linux::__NR_poll, arguments) };
    if !matches!(result, Ok(1..)) {
        return (false, false);
    }
    let [rung, typed] = entries.map(|entry| entry >> 48 != 0);
    (rung, with_input && typed)
}

/// Whether a process of the guest has died: the exit code that this means.
fn dead_child() -> Option<u8> {
    let mut status = 0_u32;
    let arguments = [u64::MAX, &raw mut status as u64, u64::from(linux::WNOHANG), 0, 0, 0];
    // SAFETY: the kernel writes the status.
    let process = unsafe { sys::call(linux::__NR_wait4, arguments) }.unwrap_or(0);
    if process == 0 {
        return None;
    }
    let (signal, code) = ((status & 0x7f) as u8, (status >> 8) as u8);
    crate::report::say(format_args!(
        "process {process} of the machine died: status {code}, signal {signal}"
    ));
    Some(if signal != 0 { 128 + signal } else { code })
}

/// Ends all other processes, and waits until they are gone: whoever waits for this one finds nothing left, and no disk in use.
fn end_all() {
    let shared = shared();
    let guests = shared.slots.iter().map(|slot| &slot.child);
    for process in guests.chain(&shared.workers) {
        let process = process.load(SeqCst);
        if process != 0 {
            sys::kill(process, linux::SIGKILL);
        }
    }
    let arguments = [u64::MAX, 0, 0, 0, 0, 0];
    // SAFETY: no memory is touched. It fails when there is nobody left.
    while unsafe { sys::call(linux::__NR_wait4, arguments) }.is_ok() {}
}
