//! `cargo xtask package`: the Debian package of Parador.
//!
//! Equal commits give equal bytes: the times of all files are the commit's, owners and modes are
//! fixed, `dpkg-deb` sorts, and no path of this host is in a file. The build environment is the
//! rest: the compiler, and Debian's packages of the C library and of Linux' source.

mod kernel;
mod notices;
mod stage;

use crate::build::{self, AGENT, DOCUMENTS_PACKAGE, WEDGE, artifacts, build};
use crate::mark;
use crate::process::{output, run, target, workspace};
use anyhow::{Context, Result, bail, ensure};
use kernel::GuestKernel;
use stage::Stage;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Name and address in the package.
const MAINTAINER: &str = "Parador developers <parador@packages.invalid>";
const CONTROL: &str = include_str!("../package/control");
const COPYRIGHT: &str = include_str!("../package/copyright");
const SERVICE: &str = include_str!("../package/parador@.service");
const OVERRIDES: &str = include_str!("../package/lintian-overrides");
/// Programs that this needs, and their packages.
const NEEDED: [(&str, &str); 4] =
    [("dpkg-deb", "dpkg"), ("objcopy", "binutils"), ("depmod", "kmod"), ("gzip", "gzip")];

/// Checks packages against Debian's policy.
const LINTIAN: &str = "/usr/bin/lintian";

/// Command line of `package`.
struct Options {
    /// With the programs of this tree as they are, uncompressed.
    is_quick: bool,
    /// Folder of the package, and of its contents in the folder `root`.
    output: PathBuf,
}

impl Options {
    fn parse(arguments: &[String]) -> Result<Self> {
        let mut options = Self { is_quick: false, output: target() };
        let mut arguments = arguments.iter();
        while let Some(argument) = arguments.next() {
            match argument.as_str() {
                "--quick" => options.is_quick = true,
                "--output" => {
                    options.output = arguments.next().context("--output without a folder")?.into();
                }
                other => bail!("no option `{other}` of `package`"),
            }
        }
        Ok(options)
    }
}

/// Commit that a package is made of.
struct Origin {
    commit: String,
    /// Seconds since 1970.
    time: u64,
    /// Time as in RFC 5322.
    date: String,
    /// Version of the package.
    version: String,
}

impl Origin {
    /// Reads the commit that is checked out. The package of `--quick` has the release of the tree,
    /// as the programs in it.
    fn new(is_quick: bool) -> Result<Self> {
        let git = |format: &str| {
            let mut command = Command::new("git");
            command.args(["log", "-1", format]).current_dir(workspace()).env("TZ", "UTC");
            Ok::<_, anyhow::Error>(
                output(command.arg("--date=format-local:%Y%m%d%H%M"))?.trim().to_owned(),
            )
        };
        let commit = build::commit();
        let minute = git("--format=%cd")?;
        let version = match is_quick {
            true => mark::RELEASE.to_owned(),
            // `-` would begin Debian's revision.
            false => format!("{}+git{minute}.{}", mark::RELEASE, commit.replace('-', "+")),
        };
        let time = git("--format=%ct")?.parse().context("git printed no time")?;
        let mut date = Command::new("date");
        date.args(["--utc", "--rfc-email", &format!("--date=@{time}")]);
        Ok(Self { commit, time, date: output(&mut date)?.trim().to_owned(), version })
    }
}

/// `cargo xtask package [--quick] [--output FOLDER]`.
pub fn package(arguments: &[String]) -> Result<()> {
    let options = Options::parse(arguments)?;
    check_host()?;
    let origin = Origin::new(options.is_quick)?;
    build(&["host", "wedge-on-linux", build::AGENT_PACKAGE].map(str::to_owned))?;
    let parador = match options.is_quick {
        true => target().join("release/parador"),
        false => build::static_parador(&origin.version)?,
    };
    let kernel = GuestKernel::find(&target().join("release/parador"))?;
    let work = options.output.join("package");
    let stage = Stage::new(&work.join("root"))?;
    programs(&stage, &parador, &kernel, &origin)?;
    documents(&stage, &kernel, &origin)?;
    let size = stage.finish(origin.time)?;
    let control = CONTROL
        .replace("@VERSION@", &origin.version)
        .replace("@MAINTAINER@", MAINTAINER)
        .replace("@LINUX@", &kernel.debian)
        .replace("@SIZE@", &size.div_ceil(1024).to_string());
    stage.control(&control, origin.time)?;
    let file = options.output.join(format!("parador_{}_amd64.deb", origin.version));
    pack(&stage, &file, options.is_quick, origin.time)?;
    stage.print_sizes()?;
    let bytes = fs::metadata(&file).with_context(|| file.display().to_string())?.len();
    println!("{}: {:.1} MiB", file.display(), bytes as f64 / f64::from(1 << 20));
    if options.is_quick { Ok(()) } else { lint(&file) }
}

