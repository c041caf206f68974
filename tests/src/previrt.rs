//! The pre-virtualized kernel (`parador kernel build`), on the bare emulated machine and in a
//! guest.

use crate::hosted::words;
use crate::scenario::{Backend, Scenario};
use crate::system::{Machine, ONE_THREAD, parador, qemu, target, workspace};
use crate::transcript::ensure_lacks;
use anyhow::{Context, Result, bail, ensure};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use tempfile::TempDir;

/// Time limit of a VM on a busy host, in seconds.
const LIMIT: u32 = 300;
/// Memory of the bare machine in MiB.
const MEMORY: u32 = 512;
/// Virtual minus physical address of an unrelocated kernel image.
const KERNEL_MAP: u64 = 0xffff_ffff_8000_0000;
/// Kinds of sites by number: the table with this head in this document.
const KINDS: &str = "docs/spec/sites.md";
const KINDS_HEAD: &str = "| kind | name | instruction |";
/// Kinds of sites that every boot executes, with the least count.
const COUNTED: [(&str, u64); 13] = [
    ("cli", 1000),
    ("sti", 1000),
    ("save_fl", 1000),
    ("iret", 10),
    ("swapgs", 1000),
    ("sysretq", 1000),
    ("wr_cr", 100),
    ("pgtable", 1000),
    ("wrmsr", 10),
    ("out", 1000),
    ("in", 1000),
    ("cpuid", 10),
    ("ltr", 1),
];
/// Kinds of sites that a boot executes rarely, with the greatest count: it does not serialise the
/// processor by `IRET` after each change of its code.
const RARE: [(&str, u64); 1] = [("iret", 1000)];
/// Kinds of sites that a boot on this machine never executes.
const NEVER: [&str; 5] = ["vmcall", "encls", "mwaitx", "sysexit", "lmsw"];
const BUSYBOX: &str = "/bin/busybox";
/// Ours, from sources in a folder outside the kernel's.
const DRIVER: [&str; 3] = ["Kbuild", "parador_com.c", "parador_com.h"];
/// Modules that check: sequences of sensitive instructions, system calls of the host, attacks on
/// it, the kernel's own memory, what devices write.
const CHECK: [&str; 6] = [
    "Kbuild",
    "check_wedge.c",
    "check_host.c",
    "check_escape.c",
    "check_memory.c",
    "check_device.c",
];
/// Runs them; their results are in the kernel's log.
const CHECK_SCRIPT: &str = "set -x
for seed in 1 2 3 4 5 6 7 8; do
    insmod /root/check_wedge.ko seed=$seed rounds=20
    rmmod check_wedge
done
dmesg | grep -o 'wedge: [0-9d].*' | sed 's/^/RESULT /'
";
/// Rounds of all of them, and an end of each.
const CHECK_LINES: usize = 8 * 21;

/// Script for every environment: load and unload modules, patch kernel code (`task_delayacct` is a
/// static key), run programs on every processor and take memory.
const SCRIPT: &str = "set -ex
for round in 1 2 3; do
    insmod /root/dummy.ko
    ifconfig dummy0 up
    rmmod dummy
done
insmod /root/parador_com.ko
rmmod parador_com
for on in 1 0 1; do echo $on >/proc/sys/kernel/task_delayacct; done
for n in 1 2 3 4; do (dd if=/dev/zero bs=1M count=20 | sha256sum) & done
wait
ls -R /sys/class >/dev/null
cat /proc/self/maps /proc/meminfo >/dev/null
echo works on $(nproc) processors
sleep 1
";
const INIT: &str = "#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox --install -s /bin
export PATH=/bin
sh /root/script || echo script failed
grep -E ' (_text|dummy_setup)$' /proc/kallsyms
poweroff -f
";
/// Texts that Linux prints when it detects a kernel bug.
const WRONG: [&str; 6] =
    ["BUG:", "WARNING: CPU", "Oops", "Call Trace", "general protection", "script failed"];

/// A kernel with what belongs to it.
#[derive(Debug)]
pub struct Kernel {
    folder: PathBuf,
    driver: PathBuf,
    check: PathBuf,
    // Lives as long as the driver in it is needed.
    _made: TempDir,
}

