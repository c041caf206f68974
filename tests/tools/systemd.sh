# Makes a Debian that is the host of containers: systemd, cgroups of version 2, podman. It is booted
# with its own kernel.
export LC_ALL=C
apt-get update -q
apt-get install -q -y --no-install-recommends busybox-static crun dbus dbus-user-session fuse-overlayfs initramfs-tools \
    linux-image-cloud-amd64 passt podman slirp4netns systemd-container systemd-sysv udev uidmap
apt-get clean
useradd --create-home --shell /bin/sh user
# The serial line is the test's.
ln -s /dev/null /etc/systemd/system/serial-getty@ttyS0.service
echo '/dev/vda / ext4 defaults 0 1' >/etc/fstab
mkdir -p /srv/image/bin
cp /bin/busybox /srv/image/bin
for name in echo sh sleep; do ln -s busybox /srv/image/bin/$name; done
tar -C /srv/image -cf /srv/image.tar .
cat >/etc/systemd/system/test.service <<EOF
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'sh /srv/test.sh >/dev/ttyS0 2>&1; poweroff'
[Install]
WantedBy=multi-user.target
EOF
ln -s ../test.service /etc/systemd/system/multi-user.target.wants/test.service
