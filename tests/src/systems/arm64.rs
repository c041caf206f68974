//! Systems of the native microhypervisor on AArch64.

use super::checks::check_scenarios;
use super::guests::channel;
use super::pass_through::{arm64_pass_through, arm64_pci_pass_through};
use super::servers::server_scenarios;
use super::{HEAD, SLOW_HOST, base, micro, task};
use crate::scenario::{Backend, Scenario, Step};
use crate::system::Machine;

/// Adds a virtual machine with Debian's kernel and a busybox RAM disk.
pub(super) fn linux(name: &str, command_line: &str, more: &str) -> String {
    format!(
        "\n[[vm]]\nname = \"{name}\"\nmemory = \"128M\"\nkernel = \"debian\"\ninitrd = \"busybox\"\n\
         cmdline = \"console=ttyAMA0 {SLOW_HOST} {command_line}\"\n{more}\n"
    )
}

/// Returns a scenario with defaults for this system.
pub(super) fn arm64(name: &'static str, system: String) -> Scenario {
    Scenario {
        backends: &[Backend::NativeArm64Vhe],
        system: format!("{HEAD}{system}"),
        never: &["PANIC", "Oops", "BUG: ", "WARNING: CPU", "rcu: INFO", "thread stopped"],
        ..base(name, String::new())
    }
}

/// Channels of Linux, which are in slots on MMIO, and its power button.
pub fn arm64_devices() -> Vec<Scenario> {
    // The same program in both guests: everything that `/dev/parador-com*` can do.
    // Linux 6.1 does not pin large pages of its area for contiguous memory.
    let check = "parador.run=/root/linux-check-com-arm64 panic=-1 cma=0";
    let pair = "files = [\"{artifacts}/linux-check-com-arm64\"]".to_owned()
        + &linux("first", check, "console = \"mux\"\ncpus = 2")
        + &linux("second", check, "console = \"mux\"")
        + &channel("first", "second", "");
    let ended = |name: &str| format!("vm {name} ended: power-off code 0");
    vec![
        Scenario {
            // The guest ends by itself, as its own user process demands.
            steps: vec![
                Step::Console("steward> "),
                Step::Type("\x1d2"),
                Step::Console(" # "),
                Step::Type("\x1d1"),
                Step::Console("steward (1"),
                Step::Type("stop linux\r"),
                Step::Console("stop linux: done"),
                Step::Log("vm linux ended: power-off code 0"),
                Step::Type("shutdown\r"),
                Step::Console("the operator shell ends"),
            ],
            limit: 200,
            ..arm64(
                "power-button",
                task("steward", "steward", &[], "console = \"mux\"\nmanage = true\npriority = 20")
                    + &linux("linux", "panic=-1", "console = \"mux\"\nessential = false"),
            )
        },
        Scenario {
            cpus: &[2],
            // A power-off has no exit code, so the program's last line counts.
            steps: vec![
                Step::Type("\x1da"),
                Step::Console("/dev/parador-com0 works"),
                Step::Console("/dev/parador-com0 works"),
            ],
            texts: vec![ended("first"), ended("second")],
            limit: 300,
            ..arm64("channel-driver", pair)
        },
    ]
}

/// Guests that drive devices of the machine themselves.
fn pass_through() -> Vec<Scenario> {
    [arm64_pass_through(), arm64_pci_pass_through()].concat()
}

/// QEMU's machine with a GICv2, which has at most eight CPUs.
const GICV2: &[&str] = &["-M", "gic-version=2"];
/// Scenarios for it: name, name on the machine with a GICv3, CPUs, and whether they are for long
/// runs only.
const ON_GICV2: [(&str, &str, &[u32], bool); 17] = [
    ("gicv2-hostile", "hostile", &[1], false),
    ("gicv2-sgi", "sgi", &[4], false),
    ("gicv2-abuse", "abuse", &[2], false),
    ("gicv2-linux", "linux", &[1], false),
    ("gicv2-reboots", "reboots", &[1], false),
    ("gicv2-hostile-max", "hostile-max", &[4], true),
    ("gicv2-sgi-shared", "sgi", &[1], true),
    ("gicv2-abuse-shared", "abuse", &[1], true),
    ("gicv2-linux-smp", "linux", &[4], true),
    ("gicv2-restarts", "restarts", &[1, 4], true),
    ("gicv2-killed-at-ends", "killed-at-ends", &[4], true),
    ("gicv2-several-guests", "several-guests", &[4], true),
    ("gicv2-channel-driver", "channel-driver", &[2], true),
    ("gicv2-disk-and-network", "linux-disk-and-network", &[1, 4], true),
    ("gicv2-disks-behind-iommu", "disks-behind-iommu", &[4], true),
    ("gicv2-pass-through", "pass-through", &[2], true),
    ("gicv2-pass-through-pci", "pass-through-pci", &[2], true),
];

