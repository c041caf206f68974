//! Process 1 of the guests of `parador exec` and `parador oci`: sets the guest up, and starts
//! commands and containers for programs of the host ([`proto::agent`]).
//!
//! It is linked statically, since it runs before there is a root directory. It relies on the host,
//! which owns the guest; guest applications cannot connect ([`listener`]). An error before the host
//! has connected is printed on the console, and ends the guest.
#![forbid(unsafe_code)]

mod cgroup;
mod children;
mod clock;
mod command;
mod connection;
mod container;
mod copy_up;
mod enter;
mod forward;
mod listener;
mod modules;
mod network;
mod privileges;
mod resolver;
mod root;
mod stream;
mod users;

use std::ffi::OsString;
use std::io::{self, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// Argument of a copy that becomes a command.
const ENTER: &str = "enter";
/// Pause after a connection that cannot be accepted for lack of descriptors or memory.
const PAUSE: Duration = Duration::from_millis(100);

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    match arguments.first().and_then(|first| first.to_str()) {
        Some(ENTER) => return enter::become_process(),
        Some(modules::REQUEST) => return load_module(&arguments),
        _ => {}
    }
    if std::process::id() != 1 {
        eprintln!("parador-agent: it is process 1 of a guest of `parador exec` or `parador oci`");
        return ExitCode::FAILURE;
    }
    let Err(error) = serve() else { return ExitCode::SUCCESS };
    eprintln!("parador-agent: {error}");
    power_off()
}

/// Loads what the kernel requests, the last argument. The kernel reports that it is missing.
fn load_module(arguments: &[OsString]) -> ExitCode {
    let request = arguments.last().and_then(|name| name.to_str()).unwrap_or_default();
    match modules::load(request) {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Serves connections. Returns only with an error.
fn serve() -> io::Result<()> {
    root::mount_kernel_file_systems()?;
    let listener = listener::Listener::new(proto::agent::PORT)?;
    let agent = Arc::new(connection::Agent::new()?);
    privileges::raise_file_limit()?;
    loop {
        let connection = match listener.accept() {
            Ok(connection) => connection,
            // The guest serves those that it has.
            Err(error) => {
                eprintln!("parador-agent: accept a connection: {error}");
                std::thread::sleep(PAUSE);
                continue;
            }
        };
        let agent = Arc::clone(&agent);
        let served = std::thread::Builder::new().spawn(move || agent.serve(connection));
        // Without memory for a thread, the host sees that the connection ends.
        if let Err(error) = served {
            eprintln!("parador-agent: {error}");
        }
    }
}

/// Writes files back and ends the guest.
fn power_off() -> ! {
    // The message before must reach the console; an error has no receiver.
    let _ = io::stderr().flush();
    rustix::fs::sync();
    let _ = rustix::system::reboot(rustix::system::RebootCommand::PowerOff);
    // A process 1 that ends is a panic of the kernel, which ends the guest, too.
    std::process::exit(1)
}
