//! Description of the VM of a command line, as `parador run` takes it.

use crate::chardev::{Chardev, Chardevs};
use crate::devices::Devices;
use crate::line::Line;
use crate::params::Params;
use crate::refuse;
use hosted_command::failure::{self, Failure};
use hosted_command::value::Size;
use hosted_monitor::config::Config;
use hosted_monitor::config::console::{Target, Virtio};
use hosted_monitor::config::vm::{BackendChoice, OnExit, VmConfig};
use hosted_monitor::run;
use proto::system::MAX_VCPUS;
use serde_json::json;
use std::path::Path;

/// Reason for options on graphics.
const GRAPHICS: &str = "VMs have no graphics: use -display none or -nographic";
/// Parameters of `-machine` without effect.
const MACHINE_IGNORED: &[&str] = &[
    "acpi",
    "auto-kernel-cmdline",
    "dump-guest-core",
    "graphics",
    "hpet",
    "i8042",
    "ioapic2",
    "isa-serial",
    "kernel-irqchip",
    "kernel_irqchip",
    "mem-merge",
    "pcie",
    "pic",
    "pit",
    "rtc",
    "smm",
    "usb",
    "vmport",
    "x-option-roms",
];
/// Parameters of `-accel` without effect.
const ACCEL_IGNORED: &[&str] = &["kernel-irqchip", "one-insn-per-tb", "tb-size", "thread"];
/// Parameters of `-smp` whose product is the number of CPUs.
const TOPOLOGY: [&str; 5] = ["sockets", "dies", "clusters", "cores", "threads"];
/// Parameters of `-m` without effect: memory is not added later.
const MEMORY_IGNORED: &[&str] = &["slots", "maxmem"];

/// Parts of a VM, as the options add them.
#[derive(Default)]
struct Vm {
    config: VmConfig,
    devices: Devices,
    chardevs: Chardevs,
    /// Values of `-serial`.
    serials: Vec<String>,
    /// Accelerators of `-accel` options, which QEMU tries in their order.
    accelerators: Vec<String>,
    /// Those of the last `-machine` or `-enable-kvm`: QEMU merges these options.
    machine_accelerators: Vec<String>,
    has_defaults: bool,
    has_display: bool,
    is_nographic: bool,
    /// Options without effect.
    ignored: Vec<String>,
}

/// Describes the VM of a command line. Returns the options that have no effect, too.
///
/// # Errors
/// A wrong option: code 64. A feature that is not supported: 69.
pub fn describe(line: Line) -> Result<(Config, Vec<String>), Failure> {
    let mut vm = Vm { has_defaults: true, has_display: true, ..Vm::default() };
    vm.ignored = line.ignored;
    // Devices name objects that may follow them.
    let is_object = |name: &str| matches!(name, "chardev" | "drive" | "fsdev" | "netdev");
    for (name, value) in line.options.iter().filter(|option| is_object(option.0)) {
        vm.add_object(name, value)?;
    }
    for (name, value) in line.options.iter().filter(|option| !is_object(option.0)) {
        vm.add(name, value)?;
    }
    vm.finish()
}

impl Vm {
    fn add_object(&mut self, name: &str, value: &str) -> Result<(), Failure> {
        match name {
            "chardev" => self.chardevs.add(value),
            "drive" => self.devices.drive(value),
            "fsdev" => self.devices.folder(value, false),
            _ => self.devices.network(value),
        }
    }

    fn add(&mut self, name: &str, value: &str) -> Result<(), Failure> {
        match name {
            "accel" => return self.accelerator(value),
            "append" => self.config.cmdline = Some(value.to_owned()),
            "cpu" => self.ignored.push(format!("-cpu {value}")),
            "device" => {
                if self.devices.device(value, &mut self.chardevs)? {
                    self.ignored.push(format!("-device {value}"));
                }
            }
            "display" | "vga" => return self.display(name, value),
            "enable-kvm" => self.machine_accelerators = vec!["kvm".to_owned()],
            "initrd" => {
                // A file may have the name of a RAM disk that `parador` builds.
                let is_file = Path::new(value).exists();
                let folder = if is_file { Path::new(".") } else { Path::new("") };
                self.config.initrd = Some(folder.join(value));
            }
            "kernel" => self.config.kernel = Some(value.into()),
            "m" => self.config.memory = Some(Size(memory(value)?)),
            "machine" | "M" => return self.machine(value),
            "mon" | "monitor" => return self.monitor(name, value),
            "net" => return self.devices.net(value),
            "nic" => return self.devices.nic(value),
            "no-reboot" => self.config.on_reset = Some(OnExit::Code(0)),
            "nodefaults" => self.has_defaults = false,
            "nographic" => self.is_nographic = true,
            "object" => return self.object(value),
            "serial" => self.serials.push(value.to_owned()),
            "smp" => return self.processors(value),
            "virtfs" => return self.devices.folder(value, true),
            _ => {
                let text = format!("option -{name} has no treatment");
                return Err(Failure::new(failure::INTERNAL, text));
            }
        }
        Ok(())
    }