/// Systems on the machine with a GICv2; `is_long`: those of long runs, too.
pub fn arm64_gicv2(is_long: bool) -> Vec<Scenario> {
    let all = [arm64_scenarios(), arm64_devices(), pass_through(), server_scenarios()].concat();
    let wanted = ON_GICV2.iter().filter(|&&(.., only_long)| is_long || !only_long);
    let on_gicv2 = |&(name, other, cpus, _): &(&'static str, &str, &'static [u32], bool)| {
        let scenario = all.iter().find(|scenario| scenario.name == other);
        let scenario = scenario.expect("the table names scenarios").clone();
        // Its only guest has one vCPU there.
        let system = scenario.system.replace("\ndisk = [\"blk0:part1\"]\n", FOUR_VCPUS);
        let qemu = match scenario.machine.qemu {
            [] => GICV2,
            ["-cpu", "max"] => &["-cpu", "max", "-M", "gic-version=2"],
            other => panic!("no arguments for a GICv2 beside {other:?}"),
        };
        Scenario {
            name,
            backends: &[Backend::NativeArm64Vhe],
            cpus,
            system,
            machine: Machine { qemu, ..scenario.machine },
            // Each access to the interrupt controller is emulated under one lock.
            limit: 2 * scenario.limit,
            ..scenario
        }
    };
    wanted.map(on_gicv2).collect()
}

/// Disks and networks at fixed addresses instead of PCI.
pub fn arm64_mmio() -> Vec<Scenario> {
    let all = server_scenarios();
    let scenario = all.into_iter().find(|scenario| scenario.name == "linux-disk-and-network");
    let scenario = scenario.expect("it is one of them");
    let disk = "disk = [\"blk0:part1\"]\n";
    let system = scenario.system.replace(disk, &format!("{disk}transport = \"mmio\"\n"));
    assert_ne!(system, scenario.system);
    let backends = &[Backend::NativeArm64Vhe];
    vec![Scenario { name: "disk-and-network-by-mmio", backends, cpus: &[1], system, ..scenario }]
}

