//! Modules that the guest's kernel requests, where its root has no program for them.
//!
//! The kernel starts the program of [`PARAMETER`] as root of the guest, with the arguments of
//! modprobe(8): `-q -- NAME`.

use rustix::io::Errno;
use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// Place of modules, in a folder with the name of the kernel's release.
pub const PLACE: &str = "/lib/modules";
/// Parameter of the kernel: the program that loads modules.
const PARAMETER: &str = "/proc/sys/kernel/modprobe";
/// The agent, whose file is not in the guest's root.
const AGENT: &str = "/proc/1/exe";
/// Place of the program in other roots.
const MODPROBE: &str = "/sbin/modprobe";
/// First argument of a request.
pub const REQUEST: &str = "-q";

/// Lets the kernel start the agent for modules, unless this process' root has a program for that.
pub fn become_loader() -> io::Result<()> {
    if Path::new(MODPROBE).exists() || !Path::new(PARAMETER).exists() {
        return Ok(());
    }
    fs::write(PARAMETER, AGENT)
}

/// Returns the folder of the kernel's modules.
pub fn folder() -> PathBuf {
    Path::new(PLACE).join(OsStr::from_bytes(rustix::system::uname().release().to_bytes()))
}

/// Loads what the kernel has requested: a module by its name, or all that have this alias, each
/// after those that it needs. One that this processor cannot use does not keep others away.
pub fn load(request: &str) -> io::Result<()> {
    let folder = folder();
    let dependencies = fs::read_to_string(folder.join("modules.dep"))?;
    let aliases = fs::read_to_string(folder.join("modules.alias"))?;
    let load = |files: Vec<&str>| files.iter().try_for_each(|file| insert(&folder.join(file)));
    files(&dependencies, &aliases, request).into_iter().map(load).fold(Ok(()), Result::and)
}

fn insert(file: &Path) -> io::Result<()> {
    match rustix::system::finit_module(fs::File::open(file)?, c"", 0) {
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Returns the files of each module of a request in the order of their insertion; none: no module
/// has this name or alias. Lines of `dependencies` are `FILE: FILE...` with all that are needed,
/// the first ones last (modules.dep(5)); lines of `aliases` are `alias NAME MODULE`. Those with
/// wildcards are for devices, which a kernel without modules for its devices does not request.
fn files<'a>(dependencies: &'a str, aliases: &str, request: &str) -> Vec<Vec<&'a str>> {
    let lines = dependencies.lines().filter_map(|line| line.split_once(':'));
    let modules: HashMap<String, (&str, &str)> =
        lines.map(|(file, needed)| (module_name(file), (file, needed))).collect();
    let request = same_name(request);
    let with_alias = aliases.lines().filter_map(|line| {
        let mut words = line.strip_prefix("alias ")?.split(' ');
        (same_name(words.next()?) == request).then(|| words.next().map(same_name))?
    });
    let names: Vec<String> = match modules.contains_key(&request) {
        true => vec![request],
        false => with_alias.collect(),
    };
    let found = names.iter().filter_map(|name| modules.get(name));
    found.map(|(file, needed)| needed.split_whitespace().rev().chain([*file]).collect()).collect()
}

/// Returns the name of the module in a file.
fn module_name(file: &str) -> String {
    let name = file.rsplit('/').next().unwrap_or_default();
    same_name(name.split('.').next().unwrap_or_default())
}

/// Returns a name in the form in which the kernel compares them.
fn same_name(name: &str) -> String {
    name.replace('-', "_")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_have_files() {
        let dependencies = "kernel/net/bridge/bridge.ko: kernel/net/802/stp.ko kernel/net/llc.ko\n\
            kernel/net/802/stp.ko: kernel/net/llc.ko\nkernel/net/llc.ko:\n\
            kernel/drivers/net/tun.ko:\nkernel/lib/sha-1.ko:\nkernel/lib/sha1_x.ko:\n";
        let aliases = "# comment\nalias rtnl-link-bridge bridge\nalias char-major-10-200 tun\n\
            alias crypto-sha1 sha_1\nalias crypto-sha1 sha1_x\nalias broken\n";
        assert_eq!(files(dependencies, aliases, "crypto-sha1").len(), 2);
        let files = |request| files(dependencies, aliases, request).concat();
        let bridge = ["kernel/net/llc.ko", "kernel/net/802/stp.ko", "kernel/net/bridge/bridge.ko"];
        assert_eq!(files("bridge"), bridge);
        assert_eq!(files("rtnl-link-bridge"), bridge);
        assert_eq!(files("char-major-10-200"), ["kernel/drivers/net/tun.ko"]);
        assert_eq!(files("crypto-sha1"), ["kernel/lib/sha-1.ko", "kernel/lib/sha1_x.ko"]);
        assert_eq!(files("sha-1"), files("sha_1"));
        assert!(["nothing", "broken", ""].iter().all(|name| files(name).is_empty()));
    }
}
