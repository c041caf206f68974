//! `parador --version`.

use hosted_command::release::RELEASE;
use hosted_kbuild::kernel;
use std::ffi::OsString;

/// Commit that `parador` was built from, set by `cargo xtask build` and `package`.
const COMMIT: &str = match option_env!("PARADOR_COMMIT") {
    Some(commit) => commit,
    None => "unknown",
};

/// Returns whether the arguments ask for all of the version text: `--version`, not `-V`.
pub fn is_long(mut arguments: impl Iterator<Item = OsString>) -> bool {
    arguments.any(|argument| argument == "--version")
}

/// Returns release, commit, default kernel and back ends, one per line.
pub fn long() -> String {
    let kernel = kernel::describe_default();
    let kernel = kernel.as_deref().unwrap_or("none; `parador kernel build` builds one");
    format!("parador {RELEASE}\ncommit {COMMIT}\nkernel {kernel}\nback ends kvm, process\n")
}
