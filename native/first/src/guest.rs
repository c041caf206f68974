//! Guests: two vCPUs on one CPU make every kind of exit in turn ([`STEPS`]), and the kernel refuses
//! to run a guest in the kernel's own state.

use abi::boot::slot;
use abi::bundle::Header;
use abi::vcpu::arm64::{exit as arm64_exit, group, system, virq};
use abi::vcpu::{SGI_TARGETS, exit, memory_fault};
use abi::{FOREVER, PAGE_SIZE, Status, rights, vm_mode};
use native_rt::start::Boot;
use native_rt::{
    Factory, Notification, Space, Vcpu, Vm, Window, drop_capability, error, info, time,
};

use crate::{DONE, Named, Outcome, Slots, ensure};

/// Name of the guest in the bundle.
const FILE: &str = "guest";
/// Number of vCPUs.
const VCPUS: usize = 2;
/// Number of vCPUs that this module creates: those, and one for forged words.
pub const CREATED: u32 = VCPUS as u32 + 1;
/// Guest-physical addresses (`guests/arm64/src/exits.s`).
const CODE: u64 = 0x4000_0000;
const SHARED: u64 = 0x4020_0000;
const READ_ONLY: u64 = SHARED + PAGE_SIZE;
const UNMAPPED: u64 = 0x0900_0010;
/// Bytes of a vCPU in the shared page.
const SHARED_LENGTH: u64 = 64;
/// Numbers of the guest's hypercalls.
const HELLO: u64 = 0x100;
const FINISHED: u64 = 0x101;
/// Time after which a vCPU leaves the guest, or stops to wait: first value, and maximum.
const DEADLINE_NS: u64 = 1_000_000;
const MAX_DEADLINE_NS: u64 = 1_000_000_000;
/// Bits that the guest's doorbell signals.
const RUNG: u64 = 1 << 40;
/// Number of the first of some interrupts that no others have.
const WITHOUT_ROOM: u64 = 100;
/// Processor states of EL2, of EL3, and of AArch32 beyond EL0.
const FORBIDDEN: [u64; 4] = [0x3c9, 0x3c8, 0x3cd, 0x1df];

/// Bit of a vCPU's notification.
const EVENT: u64 = 1 << 3;
/// Bit of an event that the kernel delivers as an interrupt, and its number.
const VIRQ_EVENT: u64 = 1 << VIRQ_EVENT_NUMBER;
const VIRQ_EVENT_NUMBER: u32 = 63;
/// Bit that every MPIDR_EL1 has.
const MPIDR_ONE: u64 = 1 << 31;
/// Priority of the guest's interrupts.
const PRIORITY: u64 = 0xa0;
/// The SGI that the guest sends itself.
const SGI: u64 = 3;
/// Length of an instruction in bytes.
const INSTRUCTION: u64 = 4;

/// Words for events without an interrupt that a guest can have, though the last four are valid:
/// numbers that are special, an LPI's, and none.
const WITHOUT_NUMBER: [u64; 6] =
    [0, !virq::VALID, virq::VALID | 1020, virq::VALID | 8192, virq::VALID | virq::NUMBER, u64::MAX];
/// Bits of a valid word that have no meaning, the lowest priority, and a report of the end.
const FORGED: u64 = !(virq::NUMBER | virq::EVENT_MASK << virq::EVENT_SHIFT);
/// First of the highest numbers of interrupts.
const HIGHEST: u64 = 1020 - virq::COUNT as u64;

/// Reaction of the VMM to an exit.
#[derive(Clone, Copy)]
enum Action {
    /// Nothing: the guest continues with the next instruction.
    Continue,
    /// Skips the instruction, and sets this register.
    Skip(usize, u64),
    /// Sets the register `x0`.
    Answer(u64),
    /// Makes four interrupts pending, from this number on.
    Interrupt(u64),
    /// Makes the interrupt with this number pending, whose end is reported.
    InterruptWithReport(u64),
    /// Signals the event that the kernel delivers as the interrupt with this number.
    Event(u64),
    /// Lets the virtual timer have the interrupt with this number.
    Timer(u64),
    /// Lets the kernel wait at the next WFI.
    Wait,
    /// Writes the word at this offset, for which the guest waits.
    Release(u64),
}