impl Kernel {
    /// The kernel, built on the first call of all if it is not kept from before.
    pub fn get() -> Result<&'static Self> {
        static KERNEL: OnceLock<Result<Kernel, String>> = OnceLock::new();
        let kernel = KERNEL.get_or_init(|| Self::build().map_err(|error| format!("{error:#}")));
        kernel.as_ref().map_err(|error| anyhow::anyhow!("{error}"))
    }

    fn build() -> Result<Self> {
        let made = TempDir::with_prefix("parador-test-").context("cannot make a folder")?;
        let text = succeed(parador(made.path()).args(["kernel", "build"]))?;
        let path = text.split_whitespace().nth(1).map(Path::new);
        let folder = path.and_then(Path::parent).context("`kernel build` prints no place")?;
        let sources = workspace().join("guests/linux");
        for (name, from, files) in
            [("driver", sources.clone(), &DRIVER[..]), ("check", sources.join("check"), &CHECK)]
        {
            let to = made.path().join(name);
            fs::create_dir(&to).context("cannot make a folder")?;
            for file in files {
                fs::copy(from.join(file), to.join(file))
                    .with_context(|| format!("cannot copy {file}"))?;
            }
            fs::write(to.join(words::HEADER), words::header()?).context("cannot write a header")?;
            succeed(parador(&to).args(["kernel", "module", "."]))?;
        }
        Ok(Self {
            folder: folder.to_owned(),
            driver: made.path().join("driver/parador_com.ko"),
            check: made.path().join("check/check_wedge.ko"),
            _made: made,
        })
    }

    /// Its file with symbols and relocations.
    pub fn vmlinux(&self) -> PathBuf {
        self.folder.join("vmlinux")
    }

    /// A module that asks the host.
    pub fn check_host(&self) -> PathBuf {
        self.check.with_file_name("check_host.ko")
    }

    /// A module that means harm to the host.
    pub fn check_escape(&self) -> PathBuf {
        self.check.with_file_name("check_escape.ko")
    }

    /// A module that sums up the kernel's memory.
    pub fn check_memory(&self) -> PathBuf {
        self.check.with_file_name("check_memory.ko")
    }

    /// A module with a page that a device writes.
    pub fn check_device(&self) -> PathBuf {
        self.check.with_file_name("check_device.ko")
    }

    /// One of its modules.
    pub fn dummy(&self) -> Result<PathBuf> {
        let versions = self.folder.join("modules/lib/modules");
        let version = fs::read_dir(&versions)?.next().context("no modules")??;
        Ok(version.path().join("kernel/drivers/net/dummy.ko"))
    }
}

/// Options of `afterburn verify` for the kernel: a function that Linux copies, whose `PUSHF` and
/// `POPF` must not be rewritten (docs/design/0009-pre-virtualization.md).
pub const COPIED: [&str; 2] = ["--data", "ftrace_regs_caller"];

/// No sensitive instruction is missed, and no pad is in the way of what Linux rewrites itself.
pub fn verify() -> Result<()> {
    let kernel = Kernel::get()?;
    let verify = |file: &Path, options: &[&str]| {
        succeed(parador(&target()).args(["afterburn", "verify"]).args(options).arg(file))
    };
    verify(&kernel.vmlinux(), &COPIED)?;
    verify(&kernel.dummy()?, &[])?;
    verify(&kernel.driver, &[])?;
    Ok(())
}

/// Boots the kernel with every site in a stub on the bare machine; modules get stubs when they are
/// loaded.
pub fn null(cpus: u32) -> Result<()> {
    let folder = TempDir::with_prefix("parador-test-").context("cannot make a folder")?;
    let (image, _) = null_image(folder.path(), &[])?;
    works(&bare(&image, cpus, "nokaslr", SCRIPT, &[])?, cpus)
}

