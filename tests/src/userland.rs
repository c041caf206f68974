//! Debian's programs in a machine that is processes of this host: a compiler, a database, a web
//! server, packages, what loads a kernel from all sides, and a build of Linux.

use crate::debian;
use crate::hosted::{Rig, end};
use crate::keys::ram_disk;
use crate::kvm::succeed;
use crate::system::{ONE_THREAD, parador, qemu, workspace};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The first program mounts what a Debian has, over a disk that stays as it is; the script sees the
/// result as its root.
const FIRST: &str = "\
set -e
export PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8
mount -t proc proc /proc
mount -t tmpfs -o size=80% over /media
mkdir /media/upper /media/work /media/root
mount -t overlay -o lowerdir=/,upperdir=/media/upper,workdir=/media/work over /media/root
cd /media/root
mkdir -p dev/pts dev/shm
mount -t devtmpfs dev dev
mkdir -p dev/pts dev/shm
mount -t devpts pts dev/pts
mount -t proc proc proc
mount -t sysfs sys sys
for folder in tmp run dev/shm; do mount -t tmpfs tmp $folder; done
mount --bind /mnt mnt
ip link set lo up
chroot . bash -e /mnt/script && echo \"debian: all well\"
sleep 1
echo o >/proc/sysrq-trigger
sleep 60
";
/// Init parameters. The second disk is mounted as the folder for files.
const START: &str =
    "root=/dev/vda1 ro quiet init=/bin/bash -- -c \"mount -o ro /dev/vdb /mnt && . /mnt/first\"";

/// Debian's programs, one after another. The variable gives the seconds of each kind of load.
const SCRIPT: &str = r##"
apt-get -q -y install /mnt/parador-guest.deb
parador-guest

