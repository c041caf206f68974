//! Guests on AMD SVM: the world switch, what the kernel settles itself, and the exchange of state
//! with the VMM through the state page (`abi::vcpu`).
//!
//! # Invariants
//!
//! * While a guest runs, this CPU does not hold the kernel lock. Whoever takes the vCPU apart first makes the CPU
//!   leave the guest (`Arch::shootdown`), and everything about the vCPU is looked up again afterwards.
//! * The VMM chooses guest state only: intercepts, maps, nested tables and ASIDs are the kernel's, so whatever it
//!   writes harms its own guest at most (a state that the processor refuses is an exit).
//! * An event is in exactly one place: the state page's `inject`, the VMCB's `EVENTINJ`, its virtual interrupt, or delivered.
//! * FPU and debug address registers stay those of the vCPU that ran last on the CPU, until another one runs there; host
//!   programs cannot read them. TSC_AUX, which they can, is 0 whenever another task than that vCPU's VMM runs.

use core::arch::asm;
use core::cell::{Cell, UnsafeCell};
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use abi::vcpu::{Segment, VcpuState, exit as kernel_exit, gpr, group, window};
use abi::{ABI_VERSION, Status};
use hw_x86::msr;
use hw_x86::paging::{cr0, xcr0};
use hw_x86::vmcb::{ControlArea, Vmcb, VmcbSegment, event, exit, npf, tlb_control, v_intr};
use kernel_core::arch::Arch;
use kernel_core::object::{Notification, Task, Thread, Vcpu, Vm};
use kernel_core::pool::{Factory, Frame, Handle, Memory};
use kernel_core::{Kernel, count};

use crate::cpu::{self, MAX_CPUS};
use crate::entry::Context;
use crate::features::{Features, features};
use crate::io::{rdmsr, read_cr0, read_xcr0, write_cr0, write_xcr0, wrmsr};
use crate::memory::IMAGE_OFFSET;
use crate::run::{Guard, X86, arm, handle_pending, local, lock, unlock};
use crate::{vectors, virq};

// ---- permission maps -------------------------------------------------------------------------------

/// Maps that all guests share: every port and every MSR intercepted, but for those MSRs that the world switch
/// carries with the guest.
#[repr(C, align(4096))]
struct PermissionMaps {
    io: [u8; 3 * 4096],
    msr: [u8; 2 * 4096],
}

struct SharedMaps(UnsafeCell<PermissionMaps>);

// SAFETY: written only by `init_maps`, before any guest runs.
unsafe impl Sync for SharedMaps {}

static MAPS: SharedMaps =
    SharedMaps(UnsafeCell::new(PermissionMaps { io: [0xff; 3 * 4096], msr: [0xff; 2 * 4096] }));
static IS_READY: AtomicBool = AtomicBool::new(false);
/// The machine has TSC_AUX.
static HAS_TSC_AUX: AtomicBool = AtomicBool::new(false);

/// MSRs that a guest reads and writes without an exit: VMLOAD and VMSAVE switch them.
const SWITCHED: [u32; 10] = [
    msr::SYSENTER_CS,
    msr::SYSENTER_ESP,
    msr::SYSENTER_EIP,
    msr::STAR,
    msr::LSTAR,
    msr::CSTAR,
    msr::SFMASK,
    msr::FS_BASE,
    msr::GS_BASE,
    msr::KERNEL_GS_BASE,
];

/// Byte and first bit of an MSR in the permission map (APM vol. 2 §15.11).
const fn msr_bit_position(msr: u32) -> (usize, u32) {
    let offset = match msr {
        0xc000_0000..=0xc000_1fff => 0x800,
        0xc001_0000..=0xc001_1fff => 0x1000,
        _ => 0,
    };
    let index = msr & 0x1fff;
    (offset + index as usize / 4, index % 4 * 2)
}

/// Physical address of something in the kernel's image.
fn image_physical<T>(pointer: *const T) -> u64 {
    pointer as u64 - IMAGE_OFFSET
}

/// Host state of each CPU for VMRUN and VMSAVE.
#[repr(C, align(4096))]
struct HostPages {
    hsave: [u8; 4096],
    state: [u8; 4096],
}

/// Prepares guests on this machine: the shared maps. First CPU, before any other.
pub fn init_maps() {
    if !features().npt {
        return;
    }
    // SAFETY: the first CPU alone, before any guest runs.
    let maps = unsafe { &mut *MAPS.0.get() };
    let auxiliary = features().rdtscp.then_some(msr::TSC_AUX);
    for msr in SWITCHED.into_iter().chain(auxiliary) {
        let (byte, bit) = msr_bit_position(msr);
        maps.msr[byte] &= !(3 << bit);
    }
    HAS_TSC_AUX.store(features().rdtscp, Ordering::Relaxed);
    IS_READY.store(true, Ordering::Release);
}

/// Turns SVM on, on this CPU. `pages` are two frames of its own.
pub fn init_cpu(cpu_index: usize, memory: &Memory, pages: Frame) {
    if !is_ready() {
        return;
    }
    let physical = memory.physical(pages);
    local(cpu_index).guest.bit.set(1 << cpu_index);
    local(cpu_index)
        .guest
        .host_state
        .set(physical + core::mem::offset_of!(HostPages, state) as u64);
    // SAFETY: SVM is there (`is_ready`); the host save area is a frame that nobody else uses.
    unsafe {
        if rdmsr(msr::VM_CR) & msr::vm_cr::SVMDIS != 0 {
            IS_READY.store(false, Ordering::Release);
            crate::log!("SVM is disabled by the firmware: virtual machines are not possible");
            return;
        }
        wrmsr(msr::EFER, rdmsr(msr::EFER) | msr::efer::SVME);
        wrmsr(msr::VM_HSAVE_PA, physical + core::mem::offset_of!(HostPages, hsave) as u64);
    }
}

/// Whether guests can run.
pub fn is_ready() -> bool {
    IS_READY.load(Ordering::Acquire)
}

// ---- what a CPU remembers --------------------------------------------------------------------------

