//! The KVM process: runs one VM from its configuration to its exit.

use std::ffi::CString;
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

use host_linux::sandbox;
use hosted_filters::confine_kvm;
use kvm_ioctls::VcpuFd;
use proto::hosted::counters::VmCounters;
use proto::hosted::debug::DebugState;
use proto::hosted::{
    DiskRecord as Record, MAX_DISKS, MAX_NETS, MAX_SHARES, NetRecord, ShareRecord, VCPU_NAME,
    console, layout, log,
};
use proto::requests::Queue;
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::rand::{GetRandomFlags, getrandom};
use rustix::thread::{futex, set_name};
use serde::{Deserialize, Serialize};
use spin::relax::RelaxStrategy;
use vmm_boot::BootConfig;
use vmm_bus::backend::BlockInfo;
use vmm_bus::frames::{self, NetPort, Sockets};
use vmm_bus::requests::{Futex, Requests};
use vmm_bus::{BackendRef, DeviceBackend, EntropySource};
use vmm_machine::{Host, Level, Model, Outcome, Pc, PcConfig, Slots, StopReason, registers};
use vmm_mem::shared::SharedMemory;
use vmm_mem::{GuestMemory, PAGE_SIZE};
use vmm_vcpu::{CounterClock, MAX_VCPUS};
use vmm_x86::{Gpr, Reg, X86Vcpu};

use crate::Error;
use crate::balloon::HostBalloon;
use crate::console::ConsoleBuffer;
use crate::control;
use crate::debug::DebugStops;
use crate::disk::{self, DiskVm, RawDisk};
use crate::kick;
use crate::net::{self, Network};
use crate::pause::PauseGate;
use crate::shared::SharedAreas;
use crate::vcpu::KvmVcpu;
use crate::vcpu_thread::{Notify, VcpuThread, event, tsc};
use crate::vm::{KvmVm, set_cpuid};

/// Descriptors of the KVM process, in addition to those of both back ends
/// ([`proto::hosted::layout`]).
pub mod descriptor {
    /// [`KvmConfig`](super::KvmConfig) as JSON.
    pub const DESCRIPTION: u32 = 40;
    /// The kernel.
    pub const KERNEL: u32 = 41;
    /// The initial RAM disk; empty: none.
    pub const INITRD: u32 = 42;
}

/// Configuration of a VM.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct KvmConfig {
    /// Guest memory in bytes, a multiple of the page size.
    pub memory: u64,
    /// vCPUs.
    pub cpus: u8,
    /// Kernel command line.
    pub command_line: String,
    /// Least severe messages that are printed: see [`proto::hosted::log`].
    pub log: u64,
    /// Disks: words of [`proto::hosted::DiskRecord`].
    pub disks: Vec<[u64; Record::WORDS]>,
    /// Networks: words of [`proto::hosted::NetRecord`].
    pub nets: Vec<[u64; NetRecord::WORDS]>,
    /// Shared directories: words of [`proto::hosted::ShareRecord`].
    pub shares: Vec<[u64; ShareRecord::WORDS]>,
    /// Guest CID of the vsock device, if there is one.
    pub vsock: Option<u32>,
    /// Virtio console in addition to the serial line: see [`proto::hosted::console`].
    pub console: u64,
    /// Initial size of the balloon in bytes; `None`: no balloon.
    pub balloon: Option<u64>,
    /// Sandboxing in addition to the seccomp filter.
    pub sandbox: Sandbox,
    /// A debugger may stop the VM.
    pub debug: bool,
}

/// Sandboxing of the process in addition to its seccomp filter.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub enum Sandbox {
    /// As far as the host permits it to unprivileged users.
    On,
    /// Disabled.
    Off,
    /// Complete, or the VM does not start.
    Strict,
}

/// Most PCI functions of a VM: disks, shared directories, entropy source, networks, vsock, balloon,
/// console.
const MAX_FUNCTIONS: usize = MAX_DISKS + MAX_SHARES + MAX_NETS + 4;

/// Yields the CPU while a vCPU thread waits for a lock of the VM.
struct YieldRelax;

impl RelaxStrategy for YieldRelax {
    fn relax() {
        thread::yield_now();
    }
}

const _: () = assert!(Level::Error.number() == log::ERROR);
const _: () = assert!(Level::Warning.number() == log::WARN);
const _: () = assert!(Level::Info.number() == log::INFO);

