//! RAM disks, and runs of all systems.

use super::columns::{Column, JOBS, Paging};
use super::rows::{self, Costs, Events};
use crate::counted::Counter;
use crate::environments::archive;
use crate::guest::{Tree, folder};
use crate::hosted::{LUA, LUA_DIGEST};
use crate::kvm;
use crate::linux::{Linux, output};
use crate::runs::{self, Bare, Clock, MEMORY, NO_SLEEP, Output, PC};
use crate::statistics::VmStatistics;
use anyhow::{Context, Result, ensure};
use parador_tests::system::artifacts;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// Tests of `vbench`.
const TESTS: &str = "forkwait,forkexec,touchmem,mprot,sockxmit,sweep,lat_ctx,jobs,compile";
/// The C file of Lua that the guest compiles.
const COMPILED: &str = "lstring.c";
/// The compiler that the guest runs, too.
const GCC: &str = "/usr/bin/gcc";
/// The micro-guest.
const MICRO_GUEST: &str = "guest-vtlb";

/// Measurement of one system.
pub struct Measured {
    /// The system.
    pub column: Column,
    /// Rows of `vbench`.
    pub costs: Costs,
    /// Rows of the micro-guest; none on the bare machine, and where only jobs were measured.
    pub micro: Costs,
    /// Statistics of a VM of Parador.
    pub statistics: Option<VmStatistics>,
    /// Events of its vTLB: name and count; none with nested paging.
    pub events: Vec<(String, u64)>,
    /// The same per operation of each row of `vbench`.
    pub events_by_row: Events,
    /// Version of the guest kernel.
    pub guest_kernel: String,
}

/// Kernel and RAM disks.
pub struct Systems {
    kernel: PathBuf,
    guest: PathBuf,
    host: PathBuf,
}

impl Systems {
    /// Builds the RAM disks.
    pub fn new() -> Result<Self> {
        let linux = Linux::fetch()?;
        let guest = guest_disk()?;
        let host = kvm::Host {
            name: "vtlb-host",
            modules: &kvm::KVM,
            guest: &guest,
            micro_guest: MICRO_GUEST,
        };
        Ok(Self { kernel: linux.image()?, host: host.ram_disk(&linux)?, guest })
    }

    /// Measures the systems, as many at once as this host has CPUs, and returns the outcomes in the
    /// same order. Other load changes no count of instructions.
    pub fn run(&self, columns: &[Column]) -> Vec<Result<Measured>> {
        let workers = thread::available_parallelism().map_or(1, usize::from).min(columns.len());
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            loop {
                let index = next.fetch_add(1, Ordering::Relaxed);
                let Some(column) = columns.get(index) else { return done };
                let outcome = self.measure(column).with_context(|| column.name.to_owned());
                if let Err(error) = &outcome {
                    println!("failed: {error:#}");
                }
                done.push((index, outcome));
            }
        };
        let mut done: Vec<(usize, Result<Measured>)> = thread::scope(|scope| {
            let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
            let joined = threads.into_iter().flat_map(|thread| match thread.join() {
                Ok(done) => done,
                Err(panic) => resume_unwind(panic),
            });
            joined.collect()
        });
        done.sort_by_key(|(index, _)| *index);
        done.into_iter().map(|(_, outcome)| outcome).collect()
    }

    fn measure(&self, column: &Column) -> Result<Measured> {
        println!("running: {}", column.title);
        let name = format!("vtlb-{}", column.name);
        let (output, costs) = counted(&name, |arguments| self.linux(column, &name, arguments))?;
        let micro = match column.has_micro_guest() {
            true => {
                let name = format!("{name}-micro");
                counted(&name, |arguments| self.micro_guest(column, &name, arguments))?.1
            }
            false => Costs::new(),
        };
        let statistics = match column.is_parador() {
            true => Some(VmStatistics::read(&output.log)?),
            false => None,
        };
        let events = events(&output.log);
        ensure!(
            events.is_empty() != matches!(column.paging, Paging::Vtlb { .. }),
            "the log has events of a vTLB: {events:?}"
        );
        let events_by_row = rows::read_events(&output.console)?;
        let names = events.len();
        ensure!(
            events_by_row.values().all(|counts| counts.len() == names)
                && events_by_row.is_empty() == (names == 0),
            "the guest has seen other events than the log: {events_by_row:?}"
        );
        let guest_kernel = output.fact("kernel").to_owned();
        println!("finished: {}", column.title);
        let column = *column;
        Ok(Measured { column, costs, micro, statistics, events, events_by_row, guest_kernel })
    }

    /// Runs Linux with the benchmarks.
    fn linux(&self, column: &Column, name: &str, arguments: &[String]) -> Result<Output> {
        let rows = format!(" rows={}", if column.only_jobs { JOBS } else { TESTS });
        let kernel = self.kernel.as_path();
        match column.paging {
            Paging::None => Bare {
                machine: PC,
                memory: MEMORY,
                kernel,
                ram_disk: &self.guest,
                more: &rows,
                icount: NO_SLEEP,
            }
            .run(arguments),
            Paging::Kvm => {
                let line = format!(" what=linux npt=0{rows}");
                kvm::run(kernel, &self.host, &line, NO_SLEEP, arguments)
            }
            Paging::Nested | Paging::Vtlb { .. } => {
                let description = runs::guest_description(&self.guest, &rows, Clock::Tsc);
                let description = description + &column.description();
                runs::system_with(name, &description, NO_SLEEP, arguments)
            }
        }
    }

    /// Runs the micro-guest.
    fn micro_guest(&self, column: &Column, name: &str, arguments: &[String]) -> Result<Output> {
        if column.paging == Paging::Kvm {
            let line = " what=micro npt=0";
            return kvm::run(&self.kernel, &self.host, line, NO_SLEEP, arguments);
        }
        let description = format!(
            "[system]\nboard = \"qemu-q35\"\nlog = \"com2\"\n\n[[vm]]\nname = \"guest\"\n\
             memory = \"16M\"\nkernel = \"{}\"\nconsole = \"com1\"\n{}",
            artifacts().join(MICRO_GUEST).display(),
            column.description()
        );
        runs::system_with(name, &description, NO_SLEEP, arguments)
    }
}

