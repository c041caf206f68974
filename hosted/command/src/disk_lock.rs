//! Locks of disk files: one writer or several readers, among Parador VMs and QEMU tools.
//!
//! Two kinds are taken. flock(2) excludes other Parador VMs. QEMU uses open-file-description locks
//! (fcntl(2), `F_OFD_SETLK`) on single bytes (QEMU, `block/file-posix.c`): per permission one byte
//! for holders and one for programs that deny it to others. All are shared locks; a program first
//! takes its own and then checks whether the opposite byte is locked. Both kinds belong to the open
//! file description: they last as long as any process of the VM has it open.

use crate::failure::{self, Failure};
use crate::input;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use rustix::fs::{FlockOperation, flock};
use std::fs::File;
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Time to wait for a file in use: the processes of a killed VM may still be exiting.
const TIMEOUT: Duration = Duration::from_millis(500);
/// Time for the host kernel to close a file of an exited VM.
const RELEASE: Duration = Duration::from_secs(2);
/// Interval between two attempts.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// First byte of the permissions that a QEMU tool holds.
const HELD: i64 = 100;
/// First byte of the permissions that a QEMU tool denies to others.
const REFUSED: i64 = 200;
/// QEMU's permissions by index: consistent read, write, resize (QEMU,
/// `include/block/block-common.h`).
const READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;
/// Permissions denied to others while a VM reads.
const UNSHARED: [i64; 2] = [WRITE, RESIZE];

/// Locks the file for this VM alone; readers may share it.
///
/// # Errors
/// Another program has the file open, or the host refuses the lock.
pub fn lock(file: &File, path: &Path, is_reader: bool) -> Result<(), Failure> {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        let owner = match take_flock(file, is_reader) {
            Ok(true) => match take_qemu(file, is_reader) {
                Ok(true) => return Ok(()),
                Ok(false) => "another program, such as QEMU",
                Err(error) => return Err(Failure::file("lock disk", path, &error.into())),
            },
            Ok(false) => "another VM",
            Err(error) => return Err(Failure::file("lock disk", path, &error.into())),
        };
        if Instant::now() >= deadline {
            let text = format!("disk {} is in use by {owner}", path.display());
            return Err(Failure::new(failure::OS_ERROR, text)
                .help("several VMs can share a disk with ro=on in each"));
        }
        thread::sleep(POLL_INTERVAL);
    }
}

/// Returns whether no Parador VM conflicts.
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

/// Returns whether no QEMU tool conflicts. After a conflict, no lock stays.
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
        // File system without such locks: QEMU uses none there, either.
        Err(Errno::EINVAL | Errno::ENOLCK | Errno::EOPNOTSUPP | Errno::ENOSYS) => return Ok(true),
        // Another program holds an exclusive lock on the byte.
        Err(Errno::EAGAIN | Errno::EACCES) => false,
        result => result?,
    };
    if !is_free {
        let all = libc::flock { l_len: 0, ..range(libc::F_UNLCK, 0) };
        fcntl(file, FcntlArg::F_OFD_SETLK(&all))?;
    }
    Ok(is_free)
}

/// Reopens the file without any lock, for [`wait_for_writer`].
pub fn open_again(file: &File) -> io::Result<File> {
    input::open_again(file, File::options().read(true))
}

/// Waits up to [`RELEASE`] until no process has the file open for writing. The writer is unknown:
/// another VM may have opened the file meanwhile.
pub fn wait_for_writer(file: &File) {
    let deadline = Instant::now() + RELEASE;
    // A file system without such locks has no writer.
    while has_writer(file).unwrap_or(false) && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(1));
    }
}

/// Returns whether a VM or QEMU tool has the file open for writing.
fn has_writer(file: &File) -> Result<bool, Errno> {
    let mut found = range(libc::F_WRLCK, HELD + WRITE);
    fcntl(file, FcntlArg::F_OFD_GETLK(&mut found))?;
    Ok(i32::from(found.l_type) != libc::F_UNLCK)
}

/// Creates the lock of one byte.
const fn range(kind: i32, byte: i64) -> libc::flock {
    let (l_type, l_whence) = (kind as i16, libc::SEEK_SET as i16);
    libc::flock { l_type, l_whence, l_start: byte, l_len: 1, l_pid: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A writer is waited for as long as any process has its open file description; a reader is
    /// not.
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
