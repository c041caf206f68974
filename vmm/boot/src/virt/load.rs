//! Boot of the board: device tree, kernel, initial RAM disk.

use alloc::{string::ToString, vec, vec::Vec};

use hw_arm64::{gic, image, pl011, pl031, psci};
use vm_fdt::FdtWriter;
use vmm_mem::GuestMemory;

use super::*;
use crate::{BootError, zimage};

/// Alignment of what the loader places.
const ALIGNMENT: u64 = image::ALIGNMENT;
/// Frequency of the clock of UART and real-time clock, in Hz: they need one.
const APB_HZ: u32 = 24_000_000;
/// Handles of nodes.
const GIC: u32 = 1;
const APB_CLOCK: u32 = 2;
const MSI: u32 = 3;
/// PCI: kind of an address, in the first of its three cells (memory with 32 bits).
const PCI_MEMORY: u32 = 0x200_0000;
/// Kinds and flags of interrupts in the device tree.
const SHARED: u32 = 0;
const PRIVATE: u32 = 1;
const EDGE_RISING: u32 = 1;
const LEVEL_HIGH: u32 = 4;
const LEVEL_LOW: u32 = 8;
/// Lowest bit of the CPUs of a GICv2 that have a private interrupt.
const CPUS_SHIFT: u32 = 8;
/// Private interrupts of the timers: secure, non-secure, virtual, hypervisor. Guests have the
/// virtual one only, but the binding (`arm,arch_timer.yaml`) tells them apart by position.
const TIMERS: [u32; 4] = [13, 14, 11, 10];

/// A guest to boot.
#[derive(Clone, Copy, Debug)]
pub struct VirtBoot<'a> {
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Kernel: an uncompressed `Image`, or a 32-bit `zImage`.
    pub kernel: &'a [u8],
    /// Initial RAM disk.
    pub initrd: Option<&'a [u8]>,
    /// Command line.
    pub command_line: &'a str,
    /// Devices by slot, at most [`MAX_SLOTS`]; `None`: the slot is empty.
    pub slots: &'a [Option<SlotNode>],
    /// Devices that the guest drives itself, at most [`MAX_PASS_THROUGH`].
    pub pass_through: &'a [PassThroughNode],
    /// Version of the interrupt controller.
    pub gic: gic::Version,
    /// Secret of the host for the guest's random numbers; another one for each boot.
    pub seed: Option<&'a [u8; 32]>,
    /// Secret of the host for the kernel's place in its address space; another one likewise.
    pub kaslr_seed: Option<u64>,
}

/// Initial state of the first vCPU.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct VirtStart {
    /// Address of the first instruction.
    pub entry: u64,
    /// Address of the device tree, for `x0`, or for `r2` of a 32-bit kernel.
    pub tree: u64,
    /// The vCPUs are of AArch32.
    pub is_32_bit: bool,
}

/// Loads a guest into its memory, whose first range, at [`RAM`] or behind it, gets everything.
///
/// # Errors
/// The kernel is no image of this format, or memory is too small.
pub fn load(memory: &GuestMemory, boot: &VirtBoot<'_>) -> Result<VirtStart, BootError> {
    let header = Header::parse(boot.kernel)?;
    let (ram, length) = memory.ranges().next().unwrap_or((RAM, 0));
    let available = length.saturating_sub(STOLEN_TIME_LENGTH);
    let entry = ram.saturating_add(header.offset);
    let kernel_end = entry.saturating_add(header.length.max(boot.kernel.len() as u64));
    let initrd = kernel_end.checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX);
    let initrd_end = initrd.saturating_add(boot.initrd.map_or(0, <[u8]>::len) as u64);
    let tree = initrd_end.checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX);
    let blob = device_tree(memory, boot, initrd..initrd_end).ok_or(BootError::BadCommandLine)?;
    let needed = tree.saturating_add(blob.len() as u64).saturating_sub(ram);
    if needed > available {
        return Err(BootError::TooLittleMemory { needed, available });
    }
    memory.write_slice(entry, boot.kernel)?;
    memory.write_slice(initrd, boot.initrd.unwrap_or(&[]))?;
    memory.write_slice(tree, &blob)?;
    Ok(VirtStart { entry, tree, is_32_bit: header.is_32_bit })
}

