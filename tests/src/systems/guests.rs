//! Micro-guests: alone, beside each other, and with channels between them.

use super::{CONSOLE, base, linux, linux::linux_scenarios, micro, task};
use crate::bochs::Model;
use crate::scenario::{Backend, Scenario};
use crate::system::Machine;

/// Micro-guests: name, virtual CPUs, exit code, text on the console or in the log.
pub const GUESTS: &[(&str, u32, i32, &str)] = &[
    ("hello", 1, 0, "hello from a micro-guest"),
    ("ports", 1, 0, "vm guest ended: power-off"),
    ("memory", 1, 0, "vm guest ended: power-off"),
    ("msr", 1, 0, "vm guest ended: power-off"),
    ("interrupts", 1, 0, "vm guest ended: power-off"),
    ("pic", 1, 0, "pic: 200 interrupts, each once"),
    ("x2apic", 1, 0, "vm guest ended: power-off"),
    ("shadow", 1, 0, "vm guest ended: power-off"),
    ("steps", 1, 0, "steps: every round, and both breakpoints"),
    ("debug", 1, 0, "debug: every exception once"),
    ("nmi", 1, 0, "nmi: masked until IRET"),
    ("vectors", 1, 0, "vectors: 3000 rounds"),
    ("fpu", 1, 0, "vm guest ended: power-off"),
    ("bigpages", 1, 0, "vm guest ended: power-off"),
    ("paging-rights", 1, 0, "paging-rights: all cases"),
    ("paging-flush", 1, 0, "paging-flush: every translation is fresh"),
    ("paging-hostile", 2, 0, "paging-hostile: the machine bears it"),
    ("paging-unbacked", 1, 81, "vm guest ended: guest fault"),
    ("stress", 1, 0, "vm guest ended: power-off"),
    ("exits", 1, 0, "VB hypercall"),
    ("vtlb", 1, 0, "VB cr3"),
    ("poweroff", 1, 0, "vm guest ended: power-off"),
    ("panic", 1, 80, "vm guest ended: guest panic"),
    ("triple", 1, 81, "vm guest ended: guest fault"),
    ("refused", 1, 81, "the CPU rejected the guest state"),
    ("reset", 1, 83, "vm guest ended: reset"),
    ("smp", 4, 0, "smp: 4 processors work together"),
];

/// Texts of micro-guests that are others with KVM.
pub const KVM_TEXTS: &[(&str, &str)] = &[
    ("exits", "VB cr8_write"),
    ("refused", "KVM cannot emulate a guest instruction (KVM_EXIT_INTERNAL_ERROR)"),
];

/// Back ends, micro-guests that they do not run, and the reason: a guest that one of them can run
/// leaves this list. docs/CAVEATS.md has those of Bochs 2.7, and of KVM of Linux 6.1 on QEMU 7.2.
const LEFT_OUT: &[(&str, &str, &str)] = &[
    (
        "bochs",
        "interrupts",
        "VMRUN with guest IF clear masks interrupts: those of the local APIC are late",
    ),
    (
        "bochs",
        "x2apic",
        "as `interrupts`: the guest waits for its timer, and the host's never comes",
    ),
    (
        "native-x86-vtlb",
        "refused",
        "the VMM raises #GP at the write of CR0, which is intercepted: no VMRUN fails",
    ),
    ("bochs", "shadow", "as `interrupts`: STI; HLT is not left"),
    ("bochs", "stress", "as `interrupts`: messages to itself are late"),
    ("bochs", "steps", "a guest's pending #DB comes behind VMRUN, in the kernel"),
    ("bochs", "debug", "a single step's #DB comes without DR6.BS"),
    ("bochs", "triple", "shutdowns are not intercepted: Bochs ends, or resets the whole machine"),
    ("bochs", "refused", "VMRUN accepts CR0.NW without CR0.CD"),
    ("bochs", "smp", "it runs one CPU"),
    ("bochs", "paging-hostile", "it runs one CPU"),
    ("kvm", "x2apic", "it does not report a write of CR8 that keeps the class, so TPR[3:0] stay"),
    ("kvm", "steps", "it carries out all rounds of a repeated OUTS before it reports a step"),
    ("kvm", "fpu", "QEMU does not intercept XSETBV, so CPUID leaf 0xd has the size of before"),
    ("kvm", "paging-rights", NOT_RUN_BY_KVM),
    ("kvm", "paging-flush", NOT_RUN_BY_KVM),
    ("kvm", "paging-hostile", NOT_RUN_BY_KVM),
    ("kvm", "paging-unbacked", NOT_RUN_BY_KVM),
    ("hosted", "hello", "`hosted/shell` tests it with Linux"),
    ("hosted", "poweroff", "`hosted/shell` tests it with Linux"),
    ("hosted", "panic", "`hosted/ends` tests it with Linux"),
    ("hosted", "triple", "`hosted/ends` tests it with Linux"),
    ("hosted", "reset", "`hosted/ends` tests it with Linux"),
    ("hosted", "exits", "it measures VM exits; processes have none"),
    ("hosted", "refused", "it tests a VM entry with invalid state; processes have no VM entry"),
    ("hosted", "smp", "`hosted/cpus` tests it with Linux; the guest starts CPUs in real mode"),
];

/// KVM's guests share one emulated host, whose time has a limit.
const NOT_RUN_BY_KVM: &str = "not run there yet: its time on the emulated host is unknown";

