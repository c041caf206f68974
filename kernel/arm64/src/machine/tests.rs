//! The device trees of QEMU 7.2's machine `virt`
//! (`-M virt,virtualization=on,gic-version=3,dumpdtb=FILE -cpu cortex-a76 -smp 4 -m 512`, and
//! `gic-version=2`), whole and with changes of single bytes.

use super::*;

static VIRT: &[u8] = include_bytes!("../../../../hw/tables/src/fdt/virt.dtb");
static VIRT_GICV2: &[u8] = include_bytes!("../../../../hw/tables/src/fdt/virt-gicv2.dtb");
/// Guests' registers of the latter, as the tree has them: address and length.
const GUEST_REGISTERS: [u32; 4] = [0, 0x804_0000, 0, 0x1_0000];
const LIMIT: u64 = 1 << 47;

fn read(bytes: &[u8]) -> Result<Machine, MachineError> {
    let fdt = Fdt::parse(bytes).map_err(|_| "malformed")?;
    let mut machine = Machine::NEW;
    machine.read(&fdt, LIMIT).map(|()| machine)
}

/// A tree with all places of `from` replaced by `to`, of the same length.
fn replaced_in(tree: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut bytes = tree.to_vec();
    let places: Vec<_> =
        (0..bytes.len() - from.len()).filter(|&at| bytes[at..].starts_with(from)).collect();
    assert!(!places.is_empty() && from.len() == to.len());
    places.into_iter().for_each(|at| bytes[at..at + to.len()].copy_from_slice(to));
    bytes
}

fn replaced(from: &[u8], to: &[u8]) -> Vec<u8> {
    replaced_in(VIRT, from, to)
}

/// The tree of the machine with a GICv2, whose guests' registers are elsewhere.
fn with_guest_registers(cells: [u32; 4]) -> Vec<u8> {
    let bytes = |cells: [u32; 4]| cells.map(u32::to_be_bytes).concat();
    replaced_in(VIRT_GICV2, &bytes(GUEST_REGISTERS), &bytes(cells))
}

#[test]
fn a_virtual_machine() {
    let machine = read(VIRT).unwrap();
    let ram: Vec<_> = machine.memory.ram.as_slice().iter().map(|r| (r.base, r.end)).collect();
    assert_eq!(ram, [(0x4000_0000, 0x6000_0000)]);
    assert_eq!(machine.affinities[..machine.listed_cpus], [0, 1, 2, 3]);
    let [distributor, redistributors, others @ ..] = machine.interrupt_controller;
    assert_eq!((machine.gic_version, others), (Version::V3, [Range::default(); 2]));
    assert_eq!((distributor.base, distributor.length()), (0x800_0000, 0x1_0000));
    assert_eq!((redistributors.base, redistributors.length()), (0x80a_0000, 0xf6_0000));
    assert_eq!((machine.timer, machine.has_psci), (26, true));
    assert_eq!((machine.maintenance, machine.virtual_timer), (Some(25), Some(27)));
    assert!(machine.bundle.is_none());
    assert_eq!(uart(&Fdt::parse(VIRT).unwrap()), Some(0x900_0000));
}

/// The tree of the machine, whose redistributors have this second region, too.
fn with_second_region(cells: [u32; 4]) -> Vec<u8> {
    let bytes = |cells: [u32; 4]| cells.map(u32::to_be_bytes).concat();
    let first = bytes([0, 0x80a_0000, 0, 0xf6_0000]);
    let at = VIRT.windows(16).position(|bytes| bytes == first).unwrap();
    let mut tree = VIRT.to_vec();
    assert_eq!(tree[at - 24..at - 20], 32u32.to_be_bytes());
    tree[at - 24..at - 20].copy_from_slice(&48u32.to_be_bytes());
    // The number of regions was behind the first. Its name replaces `#size-cells`, which is 2.
    tree.copy_within(at + 24..at + 28, at + 76);
    tree[at + 16..at + 32].copy_from_slice(&bytes(cells));
    tree
}

#[test]
fn a_gicv3_has_several_regions_of_redistributors() {
    let second = |cells| read(&with_second_region(cells)).unwrap();
    let machine = second([0, 0xb00_0000, 0, 0x40_0000]);
    let region = Range::sized(0xb00_0000, 0x40_0000);
    assert_eq!(machine.interrupt_controller[2..], [region, Range::default()]);
    let overlaps = |range: &&Range| range.base < region.end && region.base < range.end;
    assert_eq!(machine.devices.as_slice().iter().find(overlaps), None, "not for tasks");
    let high = second([0x40, 0, 0, 0x40_0000]);
    assert_eq!(high.interrupt_controller[2..], [Range::default(); 2]);
}

