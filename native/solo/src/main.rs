//! Root and VMM in one program, for one guest: an AArch64 Linux on the board `virt` with the
//! machine's UART as its own. It serves until root, console and VMM run as programs of their own on
//! AArch64.
//!
//! The bundle has the files `kernel` and `initrd`, and optionally `command-line`. The guest gets
//! one vCPU for each CPU, and the largest range of RAM. When it ends, its exit code is logged and
//! the machine is reset.
#![no_std]
#![no_main]
#![forbid(unsafe_code)]

mod backend;
mod console;

use core::fmt;

use abi::boot::slot;
use abi::bundle::Header;
use abi::{PAGE_SIZE, Status, rights, vm_mode};
use heapless::Vec;
use hw_arm64::pl031;
use native_rt::start::Boot;
use native_rt::thread::{HelperThread, Stack, ThreadResources, run_parallel};
use native_rt::{
    Factory, Notification, Platform, Space, Vcpu, Vm, Window, error, info, time, yield_now,
};
use spin::mutex::SpinMutex;
use spin::relax::RelaxStrategy;
use vmm_arm64::StartRequest;
use vmm_boot::virt::{RAM, VirtBoot};
use vmm_bus::BackendRef;
use vmm_machine::{Host, Level, Outcome, StopReason, Virt, VirtConfig};
use vmm_mem::GuestMemory;
use vmm_vcpu::CounterClock;

use crate::backend::NativeVcpu;
use crate::console::GuestLine;

/// Maximum number of vCPUs.
const MAX_CPUS: usize = 4;
/// Slots: the VM, the interrupt of the UART, and four for each vCPU.
const VM: u64 = slot::FREE;
const UART_IRQ: u64 = VM + 1;
const FIRST_VCPU: u64 = VM + 2;
const SLOTS: u64 = 4;
/// Bits of the vCPUs' notifications: the board has events; the UART has interrupted.
const KICK: u64 = 1 << 0;
const INPUT_BIT: u32 = 1;
const INPUT: u64 = 1 << INPUT_BIT;
/// Registers of the machine's real-time clock.
const CLOCK: u64 = 0x901_0000;
/// Stack of a vCPU's thread in bytes.
const STACK: usize = 16 * PAGE_SIZE as usize;
/// Priority and time slice of these threads.
const PRIORITY: u8 = 10;
const TIME_SLICE_NS: u64 = 10_000_000;
/// Time limit for the other vCPUs to stop after one has ended the VM.
const STOP_TIMEOUT_NS: u64 = 1_000_000_000;
/// Guest memory is a multiple of this, for large pages.
const BLOCK: u64 = 2 << 20;

/// Stacks of all vCPUs but the first.
static STACKS: [Stack<STACK>; MAX_CPUS - 1] = [const { Stack::new() }; MAX_CPUS - 1];

