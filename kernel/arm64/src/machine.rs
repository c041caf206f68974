//! Description of the machine, from its device tree.

use hw_arm64::gic::{self, Version};
use hw_arm64::{pl011, psci};
use hw_tables::fdt::{Fdt, Node, pci};
use kernel_run::boot_memory::{BootMemory, FOUR_GIB, MAX_RAM, normalise};
use kernel_run::command_line::CommandLine;
use kernel_run::ranges::{Range, RangeSet};

/// Maximum number of CPUs in use.
pub const MAX_CPUS: usize = 64;
/// RAM is used in whole blocks of this many bytes, which the first tables map.
pub const BLOCK: u64 = 2 << 20;
/// Reason why a device tree does not describe a machine on which the kernel runs.
pub type MachineError = &'static str;

/// Machine description found by boot.
pub struct Machine {
    /// Physical memory. Root gets everything that remains in `free`.
    pub memory: BootMemory,
    /// Device memory: below 4 GiB everything except RAM and the interrupt controller's registers,
    /// above it the configuration space of PCI.
    pub devices: RangeSet<MAX_RAM>,
    /// Boot module (initial RAM disk), page-aligned; in neither the free nor the used memory.
    pub bundle: Option<Range>,
    /// Device tree.
    pub tree: Range,
    /// Frequency of the system counter in kHz.
    pub counter_khz: u64,
    /// Number of started CPUs.
    pub cpus: usize,
    /// Kernel command line.
    pub command_line: CommandLine,
    /// Affinities of the CPUs that the device tree lists.
    pub affinities: [u64; MAX_CPUS],
    /// Number of these.
    pub listed_cpus: usize,
    /// Version of the interrupt controller.
    pub gic_version: Version,
    /// Registers of the interrupt controller, as many as it has. GICv3: distributor and
    /// redistributors, of up to three regions. GICv2: distributor, and the interfaces to the CPU,
    /// of its virtual interrupts to the hypervisor, and of the same to guests.
    pub interrupt_controller: [Range; 4],
    /// Interrupt of the hypervisor's physical timer.
    pub timer: u32,
    /// Interrupt of the virtual timer, which guests use.
    pub virtual_timer: Option<u32>,
    /// Interrupt by which the virtual interface tells that list registers are free.
    pub maintenance: Option<u32>,
    /// Firmware can start CPUs and end the machine (PSCI by SMC).
    pub has_psci: bool,
}

impl Machine {
    /// Value before boot has found anything.
    pub const NEW: Self = Self {
        memory: BootMemory { ram: RangeSet::EMPTY, free: RangeSet::EMPTY, used: RangeSet::EMPTY },
        devices: RangeSet::EMPTY,
        bundle: None,
        tree: Range::new(0, 0),
        counter_khz: 0,
        cpus: 1,
        command_line: CommandLine::EMPTY,
        affinities: [0; MAX_CPUS],
        listed_cpus: 0,
        gic_version: Version::V3,
        interrupt_controller: [Range::new(0, 0); 4],
        timer: 0,
        virtual_timer: None,
        maintenance: None,
        has_psci: false,
    };

    /// Fills in what the device tree says. RAM beyond `limit` is not used.
    ///
    /// # Errors
    /// The kernel does not run on this machine; for the log.
    pub fn read(&mut self, fdt: &Fdt<'_>, limit: u64) -> Result<(), MachineError> {
        let chosen = fdt.node("/chosen");
        let arguments = chosen.and_then(|node| node.property("bootargs")).unwrap_or(&[]);
        self.command_line.set(arguments);
        self.memory = BootMemory::new(ram(fdt, limit), Range::new(0, 0));
        if self.memory.ram.total() == 0 {
            return Err("the device tree lists no RAM");
        }
        self.bundle = chosen.and_then(|node| {
            let [start, end] =
                ["linux,initrd-start", "linux,initrd-end"].map(|name| node.number(name));
            let range = Range::new(start?, end?);
            (range.base < range.end).then_some(range)
        });
        self.read_cpus(fdt);
        self.read_interrupts(fdt)?;
        self.read_devices(fdt, limit);
        let firmware = fdt.node("/psci");
        self.has_psci = firmware.is_some_and(|node| {
            let is_known = psci::COMPATIBLE.into_iter().any(|name| node.is_compatible(name));
            is_known && node.text("method") == Some("smc")
        });
        Ok(())
    }