/// A CPU's part.
pub struct Local {
    /// The bit of the CPU in masks.
    bit: Cell<u64>,
    /// Physical address of the page that VMSAVE keeps host state in.
    host_state: Cell<u64>,
    /// vCPU whose FPU and debug registers are in the CPU.
    state_owner: Cell<Option<Handle<Vcpu<X86>>>>,
    /// The same, if its TSC_AUX is in the CPU, too. Then the loaded space is its VMM's.
    tsc_aux_owner: Cell<Option<Handle<Vcpu<X86>>>>,
    /// TSC_AUX of the owner, while the CPU's is 0.
    saved_tsc_aux: Cell<u32>,
    /// Next unused ASID, and how often they ran out.
    next_asid: Cell<u32>,
    asid_epoch: Cell<u64>,
}

impl Local {
    /// Before the first guest.
    pub const fn new() -> Self {
        Self {
            bit: Cell::new(0),
            host_state: Cell::new(0),
            state_owner: Cell::new(None),
            tsc_aux_owner: Cell::new(None),
            saved_tsc_aux: Cell::new(0),
            next_asid: Cell::new(1),
            asid_epoch: Cell::new(1),
        }
    }
}

impl Local {
    /// Another task than the VMM of the guest that ran last is about to run: TSC_AUX becomes 0.
    #[cold]
    #[inline(never)]
    pub fn clear_tsc_aux(&self) {
        self.tsc_aux_owner.set(None);
        cpu::current().guest_tsc_aux.store(false, Ordering::Relaxed);
        if HAS_TSC_AUX.load(Ordering::Relaxed) {
            // SAFETY: the register is there, and is no memory.
            unsafe {
                self.saved_tsc_aux.set(rdmsr(msr::TSC_AUX) as u32);
                wrmsr(msr::TSC_AUX, 0);
            }
        }
    }

    /// Makes `aux` the CPU's TSC_AUX, that of the owner.
    #[inline(always)]
    fn load_tsc_aux(&self, aux: u32) {
        if HAS_TSC_AUX.load(Ordering::Relaxed) {
            // SAFETY: the register is there, and is no memory; the upper half is reserved.
            unsafe { wrmsr(msr::TSC_AUX, aux.into()) };
        }
        self.tsc_aux_owner.set(self.state_owner.get());
        cpu::current().guest_tsc_aux.store(true, Ordering::Relaxed);
    }
}

impl Default for Local {
    fn default() -> Self {
        Self::new()
    }
}

// ---- the vCPU's frames -----------------------------------------------------------------------------

/// Processor structures of a vCPU.
#[derive(Clone)]
pub struct VcpuFrames {
    vmcb_frame: Frame,
    fpu_frame: Frame,
    vmcb: *mut Vmcb,
    vmcb_physical: u64,
    state: *mut VcpuState,
    fpu: *mut u8,
    /// Objects that belong to the vCPU, found once for many entries. Objects do not move, and these are there as long as
    /// `Memory::destroyed_count` is what it was.
    vm: Cell<*const Vm<X86>>,
    notification: Cell<*const Notification<X86>>,
    destroyed_count: Cell<u64>,
    asid_epoch: Cell<u64>,
    vm_generation: Cell<u64>,
    port_generation: Cell<u64>,
    xcr0: Cell<u64>,
    debug: Cell<[u64; 4]>,
    tsc_aux: Cell<u32>,
    /// The `window` of the state page that the VMCB has.
    window: Cell<u64>,
    /// The interrupt that the VMCB has as a virtual one instead of injecting it; 0: none.
    virq_offered: Cell<u64>,
    /// The processor's copy of the VMCB is out of date.
    vmcb_changed: Cell<bool>,
    /// The guest is at `HLT`, and its VMM's thread has slept since this value of the TSC; 0: not so.
    halted: Cell<u64>,
}

fn fpu_frames() -> u32 {
    features().xsave_size.div_ceil(abi::PAGE_SIZE as usize) as u32
}

impl VcpuFrames {
    /// Frames for a vCPU in its reset state.
    pub fn new(
        memory: &Memory,
        factory: Option<Handle<Factory>>,
        state: Frame,
    ) -> Result<Self, Status> {
        let vmcb_frame = memory.alloc_raw(factory, 1)?;
        let fpu_frame = memory
            .alloc_raw(factory, fpu_frames())
            .inspect_err(|_| memory.free_raw(vmcb_frame, 1))?;
        let this = Self {
            vmcb_frame,
            fpu_frame,
            vmcb: memory.address(vmcb_frame).cast(),
            vmcb_physical: memory.physical(vmcb_frame),
            state: memory.address(state).cast(),
            fpu: memory.address(fpu_frame),
            vm: Cell::new(ptr::null()),
            notification: Cell::new(ptr::null()),
            destroyed_count: Cell::new(u64::MAX),
            asid_epoch: Cell::new(0),
            vm_generation: Cell::new(0),
            port_generation: Cell::new(0),
            xcr0: Cell::new(xcr0::X87),
            debug: Cell::new([0; 4]),
            tsc_aux: Cell::new(0),
            window: Cell::new(0),
            virq_offered: Cell::new(0),
            vmcb_changed: Cell::new(true),
            halted: Cell::new(0),
        };
        this.reset();
        Ok(this)
    }

    /// Counts that something else runs instead.
    pub fn count_preemption(&self) {
        self.state().preemptions += 1;
    }

    /// Gives the frames back.
    pub fn free(&self, memory: &Memory) {
        memory.free_raw(self.vmcb_frame, 1);
        memory.free_raw(self.fpu_frame, fpu_frames());
    }

