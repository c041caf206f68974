//! A child: a task with its first thread and its capabilities.

use core::fmt;

use abi::args::irq_flags;
use abi::{PAGE_SIZE, SHARE_OF_CPU, Selector, boot, rights};
use heapless::Vec;
use native_rt::start::Boot;
use native_rt::{
    Factory, Gate, Irq, Notification, OwnThread, Platform, ServerThread, Slots, Space, Status,
    Task, Thread, Window, drop_capability,
};
use proto::manage::{PAUSE_WORD, Report};
use proto::start::{
    DEVICES, FILES, FILES_ALIGN, GUEST_MEMORY, MAX_RANGES, MAX_START, MEMORY, MESSAGE_PAGE,
    REPORT_PAGE, Range, RangeKind, STACK_TOP, START_PAGE, Start, event, slot,
};
use proto::system::{CpuTime, MAX_VCPUS, MAX_VM_DEVICES};

use crate::directory::Directory;
use crate::loader::{self, LoadError};
use crate::memory::{MAX_GUEST_PIECES, Memory, physical};
use crate::mmio::{Place, SearchError};
use crate::pci::Address;

/// Root's capability slots, without the kernel's and root's fixed ones.
pub type RootSlots = Slots<14>;

/// Rights of memory that a VMM may delegate to its guest as data.
pub const FOR_GUESTS: u8 = rights::READ | rights::WRITE | rights::USER | rights::GLOBAL;
/// Maximum number of root's slots per child.
const MAX_SLOTS: usize = 12 + MAX_VCPUS - 1 + MAX_VM_DEVICES;
/// Time slice among threads of the same priority, in ns.
const TIME_SLICE: u64 = 10_000_000;

const _: () = assert!(PAUSE_WORD + 8 <= PAGE_SIZE);

/// Purpose of a child's gate: the low bits of its badge.
pub mod purpose {
    /// Log gate.
    pub const LOG: u64 = 0;
    /// Control gate.
    pub const CONTROL: u64 = 1;
    /// Fault gate.
    pub const FAULT: u64 = 2;
    /// Management gate.
    pub const MANAGE: u64 = 3;
    /// Number of bits.
    pub const BITS: u32 = 8;
}

/// Error of a child's start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StartError {
    /// The CPU does not exist.
    Cpu(u32),
    /// The processor lacks nested paging.
    NoNestedPaging,
    /// The bundle lacks the file of that role.
    File(&'static str),
    /// The position of the file in the bundle prevents its mapping.
    Place,
    /// Free memory is exhausted or too fragmented.
    Memory,
    /// Free memory has no piece for the guest, whose device accesses it.
    OnePiece,
    /// Root's capability slots are exhausted.
    Slots,
    /// The child's server does not run.
    Server,
    /// The device is unknown, or the kernel's.
    Device,
    /// No IOMMU restricts the device to the guest's memory.
    NoIommu,
    /// The device cannot be reset between two guests.
    NoReset,
    /// The device accesses memory past the IOMMU, or may do so.
    Untranslated,
    /// Another child has the device.
    Taken,
    /// The server's PCI function is gone.
    Absent(Address),
    /// Another device has registers in the same page as the device.
    SharedPage,
    /// Another child has the interrupt line of the device.
    SharedLine,
    /// The child's description exceeds the start page.
    Description,
    /// The program cannot be loaded.
    Load(LoadError),
    /// The kernel refused to create or bind an object.
    Kernel(Status),
}

impl fmt::Display for StartError {
    fn fmt(&self, to: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::NoNestedPaging => {
                to.write_str("the processor has no nested paging: add `npt = false` to the VM")
            }
            Self::OnePiece => to.write_str(
                "no free piece of memory is large enough for the guest, whose device accesses it: \
                 give the machine more memory, or the guest less",
            ),
            Self::NoIommu => to.write_str(
                "no IOMMU restricts the device to the guest's memory: use a machine with one \
                 (AArch64: an SMMU of version 3 with stage 1 for all functions of PCI)",
            ),
            Self::NoReset => to.write_str(
                "the device cannot be reset between two guests: it has no function-level reset, \
                 and is no virtio device of version 1; give it to a server",
            ),
            Self::Untranslated => to.write_str(
                "the device may access memory past the IOMMU: it does not offer the feature \
                 VIRTIO_F_ACCESS_PLATFORM of virtio 1 (QEMU: add iommu_platform=on to the device)",
            ),
            Self::Taken => to.write_str(
                "another server or VM has the device, as a device before it is absent: \
                 restart the machine",
            ),
            Self::Absent(function) => write!(
                to,
                "PCI function {function}, which the server had before, is absent: \
                 attach it again, or restart the machine"
            ),
            Self::SharedPage => to.write_str(
                "another device has registers in the same page: \
                 give each a page (QEMU: bus=virtio-mmio-bus.N, eight of which share one)",
            ),
            Self::SharedLine => to.write_str(
                "another server has the device's interrupt line: \
                 put it into a slot with another one (QEMU: addr=N, every fourth shares one)",
            ),
            error => write!(to, "{error:?}"),
        }
    }
}

