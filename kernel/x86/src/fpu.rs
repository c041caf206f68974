//! State of guests that stays loaded in the CPU: FPU and vector registers, XCR0, debug address
//! registers and TSC_AUX.
//!
//! # Invariants
//!
//! * The registers stay loaded for the vCPU that ran last on the CPU, until another vCPU runs
//!   there; user tasks cannot read them (CR0.TS is set). TSC_AUX, which tasks can read, is 0
//!   whenever a task other than that vCPU's VMM runs.

use core::arch::asm;
use core::cell::Cell;
use core::sync::atomic::{AtomicBool, Ordering};

use abi::Status;
use abi::vcpu::x86::VcpuState;
use hw_x86::msr;
use hw_x86::paging::xcr0;
use kernel_core::Result;
use kernel_core::object::Vcpu;
use kernel_core::pool::{Account, Frame, Handle, Memory};

use crate::features::{Features, features};
use crate::io::{clear_ts, rdmsr, read_xcr0, set_ts, write_xcr0, wrmsr};
use crate::{X86, cpu, vectors};

/// The CPU has TSC_AUX.
static HAS_TSC_AUX: AtomicBool = AtomicBool::new(false);

/// Called on the first CPU, before any guest runs.
pub fn init() {
    HAS_TSC_AUX.store(features().rdtscp, Ordering::Relaxed);
}

/// Owner of the state that is loaded in a CPU.
pub struct Owner {
    /// vCPU whose FPU and debug registers are loaded.
    vcpu: Cell<Option<Handle<Vcpu<X86>>>>,
    /// The same vCPU if its TSC_AUX is loaded, too; then its VMM's address space is loaded.
    of_tsc_aux: Cell<Option<Handle<Vcpu<X86>>>>,
    /// TSC_AUX of `vcpu`, while the CPU's is 0.
    saved_tsc_aux: Cell<u32>,
}

impl Owner {
    /// State before the first guest.
    pub(crate) const fn new() -> Self {
        Self { vcpu: Cell::new(None), of_tsc_aux: Cell::new(None), saved_tsc_aux: Cell::new(0) }
    }

    /// vCPU whose registers are loaded, TSC_AUX excepted.
    #[inline(always)]
    pub fn vcpu(&self) -> Option<Handle<Vcpu<X86>>> {
        self.vcpu.get()
    }

    /// vCPU whose registers are all loaded.
    #[inline(always)]
    pub fn of_all(&self) -> Option<Handle<Vcpu<X86>>> {
        self.of_tsc_aux.get()
    }

    /// Saves TSC_AUX and sets it to 0, before a task other than the last guest's VMM runs.
    #[cold]
    #[inline(never)]
    pub fn clear_tsc_aux(&self) {
        self.of_tsc_aux.set(None);
        cpu::current().guest_tsc_aux.store(false, Ordering::Relaxed);
        if HAS_TSC_AUX.load(Ordering::Relaxed) {
            // SAFETY: the register exists and does not affect memory.
            unsafe {
                self.saved_tsc_aux.set(rdmsr(msr::TSC_AUX) as u32);
                wrmsr(msr::TSC_AUX, 0);
            }
        }
    }

    /// Loads TSC_AUX of the owner again.
    #[inline(always)]
    pub fn reload_tsc_aux(&self) {
        self.load_tsc_aux(self.saved_tsc_aux.get());
    }

    #[inline(always)]
    fn load_tsc_aux(&self, aux: u32) {
        if HAS_TSC_AUX.load(Ordering::Relaxed) {
            // SAFETY: the register exists and does not affect memory; its upper half is reserved.
            unsafe { wrmsr(msr::TSC_AUX, aux.into()) };
        }
        self.of_tsc_aux.set(self.vcpu.get());
        cpu::current().guest_tsc_aux.store(true, Ordering::Relaxed);
    }

    /// Loads the registers of vCPU `name`, whose state is `new`, after saving those of the owner up
    /// to now, whose state is `old`; a destroyed vCPU has none.
    #[inline(always)]
    pub fn switch(
        &self,
        old: Option<&ExtendedState>,
        name: Option<Handle<Vcpu<X86>>>,
        new: &ExtendedState,
    ) {
        let have = features();
        if self.of_tsc_aux.get().is_some() {
            self.clear_tsc_aux();
        }
        self.vcpu.set(name);
        if let Some(old) = old {
            old.save_xcr0_if(have);
            old.tsc_aux.set(self.saved_tsc_aux.get());
        }
        self.load_tsc_aux(new.tsc_aux.get());
        // SAFETY: TS is cleared around FPU instructions only. XCR0 values are valid for the
        // machine.
        unsafe {
            clear_ts();
            if have.xsave {
                write_xcr0(have.xcr0_mask);
            }
            if let Some(old) = old {
                old.save(have);
            }
            new.load(have);
        }
        set_ts();
    }
}

/// Such state of a vCPU while it is not loaded in a CPU.
#[derive(Clone)]
pub struct ExtendedState {
    frame: Frame,
    /// XSAVE area, or FXSAVE area of a CPU without XSAVE.
    area: *mut u8,
    xcr0: Cell<u64>,
    debug: Cell<[u64; 4]>,
    tsc_aux: Cell<u32>,
}

fn area_frames() -> u32 {
    features().xsave_size.div_ceil(abi::PAGE_SIZE as usize) as u32
}

