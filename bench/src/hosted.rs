//! What programs pay in a pre-virtualized guest that runs in processes of this host: times, beside those of the same programs on the host
//! itself and in other machines that are its processes ([`places`](crate::places)).
//!
//! Hosts are noisy: the places take turns, and each figure is the median of all rounds. For computing it is the best one, because
//! whatever disturbs it only adds, and a ratio near 1 is to be told from 1.

use anyhow::{Context, Result, bail};
use parador_tests::debian;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};

use crate::chart;
use crate::guest::{Tree, folder, source};
use crate::ladder;
use crate::places::{self, Kernels, Place, Times, Userland};
use crate::report::{self, Figure, rounded, short};

/// Turns of each place.
const ROUNDS: usize = 5;
/// Turns of what only computes, after each of these.
const AGAIN: usize = 3;
/// Turns with `--quick`.
const QUICK_ROUNDS: usize = 2;
/// The program and its RAM disk's first one.
pub const PROGRAM: &str = "hostbench";
/// What the first program of the RAM disk `start-init` says.
const BEGUN: &str = "init has begun";
/// What is compiled: Debian's sources of Lua.
const LUA: &str = "http://deb.debian.org/debian/pool/main/l/lua5.4/lua5.4_5.4.4.orig.tar.gz";
const LUA_DIGEST: &str = "SHA256:164c7849653b80ae67bec4b7473b884bf5cc8d2dca05653475ec2ed27b9ebf61";
/// Bytes of the page that is served.
const PAGE: usize = 4096;

/// How a row is read.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Medians are compared; less is better.
    Less,
    /// The best are.
    Best,
    /// Medians; more is better.
    More,
    /// There is nothing native.
    Alone,
}

/// What is measured.
pub struct Row {
    /// Its key in results.
    pub name: &'static str,
    /// For people.
    pub title: &'static str,
    unit: &'static str,
    kind: Kind,
    /// Limit of the ratio to native, or of the value.
    limit: f64,
}

/// A row.
pub const fn row(
    name: &'static str,
    title: &'static str,
    unit: &'static str,
    kind: Kind,
    limit: f64,
) -> Row {
    Row { name, title, unit, kind, limit }
}

const MIB: f64 = 1_048_576.0;
const ROWS: [Row; 10] = [
    row("null_syscall", "null system call", "us", Kind::Less, 1.3),
    row("fork", "fork, exit, wait", "us", Kind::Less, 3.0),
    row("pipe", "pipe round trip", "us", Kind::Less, 3.0),
    row("touch", "touch of a fresh page", "us", Kind::Less, 5.0),
    row("compute", "computing", "us", Kind::Best, 1.01),
    row("compile", "compiling Lua's core, make -j2", "us", Kind::Less, 1.6),
    row("web", "pages of nginx for wrk", "1/s", Kind::More, 0.6),
    row("povray", "POV-Ray", "us", Kind::Best, 1.02),
    row("start_ms", "start to init", "ms", Kind::Alone, 400.0),
    row("vm_bytes", "host memory beside the guest's", "bytes", Kind::Alone, 8.0 * MIB),
];
/// Of these, [`PROGRAM`]'s.
const PROGRAM_ROWS: usize = 5;

/// What all places have taken.
pub type All = [Times; Place::ALL.len()];

fn of(all: &All, place: Place) -> &Times {
    &all[place as usize]
}

