//! Variants of the kernel, and the changes of Linux that each has.
//!
//! The patches are those of `guests/linux/kernel/patches`, applied by `patch -p1`: `required` ones
//! make one kernel run in either half of the address space; `optional` ones make it faster where
//! page tables are expensive to change.

use super::OURS;
use super::tools::tool;
use clap::ValueEnum;
use hosted_command::failure::{self, Failure, IoContext};
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

macro_rules! ours {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_str!(concat!("../../../../guests/linux/kernel/", $name)))),*]
    };
}

/// A file by its name below `guests/linux/kernel`, and its contents.
type Builtin = (&'static str, &'static str);

const CONFIG: &str = include_str!("../../../../guests/linux/kernel/config");
const TUNING: &str = include_str!("../../../../guests/linux/kernel/patches/optional/config");
/// In the order of application.
const REQUIRED: [Builtin; 18] = ours![
    "patches/required/0001-layout-checks.patch",
    "patches/required/0002-image-addresses.patch",
    "patches/required/0003-user-limit.patch",
    "patches/required/0004-user-mappings.patch",
    "patches/required/0005-early-tables.patch",
    "patches/required/0006-modules.patch",
    "patches/required/0007-sections.patch",
    "patches/required/0008-accessed-bits.patch",
    "patches/required/0009-32-bit-processes.patch",
    "patches/required/0010-compiled-filters.patch",
    "patches/required/0011-refused-requests.patch",
    "patches/required/0012-traced-functions.patch",
    "patches/required/0013-copied-code.patch",
    "patches/required/0014-probed-sites.patch",
    "patches/required/0015-probed-addresses.patch",
    "patches/required/0016-32-bit-addresses.patch",
    "patches/required/0017-thread-descriptors.patch",
    "patches/required/0018-file-times.patch",
];
/// In the order of application, after the required ones.
const OPTIONAL: [Builtin; 12] = ours![
    "patches/optional/0001-switch.patch",
    "patches/optional/0002-address-spaces.patch",
    "patches/optional/0003-forks.patch",
    "patches/optional/0004-page-runs.patch",
    "patches/optional/0005-traced-places.patch",
    "patches/optional/0006-deferred-pages.patch",
    "patches/optional/0007-event-files.patch",
    "patches/optional/0008-library-data.patch",
    "patches/optional/0009-link-targets.patch",
    "patches/optional/0010-early-pokes.patch",
    "patches/optional/0011-lookups.patch",
    "patches/optional/0012-link-events.patch",
];
const HEADERS: [Builtin; 10] = ours![
    "include/asm/page_64.h",
    "include/asm/page_64_types.h",
    "include/asm/parador.h",
    "include/asm/parador_module.h",
    "include/asm/parador_probe.h",
    "include/asm/pgtable.h",
    "include/asm/pgtable_64.h",
    "include/asm/pgtable_64_types.h",
    "include/asm-generic/access_ok.h",
    "include/asm-generic/fixmap.h",
];

/// Variant of a kernel: which of Parador's changes it has. The configuration is the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Variant {
    /// All patches, padding and site tables.
    #[default]
    Previrt,
    /// As `previrt`, without the optional patches.
    Untuned,
    /// All patches, without padding and site tables.
    Plain,
    /// Linux as in its source.
    Stock,
}

impl Variant {
    /// Returns the name, as part of the names of cached kernels.
    pub fn name(self) -> &'static str {
        match self {
            Self::Previrt => "previrt",
            Self::Untuned => "untuned",
            Self::Plain => "plain",
            Self::Stock => "stock",
        }
    }

    /// Returns whether the afterburner assembles the kernel.
    pub fn is_padded(self) -> bool {
        matches!(self, Self::Previrt | Self::Untuned)
    }

    fn is_tuned(self) -> bool {
        matches!(self, Self::Previrt | Self::Plain)
    }

    /// Returns the patches, in the order of application.
    pub fn patches(self) -> impl Iterator<Item = &'static Builtin> {
        let required = if self == Self::Stock { &[][..] } else { &REQUIRED };
        let optional = if self.is_tuned() { &OPTIONAL[..] } else { &[] };
        required.iter().chain(optional)
    }

    /// Returns the headers that precede Linux' own.
    pub fn headers(self) -> &'static [Builtin] {
        if self == Self::Stock { &[] } else { &HEADERS }
    }

    /// Returns the lines that are added to `allnoconfig`.
    pub fn config(self) -> String {
        let tuning = if self.is_tuned() { TUNING } else { "" };
        format!("{CONFIG}{tuning}")
    }

    /// Applies the patches to Linux' tree and writes the headers into its folder [`OURS`];
    /// `progress` gets the name of each patch.
    pub fn apply(self, tree: &Path, progress: impl Fn(&'static str)) -> Result<(), Failure> {
        for &(name, text) in self.patches() {
            progress(name);
            patch(tool("patch")?, name, text, tree)?;
        }
        for (name, text) in self.headers() {
            let path = tree.join(OURS).join(name);
            let folder = path.parent().map_or(Ok(()), fs::create_dir_all);
            folder.and_then(|()| fs::write(&path, text)).file_error("write", &path)?;
        }
        Ok(())
    }
}

