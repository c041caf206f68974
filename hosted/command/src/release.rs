//! Release of this `parador`, and of the files that belong to it: the wedge, the agent, the guest
//! kernel.
//!
//! `cargo xtask` writes the release into a section of these files ([`SECTION`]); a file from
//! another build has another release, or none. Interfaces between the parts have no stability
//! across releases, so `parador` refuses such a file before it executes any of it.

use crate::failure::{self, Failure};
use object::read::elf::{ElfFile64, FileHeader, SectionHeader};
use object::{LittleEndian, ReadRef};
use std::path::Path;

/// Release of this `parador`: the version of its package; in a source tree, that of the workspace.
pub const RELEASE: &str = match option_env!("PARADOR_RELEASE") {
    Some(release) => release,
    None => env!("CARGO_PKG_VERSION"),
};

/// ELF section with the release: lines of text, the first of which is the release. The kernel of a
/// package has a second one, its own release as `uname -r` prints it.
pub const SECTION: &[u8] = b".parador_release";

/// Release that a file has been marked with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark<'a> {
    /// Release of Parador.
    pub release: &'a str,
    /// Release of the guest kernel; empty in other files.
    pub kernel: &'a str,
}

impl<'a> Mark<'a> {
    /// Reads the mark of an ELF file; `None`: it has none, or is no 64-bit ELF file.
    pub fn of(file: impl ReadRef<'a>) -> Option<Self> {
        let elf: ElfFile64<'_, LittleEndian, _> = ElfFile64::parse(file).ok()?;
        let endian = elf.elf_header().endian().ok()?;
        let (_, section) = elf.elf_section_table().section_by_name(endian, SECTION)?;
        let mut lines = str::from_utf8(section.data(endian, file).ok()?).ok()?.lines();
        let release = lines.next().filter(|line| !line.is_empty())?;
        Some(Self { release, kernel: lines.next().unwrap_or_default() })
    }
}

/// Checks that the file at `path` belongs to this `parador`.
///
/// # Errors
/// It is marked with another release, or not at all: code 65 with both releases.
pub fn check<'a>(file: impl ReadRef<'a>, path: &Path) -> Result<(), Failure> {
    check_mark(Mark::of(file), path)
}

/// Does the same as [`check`], for a file that need not be marked: a kernel that the user has
/// built.
pub fn check_if_marked<'a>(file: impl ReadRef<'a>, path: &Path) -> Result<(), Failure> {
    Mark::of(file).map_or(Ok(()), |mark| check_mark(Some(mark), path))
}

/// Does the same as [`check`], given the mark.
pub fn check_mark(mark: Option<Mark<'_>>, path: &Path) -> Result<(), Failure> {
    let release = match mark {
        Some(mark) if mark.release == RELEASE => return Ok(()),
        Some(mark) => format!("belongs to parador {}", mark.release),
        None => "has no release".to_owned(),
    };
    let text = format!("{} {release}, and this is parador {RELEASE}", path.display());
    Err(Failure::new(failure::BAD_CONFIG, text).help(
        "use files of one build: install the package again, or run `cargo xtask build` in the \
         source tree",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::process::Command;

    /// Returns this test program with `text` in the section.
    fn marked(text: &str) -> Vec<u8> {
        let folder = tempfile::tempdir().unwrap();
        let [mark, out] = ["mark", "out"].map(|name| folder.path().join(name));
        fs::write(&mark, text).unwrap();
        let section = format!("{}={}", str::from_utf8(SECTION).unwrap(), mark.display());
        let mut objcopy = Command::new("objcopy");
        objcopy.args(["--strip-all", "--add-section", &section]).arg("/proc/self/exe").arg(&out);
        assert!(objcopy.status().unwrap().success());
        fs::read(out).unwrap()
    }

    #[test]
    fn only_files_of_this_release_pass() {
        let path = Path::new("a/wedge");
        let own = marked(&format!("{RELEASE}\n6.1.2-parador\n"));
        assert_eq!(Mark::of(&*own), Some(Mark { release: RELEASE, kernel: "6.1.2-parador" }));
        check(&*own, path).unwrap();
        check_if_marked(&*own, path).unwrap();

        let other = marked("9.9.9\n");
        for result in [check(&*other, path), check_if_marked(&*other, path)] {
            let error = result.unwrap_err();
            assert_eq!(error.code(), failure::BAD_CONFIG);
            let text = format!("a/wedge belongs to parador 9.9.9, and this is parador {RELEASE}");
            assert!(error.to_string().contains(&text), "{error}");
        }
        for none in [marked("\n"), b"\x7fELF".to_vec(), Vec::new()] {
            assert!(check(&*none, path).unwrap_err().to_string().contains("has no release"));
            check_if_marked(&*none, path).unwrap();
        }
    }
}
