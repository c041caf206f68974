//! The guest kernel of a package: the cached one of this tree's `parador`, which
//! `parador kernel build` makes if there is none.

use super::stage::Stage;
use crate::process::{output, run, workspace};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const SOURCE_PACKAGE: &str = "linux-source-6.1";
const ARCHIVE: &str = "linux-source-6.1.tar.xz";
/// The package's archive, if it is installed.
const INSTALLED: &str = "/usr/src/linux-source-6.1.tar.xz";
/// Parador's part of the kernel, in the tree.
const OURS: &str = "guests/linux/kernel";
const TEXT: &str = include_str!("../../package/kernel.md");
/// Source of the build, which has the list of files that the assembler leaves alone, and the
/// options of make.
const RECIPE: &str = include_str!("../../../hosted/kbuild/src/kernel/make.rs");

/// A built kernel.
pub struct GuestKernel {
    /// Its folder in the cache.
    folder: PathBuf,
    /// As `uname -r` prints it.
    pub release: String,
    /// Version of Debian's package of its source.
    pub debian: String,
}

impl GuestKernel {
    /// Finds the default kernel of this `parador`, or builds it.
    pub fn find(parador: &Path) -> Result<Self> {
        let default = match default(parador)? {
            Some(kernel) => kernel,
            None => {
                run(Command::new(parador).args(["kernel", "build"]))?;
                default(parador)?.context("`parador kernel build` made no default kernel")?
            }
        };
        let field = |name: &str| default[name].as_str().unwrap_or_default().to_owned();
        let vmlinux = PathBuf::from(field("vmlinux"));
        let folder = vmlinux.parent().unwrap_or(Path::new("")).to_owned();
        let modules = folder.join("modules/lib/modules");
        let listed = || format!("cannot list {}", modules.display());
        let mut releases = fs::read_dir(&modules).with_context(listed)?;
        let release = releases.next().with_context(listed)?.with_context(listed)?.file_name();
        let cache = folder.ancestors().nth(2).context("a kernel outside of the cache")?;
        let debian = debian_version(cache, &field("source"))?;
        Ok(Self { folder, release: release.to_string_lossy().into_owned(), debian })
    }

    /// Returns the path of the kernel.
    pub fn vmlinux(&self) -> PathBuf {
        self.folder.join("vmlinux")
    }

    /// Adds the modules, and the kernel for other VM monitors, where Debian's kernels are.
    pub fn install(&self, stage: &Stage) -> Result<()> {
        let folder = format!("usr/lib/modules/{}", self.release);
        let modules = self.folder.join("modules/lib/modules").join(&self.release);
        stage.copy_folder(&modules, &folder)?;
        stage.copy(&self.folder.join("bzImage"), &format!("{folder}/vmlinuz"))?;
        let mut depmod = Command::new("/sbin/depmod");
        depmod.arg("--basedir").arg(stage.root.join("usr")).arg("--filesyms");
        run(depmod.arg(self.folder.join("System.map")).arg(&self.release))
    }

    /// Adds what the source of the kernel consists of beside Debian's package.
    pub fn documents(&self, stage: &Stage, folder: &str, commit: &str) -> Result<()> {
        for name in ["patches", "include"] {
            stage.copy_folder(&workspace().join(OURS).join(name), &format!("{folder}/{name}"))?;
        }
        stage.copy(&self.folder.join("config"), &format!("{folder}/config"))?;
        let text = TEXT
            .replace("@RELEASE@", &self.release)
            .replace("@LINUX@", &self.debian)
            .replace("@COMMIT@", commit)
            .replace("@SKIPPED@", &list("SKIPPED")?.join(":"))
            .replace("@TYPES@", &quoted(&list("TYPES")?));
        stage.write(&format!("{folder}/README.md"), &text)
    }
}

