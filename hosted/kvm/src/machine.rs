//! One machine, from its description to its end.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::{FromRawFd, OwnedFd};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use hosted_vmm::confine;
use kvm_ioctls::VcpuFd;
use proto::requests::Queue;
use proto::wedge::debug::DebugState;
use proto::wedge::{
    DiskRecord as Record, MAX_DISKS, MAX_NETS, MAX_QUEUES, MAX_SHARES, NetRecord, ShareRecord,
    layout, log,
};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::rand::{GetRandomFlags, getrandom};
use rustix::thread::futex;
use serde::{Deserialize, Serialize};
use spin::relax::RelaxStrategy;
use vmm_boot::BootConfig;
use vmm_bus::backend::BlockInfo;
use vmm_bus::frames::{self, NetPort, Sockets};
use vmm_bus::requests::{Futex, Requests};
use vmm_bus::{Block, Messages, Packets};
use vmm_cpu::{Gpr, MAX_VCPUS, Reg, TscClock, Vcpu};
use vmm_machine::{
    DeviceBackend, Host, Level, Model, Outcome, Pc, PcConfig, Slots, StopReason, registers,
};
use vmm_mem::shared::SharedMemory;
use vmm_mem::{GuestMemory, PAGE_SIZE};

use crate::Error;
use crate::balloon::Balloon;
use crate::console::Console;
use crate::control::{self, Gate};
use crate::debug::Stops;
use crate::disk::{Disk, WORKERS};
use crate::net::{self, Network};
use crate::seat::{Seat, event, tsc};
use crate::vcpu::{KvmVcpu, listen_to_kicks};
use crate::vm::{Vm, set_cpuid};

/// What the process is started with, beside the descriptors that machines of both back ends have ([`proto::wedge::layout`]).
pub mod descriptor {
    /// [`Machine`](super::Machine) as JSON.
    pub const DESCRIPTION: u32 = 40;
    /// The kernel.
    pub const KERNEL: u32 = 41;
    /// The initial RAM disk; empty: none.
    pub const INITRD: u32 = 42;
}

/// What a machine is made of.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Machine {
    /// Bytes of memory, a multiple of the page size.
    pub memory: u64,
    /// Virtual processors.
    pub cpus: u8,
    /// Command line of the kernel.
    pub command_line: String,
    /// Least grave messages that are printed: see [`proto::wedge::log`].
    pub log: u64,
    /// Disks: words of [`proto::wedge::DiskRecord`].
    pub disks: Vec<[u64; Record::WORDS]>,
    /// Networks: words of [`proto::wedge::NetRecord`].
    pub nets: Vec<[u64; NetRecord::WORDS]>,
    /// Shared directories: words of [`proto::wedge::ShareRecord`].
    pub shares: Vec<[u64; ShareRecord::WORDS]>,
    /// The guest's number for vsock, if it has that.
    pub vsock: Option<u32>,
    /// There is a virtio console beside the serial line.
    pub console: bool,
    /// Bytes that the guest is to give up at first, if it has a balloon.
    pub balloon: Option<u64>,
    /// What the process gives up beside system calls.
    pub sandbox: Sandbox,
    /// A debugger may stop it.
    pub debug: bool,
}

/// How far the process is shut in, beside its filter of system calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Sandbox {
    /// As far as the host lets its users.
    On,
    /// Not at all.
    Off,
    /// Wholly, or the machine does not start.
    Strict,
}

/// PCI functions of a machine: disks, shared directories, the source of random numbers, networks, vsock, the balloon, the console.
const MAX_FUNCTIONS: usize = MAX_DISKS + MAX_SHARES + MAX_NETS + 4;

/// Lets others run while a processor waits for the machine's lock.
struct Yielding;

impl RelaxStrategy for Yielding {
    fn relax() {
        thread::yield_now();
    }
}

type Board<'m, 'o> = Pc<'m, Yielding, MAX_VCPUS, Slots<Link<'o>, MAX_FUNCTIONS>>;

