//! One side of a channel to another VM, as a PCI function ([`Channel`]) and as a device without a
//! bus ([`MmioChannel`]).
//!
//! State: unacknowledged events, the last known state of the channel, arguments and results of the
//! guest's commands; of the function: header and MSI-X vectors. The back end owns and maps the
//! channel's memory and the peer's shares; the device neither accesses them nor tracks shares
//! itself.
//! Features: doorbell, events of the peer and of shares, offering and mapping shares; of the
//! function: movable windows.
//! Lines, without a bus: [`VECTOR_DOORBELL`](spec::VECTOR_DOORBELL) and
//! [`VECTOR_EVENT`](spec::VECTOR_EVENT), each a pulse.
//! Missing: 64-bit base addresses, interrupt pin.
//! Documentation: `docs/spec/channel.md`.

use proto::channel::register::*;
use proto::channel::{PeerShare, SHARE_BYTES, SHARES, ShareState, View};
use vmm_bus::backend::ChannelInfo;
use vmm_bus::{Access, Device, Env, WAKE_CHANGE, WAKE_INPUT};

use crate::pci::msix::{self, Msix};
use crate::pci::{Bar, Function, Header, spec as pci};

/// Identity, and offset of the capability.
pub mod spec {
    /// Device and vendor.
    pub const ID: u32 = 0x0001_5052;
    /// Class: memory, RAM.
    pub const CLASS: u32 = 0x05_0000;
    /// Revision of the interface.
    pub const REVISION: u8 = 1;
    /// In configuration space: MSI-X capability.
    pub const MSIX_CAP: u16 = 0x40;
    /// Vector: doorbell of the peer.
    pub const VECTOR_DOORBELL: u16 = 0;
    /// Vector: an event.
    pub const VECTOR_EVENT: u16 = 1;
    /// Number of vectors.
    pub const VECTORS: usize = 2;
}
use spec::*;

/// Bytes of the window of the peer's shares.
pub const SHARES_WINDOW: u32 = SHARES as u32 * SHARE_BYTES as u32;

/// Registers of one of the guest's own shares.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Offer {
    address: u64,
    length: u32,
    refused: bool,
}

/// One side of a channel, a PCI function. Registers support accesses of 4 bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Channel {
    header: Header,
    msix: Msix,
    registers: Registers,
    /// Addresses of the memory and the shares last set in the back end.
    placed: [Option<u64>; 2],
}

/// One side of a channel without a bus. The board has set the addresses of memory and shares in the
/// back end. Registers support accesses of 4 bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct MmioChannel {
    registers: Registers,
}

/// Registers of both kinds.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Registers {
    info: ChannelInfo,
    events: u32,
    /// Last known state; `None` before the first query.
    view: Option<View>,
    offers: [Offer; SHARES],
    /// The last command for a share of the peer failed.
    refused: [bool; SHARES],
    /// Events have been set for which the guest gets no interrupt yet.
    raised: bool,
}

impl Channel {
    /// Creates the function in its power-on state: registers at `base`, the channel's memory at
    /// `memory`, the peer's shares at `shares`, each a multiple of its length.
    pub fn new(info: ChannelInfo, base: u32, memory: u32, shares: u32) -> Self {
        let mut header = Header::new(ID, CLASS, base, WINDOW);
        header.subsystem = ID;
        header.revision = REVISION;
        header.capabilities = MSIX_CAP as u8;
        header.memory = [Bar::new(memory, info.size), Bar::new(shares, SHARES_WINDOW)];
        let (msix, registers) = (Msix::new(VECTORS), Registers::new(info));
        Self { header, msix, registers, placed: [None; 2] }
    }

    fn interrupt(&mut self, vector: u16, env: &mut dyn Env) {
        if self.header.master() {
            self.msix.send(vector, env);
        }
    }

