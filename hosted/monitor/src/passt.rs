//! User-mode networking with `passt`: the VM's frames on one socket, ordinary host sockets on the
//! other side, without privileges. It runs as a child, sandboxes itself, and exits when the VM's
//! end of its socket is closed.

use crate::config::net::{Forward, RESOLVER, ROUTER};
use crate::descriptors;
use crate::relay;
use crate::switch::STREAM_MTU;
use command_fds::FdMapping;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::supervise::{self, AtEnd};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::net::sockopt::set_socket_send_buffer_size;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, PipeReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

/// Name of the program.
pub const PROGRAM: &str = "passt";
/// Descriptor of the frame socket in passt.
const SOCKET: i32 = 3;
/// Socket buffer for frames from passt in bytes.
const BUFFER: usize = 4 << 20;
/// Time limit of the start. Without IPv4, passt does not answer; the VM then starts after the
/// limit.
const TIMEOUT: Duration = Duration::from_secs(3);
/// Interval of the checks during the start.
const TICK: Timespec = Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
/// Longest frame from passt.
const MAX_FRAME: usize = 1 << 16;

/// Returns the arguments of passt for a port forwarding.
fn forward_arguments(forward: &Forward) -> [String; 2] {
    let option = if forward.udp { "--udp-ports" } else { "--tcp-ports" };
    [option.to_owned(), format!("{}/{}:{}", forward.address, forward.port, forward.to)]
}

/// Returns the arguments of passt for a guest with this address.
fn network_arguments(address: &Ipv4Addr) -> Vec<String> {
    let [a, b, c, _] = address.octets();
    let [gateway, resolver] =
        [ROUTER, RESOLVER].map(|last| Ipv4Addr::new(a, b, c, last).to_string());
    let own = [("--address", address.to_string()), ("--netmask", "24".to_owned())];
    let others = [("--gateway", gateway), ("--dns-forward", resolver)];
    own.into_iter().chain(others).flat_map(|(name, value)| [name.to_owned(), value]).collect()
}

/// A running `passt`. Dropping it ends it.
#[derive(Debug)]
pub struct Passt {
    child: Child,
    messages: PipeReader,
    /// Filter between passt and the VM, unless the guest may reach the host's loopback address.
    relay: Option<Child>,
}

