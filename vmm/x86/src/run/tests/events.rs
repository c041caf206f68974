//! Interrupts and exceptions: their order, windows, and delivery without loss.

use super::*;

#[test]
fn intercepted_exceptions_are_reflected() {
    let (_, mut vcpu, entries) = reflect(Event::NONE, DEBUG);
    assert_eq!(entries[1], (Event::exception(DEBUG), false));
    // DR6 is written by the CPU, as is RF: it is clear after an instruction breakpoint.
    assert_eq!((vcpu.get(Reg::Dr6), vcpu.get(Reg::Dr7)), (0xffff_4ff0, 0x400));
    assert_eq!(vcpu.get(Reg::Rflags) & RFLAGS_RF, 0);

    let (_, mut vcpu, entries) = reflect(Event::NONE, ALIGNMENT);
    assert_eq!(entries[1], (Event::exception_code(ALIGNMENT, 0), false));
    assert_eq!(vcpu.get(Reg::Dr7), 0x400 | DR7_GENERAL_DETECT);
    assert_ne!(vcpu.get(Reg::Rflags) & RFLAGS_RF, 0);
    assert_eq!(vcpu.get(Reg::Rip), CODE);
}

#[test]
fn exceptions_while_an_event_is_delivered() {
    let page_fault = Event::exception_code(14, 2);
    for vector in [DEBUG, ALIGNMENT] {
        // Serial: the exception is raised again by its cause.
        for first in [page_fault, PROTECTION, UNDEFINED, Event::exception(DEBUG)] {
            let (cpu, _, entries) = reflect(first, vector);
            assert_eq!((entries[1].0.vector(), cpu.deferred), (vector, Event::NONE));
        }
        // An NMI is delivered at the next exit.
        let (cpu, _, entries) = reflect(Event::NMI, vector);
        assert_eq!((entries[1].0.vector(), cpu.nmi), (vector, true));

        let (mut cpu, mut vcpu, mut platform) = guest(&[0x90]);
        vcpu.then(|vcpu| {
            vcpu.slot = Event::exception_code(8, 0);
            Exit::Exception { vector: ALIGNMENT, code: 0 }
        });
        assert_eq!(cpu.run(&mut vcpu, &mut platform), StopReason::End(Outcome::TripleFault));
    }
}

#[test]
fn an_interrupt_waits_for_the_exception_in_its_delivery() {
    let (mut cpu, mut vcpu, mut platform) = guest(&[0x90]);
    interrupts(&mut vcpu, true);
    vcpu.then(|vcpu| {
        vcpu.slot = Event::interrupt(0x31);
        Exit::Exception { vector: ALIGNMENT, code: 0 }
    });
    vcpu.then(|vcpu| {
        // In the handler of the exception.
        assert_eq!(vcpu.window, InterruptWindow::DeliverVirq(0x31));
        interrupts(vcpu, false);
        Exit::Spurious
    });
    vcpu.then(|vcpu| {
        interrupts(vcpu, true);
        take(vcpu);
        Exit::Spurious
    });
    let entries = play(&mut cpu, &mut vcpu, &mut platform);
    let exception = Event::exception_code(ALIGNMENT, 0);
    let events = [Event::NONE, exception, Event::interrupt(0x31), Event::NONE];
    assert_eq!(entries, events.map(|event| (event, false)));
    assert_eq!(platform.taken, [], "the local APIC knows of it already");
}

#[test]
fn others_follow_the_interrupt_that_waited() {
    let (mut cpu, mut vcpu, mut platform) = guest(&[0x90]);
    interrupts(&mut vcpu, true);
    vcpu.then(|vcpu| {
        vcpu.slot = Event::interrupt(0x31);
        Exit::Exception { vector: ALIGNMENT, code: 0 }
    });
    vcpu.then(|vcpu| {
        // In the handler of the exception, which requests another one.
        interrupts(vcpu, false);
        vcpu.set_gpr(Gpr::Rcx, 0x80b);
        vcpu.set_gpr(Gpr::Rax, 0x40);
        vcpu.next_rip = CODE + 2;
        Exit::Msr { write: true }
    });
    for _ in 0..2 {
        vcpu.then(|vcpu| {
            interrupts(vcpu, true);
            Exit::InterruptWindow
        });
    }
    let entries = play(&mut cpu, &mut vcpu, &mut platform);
    let events = [
        (Event::NONE, false),
        (Event::exception_code(ALIGNMENT, 0), false),
        (Event::NONE, true),
        (Event::interrupt(0x31), true),
        (Event::interrupt(0x40), false),
    ];
    assert_eq!(entries, events);
}

