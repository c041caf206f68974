//! `--gdb`: GDB server for a VM, with GDB's remote serial protocol
//! (`docs/design/0015-debugger.md`).
//!
//! A thread of `parador` accesses guest memory and shared memory as files, and asks the VM's first
//! process to stop and resume virtual CPUs. It does not trust the contents of either: the guest may
//! have written them. Virtual CPUs are threads 1, 2 ... of the debugger.

use crate::config::gdb::{GdbAddress, GdbEndpoint};
use crate::console::listen;
use crate::control::{Command, Control};
use crate::state::State;
use gdbstub::arch::Arch;
use gdbstub::common::{Signal, Tid};
use gdbstub::conn::ConnectionExt;
use gdbstub::stub::run_blocking::{BlockingEventLoop, Event, WaitForStopReasonError};
use gdbstub::stub::{GdbStub, GdbStubError, MultiThreadStopReason};
use gdbstub::target::ext::base::BaseOps;
use gdbstub::target::ext::base::multithread::{
    MultiThreadBase, MultiThreadResume, MultiThreadResumeOps, MultiThreadSchedulerLocking,
    MultiThreadSchedulerLockingOps, MultiThreadSingleStep, MultiThreadSingleStepOps,
};
use gdbstub::target::ext::breakpoints::{
    Breakpoints, BreakpointsOps, SwBreakpoint, SwBreakpointOps,
};
use gdbstub::target::ext::section_offsets::{Offsets, SectionOffsets, SectionOffsetsOps};
use gdbstub::target::{Target, TargetError, TargetResult};
use gdbstub_arch::x86::X86_64_SSE;
use gdbstub_arch::x86::reg::X86_64CoreRegs;
use hosted_command::failure::{self, Failure};
use hosted_command::messages::{Level, say};
use hosted_loader::Image;
use proto::hosted::debug::{
    BREAKPOINT, BREAKPOINTS, DebugState, HALT, VcpuDebug, command, reason, register,
};
use proto::hosted::layout;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::Shutdown;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::mem::offset_of;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// Time limit for virtual CPUs to stop. One that spins with interrupts disabled does not stop.
const TIMEOUT: Duration = Duration::from_secs(1);
/// Time for the debugger to receive the VM's exit.
const LINGER: Duration = Duration::from_millis(500);
/// Page size.
const PAGE: u64 = 4096;
/// Bits of a page-table entry (AMD APM vol. 2, section 5.3).
const PRESENT: u64 = 1;
const USER: u64 = 1 << 2;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// First guest-physical address of memory above 4 GiB.
const HIGH: u64 = 1 << 32;
/// General registers in GDB's order (rax, rbx, rcx, rdx, rsi, rdi, rbp, rsp, r8 ...), by their
/// instruction encoding.
const ORDER: [usize; 16] = [0, 3, 1, 2, 6, 7, 5, 4, 8, 9, 10, 11, 12, 13, 14, 15];

/// Makes a VM that is about to start wait for the debugger; `shared` is its shared memory.
pub fn make_wait(shared: &OwnedFd) -> Result<(), Failure> {
    let file = shared.try_clone().map(File::from);
    let at = layout::DEBUG + offset_of!(DebugState, wanted) as u64;
    let written = file.and_then(|file| file.write_all_at(&1_u32.to_le_bytes(), at));
    written.map_err(|error| Failure::os("make the VM wait for the debugger", &error))
}

/// Kernel properties that matter to the debugger.
pub enum GuestKernel {
    /// Guest of the process back end.
    Process {
        /// First address of the kernel's code.
        start: u64,
        /// Patch sites: address and length.
        sites: Vec<(u64, u64)>,
    },
    /// Guest of KVM, which chooses its own address.
    Kvm,
}

impl GuestKernel {
    /// Returns the properties of a pre-virtualized kernel.
    pub fn new(image: &Image<'_>) -> Self {
        Self::Process { start: image.start(), sites: image.site_ranges() }
    }