type Board<'m> = Virt<'m, YieldRelax, MAX_CPUS>;
type Cell<T> = SpinMutex<T, YieldRelax>;
type Result<T = ()> = core::result::Result<T, (&'static str, Status)>;

/// Yields while it waits for a lock: the owner may share the CPU.
struct YieldRelax;

impl RelaxStrategy for YieldRelax {
    fn relax() {
        yield_now();
    }
}

native_rt::root_entry!(main);

fn main(boot: Boot) -> ! {
    match serve(&boot) {
        Ok(outcome) => info!("the guest has ended: {outcome:?}, code {}", outcome.exit_code()),
        Err((what, status)) => error!("no guest: {what}: {status:?}"),
    }
    let platform = Platform::at(slot::PLATFORM);
    native_rt::log::flush(platform);
    let _ = platform.reset();
    loop {
        yield_now();
    }
}

/// Names what has failed.
trait Named<T> {
    fn named(self, what: &'static str) -> Result<T>;
}

impl<T> Named<T> for core::result::Result<T, Status> {
    fn named(self, what: &'static str) -> Result<T> {
        self.map_err(|status| (what, status))
    }
}

/// Memory of the guest: the whole blocks of the largest range of RAM.
fn memory(boot: &Boot) -> Result<(Window, GuestMemory)> {
    let missing = ("RAM", Status::NoQuota);
    let (base, ram) = boot.ram().max_by_key(|(_, window)| window.length()).ok_or(missing)?;
    let skipped = base.next_multiple_of(BLOCK) - base;
    let length = ram.length().saturating_sub(skipped) & !(BLOCK - 1);
    let window = ram.part(skipped, length).filter(|_| length != 0).ok_or(missing)?;
    let guest = window.guest_memory(RAM).ok_or(("layout", Status::BadArgument))?;
    Ok((window, guest))
}

/// File of the bundle with this name.
fn file<'a>(boot: &Boot, name: &str) -> Option<&'a [u8]> {
    let header = Header::parse(boot.bundle, boot.bundle.len() as u64).ok()?;
    let file = header.find(name)?;
    boot.bundle.get(file.offset as usize..(file.offset + file.length) as usize)
}

/// Seconds since 1970, by the clock of QEMU's machine `virt`; 0: there is none.
fn wall_clock(boot: &Boot) -> u64 {
    let registers = boot.registers(CLOCK, PAGE_SIZE);
    registers.map_or(0, |clock| clock.read32(pl031::DATA as u64).into())
}

/// Kernel objects of the VM.
struct Objects {
    vcpus: Vec<Cell<NativeVcpu>, MAX_CPUS>,
    notifications: Vec<Notification, MAX_CPUS>,
    helpers: Vec<HelperThread, MAX_CPUS>,
}

impl Objects {
    fn new(cpus: u64, memory: Window) -> Result<Self> {
        let factory = Factory::at(slot::FACTORY);
        let vm = factory.vm(VM, vm_mode::NESTED).named("VM")?;
        let all = rights::READ | rights::WRITE | rights::EXECUTE;
        vm.map(memory, RAM, all).named("guest memory")?;
        let mut objects =
            Self { vcpus: Vec::new(), notifications: Vec::new(), helpers: Vec::new() };
        for index in 0..cpus {
            objects.add(index, vm)?;
        }
        Ok(objects)
    }

    /// Adds a vCPU. That with index 0 runs in this thread.
    fn add(&mut self, index: u64, vm: Vm) -> Result {
        let (factory, slots) = (Factory::at(slot::FACTORY), FIRST_VCPU + SLOTS * index);
        let full = |_| ("vCPU", Status::Overflow);
        let notification = factory.notification(slots).named("notification of a vCPU")?;
        let vcpu = Vcpu::create(factory, slots + 1, vm, index as u32, notification);
        let vcpu = NativeVcpu::new(vcpu.named("vCPU")?);
        self.notifications.push(notification).map_err(full)?;
        self.vcpus.push(Cell::new(vcpu)).map_err(|_| ("vCPU", Status::Overflow))?;
        let Some(stack) = index.checked_sub(1).and_then(|other| STACKS.get(other as usize)) else {
            return Ok(());
        };
        let sched = factory.sched_context(slots + 2, PRIORITY, TIME_SLICE_NS, 0);
        let resources = ThreadResources {
            factory,
            task: slot::TASK,
            slot: slots + 3,
            cpu: index as u32,
            sched: sched.named("scheduling context")?,
        };
        let helper = HelperThread::on(resources, stack).named("thread of a vCPU")?;
        self.helpers.push(helper).map_err(|_| ("thread", Status::Overflow))
    }
}

/// Runs the guest until it ends.
fn serve(boot: &Boot) -> Result<Outcome> {
    let cpus = u64::from(boot.info.cpus).min(MAX_CPUS as u64);
    let console = console::open(boot).ok_or(("UART", Status::BadArgument))?;
    let (window, memory) = memory(boot)?;
    let mut objects = Objects::new(cpus, window)?;
    let irq = console.bind(UART_IRQ, objects.notifications[0], INPUT_BIT);
    irq.named("interrupt of the UART")?;
    let command_line = file(boot, "command-line").and_then(|line| str::from_utf8(line).ok());
    let guest = VirtBoot {
        vcpus: cpus as u8,
        kernel: file(boot, "kernel").unwrap_or(&[]),
        initrd: file(boot, "initrd"),
        command_line: command_line.unwrap_or("console=ttyAMA0").trim_end(),
    };
    let start = vmm_boot::virt::load(&memory, &guest).map_err(|error| {
        error!("{error}");
        ("kernel", Status::BadArgument)
    })?;
    let config = VirtConfig {
        vcpus: cpus as u8,
        clock: CounterClock::new(boot.info.tsc_khz, time::tsc()),
        start_unix: wall_clock(boot),
        start: StartRequest { entry: start.entry, argument: start.tree },
    };
    let board = Board::new(config, &memory);
    let Objects { vcpus, notifications, helpers } = &mut objects;
    let drive = |index: usize| {
        let mut host = NativeHost { line: GuestLine(console), notifications };
        let outcome = drive(&board, index, &mut vcpus[index].lock(), &mut host);
        // The other vCPUs end too.
        board.end(outcome, &mut host);
    };
    let timeout = time::ticks(boot.info.tsc_khz, STOP_TIMEOUT_NS);
    run_parallel(helpers, timeout, &drive, || drive(0)).named("threads of the vCPUs")?;
    console.flush();
    Ok(board.outcome().unwrap_or(Outcome::HostError(0)))
}

/// Runs a vCPU until the VM ends.
fn drive(board: &Board, index: usize, vcpu: &mut NativeVcpu, host: &mut NativeHost) -> Outcome {
    let notification = host.notifications[index];
    let mut cpu = board.cpu(index);
    loop {
        let events = match board.run(&mut cpu, vcpu, host) {
            StopReason::End(outcome) => return outcome,
            StopReason::Recall(events) => events,
            StopReason::Idle { deadline_ticks } => {
                host.line.0.flush();
                match notification.wait(deadline_ticks) {
                    Ok(events) => events,
                    Err(Status::Timeout) => 0,
                    Err(status) => return Outcome::HostError(status as u64),
                }
            }
        };
        if events & INPUT != 0 {
            host.line.0.receive();
            board.input(Some(&cpu), host);
        }
    }
}

/// Services of the VMM for the board, as one thread uses them.
struct NativeHost<'a> {
    line: GuestLine,
    notifications: &'a [Notification],
}

impl Host for NativeHost<'_> {
    fn counter(&self) -> u64 {
        time::tsc()
    }

    fn serial(&mut self) -> BackendRef<'_> {
        BackendRef::Bytes(&mut self.line)
    }

    fn log(&mut self, level: Level, text: fmt::Arguments<'_>) {
        match level {
            Level::Error => error!("{text}"),
            Level::Warning | Level::Info => info!("{text}"),
        }
    }

    fn kick(&mut self, index: usize) {
        if let Some(notification) = self.notifications.get(index) {
            // It fails only if the capability is gone, and the vCPU with it.
            let _ = notification.signal(KICK);
        }
    }
}
