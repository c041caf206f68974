//! Linux source: its location, and a copy of the files that Parador's kernel is built from.

use hosted_command::digest::{digest, file_digest};
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::fetch;
use hosted_command::interrupt::Interruptible;
use hosted_command::steps::Step;
use hosted_command::supervise::{self, AtEnd};
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Component, Path, PathBuf};
use std::process::Stdio;
use std::time::UNIX_EPOCH;

/// Mode bits that are hashed: file type and execute permission.
const KIND: u32 = 0o170_111;
/// Path of the installed Debian package.
const INSTALLED: &str = "/usr/src/linux-source-6.1.tar.xz";
/// Folders of which only build descriptions are needed: the configuration uses no other file of
/// them. They are three quarters of the tree.
const UNUSED: [&str; 20] = [
    "Documentation",
    "LICENSES",
    "debian",
    "drivers/gpu",
    "drivers/iio",
    "drivers/infiniband",
    "drivers/media",
    "drivers/net/ethernet",
    "drivers/net/wireless",
    "drivers/scsi",
    "drivers/staging",
    "drivers/usb",
    "drivers/video",
    "samples",
    "sound",
    "tools/perf",
    "tools/power",
    "tools/testing",
    "tools/virtio",
    "tools/usb",
];

/// Linux source.
#[derive(Debug)]
pub enum Source {
    /// Compressed archive, as in Debian's package.
    Archive(PathBuf),
    /// A folder.
    Folder(PathBuf),
}

impl Source {
    /// Returns the named source, else the installed package, else the package from apt.
    pub fn find(
        named: Option<&Path>,
        step: &Step,
        interruptible: &Interruptible,
    ) -> Result<Self, Failure> {
        let installed = Path::new(INSTALLED);
        match named {
            Some(path) if path.is_dir() => Ok(Self::Folder(path.to_owned())),
            Some(path) if path.is_file() => Ok(Self::Archive(path.to_owned())),
            Some(path) => Err(Failure::new(
                failure::MISSING_FILE,
                format!("no Linux source: {}", path.display()),
            )),
            None if installed.is_file() => Ok(Self::Archive(installed.to_owned())),
            None => fetch::linux_source(step, interruptible).map(Self::Archive),
        }
    }

    /// Returns the digest of everything that a kernel takes from the source: the bytes of an
    /// archive; the names, contents and links of the used files in a folder, and the date of the
    /// top Makefile, which the kernel reports.
    pub fn identity(&self) -> Result<String, Failure> {
        let of_file = |path: &Path| file_digest(path).file_error("read", path);
        let root = match self {
            Self::Archive(path) => return of_file(path),
            Self::Folder(path) => path,
        };
        let mut files = Vec::new();
        list(root, Path::new(""), &mut files)?;
        let mut parts = vec![date(root).unwrap_or(0).to_le_bytes().to_vec()];
        for file in files {
            let path = root.join(&file);
            let read = |error| Failure::file("read", &path, &error);
            let metadata = fs::symlink_metadata(&path).map_err(read)?;
            let content = match metadata.is_symlink() {
                true => fs::read_link(&path).map_err(read)?.into_os_string().into_encoded_bytes(),
                false => of_file(&path)?.into_bytes(),
            };
            let kind = metadata.mode() & KIND;
            parts.extend([file.into_os_string().into_encoded_bytes(), kind.to_le_bytes().to_vec()]);
            parts.push(content);
        }
        Ok(digest(parts.iter().map(Vec::as_slice)))
    }

    /// Unpacks the source with an [`Self::identity`] into the new folder `to`.
    ///
    /// # Errors
    /// The source has changed since: code 65.
    pub fn unpack_unchanged(&self, identity: &str, to: &Path) -> Result<(), Failure> {
        self.unpack(to)?;
        let (now, path) = match self {
            Self::Archive(path) => (self.identity()?, path),
            Self::Folder(path) => (Self::Folder(to.to_owned()).identity()?, path),
        };
        match now == identity {
            true => Ok(()),
            false => {
                let text = format!("the Linux source {} has changed meanwhile", path.display());
                Err(Failure::new(failure::BAD_CONFIG, text).help("run the command again"))
            }
        }
    }

