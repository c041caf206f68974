//! Debian's cloud kernel with its modules, for guests and for the host of the peer.

use crate::guest::{Tree, folder};
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const PACKAGE: &str = "linux-image-cloud-amd64";

/// An unpacked kernel package.
pub struct Linux {
    folder: PathBuf,
}

impl Linux {
    /// Fetches and unpacks the current kernel, unless an earlier run has done so.
    pub fn fetch() -> Result<Self> {
        let shown = output(Command::new("apt-cache").args(["show", "--no-all-versions", PACKAGE]))?;
        let (name, version) = dependency(&shown)
            .with_context(|| format!("{PACKAGE} names no kernel; run `apt-get update`"))?;
        let unpacked = folder().join(format!("{name}_{version}").replace(':', "_"));
        if !unpacked.exists() {
            println!("fetching {name} {version}");
            let work = folder().join("fetch");
            if work.exists() {
                fs::remove_dir_all(&work).context("cannot empty the folder for packages")?;
            }
            fs::create_dir_all(&work).context("cannot make a folder for packages")?;
            let package = format!("{name}={version}");
            output(Command::new("apt-get").args(["download", &package]).current_dir(&work))?;
            let archive = entry(&work, |_| true)?.context("apt-get left no file")?;
            let tree = work.join("tree");
            output(Command::new("dpkg-deb").arg("-x").args([&archive, &tree]))?;
            fs::rename(&tree, &unpacked).context("cannot keep the unpacked kernel")?;
        }
        Ok(Self { folder: unpacked })
    }

    /// Returns the kernel image.
    pub fn image(&self) -> Result<PathBuf> {
        let is_kernel = |name: &str| name.starts_with("vmlinuz-");
        entry(&self.folder.join("boot"), is_kernel)?.context("the package has no kernel")
    }

    /// Copies modules into a RAM disk; its file `modules/order` lists them in load order.
    pub fn modules(&self, tree: &Tree, names: &[&str]) -> Result<()> {
        let all = output(Command::new("find").arg(&self.folder).args(["-name", "*.ko"]))?;
        for name in names {
            let end = format!("/{name}.ko");
            let path = all
                .lines()
                .find(|path| path.ends_with(&end))
                .with_context(|| format!("the package has no module {name}"))?;
            tree.file(Path::new(path), &format!("modules/{name}.ko"))?;
        }
        tree.text("modules/order", &names.join("\n"))
    }
}

/// Returns the one kernel version that a package of `apt-cache show` depends on.
fn dependency(shown: &str) -> Option<(&str, &str)> {
    let depends = shown.lines().find_map(|line| line.strip_prefix("Depends: "))?;
    let kernel = depends.split(", ").find(|package| package.starts_with("linux-image-"))?;
    let (name, version) = kernel.split_once(" (= ")?;
    Some((name, version.strip_suffix(')')?))
}

/// Finds a file in a folder by its name.
fn entry(folder: &Path, is_it: impl Fn(&str) -> bool) -> Result<Option<PathBuf>> {
    for entry in
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?
    {
        let entry = entry?;
        if entry.file_type()?.is_file() && entry.file_name().to_str().is_some_and(&is_it) {
            return Ok(Some(entry.path()));
        }
    }
    Ok(None)
}

/// Runs a program to its end and returns what it printed.
pub fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| format!("cannot start {name}"))?;
    if !output.status.success() {
        bail!("{name} failed:\n{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exact_dependency() {
        let shown = "Package: a\nDepends: x, linux-image-6.1.0-9-cloud-amd64 (= 6.1.2-1)\n";
        assert_eq!(dependency(shown), Some(("linux-image-6.1.0-9-cloud-amd64", "6.1.2-1")));
        assert_eq!(dependency("Depends: linux-image-6.1.0-9-cloud-amd64\n"), None);
    }
}
