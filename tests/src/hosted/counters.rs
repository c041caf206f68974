//! Counters of devices, times of vCPUs and the guest's memory, as `parador ctl stats` reports them,
//! against what the guest's kernel has counted.

use super::control::Controlled;
use super::{Rig, SLOW, start};
use anyhow::{Context, Result, ensure};
use proto::hosted::latency;
use serde_json::{Value, json};
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;
use std::thread::sleep;
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Bytes of frames that may be on their way when the guest reads its counters.
const ON_THE_WAY: u64 = 4096;
/// Difference of memory between two reports.
const CHANGE: u64 = 32 * MIB;
/// Least CPU time of the guest's loop of a second, in milliseconds, on a busy host.
const BUSY_MS: u64 = 200;
/// Longest answer, beside other tests.
const PROMPT: Duration = Duration::from_secs(20);

/// The guest uses each device, and writes its own counters to the shared directory.
const SCRIPT: &str = "mkdir /h; mount -t 9p -o trans=virtio,version=9p2000.L,msize=65560 host /h
    ifconfig eth0 10.0.0.2 up; until ping -c 1 -W 1 10.0.0.1 >/dev/null; do :; done
    ping -c 5 -s 1000 10.0.0.1
    dd if=/dev/zero of=/dev/vdb bs=1M count=8 conv=fsync
    dd if=/dev/vdb of=/dev/null bs=1M count=4 iflag=direct
    dd if=/dev/zero of=/dev/vdc bs=1M count=2 conv=fsync
    dd if=/h/data of=/dev/null bs=64k; dd if=/dev/zero of=/h/out bs=64k count=16
    timeout 1 sh -c 'while :; do :; done' || true
    cat /sys/block/vdb/stat >/h/vdb; cat /sys/block/vdc/stat >/h/vdc
    (cd /sys/class/net/eth0/statistics; cat rx_packets rx_bytes tx_packets tx_bytes) >/h/net
    cat /proc/meminfo >/h/memory; touch /h/counted; until [ -e /h/go ]; do sleep 0.1; done
    cd /sys/bus/virtio/drivers/virtio_balloon; for i in virtio*; do echo $i >unbind; done
    touch /h/unbound; until [ -e /h/end ]; do sleep 0.1; done; echo to the end\n";

