//! Virtual Ethernet switch between the VMs of one user that name the same socket.
//!
//! It consists of two processes. The first VM starts them; they belong to no VM and exit after the
//! last one. The *keeper* removes the socket file at the end and does nothing else; the *server*, a
//! child of the keeper, forwards frames and can do nothing else. A VM is a connection, which
//! carries frames in both directions, each after its length as a 32-bit big-endian number (QEMU's
//! `-netdev stream`). Only the user can access the socket, and both ends of a connection verify
//! that the peer is the same user.
//!
//! Creating, joining and ending a switch requires the lock of an empty file beside the socket,
//! `.NAME.parador-switch` with access for the user only, so a VM never joins a switch that is about
//! to exit: server and keeper share one open file description of it, so the server's lock stays
//! until the keeper has removed the file. Only a killed switch leaves it; the next one uses it
//! again. The folder itself may be one that others can lock. The server does not trust
//! the VMs: it closes connections with invalid lengths, limits the addresses of each VM, and drops
//! frames for a VM that does not keep up, as any switch does.

use crate::console::bind;
use host_linux::sandbox;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::lock::is_at;
use hosted_command::supervise::{self, AtEnd};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{AtFlags, FlockOperation, OFlags, flock, fstat, statat, unlinkat};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::process::{Uid, geteuid};
use std::collections::{BTreeMap, HashMap};
use std::ffi::{OsStr, OsString};
use std::fs::{File, Metadata, TryLockError};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// MTU of streams. Long frames cost less per byte; with much longer ones TCP stalls at each frame,
/// because a few of them fill its usual window. Measured optimum in both directions: 16 KiB.
pub const STREAM_MTU: u16 = 16_384;
/// First argument of a keeper process.
const MARK: &str = "--switch";
/// First argument of a server process.
const SERVE: &str = "--switch-server";
/// The server's descriptor of the lock file: standard output.
const LOCK: u32 = 1;
/// Longest wait for the lock, and the interval between two attempts.
const PATIENCE: Duration = Duration::from_secs(10);
const INTERVAL: Duration = Duration::from_millis(20);
/// Bytes of a frame's length field.
pub const LENGTH: usize = 4;
/// Valid frame lengths: an Ethernet header at least.
const FRAME: std::ops::RangeInclusive<usize> = 14..=0xffff;
/// Bytes per read.
const CHUNK: usize = 256 << 10;
/// Most bytes queued for a VM; further frames are dropped. About a TCP window.
const WAITING: usize = 4 << 20;
/// Most VMs.
const MACHINES: usize = 256;
/// Most addresses of one VM.
const ADDRESSES: usize = 64;

/// Address of a network card.
type Mac = [u8; 6];

/// Connects to the switch with this socket, and starts it if there is none.
pub fn join(path: &Path) -> Result<UnixStream, Failure> {
    let failed = |action: &str, error: io::Error| Failure::file(action, path, &error);
    let Some(name) = path.file_name() else {
        let text = format!("{} is not a valid socket path", path.display());
        return Err(Failure::new(failure::BAD_CONFIG, text));
    };
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    let opened = File::open(folder).map_err(|error| Failure::file("open", folder, &error))?;
    refuse_other_file(path, path.metadata())?;
    let lock_path = folder.join(lock_name(name));
    // The lock ends with this function. The switch uses a descriptor of its own.
    let _lock = lock(&lock_path, PATIENCE)?;
    let is_stale = match UnixStream::connect(path) {
        Ok(socket) => return check_user(&socket, path).map(|()| socket),
        Err(error) if error.kind() == ErrorKind::NotFound => false,
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => true,
        // There may be a switch, which uses the lock file.
        Err(error) => return Err(failed("connect to switch", error)),
    };
    start(path, name, opened, &lock_path, is_stale).inspect_err(|_| {
        // It is still locked. The failure to start is the one to report.
        let _ = std::fs::remove_file(&lock_path);
    })
}

