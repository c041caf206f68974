//! The assembler as a compiler runs it: rewrites the input and executes the real assembler.
//!
//! gcc looks for a program `as` in the folder of its option `-B` first. It passes none of the
//! afterburner's options, so these are in the environment: [`OPTIONS`]. The rewritten text is a
//! memory file on the real assembler's standard input, so no process waits and no file remains,
//! however the assembler ends.

use crate::error::Error;
use crate::rewrite::{self, Pad, Rewritten};
use rustix::fs::{MemfdFlags, memfd_create};
use serde::Serialize;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::env;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Program name under which the executable acts as the assembler.
pub const NAME: &str = "as";
/// Environment variable with the options: `pad=8,skip=GLOB:GLOB,stats=FILE,keep=FOLDER,off`.
pub const OPTIONS: &str = "PARADOR_AFTERBURN";
/// Environment variable with the path of the real assembler, if it is not the first in `PATH`.
pub const ASSEMBLER: &str = "PARADOR_AS";

/// The options from the environment.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct Options {
    /// Minimum bytes per site.
    pub pad: Pad,
    /// Pass every text to the assembler unchanged.
    pub off: bool,
    /// Outputs whose text is passed on unchanged because it is not kernel code. `*` and `?` as in
    /// file names; a pattern matches the whole path or the part after a `/`.
    pub skip: Vec<String>,
    /// File to which one line of JSON is appended for each text.
    pub stats: Option<PathBuf>,
    /// Folder to which rewritten texts are written as well.
    pub keep: Option<PathBuf>,
}

impl Options {
    /// Parses the value of [`OPTIONS`].
    pub fn parse(text: &str) -> Result<Self, Error> {
        let mut options = Self::default();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (name, value) = part.split_once('=').unwrap_or((part, ""));
            match name {
                "pad" => options.pad = pad(value)?,
                "off" if value.is_empty() => options.off = true,
                "skip" => options.skip.extend(value.split(':').map(str::to_owned)),
                "stats" => options.stats = Some(value.into()),
                "keep" => options.keep = Some(value.into()),
                _ => {
                    let known = "pad, off, skip, stats, keep";
                    return Err(Error::Usage(format!(
                        "{OPTIONS}: no option `{part}`; there are {known}"
                    )));
                }
            }
        }
        Ok(options)
    }
}

fn pad(value: &str) -> Result<Pad, Error> {
    let refuse =
        || Error::Usage(format!("{OPTIONS}: pad={value}: a pad has 5 (a jump) to 64 bytes"));
    value.parse().ok().filter(|bytes| (5..=64).contains(bytes)).map(Pad).ok_or_else(refuse)
}

/// Assembles as the arguments demand; returns only after an error.
pub fn run(arguments: &[OsString]) -> Result<Infallible, Error> {
    let assembler = real()?;
    let options = match env::var(OPTIONS) {
        Ok(text) => Options::parse(&text)?,
        Err(env::VarError::NotPresent) => Options::default(),
        Err(_) => return Err(Error::Usage(format!("{OPTIONS} is not UTF-8"))),
    };
    let mut command = Command::new(&assembler);
    match Call::parse(arguments)? {
        Call::Other => {
            command.args(arguments);
        }
        Call::Assemble { .. } if options.off => {
            command.args(arguments);
        }
        Call::Assemble { inputs, output } => {
            let skipped =
                options.skip.iter().any(|glob| path_matches(glob.as_bytes(), output.as_bytes()));
            match if skipped { None } else { text(arguments, &inputs, &output, &options)? } {
                Some(file) => {
                    let others = |index: &usize| !inputs.contains(index);
                    command
                        .args((0..arguments.len()).filter(others).map(|index| &arguments[index]));
                    command.arg("-").stdin(file);
                }
                None => {
                    command.args(arguments);
                }
            }
        }
    }
    Err(Error::file("start", &assembler, command.exec()))
}

