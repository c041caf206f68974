//! The run loop of a vCPU.

pub mod aarch32;
mod undescribed;

use hw_arm64::aarch32::psr;
use hw_arm64::esr::{self, MemoryAccess, SystemAccess, class, system_register};
use hw_arm64::gic::{SGI1R, SoftwareInterrupt};
use hw_arm64::registers::spsr;
use vmm_bus::{NEVER, Nanos};
use vmm_vcpu::deadline::Deadline;
use vmm_vcpu::{Activity, Flow, MemoryFault, Outcome, StopReason};

use crate::exception::{external_abort, system_error, undefined};
use crate::platform::{Arm64Platform, StartRequest, Unknown};
use crate::psci::{self, Effect};
use crate::stolen_time::StolenTimeRecord;
use crate::vcpu::{Arm64Vcpu, EXIT_NAMES, Exit, Width};
use undescribed::Described;

/// Length of A64 instructions in bytes.
const INSTRUCTION: u64 = 4;
/// Time after which interrupts without room in the CPU's interface are offered again.
const RETRY: Nanos = 1_000_000;

/// ICC_ASGI1R_EL1, ICC_SGI0R_EL1.
const ASGI1R: u32 = system_register(3, 0, 12, 11, 6);
const SGI0R: u32 = system_register(3, 0, 12, 11, 7);
/// ACTLR_EL1.
const ACTLR: u32 = system_register(3, 0, 1, 0, 1);
/// `DC ISW`, `DC CSW`, `DC CISW`: maintenance of caches by set and way.
const SET_WAY: [u32; 3] = [
    system_register(1, 0, 7, 6, 2),
    system_register(1, 0, 7, 10, 2),
    system_register(1, 0, 7, 14, 2),
];
/// CNTPCT_EL0 and CNTPCTSS_EL0: the physical counter.
const PHYSICAL_COUNTER: [u32; 2] =
    [system_register(3, 3, 14, 0, 1), system_register(3, 3, 14, 0, 5)];
/// Registers with op0 = 2 are those of debugging and tracing.
const DEBUG: core::ops::Range<u32> = system_register(2, 0, 0, 0, 0)..system_register(2, 1, 0, 0, 0);

/// State of a vCPU between runs.
pub struct VcpuLoop {
    index: usize,
    width: Width,
    activity: Activity,
    deadline: Deadline,
    /// Deadline of the board.
    board_deadline: Nanos,
    /// The next interrupts are still to be put into the CPU's interface.
    has_virqs: bool,
    stolen_time: StolenTimeRecord,
    /// Accesses to devices that an instruction has yet to make ([`undescribed`]).
    parts: [Option<Described>; 2],
    /// Exits by reason ([`EXIT_NAMES`]).
    exits: [u64; EXIT_NAMES.len()],
}

impl VcpuLoop {
    /// vCPU `index` of this kind, which is off.
    pub const fn new(index: usize, width: Width) -> Self {
        Self {
            index,
            width,
            activity: Activity::Parked,
            deadline: Deadline::UNSET,
            board_deadline: NEVER,
            has_virqs: true,
            stolen_time: StolenTimeRecord::unused(),
            parts: [None; 2],
            exits: [0; EXIT_NAMES.len()],
        }
    }

    /// Number of exits by reason, in the order of [`EXIT_NAMES`].
    pub const fn exits(&self) -> &[u64; EXIT_NAMES.len()] {
        &self.exits
    }

    /// Index of the vCPU.
    pub const fn index(&self) -> usize {
        self.index
    }

    /// Runs the guest until the host is needed.
    pub fn run<V: Arm64Vcpu, P: Arm64Platform>(&mut self, vcpu: &mut V, bus: &mut P) -> StopReason {
        // Other threads tell of events by a kick, which has ended the last run.
        let mut flow = self.service(vcpu, bus);
        loop {
            match flow {
                Ok(()) => flow = self.step(vcpu, bus),
                Err(stop) => return stop,
            }
        }
    }

    fn step<V: Arm64Vcpu, P: Arm64Platform>(&mut self, vcpu: &mut V, bus: &mut P) -> Flow {
        if bus.needs_service(self.index) {
            self.service(vcpu, bus)?;
        }
        if self.activity == Activity::Parked {
            // The first vCPU serves timers of devices, also while it is off.
            let board = bus.clock().ticks(self.board_deadline);
            return Err(StopReason::Idle { deadline_ticks: board });
        }
        self.put_virqs(vcpu, bus);
        if self.parts[0].is_none()
            && let Some((fault, syndrome)) = vcpu.run_to_access()
        {
            self.exits[Exit::MEMORY_FAULT] += 1;
            self.access(fault, syndrome, vcpu, bus);
            return Ok(());
        }
        self.handle_other(vcpu, bus)
    }

