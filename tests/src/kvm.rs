//! `parador run` by KVM, on an emulated host whose processor has SVM; and where KVM cannot be used,
//! on this one.
//!
//! The emulated host is Debian's kernel with a RAM disk: busybox, KVM's modules, `parador` with its
//! libraries, what guests boot, and an image.

use crate::hosted::control::LIFE;
use crate::hosted::debugger::{at_sync, gdb_at, has};
use crate::hosted::{Rig, kernel};
use crate::system::{ONE_THREAD, artifacts, parador, qemu, target};
use crate::systems::guests::{GUESTS, KVM_TEXTS, command_line, left_out};
use anyhow::{Context, Result, anyhow, bail, ensure};
use std::fs;
use std::io::{BufRead, BufReader, Lines};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use tempfile::TempDir;

/// Seconds that the emulated host may run on a busy machine; two minutes on an idle one.
const LIMIT: u32 = 1800;
/// Depends on Debian's current kernel for virtual machines.
const PACKAGE: &str = "linux-image-cloud-amd64";
/// Modules that make it a host, in the order in which they are loaded; and files as block devices.
const MODULES: [&str; 4] = ["irqbypass.ko", "kvm.ko", "kvm-amd.ko", "loop.ko"];
/// First part of the emulated host's script.
const INIT: &str = "#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin HOME=/root
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev; mount -t tmpfs tmp /tmp
for module in /modules/*; do insmod $module; done
cd /tmp
sh /script
poweroff -f
";
/// Main part of the script. The kernel of PVH guests reports a panic; Debian's has the driver as a
/// module.
const SCRIPT: &str = r#"
quiet() { parador run "$@" -i busybox -m ${memory:-128M} --timeout 300s 2>&1; }

echo "== debian"
printf 'echo $((6*7)) is\nuname -r\necho has $(nproc)\nsleep 1\nmachine-exit 7\n' |
    quiet /vmlinuz -c 2 -p quiet
echo "code $?"

echo "== disk"
echo from outside | dd of=/tmp/disk.img bs=512 conv=sync 2>/dev/null
dd if=/dev/zero of=/tmp/disk.img bs=512 seek=1 count=2047 2>/dev/null
quiet /vmlinux --backend kvm -d disk.img -p 'quiet parador.run="head -n 1 /dev/vda;
    cat /sys/block/vda/serial; echo; (echo from inside; cat /dev/zero) | dd of=/dev/vda bs=512 seek=5 count=1 conv=fsync;
    head -c 8 /dev/hwrng | wc -c; echo c >/proc/sysrq-trigger"' </dev/null
echo "code $?"
dd if=/tmp/disk.img bs=512 skip=5 count=1 2>/dev/null | head -n 1

for sandbox in strict off; do
echo "== process $sandbox"
# The shell of the next line may open it later than it is looked at.
rm -f /tmp/log
quiet /vmlinux --sandbox $sandbox -p 'quiet parador.run="echo it runs; while :; do sleep 9; done"' </dev/null >/tmp/log &
until grep -qs '^it runs' /tmp/log; do sleep 1; done
machine=$(for process in /proc/[0-9]*; do
    tr '\0' '\n' <$process/cmdline | grep -qx -e --kvm-machine && echo $process
done)
grep -E 'NoNewPrivs|Seccomp:|CapEff' $machine/status
[ $(readlink $machine/ns/net) = $(readlink /proc/self/ns/net) ] && echo has networks
ls -A $machine/root | grep -q . && echo has files
ls -l $machine/fd | sed 's/.*-> //'
kill -9 ${machine#/proc/}
wait $!
echo "code $?"
done

echo "== control"
ctl() { parador ctl -s vm.sock "$@"; }
count() { grep -c ^count console; }
counts() { n=$(count); until [ $(count) -gt $n ]; do sleep 1; done; }
quiet /vmlinux --backend kvm -c 2 --api-socket vm.sock --wait-boot --on-shutdown exit:9 --console stdio --event-fd 9 -p 'quiet parador.run="
    n=0; while read c rest </sys/firmware/acpi/interrupts/ff_pwr_btn; [ $c = 0 ]; do n=$((n+1)); echo count $n; sleep 0.1; done;
    cat /proc/consoles; poweroff -f"' </dev/null >console 9>events &
machine=$!
until ctl status 2>/dev/null | grep created; do sleep 1; done
ctl boot
counts
ctl pause
# Lines may have been on their way.
until n=$(count); sleep 3; [ $(count) = $n ]; do :; done
echo stood still
ctl status | grep -E 'state|backend'
ctl resume; counts; echo continues
ctl stats | grep -E 'memory_used|processes'
ctl reset; counts
ctl metrics | grep ^parador_resets_total
ctl shutdown
wait $machine
echo "code $?"
# A message may be on a line that the guest has begun.
grep -o -e 'restarting the VM' -e 'hvc0 .*' -e 'powered off.*' console
sed 's/"number.*//' events