type DeviceTable<'o> = Slots<HostEndpoint<'o>, MAX_FUNCTIONS, YieldRelax>;
type Board<'m, 'o> = Pc<'m, YieldRelax, MAX_VCPUS, DeviceTable<'o>>;

/// Host end of a PCI function.
enum HostEndpoint<'o> {
    /// Workers of a disk: threads of this process, or an image process.
    Disk(Requests<'o, FutexWait>),
    /// A file server process.
    Share(Requests<'o, FutexWait>),
    /// A network.
    Net(NetPort<net::FrameEndpoint<'o>>),
    /// Packet stream of the vsock process.
    Sockets(Sockets<net::FrameEndpoint<'o>>),
    /// Guest memory, which the balloon returns to the host.
    Balloon(HostBalloon<'o>),
    /// Random numbers of the host.
    Entropy(HostRandom),
    /// A console line.
    Console(&'o ConsoleBuffer),
}

impl DeviceBackend for HostEndpoint<'_> {
    fn get(&mut self) -> BackendRef<'_> {
        match self {
            Self::Disk(requests) => BackendRef::Block(requests),
            Self::Share(requests) => BackendRef::Messages(requests),
            Self::Net(net) => BackendRef::Net(net),
            Self::Sockets(sockets) => BackendRef::Packets(sockets),
            Self::Balloon(balloon) => BackendRef::Balloon(balloon),
            Self::Entropy(source) => BackendRef::Entropy(source),
            Self::Console(console) => BackendRef::Bytes(console),
        }
    }
}

/// Random numbers of the host.
struct HostRandom;

impl EntropySource for HostRandom {
    fn fill(&mut self, to: &mut [u8]) -> bool {
        let length = to.len();
        getrandom(to, GetRandomFlags::empty()) == Ok(length)
    }
}

/// Host services for the VM.
#[derive(Clone, Copy)]
struct KvmHost<'o> {
    console: &'o ConsoleBuffer,
    vcpu_threads: &'o [VcpuThread],
    log: u64,
}

impl Host for KvmHost<'_> {
    fn counter(&self) -> u64 {
        tsc()
    }

    fn serial(&mut self) -> BackendRef<'_> {
        BackendRef::Bytes(&mut self.console)
    }

    fn log(&mut self, level: Level, text: fmt::Arguments<'_>) {
        if level.number() <= self.log {
            eprintln!("<{}>{text}", level.number());
        }
    }

    fn kick(&mut self, index: usize) {
        self.vcpu_threads[index].notify(event::KICK);
    }
}

/// Runs the VM that this process was started for, and exits with its exit code.
pub fn run() -> ! {
    let error = match serve() {
        Ok(never) => match never {},
        Err(error) => error,
    };
    eprintln!("<{}>{error}", log::ERROR);
    process::exit(error.exit_code().into())
}

/// Uninhabited: the process exits first.
enum Never {}

/// Takes a descriptor that the process was started with. Each is taken once.
fn inherited(number: u32) -> File {
    // SAFETY: the parent passes these descriptors, and no other code here uses them. If the number
    // is not open or of another kind, its use fails.
    unsafe { File::from_raw_fd(number as i32) }
}