    /// Returns whether a breakpoint can be set at this address: kernel code, at an instruction that
    /// the wedge does not replace. `is_users`: the page is accessible in user mode.
    fn takes_breakpoint(&self, address: u64, is_users: bool) -> bool {
        match self {
            Self::Process { sites, .. } => {
                let is_kernel = (layout::IMAGE..layout::WEDGE).contains(&address)
                    || (layout::DIRECT..layout::GUEST_END).contains(&address);
                is_kernel && !is_inside(sites, address)
            }
            Self::Kvm => !is_users,
        }
    }

    /// Returns the opcode of a breakpoint.
    fn breakpoint(&self) -> u8 {
        match self {
            Self::Process { .. } => BREAKPOINT,
            Self::Kvm => HALT,
        }
    }

    /// Returns the index of the register with the page-table root of a linear address.
    fn root(&self, linear: u64) -> usize {
        match self {
            Self::Process { .. } if (layout::IMAGE..layout::LOW_END).contains(&linear) => {
                register::KERNEL_ROOT
            }
            _ => register::CR3,
        }
    }
}

/// Returns whether the address is inside a patch site, after its first byte.
fn is_inside(sites: &[(u64, u64)], address: u64) -> bool {
    let behind = sites.partition_point(|site| site.0 < address);
    let before = behind.checked_sub(1).and_then(|index| sites.get(index));
    before.is_some_and(|&(start, length)| address - start < length)
}

/// Listens for debuggers in a thread; dropping it ends the thread.
pub struct Debugger {
    path: Option<PathBuf>,
    thread: Option<JoinHandle<()>>,
    connected: Arc<Mutex<Option<OwnedFd>>>,
    /// Set on drop, even if no VM was ever started.
    end: Arc<AtomicBool>,
    wake: UnixStream,
}

/// Listening socket.
enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    fn descriptor(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }

    /// Accepts a connection and duplicates its descriptor.
    fn accept(&self) -> io::Result<(Connection, OwnedFd)> {
        match self {
            Self::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                let copy = stream.try_clone()?;
                Ok((Box::new(stream), copy.into()))
            }
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                let copy = stream.try_clone()?;
                Ok((Box::new(stream), copy.into()))
            }
        }
    }
}

type Connection = Box<dyn ConnectionExt<Error = io::Error>>;

impl Debugger {
    /// Listens at `place`.
    ///
    /// # Errors
    /// The socket cannot be created.
    pub fn start(
        place: &GdbEndpoint,
        control: Control,
        kernel: GuestKernel,
        (vcpus, ram): (u8, Ram),
    ) -> Result<Self, Failure> {
        let (listener, path) = match place.address() {
            GdbAddress::Unix(path) => {
                (Listener::Unix(listen(path, "the debugger's socket")?), Some(path.clone()))
            }
            GdbAddress::Tcp(address) => (Listener::Tcp(listen_tcp(address)?), None),
        };
        let failed = |error| Failure::os("listen for a debugger", &error);
        let (news, wake) = UnixStream::pair().map_err(failed)?;
        let copy = wake.try_clone().map_err(failed)?;
        news.set_nonblocking(true).and_then(|()| wake.set_nonblocking(true)).map_err(failed)?;
        control.set_debugger(copy);
        let connected = Arc::new(Mutex::new(None));
        let end = Arc::<AtomicBool>::default();
        let mut session = Session {
            control,
            end: Arc::clone(&end),
            kernel,
            vcpus: usize::from(vcpus),
            ram,
            news,
            connection: None,
            connected: Arc::clone(&connected),
            breakpoints: BTreeMap::new(),
            seen: vec![0; vcpus.into()],
            actions: BTreeMap::new(),
            locked: false,
        };
        let thread = thread::Builder::new().name("gdb".to_owned());
        let thread = thread.spawn(move || session.serve(&listener)).map_err(failed)?;
        Ok(Self { path, thread: Some(thread), connected, end, wake })
    }
}

impl Drop for Debugger {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // The socket may have been removed already.
            let _ = fs::remove_file(path);
        }
        let Some(thread) = self.thread.take() else { return };
        self.end.store(true, Ordering::Relaxed);
        let _ = rustix::io::write(&self.wake, &[0]);
        let deadline = Instant::now() + LINGER;
        while !thread.is_finished() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        let connected = self.connected.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(connection) = connected {
            // The connection may be closed already.
            let _ = rustix::net::shutdown(&connection, Shutdown::Both);
        }
        // Joining fails only after a panic of the thread, which has been reported.
        let _ = thread.join();
    }
}

