//! Connections of the host, and what the agent knows of their commands.

use crate::children::Children;
use crate::command::{self, Ending, Prepared, Running, Streams};
use crate::{cgroup, clock, container, forward, network, power_off, resolver, root};
use proto::agent::{
    AgentRequest, Answer, Guest, GuestCommand, Hello, Network, Purpose, Root, Stream, VERSION,
    container::{Container, ContainerProcess},
    io as wire,
};
use rustix::process::Pid;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

/// State of the agent.
pub struct Agent {
    children: Children,
    commands: Mutex<Commands>,
}

/// Commands of open control connections.
#[derive(Default)]
struct Commands {
    is_configured: bool,
    last: u32,
    /// Streams that wait for the start of their command.
    streams: BTreeMap<u32, Streams>,
    /// First processes of containers, by their names.
    containers: BTreeMap<String, Pid>,
    /// Names of containers that are being made.
    unmade: BTreeSet<String>,
}

/// Control connection.
struct Control<'a> {
    agent: &'a Agent,
    /// Serializes answers: one thread waits for the end of the command.
    connection: Arc<Mutex<File>>,
    command: u32,
    running: Option<Running>,
    prepared: Option<Prepared>,
    /// Container of this connection.
    container: Option<String>,
    /// The guest ends with this connection.
    owns_guest: bool,
}

impl Agent {
    /// Creates an agent without commands.
    ///
    /// # Errors
    /// There is no memory for a thread.
    pub fn new() -> io::Result<Self> {
        Ok(Self { children: Children::new()?, commands: Mutex::default() })
    }

    fn commands(&self) -> MutexGuard<'_, Commands> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a connection until its end.
    pub fn serve(&self, connection: File) {
        if let Err(error) = self.serve_connection(connection) {
            eprintln!("parador-agent: a connection failed: {error}");
        }
    }

    fn serve_connection(&self, connection: File) -> io::Result<()> {
        let mut room = Vec::new();
        if wire::receive(&connection, &mut room)?.is_none() {
            return Ok(());
        }
        let hello: Hello = match wire::read(&room) {
            Ok(hello) => hello,
            // Another version may have other contents after its number.
            Err(_) if room.first().is_some_and(|&version| u16::from(version) != VERSION) => {
                return refuse_version(&connection);
            }
            Err(error) => return Err(error),
        };
        if hello.version != VERSION {
            return refuse_version(&connection);
        }
        match hello.purpose {
            Purpose::Control { time } => {
                clock::follow(time);
                self.control(connection)
            }
            Purpose::Stream { command, stream } => self.stream(connection, command, stream),
            Purpose::Resolver { address } => resolver::serve(&connection, address),
            Purpose::Forward { to } => forward::serve(connection, to),
        }
    }

    /// Keeps a stream for the start of its command.
    fn stream(&self, connection: File, command: u32, stream: Stream) -> io::Result<()> {
        let own = connection.try_clone()?;
        let is_known = match self.commands().streams.get_mut(&command) {
            Some(streams) => streams.insert(stream, own).is_none(),
            None => false,
        };
        match is_known {
            true => send(&connection, &Answer::Welcome { version: VERSION, command: 0 }),
            false => send(&connection, &Answer::Failed("there is no such stream to connect")),
        }
    }

    fn control(&self, connection: File) -> io::Result<()> {
        let command = {
            let mut commands = self.commands();
            commands.last += 1;
            let command = commands.last;
            commands.streams.insert(command, BTreeMap::new());
            command
        };
        let reader = connection.try_clone()?;
        let connection = Arc::new(Mutex::new(connection));
        let mut control = Control {
            agent: self,
            connection,
            command,
            running: None,
            prepared: None,
            container: None,
            owns_guest: false,
        };
        let served = control.serve(&reader);
        control.end();
        served
    }
}

fn send(connection: &File, answer: &Answer<'_>) -> io::Result<()> {
    wire::send(connection, answer)
}

fn refuse_version(connection: &File) -> io::Result<()> {
    let text = format!("the agent has version {VERSION} of the protocol");
    send(connection, &Answer::Failed(&text))
}

