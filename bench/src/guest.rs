//! The measured guest: Debian's kernel with busybox and the benchmark as its RAM disk.

use anyhow::{Context, Result, bail};
use parador_tests::system::{target, workspace};
use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const BUSYBOX: &str = "/bin/busybox";
const APPLETS: &[&str] = &["sh", "mount", "echo", "uname", "cat", "poweroff"];

/// Where everything for the measurements is made.
pub fn folder() -> PathBuf {
    target().join("bench")
}

/// Compiles the benchmark and packs the RAM disk, the same bytes every time.
pub fn ram_disk() -> Result<PathBuf> {
    let source = workspace().join("bench/guest");
    let tree = folder().join("guest");
    if tree.exists() {
        fs::remove_dir_all(&tree).context("cannot empty the RAM disk's folder")?;
    }
    for name in ["bin", "dev", "proc", "sys", "tmp"] {
        fs::create_dir_all(tree.join(name)).context("cannot make the RAM disk's folders")?;
    }
    let compiled = Command::new("gcc")
        .args(["-O2", "-static", "-Wall", "-o"])
        .arg(tree.join("bin/vbench"))
        .arg(source.join("vbench.c"))
        .status()
        .context("cannot start gcc")?;
    if !compiled.success() {
        bail!("gcc cannot compile the benchmark");
    }
    fs::copy(BUSYBOX, tree.join("bin/busybox")).context("cannot copy busybox")?;
    for applet in APPLETS {
        symlink("busybox", tree.join("bin").join(applet)).context("cannot link busybox")?;
    }
    let init = tree.join("init");
    fs::copy(source.join("init"), &init).context("cannot copy init")?;
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755))?;
    let disk = folder().join("guest.cpio");
    pack(&tree, &disk)?;
    Ok(disk)
}

fn pack(tree: &Path, disk: &Path) -> Result<()> {
    let mut names = Vec::new();
    list(tree, Path::new(""), &mut names)?;
    names.sort();
    // Times of files would make every build another RAM disk.
    let dated = Command::new("touch")
        .args(["--no-dereference", "--date=@0"])
        .args(&names)
        .current_dir(tree)
        .status()
        .context("cannot start touch")?;
    if !dated.success() {
        bail!("touch cannot set the times of the RAM disk's files");
    }
    let mut child = Command::new("cpio")
        .args(["--null", "-o", "-H", "newc", "-R", "0:0", "--reproducible", "--quiet"])
        .current_dir(tree)
        .stdin(Stdio::piped())
        .stdout(fs::File::create(disk).context("cannot make the RAM disk")?)
        .spawn()
        .context("cannot start cpio")?;
    let mut input = child.stdin.take().context("cpio has no input")?;
    for name in &names {
        input.write_all(name.as_bytes())?;
        input.write_all(&[0])?;
    }
    drop(input);
    if !child.wait()?.success() {
        bail!("cpio cannot pack the RAM disk");
    }
    Ok(())
}

fn list(tree: &Path, below: &Path, names: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(tree.join(below))? {
        let entry = entry?;
        let name = below.join(entry.file_name());
        names.push(name.to_string_lossy().into_owned());
        if entry.file_type()?.is_dir() {
            list(tree, &name, names)?;
        }
    }
    Ok(())
}
