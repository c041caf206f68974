//! Debian's 32-bit kernel with PAE in a VM without nested paging.
//!
//! Its bzImage has no 64-bit entry, but the kernel in it boots by PVH.

use crate::foreign::fetched;
use crate::scenario::{Backend, Scenario};
use crate::systems::{CONSOLE, SLOW_HOST, base};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use std::process::Command;

/// Depends on Debian's current 32-bit kernel.
const PACKAGE: &str = "linux-image-686-pae";
/// First process of the guest.
const INIT: &str = "#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t devtmpfs dev /dev
exec >/dev/ttyS0 2>&1
uname -m
n=0; for i in $(seq 40); do n=$((n + $(echo 1))); done; echo forked $n
poweroff -f
";
/// Offsets in a bzImage (`Documentation/arch/x86/boot.rst` in Linux).
const SETUP_SECTORS: usize = 0x1f1;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;
/// Length of the uncompressed kernel, which follows the compressed one.
const SIZE_BYTES: usize = 4;

/// Boots it on the top rung, and it forks.
pub fn run() -> Result<()> {
    let folder = fetched(("i386", PACKAGE), INIT, "vmlinux", unpacked)?;
    let file = |name| folder.join(name).display().to_string();
    let system = format!(
        "\n[[vm]]\nname = \"linux\"\nmemory = \"256M\"\nnpt = false\nkernel = \"{}\"\ninitrd = \"{}\"\n\
         cmdline = \"console=ttyS0 {SLOW_HOST} panic=-1\"\n{CONSOLE}\n",
        file("vmlinux"),
        file("disk"),
    );
    let scenario = Scenario {
        texts: vec!["i686".into(), "forked 40".into(), "vm linux: vtlb: fills=".into()],
        never: &["Oops", "BUG: ", "WARNING: CPU", "general protection"],
        limit: 240,
        ..base("linux-686-pae", system)
    };
    scenario.run(Backend::NativeX86Vtlb, 1)
}

/// Returns the uncompressed kernel of a bzImage.
fn unpacked(image: &Path) -> Result<Vec<u8>> {
    let compressed = image.with_extension("xz");
    fs::write(&compressed, payload(image)?)?;
    let output = Command::new("xz").arg("-dc").arg(&compressed).output()?;
    ensure!(output.status.success(), "xz has failed: {}", output.status);
    Ok(output.stdout)
}

/// Returns the compressed kernel in a bzImage.
fn payload(image: &Path) -> Result<Vec<u8>> {
    let bytes = fs::read(image).with_context(|| format!("cannot read {}", image.display()))?;
    let word = |at: usize| {
        let bytes = bytes.get(at..at + 4)?;
        Some(u32::from_le_bytes(bytes.try_into().ok()?) as usize)
    };
    let sectors = *bytes.get(SETUP_SECTORS).context("a short bzImage")?;
    let (offset, length) =
        word(PAYLOAD_OFFSET).zip(word(PAYLOAD_LENGTH)).context("a short bzImage")?;
    ensure!(length > SIZE_BYTES, "the bzImage has a payload of {length} bytes");
    let start = (usize::from(sectors) + 1) * 512 + offset;
    let found = bytes.get(start..start + length - SIZE_BYTES);
    Ok(found.context("the payload exceeds the bzImage")?.to_vec())
}
