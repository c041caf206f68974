//! The supervisor of a VM: opens its host ends, starts its processes, serves it until it ends, and
//! restarts it.

use crate::api::ApiServer;
use crate::backend::{Backend, KernelImage, Start};
use crate::config::gdb::GdbEndpoint;
use crate::config::vm::{OnExit, VmConfig};
use crate::console::HostConsole;
use crate::control::Control;
use crate::control::executor::CommandExecutor;
use crate::debugger::{self, Debugger, GuestKernel, Ram};
use crate::descriptors;
use crate::device;
use crate::device_process::{self, DeviceProcess};
use crate::event_loop::EndingSignals;
use crate::exit::{self, ExitCause};
use crate::line_sink::LineSink;
use crate::metrics::Metrics;
use crate::net::NetBackend;
use crate::perf::Maps;
use crate::ports::Port;
use crate::profile;
use crate::runtime::{NamedVm, RuntimeFolder};
use crate::spec::Spec;
use crate::statistics;
use crate::vm_files::VmFiles;
use crate::vm_process::{SecondaryConsole, SecondaryEnds, VmProcess};
use crate::vsock::Vsock;
use command_fds::FdMapping;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::messages::{Level, MessageLog, say};
use hosted_loader::Prepared;
use proto::hosted::{MAX_DISKS, MAX_NETS, layout};
use rustix::event::{EventfdFlags, eventfd};
use std::fs;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

/// Name of the serial line in messages.
const SERIAL: &str = "the serial line";
/// Name of the virtio console in messages.
const CONSOLE: &str = "the virtio console";
/// Help on the terminal keys.
const KEYS: &str = "Ctrl-A X kills the VM; all other keys go to the guest";

/// Parts of the kernel that are needed while the VM runs.
pub struct Symbols {
    /// Kernel for the debugger.
    debugged: Option<GuestKernel>,
    /// Symbol maps for profilers.
    maps: Option<Maps>,
}

impl Symbols {
    /// Extracts what the configuration needs.
    pub fn new(spec: &Spec, kernel: &KernelImage<'_>) -> Result<Self, Failure> {
        let image = kernel.image();
        let debugged =
            spec.vm().gdb.as_ref().map(|_| image.map_or(GuestKernel::Kvm, GuestKernel::new));
        let maps = image.filter(|_| spec.vm().perf_map).map(Maps::new).transpose()?;
        Ok(Self { debugged, maps })
    }
}

/// Ends of a VM's control.
struct Clients {
    servers: Vec<ApiServer>,
    named: Option<NamedVm>,
    debugger: Option<Debugger>,
}

impl Clients {
    /// Opens the sockets, claims the VM's name and starts the debugger. `low` is the size of its
    /// memory below 4 GiB in bytes.
    fn open(
        spec: &Spec,
        control: &Control,
        debugged: Option<GuestKernel>,
        low: u64,
    ) -> Result<Self, Failure> {
        let vm = spec.vm();
        let named = vm.name.as_ref().map(|name| RuntimeFolder::open()?.claim(name)).transpose()?;
        let sockets = [vm.api_socket.as_ref(), named.as_ref().map(|named| &named.socket)];
        let sockets = sockets.into_iter().flatten();
        let servers = sockets.map(|path| ApiServer::start(path, control.clone()));
        let servers = servers.collect::<Result<_, _>>()?;
        let ram = Ram { low, size: spec.memory };
        let debugger = vm.gdb.as_ref().zip(debugged).map(|(endpoint, kernel)| {
            Debugger::start(endpoint, control.clone(), kernel, (spec.vcpus, ram))
        });
        Ok(Self { servers, named, debugger: debugger.transpose()? })
    }
}

/// A VM and its host ends.
pub struct Supervisor {
    /// Sockets of `--api-socket` and `--name`.
    servers: Vec<ApiServer>,
    /// Right to the VM's name.
    named: Option<NamedVm>,
    debugger: Option<Debugger>,
    spec: Spec,
    files: VmFiles,
    backend: Backend,
    serial: HostConsole,
    console: Option<HostConsole>,
    /// Ports of the virtio console, that of the console among them; empty: it has only one.
    ports: Vec<Port>,
    vsock: Option<Vsock>,
    control: Control,
    /// Readable when commands are pending.
    wakeup: UnixStream,
    metrics: Option<Metrics>,
    maps: Option<Maps>,
    /// End of the time limit.
    deadline: Option<Instant>,
}

