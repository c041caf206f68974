//! Instructions that access control registers, and `INVLPG` (AMD APM vol. 3), for a back end whose
//! guest exits on them. The run loop performs the access: it knows the registers' rules.

use hw_x86::paging::cr4;
use vmm_mem::GuestMemory;
use vmm_x86::walk::CodeView;
use vmm_x86::{ControlAccess, DecodedControl, Event, Reg, X86Vcpu};

use crate::decode::{Op, Operand};
use crate::{Devices, Done, Emulator, PROTECTION, Stop, fetch};

/// An instruction with control registers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Control {
    /// The access that remains to be performed. Its privilege has been checked.
    Access(DecodedControl),
    /// The instruction has been executed (`SMSW`).
    Completed(Done),
}

/// Decodes the current instruction and reads its operand: `MOV` to and from a control register,
/// `LMSW`, `CLTS` or `INVLPG`; executes `SMSW`. Operands of `SMSW` and `LMSW` may be in a device.
///
/// # Errors
/// See [`Stop`]. `#GP(0)` without the privilege for the instruction.
pub fn control<V: X86Vcpu>(
    vcpu: &mut V,
    memory: &GuestMemory,
    devices: &mut impl Devices,
) -> Result<Control, Stop> {
    let code = CodeView::of(vcpu);
    let (instruction, bytes) = fetch(vcpu, memory, &code)?;
    if !is_control(instruction.op) && instruction.op != Op::Smsw {
        return Err(Stop::Unknown(bytes));
    }
    let user = vcpu.get(Reg::Cpl) != 0;
    // SMSW is privileged only with UMIP.
    if user && (instruction.op != Op::Smsw || vcpu.get(Reg::Cr4) & cr4::UMIP != 0) {
        return Err(Stop::Raise(Event::exception_code(PROTECTION, 0)));
    }
    let mut emulator = Emulator { vcpu, memory, devices, code, instruction };
    if instruction.op == Op::Smsw {
        return emulator.execute().map(Control::Completed);
    }
    emulator.control_access(bytes).map(Control::Access)
}

/// Returns true for the instructions that only [`control`] decodes.
pub(crate) fn is_control(op: Op) -> bool {
    matches!(op, Op::MoveControl | Op::Lmsw | Op::Clts | Op::Invlpg)
}

impl<V: X86Vcpu, D: Devices> Emulator<'_, V, D> {
    /// Returns the access of this instruction; `bytes` are its first.
    fn control_access(&mut self, bytes: u64) -> Result<DecodedControl, Stop> {
        let instruction = self.instruction;
        let access = match (instruction.op, instruction.first, instruction.second) {
            (Op::MoveControl, Operand::Register { register, .. }, Operand::Control(control)) => {
                ControlAccess::Read { control, register }
            }
            (Op::MoveControl, Operand::Control(control), Operand::Register { register, .. }) => {
                ControlAccess::Write { control, register }
            }
            (Op::Lmsw, _, word) => {
                let place = self.resolve(word, 2, false, Operand::None)?;
                ControlAccess::LoadStatusWord(self.load(place, 2) as u16)
            }
            (Op::Clts, ..) => ControlAccess::ClearTaskSwitched,
            (Op::Invlpg, Operand::Memory(address), _) => {
                let offset = self.effective(address);
                ControlAccess::InvalidatePage(self.linear(address.segment, offset))
            }
            _ => return Err(Stop::Unknown(bytes)),
        };
        let rip = self.vcpu.get(Reg::Rip);
        Ok(DecodedControl { access, next: self.code.advance(rip, instruction.length.into()) })
    }
}
