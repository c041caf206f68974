//! Locks of a disk's file: one writer, or readers, whether they are VMs of Parador or programs of QEMU.
//!
//! Two kinds are taken. flock(2) keeps VMs of Parador apart. QEMU knows only locks of open files (fcntl(2), `F_OFD_SETLK`) on single bytes
//! (QEMU, `block/file-posix.c`): for each permission a byte that says who has it, and one that says who grants it to nobody else. All of
//! them are shared locks; a program takes its own first, and then looks whether the opposite byte is locked. Both kinds belong to the open
//! file: they last as long as any process of the VM has it.

use crate::failure::{self, Failure};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// How long a file may be in use by others: a VM that has just been killed needs a moment to be gone.
const PATIENCE: Duration = Duration::from_millis(500);
/// How long the host's kernel may take to close a file of a VM that has ended.
const RELEASE: Duration = Duration::from_secs(2);
/// Pause between two tries.
const PAUSE: Duration = Duration::from_millis(20);
/// First of the bytes that say which permissions a program of QEMU has.
const HELD: i64 = 100;
/// First of the bytes that say which permissions it grants to nobody else.
const REFUSED: i64 = 200;
/// QEMU's permissions by number: consistent read, write, resize (QEMU, `include/block/block-common.h`).
const READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;
/// Nobody else may change what a VM reads.
const UNSHARED: [i64; 2] = [WRITE, RESIZE];

/// Takes the file for this VM alone; readers may share it.
///
/// # Errors
/// Another program has it, or the host refuses the lock.
pub fn lock(file: &File, path: &Path, is_reader: bool) -> Result<(), Failure> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let owner = match take_flock(file, is_reader) {
            Ok(true) => match take_qemu(file, is_reader) {
                Ok(true) => return Ok(()),
                Ok(false) => "another program, such as QEMU",
                Err(error) => return Err(Failure::file("lock disk", path, &error.into())),
            },
            Ok(false) => "another machine",
            Err(error) => return Err(Failure::file("lock disk", path, &error.into())),
        };
        if Instant::now() >= deadline {
            let text = format!("disk {} is in use by {owner}", path.display());
            return Err(Failure::new(failure::OS_ERROR, text)
                .help("a file can be the disk of several machines with ro=on in each"));
        }
        thread::sleep(PAUSE);
    }
}

/// Whether no VM of Parador is in the way.
fn take_flock(file: &File, is_reader: bool) -> Result<bool, rustix::io::Errno> {
    let how = if is_reader {
        FlockOperation::NonBlockingLockShared
    } else {
        FlockOperation::NonBlockingLockExclusive
    };
    match flock(file, how) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Whether no program of QEMU is in the way. If one is, no lock stays.
fn take_qemu(file: &File, is_reader: bool) -> Result<bool, Errno> {
    let held: &[i64] = if is_reader { &[READ] } else { &[READ, WRITE, RESIZE] };
    let taken = || -> Result<bool, Errno> {
        for byte in held.iter().map(|bit| HELD + bit).chain(UNSHARED.map(|bit| REFUSED + bit)) {
            fcntl(file, FcntlArg::F_OFD_SETLK(&range(libc::F_RDLCK, byte)))?;
        }
        let opposite = held.iter().map(|bit| REFUSED + bit).chain(UNSHARED.map(|bit| HELD + bit));
        for byte in opposite {
            let mut found = range(libc::F_WRLCK, byte);
            fcntl(file, FcntlArg::F_OFD_GETLK(&mut found))?;
            if i32::from(found.l_type) != libc::F_UNLCK {
                return Ok(false);
            }
        }
        Ok(true)
    };
    let is_free = match taken() {
        // A file system without such locks: QEMU has none there, either.
        Err(Errno::EINVAL | Errno::ENOLCK | Errno::EOPNOTSUPP | Errno::ENOSYS) => return Ok(true),
        // Somebody has locked a byte for itself alone.
        Err(Errno::EAGAIN | Errno::EACCES) => false,
        result => result?,
    };
    if !is_free {
        let all = libc::flock { l_len: 0, ..range(libc::F_UNLCK, 0) };
        fcntl(file, FcntlArg::F_OFD_SETLK(&all))?;
    }
    Ok(is_free)
}

/// Opens the file once more, without any lock. It is looked at only: see [`wait_for_writer`].
pub fn open_again(file: &File) -> io::Result<File> {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Waits until nobody writes the file any more, for [`RELEASE`] at most: who it is cannot be told, and another machine may have taken it.
pub fn wait_for_writer(file: &File) {
    let deadline = Instant::now() + RELEASE;
    // A file system without such locks has no writer.
    while has_writer(file).unwrap_or(false) && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
}

/// Whether a VM, or a program of QEMU, has the file for writing.
fn has_writer(file: &File) -> Result<bool, Errno> {
    let mut found = range(libc::F_WRLCK, HELD + WRITE);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut found))?;
    Ok(i32::from(found.l_type) != libc::F_UNLCK)
}

/// One byte of a file.
const fn range(kind: i32, byte: i64) -> libc::flock {
    let (l_type, l_whence) = (kind as i16, libc::SEEK_SET as i16);
    libc::flock { l_type, l_whence, l_start: byte, l_len: 1, l_pid: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A writer is seen as long as anyone has its open file, and is waited for; a reader is none.
    #[test]
    fn a_writer_is_waited_for() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let writer = File::options().read(true).write(true).open(file.path()).unwrap();
        let again = open_again(&writer).unwrap();
        let reader = open_again(&writer).unwrap();
        lock(&reader, file.path(), true).unwrap();
        assert_eq!(has_writer(&again), Ok(false));
        drop(reader);
        lock(&writer, file.path(), false).unwrap();
        let kept = writer.try_clone().unwrap();
        drop(writer);
        assert_eq!(has_writer(&again), Ok(true));
        let start = Instant::now();
        let later = thread::spawn(move || {
            thread::sleep(Duration::from_millis(100));
            drop(kept);
        });
        wait_for_writer(&again);
        assert!((100..2000).contains(&start.elapsed().as_millis()), "{:?}", start.elapsed());
        later.join().unwrap();
    }
}
