//! State of a virtual CPU.

use hw_walk::{Intent, PageFault, Paging};
use hw_x86::msr::efer;
use hw_x86::paging::{cr0, cr4};
use vmm_mem::GuestMemory;
use vmm_x86::Event;
use vmm_x86::Segment;
use vmm_x86::walk::GuestTables;

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
    /// Flags that user mode may change: arithmetic flags, `DF`, `AC`, `ID`, `NT`, `RF`, `TF`.
    pub const USER_WRITABLE: u64 = 0x0025_4dd5;
}

/// Registers that the host CPU holds while the guest runs. Entry code depends on the offsets.
#[derive(Clone, Debug, Default)]
#[repr(C)]
pub struct RegisterFrame {
    /// General registers, in the order of their encoding.
    pub gpr: [u64; 16],
    /// Instruction pointer.
    pub rip: u64,
    /// Flags as the host CPU holds them: see [`VirtualCpu::held_flags`].
    pub rflags: u64,
}

/// Descriptor-table register.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DescriptorTable {
    /// Linear address.
    pub base: u64,
    /// Limit: offset of the last byte.
    pub limit: u16,
}

/// Range of linear addresses with the same translation in every address space: the place of a
/// kernel that was moved to the user half. Its own root page table translates it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SharedRange {
    /// First linear address.
    pub start: u64,
    /// End, exclusive.
    pub end: u64,
    /// Guest-physical address of the root page table.
    pub root: u64,
}

/// Virtual CPU in 64-bit mode.
#[derive(Clone, Debug)]
#[repr(C)]
pub struct VirtualCpu {
    /// Registers of the guest.
    pub frame: RegisterFrame,
    /// Bits of `RFLAGS` that the host CPU does not hold; all other bits are 0. `IF` in all cases:
    /// rewritten sites change it in place. `AC` at privilege level 0: that code runs at level 3 of
    /// the host, where `AC` makes unaligned accesses fault (APM vol. 2, 3.1.6).
    pub held_flags: u64,
    /// Current privilege level, 0 or 3.
    pub cpl: u8,
    /// `KernelGSbase`.
    pub kernel_gs_base: u64,
    /// Page-fault address.
    pub cr2: u64,
    /// Root page table and PCID.
    pub cr3: u64,
    /// Control register 0.
    pub cr0: u64,
    /// Control register 4.
    pub cr4: u64,
    /// Extended feature enable register.
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
    /// Debug registers; 4 and 5 are aliases of 6 and 7.
    pub dr: [u64; 8],
    /// Global descriptor table.
    pub gdtr: DescriptorTable,
    /// Interrupt descriptor table.
    pub idtr: DescriptorTable,
    /// `ES`, `CS`, `SS`, `DS`, `FS`, `GS`, in the order of their encoding; the host CPU holds the
    /// bases of the last two.
    pub segments: [Segment; 6],
    /// Local descriptor table.
    pub ldtr: Segment,
    /// Task register.
    pub tr: Segment,
    /// Range with the same translation in every address space.
    pub shared: SharedRange,
    /// User code segment that was loaded last: a cache for returns to user mode.
    pub(crate) user_code: Segment,
}

/// Index of `CS` in [`VirtualCpu::segments`].
pub(crate) const CS: usize = 1;
/// Index of `SS`.
pub(crate) const SS: usize = 2;
pub(crate) const FS: usize = 4;
pub(crate) const GS: usize = 5;

impl VirtualCpu {
    /// Creates a CPU in the state in which a boot loader enters a 64-bit kernel: paging on,
    /// interrupts off, flat segments.
    pub const fn new() -> Self {
        let data = Segment { selector: 0, attrib: DATA_64, limit: u32::MAX, base: 0 };
        let none = Segment { selector: 0, attrib: 0, limit: 0, base: 0 };
        let code = Segment { attrib: USABLE_CODE_64, ..data };
        Self {
            frame: RegisterFrame { gpr: [0; 16], rip: 0, rflags: rflags::FIXED },
            held_flags: 0,
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
            // Reset value (APM vol. 2, section 7.8.1).
            pat: 0x0007_0406_0007_0406,
            xcr0: 1,
            dr: [0, 0, 0, 0, 0, 0, 0xffff_0ff0, 0x400],
            gdtr: DescriptorTable { base: 0, limit: 0 },
            idtr: DescriptorTable { base: 0, limit: 0 },
            segments: [data, code, data, data, data, data],
            ldtr: none,
            tr: none,
            shared: SharedRange { start: 0, end: 0, root: 0 },
            user_code: none,
        }
    }