#[test]
fn an_interrupt_that_the_guest_takes_late_is_not_cut_short() {
    let (mut cpu, mut vcpu, mut platform) = guest(&[0x90]);
    platform.emulated = Emulated::Raise(PROTECTION);
    platform.request(0x31);
    interrupts(&mut vcpu, true);
    // It may be taken at once; but this processor is slow, and the guest does something else
    // first, which even faults.
    vcpu.then(|vcpu| {
        interrupts(vcpu, false);
        Exit::MemoryFault(MemoryFault { gpa: 0, write: true, fetch: false, walk: false })
    });
    vcpu.then(|_| Exit::Spurious);
    vcpu.then(|vcpu| {
        interrupts(vcpu, true);
        take(vcpu);
        Exit::Spurious
    });
    let entries = play(&mut cpu, &mut vcpu, &mut platform);
    let interrupt = Event::interrupt(0x31);
    let events = [interrupt, PROTECTION, interrupt, Event::NONE];
    assert_eq!(entries, events.map(|event| (event, false)));
    assert_eq!((platform.in_service, platform.unknown), (std::vec![0x31], std::vec![]));
}

#[test]
fn an_exception_that_is_not_intercepted_ends_the_machine() {
    let (mut cpu, mut vcpu, mut platform) = guest(&[]);
    vcpu.then(|_| Exit::Exception { vector: 3, code: 0 });
    assert_eq!(cpu.run(&mut vcpu, &mut platform), StopReason::End(Outcome::HostError(3)));
}

#[test]
fn interrupts_are_delivered_in_order_through_windows() {
    let (mut cpu, mut vcpu, mut platform) = guest(&[]);
    for vector in [0x31, 0xef, 0x40] {
        platform.request(vector);
    }
    interrupts(&mut vcpu, true);
    // Each handler runs with interrupts off, then ends.
    for _ in 0..3 {
        vcpu.then(|vcpu| {
            interrupts(vcpu, true);
            Exit::InterruptWindow
        });
    }
    let entries = play(&mut cpu, &mut vcpu, &mut platform);
    let expected = [
        (Event::interrupt(0xef), true),
        (Event::interrupt(0x40), true),
        (Event::interrupt(0x31), false),
        (Event::NONE, false),
    ];
    assert_eq!(entries, expected);
}

#[test]
fn nothing_is_delivered_while_interrupts_are_off() {
    let (mut cpu, mut vcpu, mut platform) = guest(&[]);
    platform.request(0x31);
    interrupts(&mut vcpu, false);
    vcpu.then(|vcpu| {
        interrupts(vcpu, true);
        vcpu.set(Reg::InterruptShadow, 1); // STI
        Exit::Spurious
    });
    vcpu.then(|vcpu| {
        vcpu.set(Reg::InterruptShadow, 0);
        Exit::InterruptWindow
    });
    let entries = play(&mut cpu, &mut vcpu, &mut platform);
    let expected = [(Event::NONE, true), (Event::NONE, true), (Event::interrupt(0x31), false)];
    assert_eq!(entries, expected);
}