    fn unpack(&self, to: &Path) -> Result<(), Failure> {
        match self {
            Self::Archive(path) => unpack(path, to),
            Self::Folder(from) => copy_all(from, to),
        }?;
        match to.join("Kbuild").is_file() && to.join("arch/x86/Kconfig").is_file() {
            true => Ok(()),
            false => Err(Failure::new(failure::BAD_CONFIG, "not a Linux source tree")
                .help("use linux-source-6.1.tar.xz of Debian's package, or its unpacked folder")),
        }
    }
}

/// Returns the version from the top Makefile's `VERSION`, `PATCHLEVEL` and `SUBLEVEL`, with dots.
pub fn version(tree: &Path) -> Result<String, Failure> {
    let path = tree.join("Makefile");
    let text = fs::read_to_string(&path).file_error("read", &path)?;
    let field = |name: &str| {
        let value = text.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_prefix('='));
        value.map(|value| value.trim().to_owned()).unwrap_or_default()
    };
    Ok(["VERSION", "PATCHLEVEL", "SUBLEVEL"].map(field).join("."))
}

/// Returns the date of the source as seconds since 1970: that of its top Makefile.
pub fn date(tree: &Path) -> Result<u64, Failure> {
    let path = tree.join("Makefile");
    let modified = fs::metadata(&path).and_then(|file| file.modified());
    let modified = modified.file_error("read", &path)?;
    Ok(modified.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()))
}

/// Returns whether a file of Linux, by its path, is needed for the build.
fn is_used(path: &Path) -> bool {
    let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
    let describes = ["Kconfig", "Makefile", "Kbuild"].iter().any(|start| name.starts_with(start));
    let other_machine = path
        .strip_prefix("arch")
        .is_ok_and(|path| path.components().count() > 1 && !path.starts_with("x86"));
    let unused = other_machine || UNUSED.iter().any(|folder| path.starts_with(folder));
    describes || !unused
}

/// Adds the used files below `root/folder`, in order.
fn list(root: &Path, folder: &Path, files: &mut Vec<PathBuf>) -> Result<(), Failure> {
    let path = root.join(folder);
    let read = |error| Failure::file("read", &path, &error);
    let entries: io::Result<Vec<_>> =
        fs::read_dir(&path).map_err(read)?.map(|entry| Ok((entry?.path(), ()))).collect();
    let mut entries = entries.map_err(read)?;
    entries.sort();
    for (entry, ()) in entries {
        let Ok(name) = entry.strip_prefix(root) else { continue };
        let kind = fs::symlink_metadata(&entry).map_err(read)?;
        if kind.is_dir() {
            if name != Path::new(".git") {
                list(root, name, files)?;
            }
        } else if is_used(name) {
            files.push(name.to_owned());
        }
    }
    Ok(())
}

fn copy(from: &Path, to: &Path) -> Result<(), Failure> {
    let failed = |error: io::Error| Failure::file("copy", from, &error);
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder).map_err(failed)?;
    }
    let file = fs::symlink_metadata(from).map_err(failed)?;
    fs::copy(from, to).map_err(failed)?;
    let time = file.modified().map_err(failed)?;
    fs::File::options().write(true).open(to).and_then(|to| to.set_modified(time)).map_err(failed)
}

/// Copies the used files from the folder `from`; links come last, as in [`unpack`].
fn copy_all(from: &Path, to: &Path) -> Result<(), Failure> {
    let mut files = Vec::new();
    list(from, Path::new(""), &mut files)?;
    let mut links = Vec::new();
    for file in files {
        let path = from.join(&file);
        let failed = |error| Failure::file("read", &path, &error);
        match fs::symlink_metadata(&path).map_err(failed)?.is_symlink() {
            true => links.push((file, fs::read_link(&path).map_err(failed)?)),
            false => copy(&path, &to.join(&file))?,
        }
    }
    make_links(links, from, to)
}

