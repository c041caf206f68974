//! `parador afterburn`: pre-virtualization of kernels (`wedge/afterburn`) from the command line and
//! from compilers.

use clap::Subcommand;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::input;
use hosted_command::output;
use hosted_command::supervise;
use hosted_loader::MAX_KERNEL;
use std::convert::Infallible;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use wedge_afterburn::{Error, Exceptions, Pad, assembler};

/// Subcommands of `parador afterburn`.
#[derive(Debug, Subcommand)]
pub enum AfterburnCommand {
    /// Create a folder for gcc's option -B with an assembler that pads and records sensitive
    /// instructions.
    #[command(after_help = "\
Example:
  parador afterburn tools build/tools
  make KCFLAGS=-Bbuild/tools KAFLAGS=-Bbuild/tools

gcc passes no options to the assembler, so they are environment variables:
  PARADOR_AFTERBURN=pad=8,skip=GLOB:GLOB,stats=FILE,keep=FOLDER
pad    least length of a site in bytes
skip   output files that are not kernel code (vDSO, boot loader); `*` and `?` as in file names
stats  file to append statistics to, one JSON object per input
keep   folder for the rewritten assembler files
  PARADOR_AS  the real assembler, if it is not the first `as` in PATH")]
    Tools {
        /// The folder.
        folder: PathBuf,
    },
    /// Act as the assembler: rewrite the input, then run the real assembler.
    #[command(disable_help_flag = true)]
    As {
        /// Arguments of the assembler.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "ARGUMENTS")]
        arguments: Vec<OsString>,
    },
    /// Print the rewritten assembler input.
    #[command(after_help = "Example: gcc -S -o - x.c | parador afterburn rewrite -")]
    Rewrite {
        /// Assembler file; - is standard input.
        file: PathBuf,
        /// Least length of a site in bytes.
        #[arg(long, default_value_t = Pad::default().0, value_parser = clap::value_parser!(u8).range(5..=64))]
        pad: u8,
        /// Write to this file instead of standard output.
        #[arg(short, long, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Check a kernel or module for missed sensitive instructions and for overlapping padding.
    #[command(after_help = "\
Example: parador afterburn verify vmlinux

All bytes of executable sections are checked as 64-bit code, except the entry in the PVH note and
the given symbols. The report lists all exceptions. Bytes that may be sensitive instructions or data
count as unjudged.

Exit codes: 0 nothing missed or unjudged, all sites correct, no overlapping padding; 1 otherwise;
64 unknown symbol; 65 not an ELF file, damaged, or without a site table of this version; 66 no such
file.")]
    Verify {
        /// The kernel or module.
        file: PathBuf,
        /// Print the report as JSON.
        #[arg(long)]
        json: bool,
        /// Entry of 16-bit code, which is followed along near branches. Can be given several times.
        #[arg(long, value_name = "SYMBOL")]
        code16: Vec<String>,
        /// Entry of 32-bit code, as --code16.
        #[arg(long, value_name = "SYMBOL")]
        code32: Vec<String>,
        /// Data between instructions: all bytes of the symbol. Can be given several times.
        #[arg(long, value_name = "SYMBOL")]
        data: Vec<String>,
    },
    /// Create a null image: the kernel, with a call to a stub at every sensitive instruction.
    #[command(after_help = "\
Example:
  parador afterburn null vmlinux -o vmlinux.null
  qemu-system-x86_64 -M q35 -kernel vmlinux.null ...

The kernel must reserve space for the stubs between its symbols parador_arena and parador_arena_end
and, with --count, an object parador_counters of 1 KiB: 64 bits per kind, by index (`wedge/sites`).")]
    Null {
        /// The kernel, linked.
        file: PathBuf,
        /// The null image.
        #[arg(short, long, value_name = "FILE")]
        output: PathBuf,
        /// Count executions by kind.
        #[arg(long)]
        count: bool,
    },
}

/// Executes the command and returns the exit code.
pub fn run(command: AfterburnCommand) -> Result<u8, Failure> {
    match command {
        AfterburnCommand::Tools { folder } => tools(&folder),
        AfterburnCommand::As { arguments } => match assembler::run(&arguments) {
            Ok(never) => match never {},
            Err(error) => Err(refused(&error)),
        },
        AfterburnCommand::Rewrite { file, pad, output } => {
            let text = read(&file)?;
            let name = file.to_string_lossy();
            let rewritten = wedge_afterburn::rewrite(&text, &name, Pad(pad))
                .map_err(|error| refused(&error.into()))?;
            write(output.as_deref(), rewritten.text.as_ref().unwrap_or(&text))?;
            Ok(0)
        }
        AfterburnCommand::Verify { file, json, code16, code32, data } => {
            verify(&file, json, &Exceptions { code16, code32, data })
        }
        AfterburnCommand::Null { file, output, count } => {
            let null = wedge_afterburn::null(&file, &read(&file)?, count);
            let null = null.map_err(|error| refused(&error))?;
            write(Some(&output), &null.file)?;
            write(None, format!("{}\n{}\n", output.display(), null.report).as_bytes())?;
            Ok(0)
        }
    }
}

/// Exit code if the verification fails.
const NOT_VERIFIED: u8 = 1;

fn verify(file: &Path, json: bool, exceptions: &Exceptions) -> Result<u8, Failure> {
    let report = wedge_afterburn::verify(file, &read(file)?, exceptions);
    let report = report.map_err(|error| refused(&error))?;
    let text = match json {
        true => serde_json::to_string_pretty(&report).map_err(|error| {
            Failure::new(failure::INTERNAL, format!("cannot serialize JSON: {error}"))
        })?,
        false => report.to_string().trim_end().to_owned(),
    };
    write(None, format!("{text}\n").as_bytes())?;
    Ok(if report.is_good() { 0 } else { NOT_VERIFIED })
}

/// Reads a file, or standard input if it is `-`.
fn read(path: &Path) -> Result<Vec<u8>, Failure> {
    if path != Path::new("-") {
        return input::bytes(path, MAX_KERNEL);
    }
    let mut text = Vec::new();
    let read = io::stdin().lock().read_to_end(&mut text);
    read.os_error("read standard input")?;
    Ok(text)
}

fn write(path: Option<&Path>, text: &[u8]) -> Result<(), Failure> {
    match path {
        Some(path) => fs::write(path, text).file_error("write", path),
        None => output::print(text),
    }
}

/// Creates the folder for `-B`.
fn tools(folder: &Path) -> Result<u8, Failure> {
    let this = env::current_exe().os_error("find the parador binary")?;
    fs::create_dir_all(folder).file_error("create", folder)?;
    let link = folder.join(assembler::NAME);
    // It may belong to an earlier version of `parador`.
    match fs::remove_file(&link) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            return Err(Failure::file("replace", &link, &error));
        }
        _ => {}
    }
    symlink(this, &link).file_error("create", &link)?;
    output::print(format!("{}\n", folder.display()))?;
    Ok(0)
}

