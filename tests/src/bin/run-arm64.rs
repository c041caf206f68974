//! `make run ARCH=arm64`: Debian's Linux for AArch64 as a guest on an emulated machine, with a
//! shell on this terminal. The artifacts are built before.

use anyhow::Result;

/// vCPUs of the guest.
const CPUS: u32 = 2;

fn main() -> Result<()> {
    parador_tests::arm64::run_shell(CPUS)
}