/// Returns the default kernel in the cache, as `parador kernel list --json` prints it.
fn default(parador: &Path) -> Result<Option<Value>> {
    let text = output(Command::new(parador).args(["kernel", "list", "--json"]))?;
    let listed: Value = serde_json::from_str(&text).context("`kernel list` printed no JSON")?;
    let kernels = listed["kernels"].as_array().context("`kernel list` printed no kernels")?;
    Ok(kernels.iter().find(|kernel| kernel["is_default"] == true).cloned())
}

/// Returns the version of the package with this SHA-256 of its archive, which a folder of the cache
/// has in its name (`hosted/command/src/fetch.rs`), or which is installed.
fn debian_version(cache: &Path, digest: &str) -> Result<String> {
    let is_source = |archive: &Path| -> Result<bool> {
        Ok(archive.is_file() && output(Command::new("sha256sum").arg(archive))?.starts_with(digest))
    };
    if is_source(Path::new(INSTALLED))? {
        let query = ["--show", "--showformat", "${Version}", SOURCE_PACKAGE];
        return output(Command::new("dpkg-query").args(query));
    }
    for entry in fs::read_dir(cache).with_context(|| format!("cannot list {}", cache.display()))? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(version) = version_in(&name) else { continue };
        if is_source(&entry.path().join(ARCHIVE))? {
            return Ok(version.to_owned());
        }
    }
    ensure!(!digest.is_empty(), "the kernel's record has no digest of its source");
    anyhow::bail!(
        "the kernel was not built from Debian's package {SOURCE_PACKAGE}, or the cache no longer has \
         that package: run `parador kernel build` without --source"
    )
}

/// Returns the version in the name of a folder of the cache: `linux-source-6.1_6.1.192-2.4`, whose
/// last number counts changes of the set of files kept.
fn version_in(folder: &str) -> Option<&str> {
    let rest = folder.strip_prefix(SOURCE_PACKAGE)?.strip_prefix('_')?;
    Some(rest.rsplit_once('.')?.0)
}

/// Returns the texts of a list in the source of the build.
fn list(name: &str) -> Result<Vec<String>> {
    const PATH: &str = "hosted/kbuild/src/kernel/make.rs";
    let list = RECIPE
        .split_once(&format!("const {name}: "))
        .and_then(|(_, rest)| rest.split_once("= "))
        .and_then(|(_, rest)| rest.split_once("];"));
    let (list, _) = list.with_context(|| format!("{PATH} has no list {name}"))?;
    let texts: Vec<String> = list.split('"').skip(1).step_by(2).map(joined).collect();
    ensure!(!texts.is_empty(), "{PATH} has an empty list {name}");
    Ok(texts)
}

/// Joins the lines of a text, as Rust's `\` at their ends does.
fn joined(text: &str) -> String {
    let mut parts = text.split("\\\n");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.trim_start())
}

/// Returns arguments as a shell takes them.
fn quoted(arguments: &[String]) -> String {
    arguments.iter().map(|argument| format!("'{argument}'")).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_folders() {
        assert_eq!(version_in("linux-source-6.1_6.1.192-2.4"), Some("6.1.192-2"));
        assert_eq!(version_in("linux-image-6.1_6.1.192-2.4"), None);
    }

    #[test]
    fn the_text_names_what_the_build_does() {
        let skipped = list("SKIPPED").unwrap().join(":");
        assert!(
            skipped.starts_with("arch/x86/boot/*:arch/x86/entry/vdso/vdso-note.o:"),
            "{skipped}"
        );
        assert!(!skipped.contains('"') && !skipped.contains(' '));
        let types = quoted(&list("TYPES").unwrap());
        assert!(types.starts_with("'KCFLAGS=-fno-var-tracking -g"), "{types}");
        assert!(types.contains(" -gno-column-info ") && types.ends_with('\''), "{types}");
        assert!(!types.contains('\\') && !types.contains('\n'), "{types}");
        assert!(list("NONE").is_err());
    }
}
