//! All system tests: the list of scenarios, and one body that runs them on every back end.

use anyhow::{Result, bail};
use parador_tests::bochs::Model;
use parador_tests::kvm::MicroGuest;
use parador_tests::outcome::{Class, Test};
use parador_tests::repeat::Options;
use parador_tests::scenario::{Backend, Scenario, Step};
use parador_tests::system::{Machine, parador};
use parador_tests::{
    afterburn, bochs, debian, docs, fuzz, hosted, isolation, keys, kvm, previrt, refusals, runner,
    sandbox, userland,
};
use std::process::ExitCode;

const EVERY_BACKEND: &[Backend] = &[Backend::NativeX86Npt];
/// Systems in QEMU at the same time: each keeps a CPU of the host busy.
const PARALLEL: usize = 2;

/// Numbers of host CPUs with which a whole Debian must work.
const DEBIAN_CPUS: [u32; 1] = [2];

/// Numbers of CPUs with which the pre-virtualized kernel must work.
const PREVIRT_CPUS: [u32; 2] = [1, 2];

/// Body of a test.
type Body = fn() -> Result<()>;
/// A test of attacks, which may be long.
type Attack = fn(bool) -> Result<()>;
/// Machines that are processes of this host.
const HOSTED: &[(&str, Body, Class)] = &[
    ("shell", hosted::shell, Class::Other),
    ("disk", hosted::disk, Class::Other),
    ("disk-in-use", hosted::disk_in_use, Class::SmpOrKill),
    ("disk-full", hosted::disk_full, Class::Other),
    ("module", hosted::module, Class::Other),
    ("ends", hosted::ends, Class::Other),
    ("crashes", hosted::crashes, Class::Other),
    ("preemption", hosted::preemption, Class::Other),
    ("memory", hosted::memory, Class::Other),
    ("balloon", hosted::balloon, Class::SmpOrKill),
    ("cpus", hosted::cpus, Class::SmpOrKill),
    ("compat", hosted::compat, Class::SmpOrKill),
    ("share", hosted::share, Class::SmpOrKill),
    ("console", hosted::observed::console, Class::SmpOrKill),
    ("vsock", hosted::vsock::both_ways, Class::SmpOrKill),
    ("vsock-refusals", hosted::vsock::refusals, Class::Other),
    ("qcow2", hosted::qcow2, Class::SmpOrKill),
    ("kills", hosted::kills, Class::SmpOrKill),
    ("remains", hosted::remains::none, Class::SmpOrKill),
    ("copied", hosted::host::copied, Class::Other),
    ("doctor", hosted::host::doctor, Class::Other),
    ("limits", hosted::host::limits, Class::Other),
    ("addresses", hosted::addresses::fixed, Class::Other),
    ("commands", hosted::commands::documented, Class::SmpOrKill),
    ("refusals", hosted::refusals, Class::Other),
    ("profile", hosted::profile, Class::Other),
    ("escapes", hosted::escapes, Class::Other),
    ("escape-keys", hosted::escape::keys, Class::Other),
    ("escape-mapper", hosted::escape::mapper, Class::Other),
    ("escape-requests", hosted::escape::requests, Class::Other),
    ("escape-processes", hosted::escape::processes, Class::SmpOrKill),
    ("escape-affinity", hosted::escape::affinity, Class::Other),
    ("escape-codes", hosted::escape::codes, Class::Other),
    ("escape-setup", hosted::setup::order, Class::Other),
    ("escape-table", hosted::words::documented, Class::Other),
    ("functions", hosted::functions, Class::Other),
    ("calls", hosted::calls, Class::Other),
    ("ladder", hosted::ladder, Class::SmpOrKill),
    ("sandbox", hosted::sandbox, Class::Other),
    ("filtered", sandbox::filtered, Class::Other),
    ("plain-user", sandbox::plain_user, Class::Other),
    ("crowd", sandbox::crowd, Class::Other),
    ("net-user", hosted::net::user, Class::Other),
    ("net-switch", hosted::net::switch, Class::SmpOrKill),
    ("net-tap", hosted::net::tap, Class::Other),
    ("net-kills", hosted::net::kills, Class::SmpOrKill),
    ("net-refusals", hosted::net::refusals, Class::Other),
    ("kvm", kvm::guests, Class::SmpOrKill),
    ("kvm-refused", kvm::refused, Class::Other),
    ("disk-lost", hosted::durability::lost, Class::Other),
    ("disk-kept", hosted::durability::kept, Class::SmpOrKill),
    ("disk-power", hosted::durability::power, Class::Other),
    ("kvm-gdb", kvm::debugged, Class::SmpOrKill),
    ("api", hosted::api, Class::SmpOrKill),
    ("boot", hosted::boot, Class::SmpOrKill),
    ("config", hosted::config, Class::Other),
    ("gdb", hosted::debugger::session, Class::SmpOrKill),
    ("json", hosted::observed::json, Class::Other),
    ("serial", hosted::observed::serial, Class::Other),
    ("perf-map", hosted::observed::perf_map, Class::Other),
    ("steal", hosted::observed::steal, Class::SmpOrKill),
    ("protection-apart", keys::apart, Class::SmpOrKill),
    ("protection-choices", keys::choices, Class::Other),
    ("isolation", isolation::modes, Class::SmpOrKill),
    ("many-events", isolation::many_events, Class::SmpOrKill),
    ("refused-mappings", refusals::mappings, Class::SmpOrKill),
];
/// Attacks of a guest's kernel on its host: long, or short.
const ESCAPES: &[(&str, Attack)] = &[
    ("escape-calls", hosted::escape::calls),
    ("escape-numbers", hosted::escape::numbers),
    ("escape-jumps", hosted::escape::jumps),
    ("escape-gate", hosted::escape::gate),
    ("escape-memory", hosted::escape::memory),
    ("escape-words", hosted::escape::words),
    ("escape-takeover", hosted::escape::takeover),
];
/// Seconds of the stress of such a machine, and the variable that says more.
const STRESS_SECONDS: u32 = 10;
const STRESS: &str = "PARADOR_STRESS_SECONDS";

