//! Tracing in the guest kernel: ftrace, kprobes, uprobes, and code that Linux patches beside
//! rewritten sites, under load on two vCPUs.

use super::exec::exec;
use super::{Rig, succeed, succeed_with};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::process::Command;

/// Section of the sites (docs/spec/sites.md).
const SITES: &str = "parador_sites_1";
/// Length of a record there.
const RECORD: usize = 8;
/// Kinds of sites with probes, by their numbers in the section.
const KINDS: [(u8, &str); 6] =
    [(0, "cli"), (1, "sti"), (5, "save_fl"), (17, "rdmsr"), (18, "wrmsr"), (40, "rd_seg")];
/// Number of sites of each kind with probes.
const EACH: usize = 24;

/// Traces while programs start and end. `sites` has lines of a kind and an address.
const SCRIPT: &str = r#"
set -eu
PATH=$PATH:/usr/sbin:/sbin
at=$PWD
cd /sys/kernel/tracing
fail() { echo "FAILED $*"; }
hits() { awk -v name="$1" '$1 == name { sum += $2 } $2 == name { sum += $3 } END { print sum + 0 }' kprobe_profile uprobe_profile; }
some() { [ "$2" -gt 0 ] && echo "some $1" || fail "no $1"; }
recorded() { cat per_cpu/cpu*/stats | awk '/^(entries|overrun):/ { sum += $2 } END { print sum + 0 }'; }
work() { /bin/true; /bin/true; dd if=/dev/zero bs=512 count=100 2>/dev/null | cat >/dev/null; }
load() { while [ -e /tmp/load ]; do work; done; }
touch /tmp/load
load & load &

# Functions, their graph, and instruction patching for both, under load.
for tracer in function function_graph; do
    echo "$tracer" >current_tracer
    work
    some "$tracer" "$(recorded)"
    echo nop >current_tracer
    echo >trace
done

# Static keys and tracepoints.
for n in 1 2 3; do
    echo 1 >/proc/sys/kernel/task_delayacct
    echo 1 >/proc/sys/kernel/bpf_stats_enabled
    for group in sched irq raw_syscalls kmem; do echo 1 >events/$group/enable; done
    work
    for group in sched irq raw_syscalls kmem; do echo 0 >events/$group/enable; done
    echo 0 >/proc/sys/kernel/task_delayacct
    echo 0 >/proc/sys/kernel/bpf_stats_enabled
done
some tracepoints "$(recorded)"
echo >trace

# Probes at functions (by ftrace) and in them: a handler sees the guest's interrupt flag.
echo 'p:open do_sys_openat2 flags=%flags file=+0($arg2):ustring' >>kprobe_events
echo 'p:tick update_process_times flags=%flags' >>kprobe_events
echo 'r:opened do_sys_openat2 $retval' >>kprobe_events
echo 'p:banner do_sys_openat2 text=+0(@linux_banner):x8 name=@linux_banner:string' >>kprobe_events
for n in 1 2; do
    echo 1 >events/kprobes/enable
    work
    sleep 0.1
    echo 0 >events/kprobes/enable
done
for name in open tick opened; do some "$name" "$(hits $name)"; done
cat trace >/tmp/trace
enabled() { grep "$1: " /tmp/trace | sed 's/.*flags=0x//; s/ .*//' | while read -r flags; do echo $((0x$flags >> 9 & 1)); done | sort -u | tr '\n' ' '; }
echo "open: $(enabled open)tick: $(enabled tick)"
grep -q 'file="/bin/true"\|file="/lib.*libc.so.6"' /tmp/trace || fail 'no file name'
grep -q 'name="Linux version' /tmp/trace || fail 'no string of the image'
echo >kprobe_events
echo >trace

# Probes at rewritten sites: accepted, or refused as others are, with a reason.
: >error_log
while read -r kind address; do
    echo "p:${kind}_$address _text+$address" >>kprobe_events 2>/dev/null || echo "$kind" >>/tmp/refused
done <"$at/sites"
grep -o 'error: .*' error_log | grep -v 'instruction boundary\|Failed to register\|non-probable\|blacklist' && fail 'an unknown reason'
echo "probes at sites: $(grep -c . kprobe_events), refused $(grep -c . /tmp/refused)"
for n in 1 2; do
    echo 1 >events/kprobes/enable || fail 'to enable probes'
    work
    sleep 0.2
    echo 0 >events/kprobes/enable
done
for kind in $(cut -d' ' -f1 "$at/sites" | sort -u); do
    echo "site $kind: $(awk -v kind="$kind" 'index($1, kind "_") == 1 { sum += $2; all++ } END { print sum + 0, "hits of", all + 0 }' kprobe_profile)"
done
some sites "$(awk '{ sum += $2 } END { print sum + 0 }' kprobe_profile)"
some cli "$(awk 'index($1, "cli_") == 1 { sum += $2 } END { print sum + 0 }' kprobe_profile)"
echo >kprobe_events

rm /tmp/load
wait
# Probes of programs: an instruction that is stepped, and a system call.
while read -r name file offset; do
    echo "p:$name $file:$offset" >>uprobe_events
