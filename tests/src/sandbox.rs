//! Machines where little is allowed: for a user without any capability, in a name space of users,
//! behind a filter of system calls like that of containers; and many at once.

use crate::hosted::{PROMPT, Rig, end, start};
use crate::system::{artifacts, target};
use crate::transcript::Transcript;
use anyhow::{Context, Result, bail, ensure};
use linux_raw_sys::general as linux;
use seccompiler::SeccompCmpArgLen::{Dword, Qword};
use seccompiler::SeccompCmpOp::MaskedEq;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};
use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::time::{Duration, Instant};

/// First argument of this program when it is to run the others behind filters ([`enter`]).
pub const ENTER: &str = "--sandboxed";
/// The same on a host whose kernel has no Landlock, as many have that containers run on.
pub const ENTER_OLD: &str = "--sandboxed-old";
/// First argument of this program when a host is to refuse a system call about some memory
/// ([`enter_refusing`]).
pub const ENTER_REFUSING: &str = "--refusing";
/// Address range of the refusals, which only `guests/linux/fuzz.c` uses: 1 MiB.
const REFUSED: u64 = 0x3000_0000;
/// Machines at once, and memory of each.
const MACHINES: u32 = 20;
const MEMORY: &str = "64M";
/// Time limit for their start on a busy host.
const STARTED: Duration = Duration::from_secs(120);
/// User and group that own nothing.
const UNPRIVILEGED: &str = "65534";

/// System calls that container engines deny with an error (Docker's default profile, "significant
/// syscalls blocked").
const DENIED: [u32; 39] = [
    linux::__NR_acct,
    linux::__NR_add_key,
    linux::__NR_bpf,
    linux::__NR_clock_adjtime,
    linux::__NR_clock_settime,
    linux::__NR_delete_module,
    linux::__NR_finit_module,
    linux::__NR_fsopen,
    linux::__NR_get_mempolicy,
    linux::__NR_init_module,
    linux::__NR_io_uring_setup,
    linux::__NR_ioperm,
    linux::__NR_iopl,
    linux::__NR_kcmp,
    linux::__NR_kexec_file_load,
    linux::__NR_kexec_load,
    linux::__NR_keyctl,
    linux::__NR_mbind,
    linux::__NR_mount,
    linux::__NR_move_mount,
    linux::__NR_move_pages,
    linux::__NR_open_by_handle_at,
    linux::__NR_open_tree,
    linux::__NR_perf_event_open,
    linux::__NR_pidfd_getfd,
    linux::__NR_pivot_root,
    linux::__NR_quotactl,
    linux::__NR_reboot,
    linux::__NR_request_key,
    linux::__NR_set_mempolicy,
    linux::__NR_setns,
    linux::__NR_settimeofday,
    linux::__NR_swapoff,
    linux::__NR_swapon,
    linux::__NR_syslog,
    linux::__NR_umount2,
    linux::__NR_unshare,
    linux::__NR_userfaultfd,
    linux::__NR_vhangup,
];
/// System calls that end the process: Parador must not depend on them
/// (`kernel.yama.ptrace_scope=3`).
const FATAL: [u32; 3] =
    [linux::__NR_ptrace, linux::__NR_process_vm_readv, linux::__NR_process_vm_writev];
/// Flags of `clone` that make name spaces.
const NAME_SPACES: u32 = linux::CLONE_NEWNS
    | linux::CLONE_NEWCGROUP
    | linux::CLONE_NEWUTS
    | linux::CLONE_NEWIPC
    | linux::CLONE_NEWUSER
    | linux::CLONE_NEWPID
    | linux::CLONE_NEWNET;

/// Takes the filters, those of [`ENTER_OLD`] if `is_old`, and becomes the program that `arguments`
/// name. Returns only an error.
pub fn enter(arguments: &[String], is_old: bool) -> Result<()> {
    let (program, rest) = arguments.split_first().context("no program is named")?;
    let mut denied: BTreeMap<i64, Vec<SeccompRule>> =
        DENIED.iter().map(|&call| (call.into(), Vec::new())).collect();
    // One rule for each flag: any of them is enough.
    let flags = (0..32).map(|bit| 1_u32 << bit).filter(|flag| NAME_SPACES & flag != 0);
    let clone = flags.map(|flag| {
        let (mask, flag) = (u64::from(flag), u64::from(flag));
        SeccompRule::new(vec![SeccompCondition::new(0, Dword, MaskedEq(mask), flag)?])
    });
    denied.insert(linux::__NR_clone.into(), clone.collect::<Result<_, _>>()?);
    let fatal = FATAL.iter().map(|&call| (call.into(), Vec::new())).collect();
    // The flags of clone3 are in memory, which a filter cannot read: ENOSYS makes libraries use
    // clone.
    let landlock = [
        linux::__NR_landlock_create_ruleset,
        linux::__NR_landlock_add_rule,
        linux::__NR_landlock_restrict_self,
    ];
    let unknown = landlock.iter().filter(|_| is_old).chain(&[linux::__NR_clone3]);
    let unknown = unknown.map(|&call| (call.into(), Vec::new())).collect();
    for (rules, action) in [
        (denied, SeccompAction::Errno(linux_raw_sys::errno::EPERM)),
        (unknown, SeccompAction::Errno(linux_raw_sys::errno::ENOSYS)),
        (fatal, SeccompAction::KillProcess),
    ] {
        let filter = SeccompFilter::new(rules, SeccompAction::Allow, action, TargetArch::x86_64)?;
        seccompiler::apply_filter(&BpfProgram::try_from(filter)?)?;
    }
    Err(Command::new(program).args(rest).exec()).with_context(|| format!("cannot start {program}"))
}

