//! Back end of a channel to another VM: root tracks the shares, the kernel maps them.
//!
//! The guests own the rings. The VMM accesses them only for hypercalls, and validates what it
//! reads. All code here runs under the lock of its device.

use abi::rights;
use native_rt::device::{Shared, shares};
use native_rt::{Gate, Message as Call, Notification, Window};
use proto::DONE;
use proto::channel::register::NAME_LEN;
use proto::channel::{
    Broken, End, LET_GO, LOOK, MAP, Message, OFFER, REVOKE, Receiver, SHARE_BYTES, SHARES,
    SendError, Sender, ShareRef, ShareState, View, hypercall,
};
use proto::start::slot;
use vmm_bus::backend::{ChannelBackend, ChannelInfo};
use vmm_machine::layout;

use crate::space::SPACE;

// The kernel handles this hypercall; for other hosts the library does.
const _: () = assert!(hypercall::DOORBELL == abi::vcpu::HYPERCALL_DOORBELL);
const FOUR_GIB: u64 = 1 << 32;

/// One end of a channel.
pub struct ChannelEnd {
    number: usize,
    side: usize,
    doorbell: bool,
    notification: Notification,
    signal: u64,
    memory: Shared,
    shares: Window,
    /// Guest-physical addresses of the channel's memory and of the shares.
    memory_at: Option<u64>,
    shares_at: Option<u64>,
    /// Shares of this side that root may know, one bit each.
    offered: u32,
    /// Mapped bytes of each of the peer's shares; 0: not mapped.
    mapped: [u64; SHARES],
    sender: Option<Sender<'static>>,
    receiver: Option<Receiver<'static>>,
}

impl ChannelEnd {
    /// Creates the end of channel `number`, and describes it for the guest. `own` is this VM's name
    /// and index.
    pub fn new(
        number: usize,
        end: &End,
        memory: Shared,
        own: (&str, u32),
    ) -> Option<(ChannelInfo, Self)> {
        let info = ChannelInfo {
            number: number as u8,
            side: end.side,
            own_id: own.1,
            peer_id: end.peer,
            size: u32::try_from(memory.window().length()).ok()?,
            doorbell: end.doorbell,
            own_name: name(own.0),
            peer_name: name(end.peer_name),
        };
        let peer = Self {
            number,
            side: end.side.into(),
            doorbell: end.doorbell,
            notification: Notification::at(slot::CHANNELS + number as u64),
            signal: end.signal,
            memory,
            shares: shares(number)?,
            memory_at: None,
            shares_at: None,
            offered: 0,
            mapped: [0; SHARES],
            sender: None,
            receiver: None,
        };
        Some((info, peer))
    }

    /// Sends a request to root; returns `None` if root refuses it.
    fn call_root(&self, label: u64, share: usize, words: [u64; 3]) -> Option<[u64; 4]> {
        let place = ShareRef { channel: self.number, share }.pack();
        let [a, b, c] = words;
        let answer = Gate::at(slot::CONTROL).call(Call::new(label, [place, a, b, c])).ok()?;
        (answer.tag.label == DONE).then_some(answer.words)
    }

    /// Returns the part of the window that a share occupies.
    fn share(&self, share: usize) -> Option<Window> {
        self.shares.part(share as u64 * SHARE_BYTES, self.mapped[share])
    }

    /// Maps a share for the guest; returns `false` if its window has no guest address.
    fn map_share(&self, share: usize) -> bool {
        let (Some(at), Some(window)) = (self.shares_at, self.share(share)) else { return true };
        map_guest(window, at + share as u64 * SHARE_BYTES)
    }
}

/// Maps memory for the guest; returns `false` without effect if the address is in use, or memory
/// for page tables is exhausted.
fn map_guest(window: Window, address: u64) -> bool {
    const RIGHTS: u8 = rights::READ | rights::WRITE | rights::USER | rights::GLOBAL;
    let mapped = SPACE.map(window, address, RIGHTS);
    if mapped.is_err() {
        SPACE.unmap(window);
    }
    mapped.is_ok()
}

/// Returns whether the range is in the window of PCI functions.
fn in_pci_window(address: u64, length: u64) -> bool {
    let first = u64::from(layout::PCI_WINDOW);
    address >= first && address + length <= first + u64::from(layout::PCI_WINDOW_LENGTH)
}

/// Returns the offset in guest memory of a guest-physical range; `None` if it may be split.
fn offset(address: u64, length: u64) -> Option<u64> {
    match address {
        ..layout::HOLE => (address + length <= layout::HOLE).then_some(address),
        layout::HOLE..FOUR_GIB => None,
        _ => Some(address - FOUR_GIB + layout::HOLE),
    }
}

fn name(text: &str) -> [u8; NAME_LEN] {
    let mut name = [0; NAME_LEN];
    for (to, from) in name.iter_mut().zip(text.bytes()) {
        *to = from;
    }
    name
}

impl ChannelBackend for ChannelEnd {
    fn notify(&mut self) -> bool {
        self.doorbell && self.notification.signal(self.signal).is_ok()
    }

