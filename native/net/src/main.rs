//! Network server: a switch between VMs and, with a network card, the external network.
//!
//! The server copies a frame once, from the sender's session to each receiver's. It checks
//! addresses on a private copy of the frame's header, which the receivers get too: the sender
//! cannot change it in between. It drops frames without room and never waits for a client.
#![cfg_attr(not(test), no_std, no_main)]
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(dead_code, reason = "the rest needs the kernel"))]

mod offload;
mod switch;
mod uplink;

use abi::FOREVER;
use heapless::Vec;
use native_rt::device::{self as memory, Shared};
use native_rt::{Irq, Notification, Window, error, info, time};
use proto::control::code;
use proto::net::{Frame, Info, MAX_FRAME, Offload, Port};
use proto::service::{MAX_SESSIONS, NetServer};
use proto::start::{Role, Start, event, slot};

use crate::switch::{HEADER, Switch, SwitchEnd, Verdict};
use crate::uplink::{Uplink, UplinkError};

/// Maximum number of frames of one sender per turn.
const MAX_BATCH: usize = 32;

/// Buffer for software offloads.
static SCRATCH: spin::Mutex<[u8; MAX_FRAME as usize]> = spin::Mutex::new([0; MAX_FRAME as usize]);

#[cfg(not(test))]
native_rt::entry!(main);

/// Session of a client.
struct Client {
    port: Port<'static>,
    window: Window,
    signal: u64,
}

/// The network server.
struct NetworkServer {
    switch: Switch,
    clients: Vec<Client, MAX_SESSIONS>,
    uplink: Option<Uplink>,
    tsc_khz: u64,
}

/// Location of a frame's data.
#[derive(Clone, Copy)]
struct Data {
    window: Window,
    offset: u64,
    length: u64,
    header: [u8; HEADER],
    offload: Offload,
}

impl Data {
    fn copy_to(&self, window: Window, offset: u64) -> bool {
        self.window.copy_to(self.offset, self.length, window, offset)
            && window.write(offset, &self.header)
    }
}

impl NetworkServer {
    /// Forwards all waiting frames; returns whether there were any.
    fn serve(&mut self) -> Result<bool, UplinkError> {
        let now = time::nanos(self.tsc_khz, time::tsc());
        let mut progress = false;
        for index in 0..self.clients.len() {
            for _ in 0..MAX_BATCH {
                let client = &mut self.clients[index];
                let Some(frame) = client.port.receive() else { break };
                progress = true;
                let Frame { offset, length, offload } = frame;
                let window = client.window;
                let data = Data { window, offset, length, header: [0; HEADER], offload };
                self.forward(SwitchEnd::Port(index), data, now)?;
                self.clients[index].port.done();
            }
        }
        for _ in 0..MAX_BATCH {
            let Some(uplink) = &mut self.uplink else { break };
            let Some(received) = uplink.receive()? else { break };
            progress = true;
            let data = Data {
                window: uplink.memory().window(),
                offset: received.offset,
                length: received.length,
                header: [0; HEADER],
                offload: Offload::default(),
            };
            self.forward(SwitchEnd::Uplink, data, now)?;
            if let Some(uplink) = &mut self.uplink {
                uplink.return_buffer(received);
            }
        }
        if let Some(uplink) = &mut self.uplink {
            uplink.notify();
        }
        Ok(progress)
    }

    fn forward(&mut self, from: SwitchEnd, mut data: Data, now: u64) -> Result<(), UplinkError> {
        if !data.window.read(data.offset, &mut data.header) {
            return Ok(());
        }
        match self.switch.verdict(from, &data.header, data.length, now) {
            Verdict::Drop(_) => Ok(()),
            Verdict::To(to) => self.deliver(to, &data),
            Verdict::Flood => {
                for index in 0..self.clients.len() {
                    if self.switch.reaches(from, SwitchEnd::Port(index)) {
                        self.deliver(SwitchEnd::Port(index), &data)?;
                    }
                }
                if self.switch.reaches(from, SwitchEnd::Uplink) {
                    self.deliver(SwitchEnd::Uplink, &data)?;
                }
                Ok(())
            }
        }
    }

    fn deliver(&mut self, to: SwitchEnd, data: &Data) -> Result<(), UplinkError> {
        let whole = match to {
            SwitchEnd::Port(index) => {
                let Some(client) = self.clients.get_mut(index) else { return Ok(()) };
                offload::is_accepted(client.port.offload_caps(), data.length, &data.offload)
            }
            SwitchEnd::Uplink => {
                let uplink = self.uplink.as_ref();
                uplink.is_some_and(|uplink| uplink.accepts(data.length, &data.offload))
            }
        };
        if whole {
            return self
                .put(to, data.length, data.offload, |window, offset| data.copy_to(window, offset));
        }
        let mut scratch = SCRATCH.lock();
        let Some(frame) = scratch.get_mut(..data.length as usize) else { return Ok(()) };
        if !data.window.read(data.offset, frame) {
            return Ok(());
        }
        frame[..HEADER].copy_from_slice(&data.header);
        let mut outcome = Ok(());
        offload::apply_offload(frame, &data.offload, |frame| {
            if outcome.is_ok() {
                let length = frame.len() as u64;
                outcome = self.put(to, length, Offload::default(), |window, offset| {
                    window.write(offset, frame)
                });
            }
        });
        outcome
    }

