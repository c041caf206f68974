//! Finds, and in a source tree builds, Parador's own programs: kernel, `root`, servers, VMM, tasks.

use crate::failure::{self, Failure};
use crate::steps::Step;
use crate::supervise::{self, AtEnd};
use std::collections::VecDeque;
use std::env;
use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// File name of the kernel among the programs.
pub const KERNEL: &str = "kernel.elf";

/// Where the programs are.
#[derive(Debug)]
pub enum Programs {
    /// A folder of finished programs.
    Folder(PathBuf),
    /// A source tree, in which `cargo xtask build` makes them.
    SourceTree(PathBuf),
}

impl Programs {
    /// The folder that was named, or the source tree around the current folder or this program, or
    /// `../lib/parador` beside this program.
    pub fn find(named: Option<&Path>) -> Result<Self, Failure> {
        if let Some(folder) = named {
            return match folder.is_dir() {
                true => Ok(Self::Folder(folder.to_owned())),
                false => Err(Failure::new(
                    failure::MISSING_FILE,
                    format!("no folder of programs: {}", folder.display()),
                )),
            };
        }
        let program = env::current_exe().ok();
        let starts = [env::current_dir().ok(), program.clone()];
        let mut folders = starts.iter().flatten().flat_map(|start| start.ancestors());
        if let Some(tree) = folders.find(|folder| is_source_tree(folder)) {
            return Ok(Self::SourceTree(tree.to_owned()));
        }
        let installed =
            program.as_deref().and_then(Path::parent).map(|bin| bin.join("../lib/parador"));
        match installed.filter(|folder| folder.join(KERNEL).is_file()) {
            Some(folder) => Ok(Self::Folder(folder)),
            None => Err(Failure::new(failure::MISSING_FILE, "cannot find Parador's own programs")
                .help("run this in Parador's source tree, or name their folder with --artifacts")),
        }
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

    /// Where fetched files are kept: below `target` in a source tree, else in the user's cache.
    pub fn cache_folder(&self) -> Result<PathBuf, Failure> {
        match self {
            Self::SourceTree(tree) => Ok(target(tree).join("cache/parador")),
            Self::Folder(_) => users_cache(),
        }
    }
}

/// [`Programs::cache_folder`] for who needs none of the programs.
pub fn cache_folder() -> Result<PathBuf, Failure> {
    match Programs::find(None) {
        Ok(programs) => programs.cache_folder(),
        Err(_) => users_cache(),
    }
}

fn users_cache() -> Result<PathBuf, Failure> {
    let variable =
        |name: &str| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("XDG_CACHE_HOME")
        .or_else(|| variable("HOME").map(|home| home.join(".cache")))
        .map(|cache| cache.join("parador"))
        .ok_or_else(|| {
            Failure::new(failure::MISSING_FILE, "no folder to keep fetched files in")
                .help("set HOME or XDG_CACHE_HOME")
        })
}

fn is_source_tree(folder: &Path) -> bool {
    ["Cargo.toml", "xtask/Cargo.toml", "kernel/image/Cargo.toml", "hosted/parador/Cargo.toml"]
        .iter()
        .all(|file| folder.join(file).is_file())
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
    let cargo = env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let advice = "install Rust, or name a folder of finished programs with --artifacts";
    let mut child = supervise::command(&cargo, AtEnd::Terminate)
        .map_err(|failure| failure.help(advice))?
        .args(["xtask", "build", "kernel", "native", "wedge"])
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
