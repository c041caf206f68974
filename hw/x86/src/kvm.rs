//! Hypercalls and shared memory of the KVM paravirtual interface (Linux `Documentation/virt/kvm/x86/hypercalls.rst`
//! and `msr.rst`). Its features are in [`crate::cpuid::kvm_a`], its MSRs in [`crate::msr::kvm`].

/// Hypercalls: number in `rax`, arguments in `rbx`, `rcx`, `rdx`, `rsi`, result in `rax`.
pub mod hypercall {
    /// Wakes a halted processor: `rcx` is its APIC id.
    pub const KICK_CPU: u64 = 5;
    /// Interrupts several processors: `rbx` and `rcx` are a bitmap of APIC ids (64 bits each in 64-bit mode, else 32) from
    /// `rdx` on, `rsi` is the interrupt command without destination. The result is how many get it.
    pub const SEND_IPI: u64 = 10;

    /// Result: it may not be called from here (`-EPERM`).
    pub const NOT_PERMITTED: i64 = -1;
    /// Result: bad arguments (`-EINVAL`).
    pub const INVALID: i64 = -22;
    /// Result: there is none with this number (`-KVM_ENOSYS`).
    pub const UNKNOWN: i64 = -1000;
}

/// `struct kvm_steal_time`, 64 bytes and aligned to them; zeroed by the guest before it gives the address.
pub mod steal_time {
    /// Length.
    pub const LENGTH: u64 = 64;
    /// 8 bytes: time that the processor did not run although it had something to do, in ns.
    pub const STEAL: u64 = 0;
    /// 4 bytes: odd while the rest is being written.
    pub const VERSION: u64 = 8;
    /// 4 bytes, of which the first is used: [`PREEMPTED`] and [`FLUSH_TLB`].
    pub const STATE: u64 = 16;

    /// [`STATE`]: the processor does not run.
    pub const PREEMPTED: u32 = 1 << 0;
    /// [`STATE`]: before it runs again its TLB is to be flushed. Set by other processors, while [`PREEMPTED`] is.
    pub const FLUSH_TLB: u32 = 1 << 1;
}