    fn view(&mut self) -> View {
        let view = self.call_root(LOOK, 0, [0; 3]).map_or(View::default(), View::unpack);
        for (mapped, share) in self.mapped.iter_mut().zip(view.peers) {
            if share.state != ShareState::Mapped {
                *mapped = 0;
            }
        }
        // A restarted peer has another notification.
        let signal = if self.doorbell && view.peer_runs { self.signal } else { 0 };
        SPACE.bind_doorbell(self.number as u64, self.notification, signal);
        view
    }

    fn offer(&mut self, share: usize, address: u64, length: u32, writable: bool) -> bool {
        let length = u64::from(length);
        let Some(offset) = offset(address, length) else { return false };
        let done = self.call_root(OFFER, share, [offset, length, writable.into()]).is_some();
        self.offered |= u32::from(done) << share;
        done
    }

    fn revoke(&mut self, share: usize) {
        if self.offered & 1 << share != 0 && self.call_root(REVOKE, share, [0; 3]).is_some() {
            self.offered &= !(1 << share);
        }
    }

    fn map(&mut self, share: usize) -> bool {
        if self.mapped[share] != 0 {
            return true;
        }
        if self.call_root(MAP, share, [0; 3]).is_none() {
            return false;
        }
        let view = self.view().peers[share];
        if view.state == ShareState::Mapped {
            self.mapped[share] = view.length.into();
        }
        let shown = self.mapped[share] != 0 && self.map_share(share);
        if !shown {
            self.unmap(share);
        }
        shown
    }

    fn unmap(&mut self, share: usize) {
        // Root refuses it if the peer has revoked the share meanwhile.
        let _ = self.call_root(LET_GO, share, [0; 3]);
        self.mapped[share] = 0;
    }

    fn set_addresses(&mut self, memory: Option<u64>, shares: Option<u64>) {
        let window = self.memory.window();
        let memory = memory.filter(|&at| in_pci_window(at, window.length()));
        let shares = shares.filter(|&at| in_pci_window(at, self.shares.length()));
        if memory != self.memory_at {
            SPACE.unmap(window);
            self.memory_at = memory.filter(|&at| map_guest(window, at));
        }
        if shares != self.shares_at {
            SPACE.unmap(self.shares);
            self.shares_at = shares;
            for share in 0..SHARES {
                if self.mapped[share] != 0 && !self.map_share(share) {
                    self.unmap(share);
                }
            }
        }
    }

    fn send(&mut self, message: &Message) -> Result<(), SendError> {
        let attach = || Sender::attach(self.memory.words(), self.side);
        let sender = match &mut self.sender {
            Some(sender) => sender,
            none => none.insert(attach().ok_or(SendError::Broken)?),
        };
        match sender.send(message) {
            Ok(true) => {
                // No signal arrives if the peer has just ended; the message waits until it
                // restarts.
                let _ = self.notify();
                Ok(())
            }
            Ok(false) => Ok(()),
            Err(error) => {
                if error == SendError::Broken {
                    self.sender = attach();
                }
                Err(error)
            }
        }
    }

    fn receive(&mut self) -> Result<Option<Message>, Broken> {
        let attach = || Receiver::attach(self.memory.words(), self.side);
        let receiver = match &mut self.receiver {
            Some(receiver) => receiver,
            none => none.insert(attach().ok_or(Broken)?),
        };
        match receiver.receive() {
            Ok(Some((message, ring))) => {
                if ring {
                    // As above.
                    let _ = self.notify();
                }
                Ok(Some(message))
            }
            Ok(None) => Ok(None),
            Err(Broken) => {
                self.receiver = attach();
                Err(Broken)
            }
        }
    }

    fn reset(&mut self) {
        for share in 0..SHARES {
            self.revoke(share);
            if self.mapped[share] != 0 {
                self.unmap(share);
            }
        }
        self.set_addresses(None, None);
        self.sender = None;
        self.receiver = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guest_memory_is_in_two_parts() {
        const HOLE: u64 = layout::HOLE;
        assert_eq!(offset(0x1000, 0x1000), Some(0x1000));
        assert_eq!(offset(HOLE - 0x1000, 0x1000), Some(HOLE - 0x1000));
        assert_eq!(offset(HOLE - 0x1000, 0x2000), None);
        for device in [HOLE, layout::IO_APIC, FOUR_GIB - 0x1000] {
            assert_eq!(offset(device, 0x1000), None);
        }
        assert_eq!(offset(FOUR_GIB + 0x3000, 0x1000), Some(HOLE + 0x3000));
        assert_eq!(offset(u64::MAX, 0x1000), Some(u64::MAX - FOUR_GIB + HOLE));
    }

    #[test]
    fn places_are_where_functions_are() {
        let first = u64::from(layout::PCI_WINDOW);
        let end = first + u64::from(layout::PCI_WINDOW_LENGTH);
        assert!(in_pci_window(first, 0x1000) && in_pci_window(end - 0x1000, 0x1000));
        assert!(!in_pci_window(end - 0x1000, 0x2000) && !in_pci_window(0, 0x1000));
    }
}
