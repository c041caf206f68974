//! Forwarding decisions: a learning switch with rules per port.
//!
//! - A client sends from its own address only, and no external station may use a client's address.
//! - Ports of different groups are isolated; the uplink is in every group.
//! - Clients' addresses are known, so a frame to an address that is neither a client's nor learned
//!   leaves through the uplink; other clients never see it.
//! - A client that exceeds its rate loses the excess frames.

use heapless::Vec;
use proto::net::{MAX_FRAME, Mac};
use proto::service::{MAX_SESSIONS, SwitchPort};

/// Number of remembered addresses on the uplink.
const LEARNED: usize = 256;
/// Lifetime of an address without frames, in ns (IEEE 802.1D, table 7-5).
const AGE: u64 = 300_000_000_000;
/// Burst that a client may send, as time at its rate, in ns.
const BURST: u64 = 100_000_000;

/// Bytes of addresses and type at the start of a frame.
pub const HEADER: usize = 14;

/// Source or destination of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwitchEnd {
    /// A client's port.
    Port(usize),
    /// The machine's network card.
    Uplink,
}

/// Reason to drop a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The source address is not the sender's.
    Spoofed,
    /// The sender's rate is exceeded.
    Rate,
    /// The receiver is in another group, or is the sender.
    Isolated,
    /// No station has the address.
    Unknown,
}

/// Forwarding decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It is dropped.
    Drop(Reason),
    /// Forwarded to this end.
    To(SwitchEnd),
    /// Forwarded to all ends that the sender [reaches](Switch::reaches).
    Flood,
}

/// A token bucket.
#[derive(Clone, Copy, Debug)]
pub struct Bucket {
    /// Bytes per second; 0: no limit.
    rate: u64,
    /// Capacity and content, in bytes.
    depth: u64,
    bytes: u64,
    /// Time of the last refill.
    filled: u64,
}

impl Bucket {
    /// A full bucket.
    pub fn new(rate: u64, now: u64) -> Self {
        let burst = u128::from(rate) * u128::from(BURST) / 1_000_000_000;
        // The longest frame must fit.
        let depth = u64::try_from(burst).unwrap_or(u64::MAX).max(MAX_FRAME);
        Self { rate, depth, bytes: depth, filled: now }
    }

    /// Takes `bytes` at `now`, in ns; returns `false` if the bucket has fewer.
    pub fn take(&mut self, bytes: u64, now: u64) -> bool {
        if self.rate == 0 {
            return true;
        }
        let passed = now.saturating_sub(self.filled);
        let gained = u128::from(passed) * u128::from(self.rate) / 1_000_000_000;
        if gained > 0 {
            let gained = u64::try_from(gained).unwrap_or(u64::MAX);
            self.bytes = self.bytes.saturating_add(gained).min(self.depth);
            self.filled = now;
        }
        let enough = self.bytes >= bytes;
        if enough {
            self.bytes -= bytes;
        }
        enough
    }
}

struct Port {
    mac: Mac,
    group: u8,
    bucket: Bucket,
}

#[derive(Clone, Copy)]
struct Learned {
    mac: Mac,
    /// Time of its last frame; 0 for a free entry.
    seen: u64,
}

/// The switch.
pub struct Switch {
    ports: Vec<Port, MAX_SESSIONS>,
    uplink: bool,
    learned: [Learned; LEARNED],
}

fn is_group(mac: Mac) -> bool {
    mac[0] & 1 != 0
}

/// Returns destination and source address.
fn addresses(header: &[u8; HEADER]) -> (Mac, Mac) {
    let [a, b, c, d, e, f, g, h, i, j, k, l, _, _] = *header;
    ([a, b, c, d, e, f], [g, h, i, j, k, l])
}

impl Switch {
    /// Creates a switch with these ports.
    pub fn new(ports: &[SwitchPort], uplink: bool, now: u64) -> Self {
        let port = |port: &SwitchPort| Port {
            mac: port.mac,
            group: port.group,
            bucket: Bucket::new(port.rate, now),
        };
        let free = Learned { mac: [0; 6], seen: 0 };
        Self {
            ports: ports.iter().map(port).take(MAX_SESSIONS).collect(),
            uplink,
            learned: [free; LEARNED],
        }
    }