fn listen_tcp(address: &str) -> Result<TcpListener, Failure> {
    let failed = |error: &io::Error| {
        let text =
            format!("cannot listen for a debugger at {address}: {}", failure::describe(error));
        Failure::new(failure::code_of(error), text)
    };
    let addresses: Vec<SocketAddr> = match address.strip_prefix(':') {
        // Remote access requires an explicit address.
        Some(port) => vec![(Ipv4Addr::LOCALHOST, port.parse().unwrap_or(0)).into()],
        None => address.to_socket_addrs().map_err(|error| failed(&error))?.collect(),
    };
    let listener = TcpListener::bind(&*addresses).map_err(|error| failed(&error))?;
    listener.set_nonblocking(true).map_err(|error| failed(&error))?;
    Ok(listener)
}

/// A debugger session with the VM.
struct Session {
    control: Control,
    /// See [`Debugger`].
    end: Arc<AtomicBool>,
    kernel: GuestKernel,
    vcpus: usize,
    ram: Ram,
    /// Readable after changes of the VM.
    news: UnixStream,
    connection: Option<OwnedFd>,
    connected: Arc<Mutex<Option<OwnedFd>>>,
    /// Replaced byte and offset in guest memory, by linear address.
    breakpoints: BTreeMap<u64, (u8, u64)>,
    /// Number of stops of each virtual CPU when it was last resumed.
    seen: Vec<u32>,
    /// Resume actions by virtual CPU.
    actions: BTreeMap<usize, u32>,
    /// Virtual CPUs without an action stay stopped.
    locked: bool,
}

/// Guest memory and shared memory.
type Files = (File, File);

