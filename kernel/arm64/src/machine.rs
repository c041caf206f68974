//! Description of the machine, from its device tree.

use hw_arm64::{gic, pl011, psci};
use hw_tables::fdt::{Fdt, Node};
use kernel_run::boot_memory::{BootMemory, MAX_RAM, normalise};
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
    /// Device memory below 4 GiB: everything except RAM and the interrupt controller's registers.
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
    /// Registers of the interrupt controller: distributor and redistributors.
    pub interrupt_controller: [Range; 2],
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
        interrupt_controller: [Range::new(0, 0); 2],
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
        let firmware = fdt.node("/psci");
        self.has_psci = firmware.is_some_and(|node| {
            let is_known = psci::COMPATIBLE.into_iter().any(|name| node.is_compatible(name));
            is_known && node.text("method") == Some("smc")
        });
        Ok(())
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
        let gic = fdt.find(gic::COMPATIBLE, |_| true).ok_or("no GICv3 in the device tree")?;
        let mut ranges = gic.ranges().map(|(base, length)| Range::sized(base, length));
        let both = ranges.next().zip(ranges.next());
        let (distributor, redistributors) = both.ok_or("the GICv3 has no registers")?;
        let is_mapped = |range: &Range| range.end <= kernel_run::boot_memory::FOUR_GIB;
        if ![distributor, redistributors].iter().all(is_mapped)
            || distributor.length() < gic::distributor::LENGTH
            || redistributors.length() < gic::redistributor::LENGTH
        {
            return Err("the registers of the GICv3 are above 4 GiB or too few");
        }
        self.interrupt_controller = [distributor, redistributors];
        self.maintenance = private_interrupt(&gic, 0);
        // Secure, non-secure, virtual, hypervisor.
        let timers = fdt.find("arm,armv8-timer", |_| true);
        let timer = |index| timers.and_then(|node| private_interrupt(&node, index));
        self.virtual_timer = timer(2);
        self.timer = timer(3).ok_or("the device tree lists no timer of the hypervisor")?;
        Ok(())
    }
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
