//! The project's own build tool, called as `cargo xtask COMMAND`.
//!
//! The Makefile is the front door for users; every rule in it is one command here, so that
//! developers, `make` and continuous integration run the same code.
#![forbid(unsafe_code)]

mod build;
mod process;
mod toolchain;

use anyhow::{Result, bail};

const USAGE: &str = "\
usage: cargo xtask COMMAND

  build [PACKAGE...]   build everything, or only these packages, into target/artifacts
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
    match command {
        "build" => build::build(rest),
        "help" | "--help" | "-h" => {
            print!("{USAGE}");
            Ok(())
        }
        other => bail!("no command `{other}`\n{USAGE}"),
    }
}
