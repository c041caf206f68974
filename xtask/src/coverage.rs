//! `cargo xtask coverage`: line coverage of the wedge's MMU and patching code by its unit tests.
//!
//! The compiler counts executions (`-C instrument-coverage`); LLVM's tools read the counts. They
//! must be of the compiler's own version of LLVM: rustup's component `llvm-tools`, or Debian's
//! package `llvm-N`. Lines of unit tests themselves do not count.

use crate::process::{output, run, succeeds, target, workspace};
use crate::source;
use crate::toolchain::host_cargo;
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Package whose unit tests are counted.
const PACKAGE: &str = "wedge-on-linux";
/// Folder whose files are printed.
const FOLDER: &str = "wedge/on-linux/src/mmu";
/// Lowest coverage of all its files together, in percent.
const LEAST: usize = 80;

/// Prints the coverage by file; fails below [`LEAST`].
pub fn coverage() -> Result<()> {
    let [profdata, cov] = tools()?;
    let folder = target().join("coverage");
    let raw = folder.join("raw");
    if raw.exists() {
        std::fs::remove_dir_all(&raw)
            .with_context(|| format!("cannot remove {}", raw.display()))?;
    }
    let test = |arguments: &[&str]| {
        let mut command = host_cargo();
        command.args(["test", "--package", PACKAGE, "--target-dir"]).arg(&folder);
        command.env("RUSTFLAGS", "-Cinstrument-coverage").env_remove("CARGO_ENCODED_RUSTFLAGS");
        command.env("LLVM_PROFILE_FILE", raw.join("%p.profraw")).args(arguments);
        command
    };
    let messages = output(&mut test(&["--no-run", "--message-format", "json-render-diagnostics"]))?;
    let program = executable(&messages).context("cargo built no unit tests")?;
    run(&mut test(&["--quiet"]))?;
    let counts = folder.join("counts.profdata");
    let files = source::files(&raw, &["profraw"])?;
    run(Command::new(profdata).args(["merge", "-sparse", "-o"]).arg(&counts).args(files))?;
    let mut export = Command::new(cov);
    export.args(["export", "-format=lcov", "-instr-profile"]).arg(&counts).arg(program);
    print(&covered(&output(&mut export)?)?)
}

/// The program with unit tests that cargo has built.
fn executable(messages: &str) -> Option<PathBuf> {
    let values =
        messages.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let mut programs = values.filter_map(|message| {
        let is_ours = message["target"]["name"] == "parador-wedge";
        message["executable"].as_str().filter(|_| is_ours).map(PathBuf::from)
    });
    programs.next()
}

/// `llvm-profdata` and `llvm-cov`.
fn tools() -> Result<[PathBuf; 2]> {
    let compiler = output(Command::new("rustc").arg("-vV").current_dir(workspace()))?;
    let field = |name: &str| compiler.lines().find_map(|line| line.strip_prefix(name));
    let version = field("LLVM version: ").context("rustc -vV names no version of LLVM")?;
    let major = version.split('.').next().unwrap_or(version);
    let host = field("host: ").context("rustc -vV names no host")?;
    let sysroot = output(Command::new("rustc").args(["--print", "sysroot"]))?;
    let own = Path::new(sysroot.trim()).join("lib/rustlib").join(host).join("bin");
    let find = |name: &str| {
        let candidates = [own.join(name), PathBuf::from(format!("{name}-{major}"))];
        candidates.into_iter().find(|tool| {
            succeeds(Command::new(tool).arg("--version"))
                || succeeds(Command::new(tool).arg("--help"))
        })
    };
    match (find("llvm-profdata"), find("llvm-cov")) {
        (Some(profdata), Some(cov)) => Ok([profdata, cov]),
        _ => bail!(
            "no LLVM {major} tools: run `rustup component add llvm-tools` or `apt-get install llvm-{major}`"
        ),
    }
}

/// Lines with code, and those of them that were executed, by file in [`FOLDER`].
fn covered(lcov: &str) -> Result<BTreeMap<String, (usize, usize)>> {
    let mut found = BTreeMap::new();
    let mut file: Option<(String, usize)> = None;
    for line in lcov.lines() {
        if let Some(path) = line.strip_prefix("SF:") {
            let path = Path::new(path);
            let name = path.strip_prefix(workspace().join(FOLDER)).ok();
            let is_production = |name: &&Path| *name != Path::new("testing.rs");
            file = match name.filter(is_production) {
                Some(name) => Some((
                    name.display().to_string(),
                    source::production_lines(&source::read(path)?),
                )),
                None => None,
            };
        } else if let (Some(counts), Some((name, lines))) = (line.strip_prefix("DA:"), &file) {
            let (number, count) = counts.split_once(',').context("lcov: a line without a count")?;
            if number.parse::<usize>()? <= *lines {
                let (all, executed) = found.entry(name.clone()).or_insert((0, 0));
                *all += 1;
                *executed += usize::from(count != "0");
            }
        }
    }
    Ok(found)
}

fn print(files: &BTreeMap<String, (usize, usize)>) -> Result<()> {
    let sum = files.values().fold((0, 0), |sum, file| (sum.0 + file.0, sum.1 + file.1));
    ensure!(sum.0 != 0, "no line of {FOLDER} was compiled");
    for (name, &(all, executed)) in files.iter().chain([(&FOLDER.to_owned(), &sum)]) {
        println!("{:>5} of {all:>5} lines {:>3} %  {name}", executed, 100 * executed / all);
    }
    ensure!(100 * sum.1 >= LEAST * sum.0, "less than {LEAST} % of {FOLDER} is covered");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_counted_by_file() {
        let path = workspace().join(FOLDER).join("ram.rs");
        let text = format!(
            "SF:{}\nDA:10,3\nDA:11,0\nDA:999999,1\nend_of_record\nSF:/other.rs\nDA:1,1\n",
            path.display()
        );
        let found = covered(&text).unwrap();
        assert_eq!(found, BTreeMap::from([("ram.rs".to_owned(), (2, 1))]));
        assert!(print(&found).is_err() && print(&BTreeMap::new()).is_err());
    }
}
