//! All system tests: the list of scenarios, and one body that runs them on every back end.

use anyhow::Result;
use parador_tests::hosted::linux::LINUX;
use parador_tests::outcome::{Class, Test};
use parador_tests::repeat::Options;
use parador_tests::scenario::Backend;
use parador_tests::systems::guests::GUESTS;
use parador_tests::systems::refused::{REFUSALS, refusal};
use parador_tests::systems::{CONSOLE, EVERY_BACKEND, HEAD, micro, scenarios, vtlb};
use parador_tests::{
    afterburn, arm64, bochs, debian, docs, fuzz, hosted, isolation, keys, kvm, pae, previrt,
    refusals, runner, sandbox, tools::shows, userland,
};
use std::process::ExitCode;
use std::sync::Arc;

/// Systems in QEMU at the same time: each keeps a CPU of the host busy.
const PARALLEL: usize = 2;

/// Numbers of host CPUs with which a whole Debian must work.
const DEBIAN_CPUS: [u32; 1] = [2];

/// Numbers of CPUs with which the pre-virtualized kernel must work.
const PREVIRT_CPUS: [u32; 2] = [1, 2];

/// Processors on which the kernel for AArch64 is checked from inside, CPUs, and whether they have
/// VHE.
const FIRST: [(&str, u32, bool); 7] = [
    ("cortex-a76", 1, true),
    ("cortex-a76", 4, true),
    ("max", 2, true),
    ("cortex-a53", 1, false),
    ("cortex-a53", 4, false),
    ("cortex-a57", 2, false),
    ("cortex-a72", 4, false),
];

