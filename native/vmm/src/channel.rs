//! Back end of a channel to another VM: root tracks the shares, the kernel maps them.
//!
//! The guests own the rings. The VMM accesses them only for hypercalls, and validates what it
//! reads. All code here runs under the lock of its device.

use abi::rights;
use heapless::Vec;
use native_rt::device::{Shared, shares};
use native_rt::{Gate, Message as Call, Notification, Window};
use proto::DONE;
use proto::channel::register::NAME_LEN;
use proto::channel::{
    Broken, End, LET_GO, LOOK, MAP, MAX_VM_CHANNELS, Message, OFFER, REVOKE, Receiver, SHARE_BYTES,
    SHARES, SendError, Sender, ShareRef, ShareState, View, hypercall,
};
use proto::start::{Vmm, slot};
use vmm_bus::backend::{ChannelBackend, ChannelInfo};

use crate::space::{GuestSpace, SPACE};
use crate::{Cell, platform};

// The kernel handles this hypercall; for other hosts the library does.
const _: () = assert!(hypercall::DOORBELL == abi::vcpu::HYPERCALL_DOORBELL);
/// More bytes than a guest has memory.
const MAX_MEMORY: u64 = 1 << 46;

/// One end of a channel.
pub struct ChannelEnd {
    number: usize,
    side: usize,
    doorbell: bool,
    notification: Notification,
    signal: u64,
    memory: Shared,
    shares: Window,
    /// Guest-physical addresses that the guest has chosen for the channel's memory and the shares.
    /// Windows there may wait ([`GuestWindows`]).
    memory_at: Option<u64>,
    shares_at: Option<u64>,
    /// Shares of this side that root may know, one bit each.
    offered: u32,
    /// Mapped bytes of each of the peer's shares; 0: not mapped.
    mapped: [u64; SHARES],
    /// Address of guest memory, if it is not the board's.
    identity: Option<u64>,
    sender: Option<Sender<'static>>,
    receiver: Option<Receiver<'static>>,
}

impl ChannelEnd {
    /// Creates the end of channel `number`, and describes it for the guest. `own` is this VM's name
    /// and configuration.
    pub fn new(
        number: usize,
        end: &End,
        memory: Shared,
        own: (&str, &Vmm),
    ) -> Option<(ChannelInfo, Self)> {
        let info = ChannelInfo {
            number: number as u8,
            side: end.side,
            own_id: own.1.id,
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
            identity: own.1.identity,
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

    /// Maps a share for the guest, if the shares have an address. Returns `false` if it waits.
    fn map_share(&self, share: usize) -> bool {
        let (Some(at), Some(window)) = (self.shares_at, self.share(share)) else { return true };
        WINDOWS.lock().map(window, at + share as u64 * SHARE_BYTES)
    }

    /// Takes a share that the VMM no longer has away from the guest.
    fn remove_share(&mut self, share: usize) {
        if let Some(window) = self.share(share) {
            WINDOWS.lock().unmap(window);
        }
        self.mapped[share] = 0;
    }
}

/// Windows of all channels in the address spaces of the guest.
static WINDOWS: Cell<GuestWindows<&GuestSpace>> =
    Cell::new(GuestWindows { space: &SPACE, waiting: Vec::new() });

/// Windows in address spaces. While a guest assigns addresses, it may let windows overlap. A window
/// whose address is in use waits, and is mapped when another one has left.
struct GuestWindows<S> {
    space: S,
    /// Windows that wait, and their addresses.
    waiting: Vec<(Window, u64), { MAX_VM_CHANNELS * (1 + SHARES) }>,
}

/// Address spaces of a guest.
trait GuestMap {
    /// Maps memory for the guest; returns `false` without effect if the address is in use, or
    /// memory for page tables is exhausted.
    fn map(&mut self, window: Window, address: u64) -> bool;
    /// Takes memory away from the guest.
    fn unmap(&mut self, window: Window);
}

impl GuestMap for &GuestSpace {
    fn map(&mut self, window: Window, address: u64) -> bool {
        const RIGHTS: u8 = rights::READ | rights::WRITE | rights::USER | rights::GLOBAL;
        let mapped = GuestSpace::map(self, window, address, RIGHTS);
        if mapped.is_err() {
            GuestSpace::unmap(self, window);
        }
        mapped.is_ok()
    }

    fn unmap(&mut self, window: Window) {
        GuestSpace::unmap(self, window);
    }
}

impl<S: GuestMap> GuestWindows<S> {
    /// Maps a window that is not mapped. Returns `false` if it waits.
    fn map(&mut self, window: Window, address: u64) -> bool {
        let mapped = self.space.map(window, address);
        if !mapped {
            // Each window of a channel waits once at most: there is room.
            let _ = self.waiting.push((window, address));
        }
        mapped
    }

    /// Unmaps all windows inside of this one, and maps others that waited for their addresses.
    fn unmap(&mut self, window: Window) {
        let is_inside = |other: Window| other.base().wrapping_sub(window.base()) < window.length();
        self.waiting.retain(|&(other, _)| !is_inside(other));
        self.space.unmap(window);
        self.waiting.retain(|&(other, address)| !self.space.map(other, address));
    }
}

/// Returns whether the range is where windows of channels may be.
fn in_window((first, bytes): (u64, u64), address: u64, length: u64) -> bool {
    address >= first && address + length <= first + bytes
}

/// Returns the offset in guest memory of a guest-physical range; `None` if no range of memory
/// contains it. `ranges`: address and length of the guest's memory, in order.
fn offset(ranges: impl Iterator<Item = (u64, u64)>, address: u64, length: u64) -> Option<u64> {
    let end = address.checked_add(length)?;
    let mut first = 0;
    for (base, bytes) in ranges {
        if address >= base && end <= base + bytes {
            return Some(address - base + first);
        }
        first += bytes;
    }
    None
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
        for (share, of_peer) in view.peers.iter().enumerate() {
            if self.mapped[share] != 0 && of_peer.state != ShareState::Mapped {
                self.remove_share(share);
            }
        }
        // A restarted peer has another notification.
        let signal = if self.doorbell && view.peer_runs { self.signal } else { 0 };
        SPACE.bind_doorbell(self.number as u64, self.notification, signal);
        view
    }

    fn offer(&mut self, share: usize, address: u64, length: u32, writable: bool) -> bool {
        let length = u64::from(length);
        let ranges = platform::ram_ranges(self.identity, MAX_MEMORY);
        let Some(offset) = offset(ranges, address, length) else { return false };
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
            // The peer may have revoked it meanwhile, and offered another one.
            self.view();
        }
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
        if self.mapped[share] != 0 {
            self.remove_share(share);
        }
    }