impl From<Status> for StartError {
    fn from(status: Status) -> Self {
        Self::Kernel(status)
    }
}

impl From<SearchError> for StartError {
    fn from(error: SearchError) -> Self {
        match error {
            SearchError::Missing => Self::Device,
            SearchError::SharedPage => Self::SharedPage,
        }
    }
}

impl From<LoadError> for StartError {
    fn from(error: LoadError) -> Self {
        Self::Load(error)
    }
}

/// Resources that children are created from.
pub struct Resources<'a> {
    /// Resources that the kernel passed to root.
    pub boot: &'a Boot,
    /// RAM.
    pub memory: Memory,
    /// Root's free slots.
    pub slots: RootSlots,
}

/// Parameters of a child.
pub struct ChildConfig {
    /// Its index, which is in its badges.
    pub number: usize,
    /// CPU of its first thread.
    pub cpu: u32,
    /// Priority of its first thread, and the highest that it can assign.
    pub priority: u8,
    /// CPU time of its first thread; `None`: time that other contexts leave.
    pub cpu_time: Option<CpuTime>,
    /// Number of its contexts with that CPU time.
    pub contexts: u64,
    /// Quota of kernel memory, in pages.
    pub quota: u64,
    /// Number of its capability slots.
    pub slots: u64,
    /// Bytes of its stack.
    pub stack: u64,
    /// It creates tasks, threads and gates of its own.
    pub may_create_objects: bool,
}

/// A child.
pub struct Child {
    number: usize,
    slots: Vec<Selector, MAX_SLOTS>,
    factory: Factory,
    task: Task,
    thread: Thread,
    notification: Notification,
    /// Notifications of a VM's vCPUs after the first.
    vcpu_notifications: Vec<Notification, { MAX_VCPUS - 1 }>,
    /// Bytes of its memory, without guest memory, kernel memory and shared memory.
    pub bytes: u64,
    /// Bytes of the program that are mapped from the bundle and shared by all its instances.
    pub shared: u64,
    /// TSC value of its creation.
    pub created_at: u64,
    /// Quota of kernel memory, in pages.
    pub quota: u64,
    report: Option<Window>,
    /// Guest memory, in its order.
    guest: Vec<Window, MAX_GUEST_PIECES>,
    /// Root's slot of the gate to its console.
    console: Option<Selector>,
    ranges: Vec<Range, MAX_RANGES>,
}

/// Returns the share of a CPU that a context takes, in units of 1 / [`SHARE_OF_CPU`], plus one: the
/// kernel rounds up to its own clock.
fn share(time: CpuTime) -> u64 {
    let parts = u128::from(time.budget) * u128::from(SHARE_OF_CPU);
    parts.div_ceil(u128::from(time.period.max(1))) as u64 + 1
}

/// Flags of an interrupt by line.
pub fn trigger(is_level: bool) -> u64 {
    if is_level { irq_flags::LEVEL } else { 0 }
}

/// Allocates one of root's slots for a child.
fn allocate_slot(
    slots: &mut RootSlots,
    held: &mut Vec<Selector, MAX_SLOTS>,
) -> Result<Selector, StartError> {
    if held.is_full() {
        return Err(StartError::Slots);
    }
    let slot = slots.allocate().ok_or(StartError::Slots)?;
    // Room was checked.
    let _ = held.push(slot);
    Ok(slot)
}

