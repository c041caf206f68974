//! Times of programs in a pre-virtualized guest that runs in processes of this host, beside those
//! of the same programs on the host itself and in other VMs without KVM
//! ([`environments`](crate::environments)).
//!
//! Hosts are noisy: the environments take turns, and each figure is the median of all rounds. Rows
//! that only compute take the best round: noise only adds time, and their ratio is close to 1.

use anyhow::{Context, Result, bail};
use parador_tests::debian;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};

use crate::chart;
use crate::environments::{self, Environment, Kernels, Times, Userland};
use crate::guest::{Tree, folder, source};
use crate::ladder;
use crate::promises;
use crate::report::{self, Figure, rounded, short};

/// Rounds of each environment.
const ROUNDS: usize = 5;
/// Additional rounds of rows that only compute, after each of these.
const AGAIN: usize = 3;
/// Rounds with `--quick`.
const QUICK_ROUNDS: usize = 2;
/// The benchmark program.
pub const PROGRAM: &str = "hostbench";
/// Text that the init script `start-init` prints.
const BEGUN: &str = "init has begun";
/// Source archive that is compiled: Debian's Lua.
pub const LUA: &str = "http://deb.debian.org/debian/pool/main/l/lua5.4/lua5.4_5.4.4.orig.tar.gz";
/// Digest of [`LUA`].
pub const LUA_DIGEST: &str =
    "SHA256:164c7849653b80ae67bec4b7473b884bf5cc8d2dca05653475ec2ed27b9ebf61";
/// Size of the page that nginx serves, in bytes.
const PAGE: usize = 4096;

/// Evaluation of a row.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Ratio of medians; less is better.
    Less,
    /// Ratio of the best rounds; less is better.
    Best,
    /// Ratio of medians; more is better.
    More,
    /// Absolute value; there is no native counterpart.
    Alone,
}

/// One measurement.
pub struct Row {
    /// Key in results.
    pub name: &'static str,
    /// Title for people.
    pub title: &'static str,
    unit: &'static str,
    kind: Kind,
}

impl Row {
    /// Limit of the ratio to native, or of the value; none for a row without a promise.
    fn limit(&self) -> f64 {
        promises::limit(self.name).unwrap_or(f64::INFINITY)
    }
}

/// Returns a row.
pub const fn row(name: &'static str, title: &'static str, unit: &'static str, kind: Kind) -> Row {
    Row { name, title, unit, kind }
}

const ROWS: [Row; 12] = [
    row("null_syscall", "null system call", "us", Kind::Less),
    row("fork", "fork, exit, wait", "us", Kind::Less),
    row("pipe", "pipe round trip", "us", Kind::Less),
    row("touch", "touch of a fresh page", "us", Kind::Less),
    row("compute", "computing", "us", Kind::Best),
    row("compile", "compiling Lua's core, make -j2", "us", Kind::Less),
    row("web", "pages of nginx for wrk", "1/s", Kind::More),
    row("povray", "POV-Ray", "us", Kind::Best),
    row("start_ms", "start to init", "ms", Kind::Alone),
    row("vm_bytes", "host memory beside the guest's", "bytes", Kind::Alone),
    row("fork_plain", "fork, exit, wait, without tuning", "us", Kind::Less),
    row("touch_plain", "touch of a fresh page, untuned", "us", Kind::Less),
];
/// Rows that are also measured without the optional patches of the guest's kernel, and their names
/// there.
const UNTUNED: [(&str, &str); 2] = [("fork", "fork_plain"), ("touch", "touch_plain")];
/// Kernel parameter that disables the optional patches.
const NO_TUNING: &str = "parador_tuning=off ";
/// Number of rows that [`PROGRAM`] measures.
const PROGRAM_ROWS: usize = 5;

/// Times of all environments.
pub type All = [Times; Environment::ALL.len()];

fn of(all: &All, environment: Environment) -> &Times {
    &all[environment as usize]
}

