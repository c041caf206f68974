//! `--gdb`: a debugger of the host for a machine of processes, by GDB's remote protocol (`docs/design/0015-debugger.md`).
//!
//! A thread of this program has the machine's memory as files and asks the device process to stop virtual CPUs and to let them go on. It
//! believes nothing of what it reads there: a guest may have written it. Virtual CPUs are threads 1, 2 ... of the debugger.

use crate::console::listen;
use crate::control::{Control, State, Wish};
use crate::failure::{self, Failure};
use crate::messages::{Level, say};
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
use hosted_vmm::Image;
use proto::wedge::debug::{BREAKPOINT, BREAKPOINTS, Debug, Vcpu, command, reason, register};
use proto::wedge::layout;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::Shutdown;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize, Serializer};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Read};
use std::mem::offset_of;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// How long virtual CPUs may take to stop. One that waits for another one with interrupts off does not.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long the debugger gets to hear of the machine's end.
const FAREWELL: Duration = Duration::from_millis(500);
/// Page size.
const PAGE: u64 = 4096;
/// Bits of a page-table entry (AMD APM vol. 2, section 5.3).
const PRESENT: u64 = 1;
const LARGE: u64 = 1 << 7;
const ADDRESS: u64 = 0x000f_ffff_ffff_f000;
/// Where memory above 4 GiB begins.
const HIGH: u64 = 1 << 32;
/// General registers as the debugger counts them (rax, rbx, rcx, rdx, rsi, rdi, rbp, rsp, r8 ...), as instructions encode them.
const ORDER: [usize; 16] = [0, 3, 1, 2, 6, 7, 5, 4, 8, 9, 10, 11, 12, 13, 14, 15];

/// Where a debugger is waited for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Socket.
    address: Address,
    /// The guest's first instruction waits for it.
    wait: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Address {
    Unix(PathBuf),
    /// Host, which is this one's loopback address without it, and port.
    Tcp(String),
}

impl Place {
    /// Reads `unix=SOCKET` or `tcp=[HOST]:PORT`, and `,wait`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (address, wait) = match text.strip_suffix(",wait") {
            Some(address) => (address, true),
            None => (text, false),
        };
        let refuse =
            || format!("`{text}` is neither unix=SOCKET nor tcp=:PORT, with or without `,wait`");
        let address = match address.split_once('=').ok_or_else(refuse)? {
            ("unix", path) if !path.is_empty() => Address::Unix(path.into()),
            ("tcp", address) => {
                let (_, port) = address.rsplit_once(':').ok_or_else(refuse)?;
                port.parse::<u16>().map_err(|_| refuse())?;
                Address::Tcp(address.to_owned())
            }
            _ => return Err(refuse()),
        };
        Ok(Self { address, wait })
    }

    /// The guest's first instruction waits for the debugger.
    pub fn waits(&self) -> bool {
        self.wait
    }

    /// Its socket's path, if it has one.
    pub fn path_mut(&mut self) -> Option<&mut PathBuf> {
        match &mut self.address {
            Address::Unix(path) => Some(path),
            Address::Tcp(_) => None,
        }
    }
}

impl JsonSchema for Place {
    fn schema_name() -> Cow<'static, str> {
        "Gdb".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "Where a debugger is waited for; with `,wait` by the guest's first instruction, too.",
            "type": "string",
            "pattern": "^(unix=.+|tcp=.*:[0-9]+)(,wait)?$",
        })
    }
}

impl Serialize for Place {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let wait = if self.wait { ",wait" } else { "" };
        match &self.address {
            Address::Unix(path) => match path.to_str() {
                Some(path) => serializer.serialize_str(&format!("unix={path}{wait}")),
                None => Err(serde::ser::Error::custom("a path is not UTF-8")),
            },
            Address::Tcp(address) => serializer.serialize_str(&format!("tcp={address}{wait}")),
        }
    }
}

impl<'de> Deserialize<'de> for Place {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::parse(&String::deserialize(deserializer)?).map_err(de::Error::custom)
    }
}

/// Makes a machine that is going to be started wait for the debugger; `shared` is the wedge's memory.
pub fn make_wait(shared: &OwnedFd) -> Result<(), Failure> {
    let file = shared.try_clone().map(File::from);
    let at = layout::DEBUG + offset_of!(Debug, wanted) as u64;
    let written = file.and_then(|file| file.write_all_at(&1_u32.to_le_bytes(), at));
    written.map_err(|error| Failure::os("make the machine wait", &error))
}

