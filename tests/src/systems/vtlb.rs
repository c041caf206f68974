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
/// Rungs of a vTLB from the lowest, as keys of a VM; the top one is the default.
const RUNGS: [&str; 8] = [
    "rung = \"kernel\"",
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
/// Guests that check several CPUs.
const SEVERAL: [&str; 3] = ["smp", "stress", "paging-hostile"];

/// Sets `npt = false` in all VMs of a description.
fn without_npt(system: &str) -> String {
    system.replace("[[vm]]\n", &format!("[[vm]]\n{KEY}\n"))
}

/// VMs without nested paging; `is_long`: all rungs and the guests that take minutes, too.
pub fn vtlb_scenarios(is_long: bool) -> Vec<Scenario> {
    let mut scenarios = guests(is_long);
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

/// Seconds that a guest without nested paging may take on a busy machine.
const LIMIT: u64 = 240;

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

/// Debian's kernel on the top rung and on the lowest one.
fn plain_linux() -> Vec<Scenario> {
    let scenario = |name, cpus, host: &'static [u32], more: &str| Scenario {
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
    };
    let shells = linux_scenarios().into_iter().filter(|linux| linux.name == "linux-shell");
    let shells = shells.map(|shell| Scenario {
        backends: VTLB,
        cpus: &[1],
        system: without_npt(&shell.system),
        limit: LIMIT,
        ..shell
    });
    let mut scenarios = vec![
        scenario("linux-small-pool", 1, &[1], "vtlb = \"256K\""),
        scenario("linux-2", 2, &[2], ""),
        scenario("linux-4", 4, &[4], ""),
        scenario("linux-kernel-rung", 1, &[1], RUNGS[0]),
    ];
    scenarios.extend(shells);
    scenarios
}

/// One VM per rung, all in one machine.
fn every_rung(cpus: u32) -> Scenario {
    let names = ["kernel", "global", "cache", "sync", "trace", "write", "asid", "top"];
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
        limit: 900,
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