#[test]
fn virtual_interrupts_are_delivered_without_an_exit() {
    let (mut cpu, mut vcpu, mut platform) = guest(&[]);
    platform.asks = false;
    interrupts(&mut vcpu, false);
    vcpu.then(|_| Exit::Recall { events: 1 });
    vcpu.then(|_| Exit::Recall { events: 1 });
    vcpu.then(|vcpu| {
        vcpu.window = InterruptWindow::Nothing;
        Exit::Spurious
    });
    platform.request(0x31);
    let recall = StopReason::Recall(1);
    assert_eq!(
        (cpu.run(&mut vcpu, &mut platform), vcpu.window),
        (recall, InterruptWindow::DeliverVirq(0x31))
    );
    // One interrupt of higher and one of lower priority.
    platform.request(0x40);
    assert_eq!(
        (cpu.run(&mut vcpu, &mut platform), vcpu.window),
        (recall, InterruptWindow::DeliverVirq(0x40))
    );
    assert_eq!(platform.taken, []);
    play(&mut cpu, &mut vcpu, &mut platform);
    assert_eq!(
        (&platform.taken[..], vcpu.window),
        (&[0x40][..], InterruptWindow::DeliverVirq(0x31))
    );
    // The request may be withdrawn.
    platform.requested.clear();
    play(&mut cpu, &mut vcpu, &mut platform);
    assert_eq!((&platform.taken[..], vcpu.window), (&[0x40][..], InterruptWindow::Nothing));
}

#[test]
fn interrupts_are_completed_without_an_exit() {
    const WORD: u64 = 0x2000;
    let (mut cpu, mut vcpu, mut platform) = guest(&[]);
    platform.asks = false;
    for bad in [WORD | 3, 0x1_0001, 1 << 40 | 1] {
        assert_eq!(cpu.write_msr(&mut vcpu, &mut platform, kvm::EOI, bad), None);
    }
    assert!(cpu.write_msr(&mut vcpu, &mut platform, kvm::EOI, WORD | 1).is_some());
    assert_eq!(cpu.read_msr(&mut vcpu, &mut platform, kvm::EOI), Some(WORD | 1));
    let memory = platform.memory;
    let word = move || memory.read::<u32>(WORD).unwrap();
    let end = move || memory.write(WORD, 0_u32).unwrap();
    // One interrupt is injected, one is virtual: the guest completes both in memory, or not
    // (yet).
    for (open, ends) in [(true, true), (true, false), (false, true), (false, false)] {
        interrupts(&mut vcpu, open);
        platform.request(0x31);
        vcpu.then(move |vcpu| {
            assert_eq!(word(), 1);
            vcpu.window = InterruptWindow::Nothing;
            if ends {
                end();
            }
            Exit::Spurious
        });
        play(&mut cpu, &mut vcpu, &mut platform);
        assert_eq!((platform.in_service.is_empty(), word()), (ends, 0));
        platform.in_service.clear();
    }
    // A write of the guest to the word before it takes the interrupt completes nothing.
    interrupts(&mut vcpu, false);
    platform.request(0x31);
    vcpu.then(move |_| {
        end();
        Exit::Spurious
    });
    vcpu.then(move |vcpu| {
        vcpu.window = InterruptWindow::Nothing;
        Exit::Spurious
    });
    play(&mut cpu, &mut vcpu, &mut platform);
    assert_eq!((&platform.in_service[..], word()), (&[0x31][..], 0));
    // Another interrupt is pending: its EOI must exit.
    interrupts(&mut vcpu, true);
    platform.request(0x32);
    platform.request(0x33);
    vcpu.then(move |_| {
        assert_eq!(word(), 0);
        Exit::Spurious
    });
    play(&mut cpu, &mut vcpu, &mut platform);
}

#[test]
fn interrupted_events_are_injected_first() {
    let (mut cpu, mut vcpu, mut platform) = guest(&[]);
    interrupts(&mut vcpu, true);
    // Delivery of a page fault was interrupted while an interrupt and an NMI arrive.
    vcpu.then(|vcpu| {
        vcpu.slot = Event::exception_code(14, 2);
        Exit::Spurious
    });
    vcpu.then(|_| Exit::Spurious);
    vcpu.then(|_| Exit::InterruptWindow);
    platform.request(0x31);
    platform.nmi = true;
    let entries = play(&mut cpu, &mut vcpu, &mut platform);
    let expected = [
        (Event::NMI, true),
        (Event::exception_code(14, 2), true),
        (Event::NONE, true), // a window is open only when the processor says so
        (Event::interrupt(0x31), false),
    ];
    assert_eq!(entries, expected);
}

