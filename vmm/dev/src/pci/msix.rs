//! MSI-X: interrupts of a PCI function as messages.
//!
//! State: control bits, the table of vectors, pending bits of masked vectors.
//! Features: up to [`MAX_VECTORS`] vectors, masks of a vector and of all, the pending bit array.
//! Missing: remapped messages. The board drops a message to an address that is not of its interrupt
//! controller.
//! Documentation: PCI Local Bus 3.0, section 6.8.2.

use vmm_bus::{Access, Env, Msi};

/// Registers.
pub mod spec {
    /// Capability number.
    pub const CAPABILITY: u8 = 0x11;
    /// Message control, in the capability's first word: MSI-X is enabled.
    pub const ENABLE: u32 = 1 << 31;
    /// Message control: every vector is masked.
    pub const MASK_ALL: u32 = 1 << 30;
    /// Bytes of a vector: address (64 bits), data (32), control (32).
    pub const ENTRY: u64 = 16;
    /// Vector control: masked.
    pub const MASKED: u32 = 1;
}
use spec::*;

/// Maximum vectors of a function.
pub const MAX_VECTORS: usize = 19;

/// A vector.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Vector {
    /// Address (low, high), data, control.
    words: [u32; 4],
}

impl Vector {
    const RESET: Self = Self { words: [0, 0, 0, MASKED] };

    fn masked(self) -> bool {
        self.words[3] & MASKED != 0
    }

    fn send(self, env: &mut dyn Env) {
        let [low, high, data, _] = self.words;
        env.msi(Msi { address: u64::from(high) << 32 | u64::from(low), data });
    }
}

/// The vectors of a function.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Msix {
    count: u8,
    enabled: bool,
    mask_all: bool,
    vectors: [Vector; MAX_VECTORS],
    pending: u32,
}

impl Msix {
    /// Creates `count` vectors, at least 1, at most [`MAX_VECTORS`], all masked.
    pub fn new(count: usize) -> Self {
        Self {
            count: count.clamp(1, MAX_VECTORS) as u8,
            enabled: false,
            mask_all: false,
            vectors: [Vector::RESET; MAX_VECTORS],
            pending: 0,
        }
    }

    /// Number of vectors.
    pub fn count(&self) -> u8 {
        self.count
    }

    /// True if MSI-X is enabled.
    pub fn enabled(&self) -> bool {
        self.enabled
    }

    /// Message control, in the upper half of the capability's first word.
    pub fn control(&self) -> u32 {
        let bit = |set, bit| if set { bit } else { 0 };
        u32::from(self.count - 1) << 16 | bit(self.enabled, ENABLE) | bit(self.mask_all, MASK_ALL)
    }

    /// Writes the capability's first word.
    pub fn set_control(&mut self, value: u32, env: &mut dyn Env) {
        self.enabled = value & ENABLE != 0;
        self.mask_all = value & MASK_ALL != 0;
        self.send_pending(env);
    }

    /// Reads the table.
    pub fn read_table(&self, access: Access) -> u64 {
        let (number, word) = locate(access.offset);
        self.existing().get(number).map_or(0, |vector| vector.words[word].into())
    }

    /// Writes the table, 32 bits at a time.
    pub fn write_table(&mut self, access: Access, value: u64, env: &mut dyn Env) {
        let (number, word) = locate(access.offset);
        if number < self.existing().len() && access.size == 4 {
            self.vectors[number].words[word] = value as u32;
            self.send_pending(env);
        }
    }

    /// Pending bits, one for each vector.
    pub fn pending(&self) -> u64 {
        self.pending.into()
    }

    /// Sends a vector's message, or sets its pending bit while it is masked. Ignores absent
    /// vectors.
    #[inline]
    pub fn send(&mut self, vector: u16, env: &mut dyn Env) {
        if !self.enabled {
            return;
        }
        match self.existing().get(usize::from(vector)) {
            Some(entry) if self.mask_all || entry.masked() => self.pending |= 1 << vector,
            Some(entry) => entry.send(env),
            None => {}
        }
    }

    /// Restores the power-on state.
    pub fn reset(&mut self) {
        *self = Self::new(self.count.into());
    }

    fn existing(&self) -> &[Vector] {
        &self.vectors[..usize::from(self.count).min(MAX_VECTORS)]
    }

    fn send_pending(&mut self, env: &mut dyn Env) {
        if !self.enabled || self.mask_all || self.pending == 0 {
            return;
        }
        for (number, vector) in self.vectors.iter().enumerate() {
            let bit = 1 << number;
            if self.pending & bit == 0 || vector.masked() {
                continue;
            }
            self.pending &= !bit;
            vector.send(env);
        }
    }
}

/// Vector and word of an offset in the table.
fn locate(offset: u64) -> (usize, usize) {
    let number = usize::try_from(offset / ENTRY).unwrap_or(usize::MAX);
    (number, (offset % ENTRY / 4) as usize)
}
