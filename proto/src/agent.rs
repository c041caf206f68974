//! Protocol between a program of the host and the agent, process 1 of the guests of
//! `parador exec` and `parador oci`.
//!
//! The agent listens on vsock port [`PORT`]. The first message of each connection is [`Hello`], and
//! its answer is [`Answer::Welcome`] or [`Answer::Failed`]. A control connection then has one
//! [`AgentRequest`] at a time, each answered; after [`AgentRequest::Start`] was answered, a control
//! connection takes [`AgentRequest::Signal`] and [`AgentRequest::Resize`], which have no answers,
//! and reports [`Answer::Ended`] once. A process in a container is prepared by
//! [`AgentRequest::Create`] or [`AgentRequest::Enter`] before [`AgentRequest::Run`] starts it; the
//! signals before reach it, too. A stream connection carries bytes only, and each direction
//! ends as that of a socket does.
//!
//! A message is its length (32 bits, little-endian), then a type of this module as postcard writes
//! it. [`Hello`] begins with the version, so that each version recognises all others. Neither side
//! trusts the other: lengths are checked, and lists have limits.

#[cfg(feature = "std")]
pub mod container;

#[cfg(feature = "std")]
use container::{Container, ContainerProcess, ContainerStatistics, Limits};
use core::net::{IpAddr, Ipv4Addr, SocketAddr};
use core::time::Duration;
use heapless::Vec;
use serde::de::{Error, Unexpected};
use serde::{Deserialize, Deserializer, Serialize};

/// Vsock port of the agent.
pub const PORT: u32 = 1024;
/// Version of this protocol.
pub const VERSION: u16 = 11;
/// Longest message in bytes: as much as Linux takes for one argument list and its environment on a
/// stack of 8 MiB (execve(2)).
pub const MAX_MESSAGE: usize = 2 << 20;
/// Port of name servers (RFC 1035, section 4.2).
pub const DNS_PORT: u16 = 53;
/// Longest message of DNS in bytes (RFC 1035, section 4.2.2).
pub const MAX_DNS_MESSAGE: usize = u16::MAX as usize;
/// Place of the shared directory of [`Root::Pod`], with changes.
pub const POD: &str = "/pod";
/// Most directories that are mounted besides the root.
pub const MAX_MOUNTS: usize = 16;
/// Most supplementary groups of a command.
pub const MAX_GROUPS: usize = 64;

/// Most addresses of a network interface.
pub const MAX_ADDRESSES: usize = 8;
/// Most routes over a network interface.
pub const MAX_ROUTES: usize = 32;

/// First message of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`VERSION`] of the sender.
    pub version: u16,
    /// Use of the connection.
    pub purpose: Purpose,
}

/// Use of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Purpose {
    /// Requests, for one command.
    Control {
        /// Wall-clock time of the host, since 1970-01-01 UTC. A guest that reads its real-time
        /// clock is up to half a second off, and files of shared directories would be of its
        /// future.
        time: Duration,
    },
    /// Bytes of the command of the control connection that was welcomed as `command`.
    Stream {
        /// Number of the command.
        command: u32,
        /// Which of its streams.
        stream: Stream,
    },
    /// [`DnsMessage`]s: questions to a name server at this address of the guest, and answers.
    Resolver {
        /// Loopback address.
        address: Ipv4Addr,
    },
    /// Bytes of a TCP connection to a server of the guest.
    Forward {
        /// Its address; a server at that of IPv4's loopback may be at IPv6's instead.
        to: SocketAddr,
    },
}

/// Question to a name server, or its answer, as in RFC 1035, section 4.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DnsMessage<'a> {
    /// Number of the question.
    pub number: u32,
    /// The question came over TCP, without its length in front; otherwise in a datagram.
    pub is_stream: bool,
    /// The message, at most [`MAX_DNS_MESSAGE`].
    pub message: &'a [u8],
}

/// Stream of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Stream {
    /// Standard input.
    Input,
    /// Standard output.
    Output,
    /// Standard error.
    Error,
    /// The terminal, both directions.
    Terminal,
}

