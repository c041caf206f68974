//! Exchange of state groups between VMCB and state page.

use abi::vcpu::x86::{SharedSegment, VcpuState, group};
use hw_x86::msr;
use hw_x86::vmcb::{SaveArea, SavedSegment, Vmcb};

use crate::svm::{exit, virq};

/// Interrupt shadow in the VMCB (APM vol. 2 §15.21.5).
pub const SHADOW: u64 = 1;

/// Copies fields of the same name and format between state page and VMCB.
macro_rules! copy {
    (read, $state:ident, $save:ident: $($field:ident)*) => {
        $($state.$field.set($save.$field.get());)*
    };
    (write, $state:ident, $save:ident: $($field:ident)*) => {
        $($save.$field.set($state.$field.get());)*
    };
}

/// Copies these fields of a group, the same for both directions.
macro_rules! fields {
    ($way:ident IP, $state:ident, $save:ident) => {
        copy!($way, $state, $save: rip rsp rflags)
    };
    ($way:ident CONTROL, $state:ident, $save:ident) => {
        copy!($way, $state, $save: cr0 cr2 cr3 cr4)
    };
}

/// Copies the groups that consist of such fields only.
macro_rules! plain_groups {
    ($way:ident $groups:expr, $state:ident, $control:ident, $save:ident) => {
        if $groups & group::MSRS != 0 {
            copy!($way, $state, $save: star lstar cstar sfmask kernel_gs_base sysenter_cs
                sysenter_esp sysenter_eip pat);
        }
        if $groups & group::DEBUG != 0 {
            copy!($way, $state, $save: dr6 dr7);
        }
        if $groups & group::TSC != 0 {
            copy!($way, $state, $control: tsc_offset);
        }
    };
}

/// The registers of the group `SEGMENTS`.
fn segments<'a>(
    state: &'a VcpuState,
    save: &'a SaveArea,
) -> impl Iterator<Item = (&'a SharedSegment, &'a SavedSegment)> {
    let tables = [
        (&state.gdtr, &save.gdtr),
        (&state.ldtr, &save.ldtr),
        (&state.idtr, &save.idtr),
        (&state.tr, &save.tr),
    ];
    let segments = state.segments.iter().zip(&save.segments).enumerate();
    segments.filter(|(index, _)| *index != VcpuState::CS).map(|(_, pair)| pair).chain(tables)
}

/// Copies the groups of most exits: `IP`, and for decoding of the instruction `CONTROL` and `CODE`.
#[inline(always)]
pub fn read_code(state: &VcpuState, Vmcb { control, save }: &Vmcb, groups: u64) {
    if groups & group::IP != 0 {
        fields!(read IP, state, save);
        state.interrupt_shadow.set(control.interrupt_shadow.get() & SHADOW);
    }
    if groups & group::CONTROL != 0 {
        fields!(read CONTROL, state, save);
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
        segments(state, save).for_each(|(to, from)| copy_to_state(to, from));
    }
    plain_groups!(read groups, state, control, save);
}

/// Takes over the group `IP`.
#[inline(always)]
pub fn write_ip(state: &VcpuState, Vmcb { control, save }: &Vmcb) {
    fields!(write IP, state, save);
    control.interrupt_shadow.set(state.interrupt_shadow.get() & SHADOW);
}

/// Takes over the other groups that the VMCB holds.
pub fn write(state: &VcpuState, Vmcb { control, save }: &Vmcb, dirty: u64) {
    if dirty & group::CONTROL != 0 {
        fields!(write CONTROL, state, save);
        save.efer.set(state.efer.get() | msr::efer::SVME);
        save.cpl.set(state.cpl.get() as u8 & 3);
    }
    if dirty & group::CODE != 0 {
        copy_from_state(&save.segments[VcpuState::CS], &state.segments[VcpuState::CS]);
    }
    if dirty & group::SEGMENTS != 0 {
        segments(state, save).for_each(|(from, to)| copy_from_state(to, from));
    }
    plain_groups!(write dirty, state, control, save);
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