echo "== devices"
used() { ctl stats | sed -n 's/.*memory_used_bytes": *\([0-9]*\).*/\1/p'; }
mkdir -p shared; echo from outside >shared/outside; cp /vsock shared; cp /image.qcow2 .
# Linux reports free pages only where 64 MiB and the low watermark are free in a zone.
memory=256M
# Who listens at a port of the guest's: the machine's own control socket.
ln -s vm.sock vm.vsock_52
address='ip link set eth0 up; ip addr add 10.0.0'
quiet /vmlinux --backend kvm --net switch=lan -p "quiet parador.run=\"$address.1/24 dev eth0; while :; do sleep 9; done\"" </dev/null >/dev/null &
other=$!
quiet /vmlinux --backend kvm -c 2 --net switch=lan --share shared:host --vsock cid=3,path=vm.vsock --api-socket vm.sock -d image.qcow2 -p "quiet parador.run=\"
    mkdir /h; mount -t 9p -o trans=virtio,version=9p2000.L,msize=65560 host /h; cat /h/outside; echo from inside >/h/inside
    printf 'GET /v1/vm HTTP/1.0\r\n\r\n' | /h/vsock connect 52 | grep -o state...running.
    head -n 1 /dev/vda; echo written | dd of=/dev/vda bs=512 seek=9 conv=sync,fsync; dd if=/dev/vda bs=512 skip=9 count=1 iflag=direct | head -n 1
    $address.2/24 dev eth0; until ping -c 1 -W 1 10.0.0.1 >/dev/null; do :; done; ping -c 3 -s 9000 10.0.0.1
    head -c 40000000 /dev/zero >/zeros; touch /h/filled; until [ -e /h/go ]; do sleep 1; done
    rm /zeros; until [ -e /h/end ]; do sleep 1; done; machine-exit 5\"" </dev/null >console &
machine=$!
until [ -e shared/filled ]; do sleep 1; done
ctl metrics | grep -E '^parador_(disk_written|share_written|network_receive|network_transmit)_bytes|^parador_vcpu_seconds.*run|^parador_guest_memory_free'
full=$(used); touch shared/go
until now=$(used); [ -z "$now" ] || [ $((full - now)) -gt 30000000 ]; do sleep 1; done
[ "$now" ] && echo memory returns || echo the VM has ended
touch shared/end
wait $machine
echo "code $?"
memory=
kill $other; wait $other; echo "other $?"
cat console shared/inside

echo "== priority"
parador run /interrupts --backend kvm -m 64M --timeout 60s </dev/null 2>&1
echo "code $?"

echo "== refused"
parador run /refused --backend kvm -m 64M --timeout 60s </dev/null 2>&1
echo "code $?"

echo "== timeout"
parador run /vmlinux -i busybox -m 128M --timeout 2s </dev/null >/dev/null
echo "code $?"
echo "== end"
"#;

/// Boots an unmodified kernel with two processors to a shell, and pre-virtualized ones with devices
/// of all kinds; looks at the process of a machine, and controls one; each ends in its own way.
pub fn guests() -> Result<()> {
    let folder = TempDir::with_prefix("parador-test-").context("cannot make a folder")?;
    let guests =
        |root: &Path| ["interrupts", "refused"].iter().try_for_each(|name| copy_guest(name, root));
    let mut machine = emulated(folder.path(), SCRIPT, guests)?;
    let text = succeed(with_counted_time(&mut machine).stdin(Stdio::null()))?;
    check(&text).with_context(|| format!("the emulated host has printed:\n{text}"))
}

