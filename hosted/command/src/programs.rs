//! Locates Parador's own binaries, and builds them in a source tree: kernel, `root`, servers, VMM,
//! tasks.

use crate::architecture::Architecture;
use crate::failure::{self, Failure};
use crate::steps::Step;
use crate::supervise::{self, AtEnd};
use crate::trust;
use clap::Args;
use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Options for the location of the binaries.
#[derive(Clone, Debug, Default, Args)]
pub struct Named {
    // Environment variables are read later: clap would show their values in usage texts.
    /// Folder with Parador's binaries, instead of building them [env: PARADOR_ARTIFACTS].
    #[arg(long, value_name = "FOLDER", conflicts_with = "tree")]
    artifacts: Option<PathBuf>,
    /// Parador's source tree, in which the binaries are built [default: the tree that contains
    /// `parador`] [env: PARADOR_TREE].
    #[arg(long, value_name = "FOLDER")]
    tree: Option<PathBuf>,
}

impl Named {
    /// Returns the location from the command line, else from the environment.
    fn place(&self) -> Option<Origin> {
        let variable = |name| env::var_os(name).filter(|value| !value.is_empty());
        let tree = self.tree.clone().map(Origin::Tree);
        tree.or_else(|| self.artifacts.clone().map(Origin::Folder))
            .or_else(|| variable("PARADOR_ARTIFACTS").map(|path| Origin::Folder(path.into())))
            .or_else(|| variable("PARADOR_TREE").map(|path| Origin::Tree(path.into())))
    }

    /// Adds the options to another `parador`, which has the same environment.
    pub fn pass(&self, command: &mut Command) {
        for (option, folder) in [("--artifacts", &self.artifacts), ("--tree", &self.tree)] {
            if let Some(folder) = folder {
                command.arg(option).arg(folder);
            }
        }
    }

    /// Returns whether the command line or the environment sets a location.
    pub fn is_some(&self) -> bool {
        self.place().is_some()
    }
}

/// Location that was set explicitly.
enum Origin {
    Folder(PathBuf),
    Tree(PathBuf),
}

/// Location of the binaries.
#[derive(Debug)]
pub enum Programs {
    /// Folder with finished binaries.
    Folder(PathBuf),
    /// Source tree, in which `cargo xtask build` builds them.
    SourceTree(PathBuf),
}

impl Programs {
    /// Returns the location from the command line, else from the environment, else the source tree
    /// that contains `parador`, else the folder of an installed `parador` ([`installed`]). The
    /// current folder is never searched.
    ///
    /// # Errors
    /// None exists, or another user could have created the files ([`trust::check`]).
    pub fn find(named: &Named) -> Result<Self, Failure> {
        Self::known(named)?.ok_or_else(Self::missing)
    }

    /// Does the same as [`Programs::find`]; `None`: no location is set or found.
    pub fn known(named: &Named) -> Result<Option<Self>, Failure> {
        match named.place() {
            Some(Origin::Folder(folder)) => return named_folder(&folder).map(Some),
            Some(Origin::Tree(tree)) => return named_tree(&tree).map(Some),
            None => {}
        }
        if let Some(tree) = own_tree()? {
            return Ok(Some(Self::SourceTree(tree)));
        }
        Ok(installed()?.map(Self::Folder))
    }

    /// Creates the failure of a missing location.
    pub fn missing() -> Failure {
        Failure::new(failure::MISSING_FILE, "cannot find Parador's binaries")
            .help("use --tree with its source tree, or --artifacts with a folder of binaries")
    }

    /// Returns the folder with the binaries if they exist without a build.
    pub fn finished(&self) -> Option<PathBuf> {
        match self {
            Self::Folder(folder) => Some(folder.clone()),
            Self::SourceTree(tree) => Some(artifacts(tree)).filter(|folder| folder.is_dir()),
        }
    }

    /// Returns the folder with the binaries, after building those of an architecture in a source
    /// tree, and the result for messages.
    pub fn build(
        &self,
        architecture: Architecture,
        step: &Step,
    ) -> Result<(PathBuf, String), Failure> {
        match self {
            Self::Folder(folder) => Ok((folder.clone(), format!("from {}", folder.display()))),
            Self::SourceTree(tree) => {
                build_tree(tree, architecture, step)?;
                Ok((artifacts(tree), "built".to_owned()))
            }
        }
    }

    /// Returns the default folder of results: below `target` in a source tree, else in the current
    /// folder.
    pub fn output_folder(&self) -> PathBuf {
        match self {
            Self::Folder(_) => PathBuf::from("parador-images"),
            Self::SourceTree(tree) => target(tree).join("images"),
        }
    }
}

