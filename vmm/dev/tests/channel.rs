//! Scripts for one side of a channel.

use proptest::prelude::*;
use proto::channel::{PeerShare, SHARE_BYTES, SHARES, ShareState, View, register::*};
use vmm_bus::backend::ChannelInfo;
use vmm_bus::testing::{Script, ScriptPeer};
use vmm_bus::{Access, Device, WAKE_CHANGE, WAKE_INPUT};
use vmm_dev::channel::{Channel, SHARES_WINDOW, spec};
use vmm_dev::pci::msix::spec as msix;
use vmm_dev::pci::{Function, spec as pci};

const MEMORY: u32 = 0xd000_0000;
const SHARES_AT: u32 = 0xd100_0000;

fn name(text: &[u8]) -> [u8; NAME_LEN] {
    let mut name = [0; NAME_LEN];
    name[..text.len()].copy_from_slice(text);
    name
}

fn start() -> (Channel, Script) {
    let info = ChannelInfo {
        number: 1,
        side: 1,
        own_id: 3,
        peer_id: 2,
        size: 1 << 20,
        doorbell: true,
        own_name: name(b"linux"),
        peer_name: name(b"other"),
    };
    let env = Script { channel: Some(ScriptPeer::default()), ..Script::new() };
    (Channel::new(info, 0xc000_0000, MEMORY, SHARES_AT), env)
}

/// Enables the windows, messages, and both vectors: 0x40 and 0x41.
fn enable(device: &mut Channel, env: &mut Script) {
    let command = pci::MEMORY | pci::MASTER;
    device.config_write(pci::COMMAND, command.into(), 0xffff, env);
    device.config_write(spec::MSIX_CAP, msix::ENABLE, u32::MAX, env);
    for vector in 0..spec::VECTORS as u64 {
        for (word, value) in [0xfee0_0000, 0, 0x40 + vector as u32, 0].into_iter().enumerate() {
            env.outl(device, TABLE + vector * msix::ENTRY + word as u64 * 4, value);
        }
    }
}

fn vectors(env: &mut Script) -> Vec<u8> {
    env.msis.drain(..).map(|msi| msi.data as u8).collect()
}

fn peer(env: &mut Script) -> &mut ScriptPeer {
    env.channel.as_mut().unwrap()
}

#[test]
fn identity() {
    let (mut device, mut env) = start();
    let expected = [
        (MAGIC, 0x4e41_4843),
        (VERSION, 1),
        (SIDE, 1),
        (NUMBER, 1),
        (OWN_ID, 3),
        (PEER_ID, 2),
        (SIZE, 1 << 20),
        (FLAGS, 1),
        (PEER, 0),
        (OWN_NAME, u32::from_le_bytes(*b"linu")),
        (OWN_NAME + 4, u32::from_le_bytes(*b"x\0\0\0")),
        (PEER_NAME, u32::from_le_bytes(*b"othe")),
        (PEER_NAME + 28, 0),
        (0x80, 0),
        (0x7fc, 0),
    ];
    for (register, value) in expected {
        assert_eq!(env.inl(&mut device, register), value, "{register:#x}");
    }
    assert_eq!(device.read(Access::new(1, 4), &mut env), 0);
    assert_eq!(device.read(Access::new(0, 8), &mut env), 0);
    assert_eq!(device.config_read(pci::ID, &mut env), 0x0001_5052);
    assert_eq!(device.config_read(pci::CLASS, &mut env), 0x0500_0001);
    assert_eq!(device.config_read(pci::CAPABILITIES, &mut env), spec::MSIX_CAP.into());
    assert_eq!(device.config_read(spec::MSIX_CAP, &mut env) & 0x7ff_ffff, 0x1_0011);
    assert_eq!(device.config_read(spec::MSIX_CAP + 4, &mut env), 0x1000);
    assert_eq!(device.config_read(spec::MSIX_CAP + 8, &mut env), 0x1800);
}

#[test]
fn doorbells_both_ways() {
    let (mut device, mut env) = start();
    env.outl(&mut device, DOORBELL, 0);
    env.outl(&mut device, DOORBELL, u32::MAX);
    assert_eq!(peer(&mut env).rings, 2);
    device.wake(WAKE_INPUT, &mut env);
    assert_eq!(vectors(&mut env), [], "messages are not enabled");
    enable(&mut device, &mut env);
    device.wake(WAKE_INPUT, &mut env);
    assert_eq!(vectors(&mut env), [0x40]);
    device.config_write(pci::COMMAND, pci::MEMORY.into(), 0xffff, &mut env);
    device.wake(WAKE_INPUT, &mut env);
    assert_eq!(vectors(&mut env), [], "it is no master");
}