/// An exit that is expected.
struct Step {
    reason: u64,
    /// Of a memory fault, or of the end of an interrupt; otherwise not compared.
    information: u64,
    /// Of a memory fault.
    address: u64,
    action: Action,
}

const fn step(reason: u64, action: Action) -> Step {
    Step { reason, information: 0, address: 0, action }
}

const fn fault(information: u64, address: u64, action: Action) -> Step {
    Step { reason: exit::MEMORY_FAULT, information, address, action }
}

const fn ended(number: u64) -> Step {
    let (reason, action) = (arm64_exit::VIRQ_ENDED, Action::Continue);
    Step { reason, information: number, address: 0, action }
}

/// The exits of a vCPU, in order.
const STEPS: [Step; 15] = [
    step(exit::HYPERCALL, Action::Answer(0x5a5a)),
    fault(0, UNMAPPED, Action::Skip(4, 0x1234_5678)),
    fault(memory_fault::WRITE, READ_ONLY + 8, Action::Skip(4, 0)),
    step(arm64_exit::SYSTEM_REGISTER, Action::Skip(4, 0)),
    step(arm64_exit::SECURE_CALL, Action::Skip(0, 0x77)),
    step(exit::HALT, Action::Wait),
    step(exit::HALTED, Action::Release(8)),
    step(exit::DEADLINE, Action::Release(0)),
    step(exit::HYPERCALL, Action::Interrupt(40)),
    step(exit::HYPERCALL, Action::Interrupt(50)),
    step(exit::HYPERCALL, Action::InterruptWithReport(60)),
    ended(60),
    step(exit::HYPERCALL, Action::Event(70)),
    step(exit::HYPERCALL, Action::Timer(27)),
    step(exit::HYPERCALL, Action::Continue),
];

/// Runs the guest of the bundle with memory at the start of `ram`.
pub fn check(slots: &mut Slots, boot: &Boot, ram: Window, khz: u64) -> Outcome {
    let factory = Factory::at(slot::FACTORY);
    let vm_slot = slots.next();
    let vm = factory.vm(vm_slot, vm_mode::NESTED).named("VM")?;
    let shared = memory(boot, ram, vm)?;
    vm.bind_doorbell(0, Notification::at(DONE), RUNG).named("doorbell")?;
    let mut vcpus = [create(slots, vm, 0)?, create(slots, vm, 1)?];
    become_targets(slots, vm, &vcpus)?;
    enters_with_forged_events(create(slots, vm, VCPUS as u32)?)?;
    for (vcpu, events) in &mut vcpus {
        refuses(vcpu)?;
        recalls(vcpu, *events)?;
    }
    for (number, step) in STEPS.iter().enumerate() {
        for (index, (vcpu, events)) in vcpus.iter_mut().enumerate() {
            run(vcpu, step.reason, khz)?;
            compare(vcpu, number, step)?;
            if number == 0 {
                greeting(vcpu, index as u64)?;
            }
            act((vcpu, *events), step.action, shared, index)?;
        }
    }
    for (vcpu, _) in &vcpus {
        ensure(vcpu.state().x[0].get() == FINISHED, "the guest finds no fault")?;
    }
    let rung = Notification::at(DONE).wait(0).named("the guest's doorbell signals")?;
    ensure(rung == RUNG, "the guest's doorbell signals its bits")?;
    drop_capability(vm_slot).named("end of the VM")?;
    let after = vcpus[0].0.run();
    ensure(after == Err(Status::Aborted), "a vCPU does not run without its VM")?;
    info!("guest: {} exits of {VCPUS} vCPUs as expected", STEPS.len());
    Ok(())
}