fn serve() -> Result<Never, Error> {
    let machine: KvmConfig =
        serde_json::from_reader(inherited(descriptor::DESCRIPTION)).map_err(Error::Description)?;
    let disks: Vec<Disk> = (layout::DISKS_FD..)
        .zip(&machine.disks)
        .take(MAX_DISKS)
        .map(|(number, words)| {
            let record = Record::from_words(words);
            let file = (!record.is_external).then(|| RawDisk::new(inherited(number), record));
            Disk { record, file }
        })
        .collect();
    let counters =
        SharedMemory::open(inherited(layout::COUNTERS_FD).into(), layout::COUNTERS_LENGTH)
            .map_err(Error::host("map the counters of devices"))?;
    let shared = SharedMemory::open(inherited(layout::SHARED_FD).into(), layout::SHARED_LENGTH)
        .map_err(Error::host("map shared memory"))?;
    let areas = SharedAreas::new(&shared, &counters)?;
    let networks = networks(&machine, areas.counters)?;
    kick::install_handler()?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(Error::host("make this process undumpable"))?;
    let vm = KvmVm::new()?;
    let count = usize::from(machine.cpus).clamp(1, MAX_VCPUS);
    let fds = (0..count).map(|index| vm.vcpu(index)).collect::<Result<Vec<_>, _>>()?;
    // No path names are needed from here on. Threads, of which there are none yet, inherit the
    // restriction.
    confine_process(&machine)?;
    let hole = vmm_machine::layout_with_pci().hole_start;
    let ranges: Vec<_> = vmm_boot::ram_ranges(machine.memory, hole).collect();
    let memory = OwnedFd::from(inherited(layout::MEMORY_FD));
    let mut memory =
        SharedMemory::open(memory, machine.memory).map_err(Error::host("map guest memory"))?;
    let copy = memory.descriptor().try_clone_to_owned();
    let copy = copy.map_err(Error::host("duplicate a descriptor"))?;
    let balloon = machine
        .balloon
        .map(|bytes| HostBalloon::new(copy, ranges.clone(), bytes / PAGE_SIZE, areas.report));
    let outer = Backends { disks: &disks, networks: &networks, areas };
    memory
        .with(ranges, |memory| power_on(&machine, outer, balloon, vm, fds, memory))
        .map_err(Error::host("lay out guest memory"))?
}

/// Enters the configured sandbox, and drops all capabilities in any case.
fn confine_process(machine: &KvmConfig) -> Result<(), Error> {
    let entered = enter_sandbox(machine);
    let dropped = sandbox::drop_capabilities();
    let dropped = dropped.map_err(|error| io::Error::from_raw_os_error(error.0));
    dropped.map_err(Error::host("drop capabilities"))?;
    entered
}

fn enter_sandbox(machine: &KvmConfig) -> Result<(), Error> {
    if machine.sandbox == Sandbox::Off {
        return Ok(());
    }
    // Threads need the PID namespace of their process.
    let refused = sandbox::enter(false).refused;
    if refused.is_empty() {
        return Ok(());
    }
    if machine.sandbox == Sandbox::Strict {
        return Err(Error::Sandbox(refused));
    }
    if machine.log >= log::INFO {
        eprintln!("<{}>incomplete sandbox: {refused}", log::INFO);
    }
    Ok(())
}

/// A disk.
struct Disk {
    record: Record,
    /// Its file; `None`: a device process executes its requests.
    file: Option<RawDisk>,
}

/// Opens the networks, and after them the packet stream of vsock.
fn networks<'o>(machine: &KvmConfig, counters: &'o VmCounters) -> Result<Vec<Network<'o>>, Error> {
    let nets = machine.nets.iter().take(MAX_NETS).enumerate().map(|(number, words)| {
        let file = inherited(layout::NETS_FD + number as u32);
        let (record, counters) = (NetRecord::from_words(words), counters.net(number));
        Network::new(format!("network {number}"), file, &record, counters)
    });
    let vsock = machine.vsock.map(|_| {
        let file = inherited(layout::NETS_FD + MAX_NETS as u32);
        let counters = counters.net(MAX_NETS);
        Network::new("vsock".to_owned(), file, &NetRecord::default(), counters)
    });
    nets.chain(vsock).collect()
}

/// Waits on words of shared memory with futex(2).
struct FutexWait;

impl Futex for FutexWait {
    fn wake_one(word: &AtomicU32) {
        // Cannot fail for a mapped word.
        let _ = futex::wake(word, futex::Flags::empty(), 1);
    }

    fn wait(word: &AtomicU32, value: u32) {
        // Early returns are allowed.
        let _ = futex::wait(word, futex::Flags::empty(), value, None);
    }
}

/// Notifies the vCPU that handles the completions of a device.
#[derive(Clone, Copy)]
struct SlotTarget<'a, 'm, 'o> {
    board: &'a Board<'m, 'o>,
    vcpu_threads: &'a [VcpuThread],
    slot: usize,
}

impl Notify for SlotTarget<'_, '_, '_> {
    fn notify(&self, events: u64) {
        self.vcpu_threads[self.board.target(self.slot)].notify(events);
    }
}

