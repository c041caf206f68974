//! `cargo xtask bench pods`: containers and pods of `parador oci`, beside those of other runtimes
//! in the same run.
//!
//! podman starts containers, and containerd pods by its CRI. Rounds of the runtimes alternate, so
//! that a slow minute of the host meets all of them. Memory and CPU time are those of all processes
//! of a pod: the engine's shim, and what the runtime leaves running.

use crate::report::{self, Figure};
use crate::size_line;
use anyhow::{Context, Result, bail, ensure};
use parador_tests::hosted::oci::containerd::{
    CRUN, CRUN_PATH, Containerd, PARADOR, Pod, RUNC, RUNC_PATH,
};
use parador_tests::hosted::oci::podman::Podman;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

/// Rounds of single containers, commands and pods; the figure is their median.
const CONTAINERS: usize = 10;
const COMMANDS: usize = 15;
const PODS: usize = 8;
/// Pods at once, and rounds of them.
const AT_ONCE: usize = 20;
const ROUNDS_AT_ONCE: usize = 3;
/// Pods of a node, and how many are started at the same time.
const NODE: usize = 110;
const STARTED_TOGETHER: usize = 4;
/// Time in which the CPU time of idle pods is measured, after a pause.
const IDLE: Duration = Duration::from_secs(20);
const PAUSE: Duration = Duration::from_secs(5);
/// Scripts of containers: one that prints its first line and is idle.
const SCRIPT: &str = "echo begun; exec sleep 100000";
const BEGUN: &str = "begun";
/// Parts of the measurement that have pods.
const PARTS_OF_PODS: [&str; 3] = ["pod", "at-once", "node"];
/// Runtimes of pods.
const HANDLERS: [&str; 3] = [PARADOR, RUNC, CRUN];
/// gVisor's runtime (Debian's runsc), which serves podman only.
const RUNSC: &str = "runsc";
const RUNSC_PATH: &str = "/usr/bin/runsc";
const MIB: f64 = 1_048_576.0;

/// Measured values of one row, by runtime.
struct Row {
    key: &'static str,
    values: Vec<(&'static str, Vec<f64>)>,
}

impl Row {
    fn new(key: &'static str, names: impl IntoIterator<Item = &'static str>) -> Self {
        Self { key, values: names.into_iter().map(|name| (name, Vec::new())).collect() }
    }

    fn add(&mut self, name: &str, value: f64) {
        println!("{} {name}: {}", self.key, report::short(value));
        if let Some((_, values)) = self.values.iter_mut().find(|(other, _)| *other == name) {
            values.push(value);
        }
    }

    /// Median and spread of a runtime.
    fn of(&self, name: &str) -> Result<(f64, f64)> {
        let found = self.values.iter().find(|(other, _)| *other == name);
        let mut values = found.map(|(_, values)| values.clone()).unwrap_or_default();
        ensure!(!values.is_empty(), "{}: no value of {name}", self.key);
        values.sort_by(f64::total_cmp);
        let count = values.len();
        let median = f64::midpoint(values[(count - 1) / 2], values[count / 2]);
        Ok((median, if median == 0.0 { 0.0 } else { (values[count - 1] - values[0]) / median }))
    }

    /// The figure of `parador`, relative to that of crun where it states a difference.
    fn figure(&self, title: &str, unit: &'static str, is_difference: bool) -> Result<Figure> {
        let (value, spread) = self.of(PARADOR)?;
        let peer = self.of(CRUN)?.0;
        let value = if is_difference { value - peer } else { value };
        let figure = Figure::new(self.key, title, value, unit)?;
        Ok(Figure { peer: Some(peer), spread, ..figure })
    }

