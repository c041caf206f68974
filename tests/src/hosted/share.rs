//! Shared directories whose host holds leases, or whose process is killed. The rest is a scenario
//! ([`super::linux`]).

use super::control::Controlled;
use super::counters::{number, stats};
use super::{Rig, children, end, ended, start, succeed, succeed_with};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// Mounts the folder and enters it.
const MOUNT: &str =
    "mkdir /h; mount -t 9p -o trans=virtio,version=9p2000.L,msize=65560 host /h; cd /h";

/// A file that the host opens slowly delays no other request; neither does a killed process that
/// waits for it, and waiting requests do not prevent the end of the VM. Code, because the host
/// holds leases meanwhile.
pub fn slow() -> Result<()> {
    let (rig, shared) = rig()?;
    fs::write(shared.join("slow"), "slow\n").context("cannot write a file")?;
    let script = format!(
        "{MOUNT}
        echo more >>slow & until [ -e go ]; do sleep 0.1; done
        cat slow & kill -9 $!
        echo old >word; sed -i s/old/in-the-meantime/ word; mkdir between; ls | wc -l; mv word between/answer
        wait; cat slow; rm go; touch again
        until [ -e go ]; do sleep 0.1; done; cat slow & until [ ! -e go ]; do sleep 0.1; done; echo to the end\n"
    );
    let mut lease = Lease::take(&shared.join("slow"))?;
    let mut machine = rig.script(&script, &[])?;
    let child = start(machine.args(["-c", "2", "--share", "shared:host"]))?;
    let place = |name: &str| shared.join(name);
    let go = || fs::write(place("go"), "").context("cannot write a file");
    lease.asked()?;
    go()?;
    appears(&place("between/answer"))?;
    lease.give_up()?;
    appears(&place("again"))?;
    let mut lease = Lease::take(&shared.join("slow"))?;
    go()?;
    lease.asked()?;
    fs::remove_file(place("go")).context("cannot remove a file")?;
    ended(child)?.well(0, &["slow\nmore\n", "to the end"])?;
    lease.give_up()?;
    let answer = fs::read_to_string(place("between/answer")).context("no answer")?;
    ensure!(answer == "in-the-meantime\n", "{answer}");
    Ok(())
}