#[test]
fn events_of_the_peer() {
    let (mut device, mut env) = start();
    enable(&mut device, &mut env);
    device.wake(WAKE_CHANGE, &mut env);
    assert_eq!((vectors(&mut env), env.inl(&mut device, EVENTS)), (vec![], 0), "no change");
    peer(&mut env).view = View { peer_runs: true, starts: 1, ..View::default() };
    assert_eq!(env.inl(&mut device, PEER), 0, "as seen last");
    device.wake(WAKE_CHANGE, &mut env);
    assert_eq!(vectors(&mut env), [0x41]);
    assert_eq!(env.inl(&mut device, EVENTS), EVENT_PEER);
    assert_eq!(env.inl(&mut device, PEER), 1);
    // The peer ended and was restarted before the device queried it.
    env.outl(&mut device, EVENTS, EVENT_PEER);
    peer(&mut env).view.starts = 2;
    device.wake(WAKE_CHANGE, &mut env);
    assert_eq!((vectors(&mut env), env.inl(&mut device, EVENTS)), (vec![0x41], EVENT_PEER));
    peer(&mut env).view.peers[2].state = ShareState::Offered;
    device.wake(WAKE_CHANGE, &mut env);
    assert_eq!(env.inl(&mut device, EVENTS), EVENT_PEER | EVENT_SHARES);
    env.outl(&mut device, EVENTS, EVENT_SHARES);
    assert_eq!(env.inl(&mut device, EVENTS), EVENT_PEER);
}

#[test]
fn windows_are_placed_where_they_answer() {
    let (mut device, mut env) = start();
    let windows = |env: &mut Script| peer(env).placed;
    assert_eq!(windows(&mut env), (None, None));
    enable(&mut device, &mut env);
    assert_eq!(windows(&mut env), (Some(MEMORY.into()), Some(SHARES_AT.into())));
    assert!(device.is_memory(u64::from(SHARES_AT) + u64::from(SHARES_WINDOW) - 1));
    assert!(!device.is_memory(u64::from(SHARES_AT) + u64::from(SHARES_WINDOW)));
    device.config_write(pci::BAR_2, 0xd234_5678, u32::MAX, &mut env);
    assert_eq!(windows(&mut env), (Some(0xd230_0000), Some(SHARES_AT.into())));
    device.config_write(pci::COMMAND, 0, 0xffff, &mut env);
    assert_eq!(windows(&mut env), (None, None));
    // The size, as a guest probes it.
    for (bar, size) in [(pci::BAR_2, 1 << 20), (pci::BAR_4, SHARES_WINDOW)] {
        device.config_write(bar, u32::MAX, u32::MAX, &mut env);
        assert_eq!(device.config_read(bar, &mut env), !(size - 1) | pci::PREFETCHABLE);
    }
    assert_eq!(windows(&mut env), (None, None));
    device.reset(&mut env);
    assert_eq!(device.config_read(pci::BAR_2, &mut env), MEMORY | pci::PREFETCHABLE);
}

#[test]
fn own_shares() {
    let (mut device, mut env) = start();
    let share = |register| OWN_SHARES + 2 * SHARE_STEP + register;
    env.outl(&mut device, share(SHARE_ADDRESS), 0x0123_4000);
    env.outl(&mut device, share(SHARE_ADDRESS) + 4, 1);
    env.outl(&mut device, share(SHARE_LENGTH), 0x2000);
    assert_eq!(env.inl(&mut device, share(SHARE_ADDRESS) + 4), 1);
    env.outl(&mut device, share(SHARE_COMMAND), COMMAND_OPEN | COMMAND_WRITE);
    assert_eq!(peer(&mut env).offers, [(2, 0x1_0123_4000, 0x2000, true)]);
    assert_eq!(env.inl(&mut device, share(SHARE_STATE)), 1);
    assert_eq!(env.inl(&mut device, share(SHARE_RESULT)), 0);
    peer(&mut env).refuses = true;
    for command in [COMMAND_OPEN, COMMAND_WRITE, 4, u32::MAX] {
        env.outl(&mut device, share(SHARE_COMMAND), command);
        assert_eq!(env.inl(&mut device, share(SHARE_RESULT)), 1, "{command}");
    }
    env.outl(&mut device, share(SHARE_COMMAND), COMMAND_CLOSE);
    assert_eq!(env.inl(&mut device, share(SHARE_STATE)), 0);
    assert_eq!(env.inl(&mut device, share(SHARE_RESULT)), 0);
}

