//! Commands of `docs/spec/run.md`, run as they are written there.
//!
//! A command of the document that is not in [`COMMANDS`] fails the test, and so does one that the
//! document has no longer. Its table of options has those of `parador run --help`.

use super::debugger::gdb_at;
use super::{Rig, children, end, start, succeed, succeed_with};
use crate::system::{parador, workspace};
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::process::{Child, Command};

/// The document.
const DOCUMENT: &str = "docs/spec/run.md";
/// Programs that it names.
const PROGRAMS: [&str; 14] = [
    "cargo",
    "gdb",
    "ip",
    "kill",
    "machine-exit",
    "mount",
    "nc",
    "parador",
    "perf",
    "printf",
    "qemu-img",
    "qemu-io",
    "socat",
    "strace",
];
/// The kernel's name in the document, in the current folder.
const KERNEL: &str = "vmlinux";

/// Treatment of a command.
enum Use {
    /// It is run.
    Run(fn(&Rig, &str) -> Result<()>),
    /// It is not: why.
    Not(&'static str),
}

use Use::{Not, Run};

/// All of them.
const COMMANDS: &[(&str, Use)] = &[
    ("parador run [OPTIONS] [--config FILE] [KERNEL]", Run(synopsis)),
    ("mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000 TAG /mnt", Run(mount)),
    ("parador run vmlinux -i busybox --vsock cid=3,path=vm.vsock", Run(shell)),
    ("printf 'CONNECT 1234\\n' | socat - UNIX-CONNECT:vm.vsock", Not("no socat: hosted/vsock")),
    ("socat UNIX-LISTEN:vm.vsock_52,fork EXEC:cat", Not("no socat: hosted/vsock")),
    ("parador run vmlinux -i busybox --gdb unix=gdb,wait", Run(debugged)),
    ("gdb vmlinux -ex 'target remote gdb' -ex 'break *__x64_sys_sync' -ex continue", Run(debugger)),
    ("parador kernel build", Not("takes 10 minutes: previrt/verify runs it")),
    ("parador kernel symbols vmlinux FOLDER", Run(symbols)),
    ("parador doctor", Run(doctor)),
    ("parador run", Run(cached)),
    ("parador ctl boot", Run(boot)),
    ("parador ps", Not("lists VMs with names: hosted/names")),
    ("machine-exit CODE", Run(code)),
    ("qemu-img check -r leaks FILE", Run(qemu)),
    ("qemu-img check -r all FILE", Run(qemu)),
    ("qemu-img convert", Run(convert)),
    ("qemu-img info -U", Run(beside)),
    ("qemu-io -r", Run(beside)),
    (
        "ip tuntap add NAME mode tap user USER",
        Not("changes the host: hosted/net-tap, in a namespace"),
    ),
    ("perf report --symfs FOLDER", Not("no event to sample in every VM: hosted/perf-map")),
    ("nc HOST PORT </dev/null", Not("shows a fault of passt")),
    ("kill -9", Not("a way in which a process may end: hosted/kills")),
    ("cargo xtask build", Not("has built what is tested here")),
];

/// Each command of the document is run, or has a reason why it is not.
pub fn documented() -> Result<()> {
    let text = fs::read_to_string(workspace().join(DOCUMENT)).context(DOCUMENT)?;
    let found = commands(&text);
    let known: BTreeSet<String> = COMMANDS.iter().map(|(text, _)| (*text).to_owned()).collect();
    let new: Vec<_> = found.difference(&known).collect();
    ensure!(new.is_empty(), "{DOCUMENT} has commands that are not tested: {new:?}");
    let gone: Vec<_> = known.difference(&found).collect();
    ensure!(gone.is_empty(), "{DOCUMENT} does not have these any longer: {gone:?}");
    let rig = Rig::new()?;
    table(&rig, &text)?;
    symlink(rig.kernel(), rig.path(KERNEL)).context("cannot link the kernel")?;
    for (text, what) in COMMANDS {
        match what {
            Run(run) => run(&rig, text).with_context(|| format!("`{text}`"))?,
            Not(why) => println!("not run: `{text}`: {why}"),
        }
    }
    Ok(())
}

/// Lines of blocks of code, and code in the text, that begin with a program's name.
fn commands(text: &str) -> BTreeSet<String> {
    let is_command = |text: &&str| {
        let mut words = text.split_whitespace();
        words.next().is_some_and(|word| PROGRAMS.contains(&word)) && words.next().is_some()
    };
    let is_block = |line: &&str| line.starts_with("    ");
    let blocks = text.lines().filter(is_block).map(str::trim);
    let body: Vec<&str> = text.lines().filter(|line| !is_block(line)).collect();
    let body = body.join("\n");
    // Every second piece is between back quotes.
    let inline = body.split('`').skip(1).step_by(2);
    blocks.chain(inline).filter(is_command).map(str::to_owned).collect()
}

/// Options in lines that begin as `begin` says, up to what ends them there.
fn options(text: &str, begin: &str, end: &str) -> BTreeSet<String> {
    let lines = text.lines().map(str::trim_start).filter(|line| line.starts_with(begin));
    let cells = lines.filter_map(|line| line.trim_start_matches("| ").split(end).next());
    let is_letter = |c: char| c.is_ascii_lowercase() || c == '-';
    let words = cells.flat_map(|cell| cell.split(|c: char| !is_letter(c)));
    words.filter(|word| word.starts_with("--")).map(str::to_owned).collect()
}

/// The table of options has each option of the program, and no other.
fn table(rig: &Rig, text: &str) -> Result<()> {
    let help = succeed_with(parador(rig.folder()).args(["run", "--help"]))?;
    let mut real = options(&help, "-", "  ");
    ensure!(real.remove("--help"), "no option was found:\n{help}");
    // A row names an option and its values; a column of values may name others.
    let shown = options(text, "| `-", " | ");
    let (new, gone): (Vec<_>, Vec<_>) =
        (real.difference(&shown).collect(), shown.difference(&real).collect());
    ensure!(new.is_empty() && gone.is_empty(), "not in the table: {new:?}; only there: {gone:?}");
    Ok(())
}

/// A command of the document that is one of `parador`, of that under test; not by KVM, which is
/// tested elsewhere.
fn command(rig: &Rig, text: &str) -> Result<Command> {
    let words = text.strip_prefix("parador ").context("not of parador")?;
    let mut command = parador(rig.folder());
    command.args(words.split_whitespace());
    if words.starts_with("run") {
        command.args(["--backend", "process", "--timeout", "120s"]);
    }
    Ok(command)
}

/// The synopsis: options, a description and a kernel.
fn synopsis(rig: &Rig, text: &str) -> Result<()> {
    ensure!(text.ends_with("[OPTIONS] [--config FILE] [KERNEL]"), "another synopsis");
    // The example of a description is the document's, too.
    let document = fs::read_to_string(workspace().join(DOCUMENT)).context(DOCUMENT)?;
    let (_, rest) = document.split_once("    [vm]\n").context("no description")?;
    let lines = rest.lines().take_while(|line| line.is_empty() || line.starts_with("    "));
    let lines: Vec<&str> = lines.map(str::trim).collect();
    fs::write(rig.path("vm.toml"), format!("[vm]\n{}\n", lines.join("\n")))?;
    rig.disk("root.img", "", &[])?;
    let mut run = command(rig, "parador run")?;
    run.args(["--config", "vm.toml", KERNEL]);
    end(&mut run, "cat /sys/block/vda/ro | sed 's/^/ro /'; poweroff\n")?.well(0, &["ro 1"])?;
    Ok(())
}

fn mount(rig: &Rig, text: &str) -> Result<()> {
    fs::create_dir_all(rig.path("shared"))?;
    fs::write(rig.path("shared/word"), "from the host\n")?;
    let mut run = rig.run();
    run.args(["--share", "shared:TAG"]);
    end(&mut run, &format!("{text}\ncat /mnt/word\npoweroff\n"))?.well(0, &["from the host"])?;
    Ok(())
}

fn shell(rig: &Rig, text: &str) -> Result<()> {
    end(&mut command(rig, text)?, "poweroff\n")?.well(0, &["the guest powered off"])?;
    Ok(())
}

fn cached(rig: &Rig, text: &str) -> Result<()> {
    let mut run = command(rig, text)?;
    run.args(["-i", "busybox"]);
    // Who works on a kernel names it.
    if std::env::var_os(super::KERNEL).is_some() {
        run.arg(KERNEL);
    }
    end(&mut run, "poweroff\n")?.well(0, &["the guest powered off"])?;
    Ok(())
}

fn code(rig: &Rig, text: &str) -> Result<()> {
    let typed = text.replace("CODE", "42") + "\n";
    end(&mut rig.run(), &typed)?.well(42, &["the guest ended with code 42"])?;
    Ok(())
}

/// Waits until the machine has made a file, as a socket.
fn made(rig: &Rig, name: &str) -> Result<()> {
    super::net::until(name, || Ok(rig.path(name).exists().then_some(())))
}

fn debugged(rig: &Rig, text: &str) -> Result<()> {
    let mut child = start(&mut command(rig, text)?)?;
    made(rig, "gdb")?;
    let said = gdb_at(rig, "gdb", &["info registers rip", "detach"])?;
    ensure!(said.contains("x86_64_start_kernel"), "GDB says:\n{said}");
    quit(&mut child)
}

fn debugger(rig: &Rig, text: &str) -> Result<()> {
    let mut run = rig.run();
    run.args(["--gdb", "unix=gdb,wait", "-p", "parador.run=\"while :; do sync; sleep 1; done\""]);
    let mut child = start(&mut run)?;
    made(rig, "gdb")?;
    // A user would type what comes next; here GDB ends at the breakpoint.
    let batch = text.replacen("gdb vmlinux", "timeout 200 gdb -nx -batch vmlinux", 1);
    let mut shell = Command::new("sh");
    let said = succeed_with(shell.args(["-c", &batch]).current_dir(rig.folder()))?;
    ensure!(said.contains("Breakpoint 1, 0x"), "GDB says:\n{said}");
    quit(&mut child)
}

/// Ends a machine.
fn quit(child: &mut Child) -> Result<()> {
    drop(child.stdin.take());
    succeed(Command::new("kill").arg(child.id().to_string()))?;
    child.wait().context("cannot wait for parador")?;
    Ok(())
}

fn symbols(rig: &Rig, text: &str) -> Result<()> {
    fs::create_dir_all(rig.path("FOLDER"))?;
    succeed(&mut command(rig, text)?)?;
    let written = walk(&rig.path("FOLDER"))?;
    ensure!(written != 0, "no symbols were written");
    Ok(())
}

/// Files below a folder.
fn walk(folder: &std::path::Path) -> Result<usize> {
    let mut count = 0;
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        count += if path.is_dir() { walk(&path)? } else { 1 };
    }
    Ok(count)
}

