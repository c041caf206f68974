use super::*;
use proptest::prelude::*;

/// Builds device trees.
#[derive(Default)]
struct Writer {
    structure: Vec<u8>,
    strings: Vec<u8>,
    reservations: Vec<u8>,
}

impl Writer {
    fn word(&mut self, value: u32) {
        self.structure.extend(value.to_be_bytes());
    }

    fn padded(&mut self, bytes: &[u8]) {
        self.structure.extend(bytes);
        self.structure.resize(self.structure.len().next_multiple_of(4), 0);
    }

    fn begin(mut self, name: &str) -> Self {
        self.word(token::BEGIN_NODE);
        self.padded(&[name.as_bytes(), &[0]].concat());
        self
    }

    fn property(mut self, name: &str, value: &[u8]) -> Self {
        self.word(token::PROPERTY);
        self.word(value.len() as u32);
        self.word(self.strings.len() as u32);
        self.strings.extend(name.as_bytes());
        self.strings.push(0);
        self.padded(value);
        self
    }

    fn cells(self, name: &str, cells: &[u32]) -> Self {
        let value: Vec<u8> = cells.iter().flat_map(|cell| cell.to_be_bytes()).collect();
        self.property(name, &value)
    }

    fn end(mut self) -> Self {
        self.word(token::END_NODE);
        self
    }

    fn reserve(mut self, base: u64, length: u64) -> Self {
        self.reservations.extend(base.to_be_bytes());
        self.reservations.extend(length.to_be_bytes());
        self
    }

    fn finish(mut self) -> Vec<u8> {
        self.word(token::END);
        self.reservations.extend([0; 16]);
        let reservations = HEADER;
        let structure = reservations + self.reservations.len();
        let strings = structure + self.structure.len();
        let total = strings + self.strings.len();
        let header = [
            MAGIC as usize,
            total,
            structure,
            strings,
            reservations,
            17,
            16,
            0,
            self.strings.len(),
            self.structure.len(),
        ];
        let mut all: Vec<u8> =
            header.iter().flat_map(|&field| (field as u32).to_be_bytes()).collect();
        all.extend(self.reservations);
        all.extend(self.structure);
        all.extend(self.strings);
        all
    }
}

fn machine() -> Vec<u8> {
    Writer::default()
        .reserve(0x4800_0000, 0x1000)
        .begin("")
        .cells("#address-cells", &[2])
        .cells("#size-cells", &[2])
        .property("compatible", b"linux,dummy-virt\0")
        .begin("memory@40000000")
        .property("device_type", b"memory\0")
        .cells("reg", &[0, 0x4000_0000, 0, 0x1000_0000, 1, 0, 0, 0x2000])
        .end()
        .begin("chosen")
        .property("bootargs", b"log=none\0")
        .end()
        .begin("soc")
        .cells("#address-cells", &[1])
        .cells("#size-cells", &[1])
        .cells("ranges", &[0x7e00_0000, 0, 0xfe00_0000, 0x180_0000])
        .begin("serial@7e201000")
        .property("compatible", b"arm,pl011\0arm,primecell\0")
        .cells("reg", &[0x7e20_1000, 0x200, 0x1000, 0x200])
        .property("status", b"okay\0")
        .end()
        .begin("off@7e202000")
        .property("status", b"disabled\0")
        .end()
        .end()
        .end()
        .finish()
}

#[test]
fn a_machine() {
    let bytes = machine();
    let fdt = Fdt::parse(&bytes).unwrap();
    assert_eq!(length(&bytes), Some(bytes.len()));
    assert_eq!(fdt.reservations().collect::<Vec<_>>(), [(0x4800_0000, 0x1000)]);
    let memory = fdt.node("/memory").unwrap();
    assert_eq!(memory.name, b"memory@40000000");
    let ranges: Vec<_> = memory.ranges().collect();
    assert_eq!(ranges, [(0x4000_0000, 0x1000_0000), (1 << 32, 0x2000)]);
    assert_eq!(fdt.node("/chosen").unwrap().text("bootargs"), Some("log=none"));
    let serial = fdt.node("/soc/serial@7e201000").unwrap();
    assert!(serial.is_compatible("arm,pl011") && serial.is_enabled());
    assert!(!serial.is_compatible("arm"));
    // The second range is outside of what the bus translates.
    assert_eq!(serial.ranges().collect::<Vec<_>>(), [(0xfe20_1000, 0x200)]);
    assert!(!fdt.node("/soc/off").unwrap().is_enabled());
    assert!(fdt.node("/soc/none").is_none() && fdt.node("/memory/x").is_none());
    let mut names = Vec::new();
    fdt.visit(|node| names.push(String::from_utf8_lossy(node.name).into_owned()));
    let expected = ["", "memory@40000000", "chosen", "soc", "serial@7e201000", "off@7e202000"];
    assert_eq!(names, expected);
    assert_eq!(fdt.root().number("#size-cells"), Some(2));
}