#[test]
fn shares_of_the_peer() {
    let (mut device, mut env) = start();
    let share = |register| PEER_SHARES + SHARE_STEP + register;
    let command = |device: &mut Channel, env: &mut Script, value| {
        env.outl(device, share(SHARE_COMMAND), value);
        (env.inl(device, share(SHARE_RESULT)), env.inl(device, share(SHARE_STATE)))
    };
    assert_eq!(command(&mut device, &mut env, COMMAND_OPEN), (1, 0), "nothing is offered");
    let offered =
        PeerShare { state: ShareState::Offered, writable: true, length: SHARE_BYTES as u32 };
    peer(&mut env).view.peers[1] = offered;
    device.wake(WAKE_CHANGE, &mut env);
    assert_eq!(env.inl(&mut device, share(SHARE_LENGTH)), SHARE_BYTES as u32);
    assert_eq!(command(&mut device, &mut env, COMMAND_OPEN), (0, 0x102));
    assert_eq!(command(&mut device, &mut env, 7), (1, 0x102));
    assert_eq!(command(&mut device, &mut env, COMMAND_CLOSE), (0, 0x101));
}

/// Other changes that a command discovers are reported as events: a refused driver may wait for
/// them.
#[test]
fn a_command_swallows_no_event() {
    let (mut device, mut env) = start();
    enable(&mut device, &mut env);
    let command = |share| PEER_SHARES + share * SHARE_STEP + SHARE_COMMAND;
    env.outl(&mut device, command(1), COMMAND_OPEN);
    assert_eq!((vectors(&mut env), env.inl(&mut device, EVENTS)), (vec![], 0));
    let share = PeerShare { state: ShareState::Offered, writable: false, length: 0x1000 };
    peer(&mut env).view.peers[0] = share;
    env.outl(&mut device, command(1), COMMAND_OPEN);
    assert_eq!((vectors(&mut env), env.inl(&mut device, EVENTS)), (vec![0x41], EVENT_SHARES));
    device.wake(WAKE_CHANGE, &mut env);
    assert_eq!(vectors(&mut env), [], "already reported");
    env.outl(&mut device, EVENTS, EVENT_SHARES);
    env.outl(&mut device, command(0), COMMAND_OPEN);
    assert_eq!((vectors(&mut env), env.inl(&mut device, EVENTS)), (vec![], 0), "its own doing");
    peer(&mut env).view.starts = 1;
    env.outl(&mut device, command(0), COMMAND_CLOSE);
    assert_eq!((vectors(&mut env), env.inl(&mut device, EVENTS)), (vec![0x41], EVENT_PEER));
}

/// The peer answers a command before the device looks at its effect.
#[test]
fn an_answer_to_a_command_is_an_event() {
    let (mut device, mut env) = start();
    enable(&mut device, &mut env);
    let offered = PeerShare { state: ShareState::Offered, writable: false, length: 0x1000 };
    peer(&mut env).view.peers[0] = offered;
    device.wake(WAKE_CHANGE, &mut env);
    for (shares, answer) in [(OWN_SHARES, ShareState::Mapped), (PEER_SHARES, ShareState::Offered)] {
        vectors(&mut env);
        env.outl(&mut device, EVENTS, EVENT_SHARES);
        peer(&mut env).answer = Some(answer);
        // Mapped: revoked, and another share offered.
        peer(&mut env).view.peers[0].length *= 2;
        env.outl(&mut device, shares + SHARE_COMMAND, COMMAND_OPEN);
        assert_eq!(env.inl(&mut device, shares + SHARE_RESULT), 0);
        assert_eq!((vectors(&mut env), env.inl(&mut device, EVENTS)), (vec![0x41], EVENT_SHARES));
    }
}

#[test]
fn without_an_outside_nothing_happens() {
    let (mut device, _) = start();
    let mut env = Script::new();
    enable(&mut device, &mut env);
    for offset in (0..0x400).step_by(4) {
        env.outl(&mut device, offset, 1);
        env.inl(&mut device, offset);
    }
    device.wake(WAKE_INPUT, &mut env);
    device.wake(WAKE_CHANGE, &mut env);
    device.reset(&mut env);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_access(accesses in prop::collection::vec((0u64..0x2000, 0u8..4, any::<u64>(), 0..5), 1..200)) {
        let (mut device, mut env) = start();
        enable(&mut device, &mut env);
        for (offset, size, value, what) in accesses {
            let access = Access::new(offset & !((1 << size) - 1), 1 << size);
            let register = (offset as u16) & 0xfc;
            match what {
                0 => { device.read(access, &mut env); }
                1 => device.write(access, value & access.open_bus(), &mut env),
                2 => device.config_write(register, value as u32, u32::MAX, &mut env),
                3 => device.wake(value as u8, &mut env),
                _ => { device.config_read(register, &mut env); }
            }
            for share in 0..SHARES as u64 {
                assert!(env.inl(&mut device, OWN_SHARES + share * SHARE_STEP + SHARE_STATE) < 3);
            }
        }
    }
}
