//! Protection keys (`parador run --protection`): on an emulated machine whose processor has them,
//! with Debian's kernel, and here, where the processor may have none.

use crate::hosted::net::wait_for;
use crate::hosted::{Rig, children, end, killed, start};
use crate::isolation;
use crate::kvm::{debian_kernel, succeed};
use crate::previrt::Kernel;
use crate::system::{PARALLEL, artifacts, parador, qemu, target};
use crate::transcript::ensure_lacks;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Seconds that the emulated host may run on a busy machine; less than one minute on an idle one.
const LIMIT: u32 = 300;
/// Time limit of an emulated host whose guests execute code in steps, each of which is a signal.
const COPIES_LIMIT: u32 = 600;
/// vCPUs of its guests: those of a short run, and the others.
const CPUS: [u32; 2] = [2, 1];
/// Processors of the emulated host, each a thread of QEMU: attacks on two virtual CPUs run side by
/// side.
pub const HOST_CPUS: u32 = 2;
const BUSYBOX: &str = "/bin/busybox";
/// The attack program, and those that make system calls by `int $0x80`.
const PROGRAMS: [&str; 4] =
    ["linux-attack", "linux-compat-32", "linux-compat-pie", "linux-compat-64"];
/// First output of an emulated host's first program.
const BEGUN: &str = "the first program has begun";
/// Error of an emulated host that does not get there.
pub const STOPPED: &str = "the emulated host stopped in its boot";
/// The first program of both machines, before what it is to do.
const INIT: &str = "#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox --install -s /bin
export PATH=/bin HOME=/root
cd /root
";
/// In the guest: an ordinary life, then every attempt to leave it.
const GUEST: &str = "echo $((6*7)) is; uname -r
for n in 1 2 3 4; do (dd if=/dev/zero bs=64k count=20 2>/dev/null | sha256sum) & done; wait
./linux-attack || echo an attack succeeds
./linux-compat-64 && ./linux-compat-32 && ./linux-compat-pie
./linux-isolation keys TESTS
ls / >/dev/null && echo continues
sleep 1
poweroff -f
";
const HOST: &str =
    "for cpus in CPUS; do
    echo \"== $cpus\"
    parador run vmlinux -i guest -m 256M -c $cpus -p quiet --protection keys --artifacts /bin </dev/null
    echo ends with $?
done
echo \"==\"
poweroff -f
";
/// The same in a machine of this host, with what loads a kernel.
const APART: &str = "/mnt/linux-stress 2
/mnt/linux-attack apart || echo an attack SUCCEEDS
cd /mnt; ./linux-compat-64 && ./linux-compat-32 && ./linux-compat-pie
ls / >/dev/null && echo continues
";
/// Texts that Linux prints when it detects a kernel bug.
const WRONG: [&str; 5] = ["BUG:", "WARNING:", "Oops", "Call Trace", "SUCCEEDS"];

/// Returns the numbers of vCPUs of the emulated host's guests.
pub fn cpus(is_long: bool) -> &'static [u32] {
    if is_long { &CPUS } else { &CPUS[..1] }
}

/// With keys, copies of code follow what is written to their frames, by whatever way; and a program
/// whose own code is executed in steps does what it does elsewhere.
pub fn copies(is_long: bool) -> Result<()> {
    let rig = Rig::new()?;
    let folder = rig.folder();
    let files = [isolation::program(), isolation::stepped_program(), Kernel::get()?.check_device()];
    let script = format!(
        "{}\n/root/linux-isolation keys {} && echo copies follow
/root/linux-isolation-steps keys {} && echo steps are well
ls / >/dev/null && echo continues
sleep 1
poweroff -f\n",
        isolation::driver("/root"),
        isolation::COPY_TESTS.join(" "),
        isolation::STEP_TESTS.join(" ")
    );
    let guest = ram_disk(folder, "guest", &script, &files, &[])?;
    let host: String = cpus(is_long)
        .iter()
        .map(|cpus| {
            format!(
                "echo \"== {cpus}\"
dd if=/bin/busybox of=disk bs=64k count=8 2>/dev/null
parador run vmlinux -i guest -m 256M -c {cpus} -p quiet --disk disk --protection keys --artifacts /bin </dev/null
echo ends with $?\n"
            )
        })
        .chain(["poweroff -f\n".to_owned()])
        .collect();
    let host = host_disk(folder, &host, &[rig.kernel().to_owned(), guest])?;
    let console = run_host(&host, COPIES_LIMIT, &["-smp", &HOST_CPUS.to_string()])?;
    let parts: Vec<_> = console.split("== ").skip(1).collect();
    ensure!(parts.len() == cpus(is_long).len(), "{} machines:\n{console}", parts.len());
    for text in ["copies follow", "steps are well", "continues", "ends with 0"] {
        let all = parts.iter().all(|part| part.contains(text));
        ensure!(all, "`{text}` did not appear:\n{console}");
    }
    ensure_lacks(&console, &WRONG)?;
    ensure_lacks(&console, &isolation::WRONG)?;
    Ok(())
}

