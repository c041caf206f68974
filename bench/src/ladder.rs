//! The ladder of King, Dunlap and Chen (USENIX ATC 2003, figures 9 and 10) with today's mechanisms:
//! a VM in processes of this host, first without any optimisation, then with one more on each rung.

use anyhow::{Context, Result, ensure};
use parador_tests::keys;
use parador_tests::system::parador;
use serde_json::{Map, Value, json};
use std::fmt::Write as _;
use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, Shutdown, TcpListener};
use std::path::Path;
use std::process::Command;
use std::thread;

use crate::chart;
use crate::environments::{self, Environment, Kernels, Times, Userland};
use crate::guest::{Tree, folder};
use crate::hosted::{All, Kind, Outcome, PROGRAM, Row, add, result, row};
use crate::report;

/// A rung, named after the optimisation that it adds to those below.
#[derive(Clone, Copy)]
struct Rung {
    /// Part of the name of its result file.
    name: &'static str,
    title: &'static str,
    /// Optimisation that is off below this rung (`parador run --without`).
    without: &'static str,
    /// Value of `--protection` below this rung, down to the next rung that has one.
    protection: Option<&'static str>,
}

const fn rung(
    name: &'static str,
    title: &'static str,
    without: &'static str,
    protection: Option<&'static str>,
) -> Rung {
    Rung { name, title, without, protection }
}

/// Rungs of a host without protection keys.
const RUNGS: [Rung; 6] = [
    rung("ptrace", "a process that traces, as in 2003", "", None),
    rung("in-process", "+ handled in the process", "in-process", None),
    rung("protection", "+ no changes of mappings", "", Some("remap")),
    rung("spaces", "+ a process per space", "spaces", None),
    rung("sites", "+ rewritten sites", "fast-sites,call-sites,functions", None),
    rung("batches", "+ fault-around, batches", "batches", None),
];
/// Rung that follows [`PROTECTION`] on a host with protection keys.
const KEYS: Rung = rung("keys", "+ protection keys", "", Some("none"));
const PROTECTION: usize = 2;
/// Protection keys need `functions` on every rung.
const KEYED_SITES: Rung = rung("sites", "+ rewritten sites", "fast-sites,call-sites", None);

/// Returns the rungs of a host.
struct Ladder {
    rungs: Vec<Rung>,
    has_keys: bool,
}

impl Ladder {
    fn new(has_keys: bool) -> Self {
        let mut rungs = RUNGS.to_vec();
        if has_keys {
            for rung in rungs.iter_mut().filter(|rung| rung.name == KEYED_SITES.name) {
                *rung = KEYED_SITES;
            }
            rungs.insert(PROTECTION + 1, KEYS);
        }
        Self { rungs, has_keys }
    }

    /// Options of the VM of a rung.
    fn options(&self, number: usize) -> Vec<String> {
        let above = &self.rungs[number + 1..];
        let mut options = Vec::new();
        for rung in above.iter().filter(|rung| !rung.without.is_empty()) {
            options.extend(["--without", rung.without]);
        }
        let keys = self.has_keys.then_some("keys");
        if let Some(how) = above.iter().find_map(|rung| rung.protection).or(keys) {
            options.extend(["--protection", how]);
        }
        options.into_iter().map(str::to_owned).collect()
    }

    fn climb(&self, kernels: &Kernels, number: usize) -> Kernels {
        Kernels { options: self.options(number), ..kernels.clone() }
    }

    /// Writes `target/bench-hosted-NUMBER-NAME.json`.
    fn keep<'a>(
        &self,
        number: usize,
        times: &All,
        rows: impl Iterator<Item = &'a Row>,
    ) -> Result<()> {
        let mut object = Map::new();
        for row in rows {
            object.insert(row.name.to_owned(), result(times, row)?.json());
        }
        object.insert("options".to_owned(), Value::from(self.options(number)));
        let name = self.rungs[number].name;
        report::write_object(&format!("bench-hosted-{number}-{name}.json"), &object)
    }

    fn draw(&self, name: &str, what: &str, rows: &[Row], all: &[All]) -> Result<()> {
        let mut groups = Vec::new();
        for row in rows {
            let outcomes = all.iter().map(|times| result(times, row));
            let outcomes = outcomes.collect::<Result<Vec<_>>>()?;
            let values =
                outcomes.iter().map(|outcome: &Outcome| outcome.time(row, Environment::Parador));
            groups.push(chart::Group { title: row.title.to_owned(), values: values.collect() });
        }
        let title =
            format!("Time in a machine that is processes, relative to the host's own ({what})");
        let legends: Vec<_> = self.rungs.iter().map(|rung| rung.title).collect();
        chart::draw(name, &chart::ratios(&title, &legends, &groups, FAR)?)
    }
}

