//! Capability graph of a system: the capabilities that `root` grants, with holders and objects.
//!
//! A guest holds no capability: its VMM acts for it. Every program calls `root` through two gates,
//! log and control, and `root` can revoke every capability; these edges exist in every system, so
//! they are marked ([`Edge::routine`]) and drawn without text.

pub mod dot;
pub mod svg;

use crate::attach::MachineDevice;
use crate::description::{Log, Restart, ServerKind};
use crate::resolved::{ResolvedServer, ResolvedSystem, ResolvedVm};
use hosted_command::architecture::Architecture;
use hosted_command::value::Size;
use proto::service::DiskRange;
use proto::{disk, net};

/// Kind of a node; pictures arrange nodes from top to bottom in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// A virtual machine.
    Guest,
    /// A program that is not a server: VMM or task.
    Program,
    /// A channel between VMs.
    Channel,
    /// A server.
    Server,
    /// The root task.
    Root,
    /// The microhypervisor.
    Kernel,
    /// A device of the machine, or the remaining resources.
    Device,
}

/// Holder or object of capabilities.
#[derive(Debug)]
pub struct Node {
    /// Unique ID.
    pub id: String,
    /// Kind.
    pub kind: Kind,
    /// Its name.
    pub title: String,
    /// Further text, one line each.
    pub details: Vec<String>,
    /// Created from a template at run time.
    pub template: bool,
}

/// Capabilities of one node for another.
#[derive(Debug)]
pub struct Edge {
    /// Index of the holder.
    pub from: usize,
    /// Index of the object.
    pub to: usize,
    /// Capabilities and rights, one line each.
    pub label: Vec<String>,
    /// The object holds the same for the holder.
    pub both: bool,
    /// Edge between `root` and a program that every system has.
    pub routine: bool,
}

/// Nodes and edges.
#[derive(Debug, Default)]
pub struct Graph {
    /// In the order of the description, by kind.
    pub nodes: Vec<Node>,
    /// One edge per kind of capability between two nodes.
    pub edges: Vec<Edge>,
}

impl Graph {
    /// Returns the capabilities that `root` grants at the start of this system.
    pub fn new(resolved: &ResolvedSystem) -> Self {
        let mut graph = Self::default();
        let kernel = graph.node(Kind::Kernel, "kernel", "microhypervisor", vec![]);
        let root = graph.node(
            Kind::Root,
            "root",
            "root",
            vec!["starts everything else and gives it what this graph shows".to_owned()],
        );
        graph.edge(root, kernel, &["factory: all kernel memory,", "platform: all interrupts"]);
        let ports = match resolved.board.architecture() {
            Architecture::X86 => (COM1_PORTS, COM2_PORTS),
            Architecture::Arm64 => (PL011, "virtio console"),
        };
        if let Some((port, ports)) = match resolved.log {
            Log::Com1 => Some(("com1", ports.0)),
            Log::Com2 => Some(("com2", ports.1)),
            Log::None => None,
        } {
            let device = graph.node(Kind::Device, &format!("device:{port}"), port, vec![]);
            graph.edge(kernel, device, &["the log:", ports]);
        }
        let details = vec!["memory, I/O ports, PCI functions".to_owned()];
        let rest = graph.node(Kind::Device, "machine", "the rest of the machine", details);
        graph.edge(root, rest, &["all resources", "not granted"]);

        let servers: Vec<usize> =
            resolved.servers.iter().map(|server| graph.server(server, root, ports.0)).collect();
        let monitors: Vec<usize> =
            resolved.vms.iter().map(|vm| graph.vm(vm, root, &servers)).collect();
        for (number, channel) in resolved.channels.iter().enumerate() {
            let doorbell = if channel.doorbell { "with doorbells" } else { "without doorbells" };
            let details = vec![format!("{}, {doorbell}", Size(channel.size.into()))];
            let node = graph.node(Kind::Channel, &format!("channel:{number}"), "channel", details);
            let ends = channel.between.iter().filter_map(|&vm| monitors.get(usize::from(vm)));
            for &monitor in ends {
                graph.edge(monitor, node, &["its memory,", "signals to the peer"]);
            }
        }
        for task in &resolved.tasks {
            let details = vec![format!("task, priority {}", task.priority)];
            let id = format!("task:{}", task.name);
            let node = graph.node(Kind::Program, &id, &task.name, details);
            graph.edge(node, root, &["log, control"]).routine();
            if task.manage {
                graph.edge(node, root, &["gate manage:", "start, stop, make"]);
            }
            if let Some(&server) = task.console.and_then(|index| servers.get(usize::from(index))) {
                graph.edge(node, server, CONSOLE_SESSION);
            }
        }
        graph
    }