    /// Interrupts the guest for events since the last call.
    fn report_events(&mut self, env: &mut dyn Env) {
        if core::mem::take(&mut self.registers.raised) {
            self.interrupt(VECTOR_EVENT, env);
        }
    }

    /// Sets the current addresses of memory and shares in the back end.
    fn update_addresses(&mut self, env: &mut dyn Env) {
        let at = |index| self.header.memory(index).map(|(base, _)| base.into());
        let placed = [at(0), at(1)];
        if placed != self.placed
            && let Some((channel, _)) = env.channel()
        {
            self.placed = placed;
            channel.set_addresses(placed[0], placed[1]);
        }
    }
}

impl MmioChannel {
    /// Creates the device in its power-on state.
    pub fn new(info: ChannelInfo) -> Self {
        Self { registers: Registers::new(info) }
    }

    /// Interrupts the guest for events since the last call.
    fn report_events(&mut self, env: &mut dyn Env) {
        if core::mem::take(&mut self.registers.raised) {
            pulse(VECTOR_EVENT, env);
        }
    }
}

/// Raises and lowers a line.
fn pulse(line: u16, env: &mut dyn Env) {
    env.set_line(line as u8, true);
    env.set_line(line as u8, false);
}

impl Registers {
    fn new(info: ChannelInfo) -> Self {
        Self {
            info,
            events: 0,
            view: None,
            offers: [Offer::default(); SHARES],
            refused: [false; SHARES],
            raised: false,
        }
    }

    /// Restores the power-on state.
    fn reset(&mut self) {
        *self = Self::new(self.info);
    }

    /// Reads a register in an access of 4 bytes at a multiple of 4, otherwise zero.
    fn read(&mut self, access: Access, env: &mut dyn Env) -> u64 {
        match access.offset {
            offset if access.size == 4 && offset % 4 == 0 => self.read_register(offset, env).into(),
            _ => 0,
        }
    }

    /// Writes a register in such an access.
    fn write(&mut self, access: Access, value: u64, env: &mut dyn Env) {
        match access.offset {
            offset if access.size == 4 && offset % 4 == 0 => {
                self.write_register(offset, value as u32, env);
            }
            offset => env.missing("channel: access of another size than a register", offset),
        }
    }

    /// Last known state of the channel.
    fn view(&mut self, env: &mut dyn Env) -> View {
        match self.view {
            Some(view) => view,
            None => self.refresh_view(env),
        }
    }

    fn refresh_view(&mut self, env: &mut dyn Env) -> View {
        let view = env.channel().map(|(channel, _)| channel.view()).unwrap_or_default();
        *self.view.insert(view)
    }

    /// Handles a change of the back end. That the guest's own command has given a share this state
    /// is no event; any other change is, even if the guest could read it already.
    fn change(&mut self, commanded: Option<(Of, usize, ShareState)>, env: &mut dyn Env) {
        let mut old = self.view.unwrap_or_default();
        let new = self.refresh_view(env);
        match commanded {
            Some((Of::Own, share, state)) if new.own[share] == state => old.own[share] = state,
            Some((Of::Peer, share, state)) if new.peers[share].state == state => {
                old.peers[share] = new.peers[share];
            }
            _ => {}
        }
        let peer = (old.peer_runs, old.starts) != (new.peer_runs, new.starts);
        let shares = (old.own, old.peers) != (new.own, new.peers);
        if peer || shares {
            self.events |=
                if peer { EVENT_PEER } else { 0 } | if shares { EVENT_SHARES } else { 0 };
            self.raised = true;
        }
    }