impl Control<'_> {
    fn answer(&self, answer: &Answer<'_>) -> io::Result<()> {
        send(&self.connection.lock().unwrap_or_else(PoisonError::into_inner), answer)
    }

    fn serve(&mut self, reader: &File) -> io::Result<()> {
        self.answer(&Answer::Welcome { version: VERSION, command: self.command })?;
        let mut room = Vec::new();
        while wire::receive(reader, &mut room)?.is_some() {
            match wire::read(&room)? {
                AgentRequest::Configure(guest) => {
                    let done = self.configure(&guest);
                    self.report(done)?;
                }
                AgentRequest::Connect(network) => {
                    let connected = self.connect(network.as_ref());
                    self.report(connected)?;
                }
                AgentRequest::Start(command) => {
                    let started = self.start(&command);
                    self.report_started(started)?;
                }
                AgentRequest::Create(container) => {
                    let created = self.create(reader.as_fd(), container);
                    self.report(created)?;
                }
                AgentRequest::Enter { container, process } => {
                    let entered = self.enter(reader.as_fd(), container, process);
                    self.report(entered)?;
                }
                AgentRequest::Run => {
                    let prepared = self.prepared.take();
                    let missing = || io::Error::other("run: no process is prepared");
                    let started = prepared.ok_or_else(missing);
                    self.report_started(started.and_then(|it| it.run(reader.as_fd())))?;
                }
                AgentRequest::Limit { container, limits } => {
                    let known = self.first_process(container);
                    self.report(known.and_then(|_| cgroup::set_limits(container, &limits)))?;
                }
                AgentRequest::Statistics { container } => {
                    let known = self.first_process(container);
                    match known.and_then(|_| cgroup::statistics(container)) {
                        Ok(statistics) => self.answer(&Answer::Statistics(statistics))?,
                        Err(error) => self.report(Err(error))?,
                    }
                }
                AgentRequest::Signal(number) => self.signal(number),
                AgentRequest::Resize(window) => {
                    self.running.iter().for_each(|it| it.resize(window))
                }
            }
        }
        Ok(())
    }

    fn signal(&self, number: u8) {
        self.running.iter().for_each(|it| it.signal(&self.agent.children, number));
    }

    fn report(&self, done: io::Result<()>) -> io::Result<()> {
        match done {
            Ok(()) => self.answer(&Answer::Done),
            Err(error) => self.answer(&Answer::Failed(&error.to_string())),
        }
    }

    /// Reports whether a process was started, and later its end.
    fn report_started(&self, started: io::Result<Ending>) -> io::Result<()> {
        match started {
            Ok(ending) => {
                self.answer(&Answer::Done)?;
                self.report_end(ending)
            }
            Err(error) => self.report(Err(error)),
        }
    }

    fn configure(&mut self, guest: &Guest<'_>) -> io::Result<()> {
        if std::mem::replace(&mut self.agent.commands().is_configured, true) {
            return Err(io::Error::other("the guest is set up already"));
        }
        self.owns_guest = true;
        root::change(guest)?;
        // A shared directory may be mounted at /etc, whose files are not the guest's to change.
        network::configure(guest.network.as_ref())?;
        if !matches!(guest.root, Root::Pod { .. }) {
            // A root where they cannot be written, such as one whose `/etc` is no folder, has none.
            let _ = network::complete_hosts(guest.name);
        }
        root::mount_shares(&guest.mounts)
    }

    /// Configures or removes the network interface, at the request of the guest's owner.
    fn connect(&self, network: Option<&Network>) -> io::Result<()> {
        if !self.owns_guest {
            return Err(io::Error::other("another connection has set the guest up"));
        }
        match network {
            Some(_) => network::configure(network),
            None => network::remove(),
        }
    }

    /// Takes the streams of this connection's process, which is started once.
    fn streams(&self) -> io::Result<Streams> {
        let mut commands = self.agent.commands();
        if !commands.is_configured {
            return Err(io::Error::other("the guest is not set up"));
        }
        let streams = commands.streams.remove(&self.command);
        streams.ok_or_else(|| io::Error::other("the command was started already"))
    }

    fn start(&mut self, command: &GuestCommand<'_>) -> io::Result<Ending> {
        let streams = self.streams()?;
        let (running, ending) = command::start(&self.agent.children, command, streams)?;
        self.running = Some(running);
        Ok(ending)
    }

    fn create(&mut self, host: BorrowedFd<'_>, container: Container<'_>) -> io::Result<()> {
        let name = container.name.to_owned();
        let mut commands = self.agent.commands();
        if commands.containers.contains_key(&name) || !commands.unmade.insert(name.clone()) {
            return Err(io::Error::other(format!("create the container {name}: it exists")));
        }
        drop(commands);
        let made = self.make(host, container);
        let mut commands = self.agent.commands();
        commands.unmade.remove(&name);
        let (running, prepared) = made?;
        commands.containers.insert(name.clone(), running.pid());
        drop(commands);
        self.running = Some(running);
        self.prepared = Some(prepared);
        self.container = Some(name);
        Ok(())
    }

    fn make(
        &self,
        host: BorrowedFd<'_>,
        container: Container<'_>,
    ) -> io::Result<(Running, Prepared)> {
        let streams = self.streams()?;
        let owner = self.pid_owner(container.namespaces.pid, container.sandbox)?;
        command::create(&self.agent.children, host, container, owner, streams)
    }

    /// Returns the first process of a container.
    fn first_process(&self, name: &str) -> io::Result<Pid> {
        let first = self.agent.commands().containers.get(name).copied();
        first.ok_or_else(|| io::Error::other(format!("find the container {name}")))
    }

    /// Returns the first process of container `name`, whose PID namespace a new container shares;
    /// `None` if the new one has its own, or names none and has the guest's.
    fn pid_owner(&self, is_own: bool, name: &str) -> io::Result<Option<Pid>> {
        let is_shared = !is_own && !name.is_empty();
        is_shared.then(|| self.living_process(name)).transpose()
    }

    /// Returns the first process of a container that has not ended.
    fn living_process(&self, name: &str) -> io::Result<Pid> {
        let first = self.first_process(name)?;
        let known = self.agent.children.while_known(first, || first);
        known.ok_or_else(|| io::Error::other(format!("enter the container {name}: it has ended")))
    }

    fn enter(
        &mut self,
        host: BorrowedFd<'_>,
        name: &str,
        process: ContainerProcess<'_>,
    ) -> io::Result<()> {
        let container = (name, self.living_process(name)?);
        let streams = self.streams()?;
        let entered = command::enter(&self.agent.children, host, container, process, streams)?;
        self.running = Some(entered.0);
        self.prepared = Some(entered.1);
        Ok(())
    }

    /// Reports the end of the command, whenever it comes.
    fn report_end(&self, ending: Ending) -> io::Result<()> {
        let connection = Arc::clone(&self.connection);
        let report = move || {
            let ended = ending.wait();
            // What programs have mapped and changed reaches the host's files.
            rustix::fs::sync();
            let connection = connection.lock().unwrap_or_else(PoisonError::into_inner);
            // A host that has gone needs no report.
            let _ = send(&connection, &ended);
        };
        thread::Builder::new().spawn(report).map(drop)
    }

    /// The host has closed the connection: the command ends.
    fn end(self) {
        self.signal(command::KILL);
        if let Some(name) = &self.container {
            cgroup::kill(name);
            // One whose program was not started has it still. That of the guest's owner ends with
            // the guest, which must not wait for it.
            if !self.owns_guest {
                cgroup::remove(name);
                // Before another container may have the name, and the folder.
                container::remove_scratch(name);
            }
        }
        let mut commands = self.agent.commands();
        commands.streams.remove(&self.command);
        if let Some(name) = &self.container {
            commands.containers.remove(name);
        }
        drop(commands);
        if self.owns_guest {
            power_off();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::children::testing;
    use std::os::fd::OwnedFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn a_shared_pid_namespace_is_that_of_a_living_container() {
        let agent = Agent { children: testing::idle(), commands: Mutex::default() };
        let (_host, guest) = UnixStream::pair().expect("sockets");
        let control = Control {
            agent: &agent,
            connection: Arc::new(Mutex::new(OwnedFd::from(guest).into())),
            command: 1,
            running: None,
            prepared: None,
            container: None,
            owns_guest: false,
        };
        let owner = |is_own, name| {
            let owner = control.pid_owner(is_own, name);
            owner.map_err(|error| error.to_string())
        };
        assert_eq!((owner(true, "pod"), owner(false, "")), (Ok(None), Ok(None)));
        assert_eq!(owner(false, "pod"), Err("find the container pod".to_owned()));
        agent.commands().containers.insert("pod".to_owned(), Pid::INIT);
        let ended = Err("enter the container pod: it has ended".to_owned());
        assert_eq!(owner(false, "pod"), ended);
    }
}