/// Delegates memory to the VM, with the guest's code in it, and returns the shared page.
fn memory(boot: &Boot, ram: Window, vm: Vm) -> Outcome<Window> {
    let missing = |what| (what, Status::Ok);
    let header = Header::parse(boot.bundle, boot.bundle.len() as u64);
    let file = header.ok().and_then(|header| header.find(FILE)).ok_or(missing("bundle"))?;
    let code = boot.bundle.get(file.offset as usize..(file.offset + file.length) as usize);
    let code = code.ok_or(missing("guest in the bundle"))?;
    let length = file.length.next_multiple_of(PAGE_SIZE);
    let part = |offset, length| ram.part(offset, length).ok_or(missing("memory for a guest"));
    let (image, shared, constant) =
        (part(0, length)?, part(length, PAGE_SIZE)?, part(length + PAGE_SIZE, PAGE_SIZE)?);
    ensure(image.write(0, code), "the guest's code can be written")?;
    shared.clear();
    for (window, address, rights) in [
        (image, CODE, rights::READ | rights::EXECUTE),
        (shared, SHARED, rights::READ | rights::WRITE),
        (constant, READ_ONLY, rights::READ),
    ] {
        vm.map(window, address, rights).named("memory of a guest")?;
    }
    Ok(shared)
}

/// Creates a vCPU and its notification; it starts with its number in `x0`.
fn create(slots: &mut Slots, vm: Vm, index: u32) -> Outcome<(Vcpu, Notification)> {
    let factory = Factory::at(slot::FACTORY);
    let events = factory.notification(slots.next()).named("notification of a vCPU")?;
    let mut vcpu = Vcpu::create(factory, slots.next(), vm, index, events).named("vCPU")?;
    vcpu.fetch(group::SYSTEM).named("registers of a vCPU")?;
    let state = vcpu.state();
    ensure(state.system[system::SCTLR_EL1].get() & 1 == 0, "translation is off after a reset")?;
    state.affinity.set(index.into());
    state.sgi_enabled.set(1 << SGI);
    state.sgi_priorities[0].set(PRIORITY << (8 * SGI));
    state.run.dirty.set(group::SYSTEM);
    state.x[0].set(index.into());
    state.pc.set(CODE);
    Ok((vcpu, events))
}

/// A VM has only its own vCPUs as targets of its SGIs, with indices that exist.
fn become_targets(slots: &mut Slots, vm: Vm, vcpus: &[(Vcpu, Notification); VCPUS]) -> Outcome {
    let factory = Factory::at(slot::FACTORY);
    let slot = slots.next();
    let other = factory.vm(slot, vm_mode::NESTED).named("second VM")?;
    let [(first, events), (second, _)] = vcpus;
    for (vcpu, vm, index, status) in [
        (first, vm, SGI_TARGETS, Status::BadArgument),
        (first, vm, usize::MAX, Status::BadArgument),
        (second, other, 0, Status::BadArgument),
        (first, Vm::at(events.selector()), 0, Status::BadCapability),
    ] {
        let refused = vcpu.become_sgi_target(vm, index) == Err(status);
        ensure(refused, "only its own vCPUs become targets of a VM's SGIs")?;
    }
    drop_capability(slot).named("end of a VM")?;
    // The guest's affinities do not fit these indices: such SGIs are exits.
    first.become_sgi_target(vm, 1).named("target of SGIs")?;
    second.become_sgi_target(vm, SGI_TARGETS - 1).named("target of SGIs")
}

/// The kernel does not enter a guest in a state beyond EL1.
fn refuses(vcpu: &mut Vcpu) -> Outcome {
    let good = vcpu.state().pstate.get();
    for forbidden in FORBIDDEN {
        vcpu.state().pstate.set(forbidden);
        vcpu.run().named("run of a guest at EL2")?;
        let reason = vcpu.state().run.exit_reason.get();
        ensure(reason == arm64_exit::INVALID_STATE, "the kernel enters no guest at EL2")?;
    }
    vcpu.state().pstate.set(good);
    Ok(())
}

