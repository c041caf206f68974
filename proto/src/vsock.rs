//! Vsock packets between a guest and its host (VIRTIO 1.2, section 5.10.6).

/// CID of the host.
pub const HOST: u64 = 2;
/// CIDs that a guest may have: lower ones are reserved by the standard, the highest one is the
/// wildcard.
pub const GUESTS: core::ops::RangeInclusive<u32> = 3..=u32::MAX - 1;
/// Bytes of a header.
pub const HEADER: usize = 44;
/// Largest payload of a packet in bytes: the receive buffer of one connection, which no packet may
/// exceed.
pub const MOST_DATA: u32 = 256 << 10;

/// [`Header::kind`]: stream.
pub const STREAM: u16 = 1;

/// Values of [`Header::op`].
pub mod op {
    /// Requests a connection.
    pub const REQUEST: u16 = 1;
    /// Accepts a connection.
    pub const RESPONSE: u16 = 2;
    /// Resets or rejects a connection.
    pub const RST: u16 = 3;
    /// Ends receiving or sending, according to the flags: see [`shutdown`](super::shutdown).
    pub const SHUTDOWN: u16 = 4;
    /// Payload.
    pub const RW: u16 = 5;
    /// Updates the credit.
    pub const CREDIT_UPDATE: u16 = 6;
    /// Requests an update of the credit.
    pub const CREDIT_REQUEST: u16 = 7;
}

/// Flags of [`op::SHUTDOWN`].
pub mod shutdown {
    /// The sender will not receive any more.
    pub const RECEIVE: u32 = 1;
    /// The sender will not send any more.
    pub const SEND: u32 = 2;
    /// Both directions.
    pub const BOTH: u32 = RECEIVE | SEND;
}

/// Packet header, little-endian.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Header {
    /// CID of the sender.
    pub from: u64,
    /// CID of the receiver.
    pub to: u64,
    /// Port of the sender.
    pub from_port: u32,
    /// Port of the receiver.
    pub to_port: u32,
    /// Length of the payload in bytes.
    pub length: u32,
    /// Type of the socket.
    pub kind: u16,
    /// Operation: see [`op`].
    pub op: u16,
    /// Flags of the operation.
    pub flags: u32,
    /// Receive buffer of the sender for this connection in bytes.
    pub buffer: u32,
    /// Total bytes that the sender has consumed from its receive buffer.
    pub forwarded: u32,
}

impl Header {
    /// Encodes the header.
    pub fn to_bytes(&self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..8].copy_from_slice(&self.from.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.to.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.from_port.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.to_port.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.length.to_le_bytes());
        bytes[28..30].copy_from_slice(&self.kind.to_le_bytes());
        bytes[30..32].copy_from_slice(&self.op.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.flags.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.buffer.to_le_bytes());
        bytes[40..].copy_from_slice(&self.forwarded.to_le_bytes());
        bytes
    }

    /// Decodes a header.
    pub fn from_bytes(bytes: &[u8; HEADER]) -> Self {
        let half = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let word = |at: usize| u32::from(half(at)) | u32::from(half(at + 2)) << 16;
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        Self {
            from: long(0),
            to: long(8),
            from_port: word(16),
            to_port: word(20),
            length: word(24),
            kind: half(28),
            op: half(30),
            flags: word(32),
            buffer: word(36),
            forwarded: word(40),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_round_trip() {
        let bytes: [u8; HEADER] = core::array::from_fn(|index| index as u8);
        let header = Header::from_bytes(&bytes);
        assert_eq!((header.from, header.to_port), (0x0706_0504_0302_0100, 0x1716_1514));
        assert_eq!((header.op, header.forwarded), (0x1f1e, 0x2b2a_2928));
        assert_eq!(header.to_bytes(), bytes);
    }
}