impl Child {
    /// Creates the task, its thread, and the capabilities of every child. A failure leaves no
    /// object.
    pub fn new(resources: &mut Resources, config: &ChildConfig) -> Result<Self, StartError> {
        let mut held = Vec::new();
        let created = Self::create(&mut resources.slots, &mut held, config);
        created.map(|child| Self { slots: held.clone(), ..child }).inspect_err(|_| {
            drop_slots(&mut resources.slots, &held);
        })
    }

    fn create(
        slots: &mut RootSlots,
        held: &mut Vec<Selector, MAX_SLOTS>,
        config: &ChildConfig,
    ) -> Result<Self, StartError> {
        let own = Factory::at(boot::slot::FACTORY);
        let share = config.cpu_time.map_or(0, |time| share(time).saturating_mul(config.contexts));
        let factory =
            own.factory(allocate_slot(slots, held)?, config.quota, config.priority, share)?;
        let task = factory.task(allocate_slot(slots, held)?, config.slots)?;
        let thread = factory.thread(allocate_slot(slots, held)?, task, config.cpu, MESSAGE_PAGE)?;
        let (budget, period) =
            config.cpu_time.map_or((TIME_SLICE, 0), |time| (time.budget, time.period));
        let sched =
            factory.sched_context(allocate_slot(slots, held)?, config.priority, budget, period)?;
        let notification = factory.notification(allocate_slot(slots, held)?)?;
        let root = OwnThread::at(boot::slot::THREAD);
        let mut gate = |purpose| -> Result<Gate, StartError> {
            let badge = (config.number as u64) << purpose::BITS | purpose;
            Ok(factory.gate(allocate_slot(slots, held)?, root, badge)?)
        };
        let log = gate(purpose::LOG)?;
        let control = gate(purpose::CONTROL)?;
        let fault = gate(purpose::FAULT)?;
        thread.bind_sched(sched)?;
        thread.bind_fault_gate(fault)?;
        thread.bind_notification(notification)?;

        task.delegate(factory.selector(), slot::FACTORY, rights::CREATE)?;
        let all = rights::SIGNAL | rights::WAIT | rights::DELEGATE;
        task.delegate(notification.selector(), slot::NOTIFICATION, all)?;
        task.delegate(log.selector(), slot::LOG, rights::CALL)?;
        task.delegate(control.selector(), slot::CONTROL, rights::CALL)?;
        if config.may_create_objects {
            let all = rights::MAP | rights::THREAD | rights::DELEGATE;
            task.delegate(task.selector(), slot::TASK, all)?;
            let all = rights::CONTROL | rights::SERVE;
            task.delegate(thread.selector(), slot::THREAD, all)?;
        }
        task.delegate(sched.selector(), slot::SCHED, rights::SCHEDULE)?;
        Ok(Self {
            number: config.number,
            slots: Vec::new(),
            factory,
            task,
            thread,
            notification,
            vcpu_notifications: Vec::new(),
            bytes: 0,
            shared: 0,
            created_at: native_rt::time::tsc(),
            quota: config.quota,
            report: None,
            guest: Vec::new(),
            console: None,
            ranges: Vec::new(),
        })
    }

    /// Loads a program and allocates a stack of `stack` bytes. Returns the entry address.
    pub fn load(
        &mut self,
        resources: &mut Resources,
        file: (u64, &[u8]),
        stack: u64,
    ) -> Result<u64, StartError> {
        let (offset, bytes) = file;
        let memory = &mut resources.memory;
        let program = loader::load(resources.boot, memory, self.number, self.task, offset, bytes)?;
        self.bytes += program.bytes;
        self.shared += program.shared;
        self.add_pages(resources, STACK_TOP - stack, stack)?;
        Ok(program.entry)
    }

    /// Maps private pages, one by one: programs grant and unmap single pages, and the kernel
    /// supports that only for whole mappings.
    fn add_pages(
        &mut self,
        resources: &mut Resources,
        address: u64,
        bytes: u64,
    ) -> Result<(), StartError> {
        let pages = bytes / PAGE_SIZE;
        let window = resources.memory.allocate(self.number, pages).ok_or(StartError::Memory)?;
        self.bytes += bytes;
        map_pages(self.task, window, address)
    }

    fn add_range(&mut self, kind: RangeKind, base: u64, length: u64) -> Result<(), StartError> {
        self.add_known_range(kind, base, length, 0)
    }