/// Stubs that count: how often each kind of site was executed is in the machine's memory when it is
/// off.
pub fn null_counts() -> Result<()> {
    let folder = TempDir::with_prefix("parador-test-").context("cannot make a folder")?;
    let (image, report) = null_image(folder.path(), &["--count"])?;
    let address = report
        .split_once("by kind from 0x")
        .and_then(|(_, rest)| u64::from_str_radix(rest.split_whitespace().next()?, 16).ok());
    let address = address.with_context(|| format!("no place of counters:\n{report}"))?;
    let memory = folder.path().join("memory");
    let file =
        format!("memory-backend-file,id=ram,size={MEMORY}M,mem-path={},share=on", memory.display());
    let more = ["-object", &file, "-machine", "memory-backend=ram"];
    works(&bare(&image, 1, "nokaslr", SCRIPT, &more)?, 1)?;
    let kinds = kinds()?;
    let mut bytes = vec![0; 8 * kinds.len()];
    File::open(&memory)
        .and_then(|file| file.read_exact_at(&mut bytes, address - KERNEL_MAP))
        .context("cannot read the machine's memory")?;
    let counts = bytes
        .chunks_exact(8)
        .map(|chunk| chunk.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte)));
    let counts: Vec<(String, u64)> = kinds.into_iter().zip(counts).collect();
    for (kind, count) in &counts {
        let bound = |bounds: &[(&str, u64)]| {
            bounds.iter().find(|(name, _)| name == kind).map(|(_, count)| *count)
        };
        let least = bound(&COUNTED).unwrap_or(0);
        let most = match NEVER.contains(&kind.as_str()) {
            true => 0,
            false => bound(&RARE).unwrap_or(u32::MAX.into()),
        };
        ensure!(
            (least..=most).contains(count),
            "{kind}: {count}, not {least} to {most}: {counts:?}"
        );
    }
    Ok(())
}

/// The names of the kinds of sites, by number.
fn kinds() -> Result<Vec<String>> {
    let text = fs::read_to_string(workspace().join(KINDS)).context(KINDS)?;
    let mut names = Vec::new();
    let rows = text.lines().skip_while(|line| *line != KINDS_HEAD).skip(2);
    for line in rows.take_while(|line| line.starts_with('|')) {
        let mut cells = line.split('|').map(str::trim).skip(1);
        let number = cells.next().and_then(|cell| cell.parse::<usize>().ok());
        if let (Some(number), Some(name)) = (number, cells.next()) {
            ensure!(number == names.len(), "{KINDS}: {number} after {} kinds", names.len());
            names.push(name.trim_matches('`').to_owned());
        }
    }
    ensure!(
        COUNTED.iter().all(|(name, _)| names.iter().any(|other| other == name)),
        "{KINDS}: {names:?}"
    );
    Ok(names)
}

/// Makes a null image; returns its path and what is said about it.
fn null_image(folder: &Path, options: &[&str]) -> Result<(PathBuf, String)> {
    let path = folder.join("vmlinux-null");
    let mut command = parador(folder);
    command.args(["afterburn", "null"]).arg(Kernel::get()?.vmlinux()).arg("-o").arg(&path);
    let report = succeed(command.args(options))?;
    Ok((path, report))
}

/// Boots `image` of the kernel's folder on the bare machine. Returns where its text is.
pub fn raw(image: &str, cpus: u32, options: &str) -> Result<String> {
    let console = bare(&Kernel::get()?.folder.join(image), cpus, options, SCRIPT, &[])?;
    works(&console, cpus)?;
    let place = console.lines().find_map(|line| line.trim_end().strip_suffix(" T _text"));
    place.map(str::to_owned).with_context(|| format!("no `_text`:\n{console}"))
}

/// Boots it in processes of this host.
pub fn hosted() -> Result<()> {
    works(&in_processes(SCRIPT)?, 1)
}

/// Sequences of sensitive instructions have the same results on the processor and under the wedge.
pub fn same_results() -> Result<()> {
    let results = |console: &str| -> Vec<String> {
        console.lines().filter_map(|line| line.strip_prefix("RESULT ").map(str::to_owned)).collect()
    };
    let processor = bare(&Kernel::get()?.vmlinux(), 1, "nokaslr", CHECK_SCRIPT, &[])?;
    let wedge = in_processes(CHECK_SCRIPT)?;
    let (expected, found) = (results(&processor), results(&wedge));
    ensure!(expected.len() == CHECK_LINES, "{} results:\n{processor}", expected.len());
    let differ = expected.iter().zip(&found).find(|(expected, found)| expected != found);
    if let Some((expected, found)) = differ {
        bail!("the processor: {expected}, the wedge: {found}");
    }
    ensure!(found.len() == expected.len(), "{} results of the wedge:\n{wedge}", found.len());
    Ok(())
}

/// Returns true if a console shows that all of [`SCRIPT`] succeeded.
fn works(console: &str, cpus: u32) -> Result<()> {
    let works = format!("works on {cpus} processors");
    ensure!(console.contains(&works), "`{works}` did not appear:\n{console}");
    ensure_lacks(console, &WRONG)?;
    Ok(())
}

