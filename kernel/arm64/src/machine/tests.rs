//! The device tree of QEMU 7.2's machine `virt`
//! (`-M virt,virtualization=on,gic-version=3,dumpdtb=FILE -cpu cortex-a76 -smp 4 -m 512`),
//! whole and with changes of single bytes.

use super::*;

static VIRT: &[u8] = include_bytes!("../../../../hw/tables/src/fdt/virt.dtb");
const LIMIT: u64 = 1 << 47;

fn read(bytes: &[u8]) -> Result<Machine, MachineError> {
    let fdt = Fdt::parse(bytes).map_err(|_| "malformed")?;
    let mut machine = Machine::NEW;
    machine.read(&fdt, LIMIT).map(|()| machine)
}

/// The tree with all places of `from` replaced by `to`, of the same length.
fn replaced(from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut bytes = VIRT.to_vec();
    let places: Vec<_> =
        (0..bytes.len() - from.len()).filter(|&at| bytes[at..].starts_with(from)).collect();
    assert!(!places.is_empty() && from.len() == to.len());
    places.into_iter().for_each(|at| bytes[at..at + to.len()].copy_from_slice(to));
    bytes
}

#[test]
fn a_virtual_machine() {
    let machine = read(VIRT).unwrap();
    let ram: Vec<_> = machine.memory.ram.as_slice().iter().map(|r| (r.base, r.end)).collect();
    assert_eq!(ram, [(0x4000_0000, 0x6000_0000)]);
    assert_eq!(machine.affinities[..machine.listed_cpus], [0, 1, 2, 3]);
    let [distributor, redistributors] = machine.interrupt_controller;
    assert_eq!((distributor.base, distributor.length()), (0x800_0000, 0x1_0000));
    assert_eq!((redistributors.base, redistributors.length()), (0x80a_0000, 0xf6_0000));
    assert_eq!((machine.timer, machine.has_psci), (26, true));
    assert_eq!((machine.maintenance, machine.virtual_timer), (Some(25), Some(27)));
    assert!(machine.bundle.is_none());
    assert_eq!(uart(&Fdt::parse(VIRT).unwrap()), Some(0x900_0000));
}

#[test]
fn machines_that_do_not_fit() {
    let reason = |bytes: &[u8]| read(bytes).err();
    assert_eq!(
        reason(&replaced(b"arm,gic-v3", b"arm,gic-v9")),
        Some("no GICv3 in the device tree")
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
    for at in 0..VIRT.len() {
        for value in [0, 0x7f, 0xff] {
            let mut bytes = VIRT.to_vec();
            bytes[at] = value;
            let _ = read(&bytes);
            if let Ok(fdt) = Fdt::parse(&bytes) {
                let _ = uart(&fdt);
            }
        }
    }
}
