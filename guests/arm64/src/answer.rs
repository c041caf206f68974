//! Micro-guest that answers every message that comes through its first channel.
#![no_std]
#![no_main]

#[path = "../../micro/src/answers.rs"]
mod answers;
mod board;
mod channel;

use answers::Peer;
use board::{ConsoleOutput, take, wait, write};
use channel::FirstChannel;
use proto::channel::register::{DOORBELL, PEER_NAME};

/// Answers for ever.
pub extern "C" fn guest_main() {
    let Some(channel) = FirstChannel::find() else {
        line!("FAILED: there is no channel");
        return;
    };
    let Some(rings) = channel.rings() else {
        line!("FAILED: the channel's memory is too short");
        return;
    };
    channel.enable_doorbell();
    let mut peer = Peer::new(channel.name(PEER_NAME), rings);
    line!("each message of {} gets an answer", peer.name());
    loop {
        // Taken first: a doorbell after this ends the next wait.
        take();
        let ring = || write(channel.address(DOORBELL), 1);
        if !peer.answer(&mut ConsoleOutput, ring, || channel.rings()) {
            wait();
        }
    }
}

/// There is no other vCPU.
pub extern "C" fn other_main() {}