/// Least memory in bytes for a kernel, an initial RAM disk of this length and a device tree.
///
/// # Errors
/// The kernel is no image of this format.
pub fn memory_needed(kernel: &[u8], initrd: u64) -> Result<u64, BootError> {
    let header = Header::parse(kernel)?;
    let end = header.offset.saturating_add(header.length.max(kernel.len() as u64));
    Ok(end.saturating_add(initrd).saturating_add(2 * ALIGNMENT + STOLEN_TIME_LENGTH))
}

/// Header of an image.
struct Header {
    /// Offset of the image from the start of RAM.
    offset: u64,
    /// Bytes of memory from its start on that the kernel uses.
    length: u64,
    /// It is a `zImage` of AArch32.
    is_32_bit: bool,
}

impl Header {
    fn parse(kernel: &[u8]) -> Result<Self, BootError> {
        if zimage::is_one(kernel) {
            let zimage::Place { offset, length } = zimage::place(kernel)?;
            return Ok(Self { offset, length, is_32_bit: true });
        }
        let word = |at: usize| {
            let bytes = kernel.get(at..at + 8)?;
            Some(u64::from_le_bytes(bytes.try_into().ok()?))
        };
        let actual = kernel.len() as u64;
        let short = BootError::Truncated { needed: image::HEADER as u64, actual };
        let [offset, length, flags, magic] = [8, 16, 24, 56].map(word);
        if magic.ok_or(short)? as u32 != image::MAGIC {
            return Err(BootError::UnknownFormat);
        }
        let (offset, length) = (offset.ok_or(short)?, length.ok_or(short)?);
        if flags.ok_or(short)? & image::BIG_ENDIAN != 0 {
            return Err(BootError::BigEndian);
        }
        // Kernels before 3.17 have no length.
        if offset >= ALIGNMENT || length == 0 {
            return Err(BootError::BadHeader);
        }
        Ok(Self { offset, length, is_32_bit: false })
    }
}

/// Builds the device tree. `None`: the command line has a zero byte.
fn device_tree(
    memory: &GuestMemory,
    boot: &VirtBoot<'_>,
    initrd: core::ops::Range<u64>,
) -> Option<Vec<u8>> {
    let mut to = FdtWriter::new().ok()?;
    let root = to.begin_node("").ok()?;
    to.property_string("compatible", "linux,dummy-virt").ok()?;
    to.property_string("model", "Parador virt").ok()?;
    to.property_u32("#address-cells", 2).ok()?;
    to.property_u32("#size-cells", 2).ok()?;
    to.property_u32("interrupt-parent", GIC).ok()?;

    let chosen = to.begin_node("chosen").ok()?;
    to.property_string("bootargs", boot.command_line).ok()?;
    to.property_string("stdout-path", "/pl011@9000000").ok()?;
    if let Some(seed) = boot.seed {
        to.property("rng-seed", seed).ok()?;
    }
    if let Some(seed) = boot.kaslr_seed {
        to.property_u64("kaslr-seed", seed).ok()?;
    }
    if boot.initrd.is_some() {
        to.property_u64("linux,initrd-start", initrd.start).ok()?;
        to.property_u64("linux,initrd-end", initrd.end).ok()?;
    }
    to.end_node(chosen).ok()?;

    for (index, (base, length)) in memory.ranges().enumerate() {
        let kept = if index == 0 { STOLEN_TIME_LENGTH } else { 0 };
        let length = length.saturating_sub(kept);
        let node = to.begin_node(&alloc::format!("memory@{base:x}")).ok()?;
        to.property_string("device_type", "memory").ok()?;
        to.property_array_u64("reg", &[base, length]).ok()?;
        to.end_node(node).ok()?;
    }
    cpus(&mut to, boot.vcpus)?;
    firmware(&mut to)?;
    interrupts(&mut to, boot)?;
    devices(&mut to)?;
    for (slot, node) in boot.slots.iter().enumerate().take(MAX_SLOTS) {
        match node {
            Some(SlotNode::Virtio) => {
                virtio(&mut to, (device(slot), PAGE), slot_interrupt(slot, 0))?;
            }
            Some(SlotNode::Channel(number)) => channel(&mut to, slot, *number)?,
            Some(SlotNode::Pci) | None => {}
        }
    }
    if has_pci(boot) {
        pci(&mut to, boot.pass_through)?;
    }
    for (number, node) in boot.pass_through.iter().enumerate().take(MAX_PASS_THROUGH) {
        own_device(&mut to, number, node)?;
    }
    to.end_node(root).ok()?;
    to.finish().ok()
}

