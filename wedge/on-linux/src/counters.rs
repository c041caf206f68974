//! What the wedge has done, for reports.

use core::sync::atomic::Ordering::Relaxed;

use proto::wedge::option;
use wedge_sites::Kind;

use crate::report::say;
use crate::shared::{cell, count, shared};
use crate::sites::FUNCTION;

/// Prints all counters that are not 0, if the loader asked for it: times that each kind of site came to the wedge (those that are done in
/// place do not), and what happened otherwise.
pub fn print() {
    let shared = shared();
    if shared.options.load(Relaxed) & option::COUNTERS == 0 {
        return;
    }
    for (number, counter) in (0..).zip(&shared.sites) {
        let count = counter.load(Relaxed);
        if count != 0 {
            let name = match number {
                FUNCTION => "functions",
                _ => Kind::from_number(number).map_or("unknown", Kind::name),
            };
            say(format_args!("{count:>10} {name}"));
        }
    }
    for (name, counter) in count::NAMES.iter().zip(&shared.counters) {
        say(format_args!("{:>10} {name}", counter.load(Relaxed)));
    }
    // SAFETY: the machine has ended: nobody changes it.
    let calls = unsafe { (*cell()).calls };
    say(format_args!("{calls:>10} calls without a signal"));
}
