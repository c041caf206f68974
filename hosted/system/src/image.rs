//! Bootable images: the kernel with its bundle, and a CD-ROM image for GRUB.
//!
//! All files are created in a folder next to the result and moved into place when complete: an
//! error, a full disk or a signal leaves the former image or none.

use crate::boot_files::read_kernel;
use crate::guest;
use crate::initramfs;
use crate::resolved::{InitrdSource, KernelSource, ResolvedSystem, ResolvedVm, VmFiles};
use abi::bundle;
use hosted_command::architecture::{Architecture, GuestArchitecture};
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::fetch::{self, Fetched};
use hosted_command::interrupt::Interruptible;
use hosted_command::programs::{Named, Programs};
use hosted_command::scratch::{self, ScratchFolder};
use hosted_command::steps::Steps;
use hosted_command::supervise::{self, AtEnd};
use hosted_command::value::Size;
use hosted_kbuild::module;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, File, TryLockError};
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// File name of the bundle in an image's folder.
const BUNDLE: &str = "bundle";
/// Name prefix of the folders of running builds, which may be in users' folders.
const WORK: &str = ".parador-image-";

/// Build options in addition to the description.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Output folder.
    pub output: Option<PathBuf>,
    /// Location of Parador's binaries.
    pub programs: Named,
    /// CD-ROM image to create.
    pub iso: Option<PathBuf>,
}

/// A complete image. While it lives, no other process builds one in its folder. That of [`build`]
/// has one user until [`Image::share`].
#[derive(Debug)]
pub struct Image {
    /// Kernel: PVH and Multiboot2.
    pub kernel: PathBuf,
    /// Boot module.
    pub bundle: PathBuf,
    /// Length of the bundle in bytes.
    pub bundle_length: u64,
    /// Lock of its folder.
    reservation: Option<File>,
}

impl Image {
    /// Returns the image folder of the description `file`.
    pub fn folder(file: &Path, options: &Options) -> Result<PathBuf, Failure> {
        match &options.output {
            Some(folder) => Ok(folder.clone()),
            None => {
                let stem = file.file_stem().unwrap_or(file.as_os_str());
                Ok(Programs::find(&options.programs)?.output_folder().join(stem))
            }
        }
    }

    /// Returns the existing image in `folder`.
    pub fn existing(resolved: &ResolvedSystem, folder: &Path) -> Result<Self, Failure> {
        let missing = |path: &Path, error: io::Error| {
            Failure::file("use the image", path, &error).help("build it without --no-build")
        };
        let kernel = folder.join(resolved.board.architecture().kernel());
        let bundle = folder.join(BUNDLE);
        fs::metadata(&kernel).map_err(|error| missing(&kernel, error))?;
        let reservation = reserve(folder, File::try_lock_shared)?;
        let length = fs::metadata(&bundle).map_err(|error| missing(&bundle, error))?.len();
        Ok(Self { kernel, bundle, bundle_length: length, reservation })
    }

    /// Lets other processes read the image in `folder`, too.
    ///
    /// # Errors
    /// Another process has taken the lock to replace the image: code 71.
    pub fn share(self, folder: &Path) -> Result<Self, Failure> {
        let reservation = self.reservation.map(|file| lock(file, folder, File::try_lock_shared));
        Ok(Self { reservation: reservation.transpose()?.flatten(), ..self })
    }
}