fn has_pci(boot: &VirtBoot<'_>) -> bool {
    let is_function = |node: &PassThroughNode| node.kind == DeviceKind::Pci;
    boot.slots.contains(&Some(SlotNode::Pci)) || boot.pass_through.iter().any(is_function)
}

fn cpus(to: &mut FdtWriter, count: u8) -> Option<()> {
    let all = to.begin_node("cpus").ok()?;
    to.property_u32("#address-cells", 1).ok()?;
    to.property_u32("#size-cells", 0).ok()?;
    for index in 0..count {
        let node = to.begin_node(&alloc::format!("cpu@{index}")).ok()?;
        to.property_string("device_type", "cpu").ok()?;
        to.property_string("compatible", "arm,armv8").ok()?;
        to.property_u32("reg", index.into()).ok()?;
        if count > 1 {
            to.property_string("enable-method", "psci").ok()?;
        }
        to.end_node(node).ok()?;
    }
    to.end_node(all).ok()
}

fn firmware(to: &mut FdtWriter) -> Option<()> {
    let node = to.begin_node("psci").ok()?;
    let names = psci::COMPATIBLE.iter().map(ToString::to_string).collect();
    to.property_string_list("compatible", names).ok()?;
    to.property_string("method", "hvc").ok()?;
    to.end_node(node).ok()
}

fn interrupts(to: &mut FdtWriter, boot: &VirtBoot<'_>) -> Option<()> {
    let (name, registers, cpus) = match boot.gic {
        gic::Version::V2 => {
            let own = [gic::v2::distributor::LENGTH, gic::v2::cpu_interface::LENGTH];
            let registers = [DISTRIBUTOR, own[0], CPU_INTERFACE, own[1]];
            // Private interrupts list the CPUs that have them.
            (gic::v2::COMPATIBLE[0], registers, (1 << boot.vcpus) - 1)
        }
        gic::Version::V3 => {
            let length = gic::distributor::LENGTH;
            let registers = [DISTRIBUTOR, length, REDISTRIBUTORS, REDISTRIBUTORS_LENGTH];
            (gic::COMPATIBLE, registers, 0)
        }
    };
    let node = to.begin_node("intc@8000000").ok()?;
    to.property_string("compatible", name).ok()?;
    to.property_null("interrupt-controller").ok()?;
    to.property_u32("#interrupt-cells", 3).ok()?;
    to.property_array_u64("reg", &registers).ok()?;
    to.property_phandle(GIC).ok()?;
    if has_pci(boot) {
        messages(to)?;
    }
    to.end_node(node).ok()?;

    let node = to.begin_node("timer").ok()?;
    to.property_string("compatible", "arm,armv8-timer").ok()?;
    let line = |number| [PRIVATE, number, LEVEL_LOW | cpus << CPUS_SHIFT];
    let lines: Vec<u32> = TIMERS.into_iter().flat_map(line).collect();
    to.property_array_u32("interrupts", &lines).ok()?;
    to.property_null("always-on").ok()?;
    to.end_node(node).ok()
}

