//! Frame filter between a VM and `passt` that drops frames to the host's loopback address.
//!
//! `passt` connects to any address in a guest's packet. `--no-map-gw` keeps the router's address
//! from leading to the host; this filter drops packets to loopback addresses, in a process of its
//! own without other abilities: the guest may control a VM's processes. In both directions, a frame
//! follows its length as a 32-bit big-endian number; frames to the guest are not inspected.

use crate::switch::{self, LENGTH};
use host_linux::sandbox;
use hosted_command::failure::{self, Failure};
use hosted_command::supervise::{self, AtEnd};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, ExitCode, Stdio};

/// First argument of a filter process.
const MARK: &str = "--relay";
/// Bytes per read.
const CHUNK: usize = 256 << 10;

/// Starts a filter between two sockets; it ends when either is closed.
pub fn start(guest: UnixStream, host: UnixStream) -> Result<Child, Failure> {
    supervise::own(AtEnd::Kill)?
        .arg(MARK)
        .env_clear()
        .process_group(0)
        .stdin(OwnedFd::from(guest))
        .stdout(OwnedFd::from(host))
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| Failure::program("the network filter process", &error))
}

/// Serves a filter if this process was started as one and returns the exit code; `None` in an
/// ordinary `parador`.
pub fn become_relay() -> Option<ExitCode> {
    (supervise::arguments().nth(1)? == MARK)
        .then(|| ExitCode::from(if serve().is_ok() { 0 } else { failure::OS_ERROR }))
}

/// Forwards frames between standard input, the guest's side, and standard output.
fn serve() -> io::Result<()> {
    let mut guest = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let mut host = UnixStream::from(io::stdout().as_fd().try_clone_to_owned()?);
    guest.set_nonblocking(true)?;
    host.set_nonblocking(true)?;
    // As far as the host supports it.
    let _ = sandbox::restrict_with_landlock();
    let dropped = sandbox::drop_capabilities();
    dropped.map_err(|error| io::Error::from_raw_os_error(error.0))?;
    hosted_filters::confine_relay().map_err(|error| io::Error::other(error.to_string()))?;
    let (mut out, mut inward) = (Way::default(), Way::default());
    let mut buffer = vec![0; CHUNK];
    loop {
        let [from_guest, from_host] = wait(&guest, &out, &host, &inward)?;
        if from_guest {
            let Some(received) = receive(&mut guest, &mut buffer)? else { return Ok(()) };
            out.filter(&buffer[..received])?;
        }
        if from_host {
            let Some(received) = receive(&mut host, &mut buffer)? else { return Ok(()) };
            inward.waiting.extend_from_slice(&buffer[..received]);
        }
        out.send(&mut host)?;
        inward.send(&mut guest)?;
    }
}

/// Waits for events; returns for each side whether it has data and its last data has been
/// forwarded.
fn wait(guest: &UnixStream, out: &Way, host: &UnixStream, inward: &Way) -> io::Result<[bool; 2]> {
    let wanted = |own: &Way, other: &Way| {
        let reads = if own.is_empty() { PollFlags::IN } else { PollFlags::empty() };
        reads | if other.is_empty() { PollFlags::empty() } else { PollFlags::OUT }
    };
    let mut fds = [PollFd::new(guest, wanted(out, inward)), PollFd::new(host, wanted(inward, out))];
    match poll(&mut fds, None) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    // A hang-up is received as end of file, too.
    Ok(fds.each_ref().map(|fd| !(fd.revents() - PollFlags::OUT).is_empty()))
}

/// Reads available data; `None`: the peer has disconnected.
fn receive(socket: &mut UnixStream, buffer: &mut [u8]) -> io::Result<Option<usize>> {
    match socket.read(buffer) {
        Ok(0) => Ok(None),
        Ok(received) => Ok(Some(received)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
            Ok(Some(0))
        }
        Err(error) => Err(error),
    }
}

/// Data in one direction.
#[derive(Default)]
struct Way {
    /// Incomplete received frame.
    begun: Vec<u8>,
    /// Data to send, and the bytes of it that have been sent.
    waiting: Vec<u8>,
    sent: usize,
}

impl Way {
    fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Queues complete frames that pass the filter.
    fn filter(&mut self, received: &[u8]) -> io::Result<()> {
        self.begun.extend_from_slice(received);
        let mut rest = &self.begun[..];
        while let Some((frame, after)) = switch::split_frame(rest)? {
            if may_leave(&frame[LENGTH..]) {
                self.waiting.extend_from_slice(frame);
            }
            rest = after;
        }
        let left = rest.len();
        self.begun.drain(..self.begun.len() - left);
        Ok(())
    }