/// What of a kernel matters to a debugger.
pub struct Kernel {
    /// First address of its code.
    start: u64,
    /// Its sites: address, bytes that belong together.
    sites: Vec<(u64, u64)>,
}

impl Kernel {
    /// Of this one.
    pub fn new(image: &Image<'_>) -> Self {
        Self { start: image.start(), sites: image.site_places() }
    }

    /// Whether an instruction begins here that is a part of one that has been put over it.
    fn is_inside_site(&self, address: u64) -> bool {
        let behind = self.sites.partition_point(|site| site.0 < address);
        let before = behind.checked_sub(1).and_then(|index| self.sites.get(index));
        before.is_some_and(|&(start, length)| address - start < length)
    }
}

/// Waits for debuggers in a thread; dropping it ends that.
pub struct Debugger {
    path: Option<PathBuf>,
    thread: Option<JoinHandle<()>>,
    connected: Arc<Mutex<Option<OwnedFd>>>,
    wake: UnixStream,
}

/// A socket that is listened to.
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

    /// Who has connected, and the descriptor once more.
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
    /// Waits at this place.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn start(
        place: &Place,
        control: Control,
        kernel: Kernel,
        (vcpus, ram): (u8, Ram),
    ) -> Result<Self, Failure> {
        let (listener, path) = match &place.address {
            Address::Unix(path) => {
                (Listener::Unix(listen(path, "the debugger's socket")?), Some(path.clone()))
            }
            Address::Tcp(address) => (Listener::Tcp(listen_tcp(address)?), None),
        };
        let failed = |error| Failure::os("wait for a debugger", &error);
        let (news, wake) = UnixStream::pair().map_err(failed)?;
        let copy = wake.try_clone().map_err(failed)?;
        news.set_nonblocking(true).and_then(|()| wake.set_nonblocking(true)).map_err(failed)?;
        control.debugger(copy);
        let connected = Arc::new(Mutex::new(None));
        let mut session = Session {
            control,
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
        Ok(Self { path, thread: Some(thread), connected, wake })
    }
}

impl Drop for Debugger {
    fn drop(&mut self) {
        if let Some(path) = &self.path {
            // If somebody has removed it, that was wanted.
            let _ = fs::remove_file(path);
        }
        let Some(thread) = self.thread.take() else { return };
        let _ = rustix::io::write(&self.wake, &[0]);
        let deadline = Instant::now() + FAREWELL;
        while !thread.is_finished() && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        let connected = self.connected.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(connection) = connected {
            // It may have gone.
            let _ = rustix::net::shutdown(&connection, Shutdown::Both);
        }
        // It only fails if the thread panicked, which has been reported then.
        let _ = thread.join();
    }
}

fn listen_tcp(address: &str) -> Result<TcpListener, Failure> {
    let failed = |error: &io::Error| {
        let text = format!("cannot wait for a debugger at {address}: {}", failure::describe(error));
        Failure::new(failure::code_of(error), text)
    };
    let addresses: Vec<SocketAddr> = match address.strip_prefix(':') {
        // Nobody from elsewhere unless that is said.
        Some(port) => vec![(Ipv4Addr::LOCALHOST, port.parse().unwrap_or(0)).into()],
        None => address.to_socket_addrs().map_err(|error| failed(&error))?.collect(),
    };
    let listener = TcpListener::bind(&*addresses).map_err(|error| failed(&error))?;
    listener.set_nonblocking(true).map_err(|error| failed(&error))?;
    Ok(listener)
}

/// What a debugger does with the machine.
struct Session {
    control: Control,
    kernel: Kernel,
    vcpus: usize,
    ram: Ram,
    /// Readable when something may have happened to the machine.
    news: UnixStream,
    connection: Option<OwnedFd>,
    connected: Arc<Mutex<Option<OwnedFd>>>,
    /// By linear address: what was there, and where that is in guest memory.
    breakpoints: BTreeMap<u64, (u8, u64)>,
    /// How often each virtual CPU had stopped when it went on last.
    seen: Vec<u32>,
    /// What they shall do.
    actions: BTreeMap<usize, u32>,
    /// Those without an action stay as they are.
    locked: bool,
}

