//! The package of `cargo xtask package`, with the `parador` of this tree in it.

use crate::system::workspace;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use tempfile::TempDir;

/// Release of another package.
const OTHER: &str = "9.9.9";
/// Section with the release (`hosted/command/src/release.rs`).
const SECTION: &str = ".parador_release";

/// Two packages of one tree, made in different folders, have the same bytes. Unpacked, `parador`
/// runs a command with the files of the package alone, and refuses files of another release.
pub fn unpacked() -> Result<()> {
    let folder = TempDir::new().context("cannot make a folder")?;
    let [first, second] =
        [("a", "022"), ("b", "027")].map(|(name, mask)| make(&folder.path().join(name), mask));
    let (first, second) = (first?, second?);
    let read = |path: &Path| fs::read(path).with_context(|| path.display().to_string());
    ensure!(read(&first)? == read(&second)?, "two packages of one tree differ");

    let root = folder.path().join("root");
    succeed(Command::new("dpkg-deb").arg("--extract").arg(first).arg(&root))?;
    let installed = Installed { root };
    let release = installed.kernel_release()?;
    let output = installed.exec()?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success() && printed.trim() == release, "{output:?}");
    installed.check_version(&release)?;
    let link = installed.root.join("usr/lib/parador/qemu/qemu-system-x86_64").canonicalize();
    let parador = installed.root.join("usr/bin/parador").canonicalize();
    ensure!(link.context("no qemu-system-x86_64")? == parador?, "another program is qemu");
    installed.refuses()
}

/// Makes a package in a new folder, with this mask of modes.
pub(super) fn make(folder: &Path, mask: &str) -> Result<PathBuf> {
    fs::create_dir(folder).context("cannot make a folder")?;
    let script =
        format!("umask {mask} && exec scripts/cargo xtask package --quick --output \"$0\"");
    let mut command = Command::new("sh");
    succeed(command.args(["-c", &script]).arg(folder).current_dir(workspace()))?;
    let mut entries = fs::read_dir(folder).context("cannot list a folder")?.flatten();
    let found = entries.find(|entry| entry.path().extension().is_some_and(|name| name == "deb"));
    Ok(found.context("no package was made")?.path())
}

/// An unpacked package.
struct Installed {
    root: PathBuf,
}

impl Installed {
    /// `parador` by `PATH`, without a source tree, a cache and other variables.
    fn parador(&self) -> Command {
        let path = format!("{}:/usr/bin:/bin", self.root.join("usr/bin").display());
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "timeout", "--kill-after=5", "60", "parador"]);
        command.env_clear().env("PATH", path).env("HOME", "/nonexistent").current_dir("/");
        command
    }

    fn exec(&self) -> Result<Output> {
        let mut command = self.parador();
        command.args(["exec", "--backend", "process", "/", "--", "uname", "-r"]);
        command.output().context("cannot start parador")
    }

    /// Returns the release of the kernel by the folder of its modules.
    fn kernel_release(&self) -> Result<String> {
        let folder = self.root.join("usr/lib/modules");
        let mut entries = fs::read_dir(folder).context("no modules")?.flatten();
        let release = entries.next().context("no modules")?;
        for name in ["vmlinuz", "modules.dep", "modules.builtin"] {
            ensure!(release.path().join(name).is_file(), "no {name}");
        }
        Ok(release.file_name().to_string_lossy().into_owned())
    }

    fn check_version(&self, kernel: &str) -> Result<()> {
        let version = |option: &str| -> Result<String> {
            let output = self.parador().arg(option).output().context("cannot start parador")?;
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        };
        let (short, long) = (version("-V")?, version("--version")?);
        ensure!(short.lines().count() == 1 && long.starts_with(&short), "{short}{long}");
        let kernel = format!("\nkernel Linux {kernel}, {}", self.root.display());
        for text in ["\ncommit ", &kernel, "\nback ends kvm, process\n"] {
            ensure!(long.contains(text), "no `{text}` in {long}");
        }
        Ok(())
    }

    /// Puts other files into the place of those of the package, one after another.
    fn refuses(&self) -> Result<()> {
        let mark = self.root.join("mark");
        fs::write(&mark, format!("{OTHER}\n")).context("cannot write a file")?;
        let add = format!("{SECTION}={}", mark.display());
        let remove = ["--remove-section", SECTION];
        let other: &[&str] = &[&remove[..], &["--add-section", &add]].concat();
        let belongs = format!("belongs to parador {OTHER}, and this is parador ");
        let without = "has no release, and this is parador ";
        let [wedge, kernel, disk] = ["parador-wedge", "vmlinux", "agent.cpio"];
        for (name, options, text) in [
            (wedge, other, &*belongs),
            (wedge, &remove[..], without),
            (kernel, other, &belongs),
            (kernel, &remove, without),
        ] {
            let changed = |path: &Path| succeed(Command::new("objcopy").args(options).arg(path));
            self.refuses_one(name, changed, text)?;
        }
        let cut = |path: &Path| {
            let bytes = fs::read(path).context("cannot read the RAM disk")?;
            fs::write(path, &bytes[..bytes.len() / 2]).context("cannot write the RAM disk")
        };
        self.refuses_one(disk, cut, without)?;
        for name in [wedge, kernel] {
            let gone = |path: &Path| fs::remove_file(path).context("cannot remove a file");
            self.refuses_one(name, gone, "no such ")?;
        }
        Ok(())
    }

    /// Changes a file, expects the text, and restores the file.
    fn refuses_one(
        &self,
        name: &str,
        change: impl Fn(&Path) -> Result<()>,
        text: &str,
    ) -> Result<()> {
        let path = self.root.join("usr/lib/parador").join(name);
        let kept = self.root.join("kept");
        succeed(Command::new("cp").arg("--preserve=mode").args([&path, &kept]))?;
        change(&path)?;
        let output = self.exec()?;
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(125), "{name}, {text}: {output:?}");
        ensure!(errors.contains(text) && errors.contains(name), "{name}, {text}: {errors}");
        fs::rename(kept, path).context("cannot restore a file")
    }
}

fn succeed(command: &mut Command) -> Result<()> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}: {errors}", output.status);
    Ok(())
}