    fn read_register(&mut self, offset: u64, env: &mut dyn Env) -> u32 {
        let info = &self.info;
        match offset {
            MAGIC => MAGIC_VALUE,
            VERSION => VERSION_VALUE,
            SIDE => info.side.into(),
            NUMBER => info.number.into(),
            OWN_ID => info.own_id,
            PEER_ID => info.peer_id,
            SIZE => info.size,
            FLAGS => info.doorbell.into(),
            PEER => self.view(env).peer_runs.into(),
            EVENTS => self.events,
            OWN_NAME..PEER_NAME => word(&info.own_name, offset - OWN_NAME),
            PEER_NAME..0x80 => word(&info.peer_name, offset - PEER_NAME),
            _ => match share(offset) {
                Some((Of::Own, share, register)) => self.read_own(share, register, env),
                Some((Of::Peer, share, register)) => self.read_peers(share, register, env),
                None => 0,
            },
        }
    }

    fn read_own(&mut self, share: usize, register: u64, env: &mut dyn Env) -> u32 {
        let offer = self.offers[share];
        match register {
            SHARE_ADDRESS => offer.address as u32,
            SHARE_ADDRESS_HIGH => (offer.address >> 32) as u32,
            SHARE_LENGTH => offer.length,
            SHARE_STATE => self.view(env).own[share] as u32,
            SHARE_RESULT => offer.refused.into(),
            _ => 0,
        }
    }

    fn read_peers(&mut self, share: usize, register: u64, env: &mut dyn Env) -> u32 {
        let PeerShare { state, writable, length } = self.view(env).peers[share];
        match register {
            SHARE_LENGTH => length,
            SHARE_STATE => state as u32 | if writable { STATE_WRITABLE } else { 0 },
            SHARE_RESULT => self.refused[share].into(),
            _ => 0,
        }
    }

    fn write_register(&mut self, offset: u64, value: u32, env: &mut dyn Env) {
        match offset {
            EVENTS => self.events &= !value,
            DOORBELL => {
                if let Some((channel, _)) = env.channel() {
                    // The register `PEER` shows if the peer runs.
                    let _ = channel.notify();
                }
            }
            _ => match share(offset) {
                Some((Of::Own, share, register)) => self.write_own(share, register, value, env),
                Some((Of::Peer, share, SHARE_COMMAND)) => self.command_peers(share, value, env),
                _ => env.missing("channel: write of an unknown register", offset),
            },
        }
    }

    fn write_own(&mut self, share: usize, register: u64, value: u32, env: &mut dyn Env) {
        let offer = &mut self.offers[share];
        match register {
            SHARE_ADDRESS => offer.address = offer.address & !0xffff_ffff | u64::from(value),
            SHARE_ADDRESS_HIGH => {
                offer.address = offer.address & 0xffff_ffff | u64::from(value) << 32;
            }
            SHARE_LENGTH => offer.length = value,
            SHARE_COMMAND => {
                let Offer { address, length, .. } = *offer;
                let Some((channel, _)) = env.channel() else { return };
                let (done, state) = match value {
                    COMMAND_CLOSE => {
                        channel.revoke(share);
                        (true, ShareState::None)
                    }
                    _ if value & !COMMAND_WRITE == COMMAND_OPEN => {
                        let writable = value & COMMAND_WRITE != 0;
                        (channel.offer(share, address, length, writable), ShareState::Offered)
                    }
                    _ => (false, ShareState::None),
                };
                offer.refused = !done;
                self.change(done.then_some((Of::Own, share, state)), env);
            }
            _ => env.missing("channel: write of an unknown register", register),
        }
    }

    fn command_peers(&mut self, share: usize, value: u32, env: &mut dyn Env) {
        let Some((channel, _)) = env.channel() else { return };
        let (done, state) = match value {
            COMMAND_CLOSE => {
                channel.unmap(share);
                (true, ShareState::Offered)
            }
            COMMAND_OPEN => (channel.map(share), ShareState::Mapped),
            _ => (false, ShareState::None),
        };
        self.refused[share] = !done;
        self.change(done.then_some((Of::Peer, share, state)), env);
    }
}

/// Upper half of a share's address.
const SHARE_ADDRESS_HIGH: u64 = SHARE_ADDRESS + 4;

/// Owner of a share.
enum Of {
    Own,
    Peer,
}