/// AgentRequest on a control connection.
#[expect(clippy::large_enum_variant, reason = "there is no allocator, and one request at a time")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AgentRequest<'a> {
    /// Sets the guest up; once in its life. When this connection ends, the guest powers off.
    #[serde(borrow)]
    Configure(Guest<'a>),
    /// Starts the command of this connection, with the streams that have been connected.
    Start(GuestCommand<'a>),
    /// Makes a container and prepares its first process, with the streams that have been connected.
    #[cfg(feature = "std")]
    Create(Container<'a>),
    /// Prepares another process of a container, with the streams that have been connected.
    #[cfg(feature = "std")]
    Enter {
        /// Name of the container.
        container: &'a str,
        /// The process.
        process: ContainerProcess<'a>,
    },
    /// Starts the prepared process of this connection.
    Run,
    /// Changes the limits of a container.
    #[cfg(feature = "std")]
    Limit {
        /// Name of the container.
        container: &'a str,
        /// New limits.
        limits: Limits,
    },
    /// Asks for [`Answer::Statistics`].
    #[cfg(feature = "std")]
    Statistics {
        /// Name of the container.
        container: &'a str,
    },
    /// Sends this signal to the command's process group, in containers to the process.
    Signal(u8),
    /// Sets the size of the terminal.
    Resize(TerminalSize),
    /// Configures the network interface of a guest that was set up without a configuration of it;
    /// `None`: there is no network, and the interface is removed.
    Connect(Option<Network>),
}

/// Set-up of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Guest<'a> {
    /// Name of the guest.
    pub name: &'a str,
    /// Its root directory, below an overlay in memory.
    #[serde(borrow)]
    pub root: Root<'a>,
    /// Further shared directories.
    pub mounts: Vec<Mount<'a>, MAX_MOUNTS>,
    /// Address of the network interface, if there is one.
    pub network: Option<Network>,
}

/// Root directory of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Root<'a> {
    /// Shared directory with this mount tag.
    Share(&'a str),
    /// First disk: an ext4 file system, or partitions, of which the first ext4 file system with a
    /// program for `sh` counts.
    Disk,
    /// First disk: an ext4 file system, whatever it contains.
    FileSystem,
    /// Memory, for a guest of containers.
    Pod {
        /// Mount tag of the shared directory at [`POD`], which has the owners of files.
        tag: &'a str,
        /// The first disk has an empty ext4 file system for changes of containers.
        has_scratch: bool,
        /// Path of the folder with the kernel's modules; empty: there is none.
        modules: &'a [u8],
    },
}

/// Shared directory of a guest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mount<'a> {
    /// Mount tag.
    pub tag: &'a str,
    /// Absolute path in the guest, created if necessary.
    pub place: &'a [u8],
    /// Read-only.
    pub read_only: bool,
    /// New files belong to the guest's user who makes them.
    pub owners: bool,
}

/// Configuration of the network interface.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Network {
    /// Addresses of the guest, with their networks.
    pub addresses: Vec<Prefix, MAX_ADDRESSES>,
    /// Routes besides those of the addresses' networks; a gateway is in a network before it.
    pub routes: Vec<Route, MAX_ROUTES>,
    /// Name server; `None`: the root has its own file.
    pub resolver: Option<[u8; 4]>,
    /// Largest packet in bytes, unless it is that of the device.
    pub mtu: Option<u32>,
    /// MAC address, unless it is that of the device.
    pub mac: Option<[u8; 6]>,
}

/// Address and the length of its network's prefix in bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Prefix {
    /// Address.
    pub address: IpAddr,
    /// Bits.
    pub length: u8,
}

/// Route over the network interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Destination; the length 0 is the default route.
    pub destination: Prefix,
    /// Gateway, of the destination's family; `None`: the destination is on the link.
    pub gateway: Option<IpAddr>,
}

/// Command that the agent starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GuestCommand<'a> {
    /// Program and arguments; not empty.
    #[serde(borrow)]
    pub arguments: Strings<'a>,
    /// Environment, as `NAME=VALUE`.
    pub environment: Strings<'a>,
    /// Working directory.
    pub folder: &'a [u8],
    /// User and groups.
    pub user: CommandUser<'a>,
    /// Size of its terminal; `None`: it has three streams instead.
    pub terminal: Option<TerminalSize>,
}

/// User and groups of a command.
#[expect(clippy::large_enum_variant, reason = "there is no allocator, and one request at a time")]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CommandUser<'a> {
    /// Numbers.
    Ids {
        /// User.
        user: u32,
        /// Group.
        group: u32,
        /// Supplementary groups.
        groups: Vec<u32, MAX_GROUPS>,
    },
    /// A user, and perhaps a group after a colon, by name or number, as in an image's
    /// configuration; empty: root. The guest's `/etc/passwd` and `/etc/group` have their numbers,
    /// groups and home directory.
    Named(&'a str),
}

/// Size of a terminal in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TerminalSize {
    /// Rows.
    pub rows: u16,
    /// Columns.
    pub columns: u16,
}

