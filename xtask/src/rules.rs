//! Rules of the project that a compiler does not check: imports between folders, places of
//! `unsafe`, and the size of the kernel.

use crate::neutral;
use crate::process::workspace;
use crate::source::{self, Lines, Unsafe};
use crate::workspace::{Package, packages, top};
use anyhow::{Context, Result, bail};
use std::fmt::Write;
use std::path::Path;

/// Packages in which `unsafe` may stand. In `kernel/core` only the module `pool` may have it.
const UNSAFE_ALLOWED: &[&str] = &[
    "kernel/arm64",
    "kernel/x86",
    "kernel/core",
    "kernel/run",
    "kernel/image",
    "vmm/mem",
    "host",
    "hosted/devices",
    "native/rt",
    "hosted/kvm",
    "guests/arm64",
    "guests/micro",
    "wedge/x86",
    "wedge/on-linux",
];
const UNSAFE_TABLE: &str = "docs/spec/unsafe.txt";
/// Lines of Rust and assembly that the x86-64 kernel may have, with those of `kernel/run`, which
/// AArch64 shares.
const KERNEL_BUDGET: usize = 12_000;
/// Files of the kernel's vTLB: folder, and start of their names.
const VTLB: [(&str, &str); 2] = [("kernel/core/src", "vtlb"), ("kernel/x86/src", "shadow")];
/// Folders of the OCI runtime: its front, and the agent in the guest.
const OCI: [&str; 2] = ["hosted/oci", "guests/agent"];
const KERNEL: &[&str] = &["kernel/core", "kernel/run", "kernel/x86", "kernel/image"];
const KERNEL_ARM64: &[&str] = &["kernel/core", "kernel/run", "kernel/arm64", "kernel/image"];

/// `cargo xtask deps`: every import between top folders is one that the importer's README allows,
/// and neutral packages import only each other.
pub fn deps() -> Result<()> {
    let packages = packages()?;
    let mut folders: Vec<String> = packages.iter().map(Package::folder).collect();
    folders.dedup();
    let mut wrong = neutral::wrong_imports(&packages)?;
    for folder in &folders {
        let allowed = allowed_imports(folder)?;
        for name in &allowed {
            if !folders.contains(name) {
                writeln!(wrong, "{folder}/README.md allows `{name}`, which does not exist")?;
            }
        }
        for package in packages.iter().filter(|package| package.folder() == *folder) {
            for import in &package.imports {
                let target = top(import);
                if target != *folder && !allowed.contains(&target) {
                    writeln!(
                        wrong,
                        "{} imports {}, but {folder}/README.md allows only: {}",
                        package.directory.display(),
                        import.display(),
                        allowed.join(", ")
                    )?;
                }
            }
        }
    }
    if !wrong.is_empty() {
        bail!("imports against the rules:\n{wrong}");
    }
    println!(
        "deps: {} packages in {} folders keep the import rules",
        packages.len(),
        folders.len()
    );
    Ok(())
}

/// The folders named in the line `Imports: a, b` of a top folder's README.
fn allowed_imports(folder: &str) -> Result<Vec<String>> {
    let path = workspace().join(folder).join("README.md");
    let text = source::read(&path)?;
    parse_imports(&text)
        .with_context(|| format!("{} has no line `Imports: folder, ...`", path.display()))
}

fn parse_imports(text: &str) -> Option<Vec<String>> {
    let list = text.lines().find_map(|line| line.strip_prefix("Imports:"))?;
    let list = list.trim().trim_end_matches('.');
    if list == "nothing" {
        return Some(Vec::new());
    }
    Some(list.split(',').map(|name| name.trim().to_owned()).collect())
}

/// `cargo xtask unsafe [--write]`: the count per package is the one in git, and it is zero outside
/// the packages that may have any. `--write` updates the table, so that review sees the change.
pub fn unsafe_code(arguments: &[String]) -> Result<()> {
    let mut table = String::from(
        "# Uses of `unsafe` by package: blocks, and items (functions, implementations, attributes).\n\
         # Written by `cargo xtask unsafe --write`; `make check` compares.\n",
    );
    let mut wrong = String::new();
    for package in packages()? {
        let directory = package.directory.to_string_lossy().into_owned();
        let mut sum = Unsafe::default();
        for file in source::files(&workspace().join(&package.directory), &["rs"])? {
            let count = source::count_unsafe(&file)?;
            sum += count;
            let misplaced = directory == "kernel/core" && !file.ends_with("pool.rs");
            if count != Unsafe::default()
                && (misplaced || !UNSAFE_ALLOWED.contains(&directory.as_str()))
            {
                writeln!(wrong, "{} may not use unsafe", file.display())?;
            }
        }
        if sum != Unsafe::default() {
            writeln!(table, "{directory:<16} {:>4} {:>4}", sum.blocks, sum.items)?;
        }
    }
    if !wrong.is_empty() {
        bail!("{wrong}");
    }
    compare_or_write("unsafe", Path::new(UNSAFE_TABLE), &table, arguments)
}