impl Supervisor {
    /// Opens the host ends of a VM. `low` is the size of its memory below 4 GiB in bytes.
    pub fn new(
        spec: Spec,
        mut files: VmFiles,
        backend: Backend,
        symbols: Symbols,
        low: u64,
        deadline: Option<Instant>,
    ) -> Result<Self, Failure> {
        let serial = HostConsole::open(&spec.serial, SERIAL)?;
        let console = spec.console.as_ref();
        let console = console.map(|target| HostConsole::open(target, CONSOLE)).transpose()?;
        let (console, ports) = open_ports(&spec, console)?;
        let vsock = spec.config.vsock.as_ref().map(Vsock::open).transpose()?;
        let vm = spec.vm();
        let sink = files.events.take().map(|file| LineSink::start(file, "--event-fd"));
        let sink = sink.transpose()?;
        let metrics = vm.metrics.as_deref().map(Metrics::open).transpose()?;
        let name = backend.kind().name();
        let (control, wakeup) = Control::new(spec.config.clone(), spec.memory, name, sink)?;
        if vm.wait_boot {
            control.created();
        }
        let Symbols { debugged, maps } = symbols;
        let clients = Clients::open(&spec, &control, debugged, low);
        let clients =
            clients.inspect_err(|failure| control.ended(failure.code(), &failure.message()))?;
        let Clients { servers, named, debugger } = clients;
        Ok(Self {
            servers,
            named,
            debugger,
            spec,
            files,
            backend,
            serial,
            console,
            ports,
            vsock,
            control,
            wakeup,
            metrics,
            maps,
            deadline,
        })
    }

    /// Runs the VM to its end and returns the exit code. An error ends the VM like any other cause:
    /// with its last event and statistics.
    pub fn run(mut self, start: Start) -> Result<u8, Failure> {
        say(Level::Info, &format!("back end `{}`", self.backend.kind().name()));
        match self.run_to_end(start) {
            Ok(VmEnd { code, text, began }) => {
                exit::report_exit(code, &text, began);
                self.close(code, &text);
                Ok(code)
            }
            Err(failure) => {
                self.close(failure.code(), &failure.message());
                Err(failure)
            }
        }
    }

    /// Runs the VM, with its restarts, to its end.
    fn run_to_end(&mut self, mut start: Start) -> Result<VmEnd, Failure> {
        if self.spec.vm().wait_boot {
            let began = Instant::now();
            let metrics = self.metrics.as_ref();
            if let Some(cause) = self.control.await_boot(&self.wakeup, self.deadline, metrics)? {
                let (code, text) = exit::exit_status(&cause, self.backend.kind());
                return Ok(VmEnd { code, text, began });
            }
        }
        loop {
            let began = Instant::now();
            let (cause, mut messages) = self.serve(start, began)?;
            let written = self.write_profile(&mut messages);
            messages.print();
            written?;
            let (code, text) = exit::exit_status(&cause, self.backend.kind());
            if code == failure::GUEST_PANIC {
                self.control.panicked();
            }
            match action_after(self.spec.vm(), &cause, code) {
                OnExit::Exit => return Ok(VmEnd { code, text, began }),
                OnExit::Code(code) => return Ok(VmEnd { code, text, began }),
                OnExit::Reset => start = self.restart(code, &text)?,
            }
        }
    }

    /// Records the end of the VM and closes its host ends. Without the record, clients and the
    /// debugger would wait for commands that nothing executes.
    fn close(self, code: u8, text: &str) {
        self.control.ended(code, text);
        if let Some(metrics) = &self.metrics {
            metrics.write(&self.control.statistics());
        }
        // The name is free once its socket is gone.
        drop((self.servers, self.named, self.debugger));
        self.files.close();
    }

    /// Prepares the VM for a start after an end with this code.
    fn restart(&mut self, code: u8, text: &str) -> Result<Start, Failure> {
        self.control.reset(code);
        say(Level::Info, &format!("{text}; restarting the VM"));
        let prepare =
            |kernel: &KernelImage<'_>| self.backend.prepare(&self.spec, &self.files, kernel);
        self.backend.with_kernel(&self.files, prepare)
    }

    /// Writes the report of `--profile-writes`.
    fn write_profile(&self, messages: &mut MessageLog) -> Result<(), Failure> {
        let Some(path) = &self.spec.vm().profile_writes else { return Ok(()) };
        let lines = messages.take_marked();
        let profile = self.backend.with_kernel(&self.files, |kernel| {
            Ok(kernel.image().map(|image| profile::report(&lines, image)).unwrap_or_default())
        })?;
        fs::write(path, profile).file_error("write", path)
    }

    /// Starts the VM's processes and serves them until the VM ends. Returns the cause and the
    /// messages of the VM's first process.
    fn serve(&mut self, start: Start, began: Instant) -> Result<(ExitCause, MessageLog), Failure> {
        let started = match self.start(start)? {
            ControlFlow::Continue(started) => started,
            ControlFlow::Break(cause) => {
                return Ok((cause, MessageLog::new(self.backend.process_name(), None)));
            }
        };
        let RunningVm { process, control, stream, memory, counters, _nets } = started;
        self.control.started(process.process(), memory, counters, began);
        let metrics = self.metrics.as_ref();
        let maps = self.maps.as_mut();
        let mut executor =
            CommandExecutor::new(&self.control, &self.wakeup, control, metrics, maps);
        hosted_devices::release_memory();
        let ends = match &mut self.console {
            Some(console) => SecondaryEnds::Console(console),
            None => SecondaryEnds::Ports(&mut self.ports),
        };
        let second = stream.map(|stream| SecondaryConsole { stream, ends });
        process.serve(self.deadline, KEYS, &mut self.serial, second, Some(&mut executor))
    }

