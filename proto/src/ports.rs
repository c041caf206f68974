//! Frames between the model of a virtio console with several ports and its host end.
//!
//! One byte stream carries all ports. A frame is a header of [`HEADER`] bytes, then its data. The
//! host end defines the ports ([`FrameKind::Define`]) before anything else. It sends at most
//! [`WINDOW`] bytes of a port, and further ones as the model grants them
//! ([`FrameKind::Credit`]): a port that the guest does not read delays no other one.

/// Largest number of ports.
pub const MAX_PORTS: usize = 8;
/// Input bytes of a port that the model keeps for the guest.
pub const WINDOW: u16 = 512;
/// Bytes of a header: kind, port, length of the data (16 bits, little-endian).
pub const HEADER: usize = 4;
/// Longest name of a port in bytes.
pub const MAX_NAME: usize = 64;
/// First byte of the data of [`FrameKind::Define`]: the port is a console of the guest.
pub const IS_CONSOLE: u8 = 1;

/// Kind of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum FrameKind {
    /// To the model: the port exists. Data: 0 or [`IS_CONSOLE`], then the port's name.
    Define = 1,
    /// The sender's side of the port is open. No data.
    Open = 2,
    /// The sender's side of the port is closed. No data.
    Close = 3,
    /// Bytes of the port.
    Data = 4,
    /// To the host end: permission to send more. Data: number of bytes (16 bits, little-endian).
    Credit = 5,
}

impl FrameKind {
    /// Returns the kind with this code.
    pub fn from_code(code: u8) -> Option<Self> {
        from_code!(code: u8, Define, Open, Close, Data, Credit)
    }
}

/// Header of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Kind.
    pub kind: FrameKind,
    /// Index of the port.
    pub port: u8,
    /// Length of the data in bytes.
    pub length: u16,
}

impl Header {
    /// Encodes the header.
    pub fn to_bytes(self) -> [u8; HEADER] {
        let [low, high] = self.length.to_le_bytes();
        [self.kind as u8, self.port, low, high]
    }

    /// Decodes a header; `None` if its kind is unknown.
    pub fn from_bytes([kind, port, low, high]: [u8; HEADER]) -> Option<Self> {
        let length = u16::from_le_bytes([low, high]);
        FrameKind::from_code(kind).map(|kind| Self { kind, port, length })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_round_trip() {
        for code in 0..=u8::MAX {
            let bytes = [code, 7, 0x34, 0x12];
            let header = Header::from_bytes(bytes);
            assert_eq!(header.is_some(), (1..=5).contains(&code));
            if let Some(header) = header {
                assert_eq!((header.port, header.length), (7, 0x1234));
                assert_eq!(header.to_bytes(), bytes);
            }
        }
    }
}
