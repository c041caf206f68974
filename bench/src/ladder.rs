//! The ladder of King, Dunlap and Chen (USENIX ATC 2003, figures 9 and 10), of today's mechanisms: a machine that is processes of this host,
//! without anything that makes it fast, then with one thing after another, each beside all those before it.

use anyhow::{Context, Result};
use serde_json::{Map, Value};
use std::io::Write;
use std::net::{Ipv4Addr, Shutdown, TcpListener};
use std::process::Command;
use std::thread;

use crate::chart;
use crate::guest::Tree;
use crate::hosted::{All, Kind, Outcome, PROGRAM, Row, add, result, row};
use crate::places::{self, Kernels, Place, Userland};
use crate::report;

/// A rung: what it adds to those below it.
struct Rung {
    /// In the name of its file.
    name: &'static str,
    title: &'static str,
    /// What is switched off below it, of `parador run`.
    below: &'static [&'static str],
}

const RUNGS: [Rung; 6] = [
    Rung { name: "ptrace", title: "a process that traces, as in 2003", below: &[] },
    Rung {
        name: "in-process",
        title: "+ handled in the process",
        below: &["--without", "in-process"],
    },
    Rung {
        name: "protection",
        title: "+ no changes of mappings",
        below: &["--protection", "remap"],
    },
    Rung { name: "spaces", title: "+ a process per space", below: &["--without", "spaces"] },
    Rung {
        name: "sites",
        title: "+ rewritten sites",
        below: &["--without", "fast-sites,call-sites,functions"],
    },
    Rung { name: "batches", title: "+ fault-around, batches", below: &["--without", "batches"] },
];

const UNLIMITED: f64 = f64::INFINITY;
/// As in figure 9.
const SMALL: [Row; 3] = [
    row("null_syscall", "null system call", "us", Kind::Less, UNLIMITED),
    row("switch", "switch between processes with 64 KiB", "us", Kind::Less, UNLIMITED),
    row("receive", "10 MiB by TCP", "us", Kind::Less, UNLIMITED),
];
/// As in figure 10.
const LARGE: [Row; 3] = [
    row("povray", "POV-Ray", "us", Kind::Less, UNLIMITED),
    row("compile", "compiling a part of Lua", "us", Kind::Less, UNLIMITED),
    row("web", "pages of nginx for wrk", "1/s", Kind::More, UNLIMITED),
];
/// Bytes that the server sends.
const SENT: usize = 10 << 20;
/// Right end of the drawings' axes.
const FAR: f64 = 1024.0;

/// What the machine of a rung is started with.
fn options(rung: usize) -> Vec<String> {
    RUNGS[rung + 1..].iter().flat_map(|rung| rung.below).map(|word| (*word).to_owned()).collect()
}

/// Measures figure 9 on each rung, draws it, and gives what the rungs have taken.
pub fn small(kernels: &Kernels, rounds: usize) -> Result<Vec<All>> {
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
        host[Place::Native as usize].read(&places::output(&mut run)?);
    }
    let mut all: Vec<All> = Vec::new();
    for (number, rung) in RUNGS.iter().enumerate() {
        println!("ladder, {} of {}: {}", number + 1, RUNGS.len(), rung.title);
        let kernels = climb(kernels, number);
        let mut times = All::default();
        for _ in 0..rounds {
            let mut run = places::with_ram_disk(Place::Parador, &kernels, &disk, &[])?;
            run.args(["--net", "user"]);
            times[Place::Parador as usize].read(&places::output(&mut run)?);
        }
        add(&mut times, Place::Native, &SMALL, &host)?;
        keep(number, &times, SMALL.iter())?;
        all.push(times);
    }
    draw("ladder-small.svg", "as King et al., figure 9", &SMALL, &all)?;
    Ok(all)
}

/// Goes on with figure 10, once for each rung, the highest first: the lowest ones take minutes, though they compile little.
pub fn large(kernels: &Kernels, userland: &Userland, mut all: Vec<All>) -> Result<()> {
    /// What is compiled.
    const WORK: [(&str, &str); 1] = [("HB_OBJECTS", "lapi.o")];
    let mut host = All::default();
    host[Place::Native as usize].read(&userland.run(Place::Native, kernels, &WORK)?);
    for (number, times) in all.iter_mut().enumerate().rev() {
        println!("ladder, Debian's programs: {}", RUNGS[number].title);
        let output = userland.run(Place::Parador, &climb(kernels, number), &WORK)?;
        times[Place::Parador as usize].read(&output);
        add(times, Place::Native, &LARGE, &host)?;
        keep(number, times, SMALL.iter().chain(&LARGE))?;
    }
    draw("ladder-large.svg", "as King et al., figure 10", &LARGE, &all)
}

fn climb(kernels: &Kernels, number: usize) -> Kernels {
    Kernels { options: options(number), ..kernels.clone() }
}

/// Writes `target/bench-hosted-NUMBER-NAME.json`.
fn keep<'a>(number: usize, times: &All, rows: impl Iterator<Item = &'a Row>) -> Result<()> {
    let mut object = Map::new();
    for row in rows {
        object.insert(row.name.to_owned(), result(times, row)?.json());
    }
    object.insert("options".to_owned(), Value::from(options(number)));
    report::write_object(&format!("bench-hosted-{number}-{}.json", RUNGS[number].name), &object)
}

/// A server that sends, for as long as this program runs; gives its port.
fn serve() -> Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen")?;
    let port = listener.local_addr().context("no address")?.port();
    thread::spawn(move || {
        let data = vec![0; SENT];
        for mut stream in listener.incoming().flatten() {
            // Who goes away early has no time to give.
            let _ = stream.write_all(&data).and_then(|()| stream.shutdown(Shutdown::Write));
        }
    });
    Ok(port)
}

fn draw(name: &str, what: &str, rows: &[Row], all: &[All]) -> Result<()> {
    let mut groups = Vec::new();
    for row in rows {
        let outcomes = all.iter().map(|times| result(times, row));
        let outcomes = outcomes.collect::<Result<Vec<_>>>()?;
        let values = outcomes.iter().map(|outcome: &Outcome| outcome.time(row, Place::Parador));
        groups.push(chart::Group { title: row.title.to_owned(), values: values.collect() });
    }
    let title = format!("Time in a machine that is processes, relative to the host's own ({what})");
    let legends = RUNGS.each_ref().map(|rung| rung.title);
    chart::draw(name, &chart::ratios(&title, &legends, &groups, FAR)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_rung_leaves_out_what_is_above_it() {
        assert_eq!(options(RUNGS.len() - 1), Vec::<String>::new());
        assert_eq!(options(RUNGS.len() - 2), ["--without", "batches"]);
        assert_eq!(options(0).len(), 2 * (RUNGS.len() - 1));
        assert_eq!(options(0)[..2], ["--without", "in-process"]);
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
