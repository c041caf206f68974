//! `parador kernel` around a stand-in for make: what is kept, what is left, and what is said. That the kernel works is tested
//! by whole systems.

use crate::support::{Folder, code, errors, send, wait_for, wait_for_end};
use rustix::process::Signal;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

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

/// Stand-ins, and a source of Linux that consists of what the edits change.
fn folder(make: &str) -> Folder {
    let folder = Folder::new("");
    for name in ["bc", "bison", "flex", "depmod"] {
        folder.script(&format!("programs/{name}"), "exit 1");
    }
    for name in ["gcc", "ld"] {
        folder.script(&format!("programs/{name}"), "echo version 1");
    }
    folder.script("programs/make", make);

    let edits = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guests/linux/kernel/edits");
    for edit in fs::read_dir(edits).unwrap() {
        let mut path = folder.path("linux");
        for line in fs::read_to_string(edit.unwrap().path()).unwrap().lines() {
            if let Some(name) = line.strip_prefix("+++ b/") {
                path = folder.path("linux").join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
            } else if !line.starts_with("---") && (line.starts_with('-') || line.starts_with('@')) {
                // Pieces do not touch.
                let before = fs::read_to_string(&path).unwrap_or_default();
                let line = line.strip_prefix('-').unwrap_or("//");
                fs::write(&path, format!("{before}{line}\n")).unwrap();
            }
        }
    }
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
    command.env("CARGO_TARGET_DIR", folder.path("target"));
    command
}

fn build(folder: &Folder, arguments: &[&str]) -> Output {
    kernel(folder, &[&["build"], arguments].concat()).output().unwrap()
}

const CACHE: &str = "target/cache/parador";

#[test]
fn a_kernel_is_built_once() {
    let folder = folder(MAKE);
    let output = build(&folder, &["-o", "result"]);
    assert_eq!(code(&output), 0, "{}", errors(&output));
    let digest = "a0c936696eb7d5ee3192bf53b9d281cecbb40ca9db520de72cb95817ad92ac72";
    let text = String::from_utf8_lossy(&output.stdout);
    let (shown, path) = text.trim_end().split_once("  ").unwrap();
    assert_eq!((shown, path), (digest, "result/vmlinux"));
    let names = ["System.map", "bzImage", "config", "cost.json", "headers", "modules", "vmlinux"];
    assert_eq!(folder.list("result"), names);
    assert_eq!(folder.list("result/modules/lib/modules/6.1"), [""; 0]);
    assert!(errors(&output).contains("Linux 6.1.192, pre-virtualized, 1 files compiled"));
    assert_eq!(folder.list(CACHE).len(), 1);

    let calls = folder.read("called");
    let output = build(&folder, &[]);
    assert_eq!(code(&output), 0, "{}", errors(&output));
    assert!(errors(&output).contains("kept from before"), "{}", errors(&output));
    assert_eq!(folder.read("called"), calls);

    // Another one, not instead of the first.
    assert_eq!(code(&build(&folder, &["--plain"])), 0);
    assert_eq!(folder.list(CACHE).len(), 2);

    folder.write("result/vmlinux", b"older");
    assert_eq!(code(&build(&folder, &["-o", "result"])), 0);
    assert_eq!(folder.read("result/vmlinux"), b"kernel\n");
    let output = build(&folder, &["-o", "programs"]);
    assert_eq!(code(&output), 64, "{}", errors(&output));
}

#[test]
fn modules_are_built_for_it() {
    let folder = folder(MAKE);
    fs::create_dir(folder.path("driver")).unwrap();
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
    folder.write("linux/arch/x86/kernel/vmlinux.lds.S", b"something else\n");
    let output = build(&folder, &[]);
    assert_eq!(code(&output), 65);
    let text = errors(&output);
    assert!(text.contains("8-sections.diff") && text.contains("vmlinux.lds.S"), "{text}");
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
    send(&child, Signal::INT);
    assert_eq!(child.wait().unwrap().code(), Some(130));
    wait_for_end(&make);
    assert_eq!(folder.list(CACHE), [""; 0]);
}
