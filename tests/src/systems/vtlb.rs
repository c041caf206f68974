//! VMs without nested paging: `npt = false`.

use super::guests::{left_out, micro_scenarios, paging_scenarios};
use super::linux::linux_scenarios;
use super::{CONSOLE, base, linux, micro};
use crate::bochs::Model;
use crate::scenario::{Backend, Scenario};
use crate::system::Machine;

const VTLB: &[Backend] = &[Backend::NativeX86Vtlb];
/// Key of a VM that turns nested paging off.
pub const KEY: &str = "npt = false";
/// Key of the lowest rung, on which the VMM walks the guest's page tables.
const USER: &str = "rung = \"user\"";
/// Key of the lowest rung in the kernel.
const KERNEL: &str = "rung = \"kernel\"";
/// Rungs of a vTLB from the lowest, as keys of a VM; the top one is the default.
const RUNGS: [&str; 9] = [
    USER,
    KERNEL,
    "rung = \"global\"",
    "rung = \"cache=4\"",
    "rung = \"sync\"",
    "rung = \"trace\"",
    "rung = \"trace\"\ntrace = \"write\"",
    "rung = \"asid\"",
    "",
];
/// A processor of QEMU without nested paging.
const NO_NPT: &[&str] = &["-cpu", "EPYC,+svm,-npt"];
/// Micro-guests that take minutes without nested paging, for long runs only.
const LONG: [&str; 1] = ["paging-hostile"];
/// Names of micro-guests on the rung `user`, and whether they are for long runs only.
const ON_USER: [(&str, &str, bool); 17] = [
    ("user-hello", "hello", false),
    ("user-interrupts", "interrupts", true),
    ("user-memory", "memory", true),
    ("user-paging-flush", "paging-flush", false),
    ("user-paging-rights", "paging-rights", false),
    ("user-paging-unbacked", "paging-unbacked", false),
    ("user-smp", "smp", true),
    ("user-vtlb", "vtlb", false),
    ("user-bigpages", "bigpages", true),
    ("user-debug", "debug", true),
    ("user-nmi", "nmi", true),
    ("user-paging-hostile", "paging-hostile", true),
    ("user-pic", "pic", true),
    ("user-shadow", "shadow", true),
    ("user-steps", "steps", true),
    ("user-stress", "stress", true),
    ("user-triple", "triple", true),
];
/// Guests that check several CPUs.
const SEVERAL: [&str; 3] = ["smp", "stress", "paging-hostile"];

/// Sets `npt = false` in all VMs of a description.
fn without_npt(system: &str) -> String {
    system.replace("[[vm]]\n", &format!("[[vm]]\n{KEY}\n"))
}

/// VMs without nested paging; `is_long`: all rungs and the guests that take minutes, too.
pub fn vtlb_scenarios(is_long: bool) -> Vec<Scenario> {
    let mut scenarios = guests(is_long);
    scenarios.extend(on_user(is_long));
    scenarios.extend(machines());
    scenarios.extend(plain_linux());
    if is_long {
        scenarios.extend([1, 2, 4].map(every_rung));
    }
    scenarios
}

/// The same guests with the same expectations.
fn guests(is_long: bool) -> Vec<Scenario> {
    let group = Backend::NativeX86Vtlb.to_string();
    let guests = micro_scenarios().into_iter();
    let guests = guests.filter(|guest| left_out(&group, guest.name).is_none());
    let guests = guests.filter(|guest| is_long || !LONG.contains(&guest.name));
    let guests = guests.chain(paging_scenarios()).map(|guest| Scenario {
        backends: VTLB,
        cpus: if SEVERAL.contains(&guest.name) { &[1, 4] } else { &[1] },
        system: without_npt(&guest.system),
        limit: guest.limit.max(LIMIT),
        ..guest
    });
    guests.collect()
}

/// Micro-guests whose page tables the VMM walks.
fn on_user(is_long: bool) -> Vec<Scenario> {
    let all = micro_scenarios();
    let wanted = ON_USER.iter().filter(|(.., only_long)| is_long || !only_long);
    let scenario = |&(name, guest, _): &(&'static str, &str, bool)| {
        let guest = all.iter().find(|scenario| scenario.name == guest)?.clone();
        Some(Scenario {
            name,
            backends: VTLB,
            cpus: if guest.name == "smp" { &[1, 4] } else { &[1] },
            system: without_npt(&guest.system).replace(KEY, &format!("{KEY}\n{USER}")),
            limit: USER_LIMIT,
            ..guest
        })
    };
    wanted.filter_map(scenario).collect()
}