    #[inline(always)]
    #[expect(
        clippy::mut_from_ref,
        reason = "a frame outside `self`; every user follows the rule below"
    )]
    fn vmcb(&self) -> &mut Vmcb {
        // SAFETY: a frame of this vCPU alone, zeroed when allocated (all fields are integers). References are
        // short-lived: within one function of this module, by the CPU that runs the vCPU or holds the lock, and
        // none is used again after another was taken.
        unsafe { &mut *self.vmcb }
    }

    /// The state page. The VMM may write it at any time, so each field is read once.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "a frame outside `self`; the rule is that of `vmcb`")]
    fn state(&self) -> &mut VcpuState {
        // SAFETY: as for the VMCB; all fields are integers, any value is valid. The VMM's own thread is in the
        // kernel; if another of its threads writes meanwhile, it races only for its own guest's values.
        unsafe { &mut *self.state }
    }

    /// Whether the guest, left at a `VMMCALL`, rings a doorbell.
    #[inline(always)]
    fn is_doorbell(&self) -> bool {
        let save = &self.vmcb().save;
        save.rax == abi::vcpu::HYPERCALL_DOORBELL && save.cpl == 0
    }

    fn reset(&self) {
        const LEGACY_FCW: usize = 0;
        const LEGACY_MXCSR: usize = 24;
        const PAT: u64 = 0x0007_0406_0007_0406;
        const NESTED_PAGING: u64 = 1;
        let Vmcb { control, save } = self.vmcb();
        crate::intercepts::set(control);
        // SAFETY: only the addresses of the maps are taken.
        let (io, msr) = unsafe { (&raw const (*MAPS.0.get()).io, &raw const (*MAPS.0.get()).msr) };
        control.iopm_base_pa = image_physical(io);
        control.msrpm_base_pa = image_physical(msr);
        control.v_intr = v_intr::INTR_MASKING;
        control.nested_control = NESTED_PAGING;
        save.efer = msr::efer::SVME;
        save.cr0 = cr0::ET;
        save.rflags = 2;
        save.dr6 = 0xffff_0ff0;
        save.dr7 = 0x400;
        save.g_pat = PAT;
        self.state().deadline = abi::FOREVER;
        // SAFETY: inside the FPU frames; an XSAVE area whose header is zero restores initial state.
        unsafe {
            self.fpu.add(LEGACY_FCW).cast::<u16>().write(0x37f);
            self.fpu.add(LEGACY_MXCSR).cast::<u32>().write(0x1f80);
        }
    }

    /// Copies groups to the state page and marks them valid.
    fn read_groups(&self, groups: u64) {
        let (state, vmcb) = (self.state(), self.vmcb());
        read_code(state, vmcb, groups);
        let Vmcb { control, save } = vmcb;
        if groups & group::SEGMENTS != 0 {
            for (index, from) in save.segments.iter().enumerate() {
                if index != VcpuState::CS {
                    state.segments[index] = to_abi(from);
                }
            }
            state.gdtr = to_abi(&save.gdtr);
            state.ldtr = to_abi(&save.ldtr);
            state.idtr = to_abi(&save.idtr);
            state.tr = to_abi(&save.tr);
        }
        if groups & group::MSRS != 0 {
            state.star = save.star;
            state.lstar = save.lstar;
            state.cstar = save.cstar;
            state.sfmask = save.sfmask;
            state.kernel_gs_base = save.kernel_gs_base;
            state.sysenter_cs = save.sysenter_cs;
            state.sysenter_esp = save.sysenter_esp;
            state.sysenter_eip = save.sysenter_eip;
            state.pat = save.g_pat;
        }
        if groups & group::DEBUG != 0 {
            state.dr6 = save.dr6;
            state.dr7 = save.dr7;
        }
        if groups & group::TSC != 0 {
            state.tsc_offset = control.tsc_offset;
        }
        if groups & group::XCR0 != 0 {
            state.xcr0 = self.xcr0.get();
        }
    }

    /// Takes XCR0 from the CPU, which holds this vCPU's extended state: the guest may have set it without an exit. QEMU's
    /// processor does not intercept `XSETBV`.
    fn save_xcr0(&self, have: &Features) {
        if have.xsave {
            // SAFETY: with XSAVE the kernel has set CR4.OSXSAVE.
            self.xcr0.set(unsafe { read_xcr0() } & have.xcr0_mask);
        }
    }

    /// Says what happens as soon as the guest can take an interrupt.
    #[cold]
    fn set_window(&self, wanted: u64) {
        self.window.set(wanted);
        self.vmcb_changed.set(true);
        virq::set_window(&mut self.vmcb().control, wanted);
    }

    /// Gives the guest an event at the next entry. An interrupt is made pending where that is possible: QEMU may deliver one
    /// from `EVENTINJ` twice, the second time whether the guest wants it or not, if the host needs the processor before
    /// the guest's next exit. With the intercept of a window that is not possible.
    #[cold]
    fn inject(&self, event: u64) {
        let control = &mut self.vmcb().control;
        let is_interrupt =
            event & (event::VALID | event::TYPE_MASK) == event::VALID | event::TYPE_INTR;
        if is_interrupt && virq::is_unused(self.window.get()) {
            virq::offer(control, event, self.window.get());
            self.virq_offered.set(event);
            self.vmcb_changed.set(true);
        } else {
            control.event_inj = event;
        }
    }

    /// Takes the interrupt back that the guest has not taken, if any.
    #[cold]
    fn withdraw_virq(&self) -> u64 {
        let control = &mut self.vmcb().control;
        let offered = self.virq_offered.take();
        let taken = !virq::is_pending(control);
        virq::clear(control, self.window.get());
        self.vmcb_changed.set(true);
        if taken { 0 } else { offered }
    }

    /// Takes over the groups that the VMM changed. `Err`: an XCR0 that the machine does not have.
    /// `is_owner`: the CPU holds this vCPU's extended state.
    #[inline(always)]
    fn write_groups(&self, state: &VcpuState, dirty: u64, is_owner: bool) -> Result<(), Status> {
        let Vmcb { control, save } = self.vmcb();
        if dirty & group::IP != 0 {
            save.rip = state.rip;
            save.rsp = state.rsp;
            save.rflags = state.rflags;
            control.interrupt_shadow = state.interrupt_shadow & SHADOW;
        }
        if dirty & !(group::IP | group::INJECT) != 0 {
            self.write_slow_groups(state, dirty, is_owner)?;
        }
        Ok(())
    }

    #[cold]
    fn write_slow_groups(
        &self,
        state: &VcpuState,
        dirty: u64,
        is_owner: bool,
    ) -> Result<(), Status> {
        let Vmcb { control, save } = self.vmcb();
        self.vmcb_changed.set(true);
        if dirty & group::CONTROL != 0 {
            save.cr0 = state.cr0;
            save.cr2 = state.cr2;
            save.cr3 = state.cr3;
            save.cr4 = state.cr4;
            save.efer = state.efer | msr::efer::SVME;
            save.cpl = state.cpl as u8 & 3;
            // What the guest's TLB holds may not fit the new registers.
            self.asid_epoch.set(0);
        }
        if dirty & group::CODE != 0 {
            save.segments[VcpuState::CS] = from_abi(&state.segments[VcpuState::CS]);
        }
        if dirty & group::SEGMENTS != 0 {
            for (index, from) in state.segments.iter().enumerate() {
                if index != VcpuState::CS {
                    save.segments[index] = from_abi(from);
                }
            }
            save.gdtr = from_abi(&state.gdtr);
            save.ldtr = from_abi(&state.ldtr);
            save.idtr = from_abi(&state.idtr);
            save.tr = from_abi(&state.tr);
        }
        if dirty & group::MSRS != 0 {
            save.star = state.star;
            save.lstar = state.lstar;
            save.cstar = state.cstar;
            save.sfmask = state.sfmask;
            save.kernel_gs_base = state.kernel_gs_base;
            save.sysenter_cs = state.sysenter_cs;
            save.sysenter_esp = state.sysenter_esp;
            save.sysenter_eip = state.sysenter_eip;
            save.g_pat = state.pat;
        }
        if dirty & group::DEBUG != 0 {
            save.dr6 = state.dr6;
            save.dr7 = state.dr7;
        }
        if dirty & group::TSC != 0 {
            control.tsc_offset = state.tsc_offset;
        }
        if dirty & group::PRIORITY != 0 {
            virq::set_priority(control, state.cr8);
        }
        if dirty & group::VECTORS != 0 {
            self.write_vectors(state, is_owner);
        }
        if dirty & group::XCR0 != 0 {
            let new = state.xcr0;
            let avx512 = new & xcr0::AVX512;
            let valid = new & xcr0::X87 != 0
                && new & !features().xcr0_mask == 0
                && (new & xcr0::AVX == 0 || new & xcr0::SSE != 0)
                && (avx512 == 0 || avx512 == xcr0::AVX512 && new & xcr0::AVX != 0);
            if !valid {
                return Err(Status::BadArgument);
            }
            self.xcr0.set(new);
            if is_owner && features().xsave {
                // SAFETY: the value has been checked against the machine's.
                unsafe { write_xcr0(new) };
            }
        }
        Ok(())
    }
}