    /// Returns whether frames may pass from one end to another.
    pub fn reaches(&self, from: SwitchEnd, to: SwitchEnd) -> bool {
        match (from, to) {
            (SwitchEnd::Port(from), SwitchEnd::Port(to)) => {
                let group = |port: usize| self.ports.get(port).map(|port| port.group);
                from != to && group(from).is_some() && group(from) == group(to)
            }
            (SwitchEnd::Uplink, SwitchEnd::Uplink) => false,
            _ => self.uplink,
        }
    }

    fn owner(&self, mac: Mac) -> Option<usize> {
        self.ports.iter().position(|port| port.mac == mac)
    }

    /// Returns the table index of an address: addresses with the same index replace each other.
    fn place(mac: Mac) -> usize {
        let hash =
            mac.iter().fold(0u32, |hash, &byte| hash.wrapping_mul(31).wrapping_add(byte.into()));
        hash as usize % LEARNED
    }

    fn learn(&mut self, mac: Mac, now: u64) {
        self.learned[Self::place(mac)] = Learned { mac, seen: now.max(1) };
    }

    fn is_learned(&self, mac: Mac, now: u64) -> bool {
        let entry = self.learned[Self::place(mac)];
        entry.mac == mac && entry.seen != 0 && now.saturating_sub(entry.seen) < AGE
    }