    /// Adds the accelerators of `-accel`.
    fn accelerator(&mut self, text: &str) -> Result<(), Failure> {
        let mut params = Params::parse("-accel", Some("accel"), text)?;
        let names = accelerators(&params.require("accel")?)?;
        params.finish(ACCEL_IGNORED)?;
        self.accelerators.extend(names);
        Ok(())
    }

    fn machine(&mut self, text: &str) -> Result<(), Failure> {
        let mut params = Params::parse("-machine", Some("type"), text)?;
        if let Some(kind) = params.take("type") {
            let is_pc = matches!(kind.as_str(), "q35" | "pc" | "microvm");
            if !is_pc && !kind.starts_with("pc-") {
                return Err(params.unsupported(&format!("no board `{kind}`: use q35")));
            }
            self.ignored.push(format!("-machine {kind}"));
        }
        let names = params.take("accel");
        params.finish(MACHINE_IGNORED)?;
        if let Some(names) = names {
            self.machine_accelerators = accelerators(&names)?;
        }
        Ok(())
    }

    /// Handles `-display` and `-vga`: there are no graphics.
    fn display(&mut self, name: &str, value: &str) -> Result<(), Failure> {
        match (name, value) {
            (_, "none") => {
                self.has_display &= name != "display";
                Ok(())
            }
            ("vga", "std") => {
                self.ignored.push("-vga std".to_owned());
                Ok(())
            }
            _ => {
                let text = format!("-{name} {value} is not supported: {GRAPHICS}");
                Err(Failure::new(failure::UNAVAILABLE, text))
            }
        }
    }

    /// Handles `-monitor` and `-mon`: QEMU's monitor is missing, which matters only if nothing else
    /// has its line.
    fn monitor(&mut self, name: &str, value: &str) -> Result<(), Failure> {
        let is_ignored = if name == "monitor" {
            matches!(value, "none" | "null")
        } else {
            let mut params = Params::parse("-mon", Some("chardev"), value)?;
            let is_shared = self.chardevs.is_shared(&params.require("chardev")?);
            is_shared && params.take("mode").is_none_or(|mode| mode == "readline")
        };
        if !is_ignored {
            let text = format!("-{name} {value} is not supported: VMs have no QEMU monitor");
            let help = "`parador run --api-socket` controls a VM";
            return Err(Failure::new(failure::UNAVAILABLE, text).help(help));
        }
        self.ignored.push(format!("-{name} {value}"));
        Ok(())
    }

    /// Handles `-object`: random numbers come from the host anyway.
    fn object(&mut self, text: &str) -> Result<(), Failure> {
        let kind = Params::parse("-object", Some("qom-type"), text)?.require("qom-type")?;
        if !matches!(kind.as_str(), "rng-random" | "rng-builtin") {
            return Err(refuse(format!("-object {text}: unknown object `{kind}`")));
        }
        self.ignored.push(format!("-object {text}"));
        Ok(())
    }

    fn processors(&mut self, text: &str) -> Result<(), Failure> {
        let mut params = Params::parse("-smp", Some("cpus"), text)?;
        let mut number = |key: &str| match params.take(key) {
            None => Ok(None),
            Some(value) => match value.parse::<u32>() {
                Ok(number @ 1..) => Ok(Some(number)),
                _ => Err(refuse(format!("-smp {text}: `{key}` must be 1 or more"))),
            },
        };
        // Without `cpus`, QEMU starts all CPUs of `maxcpus`.
        let (cpus, most) = (number("cpus")?, number("maxcpus")?);
        let mut product = 1_u32;
        for key in TOPOLOGY {
            product = product.saturating_mul(number(key)?.unwrap_or(1));
        }
        params.finish(&[])?;
        let count = cpus.or(most).unwrap_or(product);
        if count > MAX_VCPUS as u32 {
            self.ignored.push(format!("-smp above {MAX_VCPUS}"));
        }
        self.config.cpus = Some(count.min(MAX_VCPUS as u32) as u8);
        Ok(())
    }

