//! Shared directories.

use super::{Rig, children, end, ended, start, succeed, succeed_with};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// A folder of the host is a file system of the guest, which changes there what it may and sees
/// nothing else.
pub fn share() -> Result<()> {
    let rig = Rig::new()?;
    let shared = rig.path("shared");
    fs::create_dir(&shared).context("cannot make a folder")?;
    let big: Vec<u8> =
        (0..9_000_000_u32).map(|number| (number.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    fs::write(shared.join("big"), &big).context("cannot write a file")?;
    fs::write(shared.join("word"), "old\n").context("cannot write a file")?;
    std::os::unix::fs::symlink("/etc/hostname", shared.join("link"))
        .context("cannot make a link")?;
    std::os::unix::fs::symlink("../..", shared.join("up")).context("cannot make a link")?;
    let sum = succeed_with(Command::new("md5sum").arg(shared.join("big")))?;
    let sum = sum.split_whitespace().next().context("no checksum")?;

    let mount = "mkdir /h; mount -t 9p -o trans=virtio,version=9p2000.L,msize=65560";
    let script = format!(
        "{mount} host /h; cd /h; md5sum big; readlink link
        dd if=big of=copy bs=100k 2>/dev/null & dd if=/dev/urandom of=new bs=64k count=100 2>/dev/null; wait; md5sum new >sum
        mkdir many; for n in $(seq 300); do echo $n >many/$n; done; ls many | wc -l
        rm many/7; mv many/8 many/9; mv sum many; chmod 600 new; ln new hard; truncate -s 5 word; cat word
        ln -s word other || echo no links; mknod pipe p || echo no pipes; cat ../h/../../etc/none || echo nothing there
        chmod 4755 new || echo no rights to lend; cat up/etc/hostname || echo nothing above
        sync; cp new /dev/null; touch ready
        until grep changed word 2>/dev/null; do sleep 0.1; done\n"
    );
    let mut machine = rig.script(&script, &[])?;
    let child = start(machine.args(["-c", "2", "--share", "shared:host"]))?;
    let deadline = Instant::now() + Duration::from_secs(100);
    while !shared.join("ready").exists() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(50));
    }
    fs::write(shared.join("word"), "changed\n").context("cannot write a file")?;
    ended(child)?.well(
        0,
        &[
            sum,
            "\n/etc/hostname\n",
            "\n300\n",
            "no links",
            "no pipes",
            "nothing there",
            "no rights to lend",
            "nothing above",
            "changed",
        ],
    )?;
    ensure!(fs::read(shared.join("copy")).is_ok_and(|copy| copy == big), "the copy differs");
    let sum = fs::read_to_string(shared.join("many/sum")).context("no checksum")?;
    let new = succeed_with(Command::new("md5sum").arg("new").current_dir(&shared))?;
    ensure!(sum == new, "{sum} is not {new}");
    let many = fs::read_dir(shared.join("many")).context("no folder")?.count();
    ensure!(many == 299, "{many} files, not 299");

    let script = format!(
        "{mount} host /h; cat /h/word; md5sum /h/big | cut -c 1-4
        for attempt in 'touch /h/no' 'rm /h/word' 'chmod 777 /h/word' 'mkdir /h/no' 'dd if=/dev/zero of=/h/word'; do
            $attempt 2>&1 | grep -o 'Read-only file system'; done\n"
    );
    let mut machine = rig.script(&script, &[])?;
    let all = end(machine.args(["--share", "shared:host,ro=on"]), "")?.well(0, &["changed"])?;
    let refused = all.console.matches("Read-only file system").count();
    ensure!(refused == 5, "{refused} of 5 attempts are refused:\n{}", all.console);

    // A file that the host is slow with holds nothing else up, neither does who waits for it and is
    // killed, and what waits does not keep a machine from its end.
    fs::write(shared.join("slow"), "slow\n").context("cannot write a file")?;
    let script = format!(
        "{mount} host /h; cd /h
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

    // Its process is the machine's.
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
