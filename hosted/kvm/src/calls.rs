//! ioctls of KVM that kvm-ioctls does not provide (`Documentation/virt/kvm/api.rst` and
//! `devices/vcpu.rst` in Linux), and of tap devices (`Documentation/networking/tuntap.rst`).

use std::ffi::c_ulong;
use std::fs::File;
use std::io;

use kvm_bindings::{KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, KVMIO, kvm_device_attr, kvm_interrupt};
use kvm_ioctls::VcpuFd;
use vmm_bus::backend::OffloadCaps;
use vmm_sys_util::ioctl::{ioctl_with_mut_ref, ioctl_with_ref, ioctl_with_val};
use vmm_sys_util::ioctl_iow_nr;

ioctl_iow_nr!(KVM_INTERRUPT, KVMIO, 0x86, kvm_interrupt);
ioctl_iow_nr!(KVM_SET_DEVICE_ATTR, KVMIO, 0xe1, kvm_device_attr);
ioctl_iow_nr!(KVM_HAS_DEVICE_ATTR, KVMIO, 0xe3, kvm_device_attr);
ioctl_iow_nr!(TUNSETIFF, b'T' as u32, 202, i32);
ioctl_iow_nr!(TUNSETOFFLOAD, b'T' as u32, 208, u32);

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

/// Attaches a descriptor of `/dev/net/tun` to the tap device with this name.
pub fn become_tap(file: &File, name: [u8; 16]) -> io::Result<()> {
    /// `IFF_TAP`, `IFF_NO_PI`, `IFF_VNET_HDR`.
    const FLAGS: u16 = 0x0002 | 0x1000 | 0x4000;
    // `struct ifreq`: name, flags, padding.
    let mut request = [0_u8; 40];
    request[..16].copy_from_slice(&name);
    request[16..18].copy_from_slice(&FLAGS.to_le_bytes());
    // SAFETY: the kernel reads and writes the structure of this ioctl.
    result(unsafe { ioctl_with_mut_ref(file, TUNSETIFF() as c_ulong, &mut request) })
}

/// Sets the offloads of a tap device that the guest accepts.
pub fn set_offload(file: &File, takes: OffloadCaps) -> io::Result<()> {
    // `TUN_F_CSUM`, `TUN_F_TSO4`, `TUN_F_TSO6`.
    let bits = [(takes.csum, 1), (takes.tcp4, 2), (takes.tcp6, 4)];
    let bits = bits.iter().filter(|(takes, _)| *takes).map(|(_, bit)| bit).sum();
    // SAFETY: the ioctl accesses no memory.
    result(unsafe { ioctl_with_val(file, TUNSETOFFLOAD() as c_ulong, bits) })
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
