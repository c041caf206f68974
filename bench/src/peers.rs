//! Figures of native Linux and other hypervisors on the same emulated machine.
//!
//! Measured with the same benchmark and kernel series on QEMU 7.2 (`-icount shift=0`): KVM is
//! Debian's kernel with `kvm_amd` and QEMU's microvm as its user-level VMM, Xen is 4.17 with a
//! paravirtualized guest.

/// One row of the guest benchmark, in instructions per operation.
pub struct PeerRow {
    /// Name in the benchmark's output.
    pub name: &'static str,
    /// Title of the row.
    pub title: &'static str,
    /// Native Linux.
    pub native: f64,
    /// KVM with nested paging.
    pub kvm: f64,
    /// KVM with shadow paging; `None` where it could not be measured.
    pub shadow: Option<f64>,
    /// Xen, paravirtualized.
    pub xen: f64,
}

const fn peer(
    name: &'static str,
    title: &'static str,
    native: f64,
    kvm: f64,
    shadow: Option<f64>,
    xen: f64,
) -> PeerRow {
    PeerRow { name, title, native, kvm, shadow, xen }
}

/// The rows that make up the guest's score.
pub const GUEST: &[PeerRow] = &[
    peer("nullsys", "null system call", 338.0, 340.0, Some(339.0), 946.0),
    peer("forkwait", "fork + exit + wait", 147_280.0, 148_444.0, Some(697_580.0), 610_880.0),
    peer("forkexec", "fork + exec", 513_777.0, 621_054.0, Some(1_941_789.0), 1_653_476.0),
    peer("touch_anon", "touch fresh anonymous page", 4_592.0, 4_634.0, Some(11_694.0), 8_871.0),
    peer("touch_file", "touch page of a mapped file", 2_708.0, 2_745.0, Some(10_298.0), 7_433.0),
    peer("coldtouch_1st", "first touch of guest memory", 3_310.0, 4_330.0, Some(10_998.0), 6_122.0),
    peer("sockxmit_rt", "socket pair round trip", 17_430.0, 17_565.0, None, 28_713.0),
    peer(
        "ctx_2p_0k",
        "context switch, 2 processes, 0 KB",
        3_327.0,
        3_420.0,
        Some(6_794.0),
        7_266.0,
    ),
    peer(
        "ctx_16p_64k",
        "context switch, 16 processes, 64 KB",
        4_116.0,
        3_973.0,
        Some(8_147.0),
        7_988.0,
    ),
];

/// A hypercall that KVM handles in the kernel.
pub const KVM_HYPERCALL: f64 = 3_137.0;
/// CPUID, handled in KVM's kernel module.
pub const KVM_CPUID: f64 = 2_864.0;
/// Port I/O, handled by KVM's user-level VMM.
pub const KVM_PORT: f64 = 5_843.0;
/// Read of CR8 with a virtual task priority: `vmexit` of kvm-unit-tests, its loop included.
pub const KVM_CR8: f64 = 7.0;
/// Inter-VM message without a world switch: Varanasi, "Implementing Hardware-supported
/// Virtualization in OKL4 on ARM", 2010, in instructions of an ARM processor.
pub const VARANASI_MESSAGE: f64 = 570.0;
/// See [`VARANASI_MESSAGE`].
pub const VARANASI_MESSAGE_SWITCH: f64 = 8_340.0;
/// See [`VARANASI_MESSAGE`].
pub const VARANASI_WORLD_SWITCH: f64 = 7_955.0;
/// Memory of one VM of Karma, a VMM of the same kind, in bytes.
pub const KARMA_BYTES: f64 = 284.0 * 1024.0;

/// KVM with VHE on the same emulated machine (QEMU 7.2, Cortex-A76, GICv3), in instructions:
/// hypercall, access to a UART that QEMU emulates, SGI to itself, SGI to a vCPU in WFI, the virtual
/// timer's interrupt, and the same out of WFI.
pub const ARM_HYPERCALL: f64 = 1_078.0;
pub const ARM_MMIO: f64 = 6_118.0;
pub const ARM_SELF_SGI: f64 = 2_601.0;
pub const ARM_IPI: f64 = 4_886.0;
pub const ARM_TIMER: f64 = 2_544.0;
pub const ARM_TIMER_WFI: f64 = 9_472.0;
/// KVM: first access of a guest to a page of its memory.
pub const ARM_PAGE: f64 = 876.0;
/// Bao, whose guests have all their memory from the start.
pub const ARM_PAGE_BEFORE: f64 = 4.0;