/// Reason for the end of the session.
#[derive(Debug)]
struct Gone(&'static str);

impl Session {
    fn serve(&mut self, listener: &Listener) {
        while !self.has_ended() {
            let (mut fds, idle) = (
                [listener.descriptor(), self.news.as_fd()]
                    .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)),
                Timespec { tv_sec: 1, tv_nsec: 0 },
            );
            let _ = poll(&mut fds, Some(&idle));
            let is_news = !fds[1].revents().is_empty();
            if is_news {
                self.drain();
            }
            let (connection, copy, second) = match Self::accept(listener) {
                Ok(accepted) => accepted,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(_) => {
                    // Most likely file descriptors are exhausted; closing connections free some.
                    thread::sleep(Duration::from_millis(100));
                    continue;
                }
            };
            *self.connected.lock().unwrap_or_else(PoisonError::into_inner) = Some(second);
            self.connection = Some(copy);
            if let Err(error) = self.session(connection) {
                say(Level::Warn, &format!("debugger connection failed: {error}"));
            }
            self.connection = None;
            *self.connected.lock().unwrap_or_else(PoisonError::into_inner) = None;
            self.leave();
        }
    }

    /// Accepts a connection and duplicates its descriptor twice.
    fn accept(listener: &Listener) -> io::Result<(Connection, OwnedFd, OwnedFd)> {
        let (connection, copy) = listener.accept()?;
        let second = copy.try_clone()?;
        Ok((connection, copy, second))
    }

    /// Serves one debugger.
    fn session(&mut self, connection: Connection) -> Result<(), String> {
        self.stop_all().map_err(|gone| gone.0.to_owned())?;
        match GdbStub::new(connection).run_blocking::<Events>(self) {
            Ok(_) => Ok(()),
            // The debugger disconnected without detaching.
            Err(error) if error.is_connection_error() => Ok(()),
            Err(error) => Err(describe(&error)),
        }
    }

    /// Removes all breakpoints and resumes the VM.
    fn leave(&mut self) {
        for address in self.breakpoints.keys().copied().collect::<Vec<_>>() {
            self.remove(address);
        }
        self.actions.clear();
        self.locked = false;
        // Fails if the VM has exited.
        let _ = self.go();
    }

    /// Returns the virtual CPU of a debugger thread.
    fn vcpu(&self, tid: Tid) -> TargetResult<usize, Self> {
        let vcpu = tid.get() - 1;
        if vcpu < self.vcpus { Ok(vcpu) } else { Err(TargetError::NonFatal) }
    }

    fn has_ended(&self) -> bool {
        self.control.state() == State::Ended || self.end.load(Ordering::Relaxed)
    }

    fn drain(&self) {
        let mut bytes = [0; 64];
        // Reads do not block.
        while matches!((&self.news).read(&mut bytes), Ok(1..)) {}
    }

    fn files(&self) -> Result<Files, Gone> {
        self.control.memory().ok_or(Gone("the VM has exited"))
    }

    /// Submits a command to the VM.
    fn ask(&self, command: Command) -> Result<(), Gone> {
        match self.control.submit(command).blocking_recv() {
            Ok(Ok(_)) => Ok(()),
            _ => Err(Gone("the VM has exited")),
        }
    }

    /// Reads a word of the shared memory.
    fn word(&self, at: usize) -> Result<u32, Gone> {
        let mut bytes = [0; 4];
        let read = self.files()?.1.read_exact_at(&mut bytes, layout::DEBUG + at as u64);
        read.map_err(|_| Gone("cannot read shared memory"))?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn set_bytes(&self, at: usize, bytes: &[u8]) -> Result<(), Gone> {
        let written = self.files()?.1.write_all_at(bytes, layout::DEBUG + at as u64);
        written.map_err(|_| Gone("cannot write shared memory"))
    }

    fn set_word(&self, at: usize, value: u32) -> Result<(), Gone> {
        self.set_bytes(at, &value.to_le_bytes())
    }

    fn is_halted(&self, vcpu: usize) -> Result<bool, Gone> {
        Ok(self.word(of(vcpu, offset_of!(VcpuDebug, halted)))? != 0)
    }

    /// Stops all virtual CPUs; those that do not stop in time are not visible to the debugger.
    fn stop_all(&mut self) -> Result<(), Gone> {
        self.set_word(offset_of!(DebugState, wanted), 1)?;
        let deadline = Instant::now() + TIMEOUT;
        loop {
            // A virtual CPU may have stopped by itself meanwhile.
            self.ask(Command::Halt)?;
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
    fn go(&mut self) -> Result<(), Gone> {
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
        self.set_word(offset_of!(DebugState, wanted), self.locked.into())?;
        for vcpu in 0..self.vcpus {
            self.seen[vcpu] = self.word(of(vcpu, offset_of!(VcpuDebug, halts)))?;
            let other = (!self.locked).then_some(command::GO);
            if let Some(command) = self.actions.get(&vcpu).copied().or(other)
                && self.is_halted(vcpu)?
            {
                self.set_word(of(vcpu, offset_of!(VcpuDebug, command)), command)?;
            }
        }
        self.ask(Command::Go)
    }

    /// Returns the stop reason of a virtual CPU that has stopped since it was resumed.
    fn stopped(&mut self) -> Result<Option<MultiThreadStopReason<u64>>, Gone> {
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
                _ => signal(Signal::SIGINT),
            };
            self.stop_all()?;
            return Ok(Some(why));
        }
        Ok(None)
    }

    /// Returns the registers of a stopped virtual CPU.
    fn registers(&self, vcpu: usize) -> Result<[u64; register::COUNT], Gone> {
        let mut bytes = [0; 8 * register::COUNT];
        let at = layout::DEBUG + of(vcpu, offset_of!(VcpuDebug, registers)) as u64;
        let read = self.files()?.1.read_exact_at(&mut bytes, at);
        read.map_err(|_| Gone("cannot read shared memory"))?;
        let mut words = [0; register::COUNT];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = bytes.iter().rfold(0, |all, byte| all << 8 | u64::from(*byte));
        }
        Ok(words)
    }

    /// Translates a linear address of a virtual CPU.
    fn place(&self, vcpu: usize, linear: u64) -> Option<Mapped> {
        let registers = self.registers(vcpu).ok()?;
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
    fn pages(
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
    fn linux(&self) -> Option<u64> {
        const FIRST: u64 = 0xffff_ffff_8000_0000;
        const END: u64 = 0xffff_ffff_c000_0000;
        const ALIGNMENT: usize = 2 << 20;
        // The page tables of user mode may lack the kernel, and map parts of it elsewhere.
        let is_kernel = |vcpu: &usize| {
            self.registers(*vcpu).is_ok_and(|words| {
                words[register::CS] & 3 == 0 && matches!(words[register::LEVELS], 4 | 5)
            })
        };
        let vcpu = (0..self.vcpus).find(is_kernel)?;
        (FIRST..END)
            .step_by(ALIGNMENT)
            .find(|&linear| self.place(vcpu, linear).is_some_and(|place| !place.is_users))
    }

    /// Sets a breakpoint; returns `false` if that is impossible there.
    fn add(&mut self, address: u64) -> bool {
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
    fn remove(&mut self, address: u64) -> bool {
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

/// Returns the offset of a field of a virtual CPU's record.
fn of(vcpu: usize, field: usize) -> usize {
    offset_of!(DebugState, vcpus) + vcpu * size_of::<VcpuDebug>() + field
}

fn tid(vcpu: usize) -> Tid {
    Tid::MIN.saturating_add(vcpu)
}

/// Layout of guest memory: `low` bytes from guest-physical 0, the rest from 4 GiB.
#[derive(Clone, Copy, Debug)]
pub struct Ram {
    /// Bytes below 4 GiB.
    pub low: u64,
    /// Total size in bytes.
    pub size: u64,
}

impl Ram {
    /// Returns the offset of a guest-physical address in the file of guest memory, and the bytes
    /// that follow there.
    fn offset(self, address: u64) -> Option<(u64, u64)> {
        let (at, end) = match address.checked_sub(HIGH) {
            Some(above) => (self.low.checked_add(above)?, self.size),
            None => (address, self.low),
        };
        Some((at, end.checked_sub(at).filter(|&left| left != 0)?))
    }
}

/// Result of a translation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Mapped {
    /// Guest-physical address.
    address: u64,
    /// Bytes to the end of the page.
    left: u64,
    /// Accessible in user mode.
    is_users: bool,
}

/// Walks page tables with this number of levels (AMD APM vol. 2, section 5.3.3); see
/// [`register::LEVELS`]. Access rights are ignored.
fn translate(
    levels: u64,
    root: u64,
    linear: u64,
    read: impl Fn(u64) -> Option<u64>,
) -> Option<Mapped> {
    let shifts: &[u32] = match levels {
        0 => {
            let left = PAGE - linear % PAGE;
            return Some(Mapped { address: linear, left, is_users: false });
        }
        4 => &[39, 30, 21, 12],
        5 => &[48, 39, 30, 21, 12],
        _ => return None,
    };
    let (mut table, mut is_users) = (root & ADDRESS, true);
    for &shift in shifts {
        let entry = read(table | (linear >> shift & 0x1ff) << 3)?;
        if entry & PRESENT == 0 {
            return None;
        }
        is_users &= entry & USER != 0;
        if shift == 12 || shift < 39 && entry & LARGE != 0 {
            let size = PAGE << (shift - 12);
            let inside = linear & (size - 1);
            let address = entry & ADDRESS & !(size - 1) | inside;
            return Some(Mapped { address, left: size - inside, is_users });
        }
        table = entry & ADDRESS;
    }
    None
}

fn describe(error: &GdbStubError<Gone, io::Error>) -> String {
    error.to_string()
}

impl std::fmt::Display for Gone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.0)
    }
}