/// Waits for a file of the guest's.
fn appears(path: &Path) -> Result<()> {
    let deadline = Instant::now() + SLOW;
    while !path.exists() {
        ensure!(Instant::now() < deadline, "no {}", path.display());
        sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Returns the statistics, and the time until the answer.
pub(super) fn stats(machine: &Controlled<'_>) -> Result<(Value, Duration)> {
    let asked = Instant::now();
    let text = machine.told(&["stats"], 0, "\"disks\"")?;
    Ok((serde_json::from_str(&text).context("no JSON")?, asked.elapsed()))
}

pub(super) fn number(value: &Value) -> Result<u64> {
    value.as_u64().with_context(|| format!("no number: {value}"))
}

/// Returns the numbers in a file.
fn numbers(path: &Path) -> Result<Vec<u64>> {
    let text = fs::read_to_string(path).with_context(|| format!("no {}", path.display()))?;
    let numbers = text.split_whitespace().map(str::parse).collect::<Result<_, _>>();
    numbers.with_context(|| format!("{}: {text}", path.display()))
}

/// Figures of devices equal those of the guest's kernel, times are those of vCPUs, and a guest
/// without a driver delays nothing.
pub fn counters() -> Result<()> {
    let rig = Rig::new()?;
    let shared = rig.path("shared");
    fs::create_dir(&shared).context("cannot make a folder")?;
    fs::write(shared.join("data"), vec![7; 3 * MIB as usize]).context("cannot write a file")?;
    File::create(rig.path("raw")).and_then(|file| file.set_len(16 * MIB))?;
    let mut image = Command::new("qemu-img");
    image.args(["create", "-q", "-f", "qcow2", "image.qcow2", "16M"]).current_dir(rig.folder());
    super::succeed(&mut image)?;
    let mut peer = rig.run();
    peer.args(["--net", "switch=lan", "-p"]);
    peer.arg("parador.run=\"ifconfig eth0 10.0.0.1 up; while :; do sleep 9; done\"");
    let mut peer = start(&mut peer)?;
    let done = measure(&rig, &shared);
    peer.kill().and_then(|()| peer.wait()).context("cannot end parador")?;
    done
}

fn measure(rig: &Rig, shared: &Path) -> Result<()> {
    let mut run = rig.script(SCRIPT, &[])?;
    run.args(["-c", "2", "-d", "raw", "-d", "image.qcow2,id=image", "--share", "shared:host"]);
    let machine = Controlled::start(rig, run.args(["--net", "switch=lan"]))?;
    appears(&shared.join("counted"))?;
    let (now, _) = stats(&machine)?;
    disks(&now, shared)?;
    let share = &now["shares"][0];
    ensure!(share["tag"] == "host" && share["read"]["bytes"] == 3 * MIB, "{share}");
    ensure!(number(&share["write"]["bytes"])? >= MIB, "{share}");
    ensure!(number(&share["other"]["requests"])? > 10, "{share}");
    for op in ["read", "write"] {
        ensure!(times_in(&share[op])? == number(&share[op]["requests"])?, "{op}: {share}");
    }
    network(&now["nets"][0], &numbers(&shared.join("net"))?)?;
    memory(&now["guest_memory"], &shared.join("memory"))?;
    times(&now)?;
    // The same figures as metrics.
    let bytes = &now["disks"][1]["write"]["bytes"];
    machine.told(
        &["metrics"],
        0,
        &format!("disk_written_bytes_total{{disk=\"disk1\"}} {bytes}\n"),
    )?;
    let requests = &now["disks"][1]["write"]["requests"];
    let metric = "disk_request_seconds_bucket{disk=\"disk1\",op=\"write\",le=\"+Inf\"}";
    machine.told(&["metrics"], 0, &format!("{metric} {requests}\n"))?;
    machine.told(&["top", "-n", "1"], 0, "  disk1 write bytes\n")?;
    machine.told(&["top", "-n", "1"], 0, "  disk1 write p99 us\n")?;

    balloon(&machine)?;

    File::create(shared.join("go")).context("cannot write a file")?;
    appears(&shared.join("unbound"))?;
    let ages = [(); 4].map(|()| {
        sleep(Duration::from_millis(600));
        let (now, time) = stats(&machine)?;
        ensure!(time < PROMPT, "{time:?} for an answer");
        number(&now["guest_memory"]["age_ms"])
    });
    let [first, .., last] = ages;
    ensure!(last? >= first? + 1000, "a guest without a driver reports");
    File::create(shared.join("end")).context("cannot write a file")?;
    let (code, messages) = machine.wait()?;
    ensure!(code == Some(0), "{code:?}: {messages}");
    Ok(())
}

/// Changes the balloon while the guest runs.
fn balloon(machine: &Controlled<'_>) -> Result<()> {
    let free = |target: u64, is_reached: &dyn Fn(u64) -> bool| -> Result<u64> {
        let deadline = Instant::now() + SLOW;
        loop {
            let (now, _) = stats(machine)?;
            ensure!(now["balloon_bytes"] == target, "{}", now["balloon_bytes"]);
            let free = number(&now["guest_memory"]["free_bytes"])?;
            if is_reached(free) {
                return Ok(free);
            }
            ensure!(
                Instant::now() < deadline,
                "{free} bytes are free, with {target} in the balloon"
            );
            sleep(Duration::from_millis(600));
        }
    };
    let before = free(0, &|_| true)?;
    machine.told(&["balloon", "100G"], 1, "leaves the guest less than 64 MiB")?;
    machine.told(&["balloon", "96M"], 0, "running")?;
    let less = free(96 * MIB, &|free| free + 96 * MIB < before + CHANGE)?;
    machine.told(&["balloon", "0K"], 0, "running")?;
    free(0, &|free| free + CHANGE > less + 96 * MIB)?;
    Ok(())
}

/// Compares with the guest's statistics of disks (Linux' `Documentation/block/stat.rst`).
fn disks(now: &Value, shared: &Path) -> Result<()> {
    for (index, name, file) in [(1, "disk1", "vdb"), (2, "image", "vdc")] {
        let disk = &now["disks"][index];
        let guest = numbers(&shared.join(file))?;
        ensure!(disk["name"] == name, "{disk}");
        for (op, requests, sectors) in [("read", 0, 2), ("write", 4, 6)] {
            let host = &disk[op];
            // The guest's kernel counts a flush as a write, too.
            let flushes = if op == "write" { number(&disk["flush"]["requests"])? } else { 0 };
            let all = number(&host["requests"])? + flushes;
            ensure!(all == guest[requests], "{name} {op}: {disk}, {guest:?}");
            ensure!(host["bytes"] == guest[sectors] * 512, "{name} {op}: {host}, {guest:?}");
            let (time, longest) = (number(&host["time_ns"])?, number(&host["max_ns"])?);
            ensure!(0 < longest && longest <= time && host["failed"] == 0, "{name} {op}: {host}");
            ensure!(times_in(host)? == number(&host["requests"])?, "{name} {op}: {host}");
        }
        ensure!(number(&disk["flush"]["requests"])? > 0, "{disk}");
    }
    ensure!(number(&now["disks"][1]["read"]["bytes"])? >= 4 * MIB, "{now}");
    ensure!(number(&now["disks"][1]["write"]["bytes"])? >= 8 * MIB, "{now}");
    Ok(())
}

/// Returns the number of times in a histogram, whose last bucket holds the longest time.
fn times_in(host: &Value) -> Result<u64> {
    let histogram = host["histogram"].as_array().context("no histogram")?;
    let counts = histogram.iter().map(number).collect::<Result<Vec<_>>>()?;
    ensure!(counts.len() == latency::bucket(number(&host["max_ns"])?) + 1, "{host}");
    Ok(counts.iter().sum())
}

/// Compares with the guest's counters of its card.
fn network(net: &Value, guest: &[u64]) -> Result<()> {
    for (direction, guest) in [("receive", &guest[..2]), ("transmit", &guest[2..])] {
        let (frames, bytes) =
            (number(&net[direction]["frames"])?, number(&net[direction]["bytes"])?);
        let is_near = |host: u64, guest: u64, most: u64| host >= guest && host - guest <= most;
        ensure!(
            is_near(frames, guest[0], 32) && is_near(bytes, guest[1], ON_THE_WAY),
            "{direction}: {net}, {guest:?}"
        );
        ensure!(bytes >= 5 * 1042 && net[direction]["dropped"] == 0, "{net}");
    }
    ensure!(number(&net["transmit"]["time_ns"])? > 0 && times_in(&net["transmit"])? > 0, "{net}");
    ensure!(net["receive"]["histogram"] == json!([]), "{net}");
    Ok(())
}

/// Compares with `/proc/meminfo` of the guest.
fn memory(reported: &Value, file: &Path) -> Result<()> {
    let text = fs::read_to_string(file).context("no /proc/meminfo")?;
    let guest = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_suffix(" kB"));
        let kibibytes = line.and_then(|line| line.trim().parse::<u64>().ok());
        kibibytes.map(|kibibytes| kibibytes << 10).with_context(|| format!("no {name}: {text}"))
    };
    ensure!(reported["total_bytes"] == guest("MemTotal:")?, "{reported}\n{text}");
    for (name, value) in [("MemFree:", "free_bytes"), ("MemAvailable:", "available_bytes")] {
        let difference = number(&reported[value])?.abs_diff(guest(name)?);
        ensure!(difference < CHANGE, "{value}: {reported}\n{text}");
    }
    ensure!(number(&reported["minor_faults"])? > 0 && number(&reported["age_ms"])? < 5000);
    Ok(())
}

/// Checks the times of both vCPUs.
fn times(now: &Value) -> Result<()> {
    let uptime = number(&now["uptime_ms"])?;
    let vcpus = now["vcpu_times"].as_array().context("no times")?;
    let mut busy = 0;
    for vcpu in vcpus {
        let [run, steal, idle] =
            ["run_ms", "steal_ms", "idle_ms"].map(|state| number(&vcpu[state]));
        let (run, steal, idle) = (run?, steal?, idle?);
        // Its processes run one after the other, but on a busy host two may wait for a host CPU.
        let all = run + steal + idle;
        ensure!(run > 0 && all >= uptime && all <= 2 * uptime, "{vcpu} of {uptime} ms");
        busy += run;
    }
    ensure!(vcpus.len() == 2 && busy >= BUSY_MS && busy <= 2 * uptime, "{vcpus:?}");
    Ok(())
}