    /// Returns `RFLAGS` as the guest sees them.
    pub fn rflags(&self) -> u64 {
        let held = self.held();
        self.frame.rflags & !held | self.held_flags & held | rflags::FIXED
    }

    /// Sets `RFLAGS` as the guest sees them.
    pub fn set_rflags(&mut self, value: u64) {
        let held = self.held();
        self.held_flags = value & held;
        self.frame.rflags = value & !held & (rflags::USER_WRITABLE | rflags::IOPL) | rflags::FIXED;
    }

    /// Returns the bits of [`VirtualCpu::held_flags`] that apply at the current privilege level.
    fn held(&self) -> u64 {
        if self.cpl == 0 { rflags::IF | rflags::AC } else { rflags::IF }
    }

    /// Changes the privilege level; `RFLAGS` as the guest sees them stay the same.
    pub(crate) fn set_level(&mut self, level: u8) {
        let flags = self.rflags();
        self.cpl = level;
        self.set_rflags(flags);
    }

    /// Takes over the flags of the host CPU after the guest has stopped. `AC` at privilege level 0
    /// results from a `POPF` without a patch site.
    pub fn sync_flags(&mut self, flags: u64) {
        let moved = flags & self.held() & rflags::AC;
        self.held_flags |= moved;
        self.frame.rflags = flags & !moved;
    }

    /// Returns the PCID of the current address space.
    pub fn pcid(&self) -> u16 {
        if self.cr4 & cr4::PCIDE != 0 { (self.cr3 & 0xfff) as u16 } else { 0 }
    }

    /// Returns the translation parameters of `linear`, for accesses at the current privilege level,
    /// or at level 0.
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

    /// Splits an access at page boundaries. `act` receives the offset in the access, the
    /// guest-physical address and the length.
    fn pieces(
        &self,
        memory: &GuestMemory,
        linear: u64,
        length: usize,
        intent: Intent,
        mut act: impl FnMut(usize, u64, usize),
    ) -> Result<(), PageFault> {
        // An access spans at most two pages; both are translated before the first is accessed.
        let tables = GuestTables(memory);
        let first = self.paging(linear, false).translate(&tables, linear, intent, true)?;
        let here = length.min(usize::try_from(first.left()).unwrap_or(length));
        let rest = if here < length {
            let next = linear.wrapping_add(here as u64);
            let second = self.paging(next, false).translate(&tables, next, intent, true)?;
            Some(second.address)
        } else {
            None
        };
        act(0, first.address, here);
        if let Some(second) = rest {
            act(here, second, length - here);
        }
        Ok(())
    }

    /// Reads memory with the rights of privilege level 0. Unassigned addresses read as all ones.
    pub fn read(&self, memory: &GuestMemory, linear: u64, to: &mut [u8]) -> Result<(), PageFault> {
        self.pieces(memory, linear, to.len(), Intent::Read, |offset, address, length| {
            let part = &mut to[offset..offset + length];
            if memory.read_slice(address, part).is_err() {
                part.fill(0xff);
            }
        })
    }

    /// Writes memory with the rights of privilege level 0. Writes to unassigned addresses are
    /// dropped.
    pub fn write(&self, memory: &GuestMemory, linear: u64, from: &[u8]) -> Result<(), PageFault> {
        self.pieces(memory, linear, from.len(), Intent::Write, |offset, address, length| {
            // Writes to unassigned addresses are dropped.
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

    /// Sets `CR2` and returns the page fault as an exception.
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

/// Returns whether an address is canonical with 48 bits (APM vol. 2, section 1.1.3).
pub(crate) use vmm_x86::msr::is_canonical;
