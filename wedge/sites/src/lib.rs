//! The tables of sensitive instructions and of layout constants in a pre-virtualized kernel or
//! module. The afterburner writes them; loaders and the wedge read them.
//!
//! A table is an ELF section of 8-byte records, little-endian. A record gives its address relative
//! to itself, so the table stays valid when a loader moves the image. The version of the format is
//! part of the section's name: a reader of version 1 does not find another version by accident, and
//! [`section`] reports the difference.
//!
//! Parsing checks every record, so that the iterators cannot fail afterwards.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

mod kind;

pub use kind::Kind;

use core::fmt;

/// Version of both formats.
pub const VERSION: u32 = 1;
/// Section of [`Site`]s: allocated, read-only.
pub const SITES_SECTION: &str = "parador_sites_1";
/// Section of [`Constant`]s: allocated, read-only.
pub const CONSTANTS_SECTION: &str = "parador_consts_1";
/// Bytes of a record, in both tables.
pub const RECORD: usize = 8;

const SITES_PREFIX: &str = "parador_sites_";
const CONSTANTS_PREFIX: &str = "parador_consts_";

/// The tables.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Table {
    /// Sensitive instructions.
    Sites,
    /// Layout constants.
    Constants,
}

/// The table that a section of this name holds, `None` if none.
pub fn section(name: &str) -> Option<Result<Table, Error>> {
    let (table, version) = match name.strip_prefix(SITES_PREFIX) {
        Some(version) => (Table::Sites, version),
        None => (Table::Constants, name.strip_prefix(CONSTANTS_PREFIX)?),
    };
    let version = version.parse().ok()?;
    Some(if version == VERSION { Ok(table) } else { Err(Error::WrongVersion { version }) })
}

/// The reason for which a table cannot be used. `record` counts from 0.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Error {
    /// The table has another format.
    WrongVersion {
        /// The version in the section's name.
        version: u32,
    },
    /// The table ends inside a record.
    Truncated {
        /// The table's length in bytes.
        length: usize,
    },
    /// A site of a kind that this version does not know.
    UnknownKind {
        /// The record's index.
        record: usize,
        /// The kind's number.
        kind: u8,
    },
    /// A site with fewer bytes than its instruction, or an instruction of impossible length.
    BadLength {
        /// The record's index.
        record: usize,
    },
    /// Bits are set that have no meaning.
    BadFlags {
        /// The record's index.
        record: usize,
    },
    /// A constant that this version does not know, or of a width that does not exist.
    UnknownConstant {
        /// The record's index.
        record: usize,
    },
    /// A record's address is outside the address space.
    BadAddress {
        /// The record's index.
        record: usize,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::WrongVersion { version } => {
                write!(f, "site tables of version {version}; this program reads version {VERSION}")
            }
            Self::Truncated { length } => {
                write!(f, "the table ends inside a record ({length} bytes, not a multiple of 8)")
            }
            Self::UnknownKind { record, kind } => {
                write!(f, "record {record}: no site is of kind {kind}")
            }
            Self::BadLength { record } => write!(f, "record {record}: impossible length"),
            Self::BadFlags { record } => write!(f, "record {record}: unknown flags"),
            Self::UnknownConstant { record } => write!(f, "record {record}: no such constant"),
            Self::BadAddress { record } => {
                write!(f, "record {record}: place outside the address space")
            }
        }
    }
}

impl core::error::Error for Error {}

/// Properties of a site in addition to its kind.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Flags(u8);

impl Flags {
    /// No property is known.
    pub const NONE: Self = Self(0);
    /// Text of an alternative, original or replacement, which the kernel may overwrite or copy: not
    /// padded, and a loader must not rewrite it. The wedge hides the feature that would select a
    /// replacement, and emulates an original when it traps ([`Kind::traps`]).
    pub const RECORD_ONLY: Self = Self(1);
    /// The arithmetic flags are dead after the site (inline assembly of a compiler that clobbers
    /// them).
    pub const FLAGS_DEAD: Self = Self(2);

    /// The flags of a record's byte; `None` if it has undefined bits.
    pub const fn from_bits(bits: u8) -> Option<Self> {
        if bits & !3 == 0 { Some(Self(bits)) } else { None }
    }

    /// The record's byte.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// Returns true if all flags of `other` are set.
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The union of both.
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl fmt::Debug for Flags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut list = f.debug_set();
        if self.contains(Self::RECORD_ONLY) {
            list.entry(&"RECORD_ONLY");
        }
        if self.contains(Self::FLAGS_DEAD) {
            list.entry(&"FLAGS_DEAD");
        }
        list.finish()
    }
}

