//! The state of a virtual processor.

use hw_x86::msr::efer;
use hw_x86::paging::{cr0, cr4};
use vmm_cpu::Event;
use vmm_cpu::vcpu::Segment;
use vmm_cpu::walk::{Intent, PageFault, Paging};
use vmm_mem::GuestMemory;

use crate::segment::{DATA_64, USABLE_CODE_64};

/// `RFLAGS` bits (APM vol. 2, section 3.1.6).
#[allow(missing_docs, reason = "the manual's names")]
pub mod rflags {
    pub const FIXED: u64 = 1 << 1;
    pub const TF: u64 = 1 << 8;
    pub const IF: u64 = 1 << 9;
    pub const IOPL: u64 = 3 << 12;
    pub const NT: u64 = 1 << 14;
    pub const RF: u64 = 1 << 16;
    pub const VM: u64 = 1 << 17;
    pub const AC: u64 = 1 << 18;
    pub const ID: u64 = 1 << 21;
    /// What programs may change: arithmetic flags, `DF`, `AC`, `ID`, `NT`, `RF`, `TF`.
    pub const OPEN: u64 = 0x0025_4dd5;
}

/// Registers that the processor of the host has while the guest runs. Entry code knows the offsets.
#[derive(Clone, Debug, Default)]
#[repr(C)]
pub struct Frame {
    /// General registers, numbered as instructions encode them.
    pub gpr: [u64; 16],
    /// Instruction pointer.
    pub rip: u64,
    /// Flags as the host's processor has them: see [`VirtualCpu::held_flags`].
    pub rflags: u64,
}

/// A descriptor-table register.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Table {
    /// Linear address of the table.
    pub base: u64,
    /// Its last byte.
    pub limit: u16,
}

/// Linear addresses that mean the same in every address space, whatever the current tables say: where a kernel is that has been moved to
/// the half of the address space that programs have. They are resolved by a root of their own.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Shared {
    /// First address.
    pub start: u64,
    /// First address behind.
    pub end: u64,
    /// Guest-physical address of the root table.
    pub root: u64,
}

/// A virtual processor in 64-bit mode.
#[derive(Clone, Debug)]
#[repr(C)]
pub struct VirtualCpu {
    /// Registers of the guest.
    pub frame: Frame,
    /// Bits of `RFLAGS` that the host's processor does not hold; the other bits are 0. `IF`,
    /// always: rewritten sites change it in place. `AC` at privilege level 0: that code runs at the
    /// host's level 3, where `AC` makes unaligned accesses fault (APM vol. 2, 3.1.6).
    pub held_flags: u64,
    /// Not 0: the guest is not to go on once interrupts are on, before somebody has looked at what waits.
    pub attention: u8,
    /// Current privilege level, 0 or 3.
    pub cpl: u8,
    /// `KernelGSbase`.
    pub kernel_gs_base: u64,
    /// Page-fault address.
    pub cr2: u64,
    /// Page-table root and process-context identifier.
    pub cr3: u64,
    /// Control register 0.
    pub cr0: u64,
    /// Control register 4.
    pub cr4: u64,
    /// Extended features.
    pub efer: u64,
    /// `STAR`.
    pub star: u64,
    /// `LSTAR`.
    pub lstar: u64,
    /// `CSTAR`.
    pub cstar: u64,
    /// `SFMASK`.
    pub sfmask: u64,
    /// `SYSENTER_CS`, `_ESP`, `_EIP`.
    pub sysenter: [u64; 3],
    /// `PAT`.
    pub pat: u64,
    /// `XCR0`.
    pub xcr0: u64,
    /// Debug registers; 4 and 5 are 6 and 7.
    pub dr: [u64; 8],
    /// Global descriptor table.
    pub gdtr: Table,
    /// Interrupt descriptor table.
    pub idtr: Table,
    /// `ES`, `CS`, `SS`, `DS`, `FS`, `GS`, as instructions encode them; the bases of the last two are the host's.
    pub segments: [Segment; 6],
    /// Local descriptor table.
    pub ldtr: Segment,
    /// Task register.
    pub tr: Segment,
    /// See [`Shared`].
    pub shared: Shared,
    /// Where the ring-3 code segment was loaded from last, to spare the look into the table at each return to a program.
    pub(crate) user_code: Segment,
}

/// Index of `CS` in [`VirtualCpu::segments`].
pub(crate) const CS: usize = 1;
/// Index of `SS`.
pub(crate) const SS: usize = 2;
pub(crate) const FS: usize = 4;
pub(crate) const GS: usize = 5;

impl VirtualCpu {
    /// A processor as a boot loader leaves it for a 64-bit kernel: paging on, interrupts off, flat segments.
    pub const fn new() -> Self {
        let data = Segment { selector: 0, attrib: DATA_64, limit: u32::MAX, base: 0 };
        let none = Segment { selector: 0, attrib: 0, limit: 0, base: 0 };
        let code = Segment { attrib: USABLE_CODE_64, ..data };
        Self {
            frame: Frame { gpr: [0; 16], rip: 0, rflags: rflags::FIXED },
            held_flags: 0,
            attention: 0,
            cpl: 0,
            kernel_gs_base: 0,
            cr2: 0,
            cr3: 0,
            cr0: cr0::PE | cr0::NE | cr0::ET | cr0::WP | cr0::PG,
            cr4: cr4::PAE,
            efer: efer::LME | efer::LMA | efer::NXE | efer::SCE,
            star: 0,
            lstar: 0,
            cstar: 0,
            sfmask: 0,
            sysenter: [0; 3],
            // Its value after reset (APM vol. 2, section 7.8.1).
            pat: 0x0007_0406_0007_0406,
            xcr0: 1,
            dr: [0, 0, 0, 0, 0, 0, 0xffff_0ff0, 0x400],
            gdtr: Table { base: 0, limit: 0 },
            idtr: Table { base: 0, limit: 0 },
            segments: [data, code, data, data, data, data],
            ldtr: none,
            tr: none,
            shared: Shared { start: 0, end: 0, root: 0 },
            user_code: none,
        }
    }