    fn read_devices(&mut self, fdt: &Fdt<'_>, limit: u64) {
        self.devices = self.memory.holes();
        let pci = fdt.find(pci::COMPATIBLE, |_| true);
        for (base, length) in pci.iter().flat_map(Node::ranges) {
            let space = Range::sized(base, length).inward();
            if space.base >= FOUR_GIB && space.end <= limit {
                self.devices.insert(space);
            }
        }
        // Those that it does not have are empty.
        for range in self.memory.ram.as_slice().iter().chain(&self.interrupt_controller) {
            self.devices.remove(range.outward());
        }
        // Also regions of a GICv3 that the kernel does not use.
        for (base, length) in fdt.find(gic::COMPATIBLE, |_| true).iter().flat_map(Node::ranges) {
            self.devices.remove(Range::sized(base, length).outward());
        }
    }

    fn read_cpus(&mut self, fdt: &Fdt<'_>) {
        self.listed_cpus = 0;
        let Some(all) = fdt.node("/cpus") else { return };
        for node in all.children().filter(|node| node.text("device_type") == Some("cpu")) {
            let Some(affinity) = node.number("reg") else { continue };
            let known = &self.affinities[..self.listed_cpus];
            if self.listed_cpus < MAX_CPUS && node.is_enabled() && !known.contains(&affinity) {
                self.affinities[self.listed_cpus] = affinity;
                self.listed_cpus += 1;
            }
        }
    }

    fn read_interrupts(&mut self, fdt: &Fdt<'_>) -> Result<(), MachineError> {
        let gic = match fdt.find(gic::COMPATIBLE, |_| true) {
            Some(gic) => self.read_v3(gic),
            None => self.read_v2(fdt),
        }?;
        self.maintenance = private_interrupt(&gic, 0);
        // Secure, non-secure, virtual, hypervisor.
        let timers = fdt.find("arm,armv8-timer", |_| true);
        let timer = |index| timers.and_then(|node| private_interrupt(&node, index));
        self.virtual_timer = timer(2);
        self.timer = timer(3).ok_or("the device tree lists no timer of the hypervisor")?;
        Ok(())
    }

    fn read_v3<'a>(&mut self, gic: Node<'a>) -> Result<Node<'a>, MachineError> {
        let regions = gic.number(gic::REDISTRIBUTOR_REGIONS).unwrap_or(1).max(1) as usize;
        let mut ranges = [Range::default(); 4];
        let mut listed = gic.ranges().map(|(base, length)| Range::sized(base, length));
        let is_low = |range: &Range| range.end <= FOUR_GIB;
        ranges[0] = listed.next().filter(is_low).unwrap_or_default();
        // The CPUs of a region above 4 GiB are not used.
        let usable = listed.take(regions).filter(is_low);
        ranges[1..].iter_mut().zip(usable).for_each(|(to, range)| *to = range);
        if ranges[0].length() < gic::distributor::LENGTH
            || ranges[1].length() < gic::redistributor::LENGTH
        {
            return Err("the registers of the GICv3 are above 4 GiB or too few");
        }
        self.gic_version = Version::V3;
        self.interrupt_controller = ranges;
        Ok(gic)
    }

    fn read_v2<'a>(&mut self, fdt: &Fdt<'a>) -> Result<Node<'a>, MachineError> {
        use gic::v2::{COMPATIBLE, cpu_interface, distributor, hypervisor_interface};
        let known = COMPATIBLE.iter().find_map(|name| fdt.find(name, |_| true));
        let gic = known.ok_or("no GICv3 or GICv2 in the device tree")?;
        let ranges: [Range; 4] =
            registers(&gic).ok_or("the GICv2 has no virtualization extensions")?;
        let lengths = [
            distributor::LENGTH,
            cpu_interface::LENGTH,
            hypervisor_interface::LENGTH,
            cpu_interface::LENGTH,
        ];
        let is_short = |(range, length): (&Range, u64)| range.length() < length;
        if ranges.iter().any(|range| range.end > FOUR_GIB)
            || ranges.iter().zip(lengths).any(is_short)
        {
            return Err("the registers of the GICv2 are above 4 GiB or too few");
        }
        if ranges.iter().any(|range| *range != range.outward())
            || !ranges[3].base.is_multiple_of(cpu_interface::LENGTH)
        {
            return Err("the registers of the GICv2 are not page-aligned");
        }
        // Guests have all of the last range's pages.
        if overlaps(fdt, ranges[3]) > 1 {
            return Err("the guests' registers of the GICv2 overlap those of another device");
        }
        self.gic_version = Version::V2;
        self.interrupt_controller = ranges;
        Ok(gic)
    }
}