/// Starts the switch with this socket in the folder `opened` and connects to it. The socket of a
/// killed one is removed.
fn start(
    path: &Path,
    name: &OsStr,
    opened: File,
    lock_path: &Path,
    is_stale: bool,
) -> Result<UnixStream, Failure> {
    let failed = |action: &str, error: io::Error| Failure::file(action, path, &error);
    let for_switch = open_lock(lock_path)?;
    if is_stale {
        refuse_other_file(path, path.symlink_metadata())?;
        std::fs::remove_file(path).map_err(|error| failed("remove", error))?;
    }
    let listener = bind(path).map_err(|error| failed("create switch", error))?;
    let socket = UnixStream::connect(path).map_err(|error| failed("connect to switch", error))?;
    Command::new(supervise::SELF)
        .arg(MARK)
        .arg(name)
        .current_dir("/")
        .env_clear()
        // Signals from this terminal's keys do not reach the switch.
        .process_group(0)
        .stdin(OwnedFd::from(listener))
        .stdout(for_switch)
        .stderr(opened)
        .spawn()
        .map_err(|error| Failure::program("the switch", &error))?;
    Ok(socket)
}

/// Refuses the path of a file that is no socket.
fn refuse_other_file(path: &Path, found: io::Result<Metadata>) -> Result<(), Failure> {
    match found {
        Ok(found) if !found.file_type().is_socket() => {
            let text = format!("{} exists and is not the socket of a switch", path.display());
            Err(Failure::new(failure::BAD_CONFIG, text))
        }
        _ => Ok(()),
    }
}

/// Returns the name of the lock file of the socket `name`, one that no other program uses.
fn lock_name(name: &OsStr) -> OsString {
    let mut lock = OsString::from(".");
    lock.push(name);
    lock.push(".parador-switch");
    lock
}

/// Opens a lock file, and creates it if necessary, for this user only. The switch removes it, so it
/// must have no contents.
fn open_lock(path: &Path) -> Result<File, Failure> {
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    let opened = options.custom_flags(OFlags::NOFOLLOW.bits().cast_signed()).open(path);
    let file = opened.file_error("open", path)?;
    let found = file.metadata().file_error("examine", path)?;
    if !found.is_file() || found.len() != 0 {
        let text = format!("{} exists and is not the lock file of a switch", path.display());
        let help = "move it, or use another path for the switch";
        return Err(Failure::new(failure::BAD_CONFIG, text).help(help));
    }
    if found.uid() != geteuid().as_raw() {
        let text = format!("{} belongs to another user, who could lock it", path.display());
        let help = "use a socket in a folder that only you can write to";
        return Err(Failure::new(failure::PERMISSION, text).help(help));
    }
    Ok(file)
}

/// Takes the lock of a switch, which a process holds for moments.
fn lock(path: &Path, patience: Duration) -> Result<File, Failure> {
    let deadline = Instant::now() + patience;
    loop {
        let file = open_lock(path)?;
        match file.try_lock() {
            // Otherwise a switch has ended and removed it meanwhile.
            Ok(()) if is_at(&file, path).file_error("examine", path)? => return Ok(file),
            Ok(()) => {}
            Err(TryLockError::Error(error)) => return Err(Failure::file("lock", path, &error)),
            Err(TryLockError::WouldBlock) if Instant::now() < deadline => thread::sleep(INTERVAL),
            Err(TryLockError::WouldBlock) => {
                let text = format!(
                    "another process has locked {} for more than {} s",
                    path.display(),
                    patience.as_secs()
                );
                let help = "find it with `fuser`, or use another path for the switch";
                return Err(Failure::new(failure::OS_ERROR, text).help(help));
            }
        }
    }
}

/// Returns whether the peer of a connection is this user.
fn is_of_user(socket: &UnixStream, user: Uid) -> io::Result<bool> {
    Ok(socket_peercred(socket)?.uid == user)
}

/// Refuses a switch of another user.
fn check_user(socket: &UnixStream, path: &Path) -> Result<(), Failure> {
    match is_of_user(socket, geteuid()) {
        Ok(true) => Ok(()),
        Ok(false) => {
            let text = format!("the switch {} belongs to another user", path.display());
            let help = "use a socket in a folder that only you can write to";
            Err(Failure::new(failure::PERMISSION, text).help(help))
        }
        Err(error) => Err(Failure::file("examine switch", path, &error)),
    }
}

