#!/bin/busybox sh
# First program of a guest with the initial RAM disk "busybox": sets up what a shell expects, runs
# one on the console and powers off when it ends. A kernel command line with parador.run="COMMAND"
# runs that instead and powers off.

/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mkdir -p /dev/pts /sbin /usr/bin /usr/sbin
/bin/busybox mount -t devpts devpts /dev/pts
/bin/busybox mount -t tmpfs tmp /tmp
/bin/busybox --install -s
export PATH=/bin:/sbin:/usr/bin:/usr/sbin HOME=/root TERM=${TERM:-linux} PS1='\w # '
hostname guest
cd /root

# A panic is reported to the machine where it has the device for it.
if [ -e /sys/bus/acpi/devices/QEMU0001:00 ]; then
    for module in /lib/modules/*.ko; do insmod "$module"; done
fi

# `poweroff`, `reboot` and `halt` without -f ask process 1, which is this script.
trap 'poweroff -f' USR2
trap 'reboot -f' TERM
trap 'halt -f' USR1

line=$(cat /proc/cmdline)
case " $line" in
*" parador.run="*)
    command=${line#*parador.run=}
    case $command in
    \"*)
        command=${command#\"}
        command=${command%%\"*}
        ;;
    *) command=${command%% *} ;;
    esac
    # Not the console's own process, so that the traps above work meanwhile.
    sh -c "$command" </dev/console &
    ;;
*)
    echo
    echo "Linux $(uname -r), a guest of Parador. \`poweroff\` or the end of this shell switches it off."
    # A session of its own on the real terminal device: only then ^C reaches what runs in the shell.
    setsid cttyhack sh </dev/console &
    ;;
esac
wait $!
poweroff -f