/// What a PCI function is connected to.
enum Link<'o> {
    /// A file.
    Disk(&'o Disk),
    /// A process of the host that carries requests out.
    Requests(Requests<'o, Sleep>),
    /// A network.
    Net(NetPort<net::Link<'o>>),
    /// Sockets of the host.
    Sockets(Sockets<net::Link<'o>>),
    /// The host's memory.
    Balloon(Balloon),
    /// The host's random numbers.
    Entropy,
    /// A line.
    Console(&'o Console),
}

impl DeviceBackend for Link<'_> {
    fn block(&mut self) -> Option<&mut dyn Block> {
        match self {
            Self::Disk(disk) => Some(disk),
            Self::Requests(requests) => Some(requests),
            _ => None,
        }
    }

    fn messages(&mut self) -> Option<&mut dyn Messages> {
        match self {
            Self::Requests(requests) => Some(requests),
            _ => None,
        }
    }

    fn net(&mut self) -> Option<&mut dyn vmm_bus::Net> {
        match self {
            Self::Net(net) => Some(net),
            _ => None,
        }
    }

    fn packets(&mut self) -> Option<&mut dyn Packets> {
        match self {
            Self::Sockets(sockets) => Some(sockets),
            _ => None,
        }
    }

    fn balloon(&mut self) -> Option<&mut dyn vmm_bus::BalloonBackend> {
        match self {
            Self::Balloon(balloon) => Some(balloon),
            _ => None,
        }
    }

    fn put(&mut self, byte: u8) -> bool {
        match self {
            Self::Console(console) => console.put(byte),
            _ => true,
        }
    }

    fn take(&mut self) -> Option<u8> {
        match self {
            Self::Console(console) => console.take(),
            _ => None,
        }
    }

    fn entropy(&mut self, to: &mut [u8]) -> bool {
        let length = to.len();
        getrandom(to, GetRandomFlags::empty()) == Ok(length)
    }
}

/// The outside of the machine.
#[derive(Clone, Copy)]
struct KvmHost<'o> {
    console: &'o Console,
    seats: &'o [Seat],
    log: u64,
}

impl Host for KvmHost<'_> {
    fn tsc(&self) -> u64 {
        tsc()
    }

    fn put(&mut self, byte: u8) -> bool {
        self.console.put(byte)
    }

    fn take(&mut self) -> Option<u8> {
        self.console.take()
    }

    fn log(&mut self, level: Level, text: fmt::Arguments<'_>) {
        if level.number() <= self.log {
            eprintln!("<{}>{text}", level.number());
        }
    }

    fn kick(&mut self, index: usize) {
        self.seats[index].tell(event::KICK);
    }
}

/// Runs the machine that this process was started for, and ends the process with its exit code.
pub fn run() -> ! {
    let error = match serve() {
        Ok(never) => match never {},
        Err(error) => error,
    };
    eprintln!("<{}>{error}", log::ERROR);
    process::exit(error.exit_code().into())
}

/// No value: the process ends first.
enum Never {}

/// A descriptor that the process was started with. Each is taken once.
fn inherited(number: u32) -> File {
    // SAFETY: whoever starts this program gives it these descriptors, and nobody else here uses them. If there is none of this number, or
    // another kind, using it fails.
    unsafe { File::from_raw_fd(number as i32) }
}

fn serve() -> Result<Never, Error> {
    let machine: Machine =
        serde_json::from_reader(inherited(descriptor::DESCRIPTION)).map_err(Error::Description)?;
    let disks: Vec<Storage> = (layout::DISKS_FD..)
        .zip(&machine.disks)
        .take(MAX_DISKS)
        .map(|(number, words)| {
            let record = Record::from_words(words);
            match record.is_external {
                true => Storage::Elsewhere(record),
                false => Storage::File(Disk::new(inherited(number), record)),
            }
        })
        .collect();
    let networks = networks(&machine)?;
    let shared = SharedMemory::open(inherited(layout::SHARED_FD).into(), layout::SHARED_LENGTH)
        .map_err(Error::host("map the machine's shared memory"))?;
    let queues = queues(&shared).map_err(Error::host("find requests"))?;
    let debug = debug(&shared).map_err(Error::host("find what debuggers leave"))?;
    listen_to_kicks()?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(Error::host("close this process to others"))?;
    let vm = Vm::new()?;
    let count = usize::from(machine.cpus).clamp(1, MAX_VCPUS);
    let fds = (0..count).map(|index| vm.vcpu(index)).collect::<Result<Vec<_>, _>>()?;
    // From here on it has no use for names. Threads, of which there are none yet, inherit it.
    shut_in(&machine)?;
    let hole = vmm_machine::layout_with_pci().hole_start;
    let ranges: Vec<_> = vmm_boot::ram_ranges(machine.memory, hole).collect();
    let memory = OwnedFd::from(inherited(layout::MEMORY_FD));
    let mut memory = SharedMemory::open(memory, machine.memory)
        .map_err(Error::host("map the guest's memory"))?;
    let copy = memory.descriptor().try_clone_to_owned();
    let copy = copy.map_err(Error::host("copy a descriptor"))?;
    let balloon =
        machine.balloon.map(|bytes| Balloon::new(copy, ranges.clone(), bytes / PAGE_SIZE));
    let outer = Outer { disks: &disks, queues, networks: &networks, debug };
    memory
        .with(ranges, |memory| power_on(&machine, outer, balloon, vm, fds, memory))
        .map_err(Error::host("lay the guest's memory out"))?
}

/// Gives up names of files, networks and other processes as far as is wanted, and all capabilities in any case.
fn shut_in(machine: &Machine) -> Result<(), Error> {
    let entered = enter_sandbox(machine);
    let dropped = hosted_jail::drop_capabilities().map_err(io::Error::from);
    dropped.map_err(Error::host("give up capabilities"))?;
    entered
}

fn enter_sandbox(machine: &Machine) -> Result<(), Error> {
    if machine.sandbox == Sandbox::Off {
        return Ok(());
    }
    let refused = hosted_jail::enter();
    if refused.is_empty() {
        return Ok(());
    }
    if machine.sandbox == Sandbox::Strict {
        return Err(Error::Sandbox(refused));
    }
    if machine.log >= log::INFO {
        eprintln!("<{}>cannot enter the sandbox: {refused}", log::INFO);
    }
    Ok(())
}

/// A disk: a file of this process, or of another one.
enum Storage {
    File(Disk),
    Elsewhere(Record),
}

/// Opens the networks, and behind them the stream of vsock's packets.
fn networks(machine: &Machine) -> Result<Vec<Network>, Error> {
    let nets = machine.nets.iter().take(MAX_NETS).enumerate().map(|(number, words)| {
        let file = inherited(layout::NETS_FD + number as u32);
        Network::new(format!("network {number}"), file, &NetRecord::from_words(words))
    });
    let vsock = machine.vsock.map(|_| {
        let file = inherited(layout::NETS_FD + MAX_NETS as u32);
        Network::new("vsock".to_owned(), file, &NetRecord::default())
    });
    nets.chain(vsock).collect()
}

/// The queues of requests to other processes.
fn queues(shared: &SharedMemory) -> io::Result<&[Queue; MAX_QUEUES]> {
    let place = shared.at(layout::QUEUES, size_of::<[Queue; MAX_QUEUES]>() as u64)?;
    // SAFETY: they lie in the mapping, which lives as long as `shared`, page-aligned; all of it is atomic, with no value that is not allowed.
    Ok(unsafe { &*place.cast() })
}

/// What debugger and processors leave for each other.
fn debug(shared: &SharedMemory) -> io::Result<&DebugState> {
    let place = shared.at(layout::DEBUG, size_of::<DebugState>() as u64)?;
    // SAFETY: it lies in the mapping, which lives as long as `shared`, page-aligned; all of it is atomic, with no value that is not allowed.
    Ok(unsafe { &*place.cast() })
}

/// Words of shared memory that threads wait for.
struct Sleep;

impl Futex for Sleep {
    fn wake_one(word: &AtomicU32) {
        // It cannot fail with a mapped word.
        let _ = futex::wake(word, futex::Flags::empty(), 1);
    }

    fn wait(word: &AtomicU32, value: u32) {
        // An early return is allowed.
        let _ = futex::wait(word, futex::Flags::empty(), value, None);
    }
}

/// Passes on, until the process ends, that workers of other processes have answered.
fn answer_the_door(mut bell: &File, queues: &[Queue], seat: &Seat) {
    let mut count = [0; 8];
    loop {
        match bell.read(&mut count) {
            Ok(1..) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Ok(0) | Err(_) => return,
        }
        // All of them, since the bell has rung once for all.
        let rung = queues.iter().filter(|queue| queue.pending.swap(0, SeqCst) != 0).count();
        if rung != 0 {
            seat.tell(event::DISK);
        }
    }
}

/// What devices are connected to.
#[derive(Clone, Copy)]
struct Outer<'o> {
    disks: &'o [Storage],
    queues: &'o [Queue; MAX_QUEUES],
    /// The last one is vsock's, if there is that.
    networks: &'o [Network],
    debug: &'o DebugState,
}