#[test]
fn an_exception_of_emulation_keeps_interrupts_waiting() {
    let (mut cpu, mut vcpu, mut platform) = guest(&[]);
    interrupts(&mut vcpu, true);
    platform.emulated = Emulated::Raise(Event::exception_code(14, 2));
    let fault = MemoryFault { gpa: 0, write: false, fetch: false, walk: false };
    vcpu.then(move |_| Exit::MemoryFault(fault));
    vcpu.then(|_| Exit::InterruptWindow);
    let entries = play(&mut cpu, &mut vcpu, &mut platform);
    assert_eq!(entries[1], (Event::exception_code(14, 2), false));
    // The same with an interrupt arriving meanwhile.
    vcpu.set_gpr(Gpr::Rcx, 0x80b);
    vcpu.set_gpr(Gpr::Rax, 0x31);
    vcpu.next_rip = CODE + 2;
    vcpu.then(|vcpu| {
        vcpu.set(Reg::Rflags, RFLAGS_IF | RFLAGS_TF);
        Exit::Msr { write: true }
    });
    vcpu.then(|_| Exit::InterruptWindow);
    let entries = play(&mut cpu, &mut vcpu, &mut platform);
    let expected =
        [(Event::NONE, false), (Event::exception(DEBUG), true), (Event::interrupt(0x31), false)];
    assert_eq!(entries, expected);
}

#[test]
fn an_nmi_is_masked_until_the_end_of_iret() {
    const OLD: u64 = 0xffff_0ff1;
    let steps = |vcpu: &mut ScriptedVcpu| vcpu.get(Reg::Rflags) & RFLAGS_TF != 0;
    let (mut cpu, mut vcpu, mut platform) = guest(&[0x48, 0xcf]);
    vcpu.iret_exits = Some(false);
    vcpu.set(Reg::Dr6, OLD);
    let mut delivered = |vcpu: &mut ScriptedVcpu, platform: &mut TestPlatform| {
        vcpu.entries.clear();
        vcpu.then(|_| Exit::Recall { events: 1 });
        assert_eq!(cpu.run(vcpu, platform), StopReason::Recall(1));
        vcpu.entries.iter().map(|entry| entry.event).find(|event| event.is_some())
    };
    platform.nmi = true;
    assert_eq!(delivered(&mut vcpu, &mut platform), Some(Event::NMI));
    assert_eq!(vcpu.iret_exits, Some(true));
    // Two further NMIs merge into one, which stays pending. A fault or an interrupt does not
    // end masking.
    for _ in 0..2 {
        platform.nmi = true;
        assert_eq!(delivered(&mut vcpu, &mut platform), None);
    }
    vcpu.then(|_| Exit::Undefined);
    assert_eq!(delivered(&mut vcpu, &mut platform), Some(UNDEFINED));
    // The IRET is single-stepped, which stays hidden from the guest.
    vcpu.then(|_| Exit::Iret);
    assert_eq!(delivered(&mut vcpu, &mut platform), None);
    assert!(steps(&mut vcpu) && vcpu.iret_exits == Some(false));
    let ends = |vcpu: &mut ScriptedVcpu, causes: u64| {
        vcpu.then(move |vcpu| {
            let dr6 = vcpu.get(Reg::Dr6);
            vcpu.set(Reg::Dr6, dr6 | causes);
            interrupts(vcpu, true);
            Exit::Exception { vector: DEBUG, code: 0 }
        });
    };
    // A breakpoint at the IRET is delivered first and does not end masking.
    vcpu.then(|_| Exit::Exception { vector: DEBUG, code: 0 });
    assert_eq!(delivered(&mut vcpu, &mut platform), Some(Event::exception(DEBUG)));
    ends(&mut vcpu, DR6_SINGLE_STEP);
    assert_eq!(delivered(&mut vcpu, &mut platform), Some(Event::NMI));
    assert_eq!((vcpu.get(Reg::Dr6), vcpu.iret_exits), (OLD, Some(true)));
    // A breakpoint hit by the IRET belongs to the guest, as does the guest's own single step.
    for (own_steps, causes, dr6) in [(false, 2, OLD | 2), (true, 0, OLD | DR6_SINGLE_STEP)] {
        vcpu.set(Reg::Dr6, OLD);
        vcpu.set(Reg::Rflags, if own_steps { RFLAGS_TF } else { 0 });
        vcpu.then(|_| Exit::Iret);
        ends(&mut vcpu, DR6_SINGLE_STEP | causes);
        assert_eq!(delivered(&mut vcpu, &mut platform), Some(Event::exception(DEBUG)));
        assert_eq!(vcpu.get(Reg::Dr6), dr6);
        platform.nmi = true;
        assert_eq!(delivered(&mut vcpu, &mut platform), Some(Event::NMI));
    }
    // INIT ends masking; a back end with virtual NMIs is not asked to intercept.
    platform.init = true;
    assert!(matches!(cpu.run(&mut vcpu, &mut platform), StopReason::Idle { .. }));
    assert_eq!(vcpu.iret_exits, Some(false));
}

