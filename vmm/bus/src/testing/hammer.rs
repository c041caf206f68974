//! Random operations on a device model, for tests: no sequence of accesses, timer calls and pin
//! changes makes a model panic or wake without end.

use std::vec;
use std::vec::Vec;

use proptest::prelude::*;

use super::Script;
use crate::{Access, Device, Nanos, WAKE_INPUT};

/// One operation of a guest or a host.
#[derive(Clone, Copy, Debug)]
pub enum HammerStep {
    /// A read of a register.
    Read(Access),
    /// A write of a register.
    Write(Access, u64),
    /// A call for a timer.
    Wake(u8),
    /// Time passes, and due timers are served.
    Advance(Nanos),
    /// Time passes unnoticed.
    Jump(Nanos),
    /// Input for the serial line.
    Input(u8),
    /// Room for output.
    Room(usize),
    /// A reset.
    Reset,
    /// For the chips with methods: a call chosen by the numbers.
    Call(u8, u64),
}

/// Offsets: mostly existing registers, sometimes any.
fn offset() -> impl Strategy<Value = u64> {
    prop_oneof![
        8 => 0_u64..16,
        4 => (0_u64..0x40).prop_map(|r| r * 16),
        1 => any::<u64>(),
    ]
}

fn access() -> impl Strategy<Value = Access> {
    let size = prop_oneof![4 => prop::sample::select(vec![1_u8, 2, 4, 8]), 1 => any::<u8>()];
    (offset(), size).prop_map(|(offset, size)| Access::new(offset, size))
}

fn value() -> impl Strategy<Value = u64> {
    prop_oneof![3 => 0_u64..256, 2 => any::<u32>().prop_map(u64::from), 1 => any::<u64>()]
}

fn step() -> impl Strategy<Value = HammerStep> {
    prop_oneof![
        4 => access().prop_map(HammerStep::Read),
        10 => (access(), value()).prop_map(|(a, v)| HammerStep::Write(a, v)),
        1 => prop::sample::select(vec![0_u8, 1, WAKE_INPUT]).prop_map(HammerStep::Wake),
        2 => (0_u64..2_000_000).prop_map(HammerStep::Advance),
        1 => any::<u64>().prop_map(HammerStep::Jump),
        1 => any::<u8>().prop_map(HammerStep::Input),
        1 => (0_usize..20).prop_map(HammerStep::Room),
        1 => Just(HammerStep::Reset),
        4 => (any::<u8>(), value()).prop_map(|(w, v)| HammerStep::Call(w, v)),
    ]
}

/// Up to 300 random operations.
pub fn steps() -> impl Strategy<Value = Vec<HammerStep>> {
    prop::collection::vec(step(), 1..300)
}

/// Applies the operations to a device; `call` stands for the methods that are not of [`Device`].
pub fn hammer<D: Device>(
    mut device: D,
    steps: &[HammerStep],
    mut call: impl FnMut(&mut D, u8, u64, &mut Script),
) {
    let mut env = Script::new();
    for step in steps {
        match *step {
            HammerStep::Read(access) => {
                device.read(access, &mut env);
            }
            HammerStep::Write(access, value) => device.write(access, value, &mut env),
            HammerStep::Wake(timer) => device.wake(timer, &mut env),
            HammerStep::Advance(span) => env.advance(&mut device, span),
            HammerStep::Jump(span) => env.now = env.now.saturating_add(span >> 4),
            HammerStep::Input(byte) => env.send(&mut device, &[byte; 3]),
            HammerStep::Room(room) => env.stream.room = Some(room),
            HammerStep::Reset => device.reset(&mut env),
            HammerStep::Call(what, value) => call(&mut device, what, value, &mut env),
        }
    }
}