/// Makes the board and the threads, and runs.
fn power_on(
    machine: &Machine,
    Outer { disks, queues, networks, debug }: Outer<'_>,
    balloon: Option<Balloon>,
    vm: Vm,
    fds: Vec<VcpuFd>,
    memory: &GuestMemory,
) -> Result<Never, Error> {
    vm.map(memory)?;
    let clock = TscClock::new(vm.tsc_khz(&fds[0])?, tsc());
    let config = PcConfig {
        vcpus: fds.len() as u8,
        clock,
        xcr0_mask: vm.xcr0(),
        // Before 1970 it is not.
        start_unix: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
        kvmclock: true,
        // It would need to know when the host's scheduler takes a thread away.
        steal_time: false,
        pv_flush: false,
        // KVM would send these interrupts itself, to local APICs that it does not have.
        pv_ipi: false,
        id: 1,
    };
    let serial = Console::new(event::CONSOLE);
    let second = machine.console.then(|| Console::new(event::SECOND));
    let mut slots = Slots::new();
    // There are as many slots.
    for (disk, queue) in disks.iter().zip(queues) {
        let (info, link) = match disk {
            Storage::File(disk) => (disk.info(), Link::Disk(disk)),
            Storage::Elsewhere(record) => {
                (BlockInfo::of_file(record), Link::Requests(Requests::with_device_process(queue)))
            }
        };
        let _ = slots.add(Model::Block(info), link);
    }
    for (words, queue) in machine.shares.iter().zip(&queues[MAX_DISKS..]) {
        let tag = ShareRecord::from_words(words).tag;
        let _ = slots.add(Model::P9(tag), Link::Requests(Requests::with_device_process(queue)));
    }
    let mut used = disks.len() + machine.shares.len().min(MAX_SHARES);
    let disk_slots = 0..used;
    let _ = slots.add(Model::Entropy, Link::Entropy);
    used += 1;
    let net_slots = used..used + networks.len();
    for (words, network) in machine.nets.iter().zip(networks) {
        let record = NetRecord::from_words(words);
        let link = NetPort::new(net::Link::new(network), &record);
        let _ = slots.add(Model::Net(frames::info(&record)), Link::Net(link));
    }
    if let (Some(cid), Some(network)) = (machine.vsock, networks.last()) {
        let link = Link::Sockets(Sockets::new(net::Link::new(network)));
        let _ = slots.add(Model::Vsock(cid.into()), link);
    }
    if let Some(balloon) = balloon {
        let _ = slots.add(Model::Balloon, Link::Balloon(balloon));
    }
    let console = second.as_ref().map(Link::Console);
    let console = console.and_then(|console| slots.add(Model::Console, console).ok());
    let console = console.map_or(0..0, |slot| slot..slot + 1);
    let about = [(event::DISK, disk_slots), (event::NET, net_slots), (event::SECOND, console)];
    let board: Board<'_, '_> =
        Pc::with_functions(config, memory, |number, subleaf| vm.cpuid(number, subleaf), slots);
    for (index, fd) in fds.iter().enumerate() {
        set_cpuid(fd, index, board.cpuid())?;
    }
    // What it has made stays as long as there are processors.
    drop(vm);

    let seats: Vec<Seat> = fds.iter().map(|_| Seat::default()).collect();
    let host = KvmHost { console: &serial, seats: &seats, log: machine.log };
    let (stream, gate) = (inherited(layout::CONTROL_FD), Gate::default());
    // Every thread is there before the process is confined, and makes no other.
    let mut threads: Vec<Job<'_>> = Vec::new();
    let first = &seats[0];
    threads.push(Box::new(|| serial.write(std::io::stdout(), first)));
    threads.push(Box::new(|| serial.read(std::io::stdin(), first)));
    threads.push(Box::new(|| control::serve(&stream, &gate, &seats, debug)));
    if let Some(console) = &second {
        let line = Arc::new(inherited(layout::CONSOLE_FD));
        let other = Arc::clone(&line);
        threads.push(Box::new(move || console.write(&*line, first)));
        threads.push(Box::new(move || console.read(&*other, first)));
    }
    let bell = inherited(layout::DOORBELL_FD);
    threads.push(Box::new(move || answer_the_door(&bell, queues, first)));
    for network in networks {
        threads.push(Box::new(move || network.send(first)));
        threads.push(Box::new(move || network.receive(first)));
    }
    for (number, disk) in disks.iter().enumerate() {
        let Storage::File(disk) = disk else { continue };
        for _ in 0..WORKERS {
            threads.push(Box::new(move || disk.work(number, memory, first)));
        }
    }
    let barrier = Barrier::new(threads.len() + fds.len());
    let (barrier, board, gate, stream, about) = (&barrier, &board, &gate, &stream, &about);
    thread::scope(|scope| {
        for job in threads {
            scope.spawn(move || {
                barrier.wait();
                job();
            });
        }
        let mut drivers = fds.into_iter().enumerate().map(|(index, fd)| {
            move || {
                let seat = &host.seats[index];
                seat.take_place();
                let stops = Stops { index, shared: debug, gate, seat, stream };
                let stops = machine.debug.then_some(stops);
                let vcpu = KvmVcpu::new(fd, seat, memory, clock, stops);
                barrier.wait();
                let result = vcpu.and_then(|mut vcpu| {
                    if index == 0 {
                        load(machine, memory, &mut vcpu)?;
                        control::started(stream);
                        vcpu.stop();
                    }
                    drive(board, index, &mut vcpu, host, Known { clock, gate, about });
                    Ok(())
                });
                if let Err(error) = result {
                    eprintln!("<{}>{error}", log::ERROR);
                    process::exit(error.exit_code().into());
                }
            }
        });
        let own = drivers.next();
        drivers.for_each(|driver| drop(scope.spawn(driver)));
        own.into_iter().for_each(|driver| driver());
        host.console.finish();
        if let Some(console) = &second {
            console.finish();
        }
        let outcome = board.outcome().unwrap_or(Outcome::HostError(0));
        process::exit(outcome.exit_code().into())
    })
}