/// A guest lives with keys, and none of its programs' attempts reaches its kernel.
pub fn protection(is_long: bool) -> Result<()> {
    let rig = Rig::new()?;
    let folder = rig.folder();
    let mut files = PROGRAMS.map(|name| artifacts().join(name)).to_vec();
    files.push(isolation::program());
    let script = GUEST.replace("TESTS", &isolation::TESTS.join(" "));
    let guest = ram_disk(folder, "guest", &script, &files, &[])?;
    let cpus: Vec<String> = cpus(is_long).iter().map(u32::to_string).collect();
    let host = HOST.replace("CPUS", &cpus.join(" "));
    let host = host_disk(folder, &host, &[rig.kernel().to_owned(), guest])?;
    let console = run_host(&host, LIMIT, &["-smp", &HOST_CPUS.to_string()])?;
    let parts: Vec<_> = console.split("== ").skip(1).collect();
    ensure!(parts.len() == cpus.len(), "{} machines:\n{console}", parts.len());
    for text in [
        "42 is",
        "the kernel is unchanged",
        "layouts: all well",
        "32-bit code: all well",
        "isolation: all well with keys",
        "continues",
        "ends with 0",
    ] {
        let all = parts.iter().all(|part| part.contains(text));
        ensure!(all, "`{text}` did not appear:\n{console}");
    }
    ensure_lacks(&console, &WRONG)?;
    Ok(())
}

/// `--protection process` on any host: user processes do not map the guest kernel, and no attack of
/// a user process reaches it.
pub fn apart() -> Result<()> {
    let rig = Rig::new()?;
    let stress = artifacts().join("linux-stress");
    for cpus in ["1", "2"] {
        let programs = PROGRAMS.map(|name| artifacts().join(name));
        let [attack, small, dynamic, large] = programs.each_ref().map(PathBuf::as_path);
        let mut run = rig.script(APART, &[attack, small, dynamic, large, &stress])?;
        let ended = end(run.args(["-c", cpus, "--protection", "process"]), "")?;
        let texts =
            ["the kernel is unchanged", "layouts: all well", "32-bit code: all well", "continues"];
        ended.well(0, &texts)?.never(&WRONG)?;
    }
    // The end of one of programs, which has two threads, is the machine's.
    for sandbox in ["on", "off"] {
        let mut run = rig.run();
        run.args(["--protection", "process", "--sandbox", sandbox]);
        run.args(["-p", "quiet parador.run=\"echo it runs; while :; do sleep 9; done\""]);
        let mut child = start(&mut run)?;
        wait_for(&mut child, "it runs")?;
        let all = children(&child)?;
        let has_two = |process: &&u32| {
            fs::read_dir(format!("/proc/{process}/task")).is_ok_and(|tasks| tasks.count() == 2)
        };
        let process = *all.iter().skip(2).find(has_two).context("no process of programs")?;
        killed(child, &all, process, "KILL", Some(137))?;
    }
    // Where its processes may not signal each other the device process does it.
    let mut run = rig.script("/mnt/linux-stress 2\n", &[&stress])?;
    run.args(["-c", "2", "--protection", "process", "--sandbox", "off"]);
    end(&mut run, "")?.well(0, &["stress: all well"])?;
    Ok(())
}

/// A RAM disk in `folder` for a host that runs `parador`, with files in `/root`; [`run_host`] boots
/// it.
pub fn host_disk(folder: &Path, script: &str, files: &[PathBuf]) -> Result<PathBuf> {
    let programs = [target().join("release/parador"), artifacts().join("parador-wedge")];
    ram_disk(folder, "host", &format!("echo {BEGUN}\n{script}"), files, &programs)
}