/// Measures `kernel` with [`PROGRAM`] only and returns the figures.
pub fn figures(kernel: &Path) -> Result<Vec<Figure>> {
    environments::bind()?;
    let kernels = Kernels { parador: kernel.into(), tcg: kernel.into(), ..Kernels::default() };
    let program = program()?;
    let mut all = All::default();
    for round in 1..=ROUNDS {
        println!("times of programs on this host: round {round} of {ROUNDS}");
        for environment in [Environment::Native, Environment::Parador, Environment::Tcg] {
            program.run(&mut all, environment, &kernels, None)?;
        }
    }
    let mut figures = Vec::new();
    for row in &ROWS[..PROGRAM_ROWS] {
        for environment in [Environment::Native, Environment::Parador, Environment::Tcg] {
            let shown =
                if environment == Environment::Parador { "hosted" } else { environment.name() };
            let times = of(&all, environment);
            let (value, peer, limit, key, unit) = if row.kind == Kind::Best {
                let native = of(&all, Environment::Native).best(row.name)?;
                let peer = of(&all, Environment::Tcg).best(row.name)? / native;
                let key = format!("{shown}_{}_ratio", row.name);
                (times.best(row.name)? / native, peer, row.limit(), key, "ratio to native")
            } else {
                // The limit is the peer, QEMU with TCG.
                let peer = of(&all, Environment::Tcg).median(row.name)?.0;
                let key = format!("{shown}_{}_us", row.name);
                (times.median(row.name)?.0, peer, peer, key, row.unit)
            };
            let ours = environment == Environment::Parador;
            figures.push(Figure {
                key,
                title: format!("{}, {shown}", row.title),
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

/// `bench hosted`: measures, prints, draws and stores all rows.
pub fn measure(kernel: PathBuf, quick: bool) -> Result<()> {
    environments::bind()?;
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
    let untuned_kernels = Kernels { parameters: NO_TUNING, ..kernels.clone() };
    let (mut all, mut untuned) = (All::default(), All::default());
    let mut without_uml = environments::uml_lacks();
    for round in 0..rounds {
        for environment in Environment::ALL {
            if environment == Environment::Uml && without_uml.is_some() {
                continue;
            }
            println!("round {} of {rounds}: {}", round + 1, environment.name());
            let mut take = || -> Result<()> {
                program.run(&mut all, environment, &kernels, None)?;
                if environment != Environment::Native {
                    let time = environments::start(environment, &kernels, &start_disk, BEGUN)?;
                    all[environment as usize].add("start_ms", time, time);
                }
                if !is_slow(environment) {
                    all[environment as usize].read(&userland.run(environment, &kernels, &[])?);
                }
                if environment == Environment::Parador {
                    let bytes = environments::machine_bytes(&kernels)?;
                    all[environment as usize].add("vm_bytes", bytes, bytes);
                    program.run(&mut untuned, environment, &untuned_kernels, None)?;
                }
                Ok(())
            };
            match take() {
                // User-Mode Linux does not run on every host.
                Err(error) if environment == Environment::Uml => {
                    without_uml = Some(format!("{error:#}"))
                }
                result => result.with_context(|| environment.name())?,
            }
        }
        // Ratios near 1 need more rounds, close to each other.
        println!("round {} of {rounds}: computing again", round + 1);
        for environment in [Environment::Native, Environment::Parador].repeat(AGAIN) {
            program.run(&mut all, environment, &kernels, Some("compute"))?;
            all[environment as usize].read(&userland.run(
                environment,
                &kernels,
                &[("HB_PART", "povray")],
            )?);
        }
        add_untuned(&mut all, &untuned)?;
        // An interrupted run leaves the results so far.
        keep(&all)?;
    }
    // Each round is a median already.
    let climbed = ladder::small(&kernels, QUICK_ROUNDS)?;
    for environment in Environment::ALL.into_iter().filter(|&environment| is_slow(environment)) {
        if environment == Environment::Uml && without_uml.is_some() {
            continue;
        }
        println!("programs of Debian: {}", environment.name());
        match userland.run(environment, &kernels, &[]) {
            Ok(output) => all[environment as usize].read(&output),
            Err(error) if environment == Environment::Uml => {
                without_uml = Some(format!("{error:#}"))
            }
            Err(error) => return Err(error.context(environment.name())),
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

/// `bench ladder`: measures only the ladder.
pub fn ladder(kernel: PathBuf) -> Result<()> {
    environments::bind()?;
    let userland = Userland::new(&debian::busy_disk()?, &work()?)?;
    let kernels = Kernels { parador: kernel, ..Kernels::default() };
    // Each round is a median already.
    let climbed = ladder::small(&kernels, QUICK_ROUNDS)?;
    ladder::large(&kernels, &userland, climbed)
}

/// `bench ladder --quick`: without Debian's programs.
pub fn small_ladder(kernel: PathBuf) -> Result<()> {
    environments::bind()?;
    ladder::small(&Kernels { parador: kernel, ..Kernels::default() }, QUICK_ROUNDS).map(drop)
}

/// Returns true if Debian's programs take many minutes in this environment, which runs them once.
fn is_slow(environment: Environment) -> bool {
    matches!(environment, Environment::Tcg | Environment::Uml)
}

/// Adds the rows without tuning: the guest's times, and the same times of the host as with it.
fn add_untuned(all: &mut All, untuned: &All) -> Result<()> {
    let (native, guest) = (Environment::Native as usize, Environment::Parador as usize);
    for (name, new) in UNTUNED {
        let host = all[native].clone();
        all[native].copy(&host, name, new)?;
        all[guest].copy(&untuned[guest], name, new)?;
    }
    Ok(())
}

/// Prints, writes and draws the results so far.
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

/// Outcomes of all rows.
type Outcomes = Vec<(&'static Row, Outcome)>;

/// Values of a row in each environment.
pub struct Outcome {
    ratio: Option<f64>,
    values: [Option<f64>; Environment::ALL.len()],
    /// Spread of the rounds of `parador`.
    spread: f64,
}

impl Outcome {
    fn value(&self, environment: Environment) -> Option<f64> {
        self.values[environment as usize]
    }

    /// Value relative to the host's.
    fn ratio(&self, environment: Environment) -> Option<f64> {
        Some(self.value(environment)? / self.value(Environment::Native)?)
    }

    fn holds(&self, row: &Row) -> bool {
        let value = self.ratio.or(self.value(Environment::Parador));
        value.is_some_and(|value| match row.kind {
            Kind::More => value >= row.limit(),
            _ => value <= row.limit(),
        })
    }

    /// Time in an environment relative to the host's: less is better.
    pub fn time(&self, row: &Row, environment: Environment) -> Option<f64> {
        let ratio = self.ratio(environment)?;
        Some(if row.kind == Kind::More { 1.0 / ratio } else { ratio })
    }

    /// Returns the outcome as the series stores it.
    pub fn json(&self) -> Value {
        let mut object = Map::new();
        object.insert("ratio".to_owned(), json!(self.ratio.map(rounded)));
        for environment in Environment::ALL {
            object
                .insert(environment.name().to_owned(), json!(self.value(environment).map(rounded)));
        }
        object.insert("spread".to_owned(), json!(rounded(self.spread)));
        Value::Object(object)
    }
}

/// Adds the times of some rows in an environment to `to`.
pub fn add(to: &mut All, environment: Environment, rows: &[Row], from: &All) -> Result<()> {
    for row in rows {
        let (median, _) = of(from, environment).median(row.name)?;
        to[environment as usize].add(row.name, median, of(from, environment).best(row.name)?);
    }
    Ok(())
}

/// Evaluates the times of a row.
pub fn result(all: &All, row: &Row) -> Result<Outcome> {
    let value = |environment| {
        let times = of(all, environment);
        match row.kind {
            Kind::Best => times.best(row.name),
            _ => times.median(row.name).map(|(median, _)| median),
        }
    };
    let values = Environment::ALL.map(|environment| value(environment).ok());
    // Other environments may lack a value; `parador` must have one.
    value(Environment::Parador)?;
    let (_, spread) = of(all, Environment::Parador).median(row.name)?;
    let mut outcome = Outcome { ratio: None, values, spread };
    if row.kind != Kind::Alone {
        value(Environment::Native)?;
        outcome.ratio = outcome.ratio(Environment::Parador);
    }
    Ok(outcome)
}

fn print(results: &[(&Row, Outcome)]) {
    let [native, parador, tcg, uml] = Environment::ALL.map(Environment::name);
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
            short(row.limit()),
            result.spread * 100.0,
            row.unit,
            if result.holds(row) { "" } else { "   MISSED" },
        );
    }
}

fn draw(results: &[(&Row, Outcome)]) -> Result<()> {
    let peers = [Environment::Parador, Environment::Tcg, Environment::Uml];
    let with_ratio = results.iter().filter(|(row, _)| row.kind != Kind::Alone);
    let groups: Vec<_> = with_ratio
        .map(|(row, result)| chart::Group {
            title: row.title.to_owned(),
            values: peers.map(|environment| result.time(row, environment)).to_vec(),
        })
        .collect();
    let title = "Time of programs in machines that are processes of this host, relative to the host's own \
                 (less is better)";
    let text =
        chart::ratios(title, &["parador", "QEMU (TCG)", "User-Mode Linux"], &groups, chart::NEAR)?;
    chart::draw("hosted.svg", &text)
}

/// [`PROGRAM`] and a RAM disk that runs it.
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
    /// Runs one row of the program, or all.
    fn run(
        &self,
        all: &mut All,
        environment: Environment,
        kernels: &Kernels,
        row: Option<&str>,
    ) -> Result<()> {
        let output = environments::program(environment, kernels, &self.path, &self.disk, row)?;
        all[environment as usize].read(&output);
        Ok(())
    }
}

/// Builds the folder with the benchmarks that run in Debian.
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
    copy(&environments::archive(LUA, LUA_DIGEST)?, "lua.tar.gz")?;
    fs::write(work.join("page.html"), "x".repeat(PAGE)).context("cannot write a page")?;
    Ok(work)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(row: &Row, values: [f64; 2]) -> Outcome {
        let mut all = All::default();
        for (environment, value) in
            [Environment::Native, Environment::Parador].into_iter().zip(values)
        {
            all[environment as usize].add(row.name, value, value / 2.0);
        }
        result(&all, row).unwrap()
    }

    #[test]
    fn every_row_has_a_limit() {
        for row in &ROWS {
            assert!(promises::limit(row.name).is_ok(), "{}", row.name);
        }
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
    fn untuned_rows_compare_with_the_same_host() {
        let (mut all, mut untuned) = (All::default(), All::default());
        for (name, host, guest) in [("fork", 10.0, 30.0), ("touch", 1.0, 4.0)] {
            all[Environment::Native as usize].add(name, host, host);
            untuned[Environment::Parador as usize].add(name, guest, guest);
        }
        add_untuned(&mut all, &untuned).unwrap();
        let ratios = UNTUNED.map(|(_, name)| {
            let row = ROWS.iter().find(|row| row.name == name).unwrap();
            result(&all, row).unwrap().ratio
        });
        assert_eq!(ratios, [Some(3.0), Some(4.0)]);
    }

    #[test]
    fn an_object_has_the_agreed_keys() {
        let text = outcome(&ROWS[0], [2.0, 3.0]).json().to_string();
        let expected =
            r#"{"ratio":1.5,"native":2.0,"parador":3.0,"tcg":null,"uml":null,"spread":0.0}"#;
        assert_eq!(text, expected);
    }
}