/// Creates symbolic links, by name and target, below the folder `to`. Links that lead out of the
/// folder are refused, so later writes cannot reach beyond it.
fn make_links(links: Vec<(PathBuf, PathBuf)>, from: &Path, to: &Path) -> Result<(), Failure> {
    for (name, target) in links {
        if !stays_inside(&name, &target) {
            return Err(leads_out(from, &name, &format!("is a link to {}", target.display())));
        }
        // Relative targets are resolved from real folders only.
        let mut above = name.ancestors().skip(1);
        if above.any(|folder| to.join(folder).is_symlink()) {
            return Err(leads_out(from, &name, "is below another link and may lead"));
        }
        let path = to.join(&name);
        let made = path.parent().map_or(Ok(()), fs::create_dir_all);
        made.and_then(|()| symlink(&target, &path)).file_error("create the link", &path)?;
    }
    Ok(())
}

/// Returns whether a link in a folder resolves inside that folder, wherever other such links lead:
/// `..` components only come first, where they are those of real folders.
fn stays_inside(name: &Path, target: &Path) -> bool {
    let depth = name.components().count() - 1;
    let up = target.components().take_while(|part| *part == Component::ParentDir).count();
    let mut rest = target.components().skip(up);
    up <= depth && rest.all(|part| matches!(part, Component::Normal(_) | Component::CurDir))
}

fn leads_out(archive: &Path, name: &Path, why: &str) -> Failure {
    let text = format!("{}: {} {why}, out of the source", archive.display(), name.display());
    Failure::new(failure::BAD_CONFIG, text)
        .help("use linux-source-6.1.tar.xz of Debian's package, or its unpacked folder")
}

/// Unpacks an archive into the new folder `to`.
fn unpack(archive: &Path, to: &Path) -> Result<(), Failure> {
    let mut child = supervise::command(OsStr::new("xz"), AtEnd::Kill)?
        .args(["--decompress", "--stdout"])
        .arg(archive)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .start_error("xz")?;
    let unpacked = child.stdout.take().map_or(Ok(()), |mut tar| {
        unpack_tar(&mut tar, archive, to)?;
        // Data after the archive's end is read, too: xz must reach its own end.
        let rest = io::copy(&mut tar, &mut io::sink());
        rest.map(drop).file_error("read", archive)
    });
    let status = child.wait().os_error("wait for xz")?;
    unpacked?;
    match status.success() {
        true => Ok(()),
        false => {
            let message = format!("{} is damaged or not compressed by xz", archive.display());
            Err(Failure::new(failure::BAD_CONFIG, message))
        }
    }
}

