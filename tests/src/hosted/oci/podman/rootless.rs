//! An ordinary user, and the package of this tree installed, in a mount namespace of their own:
//! this host has neither.

use crate::hosted::{package, succeed};
use anyhow::{Context, Result, ensure};
use std::fs::{self, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Runtime of the package.
pub const RUNTIME: &str = "/usr/bin/parador-oci";
/// Name and ID of the user and the group, and the first of their subordinate IDs.
const NAME: &str = "parador-test";
const ID: u32 = 54_321;
const SUBORDINATE: u32 = 700_000;
/// Number of subordinate IDs.
const COUNT: u32 = 65_536;
/// Puts the package `$0` over /usr, files of the folder `$1` over those of /etc, and a device that
/// all users may open, as udev makes it, over that of tap devices.
const PREPARE: &str = "mount -t overlay -o lowerdir=\"$0\"/usr:/usr overlay /usr; \
    mount -t tmpfs tmpfs \"$1/dev\"; mknod -m 666 \"$1/dev/tun\" c 10 200; \
    mount --bind \"$1/dev/tun\" /dev/net/tun; \
    for file in passwd group subuid subgid; do mount --bind \"$1/$file\" \"/etc/$file\"; done; \
    echo ready; exec sleep infinity";

/// The user, and the process that keeps the namespace.
pub struct Rootless {
    holder: Child,
    /// Home folder.
    pub home: PathBuf,
    /// Runtime folder.
    pub runtime: PathBuf,
}

impl Rootless {
    /// Makes the namespace; its files are in `folder`, which the user may enter.
    pub fn new(folder: &Path) -> Result<Self> {
        fs::set_permissions(folder, Permissions::from_mode(0o711)).context("cannot change it")?;
        let package = package::make(&folder.join("built"), "022")?;
        let root = folder.join("package");
        succeed(Command::new("dpkg-deb").arg("--extract").arg(package).arg(&root))?;
        let etc = folder.join("etc");
        make_accounts(&etc)?;
        let mut holder = Command::new("setpriv");
        holder.args(["--pdeathsig", "KILL", "unshare", "--mount", "sh", "-ec", PREPARE]);
        holder.arg(&root).arg(&etc).stdin(Stdio::null()).stdout(Stdio::piped());
        let mut holder = holder.spawn().context("cannot start unshare")?;
        let output = holder.stdout.take().context("no output")?;
        let home = folder.join("home");
        let user = Self { holder, runtime: home.join("run"), home };
        let mut line = String::new();
        BufReader::new(output).read_line(&mut line).context("no mount namespace")?;
        ensure!(line == "ready\n", "the package cannot be mounted");
        for folder in [&user.home, &user.runtime] {
            fs::create_dir(folder).context("cannot make a folder")?;
            fs::set_permissions(folder, Permissions::from_mode(0o700))?;
            user.give(folder)?;
        }
        Ok(user)
    }

    /// Gives a file to the user.
    pub fn give(&self, path: &Path) -> Result<()> {
        chown(path, Some(ID), Some(ID)).with_context(|| path.display().to_string())
    }

    /// Creates a command of the user, in the namespace.
    pub fn command(&self, program: &str) -> Command {
        let [user, group] = ["--reuid", "--regid"].map(|option| format!("{option}={ID}"));
        let mut command = Command::new("nsenter");
        command.args(["--target", &self.holder.id().to_string(), "--mount", "--"]);
        command.args(["setpriv", &user, &group, "--clear-groups", "--", program]);
        command.env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").env("LC_ALL", "C");
        command.env("HOME", &self.home).env("XDG_RUNTIME_DIR", &self.runtime);
        command
    }
}

impl Drop for Rootless {
    fn drop(&mut self) {
        // It has ended where the namespace could not be made.
        let _ = self.holder.kill();
        let _ = self.holder.wait();
    }
}

/// Makes tables of accounts with the user.
fn make_accounts(folder: &Path) -> Result<()> {
    fs::create_dir_all(folder.join("dev")).context("cannot make a folder")?;
    let subordinate = format!("{NAME}:{SUBORDINATE}:{COUNT}\n");
    for (name, line) in [
        ("passwd", format!("{NAME}:x:{ID}:{ID}::/:/bin/sh\n")),
        ("group", format!("{NAME}:x:{ID}:\n")),
        ("subuid", subordinate.clone()),
        ("subgid", subordinate),
    ] {
        // Tables of subordinate IDs need not exist; without them there is no place for a mount.
        let own = fs::read_to_string(Path::new("/etc").join(name)).context("no uidmap package")?;
        fs::write(folder.join(name), own + &line).context("cannot write")?;
    }
    Ok(())
}