    /// Starts the VM's processes; returns the cause if the VM ends before its devices are ready.
    fn start(&self, start: Start) -> Result<ControlFlow<ExitCause, RunningVm>, Failure> {
        let signals = EndingSignals::subscribe()?;
        let Start { prepared, more, nets } = start;
        let memory = (duplicate(&prepared.memory)?, duplicate(&prepared.shared)?);
        let (control, theirs) = UnixStream::pair()
            .and_then(|(ours, theirs)| ours.set_nonblocking(true).map(|()| (ours, theirs)))
            .os_error("create a socket pair")?;
        let doorbell = eventfd(0, EventfdFlags::CLOEXEC).os_error("create an eventfd")?;
        let counters = statistics::devices::create()?;
        let mut devices = self.start_devices(&prepared, doorbell.as_fd(), counters.as_fd())?;
        let mut given = vec![
            (prepared.memory, layout::MEMORY_FD),
            (prepared.shared, layout::SHARED_FD),
            (doorbell, layout::DOORBELL_FD),
            (theirs.into(), layout::CONTROL_FD),
            (duplicate(&counters)?, layout::COUNTERS_FD),
        ];
        let mut stream = None;
        if self.console.is_some() || !self.ports.is_empty() {
            let pair = UnixStream::pair();
            let (ours, theirs) = pair.os_error("create a socket pair")?;
            stream = Some(ours);
            given.push((theirs.into(), layout::CONSOLE_FD));
        }
        if let Some(vsock) = &self.vsock {
            let (process, packets) = vsock.start()?;
            devices.push(process);
            given.push((packets, layout::NETS_FD + MAX_NETS as u32));
        }
        if let Some(cause) = device_process::wait_until_ready(&mut devices, signals, self.deadline)?
        {
            return Ok(ControlFlow::Break(cause));
        }
        given.extend(self.raw_disks()?);
        // The host ends of the networks end with this start.
        let (frames, nets): (Vec<_>, Vec<_>) = nets.into_iter().map(NetBackend::split).unzip();
        given.extend(frames.into_iter().zip(layout::NETS_FD..));
        given.extend(more);
        let process = self.start_process(given, &memory.1)?;
        let process = process.with_devices(devices);
        let vm = RunningVm { process, control, stream, memory, counters, _nets: nets };
        Ok(ControlFlow::Continue(vm))
    }

    /// Starts the processes of qcow2 images and shared directories.
    fn start_devices(
        &self,
        prepared: &Prepared,
        doorbell: BorrowedFd<'_>,
        counters: BorrowedFd<'_>,
    ) -> Result<Vec<DeviceProcess>, Failure> {
        let vm = device::VmDescriptors {
            memory: self.spec.memory,
            descriptors: [prepared.memory.as_fd(), prepared.shared.as_fd(), doorbell, counters],
        };
        let images = self.files.disks.iter().enumerate();
        let images = images.filter_map(|(queue, disk)| disk.start(&vm, queue));
        let shares = (MAX_DISKS..).zip(&self.files.shares);
        let shares = shares.map(|(queue, share)| share.start(&vm, queue));
        images.chain(shares).collect()
    }

    /// Returns the files of raw disks and their descriptor numbers.
    fn raw_disks(&self) -> Result<Vec<(OwnedFd, u32)>, Failure> {
        let numbered = self.files.disks.iter().zip(layout::DISKS_FD..);
        let raw = numbered.filter(|(disk, _)| !disk.record.is_external);
        raw.map(|(disk, number)| Ok((duplicate(&disk.file)?, number))).collect()
    }

    /// Starts the VM's first process with these descriptors; `shared` is the shared memory.
    fn start_process(
        &self,
        given: Vec<(OwnedFd, u32)>,
        shared: &OwnedFd,
    ) -> Result<VmProcess, Failure> {
        let name = self.backend.process_name();
        let mappings = given
            .into_iter()
            .map(|(parent_fd, number)| FdMapping { parent_fd, child_fd: number as i32 });
        let mut command = self.backend.command()?;
        let last = self.backend.last_descriptor();
        descriptors::give(&mut command, mappings.collect(), last, name)?;
        if self.spec.vm().gdb.as_ref().is_some_and(GdbEndpoint::waits) {
            debugger::make_wait(shared)?;
        }
        VmProcess::start(name, command)
    }
}

