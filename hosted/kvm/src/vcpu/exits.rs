//! Entries into the guest, and its exits.

use std::ptr;

use kvm_ioctls::{Error, VcpuExit};
use rustix::io::Errno;
use vmm_x86::{Access, Exit, Space};

use super::{KvmVcpu, Pending, Ports, StepState};
use crate::error::report_failure;

/// Reasons of KVM exits that the guest causes.
const NO_ENTRY: &str = "KVM cannot enter the guest with its registers (KVM_EXIT_FAIL_ENTRY)";
const NO_EMULATION: &str =
    "KVM cannot emulate a guest instruction (KVM_EXIT_INTERNAL_ERROR), suberror";

impl KvmVcpu<'_> {
    /// Returns the next access of a string instruction.
    pub fn next_port(&mut self) -> Option<Exit> {
        let ports = self.ports.as_mut()?;
        let size = usize::from(ports.size);
        if ports.left < size {
            self.ports = None;
            return None;
        }
        let place = ports.next;
        ports.next = place.wrapping_add(size);
        ports.left -= size;
        let value = ports.write.then(|| {
            let mut bytes = [0; 8];
            // SAFETY: KVM has written `size` bytes there, at most four, in the memory that it
            // shares as long as `fd` is open. It does not change them before the next entry.
            unsafe { ptr::copy_nonoverlapping(place, bytes.as_mut_ptr(), size) };
            u64::from_le_bytes(bytes)
        });
        self.pending =
            if value.is_some() { Pending::Answered } else { Pending::Bytes(place, size) };
        let (address, size) = (ports.port.into(), ports.size);
        Some(Exit::Access(Access { space: Space::Port, address, size, value }))
    }

    /// Returns the guest's `CR8`, which KVM has stored at the exit.
    pub fn present_cr8(&mut self) -> u8 {
        self.fd.get_kvm_run().cr8 as u8 & 0xf
    }

    /// Enters the guest once. `None`: no exit to report.
    pub fn enter(&mut self) -> Option<Exit> {
        self.sregs = None;
        self.next_rip = 0;
        self.pending = Pending::Nothing;
        match self.fd.run() {
            Ok(VcpuExit::IoIn(port, data)) => {
                let (next, left) = (data.as_mut_ptr(), data.len());
                self.ports_accessed(port, next, left, false)
            }
            Ok(VcpuExit::IoOut(port, data)) => {
                let (next, left) = (data.as_ptr().cast_mut(), data.len());
                self.ports_accessed(port, next, left, true)
            }
            Ok(VcpuExit::MmioRead(address, data)) => {
                self.pending = Pending::Bytes(data.as_mut_ptr(), data.len());
                access(Space::Memory, address, data.len(), None)
            }
            Ok(VcpuExit::MmioWrite(address, data)) => {
                self.pending = Pending::Answered;
                let mut bytes = [0; 8];
                let size = data.len().min(bytes.len());
                bytes[..size].copy_from_slice(&data[..size]);
                access(Space::Memory, address, size, Some(u64::from_le_bytes(bytes)))
            }
            Ok(VcpuExit::X86Rdmsr(read)) => {
                self.pending = Pending::Msr;
                access(Space::Msr, read.index.into(), 8, None)
            }
            Ok(VcpuExit::X86Wrmsr(write)) => {
                self.pending = Pending::Msr;
                access(Space::Msr, write.index.into(), 8, Some(write.data))
            }
            Ok(VcpuExit::Hlt) => self.halted(),
            Ok(VcpuExit::Shutdown) => Some(Exit::Shutdown),
            Ok(VcpuExit::FailEntry(code, _)) => Some(Exit::InvalidState { why: NO_ENTRY, code }),
            Ok(VcpuExit::InternalError) => {
                // SAFETY: the exit reason is an internal error, which selects this member of the
                // union.
                Some(internal_error(unsafe {
                    self.fd.get_kvm_run().__bindgen_anon_1.internal.suberror
                }))
            }
            Ok(VcpuExit::Debug(_)) => {
                self.step = StepState::Done;
                None
            }
            // The VM's interrupt controller may have an interrupt that is deliverable now.
            Ok(VcpuExit::SetTpr) => Some(Exit::Recall { events: 0 }),
            Ok(VcpuExit::IrqWindowOpen | VcpuExit::Intr | VcpuExit::Nmi) => None,
            // No other exits are enabled.
            Ok(_) => Some(report_failure(Exit::Unknown(self.fd.get_kvm_run().exit_reason.into()))),
            Err(error) => entry_error(error),
        }
    }

    /// Returns the first of the port accesses that KVM reports together.
    fn ports_accessed(
        &mut self,
        port: u16,
        next: *mut u8,
        left: usize,
        write: bool,
    ) -> Option<Exit> {
        // SAFETY: the exit reason is a port access, which selects this member of the union.
        let io = unsafe { self.fd.get_kvm_run().__bindgen_anon_1.io };
        self.ports = Some(Ports { port, size: io.size.clamp(1, 4), write, next, left });
        self.next_port()
    }
}

fn access(space: Space, address: u64, size: usize, value: Option<u64>) -> Option<Exit> {
    Some(Exit::Access(Access { space, address, size: size as u8, value }))
}

/// Returns the exit for an error of `KVM_RUN`; `None` if a signal ended it.
fn entry_error(error: Error) -> Option<Exit> {
    match Errno::from_raw_os_error(error.errno()) {
        Errno::INTR | Errno::AGAIN => None,
        _ => Some(report_failure(Exit::HostError(error.errno() as u64))),
    }
}

/// Attributes an internal error of KVM: to the guest if it executes an instruction that KVM would
/// have to emulate and cannot (such as code in device memory), or delivers an event through tables
/// in device memory; otherwise to KVM.
fn internal_error(suberror: u32) -> Exit {
    use kvm_bindings::{
        KVM_EXIT_INTERNAL_ERROR, KVM_INTERNAL_ERROR_DELIVERY_EV, KVM_INTERNAL_ERROR_EMULATION,
        KVM_INTERNAL_ERROR_SIMUL_EX,
    };
    match suberror {
        KVM_INTERNAL_ERROR_EMULATION
        | KVM_INTERNAL_ERROR_SIMUL_EX
        | KVM_INTERNAL_ERROR_DELIVERY_EV => {
            Exit::InvalidState { why: NO_EMULATION, code: suberror.into() }
        }
        _ => report_failure(Exit::Unknown(KVM_EXIT_INTERNAL_ERROR.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn internal_errors_are_the_guests_fault_or_kvms() {
        let fault = |suberror| matches!(internal_error(suberror), Exit::InvalidState { .. });
        assert_eq!([0, 1, 2, 3, 4, 5].map(fault), [false, true, true, true, false, false]);
        assert_eq!(internal_error(4), Exit::Unknown(17));
    }
}