/// The loader of processes (`hosted/loader/src/prepare.rs`) sets up page tables, GDT, stack and
/// per-CPU data by the names that Linux gives them, and enters Linux' 64-bit C code.
const ENTRY: &str = "the loader enters `x86_64_start_kernel` with Linux' page tables; a micro-guest \
    has a 32-bit PVH entry, identity mapping, which a process has not, and no site table: rustc writes \
    inline assembly in Intel syntax, which the afterburner refuses";

/// Returns why back ends whose tests' names begin with `group` do not run a micro-guest.
pub fn left_out(group: &str, guest: &str) -> Option<&'static str> {
    let row = LEFT_OUT.iter().find(|&&(by, name, _)| by == group && name == guest);
    row.map(|&(.., reason)| reason).or((group == "hosted").then_some(ENTRY))
}

/// Command line of a micro-guest on QEMU's processor in time that is not counted.
///
/// Its host may interrupt `shadow` right after `STI`; `VMRUN` then forgets the shadow
/// (docs/CAVEATS.md). That is rare: a back end without shadows fails 1,700 times.
pub fn command_line(guest: &str) -> &'static str {
    if guest == "shadow" { "early=20" } else { "" }
}

/// Guests with one behaviour each.
pub(super) fn micro_scenarios() -> Vec<Scenario> {
    let more = |name, vcpus| {
        let line = command_line(name);
        format!("cpus = {vcpus}\ncmdline = \"{line}\"\n{CONSOLE}")
    };
    let scenario = |&(name, vcpus, code, text): &(&'static str, u32, i32, &str)| Scenario {
        // Virtual CPUs with CPUs of their own, and all on one.
        cpus: &[1, 4],
        texts: vec![text.into()],
        never: &["FAILED"],
        code,
        limit: if vcpus > 1 { 240 } else { 60 },
        ..base(name, micro("guest", name, &more(name, vcpus)))
    };
    GUESTS.iter().map(scenario).collect()
}

const BOCHS: &[Backend] = &[Backend::Bochs(Model::Ryzen), Backend::Bochs(Model::Phenom)];

/// Command line for Debian's kernel on Bochs' `phenom_8650_toliman`, which reports POPCNT (CPUID
/// leaf 1, ECX bit 23) and raises `#UD` at it.
const NO_POPCNT: &str = "console=ttyS0 clearcpuid=151 ";

/// The same guests on another emulator's processors, and Debian's kernel; `is_long`: on both of
/// them.
pub fn bochs_scenarios(is_long: bool) -> Vec<Scenario> {
    let guests = micro_scenarios().into_iter();
    let guests = guests.filter(|guest| left_out("bochs", guest.name).is_none());
    let guests = guests.map(|guest| Scenario { backends: BOCHS, cpus: &[1], ..guest });
    let linux = linux_scenarios().into_iter().filter(|linux| linux.name == "linux-shell");
    let linux = linux.flat_map(|linux| {
        let system = linux.system.replace("console={serial} ", NO_POPCNT);
        let phenom = Scenario { backends: &BOCHS[1..], cpus: &[1], system, ..linux.clone() };
        let ryzen = Scenario { backends: &BOCHS[..1], cpus: &[1], ..linux };
        std::iter::once(ryzen).chain(is_long.then_some(phenom))
    });
    guests.chain(linux).collect()
}

/// Page tables of a kind that `GUESTS` has no row for.
pub(super) fn paging_scenarios() -> Vec<Scenario> {
    let unbacked = |name, case| Scenario {
        texts: vec!["paging-unbacked: a ".into(), "vm guest ended: guest fault".into()],
        never: &["FAILED"],
        code: 81,
        ..base(
            name,
            micro("guest", "paging-unbacked", &format!("cmdline = \"case={case}\"\n{CONSOLE}")),
        )
    };
    vec![
        unbacked("paging-unbacked-device", 1),
        unbacked("paging-unbacked-root", 2),
        Scenario {
            // Two vCPUs share a CPU. The figure is for readers: it depends on what else the host
            // does.
            texts: vec!["paging-neighbour: ".into()],
            never: &["FAILED"],
            limit: 240,
            ..base(
                "paging-neighbour",
                micro("guest", "paging-neighbour", &format!("cpus = 2\n{CONSOLE}")),
            )
        },
    ]
}

/// Guests with one behaviour each, and what becomes of others beside them.
pub fn guest_scenarios() -> Vec<Scenario> {
    let mut scenarios = micro_scenarios();
    scenarios.extend(paging_scenarios());
    scenarios.extend([
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
pub fn channel(one: &str, other: &str, more: &str) -> String {
    format!(
        "\n[[channel]]\nbetween = [\"{one}\", \"{other}\"]\nkind = \"shmem\"\nsize = \"64K\"\n{more}\n"
    )
}

/// Channels between virtual machines.
pub fn channel_scenarios() -> Vec<Scenario> {
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
            cpus: &[2],
            long_cpus: &[1],
            texts: vec![ended("first"), ended("second")],
            never: &["FAILED", "Oops", "BUG: ", "WARNING: CPU", "general protection"],
            limit: 240,
            ..base("linux-channel-driver", linux_pair)
        },
        Scenario {
            cpus: &[2],
            long_cpus: &[1],
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