/// Serves a switch if this process was started as its keeper or server and returns the exit code;
/// `None` in an ordinary `parador`.
pub fn become_switch() -> Option<ExitCode> {
    let mut arguments = supervise::arguments().skip(1);
    let first = arguments.next()?;
    let done = match (first.to_str()?, arguments.next()) {
        (MARK, Some(name)) => keep(&name),
        (MARK, None) => return Some(ExitCode::from(failure::USAGE)),
        (SERVE, _) => serve(),
        _ => return None,
    };
    Some(ExitCode::from(if done.is_ok() { 0 } else { failure::OS_ERROR }))
}

/// Runs the server of the socket `name` until the last connection ends, and removes the socket.
/// Standard input is the listening socket, standard output the lock file, standard error the folder
/// of both.
fn keep(name: &OsStr) -> io::Result<()> {
    let lock = io::stdout();
    let folder = io::stderr().as_fd().try_clone_to_owned()?;
    let socket = statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW)?.st_ino;
    let failed = |failure: Failure| io::Error::other(failure.to_string());
    let mut server = supervise::own(AtEnd::Kill).map_err(failed)?;
    server.arg(SERVE).stderr(Stdio::null());
    let mut server = server.spawn()?;
    // Only the server keeps the listening socket, so connections fail once it has exited.
    rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
    server.wait()?;
    // The server has the lock, unless it was killed.
    flock(&lock, FlockOperation::LockExclusive)?;
    remove_if(&folder, name, socket)?;
    remove_if(&folder, &lock_name(name), fstat(&lock)?.st_ino)
}

/// Removes a file unless the user has replaced it: it still has the number `inode`.
fn remove_if(folder: &OwnedFd, name: &OsStr, inode: u64) -> io::Result<()> {
    match statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(found) if found.st_ino == inode => Ok(unlinkat(folder, name, AtFlags::empty())?),
        _ => Ok(()),
    }
}

/// Forwards frames until the last connection ends, and exits with the lock.
fn serve() -> io::Result<()> {
    let listener = UnixListener::from(io::stdin().as_fd().try_clone_to_owned()?);
    let lock = io::stdout();
    listener.set_nonblocking(true)?;
    // Landlock as far as the host supports it. Not namespaces: in a user namespace, user IDs of
    // peers would be unmapped.
    let _ = sandbox::restrict_with_landlock();
    let dropped = sandbox::drop_capabilities();
    dropped.map_err(|error| io::Error::from_raw_os_error(error.0))?;
    // The seccomp filter forbids the call later.
    let mut switch = Switch::new(geteuid());
    let filtered = hosted_filters::confine_switch(LOCK);
    filtered.map_err(|error| io::Error::other(error.to_string()))?;
    let mut buffer = vec![0; LENGTH + FRAME.end() + CHUNK];
    loop {
        switch.accept(&listener);
        if switch.peers.is_empty() {
            flock(&lock, FlockOperation::LockExclusive)?;
            switch.accept(&listener);
            if switch.peers.is_empty() {
                return Ok(());
            }
            flock(&lock, FlockOperation::Unlock)?;
        }
        for number in switch.wait(&listener)? {
            switch.receive(number, &mut buffer);
        }
        switch.peers.retain(|_, peer| peer.send());
        let peers = &switch.peers;
        switch.addresses.retain(|_, number| peers.contains_key(number));
    }
}

/// Connections and learned addresses.
struct Switch {
    /// User whose VMs may connect.
    user: Uid,
    peers: BTreeMap<u64, Peer>,
    /// Next connection ID.
    next: u64,
    addresses: HashMap<Mac, u64>,
}

/// A connection.
struct Peer {
    socket: UnixStream,
    /// Incomplete received frame.
    begun: Vec<u8>,
    /// Data to send, and the bytes of it that have been sent.
    waiting: Vec<u8>,
    sent: usize,
    is_closed: bool,
}

impl Switch {
    fn new(user: Uid) -> Self {
        Self { user, peers: BTreeMap::new(), next: 0, addresses: HashMap::new() }
    }

    /// Accepts all pending connections of VMs of the same user.
    fn accept(&mut self, listener: &UnixListener) {
        while let Ok((socket, _)) = listener.accept() {
            let is_own = is_of_user(&socket, self.user).unwrap_or(false);
            if is_own && self.peers.len() < MACHINES && socket.set_nonblocking(true).is_ok() {
                self.peers.insert(self.next, Peer::new(socket));
                self.next += 1;
            }
        }
    }