mkdir /tmp/project
cd /tmp/project
for n in $(seq 40); do
    echo "#include <stdio.h>
        int part_$n(int x) { char text[99]; return x + $n + snprintf(text, sizeof(text), \"%d %s\", x, \"part\"); }" >part_$n.c
    echo "int part_$n(int x);" >>parts.h
    echo "x = part_$n(x);" >>calls.h
done
echo '#include <stdio.h>
    #include "parts.h"
    int main(void) { int x = 0;
    #include "calls.h"
    printf("sum %d\n", x); }' >main.c
printf 'CFLAGS = -O2 -Wall\nprogram: main.o $(patsubst %%.c,%%.o,$(wildcard part_*.c))\n\t$(CC) -o $@ $^\n' >Makefile
make -s -j2 program
./program
gcc -O2 -o stress /mnt/stress.c
./stress 3

cd /tmp
pg_ctlcluster 15 main start
until runuser -u postgres -- pg_isready -q; do sleep 1; done
runuser -u postgres -- createdb bench
runuser -u postgres -- pgbench -q -i -s 1 bench
runuser -u postgres -- pgbench -c 4 -j 2 -t 100 bench
pg_ctlcluster 15 main stop

nginx
wrk -t 1 -c 16 -d 2s http://127.0.0.1/
nginx -s quit

for kind in cpu vm fork pipe mmap signal futex; do
    stress-ng --$kind 2 --timeout SECONDS --verify --quiet --temp-path /tmp
    echo "load: $kind"
done
! dmesg | grep -E 'BUG:|WARNING:|Oops|Call Trace|I/O error|segfault|hung'
"##;
/// Texts that the output must contain.
const ANSWERS: [&str; 13] = [
    "installed on 1 processors",
    "sum 1131",
    "stress: all well",
    "number of transactions actually processed: 400/400",
    "Requests/sec:",
    "load: cpu",
    "load: vm",
    "load: fork",
    "load: pipe",
    "load: mmap",
    "load: signal",
    "load: futex",
    "debian: all well",
];

/// A Debian that compiles and installs programs, runs a database and a web server, and runs every
/// kind of load for this number of seconds. Its disk is not written to.
pub fn debian(seconds: u32) -> Result<()> {
    let rig = Rig::new()?;
    let disk = debian::busy_disk()?.join("disk.img");
    let package = debian::package(rig.folder())?;
    let script = SCRIPT.replace("SECONDS", &seconds.to_string());
    let first = rig.folder().join("first");
    std::fs::write(&first, FIRST).context("cannot write a script")?;
    let source = workspace().join("guests/linux/stress.c");
    rig.disk("work.img", &script, &[&first, &package, &source])?;
    let mut machine = rig.bare(300 + 8 * seconds);
    machine.arg("-d").arg(read_only(&disk));
    machine.args(["-d", "path=work.img,ro=on", "-p", START]);
    let ended = end(&mut machine, "")?.well(0, &ANSWERS)?;
    ended.never(&["Socket errors", "Non-2xx", "stress-ng: fail"])
}

/// Linux' source, as Debian packs it, and where its package puts it.
const SOURCE: &str = "linux-source-6.1.tar.xz";
const INSTALLED: &str = "/usr/src";
/// A build of the least Linux that runs programs and has a serial line. What no x86 can need of the
/// source is not unpacked.
const BUILD: &str = "\
mkdir /tmp/linux /tmp/source /tmp/out
mount -t 9p -o trans=virtio,version=9p2000.L source /tmp/source
mount -t 9p -o trans=virtio,version=9p2000.L out /tmp/out
cd /tmp/linux
tar -xJf /tmp/source/ARCHIVE --strip-components=1 --exclude='*/Documentation/*/*' \
    --exclude='*/tools/testing/*' --exclude='*/drivers/gpu/*.[ch]' \
    --exclude='*/drivers/net/*.[ch]' --exclude='*/sound/*.[ch]'
make -s tinyconfig >/dev/null 2>&1
for name in 64BIT BINFMT_ELF BINFMT_SCRIPT BLK_DEV_INITRD PRINTK PROC_FS SERIAL_8250 SERIAL_8250_CONSOLE TTY; do
    scripts/config --enable $name
done
make -s olddefconfig
export KBUILD_BUILD_USER=guest KBUILD_BUILD_HOST=parador
TIMEFORMAT='make: %R s, user %U s, system %S s'
time make -s -j2 bzImage
cp arch/x86/boot/bzImage vmlinux /tmp/out
! dmesg | grep -E 'BUG:|WARNING:|Oops|Call Trace|I/O error|segfault|hung'
";
/// The first program under the new kernel, which cannot switch its machine off.
const INSIDE: &str = "cat /proc/version; echo $((6*7)) is; reboot -f\n";

/// Two virtual CPUs build a Linux with gcc, which then runs in another machine.
pub fn kernel() -> Result<()> {
    /// Seconds that the build may take on a busy host, and the start of its result.
    const LIMITS: [u32; 2] = [1500, 120];
    let rig = Rig::new()?;
    let archive = linux_source()?;
    let disk = debian::compiler_disk()?.join("disk.img");
    let name = archive.file_name().and_then(|name| name.to_str()).context("no name")?;
    let first = rig.folder().join("first");
    fs::write(&first, FIRST).context("cannot write a script")?;
    rig.disk("work.img", &BUILD.replace("ARCHIVE", name), &[&first])?;
    let out = rig.folder().join("out");
    fs::create_dir(&out).context("cannot make a folder")?;
    let mut machine = rig.bare(LIMITS[0]);
    machine.args(["-c", "2", "-m", "3G", "-p", START, "-d"]).arg(read_only(&disk));
    machine.args(["-d", "path=work.img,ro=on", "--share", "out:out", "--share"]);
    let sources = archive.parent().context("no folder")?;
    machine.arg(format!("{}:source,ro=on", sources.display()));
    end(&mut machine, "")?.well(0, &["make: ", "debian: all well"])?;

    let symbols = succeed(Command::new("nm").arg(out.join("vmlinux")))?;
    for symbol in ["start_kernel", "_etext", "serial8250_register_8250_port"] {
        let there = symbols.lines().any(|line| line.split(' ').nth(2) == Some(symbol));
        ensure!(there, "the built kernel has no `{symbol}`");
    }
    let mut machine = qemu(LIMITS[1], ONE_THREAD);
    machine.args(["-m", "256M", "-kernel"]).arg(out.join("bzImage"));
    machine.arg("-initrd").arg(ram_disk(rig.folder(), "inside", INSIDE, &[], &[])?);
    let console = succeed(machine.args(["-append", "console=ttyS0 panic=-1"]))?;
    for text in ["Linux version 6.1.", "(guest@parador)", "42 is"] {
        ensure!(console.contains(text), "`{text}` did not appear:\n{console}");
    }
    Ok(())
}

/// The source that the guest's kernel is built from, too.
fn linux_source() -> Result<PathBuf> {
    let installed = Path::new(INSTALLED).join(SOURCE);
    if installed.is_file() {
        return Ok(installed);
    }
    let listed = succeed(parador(Path::new("/")).args(["kernel", "list", "--json"]))?;
    let listed: Value = serde_json::from_str(&listed).context("`kernel list` prints no JSON")?;
    let kernels = listed["folder"].as_str().map(Path::new).and_then(Path::parent);
    let cache = kernels.context("no cache of `parador kernel build`")?;
    let folders = fs::read_dir(cache).context("no cache of `parador kernel build`")?;
    let archives = folders.flatten().map(|folder| folder.path().join(SOURCE));
    let newest = archives
        .filter(|path| path.is_file())
        .max_by_key(|path| fs::metadata(path).and_then(|file| file.modified()).ok());
    newest.with_context(|| {
        format!("no {SOURCE} in {}: `parador kernel build` fetches it", cache.display())
    })
}

fn read_only(disk: &Path) -> String {
    format!("path={},ro=on", disk.display())
}
