//! The guest kernel's modules, and what image builders and testers use of them, with this host's
//! tools.

use super::exec::exec;
use super::{Rig, end};
use anyhow::{Context, Result, ensure};
use std::fs;

/// Uses a module that the kernel loads by itself, loads every module, and uses some.
const SCRIPT: &str = r#"
set -eu
PATH=$PATH:/usr/sbin:/sbin
cd /tmp
mkdir at
# Makes a file system on a file, and writes to it.
try() {
    kind=$1
    shift
    truncate -s 400M disk
    "$@" disk >/dev/null
    mount -o loop -t "$kind" disk at
    echo "text of $kind" >at/file
    umount at
    mount -o loop,ro -t "$kind" disk at
    cat at/file
    umount at
    rm disk
}
# One sector has 512 bytes.
format() { mformat -T 819200 -i "$1" ::; }
try vfat format

find "/lib/modules/$(uname -r)/" -name '*.ko' | sort >/tmp/paths
# Names of modules have no blanks.
if ! modprobe -a $(sed 's,.*/,,; s,[.]ko$,,' /tmp/paths) 2>/tmp/errors; then
    # A CPU may lack the instructions of an algorithm.
    sed -n "s/.*insert '\(.*\)': No such device.*/\1/p" /tmp/errors | while read -r name; do
        grep "x86/crypto/$name.ko" /tmp/paths | tr - _
    done >/tmp/lacking
    grep -v 'No such device' /tmp/errors | sed 's/^/FAILED /'
    [ "$(grep -c . /tmp/errors)" = "$(grep -c . /tmp/lacking)" ] || sed 's/^/FAILED /' /tmp/errors
fi
echo "modules: $(grep -c . /proc/modules)"

try xfs mkfs.xfs -q
try btrfs mkfs.btrfs -q
truncate -s 16M disk
echo secret | cryptsetup open --type plain --cipher aes-xts-plain64 --key-size 256 disk crypt
mke2fs -q /dev/mapper/crypt
mount /dev/mapper/crypt at
echo text of dm-crypt >at/file
cat at/file
umount at
cryptsetup close crypt
echo 64M >/sys/block/zram0/disksize
mkswap /dev/zram0 >/dev/null
swapon /dev/zram0
grep -o /dev/zram0 /proc/swaps

ip link set lo up
ip link add wg0 type wireguard
ip link add d0 type dummy
ip link add link d0 name d0.5 type vlan id 5
ip address add 10.9.0.1/24 dev d0.5
ip link set d0 up
ip link set d0.5 up
tc qdisc add dev d0 root handle 1: htb default 1
tc class add dev d0 parent 1: classid 1:1 htb rate 1mbit
tc qdisc add dev d0 parent 1:1 netem delay 1ms
tc qdisc show dev d0 | grep -o 'netem'
nft add table inet t
nft add chain inet t c '{ type filter hook input priority 0; }'
nft add rule inet t c ct state established counter accept
nft list ruleset | grep -o 'ct state established'
for tool in iptables-nft iptables-legacy ip6tables-legacy; do
    $tool -A INPUT -m conntrack --ctstate NEW -m limit --limit 9/s -j LOG
    $tool -t mangle -A INPUT -j MARK --set-mark 1
    $tool -t nat -A POSTROUTING -j MASQUERADE
    echo "$tool: $($tool -S INPUT | grep -c LOG)"
done
ping -q -c 1 10.9.0.1 >/dev/null
grep -c 10.9.0.1 /proc/net/nf_conntrack >/dev/null
mount -t securityfs none /sys/kernel/security
cat /sys/kernel/security/lsm
echo
echo "free blocks are reported from order $(cat /sys/module/page_reporting/parameters/page_reporting_order)"
! dmesg | grep -E 'BUG:|WARNING:|Oops|Call Trace|I/O error'
echo all well
"#;

/// Texts that the output must contain.
const ANSWERS: [&str; 13] = [
    "text of vfat",
    "text of xfs",
    "text of btrfs",
    "text of dm-crypt",
    "/dev/zram0",
    "netem",
    "ct state established",
    "iptables-nft: 1",
    "iptables-legacy: 1",
    "ip6tables-legacy: 1",
    "landlock",
    "free blocks are reported from order 5\n",
    "all well",
];

/// Every module is loaded, and file systems, device mapper, networks and filters work. AppArmor is
/// there on request.
pub fn features() -> Result<()> {
    let rig = Rig::new()?;
    fs::write(rig.folder().join("script"), SCRIPT).context("cannot write the script")?;
    let command = ["-m", "2G", "/", "--", "sh", "script"];
    let output = exec(&rig).args(command).output().context("cannot start parador")?;
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    let missing = ANSWERS.iter().find(|text| !out.contains(**text));
    let is_good = output.status.success() && missing.is_none() && !out.contains("FAILED");
    ensure!(is_good, "{:?}, missing {missing:?}:\n{out}\n{err}", output.status);

    let script = "mount -t securityfs none /sys/kernel/security; cat /sys/kernel/security/lsm";
    end(&mut rig.script_with(60, "lsm=landlock,apparmor", script, &[])?, "")?
        .well(0, &["landlock,apparmor"])?;
    Ok(())
}