/// Seconds that a guest without nested paging may take on a busy machine.
const LIMIT: u64 = 240;
/// Seconds that it may take on the rung `user`.
const USER_LIMIT: u64 = 600;

/// Machines without nested paging.
fn machines() -> Vec<Scenario> {
    let machine = || Machine { qemu: NO_NPT, ..Machine::default() };
    let tyler = |scenario: Scenario| Scenario {
        backends: &[Backend::Bochs(Model::Turion)],
        cpus: &[1],
        system: without_npt(&scenario.system),
        ..scenario
    };
    let hello = micro_scenarios().into_iter().filter(|guest| guest.name == "hello").map(tyler);
    let mut scenarios = vec![
        Scenario {
            backends: VTLB,
            machine: machine(),
            texts: vec!["hello from a micro-guest".into()],
            ..base("no-npt", micro("guest", "hello", &format!("{KEY}\n{CONSOLE}")))
        },
        Scenario {
            // A VM that asks for nested paging learns which key it needs.
            backends: VTLB,
            machine: machine(),
            texts: vec![
                "kernel: no nested paging: VMs need `npt = false`".into(),
                "cannot start vm guest: the processor has no nested paging: add `npt = false`"
                    .into(),
            ],
            code: 65,
            ..base("no-npt-no-key", micro("guest", "hello", CONSOLE))
        },
    ];
    scenarios.extend(hello);
    scenarios
}

/// Linux that counts its CPUs, computes and forks, and ends with the code 47.
fn counting(name: &str, cpus: u32, more: &str) -> String {
    let run = "parador.run=\\\"n=0; for i in $(seq 40); do n=$((n + $(echo 1))); done; \
               echo forked $n on $(nproc); exit 47\\\"";
    linux(name, run, &format!("{KEY}\ncpus = {cpus}\n{more}"))
}

/// Debian's kernel with vCPUs on host CPUs, and these keys.
fn debian(name: &'static str, cpus: u32, host: &'static [u32], more: &str) -> Scenario {
    Scenario {
        backends: VTLB,
        cpus: host,
        texts: vec![
            format!("forked 40 on {cpus}"),
            "vm linux: vtlb: fills=".into(),
            "vm linux ended: exit code 47".into(),
        ],
        never: &["Oops", "BUG: ", "WARNING: CPU", "general protection"],
        code: 47,
        limit: LIMIT,
        ..base(name, counting("linux", cpus, &format!("{CONSOLE}\n{more}")))
    }
}

/// Debian's kernel on the top rung and on the lowest ones.
fn plain_linux() -> Vec<Scenario> {
    let shells = linux_scenarios().into_iter().filter(|linux| linux.name == "linux-shell");
    let shells = shells.map(|shell| Scenario {
        backends: VTLB,
        cpus: &[1],
        system: without_npt(&shell.system),
        limit: LIMIT,
        ..shell
    });
    let mut scenarios = vec![
        debian("linux-small-pool", 1, &[1], "vtlb = \"256K\""),
        debian("linux-2", 2, &[2], ""),
        debian("linux-4", 4, &[4], ""),
        debian("linux-kernel-rung", 1, &[1], KERNEL),
        // A quota that Linux exhausts: the VMM removes all mappings, and frees page tables.
        Scenario {
            limit: USER_LIMIT,
            ..debian("linux-user", 1, &[1], &format!("{USER}\nvtlb = \"256K\""))
        },
        Scenario { limit: USER_LIMIT, ..debian("linux-user-2", 2, &[2], USER) },
    ];
    scenarios.extend(shells);
    scenarios
}

/// One VM per rung, all in one machine.
fn every_rung(cpus: u32) -> Scenario {
    let names = ["user", "kernel", "global", "cache", "sync", "trace", "write", "asid", "top"];
    let system = names.iter().zip(RUNGS).map(|(name, rung)| {
        let console = if *name == "top" { CONSOLE } else { "" };
        counting(name, cpus, &format!("{rung}\n{console}")).replace("256M", "128M")
    });
    Scenario {
        backends: VTLB,
        cpus: &[2],
        texts: names.map(|name| format!("vm {name} ended: exit code 47")).into(),
        never: &["Oops", "BUG: ", "WARNING: CPU", "general protection"],
        code: 47,
        limit: 1800,
        ..base(
            match cpus {
                1 => "linux-rungs",
                2 => "linux-rungs-2",
                _ => "linux-rungs-4",
            },
            system.collect(),
        )
    }
}