/// Builds the image of a validated description in `folder`.
pub fn build(
    resolved: &ResolvedSystem,
    folder: &Path,
    options: &Options,
    steps: &Steps,
) -> Result<Image, Failure> {
    let interruptible = Interruptible::new()?;
    let programs = Programs::find(&options.programs)?;
    let architecture = resolved.board.architecture();
    if options.iso.is_some() && architecture != Architecture::X86 {
        let message = "an image for GRUB exists only for x86";
        return Err(Failure::new(failure::BAD_CONFIG, message).help("omit --iso"));
    }
    let artifacts = steps.run("programs", |step| programs.build(architecture, step))?;
    resolved.check_programs(&artifacts)?;

    let staging = stage(folder, &interruptible)?;
    let reservation = reserve(folder, File::try_lock)?;
    let files = boot_files(resolved, &artifacts, staging.path(), steps, &interruptible)?;
    resolved.check_files(&files)?;

    let kernel = staging.path().join(architecture.kernel());
    let bundle = staging.path().join(BUNDLE);
    let bundle_length = steps.run("bundle", |step| {
        let contents = contents(resolved, &artifacts, &files)?;
        step.now("writing");
        let from = artifacts.join(architecture.kernel());
        copy(&from, &kernel, &folder.join(architecture.kernel()))?;
        let length = write_bundle(&bundle, &folder.join(BUNDLE), &contents)?;
        Ok((length, format!("{} files, {}", contents.len(), Size(length))))
    })?;
    let iso = match &options.iso {
        None => None,
        Some(path) => {
            Some((make_iso(resolved, path, &kernel, &bundle, steps, &interruptible)?, path))
        }
    };

    let image = Image {
        kernel: folder.join(architecture.kernel()),
        bundle: folder.join(BUNDLE),
        bundle_length,
        reservation,
    };
    let put = |from: &Path, to: &Path| fs::rename(from, to).file_error("write", to);
    interruptible.uninterrupted(|| {
        put(&kernel, &image.kernel)?;
        put(&bundle, &image.bundle)?;
        iso.iter().try_for_each(|(made, path)| put(&made.path().join(ISO), path))
    })?;
    Ok(image)
}

/// Locks an image's folder until the result is dropped (flock(2)); `None`: its file system, such as
/// that of some networks, has no locks.
fn reserve(
    folder: &Path,
    take: impl FnOnce(&File) -> Result<(), TryLockError>,
) -> Result<Option<File>, Failure> {
    lock(File::open(folder).file_error("open", folder)?, folder, take)
}

/// Does the same with the opened folder. A lock that it has is converted.
fn lock(
    file: File,
    folder: &Path,
    take: impl FnOnce(&File) -> Result<(), TryLockError>,
) -> Result<Option<File>, Failure> {
    match take(&file) {
        Ok(()) => Ok(Some(file)),
        Err(TryLockError::Error(_)) => Ok(None),
        Err(TryLockError::WouldBlock) => {
            let text = format!("another process uses the image in {}", folder.display());
            Err(Failure::new(failure::OS_ERROR, text)
                .help("wait for its end, or use another folder: `-o FOLDER`"))
        }
    }
}

/// Creates a folder for unfinished files next to the result.
fn stage(folder: &Path, interruptible: &Interruptible) -> Result<ScratchFolder, Failure> {
    fs::create_dir_all(folder).file_error("create the folder", folder)?;
    scratch::remove_abandoned(folder, WORK);
    let staging = ScratchFolder::new_in(folder, WORK).file_error("write to", folder)?;
    interruptible.remove_on_signal(staging.path());
    Ok(staging)
}

/// Finds, fetches and builds the boot files of the VMs.
fn boot_files(
    resolved: &ResolvedSystem,
    artifacts: &Path,
    staging: &Path,
    steps: &Steps,
    interruptible: &Interruptible,
) -> Result<Vec<VmFiles>, Failure> {
    let machine = resolved.board.architecture();
    // Guests of AArch32 have files of their own; few systems have such guests.
    let mut sets = Vec::new();
    for guest in [machine.into(), GuestArchitecture::Arm32] {
        sets.push(GuestFiles::make(guest, resolved, staging, steps, interruptible)?);
    }
    let of = |vm: &ResolvedVm| {
        let wanted = vm.guest_architecture(machine);
        sets.iter().find(|set| set.architecture == wanted)
    };
    let files = resolved.vms.iter().map(|vm| VmFiles {
        kernel: match vm.kernel.get_ref() {
            KernelSource::File(path) => path.clone(),
            KernelSource::Debian(_) => {
                of(vm).and_then(|set| set.kernel.as_ref()).map(Fetched::kernel).unwrap_or_default()
            }
            KernelSource::Micro(name) => artifacts.join(name),
        },
        initrd: vm.initrd.as_ref().map(|initrd| match initrd.get_ref() {
            InitrdSource::File(path) => path.clone(),
            InitrdSource::Busybox => of(vm).map(|set| set.ram_disk.clone()).unwrap_or_default(),
        }),
    });
    let mut files: Vec<VmFiles> = files.collect();
    unpack_kernels(resolved.board.architecture(), &mut files, staging)?;
    Ok(files)
}

