//! Packages that name no processor architecture: they import no other, and compile for AArch64.

use crate::process::{run, target, workspace};
use crate::toolchain::{ARM64, Bare};
use crate::workspace::Package;
use anyhow::Result;
use std::fmt::Write;
use std::path::Path;

/// Folders of the packages.
pub const PACKAGES: [&str; 9] = [
    "abi",
    "hw/tables",
    "kernel/core",
    "kernel/run",
    "proto",
    "vmm/mem",
    "vmm/bus",
    "vmm/vcpu",
    "vmm/dev",
];

/// Imports of another package that a neutral one may have: layouts of registers, without code for
/// the processor.
const LAYOUTS: [(&str, &str); 1] = [("vmm/dev", "hw/arm64")];

fn is_neutral(directory: &Path) -> bool {
    PACKAGES.iter().any(|folder| directory == Path::new(folder))
}

/// Returns one line for each import of a package that is not neutral by one that is.
pub fn wrong_imports(packages: &[Package]) -> Result<String> {
    let mut wrong = String::new();
    for package in packages.iter().filter(|package| is_neutral(&package.directory)) {
        let is_layout = |import: &Path| {
            LAYOUTS
                .iter()
                .any(|pair| package.directory == Path::new(pair.0) && import == Path::new(pair.1))
        };
        let others = package.imports.iter().filter(|import| !is_neutral(import));
        for import in others.filter(|import| !is_layout(import)) {
            writeln!(
                wrong,
                "{} is neutral and imports {}, which is not",
                package.directory.display(),
                import.display()
            )?;
        }
    }
    Ok(wrong)
}

/// Hosted packages that compile for every processor, although the VMs that they serve are x86.
const HOSTED: &[&str] = &["hosted-devices", "hosted-loader"];
/// The target for which [`check`] compiles them.
const HOSTED_TARGET: &str = "aarch64-unknown-linux-gnu";

/// Compiles the packages for AArch64, without code generation.
pub fn check(packages: &[Package]) -> Result<()> {
    let neutral = packages.iter().filter(|package| is_neutral(&package.directory));
    check_for(ARM64, &neutral.map(|package| package.name.as_str()).collect::<Vec<_>>())?;
    check_for(HOSTED_TARGET, HOSTED)
}

fn check_for(target_name: &str, packages: &[&str]) -> Result<()> {
    let Ok(compiler) = Bare::choose_for(target_name) else {
        // Not having the compiler must not hide that the packages were not compiled.
        println!(
            "neutral: SKIPPED, no compiler for {target_name} (rustup target add {target_name})"
        );
        return Ok(());
    };
    let mut command = compiler.cargo_for(target_name, "check", &[]);
    command.current_dir(workspace()).arg("--target-dir").arg(target().join("bare/neutral"));
    for package in packages {
        command.args(["--package", package]);
    }
    run(&mut command)?;
    println!("neutral: {} compile for {target_name}", packages.join(", "));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::packages;
    use std::path::PathBuf;

    #[test]
    fn neutral_packages_exist_and_import_only_each_other() {
        let packages = packages().unwrap();
        let neutral = packages.iter().filter(|package| is_neutral(&package.directory));
        assert_eq!(neutral.count(), PACKAGES.len());
        assert_eq!(wrong_imports(&packages).unwrap(), "");
    }

    #[test]
    fn other_imports_are_found() {
        let package = |directory: &str, imports: &[&str]| Package {
            name: directory.to_owned(),
            directory: directory.into(),
            imports: imports.iter().map(PathBuf::from).collect(),
            on_host: true,
        };
        let packages = [
            package("vmm/bus", &["proto", "hw/x86"]),
            package("vmm/x86", &["hw/x86"]),
            package("vmm/dev", &["vmm/bus", "hw/arm64"]),
        ];
        let wrong = wrong_imports(&packages).unwrap();
        assert_eq!(wrong, "vmm/bus is neutral and imports hw/x86, which is not\n");
    }
}
