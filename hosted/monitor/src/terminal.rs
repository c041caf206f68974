//! Modes of the user's terminal while a VM is connected to it.

use rustix::stdio::stdin;
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcsetattr};
use std::panic;
use std::sync::{Once, OnceLock};

/// Modes before the first change, for the panic hook: with `panic = "abort"` nothing is dropped.
static FORMER: OnceLock<Termios> = OnceLock::new();
static HOOK: Once = Once::new();

/// Standard input in raw mode: every key goes to the VM. Dropping it restores the modes.
pub struct Raw {
    former: Termios,
}

impl Raw {
    /// Enters raw mode; `None` if standard input is not a terminal or its modes cannot be changed.
    pub fn enter() -> Option<Self> {
        if !isatty(stdin()) {
            return None;
        }
        let former = tcgetattr(stdin()).ok()?;
        let mut raw = former.clone();
        raw.make_raw();
        FORMER.get_or_init(|| former.clone());
        HOOK.call_once(|| {
            let next = panic::take_hook();
            panic::set_hook(Box::new(move |info| {
                if let Some(former) = FORMER.get() {
                    restore(former);
                }
                next(info);
            }));
        });
        tcsetattr(stdin(), OptionalActions::Now, &raw).ok()?;
        Some(Self { former })
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        restore(&self.former);
    }
}

fn restore(modes: &Termios) {
    // A terminal that has hung up needs no restoring.
    let _ = tcsetattr(stdin(), OptionalActions::Now, modes);
}

/// Bytes of keys that wait for the guest. The terminal is read even if the guest does not read,
/// because of the keys for `parador`: further ones for the guest are dropped.
pub const MAX_KEYS: usize = 1 << 20;

const PREFIX: u8 = 0x01;

/// Detects Ctrl-A X, which ends the VM, among the keys.
#[derive(Default)]
pub struct Keys {
    after_prefix: bool,
}

impl Keys {
    /// Appends the keys for the VM to `output`, up to [`MAX_KEYS`]. Returns `true` if the user ends
    /// the VM.
    ///
    /// Ctrl-A Ctrl-A and Ctrl-A A send one Ctrl-A; before any other key, Ctrl-A passes with that
    /// key.
    pub fn pass(&mut self, input: &[u8], output: &mut Vec<u8>) -> bool {
        let is_over = input.iter().any(|&key| self.pass_key(key, output));
        output.truncate(MAX_KEYS);
        is_over
    }

    fn pass_key(&mut self, key: u8, output: &mut Vec<u8>) -> bool {
        match (std::mem::take(&mut self.after_prefix), key) {
            (false, PREFIX) => self.after_prefix = true,
            (false, _) => output.push(key),
            (true, b'x' | b'X') => return true,
            (true, PREFIX | b'a' | b'A') => output.push(PREFIX),
            (true, _) => output.extend([PREFIX, key]),
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pass(inputs: &[&[u8]]) -> (Vec<u8>, bool) {
        let (mut keys, mut output) = (Keys::default(), Vec::new());
        let ended = inputs.iter().any(|input| keys.pass(input, &mut output));
        (output, ended)
    }

    #[test]
    fn keys() {
        assert_eq!(pass(&[b"ls\x03"]), (b"ls\x03".to_vec(), false));
        assert_eq!(pass(&[b"a\x01xb"]), (b"a".to_vec(), true));
        assert_eq!(pass(&[b"\x01", b"X"]), (Vec::new(), true));
        assert_eq!(pass(&[b"\x01\x01x"]), (b"\x01x".to_vec(), false));
        assert_eq!(pass(&[b"\x01a"]), (b"\x01".to_vec(), false));
        assert_eq!(pass(&[b"\x01e"]), (b"\x01e".to_vec(), false));
    }
}