    fn node(&mut self, kind: Kind, id: &str, title: &str, details: Vec<String>) -> usize {
        let (id, title) = (id.to_owned(), title.to_owned());
        self.nodes.push(Node { id, kind, title, details, template: false });
        self.nodes.len() - 1
    }

    fn edge(&mut self, from: usize, to: usize, label: &[impl ToString]) -> &mut Edge {
        let label = label.iter().map(ToString::to_string).collect();
        self.edges.push(Edge { from, to, label, both: false, routine: false });
        let last = self.edges.len() - 1;
        &mut self.edges[last]
    }

    /// Adds a server. `serial`: the serial port.
    fn server(&mut self, server: &ResolvedServer, root: usize, serial: &'static str) -> usize {
        let what = match server.kind {
            ServerKind::Console if server.shared => "console server for several",
            ServerKind::Console => "console server",
            ServerKind::Block => "disk server",
            ServerKind::Switch => "switch",
        };
        let mut details = vec![format!("{what}, priority {}", server.priority)];
        details.extend(restarts(server.restart));
        let id = format!("server:{}", server.name);
        let node = self.node(Kind::Server, &id, &server.name, details);
        self.edge(node, root, &["log, control"]).routine();
        if let Some(device) = server.device {
            let there = self.device(device);
            let capabilities: &[&str] = match device {
                MachineDevice::Com1 if serial == PL011 => &[PL011, "its interrupt"],
                MachineDevice::Com1 => &[serial, "interrupt 4"],
                MachineDevice::VirtioBlk(..)
                | MachineDevice::VirtioNet(..)
                | MachineDevice::Ahci(..) => &["registers, interrupt,", "memory for DMA"],
            };
            self.edge(node, there, capabilities);
        }
        node
    }

    /// Adds a device of the machine.
    fn device(&mut self, device: MachineDevice) -> usize {
        self.node(Kind::Device, &format!("device:{device}"), &device.to_string(), vec![])
    }

    /// Adds a VM and its VMM; returns the VMM's index.
    fn vm(&mut self, vm: &ResolvedVm, root: usize, servers: &[usize]) -> usize {
        let first = self.nodes.len();
        let mut details = vec![vm.cpus_and_memory()];
        if vm.template {
            details.push("a template".to_owned());
        }
        let guest = self.node(Kind::Guest, &format!("vm:{}", vm.name), &vm.name, details);
        let mut details = vec![format!("priority {}", vm.priority)];
        details.extend(restarts(vm.restart));
        let program = vm.binary();
        let monitor = self.node(
            Kind::Program,
            &format!("vmm:{}", vm.name),
            &format!("{program} of {}", vm.name),
            details,
        );
        for node in &mut self.nodes[first..] {
            node.template = vm.template;
        }
        self.edge(monitor, guest, &["virtual CPUs,", "all its memory"]);
        self.edge(monitor, root, &["log, control"]).routine();
        let mut session = |server: u8, label: &[String]| {
            if let Some(&server) = servers.get(usize::from(server)) {
                let label: Vec<&str> = label.iter().map(String::as_str).collect();
                self.edge(monitor, server, &label).both = true;
            }
        };
        for disk in &vm.disks {
            let access = if disk.read_only { " (read-only)" } else { "" };
            let memory = shared(disk::SESSION_BYTES);
            session(disk.server, &[part(disk.part) + access + ":", memory]);
        }
        for net in &vm.nets {
            let group = match net.group {
                0 => "port:".to_owned(),
                group => format!("port, group {group}:"),
            };
            session(net.server, &[group, shared(net::SESSION_BYTES)]);
        }
        if let Some(&server) = vm.console.and_then(|index| servers.get(usize::from(index))) {
            self.edge(monitor, server, CONSOLE_SESSION);
        }
        for &device in &vm.devices {
            let there = self.device(device);
            let memory = match device {
                MachineDevice::Com1 => "passed to the guest",
                _ => "passed to the guest: all memory",
            };
            self.edge(monitor, there, &["registers, interrupt,", memory]);
        }
        monitor
    }

    /// Returns the edges whose holder has this index.
    pub fn held_by(&self, node: usize) -> impl Iterator<Item = &Edge> {
        self.edges.iter().filter(move |edge| edge.from == node)
    }
}