impl VcpuFrames {
    fn read_vectors(&self, is_owner: bool) {
        let to = &mut self.state().xmm;
        if is_owner {
            vectors::from_cpu(to);
        } else {
            // SAFETY: the vCPU's own area, which only the CPU that holds its registers writes, with the lock held.
            *to = unsafe { vectors::from_area(self.fpu) };
        }
    }

    fn write_vectors(&self, state: &VcpuState, is_owner: bool) {
        if is_owner {
            vectors::to_cpu(&state.xmm);
        } else {
            // SAFETY: as above.
            unsafe { vectors::to_area(self.fpu, &state.xmm, features().xsave) };
        }
    }
}

/// Copies groups of a vCPU's state to its state page, those too that the CPU holds.
pub fn read_groups(memory: &Memory, local: &Local, vcpu: &Vcpu<X86>, groups: u64) {
    if groups & (group::XCR0 | group::VECTORS) != 0 {
        let owner = local.state_owner.get().and_then(|owner| memory.get(owner));
        let is_owner = owner.is_some_and(|owner| ptr::eq(owner, vcpu));
        if is_owner {
            vcpu.arch.save_xcr0(features());
        }
        if groups & group::VECTORS != 0 {
            vcpu.arch.read_vectors(is_owner);
        }
    }
    vcpu.arch.read_groups(groups);
}

/// Copies what most exits need: where the guest is, and for `CONTROL` and `CODE` how its code is to be read.
#[inline(always)]
fn read_code(state: &mut VcpuState, Vmcb { control, save }: &Vmcb, groups: u64) {
    if groups & group::IP != 0 {
        state.rip = save.rip;
        state.rsp = save.rsp;
        state.rflags = save.rflags;
        state.interrupt_shadow = control.interrupt_shadow & SHADOW;
    }
    if groups & group::CONTROL != 0 {
        state.cr0 = save.cr0;
        state.cr2 = save.cr2;
        state.cr3 = save.cr3;
        state.cr4 = save.cr4;
        state.efer = save.efer & !msr::efer::SVME;
        state.cpl = save.cpl as u64;
    }
    if groups & group::CODE != 0 {
        state.segments[VcpuState::CS] = to_abi(&save.segments[VcpuState::CS]);
    }
    state.valid |= groups & group::ALL;
}

fn to_abi(from: &VmcbSegment) -> Segment {
    Segment { selector: from.selector, attrib: from.attrib, limit: from.limit, base: from.base }
}

fn from_abi(from: &Segment) -> VmcbSegment {
    VmcbSegment { selector: from.selector, attrib: from.attrib, limit: from.limit, base: from.base }
}

// ---- the world switch ------------------------------------------------------------------------------

/// Runs the guest until the next exit: loads its general registers from `registers` (`VcpuState::gpr`), executes
/// VMRUN, saves them there. `rax` and `rsp` are in the VMCB. Leaves with GIF clear.
///
/// # Safety
/// GIF is clear and IF set; host state was saved and guest state loaded (VMSAVE, VMLOAD); the VMCB is as SVM wants it.
#[inline(always)]
unsafe fn world_switch(vmcb: u64, registers: *mut u64) {
    // SAFETY: the caller's contract. Everything that the guest may change is declared, or pushed where the compiler keeps
    // the register to itself.
    unsafe {
        asm!(
            "push rbx",
            "push rbp",
            "push rsi",
            "mov rcx, [rsi + 8]",
            "mov rdx, [rsi + 16]",
            "mov rbx, [rsi + 24]",
            "mov rbp, [rsi + 40]",
            "mov rdi, [rsi + 56]",
            "mov r8, [rsi + 64]",
            "mov r9, [rsi + 72]",
            "mov r10, [rsi + 80]",
            "mov r11, [rsi + 88]",
            "mov r12, [rsi + 96]",
            "mov r13, [rsi + 104]",
            "mov r14, [rsi + 112]",
            "mov r15, [rsi + 120]",
            "mov rsi, [rsi + 48]",
            "vmrun rax",
            "xchg rsi, [rsp]",
            "mov [rsi + 8], rcx",
            "mov [rsi + 16], rdx",
            "mov [rsi + 24], rbx",
            "mov [rsi + 40], rbp",
            "mov [rsi + 56], rdi",
            "mov [rsi + 64], r8",
            "mov [rsi + 72], r9",
            "mov [rsi + 80], r10",
            "mov [rsi + 88], r11",
            "mov [rsi + 96], r12",
            "mov [rsi + 104], r13",
            "mov [rsi + 112], r14",
            "mov [rsi + 120], r15",
            "pop rax",
            "mov [rsi + 48], rax",
            "pop rbp",
            "pop rbx",
            inout("rax") vmcb => _,
            inout("rsi") registers => _,
            out("rcx") _, out("rdx") _, out("rdi") _, out("r8") _, out("r9") _, out("r10") _,
            out("r11") _, out("r12") _, out("r13") _, out("r14") _, out("r15") _,
        );
    }
}