    /// Sends queued data.
    fn send(&mut self, to: &mut UnixStream) -> io::Result<()> {
        while self.sent < self.waiting.len() {
            match to.write(&self.waiting[self.sent..]) {
                Ok(sent) => self.sent += sent,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        self.waiting.clear();
        self.sent = 0;
        Ok(())
    }
}

/// Returns whether a frame (IEEE 802.3) of the guest passes: ARP, or IP whose destination is not
/// the host itself. A host treats unspecified addresses as loopback addresses, and IPv4-mapped IPv6
/// addresses as IPv4 addresses.
fn may_leave(frame: &[u8]) -> bool {
    const ARP: [u8; 2] = [0x08, 0x06];
    const IPV4: [u8; 2] = [0x08, 0x00];
    const IPV6: [u8; 2] = [0x86, 0xdd];
    let Some((header, packet)) = frame.split_first_chunk::<14>() else { return false };
    match [header[12], header[13]] {
        ARP => true,
        // RFC 791, 3.1; "this network" and loopback (RFC 6890).
        IPV4 => packet.get(16..20).is_some_and(|address| !matches!(address[0], 0 | 127)),
        // RFC 8200, 3; `::/80` contains the unspecified, the loopback and all IPv4-mapped addresses
        // (RFC 4291, 2.5).
        IPV6 => packet.get(24..40).is_some_and(|address| address[..10] != [0; 10]),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Ipv4Addr, Ipv6Addr};

    fn frame(kind: [u8; 2], before: usize, address: &[u8]) -> Vec<u8> {
        let mut frame = vec![2; 12];
        frame.extend(kind);
        frame.resize(14 + before, 0xff);
        frame.extend(address);
        frame.extend([0; 30]);
        frame
    }

    fn ipv4(address: &str) -> Vec<u8> {
        frame([8, 0], 16, &address.parse::<Ipv4Addr>().unwrap().octets())
    }

    fn ipv6(address: &str) -> Vec<u8> {
        frame([0x86, 0xdd], 24, &address.parse::<Ipv6Addr>().unwrap().octets())
    }

    #[test]
    fn nothing_goes_to_the_host_itself() {
        for address in ["192.0.2.1", "255.255.255.255", "224.0.0.1", "128.0.0.1", "10.0.0.1"] {
            assert!(may_leave(&ipv4(address)), "{address}");
        }
        for address in ["127.0.0.1", "127.255.0.9", "0.0.0.0", "0.1.2.3"] {
            assert!(!may_leave(&ipv4(address)), "{address}");
        }
        for address in ["2001:db8::1", "fe80::1", "ff02::2", "fd00::2", "64:ff9b::7f00:1"] {
            assert!(may_leave(&ipv6(address)), "{address}");
        }
        for address in ["::1", "::", "::ffff:127.0.0.1", "::127.0.0.1", "::ffff:192.0.2.1"] {
            assert!(!may_leave(&ipv6(address)), "{address}");
        }
        assert!(may_leave(&frame([8, 6], 0, &[])));
        // A VLAN's, and what ends before the address.
        assert!(!may_leave(&frame([0x81, 0], 0, &[])));
        assert!(!may_leave(&ipv4("192.0.2.1")[..33]) && !may_leave(&ipv6("fe80::1")[..53]));
        assert!(!may_leave(&[0; 13]));
    }

    #[test]
    fn frames_are_whole() {
        let framed = |frame: &[u8]| [&(frame.len() as u32).to_be_bytes()[..], frame].concat();
        let good = framed(&ipv4("192.0.2.1"));
        let all = [&good[..], &framed(&ipv4("127.0.0.1")), &good].concat();
        // Whatever pieces they come in.
        for piece in 1..all.len() {
            let mut way = Way::default();
            all.chunks(piece).for_each(|piece| way.filter(piece).unwrap());
            assert_eq!(way.waiting, [&good[..], &good].concat(), "{piece}");
            assert!(way.begun.is_empty());
        }
        for length in [0_u32, 13, 0x1_0000, u32::MAX] {
            assert!(Way::default().filter(&length.to_be_bytes()).is_err(), "{length}");
        }
    }
}