fn doctor(rig: &Rig, text: &str) -> Result<()> {
    let said = succeed_with(&mut command(rig, text)?)?;
    // What the document sends its reader there for.
    for name in ["io_uring", "protection keys", "32-bit programs", "passt"] {
        ensure!(said.contains(name), "it does not tell of {name}:\n{said}");
    }
    Ok(())
}

fn boot(rig: &Rig, text: &str) -> Result<()> {
    let mut run = rig.run();
    run.args(["--api-socket", "vm.sock", "--wait-boot"]);
    let mut child = start(&mut run)?;
    made(rig, "vm.sock")?;
    let mut boot = parador(rig.folder());
    let words = text.strip_prefix("parador ctl").context("another command")?;
    succeed(boot.args(["ctl", "--socket", "vm.sock"]).args(words.split_whitespace()))?;
    children(&child)?;
    quit(&mut child)
}

/// A command of QEMU's with a file that it can have.
fn qemu(rig: &Rig, text: &str) -> Result<()> {
    image(rig)?;
    run(rig, &text.replace("FILE", "disk.qcow2"))
}

fn convert(rig: &Rig, text: &str) -> Result<()> {
    image(rig)?;
    run(rig, &format!("{text} -O qcow2 disk.qcow2 new.qcow2"))?;
    let mut machine = rig.run();
    end(machine.args(["-d", "new.qcow2"]), "poweroff\n")?.well(0, &["the guest powered off"])?;
    Ok(())
}

