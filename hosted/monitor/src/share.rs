//! Shared directories of `parador run`: their configuration, and folders opened for one VM.

use crate::device;
use crate::vm_process::DeviceProcess;
use hosted_command::failure::{self, Failure};
use hosted_command::keyvalue;
use rustix::fs::{CWD, Mode, OFlags, openat};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

/// Longest tag in bytes.
const TAG: usize = 32;

/// Configuration of a shared directory: `[[share]]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ShareConfig {
    /// Folder on the host.
    pub path: PathBuf,
    /// Mount tag for the guest.
    #[schemars(length(min = 1, max = 32))]
    tag: Tag,
    /// Read-only for the guest.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    ro: bool,
}

/// Mount tag: 1 to 32 printable ASCII characters.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(try_from = "String")]
struct Tag(String);

impl TryFrom<String> for Tag {
    type Error = String;

    fn try_from(tag: String) -> Result<Self, String> {
        match (1..=TAG).contains(&tag.len()) && tag.bytes().all(|byte| byte.is_ascii_graphic()) {
            true => Ok(Self(tag)),
            false => {
                Err(format!("the tag `{tag}` must have 1 to {TAG} printable ASCII characters"))
            }
        }
    }
}

/// Opened shared directory of a VM.
#[derive(Debug)]
pub struct Share {
    name: String,
    folder: OwnedFd,
    read_only: bool,
    /// Description for the VM.
    pub record: proto::hosted::ShareRecord,
}

/// Parses `DIR:TAG[,KEY=VALUE]...`.
pub fn parse(text: &str) -> Result<ShareConfig, Failure> {
    let (place, options) = text.split_once(',').unwrap_or((text, ""));
    let parsed = match place.rsplit_once(':') {
        Some((path, tag)) if !path.is_empty() => {
            let comma = if options.is_empty() { "" } else { "," };
            keyvalue::parse("--share", "path", &format!("{path},tag={tag}{comma}{options}"))
        }
        _ => {
            let text = format!("--share {text}: expected DIR:TAG");
            Err(Failure::new(failure::BAD_CONFIG, text))
        }
    };
    parsed.map_err(|failure| failure.help("use --share DIR:TAG or --share DIR:TAG,ro=on"))
}

impl ShareConfig {
    /// Opens the folder.
    pub fn open(&self) -> Result<Share, Failure> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = openat(CWD, &self.path, flags, Mode::empty())
            .map_err(|error| Failure::file("open folder", &self.path, &error.into()))?;
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
        device::start(machine, queue, share, self.folder.as_fd(), name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions() {
        let share =
            |path: &str, tag: &str, ro| ShareConfig { path: path.into(), tag: Tag(tag.into()), ro };
        assert_eq!(parse("a:b").unwrap(), share("a", "b", false));
        assert_eq!(parse("/a:b:c,ro=on").unwrap(), share("/a:b", "c", true));
        let long = format!("a:{}", "x".repeat(TAG + 1));
        for text in ["", "a", "a:", ":b", "a:b,ro", "a:b,rw=on", "a:b c", &long] {
            assert_eq!(parse(text).unwrap_err().code(), failure::BAD_CONFIG, "{text}");
        }
    }

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