/// Lets pending host interrupts in (they are noted in `PerCpu::pending`) or not, and sets GIF.
///
/// # Safety
/// Host state is loaded, the kernel lock is not held, GIF is clear and IF set.
#[inline(always)]
unsafe fn end_guest_mode(interrupts: bool) {
    // SAFETY: the caller's contract.
    unsafe {
        if interrupts {
            asm!("stgi", "nop", "cli", options(nostack));
        } else {
            asm!("cli", "stgi", options(nostack));
        }
    }
}

/// The guest goes on after the `VMMCALL` that it was left at.
#[inline(always)]
fn step_over_hypercall(vmcb: &mut Vmcb) {
    const VMMCALL_LENGTH: u64 = 3;
    vmcb.save.rip = vmcb.save.rip.wrapping_add(VMMCALL_LENGTH);
    vmcb.control.interrupt_shadow = 0;
}

/// Runs the guest with the lock not held; returns its exit code, and how many of its hypercalls the kernel answered.
#[inline(always)]
fn enter(frames: &VcpuFrames, host_state: u64) -> (u64, u64) {
    let vmcb = frames.vmcb();
    let state = frames.state();
    let registers = (&raw mut state.gpr).cast::<u64>();
    vmcb.save.rax = state.gpr[gpr::RAX];
    let mut handled = 0;
    // SAFETY: host state goes to this CPU's own page and comes back from there; the VMCB is complete, its maps and
    // tables are the kernel's. With GIF clear nothing interrupts between VMLOAD and VMRUN.
    let code = unsafe {
        asm!("clgi", "sti", "vmsave rax", in("rax") host_state, options(nostack));
        asm!("vmload rax", in("rax") frames.vmcb_physical, options(nostack));
        loop {
            world_switch(frames.vmcb_physical, registers);
            let code = (&raw const vmcb.control.exit_code).read_volatile();
            if code != exit::VMMCALL || vmcb.save.rax != abi::vcpu::HYPERCALL_VERSION {
                break code;
            }
            // A hypercall of the kernel's own.
            handled += 1;
            vmcb.save.rax = ABI_VERSION as u64;
            step_over_hypercall(vmcb);
            vmcb.control.event_inj = 0;
            vmcb.control.tlb_control = tlb_control::NOTHING;
        }
    };
    // SAFETY: as above; the host's registers are back before anything uses GS or SYSRET.
    unsafe {
        asm!("vmsave rax", in("rax") frames.vmcb_physical, options(nostack));
        asm!("vmload rax", in("rax") host_state, options(nostack));
        if frames.window.get() != 0 || frames.virq_offered.get() != 0 {
            // QEMU's VMRUN makes V_IRQ known without a lock, and may undo that an interrupt of the host became known at that
            // moment. It stays pending in the local APIC unnoticed until that looks again, as it does when its task
            // priority is written.
            asm!("mov cr8, {}", in(reg) 0u64, options(nostack, preserves_flags));
        }
        end_guest_mode(matches!(code, exit::INTR | exit::NMI));
    }
    state.gpr[gpr::RAX] = vmcb.save.rax;
    (code, handled)
}

// ---- FPU, debug and auxiliary registers --------------------------------------------------------------

/// Makes this vCPU's registers those in the CPU.
#[cold]
fn become_owner(kernel: &Kernel<X86>, local: &Local, GuestEntry { thread, vcpu }: GuestEntry<'_>) {
    let cpu_index = X86::this_cpu();
    if kernel.cpus[cpu_index].space.get() != Some(thread.task) {
        // Whoever runs next loads the space, and so hides TSC_AUX from others.
        X86::flush_local();
        kernel.clear_loaded_space(cpu_index);
    }
    if local.state_owner.get() == thread.vcpu.get() {
        return local.load_tsc_aux(local.saved_tsc_aux.get());
    }
    let have = features();
    if local.tsc_aux_owner.get().is_some() {
        local.clear_tsc_aux();
    }
    let old = local.state_owner.replace(thread.vcpu.get()).and_then(|old| kernel.memory.get(old));
    if let Some(old) = old {
        old.arch.save_xcr0(have);
        old.arch.tsc_aux.set(local.saved_tsc_aux.get());
    }
    local.load_tsc_aux(vcpu.arch.tsc_aux.get());
    // SAFETY: TS is cleared around FPU instructions only; areas are as large as `xsave_size`, aligned to pages; XCR0
    // values are within the machine's. Debug registers are no memory. A vCPU that no longer exists left
    // no area to save to.
    unsafe {
        write_cr0(read_cr0() & !cr0::TS);
        if have.xsave {
            write_xcr0(have.xcr0_mask);
        }
        if let Some(Vcpu { arch: old, .. }) = old {
            if have.xsave {
                asm!("xsave64 [{}]", in(reg) old.fpu, in("eax") u32::MAX, in("edx") u32::MAX, options(nostack));
            } else {
                asm!("fxsave64 [{}]", in(reg) old.fpu, options(nostack));
            }
            let (d0, d1, d2, d3): (u64, u64, u64, u64);
            asm!("mov {}, dr0", "mov {}, dr1", "mov {}, dr2", "mov {}, dr3",
                out(reg) d0, out(reg) d1, out(reg) d2, out(reg) d3, options(nomem, nostack));
            old.debug.set([d0, d1, d2, d3]);
        }
        let new = &vcpu.arch;
        if have.xsave {
            asm!("xrstor64 [{}]", in(reg) new.fpu, in("eax") u32::MAX, in("edx") u32::MAX, options(nostack));
            write_xcr0(new.xcr0.get());
        } else {
            asm!("fxrstor64 [{}]", in(reg) new.fpu, options(nostack));
        }
        let [d0, d1, d2, d3] = new.debug.get();
        asm!("mov dr0, {}", "mov dr1, {}", "mov dr2, {}", "mov dr3, {}",
            in(reg) d0, in(reg) d1, in(reg) d2, in(reg) d3, options(nomem, nostack));
        write_cr0(read_cr0() | cr0::TS);
    }
}

