//! Exchange of state groups between VMCB and state page.

use abi::vcpu::x86::{SharedSegment, VcpuState, group};
use hw_x86::msr;
use hw_x86::vmcb::{SavedSegment, Vmcb};

use crate::svm::{exit, virq};

/// Interrupt shadow in the VMCB (APM vol. 2 §15.21.5).
pub const SHADOW: u64 = 1;

/// Copies the groups of most exits: `IP`, and for decoding of the instruction `CONTROL` and `CODE`.
#[inline(always)]
pub fn read_code(state: &VcpuState, Vmcb { control, save }: &Vmcb, groups: u64) {
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

/// Copies groups that the VMCB holds to the state page.
pub fn read(state: &VcpuState, vmcb: &Vmcb, groups: u64) {
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
}

/// Takes over the group `IP`.
#[inline(always)]
pub fn write_ip(state: &VcpuState, Vmcb { control, save }: &Vmcb) {
    save.rip.set(state.rip.get());
    save.rsp.set(state.rsp.get());
    save.rflags.set(state.rflags.get());
    control.interrupt_shadow.set(state.interrupt_shadow.get() & SHADOW);
}

/// Takes over the other groups that the VMCB holds.
pub fn write(state: &VcpuState, Vmcb { control, save }: &Vmcb, dirty: u64) {
    if dirty & group::CONTROL != 0 {
        save.cr0.set(state.cr0.get());
        save.cr2.set(state.cr2.get());
        save.cr3.set(state.cr3.get());
        save.cr4.set(state.cr4.get());
        save.efer.set(state.efer.get() | msr::efer::SVME);
        save.cpl.set(state.cpl.get() as u8 & 3);
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
}

fn copy_to_state(to: &SharedSegment, from: &SavedSegment) {
    to.access.set(from.access.get());
    to.base.set(from.base.get());
}

fn copy_from_state(to: &SavedSegment, from: &SharedSegment) {
    to.access.set(exit::to_vmcb_access(from.access.get()));
    to.base.set(from.base.get());
}

#[cfg(test)]
mod tests {
    use super::*;

    const SVME: u64 = msr::efer::SVME;

    fn vmcb() -> Box<Vmcb> {
        // SAFETY: all fields are integers.
        unsafe { Box::new(core::mem::zeroed()) }
    }

    /// Words of a state page that groups copy, from `rip` to `tsc_offset`, CR8 included.
    fn fill(state: &VcpuState) {
        let words = [
            &state.rip,
            &state.rsp,
            &state.rflags,
            &state.cr0,
            &state.cr2,
            &state.cr3,
            &state.cr4,
            &state.star,
            &state.lstar,
            &state.cstar,
            &state.sfmask,
            &state.kernel_gs_base,
            &state.sysenter_cs,
            &state.sysenter_esp,
            &state.sysenter_eip,
            &state.pat,
            &state.dr6,
            &state.dr7,
            &state.tsc_offset,
        ];
        for (value, word) in words.into_iter().enumerate() {
            word.set(0x100 + value as u64);
        }
        let tables = [&state.gdtr, &state.ldtr, &state.idtr, &state.tr];
        for (value, segment) in state.segments.iter().chain(tables).enumerate() {
            segment.access.set(0x1234_0093_0008 + value as u64);
            segment.base.set(0x1000 * value as u64);
        }
        state.interrupt_shadow.set(1);
        state.efer.set(0x500);
        state.cpl.set(3);
        state.cr8.set(7);
    }

    #[test]
    fn groups_are_what_was_written() {
        let (from, vmcb, to) = (VcpuState::default(), vmcb(), VcpuState::default());
        fill(&from);
        write_ip(&from, &vmcb);
        write(&from, &vmcb, group::ALL);
        assert_eq!(vmcb.save.efer.get(), 0x500 | SVME, "the kernel's bit is added");
        assert_eq!(virq::priority(&vmcb.control), 7);
        read(&to, &vmcb, group::ALL);
        to.cr8.set(7);
        assert_eq!(format!("{from:?}"), format!("{to:?}"));
    }

    #[test]
    fn only_the_groups_that_are_asked_for() {
        let (from, vmcb) = (VcpuState::default(), vmcb());
        fill(&from);
        for group in (0..11).map(|bit| 1 << bit) {
            write(&from, &vmcb, group);
        }
        assert_eq!(vmcb.save.rip.get(), 0, "`write_ip` only");
        write_ip(&from, &vmcb);
        let whole = VcpuState::default();
        read(&whole, &vmcb, group::ALL);
        let parts = VcpuState::default();
        for group in (0..11).map(|bit| 1 << bit) {
            let before = format!("{parts:?}");
            read(&parts, &vmcb, group);
            let held = group & (group::INJECT | group::PRIORITY | group::VECTORS | group::XCR0);
            assert_eq!(format!("{parts:?}") == before, held != 0, "{group:#x}");
        }
        assert_eq!(format!("{parts:?}"), format!("{whole:?}"));
    }

    #[test]
    fn a_vmm_reaches_no_other_bits() {
        let (from, vmcb) = (VcpuState::default(), vmcb());
        from.interrupt_shadow.set(u64::MAX);
        from.cpl.set(u64::MAX);
        from.cr8.set(u64::MAX);
        from.segments[0].access.set(u64::MAX);
        write_ip(&from, &vmcb);
        write(&from, &vmcb, group::ALL);
        assert_eq!(vmcb.control.interrupt_shadow.get(), SHADOW);
        assert_eq!(vmcb.save.cpl.get(), 3);
        assert_eq!(vmcb.control.v_intr.get(), 15);
        assert_eq!(vmcb.save.segments[0].access.get() >> 28 & 15, 0);
    }
}
