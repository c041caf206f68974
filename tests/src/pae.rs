//! Debian's 32-bit kernel with PAE in a VM without nested paging.
//!
//! Its bzImage has no 64-bit entry, but the kernel in it boots by PVH. Kernel and a 32-bit busybox
//! come from Debian's archive by apt with folders of its own, which leave the host's apt alone.

use crate::kvm::succeed;
use crate::scenario::{Backend, Scenario};
use crate::system::target;
use crate::systems::{CONSOLE, base};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Depends on Debian's current 32-bit kernel.
const PACKAGE: &str = "linux-image-686-pae";
/// Fetches and unpacks both packages. `$0`: [`PACKAGE`].
const FETCH: &str = r#"set -e
mkdir -p lists/partial cache/archives/partial
echo 'deb http://deb.debian.org/debian bookworm main' >list
apt() {
    program=$1; shift
    "$program" -q -o APT::Architecture=i386 -o APT::Architectures=i386 -o Dir::State::Lists="$PWD/lists" \
        -o Dir::Cache="$PWD/cache" -o Dir::Etc::SourceParts=/dev/null -o Dir::Etc::SourceList="$PWD/list" "$@"
}
apt apt-get update
kernel=$(apt apt-cache depends "$0" | sed -n 's/ *Depends: \(linux-image-\)/\1/p' | head -n 1)
apt apt-get download "$kernel" busybox-static
for package in *.deb; do dpkg-deb --extract "$package" all; done
cp all/boot/vmlinuz-* bzimage
mkdir -p tree/bin tree/dev
cp all/bin/busybox tree/bin
"#;
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
    let folder = fetched()?;
    let file = |name| folder.join(name).display().to_string();
    let system = format!(
        "\n[[vm]]\nname = \"linux\"\nmemory = \"256M\"\nnpt = false\nkernel = \"{}\"\ninitrd = \"{}\"\n\
         cmdline = \"console=ttyS0 panic=-1\"\n{CONSOLE}\n",
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

/// Returns the folder with `vmlinux` and the RAM disk `disk`, made once.
fn fetched() -> Result<PathBuf> {
    let cache = target().join("cache");
    fs::create_dir_all(&cache).with_context(|| format!("cannot make {}", cache.display()))?;
    let kept = cache.join(PACKAGE);
    if kept.is_dir() {
        return Ok(kept);
    }
    let folder = TempDir::new_in(&cache).context("cannot make a folder")?;
    let path = folder.path();
    succeed(Command::new("sh").args(["-c", FETCH, PACKAGE]).current_dir(path))?;
    let done = path.join("done");
    fs::create_dir(&done)?;
    fs::write(path.join("vmlinux.xz"), payload(&path.join("bzimage"))?)?;
    let unpack = "xz -dc vmlinux.xz >done/vmlinux";
    succeed(Command::new("sh").args(["-c", unpack]).current_dir(path))?;
    let init = path.join("tree/init");
    fs::write(&init, INIT)?;
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755))?;
    let pack = "find . | cpio -o -H newc --quiet >../done/disk";
    succeed(Command::new("sh").args(["-c", pack]).current_dir(path.join("tree")))?;
    fs::rename(&done, &kept).context("cannot keep the kernel")?;
    Ok(kept)
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
