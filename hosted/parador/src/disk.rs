//! Disks of `parador run`: what the user says of them, and files opened and locked for one machine.

use crate::failure::{self, Failure};
use crate::keyvalue;
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Bytes of a sector.
const SECTOR: u64 = 512;
/// How long a file may be in use by others: a machine that has just been killed needs a moment to be gone.
const PATIENCE: Duration = Duration::from_millis(500);
/// First bytes of a qcow2 image (QEMU, `docs/interop/qcow2.txt`).
const QCOW2: [u8; 4] = *b"QFI\xfb";
/// Bytes of a disk's name (VIRTIO 1.2, section 5.2.6).
const NAME: usize = 20;

/// What the user says of a disk: `[[disk]]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// A file of whole sectors of 512 bytes, or a block device.
    pub path: PathBuf,
    /// The guest only reads, and several machines may have the file.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    ro: bool,
    /// Name for the guest [default: disk and its number].
    #[schemars(length(max = 20))]
    id: Option<Name>,
    /// What is in the file; said, it stops the question whether it is a qcow2 image.
    format: Option<Format>,
}

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
enum Format {
    /// The disk's sectors, one after another.
    Raw,
}

/// A disk's name: at most 20 bytes (VIRTIO 1.2, section 5.2.6).
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(try_from = "String")]
struct Name(String);

impl TryFrom<String> for Name {
    type Error = String;

    fn try_from(name: String) -> Result<Self, String> {
        match name.len() <= NAME {
            true => Ok(Self(name)),
            false => Err(format!("`{name}` has more than {NAME} bytes")),
        }
    }
}

/// A disk, ready to be given to a machine.
#[derive(Debug)]
pub struct Disk {
    /// The file, which nobody else writes to.
    pub file: File,
    /// What the machine is told of it.
    pub record: proto::wedge::Disk,
}

/// Reads `FILE[,KEY=VALUE]...` or `path=FILE[,KEY=VALUE]...`.
pub fn parse(text: &str) -> Result<Description, Failure> {
    let disk: Result<Description, Failure> = keyvalue::parse("--disk", "path", text);
    disk.and_then(|disk| match disk.path.as_os_str().is_empty() {
        false => Ok(disk),
        true => Err(Failure::new(failure::BAD_CONFIG, format!("--disk {text}: it names no file"))),
    })
    .map_err(|failure| {
        failure.help(
            "write -d FILE or -d path=FILE,ro=on,id=NAME,format=raw; \
             `qemu-img convert -O raw OLD NEW` converts other formats",
        )
    })
}

