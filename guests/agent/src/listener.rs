//! The agent's vsock port.

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, VsockAddr, bind, getpeername, listen, socket,
};
use rustix::net::{SocketFlags, accept_with};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// Context identifiers (vsock(7)): any of the guest's, and the host's.
const ANY: u32 = u32::MAX;
const HOST: u32 = 2;
/// Connections that wait to be accepted.
const BACKLOG: i32 = 128;

/// Listening socket. Only connections of the host are accepted: by the agent, any
/// guest application could otherwise become root.
pub struct Listener(OwnedFd);

impl Listener {
    /// Listens on a port.
    pub fn new(port: u32) -> io::Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let socket = socket(AddressFamily::Vsock, SockType::Stream, flags, None)?;
        bind(socket.as_raw_fd(), &VsockAddr::new(ANY, port))?;
        listen(&socket, Backlog::new(BACKLOG)?)?;
        Ok(Self(socket))
    }

    /// Waits for the next connection of the host.
    pub fn accept(&self) -> io::Result<File> {
        loop {
            let connection = accept_with(&self.0, SocketFlags::CLOEXEC)?;
            // A peer that has gone meanwhile has no name.
            let peer = getpeername::<VsockAddr>(connection.as_raw_fd());
            if peer.is_ok_and(|peer| peer.cid() == HOST) {
                return Ok(File::from(connection));
            }
        }
    }
}
