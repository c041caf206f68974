//! Software offloads for receivers without them: checksums and TCP segmentation (RFC 9293, RFC 791,
//! RFC 8200).
//!
//! The frame comes from a guest: the code checks every length in it, and drops a malformed frame.

use proto::net::{NEEDS_SUM, Offload, OffloadCaps, segments};

/// Maximum length of an emitted frame.
pub const MAX_OUT: usize = 9216 + 18;
/// Minimum payload of a segment: a guest must not multiply frames by requesting tiny segments.
const MIN_SEGMENT: u16 = 256;

const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const VLAN: u16 = 0x8100;
const TCP: u8 = 6;

mod flag {
    pub const FIN: u8 = 1 << 0;
    pub const PSH: u8 = 1 << 3;
    pub const CWR: u8 = 1 << 7;
}

fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_be_bytes(bytes.get(at..at + 2)?.try_into().ok()?))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    if let Some(place) = bytes.get_mut(at..at + value.len()) {
        place.copy_from_slice(value);
    }
}

/// Returns the sum of 16-bit words for an internet checksum (RFC 1071).
fn sum(bytes: &[u8], start: u64) -> u64 {
    let (words, rest) = bytes.as_chunks::<2>();
    let sum = words.iter().fold(start, |sum, &word| sum + u64::from(u16::from_be_bytes(word)));
    sum + rest.first().map_or(0, |&byte| u64::from(byte) << 8)
}

