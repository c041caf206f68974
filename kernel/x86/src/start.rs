//! What the CPUs do once the machine is set up.

use crate::boot::Machine;
use crate::io::stop;
use crate::log;

/// The first CPU.
pub fn bsp_main(machine: &'static mut Machine) -> ! {
    log!("{} MiB free", machine.memory.free.total() >> 20);
    stop()
}

/// The others.
pub fn ap_main(index: usize) -> ! {
    log!("CPU {index} is up");
    stop()
}
