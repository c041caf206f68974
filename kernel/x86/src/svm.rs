//! Guests on AMD SVM: world switch, exits handled in the kernel, and exchange of state with the VMM
//! through the state page (`abi::vcpu`).
//!
//! # Invariants
//!
//! * While a guest runs, its CPU does not hold the kernel lock. Before a vCPU is destroyed, its CPU
//!   is forced out of the guest (`Arch::shootdown`), and afterwards looks up everything about it
//!   again.
//! * The VMM controls guest state only; intercepts, permission maps, nested tables and ASIDs are
//!   the kernel's. Any value that the VMM writes harms at most its own guest: a state that the
//!   processor refuses is an exit.
//! * An event is in exactly one place: the state page's `inject`, the VMCB's `EVENTINJ`, the VMCB's
//!   virtual interrupt, or delivered.
//! * FPU and debug address registers stay loaded for the vCPU that ran last on the CPU, until
//!   another vCPU runs there; user tasks cannot read them. TSC_AUX, which tasks can read, is 0
//!   whenever a task other than that vCPU's VMM runs.

use core::arch::asm;
use core::cell::{Cell, UnsafeCell};
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use abi::vcpu::{SharedSegment, VcpuState, exit as kernel_exit, gpr, group, window};
use abi::{ABI_VERSION, Status};
use hw_x86::msr;
use hw_x86::paging::{cr0, xcr0};
use hw_x86::vmcb::{ControlArea, SavedSegment, Vmcb, event, exit, npf, tlb_control, v_intr};
use kernel_core::arch::Arch;
use kernel_core::object::{Notification, Task, Thread, Vcpu, Vm};
use kernel_core::pool::{Factory, Frame, Handle, Memory};
use kernel_core::{Kernel, count};

use crate::context::Context;
use crate::cpu::{self, MAX_CPUS};
use crate::features::{Features, features};
use crate::io::{rdmsr, read_cr0, read_xcr0, write_cr0, write_xcr0, wrmsr};
use crate::memory::IMAGE_OFFSET;
use crate::run::{Guard, X86, arm, handle_pending, local, lock, unlock};
use crate::{idt, vectors, virq};

// ---- permission maps ---------------------------------------------------------------------------

/// Permission maps that all guests share: every port and every MSR is intercepted, except the MSRs
/// that the world switch saves and restores.
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
/// The CPU has TSC_AUX.
static HAS_TSC_AUX: AtomicBool = AtomicBool::new(false);

/// MSRs that a guest accesses without an exit: VMLOAD and VMSAVE switch them.
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

/// Physical address of an object in the kernel image.
fn image_physical<T>(pointer: *const T) -> u64 {
    pointer as u64 - IMAGE_OFFSET
}

/// Host state of a CPU for VMRUN and VMSAVE.
#[repr(C, align(4096))]
struct HostPages {
    hsave: [u8; 4096],
    state: [u8; 4096],
}

/// Initialises the shared permission maps. Called on the first CPU, before all others.
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

/// Enables SVM on this CPU. `pages` are two frames for its exclusive use.
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
    // SAFETY: the CPU has SVM (`is_ready`); the host save area is a frame for this use only.
    unsafe {
        if rdmsr(msr::VM_CR) & msr::vm_cr::SVMDIS != 0 {
            IS_READY.store(false, Ordering::Release);
            crate::log!("SVM is disabled by the firmware: cannot run VMs");
            return;
        }
        wrmsr(msr::EFER, rdmsr(msr::EFER) | msr::efer::SVME);
        wrmsr(msr::VM_HSAVE_PA, physical + core::mem::offset_of!(HostPages, hsave) as u64);
    }
}

/// Returns whether guests can run.
pub fn is_ready() -> bool {
    IS_READY.load(Ordering::Acquire)
}

// ---- per-CPU state -----------------------------------------------------------------------------

/// Per-CPU state of guests.
pub struct Local {
    /// Bit of the CPU in CPU masks.
    bit: Cell<u64>,
    /// Physical address of the page for host state (VMSAVE).
    host_state: Cell<u64>,
    /// vCPU whose FPU and debug registers are loaded.
    state_owner: Cell<Option<Handle<Vcpu<X86>>>>,
    /// The same vCPU if its TSC_AUX is loaded, too; then its VMM's address space is loaded.
    tsc_aux_owner: Cell<Option<Handle<Vcpu<X86>>>>,
    /// TSC_AUX of `state_owner`, while the CPU's is 0.
    saved_tsc_aux: Cell<u32>,
    /// Next unused ASID, and number of times that the ASIDs were exhausted.
    next_asid: Cell<u32>,
    asid_epoch: Cell<u64>,
}