/// The head of a description. Virtual machines share CPUs where there is only one.
const HEAD: &str = "[system]\nboard = \"qemu-q35\"\nlog = \"com2\"\nshare_cpus = true\n";

/// Adds a virtual machine with Debian's kernel and a busybox RAM disk.
fn linux(name: &str, command_line: &str, more: &str) -> String {
    format!(
        "\n[[vm]]\nname = \"{name}\"\nmemory = \"256M\"\nkernel = \"debian\"\ninitrd = \"busybox\"\n\
         cmdline = \"console=ttyS0 {command_line}\"\n{more}\n"
    )
}

fn base(name: &'static str, system: String) -> Scenario {
    Scenario {
        name,
        backends: EVERY_BACKEND,
        cpus: &[1],
        system: format!("{HEAD}{system}"),
        machine: Machine::default(),
        steps: Vec::new(),
        texts: Vec::new(),
        code: 0,
        never: &[],
        most: &[],
        limit: 120,
    }
}

/// Adds a native program.
fn task(name: &str, binary: &str, arguments: &[&str], more: &str) -> String {
    format!("\n[[task]]\nname = \"{name}\"\nbinary = \"{binary}\"\nargs = {arguments:?}\n{more}\n")
}

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
    "bases",
    "divide",
    "stack",
    "port",
];

/// Native programs that test the kernel from inside.
fn check_scenarios() -> Vec<Scenario> {
    const ESSENTIAL: &str = "essential = true";
    const HELPER: &str = "essential = false";
    let crashers: String =
        CRASHES.iter().map(|kind| task(kind, "check-crasher", &[kind], HELPER)).collect();
    // The hostile thread runs one below its program's priority: on equal terms with the neighbour.
    let hostile = |seed, more: &str| {
        let more = format!("essential = true\npriority = 33\n{more}");
        task("hostile", "check-hostile", &[seed, "1000000"], &more)
    };
    let neighbour = task("neighbour", "check-neighbour", &[], "essential = false\npriority = 32");
    vec![
        Scenario {
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
            cpus: &[1, 2],
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
            texts: vec!["CHECK vm ok".into()],
            never: &["FAIL"],
            ..base("quota-flood", task("flood", "check-flood", &[], ESSENTIAL))
        },
        Scenario {
            cpus: &[1, 4],
            texts: vec!["CHECK hostile ok".into(), "CHECK neighbour ok".into()],
            never: &["FAIL"],
            limit: 240,
            ..base("hostile-beside-neighbour", hostile("1", "") + &neighbour)
        },
        Scenario {
            cpus: &[4],
            texts: vec!["CHECK hostile ok".into(), "CHECK neighbour ok".into()],
            never: &["FAIL"],
            limit: 240,
            ..base("hostile-on-another-cpu", hostile("2", "cpu = 1") + &neighbour)
        },
        Scenario {
            cpus: &[1, 4],
            texts: CRASHES
                .iter()
                .map(|kind| format!("task {kind} ended: fault code 70"))
                .chain(["task panic ended: panic code 70".into()])
                .collect(),
            never: &["FAIL"],
            ..base("crashing-tasks", crashers + &task("panic", "check-crasher", &["panic"], HELPER))
        },
    ]
}

/// Adds a virtual machine with a micro-guest.
fn micro(name: &str, guest: &str, more: &str) -> String {
    format!(
        "\n[[vm]]\nname = \"{name}\"\nmemory = \"16M\"\n\
         kernel = \"{{artifacts}}/guest-{guest}\"\n{more}\n"
    )
}

/// Micro-guests: name, exit code, text on the console or in the log.
const GUESTS: &[(&str, i32, &str)] = &[
    ("hello", 0, "hello from a micro-guest"),
    ("ports", 0, "vm guest ended: power-off"),
    ("memory", 0, "vm guest ended: power-off"),
    ("msr", 0, "vm guest ended: power-off"),
    ("interrupts", 0, "vm guest ended: power-off"),
    ("pic", 0, "pic: 200 interrupts, each once"),
    ("x2apic", 0, "vm guest ended: power-off"),
    ("shadow", 0, "vm guest ended: power-off"),
    ("steps", 0, "steps: every round, and both breakpoints"),
    ("debug", 0, "debug: every exception once"),
    ("nmi", 0, "nmi: masked until IRET"),
    ("vectors", 0, "vectors: 3000 rounds"),
    ("fpu", 0, "vm guest ended: power-off"),
    ("bigpages", 0, "vm guest ended: power-off"),
    ("stress", 0, "vm guest ended: power-off"),
    ("exits", 0, "VB hypercall"),
    ("poweroff", 0, "vm guest ended: power-off"),
    ("panic", 80, "vm guest ended: guest panic"),
    ("triple", 81, "vm guest ended: guest fault"),
    ("refused", 81, "the CPU rejected the guest state"),
    ("reset", 83, "vm guest ended: reset"),
];

const CONSOLE: &str = "console = \"com1\"";

/// Guests with one behaviour each.
fn micro_scenarios() -> Vec<Scenario> {
    let scenario = |&(name, code, text): &(&'static str, i32, &str)| Scenario {
        cpus: &[1, 4],
        texts: vec![text.into()],
        never: &["FAILED"],
        code,
        limit: 60,
        ..base(name, micro("guest", name, CONSOLE))
    };
    GUESTS.iter().map(scenario).collect()
}

