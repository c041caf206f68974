//! Prints a line and ends with exit code 0.
#![no_std]
#![no_main]

use guests_micro::{guest, println};

guest!(main);

fn main() {
    println!("hello from a micro-guest");
}