#[test]
fn defects() {
    let good = machine();
    assert_eq!(Fdt::parse(&[]).unwrap_err(), FdtError::BadMagic);
    assert_eq!(Fdt::parse(&good[1..]).unwrap_err(), FdtError::BadMagic);
    assert_eq!(Fdt::parse(&good[..good.len() - 1]).unwrap_err(), FdtError::BadStructure);
    let with = |at: usize, value: u32| {
        let mut bad = good.clone();
        bad[at..at + 4].copy_from_slice(&value.to_be_bytes());
        Fdt::parse(&bad).err()
    };
    assert_eq!(with(4, u32::MAX), Some(FdtError::UnsupportedVersion));
    assert_eq!(with(20, 16), Some(FdtError::UnsupportedVersion));
    assert_eq!(with(24, 18), Some(FdtError::UnsupportedVersion));
    for field in [8, 12, 16, 32, 36] {
        assert_eq!(with(field, u32::MAX), Some(FdtError::BadStructure), "{field}");
    }
    let open = Writer::default().begin("").begin("a").end().finish();
    assert_eq!(Fdt::parse(&open).unwrap_err(), FdtError::BadStructure);
    let late = Writer::default().begin("").begin("a").end().property("p", b"").end().finish();
    assert_eq!(Fdt::parse(&late).unwrap_err(), FdtError::BadStructure);
    let nested = |depth| {
        let all = (0..depth).fold(Writer::default(), |writer, _| writer.begin("n"));
        (0..depth).fold(all, |writer, _| writer.end()).finish()
    };
    assert!(Fdt::parse(&nested(MAX_DEPTH)).is_ok());
    assert_eq!(Fdt::parse(&nested(MAX_DEPTH + 1)).unwrap_err(), FdtError::BadStructure);
}

#[test]
fn absurd_numbers() {
    let all = Writer::default()
        .begin("")
        .cells("#address-cells", &[0])
        .cells("#size-cells", &[0])
        .begin("a")
        .cells("reg", &[1, 2])
        .end()
        .begin("b")
        .cells("#address-cells", &[7])
        .begin("c")
        .cells("reg", &[u32::MAX, u32::MAX, u32::MAX])
        .end()
        .end()
        .end()
        .finish();
    let fdt = Fdt::parse(&all).unwrap();
    assert_eq!(fdt.node("/a").unwrap().ranges().count(), 0);
    // No property `ranges`: no part of it has a physical address.
    assert_eq!(fdt.node("/b/c").unwrap().ranges().count(), 0);
    assert_eq!(number(&[0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0], 3), None);
    assert_eq!(number(&[0; 8], 3), None);
}

proptest! {
    #[test]
    fn nothing_panics(changes in prop::collection::vec((0usize..600, any::<u8>()), 0..8), end in 0usize..700) {
        let mut bytes = machine();
        for (at, value) in changes {
            let length = bytes.len();
            bytes[at % length] = value;
        }
        bytes.truncate(end.max(8));
        let _ = length(&bytes);
        if let Ok(fdt) = Fdt::parse(&bytes) {
            fdt.reservations().for_each(drop);
            fdt.visit(|node| {
                node.properties().for_each(drop);
                node.ranges().for_each(drop);
                assert!(!node.is_named("\u{1}"));
            });
        }
    }
}

/// QEMU 7.2's machine `virt`
/// (`-M virt,virtualization=on,gic-version=3,dumpdtb=FILE -cpu cortex-a76 -smp 4 -m 512`).
static VIRT: &[u8] = include_bytes!("virt.dtb");