/// Counts the cost of protection keys in instructions of an emulated processor that has them
/// (QEMU's `-icount shift=0`: one is one nanosecond). The count includes the emulated host's kernel
/// and does not weigh instructions by their latency.
pub fn counted(kernel: &Path) -> Result<()> {
    let ladder = Ladder::new(true);
    let tree = Tree::new("counted", &["sh", "mount", "poweroff"])?;
    tree.program(PROGRAM)?;
    tree.init("host-init")?;
    let guest = tree.pack()?;
    let name = |path: &Path| {
        let name = path.file_name().and_then(|name| name.to_str());
        name.map(str::to_owned).with_context(|| format!("no name: {}", path.display()))
    };
    let run = format!(
        "parador run {} -i {} -m 256M --backend process --artifacts /bin \
         -p 'quiet HB_ROUNDS={COUNTED_ROUNDS} HB_ROW=\"{}\"'",
        name(kernel)?,
        name(&guest)?,
        COUNTED.map(|row| row.name).join(" ")
    );
    let top = ladder.rungs.len() - 1;
    let mut cases = Vec::new();
    for number in [PROTECTION + 1, top] {
        for how in ["none", "keys"] {
            let mut options = ladder.options(number);
            // The last word is the protection mode.
            options.pop();
            options.push(how.to_owned());
            cases.push((number, how, options));
        }
    }
    let mut script = format!("echo '{PART}'; parador doctor --json\n");
    for (number, how, options) in &cases {
        writeln!(script, "echo '{PART}{number} {how}'; {run} {} </dev/null", options.join(" "))?;
    }
    let environment = folder().join("host-with-keys");
    if environment.exists() {
        fs::remove_dir_all(&environment).context("cannot remove an old folder")?;
    }
    fs::create_dir_all(&environment).context("cannot make a folder")?;
    let disk = keys::host_disk(&environment, &(script + "poweroff -f\n"), &[kernel.into(), guest])?;
    println!("counting what protection keys cost, on an emulated processor");
    let arguments = ["-smp", "1", "-icount", "shift=0,sleep=off", "-seed", "1"];
    let console = keys::run_host(&disk, COUNTED_LIMIT, &arguments)?;
    let mut parts = console.split(PART).skip(1);
    // Protection keys are detected as on a real host.
    let report = parts.next().with_context(|| console.clone())?;
    ensure!(found_keys(report.as_bytes())?, "no keys on the emulated processor:\n{report}");
    let parts: Vec<_> = parts.collect();
    ensure!(parts.len() == cases.len(), "{} of {} machines:\n{console}", parts.len(), cases.len());

    let mut times = Vec::new();
    for (part, (number, how, _)) in parts.iter().zip(&cases) {
        ensure!(part.starts_with(&format!("{number} {how}")), "another machine:\n{console}");
        let mut read = Times::default();
        read.read(part);
        times.push(read);
    }
    println!("\n{:<34} {:>10} {:>10} {:>7}  instructions", "what", "none", "keys", "ratio");
    let mut object = Map::new();
    for (pair, cases) in times.chunks(2).zip(cases.chunks(2)) {
        let (number, _, options) = &cases[1];
        let rung = if *number == top { "everything" } else { ladder.rungs[*number].name };
        let mut rows = Map::new();
        for row in COUNTED {
            let of = |times: &Times| -> Result<f64> {
                let (microseconds, _) = times.median(row.name).with_context(|| console.clone())?;
                Ok((microseconds * 1e3).round())
            };
            let (none, keys) = (of(&pair[0])?, of(&pair[1])?);
            let ratio = report::rounded(keys / none);
            println!("{:<34} {none:>10} {keys:>10} {ratio:>7.3}  {rung}", row.title);
            rows.insert(row.name.to_owned(), json!({ "none": none, "keys": keys, "ratio": ratio }));
        }
        rows.insert("options".to_owned(), json!(options));
        object.insert(rung.to_owned(), Value::Object(rows));
    }
    report::write_object("bench-hosted-keys-counted.json", &object)
}