/// The text to assemble if it differs from the one that the arguments name.
fn text(
    arguments: &[OsString],
    inputs: &[usize],
    output: &OsStr,
    options: &Options,
) -> Result<Option<File>, Error> {
    let standard_input = inputs.is_empty() || inputs.iter().any(|&index| arguments[index] == "-");
    let mut text = Vec::new();
    let mut name = None;
    // The assembler treats several files as one text.
    for &index in inputs {
        if arguments[index] != "-" {
            let path = Path::new(&arguments[index]);
            text.extend(fs::read(path).map_err(|error| Error::file("read", path, error))?);
            name.get_or_insert(path);
        }
    }
    if standard_input {
        let read = io::stdin().lock().read_to_end(&mut text);
        read.map_err(|error| Error::file("read", Path::new("standard input"), error))?;
    }
    let name = name.unwrap_or(Path::new("{standard input}")).to_string_lossy();
    let mut rewritten = rewrite::rewrite(&text, &name, options.pad)?;
    let text = match rewritten.text.take() {
        Some(rewritten) => Some(rewritten),
        // Standard input cannot be read a second time.
        None if standard_input => Some(text),
        None => None,
    };
    if let (Some(text), Some(folder)) = (&text, &options.keep) {
        let flat: Vec<u8> =
            output.as_bytes().iter().map(|&byte| if byte == b'/' { b'_' } else { byte }).collect();
        let mut path = folder.join(OsStr::from_bytes(&flat)).into_os_string();
        path.push(".s");
        let path = PathBuf::from(path);
        let kept = fs::create_dir_all(folder).and_then(|()| fs::write(&path, text));
        kept.map_err(|error| Error::file("write", &path, error))?;
    }
    let file = text
        .map(|text| memory_file(&text))
        .transpose()
        .map_err(|error| Error::file("write", Path::new("a file in memory"), error))?;
    if let Some(path) = &options.stats {
        note(path, output, &rewritten)?;
    }
    Ok(file)
}

fn memory_file(text: &[u8]) -> io::Result<File> {
    let mut file = File::from(memfd_create("assembly", MemfdFlags::CLOEXEC)?);
    file.write_all(text)?;
    file.rewind()?;
    Ok(file)
}

/// One line of statistics about a text.
#[derive(Serialize)]
struct Note<'a> {
    output: &'a str,
    /// CPU time of this process, in microseconds.
    cpu_us: u64,
    padded: BTreeMap<&'a str, u32>,
    recorded: BTreeMap<&'a str, u32>,
}

fn note(path: &Path, output: &OsStr, rewritten: &Rewritten) -> Result<(), Error> {
    let output = &output.to_string_lossy();
    let named = |counts: &BTreeMap<wedge_sites::Kind, u32>| {
        counts.iter().map(|(kind, &count)| (kind.name(), count)).collect()
    };
    let note = Note {
        output,
        cpu_us: cpu_time(),
        padded: named(&rewritten.padded),
        recorded: named(&rewritten.recorded),
    };
    let fail = |error| Error::file("write", path, error);
    let mut line = serde_json::to_vec(&note).map_err(|error| fail(error.into()))?;
    line.push(b'\n');
    let mut file = OpenOptions::new().create(true).append(true).open(path).map_err(fail)?;
    // A single write, so that lines of several processes do not interleave.
    file.write_all(&line).map_err(fail)
}

/// CPU time of this process in microseconds.
fn cpu_time() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::try_from(time).map_or(0, |time| time.as_micros() as u64)
}

/// The command line of the assembler ("Using as", 2).
#[derive(PartialEq, Eq, Debug)]
enum Call {
    /// No text to rewrite: a request for information, or 32-bit code.
    Other,
    /// 64-bit code.
    Assemble {
        /// Indexes of the arguments that are inputs; none means standard input.
        inputs: Vec<usize>,
        output: OsString,
    },
}

impl Call {
    fn parse(arguments: &[OsString]) -> Result<Self, Error> {
        let mut inputs = Vec::new();
        let mut output = OsString::from("a.out");
        let mut index = 0;
        while index < arguments.len() {
            let argument = arguments[index].as_bytes();
            match argument {
                b"-o" => {
                    index += 1;
                    output = arguments.get(index).cloned().unwrap_or_default();
                }
                b"-I"
                | b"-defsym"
                | b"--defsym"
                | b"-MD"
                | b"--MD"
                | b"-debug-prefix-map"
                | b"--debug-prefix-map" => {
                    index += 1;
                }
                b"--32" | b"--version" | b"-version" | b"--help" | b"-help" | b"--target-help" => {
                    return Ok(Self::Other);
                }
                b"--x32" | b"-msyntax=intel" | b"-mnaked-reg" => {
                    let option = String::from_utf8_lossy(argument);
                    return Err(Error::Usage(format!("code for `{option}` is not supported")));
                }
                b"-" => inputs.push(index),
                _ if argument.starts_with(b"@") => {
                    let file = String::from_utf8_lossy(argument);
                    return Err(Error::Usage(format!(
                        "arguments in a file ({file}) are not supported"
                    )));
                }
                _ if argument.starts_with(b"-o") => {
                    output = OsStr::from_bytes(&argument[2..]).to_owned()
                }
                _ if argument.starts_with(b"-") => {}
                _ => inputs.push(index),
            }
            index += 1;
        }
        Ok(Self::Assemble { inputs, output })
    }
}

