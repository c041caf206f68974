//! Scripts with control registers.

use super::*;
use crate::control::ControlAccess;
use crate::run::exception::{DOUBLE_FAULT_EVENT, Interrupted, interrupted};
use hw_x86::msr::efer;
use hw_x86::paging::{cr0, cr4};

/// Plays one exit of this access in the state that `change` makes; returns the vCPU and the event
/// of the next entry.
fn access(vcpu: ScriptedVcpu, access: ControlAccess) -> (ScriptedVcpu, TestPlatform, Event) {
    let (mut cpu, _, mut platform) = guest(&[0x90]);
    let mut vcpu = vcpu;
    vcpu.set(Reg::Rip, CODE);
    platform.control = Some(access);
    vcpu.then(|_| Exit::CrAccess { register: 0, write: true });
    let entries = play(&mut cpu, &mut vcpu, &mut platform);
    let event = entries[1].0;
    let completed = vcpu.get(Reg::Rip) == CODE + 3;
    assert_eq!(completed, event == Event::NONE, "{access:?}");
    (vcpu, platform, event)
}

#[test]
fn control_registers_are_read_and_written_in_the_width_of_the_mode() {
    let wide = 0x1_2345_6000;
    for (long, expected) in [(true, wide), (false, wide & 0xffff_ffff)] {
        let new = || if long { ScriptedVcpu::long(0) } else { ScriptedVcpu::flat32() };
        for (control, register) in [(2, Reg::Cr2), (3, Reg::Cr3)] {
            let mut vcpu = new();
            vcpu.set_gpr(Gpr::R9, wide);
            let write = ControlAccess::Write { control, register: Gpr::R9 };
            let (mut vcpu, _, event) = access(vcpu, write);
            assert_eq!((vcpu.get(register), event), (expected, Event::NONE));
            assert_eq!(vcpu.flushes, u32::from(control == 3));

            vcpu = new();
            vcpu.set(register, wide);
            let read = ControlAccess::Read { control, register: Gpr::Rsp };
            let (mut vcpu, _, _) = access(vcpu, read);
            assert_eq!(vcpu.gpr(Gpr::Rsp), expected);
        }
    }
    for (control, register) in [(0, Reg::Cr0), (4, Reg::Cr4)] {
        let read = ControlAccess::Read { control, register: Gpr::Rax };
        let (mut vcpu, _, _) = access(ScriptedVcpu::long(0), read);
        assert_eq!(vcpu.gpr(Gpr::Rax), vcpu.get(register));
    }
}

#[test]
fn writes_are_checked() {
    let (wrong, right) = (cr4::PAE | 1 << 40, cr4::PAE | cr4::PGE);
    for (value, expected) in [(wrong, PROTECTION), (right, Event::NONE)] {
        let mut vcpu = ScriptedVcpu::long(0);
        vcpu.set_gpr(Gpr::Rax, value);
        let write = ControlAccess::Write { control: 4, register: Gpr::Rax };
        let (mut vcpu, _, event) = access(vcpu, write);
        assert_eq!(event, expected);
        assert_eq!(vcpu.get(Reg::Cr4), if event == Event::NONE { right } else { cr4::PAE });
    }
    let missing = ControlAccess::Read { control: 1, register: Gpr::Rax };
    assert_eq!(access(ScriptedVcpu::long(0), missing).2, UNDEFINED);
    let missing = ControlAccess::Write { control: 9, register: Gpr::Rax };
    assert_eq!(access(ScriptedVcpu::long(0), missing).2, UNDEFINED);
    // An address wider than those of the CPU.
    let mut vcpu = ScriptedVcpu::long(0);
    vcpu.set_gpr(Gpr::Rax, 1 << 40);
    let write = ControlAccess::Write { control: 3, register: Gpr::Rax };
    assert_eq!(access(vcpu, write).2, PROTECTION);
}

#[test]
fn the_task_priority_is_a_control_register() {
    for (value, expected) in [(9, Event::NONE), (16, PROTECTION)] {
        let mut vcpu = ScriptedVcpu::long(0);
        vcpu.set_gpr(Gpr::Rbx, value);
        let write = ControlAccess::Write { control: 8, register: Gpr::Rbx };
        let (_, platform, event) = access(vcpu, write);
        assert_eq!((event, platform.cr8), (expected, if value == 9 { 9 } else { 0 }));
    }
}

#[test]
fn paging_activates_long_mode() {
    let mut vcpu = ScriptedVcpu::flat32();
    vcpu.set(Reg::Cr4, cr4::PAE);
    vcpu.set(Reg::Efer, efer::LME);
    vcpu.set_gpr(Gpr::Rax, cr0::PE | cr0::PG);
    let write = ControlAccess::Write { control: 0, register: Gpr::Rax };
    let (mut vcpu, _, _) = access(vcpu, write);
    assert_eq!(vcpu.get(Reg::Efer), efer::LME | efer::LMA);
    assert_eq!(vcpu.get(Reg::Cr0), cr0::PE | cr0::PG | cr0::ET);
}

#[test]
fn two_level_paging_ends_the_guest_with_a_message() {
    let (mut cpu, mut vcpu, mut platform) = guest(&[0x90]);
    vcpu.set_gpr(Gpr::Rax, cr0::PE | cr0::PG);
    platform.control = Some(ControlAccess::Write { control: 0, register: Gpr::Rax });
    vcpu.then(|_| Exit::CrAccess { register: 0, write: true });
    let ended = cpu.run(&mut vcpu, &mut platform);
    assert_eq!(ended, StopReason::End(Outcome::TripleFault));
    assert!(
        matches!(platform.unknown[..], [Unknown::Other(why, CODE)] if why.contains("2-level")),
        "{:?}",
        platform.unknown
    );
}