    /// Describes memory of the child, of which `physical` is known.
    pub fn add_known_range(
        &mut self,
        kind: RangeKind,
        base: u64,
        length: u64,
        physical: u64,
    ) -> Result<(), StartError> {
        let range = Range { kind, base, length, physical };
        self.ranges.push(range).map_err(|_| StartError::Description)
    }

    /// Maps memory that other tasks or devices access too and that outlives the child. `physical`
    /// is its address for devices.
    pub fn add_window(
        &mut self,
        kind: RangeKind,
        window: Window,
        address: u64,
        physical: u64,
    ) -> Result<(), StartError> {
        self.task.map(window, address, FOR_GUESTS)?;
        self.add_known_range(kind, address, window.length(), physical)
    }

    /// Maps device registers of `length` bytes as range `number`. `address` is that of the first
    /// register, in the first page of `window`.
    pub fn add_registers(
        &mut self,
        kind: RangeKind,
        window: Window,
        address: u64,
        rights: u8,
        number: u64,
        length: u64,
    ) -> Result<(), StartError> {
        self.map(window, address & !(PAGE_SIZE - 1), rights)?;
        self.add_known_range(kind, address, length, number)
    }

    /// Maps memory that the child does not own.
    pub fn map(&self, window: Window, address: u64, rights: u8) -> Result<(), Status> {
        self.task.map(window, address, rights)
    }

    /// Lets another child signal this one: delegates this child's notification to a slot there.
    pub fn give_notification(&self, other: &Self, slot: Selector) -> Result<(), StartError> {
        Ok(other.task.delegate(self.notification.selector(), slot, rights::SIGNAL)?)
    }

    /// Lets another child signal this one through the other's session `session`: each of this
    /// child's vCPUs, if it is a VM.
    pub fn give_session_notifications(
        &self,
        other: &Self,
        session: usize,
    ) -> Result<(), StartError> {
        self.give_notification(other, slot::peer(session, 0))?;
        for (further, notification) in self.vcpu_notifications.iter().enumerate() {
            let slot = slot::peer(session, further + 1);
            other.task.delegate(notification.selector(), slot, rights::SIGNAL)?;
        }
        Ok(())
    }

    /// Adds notifications for the vCPUs of a VM, of which there are `count`, after the first.
    pub fn add_vcpu_notifications(
        &mut self,
        slots: &mut RootSlots,
        count: usize,
    ) -> Result<(), StartError> {
        for vcpu in 1..count {
            let own = allocate_slot(slots, &mut self.slots)?;
            let notification = self.factory.notification(own)?;
            let all = rights::SIGNAL | rights::WAIT | rights::DELEGATE;
            self.task.delegate(own, slot::vcpu_notification(vcpu), all)?;
            self.vcpu_notifications.push(notification).map_err(|_| StartError::Slots)?;
        }
        Ok(())
    }

    /// Adds private memory.
    pub fn add_private(&mut self, resources: &mut Resources, bytes: u64) -> Result<(), StartError> {
        self.add_pages(resources, MEMORY, bytes)?;
        self.add_range(RangeKind::Private, MEMORY, bytes)
    }

    /// Adds guest memory, filled with zeros. `is_contiguous`: it is one range of physical memory,
    /// whose address is returned.
    pub fn add_guest(
        &mut self,
        resources: &mut Resources,
        bytes: u64,
        is_contiguous: bool,
    ) -> Result<Option<u64>, StartError> {
        let memory = &mut resources.memory;
        let (windows, error) = match is_contiguous {
            true => (memory.allocate_contiguous_guest(self.number, bytes), StartError::OnePiece),
            false => (memory.allocate_guest(self.number, bytes), StartError::Memory),
        };
        let windows = windows.ok_or(error)?;
        let first = windows.first().filter(|_| is_contiguous).copied();
        let mut address = GUEST_MEMORY;
        self.guest.clone_from(&windows);
        for window in windows {
            // The VMM never executes it, but can only delegate rights that it has.
            let all = FOR_GUESTS | rights::EXECUTE;
            self.task.map(window, address, all)?;
            self.add_range(RangeKind::Guest, address, window.length())?;
            address += window.length();
        }
        Ok(first.map(physical))
    }

    /// Guest memory, in its order.
    pub fn guest(&self) -> &Vec<Window, MAX_GUEST_PIECES> {
        &self.guest
    }

