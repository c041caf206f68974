//! `parador kernel` with a substitute for make: cache contents, cleanup and messages. System tests
//! check that the kernel works.

use crate::support::{Folder, code, errors, send, wait_for, wait_for_end};
use rustix::process::Signal;
use serde_json::Value;
use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, SystemTime};

/// Makes what Linux' own Makefile would.
const MAKE: &str = "\
echo \"$@\" >>\"$(dirname \"$0\")/../called\"
while [ \"$1\" != -C ]; do shift; done
cd \"$2\"
for target; do
    case $target in
    INSTALL_MOD_PATH=*) modules=${target#*=} ;;
    vmlinux)
        mkdir -p arch/x86/boot arch/x86/include include scripts tools/objtool
        touch arch/x86/Makefile arch/x86/Makefile_32.cpu tools/objtool/objtool Module.symvers
        echo \"  CC      mm/slub.o\"
        echo symbols >System.map
        echo boots >arch/x86/boot/bzImage
        echo kernel >vmlinux
        ;;
    allnoconfig) : >.config ;;
    modules_install)
        echo \"  INSTALL $modules/a.ko\"
        mkdir -p \"$modules/lib/modules/6.1\"
        ln -s /nowhere \"$modules/lib/modules/6.1/build\"
        ;;
    M=*) echo module >\"${target#*=}/a.ko\" ;;
    esac
done";

/// Stand-ins, and a source of Linux without content.
fn folder(make: &str) -> Folder {
    let folder = Folder::new("");
    for name in ["bc", "bison", "flex", "depmod"] {
        folder.script(&format!("programs/{name}"), "exit 1");
    }
    for name in ["gcc", "ld", "pahole"] {
        folder.script(&format!("programs/{name}"), "echo version 1");
    }
    // The substitute of the kernel has no DWARF.
    folder.script("programs/objcopy", ":");
    folder.script("programs/make", make);

    folder.script("programs/patch", "cat >>\"$(dirname \"$0\")/../patched\"");
    fs::create_dir_all(folder.path("linux/arch/x86/kernel")).unwrap();
    for (name, text) in [
        ("Kbuild", ""),
        ("Makefile", "VERSION = 6\nPATCHLEVEL = 1\nSUBLEVEL = 192\n"),
        ("arch/x86/Kconfig", ""),
    ] {
        folder.write(&format!("linux/{name}"), text.as_bytes());
    }
    folder
}

fn kernel(folder: &Folder, arguments: &[&str]) -> Command {
    let mut command = folder.parador(&["kernel"]);
    let path = format!("{}:/bin:/usr/bin", folder.path("programs").display());
    command.args(arguments).args(["--source", "linux"]).env("PATH", path);
    command
}

fn build(folder: &Folder, arguments: &[&str]) -> Output {
    kernel(folder, &[&["build"], arguments].concat()).output().unwrap()
}

const CACHE: &str = "cache/parador/kernels";

#[test]
fn a_kernel_is_built_once() {
    let folder = folder(MAKE);
    let output = build(&folder, &["-o", "result"]);
    assert_eq!(code(&output), 0, "{}", errors(&output));
    let digest = "a0c936696eb7d5ee3192bf53b9d281cecbb40ca9db520de72cb95817ad92ac72";
    let text = String::from_utf8_lossy(&output.stdout);
    let (shown, path) = text.trim_end().split_once("  ").unwrap();
    assert_eq!((shown, path), (digest, "result/vmlinux"));
    let names = ["System.map", "bzImage", "config", "cost.json", "headers", "kernel.json"];
    assert_eq!(folder.list("result"), [&names[..], &["modules", "vmlinux"]].concat());
    assert_eq!(folder.list("result/modules/lib/modules/6.1"), [""; 0]);
    assert!(errors(&output).contains("Linux 6.1.192, previrt, 1 files compiled"));
    assert_eq!(folder.list(CACHE).len(), 1);

    let calls = folder.read("called");
    let output = build(&folder, &[]);
    assert_eq!(code(&output), 0, "{}", errors(&output));
    assert!(errors(&output).contains("cached, built 20"), "{}", errors(&output));
    assert_eq!(folder.read("called"), calls);

    // Another one, not instead of the first.
    assert_eq!(code(&build(&folder, &["--variant", "plain"])), 0);
    assert_eq!(folder.list(CACHE).len(), 2);

    folder.write("result/vmlinux", b"older");
    assert_eq!(code(&build(&folder, &["-o", "result"])), 0);
    assert_eq!(folder.read("result/vmlinux"), b"kernel\n");
    let output = build(&folder, &["-o", "programs"]);
    assert_eq!(code(&output), 64, "{}", errors(&output));
}

