//! The project's own build tool, called as `cargo xtask COMMAND`.
//!
//! The Makefile is the front door for users; every rule in it is one command here, so that
//! developers, `make` and continuous integration run the same code.
#![forbid(unsafe_code)]

mod build;
mod check;
mod coverage;
mod flat;
mod fuzz;
mod imports;
mod mark;
mod metrics;
mod neutral;
mod package;
mod process;
mod rules;
mod source;
mod spec;
mod specification;
mod toolchain;
mod words;
mod workspace;

use anyhow::{Result, bail};

const USAGE: &str = "\
usage: cargo xtask COMMAND

  build [PACKAGE...]      build everything, or only these packages, into target/artifacts;
                          `runtime`: all programs that a system description can name
  run [FILE] [ARGUMENT..] build, then emulate a system (examples/three-guests.toml)
  run arm64               build, then boot Debian's Linux for AArch64 with a shell
  run-hosted [ARGUMENT..] build, then boot a pre-virtualized kernel in processes of this host
  image [FILE]            build, then make a bootable ISO image
  package [--quick] [--output FOLDER]
                          build target/parador_VERSION_amd64.deb; --quick: with the `parador` of this tree, not linked
                          statically, and without compression, for tests
  test [--long]           unit tests, device scripts, and systems; --long: machines are under load for minutes
  test [--long] units     unit tests and device scripts
  test [--long] [--class CLASS] [FILTER...]
                          systems: those of a CLASS, smp-or-kill (several CPUs, killed processes) or other, and
                          with names that contain a FILTER, such as `bochs/` for all on the second emulator
  test --repeat N [--busy LOOPS] [--class CLASS] [FILTER...]
                          systems only, until each has N results, and a table of failures; a further call continues
                          where this one was interrupted
  test front-door [--here]
                          the README's first commands on a terminal, in a fresh clone of HEAD; --here: in this tree
  bench [disk|net|many]   measure on the emulated machine, all or a part; write target/bench.json
  bench vtlb [COLUMN...]  measure guests without nested paging; write target/bench-vtlb.json; with columns, such as
                          `nested` or `kvm`: only print these
  bench previrt           measure a pre-virtualized kernel; write target/bench-previrt.json
  bench hosted [--quick]  time programs in processes of this host; write target/bench-hosted.json
  bench arm64             measure a guest on AArch64; write target/bench-arm64.json
  bench tools             measure the package: time to the first VM, size, time of a command; write
                          target/bench-tools.json; needs root
  bench pods [podman|pod|at-once|node]
                          containers and pods beside runc and crun; write target/bench-pods.json; needs root; with a
                          part: only print it
  bench ladder [--quick|--counted]
                          the ladder alone; what protection keys cost, in instructions of an emulated host
  fuzz TARGET [--seconds N]
                          look for inputs that break a target of fuzz/; --seeds writes the first ones
  check                   format, clippy, neutral packages for AArch64, deps, unsafe, spec, words, size
  ci                      check and test

  deps                    check the import rules of the top folders' READMEs
  neutral                 compile the packages that name no processor architecture for AArch64
  unsafe [--write]        compare the count of unsafe code with docs/spec/unsafe.txt
  spec [--write]          compare docs/spec/system-calls.md with `abi`, and the tables of SPECIFICATION.md with
                          `bench/promises.toml` and the last results
  words [FOLDER...]       check the wording of text, comments and type names
  size                    lines of code, and the kernel's budget
  metrics                 structure of the tree: import circles, longest functions and files
  coverage                lines of the wedge's MMU and patching code that its unit tests execute
  artifacts               print the directory of finished programs
";

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Err(error) = dispatch(&arguments) {
        eprintln!("xtask: {error:#}");
        std::process::exit(1);
    }
}

fn dispatch(arguments: &[String]) -> Result<()> {
    let (command, rest) = match arguments.split_first() {
        Some((command, rest)) => (command.as_str(), rest),
        None => {
            print!("{USAGE}");
            return Ok(());
        }
    };
    // `run` and `run-hosted` hand their arguments to programs that have a help of their own.
    let is_ours = !matches!(command, "run" | "run-hosted");
    if is_ours && rest.iter().any(|argument| argument == "--help" || argument == "-h") {
        print!("{USAGE}");
        return Ok(());
    }
    match command {
        "build" => build::build(rest),
        "run" => check::emulate(rest),
        "run-hosted" => check::run_hosted(rest),
        "image" => check::image(rest),
        "package" => package::package(rest),
        "test" => check::test(rest),
        "bench" => check::bench(rest),
        "fuzz" => fuzz::fuzz(rest),
        "check" => check::check(),
        "ci" => check::ci(),
        "deps" => rules::deps(),
        "neutral" => neutral::check(&workspace::packages()?),
        "unsafe" => rules::unsafe_code(rest),
        "spec" => {
            spec::spec(rest)?;
            specification::specification(rest)
        }
        "words" => words::words(rest),
        "size" => rules::size(),
        "metrics" => metrics::metrics(),
        "coverage" => coverage::coverage(),
        "artifacts" => {
            check::print_artifacts();
            Ok(())
        }
        "help" | "--help" | "-h" => {
            print!("{USAGE}");
            Ok(())
        }
        other => bail!("no command `{other}`\n{USAGE}"),
    }
}
