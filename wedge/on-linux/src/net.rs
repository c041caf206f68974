//! Networks: worker processes for frame streams and tap devices of the host ([`host_linux::net`]).
//!
//! Each network has a sender and a receiver, because the wedge has no threads. Only they have the
//! descriptor of the network; frame rings in shared memory connect them with the vCPU.
//!
//! Vsock packets use the same rings: one more network after all others.

use core::fmt;
use core::sync::atomic::Ordering::Relaxed;

use host_linux::net::{self, FrameEndpoint, NetHost, NetLink, NetQueues, Transport};
use host_linux::sys::{self, Errno};
use linux_raw_sys::general as linux;
use proto::hosted::{Filters, MAX_NETS, NetRecord, Start, layout};
use vmm_bus::frames::{NetPort, Sockets};

use crate::state::device_counters::counters;
use crate::state::shared::{NETS, NETS_LENGTH, event, shared, shared_words};
use crate::{children as processes, clock, kick, report};

/// Index of the rings of vsock packets.
pub const VSOCK: usize = MAX_NETS;
/// Largest number of network workers: a sender and a receiver for each network.
pub const MAX_WORKERS: usize = 2 * (VSOCK + 1);

/// Rings of all networks.
type AllNetQueues = [NetQueues; MAX_NETS];

/// Back end of a network device.
pub type NetEndpoint = NetPort<FrameEndpoint<'static, NetVm>>;

/// Back end of the vsock device.
pub type VsockEndpoint = Sockets<FrameEndpoint<'static, NetVm>>;

/// The VM as a network sees it.
pub struct NetVm {
    net_index: usize,
}

impl NetHost for NetVm {
    fn notify(&self) {
        let target = shared().targets.get(self.net_index);
        kick::raise_event(target.map_or(0, |target| target.load(Relaxed).into()), event::NET);
    }

    fn now(&self) -> u64 {
        clock::nanoseconds()
    }

    fn warn(&self, text: fmt::Arguments<'_>) {
        report::warn(format_args!("network {}: {text}", self.net_index));
    }
}

impl Transport for NetVm {
    fn host(&self) -> &impl NetHost {
        self
    }

    fn send(&mut self) {
        queues(self.net_index).wake_sender();
    }
}

/// Creates the back end of a network.
pub fn link(net_index: usize, record: &NetRecord) -> NetEndpoint {
    NetPort::new(endpoint(net_index), record.is_tap())
}

/// Creates the back end of the vsock device.
pub fn packets() -> VsockEndpoint {
    Sockets::new(endpoint(VSOCK))
}

fn endpoint(net_index: usize) -> FrameEndpoint<'static, NetVm> {
    FrameEndpoint::new(queues(net_index), NetVm { net_index })
}

/// Attaches the descriptors to their tap devices. For the device process, at its start.
pub fn open_taps(start: &Start) -> Result<(), Errno> {
    for net_index in 0..count(start) {
        let record = crate::state::config::net(net_index);
        if record.is_tap() {
            net::attach_tap(descriptor(net_index), record.tap)?;
        }
    }
    Ok(())
}

fn count(start: &Start) -> usize {
    (start.nets as usize).min(MAX_NETS)
}

fn descriptor(net_index: usize) -> u32 {
    layout::NETS_FD + net_index as u32
}

shared_words! {
    "shared", NETS;
    /// Frame rings of the networks, in shared memory.
    #[repr(C)]
    pub struct NetSection {
        nets: AllNetQueues,
    }
}

const _: () = assert!(size_of::<NetSection>() as u64 <= NETS_LENGTH);
const _: () = assert!(layout::VSOCK + size_of::<NetQueues>() as u64 <= layout::QUEUES);

/// Returns the frame rings of a network, or of vsock.
fn queues(net_index: usize) -> &'static NetQueues {
    // SAFETY: the device process has mapped the shared memory, initially zero, for the life of each
    // process; both places are reserved for them.
    let (nets, vsock) = unsafe {
        let vsock = (layout::SHARED + layout::VSOCK) as *const NetQueues;
        (&(*(NETS as *const NetSection)).nets, &*vsock)
    };
    nets.get(net_index).unwrap_or(vsock)
}

/// Creates the workers of all networks; returns their ids. For the device process, before the guest
/// runs.
pub fn make_workers(start: &Start, filters: &Filters) -> Result<[u32; MAX_WORKERS], Errno> {
    let mut workers = [0; MAX_WORKERS];
    for (index, place) in workers.iter_mut().enumerate() {
        let net_index = index / 2;
        let is_there = net_index < count(start) || net_index == VSOCK && start.vsock != 0;
        if is_there {
            // Read now: the guest may change it before a worker runs.
            let is_tap = crate::state::config::net(net_index).is_tap();
            match processes::fork()? {
                0 => work(index, is_tap, filters),
                worker => *place = worker,
            }
        }
    }
    Ok(workers)
}

/// Runs the sender or the receiver of a network.
fn work(index: usize, is_tap: bool, filters: &Filters) -> ! {
    let net_index = index / 2;
    let fd = descriptor(net_index);
    let alone = sys::ignore(linux::SIGPIPE)
        .and_then(|()| processes::become_worker(fd, || Ok(()), filters, Filters::NET));
    if let Err(error) = alone {
        report::warn(format_args!("cannot set up a worker of network {net_index}: {error}"));
        sys::exit(report::HOST);
    }
    let (queues, counters) = (queues(net_index), counters().net(net_index));
    let (link, vm) = (NetLink { queues, fd, is_tap, counters }, NetVm { net_index });
    if index.is_multiple_of(2) {
        net::run_sender(&link, &vm)
    } else {
        net::run_receiver(&link, &vm)
    }
}
