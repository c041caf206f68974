#!/bin/busybox sh
# First user process of the initial RAM disk "busybox": sets up the environment of a shell, runs
# one on the console and powers off when it exits. A kernel command line with parador.run="COMMAND"
# runs COMMAND instead and ends the VM with its exit code.

/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
/bin/busybox mkdir -p /dev/pts /usr/bin /usr/sbin
/bin/busybox mount -t devpts devpts /dev/pts
/bin/busybox mount -t tmpfs tmp /tmp
/bin/busybox --install -s
export PATH=/bin:/sbin:/usr/bin:/usr/sbin HOME=/root TERM=${TERM:-linux} PS1='\h:\w # '
hostname guest
cd /root

# Drivers of present devices: pvpanic reports panics to the VMM; virtio devices are PCI functions,
# on AArch64 platform devices, one of which is the power button; those of the machine are behind it,
# and the last ones on PCI.
transport=/sys/bus/pci/devices/0000:00:01.0
slot=$transport
platform=/sys/bus/platform/devices
[ ! -e $platform/9020000.virtio_mmio ] || transport=$platform/9020000.virtio_mmio
for device in $platform/a000000.* $platform/90[4-7]????.virtio_mmio \
    /sys/bus/pci/devices/0000:00:1[c-f].0; do
    [ ! -e "$device" ] || slot=$device
done
for module in /lib/modules/*.ko; do
    [ -e "$module" ] || continue
    case $module in
    *pvpanic*) device=/sys/bus/acpi/devices/QEMU0001:00 ;;
    *-button.ko | *-evdev.ko | *-virtio_input.ko) continue ;;
    *-virtio.ko | *-virtio_ring.ko | *-virtio_mmio.ko) device=$transport ;;
    *) device=$slot ;;
    esac
    [ ! -e $device ] || insmod "$module"
done

# `poweroff`, `reboot` and `halt` without -f ask process 1, which is this script.
trap 'poweroff -f' USR2
trap 'reboot -f' TERM
trap 'halt -f' USR1

line=$(cat /proc/cmdline)

# Configures the network by the kernel parameter ip=ADDRESS:NEIGHBOUR:GATEWAY:NETMASK:NAME (Linux's
# nfsroot.rst calls the neighbour a server). Debian's kernel leaves it to init.
neighbour=
case " $line" in
*" ip="*)
    network=" $line"
    network=${network#* ip=}
    IFS=: read -r address neighbour gateway netmask name rest <<EOF
${network%% *}
EOF
    [ -z "$name" ] || hostname "$name"
    ifconfig eth0 "$address" netmask "${netmask:-255.255.255.0}"
    [ -z "$gateway" ] || route add default gw "$gateway"
    ;;
esac

command=
case " $line" in
*" parador.run="*)
    command=${line#*parador.run=}
    case $command in
    \"*)
        # Up to the quote that no backslash is before; those with one are the command's.
        rest=${command#\"}
        command=
        while :; do
            part=${rest%%\"*}
            case $part in
            "$rest") break ;;
            *\\) command=$command${part%\\}\"; rest=${rest#*\"} ;;
            *) break ;;
            esac
        done
        command=$command$part
        ;;
    *) command=${command%% *} ;;
    esac
    # Output in the terminal driver is lost when its session ends; stty waits for it.
    set -- sh -c '"$@"; status=$?; stty echo </dev/tty; exit $status' - sh -c "$command"
    ;;
*)
    set -- sh
    # The power button shuts the guest down.
    for module in /lib/modules/*-button.ko /lib/modules/*-virtio_input.ko /lib/modules/*-evdev.ko; do
        [ ! -e "$module" ] || insmod "$module"
    done
    mkdir -p /etc/acpi/PWRF
    printf '#!/bin/sh\npoweroff\n' >/etc/acpi/PWRF/00000080
    chmod +x /etc/acpi/PWRF/00000080
    acpid -l /dev/null
    echo
    echo "Linux $(uname -r), a guest of Parador. \`poweroff\` or the end of this shell switches it off."
    [ -z "$neighbour" ] || echo "Its address is $address; try \`ping -c 3 $neighbour\`, the neighbour on its switch."
    for channel in /dev/parador-com*; do
        [ ! -e "$channel" ] ||
            echo "$channel is a channel to $(cat /sys/class/misc/${channel#/dev/}/peer); try \`echo hello >$channel; head -n 1 $channel\`."
    done
    ;;
esac

# The traps above only run while this script waits in `read`, so the shell has to be a background
# process; but what `&` starts ignores ^C for good. Hence the daemon, and a session of
# its own on the real terminal device for the shell: only there ^C reaches what runs in it.
mkfifo /tmp/end
exec 3<>/tmp/end
start-stop-daemon -S -b -n shell -a /bin/sh -- -c 'setsid cttyhack "$@"; echo $? >/tmp/end' - "$@"
read -r status <&3

# The machine's debug exit port takes codes up to 63; without the port the guest just powers off.
if [ -n "$command" ] && [ "$status" != 0 ]; then
    [ "$status" -le 63 ] || status=63
    machine-exit "$status"
fi
poweroff -f