    /// Waits for events; returns the connections with received data.
    fn wait(&self, listener: &UnixListener) -> io::Result<Vec<u64>> {
        let peers = self.peers.values().map(|peer| {
            let send = if peer.waiting.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
            PollFd::new(&peer.socket, PollFlags::IN | send)
        });
        let listener = PollFd::new(listener, PollFlags::IN);
        let mut fds: Vec<_> = peers.chain([listener]).collect();
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        // A hang-up is received as end of file, too.
        let ready = self.peers.keys().zip(&fds);
        let ready = ready.filter(|(_, fd)| !(fd.revents() - PollFlags::OUT).is_empty());
        Ok(ready.map(|(&number, _)| number).collect())
    }

    /// Receives from a VM and forwards complete frames.
    fn receive(&mut self, number: u64, buffer: &mut [u8]) {
        let Some(peer) = self.peers.get_mut(&number) else { return };
        let begun = peer.begun.len();
        buffer[..begun].copy_from_slice(&peer.begun);
        let received = match peer.socket.read(&mut buffer[begun..]) {
            Ok(received) if received != 0 => received,
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                return;
            }
            _ => {
                peer.is_closed = true;
                return;
            }
        };
        let mut rest = &buffer[..begun + received];
        loop {
            match split_frame(rest) {
                Ok(Some((frame, after))) => {
                    self.forward(number, frame);
                    rest = after;
                }
                Ok(None) => break,
                Err(_) => {
                    if let Some(peer) = self.peers.get_mut(&number) {
                        peer.is_closed = true;
                    }
                    return;
                }
            }
        }
        if let Some(peer) = self.peers.get_mut(&number) {
            peer.begun.clear();
            peer.begun.extend_from_slice(rest);
        }
    }

    /// Forwards a frame, with its length field, to its receivers.
    fn forward(&mut self, from: u64, frame: &[u8]) {
        let Some((to, sender)) = addresses(&frame[LENGTH..]) else { return };
        if !self.learn(sender, from) {
            return;
        }
        match self.addresses.get(&to) {
            Some(number) if *number == from => {}
            Some(number) => {
                if let Some(peer) = self.peers.get_mut(number) {
                    peer.put(frame);
                }
            }
            // Multicast, broadcast or unknown destination: flood.
            None => {
                let others = self.peers.iter_mut().filter(|(number, _)| **number != from);
                others.for_each(|(_, peer)| peer.put(frame));
            }
        }
    }

    /// Returns whether a VM may send from this address: it is the first connected VM to use it.
    fn learn(&mut self, address: Mac, from: u64) -> bool {
        if is_group(&address) {
            return false;
        }
        match self.addresses.get(&address) {
            Some(number) => *number == from,
            None => {
                let own = self.addresses.values().filter(|number| **number == from).count();
                if own < ADDRESSES {
                    self.addresses.insert(address, from);
                }
                own < ADDRESSES
            }
        }
    }
}

impl Peer {
    fn new(socket: UnixStream) -> Self {
        Self { socket, begun: Vec::new(), waiting: Vec::new(), sent: 0, is_closed: false }
    }

    /// Queues a frame, unless the queue is full.
    fn put(&mut self, frame: &[u8]) {
        if self.waiting.len() - self.sent + frame.len() > WAITING {
            return;
        }
        // The sent part is removed once it is larger than the rest, so each byte is moved at most
        // once.
        if self.sent > self.waiting.len() / 2 {
            self.waiting.drain(..self.sent);
            self.sent = 0;
        }
        self.waiting.extend_from_slice(frame);
    }

    /// Sends queued data; `false`: the peer has disconnected.
    fn send(&mut self) -> bool {
        while self.sent < self.waiting.len() {
            match self.socket.write(&self.waiting[self.sent..]) {
                Ok(sent) => self.sent += sent,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(_) => return false,
            }
        }
        if self.sent == self.waiting.len() {
            self.waiting.clear();
            self.sent = 0;
        }
        !self.is_closed
    }
}