/// Event loop of a session while the VM runs.
enum Events {}

impl BlockingEventLoop for Events {
    type Target = Session;
    type Connection = Connection;
    type StopReason = MultiThreadStopReason<u64>;

    fn wait_for_stop_reason(
        target: &mut Session,
        connection: &mut Connection,
    ) -> Result<Event<Self::StopReason>, WaitForStopReasonError<Gone, io::Error>> {
        loop {
            if target.has_ended() {
                return Ok(Event::TargetStopped(MultiThreadStopReason::Exited(0)));
            }
            target.drain();
            if let Some(why) = target.stopped().map_err(WaitForStopReasonError::Target)? {
                return Ok(Event::TargetStopped(why));
            }
            if connection.peek().map_err(WaitForStopReasonError::Connection)?.is_some() {
                let byte = connection.read().map_err(WaitForStopReasonError::Connection)?;
                return Ok(Event::IncomingData(byte));
            }
            let Some(socket) = &target.connection else {
                return Err(WaitForStopReasonError::Target(Gone("no connection")));
            };
            let mut fds = [socket.as_fd(), target.news.as_fd()]
                .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            // After an interruption, the loop checks again.
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 1, tv_nsec: 0 }));
        }
    }

    fn on_interrupt(target: &mut Session) -> Result<Option<Self::StopReason>, Gone> {
        target.stop_all()?;
        let (tid, signal) = (tid(0), Signal::SIGINT);
        Ok(Some(MultiThreadStopReason::SignalWithThread { tid, signal }))
    }
}

