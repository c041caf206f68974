//! Values of [`Start::console`](super::Start::console): kind of the virtio console.

/// None.
pub const NONE: u64 = 0;
/// One port. The stream is that of the port.
pub const SINGLE: u64 = 1;
/// Several named ports. The stream consists of [`frames`](crate::ports).
pub const PORTS: u64 = 2;