/// Returns true if `parador doctor` reports that hosted VMs can use protection keys on this host.
fn has_keys() -> Result<bool> {
    // The exit code, which reports whether VMs can run, does not matter here.
    let output = parador(&folder()).args(["doctor", "--json"]).output();
    found_keys(&output.context("cannot start parador")?.stdout)
}

fn found_keys(report: &[u8]) -> Result<bool> {
    let report: Value =
        serde_json::from_slice(report).context("`parador doctor` prints no JSON")?;
    let findings = report["findings"].as_array().context("`parador doctor` finds nothing")?;
    let keys = findings.iter().find(|finding| finding["name"] == "protection keys");
    Ok(keys.context("`parador doctor` does not look for protection keys")?["state"] == "ok")
}

/// Rows of King's figure 9.
const SMALL: [Row; 3] = [
    row("null_syscall", "null system call", "us", Kind::Less),
    row("switch", "switch between processes with 64 KiB", "us", Kind::Less),
    row("receive", "10 MiB by TCP", "us", Kind::Less),
];
/// Rows of King's figure 10.
const LARGE: [Row; 3] = [
    row("povray", "POV-Ray", "us", Kind::Less),
    row("compile", "compiling a part of Lua", "us", Kind::Less),
    row("web", "pages of nginx for wrk", "1/s", Kind::More),
];
/// Counted rows and repetitions: counts do not vary between repetitions.
const COUNTED: [Row; 3] = [
    row("null_syscall", "null system call", "ns", Kind::Less),
    row("fork", "fork, exit, wait", "ns", Kind::Less),
    row("pipe", "pipe round trip", "ns", Kind::Less),
];
const COUNTED_ROUNDS: usize = 3;
/// Time limit of the emulated host, in seconds.
const COUNTED_LIMIT: u32 = 1500;
/// Mark before the output of each VM.
const PART: &str = "== ";
/// Number of bytes that the server sends.
const SENT: usize = 10 << 20;
/// Value at the right end of the charts' axes.
const FAR: f64 = 1024.0;

/// A ladder and the times of its rungs.
pub struct Climbed {
    ladder: Ladder,
    all: Vec<All>,
}

/// Measures figure 9 on each rung, draws it, and returns the times.
pub fn small(kernels: &Kernels, rounds: usize) -> Result<Climbed> {
    let ladder = Ladder::new(has_keys()?);
    let tree = Tree::new(
        "ladder",
        &["sh", "mount", "cat", "chmod", "ifconfig", "route", "udhcpc", "poweroff"],
    )?;
    tree.program(PROGRAM)?;
    tree.init("ladder-init")?;
    let port = serve()?;
    tree.text("port", &port.to_string())?;
    let (program, disk) = (tree.path(PROGRAM), tree.pack()?);
    let mut host = All::default();
    for _ in 0..rounds {
        let mut run = Command::new(&program);
        run.env("HB_SERVER", format!("{} {port}", Ipv4Addr::LOCALHOST));
        run.args(SMALL.map(|row| row.name));
        host[Environment::Native as usize].read(&environments::output(&mut run)?);
    }
    let mut all: Vec<All> = Vec::new();
    for (number, rung) in ladder.rungs.iter().enumerate() {
        println!("ladder, {} of {}: {}", number + 1, ladder.rungs.len(), rung.title);
        let kernels = ladder.climb(kernels, number);
        let mut times = All::default();
        for _ in 0..rounds {
            let mut run = environments::with_ram_disk(Environment::Parador, &kernels, &disk, &[])?;
            // The server listens on the loopback address.
            run.args(["--net", "user,hostloopback=on"]);
            times[Environment::Parador as usize].read(&environments::output(&mut run)?);
        }
        add(&mut times, Environment::Native, &SMALL, &host)?;
        ladder.keep(number, &times, SMALL.iter())?;
        all.push(times);
    }
    ladder.draw("ladder-small.svg", "as King et al., figure 9", &SMALL, &all)?;
    Ok(Climbed { ladder, all })
}