/// Body of a test.
type Body = fn() -> Result<()>;
/// A test of attacks, which may be long.
type Attack = fn(bool) -> Result<()>;
/// Machines that are processes of this host.
const HOSTED: &[(&str, Body, Class)] = &[
    ("shell", hosted::shell, Class::Other),
    ("disk", hosted::disks::disk, Class::Other),
    ("disk-overlays", hosted::disks::overlays, Class::Other),
    ("disk-in-use", hosted::disks::disk_in_use, Class::SmpOrKill),
    ("disk-full", hosted::disks::disk_full, Class::Other),
    ("ends", hosted::ends, Class::Other),
    ("balloon", hosted::memory::balloon, Class::SmpOrKill),
    ("deferred-pages", hosted::memory::deferred, Class::Other),
    ("cpus", hosted::wedge::cpus, Class::SmpOrKill),
    ("share-slow", hosted::share::slow, Class::SmpOrKill),
    ("share-owners", hosted::share::owners, Class::Other),
    ("share-requests", hosted::share::requests, Class::Other),
    ("share-names", hosted::share::names, Class::Other),
    ("share-killed", hosted::share::killed, Class::SmpOrKill),
    ("console", hosted::observed::console, Class::SmpOrKill),
    ("qemu", hosted::qemu::front_end, Class::SmpOrKill),
    ("oci", hosted::oci::life, Class::Other),
    ("oci-configurations", hosted::oci::configurations::accepted, Class::Other),
    ("oci-options", hosted::oci::options::like_runc, Class::Other),
    ("oci-killed", hosted::oci::killed, Class::SmpOrKill),
    ("oci-network", hosted::oci::network::routes, Class::Other),
    ("oci-hostile", hosted::oci::hostile::agents, Class::Other),
    ("oci-confined", hosted::oci::confined::shares, Class::Other),
    ("oci-signals", hosted::oci::confined::signals, Class::SmpOrKill),
    ("vsock", hosted::vsock::both_ways, Class::SmpOrKill),
    ("vsock-refusals", hosted::vsock::refusals, Class::Other),
    ("qcow2-kept", hosted::disks::qcow2_kept, Class::SmpOrKill),
    ("qcow2-refused", hosted::disks::qcow2_refused, Class::Other),
    ("kills", hosted::kills, Class::SmpOrKill),
    ("remains", hosted::remains::none, Class::SmpOrKill),
    ("copied", hosted::host::copied, Class::Other),
    ("exec", hosted::exec::commands, Class::Other),
    ("exec-owners", hosted::exec::owners, Class::Other),
    ("exec-etc", hosted::exec::shared_etc, Class::Other),
    ("exec-roots", hosted::exec::roots, Class::Other),
    ("exec-archive", hosted::exec::archive, Class::Other),
    ("exec-terminal", hosted::exec::terminal, Class::Other),
    ("exec-killed", hosted::exec::killed, Class::SmpOrKill),
    ("kernel-features", hosted::features::features, Class::Other),
    ("kernel-tracing", hosted::tracing::tracing, Class::SmpOrKill),
    ("names", hosted::names::names, Class::SmpOrKill),
    ("counters", hosted::counters::counters, Class::SmpOrKill),
    ("doctor", hosted::host::doctor, Class::Other),
    ("limits", hosted::host::limits, Class::Other),
    ("addresses", hosted::addresses::fixed, Class::Other),
    ("commands", hosted::commands::documented, Class::SmpOrKill),
    ("refusals", hosted::refusals, Class::Other),
    ("profile", hosted::wedge::profile, Class::Other),
    ("escapes", hosted::escapes, Class::Other),
    ("escape-keys", hosted::escape::keys, Class::Other),
    ("escape-mapper", hosted::escape::mapper, Class::Other),
    ("escape-requests", hosted::escape::requests, Class::Other),
    ("escape-processes", hosted::escape::processes, Class::SmpOrKill),
    ("escape-affinity", hosted::escape::affinity, Class::Other),
    ("escape-codes", hosted::escape::codes, Class::Other),
    ("escape-setup", hosted::setup::order, Class::Other),
    ("escape-table", hosted::words::documented, Class::Other),
    ("functions", hosted::wedge::functions, Class::Other),
    ("calls", hosted::wedge::calls, Class::Other),
    ("ladder", hosted::wedge::ladder, Class::SmpOrKill),
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
    ("api", hosted::control::api, Class::SmpOrKill),
    ("boot", hosted::control::boot, Class::SmpOrKill),
    ("config", hosted::control::config, Class::Other),
    ("gdb", hosted::debugger::session, Class::SmpOrKill),
    ("json", hosted::observed::json, Class::Other),
    ("serial", hosted::observed::serial, Class::Other),
    ("perf-map", hosted::observed::perf_map, Class::Other),
    ("idle", hosted::observed::idle, Class::Other),
    ("steal", hosted::observed::steal, Class::SmpOrKill),
    ("protection-apart", keys::apart, Class::SmpOrKill),
    ("protection-choices", keys::choices, Class::Other),
    ("isolation", isolation::modes, Class::SmpOrKill),
    ("many-events", isolation::many_events, Class::SmpOrKill),
    ("refused-mappings", refusals::mappings, Class::SmpOrKill),
];
/// The package, which takes minutes to build, and tools of others with it, in a long run.
const TOOLS: &[(&str, Body)] = &[
    ("package", hosted::package::unpacked),
    ("tools-debos", shows::debos),
    ("tools-debvm", shows::debvm),
    ("tools-vng", shows::virtme_ng),
    ("tools-ci", shows::job),
    ("tools-trace", shows::tracers),
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
/// Guests with protection keys: long, or short.
const KEYS: &[(&str, Attack)] = &[
    ("protection", keys::protection),
    ("protection-copies", keys::copies),
    ("random-programs-keys", fuzz::keys),
];
/// Seconds of the stress of such a machine, and the variable that says more.
const STRESS_SECONDS: u32 = 10;
const STRESS: &str = "PARADOR_STRESS_SECONDS";

/// All tests, in the order in which they start. `seconds`: length of the load of those that have
/// one.
fn tests(seconds: u32) -> Vec<Test> {
    let is_long = seconds > STRESS_SECONDS;
    // The kernel is built here if need be; the tests that boot it come last.
    let mut tests = vec![Test::new("previrt/verify", Class::Other, previrt::verify)];
    tests.push(Test::new("afterburn/small-kernel", Class::Other, afterburn::small_kernel));
    for &(name, description, code, message) in REFUSALS {
        let body = move || refusal(description, code, message);
        tests.push(Test::new(format!("refuses/{name}"), Class::Other, body));
    }
    if is_long {
        let name = format!("{}/linux-686-pae/1-cpu", Backend::NativeX86Vtlb);
        tests.push(Test::new(name, Class::Other, pae::run));
        for cpus in DEBIAN_CPUS {
            for (backend, vtlb) in
                [(Backend::NativeX86Npt, ""), (Backend::NativeX86Vtlb, vtlb::KEY)]
            {
                let name = format!("{backend}/debian/{cpus}-cpu");
                let body = move || debian::run(backend, cpus, vtlb);
                tests.push(Test::new(name, Class::SmpOrKill, body).with_qemu_threads(cpus));
            }
        }
        let arm = Backend::NativeArm64Vhe;
        let body = move || debian::run(arm, 4, "");
        let test = Test::new(format!("{arm}/debian/4-cpu"), Class::SmpOrKill, body);
        tests.push(test.with_qemu_threads(4));
    }
    for scenario in scenarios(is_long) {
        let more = if is_long { scenario.long_cpus } else { &[] };
        for &backend in scenario.backends {
            for &cpus in scenario.cpus.iter().chain(more) {
                let name = format!("{backend}/{}/{cpus}-cpu", scenario.name);
                let (class, scenario) = (scenario.class(cpus), scenario.clone());
                let test = Test::new(name, class, move || scenario.run(backend, cpus));
                tests.push(test.with_qemu_threads(cpus));
            }
        }
    }
    let next = || {
        let system = format!("{HEAD}{}", micro("guest", "exits", CONSOLE));
        bochs::next_instruction(&Backend::NativeX86Npt.describe(&system))
    };
    tests.push(Test::new("bochs/next-instruction", Class::Other, next));
    tests.extend(arm64_tests());
    tests.extend(kvm_tests());
    tests.extend(previrt_tests());
    tests.extend(hosted_tests(seconds));
    let randomized = || previrt::randomized(2);
    tests.push(Test::new("previrt/raw-randomized/2-cpu", Class::SmpOrKill, randomized));
    let names: Vec<_> = tests.iter().map(|test| test.name.clone()).collect();
    tests.push(Test::new("docs/named-tests", Class::Other, move || docs::named(&names)));
    tests
}

/// The kernel for AArch64 without a system.
fn arm64_tests() -> Vec<Test> {
    let mut tests = Vec::new();
    for (processor, cpus, has_vhe) in FIRST {
        let class = if cpus > 1 { Class::SmpOrKill } else { Class::Other };
        let backend = if has_vhe { Backend::NativeArm64Vhe } else { Backend::NativeArm64NoVhe };
        let name = format!("{backend}/first-{processor}/{cpus}-cpu");
        tests.push(Test::new(name, class, move || arm64::first(processor, cpus, has_vhe)));
    }
    for (name, machine, processor, reason) in arm64::REFUSED {
        let body = move || arm64::refused(machine, processor, reason);
        tests.push(Test::new(format!("native-arm64-vhe/refuses-{name}"), Class::Other, body));
    }
    tests
}

/// VMs of `parador run` by KVM: micro-guests, and Linux guests. The first test of a batch runs it,
/// so that those come first: no test waits for a batch while it could run one.
fn kvm_tests() -> Vec<Test> {
    let batches = [kvm::micro_guests(), hosted::linux::by_kvm()].map(Arc::new);
    let mut tests = Vec::new();
    for batch in &batches {
        for (index, name) in batch.names().enumerate() {
            let has_one_cpu = GUESTS.iter().any(|&(guest, cpus, ..)| guest == name && cpus == 1);
            let class = if has_one_cpu { Class::Other } else { Class::SmpOrKill };
            let batch = Arc::clone(batch);
            let name = format!("{}/{name}", Backend::Kvm);
            tests.push((index, Test::new(name, class, move || batch.check(index))));
        }
    }
    tests.sort_by_key(|&(index, _)| index);
    tests.into_iter().map(|(_, test)| test).collect()
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
    tests.extend(LINUX.iter().map(|linux| {
        let name = format!("{}/{}", Backend::Process, linux.name);
        Test::new(name, Class::SmpOrKill, || linux.in_processes())
    }));
    for &(name, body) in KEYS {
        let name = format!("hosted/{name}");
        let test = Test::new(name, Class::SmpOrKill, move || body(is_long));
        tests.push(test.with_qemu_threads(keys::HOST_CPUS));
    }
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
        tests.push(named("oci-podman", Class::SmpOrKill, hosted::oci::podman::as_root));
        tests.push(named("oci-podman-rootless", Class::SmpOrKill, hosted::oci::podman::rootless));
        tests.push(named("oci-docker", Class::SmpOrKill, hosted::oci::docker::containers));
        tests.push(named("oci-cri", Class::SmpOrKill, hosted::oci::containerd::pods));
        tests.push(named("kubernetes", Class::SmpOrKill, hosted::oci::kubernetes::cluster));
        tests.push(named("oci-systemd", Class::SmpOrKill, hosted::oci::systemd::systemd));
        tests.extend(TOOLS.iter().map(|&(name, body)| named(name, Class::Other, body)));
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