/// Message of the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer<'a> {
    /// The connection is accepted.
    Welcome {
        /// [`VERSION`] of the agent.
        version: u16,
        /// Number of the command; 0 for streams.
        command: u32,
    },
    /// The request was carried out.
    Done,
    /// The request failed, for this reason.
    Failed(&'a str),
    /// Statistics of a container.
    #[cfg(feature = "std")]
    Statistics(ContainerStatistics),
    /// The command has ended, and all of its output was sent.
    Ended {
        /// Its exit code or signal.
        end: End,
        /// It was the first process of a container, of which the kernel has killed processes for
        /// lack of memory.
        lacked_memory: bool,
    },
}

/// End of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum End {
    /// It exited with this code.
    Exited(u8),
    /// This signal killed it.
    Signalled(u8),
}

/// Strings without zeros, each followed by a zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Strings<'a>(&'a [u8]);

impl<'a> Strings<'a> {
    /// Reads strings; `None`: the last one has no zero after it.
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        matches!(bytes, [] | [.., 0]).then_some(Self(bytes))
    }

    /// Returns the strings, without their zeros.
    pub fn iter(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        self.0.split_inclusive(|&byte| byte == 0).map(|string| &string[..string.len() - 1])
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Strings<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let bytes = <&[u8]>::deserialize(deserializer)?;
        let wrong = || D::Error::invalid_value(Unexpected::Bytes(bytes), &"strings with zeros");
        Self::new(bytes).ok_or_else(wrong)
    }
}

/// Messages over a byte stream of the standard library.
#[cfg(feature = "std")]
pub mod io {
    extern crate std;

    use super::MAX_MESSAGE;
    use serde::{Deserialize, Serialize};
    use std::io::{Error, ErrorKind, Read, Result, Write, copy};
    use std::net::{Shutdown, TcpStream};
    use std::os::unix::net::UnixStream;
    use std::thread;
    use std::vec::Vec;

    /// Sends a message.
    ///
    /// # Errors
    /// It is too long, or the stream fails.
    pub fn send(mut stream: impl Write, message: &impl Serialize) -> Result<()> {
        // The length is known last.
        let start = std::vec![0; size_of::<u32>()];
        let mut bytes = postcard::serialize_with_flavor(message, Extend(start))
            .map_err(|error| Error::new(ErrorKind::InvalidInput, std::format!("{error}")))?;
        let length = bytes.len() - size_of::<u32>();
        if length > MAX_MESSAGE {
            return Err(Error::new(ErrorKind::InvalidInput, "the message is too long"));
        }
        bytes[..size_of::<u32>()].copy_from_slice(&(length as u32).to_le_bytes());
        stream.write_all(&bytes)
    }

    /// Receives the bytes of a message into `room`; `None`: the stream has ended before it.
    ///
    /// # Errors
    /// The message is too long, the stream ends within it, or fails.
    pub fn receive(mut stream: impl Read, room: &mut Vec<u8>) -> Result<Option<()>> {
        let mut length = [0; size_of::<u32>()];
        let mut filled = 0;
        while filled < length.len() {
            match stream.read(&mut length[filled..]) {
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => filled += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let length = u32::from_le_bytes(length) as usize;
        if length > MAX_MESSAGE {
            return Err(Error::new(ErrorKind::InvalidData, "a message is too long"));
        }
        room.resize(length, 0);
        stream.read_exact(room).map(Some)
    }

    /// Reads a received message. Bytes after it are an error.
    ///
    /// # Errors
    /// It is malformed.
    pub fn read<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T> {
        match postcard::take_from_bytes(bytes) {
            Ok((message, [])) => Ok(message),
            _ => Err(Error::new(ErrorKind::InvalidData, "a message is malformed")),
        }
    }

    /// Sends a message of DNS over TCP, after its length (RFC 1035, section 4.2.2).
    ///
    /// # Errors
    /// It is too long, or the stream fails.
    pub fn send_dns(mut stream: impl Write, message: &[u8]) -> Result<()> {
        let length = u16::try_from(message.len())
            .map_err(|_| Error::new(ErrorKind::InvalidInput, "the message is too long"))?;
        stream.write_all(&[&length.to_be_bytes()[..], message].concat())
    }

    /// Receives a message of DNS over TCP.
    ///
    /// # Errors
    /// The stream ends before its end, or fails.
    pub fn receive_dns(mut stream: impl Read) -> Result<Vec<u8>> {
        let mut length = [0; size_of::<u16>()];
        stream.read_exact(&mut length)?;
        let mut message = std::vec![0; u16::from_be_bytes(length).into()];
        stream.read_exact(&mut message)?;
        Ok(message)
    }

    /// Copies bytes between two connections in both directions, until both have ended or one has
    /// failed.
    ///
    /// # Errors
    /// One has failed, or there is no memory for a thread.
    pub fn copy_both(one: &TcpStream, other: &UnixStream) -> Result<()> {
        thread::scope(|scope| {
            let forth = thread::Builder::new().spawn_scoped(scope, || {
                let copied = copy(&mut &*one, &mut &*other);
                finish(copied, |how| one.shutdown(how), |how| other.shutdown(how))
            })?;
            let copied = copy(&mut &*other, &mut &*one);
            let back = finish(copied, |how| other.shutdown(how), |how| one.shutdown(how));
            // A panic of the thread has been reported.
            forth.join().unwrap_or(Ok(())).and(back)
        })
    }

    /// Passes the end of one direction on. After a failure both directions end.
    fn finish(
        copied: Result<u64>,
        from: impl Fn(Shutdown) -> Result<()>,
        to: impl Fn(Shutdown) -> Result<()>,
    ) -> Result<()> {
        // They may be closed already.
        match copied {
            Ok(_) => drop(to(Shutdown::Write)),
            Err(_) => drop((from(Shutdown::Both), to(Shutdown::Both))),
        }
        copied.map(drop)
    }

    /// Appends to a vector.
    struct Extend(Vec<u8>);

    impl postcard::ser_flavors::Flavor for Extend {
        type Output = Vec<u8>;

        fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
            self.0.push(byte);
            Ok(())
        }

        fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
            self.0.extend_from_slice(bytes);
            Ok(())
        }

        fn finalize(self) -> postcard::Result<Vec<u8>> {
            Ok(self.0)
        }
    }
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::io::{read, receive, send};
    use super::*;