#[test]
fn halt_waits_and_wakes() {
    let (mut cpu, mut vcpu, mut platform) = guest(&[0xf4]);
    interrupts(&mut vcpu, true);
    platform.deadline = 5000;
    vcpu.then(|vcpu| {
        vcpu.set(Reg::InterruptShadow, 1); // STI; HLT
        Exit::Hlt
    });
    let idle = StopReason::Idle { deadline_ticks: 6000 };
    assert_eq!(cpu.run(&mut vcpu, &mut platform), idle);
    assert_eq!(vcpu.get(Reg::Rip), CODE + 1);
    // No event: still idle. Then an interrupt.
    assert_eq!(cpu.run(&mut vcpu, &mut platform), idle);
    platform.request(0x31);
    vcpu.entries.clear();
    vcpu.then(taking);
    let wakes = [(Event::interrupt(0x31), false), (Event::NONE, false)];
    assert_eq!(play(&mut cpu, &mut vcpu, &mut platform), wakes);
    assert_eq!(vcpu.deadline, 6000);
    // With interrupts off only an NMI wakes the vCPU.
    vcpu.set(Reg::Rip, CODE);
    interrupts(&mut vcpu, false);
    vcpu.then(|_| Exit::Hlt);
    platform.request(0x32);
    assert_eq!(cpu.run(&mut vcpu, &mut platform), idle);
    platform.nmi = true;
    vcpu.entries.clear();
    assert_eq!(play(&mut cpu, &mut vcpu, &mut platform), [(Event::NMI, true)]);
}

#[test]
fn no_wake_up_is_lost_between_sti_and_hlt() {
    let (mut cpu, mut vcpu, mut platform) = guest(&[0xf4, 0xf4]);
    let idle = StopReason::Idle { deadline_ticks: u64::MAX };
    let shadow = |vcpu: &mut ScriptedVcpu| {
        interrupts(vcpu, true);
        vcpu.set(Reg::InterruptShadow, 1);
        vcpu.next_rip = 0x7777; // of an earlier exit
    };
    // The host interrupts after STI; the guest's timer is due, or not.
    shadow(&mut vcpu);
    platform.request(0x31);
    let wakes = |vector| [(Event::interrupt(vector), false), (Event::NONE, false)];
    vcpu.then(taking);
    assert_eq!(play(&mut cpu, &mut vcpu, &mut platform), wakes(0x31));
    assert_eq!((vcpu.get(Reg::Rip), vcpu.get(Reg::InterruptShadow)), (CODE + 1, 0));
    shadow(&mut vcpu);
    assert_eq!(cpu.run(&mut vcpu, &mut platform), idle);
    assert_eq!(vcpu.get(Reg::Rip), CODE + 2);
    platform.request(0x32);
    vcpu.then(taking);
    vcpu.entries.clear();
    assert_eq!(play(&mut cpu, &mut vcpu, &mut platform), wakes(0x32));
    // Other instructions and an exception of higher priority stay as they are.
    for (rip, event) in [(CODE + 2, Event::NONE), (CODE, Event::exception(DEBUG))] {
        vcpu.set(Reg::Rip, rip);
        shadow(&mut vcpu);
        vcpu.slot = event;
        assert_eq!(play(&mut cpu, &mut vcpu, &mut platform), [(event, false)]);
        assert_eq!((vcpu.get(Reg::Rip), vcpu.get(Reg::InterruptShadow)), (rip, 1));
    }
}