/// Applies a patch, which must match without fuzz, by `command`, which is patch(1).
fn patch(mut command: Command, name: &str, text: &str, tree: &Path) -> Result<(), Failure> {
    command.args(["-p1", "--force", "--fuzz=0", "--no-backup-if-mismatch", "--reject-file=-"]);
    command.arg("-d").arg(tree).stdin(Stdio::piped()).stdout(Stdio::piped());
    let failed = |error: std::io::Error| Failure::program("patch", &error);
    let mut child = command.stderr(Stdio::piped()).spawn().map_err(failed)?;
    if let Some(mut input) = child.stdin.take() {
        // An early end of `patch` shows in its exit status.
        let _ = input.write_all(text.as_bytes());
    }
    let output = child.wait_with_output().map_err(failed)?;
    if output.status.success() {
        return Ok(());
    }
    let printed = [output.stdout, output.stderr].concat();
    let printed = String::from_utf8_lossy(&printed);
    let message = format!("{name} does not apply:\n{}", printed.trim_end());
    Err(Failure::new(failure::BAD_CONFIG, message).help(
        "the patches are for Linux 6.1 of Debian 12; use that as --source, or remove --source",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn all_that_is_ours_is_built_in() {
        let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guests/linux/kernel");
        let all = REQUIRED.iter().chain(&OPTIONAL).chain(&HEADERS);
        let known: HashSet<&str> =
            all.map(|(name, _)| *name).chain(["patches/optional/config"]).collect();
        for folder in ["patches/required", "patches/optional", "include/asm", "include/asm-generic"]
        {
            for entry in fs::read_dir(ours.join(folder)).unwrap() {
                let name = format!("{folder}/{}", entry.unwrap().file_name().display());
                assert!(known.contains(&*name), "{name} is not built in");
            }
        }
    }

    /// Only the optional patches depend on the option, and it is the only one that they add.
    #[test]
    fn a_variant_has_what_its_name_says() {
        let names = |variant: Variant| variant.patches().map(|(name, _)| *name).collect::<Vec<_>>();
        let required = REQUIRED.map(|(name, _)| name);
        let all = [&required[..], &OPTIONAL.map(|(name, _)| name)].concat();
        assert_eq!(names(Variant::Previrt), all);
        assert_eq!(names(Variant::Untuned), required);
        assert_eq!(names(Variant::Plain), all);
        assert!(names(Variant::Stock).is_empty());
        for variant in [Variant::Previrt, Variant::Untuned, Variant::Plain] {
            assert_eq!(variant.headers().len(), HEADERS.len());
        }
        assert!(Variant::Stock.headers().is_empty());
        let has = |text: &str| text.contains("PARADOR_TUNING");
        assert!(Variant::Untuned.patches().all(|(_, text)| !has(text) && !text.contains("tuned")));
        assert!(!has(&Variant::Untuned.config()) && !has(&Variant::Stock.config()));
        assert!(has(&Variant::Previrt.config()) && has(&Variant::Plain.config()));
    }

    #[test]
    fn a_patch_that_does_not_match_is_an_error() {
        let tree = tempfile::tempdir().unwrap();
        let text = "--- a/file\n+++ b/file\n@@ -1,3 +1,3 @@\n one\n-two\n+2\n three\n";
        let path = tree.path().join("file");
        fs::write(&path, "one\ntwo\nthree\n").unwrap();
        let patch = || patch(Command::new("patch"), "0001-two.patch", text, tree.path());
        patch().unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one\n2\nthree\n");
        // Also twice, or with other lines around.
        for wrong in ["one\n2\nthree\n", "1\ntwo\nthree\n"] {
            fs::write(&path, wrong).unwrap();
            let error = patch().unwrap_err().to_string();
            assert!(error.contains("0001-two.patch does not apply"), "{error}");
            assert_eq!(fs::read_to_string(&path).unwrap(), wrong);
        }
    }
}
