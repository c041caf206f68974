//! Network of a container in a namespace of the engine: IPv4, IPv6, and routes.

use super::{Engine, GONE};
use crate::hosted::succeed;
use anyhow::{Context, Result, anyhow, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use serde_json::json;
use std::fs::{self, File};
use std::io::Write;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV6, TcpListener, UdpSocket};
use std::os::fd::AsFd;
use std::process::Command;
use std::sync::mpsc::channel;
use std::thread::{self, JoinHandle};
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

/// List of name servers of a container, and a command that needs one.
const LIST: &str = "nameserver 127.0.0.11\n";
const BY_NAME: &str = "
    nc server.test PORT0 </dev/null && echo by name";

/// Questions of a client for a name: for its IPv4 address, and its IPv6 address.
const QUESTIONS: usize = 2;

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
    engine.bundle("n", &script(SCRIPT)?, |config| {
        config["linux"]["namespaces"][1]["path"] = json!(format!("/run/netns/{}", namespace.0));
    })?;
    // As that of another VM in the namespace.
    namespace.ip("-n NAME tuntap add parador0 mode tap")?;
    engine.refused(&["create", "--bundle", "n", "n"], "another VM has the network namespace")?;
    namespace.ip("-n NAME link del parador0")?;
    let _input = engine.create("n")?;
    start_connected(&engine, "n", &namespace).map(drop)
}

/// Answers `address` to the questions for a name in a network namespace, as engines do it there
/// (RFC 1035, section 4.1).
fn answer_names(namespace: &str, address: Ipv4Addr) -> Result<JoinHandle<Result<()>>> {
    let file = File::open(format!("/run/netns/{namespace}")).context("no namespace")?;
    let (ready, is_ready) = channel();
    let server = thread::spawn(move || -> Result<()> {
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
        let socket = UdpSocket::bind("127.0.0.11:53").context("cannot bind")?;
        socket.set_read_timeout(Some(GONE))?;
        ready.send(()).context("the test has ended")?;
        for _ in 0..QUESTIONS {
            let mut message = vec![0; 512];
            let (length, from) = socket.recv_from(&mut message).context("no question")?;
            message.truncate(length);
            // The question has a type and a class at its end; another type has no answer.
            let is_ipv4 = message.get(length - 4..) == Some(&[0, 1, 0, 1]);
            message[2..4].copy_from_slice(&[0x81, 0x80]);
            message[7] = is_ipv4.into();
            if is_ipv4 {
                // The name of the question, type, class, time to live, length.
                message.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4]);
                message.extend(address.octets());
            }
            socket.send_to(&message, from).context("cannot answer")?;
        }
        Ok(())
    });
    is_ready.recv_timeout(GONE).context("the name server has not begun")?;
    Ok(server)
}

/// The namespace is the container's own, and connected after `create`; it has a name server.
fn connected_late() -> Result<()> {
    let engine = Engine::new()?;
    engine.bundle("late", &script(&[SCRIPT, BY_NAME].concat())?, |config| {
        let list = json!({ "destination": "/etc/resolv.conf", "type": "bind",
            "source": "../resolv.conf", "options": ["bind", "ro"] });
        config["mounts"].as_array_mut().into_iter().for_each(|all| all.push(list.clone()));
    })?;
    fs::write(engine.path("resolv.conf"), LIST).context("cannot write")?;
    let _input = engine.create("late")?;
    let process = engine.state("late")?["pid"].as_u64();
    let namespace = Namespace::new(Some(process.context("no process")?))?;
    namespace.ip("-n NAME link set lo up")?;
    let names = answer_names(&namespace.0, Ipv4Addr::new(198, 18, 78, 1))?;
    let output = start_connected(&engine, "late", &namespace)?;
    names.join().map_err(|_| anyhow!("the name server has panicked"))??;
    ensure!(output.contains("by name"), "{output}");
    Ok(())
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

/// Returns a script with the ports of servers, which it starts.
fn script(script: &str) -> Result<String> {
    let mut script = script.to_owned();
    for (index, address) in SERVERS.into_iter().enumerate() {
        script = script.replace(&format!("PORT{index}"), &serve(index, address)?.to_string());
    }
    Ok(script)
}

/// Starts a container in the namespace, and checks what it prints and returns.
fn start_connected(engine: &Engine, name: &str, namespace: &Namespace) -> Result<String> {
    send_to_routers(&namespace.0)?;
    engine.succeed(&["start", name])?;
    engine.wait_for(name, "stopped")?;
    let output = engine.output();
    for expected in EXPECTED {
        let has = output.lines().any(|line| line.trim().starts_with(expected));
        ensure!(has, "{expected:?} is not in:\n{output}");
    }
    engine.succeed(&["delete", name])?;
    engine.nothing_left(name)?;
    Ok(output)
}
