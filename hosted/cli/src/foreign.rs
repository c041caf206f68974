//! Rejects options of other VM monitors: QEMU, lkvm, Firecracker and Cloud Hypervisor.
//!
//! The check runs before the parser, which would misread some of them (`-kernel` is `-k ernel`).

use hosted_command::failure::{self, Failure};
use std::ffi::OsString;

/// Remedy for a foreign option.
enum Remedy {
    /// This option.
    Replacement(&'static str),
    /// No option: an instruction.
    Instruction(&'static str),
}

use Remedy::{Instruction, Replacement};

/// Foreign options, and their remedies.
const FOREIGN: [(&[&str], Remedy); 25] = [
    (&["-kernel"], Replacement("-k FILE")),
    (&["-initrd", "--ramdisk"], Replacement("-i FILE")),
    (&["-append", "--append", "--params", "--kernel-cmdline"], Replacement("-p TEXT")),
    (&["-smp", "--smp", "--vcpus"], Replacement("-c COUNT")),
    (&["-mem", "--mem", "--ram"], Replacement("-m SIZE")),
    (&["-hda", "-hdb", "-drive", "--drive", "--block", "-blockdev"], Replacement("-d FILE")),
    (&["-snapshot"], Replacement("-d path=FILE,overlay=on")),
    (&["-nic", "-net", "-netdev", "--network", "--nic"], Replacement("--net user")),
    (&["-serial"], Replacement("--serial stdio")),
    (&["-chardev"], Replacement("--serial TARGET or --console TARGET")),
    (&["-nographic"], Instruction("remove it: the serial line is connected to the terminal")),
    (&["-gdb", "-s"], Replacement("--gdb tcp=:1234")),
    (&["-S"], Replacement("--gdb tcp=:1234,wait")),
    (&["-no-reboot"], Replacement("--no-reboot")),
    (&["-no-shutdown"], Replacement("--on-shutdown WHAT")),
    (&["-enable-kvm", "--enable-kvm"], Replacement("--backend kvm")),
    (&["-accel", "--accel"], Replacement("--backend kvm or --backend process")),
    (&["-qmp", "--qmp", "-monitor", "--api-sock"], Replacement("--api-socket SOCKET")),
    (&["--config-file", "--cfg"], Replacement("--config FILE")),
    (&["-virtfs", "-fsdev", "--9p", "--fs", "--shared-dir"], Replacement("--share DIR:TAG")),
    (&["-device"], Instruction("devices have options: --disk, --net, --share, --vsock, --console")),
    (&["-sandbox"], Replacement("--sandbox on")),
    (&["-cpu", "-machine", "-M", "--machine"], Instruction("remove it: there is one machine type")),
    (&["-display", "-vga"], Instruction("remove it: VMs have no graphics")),
    (&["--metrics-path"], Replacement("--metrics FILE")),
];

/// Checks the arguments of `parador run` for options of other VM monitors.
///
/// # Errors
/// One is found: code 64, with its remedy.
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
        if let Some((_, remedy)) = FOREIGN.iter().find(|(names, _)| names.contains(&name)) {
            let failure = Failure::new(failure::USAGE, format!("unknown option {name}"));
            return Err(failure.help(match remedy {
                Replacement(meant) => format!("did you mean {meant}?"),
                Instruction(text) => (*text).to_owned(),
            }));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::Cli;
    use clap::CommandFactory;

    /// Every option that a remedy names is one of `parador run`.
    #[test]
    fn remedies_name_options() {
        let command = Cli::command();
        let run = command.find_subcommand("run").unwrap();
        let long: Vec<&str> = run.get_opts().filter_map(|option| option.get_long()).collect();
        let short: Vec<char> = run.get_opts().filter_map(|option| option.get_short()).collect();
        for (names, remedy) in &FOREIGN {
            let (Replacement(text) | Instruction(text)) = remedy;
            let words = text.split([' ', ',']).filter(|word| word.starts_with('-'));
            for word in words {
                let known = match word.strip_prefix("--") {
                    Some(name) => long.contains(&name),
                    None => word.chars().nth(1).is_some_and(|letter| short.contains(&letter)),
                };
                assert!(known, "{names:?}: {word}");
            }
        }
    }

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
        assert!(refused("run vmlinux -nographic").unwrap().contains("help: remove it: the serial"));
        for line in ["run -k vmlinux -p -append", "run vmlinux -m 1G -- -smp", "doctor -kernel"] {
            assert_eq!(refused(line), None);
        }
    }
}
