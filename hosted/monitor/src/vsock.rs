//! Vsock device of `parador run`: its configuration and its Unix sockets on the host.

use crate::config::vsock::VsockConfig;
use crate::console::listen;
use crate::device;
use crate::device_process::DeviceProcess;
use hosted_command::failure::{self, Failure};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recv, sendmsg, socket_with, socketpair,
};
use std::ffi::OsString;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;

/// Longest socket path in bytes (`sockaddr_un` in Linux, terminating zero included).
const NAME: usize = 107;
/// Longest suffix for a port.
const PORT: usize = "_4294967295".len();

/// Socket for host-to-guest connections. Dropping it removes it.
#[derive(Debug)]
pub struct Vsock {
    description: VsockConfig,
    listener: UnixListener,
}

impl Drop for Vsock {
    fn drop(&mut self) {
        // The socket may have been removed already.
        let _ = std::fs::remove_file(&self.description.path);
    }
}

impl Vsock {
    /// Creates the socket, with access for the user only.
    ///
    /// # Errors
    /// It cannot be created: code 65, 66, 71 or 77.
    pub fn open(description: &VsockConfig) -> Result<Self, Failure> {
        let path = &description.path;
        if path.as_os_str().len() + PORT > NAME {
            let text = format!(
                "{}: the socket path with a port suffix is too long (limit {NAME} bytes)",
                path.display()
            );
            return Err(Failure::new(failure::BAD_CONFIG, text).help("use a shorter path"));
        }
        let listener = listen(path, "the vsock socket")?;
        Ok(Self { description: description.clone(), listener })
    }

    /// Starts the device process for one start of the VM; returns it and the packet socket.
    pub fn start(&self) -> Result<(DeviceProcess, OwnedFd), Failure> {
        let failed = |error: io::Error| Failure::os("create sockets for vsock", &error);
        let (stream, theirs) = UnixStream::pair().map_err(failed)?;
        let flags = SocketFlags::CLOEXEC;
        let (requests, asks) = socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
            .map_err(|error| failed(error.into()))?;
        let listener = self.listener.try_clone().map_err(failed)?;
        let path = self.description.path.clone();
        // The thread ends with the process, which has the only other descriptor.
        thread::Builder::new()
            .name("vsock".to_owned())
            .spawn(move || connect_for(&requests, &path))
            .map_err(failed)?;
        let own = [theirs.into(), listener.into(), asks];
        let vsock = hosted_devices::Vsock { cid: self.description.cid() };
        Ok((device::start_vsock(vsock, own)?, stream.into()))
    }
}

/// Connects to port sockets on request of the device process, which cannot connect by itself: it
/// would reach all sockets of the user.
fn connect_for(requests: &OwnedFd, path: &Path) {
    let mut port = [0; 4];
    while let Ok((4, _)) = retry_on_intr(|| recv(requests, &mut port, RecvFlags::empty())) {
        let socket = reach(&name(path, u32::from_le_bytes(port)));
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = SendAncillaryBuffer::new(&mut room);
        let sockets = socket.as_ref().ok().map(AsFd::as_fd);
        if let Some(socket) = &sockets {
            // The control message has room for one descriptor.
            rights.push(SendAncillaryMessage::ScmRights(std::slice::from_ref(socket)));
        }
        let byte = [IoSlice::new(&[0])];
        if sendmsg(requests, &byte, &mut rights, SendFlags::NOSIGNAL).is_err() {
            return;
        }
    }
}

/// Returns the socket path of a port.
fn name(path: &Path, port: u32) -> PathBuf {
    let mut name = OsString::from(path);
    name.push(format!("_{port}"));
    name.into()
}

/// Connects to a socket without blocking.
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
    fn sockets_are_the_users_and_go() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let at =
            |name: &str| VsockConfig { cid: 3.try_into().unwrap(), path: folder.path().join(name) };
        let vsock = Vsock::open(&at("vsock")).unwrap();
        let path = vsock.description.path.clone();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(Vsock::open(&at("vsock")).unwrap_err().code(), failure::OS_ERROR);
        drop(vsock);
        assert!(!path.exists());
        assert_eq!(Vsock::open(&at(&"x".repeat(100))).unwrap_err().code(), failure::BAD_CONFIG);
    }

    #[test]
    fn sockets_with_and_without_listener() {
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
