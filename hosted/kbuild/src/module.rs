//! Builds the Linux driver for channels (`guests/linux`) for the downloaded kernel, against
//! Debian's headers.
//!
//! Its sources are compiled into `parador`. Headers are unpacked for the build only; the cache
//! keeps the module by kernel version and digest of the sources.

use crate::kernel::check_path;
use hosted_command::cache;
use hosted_command::failure::{self, Failure, IoContext};
use hosted_command::fetch::{self, Fetched};
use hosted_command::interrupt::Interruptible;
use hosted_command::scratch::{self, ScratchFolder};
use hosted_command::steps::Step;
use hosted_command::supervise::{self, AtEnd};
use hosted_command::{output_folder, store};
use std::env;
use std::ffi::OsStr;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// File name of the module.
const MODULE: &str = "parador_com.ko";
/// Name prefix of the folders of running builds.
const WORK: &str = ".module-";
const SOURCES: [(&str, &str); 3] = [
    ("Kbuild", include_str!("../../../guests/linux/Kbuild")),
    ("parador_com.h", include_str!("../../../guests/linux/parador_com.h")),
    ("parador_com.c", include_str!("../../../guests/linux/parador_com.c")),
];
const ADVICE: &str = "building the channel driver requires make, libelf1 and gcc (for AArch64 \
                      gcc-aarch64-linux-gnu); install.sh installs them";

/// Returns the module for this kernel, and the result for messages.
pub fn channels(
    kernel: &Fetched,
    step: &Step,
    interruptible: &Interruptible,
) -> Result<(PathBuf, String), Failure> {
    let mut hasher = DefaultHasher::new();
    SOURCES.hash(&mut hasher);
    let cache = cache::folder()?;
    let folder = cache.join(format!("parador_com_{}_{:016x}", kernel.version(), hasher.finish()));
    let module = folder.join(MODULE);
    if store::is_whole(&folder, MODULE) {
        return Ok((module, "cached".to_owned()));
    }
    scratch::remove_abandoned(&cache, WORK);
    let work =
        ScratchFolder::new_in(&cache, WORK).map_err(|error| cache::failed(&cache, &error))?;
    interruptible.remove_on_signal(work.path());
    check_path(work.path())?;
    let headers = work.path().join("headers");
    let packages = fetch::kernel_headers(kernel, &headers, step)?;

    let source = work.path().join("source");
    fs::create_dir(&source).file_error("create the folder", &source)?;
    for (name, text) in SOURCES {
        let path = source.join(name);
        fs::write(&path, text).file_error("write", &path)?;
    }
    step.now("compiling");
    // Replaces Debian's own Makefile there, which contains an absolute path.
    let sources = headers.join("usr/src");
    let makefile = sources.join(&packages.common).join("Makefile");
    let mut argument = OsStr::new("M=").to_owned();
    argument.push(&source);
    let (prefix, architecture) = kernel.architecture.tools();
    run("make", |make| {
        make.arg(format!("ARCH={architecture}")).arg(format!("CROSS_COMPILE={prefix}"));
        make.arg("-C").arg(sources.join(&packages.headers));
        make.arg("-f").arg(makefile).arg(argument).arg("modules")
    })?;
    let made = source.join(MODULE);
    run(&format!("{prefix}strip"), |strip| strip.arg("--strip-debug").arg(&made))?;

    let kept = work.path().join("kept");
    fs::create_dir(&kept).file_error("create the folder", &kept)?;
    let path = kept.join(MODULE);
    fs::rename(&made, &path).file_error("write", &path)?;
    store::exclude_writers(&kept).file_error("change", &kept)?;
    output_folder::sync(&kept).file_error("write", &kept)?;
    let put = || store::put_whole(&kept, &folder, MODULE);
    interruptible.uninterrupted(put).file_error("create", &folder)?;
    Ok((module, "built".to_owned()))
}

/// Runs a build tool. Its environment is nearly empty, because variables could change the result.
fn run(name: &str, arguments: impl FnOnce(&mut Command) -> &mut Command) -> Result<(), Failure> {
    let mut command = supervise::command(OsStr::new(name), AtEnd::Terminate)
        .map_err(|failure| failure.help(ADVICE))?;
    command.env_clear().env("LC_ALL", "C").stdin(Stdio::null());
    command.env("PATH", env::join_paths(supervise::search_path()).unwrap_or_default());
    let output = arguments(&mut command).output().start_error(name)?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    let message = format!("cannot build the channel driver: {name} failed:\n{}", text.trim_end());
    Err(Failure::new(failure::UNAVAILABLE, message).help(ADVICE))
}