/// An emulated host that does this, started in this folder; `more` adds files to its root. Its
/// serial line is standard output.
pub fn emulated(
    folder: &Path,
    script: &str,
    more: impl FnOnce(&Path) -> Result<()>,
) -> Result<Command> {
    let tree = folder.join("tree");
    let host = debian_kernel()?;
    fill(&tree, &host, script)?;
    more(&tree)?;
    let pack = "find . | cpio -o -H newc --quiet >../disk";
    succeed(Command::new("sh").args(["-c", pack]).current_dir(&tree))?;
    let mut machine = qemu(LIMIT, ONE_THREAD);
    // QEMU 7.2 does `IRET` of programs, which the wedge does, with the rights of a kernel, which
    // SMAP refuses.
    machine.args(["-cpu", "EPYC,+svm,+npt,-smap", "-m", "2G", "-smp", "1"]);
    machine.arg("-kernel").arg(host.join("vmlinuz")).arg("-initrd").arg(folder.join("disk"));
    machine.args(["-append", "console=ttyS0 quiet panic=-1 mitigations=off"]);
    machine.current_dir(folder);
    Ok(machine)
}

/// Counts the time of an emulated host in instructions while it is busy: on a busy machine the
/// timer ticks of a Linux in its VM, each of which is several exits, would take all of it.
fn with_counted_time(machine: &mut Command) -> &mut Command {
    machine.args(["-icount", "shift=1"])
}

/// Script of an emulated host whose VMs are debugged by GDB on this host, over its second serial
/// line.
const DEBUGGED: &str = r#"
ip link set lo up
stty -F /dev/ttyS1 115200 raw -echo; exec 3<>/dev/ttyS1
mkfifo keys; exec 4<>keys
attach() { echo "== $1"; until nc 127.0.0.1 1234 <&3 >&3; do sleep 1; done; }
run() {
    # The log of the VM before must not be taken for this one's, which opens it in the background.
    rm -f log; touch log
    parador run $1 --backend kvm -c $2 -i busybox -m 128M --timeout 300s --gdb tcp=:1234$3 -p 'quiet parador.run="
        grep \ _text$ /proc/kallsyms; echo it runs; until read -t 1 end; do sync; done; machine-exit 3"' <keys >log 2>&1 &
    machine=$!
}
runs() { until grep -q '^it runs' log; do sleep 1; done; }
ends() { echo end >&4; wait $machine; echo "code $?"; cat log; }

run /vmlinux 2 ,wait
attach first; runs; attach running; ends
run /vmlinuz 1; runs
attach moved; ends
echo "== end"
"#;

/// GDB stops the guest kernel of a KVM VM at its first instruction, at a breakpoint and after
/// single steps, and continues it; `parador` reports the load address of a relocated kernel.
pub fn debugged() -> Result<()> {
    let rig = Rig::new()?;
    let mut machine = emulated(rig.folder(), DEBUGGED, no_files)?;
    with_counted_time(&mut machine).args(["-serial", "unix:gdb,server=on,wait=off"]);
    let mut host = Host::start(&mut machine)?;
    let mut sessions = || {
        host.until("== first")?;
        let first = [
            "print $pc > 0 && $pc < 0x8000000",
            "print $cs",
            "x/i $pc",
            "stepi",
            "stepi",
            "info threads",
        ];
        let text =
            gdb_at(&rig, "gdb", &[&first[..], &["break *__x64_sys_sync", "detach"]].concat())?;
        has(&text, &["$1 = 1", "Thread 1.2", "detached"])?;
        host.until("== running")?;
        at_sync(&rig, &["info threads"], &["Thread 1.2"])?;
        host.until("== moved")?;
        let text = gdb_at(&rig, "gdb", &["maintenance packet qOffsets", "stepi", "detach"])?;
        let start = text.split("TextSeg=").nth(1).and_then(|text| text.split('"').next());
        let start = start.context("no offsets").with_context(|| text.clone())?;
        host.until("== end")?;
        ensure!(host.printed.contains(&format!("{start} T _text")), "not at {start}");
        let ended = host.printed.lines().filter(|line| *line == "code 3").count();
        ensure!(ended == 2, "the guests have ended in another way");
        ensure!(!host.printed.contains("Call Trace"), "something is wrong");
        Ok(())
    };
    let result = sessions();
    let early = host.child.try_wait().context("cannot look at the emulated host")?;
    host.end(result.is_err())?;
    let early = early.map_or_else(String::new, |status| format!("QEMU has ended ({status}); "));
    result.with_context(|| format!("{early}the emulated host has printed:\n{}", host.printed))
}