// ---- ASIDs -----------------------------------------------------------------------------------------

/// Gives the vCPU an ASID under which the TLB holds nothing. This is also how a guest's TLB is flushed.
#[cold]
fn assign_asid(local: &Local, frames: &VcpuFrames, vm: &Vm<X86>) {
    let control = &mut frames.vmcb().control;
    if local.next_asid.get() >= features().asids {
        local.next_asid.set(1);
        local.asid_epoch.set(local.asid_epoch.get() + 1);
        control.tlb_control = tlb_control::FLUSH_ALL;
    }
    control.guest_asid = local.next_asid.replace(local.next_asid.get() + 1);
    frames.asid_epoch.set(local.asid_epoch.get());
    frames.vm_generation.set(vm.space.generation.get());
    frames.vmcb_changed.set(true);
}

// ---- VcpuRun ---------------------------------------------------------------------------------------

/// Interrupt shadow in the VMCB (APM vol. 2 §15.21.5).
const SHADOW: u64 = 1;
/// Clean bits for a VMCB whose cached parts have not changed: all that are defined (APM vol. 2 §15.15.3).
const CLEAN: u64 = 0xfff;

/// Why a vCPU is not entered.
enum EntryError {
    /// The VMM is to see this exit.
    Exit(u64),
    /// The call ends with this status.
    Failed(Status),
}

/// Who takes part in an entry, besides what the vCPU knows.
#[derive(Clone, Copy)]
struct GuestEntry<'a> {
    thread: &'a Thread<X86>,
    vcpu: &'a Vcpu<X86>,
}

/// A [`GuestEntry`] while the lock is not held.
struct UnlockedEntry {
    thread: *const Thread<X86>,
    vcpu: *const Vcpu<X86>,
}

impl<'a> GuestEntry<'a> {
    /// `None`: not all are there any more.
    #[inline(always)]
    fn new(kernel: &'a Kernel<X86>, thread: &'a Thread<X86>, vcpu: &'a Vcpu<X86>) -> Option<Self> {
        if vcpu.arch.destroyed_count.get() != kernel.memory.destroyed_count() {
            cache_objects(&kernel.memory, vcpu)?;
        }
        Some(Self { thread, vcpu })
    }

    /// The entry of the CPU's current thread, if that is in `VcpuRun`.
    #[cold]
    #[inline(never)]
    fn current(kernel: &'a Kernel<X86>, cpu_index: usize) -> Option<Self> {
        let thread = kernel.memory.get(kernel.cpus[cpu_index].current.get()?)?;
        Self::new(kernel, thread, kernel.memory.get(thread.vcpu.get()?)?)
    }

    /// The same after the lock was given back, or what has become of it. `ended`: `Memory::destroyed_count` before.
    #[inline(always)]
    fn revalidate(
        kernel: &'a Kernel<X86>,
        unlocked: &UnlockedEntry,
        destroyed_count: u64,
        cpu_index: usize,
    ) -> Option<Self> {
        if destroyed_count != kernel.memory.destroyed_count() {
            return Self::current(kernel, cpu_index);
        }
        // SAFETY: objects do not move, and none has ended since these were references.
        Some(unsafe { Self { thread: &*unlocked.thread, vcpu: &*unlocked.vcpu } })
    }

    #[inline(always)]
    fn unlocked(&self) -> UnlockedEntry {
        UnlockedEntry { thread: self.thread, vcpu: self.vcpu }
    }

    #[inline(always)]
    fn vm(&self) -> &'a Vm<X86> {
        // SAFETY: nothing has ended since it was found; that was seen when the entry was made, and the lock is held.
        unsafe { &*self.vcpu.arch.vm.get() }
    }

    #[inline(always)]
    fn notification(&self) -> &'a Notification<X86> {
        // SAFETY: as above.
        unsafe { &*self.vcpu.arch.notification.get() }
    }
}

#[cold]
#[inline(never)]
fn cache_objects(memory: &Memory, vcpu: &Vcpu<X86>) -> Option<()> {
    vcpu.arch.vm.set(memory.get(vcpu.vm)?);
    vcpu.arch.notification.set(memory.get(vcpu.notification)?);
    vcpu.arch.destroyed_count.set(memory.destroyed_count());
    Some(())
}

