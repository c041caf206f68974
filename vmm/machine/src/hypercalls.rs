//! Parador's own hypercalls: messages over channels, for guests without a driver
//! (`docs/spec/channel.md`).

use proto::channel::{Message, SendError, hypercall::*};
use vmm_bus::{BackendRef, ChannelBackend};
use vmm_x86::{Gpr, X86Vcpu};

use crate::functions::Functions;

/// Registers of the first words of a payload.
const PAYLOAD: [Gpr; WORDS] = [Gpr::Rdx, Gpr::Rsi, Gpr::Rdi, Gpr::R8];

/// Handles a hypercall of VM `id`: returns the result for `rax`; `None` if the number is unknown.
pub fn serve<V: X86Vcpu>(vcpu: &mut V, id: u32, functions: &impl Functions) -> Option<u64> {
    let act: fn(&mut V, &mut dyn ChannelBackend) -> u64 = match vcpu.gpr(Gpr::Rax) {
        ID => return Some(id.into()),
        DOORBELL => |_, channel| if channel.notify() { DONE } else { NO_CHANNEL },
        SEND => send,
        RECEIVE => receive,
        _ => return None,
    };
    let mut result = NO_CHANNEL;
    if let Some(slot) = functions.channel(vcpu.gpr(Gpr::Rbx)) {
        functions.with(slot, &mut |_, backend| {
            if let BackendRef::Channel(channel) = backend.get() {
                result = act(vcpu, channel);
            }
        });
    }
    Some(result)
}

fn send<V: X86Vcpu>(vcpu: &mut V, channel: &mut dyn ChannelBackend) -> u64 {
    let tag = vcpu.gpr(Gpr::Rcx) as u32;
    let mut message = Message { tag, length: size_of::<[u64; WORDS]>() as u32, payload: [0; _] };
    for (word, register) in message.payload.iter_mut().zip(PAYLOAD) {
        *word = vcpu.gpr(register);
    }
    match channel.send(&message) {
        Ok(()) => DONE,
        Err(SendError::Full) => NOT_NOW,
        Err(SendError::Broken | SendError::TooLong) => BROKEN,
    }
}

fn receive<V: X86Vcpu>(vcpu: &mut V, channel: &mut dyn ChannelBackend) -> u64 {
    match channel.receive() {
        Ok(Some(message)) => {
            vcpu.set_gpr(Gpr::Rcx, message.tag.into());
            for (word, register) in message.payload.into_iter().zip(PAYLOAD) {
                vcpu.set_gpr(register, word);
            }
            DONE
        }
        Ok(None) => NOT_NOW,
        Err(_) => BROKEN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Model, Slots};
    use vmm_bus::DeviceBackend;
    use vmm_bus::backend::ChannelInfo;
    use vmm_bus::testing::ScriptPeer;
    use vmm_x86::testing::ScriptedVcpu;

    struct End(ScriptPeer);

    impl DeviceBackend for End {
        fn get(&mut self) -> BackendRef<'_> {
            BackendRef::Channel(&mut self.0)
        }
    }

    #[test]
    fn messages_by_registers() {
        let mut slots = Slots::<_, 2>::new();
        let info = ChannelInfo {
            number: 1,
            side: 0,
            own_id: 9,
            peer_id: 2,
            size: 1 << 14,
            doorbell: true,
            own_name: [0; _],
            peer_name: [0; _],
        };
        assert!(slots.add(Model::Channel(info), End(ScriptPeer::default())).is_ok());
        let mut vcpu = ScriptedVcpu::default();
        let call = |vcpu: &mut ScriptedVcpu, number, channel| {
            vcpu.set_gpr(Gpr::Rax, number);
            vcpu.set_gpr(Gpr::Rbx, channel);
            serve(vcpu, 9, &slots)
        };
        assert_eq!(call(&mut vcpu, ID, 7), Some(9));
        assert_eq!(call(&mut vcpu, RECEIVE, 1), Some(NOT_NOW));
        vcpu.set_gpr(Gpr::Rcx, 0xffff_ffff_0000_0005);
        for (value, register) in PAYLOAD.into_iter().enumerate() {
            vcpu.set_gpr(register, value as u64 + 1);
        }
        assert_eq!(call(&mut vcpu, SEND, 0), Some(NO_CHANNEL));
        assert_eq!(call(&mut vcpu, SEND, u64::MAX), Some(NO_CHANNEL));
        assert_eq!(call(&mut vcpu, SEND, 1), Some(DONE));
        for register in PAYLOAD {
            vcpu.set_gpr(register, 0);
        }
        assert_eq!(call(&mut vcpu, RECEIVE, 1), Some(DONE));
        assert_eq!(PAYLOAD.map(|register| vcpu.gpr(register)), [1, 2, 3, 4]);
        assert_eq!(vcpu.gpr(Gpr::Rcx), 5, "32 bits of it");
        assert_eq!(call(&mut vcpu, DOORBELL, 1), Some(DONE));
        assert_eq!(call(&mut vcpu, DOORBELL, 2), Some(NO_CHANNEL));
        assert_eq!(call(&mut vcpu, RECEIVE + 1, 1), None);
    }
}
