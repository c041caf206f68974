//! Shared directories of `parador run`: their configuration, and folders opened for one VM.

use crate::config::share::{ShareConfig, Tag};
use crate::device;
use crate::device_process::DeviceProcess;
use hosted_command::failure::{Failure, IoContext};
use rustix::fs::{CWD, Mode, OFlags, openat};
use std::os::fd::{AsFd, OwnedFd};

/// Opened shared directory of a VM.
#[derive(Debug)]
pub struct Share {
    name: String,
    folder: OwnedFd,
    read_only: bool,
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
        Ok(Share { name: name.clone(), folder, read_only: self.ro, record })
    }
}

impl Share {
    /// Starts the device process.
    pub fn start(
        &self,
        machine: &device::VmDescriptors<'_>,
        queue: usize,
    ) -> Result<DeviceProcess, Failure> {
        let name = format!("shared directory {}", self.name);
        let share = device::DeviceKind::Share(hosted_devices::Share { read_only: self.read_only });
        device::start(machine, queue, share, &[self.folder.as_fd()], name)
    }
}

#[cfg(test)]
mod tests {
    use crate::config::share::parse;
    use hosted_command::failure;

    #[test]
    fn folders() {
        let folder = tempfile::tempdir().unwrap();
        let open = |path: &str| parse(&format!("{path}:tag")).unwrap().open();
        let share = open(folder.path().to_str().unwrap()).unwrap();
        assert_eq!(&share.record.tag[..4], b"tag\0");
        assert_eq!(open("/nowhere").unwrap_err().code(), failure::MISSING_FILE);
        assert!(open("/proc/self/exe").is_err());
    }
}
