//! Switches the machine off as ACPI says.
#![no_std]
#![no_main]

use guests_micro::{boot, check, cpu, guest, port, println};

guest!(main);

fn main() {
    let off = boot::soft_off();
    let Ok(Some((control, value))) = off else {
        check!(false, "the ACPI tables do not say how: {off:?}");
        return;
    };
    println!("poweroff: {value:#x} to port {control:#x}");
    port::write16(control, value);
    let start = cpu::tsc();
    while cpu::tsc() - start < 1 << 32 {}
    check!(false, "the machine continued");
}