impl Target for Session {
    type Arch = X86_64_SSE;
    type Error = Gone;

    fn base_ops(&mut self) -> BaseOps<'_, Self::Arch, Self::Error> {
        BaseOps::MultiThread(self)
    }

    fn support_breakpoints(&mut self) -> Option<BreakpointsOps<'_, Self>> {
        Some(self)
    }

    fn support_section_offsets(&mut self) -> Option<SectionOffsetsOps<'_, Self>> {
        Some(self)
    }
}

impl SectionOffsets for Session {
    fn get_section_offsets(&mut self) -> Result<Offsets<u64>, Gone> {
        let start = match self.kernel {
            GuestKernel::Process { start, .. } => Some(start),
            GuestKernel::Kvm => self.linux(),
        };
        Ok(match start {
            // All segments are relocated by the same offset.
            Some(text_seg) => Offsets::Segments { text_seg, data_seg: None },
            None => Offsets::Sections { text: 0, data: 0, bss: None },
        })
    }
}

impl MultiThreadBase for Session {
    fn read_registers(
        &mut self,
        registers: &mut <X86_64_SSE as Arch>::Registers,
        tid: Tid,
    ) -> TargetResult<(), Self> {
        let words = self.registers(self.vcpu(tid)?)?;
        *registers = X86_64CoreRegs::default();
        for (value, place) in registers.regs.iter_mut().zip(ORDER) {
            *value = words[place];
        }
        registers.rip = words[register::RIP];
        registers.eflags = words[register::RFLAGS] as u32;
        registers.segments.cs = words[register::CS] as u32;
        registers.segments.ss = words[register::SS] as u32;
        Ok(())
    }

    fn write_registers(
        &mut self,
        registers: &<X86_64_SSE as Arch>::Registers,
        tid: Tid,
    ) -> TargetResult<(), Self> {
        let mut words = [0; register::CHANGEABLE];
        for (value, place) in registers.regs.iter().zip(ORDER) {
            words[place] = *value;
        }
        words[register::RIP] = registers.rip;
        words[register::RFLAGS] = registers.eflags.into();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        Ok(self.set_bytes(of(self.vcpu(tid)?, offset_of!(VcpuDebug, registers)), &bytes)?)
    }

    fn read_addrs(&mut self, start: u64, data: &mut [u8], tid: Tid) -> TargetResult<usize, Self> {
        let length = data.len();
        let read = self.pages(self.vcpu(tid)?, start, length, |memory, at, done, count| {
            memory.read_exact_at(&mut data[done..done + count], at)
        });
        if read == 0 && length != 0 { Err(TargetError::NonFatal) } else { Ok(read) }
    }

    fn write_addrs(&mut self, start: u64, data: &[u8], tid: Tid) -> TargetResult<(), Self> {
        let written = self.pages(self.vcpu(tid)?, start, data.len(), |memory, at, done, count| {
            memory.write_all_at(&data[done..done + count], at)
        });
        if written == data.len() { Ok(()) } else { Err(TargetError::NonFatal) }
    }

    fn list_active_threads(&mut self, is_active: &mut dyn FnMut(Tid)) -> Result<(), Gone> {
        (0..self.vcpus).for_each(|vcpu| is_active(tid(vcpu)));
        Ok(())
    }