    fn set_addresses(&mut self, memory: Option<u64>, shares: Option<u64>) {
        let window = self.memory.window();
        let windows = platform::CHANNEL_WINDOWS;
        let memory = memory.filter(|&at| in_window(windows, at, window.length()));
        let shares = shares.filter(|&at| in_window(windows, at, self.shares.length()));
        if memory != self.memory_at {
            let mut windows = WINDOWS.lock();
            windows.unmap(window);
            self.memory_at = memory;
            if let Some(at) = memory {
                windows.map(window, at);
            }
        }
        if shares != self.shares_at {
            WINDOWS.lock().unmap(self.shares);
            self.shares_at = shares;
            for share in (0..SHARES).filter(|&share| self.mapped[share] != 0) {
                self.map_share(share);
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
    use vmm_machine::layout::{HOLE, IO_APIC, PCI_WINDOW, PCI_WINDOW_LENGTH};

    #[test]
    fn memory_of_a_pc_is_in_two_parts() {
        const FOUR_GIB: u64 = 1 << 32;
        let offset =
            |address, length| offset(vmm_boot::ram_ranges(MAX_MEMORY, HOLE), address, length);
        assert_eq!(offset(0x1000, 0x1000), Some(0x1000));
        assert_eq!(offset(HOLE - 0x1000, 0x1000), Some(HOLE - 0x1000));
        assert_eq!(offset(HOLE - 0x1000, 0x2000), None);
        for device in [HOLE, IO_APIC, FOUR_GIB - 0x1000, u64::MAX] {
            assert_eq!(offset(device, 0x1000), None);
        }
        assert_eq!(offset(FOUR_GIB + 0x3000, 0x1000), Some(HOLE + 0x3000));
    }

    #[test]
    fn memory_of_virt_begins_at_a_gigabyte() {
        const RAM: u64 = vmm_boot::virt::RAM;
        let offset = |address| offset([(RAM, MAX_MEMORY)].into_iter(), address, 0x1000);
        assert_eq!((offset(RAM - 0x1000), offset(RAM + 0x5000)), (None, Some(0x5000)));
    }

    #[test]
    fn windows_are_where_functions_are() {
        let windows = (PCI_WINDOW.into(), PCI_WINDOW_LENGTH.into());
        let (first, end) = (windows.0, windows.0 + windows.1);
        let in_window = |address, length| in_window(windows, address, length);
        assert!(in_window(first, 0x1000) && in_window(end - 0x1000, 0x1000));
        assert!(!in_window(end - 0x1000, 0x2000) && !in_window(0, 0x1000));
    }

    /// An address space whose mapped windows must not overlap.
    #[derive(Default)]
    struct Flat(std::vec::Vec<(Window, u64)>);

    impl GuestMap for Flat {
        fn map(&mut self, window: Window, address: u64) -> bool {
            let overlaps = |&(other, at): &(Window, u64)| {
                at < address + window.length() && address < at + other.length()
            };
            let fits = !self.0.iter().any(overlaps);
            if fits {
                self.0.push((window, address));
            }
            fits
        }

        fn unmap(&mut self, window: Window) {
            let is_inside = |other: Window| {
                (window.base()..window.base() + window.length()).contains(&other.base())
            };
            self.0.retain(|&(other, _)| !is_inside(other));
        }
    }

    #[test]
    fn windows_wait_until_their_addresses_are_free() {
        let mut windows = GuestWindows { space: Flat::default(), waiting: Vec::new() };
        let [all, other] = [0, 1].map(|channel| shares(channel).unwrap());
        let [first, second] = [0, 1].map(|n| all.part(n * SHARE_BYTES, SHARE_BYTES).unwrap());
        let places = |windows: &GuestWindows<Flat>| -> std::vec::Vec<_> {
            windows.space.0.iter().map(|&(window, at)| (window.base(), at)).collect()
        };
        // A guest exchanges the addresses of two windows.
        const A: u64 = 0xc000_0000;
        const B: u64 = 0xc100_0000;
        assert!(windows.map(other, A) && windows.map(first, B));
        windows.unmap(other);
        assert!(!windows.map(other, B));
        windows.unmap(first);
        assert!(windows.map(first, A));
        assert_eq!(places(&windows), [(other.base(), B), (first.base(), A)]);
        // Those that have left do not wait any more.
        assert!(!windows.map(second, B));
        windows.unmap(all);
        windows.unmap(other);
        assert_eq!((places(&windows), windows.waiting.len()), (vec![], 0));
    }
}