/// Measures `kernel` with [`PROGRAM`] only; gives the figures.
pub fn figures(kernel: &Path) -> Result<Vec<Figure>> {
    places::bind()?;
    let kernels = Kernels { parador: kernel.into(), tcg: kernel.into(), ..Kernels::default() };
    let program = program()?;
    let mut all = All::default();
    for round in 1..=ROUNDS {
        println!("times of programs on this host: round {round} of {ROUNDS}");
        for place in [Place::Native, Place::Parador, Place::Tcg] {
            program.run(&mut all, place, &kernels, None)?;
        }
    }
    let mut figures = Vec::new();
    for row in &ROWS[..PROGRAM_ROWS] {
        for place in [Place::Native, Place::Parador, Place::Tcg] {
            let shown = if place == Place::Parador { "hosted" } else { place.name() };
            let times = of(&all, place);
            let (value, peer, limit, key, unit) = if row.kind == Kind::Best {
                let native = of(&all, Place::Native).best(row.name)?;
                let peer = of(&all, Place::Tcg).best(row.name)? / native;
                let key = format!("{shown}_{}_ratio", row.name);
                (times.best(row.name)? / native, peer, row.limit, key, "ratio to native")
            } else {
                // The published neighbour is what has to be beaten.
                let peer = of(&all, Place::Tcg).median(row.name)?.0;
                let key = format!("{shown}_{}_us", row.name);
                (times.median(row.name)?.0, peer, peer, key, row.unit)
            };
            let ours = place == Place::Parador;
            figures.push(Figure {
                // As long as the program lives, which has few.
                key: key.leak(),
                title: format!("{}, {shown}", row.title).leak(),
                value,
                unit,
                world_switches: None,
                peer: ours.then_some(peer),
                limit: if ours { limit } else { f64::INFINITY },
                spread: times.median(row.name)?.1,
            });
        }
    }
    Ok(figures)
}

/// `bench hosted`: measures everything, prints it, draws it, and keeps it.
pub fn measure(kernel: PathBuf, quick: bool) -> Result<()> {
    places::bind()?;
    let made = debian::busy_disk()?;
    let kernels = Kernels {
        parador: kernel,
        tcg: made.join("vmlinuz"),
        tcg_initrd: Some(made.join("initrd.img")),
        ..Kernels::default()
    };
    let userland = Userland::new(&made, &work()?)?;
    let program = program()?;
    let start_disk = {
        let tree = Tree::new("start", &["sh", "poweroff"])?;
        tree.init("start-init")?;
        tree.pack()?
    };
    let rounds = if quick { QUICK_ROUNDS } else { ROUNDS };
    let mut all = All::default();
    let mut without_uml = places::uml_lacks();
    for round in 0..rounds {
        for place in Place::ALL {
            if place == Place::Uml && without_uml.is_some() {
                continue;
            }
            println!("round {} of {rounds}: {}", round + 1, place.name());
            let mut take = || -> Result<()> {
                program.run(&mut all, place, &kernels, None)?;
                if place != Place::Native {
                    let time = places::start(place, &kernels, &start_disk, BEGUN)?;
                    all[place as usize].add("start_ms", time, time);
                }
                if !is_slow(place) {
                    all[place as usize].read(&userland.run(place, &kernels, &[])?);
                }
                if place == Place::Parador {
                    let bytes = places::machine_bytes(&kernels)?;
                    all[place as usize].add("vm_bytes", bytes, bytes);
                }
                Ok(())
            };
            match take() {
                // It does not run on every host.
                Err(error) if place == Place::Uml => without_uml = Some(format!("{error:#}")),
                result => result.with_context(|| place.name())?,
            }
        }
        // Ratios near 1 need more turns, close to each other.
        println!("round {} of {rounds}: computing again", round + 1);
        for place in [Place::Native, Place::Parador].repeat(AGAIN) {
            program.run(&mut all, place, &kernels, Some("compute"))?;
            all[place as usize].read(&userland.run(place, &kernels, &[("HB_PART", "povray")])?);
        }
        // Whoever ends it early has what there is.
        keep(&all)?;
    }
    // Each turn is a median already.
    let climbed = ladder::small(&kernels, QUICK_ROUNDS)?;
    for place in Place::ALL.into_iter().filter(|&place| is_slow(place)) {
        if place == Place::Uml && without_uml.is_some() {
            continue;
        }
        println!("programs of Debian: {}", place.name());
        match userland.run(place, &kernels, &[]) {
            Ok(output) => all[place as usize].read(&output),
            Err(error) if place == Place::Uml => without_uml = Some(format!("{error:#}")),
            Err(error) => return Err(error.context(place.name())),
        }
    }
    if let Some(reason) = &without_uml {
        println!("User-Mode Linux is left out where it has no figure: {reason}");
    }
    let (results, figures) = keep(&all)?;
    if !quick {
        report::append_line("hosted.jsonl", &json!({ "rounds": rounds, "figures": figures }))?;
    }
    ladder::large(&kernels, &userland, climbed)?;
    if results.iter().any(|(row, result)| !result.holds(row)) {
        bail!("a figure misses its limit");
    }
    Ok(())
}

