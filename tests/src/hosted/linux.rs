//! Scenarios of Linux guests of `parador run` as a table of steps, which every back end runs.

use super::{NUMBERS, RUN_SCRIPT, Rig, WRONG, dummy, make_disk};
use crate::kvm::{Batch, Vm};
use crate::system::{artifacts, target};
use crate::transcript::ensure_lacks;
use anyhow::{Context, Result, bail, ensure};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Time limit of a guest on a busy host, emulated or not, in seconds.
const LIMIT: u32 = 300;
/// MiB of the disk with the steps and their programs.
const DISK: u64 = 8;

/// A step of a guest: its name, commands of its shell, and texts that it prints. A command that
/// fails ends the guest; `fails COMMAND` fails if the command succeeds.
type Step = (&'static str, &'static str, &'static [&'static str]);

/// A part of a scenario. A failure of one ends the scenario.
#[derive(Debug)]
enum Part {
    /// Commands of the host's shell, in an empty folder at first.
    Host(&'static str),
    /// A guest that carries out steps and ends with code 0: options of `parador run`, and words of
    /// the kernel command line. Linux passes words `NAME=VALUE` that it does not know as variables.
    Guest(&'static str, &'static str, &'static [Step]),
}
use Part::{Guest, Host};

/// Linux guests, one after another, and what the host does before and after each.
#[derive(Debug)]
pub struct Linux {
    /// Name of its tests.
    pub name: &'static str,
    /// `Ok` if KVM of an emulated host runs it, too; or the reason why not.
    pub kvm: Result<(), &'static str>,
    /// Programs on the guests' disk, below `/mnt`; `dummy.ko` is a module of the kernel.
    files: &'static [&'static str],
    parts: &'static [Part],
}

/// Scenarios.
pub const LINUX: &[Linux] = &[
    Linux { name: "module", kvm: Ok(()), files: &["dummy.ko"], parts: &[Guest("", "", MODULE)] },
    Linux {
        name: "crashes",
        kvm: Ok(()),
        files: &["linux-stress"],
        parts: &[Guest("", "", CRASHES)],
    },
    Linux {
        name: "program-data",
        kvm: Ok(()),
        files: &["linux-stress"],
        parts: &[Guest("", "", &[FEW_FAULTS]), Guest("", "parador_tuning=off", &[A_FAULT_EACH])],
    },
    Linux { name: "preemption", kvm: Ok(()), files: &[], parts: &[Guest("", "", PREEMPTION)] },
    Linux {
        name: "compat",
        kvm: Ok(()),
        files: &["linux-compat-32", "linux-compat-pie", "linux-compat-static-pie"],
        parts: &[
            Guest("", "", &[CODE_32, LAYOUTS_32]),
            Guest("-c 2", "", &[CODE_32, LAYOUTS_32]),
            Guest("", "ia32_emulation=off", &[NO_CODE_32]),
        ],
    },
    Linux {
        name: "old-calls",
        kvm: Err("the kernel has no `vsyscall` page: in processes the wedge serves it"),
        files: &["linux-compat-64"],
        parts: &[
            Guest("", "", &[CODE_64]),
            Guest("-c 2", "", &[CODE_64]),
            Guest("--protection process", "", &[CODE_64]),
            Guest("", "ia32_emulation=off", &[CODE_64]),
        ],
    },
    Linux {
        name: "memory-sizes",
        kvm: Ok(()),
        files: &[],
        parts: &[
            Guest("-m 64M", "least=20000 most=65536", &[TOTAL]),
            Guest("-m 321M", "least=250000 most=328704", &[TOTAL]),
        ],
    },
    Linux {
        name: "memory-4g",
        kvm: Err("the emulated host has 2 GiB"),
        files: &[],
        parts: &[Guest("-m 4G", "least=3800000 most=4194304", &[TOTAL, BOTH_SIDES])],
    },
    Linux {
        name: "memory-pages",
        kvm: Err("page faults do not leave the guest: KVM uses nested paging"),
        files: &[],
        parts: &[
            Guest("", "transparent_hugepage=always least=0 most=300", &[FAULTS]),
            Guest("", "transparent_hugepage=never least=475 most=800", &[FAULTS]),
        ],
    },
    Linux {
        name: "memory-lent",
        kvm: Err("its 400 MiB take a minute on an emulated CPU; `hosted/kvm` has a balloon"),
        files: &[],
        parts: &[Guest("-m 640M --balloon 400M", "", LENT)],
    },
    Linux {
        name: "share",
        kvm: Ok(()),
        files: &[],
        parts: &[
            Host(SHARED),
            Guest("-c 2 --share shared:host --share shared:read,ro=on", "", SHARE),
            Host("cd shared; cmp big copy; md5sum -c many/sum; [ $(ls many | wc -l) = 299 ]"),
        ],
    },
    Linux {
        name: "all-devices",
        kvm: Ok(()),
        files: &[],
        parts: &[Host(DEVICES), Guest(ALL_DEVICES, "", EACH_DEVICE), Host(CHANGED_DEVICES)],
    },
    Linux {
        name: "qcow2",
        kvm: Err("the emulated host has no `qemu-img`; `hosted/kvm` has an image"),
        files: &["linux-disk"],
        parts: &[
            Host(IMAGES),
            Guest("-c 2 -d 1.qcow2 -d files-1.qcow2", "version=1", QCOW2_WRITTEN),
            Guest("-c 2 -d 0.qcow2 -d files-0.qcow2", "version=0", QCOW2_WRITTEN),
            Host(CHECK_IMAGES),
            Guest("-d files-1.qcow2,ro=on", "", QCOW2_READ),
            Guest("-d files-0.qcow2,ro=on", "", QCOW2_READ),
            Host("md5sum -c sums"),
        ],
    },
];

const MODULE: &[Step] = &[
    ("load", "insmod /mnt/dummy.ko; ifconfig dummy0 up; ifconfig dummy0 down", &[]),
    ("unload", "rmmod dummy; fails ifconfig dummy0", &[]),
    ("again", "for n in 1 2; do insmod /mnt/dummy.ko; rmmod dummy; done", &[]),
];

const PREEMPTION: &[Step] = &[(
    "a loop beside endless loops",
    "for n in 1 2 3; do (while :; do :; done) & done
    n=0; while [ $n -lt 20000 ]; do n=$((n+1)); done; sleep 0.1; ls / >/dev/null",
    &[],
)];

const FEW_FAULTS: Step = (
    "data of a program is copied in runs",
    "faults=$(/mnt/linux-stress faults); echo $faults; set -- $faults; [ $2 -lt 10 ] && echo few",
    &["\nfew\n"],
);
const A_FAULT_EACH: Step = (
    "data of a program is copied page by page",
    "faults=$(/mnt/linux-stress faults); echo $faults; set -- $faults; [ $2 -ge $5 ] && echo all",
    &["\nall\n"],
);

const CRASHES: &[Step] = &[(
    "signals of crashing programs",
    "set +e; for way in null divide undefined breakpoint privileged kernel; do
        /mnt/linux-stress crash $way; echo $way $?; done; set -e",
    &[
        "\nnull 139\n",
        "\ndivide 136\n",
        "\nundefined 132\n",
        "\nbreakpoint 133\n",
        "\nprivileged 139\n",
        "\nkernel 139\n",
    ],
)];

const CODE_64: Step = (
    "64-bit programs",
    "/mnt/linux-compat-64",
    &[
        "int 0x80 of 64-bit code: all well",
        "segments of 64-bit code: all well",
        "single steps with NT: all well",
        "old calls: all well",
    ],
);
const CODE_32: Step = (
    "three 32-bit programs at once",
    "for n in 1 2 3; do /mnt/linux-compat-32 >/tmp/$n & all=\"$all $!\"; done
    for one in $all; do wait $one; done; cat /tmp/1 /tmp/2 /tmp/3
    [ $(cat /tmp/1 /tmp/2 /tmp/3 | grep -c '32-bit code: all well') = 3 ]",
    &[],
);
/// Position-independent 32-bit programs, in each layout of the address space.
const LAYOUTS_32: Step = (
    "position-independent 32-bit programs",
    "cd /mnt; for program in pie static-pie; do ./linux-compat-$program; done >/tmp/layouts
    cat /tmp/layouts; grep -c 'all well' /tmp/layouts",
    &["layouts: all well", "32-bit code: all well", "\n4\n"],
);
const NO_CODE_32: Step = ("32-bit programs are refused", "fails /mnt/linux-compat-32", &[]);

/// Memory of the guest in KiB is in the range of the guest's words.
const TOTAL: Step = (
    "memory of all",
    "set -- $(grep MemTotal /proc/meminfo); echo $2; [ $2 -ge $least ]; [ $2 -lt $most ]",
    &[],
);
/// Of 1,200 MiB of zeros, in memory on both sides of the hole below 4 GiB.
const BOTH_SIDES: Step = (
    "memory in use",
    "mkdir /ram; mount -t tmpfs -o size=3600M ram /ram
    dd if=/dev/zero of=/ram/a bs=1M count=1200 2>/dev/null; md5sum </ram/a",
    &["8c2297c9abaf3b724f6192f65efe9a89"],
);
/// A buffer of 1.9 MiB is too small for a large page: 475 pages, in pieces or one by one.
const FAULTS: Step = (
    "page faults",
    "faults() { sed -n 's/^pgfault //p' /proc/vmstat; }; faults >/tmp/before
    dd if=/dev/zero of=/dev/null bs=1900k count=1 2>/dev/null
    n=$(($(faults) - $(cat /tmp/before))); echo $n; [ $n -ge $least ]; [ $n -lt $most ]",
    &[],
);
/// The balloon takes memory, and gives it back when the guest needs it: 400 MiB of zeros.
const LENT: &[Step] = &[
    (
        "taken",
        "sleep 3; set -- $(grep MemFree /proc/meminfo); echo $2; [ $2 -lt $((230 << 10)) ]",
        &[],
    ),
    (
        "given back",
        "mkdir /ram; mount -t tmpfs -o size=500M ram /ram
        dd if=/dev/zero of=/ram/a bs=1M count=400 2>/dev/null; md5sum </ram/a",
        &["61eabaf2bf278703738b433ff884c91f"],
    ),
];

/// A folder with files and links, of which one changes while the guest looks.
const SHARED: &str =
    "mkdir shared; echo above >above; cd shared; head -c 9000000 /dev/urandom >big; md5sum big >sums
    ln -s /etc/hostname link; ln -s .. up; echo old >word; cd ..
    timeout 300 sh -c 'until [ -e shared/ready ]; do sleep 0.1; done; echo changed >shared/word' >/dev/null 2>&1 &";
/// The folder is a file system of the guest, which changes there what it may and sees
/// nothing else.
const SHARE: &[Step] = &[
    (
        "mount",
        "for tag in host read; do
            mkdir /$tag; mount -t 9p -o trans=virtio,version=9p2000.L,msize=65560 $tag /$tag; done; cd /host",
        &[],
    ),
    ("read", "md5sum -c sums; readlink link", &["big: OK", "\n/etc/hostname\n"]),
    (
        "write",
        "dd if=big of=copy bs=100k 2>/dev/null &
        dd if=/dev/urandom of=new bs=64k count=100 2>/dev/null; wait; md5sum new >sum",
        &[],
    ),
    (
        "many files",
        "mkdir many; for n in $(seq 300); do echo $n >many/$n; done; ls many | wc -l
        rm many/7; mv many/8 many/9; mv sum many",
        &["\n300\n"],
    ),
    ("attributes", "chmod 600 new; ln new hard; truncate -s 5 word; cat word", &["old\n"]),
    (
        "what it may not",
        "fails mknod device c 1 3; fails chmod 4755 new; fails chown 7 new
        fails cat ../host/../../above; fails cat up/above",
        &[],
    ),
    (
        "links and pipes",
        "ln -s /etc/hostname new-link; readlink new-link; ln -s ../above out; fails cat out
        mknod pipe p; echo through >pipe & cat pipe; wait; mv pipe piped; ls -l piped",
        &["\n/etc/hostname\n", "through\n", "prw"],
    ),
    (
        "a change by the host",
        "sync; cp new /dev/null; touch ready; until grep changed word 2>/dev/null; do sleep 0.1; done",
        &["changed\n"],
    ),
    (
        "read only",
        "cat /read/word
        for attempt in 'touch /read/no' 'rm /read/word' 'chmod 777 /read/word' 'mkdir /read/no' 'dd if=/dev/zero of=/read/word'; do
            $attempt 2>&1 | grep 'Read-only file system'; done",
        &["changed\n"],
    ),
];

/// Files of a VM with as many devices as there can be; its first disk is that of the steps.
const DEVICES: &str = "for n in $(seq 0 15); do mkdir s$n; echo share $n >s$n/host; done
    for n in $(seq 1 7); do (echo disk $n; cat /dev/zero) | dd of=d$n.img bs=512 count=64 iflag=fullblock 2>/dev/null; done";
const ALL_DEVICES: &str = "--share s0:s0 --share s1:s1 --share s2:s2 --share s3:s3 \
    --share s4:s4 --share s5:s5 --share s6:s6 --share s7:s7 \
    --share s8:s8 --share s9:s9 --share s10:s10 --share s11:s11 \
    --share s12:s12 --share s13:s13 --share s14:s14 --share s15:s15 \
    -d d1.img -d d2.img -d d3.img -d d4.img -d d5.img -d d6.img -d d7.img \
    --net switch=lan --net switch=lan --net switch=lan --net switch=lan --console stdio --vsock cid=3,path=vm.vsock";
/// Each share and disk is read and written, and each network card is there.
const EACH_DEVICE: &[Step] = &[
    (
        "shares",
        "for n in $(seq 0 15); do
            mkdir /s$n; mount -t 9p -o trans=virtio,version=9p2000.L,msize=65560 s$n /s$n
            [ \"$(cat /s$n/host)\" = \"share $n\" ]; echo from $n >/s$n/guest; done",
        &[],
    ),
    (
        "disks",
        "n=0; for disk in b c d e f g h; do
            n=$((n+1)); [ \"$(head -n 1 /dev/vd$disk)\" = \"disk $n\" ]
            echo from $n | dd of=/dev/vd$disk bs=512 seek=9 conv=sync,fsync 2>/dev/null; done",
        &[],
    ),
    (
        "the others",
        "ls -d /sys/class/net/eth? | wc -l; head -c 8 /dev/hwrng | wc -c
        ls /sys/bus/pci/devices | wc -l; ls -d /sys/bus/pci/devices/0000:00:01.?
        ls -d /sys/class/tty/hvc0 || ls -d /dev/hvc0",
        &["\n4\n8\n33\n", "00:01.0", "00:01.1", "hvc0"],
    ),
];
const CHANGED_DEVICES: &str = "for n in $(seq 0 15); do [ \"$(cat s$n/guest)\" = \"from $n\" ]; done
    for n in $(seq 1 7); do [ \"$(dd if=d$n.img bs=512 skip=9 2>/dev/null | head -n 1)\" = \"from $n\" ]; done";

/// For each version of the format an image without data, and one with a file system.
const IMAGES: &str = "mke2fs -q -t ext4 files.img 96M
    make() { qemu-img create -q -f qcow2 -o $1 $2.qcow2 4G; qemu-img convert -O qcow2 -o $1 files.img files-$2.qcow2; }
    make compat=1.1 1; make compat=0.10,cluster_size=4k 0";
const CHECK_IMAGES: &str = "for image in *.qcow2; do qemu-img check $image; done
    for image in files-?.qcow2; do
        qemu-img convert -O raw $image files.img; e2fsck -fp files.img || [ $? = 1 ]
    done; md5sum files-?.qcow2 >sums";
/// Both images of a version.
const QCOW2_WRITTEN: &[Step] = &[
    (
        "write and read",
        "dd if=/dev/urandom of=/tmp/data bs=1M count=12 2>/dev/null
        dd if=/tmp/data of=/dev/vdb bs=1M seek=3000 2>/dev/null
        sync; echo 3 >/proc/sys/vm/drop_caches
        dd if=/dev/vdb bs=1M skip=3000 count=12 2>/dev/null | cmp - /tmp/data
        dd if=/dev/vdb bs=1M skip=100 count=9 2>/dev/null | cmp -n 9000000 - /dev/zero",
        &[],
    ),
    (
        "zeros",
        "dd if=/dev/zero of=/dev/vdb bs=512 seek=6144000 count=1955 2>/dev/null
        dd if=/dev/vdb bs=512 skip=6144000 count=1955 2>/dev/null | cmp -n 1000960 - /dev/zero",
        &[],
    ),
    (
        // Images of version 0 have no zeros of their own, so that they take a while.
        "a read beside zeros",
        "/mnt/linux-disk vdb 256 | tee /tmp/zeros; [ $version = 1 ] || grep -q beside /tmp/zeros",
        &[],
    ),
    (
        "files",
        "mkdir /second; mount /dev/vdc /second; cp /tmp/data /second; fstrim /second; sync
        for n in 1 2 3 4; do cp /tmp/data /second/$n & done; wait; rm /second/2
        cd /second; md5sum 1 3 4 data >sums; cd /; umount /second; blockdev --getsize64 /dev/vdb",
        &["\n4294967296\n"],
    ),
];
/// The second of these disks in another guest.
const QCOW2_READ: &[Step] = &[(
    "read",
    "mkdir /second; mount -o ro /dev/vdb /second; cd /second; md5sum -c sums
    fails dd if=/dev/zero of=/dev/vdb bs=512 count=1",
    &["1: OK", "3: OK", "4: OK", "data: OK"],
)];

/// Line that a script prints before a step; with [`END`], after the last part.
const STEP: &str = "step: ";
const END: &str = "all parts";
/// First part of the guests' script: messages of Linux from warnings on, after those of its start,
/// which on an emulated host warn of the emulator.
const START: &str =
    "dmesg -n 5; fails() { if \"$@\"; then echo \"it succeeds: $*\"; exit 1; fi; }\n";
/// First part of the host's script where `parador` is not installed: it ends with the script.
const PARADOR: &str = "parador() { setpriv --pdeathsig KILL \"$PARADOR\" \"$@\"; }\n";

impl Linux {
    /// Steps of all guests.
    fn guests(&self) -> impl Iterator<Item = &'static [Step]> {
        self.parts.iter().filter_map(|part| match part {
            Guest(.., steps) => Some(*steps),
            Host(_) => None,
        })
    }

    /// The disk of the guests, in this folder.
    fn disk(&self, folder: &Path) -> PathBuf {
        folder.join(self.name).with_extension("img")
    }

    /// Makes the disk of the guests, with their steps: the word `guest` says whose.
    fn make_disk(&self, folder: &Path) -> Result<()> {
        let place = |name: &&str| match *name {
            "dummy.ko" => dummy(),
            name => Ok(artifacts().join(name)),
        };
        let files = self.files.iter().map(place).collect::<Result<Vec<_>>>()?;
        let files: Vec<&Path> = files.iter().map(PathBuf::as_path).collect();
        let step = |(name, commands, _): &Step| format!("echo '{STEP}{name}'\n{commands}\n");
        let guest = |(index, steps): (usize, &[Step])| {
            format!("{index})\n{};;\n", steps.iter().map(step).collect::<String>())
        };
        let guests: String = self.guests().enumerate().map(guest).collect();
        let script = format!("{START}case $guest in\n{guests}esac\n");
        make_disk(&self.disk(folder), DISK, &script, &files)
    }

    /// Script of a host that has the guests' disk in this folder.
    fn script(&self, backend: &str, folder: &Path, kernel: &Path) -> String {
        let (kernel, disk) = (kernel.display(), self.disk(folder));
        let run = format!(
            "parador run {kernel} --backend {backend} --timeout {LIMIT}s -i busybox -d {}",
            disk.display()
        );
        let mut script = "exec 2>&1; set -e\n".to_owned();
        let mut guest = 0;
        for part in self.parts {
            script += &match part {
                Host(commands) => format!("{commands}\n"),
                Guest(options, words, _) => {
                    let line = format!("quiet guest={guest} {words} parador.run=\"{RUN_SCRIPT}\"");
                    guest += 1;
                    format!("{run} {options} -p '{line}' </dev/null\n")
                }
            };
        }
        script + "echo '" + STEP + END + "'\n"
    }

    /// Checks what host and guests have printed.
    fn check(&self, printed: &str) -> Result<()> {
        let mut parts = printed.split(STEP).skip(1);
        for (name, _, texts) in self.guests().flatten() {
            let part = parts.next().filter(|part| part.starts_with(name));
            let part = part.with_context(|| format!("step `{name}` did not begin"))?;
            if let Some(missing) = texts.iter().find(|text| !part.contains(**text)) {
                bail!("step `{name}`: `{missing}` did not appear");
            }
        }
        ensure_lacks(printed, &WRONG)?;
        let mut messages = printed.lines().filter(|line| line.starts_with("parador: "));
        let number = messages.find(|line| NUMBERS.iter().any(|number| line.contains(number)));
        ensure!(number.is_none(), "a message has a number in place of a cause: {number:?}");
        ensure!(parts.next().is_some_and(|part| part.starts_with(END)), "the last part failed");
        Ok(())
    }

    /// Runs it in processes of this host.
    pub fn in_processes(&self) -> Result<()> {
        let rig = Rig::new()?;
        self.make_disk(rig.folder())?;
        let script = self.script("process", rig.folder(), rig.kernel());
        let mut host = Command::new("setpriv");
        host.args(["--pdeathsig", "KILL", "sh", "-c", &format!("{PARADOR}{script}")]);
        host.env("PARADOR", target().join("release/parador"));
        host.env("PARADOR_ARTIFACTS", artifacts());
        let output = host.current_dir(rig.folder()).stdin(Stdio::null()).output();
        let output = output.context("cannot start a shell through setpriv")?;
        let printed = String::from_utf8_lossy(&output.stdout).replace('\r', "");
        self.check(&printed).with_context(|| printed)
    }
}

/// The scenarios that KVM runs.
pub fn by_kvm() -> Batch {
    let all = || LINUX.iter().filter(|linux| linux.kvm.is_ok());
    let vm = |linux: &'static Linux| {
        let script = linux.script("kvm", Path::new("/"), Path::new("/vmlinux"));
        let script = format!("mkdir /tmp/{0}; cd /tmp/{0}\n{script}", linux.name);
        Vm { name: linux.name, script, check: Box::new(|printed| linux.check(printed)) }
    };
    let vms = all().map(vm).collect();
    Batch::new(vms, Box::new(move |root| all().try_for_each(|linux| linux.make_disk(root))))
}
