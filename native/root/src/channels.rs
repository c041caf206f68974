//! Channels between VMs: their memory, their ends, and the shares of the ends.
//!
//! Root allocates a channel's memory when its first end starts, and keeps it; it clears the memory
//! when neither end runs. Root maps a share a second time and delegates the alias to the peer, so
//! revoking it leaves the owner's mapping intact. A VMM names shares by index only, and guest
//! memory by offset; root validates both.

use abi::{PAGE_SIZE, rights};
use heapless::Vec;
use native_rt::{Message, Window, map_alias};
use proto::channel::{
    End, LET_GO, LOOK, MAP, MAX_CHANNELS, MAX_VM_CHANNELS, OFFER, PeerShare, REVOKE, SHARE_BYTES,
    SHARES, ShareRef, ShareState, View,
};
use proto::start::{CHANNEL_STRIDE, CHANNELS, RangeKind, event, shares, slot};
use proto::system::{System, Vm};
use proto::{DONE, REFUSED};

use crate::child::{Child, FOR_GUESTS, Resources, StartError};
use crate::manager::FIRST_VM;
use crate::sessions::{PERMANENT, connect_peers, warn_of_peer};

/// Distance of aliases: a share, and room to align it as in its owner's memory, so that both use
/// the same few large pages.
const ALIAS_STRIDE: u64 = 2 * SHARE_BYTES;

/// Memory that one end shares with the other end.
struct Share {
    /// Alias of the memory in root.
    window: Window,
    writable: bool,
    /// The peer has mapped it.
    mapped: bool,
}

/// An end of a channel.
struct ChannelSide {
    child: usize,
    /// Index of its VM in the description.
    plan: usize,
    /// Index of the channel with its VMM.
    number: usize,
    runs: bool,
    starts: u16,
    shares: [Option<Share>; SHARES],
}

struct Channel {
    sides: [ChannelSide; 2],
    size: u64,
    doorbell: bool,
    memory: Option<Window>,
}

/// All channels of the system.
pub struct Channels {
    channels: Vec<Channel, MAX_CHANNELS>,
}

impl Channels {
    /// Creates the channels of the description. Ignores those beyond the limits, which `parador
    /// system check` rejects.
    pub fn new(system: &System) -> Self {
        let mut channels: Vec<Channel, MAX_CHANNELS> = Vec::new();
        for channel in &system.channels {
            let side = |plan: u8| {
                let plan = usize::from(plan);
                // VMs are numbered without templates at first.
                let before = system.vms.iter().take(plan).filter(|vm| !vm.template).count();
                let earlier = channels.iter().flat_map(|channel| &channel.sides);
                let number = earlier.filter(|side| side.plan == plan).count();
                let there =
                    number < MAX_VM_CHANNELS && system.vms.get(plan).is_some_and(|vm| !vm.template);
                there.then_some(ChannelSide {
                    child: FIRST_VM + before,
                    plan,
                    number,
                    runs: false,
                    starts: 0,
                    shares: [const { None }; SHARES],
                })
            };
            let [first, second] = channel.between.map(side);
            if let (Some(first), Some(second)) = (first, second)
                && first.plan != second.plan
            {
                // Both lists have the same length.
                let _ = channels.push(Channel {
                    sides: [first, second],
                    size: channel.size.into(),
                    doorbell: channel.doorbell,
                    memory: None,
                });
            }
        }
        Self { channels }
    }

    /// Returns the number of channels of a VM.
    pub fn count(&self, system: &System, vm: &Vm) -> usize {
        let sides = self.channels.iter().flat_map(|channel| &channel.sides);
        sides.filter(|side| is_of(side, system, vm)).count()
    }