fn devices(to: &mut FdtWriter) -> Option<()> {
    let node = to.begin_node("apb-pclk").ok()?;
    to.property_string("compatible", "fixed-clock").ok()?;
    to.property_u32("#clock-cells", 0).ok()?;
    to.property_u32("clock-frequency", APB_HZ).ok()?;
    to.property_string("clock-output-names", "clk24mhz").ok()?;
    to.property_phandle(APB_CLOCK).ok()?;
    to.end_node(node).ok()?;

    uart(to, UART, UART_INTERRUPT)?;
    let node = to.begin_node("pl031@9010000").ok()?;
    primecell(to, (pl031::COMPATIBLE, CLOCK, None), &["apb_pclk"])?;
    to.end_node(node).ok()?;
    let line = [SHARED, BUTTON_INTERRUPT - gic::FIRST_SHARED, LEVEL_HIGH];
    virtio(to, (BUTTON, PAGE), line)
}

fn uart(to: &mut FdtWriter, base: u64, interrupt: u32) -> Option<()> {
    let node = to.begin_node(&alloc::format!("pl011@{base:x}")).ok()?;
    primecell(to, (pl011::COMPATIBLE, base, Some(interrupt)), &["uartclk", "apb_pclk"])?;
    to.end_node(node).ok()
}

/// A device that the guest drives itself.
fn own_device(to: &mut FdtWriter, number: usize, device: &PassThroughNode) -> Option<()> {
    let base = pass_through(number) + device.offset;
    let interrupt = pass_through_interrupt(number);
    match device.kind {
        DeviceKind::Pl011 => uart(to, base, interrupt),
        // The guest finds it on the bus.
        DeviceKind::Pci => Some(()),
        DeviceKind::Virtio => {
            let trigger = if device.is_level { LEVEL_HIGH } else { EDGE_RISING };
            let line = [SHARED, interrupt - gic::FIRST_SHARED, trigger];
            virtio(to, (base, device.length), line)
        }
    }
}

fn virtio(to: &mut FdtWriter, (base, length): (u64, u64), interrupt: [u32; 3]) -> Option<()> {
    let node = to.begin_node(&alloc::format!("virtio_mmio@{base:x}")).ok()?;
    to.property_string("compatible", "virtio,mmio").ok()?;
    to.property_array_u64("reg", &[base, length]).ok()?;
    to.property_array_u32("interrupts", &interrupt).ok()?;
    to.property_null("dma-coherent").ok()?;
    to.end_node(node).ok()
}

/// The frame for interrupt messages, whose addresses are those of its parent's parent.
fn messages(to: &mut FdtWriter) -> Option<()> {
    to.property_u32("#address-cells", 2).ok()?;
    to.property_u32("#size-cells", 2).ok()?;
    to.property_null("ranges").ok()?;
    let node = to.begin_node(&alloc::format!("v2m@{MESSAGES:x}")).ok()?;
    to.property_string("compatible", gic::v2m::COMPATIBLE).ok()?;
    to.property_null("msi-controller").ok()?;
    to.property_array_u64("reg", &[MESSAGES, gic::v2m::LENGTH]).ok()?;
    to.property_phandle(MSI).ok()?;
    to.end_node(node).ok()
}

