//! Debian's programs in a machine that is processes of this host: a compiler, a database, a web server, packages, and what loads a
//! kernel from all sides.

use crate::debian;
use crate::hosted::{Rig, end};
use crate::system::workspace;
use anyhow::{Context, Result};
use std::path::Path;

/// The first program mounts what a Debian has, over a disk that stays as it is; the script sees the result as its root.
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
/// How it is started. What is mounted where it looks for files is the second disk.
const START: &str =
    "root=/dev/vda1 ro quiet init=/bin/bash -- -c \"mount -o ro /dev/vdb /mnt && . /mnt/first\"";

/// Programs of Debian, one after another. The variable says how many seconds each kind of load takes.
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
/// What must be in its output.
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

/// A Debian in which programs are compiled and installed, a database and a web server work, and every kind of load lasts for so many
/// seconds. Its disk is not written to.
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

fn read_only(disk: &Path) -> String {
    format!("path={},ro=on", disk.display())
}