impl Edge {
    fn routine(&mut self) {
        (self.routine, self.both) = (true, true);
    }
}

/// The serial port of AArch64.
const PL011: &str = "PL011";
const COM1_PORTS: &str = "I/O ports 0x3f8–0x3ff";
const COM2_PORTS: &str = "I/O ports 0x2f8–0x2ff";
const CONSOLE_SESSION: &[&str] = &["gate of its session"];

fn restarts(restart: Restart) -> Option<String> {
    match restart {
        Restart::Never => None,
        Restart::OnCrash => Some("restarted after a crash".to_owned()),
        Restart::Always => Some("always restarted".to_owned()),
    }
}

/// Describes a session in shared memory; each side may signal the notification of the other.
fn shared(bytes: u64) -> String {
    format!("{} shared, signals", Size(bytes))
}

/// Describes a part of a disk.
fn part(part: DiskRange) -> String {
    let size = |sectors: u64| Size(sectors * disk::SECTOR);
    let whole = match part.partition {
        None => "disk".to_owned(),
        Some(number) => format!("partition {number}"),
    };
    match part.sectors {
        0 => whole,
        sectors => format!("{whole}, {} from {}", size(sectors), size(part.first)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::validate::{self, Overrides};

    /// The graph of a description.
    fn graph(description: &str) -> Graph {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("system.toml");
        std::fs::write(&file, description).unwrap();
        Graph::new(&validate::validate(&file, Overrides::default()).unwrap())
    }

    /// A system with one of everything.
    const HOUSE: &str = include_str!("../../cli/tests/cli/graph/house.toml");

    /// Capabilities between two nodes that are not routine.
    fn labels(graph: &Graph, from: &str, to: &str) -> Vec<String> {
        let index = |id: &str| graph.nodes.iter().position(|node| node.id == id).unwrap();
        let edges = graph.held_by(index(from)).filter(|edge| edge.to == index(to));
        edges.filter(|edge| !edge.routine).map(|edge| edge.label.join(" ")).collect()
    }

    #[test]
    fn who_holds_what() {
        let graph = graph(HOUSE);
        assert_eq!(
            labels(&graph, "server:console", "device:com1"),
            ["I/O ports 0x3f8–0x3ff interrupt 4"]
        );
        assert_eq!(labels(&graph, "kernel", "device:com2"), ["the log: I/O ports 0x2f8–0x2ff"]);
        let disk = "registers, interrupt, memory for DMA";
        assert_eq!(labels(&graph, "server:blk0", "device:pci:virtio-blk:0"), [disk]);
        assert_eq!(labels(&graph, "task:steward", "root"), ["gate manage: start, stop, make"]);
        assert_eq!(labels(&graph, "task:steward", "server:console"), ["gate of its session"]);
        let memory = shared(disk::SESSION_BYTES);
        assert_eq!(
            labels(&graph, "vmm:one", "server:blk0"),
            [format!("partition 1 (read-only): {memory}")]
        );
        assert_eq!(
            labels(&graph, "vmm:two", "server:blk0"),
            [format!("partition 2, 2 MiB from 1 MiB: {memory}")]
        );
        for vmm in ["vmm:one", "vmm:two"] {
            assert_eq!(labels(&graph, vmm, "channel:0"), ["its memory, signals to the peer"]);
        }
        assert_eq!(labels(&graph, "vmm:small", "channel:0"), Vec::<String>::new());
        assert_eq!(labels(&graph, "vmm:one", "vm:one"), ["virtual CPUs, all its memory"]);
        // No other VMM holds it.
        assert_eq!(labels(&graph, "vmm:one", "vm:two"), Vec::<String>::new());
        assert_eq!(labels(&graph, "vmm:two", "server:sw0"), Vec::<String>::new());
        assert_eq!(labels(&graph, "vmm:two", "root"), Vec::<String>::new());
    }

    #[test]
    fn every_program_calls_root() {
        let graph = graph(HOUSE);
        let root = graph.nodes.iter().position(|node| node.kind == Kind::Root).unwrap();
        for (index, node) in graph.nodes.iter().enumerate() {
            let routine = graph.held_by(index).any(|edge| edge.routine && edge.to == root);
            let program = matches!(node.kind, Kind::Program | Kind::Server);
            assert_eq!(routine, program, "{}", node.id);
        }
    }

    #[test]
    fn a_guest_holds_nothing() {
        let graph = graph(HOUSE);
        for edge in &graph.edges {
            assert_ne!(graph.nodes[edge.from].kind, Kind::Guest);
        }
    }
}
