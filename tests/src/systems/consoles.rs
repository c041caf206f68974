//! Consoles and the operator shell.

use super::guests::channel;
use super::{BOTH_ARCHITECTURES, base, linux, micro, task};
use crate::scenario::{Scenario, Step};
use crate::system::Machine;

/// Several clients of one line, and an operator.
pub fn console_scenarios() -> Vec<Scenario> {
    const SHARED: &str = "console = \"mux\"\nessential = false";
    let steward =
        task("steward", "steward", &[], "console = \"mux\"\nmanage = true\npriority = 20");
    let cycles = task("cycles", "check-cycles", &["brief", "200", "asks"], "manage = true");
    let brief = micro("brief", "poweroff", "console = \"com1\"\ntemplate = true")
        + &micro("answers", "channel-lives", "essential = false")
        + &micro("asks", "channel-lives", "essential = false\ncmdline = \"messages=20\"")
        + &channel("answers", "asks", "");
    let sixteen: String = (0..16)
        .map(|number| micro(&format!("guest-{number}"), "stress", "console = \"mux\""))
        .collect();
    vec![
        Scenario {
            cpus: &[4],
            long_cpus: &[1],
            steps: vec![
                Step::Console("steward> "),
                Step::Type("li\t\r"),
                Step::Console("linux-2"),
                Step::Console("steward> "),
                // What was written before a switch is shown; what is typed goes to the selected
                // client.
                Step::Type("\x1d4"),
                Step::Console("each message of linux-1 gets an answer"),
                Step::Type("\x1d2"),
                Step::Console("linux-1 (2"),
                Step::Console(" # "),
                Step::Type("echo one $((6 * 7))\n"),
                Step::Console("one 42"),
                Step::Type("\x1dn"),
                Step::Console("linux-2 (3"),
                Step::Console(" # "),
                Step::Type("echo two $((7 * 8))\n"),
                Step::Console("two 56"),
                // Through the switch.
                Step::Type("\x1d2"),
                Step::Console("linux-1 (2"),
                Step::Type("ping -c 3 10.0.0.2\n"),
                Step::Console("3 packets received"),
                // Through the channel.
                Step::Type(
                    "echo good $((7 * 9)) >/dev/parador-com0; head -n 1 /dev/parador-com0\n",
                ),
                Step::Console("heard: good 63"),
                Step::Type("\x1d4"),
                Step::Console("linux-1: good 63"),
                Step::Type("\x1d:st\r"),
                Step::Console("steward (1"),
                Step::Type("pause linux-1\r"),
                Step::Console("pause linux-1: done"),
                Step::Type("list\r"),
                Step::Console("paused"),
                Step::Type("resume li\t\r"),
                Step::Console("resume linux-1: done"),
                Step::Type("top\r"),
                Step::Console("HALT%"),
                Step::Console("linux-2"),
                Step::Console("steward> "),
                Step::Type("create extra small\r"),
                Step::Console("create extra: done"),
                Step::Type("start extra\r"),
                Step::Console("start extra: done"),
                Step::Type("\x1d:extra\r"),
                Step::Console("hello from a micro-guest"),
                Step::Type("\x1d2"),
                Step::Console("linux-1 (2"),
                Step::Type("echo after $((20 + 3))\n"),
                Step::Console("after 23"),
                // Lines of all, behind names.
                Step::Type("\x1da"),
                Step::Console("[parador] showing all clients"),
                Step::Type("poweroff\n"),
                Step::Console("[log] root: vm linux-1 ended: power-off"),
                Step::Type("\x1da\x1d1"),
                Step::Console("steward (1"),
                Step::Type("restart linux-2\r"),
                Step::Console("restart linux-2: done"),
                Step::Type("destroy linux-2\r"),
                Step::Console("destroy linux-2: done"),
                Step::Type("start linux-2\r"),
                Step::Console("no entry has this name"),
                Step::Type("shutdown\r"),
                Step::Console("the operator shell ends"),
            ],
            limit: 300,
            // What `make run` starts; on AArch64 as with `--arch arm64`.
            system: include_str!("../../../examples/three-guests.toml")
                .replace("qemu-q35", "{board}"),
            backends: BOTH_ARCHITECTURES,
            ..base("three-guests", String::new())
        },
        Scenario {
            cpus: &[1, 4],
            steps: vec![
                Step::Console("steward> "),
                Step::Type("\x1d2"),
                Step::Console(" # "),
                Step::Type("for i in 1 2; do while :; do :; done & done; echo busy\n"),
                Step::Console("\nbusy"),
                Step::Type("\x1d1pause linux\r"),
                Step::Console("pause linux: done"),
                // It neither runs, but to say so, nor halts. On a busy host some of its virtual
                // CPUs come to rest in the first seconds.
                Step::Type("top 4\r"),
                Step::Console("\nlinux              0."),
                Step::Console(" 0.0     256M"),
                Step::Console("steward> "),
                // A key ends the command, and is the first of the next one.
                Step::Type("top 9\r"),
                Step::Console("HALT%"),
                Step::Type("l"),
                Step::Console("steward> "),
                Step::Type("ist\r"),
                Step::Console("paused"),
                Step::Console("steward> "),
                Step::Type("resume linux\r"),
                Step::Console("resume linux: done"),
                Step::Type("\x1d2"),
                Step::Console("linux (2"),
                Step::Type(
                    "dmesg | grep -ciE 'detected stalls|soft lockup|as unstable'; echo seen $((1 + 1))\n",
                ),
                Step::Console("\n0\nseen 2"),
                // Its power button.
                Step::Type("\x1d1stop linux\r"),
                Step::Log("vm linux ended: power-off"),
                Step::Type("shutdown\r"),
            ],
            limit: 240,
            ..base(
                "pause-and-stop",
                steward.clone() + &linux("linux", "", &format!("{SHARED}\ncpus = 2")),
            )
        },
        Scenario {
            // The only client of the line, whose kernel writes while the server is killed again and
            // again.
            cpus: &[1, 4],
            steps: vec![
                Step::Log("restart 8 of console"),
                Step::Type("\n"),
                Step::Console(" # "),
                Step::Type("echo sum $((6 * 7))\n"),
                Step::Console("sum 42"),
                Step::Type("poweroff\n"),
            ],
            texts: vec!["CHECK killer ok".into()],
            never: &["FAIL", "has ended for good"],
            ..base(
                "console-restarts",
                task("killer", "check-killer", &["console", "8", "150"], "manage = true")
                    + &linux("linux", "", "console = \"com1\""),
            )
        },
        Scenario {
            // The operator restarts the server of his own line.
            cpus: &[1, 4],
            steps: [
                vec![
                    Step::Console("steward> "),
                    Step::Type("\x1d2"),
                    Step::Console(" # "),
                    Step::Type("\x1d1"),
                    Step::Console("steward (1"),
                ],
                [
                    Step::Type("restart console\r"),
                    Step::Console("steward (1"),
                    Step::Console("restart console: done"),
                    Step::Console("steward> "),
                    Step::Type("list\r"),
                    Step::Console("linux"),
                    Step::Console("steward> "),
                    Step::Type("\x1d2"),
                    Step::Console("linux (2"),
                    // The guest's VMM may not have found the new server yet.
                    Step::Type("echo still $((6 * 7))\n"),
                    Step::Console("still 42"),
                    Step::Type("\x1d:ste\r"),
                    Step::Console("steward (1"),
                ]
                .repeat(3),
                vec![Step::Type("shutdown\r"), Step::Console("the operator shell ends")],
            ]
            .concat(),
            never: &["has ended for good"],
            limit: 240,
            ..base("multiplexer-restarts", steward.clone() + &linux("linux", "", SHARED))
        },
        Scenario {
            // Lines of all are shown, and one writes without end. QEMU's port is as fast as the
            // server, so the line itself is never short here; the tests of the multiplexer have one
            // that is.
            cpus: &[2],
            long_cpus: &[1],
            steps: vec![
                Step::Console("steward> "),
                Step::Type("\x1da"),
                Step::Console("[parador] showing all clients"),
                Step::Console("[flood] line "),
                Step::Type("create again small\r"),
                Step::Console("[steward] create again: done"),
                // One of the others that writes a single line.
                Step::Type("start again\r"),
                Step::Console("[again] hello from a micro-guest"),
                Step::Type("shutdown\r"),
                Step::Console("[steward] the operator shell ends"),
            ],
            limit: 240,
            ..base(
                "console-flood",
                steward
                    + &micro("flood", "flood", SHARED)
                    + &micro("small", "hello", "console = \"mux\"\ntemplate = true"),
            )
        },
        Scenario {
            cpus: &[1, 4],
            texts: ["refusals", "cycles", "lives"].map(|case| format!("CHECK {case} ok")).into(),
            never: &["FAIL", "no console"],
            limit: 240,
            ..base("cycles", cycles + &brief)
        },
        Scenario {
            cpus: &[4],
            long_cpus: &[1],
            // A million exits: in parallel threads QEMU now and then writes the host's state over a
            // guest's at an exit (docs/CAVEATS.md), and a busy host takes longer than any limit.
            machine: Machine { counted: true, ..Machine::default() },
            texts: (0..16).map(|n| format!("vm guest-{n} ended: power-off code 0")).collect(),
            never: &["FAILED"],
            limit: 240,
            ..base("sixteen-guests", sixteen)
        },
    ]
}
