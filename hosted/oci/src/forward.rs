//! Connections from the network namespace of a pod to its guest, over the namespace's loopback
//! interface. Engines connect to `localhost` there to forward a port (CRI, `PortForward`), and the
//! guest has another loopback interface.
//!
//! A rule of iptables(8) redirects all of them to one port, at which the carrier listens; the agent
//! connects to the address that the client named.

use crate::network::run;
use crate::tasks::Tasks;
use hosted_command::failure::{Failure, IoContext};
use hosted_exec::connection::connect_to_agent;
use hosted_exec::vm::AgentVm;
use nix::sys::socket::{getsockopt, sockopt::OriginalDst};
use proto::agent::{Purpose, io as wire};
use std::io;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::thread::{self, Builder};
use std::time::Duration;

/// Most connections at a time; further ones end at once.
const MAX_CONNECTIONS: usize = 256;
/// Interval of attempts where descriptors or memory are short.
const INTERVAL: Duration = Duration::from_millis(100);

/// Serves connections in the network namespace of this thread to the guest of the VM with its files
/// in `folder`. Where the rule cannot be set, such as without iptables, there are none.
///
/// # Errors
/// There is no memory for a thread.
pub fn start(folder: PathBuf) -> Result<(), Failure> {
    // The rule delays no container.
    let serve = move || {
        let Ok(listener) = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)) else { return };
        if redirect(&listener).is_ok() {
            serve(&listener, &folder);
        }
    };
    Builder::new().spawn(serve).map(drop).os_error("create a thread")
}

/// Redirects connections over the loopback interface.
fn redirect(listener: &TcpListener) -> Result<(), Failure> {
    let port = listener.local_addr().os_error("find the port")?.port();
    let rule = format!("-t nat -A OUTPUT -o lo -p tcp -j REDIRECT --to-ports {port}");
    run("iptables", &format!("-w 10 {rule}")).map(drop)
}

fn serve(listener: &TcpListener, folder: &Path) {
    let tasks = Tasks::new(MAX_CONNECTIONS);
    for client in listener.incoming() {
        let Ok(client) = client else {
            thread::sleep(INTERVAL);
            continue;
        };
        let mut vm = AgentVm::attach(folder.to_owned());
        tasks.spawn(move || {
            // The client sees the end of its connection.
            let _ = forward(&client, &mut vm);
        });
    }
}

/// Connects a client to the server that it named.
fn forward(client: &TcpStream, vm: &mut AgentVm) -> Result<(), Failure> {
    let to = original(client).os_error("find the address that a client named")?;
    let guest = connect_to_agent(vm, Purpose::Forward { to: to.into() })?;
    wire::copy_both(client, &guest).os_error("copy between a client and the guest")
}

/// Returns the address of a connection before it was redirected (`SO_ORIGINAL_DST`).
fn original(client: &TcpStream) -> io::Result<SocketAddrV4> {
    let found = getsockopt(client, OriginalDst)?;
    let address = Ipv4Addr::from(u32::from_be(found.sin_addr.s_addr));
    Ok(SocketAddrV4::new(address, u16::from_be(found.sin_port)))
}