impl Local {
    /// State before the first guest.
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
    /// Saves TSC_AUX and sets it to 0, before a task other than the last guest's VMM runs.
    #[cold]
    #[inline(never)]
    pub fn clear_tsc_aux(&self) {
        self.tsc_aux_owner.set(None);
        cpu::current().guest_tsc_aux.store(false, Ordering::Relaxed);
        if HAS_TSC_AUX.load(Ordering::Relaxed) {
            // SAFETY: the register exists and does not affect memory.
            unsafe {
                self.saved_tsc_aux.set(rdmsr(msr::TSC_AUX) as u32);
                wrmsr(msr::TSC_AUX, 0);
            }
        }
    }

    /// Loads `aux` as TSC_AUX of `state_owner`.
    #[inline(always)]
    fn load_tsc_aux(&self, aux: u32) {
        if HAS_TSC_AUX.load(Ordering::Relaxed) {
            // SAFETY: the register exists and does not affect memory; its upper half is reserved.
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

// ---- the vCPU's frames -------------------------------------------------------------------------

/// Processor structures of a vCPU.
#[derive(Clone)]
pub struct VcpuFrames {
    vmcb_frame: Frame,
    fpu_frame: Frame,
    vmcb: *const Vmcb,
    vmcb_physical: u64,
    state: *const VcpuState,
    fpu: *mut u8,
    /// Objects of the vCPU, cached over many entries. Objects do not move, and these exist as long
    /// as `Memory::destroyed_count` is unchanged.
    vm: Cell<*const Vm<X86>>,
    notification: Cell<*const Notification<X86>>,
    destroyed_count: Cell<u64>,
    asid_epoch: Cell<u64>,
    vm_generation: Cell<u64>,
    port_generation: Cell<u64>,
    xcr0: Cell<u64>,
    debug: Cell<[u64; 4]>,
    tsc_aux: Cell<u32>,
    /// Value of the state page's `window` that the VMCB is configured for.
    window: Cell<u64>,
    /// Event that the VMCB holds as a virtual interrupt instead of injecting it; 0: none.
    virq_offered: Cell<u64>,
    /// The processor's cached copy of the VMCB is out of date.
    vmcb_changed: Cell<bool>,
    /// TSC value at which the VMM's thread blocked because the guest is at `HLT`; 0: it is not
    /// blocked.
    halted: Cell<u64>,
}

fn fpu_frames() -> u32 {
    features().xsave_size.div_ceil(abi::PAGE_SIZE as usize) as u32
}

impl VcpuFrames {
    /// Allocates frames for a vCPU in its reset state.
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

    /// Counts a preemption of the vCPU's thread.
    pub fn count_preemption(&self) {
        self.state().preemptions.add(1);
    }

    /// Frees the frames.
    pub fn free(&self, memory: &Memory) {
        memory.free_raw(self.vmcb_frame, 1);
        memory.free_raw(self.fpu_frame, fpu_frames());
    }

    /// The VMCB. Its fields are cells: the processor writes them while the guest runs.
    #[inline(always)]
    fn vmcb(&self) -> &Vmcb {
        // SAFETY: a frame of this vCPU only, zeroed when allocated, which is valid for all fields
        // (cells of integers). Only the CPU that runs the vCPU or holds the lock uses it.
        unsafe { &*self.vmcb }
    }

    /// The state page. The VMM may write it at any time: each field is an atomic word, read once.
    #[inline(always)]
    fn state(&self) -> &VcpuState {
        // SAFETY: a frame that exists as long as the vCPU; all fields are atomic integers, any
        // value is valid.
        unsafe { &*self.state }
    }

    /// Returns whether a `VMMCALL` exit is a doorbell hypercall.
    #[inline(always)]
    fn is_doorbell(&self) -> bool {
        let save = &self.vmcb().save;
        save.rax.get() == abi::vcpu::HYPERCALL_DOORBELL && save.cpl.get() == 0
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
        control.iopm_base_pa.set(image_physical(io));
        control.msrpm_base_pa.set(image_physical(msr));
        control.v_intr.set(v_intr::INTR_MASKING);
        control.nested_control.set(NESTED_PAGING);
        save.efer.set(msr::efer::SVME);
        save.cr0.set(cr0::ET);
        save.rflags.set(2);
        save.dr6.set(0xffff_0ff0);
        save.dr7.set(0x400);
        save.g_pat.set(PAT);
        self.state().deadline.set(abi::FOREVER);
        // SAFETY: inside the FPU frames; an XSAVE area whose header is zero restores initial state.
        unsafe {
            self.fpu.add(LEGACY_FCW).cast::<u16>().write(0x37f);
            self.fpu.add(LEGACY_MXCSR).cast::<u32>().write(0x1f80);
        }
    }

    /// Copies groups from the VMCB to the state page. The caller marks them valid.
    fn read_groups(&self, groups: u64) {
        let (state, vmcb) = (self.state(), self.vmcb());
        read_code(state, vmcb, groups);
        let Vmcb { control, save } = vmcb;
        if groups & group::SEGMENTS != 0 {
            for (index, from) in save.segments.iter().enumerate() {
                if index != VcpuState::CS {
                    copy_to_state(&state.segments[index], from);
                }
            }
            copy_to_state(&state.gdtr, &save.gdtr);
            copy_to_state(&state.ldtr, &save.ldtr);
            copy_to_state(&state.idtr, &save.idtr);
            copy_to_state(&state.tr, &save.tr);
        }
        if groups & group::MSRS != 0 {
            state.star.set(save.star.get());
            state.lstar.set(save.lstar.get());
            state.cstar.set(save.cstar.get());
            state.sfmask.set(save.sfmask.get());
            state.kernel_gs_base.set(save.kernel_gs_base.get());
            state.sysenter_cs.set(save.sysenter_cs.get());
            state.sysenter_esp.set(save.sysenter_esp.get());
            state.sysenter_eip.set(save.sysenter_eip.get());
            state.pat.set(save.g_pat.get());
        }
        if groups & group::DEBUG != 0 {
            state.dr6.set(save.dr6.get());
            state.dr7.set(save.dr7.get());
        }
        if groups & group::TSC != 0 {
            state.tsc_offset.set(control.tsc_offset.get());
        }
        if groups & group::XCR0 != 0 {
            state.xcr0.set(self.xcr0.get());
        }
    }

    /// Saves XCR0 from the CPU, which holds this vCPU's extended state. The guest may have changed
    /// it without an exit: QEMU TCG does not intercept `XSETBV`.
    fn save_xcr0(&self, have: &Features) {
        if have.xsave {
            // SAFETY: with XSAVE the kernel has set CR4.OSXSAVE.
            self.xcr0.set(unsafe { read_xcr0() } & have.xcr0_mask);
        }
    }

    /// Configures the VMCB for a new value of the state page's `window`.
    #[cold]
    fn set_window(&self, wanted: u64) {
        self.window.set(wanted);
        self.vmcb_changed.set(true);
        virq::set_window(&self.vmcb().control, wanted);
    }

    /// Injects an event at the next entry. An interrupt is made pending as a virtual interrupt if
    /// possible: QEMU TCG may deliver one from `EVENTINJ` twice, the second time even if the guest
    /// masks it, if a host interrupt arrives before the guest's next exit. It is not possible while
    /// a window uses the virtual interrupt.
    #[cold]
    fn inject(&self, event: u64) {
        let control = &self.vmcb().control;
        let is_interrupt =
            event & (event::VALID | event::TYPE_MASK) == event::VALID | event::TYPE_INTR;
        if is_interrupt && virq::is_unused(self.window.get()) {
            virq::offer(control, event, self.window.get());
            self.virq_offered.set(event);
            self.vmcb_changed.set(true);
        } else {
            control.event_inj.set(event);
        }
    }

    /// Withdraws the virtual interrupt. Returns it if the guest has not taken it, else 0.
    #[cold]
    fn withdraw_virq(&self) -> u64 {
        let control = &self.vmcb().control;
        let offered = self.virq_offered.take();
        let taken = !virq::is_pending(control);
        virq::clear(control, self.window.get());
        self.vmcb_changed.set(true);
        if taken { 0 } else { offered }
    }

    /// Applies the groups that the VMM has changed. Fails for an XCR0 that the machine does not
    /// support. `is_owner`: the CPU holds this vCPU's extended state.
    #[inline(always)]
    fn write_groups(&self, state: &VcpuState, dirty: u64, is_owner: bool) -> Result<(), Status> {
        let Vmcb { control, save } = self.vmcb();
        if dirty & group::IP != 0 {
            save.rip.set(state.rip.get());
            save.rsp.set(state.rsp.get());
            save.rflags.set(state.rflags.get());
            control.interrupt_shadow.set(state.interrupt_shadow.get() & SHADOW);
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
            save.cr0.set(state.cr0.get());
            save.cr2.set(state.cr2.get());
            save.cr3.set(state.cr3.get());
            save.cr4.set(state.cr4.get());
            save.efer.set(state.efer.get() | msr::efer::SVME);
            save.cpl.set(state.cpl.get() as u8 & 3);
            // TLB entries may be stale for the new registers: assign a new ASID.
            self.asid_epoch.set(0);
        }
        if dirty & group::CODE != 0 {
            copy_from_state(&save.segments[VcpuState::CS], &state.segments[VcpuState::CS]);
        }
        if dirty & group::SEGMENTS != 0 {
            for (index, from) in state.segments.iter().enumerate() {
                if index != VcpuState::CS {
                    copy_from_state(&save.segments[index], from);
                }
            }
            copy_from_state(&save.gdtr, &state.gdtr);
            copy_from_state(&save.ldtr, &state.ldtr);
            copy_from_state(&save.idtr, &state.idtr);
            copy_from_state(&save.tr, &state.tr);
        }
        if dirty & group::MSRS != 0 {
            save.star.set(state.star.get());
            save.lstar.set(state.lstar.get());
            save.cstar.set(state.cstar.get());
            save.sfmask.set(state.sfmask.get());
            save.kernel_gs_base.set(state.kernel_gs_base.get());
            save.sysenter_cs.set(state.sysenter_cs.get());
            save.sysenter_esp.set(state.sysenter_esp.get());
            save.sysenter_eip.set(state.sysenter_eip.get());
            save.g_pat.set(state.pat.get());
        }
        if dirty & group::DEBUG != 0 {
            save.dr6.set(state.dr6.get());
            save.dr7.set(state.dr7.get());
        }
        if dirty & group::TSC != 0 {
            control.tsc_offset.set(state.tsc_offset.get());
        }
        if dirty & group::PRIORITY != 0 {
            virq::set_priority(control, state.cr8.get());
        }
        if dirty & group::VECTORS != 0 {
            self.write_vectors(state, is_owner);
        }
        if dirty & group::XCR0 != 0 {
            let new = state.xcr0.get();
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
                // SAFETY: the value was checked against the machine's features.
                unsafe { write_xcr0(new) };
            }
        }
        Ok(())
    }
}

impl VcpuFrames {
    fn read_vectors(&self, is_owner: bool) {
        let mut vectors = [[0; 2]; 16];
        if is_owner {
            vectors::from_cpu(&mut vectors);
        } else {
            // SAFETY: the vCPU's own area, which is written only by the CPU that holds its
            // registers, under the lock.
            vectors = unsafe { vectors::from_area(self.fpu) };
        }
        for (to, from) in self.state().xmm.iter().zip(vectors) {
            to[0].set(from[0]);
            to[1].set(from[1]);
        }
    }

    fn write_vectors(&self, state: &VcpuState, is_owner: bool) {
        let vectors =
            core::array::from_fn(|index| [state.xmm[index][0].get(), state.xmm[index][1].get()]);
        if is_owner {
            vectors::to_cpu(&vectors);
        } else {
            // SAFETY: as above.
            unsafe { vectors::to_area(self.fpu, &vectors, features().xsave) };
        }
    }
}

/// Copies groups of a vCPU's state to its state page, including state loaded in the CPU.
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
    let state = vcpu.arch.state();
    state.valid.set(state.valid.get() | groups & group::ALL);
}

/// Copies the groups of most exits: `IP`, and for decoding of the instruction `CONTROL` and `CODE`.
#[inline(always)]
fn read_code(state: &VcpuState, Vmcb { control, save }: &Vmcb, groups: u64) {
    if groups & group::IP != 0 {
        state.rip.set(save.rip.get());
        state.rsp.set(save.rsp.get());
        state.rflags.set(save.rflags.get());
        state.interrupt_shadow.set(control.interrupt_shadow.get() & SHADOW);
    }
    if groups & group::CONTROL != 0 {
        state.cr0.set(save.cr0.get());
        state.cr2.set(save.cr2.get());
        state.cr3.set(save.cr3.get());
        state.cr4.set(save.cr4.get());
        state.efer.set(save.efer.get() & !msr::efer::SVME);
        state.cpl.set(save.cpl.get() as u64);
    }
    if groups & group::CODE != 0 {
        copy_to_state(&state.segments[VcpuState::CS], &save.segments[VcpuState::CS]);
    }
}

fn copy_to_state(to: &SharedSegment, from: &SavedSegment) {
    to.access.set(from.access.get());
    to.base.set(from.base.get());
}

fn copy_from_state(to: &SavedSegment, from: &SharedSegment) {
    to.access.set(from.access.get());
    to.base.set(from.base.get());
}

// ---- the world switch --------------------------------------------------------------------------

/// Runs the guest until the next exit: loads its general-purpose registers from `registers`
/// (`VcpuState::gpr`), executes VMRUN, and saves them there. `rax` and `rsp` are in the VMCB. GIF
/// is clear on return.
///
/// # Safety
/// GIF is clear and IF set; host state was saved and guest state loaded (VMSAVE, VMLOAD); the VMCB
/// is complete.
#[inline(always)]
unsafe fn world_switch(vmcb: u64, registers: *mut u64) {
    // SAFETY: the caller's contract. Every register that the guest may change is declared, or
    // pushed where the compiler reserves it.
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

/// Sets GIF, and with `interrupts` takes pending host interrupts, which are recorded in
/// `PerCpu::pending`.
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

/// Advances the guest beyond the `VMMCALL` that caused the exit.
#[inline(always)]
fn step_over_hypercall(vmcb: &Vmcb) {
    const VMMCALL_LENGTH: u64 = 3;
    vmcb.save.rip.set(vmcb.save.rip.get().wrapping_add(VMMCALL_LENGTH));
    vmcb.control.interrupt_shadow.set(0);
}

/// Runs the guest without the kernel lock. Returns its exit code and the number of hypercalls
/// handled.
#[inline(always)]
fn enter(frames: &VcpuFrames, host_state: u64) -> (u64, u64) {
    let vmcb = frames.vmcb();
    let state = frames.state();
    let registers = state.gpr.as_ptr().cast::<u64>().cast_mut();
    vmcb.save.rax.set(state.gpr[gpr::RAX].get());
    let mut handled = 0;
    // SAFETY: host state is saved in this CPU's own page and restored from there; the VMCB is
    // complete, with the kernel's maps and tables. With GIF clear, no interrupt occurs between
    // VMLOAD and VMRUN.
    let code = unsafe {
        asm!("clgi", "sti", "vmsave rax", in("rax") host_state, options(nostack));
        asm!("vmload rax", in("rax") frames.vmcb_physical, options(nostack));
        loop {
            world_switch(frames.vmcb_physical, registers);
            let code = vmcb.control.exit_code.get();
            if code != exit::VMMCALL || vmcb.save.rax.get() != abi::vcpu::HYPERCALL_VERSION {
                break code;
            }
            // A hypercall handled in the kernel.
            handled += 1;
            vmcb.save.rax.set(ABI_VERSION as u64);
            step_over_hypercall(vmcb);
            vmcb.control.event_inj.set(0);
            vmcb.control.tlb_control.set(tlb_control::NOTHING);
        }
    };
    // SAFETY: as above; host registers are restored before any use of GS or SYSRET.
    unsafe {
        asm!("vmsave rax", in("rax") frames.vmcb_physical, options(nostack));
        asm!("vmload rax", in("rax") host_state, options(nostack));
        if frames.window.get() != 0 || frames.virq_offered.get() != 0 {
            // QEMU TCG's VMRUN raises V_IRQ without a lock, and may clear the pending state of a
            // host interrupt that arrives at that moment. The interrupt stays in the local APIC
            // unnoticed until that re-evaluates it, as it does on a write of its task priority.
            asm!("mov cr8, {}", in(reg) idt::TASK_PRIORITY as u64, options(nostack, preserves_flags));
        }
        end_guest_mode(matches!(code, exit::INTR | exit::NMI));
    }
    state.gpr[gpr::RAX].set(vmcb.save.rax.get());
    (code, handled)
}

// ---- FPU, debug and auxiliary registers --------------------------------------------------------

/// Loads this vCPU's FPU, debug and TSC_AUX registers, after saving those of the previous owner.
#[cold]
fn become_owner(kernel: &Kernel<X86>, local: &Local, GuestEntry { thread, vcpu }: GuestEntry<'_>) {
    let cpu_index = X86::this_cpu();
    if kernel.cpus[cpu_index].space.get() != Some(thread.task) {
        // The next task to run then loads its address space, which clears TSC_AUX
        // (`run::load_space`).
        X86::flush_local();
        kernel.clear_loaded_space(cpu_index);
    }
    if local.state_owner.get() == vcpu.handle.get() {
        return local.load_tsc_aux(local.saved_tsc_aux.get());
    }
    let have = features();
    if local.tsc_aux_owner.get().is_some() {
        local.clear_tsc_aux();
    }
    let old = local.state_owner.replace(vcpu.handle.get()).and_then(|old| kernel.memory.get(old));
    if let Some(old) = old {
        old.arch.save_xcr0(have);
        old.arch.tsc_aux.set(local.saved_tsc_aux.get());
    }
    local.load_tsc_aux(vcpu.arch.tsc_aux.get());
    // SAFETY: TS is cleared around FPU instructions only; areas are `xsave_size` long and
    // page-aligned; XCR0 values are valid for the machine. Debug registers do not affect memory.
    // For a destroyed vCPU there is no area, and nothing is saved.
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

// ---- ASIDs -------------------------------------------------------------------------------------

/// Assigns an ASID without TLB entries to the vCPU. This is also how a guest's TLB is flushed.
#[cold]
fn assign_asid(local: &Local, frames: &VcpuFrames, vm: &Vm<X86>) {
    let control = &frames.vmcb().control;
    if local.next_asid.get() >= features().asids {
        local.next_asid.set(1);
        local.asid_epoch.set(local.asid_epoch.get() + 1);
        control.tlb_control.set(tlb_control::FLUSH_ALL);
    }
    control.guest_asid.set(local.next_asid.replace(local.next_asid.get() + 1));
    frames.asid_epoch.set(local.asid_epoch.get());
    frames.vm_generation.set(vm.space.generation.get());
    frames.vmcb_changed.set(true);
}

// ---- VcpuRun -----------------------------------------------------------------------------------

/// Interrupt shadow in the VMCB (APM vol. 2 §15.21.5).
const SHADOW: u64 = 1;
/// Clean bits of a VMCB without changes in cached groups: all defined bits (APM vol. 2 §15.15.3).
const CLEAN: u64 = 0xfff;

/// Reason why a vCPU is not entered.
enum EntryError {
    /// The VMM gets this exit.
    Exit(u64),
    /// `VcpuRun` ends with this status.
    Failed(Status),
}

/// Thread and vCPU of an entry, looked up under the kernel lock.
#[derive(Clone, Copy)]
struct GuestEntry<'a> {
    thread: &'a Thread<X86>,
    vcpu: &'a Vcpu<X86>,
}

/// A [`GuestEntry`] across release of the kernel lock.
struct UnlockedEntry {
    thread: *const Thread<X86>,
    vcpu: *const Vcpu<X86>,
}

impl<'a> GuestEntry<'a> {
    /// Entry of `vcpu` by `thread`. `None` if its VM or notification no longer exists.
    #[inline(always)]
    fn new(kernel: &'a Kernel<X86>, thread: &'a Thread<X86>, vcpu: &'a Vcpu<X86>) -> Option<Self> {
        if vcpu.arch.destroyed_count.get() != kernel.memory.destroyed_count() {
            cache_objects(&kernel.memory, vcpu)?;
        }
        Some(Self { thread, vcpu })
    }

    /// Entry of the CPU's current thread, if that is in `VcpuRun`.
    #[cold]
    #[inline(never)]
    fn current(kernel: &'a Kernel<X86>, cpu_index: usize) -> Option<Self> {
        let thread = kernel.memory.get(kernel.cpus[cpu_index].current.get()?)?;
        Self::new(kernel, thread, kernel.memory.get(thread.state.get().vcpu()?)?)
    }

    /// Revalidates an entry after the lock was re-acquired. `destroyed_count`: value before its
    /// release.
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
        // SAFETY: objects do not move, and none was destroyed since these were references.
        Some(unsafe { Self { thread: &*unlocked.thread, vcpu: &*unlocked.vcpu } })
    }

    #[inline(always)]
    fn unlocked(&self) -> UnlockedEntry {
        UnlockedEntry { thread: self.thread, vcpu: self.vcpu }
    }

    #[inline(always)]
    fn vm(&self) -> &'a Vm<X86> {
        // SAFETY: no object was destroyed since the look-up, as checked when the entry was made;
        // the lock is held.
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

/// Enters the vCPU that `thread`, the CPU's current thread, runs in `VcpuRun`. Unless the VMM gets
/// an exit, the thread stays in `VcpuRun` and enters the guest again when next dispatched.
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
        arm(local, kernel.cpus[cpu_index].deadline().min(entry.vcpu.arch.state().deadline.get()));
        let (frames, unlocked, destroyed_count) =
            (&raw const entry.vcpu.arch, entry.unlocked(), kernel.memory.destroyed_count());
        unlock(kernel);
        // SAFETY: the vCPU is not freed before this CPU has answered a shootdown, when it acquires
        // the lock.
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
        let (state, control) = (frames.state(), &frames.vmcb().control);
        state.entries.add(1);
        if handled != 0 {
            // Each counts as an exit and another entry.
            state.entries.add(handled);
            state.handled_in_kernel.add(handled);
            add(&kernel.counters.vm_entries, handled);
            add(&kernel.counters.handled_in_kernel, handled);
        }
        control.tlb_control.set(tlb_control::NOTHING);
        state.inject.set(match interrupted_event(control.exit_int_info.get()) {
            0 => undelivered,
            // QEMU TCG also keeps a virtual interrupt pending whose delivery was interrupted.
            event => event,
        });
        state.cr8.set(virq::priority(control));
        if frames.window.get() & window::DELIVER_VIRQ != 0 {
            if !virq::is_pending(control) {
                // The guest has taken the virtual interrupt.
                let left = frames.window.get() & window::PERSISTENT;
                frames.window.set(left);
                frames.vmcb_changed.set(true);
                virq::clear(control, left);
                state.window.set(left);
            } else if (state.inject.get() ^ frames.window.get()) & event::VECTOR == 0 {
                // QEMU TCG: still pending as a virtual interrupt, which delivers it.
                state.inject.set(0);
            }
        }
        let to_vmm = match code {
            exit::VMMCALL if frames.is_doorbell() => {
                state.gpr[gpr::RAX]
                    .set(kernel.ring_doorbell(entry.vm(), state.gpr[gpr::RBX].get()));
                step_over_hypercall(frames.vmcb());
                state.handled_in_kernel.add(1);
                count(&kernel.counters.handled_in_kernel);
                if !kernel.has_work(cpu_index) {
                    continue;
                }
                None
            }
            exit::INTR | exit::NMI | exit::SMI | exit::INIT => {
                state.handled_in_kernel.add(1);
                count(&kernel.counters.handled_in_kernel);
                handle_pending(&kernel, cpu_index);
                after_interrupt(&kernel, cpu_index);
                None
            }
            exit::MACHINE_CHECK => {
                crate::machine_check::stop("while a guest ran", frames.vmcb().save.rip.get())
            }
            exit::SHUTDOWN => Some(shut_down(&kernel, entry)),
            exit::VINTR => {
                state.window.set(state.window.get() & window::PERSISTENT);
                Some(return_exit(&kernel, entry, kernel_exit::WINDOW, group::IP))
            }
            exit::HLT
                if state.halt.get() != 0
                    && state.window.get() == 0
                    && state.inject.get() == 0
                    && halt(&kernel, cpu_index, entry) =>
            {
                None
            }
            _ => Some(report(&kernel, entry, code, code)),
        };
        return (kernel, to_vmm);
    }
}

