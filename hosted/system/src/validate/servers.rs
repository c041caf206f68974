//! Servers: their devices, their binaries, and the clients of the console.

use super::Validator;
use super::devices::{MachineDevices, log_conflict, owner};
use super::names::Names;
use crate::attach::MachineDevice;
use crate::description::{self, Console, Log, Restart, ServerKind};
use crate::resolved::ResolvedServer;
use hosted_command::problem::Problem;
use proto::system::MAX_SERVERS;
use std::ops::Range;
use toml::Spanned;

/// Name of the console server that is added when a VM uses COM1 and none is described.
const CONSOLE_NAME: &str = "console";
/// Servers have a higher priority than their clients, or a busy client could starve its own
/// console.
const DEFAULT_SERVER_PRIORITY: u8 = 40;

/// A client of the console.
pub(super) struct ConsoleClient {
    name: String,
    span: Range<usize>,
    shares: bool,
}

impl Validator<'_> {
    /// Resolves all servers, and adds one for a console that is used but not described.
    pub(super) fn servers(
        &mut self,
        described: Vec<Spanned<description::Server>>,
        consoles: &[ConsoleClient],
        machine: MachineDevices,
    ) -> Vec<ResolvedServer> {
        let shared = consoles.iter().any(|client| client.shares);
        let mut names = Names::new("server");
        let mut servers: Vec<ResolvedServer> = Vec::new();
        for server in described {
            let server = server.into_inner();
            names.add(&server.name, &mut self.problems);
            let device = self.device(&server);
            if let (Some(device), Some(written)) = (device, &server.device) {
                self.device_is_free((device, written), machine, servers.iter().filter_map(owner));
            }
            if let Some(program) = &server.program {
                self.binary(program);
            }
            servers.push(ResolvedServer {
                name: server.name.into_inner(),
                kind: server.kind,
                shared,
                device,
                program: server.program,
                restart: server.restart.unwrap_or(Restart::OnCrash),
                priority: self.priority(server.priority, DEFAULT_SERVER_PRIORITY),
                cpu_time: self.cpu_time(server.cpu.as_ref()),
            });
        }
        let has_console = servers.iter().any(|server| server.kind == ServerKind::Console);
        if let (Some(user), false) = (consoles.first(), has_console) {
            if machine.log == Log::Com1 {
                self.problems.push(log_conflict(user.span.clone()));
            }
            self.console_fits(user, &servers);
            servers.push(ResolvedServer {
                name: CONSOLE_NAME.to_owned(),
                kind: ServerKind::Console,
                shared,
                device: Some(MachineDevice::Com1),
                program: None,
                restart: Restart::OnCrash,
                priority: DEFAULT_SERVER_PRIORITY,
                cpu_time: None,
            });
        }
        servers
    }

    /// Checks that a server for the console can be added to those that are described. More than
    /// the limit have been reported.
    fn console_fits(&mut self, user: &ConsoleClient, described: &[ResolvedServer]) {
        if described.iter().any(|server| server.name == CONSOLE_NAME) {
            let message = format!("the server of this console is named `{CONSOLE_NAME}`, too");
            let problem = Problem::new(user.span.clone(), message);
            self.problems.push(problem.help("choose another name for the other server"));
        }
        if described.len() == MAX_SERVERS {
            let message = format!(
                "this console needs a server beside {MAX_SERVERS} others (limit {MAX_SERVERS})"
            );
            let problem = Problem::new(user.span.clone(), message);
            self.problems.push(problem.help("remove a server, or use console = \"none\""));
        }
    }

    /// Checks that the console has one client, or several that all share it.
    pub(super) fn consoles(
        &mut self,
        vms: &[Spanned<description::Vm>],
        tasks: &[Spanned<description::Task>],
    ) -> Vec<ConsoleClient> {
        let vms = vms.iter().map(|vm| (&vm.get_ref().name, &vm.get_ref().console));
        let tasks = tasks.iter().map(|task| (&task.get_ref().name, &task.get_ref().console));
        let clients: Vec<ConsoleClient> = tasks
            .chain(vms)
            .filter_map(|(name, console)| {
                let console = console.as_ref()?;
                let shares = *console.get_ref() == Console::Mux;
                let uses = shares || *console.get_ref() == Console::Com1;
                uses.then(|| ConsoleClient {
                    name: name.get_ref().clone(),
                    span: console.span(),
                    shares,
                })
            })
            .collect();
        for (index, client) in clients.iter().enumerate() {
            let Some(other) = clients[..index].iter().find(|other| !other.shares || !client.shares)
            else {
                continue;
            };
            let message = format!("com1 is already the console of `{}`", other.name);
            let problem = Problem::new(client.span.clone(), message);
            self.problems.push(problem.help(
                "let all of them share it with console = \"mux\", or give all but one \"none\"",
            ));
        }
        clients
    }

    /// Returns the device of a server, if the server can drive it.
    fn device(&mut self, server: &description::Server) -> Option<MachineDevice> {
        let Some(written) = &server.device else {
            if server.kind != ServerKind::Switch {
                let message = format!("server `{}` has no device", server.name.get_ref());
                let problem = Problem::new(server.name.span(), message);
                self.problems.push(problem.help(device_help(server.kind)));
            }
            return None;
        };
        let device = self.machine_device(written)?;
        let fits = match server.kind {
            ServerKind::Console => device == MachineDevice::Com1,
            ServerKind::Block => {
                matches!(device, MachineDevice::VirtioBlk(..) | MachineDevice::Ahci(..))
            }
            ServerKind::Switch => matches!(device, MachineDevice::VirtioNet(..)),
        };
        if !fits {
            let message = format!("server `{}` cannot drive {device}", server.name.get_ref());
            let problem = Problem::new(written.span(), message);
            self.problems.push(problem.help(device_help(server.kind)));
        }
        Some(device)
    }

    /// Checks that ports name VMs, and that every client of a switch is among its ports.
    pub(super) fn ports(
        &mut self,
        servers: &[Spanned<description::Server>],
        vms: &[Spanned<description::Vm>],
    ) {
        for server in servers.iter().map(Spanned::get_ref) {
            let Some(ports) = &server.ports else { continue };
            if server.kind != ServerKind::Switch {
                let message = format!("server `{}` has no ports", server.name.get_ref());
                let problem = Problem::new(server.name.span(), message);
                self.problems.push(problem.help("remove `ports`, or set kind = \"switch\""));
                continue;
            }
            for port in ports {
                let known = vms.iter().any(|vm| vm.get_ref().name.get_ref() == port.get_ref());
                if !known {
                    let message = format!("no such virtual machine: `{}`", port.get_ref());
                    self.problems.push(Problem::new(port.span(), message));
                }
            }
            for vm in vms.iter().map(Spanned::get_ref) {
                let connected = vm.net.iter().find(|net| {
                    net.get_ref().split(',').next() == Some(server.name.get_ref().as_str())
                });
                let listed = ports.iter().any(|port| port.get_ref() == vm.name.get_ref());
                if let (Some(net), false) = (connected, listed) {
                    let message = format!(
                        "`{}` is not a port of switch `{}`",
                        vm.name.get_ref(),
                        server.name.get_ref()
                    );
                    let problem = Problem::new(net.span(), message);
                    self.problems.push(problem.help("add it to the switch's `ports`"));
                }
            }
        }
    }
}

fn device_help(kind: ServerKind) -> &'static str {
    match kind {
        ServerKind::Console => "a console drives com1",
        ServerKind::Block => "a disk server drives virtio-blk:0 or pci:ahci:0",
        ServerKind::Switch => "a switch drives virtio-net:0, or nothing",
    }
}
