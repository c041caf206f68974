//! Record of a network.

/// Record of a network.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct NetRecord {
    /// MAC address of the guest's network card.
    pub mac: [u8; 6],
    /// MTU reported to the guest; 0: none is reported.
    pub mtu: u16,
    /// Name of the tap device, padded with zeros; the descriptor is an open `/dev/net/tun`. All
    /// zeros: the descriptor is a stream of frames, each preceded by its length as 32 bits,
    /// big-endian, as in `passt` and QEMU's `-netdev stream`.
    pub tap: [u8; 16],
}

impl NetRecord {
    /// Words of the record.
    pub const WORDS: usize = 3;

    /// Encodes the record.
    pub fn to_words(&self) -> [u64; Self::WORDS] {
        let [a, b, c, d, e, f] = self.mac;
        let [low, high] = self.mtu.to_le_bytes();
        let (first, last) = self.tap.split_at(8);
        let word =
            |half: &[u8]| half.iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte));
        [u64::from_le_bytes([a, b, c, d, e, f, low, high]), word(first), word(last)]
    }

    /// Decodes the record.
    pub fn from_words(words: &[u64; Self::WORDS]) -> Self {
        let [a, b, c, d, e, f, low, high] = words[0].to_le_bytes();
        let mut tap = [0; 16];
        tap[..8].copy_from_slice(&words[1].to_le_bytes());
        tap[8..].copy_from_slice(&words[2].to_le_bytes());
        Self { mac: [a, b, c, d, e, f], mtu: u16::from_le_bytes([low, high]), tap }
    }

    /// Returns whether the descriptor is that of a tap device.
    pub fn is_tap(&self) -> bool {
        self.tap != [0; 16]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_round_trips() {
        let net = NetRecord { mac: [2, 3, 4, 5, 6, 7], mtu: 65_520, tap: *b"abcdefghijklmno\0" };
        assert_eq!(NetRecord::from_words(&net.to_words()), net);
        let stream = NetRecord::from_words(&[0; NetRecord::WORDS]);
        assert_eq!((stream, stream.is_tap(), net.is_tap()), (NetRecord::default(), false, true));
    }
}