/// The real assembler: the one that the environment names, or the first in `PATH` that is not this
/// program.
pub fn real() -> Result<PathBuf, Error> {
    if let Some(path) = env::var_os(ASSEMBLER).filter(|path| !path.is_empty()) {
        return Ok(path.into());
    }
    let this = env::current_exe().and_then(fs::canonicalize).ok();
    let path = env::var_os("PATH").ok_or(Error::NoAssembler)?;
    // Relative folders are relative to the current one, where another user may have put a program.
    let folders = env::split_paths(&path).filter(|folder| folder.is_absolute());
    let mut candidates = folders.map(|folder| folder.join(NAME));
    let real = |path: &PathBuf| {
        path.is_file() && fs::canonicalize(path).ok().is_some_and(|path| Some(path) != this)
    };
    candidates.find(real).ok_or(Error::NoAssembler)
}

/// Returns true if a pattern matches the path, or the end of the path after a `/`.
fn path_matches(glob: &[u8], path: &[u8]) -> bool {
    let starts = std::iter::once(0)
        .chain(path.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at + 1));
    starts.into_iter().any(|start| matches(glob, &path[start..]))
}

/// Matches `*` with any text, also with `/`, and `?` with any byte.
fn matches(glob: &[u8], text: &[u8]) -> bool {
    let (mut g, mut t) = (0, 0);
    // Positions to retry from: after the last star, and one byte later in the text.
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match glob.get(g) {
            Some(b'*') => {
                star = Some((g + 1, t));
                g += 1;
            }
            Some(&byte) if byte == b'?' || byte == text[t] => {
                g += 1;
                t += 1;
            }
            _ => match star {
                Some((after, from)) => {
                    (g, t) = (after, from + 1);
                    star = Some((after, t));
                }
                None => return false,
            },
        }
    }
    glob[g..].iter().all(|&byte| byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn call(line: &str) -> Result<Call, Error> {
        Call::parse(&line.split_whitespace().map(OsString::from).collect::<Vec<_>>())
    }

    #[test]
    fn arguments() {
        let assemble = |inputs: &[usize], output: &str| Call::Assemble {
            inputs: inputs.to_vec(),
            output: output.into(),
        };
        assert_eq!(call("--64 -I . -o x.o /tmp/a.s").unwrap(), assemble(&[5], "x.o"));
        assert_eq!(call("-ox.o -").unwrap(), assemble(&[1], "x.o"));
        assert_eq!(call("--gdwarf-5").unwrap(), assemble(&[], "a.out"));
        assert_eq!(call("a.s --32 b.s").unwrap(), Call::Other);
        assert_eq!(call("--version").unwrap(), Call::Other);
        assert!(call("@args").is_err() && call("-msyntax=intel a.s").is_err());
    }

    #[test]
    fn options() {
        let options = Options::parse("pad=5, skip=a:b*,stats=/x,keep=y").unwrap();
        assert_eq!(options.pad, Pad(5));
        assert_eq!(options.skip, ["a", "b*"]);
        assert_eq!(options.stats, Some("/x".into()));
        assert_eq!(Options::parse("").unwrap(), Options::default());
        for wrong in ["pad=4", "pad=", "pad=65", "pads=8", "off=1"] {
            assert!(Options::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn patterns() {
        for (glob, path) in [
            ("arch/x86/boot/*", "arch/x86/boot/a/b.o"),
            ("boot/*.o", "/k/arch/x86/boot/a.o"),
            ("v?so.o", "x/vdso.o"),
            ("*", ""),
            ("a*b*c", "aXbXbXc"),
        ] {
            assert!(path_matches(glob.as_bytes(), path.as_bytes()), "{glob} {path}");
        }
        for (glob, path) in [("boot", "boot/a.o"), ("oot/*", "boot/a.o"), ("a*b", "a"), ("", "x")] {
            assert!(!path_matches(glob.as_bytes(), path.as_bytes()), "{glob} {path}");
        }
    }
}
