//! Cost of a message to another VM, and of a world switch between two VMs, for guests of both
//! architectures. Both VMs run the same guest, share one CPU and have the same priority; side 0 of
//! their channel reports the figures.
//!
//! - `message_noswitch`: from before a message is written to after the doorbell. The peer is ready
//!   to run and will find it.
//! - `message_wake`: the same; the peer has halted, and is woken.
//! - `message_switch`: from before a message is written, by way of the sender's halt (`HLT`,
//!   `WFI`), to the first instruction of the peer that follows the interrupt. The peer was ready.
//! - `message_wake_switch`: the same; the peer has halted, and is woken.
//! - `world_switch`: from before a halt to the next instruction of the other VM, which was ready.
//!
//! The VMs' counters differ; what they differ by cancels out between there and back.

use core::sync::atomic::{AtomicU64, Ordering::SeqCst};

use proto::channel::{Message, Receiver, Sender};

/// Messages each way before measuring, so that every table is warm, and with them.
const WARM: u64 = 200;
const ALL: u64 = 5_200;
/// Messages to a peer that does not run, in one turn of the CPU. They have room in the ring.
const BATCH: u64 = 32;
/// Switches before measuring, in which what the VMs have printed leaves them.
const WARM_SWITCHES: u64 = 3;

/// Words of the free area: what the follower's counter is ahead.
const OFFSET: usize = 0;
const OFFSET_KNOWN: usize = 1;
/// Messages that the follower has taken while it did not sleep.
const TAKEN: usize = 2;

/// The board of a VM with a channel. Its interrupts are masked, but for its own functions.
pub trait Board {
    /// Batches of messages to a peer that does not run. The first one is not measured.
    const BATCHES: u64;
    /// Measured switches from each side. Few, since a VM that has halted gets the CPU again only at
    /// the end of the other one's turn.
    const SWITCHES: u64;
    /// A longer time between two looks at the counter, in ticks, is a switch, or an interrupt of
    /// the host's.
    const GAP: u64;
    /// A still longer time is one in which the other VM had the CPU.
    const TURN: u64;

    /// Counter of time.
    fn counter() -> u64;
    /// Rings the peer's doorbell.
    fn ring(&self);
    /// Counter at which the last doorbell's interrupt has arrived.
    fn rung() -> u64;
    /// Halts the vCPU until an interrupt, and takes it.
    fn halt();
    /// Waits without halting until a doorbell's interrupt, and takes it.
    fn poll();
    /// Lets the timer interrupt after some time, which is shorter than the peer's turn.
    fn start_timer();
    /// Waits for a time that depends on `step`, where the counter is slower than instructions.
    fn vary(step: u64);
    /// Prints the time of an event that happened `count` times in `ticks`.
    fn report(name: &str, ticks: u64, count: u64);
    /// Ends the VM with a failure.
    fn fail(why: &str);
}

/// Measured part of a switch to a ready VM.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Until its next instruction.
    Plain = 0,
    /// Until the interrupt of a message that was sent before.
    Message = 1,
}

/// One VM of the two: the channel's rings, and the cost of its messages.
pub struct Pair<B> {
    board: B,
    sender: Sender<'static>,
    receiver: Receiver<'static>,
    /// The free area of the channel's memory.
    area: &'static [AtomicU64],
    /// Ticks of sending.
    sending: u64,
}

impl<B: Board> Pair<B> {
    /// A VM with its rings, and the free area of the channel's memory.
    pub fn new(
        board: B,
        (sender, receiver): (Sender<'static>, Receiver<'static>),
        area: &'static [AtomicU64],
    ) -> Self {
        // The peer always rings: both always sleep.
        receiver.want_messages(true);
        Self { board, sender, receiver, area, sending: 0 }
    }

    /// Measures as this side of the channel: 0 reports.
    pub fn measure(&mut self, side: u64) {
        if side == 0 { self.lead() } else { self.follow() }
    }

    /// Sends two words; returns when that began. One and the same code in all measurements.
    #[inline(never)]
    fn send(&mut self, words: [u64; 2]) -> u64 {
        let [first, second] = words;
        let begin = B::counter();
        let payload = [begin, first, second, 0, 0, 0, 0];
        match self.sender.send(&Message { tag: 0, length: 32, payload }) {
            Ok(true) => self.board.ring(),
            Ok(false) => {}
            Err(_) => B::fail("sending"),
        }
        self.sending += B::counter() - begin;
        begin
    }

    /// Takes all messages that there are.
    fn drain(&mut self) {
        while let Ok(Some(_)) = self.receiver.receive() {}
    }

    /// Sleeps until there is a message: its words.
    fn receive(&mut self) -> [u64; 3] {
        loop {
            match self.receiver.receive() {
                Ok(Some((message, _))) => {
                    let [a, b, c, ..] = message.payload;
                    return [a, b, c];
                }
                Ok(None) => B::halt(),
                Err(_) => B::fail("the ring is broken"),
            }
        }
    }