/// Owner, index and register of a share at `offset`.
fn share(offset: u64) -> Option<(Of, usize, u64)> {
    const LENGTH: u64 = SHARES as u64 * SHARE_STEP;
    let (of, offset) = match offset {
        OWN_SHARES.. if offset < OWN_SHARES + LENGTH => (Of::Own, offset - OWN_SHARES),
        PEER_SHARES.. if offset < PEER_SHARES + LENGTH => (Of::Peer, offset - PEER_SHARES),
        _ => return None,
    };
    Some((of, (offset / SHARE_STEP) as usize, offset % SHARE_STEP))
}

/// Four bytes of a name.
fn word(name: &[u8; NAME_LEN], offset: u64) -> u32 {
    name.as_chunks::<4>().0.get(offset as usize / 4).map_or(0, |bytes| u32::from_le_bytes(*bytes))
}

impl Device for Channel {
    fn read(&mut self, access: Access, env: &mut dyn Env) -> u64 {
        match access.offset {
            TABLE..PENDING => self.msix.read_table(Access::new(access.offset - TABLE, access.size)),
            PENDING => self.msix.pending(),
            _ => self.registers.read(access, env),
        }
    }

    fn write(&mut self, access: Access, value: u64, env: &mut dyn Env) {
        match access.offset {
            TABLE..PENDING => {
                self.msix.write_table(Access::new(access.offset - TABLE, access.size), value, env);
            }
            _ => {
                self.registers.write(access, value, env);
                self.report_events(env);
            }
        }
    }

    fn wake(&mut self, timer: u8, env: &mut dyn Env) {
        match timer {
            WAKE_INPUT => self.interrupt(VECTOR_DOORBELL, env),
            WAKE_CHANGE => {
                self.registers.change(None, env);
                self.report_events(env);
            }
            _ => {}
        }
    }

    fn reset(&mut self, env: &mut dyn Env) {
        if let Some((channel, _)) = env.channel() {
            channel.reset();
        }
        self.header.reset();
        self.msix.reset();
        self.registers.reset();
        self.placed = [None; 2];
    }
}

impl Device for MmioChannel {
    fn read(&mut self, access: Access, env: &mut dyn Env) -> u64 {
        self.registers.read(access, env)
    }

    fn write(&mut self, access: Access, value: u64, env: &mut dyn Env) {
        self.registers.write(access, value, env);
        self.report_events(env);
    }

    fn wake(&mut self, timer: u8, env: &mut dyn Env) {
        match timer {
            WAKE_INPUT => pulse(VECTOR_DOORBELL, env),
            WAKE_CHANGE => {
                self.registers.change(None, env);
                self.report_events(env);
            }
            _ => {}
        }
    }

    fn reset(&mut self, _: &mut dyn Env) {
        self.registers.reset();
    }
}

impl Function for Channel {
    fn config_read(&mut self, register: u16, _: &mut dyn Env) -> u32 {
        const TABLE_AT: u16 = MSIX_CAP + 4;
        const PENDING_AT: u16 = MSIX_CAP + 8;
        match register {
            ..pci::HEADER_END => self.header.read(register),
            MSIX_CAP => u32::from(msix::spec::CAPABILITY) | self.msix.control(),
            TABLE_AT => TABLE as u32,
            PENDING_AT => PENDING as u32,
            _ => 0,
        }
    }

    fn config_write(&mut self, register: u16, value: u32, mask: u32, env: &mut dyn Env) {
        match register {
            ..pci::HEADER_END => {
                self.header.write(register, value, mask);
                self.update_addresses(env);
            }
            MSIX_CAP => {
                let control = self.msix.control() & !mask | value & mask;
                self.msix.set_control(control, env);
            }
            _ => {}
        }
    }

    fn window(&self) -> Option<(u64, u64)> {
        self.header.window()
    }

    fn is_memory(&self, address: u64) -> bool {
        self.header.is_memory(address)
    }
}
