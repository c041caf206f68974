//! Boot files of the VMs, and the memory of the machine for them.

use crate::attach::VirtioBus;
use crate::guest;
use crate::packed;
use crate::resolved::{InitrdSource, KernelSource, ResolvedSystem, ResolvedVm, VmFiles};
use crate::rootfs;
use crate::vtlb;
use hosted_command::architecture::Architecture;
use hosted_command::failure::{self, Failure};
use hosted_command::input;
use hosted_command::problem::Problem;
use hosted_command::value::Size;
use std::fmt::Display;
use std::io::{self, Read};
use std::ops::Range;
use std::path::Path;
use toml::Spanned;

/// Memory of the kernel with its objects, `root` and the servers, in bytes.
const FIXED_MEMORY: u64 = 16 << 20;
/// Memory of a VM beyond guest memory: VMM and kernel objects, in bytes.
const PER_VM_MEMORY: u64 = 1 << 20;
/// Nested page tables take 8 bytes per 4 KiB page at worst, and the mapping database as much again.
const PAGE_TABLE_SHIFT: u32 = 8;
/// Assumed length of the boot files of a VM whose kernel has not been fetched, in bytes.
const UNFETCHED_FILES: u64 = 20 << 20;
/// Assumed length of a micro-guest that has not been built, in bytes.
const MICRO_FILES: u64 = 1 << 20;
/// Distance of the boot files from the start of RAM in QEMU's board `virt`, in bytes. Memory that a
/// VM needs in one piece fits behind them.
const BEFORE_BOOT_FILES: u64 = 128 << 20;
/// Granularity of an emulated machine's memory in bytes.
const MEMORY_STEP: u64 = 64 << 20;

impl ResolvedSystem {
    /// Returns the files that exist without fetching or building.
    pub(crate) fn visible_files(&self) -> Vec<Option<VmFiles>> {
        let files = self.vms.iter().map(|vm| {
            let KernelSource::File(kernel) = vm.kernel.get_ref() else { return None };
            let initrd = match vm.initrd.as_ref().map(Spanned::get_ref) {
                Some(InitrdSource::File(path)) => Some(path.clone()),
                _ => None,
            };
            Some(VmFiles { kernel: kernel.clone(), initrd })
        });
        files.collect()
    }

    /// Checks all files of all VMs, and the memory for them.
    pub fn check_files(&self, files: &[VmFiles]) -> Result<(), Failure> {
        let mut problems = Vec::new();
        let files: Vec<Option<VmFiles>> = files.iter().cloned().map(Some).collect();
        self.file_problems(&files, &mut problems);
        if problems.is_empty() { Ok(()) } else { Err(self.source.refuse(problems)) }
    }

    /// Adds the problems of these files and of the memory for them.
    pub(crate) fn file_problems(&self, files: &[Option<VmFiles>], problems: &mut Vec<Problem>) {
        let mut boot_files = 0;
        for (vm, files) in self.vms.iter().zip(files) {
            let initrd_path = files.as_ref().and_then(|files| files.initrd.as_ref());
            let described = vm.initrd.as_ref().and_then(|initrd| match initrd.get_ref() {
                InitrdSource::File(path) => Some(path),
                InitrdSource::Busybox => None,
            });
            let mut initrd_length = 0;
            if let (Some(path), Some(initrd)) = (initrd_path.or(described), &vm.initrd) {
                match file_length(path) {
                    Ok(length) => initrd_length = length,
                    Err(error) => {
                        problems.push(unreadable(initrd.span(), "RAM disk", path, &error))
                    }
                }
            }
            match files {
                None if matches!(vm.kernel.get_ref(), KernelSource::Micro(_)) => {
                    boot_files += MICRO_FILES + initrd_length;
                }
                None => {
                    boot_files += UNFETCHED_FILES + initrd_length;
                    if vm.memory.get_ref().0 < guest::LINUX_MINIMUM {
                        problems.push(vm.too_little_memory(guest::LINUX_MINIMUM));
                    }
                }
                Some(files) => {
                    let kernel_length = vm.kernel_problems(
                        self.board.architecture(),
                        (&files.kernel, initrd_length),
                        problems,
                    );
                    boot_files += kernel_length + initrd_length;
                }
            }
        }
        if let Some((given, span)) = &self.memory {
            let needed = self.memory_needed(boot_files);
            if given.0 < needed {
                let message = format!(
                    "not enough memory ({given}): guests need {}, boot files {}, Parador {}",
                    Size(self.guest_memory()),
                    Size(boot_files),
                    Size(needed.saturating_sub(self.guest_memory()).saturating_sub(boot_files)),
                );
                let help = format!("give the machine at least {}M", needed.div_ceil(1 << 20));
                problems
                    .push(Problem { span: span.clone(), ..Problem::new(0..0, message).help(help) });
            }
        }
    }

    /// Returns the memory of all guests in bytes.
    pub(crate) fn guest_memory(&self) -> u64 {
        self.vms.iter().fold(0, |sum: u64, vm| sum.saturating_add(vm.memory.get_ref().0))
    }

