//! Answers to the questions by which tools find out about QEMU.

use crate::line::Line;

/// Version of QEMU whose command line is understood.
const VERSION: &str = "7.2.0";

/// Accelerators.
const ACCELERATORS: &str = "Accelerators supported in QEMU binary:\ntcg\nkvm\n";

/// Boards; both are Parador's.
const MACHINES: &str = "\
Supported machines are:
pc                   Parador's PC (alias of q35)
q35                  Parador's PC (default)
";

/// Processors.
const PROCESSORS: &str = "\
Available CPUs:
x86 host                  processor of this host
x86 max                   same as host
";

/// Devices.
const DEVICES: &str = "\
Controller/Bridge/Hub devices:
name \"virtio-serial-pci\", bus PCI, alias \"virtio-serial\"

Storage devices:
name \"virtio-9p-pci\", bus PCI, alias \"virtio-9p\"
name \"virtio-blk-pci\", bus PCI, alias \"virtio-blk\"

Network devices:
name \"virtio-net-pci\", bus PCI, alias \"virtio-net\"

Input devices:
name \"virtconsole\", bus virtio-serial-bus
name \"virtserialport\", bus virtio-serial-bus

Misc devices:
name \"i6300esb\", bus PCI
name \"virtio-balloon-pci\", bus PCI, alias \"virtio-balloon\"
name \"virtio-rng-pci\", bus PCI, alias \"virtio-rng\"
";

/// Returns the answer, if the command line is a question.
pub fn answer(line: &Line) -> Option<String> {
    line.options.iter().find_map(|(name, value)| {
        let is_help = matches!(value.as_str(), "help" | "?");
        Some(match *name {
            "version" => {
                format!("QEMU emulator version {VERSION} (Parador {})\n", env!("CARGO_PKG_VERSION"))
            }
            "help" | "h" => format!(
                "QEMU emulator version {VERSION} (Parador {})\n\
                 usage: parador qemu -kernel FILE [options]\n\n\
                 The options are those of QEMU that docs/spec/qemu.md lists.\n",
                env!("CARGO_PKG_VERSION")
            ),
            "accel" if is_help => ACCELERATORS.to_owned(),
            "machine" | "M" if is_help => MACHINES.to_owned(),
            "cpu" if is_help => PROCESSORS.to_owned(),
            "device" if is_help => DEVICES.to_owned(),
            _ => return None,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::OsString;

    #[test]
    fn questions() {
        let answer =
            |words: &[&str]| answer(&Line::parse(words.iter().map(OsString::from)).unwrap());
        // What virtme-ng parses.
        assert!(answer(&["--version"]).unwrap().starts_with("QEMU emulator version 7.2.0"));
        assert!(answer(&["-accel", "help"]).unwrap().lines().any(|line| line == "kvm"));
        assert!(answer(&["-machine", "help"]).unwrap().contains("q35"));
        assert!(answer(&["-cpu", "?"]).unwrap().contains("host"));
        assert!(answer(&["-device", "help"]).unwrap().contains("\"virtio-9p-pci\""));
        assert!(answer(&["-help"]).unwrap().contains("qemu.md"));
        assert_eq!(answer(&["-kernel", "help", "-m", "1G"]), None);
    }
}