#[test]
fn only_kernels_made_here_are_replaced() {
    let folder = folder(MAKE);
    folder.write("linux/vmlinux", b"mine");
    fs::create_dir_all(folder.path("below/deep")).unwrap();
    let refused = |output: &str, text: &str| {
        let output = build(&folder, &["-o", output]);
        assert_eq!(code(&output), 64, "{}", errors(&output));
        assert!(errors(&output).contains(text), "{}", errors(&output));
        assert!(!folder.path("called").exists(), "before the build");
    };
    refused("linux", "contains linux/Kbuild");
    refused("system.toml", "is not a folder");
    refused(".", "the current folder");
    refused("below/..", "the current folder");
    refused("/proc", "a mount point");
    assert_eq!(folder.read("linux/vmlinux"), b"mine");

    // A file that appears during the build.
    let late = "late=$(dirname \"$0\")/../late; mkdir -p \"$late\"; : >\"$late/notes\"";
    folder.script("programs/make", &format!("{late}\n{MAKE}"));
    let output = build(&folder, &["-o", "late"]);
    assert_eq!(code(&output), 64, "{}", errors(&output));
    assert!(errors(&output).contains("contains late/notes"), "{}", errors(&output));
    assert_eq!(folder.list("late"), ["notes"]);
    assert_eq!(folder.list(CACHE).len(), 1, "the kernel is kept");
}

#[test]
fn the_target_of_a_link_is_replaced() {
    let folder = folder(MAKE);
    symlink("below/result", folder.path("link")).unwrap();
    let copy = || {
        let output = build(&folder, &["-o", "link"]);
        assert_eq!(code(&output), 0, "{}", errors(&output));
        assert_eq!(folder.read("below/result/vmlinux"), b"kernel\n");
        assert!(folder.path("link").is_symlink());
        assert_eq!(folder.list("below"), ["result"]);
        String::from_utf8(output.stdout).unwrap()
    };
    let shown = copy();
    folder.write("below/result/vmlinux", b"older");
    // Left by a killed process; and of another program.
    for name in ["below/.parador-kernel-left", ".partial-other"] {
        fs::create_dir(folder.path(name)).unwrap();
        let time = SystemTime::now() - Duration::from_secs(3600);
        File::open(folder.path(name)).unwrap().set_modified(time).unwrap();
    }
    assert_eq!(copy(), shown);
    assert!(shown.ends_with("  link/vmlinux\n"), "{shown}");
    assert!(folder.path(".partial-other").exists());
}

#[test]
fn a_kernel_built_with_any_umask_is_used() {
    for umask in ["000", "002", "077"] {
        let folder = folder(MAKE);
        let program = env!("CARGO_BIN_EXE_parador");
        let build = || {
            let script = format!("umask {umask}; exec {program} kernel build --source linux");
            let mut command = Command::new("sh");
            command.args(["-c", &script]).current_dir(folder.path(""));
            let path = format!("{}:/bin:/usr/bin", folder.path("programs").display());
            command.env("PATH", path).env("XDG_CACHE_HOME", folder.path("cache"));
            let output = command.env("PARADOR_ARTIFACTS", "programs").output().unwrap();
            assert_eq!(code(&output), 0, "{umask}: {}", errors(&output));
            errors(&output)
        };
        assert!(build().contains("1 files compiled"));
        assert!(build().contains("cached, built 20"), "{umask}");
        // A kernel that others may change is not used, for a reason that is named.
        let kernel = format!("{CACHE}/{}", folder.list(CACHE)[0]);
        let loose = Permissions::from_mode(0o777);
        fs::set_permissions(folder.path(&kernel), loose).unwrap();
        let text = build();
        assert!(text.contains("is writable by other users (mode 777)"), "{text}");
    }
}

