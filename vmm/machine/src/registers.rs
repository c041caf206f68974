//! Sets the initial registers of a boot protocol.

use vmm_boot::InitialState;
use vmm_x86::{Event, Gpr, Groups, InterruptWindow, Reg, Registers, Seg, X86Vcpu};

/// Sets every register; those that the protocol leaves undefined get their reset values.
pub fn set(vcpu: &mut impl X86Vcpu, state: &InitialState) {
    let mut registers = Registers::reset(0, 0);
    registers[Gpr::Rsp] = state.rsp;
    registers[Gpr::Rbx] = state.rbx;
    registers[Gpr::Rax] = state.rax;
    registers[Gpr::Rsi] = state.rsi;
    registers[Reg::Rip] = state.rip;
    registers[Reg::Rflags] = state.rflags;
    registers[Reg::Cr0] = state.cr0;
    registers[Reg::Cr3] = state.cr3;
    registers[Reg::Cr4] = state.cr4;
    registers[Reg::Efer] = state.efer;
    registers[Seg::Cs] = state.cs;
    for data in [Seg::Ds, Seg::Es, Seg::Ss, Seg::Fs, Seg::Gs] {
        registers[data] = state.data;
    }
    registers[Seg::Tr] = state.tr;
    registers[Seg::Gdtr] = state.gdtr;
    registers[Seg::Idtr] = state.idtr;
    registers[Seg::Ldtr] = state.ldtr;
    vcpu.store(&registers, Groups::BOOT);
    vcpu.set_event(Event::NONE);
    vcpu.set_window(InterruptWindow::Nothing);
    vcpu.set_deadline(u64::MAX);
}
