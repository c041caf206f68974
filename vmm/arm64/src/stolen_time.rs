//! Record of stolen time of a vCPU (DEN 0057): the guest asks for it by `HVC` or `SMC`, and then
//! reads it, in memory that the device tree leaves out. The VMM writes it after the host has run
//! other work in place of the guest, and never reads it.

use hw_arm64::psci::{self, stolen_time};
use vmm_mem::GuestMemory;
use vmm_vcpu::CounterClock;
use vmm_vcpu::steal::StealTime;

use crate::platform::Arm64Platform;
use crate::vcpu::Arm64Vcpu;

/// Record of a vCPU.
#[derive(Debug)]
pub struct StolenTimeRecord {
    /// Guest-physical address, once the guest has asked for it.
    address: Option<u64>,
    time: StealTime,
}

impl StolenTimeRecord {
    /// A record that the guest has not asked for.
    pub const fn unused() -> Self {
        Self { address: None, time: StealTime::UNREPORTED }
    }

    /// Serves a function of this interface for a vCPU. Returns its result, for `x0`; `None`: it is
    /// none of them.
    pub fn call<V: Arm64Vcpu, P: Arm64Platform>(
        &mut self,
        (function, argument): (u64, u64),
        cpu: usize,
        vcpu: &mut V,
        bus: &P,
    ) -> Option<i64> {
        let address = bus.stolen_time_record(cpu);
        let is_there = matches!(argument, stolen_time::FEATURES | stolen_time::RECORD);
        match function {
            stolen_time::FEATURES if is_there && address.is_some() => Some(psci::SUCCESS),
            stolen_time::FEATURES => Some(psci::NOT_SUPPORTED),
            stolen_time::RECORD => {
                Some(address.map_or(psci::NOT_SUPPORTED, |address| self.begin(address, vcpu, bus)))
            }
            _ => None,
        }
    }

    /// Begins with the record at this address, which it returns.
    fn begin<V: Arm64Vcpu, P: Arm64Platform>(
        &mut self,
        address: u64,
        vcpu: &mut V,
        bus: &P,
    ) -> i64 {
        let is_new = self.address.replace(address).is_none();
        if is_new && bus.memory().write_slice(address, &[0; stolen_time::LENGTH as usize]).is_err()
        {
            self.address = None;
            return psci::NOT_SUPPORTED;
        }
        vcpu.set_preemption_exits();
        self.update(vcpu, bus.memory(), bus.clock());
        address as i64
    }

    /// Writes the time that has been stolen until now, if there is a record.
    pub fn update<V: Arm64Vcpu>(
        &mut self,
        vcpu: &mut V,
        memory: &GuestMemory,
        clock: &CounterClock,
    ) {
        if let Some(address) = self.address {
            let nanos = self.time.report(vcpu.stolen(), clock);
            // `begin` has written there, and guest memory does not shrink.
            let _ = memory.write(address + stolen_time::TIME, nanos);
        }
    }
}