/// A sensitive instruction, or a fused pair of them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Site {
    /// Address of the first byte.
    pub address: u64,
    /// Bytes of the original instructions.
    pub length: u8,
    /// Bytes that belong to the site: the instructions and the NOPs after them.
    pub padded: u8,
    /// The kind of the instruction.
    pub kind: Kind,
    /// Further properties.
    pub flags: Flags,
}

impl Site {
    /// Returns true if a loader may replace the site by a jump.
    pub const fn is_rewritable(&self) -> bool {
        self.padded >= JUMP && !self.flags.contains(Flags::RECORD_ONLY)
    }

    /// The address after the pad.
    pub const fn end(&self) -> u64 {
        self.address.wrapping_add(self.padded as u64)
    }

    /// The record for this site at address `record`; `None` if the distance between the two does
    /// not fit.
    pub fn encode(&self, record: u64) -> Option<[u8; RECORD]> {
        let place = encode_place(self.address, record)?;
        let [a, b, c, d] = place;
        Some([a, b, c, d, self.length, self.padded, self.kind.number(), self.flags.bits()])
    }
}

/// Bytes of `jmp rel32`, the shortest way to a stub that needs no stack.
pub const JUMP: u8 = 5;

/// Longest x86 instruction (SDM vol. 2, 2.3.11).
const LONGEST_INSTRUCTION: u8 = 15;

/// Constants of the address-space layout inside instructions. The numbers are part of the format.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u8)]
pub enum ConstantId {
    /// Start of the kernel's image mapping.
    StartKernelMap = 0,
    /// End of the modules.
    ModulesEnd = 1,
    /// Address of the last page of the fixed mappings.
    FixaddrTop = 2,
    /// First address that no task may use.
    TaskSizeMax = 3,
    /// Start of the per-CPU entry areas.
    CpuEntryArea = 4,
}

impl ConstantId {
    /// All constants, by number.
    pub const ALL: [Self; 5] = [
        Self::StartKernelMap,
        Self::ModulesEnd,
        Self::FixaddrTop,
        Self::TaskSizeMax,
        Self::CpuEntryArea,
    ];

    /// The constant with this number.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// The value in a kernel as it is linked (Linux, Documentation/x86/x86_64/mm.rst, four levels).
    pub const fn upper_half(self) -> u64 {
        match self {
            Self::StartKernelMap => 0xffff_ffff_8000_0000,
            Self::ModulesEnd => 0xffff_ffff_ff00_0000,
            Self::FixaddrTop => 0xffff_ffff_ff7f_f000,
            Self::TaskSizeMax => 0x0000_7fff_ffff_f000,
            Self::CpuEntryArea => 0xffff_fe00_0000_0000,
        }
    }

    /// The value in a process, where the kernel is in the lower half. Constants that are
    /// sign-extended 32-bit immediates in the upper half all fit in 31 bits.
    pub const fn lower_half(self) -> u64 {
        match self {
            Self::StartKernelMap => 0x4000_0000,
            Self::ModulesEnd => 0x7000_0000,
            Self::FixaddrTop => 0x7f7f_f000,
            Self::TaskSizeMax => 0x3fff_ffff_f000,
            Self::CpuEntryArea => 0x6c00_0000_0000,
        }
    }
}

/// An immediate operand that holds a layout constant, or the constant with an offset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Constant {
    /// Address of the immediate field.
    pub address: u64,
    /// Width of the field.
    pub width: Width,
    /// The constant. A loader adds the difference between the new and the old value, so offsets are
    /// preserved.
    pub id: ConstantId,
}

/// Width of an immediate field.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Width {
    /// 4 bytes, sign-extended to 8.
    Signed32,
    /// 8 bytes.
    Full64,
}

/// The sites of an image.
#[derive(Clone, Copy, Debug)]
pub struct Sites<'a> {
    records: Records<'a>,
}

impl<'a> Sites<'a> {
    /// Checks the contents of a section [`SITES_SECTION`] that is loaded (or linked) at `address`.
    pub fn parse(bytes: &'a [u8], address: u64) -> Result<Self, Error> {
        let records = Records::parse(bytes, address)?;
        records.enumerate().try_for_each(|(index, record)| site(index, record).map(drop))?;
        Ok(Self { records })
    }

