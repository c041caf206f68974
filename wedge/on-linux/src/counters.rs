//! What the wedge has done, for reports.

use core::sync::atomic::Ordering::Relaxed;

use proto::wedge::option;
use wedge_sites::Kind;

use crate::report::say;
use crate::shared::{Vcpu, count, shared, vcpus};
use crate::sites::FUNCTION;

/// Prints all counters that are not 0, if the loader asked for it: times that each kind of site came to the wedge (those that are done in
/// place do not), and what happened otherwise.
pub fn print() {
    let shared = shared();
    if shared.options.load(Relaxed) & option::COUNTERS == 0 {
        return;
    }
    let sum = |counter: &dyn Fn(&Vcpu) -> u64| vcpus().iter().map(counter).sum::<u64>();
    for number in 0..=u8::MAX {
        let count = sum(&|vcpu| vcpu.sites[usize::from(number)].load(Relaxed));
        if count != 0 {
            let name = match number {
                FUNCTION => "functions",
                _ => Kind::from_number(number).map_or("unknown", Kind::name),
            };
            say(format_args!("{count:>10} {name}"));
        }
    }
    for (counter, name) in count::NAMES.iter().enumerate() {
        let count = sum(&|vcpu| vcpu.counters[counter].load(Relaxed));
        say(format_args!("{count:>10} {name}"));
    }
    let calls = sum(&Vcpu::calls);
    say(format_args!("{calls:>10} calls without a signal"));
}
