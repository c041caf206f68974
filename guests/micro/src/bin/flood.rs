//! Writes lines to its console as fast as it can. Ends never.
#![no_std]
#![no_main]

use guests_micro::{guest, println};

guest!(main);

fn main() {
    for line in 1_u64.. {
        println!("line {line} of a guest that does nothing else");
    }
}