    /// Copies a frame to its receiver if there is room.
    fn put(
        &mut self,
        to: SwitchEnd,
        length: u64,
        offload: Offload,
        fill: impl FnOnce(Window, u64) -> bool,
    ) -> Result<(), UplinkError> {
        match to {
            SwitchEnd::Port(index) => {
                let Some(client) = self.clients.get_mut(index) else { return Ok(()) };
                if let Some(offset) = client.port.place(length)
                    && fill(client.window, offset)
                {
                    client.port.send(Frame { offset, length, offload });
                }
                Ok(())
            }
            SwitchEnd::Uplink => {
                let Some(uplink) = &mut self.uplink else { return Ok(()) };
                let fill = |memory: Shared, offset| fill(memory.window(), offset);
                uplink.send(length, &offload, fill)
            }
        }
    }

    fn acknowledge_interrupt(&mut self) {
        if let Some(uplink) = &mut self.uplink {
            uplink.acknowledge_interrupt();
        }
    }

    /// Signals clients with pending events, and requests signals from all. Returns `false` if a
    /// frame is already waiting.
    fn sleep(&mut self) -> bool {
        let mut idle = true;
        for (index, client) in self.clients.iter_mut().enumerate() {
            client.port.poll();
            idle &= client.port.sleep();
            if client.port.take_signal() {
                // A client that has ended gets a new session when it restarts.
                let peer = slot::peer(index, client.port.notified_vcpu());
                let _ = Notification::at(peer).signal(client.signal);
            }
        }
        idle
    }
}

fn connect(start: &Start, plan: &NetServer) -> Result<Option<Uplink>, u64> {
    if !plan.uplink {
        return Ok(None);
    }
    let Some(dma) = memory::dma(start) else {
        error!("the start page has no device");
        return Err(code::BAD_CONFIG);
    };
    let bit = event::INTERRUPT.trailing_zeros();
    if let Err(status) = Irq::at(slot::DEVICE).bind(Notification::at(slot::NOTIFICATION), bit) {
        error!("cannot bind the interrupt: {status:?}");
        return Err(code::INTERNAL);
    }
    Uplink::new(start, dma).map(Some).map_err(|error| {
        error!("cannot set up the network card: {error}");
        code::INTERNAL
    })
}

/// Runs the server; returns the exit code of a failure.
fn main(start: &Start<'static>) -> u64 {
    let Role::Net(plan) = &start.role else {
        error!("the start page does not describe a switch");
        return code::BAD_CONFIG;
    };
    let uplink = match connect(start, plan) {
        Ok(uplink) => uplink,
        Err(code) => return code,
    };
    let mut clients = Vec::new();
    for (port, memory) in plan.ports.iter().zip(memory::sessions(start)) {
        let info = Info { mac: port.mac };
        let window = memory.window();
        let Some(session) = Port::new(memory.words(), window.length(), info) else {
            error!("the memory of a session is missing or too short");
            return code::BAD_CONFIG;
        };
        // There are at most as many sessions as places.
        let _ = clients.push(Client { port: session, window, signal: port.signal });
    }
    info!("{} ports, {}", clients.len(), if uplink.is_some() { "uplink" } else { "no uplink" });
    let now = time::nanos(start.clock.tsc_khz, time::tsc());
    let switch = Switch::new(&plan.ports, uplink.is_some(), now);
    let mut server = NetworkServer { switch, clients, uplink, tsc_khz: start.clock.tsc_khz };
    loop {
        match server.serve() {
            Err(error) => {
                error!("{error}");
                return code::INTERNAL;
            }
            Ok(progress) => {
                if !server.sleep() || progress {
                    continue;
                }
            }
        }
        match Notification::at(slot::NOTIFICATION).wait(FOREVER) {
            Err(status) => {
                error!("cannot wait for events: {status:?}");
                return code::INTERNAL;
            }
            // First at the card: a line that is still high would interrupt again.
            Ok(events) if events & event::INTERRUPT != 0 => server.acknowledge_interrupt(),
            Ok(_) => {}
        }
        // Without a card the capability is absent.
        let _ = Irq::at(slot::DEVICE).acknowledge();
    }
}