/// Device memory above 4 GiB, of a tree with this limit of addresses.
fn high_devices(bytes: &[u8], limit: u64) -> Vec<(u64, u64)> {
    let mut machine = Machine::NEW;
    machine.read(&Fdt::parse(bytes).unwrap(), limit).unwrap();
    let all = machine.devices.as_slice().iter().filter(|range| range.end > FOUR_GIB);
    all.map(|range| (range.base, range.end)).collect()
}

#[test]
fn the_configuration_space_of_pci_is_device_memory_unless_it_is_ram() {
    let space = (0x40_1000_0000, 0x40_2000_0000);
    assert_eq!(high_devices(VIRT, LIMIT), [space]);
    assert_eq!(high_devices(VIRT, 0x40_1fff_ffff), [], "beyond the tasks' reach");
    // RAM at its place.
    let bytes = |cells: [u32; 4]| cells.map(u32::to_be_bytes).concat();
    let ram = [0, 0x4000_0000, 0, 0x2000_0000];
    let over = [0x40, 0x1800_0000, 0, 0x2000_0000];
    let bytes = replaced(&bytes(ram), &bytes(over));
    assert_eq!(high_devices(&bytes, LIMIT), [(space.0, 0x40_1800_0000)]);
}

#[test]
fn a_virtual_machine_with_a_gicv2() {
    let machine = read(VIRT_GICV2).unwrap();
    let ranges = machine.interrupt_controller.map(|range| (range.base, range.length()));
    let expected = [0x800_0000, 0x801_0000, 0x803_0000, 0x804_0000].map(|base| (base, 0x1_0000));
    assert_eq!((machine.gic_version, ranges), (Version::V2, expected));
    assert_eq!((machine.timer, machine.maintenance), (26, Some(25)));
    assert_eq!(machine.virtual_timer, Some(27));
}

#[test]
fn what_guests_get_of_a_gicv2_is_nothing_else() {
    let reason = |cells: [u32; 4]| read(&with_guest_registers(cells)).err();
    let overlap = Some("the guests' registers of the GICv2 overlap those of another device");
    // Those of the interface to the hypervisor, the UART, RAM.
    for base in [0x803_e000, 0x8ff_2000, 0x4000_0000] {
        assert_eq!(reason([0, base, 0, 0x1_0000]), overlap, "{base:#x}");
    }
    let unaligned = Some("the registers of the GICv2 are not page-aligned");
    for [base, length] in [[0x804_0200, 0x1_0000], [0x804_1000, 0x2000], [0x804_0000, 0x2800]] {
        assert_eq!(reason([0, base, 0, length]), unaligned, "{base:#x}");
    }
    let few = Some("the registers of the GICv2 are above 4 GiB or too few");
    assert_eq!(reason([0, 0x804_0000, 0, 0x1000]), few);
    assert_eq!(reason([1, 0x804_0000, 0, 0x1_0000]), few);
}

#[test]
fn a_gicv2_needs_its_virtualization_extensions() {
    const NOP: [u8; 4] = 4u32.to_be_bytes();
    let first = [0, 0x800_0000, 0, 0x1_0000].map(u32::to_be_bytes).concat();
    let at = VIRT_GICV2.windows(16).position(|bytes| bytes == first).unwrap();
    let mut bytes = VIRT_GICV2.to_vec();
    // The length of the property with four ranges; the last two become tokens without effect.
    assert_eq!(bytes[at - 8..at - 4], 64u32.to_be_bytes());
    bytes[at - 8..at - 4].copy_from_slice(&32u32.to_be_bytes());
    bytes[at + 32..at + 64].copy_from_slice(&NOP.repeat(8));
    assert_eq!(read(&bytes).err(), Some("the GICv2 has no virtualization extensions"));
}

#[test]
fn machines_that_do_not_fit() {
    let reason = |bytes: &[u8]| read(bytes).err();
    assert_eq!(
        reason(&replaced(b"arm,gic-v3", b"arm,gic-v9")),
        Some("no GICv3 or GICv2 in the device tree")
    );
    assert_eq!(reason(&replaced(b"memory\0", b"nemory\0")), Some("the device tree lists no RAM"));
    let no_timer = replaced(b"arm,armv8-timer", b"arm,armv6-timer");
    assert_eq!(reason(&no_timer), Some("the device tree lists no timer of the hypervisor"));
    let other_firmware = replaced(b"smc\0", b"hvc\0");
    assert!(!read(&other_firmware).unwrap().has_psci);
    assert_eq!(uart(&Fdt::parse(&replaced(b"arm,pl011", b"arm,pl099")).unwrap()), None);
}

#[test]
fn no_change_of_a_byte_is_fatal() {
    for tree in [VIRT, VIRT_GICV2] {
        for (at, value) in (0..tree.len()).flat_map(|at| [0, 0x7f, 0xff].map(|value| (at, value))) {
            let mut bytes = tree.to_vec();
            bytes[at] = value;
            let _ = read(&bytes);
            if let Ok(fdt) = Fdt::parse(&bytes) {
                let _ = uart(&fdt);
            }
        }
    }
}