#[test]
fn a_priority_of_the_guests_own() {
    let (mut cpu, mut vcpu, mut platform) = guest(&[0x90]);
    platform.cr8 = 3;
    vcpu.then(|vcpu| {
        assert_eq!(std::mem::replace(&mut vcpu.cr8, 5), 3);
        Exit::Recall { events: 1 }
    });
    assert_eq!(cpu.run(&mut vcpu, &mut platform), StopReason::Recall(1));
    assert_eq!(platform.cr8, 5);
    // The guest sets the same through the APIC's TPR.
    platform.cr8 = 7;
    vcpu.then(|vcpu| {
        assert_eq!(vcpu.cr8, 7);
        Exit::Recall { events: 2 }
    });
    assert_eq!((cpu.run(&mut vcpu, &mut platform), platform.cr8), (StopReason::Recall(2), 7));
}

#[test]
fn application_processors_start_on_a_start_up_ipi() {
    let mut platform = TestPlatform::new();
    let mut cpu = Cpu::new(1, 40);
    let mut vcpu = ScriptedVcpu::flat32();
    let idle = StopReason::Idle { deadline_ticks: u64::MAX };
    platform.request(0x31);
    assert_eq!(cpu.run(&mut vcpu, &mut platform), idle);
    platform.init = true;
    assert_eq!(cpu.run(&mut vcpu, &mut platform), idle);
    platform.startup = Some(0x9a);
    platform.requested.clear();
    assert_eq!(play(&mut cpu, &mut vcpu, &mut platform), [(Event::NONE, false)]);
    let cs = vcpu.segment(Seg::Cs);
    assert_eq!((cs.selector, cs.base, vcpu.get(Reg::Rip)), (0x9a00, 0x9a000, 0));
    assert_eq!(vcpu.gpr(Gpr::Rdx), 0x800f12);
    // A running processor ignores start-up messages.
    platform.startup = Some(1);
    vcpu.set(Reg::Rip, 5);
    play(&mut cpu, &mut vcpu, &mut platform);
    assert_eq!(vcpu.get(Reg::Rip), 5);
}

/// One random step of the guest or the platform.
#[derive(Clone, Copy, Debug)]
enum Move {
    Request(u8),
    Nmi,
    Toggle,
    CutShort,
    Exception,
    Exit,
}

fn moves() -> impl Strategy<Value = Vec<Move>> {
    let one = prop_oneof![
        (0x20_u8..0x60).prop_map(Move::Request),
        Just(Move::Nmi),
        Just(Move::Toggle),
        Just(Move::CutShort),
        Just(Move::Exception),
        Just(Move::Exit),
    ];
    proptest::collection::vec(one, 1..60)
}

/// Requests the step's interrupt, which joins `requested`, or its NMI. Returns the number of NMIs.
fn request(
    step: Option<Move>,
    cpu: &Cpu,
    platform: &mut TestPlatform,
    requested: &mut Vec<u8>,
) -> i32 {
    match step {
        Some(Move::Request(vector)) if !platform.requested.contains(&vector) => {
            requested.push(vector);
            platform.request(vector);
            0
        }
        // A second NMI merges with a pending one, as on hardware.
        Some(Move::Nmi) if !platform.nmi && !cpu.nmi => {
            platform.nmi = true;
            platform.needs_service = true;
            1
        }
        _ => 0,
    }
}

