//! Calls of firmware by `HVC` or `SMC`: PSCI (DEN 0022), the calling convention (DEN 0028), and
//! those of [`crate::trng`] and [`crate::stolen_time`].

use hw_arm64::psci::{self, smccc, stolen_time};
use vmm_vcpu::Outcome;

use crate::platform::{Arm64Platform, StartRequest, Unknown};
use crate::stolen_time::StolenTimeRecord;
use crate::trng;
use crate::vcpu::Arm64Vcpu;

/// Effect of a call beside its result.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Effect {
    /// None.
    None,
    /// The vCPU stops until it is started.
    Stop,
}

/// Serves the call in the registers of vCPU `cpu`, which has this record of stolen time.
pub fn serve<V: Arm64Vcpu, P: Arm64Platform>(
    cpu: usize,
    record: &mut StolenTimeRecord,
    vcpu: &mut V,
    bus: &mut P,
) -> Effect {
    let [function, first, second, third] = [0, 1, 2, 3].map(|index| vcpu.general(index));
    let function = function & 0xffff_ffff;
    // The arguments of the other half of the functions have 32 bits.
    let arguments = match function & psci::WIDE {
        0 => [first, second, third].map(|value| value & 0xffff_ffff),
        _ => [first, second, third],
    };
    if function == psci::CPU_OFF {
        bus.stopped(cpu);
        return Effect::Stop;
    }
    let results = trng::call(function, arguments[0], vcpu).unwrap_or_else(|| {
        let stolen_time = record.call((function, arguments[0]), cpu, vcpu, bus);
        // The convention lets a call change the registers after the first.
        [stolen_time.unwrap_or_else(|| call(function, arguments, bus)) as u64, 0, 0, 0]
    });
    for (index, result) in results.into_iter().enumerate() {
        vcpu.set_general(index, result);
    }
    Effect::None
}

/// Returns whether a number is that of this function, in one of its two widths.
fn is(number: u64, function: u64) -> bool {
    number | psci::WIDE == function
}

/// Result of a function.
fn call(function: u64, [first, second, third]: [u64; 3], bus: &mut impl Arm64Platform) -> i64 {
    match function {
        psci::VERSION => psci::VERSION_1_1 as i64,
        psci::MIGRATE_INFO_TYPE => psci::NO_TRUSTED_OS as i64,
        psci::SYSTEM_OFF | psci::SYSTEM_RESET => {
            let is_reset = function == psci::SYSTEM_RESET;
            bus.end(if is_reset { Outcome::Reset } else { Outcome::PowerOff });
            psci::SUCCESS
        }
        psci::FEATURES => match has(first) {
            true => psci::SUCCESS,
            false => psci::NOT_SUPPORTED,
        },
        smccc::VERSION => smccc::VERSION_1_1 as i64,
        smccc::ARCH_FEATURES
            if matches!(first, smccc::VERSION | smccc::ARCH_FEATURES | stolen_time::FEATURES) =>
        {
            psci::SUCCESS
        }
        smccc::ARCH_FEATURES => psci::NOT_SUPPORTED,
        // It returns at once, as if an interrupt had occurred: that is permitted.
        _ if is(function, psci::CPU_SUSPEND) => psci::SUCCESS,
        _ if is(function, psci::CPU_ON) => {
            bus.start(first, StartRequest { entry: second, argument: third })
        }
        _ if is(function, psci::AFFINITY_INFO) => match bus.power_state(first) {
            Some(state) => state as i64,
            None => psci::INVALID_PARAMETERS,
        },
        _ => {
            bus.unknown(Unknown::Call(function));
            psci::NOT_SUPPORTED
        }
    }
}

/// Returns whether there is a function.
fn has(function: u64) -> bool {
    let narrow = [
        psci::VERSION,
        psci::CPU_OFF,
        psci::MIGRATE_INFO_TYPE,
        psci::SYSTEM_OFF,
        psci::SYSTEM_RESET,
        psci::FEATURES,
        smccc::VERSION,
    ];
    let both = [psci::CPU_SUSPEND, psci::CPU_ON, psci::AFFINITY_INFO];
    narrow.contains(&function) || both.into_iter().any(|one| is(function, one))
}