/// Micro-guests that Bochs 2.7 cannot run as a processor would (docs/CAVEATS.md), and what it does
/// instead. A guest that it can run leaves this list.
const NOT_ON_BOCHS: &[(&str, &str)] = &[
    ("interrupts", "VMRUN with guest IF clear masks interrupts: those of the local APIC are late"),
    ("x2apic", "the same: the guest waits for its timer, and the host's never comes"),
    ("shadow", "the same: STI; HLT is not left"),
    ("stress", "the same: messages to itself are late"),
    ("steps", "a guest's pending #DB comes behind VMRUN, in the kernel"),
    ("debug", "a single step's #DB comes without DR6.BS"),
    ("triple", "shutdowns are not intercepted: Bochs ends, or resets the whole machine"),
    ("refused", "VMRUN accepts CR0.NW without CR0.CD"),
];
const BOCHS: &[Backend] = &[Backend::Bochs(Model::Ryzen), Backend::Bochs(Model::Phenom)];

/// Command line for Debian's kernel on Bochs' `phenom_8650_toliman`, which reports POPCNT (CPUID
/// leaf 1, ECX bit 23) and raises `#UD` at it.
const NO_POPCNT: &str = "console=ttyS0 clearcpuid=151 ";

/// The same guests on another emulator's processors, and Debian's kernel.
fn bochs_scenarios() -> Vec<Scenario> {
    let is_left_out = |name| NOT_ON_BOCHS.iter().any(|&(other, _)| other == name);
    let guests = micro_scenarios().into_iter().filter(|guest| !is_left_out(guest.name));
    let guests = guests.map(|guest| Scenario { backends: BOCHS, cpus: &[1], ..guest });
    let linux = linux_scenarios().into_iter().filter(|linux| linux.name == "linux-shell");
    let linux = linux.flat_map(|linux| {
        let system = linux.system.replace("console=ttyS0 ", NO_POPCNT);
        let phenom = Scenario { backends: &BOCHS[1..], cpus: &[1], system, ..linux.clone() };
        [Scenario { backends: &BOCHS[..1], cpus: &[1], ..linux }, phenom]
    });
    guests.chain(linux).collect()
}

/// Guests with one behaviour each, and what becomes of others beside them.
fn guest_scenarios() -> Vec<Scenario> {
    let mut scenarios = micro_scenarios();
    scenarios.extend([
        Scenario {
            // Virtual CPUs with CPUs of their own, and all on one.
            cpus: &[1, 4],
            texts: vec!["smp: 4 processors work together".into()],
            never: &["FAILED"],
            limit: 240,
            ..base("smp", micro("guest", "smp", "cpus = 4\nconsole = \"com1\""))
        },
        Scenario {
            // Two guests whose registers take turns in one CPU, and a program there that sees none
            // of them.
            texts: ["one", "two"]
                .map(|vm| format!("vm {vm} ended: power-off code 0"))
                .into_iter()
                .chain(["CHECK neighbour ok".into()])
                .collect(),
            never: &["FAIL"],
            ..base(
                "fpu-neighbours",
                micro("one", "fpu", CONSOLE)
                    + &micro("two", "fpu", "")
                    + &task("neighbour", "check-neighbour", &[], "essential = false"),
            )
        },
        Scenario {
            // The VMMs see and set registers of guests that take turns in one CPU.
            texts: ["one", "two"].map(|vm| format!("vm {vm} ended: power-off code 0")).into(),
            never: &["FAILED"],
            ..base(
                "vectors-neighbours",
                micro("one", "vectors", CONSOLE) + &micro("two", "vectors", ""),
            )
        },
        Scenario {
            // In counted time the host's timer certainly interrupts the guest between STI and HLT,
            // once.
            machine: Machine { counted: true, ..Machine::default() },
            texts: vec!["vm guest ended: power-off".into()],
            never: &["FAILED"],
            ..base("shadow-counted", micro("guest", "shadow", CONSOLE))
        },
        Scenario {
            // The looping guest never ends; its neighbour ends the system.
            cpus: &[1, 4],
            texts: vec!["vm worker ended: power-off".into()],
            never: &["FAILED"],
            ..base(
                "looping-neighbour",
                micro("looping", "spin", "essential = false")
                    + &micro("worker", "stress", "console = \"com1\"\nessential = true"),
            )
        },
        Scenario {
            cpus: &[1, 4],
            texts: vec![
                "vm falling ended: guest fault code 81".into(),
                "vm worker ended: power-off code 0".into(),
            ],
            never: &["FAILED"],
            ..base(
                "falling-neighbour",
                micro("falling", "triple", "essential = false")
                    + &micro("worker", "stress", "console = \"com1\"\nessential = true"),
            )
        },
        Scenario {
            cpus: &[1, 4],
            texts: vec![
                "vm broken ended: fault code 70".into(),
                "vm worker ended: power-off code 0".into(),
            ],
            never: &["FAILED"],
            ..base(
                "crashing-vmm",
                micro("broken", "hello", "vmm = \"check-crasher\"\nessential = false")
                    + &micro("worker", "stress", "console = \"com1\"\nessential = true"),
            )
        },
        Scenario {
            // It resets thousands of times; what is logged of all its boots together has a limit.
            cpus: &[1, 2],
            texts: vec![
                "storm: reset number 64".into(),
                "storm: further unknown accesses are only counted".into(),
                "vm worker ended: power-off code 0".into(),
            ],
            never: &["FAILED"],
            most: &[("storm: ", 80)],
            ..base(
                "reset-storm",
                micro("storm", "reset-storm", "essential = false\non_reset = \"reset\"")
                    + &micro("worker", "stress", "console = \"com1\"\nessential = true"),
            )
        },
        Scenario {
            texts: vec!["vm falling restarts in ".into()],
            never: &["FAILED"],
            ..base(
                "restart-on-crash",
                micro("falling", "triple", "essential = false\nrestart = \"on-crash\"")
                    + &micro("worker", "stress", "console = \"com1\"\nessential = true"),
            )
        },
        Scenario {
            // It reads and writes CR8 10,000 times, for which it is never left.
            texts: vec!["VB cr8_write".into(), "statistics: entries=".into()],
            never: &["FAILED", "cr-access="],
            ..base("task-priority", micro("guest", "exits", CONSOLE))
        },
        Scenario {
            // The kernel names the missing feature and ends the emulated machine.
            machine: Machine { qemu: &["-cpu", "EPYC,+svm,+npt,-nx"], ..Machine::default() },
            texts: vec!["kernel: this processor has no long mode or no NX".into()],
            code: 69,
            limit: 30,
            ..base("no-nx", micro("guest", "hello", CONSOLE))
        },
        Scenario {
            // GRUB hands the command line over in another way.
            machine: Machine {
                disc: true,
                qemu: &["-cpu", "qemu64,-lm,-nx"],
                ..Machine::default()
            },
            texts: vec!["kernel: this processor has no long mode or no NX".into()],
            code: 69,
            limit: 60,
            ..base("no-long-mode", micro("guest", "hello", CONSOLE))
        },
        Scenario {
            // A guest that resets at once is started every 100 ms, however often; a crash would
            // double the time.
            texts: vec![
                "vm resetting ended: reset code 83".into(),
                "vm resetting restarts in ".into(),
            ],
            never: &[
                "FAILED",
                "vm resetting restarts in 100 ms",
                "restarts in 200 ms",
                "restarts in 400 ms",
            ],
            ..base(
                "restart-after-reset",
                micro("resetting", "reset", "essential = false\nrestart = \"always\"")
                    + &micro("worker", "stress", "console = \"com1\"\nessential = true"),
            )
        },
        Scenario {
            cpus: &[1, 4],
            texts: vec!["CHECK hostile ok".into(), "vm worker ended: power-off code 0".into()],
            never: &["FAIL"],
            limit: 240,
            ..base(
                "hostile-beside-guest",
                task("hostile", "check-hostile", &["3", "1000000"], "essential = true")
                    + &micro("worker", "stress", "console = \"com1\"\nessential = true"),
            )
        },
    ]);
    scenarios
}