/// Reads the last line `vtlb: name=count ...` of a log.
fn events(log: &str) -> Vec<(String, u64)> {
    const MARK: &str = ": vtlb: ";
    let line = log.lines().rev().find_map(|line| line.split_once(MARK));
    let words = line.into_iter().flat_map(|(_, rest)| rest.split_whitespace());
    let counts = words.filter_map(|word| {
        let (name, count) = word.split_once('=')?;
        Some((name.to_owned(), count.parse().ok()?))
    });
    counts.collect()
}

/// Runs a system and reads what it has measured.
fn counted(name: &str, run: impl Fn(&[String]) -> Result<Output>) -> Result<(Output, Costs)> {
    let counter = Counter::new(name)?;
    let output = run(&counter.entries_only())?;
    let costs = rows::read(&output.console, &counter.read_all()?)
        .with_context(|| format!("{}\n{}", output.console, output.log))?;
    Ok((output, costs))
}

/// Builds the RAM disk with `vbench`, gcc, and a C file with the headers that it includes.
fn guest_disk() -> Result<PathBuf> {
    let tree = Tree::new("vtlb", &["sh", "mount", "echo", "uname", "cat", "tr", "poweroff"])?;
    tree.program("vbench")?;
    tree.init("vtlb-init")?;
    let lua = folder().join("lua");
    std::fs::create_dir_all(&lua).context("cannot make a folder for Lua")?;
    let mut unpack = Command::new("tar");
    unpack.arg("-xzf").arg(archive(LUA, LUA_DIGEST)?).arg("-C").arg(&lua);
    output(unpack.arg("--strip-components=1"))?;
    let compiled = lua.join("src").join(COMPILED);
    for path in with_headers(&compiled)? {
        let in_guest = match path.strip_prefix(lua.join("src")) {
            Ok(_) if path == compiled => "lua/compiled.c".to_owned(),
            Ok(header) => format!("lua/{}", header.display()),
            // gcc's own headers are where it looks for them from /bin.
            Err(_) => match path.strip_prefix("/usr/lib") {
                Ok(own) => format!("lib/{}", own.display()),
                Err(_) => path.display().to_string().trim_start_matches('/').to_owned(),
            },
        };
        tree.file(&path, &in_guest)?;
    }
    tree.dynamic_program(Path::new(GCC), "gcc")?;
    for name in ["cc1", "as"] {
        // gcc names some of its programs without their folders.
        let find = format!("command -v $({GCC} -print-prog-name={name})");
        let path = output(Command::new("sh").args(["-c", &find]))?;
        tree.dynamic_program(Path::new(path.trim()), name)?;
    }
    tree.pack()
}

/// Returns the paths of a C file and of the headers that it includes.
fn with_headers(file: &Path) -> Result<Vec<PathBuf>> {
    let rule = output(Command::new(GCC).arg("-M").arg(file))?;
    let (_, paths) = rule.split_once(": ").context("gcc names no headers")?;
    let paths: Vec<_> = paths.split_whitespace().filter(|word| *word != "\\").collect();
    ensure!(paths.len() > 1, "{} includes nothing", file.display());
    Ok(paths.into_iter().map(PathBuf::from).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_events_of_a_vtlb() {
        let log = "root: vm linux: vtlb: fills=1\nroot: vm linux: statistics: entries=3\n\
                   root: vm linux: vtlb: fills=7 faults=2\nend\n";
        assert_eq!(events(log), [("fills".to_owned(), 7), ("faults".to_owned(), 2)]);
        assert!(events("root: vm linux: statistics: entries=3\n").is_empty());
    }
}
