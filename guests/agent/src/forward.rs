//! Connections of the host to servers of the guest.

use proto::agent::{Answer, VERSION, io as wire};
use std::fs::File;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// Time limit for a connection.
const PATIENCE: Duration = Duration::from_secs(10);

/// Connects to a server, and copies bytes in both directions until both have ended.
pub fn serve(connection: File, to: SocketAddr) -> io::Result<()> {
    let server = match connect(to) {
        Ok(server) => server,
        Err(error) => {
            let text = format!("connect to {to}: {error}");
            return wire::send(&connection, &Answer::Failed(&text));
        }
    };
    wire::send(&connection, &Answer::Welcome { version: VERSION, command: 0 })?;
    // The standard library has no type for connections of vsock, which are used in the same way.
    wire::copy_both(&server, &UnixStream::from(OwnedFd::from(connection)))
}

/// Connects to an address. A server at the loopback address may have that of IPv6 alone.
fn connect(to: SocketAddr) -> io::Result<TcpStream> {
    let connected = TcpStream::connect_timeout(&to, PATIENCE);
    if connected.is_ok() || !matches!(to.ip(), IpAddr::V4(ip) if ip.is_loopback()) {
        return connected;
    }
    let other = SocketAddr::new(Ipv6Addr::LOCALHOST.into(), to.port());
    TcpStream::connect_timeout(&other, PATIENCE).or(connected)
}