    /// Medians and spreads of all runtimes, for the series.
    fn json(&self) -> Result<Value> {
        let mut object = Map::new();
        for (name, _) in &self.values {
            let (median, spread) = self.of(name)?;
            let [median, spread] = [median, spread].map(report::rounded);
            object.insert((*name).to_owned(), json!({ "median": median, "spread": spread }));
        }
        Ok(Value::Object(object))
    }
}

/// Measures, prints and stores the figures; `part` selects one part, which is only printed.
pub fn measure(part: Option<&str>) -> Result<()> {
    for path in [RUNC_PATH, CRUN_PATH] {
        ensure!(Path::new(path).exists(), "{path} is missing: apt-get install runc crun podman");
    }
    let is_wanted = |name: &str| part.is_none_or(|part| part == name);
    let mut rows = Vec::new();
    if is_wanted("podman") {
        rows.extend(containers()?);
    }
    if PARTS_OF_PODS.iter().any(|part| is_wanted(part)) {
        let mut containerd = Containerd::new()?;
        let measured = pods(&containerd, &is_wanted, &mut rows);
        let ended = measured.and_then(|()| containerd.nothing_left());
        ended.and_then(|()| containerd.end())?;
    }
    if rows.is_empty() {
        bail!("no part `{}`: podman, pod, at-once, node", part.unwrap_or_default());
    }
    let mut figures = figures(&rows)?;
    if part.is_some() {
        report::print(&figures);
        return Ok(());
    }
    let lines = size_line("OCI runtime: ")?;
    figures.push(Figure::new("oci_lines", "front and agent, lines of Rust", lines, "lines")?);
    report::print(&figures);
    report::write_json("bench-pods.json", &figures)?;
    let runtimes: Result<Map<_, _>> =
        rows.iter().map(|row| Ok((row.key.to_owned(), row.json()?))).collect();
    let line = json!({ "figures": report::series(&figures), "runtimes": runtimes? });
    report::append_line("pods.jsonl", &line)?;
    if figures.iter().any(|figure| !figure.holds()) {
        bail!("a figure misses its limit");
    }
    Ok(())
}

/// Titles, units, and which rows state a difference to crun.
const TITLES: [(&str, &str, &str, bool); 7] = [
    ("run_ms", "podman run IMAGE true, above crun", "ms", true),
    ("container_exec_ms", "podman exec CONTAINER true, above crun", "ms", true),
    ("pod_ms", "pod to its container's first line", "ms", false),
    ("pods20_s", "20 pods at once, to the last first line", "s", false),
    ("pod_mib", "memory of a pod with sleep", "MiB", false),
    ("pods_ready", "pods on this host at the same time", "pods", false),
    ("pods_idle_cpu", "CPU of all idle pods", "cores", false),
];

fn figures(rows: &[Row]) -> Result<Vec<Figure>> {
    let mut figures = Vec::new();
    for (key, title, unit, is_difference) in TITLES {
        if let Some(row) = rows.iter().find(|row| row.key == key) {
            figures.push(row.figure(title, unit, is_difference)?);
        }
    }
    Ok(figures)
}

fn milliseconds(action: impl FnOnce() -> Result<()>) -> Result<f64> {
    let start = Instant::now();
    action().map(|()| start.elapsed().as_secs_f64() * 1000.0)
}

/// Options of `podman run`: without podman's own limits, which a host may not permit, and without a
/// network.
const RUN: [&str; 7] =
    ["run", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024", "--network", "none"];

/// A runtime of podman.
struct Runtime {
    name: &'static str,
    program: PathBuf,
    /// Options of podman.
    options: &'static [&'static str],
}

impl Runtime {
    fn call(&self, podman: &Podman, arguments: &[&str]) -> Result<()> {
        let arguments = [self.options, arguments].concat();
        let (code, text) = podman.call_with(&self.program, &arguments, "")?;
        ensure!(code == Some(0), "{} {arguments:?}: {code:?} {text}", self.name);
        Ok(())
    }