/// Forwards doorbells of device processes to vCPUs until the process ends. `targets`: those of the
/// queues.
fn pump_doorbell(mut doorbell: &File, targets: &[(&Queue, SlotTarget<'_, '_, '_>)]) {
    let mut count = [0; 8];
    loop {
        match doorbell.read(&mut count) {
            Ok(1..) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Ok(0) | Err(_) => return,
        }
        // All queues, because one doorbell may stand for several.
        for (queue, target) in targets {
            if queue.pending.swap(0, SeqCst) != 0 {
                target.notify(event::DISK);
            }
        }
    }
}

/// Host ends of the devices.
#[derive(Clone, Copy)]
struct Backends<'o> {
    disks: &'o [Disk],
    /// The last one is that of vsock, if there is one.
    networks: &'o [Network<'o>],
    areas: SharedAreas<'o>,
}

/// Creates the board and the threads, and runs the VM.
fn power_on(
    machine: &KvmConfig,
    backends: Backends<'_>,
    balloon: Option<HostBalloon<'_>>,
    vm: KvmVm,
    fds: Vec<VcpuFd>,
    memory: &GuestMemory,
) -> Result<Never, Error> {
    vm.map(memory)?;
    let clock = CounterClock::new(vm.tsc_khz(&fds[0])?, tsc());
    let serial = ConsoleBuffer::new(event::CONSOLE);
    let has_console = machine.console != console::NONE;
    let second = has_console.then(|| ConsoleBuffer::new(event::VIRTIO_CONSOLE));
    let (slots, about) = functions(machine, backends, balloon, second.as_ref());
    let config = pc_config(&vm, fds.len(), clock);
    let board: Board<'_, '_> =
        Pc::with_functions(config, memory, |number, subleaf| vm.cpuid(number, subleaf), slots);
    for (index, fd) in fds.iter().enumerate() {
        set_cpuid(fd, index, board.cpuid())?;
    }
    // Leaked: used as long as vCPUs run.
    drop(vm);

    let vcpu_threads: Vec<VcpuThread> = fds.iter().map(|_| VcpuThread::default()).collect();
    let host = KvmHost { console: &serial, vcpu_threads: &vcpu_threads, log: machine.log };
    let (stream, gate) = (inherited(layout::CONTROL_FD), PauseGate::default());
    let SharedAreas { debug, report, .. } = backends.areas;
    // All threads are created before the process is confined; none later.
    let mut jobs = console_jobs(&serial, second.as_ref(), &vcpu_threads[0]);
    jobs.push(job(|| control::serve(&stream, &gate, &vcpu_threads, debug, report)));
    let board = &board;
    let target = |slot| SlotTarget { board, vcpu_threads: &vcpu_threads, slot };
    jobs.extend(backend_jobs(backends, memory, &about, target));
    let barrier = &Barrier::new(jobs.len() + fds.len());
    let context = VcpuContext { clock, gate: &gate, about: &about, stream: &stream, debug };
    thread::scope(|scope| {
        for job in jobs {
            scope.spawn(move || job(barrier));
        }
        let mut drivers = fds.into_iter().enumerate().map(|(index, fd)| {
            move || drive(machine, board, index, fd, memory, host, context, barrier)
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

/// Returns the configuration of the board.
fn pc_config(vm: &KvmVm, vcpus: usize, clock: CounterClock) -> PcConfig {
    PcConfig {
        vcpus: vcpus as u8,
        clock,
        xcr0_mask: vm.xcr0(),
        // 0 for clocks before 1970.
        start_unix: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
        kvmclock: true,
        // Stolen time would require the host scheduler's statistics of the threads.
        steal_time: false,
        pv_flush: false,
        // KVM would send these interrupts itself, to local APICs that it does not have.
        pv_ipi: false,
        nested_paging: true,
        id: 1,
    }
}

/// Slots of the functions that an event refers to.
type EventSlots = [(u64, Range<usize>); 4];

/// Creates the PCI functions.
fn functions<'o>(
    machine: &KvmConfig,
    Backends { disks, networks, areas: SharedAreas { queues, .. } }: Backends<'o>,
    balloon: Option<HostBalloon<'o>>,
    second: Option<&'o ConsoleBuffer>,
) -> (DeviceTable<'o>, EventSlots) {
    let mut slots = Slots::new();
    // There are enough slots.
    for (Disk { record, file }, queue) in disks.iter().zip(queues) {
        let info = BlockInfo::of_file(record.sectors, record.read_only, record.serial);
        let link = match file {
            Some(_) => Requests::new(queue),
            None => Requests::with_device_process(queue),
        };
        let _ = slots.add(Model::Block(info), HostEndpoint::Disk(link));
    }
    for (words, queue) in machine.shares.iter().zip(&queues[MAX_DISKS..]) {
        let tag = ShareRecord::from_words(words).tag;
        let _ =
            slots.add(Model::P9(tag), HostEndpoint::Share(Requests::with_device_process(queue)));
    }
    let mut used = disks.len() + machine.shares.len().min(MAX_SHARES);
    let disk_slots = 0..used;
    let _ = slots.add(Model::Entropy, HostEndpoint::Entropy(HostRandom));
    used += 1;
    let net_slots = used..used + networks.len();
    for (words, network) in machine.nets.iter().zip(networks) {
        let record = NetRecord::from_words(words);
        let link = NetPort::new(net::endpoint(network), record.is_tap());
        let info = frames::info(record.mac, record.mtu, record.is_tap());
        let _ = slots.add(Model::Net(info), HostEndpoint::Net(link));
    }
    if let (Some(cid), Some(network)) = (machine.vsock, networks.last()) {
        let link = HostEndpoint::Sockets(Sockets::new(net::endpoint(network)));
        let _ = slots.add(Model::Vsock(cid.into()), link);
    }
    let slot_range = |slot: Option<usize>| slot.map_or(0..0, |slot| slot..slot + 1);
    let balloon = balloon.map(HostEndpoint::Balloon);
    let balloon = balloon.and_then(|balloon| slots.add(Model::Balloon, balloon).ok());
    let model = if machine.console == console::PORTS { Model::Ports } else { Model::Console };
    let second = second.map(HostEndpoint::Console);
    let console = second.and_then(|second| slots.add(model, second).ok());
    let about = [
        (event::DISK, disk_slots),
        (event::NET, net_slots),
        (event::BALLOON, slot_range(balloon)),
        (event::VIRTIO_CONSOLE, slot_range(console)),
    ];
    (slots, about)
}

/// Loop of a thread other than those of vCPUs. It waits at the barrier, after which the process is
/// confined.
type Job<'s> = Box<dyn FnOnce(&Barrier) + Send + 's>;

/// Creates a thread's loop that needs no preparation.
fn job<'s>(serve: impl FnOnce() + Send + 's) -> Job<'s> {
    Box::new(|barrier| {
        barrier.wait();
        serve();
    })
}

/// Returns the loops of the console lines.
fn console_jobs<'s>(
    serial: &'s ConsoleBuffer,
    second: Option<&'s ConsoleBuffer>,
    vcpu_thread: &'s VcpuThread,
) -> Vec<Job<'s>> {
    let mut jobs = vec![
        job(|| serial.write(io::stdout(), vcpu_thread)),
        job(|| serial.read(io::stdin(), vcpu_thread)),
    ];
    if let Some(console) = second {
        let line = Arc::new(inherited(layout::CONSOLE_FD));
        let other = Arc::clone(&line);
        jobs.push(job(move || console.write(&*line, vcpu_thread)));
        jobs.push(job(move || console.read(&*other, vcpu_thread)));
    }
    jobs
}