/// Acts as the assembler if `parador` was started under its name. Returns the exit code if that
/// fails; `None` in an ordinary `parador`.
pub fn become_assembler() -> Option<ExitCode> {
    let mut arguments = supervise::arguments();
    let name = arguments.next()?;
    if Path::new(&name).file_name()? != assembler::NAME {
        return None;
    }
    let arguments: Vec<OsString> = arguments.collect();
    let result: Result<Infallible, Error> = assembler::run(&arguments);
    let Err(error) = result;
    // Format of compiler errors, which editors parse.
    match &error {
        Error::Misunderstood(error) => {
            eprintln!("{}: error: afterburn: {}", error.source, error.reason);
        }
        _ => eprintln!("parador afterburn: error: {error}"),
    }
    Some(ExitCode::from(error.code()))
}

/// Creates the failure of an afterburner error.
fn refused(error: &Error) -> Failure {
    let message = match error {
        Error::File { action, path, error } => {
            format!("cannot {action} {}: {}", path.display(), failure::describe(error))
        }
        _ => error.to_string(),
    };
    Failure::new(error.code(), message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hosted_command::input::testing::with_named_pipe;

    #[test]
    fn a_named_pipe_is_not_waited_for() {
        assert_eq!(with_named_pipe(read).unwrap_err().code(), failure::BAD_CONFIG);
    }
}
