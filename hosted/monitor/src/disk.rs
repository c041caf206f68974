//! Disks of `parador run`: their configuration, and their files, opened and locked for one VM.

use crate::config::disk::{DiskConfig, NAME, Name};
use crate::device;
use crate::device_process::DeviceProcess;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::input;
use hosted_command::lock::is_at;
use hosted_devices::Base;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::{File, FileType, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

mod backing;
mod lock;

use backing::BackingFile;

/// Bytes per sector.
const SECTOR: u64 = 512;
/// Magic number of a qcow2 image (QEMU, `docs/interop/qcow2.txt`).
const QCOW2: [u8; 4] = *b"QFI\xfb";
/// Image formats: name, and place and bytes of the magic number (QEMU, `block/`).
const IMAGES: [(&str, usize, &[u8]); 8] = [
    ("qcow2", 0, &QCOW2),
    ("VMDK", 0, b"KDMV"),
    ("VMDK", 0, b"COWD"),
    ("VMDK", 0, b"# Disk DescriptorFile"),
    ("VHDX", 0, b"vhdxfile"),
    ("VHD", 0, b"conectix"),
    ("VDI", 64, b"\x7f\x10\xda\xbe"),
    ("QED", 0, b"QED\0"),
];
/// Bytes from the start that have all magic numbers.
const START: u64 = 68;

/// Opened disk of a VM.
#[derive(Debug)]
pub struct Disk {
    /// File, locked against other writers.
    pub file: File,
    /// Base and file of an overlay: its format, and where changes go.
    overlay: Option<(Base, File)>,
    /// Backing files of the image, from the one that it names on down.
    backing: Vec<BackingFile>,
    /// Description for the VM.
    pub record: proto::hosted::DiskRecord,
    /// Path for messages.
    path: PathBuf,
}

impl DiskConfig {
    /// Returns the name of the disk with this index.
    pub fn name(&self, index: usize) -> String {
        match &self.id {
            Some(Name(name)) if !name.is_empty() => name.clone(),
            _ => format!("disk{index}"),
        }
    }

    /// Returns whether the file itself is never written.
    fn is_only_read(&self) -> bool {
        self.ro || self.overlay
    }

    /// Opens the disk's file for this VM alone; read-only disks may be shared. `number` is the
    /// index of the disk.
    pub fn open(&self, number: usize) -> Result<Disk, Failure> {
        let path = &self.path;
        if self.ro && self.overlay {
            return Err(self.refuse("has both ro=on and overlay=on").help(
                "overlay=on lets the guest write, and discards it; ro=on does not let it write",
            ));
        }
        let failed = |action: &str, error: std::io::Error| Failure::file(action, path, &error);
        let (mut file, kind) = self.open_file()?;
        lock::lock(&file, path, self.is_only_read())?;
        // While the lock was waited for, `parador rootfs --force` may have replaced the disk.
        let is_at = is_at(&file, path).map_err(|error| failed("examine disk", error))?;
        if !is_at && path.exists() {
            return Err(self.refuse("was replaced while it was being opened"));
        }
        let is_image = self.is_image();
        if is_image && !kind.is_file() {
            return Err(self.refuse("is a block device, not a qcow2 image"));
        }
        if self.backing.is_some() && !is_image {
            return Err(self.refuse("has backing=DIR, which is for qcow2 images"));
        }
        let (length, backing) = if is_image {
            let header = self.header(&file)?;
            (header.length, self.backing_files(&file, &header)?)
        } else {
            let length = file.seek(SeekFrom::End(0));
            (length.map_err(|error| failed("measure disk", error))?, Vec::new())
        };
        self.check_length(length, is_image)?;
        if self.format.is_none() && !is_image {
            self.check_start(&mut file)?;
        }
        let mut serial = [0; NAME];
        let name = self.name(number);
        serial[..name.len()].copy_from_slice(name.as_bytes());
        let record = proto::hosted::DiskRecord {
            // The guest reads zeros after the end of a raw file.
            sectors: length.div_ceil(SECTOR),
            read_only: self.ro,
            is_external: is_image || self.overlay,
            serial,
        };
        let overlay = self.changes(is_image)?;
        Ok(Disk { file, overlay, backing, record, path: path.clone() })
    }

    /// Refuses a file of no named format that begins as an image.
    fn check_start(&self, file: &mut File) -> Result<(), Failure> {
        let mut start = Vec::new();
        let read = file.rewind().and_then(|()| file.take(START).read_to_end(&mut start));
        read.map_err(|error| Failure::file("read disk", &self.path, &error))?;
        let is_at = |at: usize, magic| start.get(at..).is_some_and(|rest| rest.starts_with(magic));
        let image = IMAGES.iter().find(|&&(_, at, magic)| is_at(at, magic));
        let Some(&(format, ..)) = image else { return Ok(()) };
        let help = match format {
            "qcow2" => "add format=qcow2 if the image is trusted",
            _ => "convert it: `qemu-img convert -O qcow2 OLD NEW.qcow2`",
        };
        let help = format!("{help}, or format=raw if a guest may have written the header");
        Err(self.refuse(&format!("looks like a {format} image")).help(help))
    }

    /// Checks the length of a raw file in bytes, or the virtual one of an image.
    fn check_length(&self, length: u64, is_image: bool) -> Result<(), Failure> {
        if length == 0 {
            return Err(self.refuse("is empty").help("give it a size: `truncate -s 1G FILE`"));
        }
        if !length.is_multiple_of(SECTOR) && (is_image || self.overlay) {
            let text = format!("has {length} bytes, not a multiple of {SECTOR}");
            return Err(self.refuse(&text).help("pad it: `truncate -s %512 FILE`"));
        }
        Ok(())
    }

    /// Returns the format of an overlay's base, and a new file for the changes.
    fn changes(&self, is_image: bool) -> Result<Option<(Base, File)>, Failure> {
        if !self.overlay {
            return Ok(None);
        }
        let base = if is_image { Base::Qcow2 } else { Base::Raw };
        let changes = tempfile::tempfile();
        Ok(Some((base, changes.os_error("create a file for the changes of a disk")?)))
    }

    /// Reads an image's header: its virtual size, and the backing file that it names. The rest of
    /// the image is only read by a device process.
    fn header(&self, file: &File) -> Result<backing::Header, Failure> {
        let header = backing::Header::read(file);
        let header = header.map_err(|error| Failure::file("read disk", &self.path, &error))?;
        let Some(header) = header else {
            return Err(self
                .refuse("is not a qcow2 image")
                .help("use format=raw, or create an image: `qemu-img create -f qcow2 FILE 10G`"));
        };
        if header.is_encrypted {
            return Err(self
                .refuse("is an encrypted qcow2 image")
                .help("convert it: `qemu-img convert -O qcow2 OLD NEW`"));
        }
        if header.has_snapshots && !self.is_only_read() {
            return Err(self
                .refuse("is a qcow2 image with snapshots, which can only be read")
                .help("add ro=on, or convert it: `qemu-img convert -O qcow2 OLD NEW`"));
        }
        Ok(header)
    }

    /// Opens the backing files of an image with this header.
    fn backing_files(
        &self,
        file: &File,
        header: &backing::Header,
    ) -> Result<Vec<BackingFile>, Failure> {
        match (&header.backing, &self.backing) {
            (None, _) => Ok(Vec::new()),
            (Some(_), None) => Err(self.refuse("is a qcow2 image with a backing file").help(
                "name the folder of its backing files: `backing=DIR`; or merge them: \
                 `qemu-img convert -O qcow2 OLD NEW`",
            )),
            (Some(named), Some(folder)) => {
                let chain = backing::open_chain(file, named, folder);
                chain.map_err(|problem| problem.failure(&self.path))
            }
        }
    }

    /// Opens the file and returns its kind. A block device that is written is opened exclusively,
    /// which refuses one that is mounted or in use by the host for swap or as part of another
    /// device (open(2), `O_EXCL`).
    fn open_file(&self) -> Result<(File, FileType), Failure> {
        let failed = |error: &io::Error| Failure::file("open disk", &self.path, error);
        let unsuitable = || self.refuse("is neither a file nor a block device");
        let found = input::find(&self.path).map_err(|error| failed(&error))?;
        let kind = found.metadata().map_err(|error| failed(&error))?.file_type();
        let is_suitable = kind.is_file() || kind.is_block_device();
        // Checked before: opening a pipe or a terminal may wait.
        if !is_suitable && !kind.is_dir() {
            return Err(unsuitable());
        }
        let is_exclusive = kind.is_block_device() && !self.is_only_read();
        let exclusive = if is_exclusive { OFlags::EXCL } else { OFlags::empty() };
        let mut options = OpenOptions::new();
        options.read(true).write(!self.is_only_read());
        options.custom_flags(exclusive.bits().cast_signed());
        let file = input::open_again(&found, &options).map_err(|error| {
            let failure = failed(&error);
            match failure.code() {
                _ if is_exclusive && error.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => {
                    let text = format!("disk {} is in use by the host", self.path.display());
                    Failure::new(failure::OS_ERROR, text)
                        .help("unmount it or stop its other user; `lsblk` shows it")
                }
                failure::PERMISSION if !self.is_only_read() => failure
                    .help("add ro=on for read-only access, or overlay=on to discard the changes"),
                _ => failure,
            }
        })?;
        if is_suitable { Ok((file, kind)) } else { Err(unsuitable()) }
    }

    fn refuse(&self, text: &str) -> Failure {
        Failure::new(failure::BAD_CONFIG, format!("disk {} {text}", Path::display(&self.path)))
    }
}

/// Closes the disks of an exited VM and waits until the host kernel has closed them, too: it
/// releases files of io_uring(7) shortly after the exit of the process. Read-only disks are not
/// waited for.
pub fn release(disks: Vec<Disk>) {
    let written = disks.iter().filter(|disk| !disk.record.read_only && disk.overlay.is_none());
    // A file that cannot be reopened cannot be checked.
    let again: Vec<File> = written.filter_map(|disk| lock::open_again(&disk.file).ok()).collect();
    drop(disks);
    again.iter().for_each(lock::wait_for_writer);
}

impl Disk {
    /// Starts the device process of a qcow2 image; `queue` is the index of its request queue.
    pub fn start(
        &self,
        machine: &device::VmDescriptors<'_>,
        queue: usize,
    ) -> Option<Result<DeviceProcess, Failure>> {
        let proto::hosted::DiskRecord { sectors, read_only, is_external, .. } = self.record;
        let base = self.overlay.as_ref().map(|overlay| overlay.0);
        let config = hosted_devices::ImageConfig { base, read_only, sectors };
        let formats = self.backing.iter().map(|backing| backing.format).collect();
        let image = device::DeviceKind::Image(config, formats);
        let changes = self.overlay.iter().map(|(_, changes)| changes.as_fd());
        let backing = self.backing.iter().map(|backing| backing.file.as_fd());
        let files: Vec<_> =
            std::iter::once(self.file.as_fd()).chain(changes).chain(backing).collect();
        let name = format!("disk {}", self.path.display());
        is_external.then(|| device::start(machine, queue, image, &files, name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::disk::parse;
    use rustix::fs::{CWD, Mode, mknodat};
    use std::process::{Command, Stdio};
    use std::sync::mpsc;
    use std::thread;
    use std::time::{Duration, Instant};

    #[test]
    fn files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let open = |more: &str| parse(&format!("{}{more}", path.display())).unwrap().open(1);
        assert_eq!(open("").unwrap_err().code(), failure::MISSING_FILE);
        for (length, sectors) in [(511, 1), (513, 2)] {
            std::fs::write(&path, vec![0; length]).unwrap();
            assert_eq!(open("").unwrap().record.sectors, sectors, "padded");
            assert_eq!(open(",overlay=on").unwrap_err().code(), failure::BAD_CONFIG);
        }
        std::fs::write(&path, []).unwrap();
        assert_eq!(open("").unwrap_err().code(), failure::BAD_CONFIG);
        std::fs::write(&path, vec![0; 1024]).unwrap();
        let disk = open("").unwrap();
        assert_eq!((disk.record.sectors, &disk.record.serial[..6]), (2, b"disk1\0".as_slice()));
        assert!(open(",ro=on").unwrap_err().to_string().contains("in use"));
        drop(disk);
        let overlays = (open(",overlay=on").unwrap(), open(",overlay=on").unwrap());
        assert!(!overlays.0.record.read_only && overlays.0.record.is_external);
        assert!(open("").unwrap_err().to_string().contains("in use"));
        drop(overlays);
        let both = open(",ro=on,overlay=on").unwrap_err();
        assert!(both.to_string().contains("both ro=on and overlay=on"));
        let readers = (open(",ro=on").unwrap(), open(",ro=on").unwrap());
        assert!(readers.0.record.read_only);
        drop(readers);
        locks(&path);
        for (format, at, magic) in IMAGES {
            for end in [at + magic.len(), 512] {
                let mut image = vec![0; end];
                image[at..][..magic.len()].copy_from_slice(magic);
                std::fs::write(&path, &image).unwrap();
                let failure = open("").unwrap_err().to_string();
                assert!(failure.contains(&format!("looks like a {format} image")), "{failure}");
                assert!(open(",format=raw").is_ok());
                image[at] ^= 1;
                std::fs::write(&path, &image).unwrap();
                assert!(open("").is_ok(), "{format}");
            }
        }
        images(folder.path());
        let folder = parse(folder.path().to_str().unwrap()).unwrap();
        assert!(folder.open(0).is_err());
    }

    #[test]
    fn pipes_are_not_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        mknodat(CWD, &path, rustix::fs::FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        for more in ["", ",ro=on", ",overlay=on", ",format=qcow2,ro=on"] {
            let disk = parse(&format!("{}{more}", path.display())).unwrap();
            let (sender, receiver) = mpsc::channel();
            thread::spawn(move || sender.send(disk.open(0)));
            let failure = receiver.recv_timeout(Duration::from_secs(20)).expect("an end");
            let failure = failure.unwrap_err();
            assert_eq!(failure.code(), failure::BAD_CONFIG, "{more}");
            assert!(failure.to_string().contains("neither a file nor a block device"), "{failure}");
        }
    }

    /// Excludes QEMU tools and `parador` from each other's disks.
    fn locks(path: &Path) {
        let open = |more: &str| parse(&format!("{}{more}", path.display())).unwrap().open(1);
        let qemu = |options: &[&str]| {
            let mut command = Command::new("qemu-io");
            command.args(["-f", "raw", "-c", "read 0 512"]).args(options).arg(path);
            command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
            command.spawn().unwrap()
        };
        // Its first write shows that it has the file open; then it sleeps.
        let mut writer = qemu(&["-c", "write -P 9 0 512", "-c", "sleep 100000"]);
        let deadline = Instant::now() + Duration::from_secs(20);
        while std::fs::read(path).unwrap()[0] != 9 {
            assert!(Instant::now() < deadline, "it writes nothing");
        }
        for more in ["", ",ro=on"] {
            let failure = open(more).unwrap_err();
            assert_eq!(failure.code(), failure::OS_ERROR, "{more}: {failure}");
            assert!(failure.to_string().contains("such as QEMU"), "{more}: {failure}");
        }
        writer.kill().and_then(|()| writer.wait()).unwrap();
        // A read-only QEMU tool permits writers, because it takes no deny lock: a reader of ours
        // may open the file concurrently.
        let disk = open(",ro=on").unwrap();
        assert!(qemu(&["-r"]).wait().unwrap().success());
        assert!(!qemu(&[]).wait().unwrap().success(), "QEMU writes what we read");
        drop(disk);
        let disk = open("").unwrap();
        let output = qemu(&[]).wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && said.contains("lock"), "{said}");
        drop(disk);
        assert!(qemu(&[]).wait().unwrap().success(), "it is free again");
    }

    fn images(folder: &Path) {
        let path = folder.join("disk.qcow2");
        let open = |more: &str| parse(&format!("{}{more}", path.display())).unwrap().open(1);
        let write = |field: usize, value: u8| {
            let mut header = [0; 4096];
            header[..4].copy_from_slice(&QCOW2);
            // Names of 3 bytes, clusters of 4 KiB, 16 MiB.
            (header[19], header[23], header[28]) = (3, 12, 1);
            header[field] |= value;
            std::fs::write(&path, header).unwrap();
        };
        write(0, 0);
        let disk = open("").unwrap();
        assert_eq!((disk.record.sectors, disk.record.is_external), (1 << 15, true));
        drop(disk);
        for (field, said) in [
            (1, "not a qcow2 image"),
            (15, "backing file"),
            (35, "encrypted"),
            (63, "snapshots"),
            (31, "bytes"),
        ] {
            write(field, 1);
            let failure = open("").unwrap_err();
            assert_eq!(failure.code(), failure::BAD_CONFIG);
            assert!(failure.to_string().contains(said), "{said}: {failure}");
        }
        write(63, 1);
        assert!(open(",ro=on").is_ok());
        std::fs::write(&path, [0; 512]).unwrap();
        assert!(open("").unwrap_err().to_string().contains("not a qcow2 image"));
        assert!(!open(",format=raw").unwrap().record.is_external);
    }
}
