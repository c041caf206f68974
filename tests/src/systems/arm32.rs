//! 32-bit guests (AArch32) of the native microhypervisor on AArch64.

use super::arm64::arm64;
use super::{SLOW_HOST, micro};
use crate::scenario::{Backend, Scenario, Step};
use crate::system::Machine;

/// The only processor of the emulator with VHE that has AArch32 at EL1.
const MAX: &[&str] = &["-cpu", "max"];
const MAX_GICV2: &[&str] = &["-cpu", "max", "-M", "gic-version=2"];

/// A processor without VHE that has it.
const A57: &[&str] = &["-cpu", "cortex-a57"];

/// Adds a virtual machine with Debian's 32-bit kernel and a busybox RAM disk.
fn armmp(name: &str, command_line: &str, more: &str) -> String {
    format!(
        "\n[[vm]]\nname = \"{name}\"\nmemory = \"192M\"\nkernel = \"debian-armmp\"\n\
         initrd = \"busybox\"\ncmdline = \"console=ttyAMA0 {SLOW_HOST} {command_line}\"\n{more}\n"
    )
}

/// Adds a 32-bit micro-guest: its image is loaded 32 MiB behind the start of memory.
fn hostile() -> String {
    micro("guest", "hostile32", "").replace("16M", "48M")
}

/// A disk server and a switch, and a guest that uses both.
fn with_devices() -> String {
    let server = |name, kind, device| {
        format!("\n[[server]]\nname = \"{name}\"\nkind = \"{kind}\"\ndevice = \"{device}:0\"\n")
    };
    let more = "console = \"com1\"\ncpus = {cpus}\ndisk = [\"blk0:part1\"]\nnet = [\"sw0\"]";
    "disk = [\"first.img\"]\nnet = [\"user\"]\n".to_owned()
        + &server("blk0", "block", "virtio-blk")
        + &server("sw0", "switch", "virtio-net")
        + &armmp("linux", "panic=-1", more)
}

/// Steps at the shell of a guest with all devices.
fn shell_steps() -> Vec<Step> {
    vec![
        Step::Console(" # "),
        Step::Type("echo machine $(uname -m) CPUs $(grep -c ^processor /proc/cpuinfo)\n"),
        Step::Console("machine armv7l CPUs "),
        Step::Type("[ $(date +%s) -gt 1700000000 ] && echo the time is $((6 * 7))\n"),
        Step::Console("the time is 42"),
        Step::Type("for i in $(seq 100); do usleep 4000; done; echo slept $((6 * 8))\n"),
        Step::Console("slept 48"),
        Step::Type("awk 'BEGIN { printf \"float %.6f\\n\", 22 / 7 }'\n"),
        Step::Console("float 3.142857"),
        Step::Type("dd if=/dev/urandom of=/tmp/a bs=64k count=16\n"),
        Step::Console("16+0 records out"),
        Step::Type("dd if=/tmp/a of=/dev/vda bs=64k conv=fsync\n"),
        Step::Console("16+0 records out"),
        Step::Type("echo 3 > /proc/sys/vm/drop_caches\n"),
        Step::Type(
            "dd if=/dev/vda of=/tmp/b bs=64k count=16; cmp /tmp/a /tmp/b && echo disk $((6 * 9))\n",
        ),
        Step::Console("disk 54"),
        Step::Type("ifconfig eth0 10.0.2.15; ping -c 2 10.0.2.2 && echo network $((7 * 9))\n"),
        Step::Console("network 63"),
        Step::Type("poweroff\n"),
    ]
}

/// Systems with 32-bit guests; `is_long`: those of long runs, too.
pub fn arm32_scenarios(is_long: bool) -> Vec<Scenario> {
    let linux = Scenario {
        machine: Machine { qemu: MAX, ..Machine::default() },
        steps: shell_steps(),
        texts: vec!["vm linux ended: power-off code 0".into()],
        limit: 300,
        ..arm64("armmp", with_devices())
    };
    let refused = Scenario {
        texts: vec![
            "the kernel is a 32-bit one (zImage), but the processor has no AArch32 at EL1".into(),
        ],
        code: 65,
        ..arm64("armmp-refused", armmp("linux", "", ""))
    };
    let hostile = Scenario {
        machine: Machine { qemu: MAX, ..Machine::default() },
        texts: vec!["vm guest ended: power-off code 0".into()],
        ..arm64("hostile32", hostile())
    };
    let mut all = vec![linux.clone(), refused, hostile.clone()];
    if is_long {
        all.push(Scenario { name: "armmp-smp", cpus: &[4], ..linux.clone() });
        let machine = Machine { qemu: MAX_GICV2, ..Machine::default() };
        all.push(Scenario {
            cpus: &[1, 4],
            machine: Machine { qemu: MAX, ..Machine::default() },
            steps: example_steps(),
            limit: 600,
            system: include_str!("../../../examples/arm32.toml").to_owned(),
            ..arm64("armmp-beside-64-bit", String::new())
        });
        all.push(Scenario { name: "armmp-gicv2", cpus: &[1, 4], machine, ..linux.clone() });
        for (name, scenario) in [("armmp", linux), ("hostile32", hostile)] {
            let machine = Machine { qemu: A57, ..Machine::default() };
            let (backends, limit) = (&[Backend::NativeArm64NoVhe], 2 * scenario.limit);
            all.push(Scenario { name, backends, limit, machine, ..scenario });
        }
    }
    all
}

/// The system of `examples/arm32.toml` under an operator.
fn example_steps() -> Vec<Step> {
    vec![
        Step::Console("steward> "),
        Step::Type("\x1d2"),
        Step::Console(" # "),
        Step::Type("echo one $((6 * 7)) on $(uname -m)\n"),
        Step::Console("one 42 on aarch64"),
        Step::Type("\x1d3"),
        Step::Console(" # "),
        Step::Type("echo two $((7 * 8)) on $(uname -m)\n"),
        Step::Console("two 56 on aarch64"),
        Step::Type("\x1d4"),
        Step::Console(" # "),
        Step::Type("echo three $((8 * 9)) on $(uname -m)\n"),
        Step::Console("three 72 on armv7l"),
        Step::Type("ping -c 3 10.0.2.15; ping -c 3 10.0.2.16\n"),
        Step::Console("3 packets received"),
        Step::Console("3 packets received"),
        Step::Type("\x1d5"),
        Step::Console("tick "),
        Step::Type("\x1d1"),
        Step::Console("steward (1"),
        Step::Type("pause linux-32\r"),
        Step::Console("pause linux-32: done"),
        Step::Type("resume linux-32\r"),
        Step::Console("resume linux-32: done"),
        Step::Type("restart linux-32\r"),
        Step::Console("restart linux-32: done"),
        Step::Type("\x1d4"),
        Step::Console(" # "),
        Step::Type("echo again $((5 * 5)) on $(uname -m); poweroff\n"),
        Step::Console("again 25 on armv7l"),
        Step::Log("vm linux-32 ended: power-off"),
        Step::Type("\x1d1"),
        Step::Console("steward (1"),
        Step::Type("shutdown\r"),
        Step::Console("the operator shell ends"),
    ]
}
