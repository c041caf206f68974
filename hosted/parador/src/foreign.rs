//! Options as other programs spell them that start virtual machines: QEMU, lkvm, Firecracker, Cloud Hypervisor.
//!
//! They are never taken. Some would be read as something else (`-kernel` is `-k ernel`), so they are looked for first.

use crate::failure::{self, Failure};
use std::ffi::OsString;

/// Spellings, and what to write instead.
const FOREIGN: [(&[&str], &str); 20] = [
    (&["-kernel"], "-k FILE"),
    (&["-initrd", "--ramdisk"], "-i FILE"),
    (&["-append", "--append", "--params", "--kernel-cmdline"], "-p TEXT"),
    (&["-smp", "--smp", "--vcpus"], "-c COUNT"),
    (&["-mem", "--mem", "--ram"], "-m SIZE"),
    (&["-hda", "-hdb", "-drive", "--drive", "--block", "-blockdev"], "-d FILE"),
    (&["-snapshot"], "a copy of the disk's file"),
    (&["-nic", "-netdev", "--network", "--nic"], "--net user"),
    (&["-serial"], "--serial stdio"),
    (&["-nographic"], "nothing: the serial line is the terminal"),
    (&["-gdb", "-s"], "--gdb tcp=:1234"),
    (&["-S"], "--gdb tcp=:1234,wait"),
    (&["-no-reboot"], "--no-reboot"),
    (&["-no-shutdown"], "--on-shutdown"),
    (&["-enable-kvm", "--enable-kvm", "-accel", "--accel"], "--backend kvm"),
    (&["-qmp", "--qmp", "-monitor", "--api-sock"], "--api-socket SOCKET"),
    (&["--config-file", "--cfg"], "--config FILE"),
    (&["-virtfs", "--9p", "--fs"], "a disk: there are no shared folders"),
    (&["-cpu", "-machine", "-M", "--machine"], "nothing: there is one kind of machine"),
    (&["--metrics-path"], "--metrics FILE"),
];

/// Looks for such an option among the arguments of `parador`.
///
/// # Errors
/// There is one: code 64, with what to write instead.
pub fn check(arguments: impl Iterator<Item = OsString>) -> Result<(), Failure> {
    let mut arguments = arguments.skip(1);
    if arguments.next().is_none_or(|command| command != "run") {
        return Ok(());
    }
    let mut is_text = false;
    for argument in arguments.take_while(|argument| argument != "--") {
        let Some(argument) = argument.to_str() else { continue };
        // A kernel's command line may begin with anything.
        if std::mem::replace(&mut is_text, matches!(argument, "-p" | "--cmdline")) {
            continue;
        }
        let name = argument.split('=').next().unwrap_or(argument);
        if let Some((_, meant)) = FOREIGN.iter().find(|(names, _)| names.contains(&name)) {
            let failure = Failure::new(failure::USAGE, format!("unknown option {name}"));
            return Err(failure.help(format!("did you mean {meant}?")));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_foreign_ones_are_refused() {
        let refused = |line: &str| {
            let words = ["parador"].into_iter().chain(line.split(' '));
            check(words.map(OsString::from)).err().map(|failure| failure.to_string())
        };
        assert!(refused("run -kernel bzImage").unwrap().contains("did you mean -k FILE?"));
        assert!(refused("run vmlinux --mem=1G").unwrap().contains("-m SIZE"));
        assert!(refused("run vmlinux -S").unwrap().contains("--gdb tcp=:1234,wait"));
        for line in ["run -k vmlinux -p -append", "run vmlinux -m 1G -- -smp", "doctor -kernel"] {
            assert_eq!(refused(line), None);
        }
    }
}
