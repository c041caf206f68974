//! `make` in a Linux tree, with the settings that all kernels and modules share, and its host
//! programs.

use super::tools::tool;
use super::{DATE, OURS};
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::supervise;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

/// Required programs and their packages.
const NEEDED: [(&str, &str); 11] = [
    ("bc", "bc"),
    ("bison", "bison"),
    ("flex", "flex"),
    ("gcc", "gcc"),
    ("ld", "binutils"),
    ("make", "make"),
    ("pahole", "dwarves"),
    ("cmp", "diffutils"),
    ("depmod", "kmod"),
    ("patch", "patch"),
    ("xz", "xz-utils"),
];
/// A header that Linux' own tools require, and its package.
const NEEDED_HEADER: (&str, &str) = ("/usr/include/libelf.h", "libelf-dev");

/// Least length of a site in bytes: see `wedge/afterburn`.
pub const PAD: &str = "pad=8";
/// 64-bit code that runs outside the kernel's image, where sites are not rewritten: output files as
/// the front end takes them. The same folders contain files of the kernel itself.
pub const SKIPPED: &[&str] = &[
    "arch/x86/boot/*",
    "arch/x86/entry/vdso/vdso-note.o",
    "arch/x86/entry/vdso/vclock_gettime.o",
    "arch/x86/entry/vdso/vgetcpu.o",
    "arch/x86/purgatory/*",
    "arch/x86/realmode/rm/*",
];

/// Types for tracing (BTF). They are made of the kernel's DWARF, of which modules have none. The
/// types need neither the places of local variables, whose computation takes much of the compiler's
/// time, nor more positions than lines. The folder of the build must not enter the build id. pahole
/// runs single-threaded: the order of its threads would change the result.
pub const TYPES: [&str; 5] = [
    "KCFLAGS=-fno-var-tracking -gno-statement-frontiers -gno-variable-location-views \
     -gno-column-info -fdebug-prefix-map=$(CURDIR)=.",
    "KAFLAGS=-fdebug-prefix-map=$(CURDIR)=.",
    "CFLAGS_MODULE=-g0",
    "AFLAGS_MODULE=-g0",
    "PAHOLE_FLAGS=--btf_gen_floats --lang_exclude=rust",
];

/// Checks the required programs of the host.
pub fn check_host() -> Result<(), Failure> {
    let programs = NEEDED
        .iter()
        .filter(|(program, _)| {
            let sbin = Path::new("/sbin").join(program);
            supervise::find(Path::new(program)).is_none() && !sbin.is_file()
        })
        .map(|(_, package)| *package);
    let (header, package) = NEEDED_HEADER;
    let header = (!Path::new(header).is_file()).then_some(package);
    let missing: Vec<&str> = programs.chain(header).collect();
    match missing.is_empty() {
        true => Ok(()),
        false => {
            let message = format!("building a kernel requires {}", missing.join(", "));
            let help = format!("apt-get install {}", missing.join(" "));
            Err(Failure::new(failure::UNAVAILABLE, message).help(help))
        }
    }
}

/// Checks that neither make, the shell, the compiler nor the afterburner's options split the path
/// of a folder of the build.
///
/// # Errors
/// A character that one of them may take as a separator: code 65.
pub fn check_path(path: &Path) -> Result<(), Failure> {
    const ACCEPTED: &str = "/._-+@~";
    let shown = path.to_string_lossy();
    let is_accepted = |found: &char| found.is_alphanumeric() || ACCEPTED.contains(*found);
    match shown.chars().find(|found| !is_accepted(found)) {
        None => Ok(()),
        Some(found) => {
            let text = format!("cannot build in {shown}: `{found}` in the path separates words");
            let help = format!(
                "use a path of letters, digits and `{ACCEPTED}`; XDG_CACHE_HOME sets that of the \
                 cache, TMPDIR that of temporary files"
            );
            Err(Failure::new(failure::BAD_CONFIG, text).help(help))
        }
    }
}

/// Creates a `make` command for a Linux tree. In the folder `bin`, `parador` becomes the assembler
/// and records its CPU time in the file `stats`.
pub fn make(linux: &Path, bin: Option<&Path>, stats: Option<&Path>) -> Result<Command, Failure> {
    // Relative to `srctree` (`.`), so that no path of the host enters a file name.
    let mut compiler = OsString::from("CC=gcc -I$(srctree)/");
    compiler.push(Path::new(OURS).join("include"));
    let mut make = tool("make")?;
    if let Some(bin) = bin {
        let own = env::current_exe().os_error("find the parador binary")?;
        let link = bin.join("as");
        fs::create_dir_all(bin)
            .and_then(|()| match std::os::unix::fs::symlink(own, &link) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
                _ => Ok(()),
            })
            .file_error("create", &link)?;
        compiler.push(" -B");
        compiler.push(bin);
        let mut options = OsString::from(format!("{PAD},skip={}", SKIPPED.join(":")));
        if let Some(stats) = stats {
            options.push(",stats=");
            options.push(stats);
        }
        make.env("PARADOR_AFTERBURN", options);
    }
    let path = linux.join(OURS).join(DATE);
    let date = fs::read_to_string(&path).file_error("read", &path)?;
    make.arg("-C").arg(linux).args(["ARCH=x86_64", "LOCALVERSION="]).arg(compiler);
    make.args(TYPES);
    make.env("KBUILD_BUILD_TIMESTAMP", date.trim())
        .env("KBUILD_BUILD_USER", "parador")
        .env("KBUILD_BUILD_HOST", "parador")
        .env("KBUILD_BUILD_VERSION", "1");
    Ok(make)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_with_separators_are_refused() {
        for path in ["/home/jürgen/.cache/parador/kernels/.work-a1", "/tmp/x+y~1/@v-2_0"] {
            check_path(Path::new(path)).unwrap();
        }
        for path in ["/a,b/c", "/a b", "/a:b", "/a$b", "/a'b", "/a\nb"] {
            let failure = check_path(Path::new(path)).unwrap_err();
            assert_eq!(failure.code(), failure::BAD_CONFIG);
            assert!(failure.to_string().contains(path), "{failure}");
        }
    }
}
