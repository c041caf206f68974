#!/bin/sh
# Installs the Debian packages that building and running Parador needs. Does nothing, quickly, when
# they are all there. Uses apt only; asks sudo when not run as root.
set -eu
cd "$(dirname "$0")"

# For emulation, boot images, guest kernels, root file systems, networks of VMs and SSH access. A C
# compiler links host programs and builds the guests' channel driver and a kernel; the kernel's
# build tools need other packages, and a test of its modules the tools for file systems, networks
# and packet filters.
packages="bc binutils bison bochs bochsbios btrfs-progs busybox-static ca-certificates cpio cryptsetup-bin
    debian-archive-keyring debootstrap diffutils dwarves e2fsprogs flex gcc gcc-aarch64-linux-gnu gdb git gpgv grub-common grub-pc-bin
    iproute2 iptables iputils-ping kmod libc6-dev libc6-dev-arm64-cross libelf-dev make mtools nftables openssh-client passt patch
    qemu-system-arm qemu-system-x86 qemu-utils strace user-mode-linux vgabios xfsprogs xorriso xz-utils"

# A rustup toolchain with the bare-metal targets serves as it is. Otherwise Debian's rustc for
# browsers is the newest that Debian 12 has, and builds the bare-metal `core` from its sources.
# rustup_has_target TARGET: succeeds if its `core` is installed
rustup_has_target() {
    directory=$(rustc --print target-libdir --target "$1" 2>/dev/null) || return 1
    ls "$directory"/libcore-*.rlib >/dev/null 2>&1
}
if ! rustup_has_target x86_64-unknown-none || ! rustup_has_target aarch64-unknown-none-softfloat ||
    ! scripts/cargo --version >/dev/null 2>&1; then
    packages="$packages rustc-web cargo-web rust-web-src lld"
fi

missing=
for package in $packages; do
    status=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) || status=none
    [ "$status" = installed ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

if ! command -v apt-get >/dev/null; then
    echo "install.sh: this system has no apt; install these by hand:$missing" >&2
    exit 1
fi
as_root=
if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo >/dev/null; then
        echo "install.sh: not root and no sudo; run as root: apt-get install$missing" >&2
        exit 1
    fi
    as_root=sudo
fi

echo "installing:$missing"
$as_root apt-get update -q
$as_root env DEBIAN_FRONTEND=noninteractive \
    apt-get install -q -y --no-install-recommends $missing
