//! Packages of this workspace, from `cargo metadata`.

use crate::process::{output, workspace};
use crate::toolchain::host_cargo;
use anyhow::{Context, Result};
use serde_json::Value;
use std::path::PathBuf;

/// A package of the workspace.
#[derive(Clone, Debug)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Its directory, from the root of the tree, such as `kernel/core`.
    pub directory: PathBuf,
    /// Directories of the workspace packages that it depends on, for any purpose.
    pub imports: Vec<PathBuf>,
    /// True if a plain `cargo test` builds and tests it on the host.
    pub on_host: bool,
}

impl Package {
    /// The top folder, which tells the level of privilege.
    pub fn folder(&self) -> String {
        top(&self.directory)
    }
}

/// The first component of a path.
pub fn top(path: &std::path::Path) -> String {
    path.components()
        .next()
        .map(|part| part.as_os_str().to_string_lossy().into_owned())
        .unwrap_or_default()
}

fn metadata() -> Result<Value> {
    let text = output(host_cargo().args(["metadata", "--no-deps", "--format-version", "1"]))?;
    serde_json::from_str(&text).context("cargo metadata printed no JSON")
}

/// Names of the programs (targets of kind `bin`) of a package.
#[cfg(test)]
pub fn programs(package: &str) -> Result<Vec<String>> {
    let metadata = metadata()?;
    let mut packages = array(&metadata["packages"]);
    let package = packages.find(|found| found["name"] == package).context("no such package")?;
    let programs = array(&package["targets"])
        .filter(|target| array(&target["kind"]).any(|kind| kind == "bin"))
        .filter_map(|target| target["name"].as_str().map(str::to_owned));
    Ok(programs.collect())
}

/// The packages, by directory.
pub fn packages() -> Result<Vec<Package>> {
    let metadata = metadata()?;
    let root = workspace();
    let relative = |path: &str| {
        std::path::Path::new(path).strip_prefix(&root).map(PathBuf::from).unwrap_or_default()
    };
    let defaults: Vec<&str> =
        array(&metadata["workspace_default_members"]).filter_map(Value::as_str).collect();
    let mut packages: Vec<Package> = array(&metadata["packages"])
        .map(|package| {
            let manifest = relative(package["manifest_path"].as_str().unwrap_or_default());
            Package {
                name: package["name"].as_str().unwrap_or_default().to_owned(),
                directory: manifest.parent().map(PathBuf::from).unwrap_or_default(),
                imports: array(&package["dependencies"])
                    .filter_map(|dependency| dependency["path"].as_str())
                    .map(relative)
                    .collect(),
                on_host: package["id"].as_str().is_some_and(|id| defaults.contains(&id)),
            }
        })
        .collect();
    packages.sort_by(|a, b| a.directory.cmp(&b.directory));
    Ok(packages)
}

fn array(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().map(Vec::as_slice).unwrap_or_default().iter()
}