/// Exits during the delivery of an event: `cut` short, or by an exception.
fn interrupt_delivery(vcpu: &mut ScriptedVcpu, cut: bool, exception: bool) -> Option<Exit> {
    let mut delivered = vcpu.entries.last().map_or(Event::NONE, |entry| entry.event);
    if let (InterruptWindow::DeliverVirq(vector), true) = (vcpu.window, cut || exception)
        && !delivered.is_some()
        && vcpu.get(Reg::Rflags) & RFLAGS_IF != 0
    {
        // It takes the interrupt, of which there is an end at once.
        vcpu.window = InterruptWindow::Nothing;
        delivered = Event::interrupt(vector);
    }
    if cut && delivered.is_some() {
        vcpu.slot = delivered;
        return Some(Exit::Recall { events: 1 });
    }
    if exception {
        vcpu.slot = delivered;
        return Some(Exit::Exception { vector: ALIGNMENT, code: 0 });
    }
    if delivered.is_some() {
        interrupts(vcpu, false); // the handler
    }
    None
}

/// Executes the guest until its next exit: it may `toggle` its interrupt flag, and takes a virtual
/// interrupt while the flag is set.
fn run_guest(vcpu: &mut ScriptedVcpu, toggle: bool, taken: &mut Vec<u8>) -> Exit {
    let open = (vcpu.get(Reg::Rflags) & RFLAGS_IF != 0) != toggle;
    interrupts(vcpu, open);
    match vcpu.window {
        InterruptWindow::Exit if open => return Exit::InterruptWindow,
        InterruptWindow::DeliverVirq(vector) if open => {
            vcpu.window = InterruptWindow::Nothing;
            interrupts(vcpu, false);
            taken.push(vector);
        }
        _ => {}
    }
    Exit::Recall { events: 0 }
}

proptest! {
    /// A guest that switches interrupts on and off at random and whose event deliveries are
    /// interrupted at random: each requested event arrives exactly once, maskable interrupts
    /// only while enabled, and none is pending at the end.
    #[test]
    fn nothing_is_lost_or_doubled(moves in moves(), asks: bool) {
        let (mut cpu, mut vcpu, mut platform) = guest(&[]);
        platform.asks = asks;
        let mut accepted = Vec::new();
        let taken = std::rc::Rc::new(core::cell::RefCell::new(Vec::new()));
        let mut requested = Vec::new();
        let mut nmis = 0;
        let mut steps = moves.into_iter();
        // After the moves the guest enables interrupts and completes handler after handler.
        let mut closing = 200;
        loop {
            let step = steps.next();
            if step.is_none() {
                closing -= 1;
                if closing == 0 {
                    break;
                }
            }
            nmis += request(step, &cpu, &mut platform, &mut requested);
            vcpu.entries.clear();
            let cut = matches!(step, Some(Move::CutShort));
            let exception = matches!(step, Some(Move::Exception));
            let toggle = matches!(step, Some(Move::Toggle)) || step.is_none();
            let taken_by_guest = taken.clone();
            vcpu.then(move |vcpu| {
                if let Some(exit) = interrupt_delivery(vcpu, cut, exception) {
                    return exit;
                }
                run_guest(vcpu, toggle, &mut taken_by_guest.borrow_mut())
            });
            let pause = cpu.run(&mut vcpu, &mut platform);
            // After a window exit the next entry finds an empty script.
            prop_assert!(matches!(pause, StopReason::Recall(_) | StopReason::End(Outcome::HostError(0))));
            for (at, entry) in vcpu.entries.iter().enumerate() {
                let is_cut = (cut || exception) && at == 0;
                if !entry.event.is_some() || entry.event.is_exception() || is_cut {
                    continue;
                }
                if entry.event == Event::NMI {
                    nmis -= 1;
                } else {
                    prop_assert!(entry.open);
                    accepted.push(entry.event.vector());
                }
            }
            let ended = matches!(pause, StopReason::End(_));
            if ended && vcpu.entries.last().is_some_and(|entry| entry.event.is_some()) {
                interrupts(&mut vcpu, false);
            }
        }
        accepted.append(&mut taken.borrow_mut());
        requested.sort_unstable();
        accepted.sort_unstable();
        prop_assert_eq!(accepted, requested);
        prop_assert_eq!(nmis, 0);
        prop_assert!(platform.requested.is_empty() && vcpu.window == InterruptWindow::Nothing);
    }
}