/// Measures figure 10 once per rung, the highest first: the lowest rungs take minutes, though they
/// compile little.
pub fn large(kernels: &Kernels, userland: &Userland, climbed: Climbed) -> Result<()> {
    /// Target that is compiled.
    const WORK: [(&str, &str); 1] = [("HB_OBJECTS", "lapi.o")];
    let Climbed { ladder, mut all } = climbed;
    let mut host = All::default();
    host[Environment::Native as usize].read(&userland.run(Environment::Native, kernels, &WORK)?);
    for (number, times) in all.iter_mut().enumerate().rev() {
        println!("ladder, Debian's programs: {}", ladder.rungs[number].title);
        let output = userland.run(Environment::Parador, &ladder.climb(kernels, number), &WORK)?;
        times[Environment::Parador as usize].read(&output);
        add(times, Environment::Native, &LARGE, &host)?;
        ladder.keep(number, times, SMALL.iter().chain(&LARGE))?;
    }
    ladder.draw("ladder-large.svg", "as King et al., figure 10", &LARGE, &all)
}

/// Starts a server that sends data as long as this process runs; returns its port.
fn serve() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen")?;
    let port = listener.local_addr().context("no address")?.port();
    thread::spawn(move || {
        let data = vec![0; SENT];
        for mut stream in listener.incoming().flatten() {
            // A client that disconnects early reports no time.
            let _ = stream.write_all(&data).and_then(|()| stream.shutdown(Shutdown::Write));
        }
    });
    Ok(port)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(has_keys: bool, name: &str) -> String {
        let ladder = Ladder::new(has_keys);
        let number = ladder.rungs.iter().position(|rung| rung.name == name).unwrap();
        ladder.options(number).join(" ")
    }

    #[test]
    fn each_rung_leaves_out_what_is_above_it() {
        assert_eq!(of(false, "batches"), "");
        assert_eq!(of(false, "sites"), "--without batches");
        let protection =
            "--without spaces --without fast-sites,call-sites,functions --without batches";
        assert_eq!(of(false, "protection"), protection);
        assert_eq!(of(false, "in-process"), format!("{protection} --protection remap"));
        let all = format!("--without in-process {protection} --protection remap");
        assert_eq!(of(false, "ptrace"), all);
    }

    #[test]
    fn keys_are_a_rung_where_there_are_some() {
        assert_eq!(of(true, "batches"), "--protection keys");
        let keys = "--without spaces --without fast-sites,call-sites --without batches";
        assert_eq!(of(true, "keys"), format!("{keys} --protection keys"));
        assert_eq!(of(true, "protection"), format!("{keys} --protection none"));
        assert_eq!(of(true, "in-process"), format!("{keys} --protection remap"));
        // Protection keys need each of these.
        assert!(Ladder::new(true).rungs.iter().all(|rung| !rung.without.contains("functions")));
    }

    #[test]
    fn the_doctor_report_is_used() {
        let report = |state| {
            format!(
                r#"{{"findings":[{{"name":"KVM","state":"ok"}},{{"name":"protection keys","state":"{state}"}}]}}"#
            )
        };
        assert!(found_keys(report("ok").as_bytes()).unwrap());
        assert!(!found_keys(report("absent").as_bytes()).unwrap());
        assert!(found_keys(br#"{"findings":[]}"#).is_err());
        assert!(found_keys(b"nothing").is_err());
    }

    #[test]
    fn the_server_sends() {
        use std::io::Read;
        let mut stream =
            std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, serve().unwrap())).unwrap();
        let mut data = Vec::new();
        stream.read_to_end(&mut data).unwrap();
        assert_eq!(data.len(), SENT);
    }
}