/// Returns the loops of device processes' doorbell, networks and disks.
fn backend_jobs<'s, 'm: 's, 'o: 's>(
    Backends { disks, networks, areas: SharedAreas { queues, counters, .. } }: Backends<'s>,
    memory: &'s GuestMemory,
    [(_, disk_slots), (_, net_slots), ..]: &EventSlots,
    target: impl Fn(usize) -> SlotTarget<'s, 'm, 'o>,
) -> Vec<Job<'s>> {
    let doorbell = inherited(layout::DOORBELL_FD);
    let disk_queues = queues.iter().take(disks.len());
    let share_queues = queues[MAX_DISKS..].iter().take(disk_slots.len() - disks.len());
    let rung = disk_queues.chain(share_queues).zip(disk_slots.clone());
    let rung: Vec<_> = rung.map(|(queue, slot)| (queue, target(slot))).collect();
    let mut jobs = vec![job(move || pump_doorbell(&doorbell, &rung))];
    for (slot, network) in net_slots.clone().zip(networks) {
        let target = target(slot);
        jobs.push(job(move || network.send(&target)));
        jobs.push(job(move || network.receive(&target)));
    }
    let (count, has_ring) = disk::workers();
    for (index, (disk, queue)) in disks.iter().zip(queues).enumerate() {
        let Some(file) = &disk.file else { continue };
        for _ in 0..count {
            let target = target(index);
            jobs.push(Box::new(move |barrier| {
                let host = DiskVm { memory, target: &target };
                let own = (queue, counters.queue(index));
                file.work(index, has_ring, own, host, barrier);
            }));
        }
    }
    jobs
}

