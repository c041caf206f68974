//! Shared directories of `parador run`: their configuration, and folders opened for one VM.

use crate::config::share::{ShareConfig, Tag};
use crate::device;
use crate::device_process::DeviceProcess;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::messages::{Level, say};
use rustix::fs::{CWD, Mode, OFlags, StatVfsMountFlags, fstatvfs, openat};
use rustix::process::geteuid;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Opened shared directory of a VM.
#[derive(Debug)]
pub struct Share {
    name: String,
    folder: OwnedFd,
    config: hosted_devices::Share,
    /// Description for the VM.
    pub record: proto::hosted::ShareRecord,
}

impl ShareConfig {
    /// Opens the folder.
    pub fn open(&self) -> Result<Share, Failure> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder =
            openat(CWD, &self.path, flags, Mode::empty()).file_error("open folder", &self.path)?;
        let Tag(name) = &self.tag;
        let mut record = proto::hosted::ShareRecord::default();
        record.tag[..name.len()].copy_from_slice(name.as_bytes());
        if self.owners {
            self.check_owners(&folder)?;
        }
        let config = hosted_devices::Share { read_only: self.ro, owners: self.owners };
        Ok(Share { name: name.clone(), folder, config, record })
    }

    /// Refuses a folder with owners for other users than root, and warns if other users could run
    /// its programs or open its devices.
    fn check_owners(&self, folder: &OwnedFd) -> Result<(), Failure> {
        let text = |text: &str| format!("shared directory {}: {text}", self.path.display());
        if !geteuid().is_root() {
            let text = text("owners=on serves files of all users, which only root may");
            return Err(Failure::new(failure::PERMISSION, text));
        }
        if self.ro {
            return Ok(());
        }
        let flags = fstatvfs(folder).os_error("examine a file system")?.f_flag;
        let is_harmless = flags.contains(StatVfsMountFlags::NOSUID | StatVfsMountFlags::NODEV);
        let path = fs::canonicalize(&self.path).file_error("find folder", &self.path)?;
        if !is_harmless && !is_private(&path).file_error("examine folder", &path)? {
            let risk = "owners=on: users of this host could run set-user-ID programs and open \
                devices that the guest makes there; share a folder below one with `chmod 700`, or \
                mount it with nosuid,nodev";
            say(Level::Warn, &text(risk));
        }
        Ok(())
    }
}

/// Returns whether a folder above this one, whose mode the guest cannot change, admits only its
/// owner, root.
fn is_private(path: &Path) -> io::Result<bool> {
    const OTHERS: u32 = 0o077;
    for above in path.ancestors().skip(1) {
        let found = fs::metadata(above)?;
        if found.uid() == 0 && found.mode() & OTHERS == 0 {
            return Ok(true);
        }
    }
    Ok(false)
}

impl Share {
    /// Starts the device process.
    pub fn start(
        &self,
        machine: &device::VmDescriptors<'_>,
        queue: usize,
    ) -> Result<DeviceProcess, Failure> {
        let name = format!("shared directory {}", self.name);
        let share = device::DeviceKind::Share(self.config);
        device::start(machine, queue, share, &[self.folder.as_fd()], name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::share::parse;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn folders() {
        let folder = tempfile::tempdir().unwrap();
        let open = |path: &str| parse(&format!("{path}:tag")).unwrap().open();
        let share = open(folder.path().to_str().unwrap()).unwrap();
        assert_eq!(&share.record.tag[..4], b"tag\0");
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
        assert!(is_private(&folder.path().join("below")).unwrap() == geteuid().is_root());
        assert!(!is_private(Path::new("/usr/bin")).unwrap());
        assert_eq!(open("/nowhere").unwrap_err().code(), failure::MISSING_FILE);
        assert!(open("/proc/self/exe").is_err());
    }
}
