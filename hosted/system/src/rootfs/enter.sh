# Runs a command on a fresh debootstrap tree, in which programs of its architecture run. Executes in
# mount and PID namespaces of its own, so that mounts and processes are gone when it ends.
#
# Environment: TREE, the tree; ARCHIVES, where packages are kept; WORK, a folder; QEMU, what
# executes the tree's programs, empty for the processor; HANDLER, its line for binfmt_misc.
# Arguments: the command.
set -eu
umask 022

mount -t sysfs -o ro sysfs "$TREE/sys"
mount -t tmpfs tmpfs "$TREE/dev/shm"
mkdir -p "$TREE/var/cache/apt/archives"
mount --bind "$ARCHIVES" "$TREE/var/cache/apt/archives"
if [ -z "$QEMU" ]; then
    mount -t proc proc "$TREE/proc"
    exec "$@"
fi

# Handlers of foreign programs are those of a user namespace (Linux 6.7): one with all IDs gets a
# handler, so that the host has none more than before.
mount -t proc proc /proc
mkfifo "$WORK/ready" "$WORK/mapped"
cat >"$WORK/inside" <<'END'
set -eu
: >"$WORK/ready"
read -r _ <"$WORK/mapped"
if ! mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc 2>/dev/null; then
    echo "E: only Linux 6.7 and later execute programs of another architecture without a handler for"
    echo "E: all of the host: install binfmt-support with qemu-user-static for one"
    exit 1
fi
printf %s "$HANDLER" >/proc/sys/fs/binfmt_misc/register
mount -t proc proc "$TREE/proc"
exec "$@"
END
handlers=/proc/sys/fs/binfmt_misc
[ -e "$handlers/register" ] || mount -t binfmt_misc binfmt_misc "$handlers" 2>/dev/null || true
if grep -qs '^enabled' "$handlers/qemu-aarch64"; then
    mount -t proc proc "$TREE/proc"
    exec "$@"
fi
unshare --user --mount --pid --fork --kill-child sh "$WORK/inside" "$@" &
child=$!
read -r _ <"$WORK/ready" || true
for map in uid_map gid_map; do
    echo "0 0 4294967295" >"/proc/$child/$map"
done
echo mapped >"$WORK/mapped"
wait "$child"