/// Events end a run before the guest is entered, unless they have an interrupt.
fn recalls(vcpu: &mut Vcpu, events: Notification) -> Outcome {
    let number = u64::from(VIRQ_EVENT_NUMBER) << virq::EVENT_SHIFT;
    // No interrupt, one for another event, and none again.
    for (virq, signalled, recalled) in [
        (number, EVENT | VIRQ_EVENT, EVENT | VIRQ_EVENT),
        (virq_word(0) | number, EVENT | VIRQ_EVENT, EVENT),
        (0, EVENT, EVENT | VIRQ_EVENT),
    ] {
        vcpu.state().event_virqs[0].set(virq);
        events.signal(signalled).named("signal")?;
        vcpu.run().named("run of a guest with events")?;
        let seen = (vcpu.state().run.exit_reason.get(), vcpu.state().run.events.get());
        ensure(seen == (exit::RECALL, recalled), "events of its notification recall a vCPU")?;
    }
    Ok(())
}

/// Whatever the words of events are, a guest is entered, words without an interrupt use no list
/// register, and events for which none is free are kept.
fn enters_with_forged_events((mut vcpu, events): (Vcpu, Notification)) -> Outcome {
    for word in WITHOUT_NUMBER {
        set_event_virqs(&vcpu, |_| word);
        events.signal(u64::MAX).named("signal of all events")?;
        recalled(&mut vcpu)?;
    }
    let all = (1 << virq::COUNT) - 1;
    for (signalled, kept) in [(all, 0), (1, 1)] {
        // Other numbers for the second signal.
        let first = if kept == 0 { HIGHEST } else { HIGHEST - virq::COUNT as u64 };
        set_event_virqs(&vcpu, |place| FORGED | place << virq::EVENT_SHIFT | (first + place));
        events.signal(signalled).named("signal of events")?;
        ensure(recalled(&mut vcpu)? == 0, "events with an interrupt do not end a run")?;
        set_event_virqs(&vcpu, |_| 0);
        ensure(recalled(&mut vcpu)? == kept, "events remain if no list register is free")?;
    }
    // Nor does one for more interrupts, in an entry that is refused, interrupt this task for ever
    // when another vCPU has free ones.
    for (word, number) in vcpu.state().virqs.iter().zip(WITHOUT_ROOM..) {
        word.set(virq_word(number));
    }
    refuses(&mut vcpu)
}

fn set_event_virqs(vcpu: &Vcpu, word: impl Fn(u64) -> u64) {
    for (place, event_virq) in (0..).zip(&vcpu.state().event_virqs) {
        event_virq.set(word(place));
    }
}

/// Runs a guest from its start until its first hypercall; returns the events that ended a run
/// before, which may happen once.
fn recalled(vcpu: &mut Vcpu) -> Outcome<u64> {
    let (mut reason, mut events) = (enter(vcpu)?, 0);
    if reason == exit::RECALL {
        events = vcpu.state().run.events.get();
        reason = enter(vcpu)?;
    }
    ensure(reason == exit::HYPERCALL, "a guest is entered with forged events")?;
    Ok(events)
}

/// Runs a guest from its start until its next exit, whose reason it returns.
fn enter(vcpu: &mut Vcpu) -> Outcome<u64> {
    vcpu.state().pc.set(CODE);
    vcpu.run().named("run of a guest with forged events")?;
    Ok(vcpu.state().run.exit_reason.get())
}