    /// The number of sites.
    pub fn count(&self) -> usize {
        self.records.bytes.len()
    }

    /// Iterates in the order of the table, which is that of assembly and linking, not that of
    /// addresses.
    pub fn iter(&self) -> impl Iterator<Item = Site> + 'a {
        let records = self.records;
        // `parse` has checked every record.
        records.enumerate().filter_map(|(index, record)| site(index, record).ok())
    }
}

/// The layout constants of an image.
#[derive(Clone, Copy, Debug)]
pub struct Constants<'a> {
    records: Records<'a>,
}

impl<'a> Constants<'a> {
    /// Checks the contents of a section [`CONSTANTS_SECTION`] that is loaded (or linked) at
    /// `address`.
    pub fn parse(bytes: &'a [u8], address: u64) -> Result<Self, Error> {
        let records = Records::parse(bytes, address)?;
        records.enumerate().try_for_each(|(index, record)| constant(index, record).map(drop))?;
        Ok(Self { records })
    }

    /// The number of constants.
    pub fn count(&self) -> usize {
        self.records.bytes.len()
    }

    /// Iterates in the order of the table.
    pub fn iter(&self) -> impl Iterator<Item = Constant> + 'a {
        let records = self.records;
        records.enumerate().filter_map(|(index, record)| constant(index, record).ok())
    }
}

/// Records with their addresses.
#[derive(Clone, Copy, Debug)]
struct Records<'a> {
    bytes: &'a [[u8; RECORD]],
    address: u64,
}

impl<'a> Records<'a> {
    fn parse(bytes: &'a [u8], address: u64) -> Result<Self, Error> {
        let (records, rest) = bytes.as_chunks();
        if !rest.is_empty() {
            return Err(Error::Truncated { length: bytes.len() });
        }
        Ok(Self { bytes: records, address })
    }

    fn enumerate(self) -> impl Iterator<Item = (usize, (u64, [u8; RECORD]))> + 'a {
        let addresses =
            (0..).map(move |index: u64| self.address.wrapping_add(index * RECORD as u64));
        addresses.zip(self.bytes.iter().copied()).enumerate()
    }
}

fn site(index: usize, (address, record): (u64, [u8; RECORD])) -> Result<Site, Error> {
    let [a, b, c, d, length, padded, kind, flags] = record;
    let site = Site {
        address: place(index, address, [a, b, c, d])?,
        length,
        padded,
        kind: Kind::from_number(kind).ok_or(Error::UnknownKind { record: index, kind })?,
        flags: Flags::from_bits(flags).ok_or(Error::BadFlags { record: index })?,
    };
    let possible = match site.kind {
        kind if kind.is_marker() => length == 0,
        kind if kind.is_pair() => (2..=2 * LONGEST_INSTRUCTION).contains(&length),
        _ => (1..=LONGEST_INSTRUCTION).contains(&length),
    };
    if !possible || padded < length || site.address.checked_add(padded.into()).is_none() {
        return Err(Error::BadLength { record: index });
    }
    Ok(site)
}

fn constant(index: usize, (address, record): (u64, [u8; RECORD])) -> Result<Constant, Error> {
    let [a, b, c, d, width, id, 0, 0] = record else {
        return Err(Error::BadFlags { record: index });
    };
    let width = match width {
        4 => Width::Signed32,
        8 => Width::Full64,
        _ => return Err(Error::UnknownConstant { record: index }),
    };
    let id = ConstantId::from_number(id).ok_or(Error::UnknownConstant { record: index })?;
    Ok(Constant { address: place(index, address, [a, b, c, d])?, width, id })
}

fn place(index: usize, record: u64, distance: [u8; 4]) -> Result<u64, Error> {
    let distance = i32::from_le_bytes(distance).into();
    record.checked_add_signed(distance).ok_or(Error::BadAddress { record: index })
}