/// Blocks the VMM's thread in `VcpuRun` until an event or the deadline. Returns `false` if it
/// cannot wait.
#[inline(always)]
fn halt(kernel: &Kernel<X86>, cpu_index: usize, entry: GuestEntry<'_>) -> bool {
    let GuestEntry { thread, vcpu, .. } = entry;
    // The thread may have been stopped meanwhile.
    let Some(name) = kernel.cpus[cpu_index].current.get() else { return false };
    let since = crate::time::tsc();
    let deadline = vcpu.arch.state().deadline.get();
    let halts = deadline > since && kernel.halt(name, thread, entry.notification(), deadline);
    if halts {
        vcpu.arch.halted.set(since);
    }
    halts
}

/// Ends the wait at the guest's `HLT`: events are pending, or the deadline has passed.
#[cold]
fn end_halt(kernel: &Kernel<X86>, entry: GuestEntry<'_>) -> ExitToVmm {
    let state = entry.vcpu.arch.state();
    let since = entry.vcpu.arch.halted.take();
    state.events.set(entry.notification().bits.take());
    state.halted.add(crate::time::tsc().saturating_sub(since));
    report(kernel, entry, exit::HLT, kernel_exit::HALTED)
}

/// Returns the processor's exit `code` to the VMM, as `reported`.
#[inline(always)]
fn report(kernel: &Kernel<X86>, entry: GuestEntry<'_>, code: u64, reported: u64) -> ExitToVmm {
    let frames = &entry.vcpu.arch;
    let (state, control) = (frames.state(), &frames.vmcb().control);
    state.exit_info1.set(control.exit_info1.get());
    state.exit_info2.set(control.exit_info2.get());
    // 0 if the processor does not save the next instruction's address. Then the VMM decodes the
    // instruction, except for port accesses, where EXITINFO2 has that address.
    state.next_rip.set(control.n_rip.get());
    state.bytes_len.set(0);
    let groups = match code {
        exit::NPF => {
            page_fault_bytes(state, control);
            group::IP | group::CONTROL | group::CODE | group::SEGMENTS
        }
        exit::IOIO => group::IP,
        // The sizes in this leaf depend on XCR0.
        exit::CPUID if state.gpr[gpr::RAX].get() as u32 == hw_x86::cpuid::leaf::XSAVE => {
            frames.save_xcr0(features());
            group::IP | group::CONTROL | group::CODE | group::XCR0
        }
        _ if control.n_rip.get() != 0 => group::IP,
        _ => group::IP | group::CONTROL | group::CODE,
    };
    return_exit(kernel, entry, reported, groups)
}