    /// Handles an exit that [`Arm64Vcpu::run_to_access`] has not returned. It is a function of its
    /// own, so that the path of accesses has no large values and few registers.
    #[inline(never)]
    fn handle_other<V: Arm64Vcpu, P: Arm64Platform>(&mut self, vcpu: &mut V, bus: &mut P) -> Flow {
        let exit = match self.parts[0] {
            None => vcpu.other_exit(),
            Some(part) => self.take_part(part),
        };
        self.exits[exit.index()] += 1;
        self.handle(exit, vcpu, bus)
    }

    /// Services due timers and pending events.
    fn service<V: Arm64Vcpu, P: Arm64Platform>(&mut self, vcpu: &mut V, bus: &mut P) -> Flow {
        let signals = bus.service_timers(self.index);
        if let Some(outcome) = signals.end {
            return Err(StopReason::End(outcome));
        }
        if let Some(request) = signals.interrupts.start {
            self.start(request, vcpu);
        }
        vcpu.set_timer_virq(signals.interrupts.timer);
        self.board_deadline = signals.deadline;
        self.has_virqs = true;
        Ok(())
    }

    /// Starts the vCPU.
    #[cold]
    fn start(&mut self, StartRequest { entry, argument }: StartRequest, vcpu: &mut impl Arm64Vcpu) {
        vcpu.reset(self.index as u64, self.width);
        match self.width {
            Width::Bits64 => {
                vcpu.set_state(spsr::EL1_MASKED);
                vcpu.set_pc(entry);
                vcpu.set_general(0, argument);
            }
            Width::Bits32 => aarch32::start(self.index, entry, argument, vcpu),
        }
        self.activity = Activity::Running;
    }

    /// Puts interrupts into the CPU's interface while there is room.
    fn put_virqs<V: Arm64Vcpu, P: Arm64Platform>(&mut self, vcpu: &mut V, bus: &mut P) {
        let mut deadline = self.board_deadline;
        if self.has_virqs {
            self.has_virqs = !bus.put_virqs(self.index, vcpu);
            if self.has_virqs {
                let retry = bus.clock().nanos(bus.counter()).saturating_add(RETRY);
                deadline = deadline.min(retry);
            }
        }
        self.deadline.set(deadline, vcpu, bus.clock());
    }

    fn handle<V: Arm64Vcpu, P: Arm64Platform>(
        &mut self,
        exit: Exit,
        vcpu: &mut V,
        bus: &mut P,
    ) -> Flow {
        match exit {
            Exit::Deadline => {
                self.deadline.passed();
                self.service(vcpu, bus)
            }
            Exit::Preempted => {
                self.stolen_time.update(vcpu, bus.memory(), bus.clock());
                Ok(())
            }
            // A kick may be among them: the next run begins with a look at everything.
            Exit::Recall { events } | Exit::Waited { events } if events != 0 => {
                Err(StopReason::Recall(events))
            }
            Exit::Recall { .. } => Ok(()),
            Exit::Waited { .. } => {
                self.deadline.passed();
                self.service(vcpu, bus)
            }
            Exit::Wait { timer } => {
                let board = bus.clock().ticks(self.board_deadline);
                Err(StopReason::Idle { deadline_ticks: timer.min(board) })
            }
            Exit::Hypercall => self.call(vcpu, bus),
            Exit::SecureCall => {
                skip(vcpu);
                self.call(vcpu, bus)
            }
            Exit::MemoryFault { fault, syndrome } => {
                self.access(fault, syndrome, vcpu, bus);
                Ok(())
            }
            Exit::SystemRegister { syndrome } => {
                self.system_register(esr::system_access(syndrome), vcpu, bus);
                Ok(())
            }
            Exit::VirqEnded { number } => {
                bus.end_virq(self.index, number);
                Ok(())
            }
            Exit::AArch32 { syndrome } => self.handle_32(syndrome, vcpu, bus),
            Exit::Unknown { syndrome } => {
                bus.unknown(Unknown::Exit(syndrome));
                match esr::class(syndrome) {
                    class::SYSTEM_ERROR => system_error(vcpu),
                    _ => undefined(vcpu),
                }
                Ok(())
            }
            Exit::InvalidState => Err(StopReason::End(Outcome::TripleFault)),
            Exit::HostError(error) => Err(StopReason::End(Outcome::HostError(error))),
        }
    }

    fn call<V: Arm64Vcpu, P: Arm64Platform>(&mut self, vcpu: &mut V, bus: &mut P) -> Flow {
        if psci::serve(self.index, &mut self.stolen_time, vcpu, bus) == Effect::Stop {
            self.activity = Activity::Parked;
        }
        Ok(())
    }