/// Replaces the files of compressed kernels that the machine does not unpack by unpacked ones. What
/// is no kernel is left for the checks that follow.
fn unpack_kernels(
    architecture: Architecture,
    files: &mut [VmFiles],
    staging: &Path,
) -> Result<(), Failure> {
    if guest::unpacks_itself(architecture) {
        return Ok(());
    }
    let mut unpacked: BTreeMap<PathBuf, PathBuf> = BTreeMap::new();
    for files in files {
        if let Some(known) = unpacked.get(&files.kernel) {
            files.kernel = known.clone();
            continue;
        }
        let Ok(packed) = read_kernel(&files.kernel) else { continue };
        let Ok(Some(kernel)) = guest::unpack(architecture, &packed) else { continue };
        let path = staging.join(format!("kernel-{}", unpacked.len()));
        fs::write(&path, kernel).file_error("write", &path)?;
        unpacked.insert(std::mem::replace(&mut files.kernel, path.clone()), path);
    }
    Ok(())
}

/// Boot files that VMs of one architecture share.
struct GuestFiles {
    architecture: GuestArchitecture,
    /// Debian's kernel, if a VM has it.
    kernel: Option<Fetched>,
    /// RAM disk with busybox; exists if a VM has it.
    ram_disk: PathBuf,
}

impl GuestFiles {
    /// Fetches and builds what VMs of this architecture have.
    fn make(
        architecture: GuestArchitecture,
        resolved: &ResolvedSystem,
        staging: &Path,
        steps: &Steps,
        interruptible: &Interruptible,
    ) -> Result<Self, Failure> {
        let machine = resolved.board.architecture();
        let is_of = |vm: &&ResolvedVm| vm.guest_architecture(machine) == architecture;
        let vms = || resolved.vms.iter().filter(is_of);
        let is_32_bit = architecture == GuestArchitecture::Arm32;
        let title = |of: &str| format!("{of}{}", if is_32_bit { " (32 bits)" } else { "" });
        let needs_debian =
            vms().any(|vm| *vm.kernel.get_ref() == KernelSource::Debian(architecture));
        let kernel: Option<Fetched> = if needs_debian {
            Some(steps.run(&title("Debian kernel"), |step| {
                let fetched = fetch::debian_kernel(architecture, step, interruptible)?;
                let title = fetched.title.clone();
                Ok((fetched, title))
            })?)
        } else {
            None
        };
        let needs_busybox = vms().any(|vm| {
            vm.initrd.as_ref().is_some_and(|initrd| *initrd.get_ref() == InitrdSource::Busybox)
        });
        // Guests without channels do not load the driver, so all share one RAM disk. It is not for
        // AArch32.
        let driver = match &kernel {
            Some(kernel) if needs_busybox && !resolved.channels.is_empty() && !is_32_bit => Some(
                steps
                    .run("channel driver", |step| module::channels(kernel, step, interruptible))?,
            ),
            _ => None,
        };
        let ram_disk = staging.join(format!("initramfs-{}", architecture.debian()));
        if needs_busybox {
            steps.run(&title("RAM disk"), |step| {
                let (busybox, title) = fetch::busybox(architecture, step, interruptible)?;
                // Modules match the kernel they come with; `/init` loads none if they do not.
                let mut modules = kernel.as_ref().map(Fetched::modules).unwrap_or_default();
                modules.extend(driver);
                let archive = initramfs::busybox(machine, &busybox, &modules, &resolved.files)?;
                let length = Size(archive.len() as u64);
                fs::write(&ram_disk, archive).file_error("write", &ram_disk)?;
                Ok(((), format!("{title}, {length}")))
            })?;
        }
        Ok(Self { architecture, kernel, ram_disk })
    }
}

/// A file of a bundle.
enum Content {
    File(PathBuf),
    Bytes(Vec<u8>),
}