    fn run(&self, podman: &Podman) -> Result<()> {
        self.call(podman, &[&RUN[..], &["--rm", "test:1", "true"]].concat())
    }
}

/// Containers of podman, and commands in them.
fn containers() -> Result<[Row; 2]> {
    let podman = Podman::new()?;
    let runtime = |name, program: &Path, options| {
        let program = program.to_owned();
        Runtime { name, program, options }
    };
    let mut runtimes = vec![
        runtime(PARADOR, &podman.runtime, &[]),
        runtime(RUNC, Path::new(RUNC_PATH), &[]),
        runtime(CRUN, Path::new(CRUN_PATH), &[]),
    ];
    let runsc = runtime(RUNSC, Path::new(RUNSC_PATH), &["--runtime-flag", "network=none"]);
    match runsc.run(&podman) {
        Ok(()) => runtimes.push(runsc),
        Err(error) => println!("{RUNSC}: SKIPPED: {error:#}"),
    }
    let names: Vec<&'static str> = runtimes.iter().map(|runtime| runtime.name).collect();
    let mut run = Row::new("run_ms", names.clone());
    for _ in 0..CONTAINERS {
        for runtime in &runtimes {
            run.add(runtime.name, milliseconds(|| runtime.run(&podman))?);
        }
    }
    let mut exec = Row::new("container_exec_ms", names);
    for runtime in &runtimes {
        let container = ["-d", "--name", runtime.name, "test:1", "sleep", "100000"];
        runtime.call(&podman, &[&RUN[..], &container].concat())?;
    }
    for _ in 0..COMMANDS {
        for runtime in &runtimes {
            let exec_true = || runtime.call(&podman, &["exec", runtime.name, "true"]);
            exec.add(runtime.name, milliseconds(exec_true)?);
        }
    }
    for runtime in &runtimes {
        runtime.call(&podman, &["rm", "--force", "--time", "0", runtime.name])?;
    }
    Ok([run, exec])
}

/// A pod with one container.
struct Running {
    pod: Pod,
    container: String,
}

/// Starts a pod, and waits for the first line of its container.
fn start(containerd: &Containerd, name: &str, handler: &str) -> Result<Running> {
    let pod = containerd.run_pod(name, handler)?;
    let container = containerd.run_container(&pod, "main", SCRIPT)?;
    containerd.wait_for_log(name, "main", BEGUN)?;
    Ok(Running { pod, container })
}

fn pods(
    containerd: &Containerd,
    is_wanted: &dyn Fn(&str) -> bool,
    rows: &mut Vec<Row>,
) -> Result<()> {
    if is_wanted("pod") {
        rows.extend(single(containerd)?);
    }
    if is_wanted("at-once") {
        let mut row = Row::new("pods20_s", HANDLERS);
        for round in 0..ROUNDS_AT_ONCE {
            for handler in HANDLERS {
                let names = (0..AT_ONCE).map(|index| format!("{handler}-{round}-{index}"));
                let begun = Instant::now();
                let pods = start_all(containerd, names.collect(), handler, AT_ONCE)?;
                row.add(handler, begun.elapsed().as_secs_f64());
                remove_all(containerd, pods)?;
            }
        }
        rows.push(row);
    }
    if is_wanted("node") {
        rows.extend(node(containerd)?);
    }
    Ok(())
}

/// Time and memory of single pods.
fn single(containerd: &Containerd) -> Result<[Row; 2]> {
    let mut time = Row::new("pod_ms", HANDLERS);
    let mut memory = Row::new("pod_mib", HANDLERS);
    for round in 0..PODS {
        for handler in HANDLERS {
            let name = format!("{handler}-{round}");
            let mut started = None;
            time.add(
                handler,
                milliseconds(|| {
                    started = Some(start(containerd, &name, handler)?);
                    Ok(())
                })?,
            );
            let Running { pod, .. } = started.context("no pod")?;
            // The guest returns free memory.
            sleep(PAUSE);
            memory.add(handler, containerd.cost(&[&pod])?.memory as f64 / MIB);
            containerd.remove_pod(&pod.id)?;
        }
    }
    Ok([time, memory])
}

/// Pods of a node: their number, and the CPU time that they take when idle.
fn node(containerd: &Containerd) -> Result<[Row; 2]> {
    let mut ready = Row::new("pods_ready", HANDLERS);
    let mut idle = Row::new("pods_idle_cpu", HANDLERS);
    for handler in HANDLERS {
        let names = (0..NODE).map(|index| format!("{handler}-node-{index}")).collect();
        let pods = start_all(containerd, names, handler, STARTED_TOGETHER)?;
        sleep(PAUSE);
        let all: Vec<&Pod> = pods.iter().map(|running| &running.pod).collect();
        let before = containerd.cost(&all)?;
        sleep(IDLE);
        let after = containerd.cost(&all)?;
        let answers = |running: &&Running| {
            containerd.exec(&running.container, &["true"]).is_ok_and(|(code, _)| code == 0)
        };
        let alive = pods.iter().filter(answers).count();
        ready.add(handler, alive as f64);
        let used = after.cpu.saturating_sub(before.cpu);
        idle.add(handler, used.as_secs_f64() / IDLE.as_secs_f64());
        println!("memory of {alive} pods of {handler}: {:.0} MiB", after.memory as f64 / MIB);
        remove_all(containerd, pods)?;
    }
    Ok([ready, idle])
}

/// Starts pods with these names, `together` of them at the same time.
fn start_all(
    containerd: &Containerd,
    names: Vec<String>,
    handler: &str,
    together: usize,
) -> Result<Vec<Running>> {
    let parts = split(names, together);
    let start_part = |part: Vec<String>| {
        part.iter().map(|name| start(containerd, name, handler)).collect::<Result<Vec<Running>>>()
    };
    let started = in_parallel(parts, start_part)?;
    Ok(started.into_iter().flatten().collect())
}

fn remove_all(containerd: &Containerd, pods: Vec<Running>) -> Result<()> {
    let remove = |part: Vec<Running>| {
        part.iter().try_for_each(|running| containerd.remove_pod(&running.pod.id))
    };
    in_parallel(split(pods, STARTED_TOGETHER), remove).map(drop)
}

/// Distributes values over this many parts.
fn split<T>(all: Vec<T>, count: usize) -> Vec<Vec<T>> {
    let mut parts: Vec<Vec<T>> = (0..count).map(|_| Vec::new()).collect();
    for (index, value) in all.into_iter().enumerate() {
        parts[index % count].push(value);
    }
    parts
}

/// Carries an action out for each part in a thread of its own.
fn in_parallel<T: Send, R: Send>(
    parts: Vec<T>,
    action: impl Fn(T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let action = &action;
    thread::scope(|scope| {
        let threads: Vec<_> =
            parts.into_iter().map(|part| scope.spawn(move || action(part))).collect();
        let ended = threads.into_iter().map(|thread| match thread.join() {
            Ok(result) => result,
            Err(_) => bail!("a thread has panicked"),
        });
        // All of them have ended before a failure is returned.
        ended.collect::<Vec<_>>().into_iter().collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::promises;

    #[test]
    fn rows_have_medians() {
        let mut row = Row::new("run_ms", HANDLERS);
        for (name, values) in [(PARADOR, [500.0, 700.0]), (RUNC, [1.0, 1.0]), (CRUN, [90.0, 110.0])]
        {
            values.iter().for_each(|value| row.add(name, *value));
        }
        let figure = row.figure("", "ms", true).unwrap();
        assert_eq!((figure.value, figure.peer), (500.0, Some(100.0)));
        assert!((figure.spread - 1.0 / 3.0).abs() < 1e-9);
        assert_eq!(row.figure("", "ms", false).unwrap().value, 600.0);
        assert!(Row::new("run_ms", HANDLERS).of(PARADOR).is_err());
    }

    #[test]
    fn titles_have_limits() {
        for (key, ..) in TITLES {
            assert!(promises::limit(key).is_ok(), "{key}");
        }
        assert!(promises::is_least("pods_ready") && !promises::is_least("pod_ms"));
    }

    #[test]
    fn parts_have_all() {
        assert_eq!(split(vec![1, 2, 3, 4, 5], 2), [vec![1, 3, 5], vec![2, 4]]);
        let sums = in_parallel(vec![1, 2], |value| Ok(value + 1)).unwrap();
        assert_eq!(sums, [2, 3]);
        assert!(
            in_parallel(vec![1, 2], |value| if value == 1 { bail!("x") } else { Ok(()) }).is_err()
        );
    }
}