/// Unpacks the used files of an uncompressed archive. The archive is not trusted: no symbolic links
/// exist while its files are written, and the links created afterwards stay inside.
fn unpack_tar(tar: impl Read, archive: &Path, to: &Path) -> Result<(), Failure> {
    let broken = |error: io::Error| {
        let reason = failure::describe(&error);
        let message = format!("cannot unpack {}: {reason}", archive.display());
        Failure::new(failure::code_of(&error), message)
            .help("check that the archive is complete and the disk is not full")
    };
    let mut links = Vec::new();
    let mut tar = tar::Archive::new(tar);
    for entry in tar.entries().map_err(broken)? {
        let mut entry = entry.map_err(broken)?;
        let path = entry.path().map_err(broken)?.into_owned();
        let mut parts = path.components().filter(|part| *part != Component::CurDir);
        if parts.clone().any(|part| !matches!(part, Component::Normal(_))) {
            return Err(leads_out(archive, &path, "is a path"));
        }
        // The top folder has the version in its name.
        parts.next();
        let name: PathBuf = parts.collect();
        if name.as_os_str().is_empty() || !is_used(&name) {
            continue;
        }
        let kind = entry.header().entry_type();
        if kind.is_symlink() {
            let target = entry.link_name().map_err(broken)?.unwrap_or_default().into_owned();
            links.push((name, target));
        } else if kind.is_file() {
            let place = to.join(name);
            place.parent().map_or(Ok(()), fs::create_dir_all).map_err(broken)?;
            entry.unpack(&place).map_err(broken)?;
        } else if !kind.is_dir() && !kind.is_pax_global_extensions() {
            // Linux' source contains no hard links, devices or pipes.
            let text = format!(
                "{}: {} is neither a file nor a symbolic link",
                archive.display(),
                path.display()
            );
            return Err(Failure::new(failure::BAD_CONFIG, text));
        }
    }
    make_links(links, archive, to)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_used() {
        for used in ["Makefile", "arch/Kconfig", "arch/x86/mm/tlb.c", "drivers/net/dummy.c"] {
            assert!(is_used(Path::new(used)), "{used}");
        }
        for used in ["sound/Kconfig", "arch/arm/Kconfig.debug", "drivers/scsi/Makefile"] {
            assert!(is_used(Path::new(used)), "{used}");
        }
        for unused in ["arch/arm/mm/mmu.c", "sound/core/init.c", "drivers/gpu/drm/drm_drv.c"] {
            assert!(!is_used(Path::new(unused)), "{unused}");
        }
    }

    #[test]
    fn a_folder_is_copied_and_known_again() {
        let from = tempfile::tempdir().unwrap();
        for file in ["Kbuild", "arch/x86/Kconfig", "arch/arm/a.c", "sound/b.c", ".git/x"] {
            let path = from.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, file).unwrap();
        }
        let makefile = from.path().join("Makefile");
        fs::write(&makefile, "VERSION = 6\nPATCHLEVEL = 1\nSUBLEVEL = 192\n").unwrap();
        let source = Source::Folder(from.path().to_owned());
        let identity = source.identity().unwrap();
        assert_eq!(source.identity().unwrap(), identity);

        let copy = tempfile::tempdir().unwrap();
        let to = copy.path().join("copy");
        source.unpack(&to).unwrap();
        assert_eq!(Source::Folder(to.clone()).identity().unwrap(), identity);
        assert_eq!(version(&to).unwrap(), "6.1.192");
        assert_eq!(date(&to).unwrap(), date(from.path()).unwrap());
        assert!(!to.join("sound").exists() && !to.join(".git").exists());
        fs::remove_dir_all(&to).unwrap();
        source.unpack_unchanged(&identity, &to).unwrap();
        fs::remove_dir_all(&to).unwrap();

        fs::write(&makefile, "VERSION = 7").unwrap();
        assert_ne!(source.identity().unwrap(), identity);
        let failure = source.unpack_unchanged(&identity, &to).unwrap_err();
        assert_eq!(failure.code(), failure::BAD_CONFIG);
        assert!(failure.to_string().contains("has changed"), "{failure}");
        fs::remove_dir_all(&to).unwrap();
        fs::remove_file(from.path().join("Kbuild")).unwrap();
        assert_eq!(source.unpack(&to).unwrap_err().code(), failure::BAD_CONFIG);
    }

    /// An entry of an archive, by name, kind and link.
    type Entry<'a> = (&'a str, tar::EntryType, &'a str);

    /// An archive of these entries; the content of a file is its name. Names are written as given.
    fn archive(entries: &[Entry<'_>]) -> Vec<u8> {
        let mut tar = tar::Builder::new(Vec::new());
        let more = [("linux/Kbuild", tar::EntryType::Regular, "")];
        let kconfig = ("linux/arch/x86/Kconfig", tar::EntryType::Regular, "");
        for (name, kind, link) in more.iter().chain([&kconfig]).chain(entries) {
            let mut header = tar::Header::new_ustar();
            let fields = header.as_ustar_mut().unwrap();
            fields.name[..name.len()].copy_from_slice(name.as_bytes());
            fields.linkname[..link.len()].copy_from_slice(link.as_bytes());
            header.set_entry_type(*kind);
            let content = if kind.is_file() { name.as_bytes() } else { b"" };
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            header.set_mtime(1_000_000_000);
            header.set_cksum();
            tar.append(&header, content).unwrap();
        }
        tar.into_inner().unwrap()
    }

    /// Unpacks such an archive into the folder `to`.
    fn unpack_entries(entries: &[Entry<'_>], to: &Path) -> Result<(), Failure> {
        unpack_tar(&*archive(entries), Path::new("linux.tar.xz"), to)
    }

    #[test]
    fn an_archive_is_unpacked() {
        use tar::EntryType::{Directory, Regular, Symlink};
        let folder = tempfile::tempdir().unwrap();
        let entries = [
            ("./linux/scripts", Directory, ""),
            ("./linux/scripts/include/x86", Symlink, "../../arch/x86"),
            ("linux/arch/x86/run.sh", Regular, ""),
        ];
        let to = folder.path().join("to");
        unpack_entries(&entries, &to).unwrap();
        let through = fs::read_to_string(to.join("scripts/include/x86/run.sh")).unwrap();
        assert_eq!(through, "linux/arch/x86/run.sh");
        assert_eq!(date(&to).unwrap_err().code(), failure::MISSING_FILE);
    }

    #[test]
    fn nothing_is_written_outside_of_the_source() {
        use tar::EntryType::{Char, Fifo, Link, Regular, Symlink};
        let outside = tempfile::tempdir().unwrap();
        let target = outside.path().to_str().unwrap();
        let absolute = format!("{target}/absolute");
        let attacks: [&[Entry<'_>]; 10] = [
            &[("linux/lib", Symlink, target), ("linux/lib/evil", Regular, "")],
            &[("linux/lib", Symlink, "../../.."), ("linux/lib/evil", Regular, "")],
            &[("linux/evil", Symlink, &absolute), ("linux/evil", Regular, "")],
            &[("linux/../../evil", Regular, "")],
            &[(&absolute, Regular, "")],
            &[("linux/evil", Link, "/etc/passwd")],
            &[("linux/evil", Char, "")],
            &[("linux/evil", Fifo, "")],
            // Two links that each stay inside, and together lead out.
            &[("linux/a/b/c", Symlink, "../../s"), ("linux/t", Symlink, "a/b/c/../..")],
            &[("linux/a/b/c", Symlink, "../../s"), ("linux/a/b/c/t", Symlink, "../../../x")],
        ];
        for entries in attacks {
            let folder = tempfile::tempdir().unwrap();
            let failure = unpack_entries(entries, &folder.path().join("a/b/to")).unwrap_err();
            assert_eq!(failure.code(), failure::BAD_CONFIG, "{entries:?}: {failure}");
            assert!(failure.to_string().contains("linux.tar.xz"), "{entries:?}: {failure}");
            assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0, "{entries:?}");
            for above in ["evil", "x", "a/evil", "a/b/evil"] {
                assert!(!folder.path().join(above).exists(), "{entries:?}");
            }
        }
    }

    #[test]
    fn links_of_a_folder_stay_inside() {
        let from = tempfile::tempdir().unwrap();
        fs::create_dir_all(from.path().join("arch/x86")).unwrap();
        for name in ["Kbuild", "arch/x86/Kconfig"] {
            fs::write(from.path().join(name), name).unwrap();
        }
        symlink("../Kbuild", from.path().join("arch/inside")).unwrap();
        let source = Source::Folder(from.path().to_owned());
        let to = tempfile::tempdir().unwrap();
        source.unpack(&to.path().join("1")).unwrap();
        assert_eq!(fs::read(to.path().join("1/arch/inside")).unwrap(), b"Kbuild");
        let identity = source.identity().unwrap();
        symlink("/etc/passwd", from.path().join("arch/outside")).unwrap();
        assert_ne!(source.identity().unwrap(), identity);
        let failure = source.unpack(&to.path().join("2")).unwrap_err();
        assert!(failure.to_string().contains("arch/outside is a link to /etc/passwd"), "{failure}");
    }
}