/// Confines the process, loads the kernel, and sets the first vCPU to its initial state.
fn load(machine: &KvmConfig, memory: &GuestMemory, vcpu: &mut KvmVcpu<'_>) -> Result<(), Error> {
    confine_kvm(machine.debug).map_err(Error::Filter)?;
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

/// Context of a vCPU besides the VM.
#[derive(Clone, Copy)]
struct VcpuContext<'o> {
    clock: CounterClock,
    gate: &'o PauseGate,
    /// Control stream.
    stream: &'o File,
    debug: &'o DebugState,
    /// Slots of the functions that events refer to.
    about: &'o [(u64, Range<usize>)],
}

/// Thread of a vCPU: creates it, and runs it until the VM ends. The first one starts the guest.
#[expect(clippy::too_many_arguments, reason = "they are the parts of the VM")]
fn drive(
    machine: &KvmConfig,
    board: &Board<'_, '_>,
    index: usize,
    fd: VcpuFd,
    memory: &GuestMemory,
    host: KvmHost<'_>,
    context: VcpuContext<'_>,
    barrier: &Barrier,
) {
    let VcpuContext { clock, gate, stream, debug, .. } = context;
    let vcpu_thread = &host.vcpu_threads[index];
    vcpu_thread.register_current();
    name_thread(index);
    let stops = DebugStops { index, shared: debug, gate, vcpu_thread, stream };
    let stops = machine.debug.then_some(stops);
    let vcpu = KvmVcpu::new(fd, vcpu_thread, memory, clock, stops);
    barrier.wait();
    let result = vcpu.and_then(|mut vcpu| {
        if index == 0 {
            load(machine, memory, &mut vcpu)?;
            control::started(stream);
            vcpu.stop();
        }
        run_vcpu(board, index, &mut vcpu, host, context);
        Ok(())
    });
    if let Err(error) = result {
        eprintln!("<{}>{error}", log::ERROR);
        process::exit(error.exit_code().into());
    }
}

/// Names this thread after its vCPU. The process' filter forbids a change.
fn name_thread(index: usize) {
    if let Ok(name) = CString::new(format!("{VCPU_NAME}{index}")) {
        // On failure, the vCPU's times are missing from the statistics.
        let _ = set_name(&name);
    }
}

/// Runs a vCPU until the VM ends.
fn run_vcpu(
    board: &Board<'_, '_>,
    index: usize,
    vcpu: &mut KvmVcpu<'_>,
    mut host: KvmHost<'_>,
    VcpuContext { clock, gate, about, .. }: VcpuContext<'_>,
) {
    let host = &mut host;
    let mut cpu = board.cpu(index);
    let vcpu_thread = &host.vcpu_threads[index];
    let outcome = loop {
        let events = match board.run(&mut cpu, vcpu, host) {
            StopReason::Recall(events) => events,
            StopReason::Idle { deadline_ticks } => vcpu_thread.wait(&clock, deadline_ticks),
            StopReason::End(outcome) => break outcome,
        };
        if events & event::PAUSE != 0 {
            gate.wait_if_paused();
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
        report_registers(index, vcpu);
    }
    // The other vCPUs end, too.
    board.end(outcome, host);
    gate.end();
}

/// Prints the registers of a failed vCPU.
fn report_registers(index: usize, vcpu: &mut KvmVcpu<'_>) {
    let [rip, rflags, cr0, cr2, cr3, cr4] =
        [Reg::Rip, Reg::Rflags, Reg::Cr0, Reg::Cr2, Reg::Cr3, Reg::Cr4]
            .map(|register| vcpu.get(register));
    let rsp = vcpu.gpr(Gpr::Rsp);
    eprintln!(
        "<{}>vCPU {index} failed: rip {rip:#x} rsp {rsp:#x} rflags {rflags:#x} \
         cr0 {cr0:#x} cr2 {cr2:#x} cr3 {cr3:#x} cr4 {cr4:#x}",
        log::WARN
    );
}
