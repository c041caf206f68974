//! Vsock of `parador run`: what the user says of it, and its sockets of this host.

use crate::console::listen;
use crate::device;
use crate::failure::{self, Failure};
use crate::keyvalue;
use crate::machine::Other;
use proto::vsock::GUESTS;
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, sendmsg, socket_with, socketpair,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::ffi::OsString;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;

/// Most bytes of a socket's name (`sockaddr_un` in Linux, with a zero behind it).
const NAME: usize = 107;
/// Bytes that the longest port adds to it.
const PORT: usize = "_4294967295".len();

/// What the user says of vsock: `[vsock]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// The guest's number, 3 or more; machines do not see each other's.
    #[schemars(range(min = 3))]
    cid: Cid,
    /// Socket with which programs of the host connect. That of port P, to which programs of the guest connect, has `_P` at the end of its name.
    pub path: PathBuf,
}

/// A guest's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(try_from = "u32")]
struct Cid(u32);

impl TryFrom<u32> for Cid {
    type Error = String;

    fn try_from(cid: u32) -> Result<Self, String> {
        match GUESTS.contains(&cid) {
            true => Ok(Self(cid)),
            false => {
                let (first, last) = (GUESTS.start(), GUESTS.end());
                Err(format!("{cid} is no number of a guest: these are {first} to {last}"))
            }
        }
    }
}

/// Reads `cid=CID,path=SOCKET`.
pub fn parse(text: &str) -> Result<Description, Failure> {
    let parsed = keyvalue::parse("--vsock", "cid", text);
    parsed.map_err(|failure| failure.help("write --vsock cid=3,path=SOCKET"))
}

impl Description {
    /// The guest's number.
    pub fn cid(&self) -> u32 {
        self.cid.0
    }
}

/// The socket to which programs of the host connect. Dropping it removes it.
#[derive(Debug)]
pub struct Vsock {
    description: Description,
    listener: UnixListener,
}

impl Drop for Vsock {
    fn drop(&mut self) {
        // If somebody has removed it, that was wanted.
        let _ = std::fs::remove_file(&self.description.path);
    }
}

impl Vsock {
    /// Makes the socket, for the user alone.
    ///
    /// # Errors
    /// It cannot be made: code 65, 66, 71 or 77.
    pub fn open(description: &Description) -> Result<Self, Failure> {
        let path = &description.path;
        if path.as_os_str().len() + PORT > NAME {
            let text = format!("{}: with a port the name of a socket is too long", path.display());
            return Err(Failure::new(failure::BAD_CONFIG, text).help("name a shorter path"));
        }
        let listener = listen(path, "the socket of vsock")?;
        Ok(Self { description: description.clone(), listener })
    }

    /// Starts the process that keeps the connections of one start of the machine; gives it, and the descriptor of its packets.
    pub fn start(&self) -> Result<(Other, OwnedFd), Failure> {
        let failed = |error: io::Error| Failure::os("make sockets for vsock", &error);
        let (stream, theirs) = UnixStream::pair().map_err(failed)?;
        let flags = SocketFlags::CLOEXEC;
        let (asked, asks) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(|error| failed(error.into()))?;
        let listener = self.listener.try_clone().map_err(failed)?;
        let path = self.description.path.clone();
        // It ends with the process, whose descriptor is the only other one.
        thread::Builder::new()
            .name("vsock".to_owned())
            .spawn(move || connect_for(&asked, &path))
            .map_err(failed)?;
        let own = [theirs.into(), listener.into(), asks];
        let vsock = hosted_jail::Vsock { cid: self.description.cid() };
        Ok((device::start_vsock(vsock, own)?, stream.into()))
    }
}

/// Connects with sockets of ports that the process asks for, which cannot do so itself: it would reach all sockets of the user.
fn connect_for(asked: &OwnedFd, path: &Path) {
    let mut port = [0; 4];
    while let Ok((4, _)) = retry_on_intr(|| recv(asked, &mut port, RecvFlags::empty())) {
        let socket = reach(&name(path, u32::from_le_bytes(port)));
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = SendAncillaryBuffer::new(&mut room);
        let sockets = socket.as_ref().ok().map(AsFd::as_fd);
        if let Some(socket) = &sockets {
            // There is room for one.
            rights.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(socket)));
        }
        let byte = [IoSlice::new(&[0])];
        if sendmsg(asked, &byte, &mut rights, SendFlags::NOSIGNAL).is_err() {
            return;
        }
    }
}

/// The socket of a port.
fn name(path: &Path, port: u32) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(format!("_{port}"));
    name.into()
}

/// Connects with a socket if somebody is there who takes it now; nothing here waits.
fn reach(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, &SocketAddrUnix::new(path.as_os_str().as_bytes())?)?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions() {
        let wanted = Description { cid: Cid(3), path: "a=b".into() };
        assert_eq!(parse("cid=3,path=a=b").unwrap(), wanted);
        assert_eq!(parse("3,path=a=b").unwrap(), wanted);
        for (text, said) in [
            ("", "not ``"),
            ("cid=3", "no `path`"),
            ("path=a", "no `cid`"),
            ("cid=2,path=a", "2 is no number of a guest"),
            ("cid=4294967295,path=a", "is no number of a guest"),
            ("cid=4294967296,path=a", "4294967296"),
            ("cid=3,path=a,port=1", "unknown key `port`"),
        ] {
            let failure = parse(text).unwrap_err();
            assert_eq!(failure.code(), failure::BAD_CONFIG, "{text}");
            assert!(failure.to_string().contains(said), "{text}: {failure}");
        }
    }

    #[test]
    fn sockets_are_the_users_and_go() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| Description { cid: Cid(3), path: folder.path().join(name) };
        let vsock = Vsock::open(&at("vsock")).unwrap();
        let path = vsock.description.path.clone();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(Vsock::open(&at("vsock")).unwrap_err().code(), failure::OS_ERROR);
        drop(vsock);
        assert!(!path.exists());
        assert_eq!(Vsock::open(&at(&"x".repeat(100))).unwrap_err().code(), failure::BAD_CONFIG);
    }

    #[test]
    fn somebody_is_there_or_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("vsock");
        let own = name(&path, 5000);
        assert_eq!(reach(&own).unwrap_err(), Errno::NOENT);
        let listener = UnixListener::bind(&own).unwrap();
        let _socket = reach(&own).unwrap();
        assert!(listener.accept().is_ok());
        drop(listener);
        assert_eq!(reach(&own).unwrap_err(), Errno::CONNREFUSED);
    }
}
