//! `parador kernel list` and `parador kernel prune`: the cached kernels.

use super::layout::VMLINUX;
use super::store::{CachedKernel, Record, Store};
use super::{Variant, recipe};
use hosted_command::failure::{self, Failure};
use hosted_command::output;
use hosted_command::programs;
use hosted_command::value::Size;
use serde::Serialize;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Output of `list --json`.
#[derive(Serialize)]
struct Listed {
    /// Cache folder; `null`: it does not exist.
    folder: Option<PathBuf>,
    kernels: Vec<ListedKernel>,
}

#[derive(Serialize)]
struct ListedKernel {
    name: String,
    vmlinux: PathBuf,
    /// Default kernel of `parador run`.
    is_default: bool,
    /// Disk usage in bytes.
    size: u64,
    /// Time of the last build or use, RFC 3339.
    used: String,
    #[serde(flatten)]
    record: Record,
}

/// Prints the cached kernels, most recently used first.
pub fn list(json: bool) -> Result<(), Failure> {
    let store = Store::existing()?;
    let entries = store.as_ref().map_or_else(|| Ok(Vec::new()), Store::entries)?;
    // An installed `parador` starts the kernel that was installed with it.
    let has_own = programs::installed()?.is_some();
    let default = default(&entries).filter(|_| !has_own).map(|entry| entry.folder.clone());
    let kernels: Vec<ListedKernel> = entries
        .into_iter()
        .map(|entry| ListedKernel {
            name: entry.record.inputs.name(),
            vmlinux: entry.folder.join(VMLINUX),
            is_default: default.as_ref() == Some(&entry.folder),
            size: size(&entry.folder),
            used: humantime::format_rfc3339_seconds(entry.used).to_string(),
            record: entry.record,
        })
        .collect();
    let folder = store.map(|store| store.folder().to_owned());
    if json {
        let listed = Listed { folder, kernels };
        let text = serde_json::to_string_pretty(&listed);
        let text = text.map_err(|error| {
            Failure::new(failure::INTERNAL, format!("cannot serialize JSON: {error}"))
        })?;
        return output::print(format!("{text}\n"));
    }
    if kernels.is_empty() {
        let place = folder.map_or("the cache".to_owned(), |path| path.display().to_string());
        return output::print(format!(
            "no kernels in {place}; `parador kernel build` builds one\n"
        ));
    }
    kernels.iter().try_for_each(|kernel| output::print(kernel.line()))
}

impl ListedKernel {
    fn line(&self) -> String {
        let mark = if self.is_default { '*' } else { ' ' };
        let size = Size(self.size >> 20 << 20);
        let (linux, place) = (&self.record.linux, self.vmlinux.display());
        let (kind, used) = (&self.record.inputs.kind, &self.used);
        format!("{mark} Linux {linux:<9} {kind:<8} {size:>6}  used {used}  {place}\n")
    }
}

/// Returns the default kernel of `parador run`: one with the recipe of this `parador`; of several
/// that differ in Linux source or compiler, the one built last.
pub fn default(entries: &[CachedKernel]) -> Option<&CachedKernel> {
    let recipe = recipe(Variant::Previrt);
    let ours = entries.iter().filter(|entry| {
        let inputs = &entry.record.inputs;
        inputs.kind == Variant::Previrt.name() && inputs.recipe == recipe
    });
    ours.max_by(|a, b| a.record.built.cmp(&b.record.built))
}

/// Removes all but the `keep` most recently used kernels and prints their names.
pub fn prune(keep: usize) -> Result<(), Failure> {
    let Some(store) = Store::existing()? else { return Ok(()) };
    let mut printed = Ok(());
    let pruned = store.prune(keep, |name| {
        if printed.is_ok() {
            printed = output::print(format!("removed {name}\n"));
        }
    });
    pruned.and(printed)
}

/// Returns the disk usage of all files below a folder; unreadable files count as zero.
fn size(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let sizes = entries.map(|entry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => size(&entry.path()),
        Ok(metadata) => metadata.blocks() * 512,
        Err(_) => 0,
    });
    sizes.sum()
}