/// What a thread beside those of virtual processors does.
type Job<'s> = Box<dyn FnOnce() + Send + 's>;

/// Confines the process, and puts the kernel into memory and the first processor into the state that it wants.
fn load(machine: &Machine, memory: &GuestMemory, vcpu: &mut KvmVcpu<'_>) -> Result<(), Error> {
    confine(machine.debug).map_err(Error::Filter)?;
    let read = |number, action| {
        let mut bytes = Vec::new();
        inherited(number).read_to_end(&mut bytes).map_err(Error::host(action))?;
        Ok(bytes)
    };
    let kernel = read(descriptor::KERNEL, "read the kernel")?;
    let initrd = read(descriptor::INITRD, "read the initial RAM disk")?;
    let config = BootConfig {
        layout: &vmm_machine::layout_with_pci(),
        vcpus: machine.cpus,
        kernel: &kernel,
        initrd: Some(&initrd),
        command_line: machine.command_line.as_bytes(),
    };
    let state = vmm_boot::load(memory, &config).map_err(Error::Boot)?;
    registers::set(vcpu, &state);
    Ok(())
}

/// What a virtual processor needs to know beside its machine.
#[derive(Clone, Copy)]
struct Known<'o> {
    clock: TscClock,
    gate: &'o Gate,
    /// Slots of the functions that events are about.
    about: &'o [(u64, Range<usize>)],
}