/// Returns the names and contents of all files in the bundle.
fn contents(
    resolved: &ResolvedSystem,
    artifacts: &Path,
    files: &[VmFiles],
) -> Result<Vec<(String, Content)>, Failure> {
    let mut contents = Vec::new();
    let root = (bundle::ROOT_NAME, None);
    for (name, _) in [root].into_iter().chain(resolved.binaries()) {
        let file = resolved.board.architecture().program(name);
        let path = artifacts.join(&file);
        if !path.is_file() {
            let message = format!("no binary `{file}` in {}", artifacts.display());
            return Err(Failure::new(failure::MISSING_FILE, message)
                .help("build Parador's programs with `cargo xtask build`"));
        }
        contents.push((name.to_owned(), Content::File(path)));
    }
    // A file that several VMs use is in the bundle once.
    let mut known: Vec<(PathBuf, String)> = Vec::new();
    let mut add = |path: &Path, name: String| match known.iter().find(|(other, _)| other == path) {
        Some((_, name)) => name.clone(),
        None => {
            known.push((path.to_owned(), name.clone()));
            name
        }
    };
    let names: Vec<(String, Option<String>)> = resolved
        .vms
        .iter()
        .zip(files)
        .map(|(vm, files)| {
            let kernel = add(&files.kernel, format!("{}.kernel", vm.name));
            let initrd = files.initrd.as_ref().map(|path| add(path, format!("{}.initrd", vm.name)));
            (kernel, initrd)
        })
        .collect();
    let system = resolved.compile(&names)?;
    contents.push((bundle::SYSTEM_NAME.to_owned(), Content::Bytes(system)));
    contents.extend(known.into_iter().map(|(path, name)| (name, Content::File(path))));
    Ok(contents)
}

/// Writes a bundle to `path` and returns its length in bytes. Write errors name `shown`, its later
/// path.
fn write_bundle(path: &Path, shown: &Path, contents: &[(String, Content)]) -> Result<u64, Failure> {
    let mut files = Vec::new();
    for (name, content) in contents {
        let length = match content {
            Content::Bytes(bytes) => bytes.len() as u64,
            Content::File(path) => fs::metadata(path).file_error("read", path)?.len(),
        };
        files.push((name.as_str(), length));
    }
    let mut offsets = vec![0; files.len()];
    let header =
        bundle::write_header(&files, |index, offset| offsets[index] = offset).ok_or_else(|| {
            Failure::new(
                failure::BAD_CONFIG,
                format!(
                    "too many files for a bundle: {} (limit {})",
                    files.len(),
                    bundle::MAX_FILES
                ),
            )
        })?;

    let failed = |error: io::Error| Failure::file("write", shown, &error);
    let mut output = BufWriter::new(File::create(path).map_err(failed)?);
    output.write_all(&header).map_err(failed)?;
    let mut end = header.len() as u64;
    for (((_, content), (_, length)), offset) in contents.iter().zip(&files).zip(offsets) {
        output.seek(SeekFrom::Start(offset)).map_err(failed)?;
        match content {
            Content::Bytes(bytes) => output.write_all(bytes).map_err(failed)?,
            Content::File(from) => {
                let mut input = File::open(from).file_error("read", from)?;
                let copied = io::copy(&mut input, &mut output).map_err(failed)?;
                if copied != *length {
                    let message = format!("{} changed while it was read", from.display());
                    return Err(Failure::new(failure::OS_ERROR, message));
                }
            }
        }
        end = offset + length;
    }
    output.flush().map_err(failed)?;
    Ok(end)
}

/// Copies a file. Write errors name `shown`, the later path.
fn copy(from: &Path, to: &Path, shown: &Path) -> Result<(), Failure> {
    let mut input = File::open(from).map_err(|error| {
        Failure::file("read", from, &error)
            .help("build Parador's programs with `cargo xtask build`")
    })?;
    let mut output = File::create(to).file_error("write", shown)?;
    io::copy(&mut input, &mut output).file_error("write", shown)?;
    Ok(())
}

/// File name of the CD-ROM image during the build.
const ISO: &str = "image.iso";

