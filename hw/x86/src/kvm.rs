//! Hypercalls and shared memory of the KVM paravirtual interface (Linux
//! `Documentation/virt/kvm/x86/hypercalls.rst` and `msr.rst`). [`crate::cpuid::kvm_a`] contains its
//! features, [`crate::msr::kvm`] its MSRs.

/// Hypercalls: number in `rax`, arguments in `rbx`, `rcx`, `rdx`, `rsi`, result in `rax`.
pub mod hypercall {
    /// Sends an IPI to several vCPUs: `rbx` and `rcx` are a bitmap of APIC ids (64 bits each in
    /// 64-bit mode, else 32) starting at `rdx`; `rsi` is the interrupt command without destination.
    /// Returns the number of vCPUs interrupted.
    pub const SEND_IPI: u64 = 10;

    /// Result: not permitted at this CPL (`-EPERM`).
    pub const NOT_PERMITTED: i64 = -1;
    /// Result: invalid arguments (`-EINVAL`).
    pub const INVALID: i64 = -22;
    /// Result: unknown hypercall (`-KVM_ENOSYS`).
    pub const UNKNOWN: i64 = -1000;
}

/// `struct kvm_steal_time`, 64 bytes, naturally aligned; zeroed by the guest before it sets the
/// address.
pub mod steal_time {
    /// Length.
    pub const LENGTH: u64 = 64;
    /// 8 bytes: time in ns during which the vCPU was runnable but did not run.
    pub const STEAL: u64 = 0;
    /// 4 bytes: odd while the host updates the other fields.
    pub const VERSION: u64 = 8;
    /// 4 bytes, of which the first is used: [`PREEMPTED`] and [`FLUSH_TLB`].
    pub const STATE: u64 = 16;

    /// [`STATE`]: the vCPU is preempted.
    pub const PREEMPTED: u32 = 1 << 0;
    /// [`STATE`]: flush the TLB before the vCPU runs again. Set by other vCPUs, while [`PREEMPTED`]
    /// is set.
    pub const FLUSH_TLB: u32 = 1 << 1;
}