/// The machine's memory, and the memory of the wedge.
type Files = (File, File);

/// Why the session cannot go on.
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
            let Ok((connection, copy)) = listener.accept() else { continue };
            let Ok(second) = copy.try_clone() else { continue };
            *self.connected.lock().unwrap_or_else(PoisonError::into_inner) = Some(second);
            self.connection = Some(copy);
            if let Err(error) = self.session(connection) {
                say(Level::Warn, &format!("the debugger's connection: {error}"));
            }
            self.connection = None;
            *self.connected.lock().unwrap_or_else(PoisonError::into_inner) = None;
            self.leave();
        }
    }

    /// From a debugger's first word to its last.
    fn session(&mut self, connection: Connection) -> Result<(), String> {
        self.stop_all().map_err(|gone| gone.0.to_owned())?;
        match GdbStub::new(connection).run_blocking::<Events>(self) {
            Ok(_) => Ok(()),
            // It has gone without a word.
            Err(error) if error.is_connection_error() => Ok(()),
            Err(error) => Err(describe(&error)),
        }
    }

    /// Takes everything back, and lets the machine go on.
    fn leave(&mut self) {
        for address in self.breakpoints.keys().copied().collect::<Vec<_>>() {
            self.remove(address);
        }
        self.actions.clear();
        self.locked = false;
        // If it has ended, nobody goes on.
        let _ = self.go();
    }

    /// The virtual CPU that is a thread for the debugger.
    fn vcpu(&self, tid: Tid) -> TargetResult<usize, Self> {
        let vcpu = tid.get() - 1;
        if vcpu < self.vcpus { Ok(vcpu) } else { Err(TargetError::NonFatal) }
    }

    fn has_ended(&self) -> bool {
        self.control.state() == State::Ended
    }

    fn drain(&self) {
        let mut bytes = [0; 64];
        // It does not block.
        while matches!((&self.news).read(&mut bytes), Ok(1..)) {}
    }

    fn files(&self) -> Result<Files, Gone> {
        self.control.memory().ok_or(Gone("the machine has ended"))
    }

    /// Asks the device process.
    fn ask(&self, wish: Wish) -> Result<(), Gone> {
        match self.control.wish(wish).blocking_recv() {
            Ok(Ok(_)) => Ok(()),
            _ => Err(Gone("the machine has ended")),
        }
    }

    /// A word of the shared memory.
    fn word(&self, at: usize) -> Result<u32, Gone> {
        let mut bytes = [0; 4];
        let read = self.files()?.1.read_exact_at(&mut bytes, layout::DEBUG + at as u64);
        read.map_err(|_| Gone("shared memory cannot be read"))?;
        Ok(u32::from_le_bytes(bytes))
    }

    fn set_bytes(&self, at: usize, bytes: &[u8]) -> Result<(), Gone> {
        let written = self.files()?.1.write_all_at(bytes, layout::DEBUG + at as u64);
        written.map_err(|_| Gone("shared memory cannot be written"))
    }

    fn set_word(&self, at: usize, value: u32) -> Result<(), Gone> {
        self.set_bytes(at, &value.to_le_bytes())
    }

    fn is_halted(&self, vcpu: usize) -> Result<bool, Gone> {
        Ok(self.word(of(vcpu, offset_of!(Vcpu, halted)))? != 0)
    }

    /// Stops all virtual CPUs; those that do not in time are not there for the debugger.
    fn stop_all(&mut self) -> Result<(), Gone> {
        self.set_word(offset_of!(Debug, wanted), 1)?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            // One that has just been told may have been on its way to a stop of its own.
            self.ask(Wish::Halt)?;
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

    /// Lets virtual CPUs go on as they shall.
    fn go(&mut self) -> Result<(), Gone> {
        for (index, address) in self
            .breakpoints
            .keys()
            .copied()
            .chain(std::iter::repeat(0))
            .take(BREAKPOINTS)
            .enumerate()
        {
            self.set_bytes(offset_of!(Debug, breakpoints) + 8 * index, &address.to_le_bytes())?;
        }
        self.set_word(offset_of!(Debug, wanted), self.locked.into())?;
        for vcpu in 0..self.vcpus {
            self.seen[vcpu] = self.word(of(vcpu, offset_of!(Vcpu, halts)))?;
            let other = (!self.locked).then_some(command::GO);
            if let Some(command) = self.actions.get(&vcpu).copied().or(other)
                && self.is_halted(vcpu)?
            {
                self.set_word(of(vcpu, offset_of!(Vcpu, command)), command)?;
            }
        }
        self.ask(Wish::Go)
    }

    /// Why a virtual CPU has stopped since it went on.
    fn stopped(&mut self) -> Result<Option<MultiThreadStopReason<u64>>, Gone> {
        for vcpu in 0..self.vcpus {
            let halts = self.word(of(vcpu, offset_of!(Vcpu, halts)))?;
            if halts == self.seen[vcpu] || !self.is_halted(vcpu)? {
                continue;
            }
            let tid = tid(vcpu);
            let signal = |signal| MultiThreadStopReason::SignalWithThread { tid, signal };
            let why = match self.word(of(vcpu, offset_of!(Vcpu, reason)))? {
                reason::BREAKPOINT => MultiThreadStopReason::SwBreak(tid),
                reason::STEP => signal(Signal::SIGTRAP),
                _ => signal(Signal::SIGINT),
            };
            self.stop_all()?;
            return Ok(Some(why));
        }
        Ok(None)
    }

    /// Registers of a virtual CPU that has stopped.
    fn registers(&self, vcpu: usize) -> Result<[u64; register::COUNT], Gone> {
        let mut bytes = [0; 8 * register::COUNT];
        let at = layout::DEBUG + of(vcpu, offset_of!(Vcpu, registers)) as u64;
        let read = self.files()?.1.read_exact_at(&mut bytes, at);
        read.map_err(|_| Gone("shared memory cannot be read"))?;
        let mut words = [0; register::COUNT];
        for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
            *word = bytes.iter().rfold(0, |all, byte| all << 8 | u64::from(*byte));
        }
        Ok(words)
    }

    /// Where a linear address of a virtual CPU is in guest memory, and how many bytes follow in its page.
    fn place(&self, vcpu: usize, linear: u64) -> Option<(u64, u64)> {
        let registers = self.registers(vcpu).ok()?;
        let is_kernel = (layout::IMAGE..layout::LOW_END).contains(&linear);
        let root = if is_kernel { register::KERNEL_ROOT } else { register::CR3 };
        let memory = self.files().ok()?.0;
        translate(registers[root], linear, |at| {
            let mut bytes = [0; 8];
            memory.read_exact_at(&mut bytes, self.ram.offset(at)?.0).ok()?;
            Some(u64::from_le_bytes(bytes))
        })
    }

    /// Goes through the pages of a range: offset in guest memory's file, and how many bytes. Stops where there is no memory; gives the bytes gone through.
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
            let Some((address, left)) = self.place(vcpu, linear) else { break };
            let Some((at, there)) = self.ram.offset(address) else { break };
            let count = usize::try_from(left.min(there)).unwrap_or(usize::MAX).min(length - done);
            if act(&memory, at, done, count).is_err() {
                break;
            }
            done += count;
        }
        done
    }

    /// Puts a breakpoint. `false`: there cannot be one.
    fn add(&mut self, address: u64) -> bool {
        let is_kernel = (layout::IMAGE..layout::WEDGE).contains(&address)
            || (layout::DIRECT..layout::GUEST_END).contains(&address);
        if self.breakpoints.contains_key(&address) {
            return true;
        }
        if !is_kernel
            || self.kernel.is_inside_site(address)
            || self.breakpoints.len() >= BREAKPOINTS
        {
            return false;
        }
        let mut found = None;
        self.pages(0, address, 1, |memory, at, _, _| {
            let mut byte = [0];
            memory.read_exact_at(&mut byte, at)?;
            memory.write_all_at(&[BREAKPOINT], at)?;
            found = Some((byte[0], at));
            Ok(())
        });
        found.is_some_and(|found| {
            self.breakpoints.insert(address, found);
            true
        })
    }

    /// Takes one back, unless the guest has written something else there.
    fn remove(&mut self, address: u64) -> bool {
        let Some((byte, at)) = self.breakpoints.remove(&address) else { return false };
        let mut now = [0];
        if let Ok((memory, _)) = self.files()
            && memory.read_exact_at(&mut now, at).is_ok()
            && now == [BREAKPOINT]
        {
            return memory.write_all_at(&[byte], at).is_ok();
        }
        true
    }
}