/// Checks the output of a VM.
type Check = Box<dyn Fn(&str) -> Result<()> + Send + Sync>;
/// Puts files into the root of an emulated host.
type Fill = Box<dyn Fn(&Path) -> Result<()> + Send + Sync>;

/// VMs of one test, which `parador run` of an emulated host runs by KVM.
pub struct Vm {
    /// Name of the test.
    pub name: &'static str,
    /// Commands of the host's shell that run it.
    pub script: String,
    /// Checks what it prints, with a last line `code CODE`.
    pub check: Check,
}

/// VMs that one emulated host runs, one after the other, once for all tests of them.
pub struct Batch {
    vms: Vec<Vm>,
    /// Puts the files that the VMs need into this folder, the emulated host's root.
    fill: Fill,
    printed: OnceLock<Result<String, String>>,
}

impl Batch {
    /// VMs, and what puts their files into the root of the emulated host.
    pub fn new(vms: Vec<Vm>, fill: Fill) -> Self {
        Self { vms, fill, printed: OnceLock::new() }
    }

    /// The names of the VMs, in order.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.vms.iter().map(|vm| vm.name)
    }

    /// Runs all VMs, if no test has done so, and checks one of them.
    pub fn check(&self, index: usize) -> Result<()> {
        let vm = self.vms.get(index).context("no such VM")?;
        let printed = self.printed.get_or_init(|| self.run().map_err(|error| format!("{error:#}")));
        let printed = printed.as_ref().map_err(|error| anyhow!("{error}"))?;
        let head = format!("== {}\n", vm.name);
        let part = printed.split_once(&head).and_then(|(_, rest)| rest.split("== ").next());
        let part = part.with_context(|| format!("it did not start:\n{printed}"))?;
        let is_kvm = part.contains("back end `kvm`");
        ensure!(is_kvm, "not by KVM:\n{part}");
        (vm.check)(part).with_context(|| format!("it has printed:\n{part}"))
    }

    fn run(&self) -> Result<String> {
        let run = |Vm { name, script, .. }: &Vm| {
            format!("echo '== {name}'\n(\n{script}\n) </dev/null 2>&1\necho \"code $?\"\n")
        };
        let script = self.vms.iter().map(run).collect::<String>() + "echo '== end'\n";
        let folder = TempDir::with_prefix("parador-test-").context("cannot make a folder")?;
        let mut host = emulated(folder.path(), &script, &self.fill)?;
        succeed(host.stdin(Stdio::null()))
    }
}

/// The micro-guests that KVM runs.
pub fn micro_guests() -> Batch {
    const NATIVE: &str = "vm guest ended";
    let guests = GUESTS.iter().filter(|&&(name, ..)| left_out("kvm", name).is_none());
    let vm = |&(name, cpus, code, native): &(&'static str, u32, i32, &'static str)| {
        let other = KVM_TEXTS.iter().find(|&&(other, _)| other == name).map(|&(_, text)| text);
        // The native kernel's log states the end; the exit code does here.
        let text = other.or((!native.starts_with(NATIVE)).then_some(native));
        let check = move |part: &str| {
            let is_good = part.contains(&format!("code {code}\n"))
                && text.is_none_or(|text| part.contains(text));
            ensure!(is_good && !part.contains("FAILED"), "expected {code}, {text:?}");
            Ok(())
        };
        let line = command_line(name);
        let run = format!(
            "parador run /{name} -c {cpus} -m 64M -p '{line}' --backend kvm --timeout 600s"
        );
        Vm { name, script: run, check: Box::new(check) }
    };
    let fill = |root: &Path| GUESTS.iter().try_for_each(|(name, ..)| copy_guest(name, root));
    Batch::new(guests.map(vm).collect(), Box::new(fill))
}

