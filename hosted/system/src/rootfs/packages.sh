# Makes a fresh debootstrap tree a Debian that boots as a guest. enter.sh executes it.
#
# Environment: TREE, the tree; SUITE and MIRROR; SECURITY_MIRROR, empty for none; KEY, a file with a
# public key; MODULES, what is copied to the modules, empty for none.
# Arguments: packages.
set -eu
# Users of the disk read what root writes here.
umask 022

if [ -x "$TREE/debootstrap/debootstrap" ]; then
    # The second stage of another architecture. In a user namespace it cannot make device files,
    # which are there already, as in containers of LXC.
    container=lxc chroot "$TREE" /debootstrap/debootstrap --second-stage
fi
# Nothing is to start in the tree while packages are installed.
printf '#!/bin/sh\nexit 101\n' >"$TREE/usr/sbin/policy-rc.d"
chmod 755 "$TREE/usr/sbin/policy-rc.d"
rm -f "$TREE/etc/resolv.conf"
cat /etc/resolv.conf >"$TREE/etc/resolv.conf"

cat >"$TREE/etc/apt/sources.list" <<END
deb $MIRROR $SUITE main
deb $MIRROR $SUITE-updates main
END
if [ -n "$SECURITY_MIRROR" ]; then
    echo "deb $SECURITY_MIRROR $SUITE-security main" >>"$TREE/etc/apt/sources.list"
fi
apt() {
    chroot "$TREE" apt-get -q -y -o APT::Keep-Downloaded-Packages=true \
        -o Binary::apt-get::APT::Keep-Downloaded-Packages=true "$@"
}
export DEBIAN_FRONTEND=noninteractive LC_ALL=C.UTF-8
apt update
apt upgrade
apt install --no-install-recommends "$@"
rm "$TREE/usr/sbin/policy-rc.d"

echo "Configuring"
echo debian >"$TREE/etc/hostname"
printf '127.0.0.1 localhost\n127.0.1.1 debian\n' >"$TREE/etc/hosts"
echo '/dev/vda1 / ext4 errors=remount-ro 0 1' >"$TREE/etc/fstab"
echo 'LANG=C.UTF-8' >"$TREE/etc/default/locale"
printf '[Match]\nType=ether\n\n[Network]\nDHCP=yes\n' >"$TREE/etc/systemd/network/ether.network"
chroot "$TREE" systemctl --quiet enable systemd-networkd
ln -sf ../run/systemd/resolve/stub-resolv.conf "$TREE/etc/resolv.conf"
# The serial line needs no password; sshd takes keys only.
chroot "$TREE" passwd --quiet --delete root
mkdir -p -m 700 "$TREE/root/.ssh"
cat "$KEY" >"$TREE/root/.ssh/authorized_keys"
if [ -n "$MODULES" ]; then
    cp --recursive --no-dereference --preserve=mode,timestamps "$MODULES" "$TREE/usr/lib/modules/"
fi