/// End of a VM that is not restarted.
struct VmEnd {
    /// Exit code.
    code: u8,
    /// Meaning of the exit code.
    text: String,
    /// Time of the last start.
    began: Instant,
}

/// A started VM.
struct RunningVm {
    process: VmProcess,
    /// This side of the control socket.
    control: UnixStream,
    /// This side of the virtio console.
    stream: Option<UnixStream>,
    /// Guest memory, and the memory shared with the VM's processes.
    memory: (OwnedFd, OwnedFd),
    /// Counters of the devices.
    counters: OwnedFd,
    /// Processes of networks, which end with this.
    _nets: Vec<Option<crate::passt::Passt>>,
}

/// Opens the named ports. With one of them the console is a port, too.
fn open_ports(
    spec: &Spec,
    console: Option<HostConsole>,
) -> Result<(Option<HostConsole>, Vec<Port>), Failure> {
    let named = spec.config.port.iter().map(Port::open).collect::<Result<Vec<_>, _>>()?;
    if named.is_empty() {
        return Ok((console, named));
    }
    let console = console.map(Port::console);
    Ok((None, console.into_iter().chain(named).collect()))
}

/// Returns the action after an end with this code.
fn action_after(vm: &VmConfig, cause: &ExitCause, code: u8) -> OnExit {
    let wanted = match (cause, code) {
        (ExitCause::Reset, _) => Some(OnExit::Reset),
        (ExitCause::Exited(_), 0) => vm.on_shutdown,
        (ExitCause::Exited(_), failure::GUEST_RESET) => vm.on_reset,
        (ExitCause::Exited(_), failure::GUEST_PANIC) => vm.on_panic,
        _ => None,
    };
    wanted.unwrap_or_default()
}

fn duplicate(descriptor: &impl AsFd) -> Result<OwnedFd, Failure> {
    let copy = descriptor.as_fd().try_clone_to_owned();
    copy.os_error("duplicate a descriptor")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use crate::config::console::Target;
    use crate::spec::MIN_MEMORY;
    use hosted_command::programs::Named;
    use rustix::io::read;
    use serde_json::Value;
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::path::Path;
    use std::sync::mpsc::channel;
    use std::thread;
    use std::time::Duration;
    use vmm_mem::large::Large;

    /// Returns the last line of a file.
    fn last_line(path: &Path) -> Value {
        let text = fs::read_to_string(path).unwrap();
        serde_json::from_str(text.lines().last().unwrap()).unwrap()
    }

    /// A start fails while GDB is connected and waits for a command.
    #[test]
    fn an_error_ends_the_vm_like_any_other_cause() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let (gdb, metrics, kernel) = (path("gdb"), path("metrics"), path("kernel"));
        fs::write(&kernel, "none").unwrap();
        let events = File::create(path("events")).unwrap();
        let mut config = Config::default();
        config.vm.kernel = Some(kernel);
        config.vm.gdb = Some(GdbEndpoint::parse(&format!("unix={}", gdb.display())).unwrap());
        config.vm.metrics = Some(metrics.clone());
        config.vm.event_fd = Some(events.as_raw_fd() as u32);
        let spec = Spec { serial: Target::Null, ..config.validate(true).unwrap() };
        let files = VmFiles::open(&spec.config).unwrap();
        let kernel = KernelImage::Kvm(Large::copy_of(b"none").unwrap());
        let backend = Backend::new(&spec, &kernel, &Named::default()).unwrap();
        let symbols = Symbols::new(&spec, &kernel).unwrap();
        let vm = Supervisor::new(spec, files, backend, symbols, MIN_MEMORY, None).unwrap();

        let prepared = || hosted_loader::empty(MIN_MEMORY).unwrap();
        let Prepared { memory, shared, .. } = prepared();
        let counters = statistics::devices::create().unwrap();
        vm.control.started(std::process::id(), (memory, shared), counters, Instant::now());
        let _debugger = UnixStream::connect(&gdb).unwrap();
        vm.wakeup.set_nonblocking(false).unwrap();
        read(&vm.wakeup, &mut [0]).unwrap();
        // Two descriptors with the same number.
        let more = vec![(duplicate(&events).unwrap(), layout::MEMORY_FD)];
        let (done, ended) = channel();
        thread::spawn(move || {
            done.send(vm.run(Start { prepared: prepared(), more, nets: Vec::new() }))
        });
        let result = ended.recv_timeout(Duration::from_secs(60)).expect("`run` does not end");
        let failure = result.unwrap_err();

        let end = last_line(&path("events"));
        assert_eq!((&end["event"], &end["code"]), (&"ended".into(), &failure.code().into()));
        assert_eq!(end["reason"], *failure.message());
        assert_eq!(last_line(&metrics)["state"], "ended");
    }
}
