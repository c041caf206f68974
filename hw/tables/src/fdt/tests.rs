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
    assert!(uart.is_gic_level(0) && !uart.is_gic_level(1));
    let timer = fdt.find("arm,armv8-timer", |_| true).unwrap();
    assert_eq!(
        (0..5).map(|at| timer.gic_interrupt(at)).collect::<Vec<_>>(),
        [Some(29), Some(30), Some(27), Some(26), None]
    );
    let mut places = Vec::new();
    assert!(
        fdt.find("virtio,mmio", |node| {
            places.extend(node.ranges());
            assert!(!node.is_gic_level(0));
            false
        })
        .is_none()
    );
    assert_eq!((places.len(), places[0]), (32, (0xa00_0000, 0x200)));
    assert!(fdt.console("ns16550a").is_none());
}
