//! Ports without a device read as all ones and discard writes, at every width and by string
//! instructions.
#![no_std]
#![no_main]

use guests_micro::{check, guest, port, println};

guest!(main);

/// Ports that belong to no chip of a PC.
const NOBODYS: [u16; 6] = [0x0104, 0x02d0, 0x1234, 0x5678, 0xab10, 0xfff0];

fn main() {
    for number in NOBODYS {
        for round in 0..3 {
            check!(port::read8(number) == u8::MAX, "8 bits of port {number:#x}, round {round}");
            check!(port::read16(number) == u16::MAX, "16 bits of port {number:#x}");
            check!(port::read32(number) == u32::MAX, "32 bits of port {number:#x}");
            port::write8(number, 0x5a);
            port::write16(number, 0x5aa5);
            port::write32(number, 0x5aa5_1234);
        }
        let mut buffer = [0; 16];
        port::write_string(number, &buffer);
        port::read_string(number, &mut buffer);
        check!(buffer == [u8::MAX; 16], "string read of port {number:#x}");
    }
    println!("ports: all {} answer as the open bus", NOBODYS.len());
}
