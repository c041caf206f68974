//! Configuration of disks: `--disk`.

use hosted_command::failure::{self, Failure};
use hosted_command::keyvalue;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Longest name of a disk in bytes (VIRTIO 1.2, section 5.2.6).
pub const NAME: usize = 20;

/// Configuration of a disk: `[[disk]]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// File, block device, or qcow2 image. The last sector of a raw file is padded with zeros.
    pub path: PathBuf,
    /// Read-only for the guest; several VMs may share the file.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ro: bool,
    /// Keep the guest's changes apart from the file and discard them at the end; several VMs may
    /// share the file.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub overlay: bool,
    /// Folder whose files a qcow2 image may name as its backing files.
    pub backing: Option<PathBuf>,
    /// Name for the guest [default: disk and its index].
    #[schemars(length(max = 20))]
    pub id: Option<Name>,
    /// Format of the file [default: qcow2 if its name ends in .qcow2, else raw]; required for a raw
    /// file that looks like an image of another format.
    pub format: Option<Format>,
}

/// Format of a disk file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Sectors in order.
    Raw,
    /// QEMU's copy-on-write format.
    Qcow2,
}

/// Name of a disk, at most 20 bytes (VIRTIO 1.2, section 5.2.6).
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(try_from = "String")]
pub struct Name(pub(crate) String);

impl TryFrom<String> for Name {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        match name.len() <= NAME {
            true => Ok(Self(name)),
            false => Err(format!("the name `{name}` is longer than {NAME} bytes")),
        }
    }
}

impl DiskConfig {
    /// Returns whether the disk is a qcow2 image. The contents do not decide: a guest could write a
    /// qcow2 header into its raw disk.
    pub fn is_image(&self) -> bool {
        match self.format {
            Some(format) => format == Format::Qcow2,
            None => self.path.extension().is_some_and(|extension| extension == "qcow2"),
        }
    }
}

/// Parses `FILE[,KEY=VALUE]...` or `path=FILE[,KEY=VALUE]...`.
pub fn parse(text: &str) -> Result<DiskConfig, Failure> {
    let disk: Result<DiskConfig, Failure> = keyvalue::parse("--disk", "path", text);
    disk.and_then(|disk| match disk.path.as_os_str().is_empty() {
        false => Ok(disk),
        true => Err(Failure::new(failure::BAD_CONFIG, format!("--disk {text}: no file name"))),
    })
    .map_err(|failure| {
        failure.help(
            "use -d FILE or -d path=FILE,ro=on,overlay=on,backing=DIR,id=NAME,format=raw or \
             format=qcow2; \
             `qemu-img convert -O qcow2 OLD NEW` converts other formats",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions() {
        let disk = |path: &str| DiskConfig {
            path: path.into(),
            ro: false,
            overlay: false,
            backing: None,
            id: None,
            format: None,
        };
        assert_eq!(parse("a.img").unwrap(), disk("a.img"));
        let backing = Some("/b".into());
        assert_eq!(parse("a,backing=/b").unwrap(), DiskConfig { backing, ..disk("a") });
        assert_eq!(parse("path=a=b").unwrap(), disk("a=b"));
        let id = Some(Name("root".into()));
        let wanted = DiskConfig { ro: true, id, format: Some(Format::Raw), ..disk("a") };
        assert_eq!(parse("a,ro=on,id=root,format=raw").unwrap(), wanted);
        assert_eq!(parse("ro=off,path=a").unwrap(), disk("a"));
    }

    #[test]
    fn bad_descriptions() {
        for (text, said) in [
            ("a,rw=on", "unknown key `rw`"),
            ("a,format=vmdk", "qemu-img"),
            ("pth=a", "did you mean `path`?"),
            ("ro=on", "`path` is missing"),
            ("a,ro", "`ro` has no value"),
            ("a,ro=yes", "`on` or `off`"),
            ("a,id=123456789012345678901", "20 bytes"),
            ("", "no file name"),
        ] {
            let failure = parse(text).unwrap_err();
            assert_eq!(failure.code(), failure::BAD_CONFIG, "{text}");
            assert!(failure.to_string().contains(said), "{text}: {failure}");
        }
    }
}
