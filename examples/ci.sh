#!/bin/sh
# Job of a CI service: runs a test in a VM of its own, on runners that have no KVM.
#
#     ci.sh PACKAGE COMMAND...
#
# Installs the package of Parador, and runs the command in the current folder, which it may
# change. The runner's other files are read-only for it. The exit code is that of the command;
# 124: it took more than ten minutes; 125: Parador failed.
set -eu

package=$(realpath "$1") || exit 125
shift
sudo=sudo
if [ "$(id -u)" = 0 ]; then
    sudo=
fi
# Containers have no package lists. A source that fails may not be needed.
$sudo apt-get update -q >&2 || :
$sudo apt-get install -q -y --no-install-recommends "$package" >&2 || exit 125
parador doctor >&2 || exit 125
exec parador exec --timeout 600s / -- "$@"
