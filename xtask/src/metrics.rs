//! `cargo xtask metrics`: figures that show how well the tree is structured.
//!
//! All figures are computed from the source text, so that they can be compared from commit to
//! commit. Unit tests and files that are only compiled for tests do not count.

use crate::imports;
use crate::neutral;
use crate::process::workspace;
use crate::source::{self, FunctionLengths, Lines, Unsafe};
use crate::workspace::packages;
use anyhow::Result;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Folders whose import circles are printed.
const CIRCLES: [&str; 3] = ["wedge/on-linux", "hosted", "kernel/x86"];
/// Folders whose longest file is printed.
const FILES: [&str; 2] = ["kernel", "hosted"];

/// Parts that hosted VMs have once, and the text by which an implementation is known.
const ONCE: [(&str, &str); 4] = [
    ("raw-disk engines", "__NR_io_uring_setup"),
    ("network pumps", "TUNSETIFF"),
    ("sandboxes", "__NR_landlock_create_ruleset"),
    ("lists of seccomp filters", "SeccompFilter::new"),
];

/// Prints all figures.
pub fn metrics() -> Result<()> {
    let sources = Sources::read()?;
    sources.print_circles()?;
    let wedge = sources.below("wedge/on-linux");
    println!("{:<52} {:>8}", "unsafe blocks in wedge/on-linux", unsafe_blocks(&wedge)?);
    println!("{:<52} {:>8}", "unit tests in wedge/on-linux", unit_tests(&wedge)?);
    sources.print_implementations()?;
    sources.print_functions()?;
    sources.print_files()?;
    println!("{:<52} {:>8}", "files of neutral crates that import hw_x86", sources.x86_files()?);
    println!("{:<52} {:>8}", "lines of Rust without comments and tests", sources.code()?);
    Ok(())
}

/// The Rust files of all packages, by package folder, without files for tests only.
struct Sources {
    packages: BTreeMap<PathBuf, Vec<PathBuf>>,
}

impl Sources {
    fn read() -> Result<Self> {
        let mut found = BTreeMap::new();
        for package in packages()? {
            let folder = workspace().join(&package.directory).join("src");
            if folder.is_dir() {
                found.insert(package.directory, source::production_files(&folder)?);
            }
        }
        Ok(Self { packages: found })
    }

    /// The files of all packages at or below a folder.
    fn below(&self, folder: &str) -> Vec<&Path> {
        let inside = self.packages.iter().filter(|(directory, _)| directory.starts_with(folder));
        inside.flat_map(|(_, files)| files.iter().map(PathBuf::as_path)).collect()
    }

    /// The largest import circle of each folder in [`CIRCLES`].
    fn print_circles(&self) -> Result<()> {
        for folder in CIRCLES {
            let mut largest: Vec<String> = Vec::new();
            for (directory, files) in &self.packages {
                if directory.starts_with(folder) {
                    let circle = imports::largest_circle(files)?;
                    if circle.len() > largest.len() {
                        largest = circle;
                    }
                }
            }
            let title = format!("files in the largest import circle of {folder}");
            println!("{title:<52} {:>8}  {}", largest.len(), largest.join(" "));
        }
        Ok(())
    }

    /// The packages with an implementation of each idea in [`ONCE`].
    fn print_implementations(&self) -> Result<()> {
        for (title, text) in ONCE {
            let mut found = Vec::new();
            for (directory, files) in &self.packages {
                let mut texts = files.iter().map(|file| source::read(file));
                let is_here =
                    texts.any(|content| content.is_ok_and(|text_of| text_of.contains(text)));
                if is_here && !["tests", "xtask"].iter().any(|folder| directory.starts_with(folder))
                {
                    found.push(directory.display().to_string());
                }
            }
            println!("{title:<52} {:>8}  {}", found.len(), found.join(" "));
        }
        Ok(())
    }

    /// The longest function outside of tests, benchmarks and fuzzing.
    fn print_functions(&self) -> Result<()> {
        let mut longest = None;
        for (directory, files) in &self.packages {
            if ["tests", "bench", "fuzz"].iter().any(|folder| directory.starts_with(folder)) {
                continue;
            }
            for file in files {
                for function in FunctionLengths::read(file)?.0 {
                    if longest.as_ref().is_none_or(|(lines, _)| function.lines > *lines) {
                        longest = Some((function.lines, place(file, &function.name)));
                    }
                }
            }
        }
        if let Some((lines, place)) = longest {
            println!("{:<52} {lines:>8}  {place}", "lines of the longest function");
        }
        Ok(())
    }

    /// The longest file of each folder in [`FILES`], its inline unit tests left out.
    fn print_files(&self) -> Result<()> {
        for folder in FILES {
            let mut longest = (0, String::new());
            for file in self.below(folder) {
                let lines = source::production_lines(&source::read(file)?);
                longest = longest.max((lines, place(file, "")));
            }
            let title = format!("lines of the longest file in {folder}/");
            println!("{title:<52} {:>8}  {}", longest.0, longest.1);
        }
        Ok(())
    }

    fn x86_files(&self) -> Result<usize> {
        let mut count = 0;
        for file in neutral::PACKAGES.iter().flat_map(|folder| self.below(folder)) {
            count += usize::from(source::read(file)?.contains("hw_x86"));
        }
        Ok(count)
    }

    fn code(&self) -> Result<usize> {
        let mut sum = Lines::default();
        for file in self.below("") {
            sum += source::lines(&source::read(file)?);
        }
        Ok(sum.code)
    }
}

fn unsafe_blocks(files: &[&Path]) -> Result<usize> {
    let mut sum = Unsafe::default();
    for file in files {
        sum += source::count_unsafe(file)?;
    }
    Ok(sum.blocks)
}

fn unit_tests(files: &[&Path]) -> Result<usize> {
    let mut count = 0;
    let folders: std::collections::BTreeSet<_> = files.iter().filter_map(|f| f.parent()).collect();
    for folder in folders {
        for file in source::files_in(folder, "rs")? {
            let text = source::read(&file)?;
            count += text.lines().filter(|line| line.trim() == "#[test]").count();
        }
    }
    Ok(count)
}

/// A file from the root of the tree, with the name of something in it.
fn place(file: &Path, name: &str) -> String {
    let file = file.strip_prefix(workspace()).unwrap_or(file);
    format!("{} {name}", file.display()).trim_end().to_owned()
}