/// Processors without VHE: QEMU's arguments.
const A53: &[&str] = &["-cpu", "cortex-a53"];
const A57: &[&str] = &["-cpu", "cortex-a57"];
const A72: &[&str] = &["-cpu", "cortex-a72"];
/// The same with a GICv2.
const A53_GICV2: &[&str] = &["-cpu", "cortex-a53", "-M", "gic-version=2"];
const A57_GICV2: &[&str] = &["-cpu", "cortex-a57", "-M", "gic-version=2"];
const A72_GICV2: &[&str] = &["-cpu", "cortex-a72", "-M", "gic-version=2"];
/// A scenario without VHE: name, name with VHE, CPUs, processor, and whether it is for long runs
/// only.
type WithoutVhe = (&'static str, &'static str, &'static [u32], &'static [&'static str], bool);
const WITHOUT_VHE: [WithoutVhe; 28] = [
    ("hello", "hello", &[1], A53, false),
    ("hostile", "hostile", &[1], A57, false),
    ("sgi", "sgi", &[4], A72, false),
    ("abuse", "abuse", &[2], A72, true),
    ("crashing-tasks", "crashing-tasks", &[1], A53, false),
    ("quota-flood", "quota-flood", &[1], A57, false),
    ("kernel-objects", "kernel-objects", &[4], A53, false),
    ("hostile-beside-neighbour", "hostile-beside-neighbour", &[4], A57, false),
    ("linux", "linux", &[1], A53, false),
    ("linux-smp", "linux", &[4], A72, false),
    ("restarts", "restarts", &[4], A72, true),
    ("killed-at-ends", "killed-at-ends", &[4], A72, true),
    ("sgi-shared", "sgi", &[1], A53, true),
    ("abuse-shared", "abuse", &[1], A53, true),
    ("hostile-on-another-cpu", "hostile-on-another-cpu", &[4], A53, true),
    ("several-guests", "several-guests", &[4], A57, true),
    ("channel-driver", "channel-driver", &[2], A72, true),
    ("disk-and-network", "linux-disk-and-network", &[1, 4], A72, true),
    ("disks-behind-iommu", "disks-behind-iommu", &[4], A72_LOW, true),
    ("pass-through", "pass-through", &[2], A72, true),
    ("pass-through-pci", "pass-through-pci", &[2], A72_LOW, true),
    ("gicv2-hostile", "hostile", &[1], A57_GICV2, true),
    ("gicv2-sgi", "sgi", &[1, 4], A72_GICV2, true),
    ("gicv2-abuse", "abuse", &[2], A57_GICV2, true),
    ("gicv2-linux", "linux", &[1], A72_GICV2, true),
    ("gicv2-linux-smp", "linux", &[4], A53_GICV2, true),
    ("gicv2-restarts", "restarts", &[4], A53_GICV2, true),
    ("gicv2-several-guests", "several-guests", &[4], A72_GICV2, true),
];

/// Without VHE configuration space must be lower than where QEMU's board has it.
const A72_LOW: &[&str] = &["-cpu", "cortex-a72", "-M", "highmem=off"];

/// Systems on processors without VHE; `is_long`: those of long runs, too.
pub fn arm64_without_vhe(is_long: bool) -> Vec<Scenario> {
    let servers = [server_scenarios(), check_scenarios()].concat();
    let all = [arm64_scenarios(), arm64_devices(), pass_through(), servers].concat();
    let with_vhe = |wanted: &str| {
        let is_it =
            |one: &&Scenario| one.name == wanted && one.backends.contains(&Backend::NativeArm64Vhe);
        all.iter().find(is_it).expect("the table names scenarios").clone()
    };
    let wanted = WITHOUT_VHE.iter().filter(|&&(.., only_long)| is_long || !only_long);
    let on_processor = |&(name, other, cpus, qemu, _): &WithoutVhe| {
        let scenario = with_vhe(other);
        assert!(scenario.machine.qemu.is_empty(), "{other} has a machine of its own");
        Scenario {
            name,
            backends: &[Backend::NativeArm64NoVhe],
            cpus,
            machine: Machine { qemu, ..scenario.machine },
            limit: 2 * scenario.limit,
            ..scenario
        }
    };
    wanted.map(on_processor).collect()
}

/// Disk of a guest with four vCPUs.
const FOUR_VCPUS: &str = "\ncpus = 4\ndisk = [\"blk0:part1\"]\n";

/// Virtio devices that no server can have.
pub fn arm64_refused_devices() -> Vec<Scenario> {
    let system = || {
        "disk = [\"first.img\"]\n\n[[server]]\nname = \"blk0\"\nkind = \"block\"\ndevice = \"virtio-blk:0\"\n"
            .to_owned()
            + &micro("guest", "hello", "console = \"com1\"")
    };
    let hello = || "vm guest ended: power-off code 0".to_owned();
    vec![
        Scenario {
            // The second transport is in the page of the first one, which has the disk.
            machine: Machine {
                qemu: &["-device", "virtio-rng-device,bus=virtio-mmio-bus.1"],
                ..Machine::default()
            },
            texts: vec![
                "cannot start server blk0: another device has registers in the same page".into(),
                hello(),
            ],
            ..arm64("device-in-a-shared-page", system())
        },
        Scenario {
            // Another machine than the description's.
            machine: Machine {
                qemu: &["-global", "virtio-mmio.force-legacy=true"],
                ..Machine::default()
            },
            texts: vec![
                "blk0: error: cannot set up the disk: virtio over MMIO of version 1".into(),
                hello(),
            ],
            ..arm64("legacy-device", system())
        },
    ]
}

/// Devices behind an SMMU.
pub fn arm64_guarded_devices() -> Vec<Scenario> {
    let server = |name: &str, kind: &str, device: &str| {
        format!("\n[[server]]\nname = \"{name}\"\nkind = \"{kind}\"\ndevice = \"{device}\"\n")
    };
    let disk = "iommu = true\ndisk = [\"first.img\"]\n";
    vec![
        Scenario {
            // Each of the four interrupt lines of PCI has a device.
            steps: vec![
                Step::Console(" # "),
                Step::Type(
                    "for disk in vda vdb; do dd if=/dev/$disk of=/dev/null bs=64k count=32; done; \
                     for net in 0 1; do ifconfig eth$net 10.0.2.15 && ping -c 3 10.0.2.2; \
                     ifconfig eth$net 0.0.0.0 down; done | grep '3 packets received' | wc -l\n",
                ),
                Step::Console("\n2"),
                Step::Console(" # "),
                Step::Type("poweroff\n"),
            ],
            texts: vec![
                "IOMMU at 0x".into(),
                "server drives PCI function 00:01.0".into(),
                "server drives PCI function 00:04.0".into(),
            ],
            never: &["IOMMU: event", "PANIC", "Oops"],
            limit: 200,
            ..arm64(
                "four-devices",
                disk.replace(
                    "\"first.img\"]",
                    "\"first.img\", \"second.img,bus=ahci\"]\nnet = [\"user\", \"user\"]",
                ) + &server("blk0", "block", "virtio-blk:0")
                    + &server("blk1", "block", "pci:ahci:0")
                    + &server("sw0", "switch", "virtio-net:0")
                    + &server("sw1", "switch", "virtio-net:1")
                    + &linux(
                        "linux",
                        "panic=-1",
                        "console = \"com1\"\ndisk = [\"blk0:part1\", \"blk1\"]\n\
                         net = [\"sw0\", \"sw1\"]",
                    ),
            )
        },
        Scenario {
            // A server that programs its device to access kernel memory: the SMMU records it, and
            // root stops the server.
            steps: vec![
                Step::Console("steward> "),
                Step::Log("IOMMU: event of PCI function 00:01.0: 0x0000000800000010"),
                Step::Log("server blk0 ended: blocked request of its device"),
                Step::Log("PCI function 00:01.0 is disabled"),
                Step::Log("vm witness started"),
                Step::Log("vm witness ended: power-off code 0"),
                Step::Type("shutdown\r"),
                Step::Console("the operator shell ends"),
            ],
            never: &["the disk can read", "can write what", "PANIC"],
            ..arm64(
                "hostile-device-behind-iommu",
                disk.to_owned()
                    + &server("blk0", "block", "virtio-blk:0")
                    + "program = \"check-dma\"\n"
                    + &micro("witness", "hello", "essential = false\nrestart = \"always\"")
                    + &task("steward", "steward", &[], "console = \"mux\"\nmanage = true"),
            )
        },
    ]
}

/// Line of the micro-guest `reboots` after a reset.
const AFTER_RESET: &str = "stale false SGI true timer true others false";

/// Guests, the console and its clients, the operator shell, restarts.
pub fn arm64_scenarios() -> Vec<Scenario> {
    vec![
        killed_at_ends(),
        Scenario {
            cpus: &[1],
            steps: vec![
                Step::Console("steward> "),
                Step::Type("\x1da"),
                Step::Console("interrupt 27 was made pending"),
                Step::Console("tick 8"),
                Step::Type("shutdown\r"),
                Step::Console("the operator shell ends"),
            ],
            ..arm64(
                "timer-made-pending",
                steward()
                    + &micro("ticks", "ticks", "console = \"mux\"\nessential = false")
                    + &micro("pended", "pended", "console = \"mux\"\nessential = false"),
            )
        },
        Scenario {
            texts: vec![
                "hello from a micro-guest for AArch64".into(),
                "vm guest ended: power-off code 0".into(),
            ],
            ..arm64("hello", micro("guest", "hello", "console = \"com1\""))
        },
        Scenario {
            cpus: &[1, 4],
            steps: vec![
                // It has a seed from the start, which is the host firmware's.
                Step::Console("[    0.000000] random: crng init done"),
                Step::Console(" # "),
                Step::Type("echo machine $(uname -m) CPUs $(grep -c ^processor /proc/cpuinfo)\n"),
                Step::Console("machine aarch64 CPUs "),
                // Linux has found random numbers of the firmware.
                Step::Type("mount -t sysfs none /sys; ls /sys/bus/platform/devices\n"),
                Step::Console("smccc_trng"),
                // Linux has found its records of stolen time, and a seed for its own place.
                Step::Type("dmesg | grep -e 'stolen time' -e KASLR\n"),
                Step::Console("arm-pv: using stolen time PV"),
                Step::Console("KASLR enabled"),
                Step::Type("[ $(date +%s) -gt 1700000000 ] && echo the time is $((6 * 7))\n"),
                Step::Console("the time is 42"),
                // Timers that expire while the previous interrupt is handled.
                Step::Type("for i in $(seq 100); do usleep 4000; done; echo slept $((6 * 8))\n"),
                Step::Console("slept 48"),
                Step::Type("time sleep 1; for i in $(seq 100); do echo; done | wc -l; poweroff\n"),
                Step::Console("real\t0m 1.0"),
                Step::Console("100"),
            ],
            texts: vec!["vm linux ended: power-off code 0".into()],
            limit: 240,
            ..arm64("linux", linux("linux", "panic=-1", "console = \"com1\"\ncpus = {cpus}"))
        },
        Scenario {
            texts: vec!["vm guest ended: power-off code 0".into()],
            ..arm64("hostile", micro("guest", "hostile", ""))
        },
        Scenario {
            cpus: &[1, 2],
            texts: vec!["abuse ok".into(), "vm guest ended: power-off code 0".into()],
            ..arm64("abuse", micro("guest", "abuse", "console = \"com1\"\ncpus = 2"))
        },
        Scenario {
            steps: vec![
                Step::Console("steward> "),
                Step::Type("\x1d2"),
                Step::Console(AFTER_RESET),
                Step::Console(AFTER_RESET),
                Step::Console(AFTER_RESET),
                Step::Type("\x1d1"),
                Step::Console("steward (1"),
                Step::Type("shutdown\r"),
                Step::Console("the operator shell ends"),
            ],
            never: &["PANIC", "SGI false", "timer false", "stale true", "others true"],
            ..arm64(
                "reboots",
                steward()
                    + &micro(
                        "guest",
                        "reboots",
                        "console = \"mux\"\non_reset = \"reset\"\nessential = false",
                    ),
            )
        },
        Scenario {
            texts: vec!["stolen: ".into(), "vm guest ended: power-off code 0".into()],
            ..arm64("stolen-time", micro("guest", "stolen", "console = \"com1\"\ncpus = 2"))
        },
        Scenario {
            cpus: &[1, 4],
            texts: vec!["sgi ok".into(), "vm guest ended: power-off code 0".into()],
            ..arm64("sgi", micro("guest", "sgi", "console = \"com1\"\ncpus = 4"))
        },
        Scenario {
            texts: vec!["vm guest ended: power-off code 0".into()],
            machine: Machine { qemu: &["-cpu", "max"], ..Machine::default() },
            ..arm64("hostile-max", micro("guest", "hostile", ""))
        },
        Scenario {
            cpus: &[4],
            steps: operator_steps(),
            limit: 400,
            // What `make run ARCH=arm64` starts.
            system: include_str!("../../../examples/arm64.toml").to_owned(),
            ..arm64("several-guests", String::new())
        },
        Scenario {
            cpus: &[1, 4],
            steps: vec![
                Step::Console("steward> "),
                Step::Type("\x1d2"),
                Step::Console("tick 3"),
                Step::Type("\x1d1"),
                Step::Console("steward (1"),
                Step::Type("restart console\r"),
                // The new server's; keys that come before it has the UART are lost.
                Step::Console("steward (1"),
                Step::Console("restart console: done"),
                Step::Type("\x1d2"),
                Step::Console("ticks (2"),
                Step::Console("tick "),
                Step::Type("\x1d1"),
                Step::Console("steward (1"),
                Step::Type("list\r"),
                Step::Console("running"),
                // It crashes at once, again and again.
                Step::Log("vm crashes ended: reset code 83"),
                Step::Log("vm crashes restarts in"),
                Step::Log("vm crashes ended: reset code 83"),
                Step::Type("shutdown\r"),
                Step::Console("the operator shell ends"),
            ],
            limit: 200,
            ..arm64(
                "restarts",
                steward()
                    + &micro("ticks", "ticks", "console = \"mux\"\nessential = false")
                    + &micro("crashes", "resets", "restart = \"on-crash\"\nessential = false"),
            )
        },
    ]
}

/// Guests that end an interrupt at any time are restarted and killed on other CPUs: mostly while
/// the CPU of one waits to report an end.
fn killed_at_ends() -> Scenario {
    let mut steps = vec![Step::Console("steward> "), Step::Type("\x1da")];
    for _ in 0..10 {
        for (command, answer) in [
            ("restart a\r", "restart a: done"),
            ("restart b\r", "restart b: done"),
            ("restart c\r", "restart c: done"),
        ] {
            let runs = Step::Console("1000 interrupts have ended");
            steps.extend([Step::Type(command), Step::Console(answer), runs]);
        }
    }
    for (command, answer) in [
        ("kill a\r", "kill a: done"),
        ("kill b\r", "kill b: done"),
        ("kill c\r", "kill c: done"),
        ("shutdown\r", "the operator shell ends"),
    ] {
        steps.extend([Step::Type(command), Step::Console(answer)]);
    }
    let guest = |name| micro(name, "ends", "console = \"mux\"\nessential = false");
    let system = steward() + &["a", "b", "c"].map(guest).concat();
    Scenario { cpus: &[4], steps, limit: 120, ..arm64("killed-at-ends", system) }
}

/// The operator shell.
pub(super) fn steward() -> String {
    let more = "console = \"mux\"\nmanage = true\npriority = 20";
    task("steward", "steward", &[], more)
}

/// The system of `examples/arm64.toml` under an operator.
fn operator_steps() -> Vec<Step> {
    vec![
        Step::Console("steward> "),
        Step::Type("li\t\r"),
        Step::Console("linux-2"),
        Step::Console("steward> "),
        // What was written before a switch is shown; what is typed goes to the selected client.
        Step::Type("\x1d2"),
        Step::Console("linux-1 (2"),
        Step::Console(" # "),
        Step::Type("echo one $((6 * 7)) on $(grep -c ^processor /proc/cpuinfo)\n"),
        Step::Console("one 42 on 2"),
        Step::Type("\x1dn"),
        Step::Console("linux-2 (3"),
        Step::Console(" # "),
        Step::Type("echo two $((7 * 8)); ping -c 3 10.0.2.15; ping -c 1 10.0.2.2\n"),
        Step::Console("two 56"),
        Step::Console("3 packets received"),
        Step::Console("1 packets received"),
        Step::Type("\x1d4"),
        Step::Console("tick "),
        Step::Type("\x1d:st\r"),
        Step::Console("steward (1"),
        Step::Type("pause linux-1\r"),
        Step::Console("pause linux-1: done"),
        Step::Type("list\r"),
        Step::Console("paused"),
        Step::Type("resume linux-1\r"),
        Step::Console("resume linux-1: done"),
        Step::Type("top\r"),
        Step::Console("HALT%"),
        Step::Console("linux-2"),
        Step::Console("steward> "),
        Step::Type("start hello\r"),
        Step::Console("start hello: done"),
        Step::Type("\x1d:hello\r"),
        Step::Console("hello from a micro-guest"),
        Step::Type("\x1d2"),
        Step::Console("linux-1 (2"),
        Step::Type("sleep 1; echo after $((20 + 3))\n"),
        Step::Console("after 23"),
        Step::Type("\x1da"),
        Step::Console("[parador] showing all clients"),
        Step::Type("poweroff\n"),
        Step::Console("[log] root: vm linux-1 ended: power-off"),
        Step::Type("\x1da\x1d1"),
        Step::Console("steward (1"),
        Step::Type("restart linux-2\r"),
        Step::Console("restart linux-2: done"),
        Step::Type("kill ticks\r"),
        Step::Console("kill ticks: done"),
        Step::Type("destroy linux-2\r"),
        Step::Console("destroy linux-2: done"),
        Step::Type("start linux-2\r"),
        Step::Console("no entry has this name"),
        Step::Type("shutdown\r"),
        Step::Console("the operator shell ends"),
    ]
}
