//! Listening sockets for debuggers.

use crate::config::gdb::GdbAddress;
use crate::console::listen;
use gdbstub::conn::ConnectionExt;
use hosted_command::failure::{self, Failure};
use std::io;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

/// Connection to a debugger.
pub type Connection = Box<dyn ConnectionExt<Error = io::Error>>;

/// Listening socket.
pub enum Listener {
    /// Unix socket.
    Unix(UnixListener),
    /// TCP socket.
    Tcp(TcpListener),
}

impl Listener {
    /// Creates the socket. Returns the path of a Unix socket, too.
    pub fn open(address: &GdbAddress) -> Result<(Self, Option<PathBuf>), Failure> {
        Ok(match address {
            GdbAddress::Unix(path) => {
                (Self::Unix(listen(path, "the debugger's socket")?), Some(path.clone()))
            }
            GdbAddress::Tcp(address) => (Self::Tcp(listen_tcp(address)?), None),
        })
    }

    /// Returns the descriptor to poll for connections.
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }

    /// Accepts a connection and duplicates its descriptor.
    pub fn accept(&self) -> io::Result<(Connection, OwnedFd)> {
        match self {
            Self::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                let copy = stream.try_clone()?;
                Ok((Box::new(stream), copy.into()))
            }
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                let copy = stream.try_clone()?;
                Ok((Box::new(stream), copy.into()))
            }
        }
    }
}

fn listen_tcp(address: &str) -> Result<TcpListener, Failure> {
    let failed = |error: &io::Error| {
        let text =
            format!("cannot listen for a debugger at {address}: {}", failure::describe(error));
        Failure::new(failure::code_of(error), text)
    };
    let addresses: Vec<SocketAddr> = match address.strip_prefix(':') {
        // Remote access requires an explicit address.
        Some(port) => vec![(Ipv4Addr::LOCALHOST, port.parse().unwrap_or(0)).into()],
        None => address.to_socket_addrs().map_err(|error| failed(&error))?.collect(),
    };
    let listener = TcpListener::bind(&*addresses).map_err(|error| failed(&error))?;
    listener.set_nonblocking(true).map_err(|error| failed(&error))?;
    Ok(listener)
}