/// Handles a shutdown of the guest: an exit for its VMM, unless a hardware error caused it.
#[cold]
#[inline(never)]
fn shut_down(kernel: &Kernel<X86>, entry: GuestEntry<'_>) -> ExitToVmm {
    crate::machine_check::check_after_shutdown(entry.vcpu.arch.vmcb().save.rip.get());
    report(kernel, entry, exit::SHUTDOWN, exit::SHUTDOWN)
}

/// Updates the processor structures of a vCPU, and its state loaded in the CPU, before an entry.
#[inline(always)]
fn prepare(kernel: &Kernel<X86>, local: &Local, entry: GuestEntry<'_>) -> Result<(), EntryError> {
    let (vcpu, vm) = (entry.vcpu, entry.vm());
    if vm.space.dying.get() {
        return Err(EntryError::Failed(Status::Aborted));
    }
    let frames = &vcpu.arch;
    let state = frames.state();
    let dirty = state.dirty.get();
    if dirty != 0 {
        let is_owner = local.state_owner.get() == vcpu.handle.get();
        state.dirty.set(0);
        frames.write_groups(state, dirty, is_owner).map_err(EntryError::Failed)?;
    }
    let bits = entry.notification().bits.take();
    if bits != 0 {
        state.events.set(bits);
        return Err(EntryError::Exit(kernel_exit::RECALL));
    }
    if local.tsc_aux_owner.get() != vcpu.handle.get() {
        become_owner(kernel, local, entry);
    }
    if frames.asid_epoch.get() != local.asid_epoch.get()
        || frames.vm_generation.get() != vm.space.generation.get()
    {
        assign_asid(local, frames, vm);
        frames.vmcb().control.n_cr3.set(kernel.memory.physical(vm.space.root));
    }
    if frames.port_generation.get() != vm.space.port_generation.get() {
        frames.port_generation.set(vm.space.port_generation.get());
        frames.vmcb_changed.set(true);
        if let Some(map) = vm.space.port_map.get() {
            frames.vmcb().control.iopm_base_pa.set(kernel.memory.physical(map));
        }
    }
    let window = state.window.get();
    if frames.window.get() != window {
        frames.set_window(window);
    }
    frames.vmcb().control.event_inj.set(0);
    let event = state.inject.get();
    if event != 0 {
        state.inject.set(0);
        frames.inject(event);
    }
    let control = &frames.vmcb().control;
    control.clean.set(CLEAN);
    if frames.vmcb_changed.get() {
        frames.vmcb_changed.set(false);
        control.clean.set(0);
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

/// Ends the `VcpuRun` of a thread whose vCPU was destroyed. Returns null.
#[cold]
pub fn abort_destroyed_vcpu(kernel: &Kernel<X86>, thread: &Thread<X86>) -> *const Vcpu<X86> {
    kernel.vcpu_return(thread, None, Status::Aborted);
    ptr::null()
}

/// Ends the `VcpuRun` of the CPU's current thread, if it is still in it, because an object that it
/// needs was destroyed.
#[cold]
#[inline(never)]
fn abort_run(kernel: &Kernel<X86>, cpu_index: usize) {
    if let Some(thread) =
        kernel.cpus[cpu_index].current.get().and_then(|name| kernel.memory.get(name))
        && let Some(name) = thread.state.get().vcpu()
    {
        kernel.vcpu_return(thread, kernel.memory.get(name), Status::Aborted);
    }
}

/// Returns an exit to the VMM after a host interrupt, if needed. Only here is the deadline compared
/// with the clock: before an entry the VMM has just read the clock, and a deadline in the past
/// interrupts at once.
#[cold]
fn after_interrupt(kernel: &Kernel<X86>, cpu_index: usize) {
    // The thread may have been stopped, or its `VcpuRun` aborted.
    let Some(entry) = GuestEntry::current(kernel, cpu_index) else { return };
    let frames = &entry.vcpu.arch;
    if frames.vmcb().control.interrupt_shadow.get() & SHADOW != 0 {
        // Not every processor restores an interrupt shadow on entry (QEMU TCG does not), so the VMM
        // must emulate the instruction in it.
        frames.state().events.set(0);
        return_exit(kernel, entry, kernel_exit::RECALL, group::IP);
    } else if frames.state().deadline.get() <= crate::time::tsc() {
        return_exit(kernel, entry, kernel_exit::DEADLINE, group::IP);
    }
}

/// Copies the bytes of the faulting instruction, if the processor reports them (APM vol. 2
/// §15.33.5).
#[cold]
fn page_fault_bytes(state: &VcpuState, control: &ControlArea) {
    if features().decode_assist && control.exit_info1.get() & npf::FETCH == 0 {
        state.bytes_len.set(control.fetched_bytes.get() as u64 & 0xf);
        for (to, from) in state.bytes.iter().zip(control.instruction_bytes.get()) {
            to.set(from);
        }
    }
}

fn add(counter: &Cell<u64>, value: u64) {
    counter.set(counter.get() + value);
}

/// Event to inject again after an exit that interrupted its delivery. Software interrupts and
/// exceptions recur, because their instruction has not completed (APM vol. 2 §15.20).
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

/// Return to user mode of the CPU's current thread: a VMM thread whose `VcpuRun` has ended.
/// Ordinary threads return in the same way.
pub struct ExitToVmm {
    /// Task of the thread.
    pub task: Handle<Task<X86>>,
    /// Saved registers of the thread.
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
    state.exit_code.set(code);
    state.valid.set(group::INJECT | group::PRIORITY | groups);
    // Constant arguments make the frequent cases branch-free.
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

/// Number of host-state frames per CPU.
pub const HOST_FRAMES: u32 = (size_of::<HostPages>() / 4096) as u32;

/// Physical addresses of the host-state pages of all CPUs, for their own initialisation.
static HOST_PAGES: [AtomicU64; MAX_CPUS] = [const { AtomicU64::new(0) }; MAX_CPUS];

/// Records a CPU's host-state pages.
pub fn set_host_pages(memory: &Memory, cpu_index: usize, pages: Frame) {
    HOST_PAGES[cpu_index].store(memory.physical(pages), Ordering::Release);
}

/// Enables SVM on this CPU, with its recorded host-state pages.
pub fn init_this_cpu(memory: &Memory, cpu_index: usize) {
    let physical = HOST_PAGES[cpu_index].load(Ordering::Acquire);
    if physical != 0 {
        init_cpu(cpu_index, memory, memory.frame_at(physical));
    }
}