    /// Returns the least memory of a machine for this system in bytes, with boot files of this
    /// length.
    fn memory_needed(&self, boot_files: u64) -> u64 {
        let guests = self.guest_memory();
        let disks = self.vms.iter().map(|vm| vm.disks.len()).sum::<usize>() as u64;
        let nets = self.vms.iter().map(|vm| vm.nets.len()).sum::<usize>() as u64;
        let sessions = disks * proto::disk::SESSION_BYTES + nets * proto::net::SESSION_BYTES;
        let pools: u64 = self.vms.iter().map(|vm| vtlb::memory(vm.vtlb, vm.vcpus)).sum();
        let channels: u64 = self.channels.iter().map(|channel| u64::from(channel.size)).sum();
        let has_whole = self.vms.iter().any(ResolvedVm::needs_one_piece);
        let lost = if has_whole { BEFORE_BOOT_FILES } else { 0 };
        let vms = PER_VM_MEMORY * self.vms.len() as u64;
        let fixed = FIXED_MEMORY + vms + sessions + channels + pools + lost;
        guests.saturating_add(guests >> PAGE_TABLE_SHIFT).saturating_add(fixed + boot_files)
    }

    /// Returns the memory of the emulated machine in bytes: as requested, else the least plus a
    /// margin.
    pub fn machine_memory(&self, boot_files: u64) -> u64 {
        match &self.memory {
            Some((size, _)) => size.0,
            None => self
                .memory_needed(boot_files)
                .saturating_add(MEMORY_STEP / 2)
                .checked_next_multiple_of(MEMORY_STEP)
                .unwrap_or(u64::MAX),
        }
    }
}

impl ResolvedVm {
    /// Returns whether guest memory is one piece of the machine's, because a device accesses it.
    fn needs_one_piece(&self) -> bool {
        self.devices.iter().any(|device| device.bus() == Some(VirtioBus::Mmio))
    }

    /// Checks the kernel file and returns the kernel's length.
    fn kernel_problems(
        &self,
        architecture: Architecture,
        (path, initrd): (&Path, u64),
        problems: &mut Vec<Problem>,
    ) -> u64 {
        let span = self.kernel.span();
        let bytes = match read_kernel(path) {
            Ok(bytes) => bytes,
            Err(error) => {
                problems.push(unreadable(span, "kernel", path, &error));
                return 0;
            }
        };
        let mut refuse = |reason: &dyn Display| {
            let message = format!("{}: {reason}", path.display());
            let help = guest::kernel_help(architecture);
            problems.push(Problem::new(span.clone(), message).help(help));
        };
        let bytes = match guest::unpack(architecture, &bytes) {
            Ok(unpacked) => unpacked.unwrap_or(bytes),
            Err(reason) => {
                refuse(&reason);
                return 0;
            }
        };
        match guest::least_memory(architecture, &bytes, initrd) {
            Err(error) => refuse(&error),
            Ok(least) => {
                if self.memory.get_ref().0 < least {
                    problems.push(self.too_little_memory(least));
                }
            }
        }
        bytes.len() as u64
    }

    fn too_little_memory(&self, least: u64) -> Problem {
        let message = format!(
            "{} of memory is not enough for the kernel of `{}`",
            self.memory.get_ref(),
            self.name
        );
        let help = format!("give it at least {}M", least.div_ceil(1 << 20));
        Problem::new(self.memory.span(), message).help(help)
    }
}

/// Reads the file of a kernel.
///
/// # Errors
/// It is a named pipe, cannot be read, or has more than [`packed::LIMIT`] bytes: a device may have
/// no end.
pub(crate) fn read_kernel(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    input::try_open(path)?.take(packed::LIMIT + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > packed::LIMIT {
        true => Err(io::ErrorKind::FileTooLarge.into()),
        false => Ok(bytes),
    }
}

/// Creates the problem of a file that cannot be read.
pub(crate) fn unreadable(
    span: Range<usize>,
    what: &str,
    path: &Path,
    error: &std::io::Error,
) -> Problem {
    let reason = failure::describe(error);
    let message = format!("cannot read the {what} {}: {reason}", path.display());
    let help = rootfs::advice(path)
        .unwrap_or_else(|| "paths are relative to the folder of this description".to_owned());
    Problem::missing(span, message).code(failure::code_of(error)).help(help)
}

/// Returns the length of a readable regular file.
pub(crate) fn file_length(path: &Path) -> std::io::Result<u64> {
    let metadata = input::try_open(path)?.metadata()?;
    if metadata.is_file() {
        Ok(metadata.len())
    } else {
        Err(std::io::ErrorKind::IsADirectory.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hosted_command::input::testing::with_named_pipe;

    #[test]
    fn named_pipes_are_not_waited_for() {
        let read =
            with_named_pipe(|pipe| [read_kernel(pipe).map(drop), file_length(pipe).map(drop)]);
        for result in read {
            assert_eq!(result.unwrap_err().to_string(), "it is a named pipe");
        }
    }
}