#[test]
fn devices_of_a_virtual_machine() {
    let fdt = Fdt::parse(VIRT).unwrap();
    let uart = fdt.console("arm,pl011").unwrap();
    assert_eq!(uart.ranges().next(), Some((0x900_0000, 0x1000)));
    assert_eq!((uart.gic_interrupt(0), uart.gic_interrupt(1)), (Some(33), None));
    assert_eq!(uart.gic_line(0).map(|(_, is_level)| is_level), Some(true));
    assert_eq!(uart.gic_line(1), None);
    let timer = fdt.find("arm,armv8-timer", |_| true).unwrap();
    assert_eq!(
        (0..5).map(|at| timer.gic_interrupt(at)).collect::<Vec<_>>(),
        [Some(29), Some(30), Some(27), Some(26), None]
    );
    let mut places = Vec::new();
    assert!(
        fdt.find("virtio,mmio", |node| {
            places.extend(node.ranges());
            assert_eq!(node.gic_line(0).map(|(_, is_level)| is_level), Some(false));
            false
        })
        .is_none()
    );
    assert_eq!((places.len(), places[0]), (32, (0xa00_0000, 0x200)));
    assert!(fdt.console("ns16550a").is_none());
}

/// The same machine with `iommu=smmuv3`.
static VIRT_SMMU: &[u8] = include_bytes!("virt-smmu.dtb");

#[test]
fn the_host_bridge_of_a_virtual_machine() {
    let fdt = Fdt::parse(VIRT_SMMU).unwrap();
    let bridge = fdt.find(pci::COMPATIBLE, |_| true).unwrap();
    assert_eq!(bridge.ranges().next(), Some((0x40_1000_0000, 0x1000_0000)));
    assert_eq!(bridge.buses(), Some((0, 255)));
    assert_eq!(bridge.register_window(), Some((0x1000_0000, 0x2eff_0000)));
    // The pins of four devices in a row are on different lines, and so are those of one device.
    let lines = |device, pin| bridge.pin_interrupt(device, pin);
    assert_eq!(
        [1, 2, 3, 4].map(|device| lines(device, 1)),
        [36, 37, 38, 35].map(|n| Some((n, true)))
    );
    assert_eq!([1, 2, 3, 4].map(|pin| lines(0, pin)), [35, 36, 37, 38].map(|n| Some((n, true))));
    assert_eq!((lines(1, 0), lines(1, 5)), (None, None));
    let all: Vec<_> = bridge.streams().collect();
    let [streams] = all[..] else { panic!("{all:?}") };
    assert_eq!((streams.of(0x18), streams.function(0x18)), (Some(0x18), Some(0x18)));
    assert_eq!((streams.of(u16::MAX), streams.function(0x1_0000)), (Some(0xffff), None));
    let apart = pci::Streams { first: 0x100, stream: 0x20, count: 0x10, ..streams };
    assert_eq!(
        ([0xff, 0x100, 0x10f, 0x110].map(|f| apart.of(f))),
        [None, Some(0x20), Some(0x2f), None]
    );
    assert_eq!(
        [0x1f, 0x20, 0x2f, 0x30].map(|s| apart.function(s)),
        [None, Some(0x100), Some(0x10f), None]
    );
    let last = pci::Streams { first: u16::MAX, stream: u32::MAX, count: u32::MAX, ..streams };
    assert_eq!((last.of(u16::MAX), last.function(u32::MAX)), (Some(u32::MAX), Some(u16::MAX)));
    let smmu = fdt.referred(streams.smmu).unwrap();
    assert!(smmu.is_compatible("arm,smmu-v3"));
    assert_eq!(smmu.ranges().next(), Some((0x905_0000, 0x2_0000)));
    // Without an SMMU.
    let plain = Fdt::parse(VIRT).unwrap();
    assert_eq!(plain.find(pci::COMPATIBLE, |_| true).unwrap().streams().count(), 0);
    assert!(plain.referred(u32::MAX).is_none());
    // Other nodes have no such properties.
    assert_eq!(
        (smmu.buses(), smmu.register_window(), smmu.pin_interrupt(0, 1)),
        (None, None, None)
    );
}

#[test]
fn damaged_host_bridges_are_read_to_their_end() {
    let mut bytes = VIRT_SMMU.to_vec();
    let map = bytes.windows(13).position(|name| name == b"interrupt-map").unwrap();
    for at in (0..bytes.len()).step_by(7).chain(map..map + 16) {
        let whole = bytes[at];
        bytes[at] ^= 0xff;
        if let Ok(fdt) = Fdt::parse(&bytes)
            && let Some(bridge) = fdt.find(pci::COMPATIBLE, |_| true)
        {
            let _ = (bridge.buses(), bridge.register_window(), bridge.streams().count());
            let _ = bridge.pin_interrupt(31, 4);
        }
        bytes[at] = whole;
    }
}