/// Files that identify a source tree of Parador.
const MARKS: [&str; 4] =
    ["Cargo.toml", "xtask/Cargo.toml", "kernel/image/Cargo.toml", "hosted/cli/Cargo.toml"];
/// Folder of the files of an installed `parador`, below the parent of its own folder.
const INSTALLED: &str = "lib/parador";
/// Script that starts cargo in a source tree.
const CARGO: &str = "scripts/cargo";
/// Names of files that determine what cargo and rustup execute, also in every parent folder.
const TOOL_CONFIGURATIONS: [&str; 3] = [".cargo", "rust-toolchain", "rust-toolchain.toml"];

/// Returns the source tree that contains `parador`, if there is one.
fn own_tree() -> Result<Option<PathBuf>, Failure> {
    let program = env::current_exe().ok();
    let mut folders = program.iter().flat_map(|program| program.ancestors());
    folders.find(|folder| is_source_tree(folder)).map(check_tree).transpose()
}

/// Returns the folder of the files that were installed with `parador`: `PREFIX/lib/parador` of a
/// `PREFIX/bin/parador`; `None`: there is none, or `parador` is in a source tree.
///
/// # Errors
/// Another user can change the folder ([`trust::check`]).
pub fn installed() -> Result<Option<PathBuf>, Failure> {
    if own_tree()?.is_some() {
        return Ok(None);
    }
    let program = env::current_exe().ok();
    let prefix = program.as_deref().and_then(Path::parent).and_then(Path::parent);
    let folder = prefix.map(|prefix| prefix.join(INSTALLED)).filter(|folder| folder.is_dir());
    folder.map(|folder| trust::check(&folder)).transpose()
}

/// Returns the folder of build products of the source tree that contains `parador`, if there is
/// one.
pub fn own_target() -> Result<Option<PathBuf>, Failure> {
    Ok(own_tree()?.map(|tree| target(&tree)))
}

fn named_folder(folder: &Path) -> Result<Programs, Failure> {
    match folder.is_dir() {
        true => Ok(Programs::Folder(trust::check(folder)?)),
        false => Err(Failure::new(
            failure::MISSING_FILE,
            format!("no folder with binaries: {}", folder.display()),
        )),
    }
}

fn named_tree(tree: &Path) -> Result<Programs, Failure> {
    if !is_source_tree(tree) {
        let message = format!("not a Parador source tree: {}", tree.display());
        return Err(Failure::new(failure::MISSING_FILE, message)
            .help(format!("a source tree contains {}", MARKS.join(", "))));
    }
    check_tree(tree).map(Programs::SourceTree)
}

/// Checks that no other user controls what is executed in a source tree. Only these files are
/// checked: a clone gives all files the same owner and mode.
fn check_tree(tree: &Path) -> Result<PathBuf, Failure> {
    let tree = trust::check(tree)?;
    for name in MARKS.iter().chain(&[CARGO, "target", "target/artifacts"]) {
        let path = tree.join(name);
        if path.symlink_metadata().is_ok() {
            trust::check(&path)?;
        }
    }
    for folder in tree.ancestors() {
        for name in TOOL_CONFIGURATIONS {
            let path = folder.join(name);
            if path.symlink_metadata().is_ok() {
                trust::check(&path)?;
            }
        }
    }
    Ok(tree)
}

fn is_source_tree(folder: &Path) -> bool {
    MARKS.iter().all(|file| folder.join(file).is_file())
}

fn target(tree: &Path) -> PathBuf {
    match env::var_os("CARGO_TARGET_DIR").filter(|value| !value.is_empty()) {
        Some(folder) => tree.join(folder),
        None => tree.join("target"),
    }
}

fn artifacts(tree: &Path) -> PathBuf {
    target(tree).join("artifacts")
}

/// Output lines shown of a failed build.
const SHOWN_LINES: usize = 40;

fn build_tree(tree: &Path, architecture: Architecture, step: &Step) -> Result<(), Failure> {
    let cargo = tree.join(CARGO);
    let advice = "install Rust, or use --artifacts with a folder of binaries";
    let mut command = supervise::command(cargo.as_os_str(), AtEnd::Terminate)
        .map_err(|failure| failure.help(advice))?;
    command.args(["xtask", "build", architecture.build_group()]).current_dir(tree);
    let show = |line: &str| {
        step.now(line.trim());
        true
    };
    let Err(last) = supervise::follow(&mut command, "cargo", None, SHOWN_LINES, show)? else {
        return Ok(());
    };
    let lines = last.join("\n");
    Err(Failure::new(failure::INTERNAL, format!("cannot build Parador's binaries:\n{lines}"))
        .help(format!("run `cargo xtask build` in {}", tree.display())))
}