/// Copies a micro-guest to the root of an emulated host.
fn copy_guest(name: &str, root: &Path) -> Result<()> {
    let from = artifacts().join(format!("guest-{name}"));
    fs::copy(&from, root.join(name)).with_context(|| format!("cannot copy {}", from.display()))?;
    Ok(())
}

/// An emulated host that runs.
pub struct Host {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    /// Output that has been read so far.
    pub printed: String,
}

impl Host {
    /// Starts QEMU; the host's serial line is read by [`Self::until`].
    pub fn start(machine: &mut Command) -> Result<Self> {
        machine.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut child = machine.spawn().context("cannot start the emulated host")?;
        let lines = BufReader::new(child.stdout.take().context("no output")?).lines();
        Ok(Self { child, lines, printed: String::new() })
    }

    /// Reads up to this line.
    pub fn until(&mut self, wanted: &str) -> Result<()> {
        for line in &mut self.lines {
            let line = line.context("cannot read what the emulated host prints")?;
            let line = line.trim_end();
            self.printed.push_str(line);
            self.printed.push('\n');
            if line == wanted {
                return Ok(());
            }
        }
        bail!("`{wanted}` did not appear")
    }

    /// Waits for the end of QEMU; with `is_killed` kills it first, without a shutdown of its Linux.
    pub fn end(&mut self, is_killed: bool) -> Result<()> {
        if is_killed {
            // `timeout` passes the signal on, which it cannot with SIGKILL.
            let _ = Command::new("kill").arg(self.child.id().to_string()).status();
        }
        self.child.wait().context("cannot wait for the emulated host")?;
        Ok(())
    }
}

/// Texts that each part of the output must contain.
fn check(text: &str) -> Result<()> {
    let part = |name: &str, wanted: &[&str]| {
        let part = text.split("== ").find(|part| part.starts_with(name));
        let part = part.with_context(|| format!("no part `{name}`"))?;
        if let Some(missing) = wanted.iter().find(|wanted| !part.contains(**wanted)) {
            bail!("{name}: `{missing}` is missing");
        }
        ensure!(!part.contains("Call Trace") || name == "disk", "{name}: something is wrong");
        Ok(part)
    };
    let kvm = "back end `kvm`";
    // A line may begin with the terminal's echo of one that is still to be read.
    part("debian", &[kvm, "42 is\n", "-cloud-amd64\n", "has 2\n", "code 7\n"])?;
    let disk =
        part("disk", &[kvm, "from outside", "disk0", "\n8\n", "kernel panicked", "code 80\n"])?;
    ensure!(disk.ends_with("code 80\nfrom inside\n"), "nothing was written");
    for sandbox in ["strict", "off"] {
        let wanted = ["NoNewPrivs:\t1", "Seccomp:\t2", "code 137\n"];
        let process = part(&format!("process {sandbox}"), &wanted)?;
        let is_confined = sandbox == "strict";
        for (text, is_there) in [
            ("CapEff:\t0000000000000000", true),
            ("has networks", !is_confined),
            ("has files", !is_confined),
        ] {
            ensure!(process.contains(text) == is_there, "--sandbox {sandbox}: {text}");
        }
        for line in process.lines().filter(|line| line.starts_with('/')) {
            // The files in memory that are left are mapped.
            let files = [
                "/memfd:parador-guest",
                "/memfd:parador-shared",
                "/memfd:parador-counters",
                "/dev/null",
            ];
            let is_known = files.iter().any(|file| line.starts_with(file));
            ensure!(is_known, "the machine has {line}");
        }
    }
    let control = [
        "stood still",
        "\"backend\": \"kvm\"",
        "\"state\": \"paused\"",
        "continues",
        "\"processes\": 1",
        "parador_resets_total 1\n",
        "code 9\n",
        "restarting the VM",
        "hvc0 ",
        "powered off (exit code 9",
    ];
    let control = part("control", &control)?;
    let events = control.lines().filter_map(|line| line.strip_prefix("{\"event\":\""));
    let events: Vec<_> = events.filter_map(|line| line.split('"').next()).collect();
    ensure!(events == LIFE, "control: {events:?}");
    let devices = [
        "memory returns",
        "code 5\n",
        "other 143\n",
        "from outside",
        "state\":\"running\"",
        "in the image\n",
        "written\n",
        "9008 bytes from 10.0.0.1",
        "from inside\n",
    ];
    let devices = part("devices", &devices)?;
    // Two vCPUs.
    for (name, count, least) in [
        ("parador_disk_written_bytes_total{disk=\"disk0\"} ", 1, 512.0),
        ("parador_share_written_bytes_total{share=\"host\"} ", 1, 12.0),
        ("parador_network_receive_bytes_total{net=\"net0\"} ", 1, 3.0 * 9042.0),
        ("parador_network_transmit_bytes_total{net=\"net0\"} ", 1, 3.0 * 9042.0),
        ("parador_vcpu_seconds_total{vcpu=\"", 2, 0.001),
        ("parador_guest_memory_free_bytes ", 1, 4096.0),
    ] {
        let lines = devices.lines().filter(|line| line.starts_with(name));
        let values = lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        let enough = values.filter(|value| *value >= least).count();
        ensure!(enough == count, "devices: {enough} values of {name}");
    }
    part("priority", &[kvm, "code 0\n"])?;
    part(
        "refused",
        &[kvm, "KVM cannot emulate a guest instruction", "suberror: 0x1", "code 81\n"],
    )?;
    part("timeout", &["time limit", "code 124\n"])?;
    part("end", &[])?;
    Ok(())
}