/// Adds a channel between two virtual machines.
fn channel(one: &str, other: &str, more: &str) -> String {
    format!(
        "\n[[channel]]\nbetween = [\"{one}\", \"{other}\"]\nkind = \"shmem\"\nsize = \"64K\"\n{more}\n"
    )
}

/// Channels between virtual machines.
fn channel_scenarios() -> Vec<Scenario> {
    // The same program in both guests: everything that `/dev/parador-com*` can do.
    let check = "parador.run=/root/linux-check-com";
    let linux_pair = "files = [\"{artifacts}/linux-check-com\"]".to_owned()
        + &linux("first", check, "console = \"mux\"\ncpus = 2")
        + &linux("second", check, "console = \"mux\"")
        + &channel("first", "second", "");
    let pair = || {
        micro("first", "channel", "console = \"mux\"")
            + &micro("second", "channel", "console = \"mux\"")
            + &channel("first", "second", "")
    };
    let ended = |name: &str| format!("vm {name} ended: power-off code 0");
    // The guest restarts as long as its peers run, and pages that it shared before are revoked.
    let hostile = "console = \"mux\"\nessential = false\nrestart = \"always\"";
    // In Linux, with a correct peer and a hostile one: the driver reports errors, and nothing else
    // happens.
    let command = "parador.run=\\\"ask() { echo $1 >/dev/parador-com0; head -n 1 /dev/parador-com0 | grep -x \
                   'heard: '$1; }; ask one && for i in $(seq 40); do timeout 2 head -c 99 /dev/parador-com1; \
                   timeout 2 sh -c 'echo x >/dev/parador-com1'; done >/dev/null 2>/tmp/errors; \
                   grep -c Input/output.error /tmp/errors && ask two\\\"";
    let linux = linux("linux", command, "console = \"com1\"")
        + &micro("good", "answer", "essential = false")
        + &micro("bad", "channel-hostile", "essential = false\nrestart = \"always\"")
        + &channel("linux", "good", "")
        + &channel("linux", "bad", "");
    // One end of a channel restarts, by an operator and by policy; the other end checks.
    let lives = |count, more: &str| {
        micro(
            "answers",
            "channel-lives",
            &format!("console = \"com1\"\ncmdline = \"lives={count}\""),
        ) + &micro("asks", "channel-lives", &format!("essential = false\n{more}"))
            + &channel("answers", "asks", "")
    };
    let killer = task("killer", "check-killer", &["asks", "8", "60"], "manage = true");
    vec![
        Scenario {
            // In counted time each life is long enough for some messages.
            cpus: &[1, 4],
            machine: Machine { counted: true, ..Machine::default() },
            texts: vec!["CHECK killer ok".into(), ended("answers")],
            never: &["FAIL"],
            ..base("channel-peer-killed", lives(9, "") + &killer)
        },
        Scenario {
            cpus: &[1, 4],
            machine: Machine { counted: true, ..Machine::default() },
            texts: vec!["vm asks restarts in ".into(), ended("answers")],
            never: &["FAIL"],
            ..base("channel-peer-ends", lives(6, "restart = \"always\"\ncmdline = \"messages=50\""))
        },
        Scenario {
            // The second VM's quota covers itself and its first channel, but not the second
            // channel: its start fails in the middle.
            machine: Machine { qemu: &["-m", "50M"], ..Machine::default() },
            texts: vec!["cannot start vm second: Memory".into(), ended("first")],
            never: &["FAILED"],
            ..base("channel-peer-cannot-start", {
                micro("first", "channel-alone", "console = \"com1\"")
                    + &micro("second", "hello", "essential = false")
                    + &micro("third", "hello", "essential = false")
                    + &channel("first", "second", "")
                    + &channel("second", "third", "").replace("64K", "16M")
            })
        },
        Scenario {
            cpus: &[1, 2],
            texts: vec![ended("first"), ended("second")],
            never: &["FAILED", "Oops", "BUG: ", "WARNING: CPU", "general protection"],
            limit: 240,
            ..base("linux-channel-driver", linux_pair)
        },
        Scenario {
            cpus: &[1, 2],
            texts: vec!["heard: one".into(), "heard: two".into()],
            never: &["Oops", "BUG: ", "general protection", "cannot start"],
            limit: 240,
            ..base("linux-channels", linux)
        },
        Scenario {
            cpus: &[1, 4],
            texts: vec![ended("first"), ended("second")],
            never: &["FAILED"],
            ..base("channel", pair())
        },
        Scenario {
            cpus: &[1, 4],
            texts: vec![ended("first"), ended("second"), "vm hostile restarts in ".into()],
            never: &["FAILED", "vm hostile ended: fault", "vm first ended: fault"],
            limit: 240,
            ..base(
                "channel-hostile",
                pair()
                    + &micro("hostile", "channel-hostile", hostile)
                    + &channel("hostile", "first", "")
                    + &channel("second", "hostile", "doorbell = false"),
            )
        },
    ]
}