/// Where a field of a virtual CPU's part is.
fn of(vcpu: usize, field: usize) -> usize {
    offset_of!(Debug, vcpus) + vcpu * size_of::<Vcpu>() + field
}

fn tid(vcpu: usize) -> Tid {
    Tid::MIN.saturating_add(vcpu)
}

/// Where memory is: first so many bytes from guest-physical 0 on, then the rest of all from 4 GiB on.
#[derive(Clone, Copy, Debug)]
pub struct Ram {
    /// Bytes below 4 GiB.
    pub low: u64,
    /// All bytes.
    pub size: u64,
}

impl Ram {
    /// Where a guest-physical address is in the file of guest memory, and how many bytes follow there.
    fn offset(self, address: u64) -> Option<(u64, u64)> {
        let (at, end) = match address.checked_sub(HIGH) {
            Some(above) => (self.low.checked_add(above)?, self.size),
            None => (address, self.low),
        };
        Some((at, end.checked_sub(at).filter(|&left| left != 0)?))
    }
}

/// Walks page tables of four levels (AMD APM vol. 2, section 5.3.3): guest-physical address, and how many bytes follow in the page. Rights do
/// not matter.
fn translate(root: u64, linear: u64, read: impl Fn(u64) -> Option<u64>) -> Option<(u64, u64)> {
    let mut table = root & ADDRESS;
    for shift in [39, 30, 21, 12] {
        let entry = read(table | (linear >> shift & 0x1ff) << 3)?;
        if entry & PRESENT == 0 {
            return None;
        }
        if shift == 12 || shift < 39 && entry & LARGE != 0 {
            let size = PAGE << (shift - 12);
            let inside = linear & (size - 1);
            return Some((entry & ADDRESS & !(size - 1) | inside, size - inside));
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

/// What the debugger waits for while the machine runs.
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
            // Interrupted or not: it looks.
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
        // All segments are moved by as much as the first.
        Ok(Offsets::Segments { text_seg: self.kernel.start, data_seg: None })
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
        Ok(self.set_bytes(of(self.vcpu(tid)?, offset_of!(Vcpu, registers)), &bytes)?)
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
    fn places() {
        for text in ["unix=/run/gdb", "unix=g,wait", "tcp=:1234", "tcp=[::1]:1,wait"] {
            let place = Place::parse(text).unwrap();
            assert_eq!(place.wait, text.ends_with(",wait"));
            assert_eq!(serde_json::to_string(&place).unwrap(), format!("\"{text}\""));
        }
        for text in ["", "unix=", "tcp=1234", "tcp=:port", ":1234", "tcp=:1234,stop"] {
            assert!(Place::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn tables_of_all_sizes() {
        let entries = BTreeMap::from([
            (0x1000, 0x2001),
            (0x2008, 0x4000_0081),
            (0x2000, 0x3001),
            (0x3000, 0x20_0081),
            (0x3008, 0x4001),
            (0x4000, 0x8000_0000_0000_5003),
        ]);
        let find = |linear| translate(0x1fff, linear, |at| entries.get(&at).copied());
        assert_eq!(find(0x4000_1234), Some((0x4000_1234, 0x3fff_edcc)));
        assert_eq!(find(0x1234), Some((0x20_1234, 0x1f_edcc)));
        assert_eq!(find(0x20_0ffe), Some((0x5ffe, 2)));
        assert_eq!(find(0x20_1000), None);
        let ram = Ram { low: 0x3000, size: 0x5000 };
        assert_eq!((ram.offset(0x2fff), ram.offset(0x3000)), (Some((0x2fff, 1)), None));
        assert_eq!(
            (ram.offset(HIGH + 8), ram.offset(HIGH + 0x2000)),
            (Some((0x3008, 0x1ff8)), None)
        );
    }

    #[test]
    fn no_breakpoints_inside_of_sites() {
        let kernel = Kernel { start: 0, sites: vec![(16, 5), (32, 2)] };
        let inside: Vec<u64> = (14..40).filter(|&at| kernel.is_inside_site(at)).collect();
        assert_eq!(inside, [17, 18, 19, 20, 33]);
    }
}