/// The emulated host's files.
fn fill(tree: &Path, host: &Path, script: &str) -> Result<()> {
    for name in ["bin", "dev", "modules", "proc", "root", "sys", "tmp"] {
        fs::create_dir_all(tree.join(name)).context("cannot make a folder")?;
    }
    let copy = |from: &Path, to: &str| {
        let to = tree.join(to.trim_start_matches('/'));
        fs::create_dir_all(to.parent().unwrap_or(tree)).context("cannot make a folder")?;
        fs::copy(from, &to).with_context(|| format!("cannot copy {}", from.display()))?;
        Ok::<_, anyhow::Error>(to)
    };
    copy(Path::new("/bin/busybox"), "bin/busybox")?;
    for (number, name) in MODULES.iter().enumerate() {
        copy(&host.join(name), &format!("modules/{number}-{name}"))?;
    }
    let program = target().join("release/parador");
    // `libm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x...)`, `/lib64/ld-linux-x86-64.so.2 (0x...)`
    let libraries = succeed(Command::new("ldd").arg(&program))?;
    for path in libraries.split_whitespace().filter(|word| word.starts_with('/')) {
        copy(Path::new(path), path)?;
    }
    copy(&host.join("vmlinuz"), "vmlinuz")?;
    copy(&artifacts().join("parador-wedge"), "bin/parador-wedge")?;
    copy(&artifacts().join("linux-vsock"), "vsock")?;
    let raw = tree.join("raw");
    let mut bytes = b"in the image\n".to_vec();
    bytes.resize(1 << 20, 0);
    fs::write(&raw, bytes)?;
    let mut convert = Command::new("qemu-img");
    convert.args(["convert", "-O", "qcow2"]).arg(&raw).arg(tree.join("image.qcow2"));
    succeed(&mut convert)?;
    fs::remove_file(raw)?;
    for (from, to) in [(program, "bin/parador"), (kernel()?, "vmlinux")] {
        // Without what debuggers want: the emulated host unpacks all this.
        let copied = copy(&from, to)?;
        // The kernel's relocations stay: processes need them.
        succeed(Command::new("strip").arg("--strip-debug").arg(copied))?;
    }
    fs::write(tree.join("script"), script).context("cannot write the script")?;
    let init = tree.join("init");
    fs::write(&init, INIT)?;
    Ok(fs::set_permissions(init, fs::Permissions::from_mode(0o755))?)
}