/// Commands that read what a machine writes.
fn beside(rig: &Rig, text: &str) -> Result<()> {
    rig.disk("disk.img", "", &[])?;
    let mut child = start(rig.run().args(["-d", "disk.img"]))?;
    children(&child)?;
    let read = match text {
        "qemu-io -r" => " -f raw -c 'read 0 512'",
        _ => "",
    };
    run(rig, &format!("{text}{read} disk.img"))?;
    if run(rig, "qemu-io -f raw -c 'write 0 512' disk.img").is_ok() {
        bail!("the disk is not locked");
    }
    quit(&mut child)
}

fn image(rig: &Rig) -> Result<()> {
    run(rig, "qemu-img create -q -f qcow2 disk.qcow2 64M")
}

/// By a shell, in the machine's folder.
fn run(rig: &Rig, text: &str) -> Result<()> {
    succeed(Command::new("sh").args(["-c", text]).current_dir(rig.folder()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_found() {
        let text = "a `parador doctor` and `parador` and `vm`\n\n    gdb -x a\n    a = 1\n\nuses `qemu-img\n";
        assert_eq!(commands(text).into_iter().collect::<Vec<_>>(), ["gdb -x a", "parador doctor"]);
    }

    #[test]
    fn options_are_found() {
        let table = "| `-k`, `--kernel FILE` | as --other | |\n| `--on-reset WHAT`, `--on-panic WHAT` | |\n";
        let found = options(table, "| `-", " | ").into_iter().collect::<Vec<_>>();
        assert_eq!(found, ["--kernel", "--on-panic", "--on-reset"]);
        let help =
            "  -q, --quiet  Print nothing, see --log\n      --dry-run\n          text --more\n";
        let found = options(help, "-", "  ").into_iter().collect::<Vec<_>>();
        assert_eq!(found, ["--dry-run", "--quiet"]);
    }
}