/// The first ranges of a device's registers.
fn registers<const N: usize>(node: &Node<'_>) -> Option<[Range; N]> {
    let mut ranges = node.ranges().map(|(base, length)| Range::sized(base, length));
    let first = [(); N].map(|()| ranges.next());
    first.iter().all(Option::is_some).then(|| first.map(Option::unwrap_or_default))
}

/// Number of ranges in the device tree, of devices and of memory, that have an address of `with`.
fn overlaps(fdt: &Fdt<'_>, with: Range) -> usize {
    let mut count = 0;
    fdt.visit(|node| {
        let ranges = node.ranges().map(|(base, length)| Range::sized(base, length));
        count += ranges.filter(|range| range.base < with.end && with.base < range.end).count();
    });
    count
}

/// Number of the device's interrupt with this index, if it is private to each CPU.
fn private_interrupt(node: &Node<'_>, index: usize) -> Option<u32> {
    let private = gic::FIRST_PRIVATE..gic::FIRST_SHARED;
    node.gic_interrupt(index).filter(|number| private.contains(number))
}

/// Physical address of the UART for the log: the one that `/chosen` names, else the first PL011.
pub fn uart(fdt: &Fdt<'_>) -> Option<u64> {
    fdt.console(pl011::COMPATIBLE)?.ranges().next().map(|(base, _)| base)
}

/// Value of an option on the kernel command line.
pub fn option<'a>(fdt: &Fdt<'a>, name: &str) -> Option<&'a str> {
    let line = fdt.node("/chosen")?.text("bootargs")?;
    kernel_run::command_line::option(line, name)
}

/// RAM without reservations, in whole blocks.
fn ram(fdt: &Fdt<'_>, limit: u64) -> RangeSet<MAX_RAM> {
    let mut ram = RangeSet::<MAX_RAM>::EMPTY;
    let is_memory = |node: &Node<'_>| node.text("device_type") == Some("memory");
    for node in fdt.root().children().filter(is_memory) {
        for (base, length) in node.ranges() {
            let end = base.saturating_add(length).min(limit);
            ram.insert(Range::new(base, end.max(base)).inward());
        }
    }
    for (base, length) in fdt.reservations() {
        ram.remove(Range::new(base, base.saturating_add(length)).outward());
    }
    for node in fdt.node("/reserved-memory").iter().flat_map(Node::children) {
        for (base, length) in node.ranges() {
            ram.remove(Range::new(base, base.saturating_add(length)).outward());
        }
    }
    let blocks = |range: &Range| {
        let base = range.base.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX);
        (Range::new(base, (range.end & !(BLOCK - 1)).max(base)), true)
    };
    normalise(limit, || ram.as_slice().iter().map(blocks))
}

#[cfg(test)]
mod tests;
