//! Limits of images, which bound memory, disk space and time for input of strangers.

/// Longest document (index, manifest, configuration) in bytes.
pub const MAX_DOCUMENT: u64 = 4 << 20;
/// Most indexes inside of each other.
pub const MAX_NESTING: usize = 4;
/// Most entries of all indexes of an archive. Docker's official images have about twenty each.
pub const MAX_MANIFESTS: usize = 1000;
/// Most layers of an image, as in Docker.
pub const MAX_LAYERS: usize = 127;
/// Most entries of all layers, and of an archive of an image.
pub const MAX_ENTRIES: usize = 1 << 19;
/// Most bytes of names, link targets and extended attributes of all entries.
pub const MAX_TEXT: usize = 128 << 20;
/// Most bytes of all layers, without compression.
pub const MAX_BYTES: u64 = 64 << 30;
/// Longest path, and longest component of one, as in Linux.
pub const MAX_PATH: usize = 4095;
/// See [`MAX_PATH`].
pub const MAX_NAME: usize = 255;
/// Most components of a path.
pub const MAX_DEPTH: usize = 128;
/// Most bytes of the extended headers of an entry.
pub const MAX_HEADER: u64 = 256 << 10;
/// Longest file in bytes, which ustar states without extensions.
pub const MAX_FILE: u64 = 8 << 30;
/// Largest window of a zstd frame in bytes: that of level 22.
pub const MAX_WINDOW: u64 = 128 << 20;