/// Enters the vCPU that the CPU's current thread, `thread`, is in `VcpuRun` on. Unless there is something for its VMM the
/// thread stays in `VcpuRun`: it enters again when it is chosen again.
#[inline(always)]
pub fn run(
    mut kernel: Guard,
    cpu_index: usize,
    thread: &Thread<X86>,
    vcpu: &Vcpu<X86>,
) -> (Guard, Option<ExitToVmm>) {
    let local = local(cpu_index);
    let Some(mut entry) = GuestEntry::new(&kernel, thread, vcpu) else {
        abort_run(&kernel, cpu_index);
        return (kernel, None);
    };
    if entry.vcpu.arch.halted.get() != 0 {
        let to_vmm = end_halt(&kernel, entry);
        return (kernel, Some(to_vmm));
    }
    loop {
        if let Err(error) = prepare(&kernel, &local.guest, entry) {
            let to_vmm = abort_entry(&kernel, entry, error);
            return (kernel, Some(to_vmm));
        }
        let active = &entry.vm().space.active;
        active.set(active.get() | local.guest.bit.get());
        arm(local, kernel.cpus[cpu_index].deadline().min(entry.vcpu.arch.state().deadline));
        let (frames, unlocked, destroyed_count) =
            (&raw const entry.vcpu.arch, entry.unlocked(), kernel.memory.destroyed_count());
        unlock(kernel);
        // SAFETY: the vCPU is not freed before this CPU has answered a shootdown, which it does when it takes the lock.
        let frames = unsafe { &*frames };
        let (code, handled) = enter(frames, local.guest.host_state.get());
        kernel = lock(cpu_index);

        count(&kernel.counters.vm_entries);
        entry = match GuestEntry::revalidate(&kernel, &unlocked, destroyed_count, cpu_index) {
            Some(entry) => entry,
            None => {
                handle_pending(&kernel, cpu_index);
                abort_run(&kernel, cpu_index);
                return (kernel, None);
            }
        };
        let active = &entry.vm().space.active;
        active.set(active.get() & !local.guest.bit.get());
        let frames = &entry.vcpu.arch;
        let undelivered = if frames.virq_offered.get() != 0 { frames.withdraw_virq() } else { 0 };
        let (state, control) = (frames.state(), &mut frames.vmcb().control);
        state.entries += 1;
        if handled != 0 {
            // Each is an exit and another entry.
            state.entries += handled;
            state.handled_in_kernel += handled;
            add(&kernel.counters.vm_entries, handled);
            add(&kernel.counters.handled_in_kernel, handled);
        }
        control.tlb_control = tlb_control::NOTHING;
        state.inject = match interrupted_event(control.exit_int_info) {
            0 => undelivered,
            // QEMU keeps one pending too whose delivery was cut short.
            event => event,
        };
        state.cr8 = virq::priority(control);
        if frames.window.get() & window::DELIVER_VIRQ != 0 {
            if !virq::is_pending(control) {
                // The guest has taken it.
                let left = frames.window.get() & window::PERSISTENT;
                frames.window.set(left);
                frames.vmcb_changed.set(true);
                virq::clear(control, left);
                state.window = left;
            } else if (state.inject ^ frames.window.get()) & event::VECTOR == 0 {
                // QEMU again: it is pending still, and comes that way.
                state.inject = 0;
            }
        }
        let to_vmm = match code {
            exit::VMMCALL if frames.is_doorbell() => {
                state.gpr[gpr::RAX] = kernel.ring_doorbell(entry.vm(), state.gpr[gpr::RBX]);
                step_over_hypercall(frames.vmcb());
                state.handled_in_kernel += 1;
                count(&kernel.counters.handled_in_kernel);
                if !kernel.has_work(cpu_index) {
                    continue;
                }
                None
            }
            exit::INTR | exit::NMI | exit::SMI | exit::INIT => {
                state.handled_in_kernel += 1;
                count(&kernel.counters.handled_in_kernel);
                handle_pending(&kernel, cpu_index);
                after_interrupt(&kernel, cpu_index);
                None
            }
            exit::MACHINE_CHECK => {
                crate::machine_check::stop("while a guest ran", frames.vmcb().save.rip)
            }
            exit::VINTR => {
                state.window &= window::PERSISTENT;
                Some(return_exit(&kernel, entry, kernel_exit::WINDOW, group::IP))
            }
            exit::HLT
                if state.halt != 0
                    && state.window == 0
                    && state.inject == 0
                    && halt(&kernel, cpu_index, entry) =>
            {
                None
            }
            _ => Some(report(&kernel, entry, code, code)),
        };
        return (kernel, to_vmm);
    }
}

/// The VMM's thread waits in `VcpuRun`, if it can.
#[inline(always)]
fn halt(kernel: &Kernel<X86>, cpu_index: usize, entry: GuestEntry<'_>) -> bool {
    let GuestEntry { thread, vcpu, .. } = entry;
    // It may have been stopped meanwhile.
    let Some(name) = kernel.cpus[cpu_index].current.get() else { return false };
    let since = crate::time::tsc();
    let deadline = vcpu.arch.state().deadline;
    let halts = deadline > since
        && kernel.halt(name, thread, (vcpu.notification, entry.notification()), deadline);
    if halts {
        vcpu.arch.halted.set(since);
    }
    halts
}

/// The VMM's thread goes on after the guest's `HLT`, since there are events or the deadline has passed.
#[cold]
fn end_halt(kernel: &Kernel<X86>, entry: GuestEntry<'_>) -> ExitToVmm {
    let state = entry.vcpu.arch.state();
    let since = entry.vcpu.arch.halted.take();
    state.events = entry.notification().bits.take();
    state.halted += crate::time::tsc().saturating_sub(since);
    report(kernel, entry, exit::HLT, kernel_exit::HALTED)
}

/// Gives the VMM an exit of the processor's, `code`, as `reported`.
#[inline(always)]
fn report(kernel: &Kernel<X86>, entry: GuestEntry<'_>, code: u64, reported: u64) -> ExitToVmm {
    let frames = &entry.vcpu.arch;
    let (state, control) = (frames.state(), &frames.vmcb().control);
    state.exit_info1 = control.exit_info1;
    state.exit_info2 = control.exit_info2;
    // A processor that does not save the next instruction's address leaves 0. Then the VMM looks at the
    // instruction, but for port accesses, where EXITINFO2 has that address.
    state.next_rip = control.n_rip;
    state.bytes_len = 0;
    let groups = match code {
        exit::NPF => {
            page_fault_bytes(state, control);
            group::IP | group::CONTROL | group::CODE | group::SEGMENTS
        }
        exit::IOIO => group::IP,
        // The sizes in this leaf depend on it.
        exit::CPUID if state.gpr[gpr::RAX] as u32 == hw_x86::cpuid::leaf::XSAVE => {
            frames.save_xcr0(features());
            group::IP | group::CONTROL | group::CODE | group::XCR0
        }
        _ if control.n_rip != 0 => group::IP,
        _ => group::IP | group::CONTROL | group::CODE,
    };
    return_exit(kernel, entry, reported, groups)
}

/// Brings the processor structures of a vCPU, and what the CPU holds of it, up to date.
#[inline(always)]
fn prepare(kernel: &Kernel<X86>, local: &Local, entry: GuestEntry<'_>) -> Result<(), EntryError> {
    let (vcpu, vm) = (entry.vcpu, entry.vm());
    if vm.space.dying.get() {
        return Err(EntryError::Failed(Status::Aborted));
    }
    let frames = &vcpu.arch;
    let state = frames.state();
    let dirty = state.dirty;
    if dirty != 0 {
        let is_owner = local.state_owner.get() == entry.thread.vcpu.get();
        state.dirty = 0;
        frames.write_groups(state, dirty, is_owner).map_err(EntryError::Failed)?;
    }
    let bits = entry.notification().bits.take();
    if bits != 0 {
        state.events = bits;
        return Err(EntryError::Exit(kernel_exit::RECALL));
    }
    if local.tsc_aux_owner.get() != entry.thread.vcpu.get() {
        become_owner(kernel, local, entry);
    }
    if frames.asid_epoch.get() != local.asid_epoch.get()
        || frames.vm_generation.get() != vm.space.generation.get()
    {
        assign_asid(local, frames, vm);
        frames.vmcb().control.n_cr3 = kernel.memory.physical(vm.space.root);
    }
    if frames.port_generation.get() != vm.space.port_generation.get() {
        frames.port_generation.set(vm.space.port_generation.get());
        frames.vmcb_changed.set(true);
        if let Some(map) = vm.space.port_map.get() {
            frames.vmcb().control.iopm_base_pa = kernel.memory.physical(map);
        }
    }
    let window = state.window;
    if frames.window.get() != window {
        frames.set_window(window);
    }
    frames.vmcb().control.event_inj = 0;
    if state.inject != 0 {
        frames.inject(core::mem::take(&mut state.inject));
    }
    let control = &mut frames.vmcb().control;
    control.clean = CLEAN;
    if frames.vmcb_changed.get() {
        frames.vmcb_changed.set(false);
        control.clean = 0;
    }
    Ok(())
}