/// Runs a script in processes of this host; gives the console.
fn in_processes(script: &str) -> Result<String> {
    let kernel = Kernel::get()?;
    let folder = TempDir::with_prefix("parador-test-").context("cannot make a folder")?;
    let disk = ram_disk(kernel, folder.path(), script)?;
    let mut run = parador(folder.path());
    run.arg("run").arg(kernel.vmlinux()).args(["--backend", "process", "-i"]).arg(disk);
    run.args(["-m", "512M", "--timeout", &format!("{LIMIT}s")]);
    succeed(&mut run)
}

/// Runs a script on the bare machine with the QEMU arguments `more`; returns the console output.
fn bare(image: &Path, cpus: u32, options: &str, script: &str, more: &[&str]) -> Result<String> {
    let kernel = Kernel::get()?;
    let folder = TempDir::with_prefix("parador-test-").context("cannot make a folder")?;
    let disk = ram_disk(kernel, folder.path(), script)?;
    let mut machine = qemu(LIMIT, ONE_THREAD);
    machine.args(["-cpu", "max", "-m", &MEMORY.to_string(), "-smp", &cpus.to_string()]).args(more);
    machine.arg("-kernel").arg(image).arg("-initrd").arg(disk);
    machine.args(["-append", &format!("console=ttyS0 panic=-1 {options}")]);
    succeed(&mut machine)
}

/// With address space randomization the kernel is somewhere else each time; three equal places are
/// no accident.
pub fn randomized(cpus: u32) -> Result<()> {
    let places: Result<Vec<String>> = (0..3).map(|_| raw("bzImage", cpus, "")).collect();
    let places = places?;
    ensure!(places.iter().any(|place| *place != places[0]), "always at {}", places[0]);
    Ok(())
}

/// Boots it in a guest of ours.
pub fn guest(backend: Backend, cpus: u32) -> Result<()> {
    let kernel = Kernel::get()?;
    let folder = TempDir::with_prefix("parador-test-").context("cannot make a folder")?;
    let script = folder.path().join("script");
    fs::write(&script, SCRIPT).context("cannot write the script")?;
    let files = [&script, &kernel.dummy()?, &kernel.driver]
        .map(|path| format!("{:?}", path.display().to_string()))
        .join(", ");
    let scenario = Scenario {
        name: "linux-previrtualized",
        backends: &[],
        cpus: &[],
        long_cpus: &[],
        system: format!(
            "[system]\nboard = \"qemu-q35\"\nlog = \"com2\"\nshare_cpus = true\nfiles = [{files}]\n\
             [[vm]]\nname = \"linux\"\nmemory = \"256M\"\nkernel = {:?}\ninitrd = \"busybox\"\n\
             cpus = 2\nconsole = \"com1\"\n\
             cmdline = 'console=ttyS0 parador.run=\"sh /root/script\"'\n",
            kernel.vmlinux().display().to_string()
        ),
        machine: Machine::default(),
        steps: Vec::new(),
        code: 0,
        texts: vec!["works on 2 processors".into()],
        never: &WRONG,
        most: &[],
        counters: &[],
        limit: LIMIT.into(),
    };
    scenario.run(backend, cpus)
}

fn ram_disk(kernel: &Kernel, folder: &Path, script: &str) -> Result<PathBuf> {
    let tree = folder.join("tree");
    for name in ["bin", "dev", "proc", "root", "sys"] {
        fs::create_dir_all(tree.join(name)).context("cannot make the RAM disk's folders")?;
    }
    fs::copy(BUSYBOX, tree.join("bin/busybox")).context("cannot copy busybox")?;
    fs::copy(kernel.dummy()?, tree.join("root/dummy.ko")).context("cannot copy a module")?;
    fs::copy(&kernel.driver, tree.join("root/parador_com.ko")).context("cannot copy a module")?;
    fs::copy(&kernel.check, tree.join("root/check_wedge.ko")).context("cannot copy a module")?;
    fs::write(tree.join("root/script"), script)?;
    fs::write(tree.join("init"), INIT)?;
    fs::set_permissions(tree.join("init"), fs::Permissions::from_mode(0o755))?;
    let packed = succeed(
        Command::new("sh")
            .args(["-c", "find . | cpio -o -H newc --quiet >../disk"])
            .current_dir(&tree),
    );
    packed.map(|_| folder.join("disk"))
}

/// Runs a program to its end and returns what it printed.
fn succeed(command: &mut Command) -> Result<String> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot start {command:?}"))?;
    let text = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        bail!("{command:?} failed ({})\n{text}\n{errors}", output.status);
    }
    Ok(text)
}