/// Machines that cannot run the guest that is asked for.
fn machine_scenarios() -> Vec<Scenario> {
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
fn linux_scenarios() -> Vec<Scenario> {
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

/// Several clients of one line, and an operator.
fn console_scenarios() -> Vec<Scenario> {
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
            cpus: &[1, 4],
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
            // What `make run` starts.
            system: include_str!("../../examples/three-guests.toml").to_owned(),
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
            cpus: &[1, 2],
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
            cpus: &[1, 4],
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

/// Descriptions that `parador system build` must refuse: name, description, exit code, text of the
/// message.
const REFUSALS: &[(&str, &str, i32, &str)] = &[
    ("unknown-key", "[system]\nboard = \"qemu-q35\"\nmemroy = \"1G\"\n", 65, "memroy"),
    (
        "missing-kernel",
        "[system]\nboard = \"qemu-q35\"\n[[vm]]\nname = \"a\"\nmemory = \"64M\"\nkernel = \"nowhere\"\n",
        66,
        "nowhere",
    ),
    (
        "truncated-kernel",
        "[system]\nboard = \"qemu-q35\"\n[[vm]]\nname = \"a\"\nmemory = \"64M\"\nkernel = \"truncated\"\n",
        65,
        "truncated",
    ),
    (
        "too-little-guest-memory",
        "[system]\nboard = \"qemu-q35\"\n[[vm]]\nname = \"a\"\nmemory = \"8M\"\nkernel = \"debian\"\n",
        65,
        "memory",
    ),
];

fn refusal(description: &str, code: i32, message: &str) -> Result<()> {
    let folder = tempfile::tempdir()?;
    std::fs::write(folder.path().join("system.toml"), description)?;
    // A boot sector that says it is a Linux kernel of 64 KiB, and nothing after it.
    let mut kernel = vec![0; 1024];
    kernel[0x1f1] = 1;
    kernel[0x1f4..0x1f6].copy_from_slice(&0x1000_u16.to_le_bytes());
    kernel[0x1fe..0x206].copy_from_slice(b"\x55\xaa\xeb\x66HdrS");
    kernel[0x206..0x208].copy_from_slice(&0x020f_u16.to_le_bytes());
    kernel[0x236] = 1;
    std::fs::write(folder.path().join("truncated"), kernel)?;

    let arguments = ["system", "build", "system.toml", "--output", "image"];
    let output = parador(folder.path()).args(arguments).output()?;
    let errors = String::from_utf8_lossy(&output.stderr);
    if output.status.code() != Some(code) {
        bail!("exit status {} instead of {code}\n{errors}", output.status);
    }
    if !errors.contains(message) || !errors.contains("system.toml") {
        bail!("the message does not name the file and `{message}`:\n{errors}");
    }
    let image = folder.path().join("image");
    if image.exists() && std::fs::read_dir(&image)?.next().is_some() {
        bail!("a half-made image is left");
    }
    Ok(())
}

/// Disk servers and switches, with programs in place of VMMs that check what they get.
fn server_scenarios() -> Vec<Scenario> {
    let client = |name: &str, program: &str, command_line: &str, more: &str| {
        let vmm = format!("vmm = \"check-{program}\"\ncmdline = \"{command_line}\"\n{more}");
        micro(name, "hello", &vmm)
    };
    let server = |name: &str, kind: &str, device: &str| {
        let device = match device {
            "" => String::new(),
            device => format!("device = \"pci:{device}:0\"\n"),
        };
        format!("\n[[server]]\nname = \"{name}\"\nkind = \"{kind}\"\n{device}")
    };
    let one = "disk = [\"blk0:part1\"]";
    let two = "disk = [\"blk0:part2\"]";
    let three = "disk = [\"blk1:part1\"]";
    let block = server("blk0", "block", "virtio-blk");
    let first = "disk = [\"first.img\"]\n";
    let killer = |server: &str, count: &str, pause: &str| {
        let more = "manage = true\nessential = true";
        task(&format!("killer-{server}"), "check-killer", &[server, count, pause], more)
    };
    let hostile = format!("{block}program = \"check-dma\"\n");
    // It goes through a whole life after whatever happens beside it, for as long as the operator
    // likes.
    let witness = micro("witness", "stress", "essential = false\nrestart = \"always\"")
        + &task("steward", "steward", &[], "console = \"mux\"\nmanage = true");
    let pong = client("pong", "net", "pong", "net = [\"sw0\"]\nessential = false");
    // Written data is read back from the disk, not from memory, and the network peer answers.
    let command = "parador.run=\\\"dd if=/dev/urandom of=/tmp/a bs=64k count=32 && \
                   dd if=/tmp/a of=/dev/vda bs=64k conv=fsync && echo 3 > /proc/sys/vm/drop_caches && \
                   dd if=/dev/vda of=/tmp/b bs=64k count=32 && cmp /tmp/a /tmp/b && \
                   ifconfig eth0 10.0.2.15 && ping -c 2 10.0.2.2 && \
                   dd if=/dev/hwrng bs=16 count=1 | wc -c | grep -x 16\\\"";
    let devices = "console = \"com1\"\ndisk = [\"blk0:part1\"]\nnet = [\"sw0\"]";
    vec![
        Scenario {
            cpus: &[1, 2],
            texts: vec!["restart 5 of blk0".into()],
            limit: 240,
            ..base(
                "linux-disk-and-network",
                first.to_owned()
                    + "net = [\"user\"]\n"
                    + &block
                    + &server("sw0", "switch", "virtio-net")
                    + &killer("blk0", "5", "500")
                    + &linux("linux", command, devices),
            )
        },
        Scenario {
            cpus: &[1, 2],
            never: &["FAIL"],
            ..base(
                "disks",
                "disk = [\"first.img\", \"second.img,bus=ahci\"]\n".to_owned()
                    + &block
                    + &server("blk1", "block", "ahci")
                    + &client("one", "disk", "3000 1", one)
                    + &client("two", "disk", "3000 2", two)
                    + &client("three", "disk", "3000 3", three),
            )
        },
        Scenario {
            cpus: &[1, 2],
            texts: vec!["CHECK killer ok".into(), "restart 20 of blk0".into()],
            never: &["FAIL"],
            limit: 240,
            ..base(
                "disk-server-restarts",
                first.to_owned()
                    + &block
                    + &killer("blk0", "20", "100")
                    + &client("one", "disk", "40000 1", one)
                    + &client("two", "disk", "40000 2", two),
            )
        },
        Scenario {
            cpus: &[1, 2],
            texts: vec!["CHECK ping ok".into(), "CHECK spoof ok".into(), "CHECK arp ok".into()],
            never: &["FAIL"],
            ..base(
                "switch",
                "net = [\"user\"]\n".to_owned()
                    + &server("sw0", "switch", "virtio-net")
                    + &client("ping", "net", "ping 500", "net = [\"sw0\"]")
                    + &pong
                    + &client("spoof", "net", "spoof", "net = [\"sw0\"]")
                    + &client("arp", "net", "arp", "net = [\"sw0,group=2\"]")
                    + &client(
                        "silent",
                        "net",
                        "silent",
                        "net = [\"sw0,group=3\"]\nessential = false",
                    ),
            )
        },
        Scenario {
            // Servers of both kinds of disks, one of which is killed, behind an IOMMU.
            cpus: &[1, 2],
            texts: vec!["IOMMU at 0x".into(), "restart 5 of blk0".into()],
            never: &["FAIL", "IOMMU: event"],
            limit: 240,
            ..base(
                "disks-behind-iommu",
                "iommu = true\ndisk = [\"first.img\", \"second.img,bus=ahci\"]\n".to_owned()
                    + &block
                    + &server("blk1", "block", "ahci")
                    + &killer("blk0", "5", "200")
                    + &client("one", "disk", "20000 1", one)
                    + &client("three", "disk", "3000 3", three),
            )
        },
        Scenario {
            // A switch that has turned its network card on, and finds no memory for its last
            // clients.
            machine: Machine { qemu: &["-m", "10M"], ..Machine::default() },
            texts: vec![
                "root: server drives PCI function 00:".into(),
                "cannot start server sw0: Memory".into(),
                " is disabled".into(),
            ],
            code: 65,
            ..base(
                "server-cannot-start",
                "net = [\"user\"]\n".to_owned()
                    + &server("sw0", "switch", "virtio-net")
                    + &(0..4)
                        .map(|vm| {
                            let nets = "net = [\"sw0\", \"sw0\", \"sw0\", \"sw0\"]";
                            micro(&format!("vm-{vm}"), "hello", nets)
                        })
                        .collect::<String>(),
            )
        },
        Scenario {
            // A virtual machine in the place of one that had a disk: neither it nor the disk's
            // server learns of the other, when that is started again.
            cpus: &[1, 2],
            steps: vec![
                Step::Console("steward> "),
                Step::Type("destroy old\r"),
                Step::Console("destroy old: done"),
                Step::Type("create new small\r"),
                Step::Console("create new: done"),
                Step::Type("start new\r"),
                Step::Console("start new: done"),
                Step::Log("new: probes for 5000 ms"),
                Step::Type("restart blk0\r"),
                Step::Console("restart blk0: done"),
                Step::Log("new: CHECK stranger ok"),
                Step::Type("shutdown\r"),
                Step::Console("the operator shell ends"),
            ],
            never: &["FAIL"],
            ..base(
                "session-of-a-destroyed-guest",
                first.to_owned()
                    + &block
                    + &task("steward", "steward", &[], "console = \"mux\"\nmanage = true")
                    + &micro("old", "spin", &format!("essential = false\n{one}"))
                    + &micro("small", "hello", "vmm = \"check-stranger\"\ntemplate = true"),
            )
        },
        Scenario {
            // A guest that never stops, above all others, with a budget: two virtual CPUs, each
            // with its part.
            cpus: &[1, 2],
            texts: vec!["vm witness ended: power-off code 0".into()],
            never: &["FAIL"],
            ..base(
                "budgets",
                String::new()
                    + &micro(
                        "hog",
                        "spin",
                        "priority = 50\nessential = false\ncpus = 2\n\
                         cpu = { budget = \"2ms\", period = \"10ms\" }",
                    )
                    + &task(
                        "neighbour",
                        "check-neighbour",
                        &[],
                        "essential = false\npriority = 51\n\
                         cpu = { budget = \"1ms\", period = \"5ms\" }",
                    )
                    + &micro("witness", "stress", ""),
            )
        },
        Scenario {
            // A server that programs its device to access kernel memory, and to send interrupts.
            steps: vec![
                Step::Console("steward> "),
                Step::Log("the disk cannot read and cannot write what is not its server's"),
                Step::Log("CHECK dma ok"),
                Step::Log("vm witness started"),
                Step::Log("the disk cannot send interrupts of its choice"),
                Step::Log("CHECK messages ok"),
                Step::Log("vm witness ended: power-off code 0"),
                Step::Type("shutdown\r"),
                Step::Console("the operator shell ends"),
            ],
            never: &["FAIL"],
            ..base(
                "hostile-device-behind-iommu",
                format!("iommu = true\n{first}") + &hostile + &witness,
            )
        },
        Scenario {
            // Without an IOMMU it can: this is what the one before shows.
            steps: vec![
                Step::Console("steward> "),
                Step::Log("the disk can read and can write what is not its server's"),
                Step::Log("the disk can send interrupts of its choice"),
                Step::Log("CHECK messages ok"),
                Step::Log("vm witness ended: power-off code 0"),
                Step::Type("shutdown\r"),
                Step::Console("the operator shell ends"),
            ],
            never: &["FAIL"],
            ..base("hostile-device", first.to_owned() + &hostile + &witness)
        },
        Scenario {
            // A hostile driver in a guest, beside clients of the same servers that notice wrong
            // data.
            cpus: &[1, 4],
            texts: vec![
                "all devices work".into(),
                "CHECK disk ok".into(),
                "CHECK ping ok".into(),
                "vm hostile ended: power-off code 0".into(),
            ],
            never: &["FAIL"],
            limit: 240,
            ..base(
                "hostile-rings",
                first.to_owned()
                    + &block
                    + &server("sw0", "switch", "")
                    + &micro(
                        "hostile",
                        "hostile-rings",
                        &format!("console = \"com1\"\n{one}\nnet = [\"sw0\"]"),
                    )
                    + &client("two", "disk", "20000 2", two)
                    + &client("ping", "net", "ping 3000", "net = [\"sw0\"]")
                    + &pong,
            )
        },
        Scenario {
            cpus: &[2],
            texts: vec!["CHECK ping ok".into(), "restart 10 of sw0".into()],
            never: &["FAIL"],
            limit: 240,
            ..base(
                "switch-restarts",
                server("sw0", "switch", "")
                    + &killer("sw0", "10", "100")
                    + &client("ping", "net", "ping 3000", "net = [\"sw0\"]")
                    + &pong,
            )
        },
    ]
}

fn scenarios() -> Vec<Scenario> {
    [
        bochs_scenarios(),
        server_scenarios(),
        check_scenarios(),
        guest_scenarios(),
        channel_scenarios(),
        machine_scenarios(),
        linux_scenarios(),
        console_scenarios(),
    ]
    .concat()
}

/// All tests, in the order in which they start. `seconds`: length of the load of those that have
/// one.
fn tests(seconds: u32) -> Vec<Test> {
    // The longest comes first, beside the others.
    let mut tests: Vec<Test> = DEBIAN_CPUS
        .iter()
        .map(|&cpus| {
            let name = format!("{}/debian/{cpus}-cpu", Backend::NativeX86Npt);
            Test::new(name, Class::SmpOrKill, move || debian::run(cpus)).with_qemu_threads(cpus)
        })
        .collect();
    // The kernel is built here if need be; the tests that boot it come last.
    tests.push(Test::new("previrt/verify", Class::Other, previrt::verify));
    tests.push(Test::new("afterburn/small-kernel", Class::Other, afterburn::small_kernel));
    for &(name, description, code, message) in REFUSALS {
        let body = move || refusal(description, code, message);
        tests.push(Test::new(format!("refuses/{name}"), Class::Other, body));
    }
    for scenario in scenarios() {
        for &backend in scenario.backends {
            for &cpus in scenario.cpus {
                let name = format!("{backend}/{}/{cpus}-cpu", scenario.name);
                let (class, scenario) = (scenario.class(cpus), scenario.clone());
                let test = Test::new(name, class, move || scenario.run(backend, cpus));
                tests.push(test.with_qemu_threads(cpus));
            }
        }
    }
    let next = || bochs::next_instruction(&format!("{HEAD}{}", micro("guest", "exits", CONSOLE)));
    tests.push(Test::new("bochs/next-instruction", Class::Other, next));
    tests.extend(kvm_tests());
    tests.extend(previrt_tests());
    tests.extend(hosted_tests(seconds));
    let randomized = || previrt::randomized(2);
    tests.push(Test::new("previrt/raw-randomized/2-cpu", Class::SmpOrKill, randomized));
    let names: Vec<_> = tests.iter().map(|test| test.name.clone()).collect();
    tests.push(Test::new("docs/named-tests", Class::Other, move || docs::named(&names)));
    tests
}

/// Micro-guests for which KVM of Linux 6.1 on QEMU 7.2 is no processor (docs/CAVEATS.md), and what
/// it does instead. A guest that it can run leaves this list.
const NOT_ON_KVM: &[(&str, &str)] = &[
    ("x2apic", "it does not report a write of CR8 that keeps the class, so TPR[3:0] stay"),
    ("steps", "it carries out all rounds of a repeated OUTS before it reports a step"),
    ("fpu", "QEMU does not intercept XSETBV, so CPUID leaf 0xd has the size of before"),
];

/// Texts of micro-guests that are others with KVM.
const KVM_TEXTS: &[(&str, &str)] = &[
    ("exits", "VB cr8_write"),
    ("refused", "KVM cannot emulate a guest instruction (KVM_EXIT_INTERNAL_ERROR)"),
];

/// The micro-guests in VMs of `parador run` by KVM.
fn kvm_tests() -> Vec<Test> {
    const NATIVE: &str = "vm guest ended";
    let is_left_out = |name| NOT_ON_KVM.iter().any(|&(other, _)| other == name);
    let guests = GUESTS.iter().filter(|&&(name, ..)| !is_left_out(name));
    let guests = guests.map(|&(name, code, text)| {
        let other = KVM_TEXTS.iter().find(|&&(other, _)| other == name);
        let text = other.map_or(text, |&(_, text)| text);
        // The native kernel's log states the end; the exit code does here.
        let text = (!text.starts_with(NATIVE)).then_some(text);
        MicroGuest { name, cpus: 1, code, text }
    });
    let smp =
        MicroGuest { name: "smp", cpus: 4, code: 0, text: Some("smp: 4 processors work together") };
    let all: Vec<_> = guests.chain([smp]).collect();
    let test = |&guest: &MicroGuest| {
        let (name, all) = (format!("kvm/{}", guest.name), all.clone());
        let class = if guest.cpus > 1 { Class::SmpOrKill } else { Class::Other };
        Test::new(name, class, move || kvm::micro(&all, guest))
    };
    all.iter().map(test).collect()
}

/// The pre-virtualized kernel on the bare emulated machine, in guests and in processes.
fn previrt_tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for cpus in PREVIRT_CPUS {
        let class = if cpus > 1 { Class::SmpOrKill } else { Class::Other };
        let name = |test: &str| format!("previrt/{test}/{cpus}-cpu");
        let raw = move || previrt::raw("vmlinux", cpus, "nokaslr").map(drop);
        tests.push(Test::new(name("null"), class, move || previrt::null(cpus)));
        tests.push(Test::new(name("raw"), class, raw));
        for &backend in EVERY_BACKEND {
            let name = format!("{backend}/linux-previrtualized/{cpus}-cpu");
            // The guest has two CPUs on any host.
            let test = Test::new(name, Class::SmpOrKill, move || previrt::guest(backend, cpus));
            tests.push(test.with_qemu_threads(cpus));
        }
    }
    tests.push(Test::new("previrt/null-counts", Class::Other, previrt::null_counts));
    tests.push(Test::new("previrt/hosted", Class::Other, previrt::hosted));
    tests.push(Test::new("previrt/same-results", Class::Other, previrt::same_results));
    tests
}

/// Machines in processes of this host.
fn hosted_tests(seconds: u32) -> Vec<Test> {
    let is_long = seconds > STRESS_SECONDS;
    let named = |name: &str, class, body: Body| Test::new(format!("hosted/{name}"), class, body);
    let mut tests: Vec<Test> =
        HOSTED.iter().map(|&(name, body, class)| named(name, class, body)).collect();
    let protection = named("protection", Class::SmpOrKill, keys::protection);
    tests.push(protection.with_qemu_threads(keys::HOST_CPUS));
    let copies = named("protection-copies", Class::SmpOrKill, keys::copies);
    tests.push(copies.with_qemu_threads(keys::HOST_CPUS));
    let with_keys = move || fuzz::keys(is_long);
    let with_keys = Test::new("hosted/random-programs-keys", Class::SmpOrKill, with_keys);
    tests.push(with_keys.with_qemu_threads(keys::HOST_CPUS));
    let modes = move || fuzz::modes(is_long);
    tests.push(Test::new("hosted/random-programs", Class::SmpOrKill, modes));
    for &(name, body) in ESCAPES {
        let name = format!("hosted/{name}");
        tests.push(Test::new(name, Class::Other, move || body(is_long)));
    }
    let stress = move || hosted::stress(seconds);
    tests.push(Test::new("hosted/stress", Class::SmpOrKill, stress));
    tests.push(named("systemd", Class::SmpOrKill, debian::in_processes));
    if is_long {
        tests.push(named("kernel-inside", Class::SmpOrKill, userland::kernel));
    }
    let userland = move || userland::debian(seconds.div_ceil(4));
    tests.push(Test::new("hosted/debian", Class::Other, userland));
    tests
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    if let Some((first, rest)) = words.split_first()
        && (first == sandbox::ENTER || first == sandbox::ENTER_OLD)
    {
        if let Err(error) = sandbox::enter(rest, first == sandbox::ENTER_OLD) {
            eprintln!("{error:#}");
        }
        return ExitCode::FAILURE;
    }
    if let Some((first, rest)) = words.split_first()
        && first == sandbox::ENTER_REFUSING
    {
        if let Err(error) = sandbox::enter_refusing(rest) {
            eprintln!("{error:#}");
        }
        return ExitCode::FAILURE;
    }
    if let Some((first, rest)) = words.split_first()
        && first == hosted::net::CONNECT
    {
        return match hosted::net::connect(rest) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error:#}");
                ExitCode::FAILURE
            }
        };
    }
    let seconds = std::env::var(STRESS).ok().and_then(|text| text.parse().ok());
    let seconds = seconds.unwrap_or(STRESS_SECONDS);
    let options = Options::parse(words);
    match options.and_then(|options| runner::run(tests(seconds), &options, PARALLEL, seconds)) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}