/// Runs a virtual processor until the machine ends.
fn drive(
    board: &Board<'_, '_>,
    index: usize,
    vcpu: &mut KvmVcpu<'_>,
    mut host: KvmHost<'_>,
    Known { clock, gate, about }: Known<'_>,
) {
    let host = &mut host;
    let mut cpu = board.cpu(index);
    let seat = &host.seats[index];
    let outcome = loop {
        let events = match board.run(&mut cpu, vcpu, host) {
            StopReason::Recall(events) => events,
            StopReason::Idle { deadline_tsc } => seat.wait(&clock, deadline_tsc),
            StopReason::End(outcome) => break outcome,
        };
        if events & event::PAUSE != 0 {
            gate.pass();
        }
        if events & event::DEBUG != 0 {
            vcpu.stop();
        }
        if events & event::POWER_BUTTON != 0 {
            board.press_power_button(host);
        }
        if events & event::CONSOLE != 0 {
            board.input(Some(&cpu), host);
        }
        for (_, slots) in about.iter().filter(|(event, _)| events & event != 0) {
            for slot in slots.clone() {
                board.function_input(slot, Some(&cpu), host);
            }
        }
    };
    if outcome == Outcome::TripleFault {
        describe(index, vcpu);
    }
    // The others end too.
    board.end(outcome, host);
}

/// Where a virtual processor was when it gave up.
fn describe(index: usize, vcpu: &mut KvmVcpu<'_>) {
    let [rip, rflags, cr0, cr2, cr3, cr4] =
        [Reg::Rip, Reg::Rflags, Reg::Cr0, Reg::Cr2, Reg::Cr3, Reg::Cr4]
            .map(|register| vcpu.get(register));
    let rsp = vcpu.gpr(Gpr::Rsp);
    eprintln!(
        "<{}>virtual processor {index} gave up: rip {rip:#x} rsp {rsp:#x} rflags {rflags:#x} \
         cr0 {cr0:#x} cr2 {cr2:#x} cr3 {cr3:#x} cr4 {cr4:#x}",
        log::WARN
    );
}