/// Creates a CD-ROM image in a folder next to `path`.
fn make_iso(
    resolved: &ResolvedSystem,
    path: &Path,
    kernel: &Path,
    bundle: &Path,
    steps: &Steps,
    interruptible: &Interruptible,
) -> Result<ScratchFolder, Failure> {
    let folder =
        path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let staging = stage(folder, interruptible)?;
    let image = staging.path().join(ISO);
    steps.run("CD-ROM image", |step| {
        step.now("copying");
        let tree = staging.path().join("tree");
        let boot = tree.join("boot/parador");
        let grub = tree.join("boot/grub");
        for folder in [&boot, &grub] {
            fs::create_dir_all(folder)
                .file_error("create the folder", folder)?;
        }
        copy(kernel, &boot.join(Architecture::X86.kernel()), path)?;
        copy(bundle, &boot.join(BUNDLE), path)?;
        let menu = grub.join("grub.cfg");
        fs::write(&menu, grub_menu(resolved))
            .file_error("write", &menu)?;
        step.now("grub-mkrescue");
        let output = supervise::command(OsStr::new("grub-mkrescue"), AtEnd::Terminate)
            .map_err(|failure| {
                failure.help("install the packages grub-common, grub-pc-bin, xorriso and mtools")
            })?
            .arg("-o")
            .arg(&image)
            .arg(&tree)
            .stdin(Stdio::null())
            .output()
            .start_error("grub-mkrescue")?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            let last = text.trim().lines().last().unwrap_or("no reason given").to_owned();
            return Err(Failure::new(
                failure::UNAVAILABLE,
                format!("grub-mkrescue failed: {last}"),
            )
            .help(
                "check that grub-pc-bin, xorriso and mtools are installed and that the disk is not full",
            ));
        }
        let length =
            fs::metadata(&image).file_error("read", &image)?.len();
        Ok(((), Size(length).to_string()))
    })?;
    Ok(staging)
}

fn grub_menu(resolved: &ResolvedSystem) -> String {
    format!(
        "set timeout=0\n\
         menuentry \"Parador\" {{\n    \
             multiboot2 /boot/parador/{} {}\n    \
             module2 /boot/parador/{BUNDLE} {BUNDLE}\n\
         }}\n",
        Architecture::X86.kernel(),
        resolved.kernel_command_line(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_reads_back() {
        let folder = tempfile::tempdir().unwrap();
        let (program, path) = (folder.path().join("program"), folder.path().join("bundle"));
        fs::write(&program, vec![7; 5000]).unwrap();
        let contents = [
            ("root".to_owned(), Content::File(program)),
            ("system".to_owned(), Content::Bytes(b"text".to_vec())),
        ];
        let length = write_bundle(&path, &path, &contents).unwrap();
        let bytes = fs::read(&path).unwrap();
        assert_eq!(bytes.len() as u64, length);
        let header = bundle::Header::parse(&bytes, length).unwrap();
        let content = |name: &str| {
            let file = header.find(name).unwrap();
            &bytes[file.offset as usize..][..file.length as usize]
        };
        assert_eq!(content("root"), vec![7; 5000]);
        assert_eq!(content("system"), b"text");
    }

    #[test]
    fn a_built_image_is_shared() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let reservation = reserve(folder, File::try_lock).unwrap();
        let (kernel, bundle) = (folder.join("kernel"), folder.join(BUNDLE));
        let image = Image { kernel, bundle, bundle_length: 0, reservation };
        assert!(reserve(folder, File::try_lock_shared).is_err());
        let image = image.share(folder).unwrap();
        let other = reserve(folder, File::try_lock_shared).unwrap();
        assert!(other.is_some());
        drop(other);
        assert_eq!(reserve(folder, File::try_lock).unwrap_err().code(), failure::OS_ERROR);
        drop(image);
        assert!(reserve(folder, File::try_lock).unwrap().is_some());
    }

    #[test]
    fn compressed_kernels_are_unpacked_once() {
        let folder = tempfile::tempdir().unwrap();
        let [packed, plain] = ["packed", "plain"].map(|name| folder.path().join(name));
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(b"the kernel").unwrap();
        fs::write(&packed, gzip.finish().unwrap()).unwrap();
        fs::write(&plain, "another").unwrap();
        let vm = |kernel: &Path| VmFiles { kernel: kernel.to_owned(), initrd: None };
        let described = [vm(&packed), vm(&plain), vm(&packed), vm(&folder.path().join("none"))];
        let mut files = described.clone();
        unpack_kernels(Architecture::Arm64, &mut files, folder.path()).unwrap();
        assert_eq!(fs::read(&files[0].kernel).unwrap(), b"the kernel");
        assert_eq!(files[0].kernel, files[2].kernel, "in the bundle once");
        assert_eq!((&files[1].kernel, &files[3].kernel), (&plain, &described[3].kernel));
        // A PC's kernel unpacks itself.
        let mut files = described;
        unpack_kernels(Architecture::X86, &mut files, folder.path()).unwrap();
        assert_eq!(files[0].kernel, packed);
    }
}
