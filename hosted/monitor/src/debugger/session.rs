//! A debugger's session with a VM: stops and resumes virtual CPUs, reads registers and memory, and
//! sets breakpoints.

use super::guest_kernel::GuestKernel;
use super::memory::{Mapped, Ram, translate};
use crate::control::{Command, Control};
use crate::event_loop::drain;
use crate::state::State;
use gdbstub::common::{Signal, Tid};
use gdbstub::stub::MultiThreadStopReason;
use gdbstub::target::{TargetError, TargetResult};
use proto::hosted::debug::{BREAKPOINTS, DebugState, VcpuDebug, command, reason, register, stop};
use proto::hosted::layout;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

/// Time limit for virtual CPUs to stop. One that spins with interrupts disabled does not stop.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Time limit for a VM that waits for the debugger to come to its first stop, on a busy host.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A debugger session with the VM.
pub struct Session {
    pub control: Control,
    /// Set when the debugger ends, even if no VM was ever started.
    pub end: Arc<AtomicBool>,
    pub kernel: GuestKernel,
    pub vcpus: usize,
    /// The guest does not start before the debugger connects.
    pub waits: bool,
    pub ram: Ram,
    /// Readable after changes of the VM.
    pub news: UnixStream,
    pub connection: Option<OwnedFd>,
    pub connected: Arc<Mutex<Option<OwnedFd>>>,
    /// Number of restarts of the VM before this session.
    pub resets: u64,
    /// Replaced byte and offset in guest memory, by linear address.
    pub breakpoints: BTreeMap<u64, (u8, u64)>,
    /// Number of stops of each virtual CPU when it was last resumed.
    pub seen: Vec<u32>,
    /// Resume actions by virtual CPU.
    pub actions: BTreeMap<usize, u32>,
    /// Virtual CPUs without an action stay stopped.
    pub locked: bool,
}

/// Guest memory and shared memory.
type Files = (File, File);