done <"$at/programs"
echo 1 >events/uprobes/enable
for n in 1 2 3 4 5; do /bin/true; done
dd if=/dev/zero of=/dev/null bs=1 count=300 2>/dev/null
echo 0 >events/uprobes/enable
echo "start $(hits start)"
[ "$(hits write)" -ge 300 ] && echo "some write" || fail "write $(hits write)"
echo >uprobe_events
work
! dmesg | grep -E 'BUG:|WARNING:|Oops|Call Trace|ftrace_bug'
echo all well
"#;

/// Texts that the output must contain.
const ANSWERS: [&str; 12] = [
    "some function\n",
    "some function_graph\n",
    "some tracepoints\n",
    "some open\n",
    "some tick\n",
    "some opened\n",
    "open: 1 tick: 0 \n",
    "some sites\n",
    "some cli\n",
    "start 5\n",
    "some write\n",
    "all well\n",
];

/// Functions, tracepoints, static keys, probes at functions, sites and programs.
pub fn tracing() -> Result<()> {
    let rig = Rig::new()?;
    fs::write(rig.path("script"), SCRIPT).context("cannot write the script")?;
    fs::write(rig.path("sites"), sites(&rig)?).context("cannot write the sites")?;
    fs::write(rig.path("programs"), programs()?).context("cannot write the programs")?;
    let command = ["-c", "2", "/", "--", "sh", "script"];
    let output = exec(&rig).args(command).output().context("cannot start parador")?;
    let [out, err] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    let missing = ANSWERS.iter().find(|text| !out.contains(**text));
    let is_good = output.status.success() && missing.is_none() && !out.contains("FAILED");
    ensure!(is_good, "{:?}, missing {missing:?}:\n{out}\n{err}", output.status);
    Ok(())
}

/// Lists sites of some kinds, as distances from the symbol `_text`, spread over the kernel.
fn sites(rig: &Rig) -> Result<String> {
    let kernel = rig.kernel();
    let copy = rig.path("table");
    let mut extract = Command::new("objcopy");
    succeed(extract.args(["-O", "binary", "-j", SITES]).args([kernel, &copy]))?;
    let symbols = succeed_with(Command::new("nm").arg(kernel))?;
    let symbol = symbols.lines().find_map(|line| line.strip_suffix(" T _text"));
    let start = hexadecimal(symbol.context("no symbol _text")?)?;
    let sections = succeed_with(Command::new("objdump").args(["-h", "-w"]).arg(kernel))?;
    let section = sections.lines().find(|line| line.contains(SITES));
    let base = section.and_then(|line| line.split_whitespace().nth(3)).context("no sites")?;
    let base = hexadecimal(base)?;
    let table = fs::read(&copy).context("cannot read the table")?;
    let mut text = String::new();
    for (kind, name) in KINDS {
        let mut places = Vec::new();
        for (index, record) in table.chunks_exact(RECORD).enumerate() {
            let [a, b, c, d, _, _, number, flags] = *record else { continue };
            // The others are texts of alternatives.
            let is_rewritten = flags & 1 == 0;
            if number == kind && is_rewritten {
                let record = base + (index * RECORD) as u64;
                let offset = i32::from_le_bytes([a, b, c, d]);
                places.push(record.wrapping_add_signed(offset.into()).wrapping_sub(start));
            }
        }
        let step = places.len().div_ceil(EACH).max(1);
        for place in places.iter().step_by(step) {
            text += &format!("{name} {place}\n");
        }
    }
    Ok(text)
}

/// Returns places in files of this host, which are the guest's: the first instruction of a program,
/// and the system call of a function of the C library.
fn programs() -> Result<String> {
    const PROGRAM: &str = "/bin/true";
    const LIBRARY: &str = "/lib/x86_64-linux-gnu/libc.so.6";
    const SYSCALL: [u8; 2] = [0x0f, 0x05];
    let header = succeed_with(Command::new("readelf").args(["-h", PROGRAM]))?;
    let entry = header.lines().find_map(|line| line.trim().strip_prefix("Entry point address:"));
    let entry = hexadecimal(entry.context("no entry")?.trim().trim_start_matches("0x"))?;
    let symbols = succeed_with(Command::new("nm").args(["-D", LIBRARY]))?;
    let write = symbols.lines().find(|line| line.ends_with(" write@@GLIBC_2.2.5"));
    let write = hexadecimal(write.and_then(|line| line.split(' ').next()).context("no write")?)?;
    // Code is at the same offset in file and memory.
    let library = fs::read(LIBRARY).context("cannot read the C library")?;
    let function = library.get(write as usize..write as usize + 64).context("a short library")?;
    let call = function.windows(2).position(|bytes| bytes == SYSCALL).context("no call")?;
    Ok(format!("start {PROGRAM} {entry:#x}\nwrite {LIBRARY} {:#x}\n", write + call as u64))
}

fn hexadecimal(text: &str) -> Result<u64> {
    u64::from_str_radix(text, 16).with_context(|| format!("`{text}` is no number"))
}