    /// `RFLAGS` as the guest sees them.
    pub fn rflags(&self) -> u64 {
        let held = self.held();
        self.frame.rflags & !held | self.held_flags & held | rflags::FIXED
    }

    /// Sets `RFLAGS`.
    pub fn set_rflags(&mut self, value: u64) {
        let held = self.held();
        self.held_flags = value & held;
        self.frame.rflags = value & !held & (rflags::OPEN | rflags::IOPL) | rflags::FIXED;
    }

    /// The bits of [`VirtualCpu::held_flags`] that count at the current privilege level.
    fn held(&self) -> u64 {
        if self.cpl == 0 { rflags::IF | rflags::AC } else { rflags::IF }
    }

    /// Changes the privilege level; the guest sees the same `RFLAGS`.
    pub(crate) fn set_level(&mut self, level: u8) {
        let flags = self.rflags();
        self.cpl = level;
        self.set_rflags(flags);
    }

    /// The guest has stopped with these flags in the host's processor. `AC` at privilege level 0
    /// comes from a `POPF` that is no site.
    pub fn found_flags(&mut self, flags: u64) {
        let moved = flags & self.held() & rflags::AC;
        self.held_flags |= moved;
        self.frame.rflags = flags & !moved;
    }

    /// The process-context identifier of the current space.
    pub fn pcid(&self) -> u16 {
        if self.cr4 & cr4::PCIDE != 0 { (self.cr3 & 0xfff) as u16 } else { 0 }
    }

    /// How `linear` is translated for accesses of the current privilege level, or of level 0.
    pub fn paging(&self, linear: u64, user: bool) -> Paging {
        let shared = self.shared.start <= linear && linear < self.shared.end;
        Paging {
            cr0: self.cr0,
            cr3: if shared { self.shared.root } else { self.cr3 },
            cr4: self.cr4,
            efer: self.efer,
            rflags: self.rflags(),
            user,
        }
    }

    /// Goes through the pieces of memory that an access touches: offset in the access, guest-physical address, length.
    fn pieces(
        &self,
        memory: &GuestMemory,
        linear: u64,
        length: usize,
        intent: Intent,
        mut act: impl FnMut(usize, u64, usize),
    ) -> Result<(), PageFault> {
        // An access is at most a page long, so it is in two pages at most: both are checked before the first is used.
        let (first, left) = self.paging(linear, false).translate(memory, linear, intent, true)?;
        let here = length.min(usize::try_from(left).unwrap_or(length));
        let rest = if here < length {
            let next = linear.wrapping_add(here as u64);
            let (second, _) = self.paging(next, false).translate(memory, next, intent, true)?;
            Some(second)
        } else {
            None
        };
        act(0, first, here);
        if let Some(second) = rest {
            act(here, second, length - here);
        }
        Ok(())
    }

    /// Reads memory with the rights of privilege level 0. Where nothing answers, all bits are 1.
    pub fn read(&self, memory: &GuestMemory, linear: u64, to: &mut [u8]) -> Result<(), PageFault> {
        self.pieces(memory, linear, to.len(), Intent::Read, |offset, address, length| {
            let part = &mut to[offset..offset + length];
            if memory.read_slice(address, part).is_err() {
                part.fill(0xff);
            }
        })
    }

    /// Writes memory with the rights of privilege level 0. Where nothing answers, nothing happens.
    pub fn write(&self, memory: &GuestMemory, linear: u64, from: &[u8]) -> Result<(), PageFault> {
        self.pieces(memory, linear, from.len(), Intent::Write, |offset, address, length| {
            // What is not memory ignores writes.
            let _ = memory.write_slice(address, &from[offset..offset + length]);
        })
    }

    /// Reads a little-endian value of `size` bytes, 1 to 8.
    pub(crate) fn read_value(
        &self,
        memory: &GuestMemory,
        linear: u64,
        size: usize,
    ) -> Result<u64, PageFault> {
        let mut bytes = [0; 8];
        self.read(memory, linear, &mut bytes[..size.min(8)])?;
        Ok(u64::from_le_bytes(bytes))
    }

    pub(crate) fn write_value(
        &self,
        memory: &GuestMemory,
        linear: u64,
        size: usize,
        value: u64,
    ) -> Result<(), PageFault> {
        self.write(memory, linear, &value.to_le_bytes()[..size.min(8)])
    }

    /// The page fault as an exception: `CR2` says where.
    pub fn page_fault(&mut self, fault: PageFault) -> Event {
        self.cr2 = fault.address;
        Event::exception_code(crate::vector::PAGE_FAULT, fault.code)
    }
}

impl Default for VirtualCpu {
    fn default() -> Self {
        Self::new()
    }
}

/// Whether an address is canonical with 48 bits (APM vol. 2, section 1.1.3).
pub(crate) use vmm_cpu::msr::is_canonical;