/// Has the host refuse a system call, whose number comes first, with `ENOMEM` if its first argument
/// is an address in [`REFUSED`]; becomes the program that further arguments name. Returns only an
/// error.
pub fn enter_refusing(arguments: &[String]) -> Result<()> {
    const MASK: u64 = !0xf_ffff;
    let [number, program, rest @ ..] = arguments else { bail!("no program is named") };
    let number = number.parse().context("no number of a system call")?;
    let is_there = SeccompCondition::new(0, Qword, MaskedEq(MASK), REFUSED)?;
    let rules = [(number, vec![SeccompRule::new(vec![is_there])?])].into();
    let refuse = SeccompAction::Errno(linux_raw_sys::errno::ENOMEM);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, TargetArch::x86_64)?;
    seccompiler::apply_filter(&BpfProgram::try_from(filter)?)?;
    Err(Command::new(program).args(rest).exec()).with_context(|| format!("cannot start {program}"))
}

/// Behind filters like those of a container, and without ever asking to trace another process.
pub fn filtered() -> Result<()> {
    let itself = std::env::current_exe().context("no path of this program")?;
    let wrapped = |inner: &Command| {
        let mut command = Command::new(&itself);
        command.arg(ENTER).arg(inner.get_program()).args(inner.get_args());
        if let Some(folder) = inner.get_current_dir() {
            command.current_dir(folder);
        }
        command.envs(inner.get_envs().filter_map(|(name, value)| Some((name, value?))));
        command
    };
    let rig = Rig::new()?;
    end(&mut wrapped(&rig.run()), "echo $((6*7)) is\nmachine-exit 7\n")?
        .well(7, &["\n42 is\n", "the guest ended with code 7"])?;
    // The filters do what they are for.
    let mut unshare = Command::new("unshare");
    let refused = wrapped(unshare.args(["--user", "true"])).output().context("no unshare")?;
    ensure!(!refused.status.success(), "a name space was made: {refused:?}");
    Ok(())
}

/// As a user without capabilities, and in a user namespace without capabilities.
pub fn plain_user() -> Result<()> {
    let rig = Rig::new()?;
    // The other user may have no access to the folders of the user who runs the tests.
    let folder = rig.folder();
    for (from, name) in [
        (target().join("release/parador"), "parador"),
        (artifacts().join("parador-wedge"), "parador-wedge"),
        (rig.kernel().to_owned(), "vmlinux"),
    ] {
        fs::copy(&from, folder.join(name))
            .with_context(|| format!("cannot copy {}", from.display()))?;
    }
    fs::set_permissions(folder, Permissions::from_mode(0o755)).context("cannot open a folder")?;
    let is_root = fs::metadata("/proc/self").context("no /proc")?.uid() == 0;
    let other_user: &[&str] = match is_root {
        true => &["--reuid", UNPRIVILEGED, "--regid", UNPRIVILEGED, "--clear-groups"],
        // That is who runs this already.
        false => &[],
    };
    let without = ["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"];
    // Only a privileged process can reduce its bounding set.
    let less = if is_root { &without[..] } else { &without[1..] };
    let plain = [&["setpriv"][..], other_user, less].concat();
    let name_space = [&["unshare", "--user", "setpriv"][..], &without[1..]].concat();
    for wrapper in [plain, name_space] {
        let mut machine = Command::new(wrapper[0]);
        machine.args(&wrapper[1..]).arg(folder.join("parador")).arg("run");
        machine.arg(folder.join("vmlinux")).args(["-i", "busybox", "--timeout", "120s"]);
        machine.arg("--artifacts").arg(folder).current_dir(folder);
        // Nothing is fetched, so no folder is needed to keep it in.
        machine.env_remove("XDG_CACHE_HOME").env_remove("HOME");
        end(&mut machine, "echo $((6*7)) is\nmachine-exit 9\n")
            .and_then(|ended| ended.well(9, &["\n42 is\n"]))
            .with_context(|| format!("{wrapper:?}"))?;
    }
    Ok(())
}

/// Many at once: all come to their shell, and each ends with its own code.
pub fn crowd() -> Result<()> {
    let rig = Rig::new()?;
    let begin = Instant::now();
    let mut machines = Vec::new();
    for number in 0..MACHINES {
        let mut child = start(rig.run().args(["-m", MEMORY]))?;
        let output = child.stdout.take().context("no output")?;
        machines.push((number, child, Transcript::follow("console", output)));
    }
    for (_, _, console) in &mut machines {
        console.expect(PROMPT, begin + STARTED)?;
    }
    println!("{MACHINES} shells after {:.1} s", begin.elapsed().as_secs_f64());
    for (number, child, _) in &mut machines {
        let input = child.stdin.as_mut().context("no input")?;
        let line = format!("machine-exit {number}\n");
        input.write_all(line.as_bytes()).context("cannot type")?;
    }
    for (number, mut child, console) in machines {
        let code = child.wait().context("cannot wait for parador")?.code();
        if code != Some(number as i32) {
            bail!("machine {number} ended with {code:?}:\n{}", console.text());
        }
    }
    Ok(())
}
