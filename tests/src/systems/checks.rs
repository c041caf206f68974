//! Native programs that test the kernel from inside.

use super::{BOTH_ARCHITECTURES, base, micro, task};
use crate::scenario::{Backend, Scenario};
use crate::system::Machine;

/// Ways in which the program `check-crasher` ends.
const CRASHES: &[&str] = &[
    "null",
    "read-kernel",
    "write-kernel",
    "read-nowhere",
    "write-code",
    "execute-data",
    "jump-kernel",
    "jump-nowhere",
    "undefined",
    "privileged",
    "stack",
];
/// Further ways of each architecture.
const CRASHES_X86: &[&str] = &["bases", "divide", "port"];
const CRASHES_ARM64: &[&str] = &["breakpoint", "floating-point"];

/// Tasks that crash, each in its own way.
fn crashing_tasks(backend: &'static [Backend], more: &[&str]) -> Scenario {
    let kinds = || CRASHES.iter().chain(more);
    let crasher = |kind| task(kind, "check-crasher", &[kind], "essential = false");
    Scenario {
        backends: backend,
        cpus: &[1, 4],
        texts: kinds()
            .map(|kind| format!("task {kind} ended: fault code 70"))
            .chain(["task panic ended: panic code 70".into()])
            .collect(),
        never: &["FAIL"],
        ..base("crashing-tasks", kinds().copied().chain(["panic"]).map(crasher).collect())
    }
}

/// Native programs that test the kernel from inside.
pub fn check_scenarios() -> Vec<Scenario> {
    const ESSENTIAL: &str = "essential = true";
    // The hostile thread runs one below its program's priority: on equal terms with the neighbour.
    let hostile = |seed, more: &str| {
        let more = format!("essential = true\npriority = 33\n{more}");
        task("hostile", "check-hostile", &[seed, "1000000"], &more)
    };
    let neighbour = task("neighbour", "check-neighbour", &[], "essential = false\npriority = 32");
    vec![
        Scenario {
            backends: BOTH_ARCHITECTURES,
            cpus: &[1, 4],
            // Budgets are checked in counted time: a busy host delivers the timer's interrupts
            // late.
            machine: Machine { counted: true, ..Machine::default() },
            texts: vec!["CHECK budget-is-a-limit ok".into()],
            never: &["FAIL"],
            ..base("kernel-objects", task("ipc", "check-ipc", &[], ESSENTIAL))
        },
        Scenario {
            // Every entry of the kernel is short, whatever a program has made: ten thousand
            // mappings, all the capabilities that there can be, 256 callers, 64 timeouts.
            machine: Machine { counted: true, measured: true, ..Machine::default() },
            texts: vec!["VB kernel_max".into(), "CHECK timeouts-at-once ok".into()],
            never: &["FAIL"],
            limit: 240,
            ..base("longest-path", task("longest", "check-longest", &[], ESSENTIAL))
        },
        Scenario {
            // A program that does nothing but log; what others log is there all the same. At most
            // 100 lines at once and ten in each of the 240 seconds.
            cpus: &[2],
            long_cpus: &[1],
            texts: vec![
                "root: warning: task chatter: ".into(),
                "CHECK vm ok".into(),
                "vm worker ended: power-off code 0".into(),
            ],
            never: &["FAIL"],
            most: &[("chatter: ", 100 + 10 * 240), ("lines dropped", 241)],
            limit: 240,
            ..base(
                "log-flood",
                task("chatter", "check-chatter", &[], "essential = false")
                    + &task("polite", "check-flood", &[], ESSENTIAL)
                    + &micro("worker", "stress", "console = \"com1\"\nessential = true"),
            )
        },
        Scenario {
            backends: BOTH_ARCHITECTURES,
            texts: vec!["CHECK vm ok".into()],
            never: &["FAIL"],
            ..base("quota-flood", task("flood", "check-flood", &[], ESSENTIAL))
        },
        Scenario {
            backends: BOTH_ARCHITECTURES,
            cpus: &[1, 4],
            texts: vec!["CHECK hostile ok".into(), "CHECK neighbour ok".into()],
            never: &["FAIL"],
            limit: 240,
            ..base("hostile-beside-neighbour", hostile("1", "") + &neighbour)
        },
        Scenario {
            backends: BOTH_ARCHITECTURES,
            cpus: &[4],
            texts: vec!["CHECK hostile ok".into(), "CHECK neighbour ok".into()],
            never: &["FAIL"],
            limit: 240,
            ..base("hostile-on-another-cpu", hostile("2", "cpu = 1") + &neighbour)
        },
        crashing_tasks(&[Backend::NativeX86Npt], CRASHES_X86),
        crashing_tasks(&[Backend::NativeArm64Vhe], CRASHES_ARM64),
    ]
}