    /// Returns the pieces of `length` bytes of guest memory from `offset` on; `None` beyond its
    /// end.
    pub fn guest_pieces(&self, offset: u64, length: u64) -> Option<impl Iterator<Item = Window>> {
        let end = offset.checked_add(length)?;
        let all: u64 = self.guest.iter().map(|window| window.length()).sum();
        let mut at = 0;
        let pieces = self.guest.iter().filter_map(move |window| {
            let first = at;
            at += window.length();
            let (from, to) = (offset.max(first), end.min(at));
            let length = to.checked_sub(from).filter(|&length| length != 0)?;
            window.part(from - first, length)
        });
        (end <= all).then_some(pieces)
    }

    /// Maps a file of the bundle, read-only.
    pub fn add_file(
        &mut self,
        resources: &Resources,
        kind: RangeKind,
        offset: u64,
        length: u64,
    ) -> Result<(), StartError> {
        let boot = resources.boot;
        let window = boot.bundle_pages(offset, length).ok_or(StartError::Place)?;
        let address = FILES + (boot.info.bundle_base + offset) % FILES_ALIGN;
        if window.length() > FILES_ALIGN {
            return Err(StartError::Place);
        }
        self.task.map(window, address, rights::READ)?;
        self.add_range(kind, address, length)
    }

    /// Creates a gate that this child serves, for a client. It replaces the gate to a previous
    /// server, if there was one.
    pub fn session(
        &self,
        slots: &mut RootSlots,
        client: &mut Self,
        badge: u64,
    ) -> Result<(), StartError> {
        let slot_of_gate = match client.console {
            Some(slot) => {
                // This revokes the client's capability, too.
                drop_capability(slot)?;
                slot
            }
            None => *client.console.insert(allocate_slot(slots, &mut client.slots)?),
        };
        let gate = client.factory.gate(slot_of_gate, self.thread, badge)?;
        client.task.delegate(gate.selector(), slot::DEVICE, rights::CALL)?;
        Ok(())
    }

    /// Delegates the management gate.
    pub fn add_management(&mut self, slots: &mut RootSlots) -> Result<(), StartError> {
        let slot_of_gate = allocate_slot(slots, &mut self.slots)?;
        let badge = (self.number as u64) << purpose::BITS | purpose::MANAGE;
        let gate = self.factory.gate(slot_of_gate, OwnThread::at(boot::slot::THREAD), badge)?;
        self.task.delegate(gate.selector(), slot::MANAGE, rights::CALL)?;
        Ok(())
    }

    /// Adds pages that root writes too, filled with zeros, and returns them.
    fn add_shared(
        &mut self,
        resources: &mut Resources,
        kind: RangeKind,
        address: u64,
        pages: u64,
        rights: u8,
    ) -> Result<Window, StartError> {
        let window = resources.memory.allocate(self.number, pages).ok_or(StartError::Memory)?;
        self.bytes += window.length();
        self.task.map(window, address, rights)?;
        self.add_range(kind, address, window.length())?;
        Ok(window)
    }

    /// Adds the directory of console clients.
    pub fn add_directory(&mut self, resources: &mut Resources) -> Result<Directory, StartError> {
        let (kind, pages) = (RangeKind::Directory, Directory::PAGES);
        let window = self.add_shared(resources, kind, MEMORY, pages, rights::READ)?;
        Ok(Directory::new(window, self.notification))
    }

    /// Adds a page for reports.
    pub fn add_report(&mut self, resources: &mut Resources) -> Result<(), StartError> {
        let rights = rights::READ | rights::WRITE;
        let window = self.add_shared(resources, RangeKind::Report, REPORT_PAGE, 1, rights)?;
        self.report = Some(window);
        Ok(())
    }

    /// Pauses or resumes a VM. The VMM acts on the last call, however the events meet.
    pub fn set_paused(&self, paused: bool) {
        if let Some(page) = self.report {
            // The page has room, and root may write to it.
            let _ = page.write(PAUSE_WORD, &u64::from(paused).to_le_bytes());
        }
        self.signal(if paused { event::PAUSE } else { event::RESUME });
    }