#[test]
fn modules_are_built_for_it() {
    let folder = folder(MAKE);
    fs::create_dir(folder.path("driver")).unwrap();
    // What is wrong with the folder is said before a kernel is built.
    let refused = |name: &str, expected: i32, text: &str| {
        let output = kernel(&folder, &["module", name]).output().unwrap();
        assert_eq!(code(&output), expected, "{}", errors(&output));
        assert!(errors(&output).contains(text), "{}", errors(&output));
        assert!(!folder.path("called").exists());
    };
    refused("nowhere", 66, "cannot find the module source folder nowhere");
    refused("system.toml", 65, "system.toml is not a folder");
    refused("driver", 65, "driver has neither Kbuild nor Makefile");
    folder.write("driver/Makefile", b"all:\n");
    refused("driver", 65, "defines no module");
    folder.write("driver/Kbuild", b"obj-m := a.o\n");
    let output = kernel(&folder, &["module", "driver"]).output().unwrap();
    assert_eq!(code(&output), 0, "{}", errors(&output));
    assert_eq!(folder.read("driver/a.ko"), b"module\n");
    let output = kernel(&folder, &["module", "driver", "--kernel", "programs"]).output().unwrap();
    assert_eq!(code(&output), 66, "{}", errors(&output));
}

#[test]
fn symbols_are_those_of_a_kernel() {
    let folder = folder(MAKE);
    folder.write("file", b"no kernel");
    for (kernel, expected) in [("file", 65), ("nowhere", 66)] {
        let symbols = folder.parador(&["kernel", "symbols", kernel, "symbols"]).output().unwrap();
        assert_eq!(code(&symbols), expected, "{}", errors(&symbols));
        assert!(errors(&symbols).contains(kernel) && !folder.path("symbols").exists());
    }
}

#[test]
fn what_is_wrong_is_named() {
    let folder = folder(MAKE);
    // The host's own.
    fs::remove_file(folder.path("programs/patch")).unwrap();
    folder.write("linux/arch/x86/kernel/head64.c", b"something else\n");
    let output = build(&folder, &[]);
    assert_eq!(code(&output), 65);
    let text = errors(&output);
    assert!(text.contains("0001-layout-checks.patch") && text.contains("head64.c"), "{text}");
    fs::remove_file(folder.path("linux/Kbuild")).unwrap();
    assert_eq!(code(&build(&folder, &[])), 65);
    folder.write("archive", b"not compressed");
    for (source, expected) in [("archive", 65), ("nowhere", 66)] {
        fs::rename(folder.path("linux"), folder.path("was")).unwrap_or_default();
        fs::rename(folder.path(source), folder.path("linux")).unwrap_or_default();
        let output = build(&folder, &[]);
        assert_eq!(code(&output), expected, "{}", errors(&output));
        fs::remove_file(folder.path("linux")).unwrap_or_default();
    }
    assert_eq!(folder.list(CACHE), [""; 0]);
}

#[test]
fn a_compiler_that_fails_leaves_nothing() {
    let folder = folder("echo x.c:1: it is wrong >&2; exit 2");
    let output = build(&folder, &[]);
    assert_eq!(code(&output), 70);
    assert!(errors(&output).contains("x.c:1: it is wrong"), "{}", errors(&output));
    assert_eq!(folder.list(CACHE), [""; 0]);
}

#[test]
fn an_interrupted_build_leaves_nothing() {
    let folder = folder("echo $$ >\"$(dirname \"$0\")/../started\"; exec sleep 60");
    let mut child = kernel(&folder, &["build"]).stderr(Stdio::null()).spawn().unwrap();
    let make = wait_for(&folder.path("started"));
    // Not SIGINT, which what has started the tests may ignore.
    send(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(143));
    wait_for_end(&make);
    assert_eq!(folder.list(CACHE), [""; 0]);
}