/// The host bridge, a bus with memory windows only (PCI Bus Binding to IEEE 1275). `own`: devices
/// that the guest drives itself; the functions among them have an interrupt by pin.
fn pci(to: &mut FdtWriter, own: &[PassThroughNode]) -> Option<()> {
    let node = to.begin_node(&alloc::format!("pcie@{ECAM:x}")).ok()?;
    to.property_string("compatible", "pci-host-ecam-generic").ok()?;
    to.property_string("device_type", "pci").ok()?;
    to.property_u32("#address-cells", 3).ok()?;
    to.property_u32("#size-cells", 2).ok()?;
    to.property_array_u64("reg", &[ECAM, ECAM_LENGTH]).ok()?;
    to.property_array_u32("bus-range", &[0, 0]).ok()?;
    to.property_u32("linux,pci-domain", 0).ok()?;
    let (window, length) = (PCI_WINDOW as u32, PCI_WINDOW_LENGTH as u32);
    // Address on the bus, address of the CPU, length.
    to.property_array_u32("ranges", &[PCI_MEMORY, 0, window, 0, window, 0, length]).ok()?;
    to.property_u32("msi-parent", MSI).ok()?;
    to.property_null("dma-coherent").ok()?;
    let functions: Vec<u32> = own
        .iter()
        .enumerate()
        .take(MAX_PASS_THROUGH)
        .filter(|(_, device)| device.kind == DeviceKind::Pci)
        .flat_map(|(number, device)| pin(number, device))
        .collect();
    if !functions.is_empty() {
        to.property_u32("#interrupt-cells", 1).ok()?;
        // The device number of the address, and the pin.
        to.property_array_u32("interrupt-map-mask", &[0xf800, 0, 0, 7]).ok()?;
        to.property_array_u32("interrupt-map", &functions).ok()?;
    }
    to.end_node(node).ok()
}

/// Entry of the map for pin A of a function that the guest drives itself: address on the bus (three
/// cells), pin; controller, its address (two cells), interrupt.
fn pin(number: usize, device: &PassThroughNode) -> [u32; 10] {
    const PIN_A: u32 = 1;
    let address = u32::from(pass_through_pci_device(number)) << 11;
    let interrupt = pass_through_interrupt(number) - gic::FIRST_SHARED;
    let trigger = if device.is_level { LEVEL_HIGH } else { EDGE_RISING };
    [address, 0, 0, PIN_A, GIC, 0, 0, SHARED, interrupt, trigger]
}

/// Registers, memory, and shares of the peer; doorbell and events.
fn channel(to: &mut FdtWriter, slot: usize, number: u8) -> Option<()> {
    let (base, memory) = (device(slot), channel_memory(number));
    let shares = memory + CHANNEL_SHARES;
    let node = to.begin_node(&alloc::format!("channel@{base:x}")).ok()?;
    to.property_string("compatible", "parador,channel").ok()?;
    let registers = [base, PAGE, memory, CHANNEL_SHARES, shares, CHANNEL_SHARES_LENGTH];
    to.property_array_u64("reg", &registers).ok()?;
    let interrupts = [slot_interrupt(slot, 0), slot_interrupt(slot, 1)];
    to.property_array_u32("interrupts", interrupts.as_flattened()).ok()?;
    to.end_node(node).ok()
}

const fn slot_interrupt(slot: usize, line: u8) -> [u32; 3] {
    [SHARED, device_interrupt(slot, line) - gic::FIRST_SHARED, EDGE_RISING]
}