/// A folder with Debian's current kernel and the modules of KVM, fetched once.
pub fn debian_kernel() -> Result<PathBuf> {
    let shown = succeed(Command::new("apt-cache").args(["show", "--no-all-versions", PACKAGE]))?;
    let package = shown
        .lines()
        .find_map(|line| line.strip_prefix("Depends: "))
        .and_then(|depends| depends.split([' ', ',']).find(|name| name.starts_with("linux-image-")))
        .with_context(|| format!("package {PACKAGE} names no kernel"))?;
    let cache = target().join("cache");
    fs::create_dir_all(&cache).with_context(|| format!("cannot make {}", cache.display()))?;
    let kept = cache.join(format!("emulated-host-{package}"));
    if kept.is_dir() {
        return Ok(kept);
    }
    let folder = TempDir::new_in(&cache).context("cannot make a folder")?;
    let download = "apt-get -q download $0 && dpkg-deb --extract *.deb all";
    succeed(Command::new("sh").args(["-c", download, package]).current_dir(folder.path()))?;
    let done = folder.path().join("done");
    fs::create_dir(&done)?;
    let collect = r"cp all/boot/vmlinuz-* done/vmlinuz
        for module; do find all -name $module -exec cp {} done ';'; done";
    let mut collect_all = Command::new("sh");
    collect_all.args(["-c", collect, "sh"]).args(MODULES).current_dir(folder.path());
    succeed(&mut collect_all)?;
    for name in MODULES {
        ensure!(done.join(name).is_file(), "{package} has no {name}");
    }
    // Another run may have been faster.
    fs::rename(&done, &kept).or_else(|error| if kept.is_dir() { Ok(()) } else { Err(error) })?;
    Ok(kept)
}

/// Without a usable `/dev/kvm`, options that need it are refused with the reason, and a
/// pre-virtualized kernel runs without it.
pub fn refused() -> Result<()> {
    let folder = TempDir::with_prefix("parador-test-").context("cannot make a folder")?;
    let debian = debian_kernel()?.join("vmlinuz");
    let vmlinux = kernel()?;
    let run = |image: &Path, options: &[&str]| -> Result<(Option<i32>, String)> {
        let parador = parador(folder.path());
        let mut command = Command::new("unshare");
        command.args(["--user", "--map-root-user", "--mount", "sh", "-c"]);
        command.arg("[ ! -e /dev/kvm ] || mount --bind /dev/null /dev/kvm; exec \"$@\"").arg("sh");
        command.arg(parador.get_program()).args(parador.get_args()).arg("run").arg(image);
        command.args(["-i", "busybox", "-m", "128M", "--timeout", "60s"]).args(options);
        command.current_dir(folder.path()).stdin(Stdio::null());
        command.envs(parador.get_envs().filter_map(|(name, value)| Some((name, value?))));
        let output = command.output().context("cannot start parador through unshare")?;
        let text = [&output.stdout[..], &output.stderr].concat();
        Ok((output.status.code(), String::from_utf8_lossy(&text).into_owned()))
    };
    let line = "parador.run=\"echo it runs\"";
    for (image, options, code, texts) in [
        (&debian, &[][..], 69, ["not pre-virtualized", "parador kernel build"]),
        (&debian, &["--backend", "kvm"], 69, ["KVM is not usable", "--backend process"]),
        (&debian, &["--backend", "process"], 65, ["not a bzImage", "vmlinux"]),
        (&vmlinux, &["--backend", "kvm"], 69, ["KVM is not usable", "--backend process"]),
        (
            &vmlinux,
            &["--backend", "kvm", "--gdb", "unix=gdb"],
            69,
            ["KVM is not usable", "--backend process"],
        ),
        (&vmlinux, &["-p", line], 0, ["back end `process`", "it runs"]),
        (&vmlinux, &["--dry-run"], 0, ["would run in processes", "vmlinux"]),
    ] {
        let (ended, text) = run(image, options)?;
        ensure!(ended == Some(code), "{options:?}: {ended:?}, not {code}:\n{text}");
        if let Some(missing) = texts.iter().find(|wanted| !text.contains(**wanted)) {
            bail!("{options:?}: `{missing}` is missing:\n{text}");
        }
    }
    Ok(())
}

/// Adds no files to an emulated host.
pub fn no_files(_: &Path) -> Result<()> {
    Ok(())
}

/// Runs a program to its end and returns what it printed.
pub fn succeed(command: &mut Command) -> Result<String> {
    let output = command.output().with_context(|| format!("cannot start {command:?}"))?;
    let text = String::from_utf8_lossy(&output.stdout).replace('\r', "");
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?} failed ({})\n{text}\n{errors}", output.status);
    Ok(text)
}