#[test]
fn status_words_and_task_switches() {
    let (mut vcpu, ..) =
        access(ScriptedVcpu::long(0), ControlAccess::LoadStatusWord(cr0::TS as u16));
    assert!(vcpu.get(Reg::Cr0) & (cr0::TS | cr0::PE) == cr0::TS | cr0::PE);
    let (mut vcpu, ..) = access(vcpu, ControlAccess::ClearTaskSwitched);
    assert_eq!(vcpu.get(Reg::Cr0) & cr0::TS, 0);
}

#[test]
fn pages_are_invalidated() {
    for (address, expected) in
        [(0xffff_8000_0000_1234, true), (0x7fff_ffff_ffff, true), (1 << 47, false)]
    {
        let page = ControlAccess::InvalidatePage(address);
        let (vcpu, _, event) = access(ScriptedVcpu::long(0), page);
        let invalidated = if expected { &[address][..] } else { &[] };
        assert_eq!((&vcpu.invalidated[..], event), (invalidated, Event::NONE));
    }
}

/// APM vol. 2, table 8-5.
#[test]
fn double_faults() {
    use Interrupted::{Deferred, DoubleFault, Dropped, Shutdown};
    const BENIGN: [u8; 8] = [1, 3, 4, 5, 6, 7, 16, 17];
    const CONTRIBUTORY: [u8; 5] = [0, 10, 11, 12, 13];
    let software = Event(Event::interrupt(0x80).0 | hw_x86::vmcb::event::TYPE_SOFT);
    for second in BENIGN.into_iter().chain(CONTRIBUTORY).chain([14]) {
        assert_eq!(interrupted(Event::NONE, second), Dropped);
        assert_eq!(interrupted(software, second), Dropped);
        assert_eq!(interrupted(Event::NMI, second), Deferred);
        // The vector of an interrupt does not count.
        assert_eq!(interrupted(Event::interrupt(14), second), Deferred);
        assert_eq!(interrupted(Event::exception_code(8, 0), second), Shutdown);
    }
    let class = |first: &[u8], second: &[u8], expected| {
        for (&first, &second) in
            first.iter().flat_map(|one| second.iter().map(move |two| (one, two)))
        {
            assert_eq!(interrupted(Event::exception(first), second), expected, "{first} {second}");
        }
    };
    class(&BENIGN, &BENIGN, Dropped);
    class(&BENIGN, &CONTRIBUTORY, Dropped);
    class(&BENIGN, &[14], Dropped);
    class(&CONTRIBUTORY, &BENIGN, Dropped);
    class(&CONTRIBUTORY, &CONTRIBUTORY, DoubleFault);
    class(&CONTRIBUTORY, &[14], Dropped);
    class(&[14], &BENIGN, Dropped);
    class(&[14], &CONTRIBUTORY, DoubleFault);
    class(&[14], &[14], DoubleFault);
}

/// Plays a page fault during the delivery of `first`; returns the events of the entries after it.
fn fault_during(first: Event) -> (ScriptedVcpu, Vec<(Event, bool)>) {
    let (mut cpu, mut vcpu, mut platform) = guest(&[0x90]);
    interrupts(&mut vcpu, true);
    vcpu.then(move |vcpu| {
        vcpu.slot = first;
        Exit::PageFault { address: 0xdead_b000, code: 2 }
    });
    vcpu.then(|_| Exit::Spurious);
    let entries = play(&mut cpu, &mut vcpu, &mut platform);
    (vcpu, entries)
}

#[test]
fn page_faults_are_reflected() {
    let fault = Event::exception_code(14, 2);
    for first in [Event::NONE, Event::exception(6), Event::exception_code(13, 0)] {
        let (mut vcpu, entries) = fault_during(first);
        assert_eq!((vcpu.get(Reg::Cr2), entries[1].0), (0xdead_b000, fault));
    }
    let (mut vcpu, entries) = fault_during(Event::exception_code(14, 0));
    assert_eq!((vcpu.get(Reg::Cr2), entries[1].0), (0xdead_b000, DOUBLE_FAULT_EVENT));
}

#[test]
fn an_interrupt_that_faulted_follows_the_page_fault() {
    let (_, entries) = fault_during(Event::interrupt(0x41));
    assert_eq!(entries[1].0, Event::exception_code(14, 2));
    assert_eq!(entries[2].0, Event::interrupt(0x41));
    let (_, entries) = fault_during(Event::NMI);
    assert_eq!(entries[1].0, Event::exception_code(14, 2));
    assert_eq!(entries[2].0, Event::NMI);
}

#[test]
fn a_fault_in_the_delivery_of_a_double_fault_shuts_down() {
    let (mut cpu, mut vcpu, mut platform) = guest(&[0x90]);
    vcpu.then(|vcpu| {
        vcpu.slot = DOUBLE_FAULT_EVENT;
        Exit::PageFault { address: 0, code: 0 }
    });
    let ended = cpu.run(&mut vcpu, &mut platform);
    assert_eq!(ended, StopReason::End(Outcome::TripleFault));
}