/// A guest holds names of many more files than the host lets a process open, and uses all of them.
/// Code, because the process has a limit.
pub fn names() -> Result<()> {
    const FILES: usize = 2000;
    let (rig, shared) = rig()?;
    for number in 0..FILES {
        let folder = shared.join(format!("folder{}", number % 10));
        fs::create_dir_all(&folder).context("cannot make a folder")?;
        fs::write(folder.join(format!("file{number}")), "text\n").context("cannot write a file")?;
    }
    // The driver keeps a name for each file that it caches.
    let script = format!(
        "{}
        for round in 1 2 3; do find . -type f -exec cat {{}} + | grep -c text; done
        grep v9fs_inode /proc/slabinfo | (read name count rest; [ $count -ge {FILES} ] && echo cached)
        mv folder3 moved && cat moved/* | grep -c text\n",
        MOUNT.replace("msize", "cache=loose,msize")
    );
    let mut inner = rig.script(&script, &[])?;
    let mut machine = rig.limited("-n 300", inner.args(["--share", "shared:host"]));
    let counts = format!("{FILES}\n").repeat(3);
    end(&mut machine, "")?.well(0, &[&counts, "cached", "\n200\n"])?;
    Ok(())
}

/// A lookup is one message, which ends fids of earlier ones and has the attributes for `stat`: a
/// path has as many messages as components. Fids end with a mount. Code, because it counts
/// messages.
pub fn requests() -> Result<()> {
    const LOOKUPS: u64 = 1000;
    /// Mounts, programs in the directory, and looks for the last file.
    const OTHERS: u64 = 1000;
    let (rig, shared) = rig()?;
    fs::create_dir_all(shared.join("a/b/c")).context("cannot make a folder")?;
    fs::write(shared.join("a/b/c/file"), "text").context("cannot write a file")?;
    let mount = MOUNT.replace("mkdir", "mkdir -p");
    let script = format!(
        "{mount}
        i=0; while [ $i -lt {LOOKUPS} ]; do [ -e a/b/c/file ]; i=$((i + 1)); done
        echo 3 >/proc/sys/vm/drop_caches; cd /
        for i in 1 2 3 4 5 6 7 8 9; do umount /h; {mount}; [ -e a/b/c/file ]; cd /; done
        ln /h/a/b/c/file /h/a/link; echo more >>/h/a/link
        (stat -c '%n %h %s' /h/a/b/c/file
        dmesg | grep -e 'not clunked' -e 'still in use' || echo none is left) >/h/found
        mv /h/found /h/counted; until [ -e /h/end ]; do sleep 0.1; done\n"
    );
    let mut run = rig.script(&script, &[])?;
    let machine = Controlled::start(&rig, run.args(["-c", "2", "--share", "shared:host"]))?;
    appears(&shared.join("counted"))?;
    let (stats, _) = stats(&machine)?;
    let count = number(&stats["shares"][0]["other"]["requests"])?;
    // Four components.
    ensure!((LOOKUPS..4 * LOOKUPS + OTHERS).contains(&count), "{count} messages");
    fs::write(shared.join("end"), "").context("cannot write a file")?;
    let (code, messages) = machine.wait()?;
    ensure!(code == Some(0), "{code:?}: {messages}");
    let found = fs::read_to_string(shared.join("counted")).context("nothing was found")?;
    ensure!(found == "/h/a/b/c/file 2 9\nnone is left\n", "{found}");
    Ok(())
}

/// The process of a shared directory is confined, and the VM ends with it. Code, because it kills a
/// process.
pub fn killed() -> Result<()> {
    let (rig, _) = rig()?;
    let mut machine = rig.script("sleep 1000\n", &[])?;
    let child = start(machine.arg("--share").arg("shared:host"))?;
    let all = children(&child)?;
    let text = fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id()));
    let text = text.context("no processes")?;
    let mut own = text.split_whitespace().filter_map(|number| number.parse::<u32>().ok());
    let server = own.find(|process| !all.contains(process)).context("no process of the share")?;
    // Each of its threads has given up the same.
    let threads = fs::read_dir(format!("/proc/{server}/task")).context("no threads")?;
    let mut count = 0;
    for thread in threads {
        let path = thread.context("no thread")?.path().join("status");
        let status = fs::read_to_string(path).context("no thread")?;
        for line in ["Seccomp:\t2\n", "NoNewPrivs:\t1\n", "CapPrm:\t0000000000000000\n"] {
            ensure!(status.contains(line), "not {line}{status}");
        }
        count += 1;
    }
    ensure!(count > 2, "{count} threads");
    succeed(Command::new("kill").args(["-KILL", &server.to_string()]))?;
    ended(child)?.has(137, &["shared directory host"])?;
    Ok(())
}

/// Makes a tree with files of all kinds and owners.
const TREE: &str = "umask 022; mkdir -p tree/empty tree/sticky; cd tree; echo program >program
    chown 1000:1001 program; chmod 6755 program; ln program hard; ln -s /etc/passwd link
    ln -s nowhere dangling; chown -h 5:6 link; mknod null c 1 3; mknod disk b 7 200; mkfifo pipe
    echo large >large; chown 70000:2000000 large; chmod 0 large; chmod 1777 sticky
    mkdir group; chown 0:50 group; chmod 2775 group; echo own >group/own; touch -d 2001-02-03 link large";
/// Lists a tree: kind, mode, owner, size, links, target, device; folders have no size.
const LIST: &str = "cd $0 && find . -mindepth 1 -printf '%P %y %m %U:%G %n %l %s\\n' |
    sed '/ d /s/ [0-9]*$//' | sort; stat -c '%n %t:%T' null disk; find . -samefile program | sort";

/// With `owners=on` a guest copies a tree with all owners, modes, links and devices, and its users
/// own what they make; for other users than root it is refused. Code, because it compares lists.
pub fn owners() -> Result<()> {
    let (rig, shared) = rig()?;
    // Busybox' tar gives links to root.
    let script = format!(
        "{MOUNT}
        cp -a tree copied; mkdir packed; tar cf - tree | tar xpf - -C packed
        chown -h 5:6 packed/tree/link
        mkdir -m 1777 open; chmod 4777 tree/program
        echo u:x:1234:1234::/:/bin/sh >>/etc/passwd; echo u:x:1234: >>/etc/group
        su u -c 'set -e; cd open; echo mine >file; mkdir folder; ln -s a b; mkfifo pipe
            echo more >>../tree/program; ! echo more >>../tree/large'
        stat -c '%n %a' tree/program; chmod 4755 tree/program; echo more >>tree/program
        stat -c '%n %a' tree/program; cat tree/null; head -c 3 tree/large\n"
    );
    let mut run = rig.script(&script, &[])?;
    run.args(["--share", "shared:host,owners=on"]);
    if !rustix::process::geteuid().is_root() {
        end(&mut run, "")?.has(77, &["owners=on serves files of all users"])?;
        return Ok(());
    }
    succeed(Command::new("sh").args(["-ec", TREE]).current_dir(&shared))?;
    let list = |name: &str| {
        let mut command = Command::new("sh");
        command.args(["-ec", LIST, name]).current_dir(&shared);
        succeed_with(&mut command)
    };
    let before = list("tree")?;
    let printed = ["tree/program 777\n", "tree/program 4755\n", "lar"];
    end(&mut run, "")?.well(0, &printed)?;
    for copy in ["copied", "packed/tree"] {
        let after = list(copy)?;
        ensure!(before == after, "{copy}:\n{after}\nnot\n{before}");
    }
    for entry in fs::read_dir(shared.join("open")).context("no folder")? {
        let path = entry.context("no entry")?.path();
        let found = fs::symlink_metadata(&path).context("no file")?;
        ensure!((found.uid(), found.gid()) == (1234, 1234), "{}: {found:?}", path.display());
    }
    Ok(())
}

/// A VM's folder, and one in it that is shared.
fn rig() -> Result<(Rig, PathBuf)> {
    let rig = Rig::new()?;
    let shared = rig.path("shared");
    fs::create_dir(&shared).context("cannot make a folder")?;
    Ok((rig, shared))
}

/// Waits for a file.
fn appears(file: &Path) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(100);
    while !file.exists() {
        ensure!(Instant::now() < deadline, "no {}", file.display());
        std::thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// A lease of a file: who opens it otherwise waits until it is given up, at most for
/// `/proc/sys/fs/lease-break-time` (fcntl(2)).
struct Lease {
    holder: Child,
    says: BufReader<ChildStdout>,
}

impl Lease {
    fn take(file: &Path) -> Result<Self> {
        // F_SETLEASE is 1024; F_WRLCK is 1, F_UNLCK 2, which says no if the host has taken the
        // lease away.
        let program = r#"$| = 1; $SIG{IO} = sub { print "asked\n" };
            open F, "+<", $ARGV[0] and fcntl F, 1024, 1 or die "no lease: $!"; print "held\n";
            <STDIN>; fcntl F, 1024, 2 or die "the lease is gone: $!"; print "given up\n""#;
        let mut holder = Command::new("perl");
        holder.args(["-e", program]).arg(file).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut holder = holder.spawn().context("cannot start perl")?;
        let says = BufReader::new(holder.stdout.take().context("no output")?);
        let mut lease = Self { holder, says };
        lease.expect("held")?;
        Ok(lease)
    }

    fn expect(&mut self, text: &str) -> Result<()> {
        let mut line = String::new();
        self.says.read_line(&mut line).context("cannot read what is said of a lease")?;
        ensure!(line.trim() == text, "of a lease: {line}, not {text}");
        Ok(())
    }

    /// Waits for a process that wants to open the file.
    fn asked(&mut self) -> Result<()> {
        self.expect("asked")
    }

    /// Gives the lease up, if the host has not revoked it.
    fn give_up(&mut self) -> Result<()> {
        drop(self.holder.stdin.take());
        self.expect("given up")?;
        self.holder.wait().context("cannot wait for perl")?;
        Ok(())
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // It is over already if all went well.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}