fn encode_place(address: u64, record: u64) -> Option<[u8; 4]> {
    let distance = address.wrapping_sub(record).cast_signed();
    Some(i32::try_from(distance).ok()?.to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    const AT: u64 = 0xffff_ffff_8200_0000;

    fn cli() -> Site {
        Site {
            address: 0xffff_ffff_8100_1234,
            length: 1,
            padded: 8,
            kind: Kind::Cli,
            flags: Flags::FLAGS_DEAD,
        }
    }

    #[test]
    fn a_site_goes_there_and_back() {
        let second = Site { address: AT + 100, kind: Kind::Announce, length: 0, ..cli() };
        let mut table = cli().encode(AT).unwrap().to_vec();
        table.extend(second.encode(AT + 8).unwrap());
        let sites = Sites::parse(&table, AT).unwrap();
        assert_eq!(sites.count(), 2);
        assert_eq!(sites.iter().collect::<Vec<_>>(), [cli(), second]);
        assert_eq!(cli().encode(1 << 40), None, "too far away");
    }

    #[test]
    fn an_empty_table_is_a_table() {
        assert_eq!(Sites::parse(&[], AT).unwrap().count(), 0);
        assert_eq!(Constants::parse(&[], AT).unwrap().iter().next(), None);
    }

    #[test]
    fn wrong_sites_are_refused() {
        let good = cli().encode(AT).unwrap();
        let with = |index: usize, value: u8| {
            let mut record = good;
            record[index] = value;
            Sites::parse(&record, AT).map(drop)
        };
        assert_eq!(with(4, 1), Ok(()));
        assert_eq!(with(4, 0), Err(Error::BadLength { record: 0 }));
        assert_eq!(with(4, 16), Err(Error::BadLength { record: 0 }));
        assert_eq!(with(5, 0), Err(Error::BadLength { record: 0 }));
        assert_eq!(with(6, 255), Err(Error::UnknownKind { record: 0, kind: 255 }));
        assert_eq!(with(7, 4), Err(Error::BadFlags { record: 0 }));
        assert_eq!(Sites::parse(&good[..7], AT).map(drop), Err(Error::Truncated { length: 7 }));
        // 1 - 2^31: before the address space.
        let below = [1, 0, 0, 0x80, 1, 8, 0, 0];
        assert_eq!(Sites::parse(&below, 0).map(drop), Err(Error::BadAddress { record: 0 }));
        let end = Site { address: u64::MAX, ..cli() }.encode(u64::MAX - 100).unwrap();
        let end = Sites::parse(&end, u64::MAX - 100).map(drop);
        assert_eq!(end, Err(Error::BadLength { record: 0 }));
    }

    #[test]
    fn constants() {
        let record = |width, id, zero| [2, 0, 0, 0, width, id, zero, 0];
        let all: Vec<u8> = [record(4, 0, 0), record(8, 3, 0)].concat();
        let constants: Vec<_> = Constants::parse(&all, 0x1000).unwrap().iter().collect();
        assert_eq!(
            constants,
            [
                Constant {
                    address: 0x1002,
                    width: Width::Signed32,
                    id: ConstantId::StartKernelMap
                },
                Constant { address: 0x100a, width: Width::Full64, id: ConstantId::TaskSizeMax },
            ]
        );
        let wrong = |record: [u8; 8]| Constants::parse(&record, 0).map(drop).unwrap_err();
        assert_eq!(wrong(record(2, 0, 0)), Error::UnknownConstant { record: 0 });
        assert_eq!(wrong(record(4, 5, 0)), Error::UnknownConstant { record: 0 });
        assert_eq!(wrong(record(4, 0, 1)), Error::BadFlags { record: 0 });
    }

    #[test]
    fn constants_that_are_32_bits_wide_fit_in_both_halves() {
        for id in [ConstantId::StartKernelMap, ConstantId::ModulesEnd, ConstantId::FixaddrTop] {
            for value in [id.upper_half(), id.lower_half()] {
                assert!(i32::try_from(value.cast_signed()).is_ok(), "{id:?}");
            }
        }
    }

    #[test]
    fn sections_by_name() {
        assert_eq!(section(SITES_SECTION), Some(Ok(Table::Sites)));
        assert_eq!(section(CONSTANTS_SECTION), Some(Ok(Table::Constants)));
        assert_eq!(section("parador_sites_2"), Some(Err(Error::WrongVersion { version: 2 })));
        assert_eq!(section("parador_sites_"), None);
        assert_eq!(section(".text"), None);
    }

    #[test]
    fn kinds_keep_their_numbers() {
        for (number, kind) in Kind::ALL.iter().enumerate() {
            assert_eq!(usize::from(kind.number()), number);
            assert_eq!(Kind::from_number(kind.number()), Some(*kind));
        }
        assert_eq!(Kind::from_number(Kind::ALL.len() as u8), None);
        // Numbers in existing binaries.
        assert_eq!(Kind::Swapgs.number(), 39);
        assert_eq!(Kind::PageTable.number(), 67);
        assert_eq!(Kind::Retract.number(), 69);
    }
}
