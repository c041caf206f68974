//! Answers every message that comes through its channels, until the power button is pressed. At the
//! other end is, for example, a Linux guest with `/dev/parador-com0`.
#![no_std]
#![no_main]

use guests_micro::answers::Peer;
use guests_micro::channel::{self, ChannelEnd};
use guests_micro::console::ConsoleOutput;
use guests_micro::trap::{FIRST_INTERRUPT, TrapFrame};
use guests_micro::{apic, boot, check, cpu, guest, port, println};
use proto::channel::MAX_VM_CHANNELS;
use proto::channel::register::PEER_NAME;

guest!(main, trap);

const POWER_VECTOR: u8 = 0x40;
/// Doorbell vector of all channels: any doorbell makes the program check all of them.
const CHANNEL_VECTORS: u8 = 0x50;

fn trap(frame: &mut TrapFrame) {
    match frame.vector() {
        POWER_VECTOR => guests_micro::exit(0),
        vector if u64::from(vector) < FIRST_INTERRUPT => guests_micro::trap::unexpected(frame),
        _ => apic::end_of_interrupt(),
    }
}

/// An end of a channel.
struct End {
    channel: ChannelEnd,
    peer: Peer,
}

impl End {
    fn new(mut channel: ChannelEnd) -> Option<Self> {
        channel.enable(CHANNEL_VECTORS);
        Some(Self { channel, peer: Peer::new(channel.name(PEER_NAME), channel.rings()?) })
    }

    /// Answers a message; whether there was something.
    fn answer(&mut self) -> bool {
        let Self { channel, peer } = self;
        let ring = || {
            channel.ring();
        };
        peer.answer(&mut ConsoleOutput, ring, || channel.rings())
    }
}

fn main() {
    apic::enable();
    let button = boot::power_button();
    let Ok(Some((status, interrupt))) = button else {
        check!(false, "the ACPI tables do not show a power button: {button:?}");
        return;
    };
    apic::route_level(interrupt, POWER_VECTOR);
    port::write16(status + boot::PM1_ENABLE, boot::POWER_BUTTON);
    let mut ends = [const { None::<End> }; MAX_VM_CHANNELS];
    for (end, channel) in ends.iter_mut().zip(channel::all()) {
        *end = End::new(channel);
        if let Some(end) = end {
            println!("each message of {} gets an answer", end.peer.name());
        }
    }
    loop {
        cpu::disable_interrupts();
        let mut busy = false;
        for end in ends.iter_mut().flatten() {
            busy |= end.answer();
        }
        if busy { cpu::enable_interrupts() } else { cpu::enable_and_halt() }
    }
}
