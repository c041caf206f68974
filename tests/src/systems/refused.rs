//! Descriptions that `parador` refuses.

use crate::system::parador;
use anyhow::{Result, bail};

/// Descriptions that `parador system build` must refuse: name, description, exit code, text of the
/// message.
pub const REFUSALS: &[(&str, &str, i32, &str)] = &[
    ("unknown-key", "[system]\nboard = \"qemu-q35\"\nmemroy = \"1G\"\n", 65, "memroy"),
    (
        "missing-kernel",
        "[system]\nboard = \"qemu-q35\"\n[[vm]]\nname = \"a\"\nmemory = \"64M\"\nkernel = \"nowhere\"\n",
        66,
        "nowhere",
    ),
    (
        "truncated-kernel",
        "[system]\nboard = \"qemu-q35\"\n[[vm]]\nname = \"a\"\nmemory = \"64M\"\nkernel = \"truncated\"\n",
        65,
        "truncated",
    ),
    (
        "32-bit-kernel-on-a-pc",
        "[system]\nboard = \"qemu-q35\"\n[[vm]]\nname = \"a\"\nmemory = \"64M\"\nkernel = \"debian-armmp\"\n",
        65,
        "machines of AArch64 alone",
    ),
    (
        "too-little-guest-memory",
        "[system]\nboard = \"qemu-q35\"\n[[vm]]\nname = \"a\"\nmemory = \"8M\"\nkernel = \"debian\"\n",
        65,
        "memory",
    ),
];

/// Checks that `parador` refuses a description with this exit code and message.
pub fn refusal(description: &str, code: i32, message: &str) -> Result<()> {
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("system.toml"), description)?;
    // A boot sector that says it is a Linux kernel of 64 KiB, and nothing after it.
    let mut kernel = vec![0; 1024];
    kernel[0x1f1] = 1;
    kernel[0x1f4..0x1f6].copy_from_slice(&0x1000_u16.to_le_bytes());
    kernel[0x1fe..0x206].copy_from_slice(b"\x55\xaa\xeb\x66HdrS");
    kernel[0x206..0x208].copy_from_slice(&0x020f_u16.to_le_bytes());
    kernel[0x236] = 1;
    std::fs::write(folder.path().join("truncated"), kernel)?;

    let arguments = ["system", "build", "system.toml", "--output", "image"];
    let output = parador(folder.path()).args(arguments).output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    if output.status.code() != Some(code) {
        bail!("exit status {} instead of {code}\n{errors}", output.status);
    }
    if !errors.contains(message) || !errors.contains("system.toml") {
        bail!("the message does not name the file and `{message}`:\n{errors}");
    }
    let image = folder.path().join("image");
    if image.exists() && std::fs::read_dir(&image)?.next().is_some() {
        bail!("a half-made image is left");
    }
    Ok(())
}