/// `cargo xtask size`: lines of the kernel, against its budget.
pub fn size() -> Result<()> {
    println!("{:<14} {:>8} {:>8} {:>8}", "package", "lines", "code", "tests");
    let mut kernel = Lines::default();
    for directory in KERNEL {
        let sum = print_lines(directory)?;
        kernel += sum;
    }
    println!("{:<14} {:>8} {:>8} {:>8}", "kernel", kernel.total, kernel.code, kernel.tests);
    println!(
        "\nx86-64 kernel: {} lines of Rust and assembly without comments, blank lines and unit \
         tests; {} with them (budget {KERNEL_BUDGET})",
        kernel.code, kernel.total
    );
    let mut arm64 = Lines::default();
    for directory in KERNEL_ARM64 {
        arm64 += source::lines_below(&workspace().join(directory))?;
    }
    let mut vtlb = Lines::default();
    let mut core_vtlb = 0;
    for (directory, prefix) in VTLB {
        let lines = source::lines_with_prefix(&workspace().join(directory), prefix)?;
        core_vtlb += if KERNEL_ARM64.contains(&top_package(directory)) { lines.code } else { 0 };
        vtlb += lines;
    }
    println!(
        "AArch64 kernel: {} lines, with kernel/arm64 and without the vTLB, which it does not contain",
        arm64.code - core_vtlb
    );
    println!("vTLB: {} lines of these", vtlb.code);
    let mut runtime = Lines::default();
    for directory in OCI {
        runtime += source::lines_below(&workspace().join(directory))?;
    }
    println!("OCI runtime: {} lines of the front and the agent\n", runtime.code);
    for directory in [
        "abi", "hw", "host", "proto", "native", "vmm", "wedge", "guests", "hosted", "tests",
        "bench", "fuzz", "xtask",
    ] {
        print_lines(directory)?;
    }
    if kernel.code > KERNEL_BUDGET {
        bail!("the kernel is over its budget");
    }
    Ok(())
}

/// Folder of the package that a source folder belongs to.
fn top_package(source: &str) -> &str {
    source.strip_suffix("/src").unwrap_or(source)
}

fn print_lines(directory: &str) -> Result<Lines> {
    let sum = source::lines_below(&workspace().join(directory))?;
    println!("{directory:<14} {:>8} {:>8} {:>8}", sum.total, sum.code, sum.tests);
    Ok(sum)
}

/// Writes a generated file with `--write`, else fails unless the file in the tree is the same.
pub fn compare_or_write(
    command: &str,
    path: &Path,
    text: &str,
    arguments: &[String],
) -> Result<()> {
    let full = workspace().join(path);
    match arguments {
        [flag] if flag == "--write" => {
            if let Some(directory) = full.parent() {
                std::fs::create_dir_all(directory)?;
            }
            std::fs::write(&full, text)
                .with_context(|| format!("cannot write {}", full.display()))?;
            println!("{command}: wrote {}", path.display());
            Ok(())
        }
        [] => {
            if source::read(&full).unwrap_or_default() != text {
                print!("{text}");
                bail!("{} differs; run `cargo xtask {command} --write`", path.display());
            }
            println!("{command}: {} is up to date", path.display());
            Ok(())
        }
        _ => bail!("usage: cargo xtask {command} [--write]"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rules hold for every commit that passes its tests, also where clippy and rustfmt are
    /// not.
    #[test]
    fn the_tree_keeps_the_rules() {
        deps().unwrap();
        unsafe_code(&[]).unwrap();
        crate::spec::spec(&[]).unwrap();
        crate::specification::specification(&[]).unwrap();
        size().unwrap();
    }

    #[test]
    fn reads_import_rules() {
        assert_eq!(parse_imports("# x\n\nImports: abi, hw\n").unwrap(), ["abi", "hw"]);
        assert!(parse_imports("Imports: nothing\n").unwrap().is_empty());
        assert!(parse_imports("# x\n").is_none());
    }
}
