//! Library of the micro-guests: start-up, console, traps, interrupt controllers.
//!
//! A micro-guest shows one behaviour of a machine, checks it, and ends the machine with an exit
//! code: 0 if the machine did what the architecture says, [`FAILED`] with a line on the console if
//! not. It runs on every back end and on plain QEMU:
//!
//! ```text
//! qemu-system-x86_64 -M q35 -cpu EPYC -nographic -no-reboot -kernel guest-hello \
//!     -device isa-debug-exit,iobase=0x501        # exit status: 2 * code + 1
//! ```
//!
//! The start-up code (`start`) enters at the PVH entry in 32-bit mode, maps the first 16 GiB to
//! themselves and calls the program in 64-bit mode with interrupts off. Code is compiled without
//! SSE, so programs own those registers.
#![no_std]

#[cfg(target_os = "none")]
mod start;

pub mod access;
pub mod answers;
pub mod apic;
pub mod boot;
pub mod channel;
pub mod console;
pub mod cpu;
pub mod messages;
pub mod paging;
pub mod pci;
pub mod port;
pub mod ram;
pub mod random;
pub mod smp;
pub mod trap;
pub mod virtio;

/// Exit code: the machine did something else than the architecture says.
pub const FAILED: u8 = 1;
/// Exit code: a trap that the program does not expect.
pub const UNEXPECTED_TRAP: u8 = 62;
/// Exit code: a bug in the program itself.
pub const BUG: u8 = 63;

/// Port of the debug-exit device.
const EXIT_PORT: u16 = 0x501;

/// Ends the machine with an exit code of 0 to 63.
pub fn exit(code: u8) -> ! {
    port::write8(EXIT_PORT, code);
    // Where there is no such device, the code is on the console.
    println!("exit code {code}");
    loop {
        cpu::disable_interrupts();
        cpu::halt();
    }
}

/// Makes a program of a function `fn()` that is called once, and of a function `fn(&mut TrapFrame)`
/// for traps (default: none is expected). Returning from the first ends the machine with exit code
/// 0.
#[macro_export]
macro_rules! guest {
    ($main:path) => {
        $crate::guest!($main, $crate::trap::unexpected);
    };
    ($main:path, $trap:path) => {
        // SAFETY: the names occur once in a program, and start-up declares them with these types.
        #[unsafe(no_mangle)]
        fn guest_program() {
            $main()
        }

        // SAFETY: as above.
        #[unsafe(no_mangle)]
        fn guest_trap(frame: &mut $crate::trap::TrapFrame) {
            $trap(frame)
        }
    };
}

/// Ends the machine with [`FAILED`] and a message, unless the condition holds.
#[macro_export]
macro_rules! check {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            $crate::println!("FAILED: {}", format_args!($($message)+));
            $crate::exit($crate::FAILED);
        }
    };
}

#[cfg(target_os = "none")]
#[panic_handler]
fn panic(info: &core::panic::PanicInfo<'_>) -> ! {
    println!("{info}");
    exit(BUG)
}
