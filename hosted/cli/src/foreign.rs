//! Rejects options of other VM monitors: QEMU, lkvm, Firecracker and Cloud Hypervisor.
//!
//! The check runs before the parser, which would misread some of them (`-kernel` is `-k ernel`).

use hosted_command::failure::{self, Failure};
use std::ffi::OsString;

/// Foreign options, and their replacements.
const FOREIGN: [(&[&str], &str); 20] = [
    (&["-kernel"], "-k FILE"),
    (&["-initrd", "--ramdisk"], "-i FILE"),
    (&["-append", "--append", "--params", "--kernel-cmdline"], "-p TEXT"),
    (&["-smp", "--smp", "--vcpus"], "-c COUNT"),
    (&["-mem", "--mem", "--ram"], "-m SIZE"),
    (&["-hda", "-hdb", "-drive", "--drive", "--block", "-blockdev"], "-d FILE"),
    (&["-snapshot"], "copying the disk image first"),
    (&["-nic", "-netdev", "--network", "--nic"], "--net user"),
    (&["-serial"], "--serial stdio"),
    (&["-nographic"], "no option: the serial line is connected to the terminal"),
    (&["-gdb", "-s"], "--gdb tcp=:1234"),
    (&["-S"], "--gdb tcp=:1234,wait"),
    (&["-no-reboot"], "--no-reboot"),
    (&["-no-shutdown"], "--on-shutdown"),
    (&["-enable-kvm", "--enable-kvm", "-accel", "--accel"], "--backend kvm"),
    (&["-qmp", "--qmp", "-monitor", "--api-sock"], "--api-socket SOCKET"),
    (&["--config-file", "--cfg"], "--config FILE"),
    (&["-virtfs", "--9p", "--fs"], "--share DIR:TAG"),
    (&["-cpu", "-machine", "-M", "--machine"], "no option: there is one machine type"),
    (&["--metrics-path"], "--metrics FILE"),
];

/// Checks the arguments of `parador run` for options of other VM monitors.
///
/// # Errors
/// One is found: code 64, with its replacement.
pub fn check(arguments: impl Iterator<Item = OsString>) -> Result<(), Failure> {
    let mut arguments = arguments.skip(1);
    if arguments.next().is_none_or(|command| command != "run") {
        return Ok(());
    }
    let mut is_text = false;
    for argument in arguments.take_while(|argument| argument != "--") {
        let Some(argument) = argument.to_str() else { continue };
        // The kernel command line may begin with anything.
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
        assert!(refused("run vmlinux -virtfs local").unwrap().contains("--share DIR:TAG"));
        for line in ["run -k vmlinux -p -append", "run vmlinux -m 1G -- -smp", "doctor -kernel"] {
            assert_eq!(refused(line), None);
        }
    }
}
