//! The contract between a device model and its host, and dispatch of accesses to devices.
//!
//! A device model is a struct of registers. It holds no lock, clock, thread, file or callback: all
//! effects go through [`Env`], so the order of inputs determines the outputs. Tests are scripts of
//! accesses, and a snapshot is the struct itself.
#![cfg_attr(not(test), no_std)]
#![forbid(unsafe_code)]

#[cfg(any(test, feature = "testing"))]
extern crate std;

pub mod backend;
pub mod frames;
mod map;
pub mod requests;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
mod ticks;

pub use backend::{
    BackendRef, BalloonBackend, Block, ByteStream, ChannelBackend, Data, DeviceBackend,
    EntropySource, Messages, Net, Packets,
};
pub use map::{Map, MapError, Piece, Region};
pub use ticks::Ticks;
use vmm_mem::GuestMemory;

/// A time in nanoseconds of the VM's monotonic clock.
pub type Nanos = u64;
/// A deadline that never passes.
pub const NEVER: Nanos = u64::MAX;

/// One access to a register of a device, already split so that `offset..offset + size` is in the
/// device's region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Access {
    /// First byte, from the start of the device's region.
    pub offset: u64,
    /// 1, 2, 4 or 8 bytes.
    pub size: u8,
}

impl Access {
    /// An access of `size` bytes at `offset`.
    pub const fn new(offset: u64, size: u8) -> Self {
        Self { offset, size }
    }

    /// Value of a read without a responding device: all ones of its size.
    pub const fn open_bus(self) -> u64 {
        if self.size >= 8 { u64::MAX } else { (1 << (8 * self.size)) - 1 }
    }
}

/// Event of a device that concerns the whole VM.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MachineEvent {
    /// Soft power-off (ACPI S5).
    PowerOff,
    /// System reset (ACPI reset register, keyboard controller, port CF9).
    Reset,
    /// The guest kernel has panicked (pvpanic event 0).
    GuestPanic,
    /// The guest kernel has crashed and runs its crash kernel (pvpanic event 1). The VM continues.
    GuestCrashLoaded,
    /// The guest ends the VM with an exit code of its own, 0 to 63 (debug exit port).
    ExitCode(u8),
}

/// A message-signalled interrupt: a write of `data` to `address`. The interrupt controller of the
/// guest architecture decodes it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Msi {
    /// Guest-physical address.
    pub address: u64,
    /// Data.
    pub data: u32,
}

/// Environment of a device model: all its effects and inputs.
pub trait Env {
    /// Current VM time.
    fn now(&self) -> Nanos;
    /// Sets an output line of the device. Lines are numbered per device (see the head of its
    /// module); the board connects them.
    fn set_line(&mut self, line: u8, level: bool);
    /// Arms the device's timer `timer` (numbered per device) to call [`Device::wake`] at
    /// `deadline`, or disarms it with [`NEVER`]. A later call replaces an earlier one. A deadline
    /// in the past wakes the device as soon as the host can, after the current call, so a device
    /// need not compare it with [`Env::now`].
    fn arm(&mut self, timer: u8, deadline: Nanos);
    /// Guest memory.
    fn memory(&self) -> &GuestMemory;
    /// Back end of the device, and guest memory. Devices use the accessors of `dyn Env`, such as
    /// [`block`](#method.block).
    fn backend(&mut self) -> (BackendRef<'_>, &GuestMemory);
    /// Sends a message-signalled interrupt (of a PCI function or an interrupt controller).
    fn msi(&mut self, msi: Msi);
    /// Reports an event that concerns the whole VM.
    fn machine(&mut self, event: MachineEvent);
    /// Counts a use of a feature that the model lacks, and logs it once per device and `what`.
    fn missing(&mut self, what: &'static str, value: u64);
}

/// A device model.
///
/// Life cycle: a device is created in its reset state; [`Device::reset`] restores it. Nothing
/// happens between calls: a paused VM does not call its devices, and deadlines are in VM time,
/// which stands still meanwhile.
pub trait Device {
    /// Reads a register: its value, zero-extended; bits beyond the access size are ignored.
    fn read(&mut self, access: Access, env: &mut dyn Env) -> u64;
    /// Writes a register.
    fn write(&mut self, access: Access, value: u64, env: &mut dyn Env);
    /// Handles an event that the device waits for: timer `timer` has reached its deadline, or (for
    /// [`WAKE_INPUT`]) input or room for output is available, a request has completed or the peer
    /// has rung the doorbell, or (for [`WAKE_CHANGE`]) the properties of the back end have changed.
    fn wake(&mut self, timer: u8, env: &mut dyn Env);
    /// Restores the state after power-on.
    fn reset(&mut self, env: &mut dyn Env);
}

/// Pseudo timer of [`Device::wake`]: the back end has input or room for output.
pub const WAKE_INPUT: u8 = 0xff;
/// Pseudo timer of [`Device::wake`]: the properties of the back end have changed.
pub const WAKE_CHANGE: u8 = 0xfe;