    /// The words of the free area for the switches in which `side` halts: when it did, how long
    /// they took, and how many there were.
    fn words(&self, way: Way, side: usize) -> &'static [AtomicU64] {
        let first = 8 * (1 + 2 * way as usize + side);
        &self.area[first..first + 3]
    }

    fn lead(&mut self) {
        self.send_batches();
        let ahead = self.send_and_receive();
        self.area[OFFSET].store(ahead, SeqCst);
        self.area[OFFSET_KNOWN].store(1, SeqCst);
        for (way, name) in [(Way::Plain, "world_switch"), (Way::Message, "message_switch")] {
            self.halt(way, 0);
            self.watch(way, 1, ahead.wrapping_neg());
            let ticks = [0, 1].map(|side| self.words(way, side)[1].load(SeqCst));
            // In both directions, so that it cancels out if `ahead` is not right.
            B::report(name, ticks[0].wrapping_add(ticks[1]), 2 * B::SWITCHES);
        }
    }

    /// Sends messages to a peer that does not run meanwhile.
    fn send_batches(&mut self) {
        for batch in 0..B::BATCHES {
            wait_for_turn::<B>();
            if batch == 1 {
                self.sending = 0;
            }
            for message in 0..BATCH {
                B::vary(message);
                self.send([0; 2]);
            }
            while self.area[TAKEN].load(SeqCst) <= batch * BATCH {
                core::hint::spin_loop();
            }
        }
        // Without the first one.
        B::report("message_noswitch", self.sending, (B::BATCHES - 1) * BATCH);
    }

    /// Sends messages to a peer that has halted, and waits for its answers. Returns the ticks that
    /// the peer's counter is ahead.
    fn send_and_receive(&mut self) -> u64 {
        let (mut there_and_back, mut difference) = (0, 0u64);
        for round in 0..ALL {
            if round == WARM {
                (there_and_back, difference, self.sending) = (0, 0, 0);
            }
            B::vary(round);
            let sent = self.send([0; 2]);
            // When its interrupt arrived, and when it sent this: by the peer's counter.
            let [answered, handled, _] = self.receive();
            let back = B::rung();
            there_and_back += (back - sent) - (answered - handled);
            // Twice what the peer's counter is ahead, if both ways take as long.
            difference = difference
                .wrapping_add(handled.wrapping_sub(sent))
                .wrapping_add(answered.wrapping_sub(back));
        }
        let count = ALL - WARM;
        B::report("message_wake", self.sending, count);
        B::report("message_wake_switch", there_and_back, 2 * count);
        (difference as i64 / (2 * count) as i64) as u64
    }

    fn follow(&mut self) {
        let mut taken = 0;
        while taken < B::BATCHES * BATCH {
            // All of a batch have come before the CPU comes here.
            if let Ok(Some(_)) = self.receiver.receive() {
                taken += 1;
                self.area[TAKEN].store(taken, SeqCst);
            }
        }
        for _ in 0..ALL {
            self.receive();
            self.send([B::rung(), 0]);
        }
        while self.area[OFFSET_KNOWN].load(SeqCst) == 0 {
            core::hint::spin_loop();
        }
        for way in [Way::Plain, Way::Message] {
            self.watch(way, 0, self.area[OFFSET].load(SeqCst));
            self.halt(way, 1);
        }
    }

    /// Halts repeatedly, as `side`, until the peer has seen it often enough.
    fn halt(&mut self, way: Way, side: usize) {
        let [stamp, _, seen] = self.words(way, side) else { return };
        loop {
            let step = seen.load(SeqCst);
            if step == WARM_SWITCHES + B::SWITCHES {
                return;
            }
            // The peer answers a message.
            if way == Way::Plain {
                B::start_timer();
            }
            B::vary(step);
            stamp.store(B::counter(), SeqCst);
            if way == Way::Message {
                self.send([0; 2]);
            }
            B::halt();
            self.drain();
        }
    }

    /// Measures the time from the peer's halt (the peer is `side`) to this VM's next instruction.
    /// `ahead`: lead of this VM's counter.
    fn watch(&mut self, way: Way, side: usize, ahead: u64) {
        let [stamp, ticks, seen] = self.words(way, side) else { return };
        let (mut sum, mut count, mut last) = (0u64, 0, 0);
        if way == Way::Message {
            // The first one may have been taken before.
            self.send([0; 2]);
        }
        while count < WARM_SWITCHES + B::SWITCHES {
            let began = match way {
                Way::Plain => after_gap::<B>(),
                Way::Message => self.handled(),
            };
            let stamp = stamp.load(SeqCst);
            // An interrupt of the host's makes a gap too.
            if stamp == last {
                continue;
            }
            last = stamp;
            if count == WARM_SWITCHES {
                sum = 0;
            }
            sum = sum.wrapping_add(began.wrapping_sub(stamp.wrapping_add(ahead)));
            count += 1;
            ticks.store(sum, SeqCst);
            seen.store(count, SeqCst);
            if way == Way::Message {
                self.send([0; 2]);
            }
        }
    }

    /// Waits, ready to run, for the next message: when its interrupt arrived.
    fn handled(&mut self) -> u64 {
        B::poll();
        self.drain();
        B::rung()
    }
}

/// Waits until the other VM has had the CPU, so that a whole turn is left.
fn wait_for_turn<B: Board>() {
    wait_for_gap::<B>(B::TURN);
}

/// Waits until this VM has not had the CPU for some time, and then has it.
fn after_gap<B: Board>() -> u64 {
    wait_for_gap::<B>(B::GAP)
}

/// Waits for more than `ticks` between two looks at the counter; returns the second one.
fn wait_for_gap<B: Board>(ticks: u64) -> u64 {
    let mut last = B::counter();
    loop {
        let now = B::counter();
        if now - last > ticks {
            return now;
        }
        last = now;
    }
}