fn fold(mut sum: u64) -> u16 {
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

/// Offsets of the parts of a TCP frame.
struct Layout {
    is_v4: bool,
    network: usize,
    transport: usize,
    payload: usize,
}

impl Layout {
    fn of(frame: &[u8], is_v4: bool) -> Option<Self> {
        let outer = u16_at(frame, 12)?;
        let (kind, network) = if outer == VLAN { (u16_at(frame, 16)?, 18) } else { (outer, 14) };
        let first = *frame.get(network)?;
        let (protocol, transport) = if is_v4 {
            (*frame.get(network + 9)?, network + usize::from(first & 0xf) * 4)
        } else {
            (*frame.get(network + 6)?, network + 40)
        };
        let right = if is_v4 {
            kind == IPV4 && first >> 4 == 4 && first & 0xf >= 5
        } else {
            kind == IPV6 && first >> 4 == 6
        };
        let length = usize::from(*frame.get(transport + 12)? >> 4) * 4;
        let payload = transport + length;
        let whole = right && protocol == TCP && length >= 20 && payload < frame.len();
        whole.then_some(Self { is_v4, network, transport, payload })
    }
}

/// Returns whether a receiver with these capabilities accepts a frame of `length` bytes without
/// software offloads. A frame whose checksum field is beyond its end goes to none: the sender may
/// be hostile, and a receiver, which may be a network card, need not check the fields.
pub fn is_accepted(takes: OffloadCaps, length: u64, offload: &Offload) -> bool {
    let kind = match offload.segments & !segments::ECN {
        segments::NONE => true,
        segments::TCP4 => takes.tcp4,
        segments::TCP6 => takes.tcp6,
        _ => false,
    };
    let needs_sum = offload.flags & NEEDS_SUM != 0;
    kind && (!needs_sum || takes.sums && checksum_place(length, offload).is_some())
}

/// Returns the offset of the checksum field, if the frame of `length` bytes has it.
fn checksum_place(length: u64, offload: &Offload) -> Option<usize> {
    let place = usize::from(offload.sum_start) + usize::from(offload.sum_offset);
    (place as u64 + 2 <= length).then_some(place)
}

/// Calls `emit` with every frame that `frame` results in, in order. Returns `false` if the frame is
/// malformed, or a result would be too long.
pub fn apply_offload(frame: &mut [u8], offload: &Offload, mut emit: impl FnMut(&[u8])) -> bool {
    match offload.segments & !segments::ECN {
        segments::NONE => {
            if offload.flags & NEEDS_SUM != 0 && !fill_checksum(frame, offload) {
                return false;
            }
            emit(frame);
            true
        }
        kind @ (segments::TCP4 | segments::TCP6) => {
            segment_tcp(frame, kind == segments::TCP4, offload.segment, &mut emit).is_some()
        }
        _ => false,
    }
}

/// Completes a checksum; the sender has stored the sum of the pseudo-header in the checksum field.
fn fill_checksum(frame: &mut [u8], offload: &Offload) -> bool {
    let Some(place) = checksum_place(frame.len() as u64, offload) else { return false };
    let value = match fold(sum(&frame[usize::from(offload.sum_start)..], 0)) {
        // In UDP, 0 means no checksum; the values are equal in ones' complement.
        0 => u16::MAX,
        value => value,
    };
    put(frame, place, &value.to_be_bytes());
    true
}

fn segment_tcp(
    frame: &[u8],
    is_v4: bool,
    segment: u16,
    emit: &mut impl FnMut(&[u8]),
) -> Option<()> {
    let layout = Layout::of(frame, is_v4)?;
    let Layout { network, transport, payload, .. } = layout;
    if segment < MIN_SEGMENT || payload + usize::from(segment) > MAX_OUT {
        return None;
    }
    let (headers, data) = frame.split_at(payload);
    let sequence = u32_at(headers, transport + 4)?;
    let identification = u16_at(headers, network + 4)?;
    let flags = *headers.get(transport + 13)?;
    let mut out = [0; MAX_OUT];
    let count = data.len().div_ceil(segment.into());
    for (index, chunk) in data.chunks(segment.into()).enumerate() {
        let length = payload + chunk.len();
        let out = &mut out[..length];
        out[..payload].copy_from_slice(headers);
        out[payload..].copy_from_slice(chunk);
        let behind = (length - network) as u16;
        if layout.is_v4 {
            put(out, network + 2, &behind.to_be_bytes());
            put(out, network + 4, &identification.wrapping_add(index as u16).to_be_bytes());
            put(out, network + 10, &[0; 2]);
            let checksum = fold(sum(&out[network..transport], 0));
            put(out, network + 10, &checksum.to_be_bytes());
        } else {
            put(out, network + 4, &(behind - 40).to_be_bytes());
        }
        let offset = (index * usize::from(segment)) as u32;
        put(out, transport + 4, &sequence.wrapping_add(offset).to_be_bytes());
        let first = if index == 0 { 0 } else { flag::CWR };
        let last = if index + 1 == count { 0 } else { flag::FIN | flag::PSH };
        out[transport + 13] = flags & !first & !last;
        put(out, transport + 16, &[0; 2]);
        let addresses =
            if layout.is_v4 { network + 12..network + 20 } else { network + 8..network + 40 };
        let pseudo = (length - transport) as u64 + u64::from(TCP);
        let checksum = fold(sum(&out[transport..], sum(&out[addresses], pseudo)));
        put(out, transport + 16, &checksum.to_be_bytes());
        emit(out);
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tcp4(payload: usize, flags: u8) -> Vec<u8> {
        let mut frame = vec![0; 54 + payload];
        put(&mut frame, 12, &IPV4.to_be_bytes());
        put(&mut frame, 14, &[0x45, 0, 0, 0, 0x12, 0xff, 0, 0, 64, TCP]);
        put(&mut frame, 26, &[10, 0, 0, 1, 10, 0, 0, 2]);
        put(&mut frame, 34 + 4, &0xffff_ff00u32.to_be_bytes());
        frame[34 + 12] = 0x50;
        frame[34 + 13] = flags;
        for (index, byte) in frame[54..].iter_mut().enumerate() {
            *byte = index as u8;
        }
        frame
    }

    fn tcp6(payload: usize) -> Vec<u8> {
        let mut frame = vec![3; 18 + 40 + 20 + payload];
        put(&mut frame, 12, &[0x81, 0, 0, 5, 0x86, 0xdd, 0x60, 0, 0, 0, 0, 0, TCP, 64]);
        frame[58 + 12] = 0x50;
        frame
    }

    fn finished(mut frame: Vec<u8>, offload: Offload) -> Option<Vec<Vec<u8>>> {
        let mut out = Vec::new();
        apply_offload(&mut frame, &offload, |frame| out.push(frame.to_vec())).then_some(out)
    }

    /// The sum over the covered bytes, checksum included, is 0.
    fn verify(frame: &[u8], network: usize, is_v4: bool) {
        let transport = network + if is_v4 { 20 } else { 40 };
        let addresses = if is_v4 { network + 12..network + 20 } else { network + 8..network + 40 };
        if is_v4 {
            assert_eq!(fold(sum(&frame[network..transport], 0)), 0);
            assert_eq!(usize::from(u16_at(frame, network + 2).unwrap()), frame.len() - network);
        } else {
            assert_eq!(usize::from(u16_at(frame, network + 4).unwrap()), frame.len() - transport);
        }
        let pseudo = (frame.len() - transport) as u64 + 6;
        assert_eq!(fold(sum(&frame[transport..], sum(&frame[addresses], pseudo))), 0);
    }

    #[test]
    fn segments_of_tcp() {
        let offload = Offload { segments: segments::TCP4, segment: 1000, ..Offload::default() };
        let frames = finished(tcp4(2500, 0x99), offload).unwrap();
        assert_eq!(frames.iter().map(Vec::len).collect::<Vec<_>>(), [1054, 1054, 554]);
        let mut data: Vec<u8> = Vec::new();
        for (index, frame) in frames.iter().enumerate() {
            verify(frame, 14, true);
            let sequence = 0xffff_ff00u32.wrapping_add(1000 * index as u32);
            assert_eq!(u32_at(frame, 38), Some(sequence));
            assert_eq!(u16_at(frame, 18), Some(0x12ff + index as u16));
            data.extend(&frame[54..]);
        }
        assert_eq!(data, tcp4(2500, 0)[54..]);
        let flags: Vec<u8> = frames.iter().map(|frame| frame[47]).collect();
        assert_eq!(flags, [0x90, 0x10, 0x19], "CWR first, FIN and PSH last");
        let offload = Offload {
            segments: segments::TCP6 | segments::ECN,
            segment: 1440,
            ..Offload::default()
        };
        let frames = finished(tcp6(3000), offload).unwrap();
        assert_eq!(frames.len(), 3);
        frames.iter().for_each(|frame| verify(frame, 18, false));
    }

    #[test]
    fn checksums() {
        let mut frame = tcp4(100, 0);
        let pseudo = sum(&frame[26..34], 120 + 6);
        put(&mut frame, 50, &(!fold(pseudo)).to_be_bytes());
        let offload =
            Offload { flags: NEEDS_SUM, sum_start: 34, sum_offset: 16, ..Offload::default() };
        let frames = finished(frame.clone(), offload).unwrap();
        let pseudo = sum(&frames[0][26..34], 120 + 6);
        assert_eq!(fold(sum(&frames[0][34..], pseudo)), 0);
        for (sum_start, sum_offset) in [(1000, 0), (34, 200), (u16::MAX, u16::MAX)] {
            assert_eq!(finished(frame.clone(), Offload { sum_start, sum_offset, ..offload }), None);
        }
        assert_eq!(finished(frame.clone(), Offload::default()), Some(vec![frame]));
    }

    #[test]
    fn a_checksum_beyond_the_frame_is_left_to_no_receiver() {
        let all = OffloadCaps { sums: true, tcp4: true, tcp6: true };
        let with = |sum_start, sum_offset| Offload {
            flags: NEEDS_SUM,
            sum_start,
            sum_offset,
            ..Offload::default()
        };
        assert!(is_accepted(all, 60, &with(34, 24)), "the last two bytes");
        assert!(!is_accepted(OffloadCaps { sums: false, ..all }, 60, &with(34, 24)));
        for (sum_start, sum_offset) in [(34, 25), (58, 1), (u16::MAX, 0), (u16::MAX, u16::MAX)] {
            let offload = with(sum_start, sum_offset);
            assert!(!is_accepted(all, 60, &offload), "{sum_start} {sum_offset}");
            let segmented = Offload { segments: segments::TCP4, segment: 1000, ..offload };
            assert!(!is_accepted(all, 60, &segmented), "{sum_start} {sum_offset}");
            // The software drops it, too.
            assert_eq!(finished(vec![0; 60], offload), None, "{sum_start} {sum_offset}");
            let unused = Offload { flags: 0, ..offload };
            assert!(is_accepted(all, 60, &unused), "nothing is to be done");
        }
    }

    #[test]
    fn malformed_frames_are_dropped() {
        let offload = Offload { segments: segments::TCP4, segment: 1000, ..Offload::default() };
        let refused = |change: fn(&mut Vec<u8>)| {
            let mut frame = tcp4(2000, 0);
            change(&mut frame);
            assert_eq!(finished(frame, offload), None);
        };
        refused(|frame| frame[14] = 0x44);
        refused(|frame| frame[14] = 0x65);
        refused(|frame| frame[23] = 17);
        refused(|frame| frame[46] = 0x40);
        refused(|frame| frame.truncate(54));
        refused(|frame| frame.truncate(20));
        refused(|frame| frame[12] = 0x86);
        for segment in [0, 1, MIN_SEGMENT - 1, MAX_OUT as u16] {
            assert_eq!(finished(tcp4(2000, 0), Offload { segment, ..offload }), None);
        }
        assert_eq!(finished(tcp4(10, 0), Offload { segments: 3, ..offload }), None, "UDP");
    }

    proptest! {
        #[test]
        fn any_bytes(mut frame in prop::collection::vec(any::<u8>(), 14..3000), like: bool,
                     segment: u16, kinds in 0..6u8, flags in 0..2u8, sum_start: u16, sum_offset: u16) {
            if like {
                let good = tcp4(100, 0);
                let length = good.len().min(frame.len()).min(24);
                frame[..length].copy_from_slice(&good[..length]);
            }
            let offload = Offload { segments: kinds, segment, flags, sum_start, sum_offset, header: 0 };
            let mut count = 0;
            apply_offload(&mut frame, &offload, |_| count += 1);
            prop_assert!(count <= 3000 / usize::from(MIN_SEGMENT) + 1);
        }
    }
}
