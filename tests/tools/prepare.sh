# Makes a Debian with the tools of the tests, in a fresh one. Only now a mirror is used: $1.
export LC_ALL=C
apt-get update -q
apt-get install -q -y --no-install-recommends bzip2 dbus debos debvm dosfstools dpkg-dev e2fsprogs fakemachine kmod lintian \
    bpftrace linux-perf mount openssh-client parted passt python3-venv systemd-resolved udev xz-utils
apt-get clean

# A mirror of its own for debootstrap and mmdebstrap: what Debian itself needs, and what debvm adds.
mkdir -p /srv/mirror/pool/partial /srv/mirror/dists/bookworm/main/binary-amd64
cd /srv/mirror
: >/tmp/nothing
base=$(debootstrap --print-debs --variant=minbase bookworm /tmp/list "$1")
apt-get install -q -y --download-only --no-install-recommends -o Dir::State::status=/tmp/nothing \
    -o Dir::Cache::archives=/srv/mirror/pool -o Debug::NoLocking=1 \
    '?essential' $base initramfs-tools libnss-resolve linux-image-cloud-amd64 login openssh-server systemd-sysv
rm -rf pool/partial pool/lock /tmp/nothing /tmp/list
index=main/binary-amd64/Packages
dpkg-scanpackages --multiversion pool >dists/bookworm/$index
cd dists/bookworm
{
    printf 'Suite: stable\nCodename: bookworm\nArchitectures: amd64\nComponents: main\nDate: %s\nSHA256:\n' "$(date -Ru)"
    printf ' %s %s %s\n' "$(sha256sum $index | cut -d ' ' -f 1)" "$(stat -c %s $index)" $index
} >Release

# virtme-ng, from files that the host's pip has fetched.
python3 -m venv /opt/vng
/opt/vng/bin/pip install -q --no-index --find-links /srv/wheels virtme-ng setuptools

# debos builds in here with and without a VM. The VM's /etc/hostname has this mode, and
# debootstrap copies the file.
chmod 444 /etc/hostname
# This host's udev, if there is one, does not see what is done here. The kernel makes the device
# nodes that debos waits for.
mkdir -p /srv/no-udev
printf '#!/bin/sh\n' >/srv/no-udev/udevadm
chmod 755 /srv/no-udev/udevadm

# QEMU, with a network card for which the kernel of the package has a driver.
mkdir -p /srv/tcg
printf '#!/bin/sh\nexec /usr/bin/qemu-system-x86_64 "$@" -nic user,model=virtio-net-pci\n' >/srv/tcg/qemu-system-x86_64
chmod 755 /srv/tcg/qemu-system-x86_64