impl Drop for Passt {
    fn drop(&mut self) {
        // Fails if the process has exited.
        for child in [Some(&mut self.child), self.relay.as_mut()].into_iter().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Passt {
    /// Starts passt and returns the socket with its frames. The guest reaches services on the
    /// host's loopback address only with `hostloopback`.
    pub fn start(
        forwards: &[Forward],
        hostloopback: bool,
        address: Option<Ipv4Addr>,
    ) -> Result<(Self, UnixStream), Failure> {
        let failed = |error: io::Error| Failure::os("create a socket pair", &error);
        let (ours, theirs) = UnixStream::pair().map_err(failed)?;
        // Frames that do not fit are lost, and retransmission is slow. The host may grant less.
        let _ = set_socket_send_buffer_size(&theirs, BUFFER);
        let (messages, writer) = io::pipe().map_err(failed)?;
        // The send never blocks: frames without a reader are lost.
        fcntl_setfl(&writer, OFlags::NONBLOCK).map_err(|error| failed(error.into()))?;
        let mut command =
            supervise::command(OsStr::new(PROGRAM), AtEnd::Kill).map_err(|failure| {
                failure.help(
                    "install Debian's package passt, or use --net tap=NAME or --net switch=SOCKET",
                )
            })?;
        let mtu = STREAM_MTU.to_string();
        command.args(["--foreground", "--quiet", "--mtu", &mtu, "--fd", &SOCKET.to_string()]);
        command.args(forwards.iter().flat_map(forward_arguments));
        command.args(address.iter().flat_map(network_arguments));
        if !hostloopback {
            command.args(without_loopback());
        }
        let socket = FdMapping { parent_fd: theirs.into(), child_fd: SOCKET };
        descriptors::give(&mut command, vec![socket], SOCKET, PROGRAM)?;
        let child = command
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(writer)
            .spawn()
            .start_error(PROGRAM)?;
        let mut passt = Self { child, messages, relay: None };
        if hostloopback {
            return Ok((passt, ours));
        }
        let (machine, theirs) = UnixStream::pair().map_err(failed)?;
        let _ = set_socket_send_buffer_size(&theirs, BUFFER);
        passt.relay = Some(relay::start(theirs, ours)?);
        Ok((passt, machine))
    }

    /// Waits until passt answers an ARP request, which it does for every neighbour (RFC 826, with
    /// no sender as in RFC 5227). Earlier frames are lost.
    pub fn wait(&mut self, socket: &mut UnixStream, mac: [u8; 6]) -> Result<(), Failure> {
        const ARP: [u8; 2] = [0x08, 0x06];
        let failed = |error: io::Error| Failure::os("exchange frames with passt", &error);
        let mut frame = vec![0xff; 6];
        frame.extend(mac);
        frame.extend(ARP);
        // Ethernet and IPv4, their address lengths, request.
        frame.extend([0, 1, 8, 0, 6, 4, 0, 1]);
        frame.extend(mac);
        frame.extend([0; 10]);
        frame.extend([169, 254, 77, 77]);
        let mut question = (frame.len() as u32).to_be_bytes().to_vec();
        question.extend(&frame);
        if socket.write_all(&question).is_err() {
            return Err(self.ended());
        }
        let deadline = Instant::now() + TIMEOUT;
        while Instant::now() < deadline {
            let mut fds = [PollFd::new(&socket, PollFlags::IN)];
            // An interruption causes an early check.
            let _ = poll(&mut fds, Some(&TICK));
            if fds[0].revents().is_empty() {
                if self.child.try_wait().map_err(failed)?.is_some() {
                    return Err(self.ended());
                }
                continue;
            }
            let mut length = [0; 4];
            let mut frame = vec![0; MAX_FRAME];
            let whole = socket.read_exact(&mut length).and_then(|()| {
                let length = u32::from_be_bytes(length) as usize;
                let frame = frame.get_mut(..length).ok_or(io::ErrorKind::InvalidData)?;
                socket.read_exact(frame)
            });
            if whole.is_err() {
                return Err(self.ended());
            }
            if frame[12..14] == ARP {
                break;
            }
        }
        Ok(())
    }

    /// Creates the failure of a passt that has exited during its start.
    fn ended(&mut self) -> Failure {
        // It may still be exiting.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let mut messages = Vec::new();
        // The pipe's other end is closed.
        let _ = self.messages.read_to_end(&mut messages);
        let messages = String::from_utf8_lossy(&messages);
        // Without a system log, passt reports that for each message.
        let mut lines = messages.lines().filter(|line| !line.starts_with("Failed to send"));
        let reason = lines.next_back().unwrap_or("no reason given");
        Failure::new(failure::OS_ERROR, format!("passt cannot start: {reason}"))
            .help("ports that are in use, or privileged ports below 1024, cannot be forwarded")
    }
}

/// Files with the host's name servers, and with those that systemd-resolved uses behind its
/// loopback address.
const RESOLVERS: [&str; 2] = ["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"];

/// Returns the arguments by which the router's address does not lead to the host. A name server on
/// the host's loopback address is then unreachable; the guest gets that server's own name servers,
/// if they are known.
fn without_loopback() -> Vec<String> {
    let [own, upstream] = RESOLVERS.map(|file| {
        // A host without the file has no name servers.
        resolvers(&fs::read_to_string(file).unwrap_or_default())
    });
    let is_hidden = !own.is_empty() && own.iter().all(IpAddr::is_loopback);
    let others = upstream.iter().filter(|address| is_hidden && !address.is_loopback());
    let others = others.flat_map(|address| ["--dns".to_owned(), address.to_string()]);
    std::iter::once("--no-map-gw".to_owned()).chain(others).collect()
}

/// Returns the name servers in a file of resolv.conf(5).
fn resolvers(text: &str) -> Vec<IpAddr> {
    let lines = text.lines().filter_map(|line| line.strip_prefix("nameserver"));
    lines.filter_map(|rest| rest.split_whitespace().next()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_servers() {
        let text = "# nameserver 1.1.1.1\nnameserver 127.0.0.53\nnameserver\t::1 \nsearch a\nnameserver x\n";
        let found = resolvers(text);
        assert_eq!(found.iter().map(IpAddr::to_string).collect::<Vec<_>>(), ["127.0.0.53", "::1"]);
        assert!(found.iter().all(IpAddr::is_loopback));
        assert_eq!(without_loopback()[0], "--no-map-gw");
    }

    #[test]
    fn arguments_of_an_address() {
        let text = network_arguments(&Ipv4Addr::new(10, 0, 2, 15)).join(" ");
        assert_eq!(
            text,
            "--address 10.0.2.15 --netmask 24 --gateway 10.0.2.2 --dns-forward 10.0.2.3"
        );
    }

    #[test]
    fn arguments_of_forwards() {
        let arguments = |text: &str| forward_arguments(&Forward::parse(text).unwrap()).join(" ");
        assert_eq!(arguments("tcp:2222:22"), "--tcp-ports 127.0.0.1/2222:22");
        assert_eq!(arguments("tcp::2222-:22"), "--tcp-ports 127.0.0.1/2222:22");
        assert_eq!(arguments("udp:0.0.0.0:53-:5353"), "--udp-ports 0.0.0.0/53:5353");
        assert_eq!(arguments("tcp:[::1]:80-:80"), "--tcp-ports ::1/80:80");
    }
}