/// Ends `VcpuRun` without an entry.
#[cold]
fn abort_entry(kernel: &Kernel<X86>, entry: GuestEntry<'_>, error: EntryError) -> ExitToVmm {
    match error {
        EntryError::Exit(code) => return_exit(kernel, entry, code, group::IP),
        EntryError::Failed(status) => end_run(kernel, entry, status),
    }
}

/// Ends the `VcpuRun` of a thread whose vCPU has ended: it is in none.
#[cold]
pub fn abort_destroyed_vcpu(kernel: &Kernel<X86>, thread: &Thread<X86>) -> *const Vcpu<X86> {
    kernel.vcpu_return(thread, None, Status::Aborted);
    ptr::null()
}

/// Ends the `VcpuRun` of the CPU's current thread, if it still is in it, because an object that it needs has ended.
#[cold]
#[inline(never)]
fn abort_run(kernel: &Kernel<X86>, cpu_index: usize) {
    if let Some(thread) =
        kernel.cpus[cpu_index].current.get().and_then(|name| kernel.memory.get(name))
        && let Some(name) = thread.vcpu.get()
    {
        kernel.vcpu_return(thread, kernel.memory.get(name), Status::Aborted);
    }
}

/// What the VMM has to know after a host interrupt, if anything. The deadline is looked at only here: on the way in the VMM
/// has just looked at its clock, and a deadline that is past interrupts at once.
#[cold]
fn after_interrupt(kernel: &Kernel<X86>, cpu_index: usize) {
    // The thread may have been stopped or its call ended.
    let Some(entry) = GuestEntry::current(kernel, cpu_index) else { return };
    let frames = &entry.vcpu.arch;
    if frames.vmcb().control.interrupt_shadow & SHADOW != 0 {
        // Not every processor takes a shadow back into the guest (QEMU's does not), so the VMM has to see the
        // instruction in it.
        frames.state().events = 0;
        return_exit(kernel, entry, kernel_exit::RECALL, group::IP);
    } else if frames.state().deadline <= crate::time::tsc() {
        return_exit(kernel, entry, kernel_exit::DEADLINE, group::IP);
    }
}

/// Bytes of the instruction that faulted, where the processor has them (APM vol. 2 §15.33.5).
#[cold]
fn page_fault_bytes(state: &mut VcpuState, control: &ControlArea) {
    if features().decode_assist && control.exit_info1 & npf::FETCH == 0 {
        state.bytes_len = control.fetched_bytes as u64 & 0xf;
        state.bytes[..15].copy_from_slice(&control.instruction_bytes);
    }
}

fn add(counter: &Cell<u64>, value: u64) {
    counter.set(counter.get() + value);
}

/// What must be injected again after an exit that cut a delivery short. Software interrupts and exceptions happen again
/// by themselves, because their instruction has not completed (APM vol. 2 §15.20).
#[inline(always)]
fn interrupted_event(info: u64) -> u64 {
    if info & event::VALID == 0 {
        return 0;
    }
    let by_instruction = info & event::TYPE_MASK == event::TYPE_SOFT
        || info & event::TYPE_MASK == event::TYPE_EXCEPTION
            && matches!(info & event::VECTOR, 3 | 4);
    if by_instruction { 0 } else { info }
}

/// The VMM's thread whose `VcpuRun` has ended, which is the CPU's current one.
pub struct ExitToVmm {
    /// Its task.
    pub task: Handle<Task<X86>>,
    /// Its registers.
    pub context: *const Context,
}

/// Ends `VcpuRun` with an exit for the VMM.
#[inline(always)]
fn return_exit(
    kernel: &Kernel<X86>,
    GuestEntry { thread, vcpu }: GuestEntry<'_>,
    code: u64,
    groups: u64,
) -> ExitToVmm {
    const IP_ONLY: u64 = group::IP;
    const DECODE: u64 = group::IP | group::CONTROL | group::CODE;
    let (state, vmcb) = (vcpu.arch.state(), vcpu.arch.vmcb());
    state.exit_code = code;
    state.valid = group::INJECT | group::PRIORITY;
    // Constants make straight code of the frequent cases.
    match groups {
        IP_ONLY => read_code(state, vmcb, IP_ONLY),
        DECODE => read_code(state, vmcb, DECODE),
        _ => vcpu.arch.read_groups(groups),
    }
    end_run(kernel, GuestEntry { thread, vcpu }, Status::Ok)
}

/// Ends `VcpuRun` with a status.
#[inline(always)]
fn end_run(
    kernel: &Kernel<X86>,
    GuestEntry { thread, vcpu }: GuestEntry<'_>,
    status: Status,
) -> ExitToVmm {
    kernel.vcpu_return(thread, Some(vcpu), status);
    ExitToVmm { task: thread.task, context: &raw const thread.context }
}

/// Frames of host state that each CPU needs.
pub const HOST_FRAMES: u32 = (size_of::<HostPages>() / 4096) as u32;

/// Host pages of all CPUs, by physical address: the APs set themselves up from here.
static HOST_PAGES: [AtomicU64; MAX_CPUS] = [const { AtomicU64::new(0) }; MAX_CPUS];

/// Remembers a CPU's host pages.
pub fn set_host_pages(memory: &Memory, cpu_index: usize, pages: Frame) {
    HOST_PAGES[cpu_index].store(memory.physical(pages), Ordering::Release);
}

/// Turns SVM on, on this CPU, with the pages that were set aside for it.
pub fn init_this_cpu(memory: &Memory, cpu_index: usize) {
    let physical = HOST_PAGES[cpu_index].load(Ordering::Acquire);
    if physical != 0 {
        init_cpu(cpu_index, memory, memory.frame_at(physical));
    }
}
