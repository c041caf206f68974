//! Random numbers for the guest's kernel, by `HVC` or `SMC` (DEN 0098): those of the host
//! ([`Arm64Vcpu::random`]). Without a source there are no such functions.

use hw_arm64::psci::{self, trng};

use crate::vcpu::Arm64Vcpu;

/// UUID of the source, which names this implementation: `d7e2a1b4-5c38-4f60-9a1d-3b8f62c04e75`.
const UUID: [u64; 4] = [0xd7e2_a1b4, 0x5c38_4f60, 0x9a1d_3b8f, 0x62c0_4e75];
const FUNCTIONS: [u64; 5] =
    [trng::VERSION, trng::FEATURES, trng::GET_UUID, trng::RND32, trng::RND64];
/// Registers with random bits.
const REGISTERS: usize = 3;

/// Serves a function of this interface. Returns its results, in `x0` and the registers after it;
/// `None`: it is none of them, or there is no source.
pub fn call(function: u64, argument: u64, vcpu: &mut impl Arm64Vcpu) -> Option<[u64; 4]> {
    if !FUNCTIONS.contains(&function) || !vcpu.random(&mut []) {
        return None;
    }
    Some(match function {
        trng::VERSION => result(trng::VERSION_1_0 as i64),
        trng::FEATURES if FUNCTIONS.contains(&argument) => result(psci::SUCCESS),
        trng::FEATURES => result(psci::NOT_SUPPORTED),
        trng::GET_UUID => UUID,
        trng::RND32 => random(argument, u32::BITS, vcpu),
        _ => random(argument, u64::BITS, vcpu),
    })
}

/// Results without random bits.
fn result(status: i64) -> [u64; 4] {
    [status as u64, 0, 0, 0]
}

/// Results with `bits` random bits in registers of which `width` bits are used.
fn random(bits: u64, width: u32, vcpu: &mut impl Arm64Vcpu) -> [u64; 4] {
    if !(1..=trng::max_bits(width).into()).contains(&bits) {
        return result(psci::INVALID_PARAMETERS);
    }
    let mut bytes = [[0; 8]; REGISTERS];
    if !vcpu.random(bytes.as_flattened_mut()) {
        return result(trng::NO_ENTROPY);
    }
    let mut results = result(psci::SUCCESS);
    let mut left = bits as u32;
    // The lowest bits are in the last register.
    for (register, bytes) in results[1..].iter_mut().rev().zip(bytes) {
        let count = left.min(width);
        *register = u64::from_le_bytes(bytes) & 1_u64.unbounded_shl(count).wrapping_sub(1);
        left -= count;
    }
    results
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::ScriptVcpu;

    const OK: u64 = psci::SUCCESS as u64;

    fn vcpu() -> ScriptVcpu {
        ScriptVcpu::with_random(0xff)
    }

    #[test]
    fn a_source_has_a_version_and_functions() {
        let call = |function, argument| call(function, argument, &mut vcpu());
        assert_eq!(call(trng::VERSION, 0), Some([0x1_0000, 0, 0, 0]));
        for function in 0x8400_0050..=0x8400_0053 {
            assert_eq!(call(trng::FEATURES, function), Some([OK, 0, 0, 0]));
        }
        assert_eq!(call(trng::FEATURES, trng::RND64), Some([OK, 0, 0, 0]));
        let missing = Some([psci::NOT_SUPPORTED as u64, 0, 0, 0]);
        assert_eq!(call(trng::FEATURES, 0x8400_0054), missing);
        let uuid = call(trng::GET_UUID, 0).unwrap();
        assert!(uuid.iter().all(|&word| word < 0xffff_ffff), "a failure would have all bits set");
        assert_eq!(call(psci::VERSION, 0), None);
    }

    #[test]
    fn as_many_bits_as_asked_for_are_random() {
        let call = |function, bits| call(function, bits, &mut vcpu()).unwrap();
        assert_eq!(call(trng::RND64, 1), [OK, 0, 0, 1]);
        assert_eq!(call(trng::RND64, 64), [OK, 0, 0, u64::MAX]);
        assert_eq!(call(trng::RND64, 70), [OK, 0, 0x3f, u64::MAX]);
        assert_eq!(call(trng::RND64, 192), [OK, u64::MAX, u64::MAX, u64::MAX]);
        assert_eq!(call(trng::RND32, 33), [OK, 0, 1, 0xffff_ffff]);
        assert_eq!(call(trng::RND32, 96), [OK, 0xffff_ffff, 0xffff_ffff, 0xffff_ffff]);
        let wrong = [psci::INVALID_PARAMETERS as u64, 0, 0, 0];
        for (function, bits) in [
            (trng::RND64, 0),
            (trng::RND64, 193),
            (trng::RND64, u64::MAX),
            (trng::RND32, 0),
            (trng::RND32, 97),
        ] {
            assert_eq!(call(function, bits), wrong);
        }
    }

    #[test]
    fn without_a_source_there_are_no_functions() {
        for function in FUNCTIONS {
            assert_eq!(call(function, 64, &mut ScriptVcpu::default()), None);
        }
        let mut vcpu = vcpu();
        vcpu.fails = true;
        let none = [trng::NO_ENTROPY as u64, 0, 0, 0];
        assert_eq!(call(trng::RND64, 64, &mut vcpu), Some(none), "it has failed meanwhile");
    }
}