/// `bench ladder`: the ladder alone.
pub fn ladder(kernel: PathBuf) -> Result<()> {
    places::bind()?;
    let userland = Userland::new(&debian::busy_disk()?, &work()?)?;
    let kernels = Kernels { parador: kernel, ..Kernels::default() };
    // Each of which is a median already.
    let climbed = ladder::small(&kernels, QUICK_ROUNDS)?;
    ladder::large(&kernels, &userland, climbed)
}

/// With `--quick`: without Debian's programs.
pub fn small_ladder(kernel: PathBuf) -> Result<()> {
    places::bind()?;
    ladder::small(&Kernels { parador: kernel, ..Kernels::default() }, QUICK_ROUNDS).map(drop)
}

/// Debian's programs take it many minutes, so it runs them once.
fn is_slow(place: Place) -> bool {
    matches!(place, Place::Tcg | Place::Uml)
}

/// Prints, writes and draws what there is.
fn keep(all: &All) -> Result<(Outcomes, Map<String, Value>)> {
    let results = ROWS.iter().map(|row| Ok((row, result(all, row)?)));
    let results = results.collect::<Result<Vec<_>>>()?;
    print(&results);
    let keyed = |(row, result): &(&Row, Outcome)| (row.name.to_owned(), result.json());
    let object: Map<String, Value> = results.iter().map(keyed).collect();
    report::write_object("bench-hosted.json", &object)?;
    draw(&results)?;
    Ok((results, object))
}