    /// Returns its last report, if that is consistent.
    pub fn report(&self) -> Option<Report> {
        let mut bytes = [0; Report::LENGTH];
        let window = self.report?;
        let mut words = [0; Report::LENGTH / 8];
        let mut after = [0; 8];
        if !window.read(0, &mut bytes) || !window.read(0, &mut after) {
            return None;
        }
        for (word, chunk) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*chunk);
        }
        let (&sequence, words) = words.split_first()?;
        let whole = sequence % 2 == 0 && sequence == u64::from_le_bytes(after);
        whole.then(|| words.first_chunk().map(Report::unpack)).flatten()
    }

    /// Delegates the interrupt of a device to a slot there; number and flags as for `Create` in
    /// `abi`.
    pub fn add_interrupt(
        &mut self,
        resources: &mut Resources,
        (interrupt, flags): (u32, u64),
        to: Selector,
    ) -> Result<Irq, StartError> {
        let slot_of_irq = allocate_slot(&mut resources.slots, &mut self.slots)?;
        let platform = Platform::at(boot::slot::PLATFORM);
        let irq = self.factory.irq(slot_of_irq, platform, interrupt, flags)?;
        self.task.delegate(irq.selector(), to, rights::IRQ)?;
        Ok(irq)
    }

    /// Gives it a device of a device tree: its registers of `length` bytes, with these rights as
    /// range `number`, and its interrupt, in a slot there.
    pub fn add_mmio_device(
        &mut self,
        resources: &mut Resources,
        (place, length): (Place, u64),
        (number, to, rights): (u64, Selector, u8),
    ) -> Result<Irq, StartError> {
        let registers = resources.boot.device_pages(place.base, length);
        let registers = registers.ok_or(StartError::Device)?;
        let address = DEVICES + number * PAGE_SIZE + place.base % PAGE_SIZE;
        self.add_registers(RangeKind::Registers, registers, address, rights, number, length)?;
        self.add_interrupt(resources, (place.interrupt, trigger(place.is_level)), to)
    }

    /// Gives it eight I/O ports and an interrupt line, which is returned.
    #[cfg(target_arch = "x86_64")]
    pub fn add_ports(
        &mut self,
        resources: &mut Resources,
        ports: u16,
        interrupt: u32,
    ) -> Result<Irq, StartError> {
        const EDGE: u64 = 0;
        let irq = self.add_interrupt(resources, (interrupt, EDGE), slot::DEVICE)?;
        self.task.delegate_ports(ports, 8)?;
        Ok(irq)
    }

    /// Returns its memory ranges.
    pub fn ranges(&self) -> &Vec<Range, MAX_RANGES> {
        &self.ranges
    }

    /// Writes the start page and starts the first thread.
    pub fn start(
        &mut self,
        resources: &mut Resources,
        start: &Start,
        entry: u64,
    ) -> Result<(), StartError> {
        let mut buffer = [0; MAX_START];
        let bytes = start.encode(&mut buffer).ok_or(StartError::Description)?;
        let window = resources.memory.allocate(self.number, 1).ok_or(StartError::Memory)?;
        if !window.write(0, bytes) {
            return Err(StartError::Description);
        }
        self.task.map(window, START_PAGE, rights::READ)?;
        self.bytes += PAGE_SIZE;
        self.thread.start(entry, STACK_TOP, START_PAGE)?;
        Ok(())
    }

    /// Signals its notification.
    pub fn signal(&self, events: u64) {
        // The child may have just ended.
        let _ = self.notification.signal(events);
    }

    /// Stops its first thread, the only one of a server; it executes nothing more.
    pub fn stop(&self) {
        // It exists.
        let _ = self.thread.stop();
    }

    /// Frees all its resources.
    pub fn destroy(self, resources: &mut Resources) {
        self.stop();
        drop_slots(&mut resources.slots, &self.slots);
        resources.memory.free_all(self.number);
    }
}

/// Maps a window into a task page by page, readable and writable.
fn map_pages(task: Task, window: Window, address: u64) -> Result<(), StartError> {
    for offset in (0..window.length()).step_by(PAGE_SIZE as usize) {
        let page = window.part(offset, PAGE_SIZE).ok_or(StartError::Memory)?;
        task.map(page, address + offset, rights::READ | rights::WRITE)?;
    }
    Ok(())
}

/// Empties slots in reverse order, so that objects are destroyed before their factory.
fn drop_slots(slots: &mut RootSlots, held: &[Selector]) {
    for &slot in held.iter().rev() {
        // A slot whose object could not be created is already empty.
        let _ = drop_capability(slot);
        slots.free(slot);
    }
}
