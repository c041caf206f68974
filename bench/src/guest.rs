//! RAM disks of the measured systems.

use crate::linux::output;
use anyhow::{Context, Result, bail};
use parador_tests::system::{target, workspace};
use std::fs;
use std::io::Write;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const BUSYBOX: &str = "/bin/busybox";

/// Returns the folder for files of the measurements.
pub fn folder() -> PathBuf {
    target().join("bench")
}

/// Returns the path of a file in `bench/guest`.
pub fn source(name: &str) -> PathBuf {
    workspace().join("bench/guest").join(name)
}

/// Builds the RAM disk with the benchmark, for Debian's kernel on the bare machine and in a VM.
pub fn ram_disk() -> Result<PathBuf> {
    let tree = Tree::new("guest", &["sh", "mount", "echo", "uname", "cat", "poweroff"])?;
    tree.program("vbench")?;
    tree.init("init")?;
    tree.pack()
}

/// The tree of files that a RAM disk is built from.
pub struct Tree {
    folder: PathBuf,
}

impl Tree {
    /// Returns a tree with busybox under these names.
    pub fn new(name: &str, applets: &[&str]) -> Result<Self> {
        let tree = Self { folder: folder().join(name) };
        if tree.folder.exists() {
            fs::remove_dir_all(&tree.folder).context("cannot empty the RAM disk's folder")?;
        }
        for name in ["dev", "proc", "sys", "tmp"] {
            fs::create_dir_all(tree.folder.join(name))
                .context("cannot make the RAM disk's folders")?;
        }
        tree.file(Path::new(BUSYBOX), "bin/busybox")?;
        for applet in applets {
            symlink("busybox", tree.folder.join("bin").join(applet))
                .context("cannot link busybox")?;
        }
        Ok(tree)
    }

    /// Adds a copy of a file and its parent folders.
    pub fn file(&self, from: &Path, to: &str) -> Result<()> {
        let to = self.folder.join(to);
        if let Some(parent) = to.parent() {
            fs::create_dir_all(parent).context("cannot make a RAM disk's folder")?;
        }
        fs::copy(from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        Ok(())
    }

    /// Adds a file with this text.
    pub fn text(&self, to: &str, text: &str) -> Result<()> {
        fs::write(self.folder.join(to), text).with_context(|| format!("cannot write {to}"))
    }

    /// Compiles a program of `bench/guest`.
    pub fn program(&self, name: &str) -> Result<()> {
        let compiled = Command::new("gcc")
            .args(["-O2", "-static", "-Wall", "-o"])
            .arg(self.folder.join("bin").join(name))
            .arg(source(&format!("{name}.c")))
            .status()
            .context("cannot start gcc")?;
        if !compiled.success() {
            bail!("gcc cannot compile {name}");
        }
        Ok(())
    }

    /// Adds a program of this host to `bin`, and the libraries that it is linked with.
    pub fn dynamic_program(&self, from: &Path, name: &str) -> Result<()> {
        self.file(from, &format!("bin/{name}"))?;
        for library in output(Command::new("ldd").arg(from))?.split_whitespace() {
            let Some((_, name)) = library.rsplit_once('/') else { continue };
            let folder = if name.starts_with("ld-linux") { "lib64" } else { "lib" };
            self.file(Path::new(library), &format!("{folder}/{name}"))?;
        }
        Ok(())
    }

    /// Returns the path of a program in the tree.
    pub fn path(&self, program: &str) -> PathBuf {
        self.folder.join("bin").join(program)
    }

    /// Adds init, a script of `bench/guest`.
    pub fn init(&self, name: &str) -> Result<()> {
        self.file(&source(name), "init")?;
        fs::set_permissions(self.folder.join("init"), fs::Permissions::from_mode(0o755))?;
        Ok(())
    }

    /// Packs the RAM disk reproducibly.
    pub fn pack(&self) -> Result<PathBuf> {
        let disk = self.folder.with_extension("cpio");
        pack(&self.folder, &disk)?;
        Ok(disk)
    }
}

fn pack(tree: &Path, disk: &Path) -> Result<()> {
    let mut names = Vec::new();
    list(tree, Path::new(""), &mut names)?;
    names.sort();
    // File times would change the bytes of every build.
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
