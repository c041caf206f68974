//! Text to the first serial line.

use crate::port;
use core::fmt::{self, Write};
use hw_x86::uart;

/// Tries after which a byte is sent regardless: a machine without the chip must not stop a guest.
const PATIENCE: u32 = 1_000_000;

/// The first serial line.
pub struct ConsoleOutput;

impl Write for ConsoleOutput {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            for _ in 0..PATIENCE {
                if port::read8(uart::COM1 + uart::LINE_STATUS) & uart::TRANSMITTER_EMPTY != 0 {
                    break;
                }
            }
            port::write8(uart::COM1 + uart::DATA, byte);
        }
        Ok(())
    }
}

/// Implementation of [`crate::println!`].
pub fn print(text: fmt::Arguments<'_>) {
    // Writing to the console cannot fail.
    let _ = ConsoleOutput.write_fmt(text);
}

/// Prints a line.
#[macro_export]
macro_rules! println {
    ($($text:tt)*) => {{
        $crate::console::print(format_args!($($text)*));
        $crate::console::print(format_args!("\n"));
    }};
}