/// Waits in `make` until the file `go` is there, 30 s at most.
fn slow_make() -> String {
    let wait = "echo $$ >>\"$(dirname \"$0\")/../started\"
for _ in $(seq 600); do [ -e \"$(dirname \"$0\")/../go\" ] && break; sleep 0.05; done";
    format!("{wait}\n{MAKE}")
}

#[test]
fn two_builds_of_one_kernel_share_it() {
    let folder = folder(&slow_make());
    let start = || {
        let mut command = kernel(&folder, &["build"]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let first = start();
    wait_for(&folder.path("started"));
    let mut second = start();
    // It reports at once that it waits, and for which process.
    let mut said = String::new();
    let mut lines = BufReader::new(second.stderr.take().unwrap());
    while !said.contains("waiting for another build") {
        said.clear();
        assert_ne!(lines.read_line(&mut said).unwrap(), 0);
    }
    assert!(said.contains(&format!("process {}", first.id())), "{said}");
    folder.write("go", b"");
    let [first, second] = [first, second].map(|child| child.wait_with_output().unwrap());
    assert_eq!((code(&first), code(&second)), (0, 0), "{}", errors(&first));
    assert_eq!(first.stdout, second.stdout);
    let calls = String::from_utf8(folder.read("called")).unwrap();
    assert_eq!(calls.matches("vmlinux bzImage modules").count(), 1, "{calls}");
    assert_eq!(folder.list(CACHE).len(), 1);
}

#[test]
fn the_second_build_continues_if_the_first_is_killed() {
    let folder = folder(&slow_make());
    let mut first = kernel(&folder, &["build"]).stderr(Stdio::null()).spawn().unwrap();
    wait_for(&folder.path("started"));
    let second = kernel(&folder, &["build"]).stdout(Stdio::piped()).spawn().unwrap();
    first.kill().unwrap();
    first.wait().unwrap();
    folder.write("go", b"");
    assert_eq!(code(&second.wait_with_output().unwrap()), 0);
    let left = folder.list(CACHE);
    let whole = left.iter().filter(|name| name.starts_with("linux-previrt-")).count();
    assert_eq!(whole, 1, "{left:?}");
    assert!(!left.iter().any(|name| name.starts_with(".lock-")), "{left:?}");
}

#[test]
fn kernels_are_listed_and_removed() {
    let folder = folder(MAKE);
    let parador = |arguments: &[&str]| {
        let output = folder.parador(arguments).output().unwrap();
        assert_eq!(code(&output), 0, "{}", errors(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let list = || parador(&["kernel", "list"]);
    let json =
        || -> Value { serde_json::from_str(&parador(&["kernel", "list", "--json"])).unwrap() };
    assert!(list().contains("parador kernel build"));
    assert_eq!(json(), serde_json::json!({ "folder": null, "kernels": [] }));
    assert_eq!(parador(&["kernel", "prune"]), "");
    assert!(!folder.path("cache").exists(), "looking makes nothing");

    // One of another recipe, as a former version left it.
    build(&folder, &[]);
    let name = folder.list(CACHE).remove(0);
    build(&folder, &["--variant", "plain"]);
    let kernels = json()["kernels"].as_array().unwrap().clone();
    assert_eq!(kernels.len(), 2);
    let previrt = kernels.iter().find(|kernel| kernel["kind"] == "previrt").unwrap();
    assert_eq!((&previrt["name"], &previrt["linux"]), (&name.clone().into(), &"6.1.192".into()));
    let defaults = kernels.iter().filter(|kernel| kernel["is_default"] == true);
    assert_eq!(defaults.collect::<Vec<_>>(), [previrt]);
    let text = list();
    let marked: Vec<_> = text.lines().filter(|line| line.starts_with('*')).collect();
    assert!(marked.len() == 1 && marked[0].contains(&name), "{text}");

    // A virtual machine gets that one, whichever was used last.
    let run = folder.parador(&["run", "--backend", "process"]).output().unwrap();
    assert_eq!(code(&run), 65, "{}", errors(&run));
    assert!(errors(&run).contains(&format!("{name}/vmlinux")), "{}", errors(&run));

    assert_eq!(parador(&["kernel", "prune", "--keep", "1"]), "", "one of each variant stays");
    let removed = parador(&["kernel", "prune", "--all"]);
    assert_eq!(removed.lines().count(), 2, "{removed}");
    assert!(removed.contains(&format!("removed {name}\n")), "{removed}");
    assert!(removed.contains("removed linux-plain-"), "{removed}");
    assert_eq!(folder.list(CACHE), [""; 0]);
    let run = folder.parador(&["run"]).output().unwrap();
    assert_eq!(code(&run), 66, "{}", errors(&run));
    assert!(errors(&run).contains("`parador kernel build` builds one"), "{}", errors(&run));
}

#[test]
fn a_cache_that_cannot_be_used_is_named() {
    let folder = folder(MAKE);
    folder.write("file", b"");
    let build = |cache: &Path| kernel(&folder, &["build"]).env("XDG_CACHE_HOME", cache).output();
    let output = build(&folder.path("file")).unwrap();
    assert_eq!(code(&output), 71, "{}", errors(&output));
    assert!(errors(&output).contains("set XDG_CACHE_HOME"), "{}", errors(&output));

    // Others may write to it.
    fs::create_dir_all(folder.path("open/parador")).unwrap();
    fs::set_permissions(folder.path("open"), Permissions::from_mode(0o777)).unwrap();
    let output = build(&folder.path("open")).unwrap();
    assert_eq!(code(&output), 77, "{}", errors(&output));
    assert!(errors(&output).contains("is writable by other users"), "{}", errors(&output));

    // There is no place for one: this copy is in no source tree.
    folder.copy_parador(&folder.path("parador"));
    let mut command = Command::new(folder.path("parador"));
    command.args(["kernel", "list"]).env_remove("XDG_CACHE_HOME").env_remove("HOME");
    let output = command.output().unwrap();
    assert_eq!(code(&output), 66, "{}", errors(&output));
    assert!(errors(&output).contains("neither XDG_CACHE_HOME nor HOME"), "{}", errors(&output));
    // In a source tree it is there.
    let tree = folder.path("tree");
    for name in ["", "xtask", "kernel/image", "hosted/cli", "bin"] {
        fs::create_dir_all(tree.join(name)).unwrap();
        fs::write(tree.join(name).join("Cargo.toml"), "").unwrap();
    }
    fs::rename(folder.path("parador"), tree.join("bin/parador")).unwrap();
    let kernels = tree.join("target/cache/parador/kernels");
    fs::create_dir_all(&kernels).unwrap();
    let mut command = Command::new(tree.join("bin/parador"));
    command.args(["kernel", "list"]).env_remove("XDG_CACHE_HOME").env_remove("HOME");
    let output = command.env_remove("CARGO_TARGET_DIR").output().unwrap();
    assert_eq!(code(&output), 0, "{}", errors(&output));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains(kernels.to_str().unwrap()), "{text}");
}

#[test]
fn an_archive_cannot_write_elsewhere() {
    let folder = folder(MAKE);
    fs::create_dir(folder.path("outside")).unwrap();
    // A link, and a file below it.
    let script = "\
ln -s \"$PWD/outside\" linux/lib && tar -cf source.tar linux && rm linux/lib
mkdir linux/lib && echo evil >linux/lib/evil && tar -rf source.tar linux/lib/evil
xz source.tar && rm -r linux && mv source.tar.xz linux";
    let mut command = Command::new("sh");
    command.args(["-ec", script]).current_dir(folder.path(""));
    assert!(command.status().unwrap().success());
    let output = build(&folder, &[]);
    assert_eq!(code(&output), 65, "{}", errors(&output));
    assert!(errors(&output).contains("lib is a link to"), "{}", errors(&output));
    assert_eq!(folder.list("outside"), [""; 0]);
    assert_eq!(folder.list(CACHE), [""; 0]);
}
