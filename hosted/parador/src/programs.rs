//! Finds, and in a source tree builds, Parador's own programs: kernel, `root`, servers, VMM, tasks.

use crate::failure::{self, Failure};
use crate::steps::Step;
use crate::supervise::{self, AtEnd};
use crate::trust;
use clap::Args;
use std::collections::VecDeque;
use std::env;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// File name of the kernel among the programs.
pub const KERNEL: &str = "kernel.elf";

/// What the command line says of where the programs are.
#[derive(Clone, Debug, Default, Args)]
pub struct Named {
    // The environment is asked later: clap takes its values for options, also in lines of usage.
    /// Folder of finished programs, instead of building them [env: PARADOR_ARTIFACTS].
    #[arg(long, value_name = "FOLDER", conflicts_with = "tree")]
    artifacts: Option<PathBuf>,
    /// Parador's source tree, in which its programs are built [default: the one that this program
    /// is in] [env: PARADOR_TREE].
    #[arg(long, value_name = "FOLDER")]
    tree: Option<PathBuf>,
}

impl Named {
    /// The place that the command line names, else the environment.
    fn place(&self) -> Option<Place> {
        let variable = |name| env::var_os(name).filter(|value| !value.is_empty());
        let tree = self.tree.clone().map(Place::Tree);
        tree.or_else(|| self.artifacts.clone().map(Place::Folder))
            .or_else(|| variable("PARADOR_ARTIFACTS").map(|path| Place::Folder(path.into())))
            .or_else(|| variable("PARADOR_TREE").map(|path| Place::Tree(path.into())))
    }

    /// The command line or the environment names a place.
    pub fn is_some(&self) -> bool {
        self.place().is_some()
    }
}

/// A place that was named.
enum Place {
    Folder(PathBuf),
    Tree(PathBuf),
}

/// Where the programs are.
#[derive(Debug)]
pub enum Programs {
    /// A folder of finished programs.
    Folder(PathBuf),
    /// A source tree, in which `cargo xtask build` makes them.
    SourceTree(PathBuf),
}

impl Programs {
    /// The programs that the command line names, else those that the environment names, else the
    /// source tree that this program is in, else `../lib/parador` beside this program. Never
    /// anything found by the current folder.
    ///
    /// # Errors
    /// There are none, or somebody else could have put them there ([`trust::check`]).
    pub fn find(named: &Named) -> Result<Self, Failure> {
        Self::known(named)?.ok_or_else(Self::missing)
    }

    /// As [`Programs::find`]; `None`: nothing names a place, and there is none.
    pub fn known(named: &Named) -> Result<Option<Self>, Failure> {
        match named.place() {
            Some(Place::Folder(folder)) => return named_folder(&folder).map(Some),
            Some(Place::Tree(tree)) => return named_tree(&tree).map(Some),
            None => {}
        }
        if let Some(tree) = own_tree()? {
            return Ok(Some(Self::SourceTree(tree)));
        }
        let program = env::current_exe().ok();
        let installed =
            program.as_deref().and_then(Path::parent).map(|bin| bin.join("../lib/parador"));
        let installed = installed.filter(|folder| folder.join(KERNEL).is_file());
        installed.map(|folder| trust::check(&folder).map(Self::Folder)).transpose()
    }

    /// There are no programs.
    pub fn missing() -> Failure {
        Failure::new(failure::MISSING_FILE, "cannot find Parador's own programs")
            .help("name its source tree with --tree, or a folder of programs with --artifacts")
    }

    /// The folder with the programs, if they are there without building.
    pub fn finished(&self) -> Option<PathBuf> {
        match self {
            Self::Folder(folder) => Some(folder.clone()),
            Self::SourceTree(tree) => Some(artifacts(tree)).filter(|folder| folder.is_dir()),
        }
    }

    /// The folder with the programs, after building them if there is a source tree. Returns what was done, too.
    pub fn build(&self, step: &Step) -> Result<(PathBuf, String), Failure> {
        match self {
            Self::Folder(folder) => Ok((folder.clone(), format!("from {}", folder.display()))),
            Self::SourceTree(tree) => {
                build_tree(tree, step)?;
                Ok((artifacts(tree), "built".to_owned()))
            }
        }
    }

    /// Where results go if the user names no place: below `target` in a source tree, else the current folder.
    pub fn output_folder(&self) -> PathBuf {
        match self {
            Self::Folder(_) => PathBuf::from("parador-images"),
            Self::SourceTree(tree) => target(tree).join("images"),
        }
    }
}

/// Files that make a folder a source tree of Parador.
const MARKS: [&str; 4] =
    ["Cargo.toml", "xtask/Cargo.toml", "kernel/image/Cargo.toml", "hosted/parador/Cargo.toml"];
/// Starts cargo in a source tree.
const CARGO: &str = "scripts/cargo";
/// Names by which cargo and rustup look for what they execute, in every folder above the current
/// one, too.
const TOOL_CONFIGURATIONS: [&str; 3] = [".cargo", "rust-toolchain", "rust-toolchain.toml"];

/// The source tree that this program was built in: it is in a folder of that tree. `None`: in none.
fn own_tree() -> Result<Option<PathBuf>, Failure> {
    let program = env::current_exe().ok();
    let mut folders = program.iter().flat_map(|program| program.ancestors());
    folders.find(|folder| is_source_tree(folder)).map(check_tree).transpose()
}

/// The folder for build products of the source tree that this program is in. `None`: it is in none.
pub fn own_target() -> Result<Option<PathBuf>, Failure> {
    Ok(own_tree()?.map(|tree| target(&tree)))
}

fn named_folder(folder: &Path) -> Result<Programs, Failure> {
    match folder.is_dir() {
        true => Ok(Programs::Folder(trust::check(folder)?)),
        false => Err(Failure::new(
            failure::MISSING_FILE,
            format!("no folder of programs: {}", folder.display()),
        )),
    }
}

fn named_tree(tree: &Path) -> Result<Programs, Failure> {
    if !is_source_tree(tree) {
        let message = format!("no source tree of Parador: {}", tree.display());
        return Err(Failure::new(failure::MISSING_FILE, message)
            .help(format!("a source tree has {}", MARKS.join(", "))));
    }
    check_tree(tree).map(Programs::SourceTree)
}

/// Checks that nobody else decides what is executed in a source tree. Files below its marks are as
/// their folders: who clones a tree makes them alike.
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

/// Lines of a failed build that are shown.
const SHOWN_LINES: usize = 40;

fn build_tree(tree: &Path, step: &Step) -> Result<(), Failure> {
    let cargo = tree.join(CARGO);
    let advice = "install Rust, or name a folder of finished programs with --artifacts";
    let mut child = supervise::command(cargo.as_os_str(), AtEnd::Terminate)
        .map_err(|failure| failure.help(advice))?
        .args(["xtask", "build", "runtime"])
        .current_dir(tree)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|error| Failure::program("cargo", &error))?;
    let mut last: VecDeque<String> = VecDeque::new();
    if let Some(stderr) = child.stderr.take() {
        for line in BufReader::new(stderr).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).into_owned();
            step.now(line.trim());
            if last.len() == SHOWN_LINES {
                last.pop_front();
            }
            last.push_back(line);
        }
    }
    let status = child.wait().map_err(|error| Failure::os("wait for cargo", &error))?;
    if status.success() {
        return Ok(());
    }
    let lines = Vec::from(last).join("\n");
    Err(Failure::new(failure::INTERNAL, format!("cannot build Parador's programs:\n{lines}"))
        .help(format!("run `cargo xtask build` in {}", tree.display())))
}
