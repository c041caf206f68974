//! Files of a built kernel.

/// File names in a kernel's folder: kernel with symbols and relocations, kernel for PC boot
/// loaders, symbol table, configuration, modules as below `/`, and the files that external modules
/// are built against.
pub const VMLINUX: &str = "vmlinux";
pub const BZIMAGE: &str = "bzImage";
pub const SYMBOLS: &str = "System.map";
pub const CONFIGURED: &str = "config";
pub const MODULES: &str = "modules";
pub const HEADERS_FOLDER: &str = "headers";
/// CPU time of the build, which is not reproducible.
pub const COST: &str = "cost.json";