impl ExtendedState {
    /// Allocates state with reset values.
    pub fn new(memory: &Memory, factory: Account) -> Result<Self> {
        const LEGACY_FCW: usize = 0;
        const LEGACY_MXCSR: usize = 24;
        let frame = memory.alloc_raw(factory, area_frames())?;
        let area = memory.address(frame);
        // SAFETY: inside the area; an XSAVE area whose header is zero restores initial state.
        unsafe {
            area.add(LEGACY_FCW).cast::<u16>().write(0x37f);
            area.add(LEGACY_MXCSR).cast::<u32>().write(0x1f80);
        }
        Ok(Self {
            frame,
            area,
            xcr0: Cell::new(xcr0::X87),
            debug: Cell::new([0; 4]),
            tsc_aux: Cell::new(0),
        })
    }

    /// Frees the state.
    pub fn free(&self, memory: &Memory) {
        memory.free_raw(self.frame, area_frames());
    }

    /// Extended-state components that the guest has enabled.
    pub fn xcr0(&self) -> u64 {
        self.xcr0.get()
    }

    /// Saves XCR0 from the CPU, which holds this state, where the guest may have changed it without
    /// an exit.
    pub fn save_xcr0(&self) {
        self.save_xcr0_if(features());
    }

    #[inline(always)]
    fn save_xcr0_if(&self, have: &Features) {
        if have.xsave && have.is_tcg {
            // SAFETY: with XSAVE the kernel has set CR4.OSXSAVE.
            self.xcr0.set(unsafe { read_xcr0() } & have.xcr0_mask);
        }
    }

    /// Sets XCR0. Fails for a value that the machine does not support. `is_loaded`: the CPU holds
    /// this state.
    pub fn set_xcr0(&self, new: u64, is_loaded: bool) -> Result<()> {
        let avx512 = new & xcr0::AVX512;
        let valid = new & xcr0::X87 != 0
            && new & !features().xcr0_mask == 0
            && (new & xcr0::AVX == 0 || new & xcr0::SSE != 0)
            && (avx512 == 0 || avx512 == xcr0::AVX512 && new & xcr0::AVX != 0);
        if !valid {
            return Err(Status::BadArgument);
        }
        self.xcr0.set(new);
        if is_loaded && features().xsave {
            // SAFETY: the value was checked against the machine's features.
            unsafe { write_xcr0(new) };
        }
        Ok(())
    }

    /// Copies the SSE registers to the state page. `is_loaded`: the CPU holds this state.
    pub fn read_vectors(&self, state: &VcpuState, is_loaded: bool) {
        let mut vectors = [[0; 2]; 16];
        if is_loaded {
            vectors::from_cpu(&mut vectors);
        } else {
            // SAFETY: the vCPU's own area, which is written only by the CPU that holds its
            // registers, under the lock.
            vectors = unsafe { vectors::from_area(self.area) };
        }
        for (to, from) in state.xmm.iter().zip(vectors) {
            to[0].set(from[0]);
            to[1].set(from[1]);
        }
    }

    /// Copies the SSE registers from the state page. `is_loaded`: the CPU holds this state.
    pub fn write_vectors(&self, state: &VcpuState, is_loaded: bool) {
        let vectors =
            core::array::from_fn(|index| [state.xmm[index][0].get(), state.xmm[index][1].get()]);
        if is_loaded {
            vectors::to_cpu(&vectors);
        } else {
            // SAFETY: as above.
            unsafe { vectors::to_area(self.area, &vectors, features().xsave) };
        }
    }

    /// # Safety
    /// The CPU holds this state, TS is clear, and XCR0 has every component.
    #[inline(always)]
    unsafe fn save(&self, have: &Features) {
        // SAFETY: the area is `xsave_size` long and page-aligned. Debug registers do not affect
        // memory.
        unsafe {
            if have.xsave {
                asm!("xsave64 [{}]", in(reg) self.area, in("eax") u32::MAX, in("edx") u32::MAX, options(nostack));
            } else {
                asm!("fxsave64 [{}]", in(reg) self.area, options(nostack));
            }
            let (d0, d1, d2, d3): (u64, u64, u64, u64);
            asm!("mov {}, dr0", "mov {}, dr1", "mov {}, dr2", "mov {}, dr3",
                out(reg) d0, out(reg) d1, out(reg) d2, out(reg) d3, options(nomem, nostack));
            self.debug.set([d0, d1, d2, d3]);
        }
    }

    /// # Safety
    /// TS is clear, and XCR0 has every component.
    #[inline(always)]
    unsafe fn load(&self, have: &Features) {
        static ZERO: u32 = 0;
        // SAFETY: as in `save`; the XCR0 value is valid for the machine.
        unsafe {
            if !have.loads_error_pointers {
                // Else those of the guest before stay in the CPU (CVE-2006-1056).
                asm!("fnclex", "emms", "fild dword ptr [{}]", in(reg) &ZERO, options(nostack));
            }
            if have.xsave {
                asm!("xrstor64 [{}]", in(reg) self.area, in("eax") u32::MAX, in("edx") u32::MAX, options(nostack));
                write_xcr0(self.xcr0.get());
            } else {
                asm!("fxrstor64 [{}]", in(reg) self.area, options(nostack));
            }
            let [d0, d1, d2, d3] = self.debug.get();
            asm!("mov dr0, {}", "mov dr1, {}", "mov dr2, {}", "mov dr3, {}",
                in(reg) d0, in(reg) d1, in(reg) d2, in(reg) d3, options(nomem, nostack));
        }
    }
}