/// Properties of a PrimeCell: name, registers, interrupt; names of its clocks.
fn primecell(
    to: &mut FdtWriter,
    (name, base, interrupt): (&str, u64, Option<u32>),
    clocks: &[&str],
) -> Option<()> {
    let names = vec![name.to_string(), "arm,primecell".to_string()];
    to.property_string_list("compatible", names).ok()?;
    to.property_array_u64("reg", &[base, PAGE]).ok()?;
    if let Some(number) = interrupt {
        let line = [SHARED, number - gic::FIRST_SHARED, LEVEL_HIGH];
        to.property_array_u32("interrupts", &line).ok()?;
    }
    to.property_array_u32("clocks", &vec![APB_CLOCK; clocks.len()]).ok()?;
    let names = clocks.iter().map(ToString::to_string).collect();
    to.property_string_list("clock-names", names).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hw_tables::fdt::Fdt;
    use vmm_mem::testing;

    /// An image of one page that uses 1 MiB.
    fn kernel() -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        bytes[16..24].copy_from_slice(&(1_u64 << 20).to_le_bytes());
        bytes[56..60].copy_from_slice(&image::MAGIC.to_le_bytes());
        bytes
    }

    fn boot(kernel: &[u8]) -> VirtBoot<'_> {
        const SLOTS: [Option<SlotNode>; 3] =
            [Some(SlotNode::Virtio), None, Some(SlotNode::Channel(1))];
        let (initrd, command_line) = (Some(&b"initrd"[..]), "console=ttyAMA0");
        VirtBoot {
            vcpus: 2,
            kernel,
            initrd,
            command_line,
            slots: &SLOTS,
            pass_through: &[],
            gic: gic::Version::V3,
            seed: Some(&[7; 32]),
            kaslr_seed: Some(9),
        }
    }

    #[test]
    fn the_tree_describes_the_machine() {
        let memory = testing::memory(&[(RAM, 8 << 20)]);
        let kernel = kernel();
        let start = load(&memory, &boot(&kernel)).expect("loads");
        assert_eq!(start, VirtStart { entry: RAM, tree: RAM + (4 << 20), is_32_bit: false });
        let mut bytes = vec![0; 1 << 20];
        memory.read_slice(start.tree, &mut bytes).expect("in memory");
        let fdt = Fdt::parse(&bytes).expect("a tree");
        let chosen = fdt.node("/chosen").expect("a node");
        assert_eq!(chosen.text("bootargs"), Some("console=ttyAMA0"));
        assert_eq!(chosen.property("rng-seed"), Some(&[7; 32][..]));
        assert_eq!(chosen.number("kaslr-seed"), Some(9));
        let at = chosen.number("linux,initrd-start").expect("a number");
        let mut disk = [0; 6];
        memory.read_slice(at, &mut disk).expect("in memory");
        assert_eq!((&disk, chosen.number("linux,initrd-end")), (b"initrd", Some(at + 6)));
        assert_eq!(fdt.node("/cpus").expect("a node").children().count(), 2);
        let ram = fdt.node("/memory@40000000").expect("a node");
        let length = (8 << 20) - STOLEN_TIME_LENGTH;
        assert_eq!(ram.ranges().next(), Some((RAM, length)), "without the records");
        assert_eq!(stolen_time_record((RAM, 8 << 20), 1), RAM + length + 64);
        let uart = fdt.node("/pl011@9000000").expect("a node");
        assert!(uart.is_compatible(pl011::COMPATIBLE));
        assert_eq!(uart.ranges().next(), Some((UART, PAGE)));
        let virtio = fdt.node("/virtio_mmio@a000000").expect("a node");
        assert_eq!(virtio.ranges().next(), Some((device(0), PAGE)));
        assert!(fdt.node("/virtio_mmio@a001000").is_none(), "an empty slot");
        assert!(fdt.node("/virtio_mmio@9020000").is_some(), "the power button");
        let channel = fdt.node("/channel@a002000").expect("a node");
        assert!(channel.is_compatible("parador,channel"));
        let ranges: Vec<_> = channel.ranges().collect();
        let expected = [
            (device(2), PAGE),
            (0x1200_0000, CHANNEL_SHARES),
            (0x1300_0000, CHANNEL_SHARES_LENGTH),
        ];
        assert_eq!(ranges, expected);
    }

    #[test]
    fn the_tree_has_the_version_of_the_interrupt_controller() {
        let kernel = kernel();
        for (gic, name, second, trigger) in [
            (gic::Version::V2, "arm,cortex-a15-gic", (CPU_INTERFACE, 0x2000), 0x308),
            (gic::Version::V3, "arm,gic-v3", (REDISTRIBUTORS, REDISTRIBUTORS_LENGTH), LEVEL_LOW),
        ] {
            let memory = testing::memory(&[(RAM, 8 << 20)]);
            let boot = VirtBoot { gic, ..boot(&kernel) };
            let start = load(&memory, &boot).expect("loads");
            let mut bytes = vec![0; 1 << 20];
            memory.read_slice(start.tree, &mut bytes).expect("in memory");
            let fdt = Fdt::parse(&bytes).expect("a tree");
            let node = fdt.node("/intc").expect("a node");
            assert!(node.is_compatible(name));
            assert_eq!(node.ranges().nth(1), Some(second));
            let timer = fdt.node("/timer").expect("a node");
            assert_eq!(timer.gic_interrupt(2), Some(27));
            let cells = timer.property("interrupts").expect("a property");
            assert_eq!(cells[8..12], trigger.to_be_bytes());
        }
    }

    #[test]
    fn the_tree_describes_pci() {
        let (memory, kernel) = (testing::memory(&[(RAM, 8 << 20)]), kernel());
        let boot = VirtBoot { slots: &[Some(SlotNode::Pci)], ..boot(&kernel) };
        let start = load(&memory, &boot).expect("loads");
        let mut bytes = vec![0; 1 << 20];
        memory.read_slice(start.tree, &mut bytes).expect("in memory");
        let fdt = Fdt::parse(&bytes).expect("a tree");
        let bridge = fdt.node("/pcie@3f000000").expect("a node");
        assert!(bridge.is_compatible("pci-host-ecam-generic"));
        let frame = fdt.node("/intc/v2m").expect("a node");
        assert_eq!(frame.ranges().next(), Some((MESSAGES, PAGE)));
        assert_eq!(bridge.number("msi-parent"), frame.number("phandle"));
        assert!(fdt.node("/virtio_mmio@a000000").is_none());
    }

    #[test]
    fn the_tree_describes_devices_of_the_machine() {
        const BASE: u64 = RAM + (96 << 20);
        let (memory, kernel) = (testing::memory(&[(BASE, 8 << 20)]), kernel());
        let uart =
            PassThroughNode { kind: DeviceKind::Pl011, offset: 0, length: PAGE, is_level: true };
        let disk = PassThroughNode {
            kind: DeviceKind::Virtio,
            offset: 0xe00,
            length: 0x200,
            is_level: false,
        };
        let boot = VirtBoot { pass_through: &[uart, disk], ..boot(&kernel) };
        let start = load(&memory, &boot).expect("loads");
        assert_eq!((start.entry, start.tree), (BASE, BASE + (4 << 20)), "RAM at an address");
        let mut bytes = vec![0; 1 << 20];
        memory.read_slice(start.tree, &mut bytes).expect("in memory");
        let fdt = Fdt::parse(&bytes).expect("a tree");
        let length = (8 << 20) - STOLEN_TIME_LENGTH;
        let ram = fdt.node("/memory@46000000").expect("a node");
        assert_eq!(ram.ranges().next(), Some((BASE, length)));
        let node = fdt.node("/pl011@9040000").expect("a node");
        assert_eq!(node.ranges().next(), Some((0x904_0000, PAGE)));
        assert_eq!(node.gic_line(0), Some((36, true)));
        let node = fdt.node("/virtio_mmio@9050e00").expect("a node");
        assert_eq!(node.ranges().next(), Some((0x905_0e00, 0x200)));
        assert_eq!(node.gic_line(0), Some((37, false)));
        assert_eq!([36, 39, 40, 35].map(pass_through_number), [Some(0), Some(3), None, None]);
    }

    #[test]
    fn functions_of_the_machine_have_a_pin_on_the_bus() {
        let (memory, kernel) = (testing::memory(&[(RAM, 8 << 20)]), kernel());
        let node = |kind| PassThroughNode { kind, offset: 0, length: 0, is_level: true };
        let own = [node(DeviceKind::Pl011), node(DeviceKind::Pci)];
        let boot = VirtBoot { pass_through: &own, slots: &[], ..boot(&kernel) };
        let start = load(&memory, &boot).expect("loads");
        let mut bytes = vec![0; 1 << 20];
        memory.read_slice(start.tree, &mut bytes).expect("in memory");
        let fdt = Fdt::parse(&bytes).expect("a tree");
        let node = fdt.node("/pcie@3f000000").expect("a node");
        assert_eq!(pass_through_pci_device(1), 29);
        assert_eq!(node.pin_interrupt(29, 1), Some((37, true)));
        assert_eq!(
            [(29, 2), (28, 1), (1, 1)].map(|(of, pin)| node.pin_interrupt(of, pin)),
            [None; 3]
        );
    }

    #[test]
    fn the_longest_tree_fits_the_heap_of_a_vmm() {
        // Twice: an array of bytes that grows doubles (native/rt/src/heap.rs).
        const MOST: usize = 8 << 10;
        let (memory, kernel) = (testing::memory(&[(RAM, 8 << 20)]), kernel());
        let line = "x".repeat(2048);
        let slots: Vec<_> = (0..MAX_SLOTS as u8)
            .map(|slot| match u64::from(slot) < MAX_CHANNELS {
                true => Some(SlotNode::Channel(slot)),
                false => Some(SlotNode::Virtio),
            })
            .collect();
        let disk =
            PassThroughNode { kind: DeviceKind::Virtio, offset: 0, length: PAGE, is_level: false };
        let function = PassThroughNode { kind: DeviceKind::Pci, ..disk };
        for device in [disk, function] {
            let boot = VirtBoot {
                vcpus: 8,
                command_line: &line,
                slots: &slots,
                pass_through: &[device; MAX_PASS_THROUGH],
                ..boot(&kernel)
            };
            let tree = device_tree(&memory, &boot, 0..0).expect("a tree");
            assert!(tree.len() <= MOST, "{} bytes", tree.len());
        }
    }

    #[test]
    fn a_32_bit_kernel_is_behind_what_it_decompresses() {
        let kernel = zimage::tests::image();
        let memory = testing::memory(&[(RAM, 40 << 20)]);
        let start = load(&memory, &boot(&kernel)).expect("loads");
        let (entry, tree) = (RAM + (32 << 20), RAM + (36 << 20));
        assert_eq!(start, VirtStart { entry, tree, is_32_bit: true });
        let mut magic = [0; 4];
        memory.read_slice(entry + 0x24, &mut magic).expect("in memory");
        assert_eq!(u32::from_le_bytes(magic), 0x016f_2818);
        let needed = memory_needed(&kernel, 6).expect("a kernel");
        assert!(needed > 33 << 20 && needed <= 40 << 20, "{needed}");
        let small = testing::memory(&[(RAM, 32 << 20)]);
        let error = load(&small, &boot(&kernel));
        assert!(matches!(error, Err(BootError::TooLittleMemory { .. })), "{error:?}");
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let kernel = kernel();
        let small = testing::memory(&[(RAM, 1 << 20)]);
        let error = load(&small, &boot(&kernel));
        assert!(matches!(error, Err(BootError::TooLittleMemory { .. })), "{error:?}");
        let memory = testing::memory(&[(RAM, 8 << 20)]);
        for (bytes, error) in [
            (&kernel[..40], BootError::Truncated { needed: 64, actual: 40 }),
            (&[0; 64][..], BootError::UnknownFormat),
        ] {
            assert_eq!(load(&memory, &boot(bytes)), Err(error));
        }
        let mut wrong = kernel;
        wrong[24..32].copy_from_slice(&(image::FLAGS | 1).to_le_bytes());
        assert_eq!(load(&memory, &boot(&wrong)), Err(BootError::BigEndian));
        wrong[24..32].copy_from_slice(&image::FLAGS.to_le_bytes());
        wrong[8..16].copy_from_slice(&u64::MAX.to_le_bytes());
        assert_eq!(load(&memory, &boot(&wrong)), Err(BootError::BadHeader));
    }
}
