//! Sets the initial registers of a boot protocol.

use vmm_boot::InitialState;
use vmm_x86::{Event, Gpr, InterruptWindow, Reg, Seg, X86Vcpu};

/// `PAT` after reset (AMD APM vol. 2, section 7.8).
const PAT: u64 = 0x0007_0406_0007_0406;
/// `DR6` and `DR7` after reset (APM vol. 2, table 14-1).
const DR6: u64 = 0xffff_0ff0;
const DR7: u64 = 0x400;

/// Sets every register; those that the protocol leaves undefined get their reset values.
pub fn set(vcpu: &mut impl X86Vcpu, state: &InitialState) {
    for code in 0..16 {
        vcpu.set_gpr(Gpr::from_code(code), 0);
    }
    vcpu.set_gpr(Gpr::Rsp, state.rsp);
    vcpu.set_gpr(Gpr::Rbx, state.rbx);
    vcpu.set_gpr(Gpr::Rax, state.rax);
    vcpu.set_gpr(Gpr::Rsi, state.rsi);
    let zero = [
        Reg::InterruptShadow,
        Reg::Cr2,
        Reg::Cpl,
        Reg::Star,
        Reg::Lstar,
        Reg::Cstar,
        Reg::Sfmask,
        Reg::KernelGsBase,
        Reg::SysenterCs,
        Reg::SysenterEsp,
        Reg::SysenterEip,
    ];
    for register in zero {
        vcpu.set(register, 0);
    }
    vcpu.set(Reg::Rip, state.rip);
    vcpu.set(Reg::Rflags, state.rflags);
    vcpu.set(Reg::Cr0, state.cr0);
    vcpu.set(Reg::Cr3, state.cr3);
    vcpu.set(Reg::Cr4, state.cr4);
    vcpu.set(Reg::Efer, state.efer);
    vcpu.set(Reg::Pat, PAT);
    vcpu.set(Reg::Dr6, DR6);
    vcpu.set(Reg::Dr7, DR7);
    vcpu.set_segment(Seg::Cs, state.cs);
    for data in [Seg::Ds, Seg::Es, Seg::Ss, Seg::Fs, Seg::Gs] {
        vcpu.set_segment(data, state.data);
    }
    vcpu.set_segment(Seg::Tr, state.tr);
    vcpu.set_segment(Seg::Gdtr, state.gdtr);
    vcpu.set_segment(Seg::Idtr, state.idtr);
    vcpu.set_segment(Seg::Ldtr, state.ldtr);
    vcpu.set_event(Event::NONE);
    vcpu.set_window(InterruptWindow::Nothing);
    vcpu.set_deadline(u64::MAX);
}