/// Boots Debian's kernel with a RAM disk on an emulated processor that has protection keys, with a
/// time limit in seconds and further arguments for QEMU; returns its output.
pub fn run_host(disk: &Path, limit: u32, arguments: &[&str]) -> Result<String> {
    let mut machine = qemu(limit, PARALLEL);
    // QEMU 7.2 does `IRET` of programs with the rights of a kernel, which SMAP refuses.
    machine.args(["-cpu", "max,-smap", "-m", "1G"]).args(arguments);
    machine.arg("-kernel").arg(debian_kernel()?.join("vmlinuz")).arg("-initrd").arg(disk);
    machine.args(["-append", "console=ttyS0 panic=-1 quiet mitigations=off"]);
    succeed(&mut machine).map_err(|error| {
        let text = format!("{error:#}");
        // Process 1, before it is a program.
        let is_in_boot = text.contains("[swapper/0:1]") && !text.contains(BEGUN);
        if is_in_boot { error.context(STOPPED) } else { error }
    })
}

/// Without PKU, `auto` prints a warning and `keys` fails; with `none` there is no message.
pub fn choices() -> Result<()> {
    const OPEN: &str = "the guest kernel is not isolated from guest user mode";
    let rig = Rig::new()?;
    let has_keys = fs::read_to_string("/proc/cpuinfo").is_ok_and(|text| text.contains(" ospke"));
    let run = |options: &[&str]| {
        let mut command = parador(rig.folder());
        command.arg("run").arg(rig.kernel()).args(["-i", "busybox", "--timeout", "120s"]);
        command.args(["-p", "parador.run=true"]).args(options).stdin(Stdio::null());
        let output = command.output().context("cannot start parador")?;
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        Ok::<_, anyhow::Error>((output.status.code(), errors))
    };
    for (options, code, text, open) in [
        (&[][..], 0, "code 0", !has_keys),
        (&["--without", "functions"], 0, "code 0", true),
        (&["--protection", "none"], 0, "code 0", false),
        (&["--protection", "keys"], if has_keys { 0 } else { 69 }, "", false),
        (
            &["--protection", "keys", "--without", "functions"],
            69,
            "modify its code unnoticed",
            false,
        ),
        (&["--protection", "keys", "--profile-writes", "a"], 69, "--profile-writes", false),
        (&["--protection", "process"], 0, "code 0", false),
        (&["--protection", "process", "--profile-writes", "a"], 64, "--profile-writes", false),
        (&["--protection", "process", "--without", "in-process"], 64, "in-process", false),
    ] {
        let (found, errors) = run(options)?;
        ensure!(found == Some(code), "{options:?}: {found:?}, not {code}:\n{errors}");
        ensure!(errors.contains(text), "{options:?}: no `{text}`:\n{errors}");
        ensure!(errors.contains(OPEN) == open, "{options:?}:\n{errors}");
    }
    Ok(())
}

/// A RAM disk in `folder` whose first program does this, with files in `/root`, and programs with
/// what they are linked to.
pub fn ram_disk(
    folder: &Path,
    name: &str,
    script: &str,
    files: &[PathBuf],
    programs: &[PathBuf],
) -> Result<PathBuf> {
    let tree = folder.join(format!("tree-{name}"));
    for below in ["bin", "dev", "proc", "root", "sys", "tmp"] {
        fs::create_dir_all(tree.join(below)).context("cannot make a folder")?;
    }
    let copy = |from: &Path, to: PathBuf| {
        fs::create_dir_all(to.parent().context("no folder")?).context("cannot make a folder")?;
        fs::copy(from, &to).with_context(|| format!("cannot copy {}", from.display()))
    };
    copy(Path::new(BUSYBOX), tree.join("bin/busybox"))?;
    for file in files {
        let to = tree.join("root").join(file.file_name().context("a file without name")?);
        copy(file, to)?;
    }
    for program in programs {
        let to = tree.join("bin").join(program.file_name().context("a program without name")?);
        copy(program, to.clone())?;
        // The emulated host unpacks all this.
        succeed(Command::new("strip").arg(to))?;
        // A program that is not dynamic has none.
        let listed = Command::new("ldd").arg(program).output().context("cannot start ldd")?;
        let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
        for library in listed.split_whitespace().filter(|word| word.starts_with('/')) {
            copy(Path::new(library), tree.join(&library[1..]))?;
        }
    }
    let init = tree.join("init");
    fs::write(&init, format!("{INIT}{script}")).context("cannot write a file")?;
    fs::set_permissions(&init, fs::Permissions::from_mode(0o755)).context("cannot change it")?;
    let packed = folder.join(name);
    let mut pack = Command::new("sh");
    pack.args(["-c", &format!("find . | cpio -o -H newc --quiet >{}", packed.display())]);
    succeed(pack.current_dir(&tree))?;
    Ok(packed)
}
