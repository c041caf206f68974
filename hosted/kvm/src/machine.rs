//! One machine, from its description to its end.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::ops::Range;
use std::os::fd::{FromRawFd, OwnedFd};
use std::process;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};

use hosted_vmm::confine;
use kvm_ioctls::VcpuFd;
use proto::wedge::{Disk as Record, MAX_DISKS, layout, log};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};
use spin::relax::RelaxStrategy;
use vmm_boot::BootConfig;
use vmm_bus::Block;
use vmm_cpu::{Backend, Gpr, MAX_VCPUS, Reg, TscClock};
use vmm_machine::{Host, Level, Model, Outcome, Outside, Pause, Pc, PcConfig, Slots, registers};
use vmm_mem::GuestMemory;
use vmm_mem::shared::SharedMemory;

use crate::Error;
use crate::console::Console;
use crate::control::{self, Gate};
use crate::disk::{Disk, WORKERS};
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
    /// Disks: words of [`proto::wedge::Disk`].
    pub disks: Vec<[u64; Record::WORDS]>,
    /// There is a virtio console beside the serial line.
    pub console: bool,
}

/// PCI functions of a machine: disks, then the source of random numbers and the console.
const MAX_FUNCTIONS: usize = MAX_DISKS + 2;

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
    /// The host's random numbers.
    Entropy,
    /// A line.
    Console(&'o Console),
}

impl Outside for Link<'_> {
    fn block(&mut self) -> Option<&mut dyn Block> {
        match self {
            Self::Disk(disk) => Some(disk),
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
    let disks: Vec<Disk> = (layout::DISKS_FD..)
        .zip(&machine.disks)
        .take(MAX_DISKS)
        .map(|(number, words)| Disk::new(inherited(number), Record::from_words(words)))
        .collect();
    listen_to_kicks()?;
    set_dumpable_behavior(DumpableBehavior::NotDumpable)
        .map_err(Error::host("close this process to others"))?;
    let vm = Vm::new()?;
    let count = usize::from(machine.cpus).clamp(1, MAX_VCPUS);
    let fds = (0..count).map(|index| vm.vcpu(index)).collect::<Result<Vec<_>, _>>()?;
    let hole = vmm_machine::layout_with_pci().hole_start;
    let ranges: Vec<_> = vmm_boot::ram_ranges(machine.memory, hole).collect();
    let memory = OwnedFd::from(inherited(layout::MEMORY_FD));
    let mut memory = SharedMemory::open(memory, machine.memory)
        .map_err(Error::host("map the guest's memory"))?;
    memory
        .with(ranges, |memory| power_on(&machine, &disks, vm, fds, memory))
        .map_err(Error::host("lay the guest's memory out"))?
}

/// Makes the board and the threads, and runs.
fn power_on(
    machine: &Machine,
    disks: &[Disk],
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
    for disk in disks {
        // There are as many slots.
        let _ = slots.add(Model::Block(disk.info()), Link::Disk(disk));
    }
    let _ = slots.add(Model::Entropy, Link::Entropy);
    let console = second.as_ref().map(Link::Console);
    let console = console.and_then(|console| slots.add(Model::Console, console).ok());
    let about = [(event::DISK, 0..disks.len()), (event::SECOND, slot(console))];
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
    threads.push(Box::new(|| control::serve(&stream, &gate, &seats)));
    if let Some(console) = &second {
        let line = Arc::new(inherited(layout::CONSOLE_FD));
        let other = Arc::clone(&line);
        threads.push(Box::new(move || console.write(&*line, first)));
        threads.push(Box::new(move || console.read(&*other, first)));
    }
    for (number, disk) in disks.iter().enumerate() {
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
                let vcpu = KvmVcpu::new(fd, seat, clock);
                barrier.wait();
                let result = vcpu.and_then(|mut vcpu| {
                    if index == 0 {
                        load(machine, memory, &mut vcpu)?;
                        control::started(stream);
                    }
                    drive(board, index, &mut vcpu, host, Outer { clock, gate, about });
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

/// A slot, if it is there.
fn slot(slot: Option<usize>) -> Range<usize> {
    slot.map_or(0..0, |slot| slot..slot + 1)
}

/// Confines the process, and puts the kernel into memory and the first processor into the state that it wants.
fn load(machine: &Machine, memory: &GuestMemory, vcpu: &mut KvmVcpu<'_>) -> Result<(), Error> {
    confine().map_err(Error::Filter)?;
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
struct Outer<'o> {
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
    Outer { clock, gate, about }: Outer<'_>,
) {
    let host = &mut host;
    let mut cpu = board.cpu(index);
    let seat = &host.seats[index];
    let outcome = loop {
        let events = match board.run(&mut cpu, vcpu, host) {
            Pause::Recall(events) => events,
            Pause::Idle { deadline_tsc } => seat.wait(&clock, deadline_tsc),
            Pause::End(outcome) => break outcome,
        };
        if events & event::PAUSE != 0 {
            gate.pass();
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