    /// Decides on a frame of `length` bytes at `now`, in ns.
    pub fn verdict(
        &mut self,
        from: SwitchEnd,
        header: &[u8; HEADER],
        length: u64,
        now: u64,
    ) -> Verdict {
        let (destination, source) = addresses(header);
        match from {
            SwitchEnd::Port(index) => {
                let Some(port) = self.ports.get_mut(index) else {
                    return Verdict::Drop(Reason::Unknown);
                };
                if port.mac != source {
                    return Verdict::Drop(Reason::Spoofed);
                }
                if !port.bucket.take(length, now) {
                    return Verdict::Drop(Reason::Rate);
                }
            }
            SwitchEnd::Uplink => {
                if is_group(source) || self.owner(source).is_some() {
                    return Verdict::Drop(Reason::Spoofed);
                }
                self.learn(source, now);
            }
        }
        if is_group(destination) {
            return Verdict::Flood;
        }
        if let Some(owner) = self.owner(destination) {
            let to = SwitchEnd::Port(owner);
            return if self.reaches(from, to) {
                Verdict::To(to)
            } else {
                Verdict::Drop(Reason::Isolated)
            };
        }
        // Also if no station with this address was heard yet: it can only be on the uplink.
        match from {
            SwitchEnd::Port(_) if self.uplink => Verdict::To(SwitchEnd::Uplink),
            _ if self.is_learned(destination, now) => Verdict::Drop(Reason::Isolated),
            _ => Verdict::Drop(Reason::Unknown),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTSIDE: Mac = [0x52, 0x55, 10, 0, 2, 2];

    fn mac(number: u8) -> Mac {
        [2, 0, 0, 0, 0, number]
    }

    fn switch(uplink: bool) -> Switch {
        let port = |number, group| SwitchPort { mac: mac(number), group, rate: 0, signal: 0 };
        Switch::new(&[port(0, 0), port(1, 0), port(2, 7)], uplink, 0)
    }

    fn header(destination: Mac, source: Mac) -> [u8; HEADER] {
        let mut header = [0; HEADER];
        header[..6].copy_from_slice(&destination);
        header[6..12].copy_from_slice(&source);
        header
    }

    fn decide(switch: &mut Switch, from: SwitchEnd, destination: Mac, source: Mac) -> Verdict {
        switch.verdict(from, &header(destination, source), 100, 0)
    }

    #[test]
    fn clients_reach_their_group_and_the_uplink() {
        let switch = &mut switch(true);
        let from = SwitchEnd::Port(0);
        assert_eq!(decide(switch, from, mac(1), mac(0)), Verdict::To(SwitchEnd::Port(1)));
        assert_eq!(decide(switch, from, mac(2), mac(0)), Verdict::Drop(Reason::Isolated));
        assert_eq!(decide(switch, from, mac(0), mac(0)), Verdict::Drop(Reason::Isolated));
        assert_eq!(decide(switch, from, OUTSIDE, mac(0)), Verdict::To(SwitchEnd::Uplink));
        assert_eq!(decide(switch, from, [0xff; 6], mac(0)), Verdict::Flood);
        let reached: std::vec::Vec<bool> =
            [SwitchEnd::Port(0), SwitchEnd::Port(1), SwitchEnd::Port(2), SwitchEnd::Uplink]
                .map(|to| switch.reaches(from, to))
                .into();
        assert_eq!(reached, [false, true, false, true]);
        assert_eq!(
            decide(switch, SwitchEnd::Uplink, mac(2), OUTSIDE),
            Verdict::To(SwitchEnd::Port(2))
        );
        assert_eq!(
            decide(switch, SwitchEnd::Uplink, [0x33, 0x33, 0, 0, 0, 1], OUTSIDE),
            Verdict::Flood
        );
        assert!(switch.reaches(SwitchEnd::Uplink, SwitchEnd::Port(2)));
        assert_eq!(
            decide(switch, SwitchEnd::Port(9), mac(0), mac(9)),
            Verdict::Drop(Reason::Unknown)
        );
    }

    #[test]
    fn addresses_of_other_clients_are_rejected() {
        let switch = &mut switch(true);
        assert_eq!(
            decide(switch, SwitchEnd::Port(0), mac(1), mac(2)),
            Verdict::Drop(Reason::Spoofed)
        );
        assert_eq!(
            decide(switch, SwitchEnd::Port(0), mac(1), OUTSIDE),
            Verdict::Drop(Reason::Spoofed)
        );
        assert_eq!(
            decide(switch, SwitchEnd::Uplink, mac(1), mac(0)),
            Verdict::Drop(Reason::Spoofed)
        );
        assert_eq!(
            decide(switch, SwitchEnd::Uplink, mac(1), [0xff; 6]),
            Verdict::Drop(Reason::Spoofed)
        );
    }

    #[test]
    fn learned_addresses_stay_outside_and_age() {
        let switch = &mut switch(true);
        let other = [0x52, 0x55, 10, 0, 2, 3];
        assert_eq!(
            decide(switch, SwitchEnd::Uplink, other, OUTSIDE),
            Verdict::Drop(Reason::Unknown)
        );
        assert_eq!(
            decide(switch, SwitchEnd::Uplink, OUTSIDE, other),
            Verdict::Drop(Reason::Isolated)
        );
        let late = switch.verdict(SwitchEnd::Uplink, &header(OUTSIDE, other), 100, AGE + 1);
        assert_eq!(late, Verdict::Drop(Reason::Unknown), "forgotten");
    }

    #[test]
    fn without_uplink_unknown_addresses_lead_nowhere() {
        let switch = &mut switch(false);
        assert_eq!(
            decide(switch, SwitchEnd::Port(0), OUTSIDE, mac(0)),
            Verdict::Drop(Reason::Unknown)
        );
        assert!(!switch.reaches(SwitchEnd::Port(0), SwitchEnd::Uplink));
    }

    #[test]
    fn rates() {
        const SECOND: u64 = 1_000_000_000;
        let mut free = Bucket::new(0, 0);
        assert!(free.take(u64::MAX, 0));
        let mut bucket = Bucket::new(1_000_000, 0);
        let taken =
            |bucket: &mut Bucket, now| (0..100_000).filter(|_| bucket.take(100, now)).count();
        assert_eq!(taken(&mut bucket, 0), 1000, "a tenth of a second at once");
        assert_eq!(taken(&mut bucket, SECOND / 100), 100);
        assert_eq!(taken(&mut bucket, SECOND / 100), 0);
        assert_eq!(taken(&mut bucket, 100 * SECOND), 1000, "no more than its depth");
        assert_eq!(taken(&mut bucket, 0), 0, "a clock that goes back refills nothing");
        let mut slow = Bucket::new(1, 0);
        assert!(slow.take(MAX_FRAME, 0));
        let sent = (0..=20 * SECOND).step_by(1000_000).filter(|&now| slow.take(1, now)).count();
        assert_eq!(sent, 20, "small gains are not lost");
        assert!(Bucket::new(u64::MAX, 0).take(MAX_FRAME, u64::MAX));
    }
}
