//! Network of a container in a namespace of the engine: IPv4, IPv6, and routes.

use super::Engine;
use crate::hosted::succeed;
use anyhow::{Context, Result, ensure};
use serde_json::json;
use std::fs;
use std::io::Write;
use std::net::{Ipv6Addr, SocketAddrV6, TcpListener, UdpSocket};
use std::process::Command;
use std::thread;
use std::time::Duration;

/// Addresses in which servers wait: those of the host's end do not exist before a late network.
const SERVERS: [&str; 2] = ["0.0.0.0", "::"];
/// Commands of iproute2 that connect the namespace NAME, as CNI plugins do.
const SET_UP: [&str; 13] = [
    "link add NAME type veth peer name eth0 netns NAME",
    "link set NAME up",
    "address add 198.18.78.1/24 dev NAME",
    "address add fd00:78::1/64 dev NAME nodad",
    // The guest takes them over, too.
    "-n NAME link set eth0 address 02:00:00:00:78:02",
    "-n NAME link set eth0 mtu 9000",
    "-n NAME link set eth0 up",
    "-n NAME address add 198.18.78.2/32 dev eth0",
    "-n NAME address add fd00:78::2/64 dev eth0 nodad",
    // As Calico does it: the gateway is in no network of the guest.
    "-n NAME route add 198.18.78.1 dev eth0 scope link",
    "-n NAME route add default via 198.18.78.1",
    "-n NAME route add 203.0.113.0/24 via 198.18.78.1",
    "-n NAME route add default via fd00:78::1",
];
/// Script of the guest, which prints routes and the answers of both servers.
const SCRIPT: &str = "ip -4 route; ip -6 route | grep default; ip link show eth0 | grep -o mtu.9000
    cat /sys/class/net/eth0/address
    nc 198.18.78.1 PORT0 </dev/null; nc fd00:78::1 PORT1 </dev/null
    received() { sed -n 's/^ *eth0: *[0-9]* *\\([0-9]*\\) .*/\\1/p' /proc/net/dev; }
    before=$(received); sleep 1; count=$(($(received) - before))
    [ $count -lt 20 ] && echo few packets || echo $count packets";
const EXPECTED: [&str; 9] = [
    "default via 198.18.78.1 dev eth0",
    "198.18.78.1 dev eth0 scope link",
    "203.0.113.0/24 via 198.18.78.1 dev eth0",
    "default via fd00:78::1 dev eth0",
    "mtu 9000",
    "02:00:00:00:78:02",
    "server 0",
    "server 1",
    // Not those to all routers.
    "few packets",
];
/// Interval of packets to all routers.
const INTERVAL: Duration = Duration::from_millis(10);

/// Namespace and its link, which end with this value.
struct Namespace(String);

impl Namespace {
    /// Makes it, or takes that of this process.
    fn new(process: Option<u64>) -> Result<Self> {
        let namespace = Self(format!("prd{}{}", std::process::id(), process.map_or("", |_| "l")));
        match process {
            Some(process) => namespace.ip(&format!("netns attach NAME {process}"))?,
            None => namespace.ip("netns add NAME")?,
        }
        SET_UP.iter().try_for_each(|line| namespace.ip(line))?;
        Ok(namespace)
    }

    fn ip(&self, line: &str) -> Result<()> {
        succeed(Command::new("ip").args(line.replace("NAME", &self.0).split(' ')))
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        // The link ends with the namespace.
        for line in ["link del NAME", "netns del NAME"] {
            let _ = self.ip(line);
        }
    }
}

/// Starts a server, which greets a client; returns its port.
fn serve(index: usize, address: &str) -> Result<u16> {
    let listener = TcpListener::bind((address, 0)).context("cannot listen")?;
    let port = listener.local_addr().context("no port")?.port();
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // The client shows what is missing.
            let _ = (&stream).write_all(format!("server {index}\n").as_bytes());
        }
    });
    Ok(port)
}

/// Sends packets to all routers from the host's end, until the link is gone.
fn send_to_routers(link: &str) -> Result<()> {
    let index = fs::read_to_string(format!("/sys/class/net/{link}/ifindex"));
    let index = index.context("no link")?.trim().parse().context("no index of the link")?;
    let routers = SocketAddrV6::new(Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 2), 9, 0, index);
    let socket = UdpSocket::bind("[::]:0").context("no socket")?;
    socket.send_to(b"x", routers).context("cannot send to all routers")?;
    thread::spawn(move || {
        while socket.send_to(b"x", routers).is_ok() {
            thread::sleep(INTERVAL);
        }
    });
    Ok(())
}

/// The guest has the addresses and routes of the namespace, reaches the host with them, and gets no
/// packets to routers.
pub fn routes() -> Result<()> {
    connected_before()?;
    connected_late()?;
    not_connected()
}

fn connected_before() -> Result<()> {
    let engine = Engine::new()?;
    let namespace = Namespace::new(None)?;
    let script = script()?;
    engine.bundle("n", &script, |config| {
        config["linux"]["namespaces"][1]["path"] = json!(format!("/run/netns/{}", namespace.0));
    })?;
    let _input = engine.create("n")?;
    start_connected(&engine, "n", &namespace)
}

/// The namespace is the container's own, and connected after `create`.
fn connected_late() -> Result<()> {
    let engine = Engine::new()?;
    engine.bundle("late", &script()?, |_| ())?;
    let _input = engine.create("late")?;
    let process = engine.state("late")?["pid"].as_u64();
    let namespace = Namespace::new(Some(process.context("no process")?))?;
    start_connected(&engine, "late", &namespace)
}

/// Nothing is connected: the guest has no interface.
fn not_connected() -> Result<()> {
    let engine = Engine::new()?;
    engine.bundle("alone", "echo has $(ls /sys/class/net)", |_| ())?;
    let _input = engine.create("alone")?;
    engine.succeed(&["start", "alone"])?;
    engine.wait_for("alone", "stopped")?;
    let output = engine.output();
    ensure!(output.lines().any(|line| line.trim() == "has lo"), "{output}");
    engine.succeed(&["delete", "alone"])?;
    engine.nothing_left("alone")
}

/// Returns the script for servers that it starts.
fn script() -> Result<String> {
    let mut script = SCRIPT.to_owned();
    for (index, address) in SERVERS.into_iter().enumerate() {
        script = script.replace(&format!("PORT{index}"), &serve(index, address)?.to_string());
    }
    Ok(script)
}

/// Starts a container in the namespace, and checks what it prints.
fn start_connected(engine: &Engine, name: &str, namespace: &Namespace) -> Result<()> {
    send_to_routers(&namespace.0)?;
    engine.succeed(&["start", name])?;
    engine.wait_for(name, "stopped")?;
    let output = engine.output();
    for expected in EXPECTED {
        let has = output.lines().any(|line| line.trim().starts_with(expected));
        ensure!(has, "{expected:?} is not in:\n{output}");
    }
    engine.succeed(&["delete", name])?;
    engine.nothing_left(name)
}