    /// Connects a VM to its channels: maps their memory and delegates the peers' notifications.
    /// Returns the description for its VMM.
    pub fn connect<'a>(
        &mut self,
        number: usize,
        vm: &Vm,
        system: &System<'a>,
        child: &mut Child,
        resources: &mut Resources,
        children: &[Option<Child>],
    ) -> Result<Vec<End<'a>, MAX_VM_CHANNELS>, StartError> {
        let mut ends = Vec::new();
        for channel in &mut self.channels {
            // A VM created from a template may reuse the index of one that had channels.
            let own = |side: &ChannelSide| side.child == number && is_of(side, system, vm);
            let Some(side) = channel.sides.iter().position(own) else { continue };
            let memory = match channel.memory {
                Some(memory) => memory,
                None => {
                    let pages = channel.size / PAGE_SIZE;
                    let memory = resources.memory.allocate_aligned(PERMANENT, pages, pages);
                    *channel.memory.insert(memory.ok_or(StartError::Memory)?)
                }
            };
            let (own, peer) = both(&mut channel.sides, side);
            let place = CHANNELS + own.number as u64 * CHANNEL_STRIDE;
            child.add_window(RangeKind::Channel, memory, place, 0)?;
            if let Some(Some(other)) = children.get(peer.child)
                && channel.doorbell
                && peer.runs
            {
                let name = system.vms.get(peer.plan).map(|vm| vm.name);
                connect_peers(
                    || other.give_notification(child, slot::CHANNELS + own.number as u64),
                    || child.give_notification(other, slot::CHANNELS + peer.number as u64),
                    |error| warn_of_peer(name, error),
                )?;
            }
            let end = End {
                side: side as u8,
                peer: (peer.child - FIRST_VM) as u32 + 1,
                peer_name: system.vms.get(peer.plan).map_or("", |vm| vm.name),
                doorbell: channel.doorbell,
                signal: event::channel(peer.number),
            };
            own.runs = true;
            own.starts = own.starts.wrapping_add(1);
            // `new` limits the number per VM.
            let _ = ends.push(end);
        }
        Ok(ends)
    }

    /// Notifies a started VM and its peers.
    pub fn started(&self, number: usize, children: &[Option<Child>]) {
        for channel in &self.channels {
            if channel.sides.iter().any(|side| side.child == number && side.runs) {
                channel.sides.iter().for_each(|side| notify(side, children));
            }
        }
    }

    /// Handles the end of a VM, after its child has been destroyed.
    pub fn ended(&mut self, number: usize, children: &[Option<Child>]) {
        for channel in &mut self.channels {
            let own = |side: &ChannelSide| side.child == number && side.runs;
            let Some(side) = channel.sides.iter().position(own) else { continue };
            let (own, peer) = both(&mut channel.sides, side);
            own.runs = false;
            own.shares.iter_mut().for_each(revoke);
            peer.shares.iter_mut().flatten().for_each(let_go);
            notify(peer, children);
            if !peer.runs
                && let Some(memory) = channel.memory
            {
                memory.clear();
            }
        }
    }

    /// Handles a call of a VMM.
    pub fn call(
        &mut self,
        number: usize,
        label: u64,
        words: [u64; 4],
        children: &[Option<Child>],
    ) -> Message {
        let answer = self.try_call(number, label, words, children);
        answer.map_or(Message::new(REFUSED, [0; 4]), |words| Message::new(DONE, words))
    }

    fn try_call(
        &mut self,
        number: usize,
        label: u64,
        [place, offset, length, writable]: [u64; 4],
        children: &[Option<Child>],
    ) -> Option<[u64; 4]> {
        let ShareRef { channel: of_vmm, share } = ShareRef::unpack(place)?;
        let own = |side: &ChannelSide| side.child == number && side.runs && side.number == of_vmm;
        let found = self.channels.iter_mut().enumerate().find_map(|(index, channel)| {
            let side = channel.sides.iter().position(own)?;
            Some((index, side, channel))
        });
        let (index, side, channel) = found?;
        let (own, peer) = both(&mut channel.sides, side);
        let child = children.get(number)?.as_ref()?;
        match label {
            OFFER => {
                let slot = &mut own.shares[share];
                let fits = slot.is_none()
                    && (PAGE_SIZE..=SHARE_BYTES).contains(&length)
                    && (offset | length).is_multiple_of(PAGE_SIZE);
                if !fits {
                    return None;
                }
                let place = ((index * 2 + side) * SHARES + share) as u64 * ALIAS_STRIDE;
                let at = place + offset % SHARE_BYTES;
                let writable = writable != 0;
                let rights = FOR_GUESTS & if writable { rights::ALL } else { !rights::WRITE };
                let window = map_alias(child.guest_pieces(offset, length)?, at, rights).ok()?;
                *slot = Some(Share { window, writable, mapped: false });
                notify(peer, children);
            }
            REVOKE => {
                revoke(&mut own.shares[share]);
                notify(peer, children);
            }
            MAP => {
                let offered = peer.shares[share].as_mut()?;
                if !offered.mapped {
                    let mapped = child.map(offered.window, shares(of_vmm, share), FOR_GUESTS);
                    if mapped.is_err() {
                        let_go(offered);
                        return None;
                    }
                    offered.mapped = true;
                    notify(peer, children);
                }
            }
            LET_GO => {
                let_go(peer.shares[share].as_mut()?);
                notify(peer, children);
            }
            LOOK => return Some(view(own, peer).pack()),
            _ => return None,
        }
        Some([0; 4])
    }
}

/// Returns whether a VM is the one that the description has at an end.
fn is_of(side: &ChannelSide, system: &System, vm: &Vm) -> bool {
    system.vms.get(side.plan).is_some_and(|plan| core::ptr::eq(plan, vm))
}

/// Returns an end and its peer.
fn both(sides: &mut [ChannelSide; 2], own: usize) -> (&mut ChannelSide, &mut ChannelSide) {
    let [first, second] = sides;
    if own == 0 { (first, second) } else { (second, first) }
}

/// Notifies the VMM of an end.
fn notify(side: &ChannelSide, children: &[Option<Child>]) {
    if let Some(Some(child)) = children.get(side.child)
        && side.runs
    {
        child.signal(event::CHANNELS);
    }
}

fn view(own: &ChannelSide, peer: &ChannelSide) -> View {
    let state = |share: &Share| if share.mapped { ShareState::Mapped } else { ShareState::Offered };
    let of = |share: &Option<Share>| share.as_ref().map_or(ShareState::None, state);
    View {
        peer_runs: peer.runs,
        starts: peer.starts,
        own: core::array::from_fn(|share| of(&own.shares[share])),
        peers: core::array::from_fn(|share| {
            let share = &peer.shares[share];
            PeerShare {
                state: of(share),
                writable: share.as_ref().is_some_and(|share| share.writable),
                length: share.as_ref().map_or(0, |share| share.window.length() as u32),
            }
        }),
    }
}

/// Revokes a share.
fn revoke(share: &mut Option<Share>) {
    if let Some(Share { window, .. }) = share.take() {
        // Neither fails: an absent mapping counts as revoked. The peer comes first, independent of
        // the result.
        let _ = window.revoke();
        let _ = window.release();
    }
}

/// Unmaps a share from the peer; it stays offered.
fn let_go(share: &mut Share) {
    // As above.
    let _ = share.window.revoke();
    share.mapped = false;
}
