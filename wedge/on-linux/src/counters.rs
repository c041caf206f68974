//! Output of the wedge's counters.

use core::sync::atomic::Ordering::Relaxed;

use proto::hosted::{counter, log, option};
use wedge_sites::Kind;

use crate::report::print_line;
use crate::sites::FUNCTION;
use crate::state::shared::{SharedVcpu, vcpus};
use crate::state::statistics::statistics;

/// Prints the counters if the loader requests them: entries into the wedge by kind of patch site
/// (without sites handled in place), and the remaining counters.
pub fn print() {
    if !crate::state::config::has(option::COUNTERS) {
        return;
    }
    let sum = |counter: &dyn Fn(usize) -> u64| (0..vcpus().len()).map(counter).sum::<u64>();
    for number in 0..=u8::MAX {
        let count = sum(&|vcpu| statistics(vcpu).sites[usize::from(number)].load(Relaxed));
        if count != 0 {
            let name = match number {
                FUNCTION => "functions",
                _ => Kind::from_number(number).map_or("unknown", Kind::name),
            };
            print_line(log::INFO, format_args!("{count:>10} {name}"));
        }
    }
    for (counter, name) in counter::NAMES.iter().enumerate() {
        let count = sum(&|vcpu| statistics(vcpu).counters[counter].load(Relaxed));
        print_line(log::INFO, format_args!("{count:>10} {name}"));
    }
    let calls: u64 = vcpus().iter().map(SharedVcpu::calls).sum();
    print_line(log::INFO, format_args!("{calls:>10} calls without a signal"));
}