    fn command() -> AgentRequest<'static> {
        AgentRequest::Start(GuestCommand {
            arguments: Strings::new(b"sh\0-c\0\0").expect("strings"),
            environment: Strings::new(b"A=b\0").expect("strings"),
            folder: b"/",
            user: CommandUser::Ids {
                user: 1000,
                group: 100,
                groups: Vec::from_slice(&[4, 5]).expect("few"),
            },
            terminal: Some(TerminalSize { rows: 24, columns: 80 }),
        })
    }

    #[test]
    fn messages_pass() {
        let mut wire = std::vec![];
        let hello = Hello { version: VERSION, purpose: Purpose::Control { time: Duration::MAX } };
        send(&mut wire, &hello).expect("it fits");
        send(&mut wire, &command()).expect("it fits");
        let (mut stream, mut room) = (&wire[..], std::vec![]);
        receive(&mut stream, &mut room).expect("a message").expect("one");
        // The version comes first in every version.
        assert_eq!(room[0], VERSION as u8);
        assert_eq!(read::<Hello>(&room).expect("a hello"), hello);
        receive(&mut stream, &mut room).expect("a message").expect("one");
        let AgentRequest::Start(found) = read(&room).expect("a request") else {
            panic!("no start")
        };
        assert_eq!(AgentRequest::Start(found.clone()), command());
        assert!(found.arguments.iter().eq([&b"sh"[..], b"-c", b""]));
        assert_eq!(receive(&mut stream, &mut room).expect("the end"), None);
    }

    #[test]
    fn malformed_messages_are_refused() {
        let mut wire = std::vec![];
        send(&mut wire, &command()).expect("it fits");
        let mut room = std::vec![];
        for length in 1..wire.len() {
            assert!(receive(&wire[..length], &mut room).is_err(), "{length} bytes");
        }
        let body = &wire[4..];
        for length in 0..body.len() {
            assert!(read::<AgentRequest<'_>>(&body[..length]).is_err(), "{length} bytes");
        }
        assert!(read::<AgentRequest<'_>>(&[body, &[0]].concat()).is_err(), "a byte too many");
        let long = (MAX_MESSAGE as u32 + 1).to_le_bytes();
        assert!(receive(&long[..], &mut room).is_err());
        assert!(send(&mut wire, &Answer::Failed(&"x".repeat(MAX_MESSAGE))).is_err());
        assert_eq!(Strings::new(b"a"), None);
        // A list that states more than its limit.
        let groups = Vec::<u32, 65>::from_slice(&[0; 65]).expect("65");
        let mut wire = std::vec![];
        send(&mut wire, &groups).expect("it fits");
        assert!(read::<Vec<u32, MAX_GROUPS>>(&wire[4..]).is_err());
    }
}
