//! Replaces a VMM: a network client. Command line: `ping N` broadcasts frames and expects an echo
//! of each; `pong` echoes; `silent` must receive no frame; `arp` resolves the address of 10.0.2.2
//! on the external network; `spoof` sends from another client's address and fails if `pong`
//! answers. All but `ping`, `arp` and `spoof` run until root ends them.
#![no_std]
#![no_main]
#![forbid(unsafe_code)]

use native_check::Report;
use native_rt::device::{Shared, sessions};
use native_rt::{Notification, info, time};
use proto::net::{Client, Frame, MAX_FRAME, Mac, Offload};
use proto::service::{Attachment, Service};
use proto::start::{Role, Start, event, slot};

/// EtherType of the frames: experimental (IEEE 802, local experimental EtherType 1).
const TYPE: [u8; 2] = [0x88, 0xb5];
const ARP: [u8; 2] = [8, 6];
const ALL: Mac = [0xff; 6];
/// Time to wait for an answer, in ns, before the frame is sent again; and the number of attempts.
const ANSWER_TIMEOUT: u64 = 300_000_000;
const TRIES: u64 = 50;

native_rt::entry!(main);

struct Card<'s> {
    start: &'s Start<'static>,
    memory: Shared,
    attachment: Attachment,
    client: Client<'static>,
    mac: Mac,
}

fn main(start: &Start<'static>) -> u64 {
    let mut report = Report::default();
    let Role::Vmm(plan) = &start.role else { return 1 };
    let mut words = plan.command_line.split_ascii_whitespace();
    let what = words.next().unwrap_or("");
    let number = words.next().and_then(|word| word.parse().ok()).unwrap_or(100);
    let result = card(start).and_then(|mut card| match what {
        "ping" => card.ping(number),
        "pong" => card.pong(),
        "silent" => card.silent(),
        "arp" => card.arp(),
        "spoof" => card.spoof(),
        _ => Err("no such check"),
    });
    report.case(what, result);
    report.exit_code()
}

fn card<'s>(start: &'s Start<'static>) -> Result<Card<'s>, &'static str> {
    let Role::Vmm(plan) = &start.role else { return Err("the start page does not describe a VMM") };
    let net = plan.attachments.iter().zip(sessions(start));
    let net = net.into_iter().find(|(attachment, _)| attachment.service == Service::Net);
    let (&attachment, memory) = net.ok_or("no network card")?;
    let client = Client::new(memory.words(), memory.window().length()).ok_or("no session")?;
    let mut card = Card { start, memory, attachment, client, mac: [0; 6] };
    for _ in 0..TRIES {
        if let Some(info) = card.client.info() {
            card.mac = info.mac;
            return Ok(card);
        }
        card.client.poll();
        card.signal();
        card.wait()?;
    }
    Err("no connection")
}