    fn support_resume(&mut self) -> Option<MultiThreadResumeOps<'_, Self>> {
        Some(self)
    }
}

impl From<Gone> for TargetError<Gone> {
    fn from(gone: Gone) -> Self {
        Self::Fatal(gone)
    }
}

impl MultiThreadResume for Session {
    fn resume(&mut self) -> Result<(), Gone> {
        self.go()
    }

    fn clear_resume_actions(&mut self) -> Result<(), Gone> {
        self.actions.clear();
        self.locked = false;
        Ok(())
    }

    fn set_resume_action_continue(&mut self, tid: Tid, _: Option<Signal>) -> Result<(), Gone> {
        self.actions.insert(tid.get() - 1, command::GO);
        Ok(())
    }

    fn support_single_step(&mut self) -> Option<MultiThreadSingleStepOps<'_, Self>> {
        Some(self)
    }

    fn support_scheduler_locking(&mut self) -> Option<MultiThreadSchedulerLockingOps<'_, Self>> {
        Some(self)
    }
}

impl MultiThreadSingleStep for Session {
    fn set_resume_action_step(&mut self, tid: Tid, _: Option<Signal>) -> Result<(), Gone> {
        self.actions.insert(tid.get() - 1, command::STEP);
        Ok(())
    }
}

impl MultiThreadSchedulerLocking for Session {
    fn set_resume_action_scheduler_lock(&mut self) -> Result<(), Gone> {
        self.locked = true;
        Ok(())
    }
}

impl Breakpoints for Session {
    fn support_sw_breakpoint(&mut self) -> Option<SwBreakpointOps<'_, Self>> {
        Some(self)
    }
}

impl SwBreakpoint for Session {
    fn add_sw_breakpoint(&mut self, address: u64, _: usize) -> TargetResult<bool, Self> {
        Ok(self.add(address))
    }

    fn remove_sw_breakpoint(&mut self, address: u64, _: usize) -> TargetResult<bool, Self> {
        Ok(self.remove(address))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_of_all_sizes() {
        let entries = BTreeMap::from([
            (8, 0x1007),
            (0x1000, 0x2007),
            (0x2008, 0x4000_0081),
            (0x2000, 0x3007),
            (0x3000, 0x20_0081),
            (0x3008, 0x4007),
            (0x4000, 0x8000_0000_0000_5007),
        ]);
        let walk =
            |levels, root, linear| translate(levels, root, linear, |at| entries.get(&at).copied());
        let place = |address, left, is_users| Some(Mapped { address, left, is_users });
        let find = |linear| walk(4, 0x1fff, linear);
        assert_eq!(find(0x4000_1234), place(0x4000_1234, 0x3fff_edcc, false));
        assert_eq!(find(0x1234), place(0x20_1234, 0x1f_edcc, false));
        assert_eq!(find(0x20_0ffe), place(0x5ffe, 2, true));
        assert_eq!(find(0x20_1000), None);
        // Five levels, none, and invalid numbers.
        assert_eq!(walk(5, 0, 1 << 48 | 0x20_0ffe), place(0x5ffe, 2, true));
        assert_eq!(walk(5, 0, 0x20_0ffe), None);
        assert_eq!(walk(0, 0x1fff, 0x1234), place(0x1234, 0xdcc, false));
        assert_eq!(walk(0, 0, u64::MAX), place(u64::MAX, 1, false));
        assert!(
            [1, 2, 3, 6, u64::MAX].iter().all(|&levels| walk(levels, 0x1fff, 0x1234).is_none())
        );
        let ram = Ram { low: 0x3000, size: 0x5000 };
        assert_eq!((ram.offset(0x2fff), ram.offset(0x3000)), (Some((0x2fff, 1)), None));
        assert_eq!(
            (ram.offset(HIGH + 8), ram.offset(HIGH + 0x2000)),
            (Some((0x3008, 0x1ff8)), None)
        );
    }

    #[test]
    fn no_breakpoints_inside_of_sites() {
        let sites = [(16, 5), (32, 2)];
        let inside: Vec<u64> = (14..40).filter(|&at| is_inside(&sites, at)).collect();
        assert_eq!(inside, [17, 18, 19, 20, 33]);
    }
}
