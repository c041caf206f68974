//! Kernels of Debian for other processors than the host's, with a RAM disk of a static busybox.
//! Both come from Debian's archive by apt with folders of its own: the host's apt stays as it is.

use crate::kvm::succeed;
use crate::system::target;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use tempfile::TempDir;

/// Fetches and unpacks both packages. `$0`: Debian's architecture; `$1`: package that depends on
/// the kernel's.
const FETCH: &str = r#"set -e
mkdir -p lists/partial cache/archives/partial
echo 'deb http://deb.debian.org/debian bookworm main' >list
architecture=$0
apt() {
    program=$1; shift
    "$program" -q -o APT::Architecture="$architecture" -o APT::Architectures="$architecture" \
        -o Dir::State::Lists="$PWD/lists" -o Dir::Cache="$PWD/cache" -o Dir::Etc::SourceParts=/dev/null \
        -o Dir::Etc::SourceList="$PWD/list" "$@"
}
apt apt-get update
kernel=$(apt apt-cache depends "$1" | sed -n 's/ *Depends: \(linux-image-\)/\1/p' | head -n 1)
apt apt-get download "$kernel" busybox-static
for package in *.deb; do dpkg-deb --extract "$package" all; done
cp all/boot/vmlinuz-* kernel
mkdir -p tree/bin tree/dev
cp all/bin/busybox tree/bin
"#;

/// Returns the folder with the kernel of a package, in the file `name`, and the RAM disk `disk`
/// with the first process `init`; made once. `prepare` returns the kernel's bytes, given the
/// package's file.
pub fn fetched(
    (architecture, package): (&str, &str),
    init: &str,
    name: &str,
    prepare: impl FnOnce(&Path) -> Result<Vec<u8>>,
) -> Result<PathBuf> {
    let cache = target().join("cache");
    fs::create_dir_all(&cache).with_context(|| format!("cannot make {}", cache.display()))?;
    let kept = cache.join(package);
    if kept.is_dir() {
        return Ok(kept);
    }
    let folder = TempDir::new_in(&cache).context("cannot make a folder")?;
    let path = folder.path();
    let mut fetch = Command::new("sh");
    succeed(fetch.args(["-c", FETCH, architecture, package]).current_dir(path))?;
    let done = path.join("done");
    fs::create_dir(&done)?;
    fs::write(done.join(name), prepare(&path.join("kernel"))?)?;
    let first = path.join("tree/init");
    fs::write(&first, init)?;
    fs::set_permissions(&first, fs::Permissions::from_mode(0o755))?;
    let pack = "find . | cpio -o -H newc --quiet >../done/disk";
    succeed(Command::new("sh").args(["-c", pack]).current_dir(path.join("tree")))?;
    let moved = fs::rename(&done, &kept);
    // Another test may have made it meanwhile.
    ensure!(kept.is_dir(), "cannot keep the kernel: {moved:?}");
    Ok(kept)
}