/// Splits the first frame, with its length field, from received data; `None`: it is incomplete.
///
/// # Errors
/// The length is invalid, so the position of the next frame is unknown.
pub fn split_frame(received: &[u8]) -> io::Result<Option<(&[u8], &[u8])>> {
    let Some(length) = received.first_chunk::<LENGTH>() else { return Ok(None) };
    let length = u32::from_be_bytes(*length) as usize;
    match FRAME.contains(&length) {
        true => Ok(received.split_at_checked(LENGTH + length)),
        false => Err(ErrorKind::InvalidData.into()),
    }
}

/// Returns destination and source address of a frame (IEEE 802.3).
fn addresses(frame: &[u8]) -> Option<(Mac, Mac)> {
    let (to, rest) = frame.split_first_chunk()?;
    let sender = rest.first_chunk()?;
    Some((*to, *sender))
}

/// Returns whether an address is a multicast or broadcast address.
fn is_group(address: &Mac) -> bool {
    address[0] & 1 != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A switch with three connections, and their other ends.
    fn switch() -> (Switch, Vec<UnixStream>) {
        let mut switch = Switch::new(geteuid());
        let mut ends = Vec::new();
        for number in 0..3 {
            let (ours, theirs) = UnixStream::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            theirs.set_nonblocking(true).unwrap();
            switch.peers.insert(number, Peer::new(ours));
            ends.push(theirs);
        }
        (switch, ends)
    }

    fn card(number: u8) -> Mac {
        [2, 0, 0, 0, 0, number]
    }

    fn frame(to: Mac, from: Mac) -> Vec<u8> {
        let mut bytes = 20_u32.to_be_bytes().to_vec();
        bytes.extend(to);
        bytes.extend(from);
        bytes.extend([7; 8]);
        bytes
    }

    /// Sends bytes from an end; returns the number of bytes received at each end, and whether the
    /// sender is still connected.
    fn sent(
        switch: &mut Switch,
        ends: &mut [UnixStream],
        from: usize,
        bytes: &[u8],
    ) -> ([usize; 3], bool) {
        ends[from].write_all(bytes).unwrap();
        let mut buffer = vec![0; LENGTH + FRAME.end() + CHUNK];
        switch.receive(from as u64, &mut buffer);
        switch.peers.retain(|_, peer| peer.send());
        let came = std::array::from_fn(|end| ends[end].read(&mut buffer).unwrap_or(0));
        (came, switch.peers.contains_key(&(from as u64)))
    }

    #[test]
    fn frames_reach_their_receivers() {
        let (mut switch, mut ends) = switch();
        let mut send = |from, bytes: &[u8]| sent(&mut switch, &mut ends, from, bytes);
        assert_eq!(send(0, &frame([0xff; 6], card(0))), ([0, 24, 24], true), "to all");
        assert_eq!(send(1, &frame(card(0), card(1))), ([24, 0, 0], true));
        assert_eq!(send(0, &frame(card(1), card(0))), ([0, 24, 0], true), "it has been seen");
        assert_eq!(send(0, &frame(card(2), card(0))), ([0, 24, 24], true), "it has not");
        assert_eq!(send(0, &frame(card(0), card(0))), ([0, 0, 0], true), "to itself");
        assert_eq!(send(2, &frame(card(0), card(1))), ([0, 0, 0], true), "another's address");
        assert_eq!(send(2, &frame(card(0), [3; 6])), ([0, 0, 0], true), "a group's address");
        let two = [frame(card(1), card(0)), frame(card(1), card(0))].concat();
        assert_eq!(send(0, &two[..30]), ([0, 24, 0], true), "a part");
        assert_eq!(send(0, &two[30..]), ([0, 24, 0], true), "the rest");
    }

    #[test]
    fn nonsense_closes_the_connection() {
        for length in [0_u32, 13, 0x1_0000, u32::MAX] {
            let (mut switch, mut ends) = switch();
            let mut bytes = frame(card(1), card(0));
            bytes.extend(length.to_be_bytes());
            let (came, stays) = sent(&mut switch, &mut ends, 0, &bytes);
            assert_eq!((came, stays), ([0, 24, 24], false), "{length}");
        }
    }

    #[test]
    fn addresses_of_a_machine_are_bounded() {
        let (mut switch, _ends) = switch();
        assert!((0..200).filter(|&number| switch.learn(card(number), 0)).count() == ADDRESSES);
        assert!(switch.learn(card(0), 0), "a known one");
        assert!(switch.learn(card(250), 1), "another machine");
    }

    #[test]
    fn a_machine_that_takes_nothing_costs_a_bounded_amount() {
        let (mut switch, _ends) = switch();
        let mut long = 0xffff_u32.to_be_bytes().to_vec();
        long.resize(LENGTH + 0xffff, 0);
        long[LENGTH..LENGTH + 6].fill(0xff);
        long[LENGTH + 6..LENGTH + 12].copy_from_slice(&card(0));
        for _ in 0..1000 {
            switch.forward(0, &long);
            switch.peers.retain(|_, peer| peer.send());
        }
        let peer = &switch.peers[&1];
        assert!(peer.waiting.len() - peer.sent <= WAITING);
        assert!(peer.waiting.len() <= 2 * WAITING + long.len());
    }

    #[test]
    fn others_are_not_taken_in() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        assert!(is_of_user(&ours, geteuid()).unwrap());
        assert!(!is_of_user(&ours, Uid::from_raw(geteuid().as_raw() + 1)).unwrap());
    }

    #[test]
    fn refusals() {
        let folder = tempfile::tempdir().unwrap();
        let refused = |path: &Path| join(path).unwrap_err().code();
        assert_eq!(refused(&folder.path().join("none").join("s")), failure::MISSING_FILE);
        assert_eq!(refused(Path::new("/")), failure::BAD_CONFIG);
        let file = folder.path().join("file");
        std::fs::write(&file, "").unwrap();
        assert_eq!(refused(&file), failure::BAD_CONFIG);
        assert!(file.exists());
    }

    #[test]
    fn files_of_others_stay() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("yarn");
        let lock = folder.path().join(lock_name("yarn".as_ref()));
        std::fs::write(path.with_extension("lock"), "").unwrap();
        std::fs::write(&lock, "text").unwrap();
        assert_eq!(join(&path).unwrap_err().code(), failure::BAD_CONFIG);
        std::fs::remove_file(&lock).unwrap();
        // A switch cannot be started: the name is that of a link, which leads nowhere, then to the
        // socket of a killed switch. Its lock file goes.
        let target = folder.path().join("target");
        std::os::unix::fs::symlink(&target, &path).unwrap();
        for has_target in [false, true] {
            has_target.then(|| drop(UnixListener::bind(&target).unwrap()));
            assert!(join(&path).is_err());
            assert!(!lock.exists() && path.is_symlink(), "{has_target}");
        }
        assert!(path.with_extension("lock").exists());

        let opened = OwnedFd::from(File::open(folder.path()).unwrap());
        let inode = target.metadata().unwrap().ino();
        remove_if(&opened, "target".as_ref(), inode + 1).unwrap();
        assert!(target.exists());
        remove_if(&opened, "target".as_ref(), inode).unwrap();
        assert!(!target.exists());
        remove_if(&opened, "target".as_ref(), inode).unwrap();
    }

    #[test]
    fn only_the_user_can_delay_a_switch() {
        let folder = tempfile::tempdir().unwrap();
        // Each user can lock a folder like /tmp.
        let opened = File::open(folder.path()).unwrap();
        flock(&opened, FlockOperation::LockExclusive).unwrap();
        let path = folder.path().join(lock_name("lan".as_ref()));
        let held = lock(&path, Duration::ZERO).unwrap();
        assert_eq!(held.metadata().unwrap().mode() & 0o777, 0o600);
        let failure = lock(&path, Duration::ZERO).unwrap_err();
        assert_eq!(failure.code(), failure::OS_ERROR);
        assert!(failure.to_string().contains(".lan.parador-switch"), "{failure}");
        // The end of the switch: another process takes a new file.
        std::fs::remove_file(&path).unwrap();
        drop(lock(&path, Duration::ZERO).unwrap());
        if geteuid().is_root() {
            std::os::unix::fs::chown(&path, Some(1), None).unwrap();
            assert_eq!(lock(&path, Duration::ZERO).unwrap_err().code(), failure::PERMISSION);
        }
    }
}
