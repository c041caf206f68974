//! Guests on AArch64 that drive devices of the machine themselves.

use super::arm64::{arm64, linux, steward};
use super::micro;
use crate::scenario::{Scenario, Step};

/// [`linux`] with the machine's UART as its console, which is its second one: Linux has one console
/// for all of these.
fn on_own_uart(name: &str, more: &str) -> String {
    linux(name, "panic=-1", more).replace("ttyAMA0", "ttyAMA1")
}

/// Steps in which a guest uses a disk and a network card of its own. `interrupts` is a command that
/// counts the interrupts of its devices, and `count` its output.
fn uses_disk_and_network(interrupts: &'static str, count: &'static str) -> Vec<Step> {
    // What is read comes from the disk: Linux has not cached it.
    vec![
        Step::Console(" # "),
        Step::Type(
            "dd if=/dev/urandom of=a bs=64k count=16; dd if=a of=/dev/vda bs=64k; sync; \
             echo 3 >/proc/sys/vm/drop_caches; dd if=/dev/vda of=b bs=64k count=16; \
             cmp a b && test -b /dev/vda && echo the disk has $((6 * 7))\n",
        ),
        Step::Console("the disk has 42"),
        Step::Type("ifconfig eth0 10.0.2.15; ping -c 3 10.0.2.2\n"),
        Step::Console("3 packets received"),
        Step::Type(interrupts),
        Step::Console(count),
    ]
}

/// A guest that drives the machine's UART, disk and network card itself, and boots a second time.
pub fn arm64_pass_through() -> Vec<Scenario> {
    let work = || {
        let interrupts = "grep -c -E 'GIC.* (3[678] Level|3[678] Edge)' /proc/interrupts\n";
        uses_disk_and_network(interrupts, "\n3")
    };
    let end = |command| vec![Step::Console(" # "), Step::Type(command)];
    let relay = Scenario {
        // One guest has the machine's UART, and is the console of another one by a channel.
        cpus: &[2],
        steps: vec![
            Step::Console(" # "),
            Step::Type("echo 6 7 >/dev/parador-com0; head -n 1 /dev/parador-com0\n"),
            Step::Console("the product is 42"),
            Step::Console(" # "),
            Step::Type("poweroff\n"),
        ],
        texts: vec![
            "vm console ended: power-off code 0".into(),
            "vm worker ended: power-off code 0".into(),
        ],
        limit: 240,
        system: include_str!("../../../examples/console-guest.toml").to_owned(),
        ..arm64("console-guest", String::new())
    };
    let disks = Scenario {
        cpus: &[2],
        steps: [work(), end("reboot -f\n"), work(), end("poweroff\n")].concat(),
        texts: vec![
            "guest drives the device at 0x9000000".into(),
            "vm linux ended: power-off code 0".into(),
            "device at 0x9000000 is reset".into(),
            "device at 0xa000000 is reset".into(),
        ],
        limit: 240,
        ..arm64(
            "pass-through",
            "disk = [\"first.img\"]\nnet = [\"user\"]\n".to_owned()
                + &on_own_uart(
                    "linux",
                    "cpus = 2\non_reset = \"reset\"\ntrusted = true\n\
                     devices = [\"com1\", \"virtio-blk:0\", \"virtio-net:0\"]",
                ),
        )
    };
    vec![relay, disks]
}

/// Guests that drive disk and network card on PCI themselves, behind the SMMU.
pub fn arm64_pci_pass_through() -> Vec<Scenario> {
    let work = || {
        let interrupts = "grep -c -E 'GIC.* 3[67] Level' /proc/interrupts\n";
        let mut steps = uses_disk_and_network(interrupts, "\n2");
        steps.push(Step::Console(" # "));
        steps
    };
    let restart = vec![
        Step::Type("\x1d1"),
        Step::Type("restart linux\r"),
        Step::Console("restart linux: done"),
        Step::Type("\x1d2"),
    ];
    let end = vec![
        Step::Type("poweroff\n"),
        Step::Log("vm linux ended: power-off code 0"),
        Step::Type("\x1d1"),
        Step::Type("shutdown\r"),
        Step::Console("the operator shell ends"),
    ];
    let begin = vec![Step::Console("steward> "), Step::Type("\x1d2")];
    let reboot = vec![Step::Type("reboot -f\n"), Step::Log("vm linux ended: reset code 83")];
    vec![
        Scenario {
            cpus: &[2],
            steps: [begin, work(), reboot, work(), restart, work(), end].concat(),
            texts: vec![
                "IOMMU at 0x".into(),
                "guest drives PCI function 00:01.0".into(),
                "guest drives PCI function 00:02.0".into(),
                "PCI function 00:01.0 is reset".into(),
                "vm linux ended: killed".into(),
            ],
            never: &["IOMMU: event", "PANIC", "Oops", "cannot"],
            limit: 360,
            ..arm64(
                "pass-through-pci",
                "iommu = true\ndisk = [\"first.img\"]\nnet = [\"user\"]\n".to_owned()
                    + &steward()
                    + &linux(
                        "linux",
                        "panic=-1",
                        "console = \"mux\"\nessential = false\ncpus = 2\non_reset = \"reset\"\n\
                         devices = [\"virtio-blk:0\", \"virtio-net:0\"]",
                    ),
            )
        },
        Scenario {
            // The guest lets its disk read a queue at an address where it has no memory.
            cpus: &[2],
            steps: vec![
                Step::Console("steward> "),
                Step::Type("\x1d2"),
                Step::Console(" # "),
                Step::Type(
                    "cd /sys/bus/pci/devices/0000:00:1c.0; \
                     b=$(sed -n 5p resource | cut -d' ' -f1); echo 0000:00:1c.0 >driver/unbind; \
                     w() { devmem $(($b + $1)) $2 $3; }; \
                     w 20 8 0; w 20 8 1; w 20 8 3; w 8 32 1; w 12 32 3; w 20 8 11; \
                     w 22 16 0; w 24 16 8; w 32 32 0x1000; w 36 32 0; w 40 32 0x2000; w 44 32 0; \
                     w 48 32 0x3000; w 52 32 0; w 28 16 1; w 20 8 15; w 0x3000 16 0\n",
                ),
                Step::Log("IOMMU: event of PCI function 00:01.0: 0x0000000800000010"),
                Step::Log("PCI function 00:01.0 is reset"),
                Step::Log("vm linux ended: blocked request of its device"),
                Step::Log("vm witness started"),
                Step::Log("vm witness ended: power-off code 0"),
                Step::Type("\x1d1"),
                Step::Type("shutdown\r"),
                Step::Console("the operator shell ends"),
            ],
            never: &["PANIC"],
            limit: 200,
            ..arm64(
                "hostile-function",
                "iommu = true\ndisk = [\"first.img\"]\n".to_owned()
                    + &steward()
                    + &linux(
                        "linux",
                        "panic=-1",
                        "console = \"mux\"\nessential = false\ndevices = [\"virtio-blk:0\"]",
                    )
                    + &micro("witness", "hello", "essential = false\nrestart = \"always\""),
            )
        },
    ]
}