    /// Connects the serial line. QEMU has further ones.
    fn serial(&mut self) -> Result<Target, Failure> {
        let mut targets = Vec::new();
        for text in std::mem::take(&mut self.serials) {
            targets.push(match text.strip_prefix("chardev:") {
                Some(id) => self.chardevs.connect(&format!("-serial {text}"), id)?,
                None => Chardev::serial(&text)?.target,
            });
        }
        if targets.iter().skip(1).any(|target| *target != Target::Null) {
            let text = "VMs have one serial line: use -device virtconsole or virtserialport";
            return Err(Failure::new(failure::UNAVAILABLE, text));
        }
        // Without a display, QEMU's default line is invisible.
        let is_visible = self.has_defaults && (self.has_display || self.is_nographic);
        let default = if is_visible { Target::Stdio } else { Target::Null };
        Ok(targets.into_iter().next().unwrap_or(default))
    }

    fn finish(mut self) -> Result<(Config, Vec<String>), Failure> {
        if self.config.kernel.is_none() {
            let text = "no -kernel: VMs have no firmware that boots from a disk";
            return Err(Failure::new(failure::UNAVAILABLE, text));
        }
        let has_serial = !self.serials.is_empty();
        let mut serial = self.serial()?;
        if !has_serial && self.devices.use_stdio() {
            serial = Target::Null;
        }
        self.devices.finish()?;
        if !self.devices.has_net_options && self.has_defaults {
            match run::has_user_network() {
                true => self.devices.add_default_net(),
                false => self.ignored.push("default network (no passt)".to_owned()),
            }
        }
        let Devices { disks, shares, nets, ports, console, .. } = self.devices;
        let lists = json!({ "disk": disks, "share": shares, "net": nets, "port": ports });
        let lists: Config =
            serde_json::from_value(lists).map_err(|error| refuse(error.to_string()))?;
        self.config.serial = Some(serial);
        self.config.console = console.map(|target| Virtio { target: Some(target), kernel: false });
        self.config.on_reset = self.config.on_reset.or(Some(OnExit::Reset));
        let mut accelerators =
            self.accelerators.iter().chain(&self.machine_accelerators).peekable();
        let wants_kvm = accelerators.peek().is_none() || accelerators.any(|name| name == "kvm");
        self.config.backend =
            Some(if wants_kvm { BackendChoice::Auto } else { BackendChoice::Process });
        let mut ignored: Vec<String> = Vec::new();
        for text in self.ignored {
            if !ignored.contains(&text) {
                ignored.push(text);
            }
        }
        Ok((Config { vm: self.config, ..lists }, ignored))
    }
}

/// Parses a list of accelerators.
fn accelerators(names: &str) -> Result<Vec<String>, Failure> {
    let check = |name: &str| match name {
        "kvm" | "tcg" => Ok(name.to_owned()),
        _ => Err(refuse(format!("unknown accelerator `{name}`")).help("use kvm or tcg")),
    };
    names.split(':').map(check).collect()
}

/// Parses the value of `-m`: bytes. A number without a unit is in MiB.
fn memory(text: &str) -> Result<u64, Failure> {
    let mut params = Params::parse("-m", Some("size"), text)?;
    let size = params.require("size")?;
    let wrong = || refuse(format!("-m {text}: invalid size `{size}`: use 512M or 2G"));
    let digits = size.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = match size[digits.len()..].to_ascii_uppercase().as_str() {
        "B" => 0,
        "K" => 10,
        "" | "M" => 20,
        "G" => 30,
        "T" => 40,
        _ => return Err(wrong()),
    };
    let number: u64 = digits.parse().map_err(|_| wrong())?;
    let bytes = number.checked_mul(1 << unit).filter(|bytes| *bytes > 0).ok_or_else(wrong)?;
    params.finish(MEMORY_IGNORED)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests;