    /// Access to a device.
    #[inline(always)]
    fn access<V: Arm64Vcpu, P: Arm64Platform>(
        &mut self,
        fault: MemoryFault,
        syndrome: u64,
        vcpu: &mut V,
        bus: &mut P,
    ) {
        let described = esr::memory_access(syndrome).filter(|_| !fault.fetch && !fault.walk);
        let Some(access) = described else {
            return self.other_access(fault, syndrome, vcpu, bus);
        };
        if access.is_write {
            if !bus.has_device(fault.gpa) {
                return self.other_access(fault, syndrome, vcpu, bus);
            }
            let unused = 64 - 8 * u32::from(access.size);
            let value = read_general(vcpu, access.general) << unused >> unused;
            bus.mmio_write(self.index, fault.gpa, access.size, value);
        } else {
            let Some(value) = bus.read_device(self.index, fault.gpa, access.size) else {
                return self.other_access(fault, syndrome, vcpu, bus);
            };
            write_general(vcpu, access.general, extend(access, value));
        }
        self.skip_access(syndrome, vcpu);
    }

    /// Skips an instruction that has accessed a device. It is one of 32 bits in user mode of a
    /// 64-bit guest, too.
    #[inline(always)]
    fn skip_access(&self, syndrome: u64, vcpu: &mut impl Arm64Vcpu) {
        if vcpu.state() & psr::IS_32_BIT != 0 && self.width == Width::Bits64 {
            return aarch32::skip(syndrome, vcpu);
        }
        skip(vcpu);
    }

    /// Access that no syndrome describes, or to no device.
    #[cold]
    #[inline(never)]
    fn other_access<V: Arm64Vcpu, P: Arm64Platform>(
        &mut self,
        fault: MemoryFault,
        syndrome: u64,
        vcpu: &mut V,
        bus: &mut P,
    ) {
        let is_device = bus.has_device(fault.gpa);
        if is_device && syndrome & esr::CACHE_MAINTENANCE != 0 && !fault.walk {
            // Devices have no caches.
            return self.skip_access(syndrome, vcpu);
        }
        if is_device
            && self.width == Width::Bits64
            && let Some(parts) = undescribed::parts(fault, syndrome, vcpu, bus)
        {
            self.parts = parts;
            return;
        }
        bus.unknown(Unknown::Instruction(fault.gpa));
        match self.width {
            Width::Bits64 => external_abort(vcpu, fault.fetch),
            Width::Bits32 => aarch32::abort(vcpu, fault.fetch, syndrome),
        }
    }

    /// Takes the next access of an instruction, as an exit that the guest has not made.
    #[cold]
    fn take_part(&mut self, (fault, syndrome): Described) -> Exit {
        self.parts = [self.parts[1], None];
        let exit = Exit::MemoryFault { fault, syndrome };
        self.exits[exit.index()] -= 1;
        exit
    }

    fn system_register<V: Arm64Vcpu, P: Arm64Platform>(
        &self,
        access: SystemAccess,
        vcpu: &mut V,
        bus: &mut P,
    ) {
        let SystemAccess { register, general, is_read } = access;
        match register {
            SGI1R | ASGI1R if !is_read => {
                let value = read_general(vcpu, general);
                // Both states have the same interrupts of group 1; there is only one.
                if register == SGI1R {
                    bus.send(self.index, SoftwareInterrupt::decode(value));
                }
            }
            SGI0R if !is_read => {}
            // Equal to the virtual counter, whose offset is the time of pauses: `bus` subtracts it.
            _ if is_read && PHYSICAL_COUNTER.contains(&register) => {
                write_general(vcpu, general, bus.counter());
            }
            _ if is_read && (register == ACTLR || DEBUG.contains(&register)) => {
                write_general(vcpu, general, 0);
            }
            _ if register == ACTLR || DEBUG.contains(&register) => {}
            _ if SET_WAY.contains(&register) => {}
            _ => {
                bus.unknown(Unknown::SystemRegister(register));
                return undefined(vcpu);
            }
        }
        skip(vcpu);
    }
}

fn skip(vcpu: &mut impl Arm64Vcpu) {
    let next = vcpu.pc().wrapping_add(INSTRUCTION);
    vcpu.set_pc(next);
}

/// Value of a general-purpose register; 31 is zero.
fn read_general(vcpu: &mut impl Arm64Vcpu, index: usize) -> u64 {
    if index < 31 { vcpu.general(index) } else { 0 }
}

fn write_general(vcpu: &mut impl Arm64Vcpu, index: usize, value: u64) {
    if index < 31 {
        vcpu.set_general(index, value);
    }
}

/// Value of a load as it is in its register.
fn extend(access: MemoryAccess, value: u64) -> u64 {
    let unused = 64 - 8 * u32::from(access.size);
    let value = value << unused;
    let value = match access.is_signed {
        true => (value as i64 >> unused) as u64,
        false => value >> unused,
    };
    if access.is_wide { value } else { value & 0xffff_ffff }
}

#[cfg(test)]
pub(crate) mod tests;
