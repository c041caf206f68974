//! VMs with Linux, and the emulated machine itself.

use super::{BOTH_ARCHITECTURES, base, linux};
use crate::scenario::{Scenario, Step};
use crate::system::Machine;

/// Machines that cannot run the guest that is asked for.
pub fn machine_scenarios() -> Vec<Scenario> {
    vec![
        Scenario {
            machine: Machine { qemu: &["-cpu", "EPYC,-svm"], ..Machine::default() },
            texts: vec!["cannot start vm linux".into()],
            code: 65,
            ..base("no-svm", linux("linux", "", ""))
        },
        Scenario {
            // The description promises more than the machine turns out to have.
            machine: Machine { qemu: &["-m", "160M"], ..Machine::default() },
            texts: vec!["cannot start vm linux".into()],
            code: 65,
            ..base("too-little-memory", linux("linux", "", ""))
        },
    ]
}

/// Debian's kernel, unmodified.
pub fn linux_scenarios() -> Vec<Scenario> {
    let on_console = "console = \"com1\"";
    vec![
        Scenario {
            cpus: &[1, 4],
            steps: vec![
                Step::Console("Linux version"),
                Step::Console(" # "),
                Step::Type("echo sum $((6 * 7))\n"),
                Step::Console("sum 42"),
                Step::Type("cat /proc/interrupts\n"),
                Step::Console("ttyS0"),
                Step::Type("poweroff\n"),
            ],
            ..base("linux-shell", linux("linux", "", on_console))
        },
        Scenario {
            // Virtual CPUs with CPUs of their own, and sharing one; the second start is after a
            // reset.
            cpus: &[1, 4],
            steps: vec![
                Step::Console(" # "),
                Step::Type("echo all $(nproc)\n"),
                Step::Console("all 3"),
                Step::Type(
                    "for c in 0 1 2; do taskset $((1 << c)) awk '{ print \"ran on\", $39 }' /proc/self/stat; done\n",
                ),
                Step::Console("ran on 0"),
                Step::Console("ran on 1"),
                Step::Console("ran on 2"),
                Step::Type("reboot\n"),
                Step::Console("Linux version"),
                Step::Console(" # "),
                Step::Type("poweroff\n"),
            ],
            limit: 240,
            ..base(
                "linux-smp",
                linux("linux", "", "cpus = 3\non_reset = \"reset\"\nconsole = \"com1\""),
            )
        },
        Scenario {
            // It uses what the machine offers, on more virtual CPUs than there are CPUs: two that
            // are busy share one, and each takes the other's time.
            cpus: &[2],
            steps: vec![
                Step::Console("setup pv remote TLB flush"),
                Step::Console("setup PV IPIs"),
                Step::Console(" # "),
                Step::Type(
                    "for c in 0 2; do taskset $((1 << c)) timeout 3 sh -c 'while :; do :; done' & done; wait\n",
                ),
                Step::Console(" # "),
                Step::Type("awk '$1 == \"cpu2\" { print \"stolen\", ($9 > 20) }' /proc/stat\n"),
                Step::Console("stolen 1"),
                Step::Type("poweroff\n"),
            ],
            limit: 240,
            ..base("linux-paravirtual", linux("linux", "", "cpus = 3\nconsole = \"com1\""))
        },
        Scenario {
            steps: vec![
                Step::Console(" # "),
                Step::Type("echo c > /proc/sysrq-trigger\n"),
                Step::Console("Kernel panic"),
            ],
            code: 80,
            ..base("linux-panic", linux("linux", "panic=-1", on_console))
        },
        Scenario {
            steps: vec![Step::Console(" # "), Step::Type("reboot\n")],
            code: 83,
            ..base("linux-reboot", linux("linux", "", on_console))
        },
        Scenario {
            code: 47,
            texts: vec!["vm linux ended: exit code 47".into()],
            ..base("linux-code", linux("linux", r#"parador.run=\"exit 47\""#, on_console))
        },
        Scenario {
            // Two ways to one console: keys go to the one that was written to last.
            cpus: &[1, 2],
            backends: BOTH_ARCHITECTURES,
            steps: vec![
                Step::Console(" # "),
                Step::Type(
                    "(echo ready $((3 * 5)); read key; echo \"hvc has $key\") <>/dev/hvc0 >&0\n",
                ),
                Step::Console("ready 15"),
                Step::Type("seven\n"),
                Step::Console("hvc has seven"),
                Step::Console(" # "),
                Step::Type("seq 3000 >/dev/hvc0; echo serial $((6 * 7))\n"),
                Step::Console("\n3000"),
                Step::Console("serial 42"),
                Step::Type("poweroff\n"),
            ],
            ..base(
                "linux-virtio-console",
                linux("linux", "", "console = \"com1\"\nvirtio_console = true"),
            )
        },
        Scenario {
            machine: Machine { disc: true, ..Machine::default() },
            steps: vec![Step::Console(" # "), Step::Type("poweroff\n")],
            ..base("linux-from-disc", linux("linux", "", on_console))
        },
    ]
}