/// Reason for the end of the session.
#[derive(Debug)]
pub struct Gone(pub Cow<'static, str>);

impl Gone {
    /// Creates one with a fixed text.
    pub const fn new(text: &'static str) -> Self {
        Self(Cow::Borrowed(text))
    }
}

/// The VM has exited.
const EXITED: Gone = Gone::new("the VM has exited");

impl Session {
    /// Begins a session with the present start of the VM.
    pub fn begin(&mut self) {
        self.resets = self.control.resets();
        // They belong to the memory and the virtual CPUs of an earlier start.
        self.breakpoints.clear();
        self.seen.fill(0);
    }

    /// Removes all breakpoints and resumes the VM.
    pub fn leave(&mut self) {
        for address in self.breakpoints.keys().copied().collect::<Vec<_>>() {
            self.remove(address);
        }
        self.actions.clear();
        self.locked = false;
        // Fails if the VM has exited.
        let _ = self.go();
    }

    /// Returns the virtual CPU of a debugger thread.
    pub fn vcpu(&self, tid: Tid) -> TargetResult<usize, Self> {
        let vcpu = tid.get() - 1;
        if vcpu < self.vcpus { Ok(vcpu) } else { Err(TargetError::NonFatal) }
    }

    pub fn has_ended(&self) -> bool {
        self.control.state() == State::Ended || self.end.load(Ordering::Relaxed)
    }

    /// Returns whether the VM has yet to start its processes.
    pub fn is_before_start(&self) -> bool {
        !self.has_ended() && !self.control.has_process()
    }

    pub fn drain(&self) {
        drain(self.news.as_fd());
    }

    /// Returns the memory of the VM.
    ///
    /// # Errors
    /// The VM has exited or restarted since the session began.
    fn files(&self) -> Result<Files, Gone> {
        let files = self.control.memory();
        // After the memory: that of a new start follows the count.
        if self.control.resets() != self.resets {
            return Err(Gone::new("the VM has restarted"));
        }
        files.ok_or(EXITED)
    }

    /// Submits a command to the VM.
    fn ask(&self, command: Command) -> Result<(), Gone> {
        let answer = self.control.submit(command);
        // After it sets the end, the debugger discards the commands: one that is queued later than
        // that sees the end here.
        let answer = match self.end.load(Ordering::Relaxed) {
            true => None,
            false => answer.blocking_recv().ok(),
        };
        match answer {
            Some(Ok(_)) => Ok(()),
            Some(Err(refusal)) => Err(Gone(refusal.into())),
            None => Err(EXITED),
        }
    }

    /// Reads a word of the shared memory.
    fn word(&self, at: usize) -> Result<u32, Gone> {
        let mut bytes = [0; 4];
        let read = self.files()?.1.read_exact_at(&mut bytes, layout::DEBUG + at as u64);
        read.map_err(|_| Gone::new("cannot read shared memory"))?;
        Ok(u32::from_le_bytes(bytes))
    }

    pub fn set_bytes(&self, at: usize, bytes: &[u8]) -> Result<(), Gone> {
        let written = self.files()?.1.write_all_at(bytes, layout::DEBUG + at as u64);
        written.map_err(|_| Gone::new("cannot write shared memory"))
    }

    fn set_word(&self, at: usize, value: u32) -> Result<(), Gone> {
        self.set_bytes(at, &value.to_le_bytes())
    }

    /// Returns whether a virtual CPU is stopped. One that has a command is about to resume.
    fn is_halted(&self, vcpu: usize) -> Result<bool, Gone> {
        // First: a virtual CPU that resumes takes its command last.
        let waits = self.word(of(vcpu, offset_of!(VcpuDebug, command)))? == command::WAIT;
        Ok(waits && self.word(of(vcpu, offset_of!(VcpuDebug, halted)))? != 0)
    }

    /// Returns whether the VM waits for the debugger, and its first virtual CPU has not come to the
    /// stop before its first instruction.
    fn is_starting(&self) -> Result<bool, Gone> {
        Ok(self.waits && self.word(of(0, offset_of!(VcpuDebug, halts)))? == 0)
    }

    /// Stops all virtual CPUs; those that do not stop in time are not visible to the debugger.
    pub fn stop_all(&mut self) -> Result<(), Gone> {
        self.set_word(offset_of!(DebugState, wanted), stop::REQUESTED)?;
        let begin = Instant::now();
        let mut deadline = begin + TIMEOUT;
        loop {
            // A virtual CPU may have stopped by itself meanwhile.
            self.ask(Command::Halt)?;
            if self.is_starting()? && begin.elapsed() < START_TIMEOUT {
                deadline = Instant::now() + TIMEOUT;
            }
            let mut all = true;
            for vcpu in 0..self.vcpus {
                all &= self.is_halted(vcpu)?;
            }
            if all || Instant::now() >= deadline {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Resumes virtual CPUs with their actions.
    pub fn go(&mut self) -> Result<(), Gone> {
        for (index, address) in self
            .breakpoints
            .keys()
            .copied()
            .chain(std::iter::repeat(0))
            .take(BREAKPOINTS)
            .enumerate()
        {
            self.set_bytes(
                offset_of!(DebugState, breakpoints) + 8 * index,
                &address.to_le_bytes(),
            )?;
        }
        let mut commands = Vec::new();
        for vcpu in 0..self.vcpus {
            // The next stop of a virtual CPU that runs has not been seen.
            let waits = self.actions.contains_key(&vcpu);
            if !self.is_halted(vcpu)? && (!waits || !self.stops(vcpu)?) {
                continue;
            }
            self.seen[vcpu] = self.word(of(vcpu, offset_of!(VcpuDebug, halts)))?;
            let other = (!self.locked).then_some(command::GO);
            commands
                .extend(self.actions.get(&vcpu).copied().or(other).map(|action| (vcpu, action)));
        }
        for (at, value) in release(self.locked, &commands) {
            self.set_word(at, value)?;
        }
        self.ask(Command::Go)
    }

    /// Returns whether a virtual CPU stops, in a moment: without a command it looks for one in
    /// between, if it arrived during the last resumption.
    fn stops(&self, vcpu: usize) -> Result<bool, Gone> {
        const ATTEMPTS: usize = 20;
        for _ in 0..ATTEMPTS {
            thread::sleep(Duration::from_millis(1));
            if self.is_halted(vcpu)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns the stop reason of a virtual CPU that has stopped since it was resumed.
    pub fn stopped(&mut self) -> Result<Option<MultiThreadStopReason<u64>>, Gone> {
        for vcpu in 0..self.vcpus {
            let halts = self.word(of(vcpu, offset_of!(VcpuDebug, halts)))?;
            if halts == self.seen[vcpu] || !self.is_halted(vcpu)? {
                continue;
            }
            let tid = tid(vcpu);
            let signal = |signal| MultiThreadStopReason::SignalWithThread { tid, signal };
            let why = match self.word(of(vcpu, offset_of!(VcpuDebug, reason)))? {
                reason::BREAKPOINT => MultiThreadStopReason::SwBreak(tid),
                reason::STEP => signal(Signal::SIGTRAP),
                // A requested stop, which came too late and ends by itself. Interruptions by the
                // debugger are reported when all have stopped.
                _ => continue,
            };
            self.stop_all()?;
            return Ok(Some(why));
        }
        Ok(None)
    }

    /// Returns the registers of a stopped virtual CPU: those of its last stop; `None` before the
    /// first one.
    pub fn registers(&self, vcpu: usize) -> Result<Option<[u64; register::COUNT]>, Gone> {
        if self.word(of(vcpu, offset_of!(VcpuDebug, halts)))? == 0 {
            return Ok(None);
        }
        let mut bytes = [0; 8 * register::COUNT];
        let at = layout::DEBUG + of(vcpu, offset_of!(VcpuDebug, registers)) as u64;
        let read = self.files()?.1.read_exact_at(&mut bytes, at);
        read.map_err(|_| Gone::new("cannot read shared memory"))?;
        let mut words = [0; register::COUNT];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = bytes.iter().rfold(0, |all, byte| all << 8 | u64::from(*byte));
        }
        Ok(Some(words))
    }

    /// Translates a linear address of a virtual CPU.
    fn place(&self, vcpu: usize, linear: u64) -> Option<Mapped> {
        let registers = self.registers(vcpu).ok()??;
        let root = registers[self.kernel.root(linear)];
        let memory = self.files().ok()?.0;
        translate(registers[register::LEVELS], root, linear, |at| {
            let mut bytes = [0; 8];
            memory.read_exact_at(&mut bytes, self.ram.offset(at)?.0).ok()?;
            Some(u64::from_le_bytes(bytes))
        })
    }

    /// Calls a function for each page of a range, with the offset in the file of guest memory and
    /// the length. Stops at the first unmapped page; returns the bytes visited.
    pub fn pages(
        &self,
        vcpu: usize,
        start: u64,
        length: usize,
        mut act: impl FnMut(&File, u64, usize, usize) -> io::Result<()>,
    ) -> usize {
        let Ok((memory, _)) = self.files() else { return 0 };
        let mut done = 0;
        while done < length {
            let Some(linear) = start.checked_add(done as u64) else { break };
            let Some(place) = self.place(vcpu, linear) else { break };
            let Some((at, there)) = self.ram.offset(place.address) else { break };
            let count =
                usize::try_from(place.left.min(there)).unwrap_or(usize::MAX).min(length - done);
            if act(&memory, at, done, count).is_err() {
                break;
            }
            done += count;
        }
        done
    }

    /// Returns the address of Linux' code once Linux runs: the first mapping of its part of the
    /// address space, in which it chooses its address (`Documentation/arch/x86/x86_64/mm.rst` and
    /// `CONFIG_PHYSICAL_ALIGN` in Linux).
    pub fn linux(&self) -> Option<u64> {
        const FIRST: u64 = 0xffff_ffff_8000_0000;
        const END: u64 = 0xffff_ffff_c000_0000;
        const ALIGNMENT: usize = 2 << 20;
        // The page tables of user mode may lack the kernel, and map parts of it elsewhere.
        let is_kernel = |vcpu: &usize| {
            self.registers(*vcpu).ok().flatten().is_some_and(|words| {
                words[register::CS] & 3 == 0 && matches!(words[register::LEVELS], 4 | 5)
            })
        };
        let vcpu = (0..self.vcpus).find(is_kernel)?;
        (FIRST..END)
            .step_by(ALIGNMENT)
            .find(|&linear| self.place(vcpu, linear).is_some_and(|place| !place.is_users))
    }

    /// Sets a breakpoint; returns `false` if that is impossible there.
    pub fn add(&mut self, address: u64) -> bool {
        if self.breakpoints.contains_key(&address) {
            return true;
        }
        // The page tables of a virtual CPU in user mode may lack the kernel.
        let places = (0..self.vcpus).map(|vcpu| (vcpu, self.place(vcpu, address)));
        let place = places.filter_map(|(vcpu, place)| Some((vcpu, place?))).next();
        let Some((vcpu, place)) = place else { return false };
        if self.breakpoints.len() >= BREAKPOINTS
            || !self.kernel.takes_breakpoint(address, place.is_users)
        {
            return false;
        }
        let (mut found, instruction) = (None, self.kernel.breakpoint());
        self.pages(vcpu, address, 1, |memory, at, _, _| {
            let mut byte = [0];
            memory.read_exact_at(&mut byte, at)?;
            memory.write_all_at(&[instruction], at)?;
            found = Some((byte[0], at));
            Ok(())
        });
        found.is_some_and(|found| {
            self.breakpoints.insert(address, found);
            true
        })
    }

    /// Removes a breakpoint, unless the guest has overwritten it.
    pub fn remove(&mut self, address: u64) -> bool {
        let Some((byte, at)) = self.breakpoints.remove(&address) else { return false };
        let mut now = [0];
        if let Ok((memory, _)) = self.files()
            && memory.read_exact_at(&mut now, at).is_ok()
            && now == [self.kernel.breakpoint()]
        {
            return memory.write_all_at(&[byte], at).is_ok();
        }
        true
    }
}

/// Returns the words, by offset, that give commands to stopped virtual CPUs, in the order in which
/// they are written. A virtual CPU may look between any two: one that found no request and no
/// command would resume, and its command be lost. `locked`: the others stay stopped.
fn release(locked: bool, commands: &[(usize, u32)]) -> Vec<(usize, u32)> {
    let wanted = |value| (offset_of!(DebugState, wanted), value);
    let mut words = vec![wanted(if locked { stop::REQUESTED } else { stop::ENDING })];
    for &(vcpu, action) in commands {
        words.push((of(vcpu, offset_of!(VcpuDebug, command)), action));
    }
    words.extend((!locked).then_some(wanted(stop::NONE)));
    words
}

/// Returns the offset of a field of a virtual CPU's record.
pub fn of(vcpu: usize, field: usize) -> usize {
    offset_of!(DebugState, vcpus) + vcpu * size_of::<VcpuDebug>() + field
}

pub fn tid(vcpu: usize) -> Tid {
    Tid::MIN.saturating_add(vcpu)
}

impl std::fmt::Display for Gone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
pub mod tests;