/// Checks the package against Debian's policy, where lintian is installed.
fn lint(file: &Path) -> Result<()> {
    if !Path::new(LINTIAN).is_file() {
        println!("lintian: SKIPPED, not installed");
        return Ok(());
    }
    run(Command::new(LINTIAN).args(["--fail-on", "error", "--allow-root"]).arg(file))
}

fn check_host() -> Result<()> {
    for (program, package) in NEEDED {
        let found = ["/usr/bin", "/usr/sbin"].map(|folder| Path::new(folder).join(program));
        ensure!(found.iter().any(|path| path.is_file()), "no {program}: install {package}");
    }
    Ok(())
}

/// Adds the programs and the kernel.
fn programs(stage: &Stage, parador: &Path, kernel: &GuestKernel, origin: &Origin) -> Result<()> {
    stage.program(parador, "usr/bin/parador")?;
    let wedge = stage.place(&format!("usr/lib/parador/{WEDGE}"))?;
    let text = format!("{}\n{}", origin.version, kernel.release);
    mark::strip_and_mark(&artifacts().join(WEDGE), &wedge, &origin.version)?;
    mark::mark(&kernel.vmlinux(), &stage.place("usr/lib/parador/vmlinux")?, &text)?;
    stage.link("usr/lib/parador/qemu/qemu-system-x86_64", "../../../bin/parador")?;
    stage.link("usr/bin/parador-oci", "parador")?;
    kernel.install(stage)
}

/// Adds manual pages, completions, descriptions of formats, the unit of systemd, and what the
/// licences demand.
fn documents(stage: &Stage, kernel: &GuestKernel, origin: &Origin) -> Result<()> {
    let agent = target().join("package-agent");
    mark::strip_and_mark(&artifacts().join(AGENT), &agent, &origin.version)?;
    let writer = target().join("release").join(DOCUMENTS_PACKAGE);
    run(Command::new(writer).arg(&stage.root).arg(&agent))?;
    fs::remove_file(&agent).with_context(|| agent.display().to_string())?;
    stage.compress("usr/share/man/man1")?;
    for name in ["vm.schema.json", "openapi.json"] {
        stage.copy(
            &workspace().join("docs/spec").join(name),
            &format!("usr/share/parador/{name}"),
        )?;
    }
    stage.write("lib/systemd/system/parador@.service", SERVICE)?;
    stage.folder("etc/parador")?;
    stage.write("usr/share/lintian/overrides/parador", OVERRIDES)?;
    let folder = "usr/share/doc/parador";
    stage.write(&format!("{folder}/copyright"), COPYRIGHT)?;
    stage.write(&format!("{folder}/third-party"), &notices::text()?)?;
    stage.write(&format!("{folder}/changelog"), &changelog(origin))?;
    kernel.documents(stage, &format!("{folder}/kernel"), &origin.commit)?;
    for name in ["third-party", "changelog"] {
        stage.compress(&format!("{folder}/{name}"))?;
    }
    Ok(())
}

fn changelog(origin: &Origin) -> String {
    let Origin { commit, date, version, .. } = origin;
    format!(
        "parador ({version}) unstable; urgency=medium\n\n  * Built from commit {commit}.\n\n \
         -- {MAINTAINER}  {date}\n"
    )
}

/// Packs the folder into the file, which appears complete or not at all.
fn pack(stage: &Stage, file: &Path, is_quick: bool, time: u64) -> Result<()> {
    let mut command = Command::new("dpkg-deb");
    // Blocks of several threads would depend on their number.
    match is_quick {
        true => command.arg("-Znone"),
        false => command.args(["-Zxz", "-z9", "--threads-max=1"]),
    };
    command.arg("--root-owner-group").env("SOURCE_DATE_EPOCH", time.to_string());
    let partial = file.with_extension("partial");
    run(command.arg("--build").arg(&stage.root).arg(&partial))?;
    fs::rename(&partial, file).with_context(|| format!("cannot move {}", partial.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options() {
        let parse = |words: &[&str]| {
            Options::parse(&words.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        let options = parse(&["--quick", "--output", "a"]).unwrap();
        assert!(options.is_quick && options.output == Path::new("a"));
        assert!(!parse(&[]).unwrap().is_quick);
        assert!(parse(&["--output"]).is_err() && parse(&["more"]).is_err());
    }

    #[test]
    fn a_package_has_the_version_of_the_commit() {
        let origin = Origin::new(false).unwrap();
        let rest = origin.version.strip_prefix(mark::RELEASE).unwrap();
        let (minute, commit) = rest.strip_prefix("+git").unwrap().split_once('.').unwrap();
        assert!(minute.len() == 12 && minute.bytes().all(|byte| byte.is_ascii_digit()));
        assert!(commit.len() >= 12 && !commit.contains('-'));
        assert!(changelog(&origin).starts_with(&format!("parador ({}) ", origin.version)));
        assert_eq!(Origin::new(true).unwrap().version, mark::RELEASE);
    }
}