impl Description {
    /// Opens the disk's file for this machine alone; readers may share it. `number` counts the machine's disks.
    pub fn open(&self, number: usize) -> Result<Disk, Failure> {
        let path = &self.path;
        let failed = |action: &str, error: std::io::Error| Failure::file(action, path, &error);
        let opened = OpenOptions::new().read(true).write(!self.ro).open(path);
        let mut file = opened.map_err(|error| {
            let failure = failed("open disk", error);
            match failure.code() {
                failure::PERMISSION if !self.ro => {
                    failure.help("add ro=on if it is to be read only")
                }
                _ => failure,
            }
        })?;
        let kind = file.metadata().map_err(|error| failed("look at disk", error))?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(self.refuse("is no file and no block device"));
        }
        self.lock(&file)?;
        let length = file.seek(SeekFrom::End(0)).map_err(|error| failed("measure disk", error))?;
        if length == 0 || !length.is_multiple_of(SECTOR) {
            let text = format!("has {length} bytes, which is no multiple of {SECTOR} above 0");
            return Err(self.refuse(&text).help("fill it up: `truncate -s %512 FILE`"));
        }
        if self.format.is_none() {
            let mut start = [0; QCOW2.len()];
            let read = file.rewind().and_then(|()| file.read_exact(&mut start));
            read.map_err(|error| failed("read disk", error))?;
            if start == QCOW2 {
                return Err(self
                    .refuse("looks like a qcow2 image")
                    .help("convert it: `qemu-img convert -O raw OLD NEW`; or say format=raw"));
            }
        }
        let mut serial = [0; NAME];
        let name = match &self.id {
            Some(Name(name)) if !name.is_empty() => name.clone(),
            _ => format!("disk{number}"),
        };
        serial[..name.len()].copy_from_slice(name.as_bytes());
        let record = proto::wedge::Disk {
            sectors: length / SECTOR,
            read_only: self.ro,
            is_elsewhere: false,
            serial,
        };
        Ok(Disk { file, record })
    }

    /// The lock belongs to the open file: it lasts as long as any process of the machine has it.
    fn lock(&self, file: &File) -> Result<(), Failure> {
        let how = if self.ro {
            FlockOperation::NonBlockingLockShared
        } else {
            FlockOperation::NonBlockingLockExclusive
        };
        let deadline = Instant::now() + PATIENCE;
        loop {
            match flock(file, how) {
                Ok(()) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(Errno::WOULDBLOCK) if Instant::now() < deadline => {
                    thread::sleep(Duration::from_millis(20));
                }
                Err(Errno::WOULDBLOCK) => {
                    let text = format!("disk {} is in use by another machine", self.path.display());
                    return Err(Failure::new(failure::OS_ERROR, text)
                        .help("a file can be the disk of several machines with ro=on in each"));
                }
                Err(error) => return Err(Failure::file("lock disk", &self.path, &error.into())),
            }
        }
    }

    fn refuse(&self, text: &str) -> Failure {
        Failure::new(failure::BAD_CONFIG, format!("disk {} {text}", Path::display(&self.path)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions() {
        let disk =
            |path: &str| Description { path: path.into(), ro: false, id: None, format: None };
        assert_eq!(parse("a.img").unwrap(), disk("a.img"));
        assert_eq!(parse("path=a=b").unwrap(), disk("a=b"));
        let id = Some(Name("root".into()));
        let wanted = Description { ro: true, id, format: Some(Format::Raw), ..disk("a") };
        assert_eq!(parse("a,ro=on,id=root,format=raw").unwrap(), wanted);
        assert_eq!(parse("ro=off,path=a").unwrap(), disk("a"));
    }

    #[test]
    fn bad_descriptions() {
        for (text, said) in [
            ("a,rw=on", "unknown key `rw`"),
            ("a,format=qcow2", "qemu-img"),
            ("pth=a", "did you mean `path`?"),
            ("ro=on", "it has no `path`"),
            ("a,ro", "`ro` has no value"),
            ("a,ro=yes", "`on` or `off`"),
            ("a,id=123456789012345678901", "20 bytes"),
            ("", "names no file"),
        ] {
            let failure = parse(text).unwrap_err();
            assert_eq!(failure.code(), failure::BAD_CONFIG, "{text}");
            assert!(failure.to_string().contains(said), "{text}: {failure}");
        }
    }

    #[test]
    fn files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let open = |more: &str| parse(&format!("{}{more}", path.display())).unwrap().open(1);
        assert_eq!(open("").unwrap_err().code(), failure::MISSING_FILE);
        for length in [0, 511, 513] {
            std::fs::write(&path, vec![0; length]).unwrap();
            assert_eq!(open("").unwrap_err().code(), failure::BAD_CONFIG);
        }
        std::fs::write(&path, vec![0; 1024]).unwrap();
        let disk = open("").unwrap();
        assert_eq!((disk.record.sectors, &disk.record.serial[..6]), (2, b"disk1\0".as_slice()));
        assert!(open(",ro=on").unwrap_err().to_string().contains("in use"));
        drop(disk);
        let readers = (open(",ro=on").unwrap(), open(",ro=on").unwrap());
        assert!(readers.0.record.read_only);
        drop(readers);
        let mut image = vec![0; 512];
        image[..4].copy_from_slice(&QCOW2);
        std::fs::write(&path, image).unwrap();
        assert!(open("").unwrap_err().to_string().contains("qcow2"));
        assert!(open(",format=raw").is_ok());
        let folder = parse(folder.path().to_str().unwrap()).unwrap();
        assert!(folder.open(0).is_err());
    }
}