/// Compares an exit.
fn compare(vcpu: &Vcpu, number: usize, step: &Step) -> Outcome {
    let (state, run) = (vcpu.state(), &vcpu.state().run);
    let is_fault = step.reason == exit::MEMORY_FAULT;
    let has_information = is_fault || step.reason == arm64_exit::VIRQ_ENDED;
    let is_same = run.exit_reason.get() == step.reason
        && (!is_fault || run.fault_address.get() == step.address)
        && (!has_information || run.exit_info.get() == step.information);
    if !is_same {
        error!(
            "step {number}: exit {}, information {:#x}, address {:#x} at {:#x}; x0 {:#x}, x1 {:#x}",
            run.exit_reason.get(),
            run.exit_info.get(),
            run.fault_address.get(),
            state.pc.get(),
            state.x[0].get(),
            state.x[1].get()
        );
    }
    ensure(is_same, "the guest's exits come in order")
}

/// The guest's first hypercall has what it has read, and its registers can be fetched.
fn greeting(vcpu: &mut Vcpu, index: u64) -> Outcome {
    let words = [0, 1, 2, 3].map(|register: usize| vcpu.state().x[register].get());
    let wanted = [HELLO, abi::ABI_VERSION.into(), index, MPIDR_ONE | index];
    ensure(words == wanted, "a guest reads the interface's version and its affinity")?;
    vcpu.fetch(group::SYSTEM).named("registers of a vCPU")?;
    let (state, valid) = (vcpu.state(), vcpu.state().run.valid.get());
    ensure(valid & group::SYSTEM != 0, "the registers of a vCPU are valid")?;
    let value = state.system[system::TPIDR_EL1].get();
    ensure(value == index, "a vCPU has registers of its own")
}

/// Runs a vCPU until its next exit, with a deadline if that is to end the run or the wait.
fn run(vcpu: &mut Vcpu, reason: u64, khz: u64) -> Outcome {
    let is_limited = matches!(reason, exit::HALTED | exit::DEADLINE);
    let mut limit = DEADLINE_NS;
    loop {
        let deadline = time::tsc() + time::ticks(khz, limit);
        vcpu.state().run.deadline.set(if is_limited { deadline } else { FOREVER });
        vcpu.run().named("run of a guest")?;
        let is_early = match vcpu.state().run.exit_reason.get() {
            // On a busy host the deadline may pass before the guest's WFI, or before the kernel
            // waits.
            exit::DEADLINE | exit::HALT => reason == exit::HALTED,
            _ => false,
        };
        if !is_early || limit > MAX_DEADLINE_NS {
            return Ok(());
        }
        limit *= 2;
    }
}

const fn virq_word(number: u64) -> u64 {
    virq::VALID | PRIORITY << virq::PRIORITY_SHIFT | number
}

/// Does what the VMM is to do about an exit.
fn act(
    (vcpu, events): (&Vcpu, Notification),
    action: Action,
    shared: Window,
    index: usize,
) -> Outcome {
    let state = vcpu.state();
    match action {
        Action::Continue => {}
        Action::Skip(register, value) => {
            state.pc.add(INSTRUCTION);
            state.x[register].set(value);
        }
        Action::Answer(value) => state.x[0].set(value),
        Action::Interrupt(first) => {
            for (word, number) in state.virqs.iter().zip(first..) {
                word.set(virq_word(number));
            }
        }
        Action::InterruptWithReport(number) => {
            state.virqs[0].set(virq_word(number) | virq::REPORT_END);
        }
        Action::Event(number) => {
            let event = u64::from(VIRQ_EVENT_NUMBER) << virq::EVENT_SHIFT;
            state.event_virqs[virq::COUNT - 1].set(virq_word(number) | event);
            events.signal(VIRQ_EVENT).named("signal")?;
        }
        Action::Timer(number) => state.timer_virq.set(virq_word(number)),
        Action::Wait => state.run.halt.set(1),
        Action::Release(offset) => {
            let word = 1_u64.to_le_bytes();
            let is_written = shared.write(index as u64 * SHARED_LENGTH + offset, &word);
            ensure(is_written, "the shared page can be written")?;
        }
    }
    Ok(())
}