impl Card<'_> {
    fn signal(&mut self) {
        if self.client.take_signal() {
            // A switch that has ended gets the signal when it restarts.
            let _ = Notification::at(slot::SESSIONS).signal(self.attachment.signal);
        }
    }

    /// Waits for a frame, or a short time.
    fn wait(&mut self) -> Result<(), &'static str> {
        self.client.poll();
        let sleeps = self.client.sleep();
        self.signal();
        if !sleeps {
            return Ok(());
        }
        let deadline = time::after(&self.start.clock, ANSWER_TIMEOUT);
        match Notification::at(slot::NOTIFICATION).wait(deadline) {
            Ok(events) if events & event::STOP != 0 => Err("stopped"),
            _ => Ok(()),
        }
    }

    /// Sends a frame of `length` bytes that begins with `head`, the rest filled with `fill`.
    fn send(&mut self, head: &[u8], length: u64, fill: u8) -> bool {
        let Some(offset) = self.client.place(length) else { return false };
        let window = self.memory.window();
        let mut done = window.write(offset, head);
        for at in (head.len() as u64..length).step_by(64) {
            let part = (length - at).min(64);
            done &= window.write(offset + at, &[fill; 64][..part as usize]);
        }
        self.client.send(Frame { offset, length, offload: Offload::default() });
        self.signal();
        done
    }

    /// Returns the next frame: its first 64 bytes, its length, and whether the rest is filled with
    /// byte 18.
    fn receive(&mut self) -> Option<([u8; 64], u64, bool)> {
        let frame = self.client.receive()?;
        let mut head = [0; 64];
        let length = frame.length.min(64) as usize;
        let window = self.memory.window();
        let mut good = window.read(frame.offset, &mut head[..length]);
        for at in (64..frame.length).step_by(64) {
            let part = (frame.length - at).min(64) as usize;
            let mut bytes = [0; 64];
            good &= window.read(frame.offset + at, &mut bytes[..part]);
            good &= bytes[..part].iter().all(|&byte| byte == head[18]);
        }
        self.client.done();
        Some((head, frame.length, good))
    }

    fn head(&self, to: Mac, from: Mac, number: u32, fill: u8) -> [u8; 19] {
        let mut head = [0; 19];
        head[..6].copy_from_slice(&to);
        head[6..12].copy_from_slice(&from);
        head[12..14].copy_from_slice(&TYPE);
        head[14..18].copy_from_slice(&number.to_le_bytes());
        head[18] = fill;
        head
    }

    fn ping(&mut self, count: u64) -> Result<(), &'static str> {
        let (mut answered, mut tries, mut bytes) = (0, 0, 0);
        let begin = time::tsc();
        while answered < count {
            let length = match answered % 8 {
                7 => MAX_FRAME,
                step => 60 + 200 * step,
            };
            let fill = answered as u8;
            let to = ALL;
            let head = self.head(to, self.mac, answered as u32, fill);
            self.client.poll();
            if !self.send(&head, length, fill) {
                self.wait()?;
            }
            let mut echoed = false;
            for _ in 0..4 {
                while let Some((head, got, good)) = self.receive() {
                    let number = u32::from_le_bytes([head[14], head[15], head[16], head[17]]);
                    if head[12..14] == TYPE
                        && u64::from(number) == answered
                        && head[..6] == self.mac
                    {
                        if got != length || !good {
                            return Err("a frame has changed on its way");
                        }
                        echoed = true;
                    }
                }
                if echoed {
                    break;
                }
                self.wait()?;
            }
            if echoed {
                bytes += 2 * length;
                answered += 1;
                tries = 0;
            } else {
                tries += 1;
                if tries == TRIES {
                    return Err("no answer");
                }
            }
        }
        let nanos = time::nanos(self.start.clock.tsc_khz, time::tsc() - begin);
        info!("{count} frames and answers, {bytes} bytes, {} ns each", nanos / count.max(1));
        Ok(())
    }

    fn pong(&mut self) -> Result<(), &'static str> {
        loop {
            while let Some((mut head, length, good)) = self.receive() {
                if head[12..14] != TYPE || !good {
                    continue;
                }
                let (first, second) = head.split_at_mut(6);
                first.copy_from_slice(&second[..6]);
                second[..6].copy_from_slice(&self.mac);
                // Without room the answer is dropped, as a network may.
                let head = head;
                self.send(&head[..19], length, head[18]);
            }
            if self.wait().is_err() {
                return Ok(());
            }
        }
    }

    fn silent(&mut self) -> Result<(), &'static str> {
        loop {
            if let Some((head, ..)) = self.receive()
                && head[12..14] == TYPE
            {
                return Err("a frame of another group");
            }
            if self.wait().is_err() {
                return Ok(());
            }
        }
    }

    fn arp(&mut self) -> Result<(), &'static str> {
        let mut question = [0; 60];
        question[..6].copy_from_slice(&ALL);
        question[6..12].copy_from_slice(&self.mac);
        question[12..14].copy_from_slice(&ARP);
        question[14..22].copy_from_slice(&[0, 1, 8, 0, 6, 4, 0, 1]);
        question[22..28].copy_from_slice(&self.mac);
        question[28..32].copy_from_slice(&[10, 0, 2, 15]);
        question[38..42].copy_from_slice(&[10, 0, 2, 2]);
        for _ in 0..TRIES {
            self.client.poll();
            self.send(&question, 60, 0);
            self.wait()?;
            while let Some((answer, ..)) = self.receive() {
                if answer[12..14] == ARP && answer[21] == 2 && answer[28..32] == [10, 0, 2, 2] {
                    return Ok(());
                }
            }
        }
        Err("no answer from the external network")
    }

    fn spoof(&mut self) -> Result<(), &'static str> {
        let mut other = self.mac;
        other[5] ^= 0x40;
        for number in 0..3 {
            self.client.poll();
            let head = self.head(ALL, other, 0xffff_0000 + number, 1);
            self.send(&head, 100, 1);
            self.wait()?;
            while let Some((head, ..)) = self.receive() {
                if head[12..14] == TYPE && head[16..18] == [0xff, 0xff] {
                    return Err("a frame with a spoofed address was forwarded");
                }
            }
        }
        Ok(())
    }
}
