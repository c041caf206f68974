//! ioctls of KVM that kvm-ioctls does not provide (`Documentation/virt/kvm/api.rst` and
//! `devices/vcpu.rst` in Linux).

use std::ffi::c_ulong;
use std::io;

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, KVMIO, kvm_device_attr, kvm_interrupt};
use kvm_ioctls::VcpuFd;
use vmm_sys_util::ioctl::ioctl_with_ref;
use vmm_sys_util::ioctl_iow_nr;

ioctl_iow_nr!(KVM_INTERRUPT, KVMIO, 0x86, kvm_interrupt);
ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, KVMIO, 0xe1, kvm_device_attr);
ioctl_iow_nr!(KVM_HAS_DEVICE_ATTR, KVMIO, 0xe3, kvm_device_attr);

/// Injects an interrupt at the next guest entry.
pub fn interrupt(vcpu: &VcpuFd, vector: u8) -> io::Result<()> {
    let interrupt = kvm_interrupt { irq: vector.into() };
    // SAFETY: KVM reads the structure of this ioctl.
    result(unsafe { ioctl_with_ref(vcpu, KVM_INTERRUPT() as c_ulong, &interrupt) })
}

/// Sets the offset of the guest TSC from the host TSC.
pub fn set_tsc_offset(vcpu: &VcpuFd, offset: u64) -> io::Result<()> {
    let attribute = tsc_offset(&offset);
    // SAFETY: KVM reads the structure of this ioctl and its target, which lives as long.
    result(unsafe { ioctl_with_ref(vcpu, KVM_SET_DEVICE_ATTR() as c_ulong, &attribute) })
}

/// Returns whether KVM supports [`set_tsc_offset`].
pub fn has_tsc_offset(vcpu: &VcpuFd) -> bool {
    let attribute = tsc_offset(&0);
    // SAFETY: KVM only reads the structure.
    result(unsafe { ioctl_with_ref(vcpu, KVM_HAS_DEVICE_ATTR() as c_ulong, &attribute) }).is_ok()
}

fn tsc_offset(offset: &u64) -> kvm_device_attr {
    kvm_device_attr {
        flags: 0,
        group: KVM_VCPU_TSC_CTRL,
        attr: KVM_VCPU_TSC_OFFSET.into(),
        addr: (&raw const *offset).expose_provenance() as u64,
    }
}

fn result(value: i32) -> io::Result<()> {
    if value < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