/// All rows with theirs.
type Outcomes = Vec<(&'static Row, Outcome)>;

/// A row's values in each place.
pub struct Outcome {
    ratio: Option<f64>,
    values: [Option<f64>; Place::ALL.len()],
    /// Of the rounds of `parador`.
    spread: f64,
}

impl Outcome {
    fn value(&self, place: Place) -> Option<f64> {
        self.values[place as usize]
    }

    /// Relative to the host's own.
    fn ratio(&self, place: Place) -> Option<f64> {
        Some(self.value(place)? / self.value(Place::Native)?)
    }

    fn holds(&self, row: &Row) -> bool {
        let value = self.ratio.or(self.value(Place::Parador));
        value.is_some_and(|value| match row.kind {
            Kind::More => value >= row.limit,
            _ => value <= row.limit,
        })
    }

    /// What it takes in a place relative to the host's own time: less is better.
    pub fn time(&self, row: &Row, place: Place) -> Option<f64> {
        let ratio = self.ratio(place)?;
        Some(if row.kind == Kind::More { 1.0 / ratio } else { ratio })
    }

    /// As it is kept.
    pub fn json(&self) -> Value {
        let mut object = Map::new();
        object.insert("ratio".to_owned(), json!(self.ratio.map(rounded)));
        for place in Place::ALL {
            object.insert(place.name().to_owned(), json!(self.value(place).map(rounded)));
        }
        object.insert("spread".to_owned(), json!(rounded(self.spread)));
        Value::Object(object)
    }
}

/// Gives `to` what a place has taken of some rows.
pub fn add(to: &mut All, place: Place, rows: &[Row], from: &All) -> Result<()> {
    for row in rows {
        let (median, _) = of(from, place).median(row.name)?;
        to[place as usize].add(row.name, median, of(from, place).best(row.name)?);
    }
    Ok(())
}

/// What the times of a row come to.
pub fn result(all: &All, row: &Row) -> Result<Outcome> {
    let value = |place| {
        let times = of(all, place);
        match row.kind {
            Kind::Best => times.best(row.name),
            _ => times.median(row.name).map(|(median, _)| median),
        }
    };
    let values = Place::ALL.map(|place| value(place).ok());
    // What is not measured elsewhere has no value there; ours has one.
    value(Place::Parador)?;
    let (_, spread) = of(all, Place::Parador).median(row.name)?;
    let mut outcome = Outcome { ratio: None, values, spread };
    if row.kind != Kind::Alone {
        value(Place::Native)?;
        outcome.ratio = outcome.ratio(Place::Parador);
    }
    Ok(outcome)
}

fn print(results: &[(&Row, Outcome)]) {
    let [native, parador, tcg, uml] = Place::ALL.map(Place::name);
    println!(
        "\n{:<32} {native:>10} {parador:>10} {tcg:>10} {uml:>10} {:>8} {:>8} {:>8}  unit",
        "what", "ratio", "limit", "spread"
    );
    for (row, result) in results {
        let text = |value: Option<f64>| value.map_or("-".into(), short);
        let [native, parador, tcg, uml] = result.values.map(text);
        println!(
            "{:<32} {native:>10} {parador:>10} {tcg:>10} {uml:>10} {:>8} {:>8} {:>7.1}%  {}{}",
            row.title,
            text(result.ratio),
            short(row.limit),
            result.spread * 100.0,
            row.unit,
            if result.holds(row) { "" } else { "   MISSED" },
        );
    }
}

fn draw(results: &[(&Row, Outcome)]) -> Result<()> {
    let peers = [Place::Parador, Place::Tcg, Place::Uml];
    let with_ratio = results.iter().filter(|(row, _)| row.kind != Kind::Alone);
    let groups: Vec<_> = with_ratio
        .map(|(row, result)| chart::Group {
            title: row.title.to_owned(),
            values: peers.map(|place| result.time(row, place)).to_vec(),
        })
        .collect();
    let title = "Time of programs in machines that are processes of this host, relative to the host's own \
                 (less is better)";
    let text =
        chart::ratios(title, &["parador", "QEMU (TCG)", "User-Mode Linux"], &groups, chart::NEAR)?;
    chart::draw("hosted.svg", &text)
}

/// [`PROGRAM`], and a RAM disk that runs it.
struct Program {
    path: PathBuf,
    disk: PathBuf,
}

fn program() -> Result<Program> {
    let tree = Tree::new("host", &["sh", "mount", "poweroff"])?;
    tree.program(PROGRAM)?;
    tree.init("host-init")?;
    Ok(Program { path: tree.path(PROGRAM), disk: tree.pack()? })
}

impl Program {
    /// With one row, or all.
    fn run(&self, all: &mut All, place: Place, kernels: &Kernels, row: Option<&str>) -> Result<()> {
        let output = places::program(place, kernels, &self.path, &self.disk, row)?;
        all[place as usize].read(&output);
        Ok(())
    }
}

/// The folder with what is done in a Debian.
fn work() -> Result<PathBuf> {
    let work = folder().join("userland");
    if work.exists() {
        fs::remove_dir_all(&work).context("cannot empty a folder")?;
    }
    fs::create_dir_all(&work).context("cannot make a folder")?;
    let copy = |from: &Path, name: &str| {
        fs::copy(from, work.join(name)).with_context(|| format!("cannot copy {name}"))
    };
    for name in ["userland", "userland-init", "nginx.conf", "scene.pov"] {
        copy(&source(name), name)?;
    }
    copy(&places::archive(LUA, LUA_DIGEST)?, "lua.tar.gz")?;
    fs::write(work.join("page.html"), "x".repeat(PAGE)).context("cannot write a page")?;
    Ok(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(row: &Row, values: [f64; 2]) -> Outcome {
        let mut all = All::default();
        for (place, value) in [Place::Native, Place::Parador].into_iter().zip(values) {
            all[place as usize].add(row.name, value, value / 2.0);
        }
        result(&all, row).unwrap()
    }

    #[test]
    fn limits_are_kept_or_missed() {
        for (row, values, holds) in [
            (&ROWS[1], [10.0, 29.0], true),
            (&ROWS[1], [10.0, 31.0], false),
            (&ROWS[6], [10.0, 6.1], true),
            (&ROWS[6], [10.0, 5.9], false),
            (&ROWS[8], [1.0, 399.0], true),
            (&ROWS[8], [1.0, 401.0], false),
        ] {
            assert_eq!(outcome(row, values).holds(row), holds, "{} {values:?}", row.name);
        }
    }

    #[test]
    fn an_object_has_the_agreed_keys() {
        let text = outcome(&ROWS[0], [2.0, 3.0]).json().to_string();
        let expected =
            r#"{"ratio":1.5,"native":2.0,"parador":3.0,"tcg":null,"uml":null,"spread":0.0}"#;
        assert_eq!(text, expected);
    }
}
