//! Origin of executed binaries: the source tree that contains `parador` or that was given, if no
//! other user can change it, and never the current folder.

use crate::support::{Folder, ONE_VM, bzimage, code, errors};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// A folder that looks like a source tree of Parador. What is executed there leaves the file
/// `owned`.
fn decoy(folder: &Folder) -> PathBuf {
    let tree = folder.path("decoy");
    for name in ["", "xtask", "kernel/image", "hosted/cli"] {
        fs::create_dir_all(tree.join(name)).unwrap();
        fs::write(tree.join(name).join("Cargo.toml"), "").unwrap();
    }
    for name in ["scripts", "target/release", "target/artifacts", ".cargo", "below"] {
        fs::create_dir_all(tree.join(name)).unwrap();
    }
    let owned = folder.path("owned");
    let script = format!("echo \"$0 $*\" >>{}; exit 1", owned.display());
    for name in ["scripts/cargo", "cargo", "apt-cache", "qemu-system-x86_64"] {
        folder.script(&format!("decoy/{name}"), &script);
        folder.script(&format!("decoy/below/{}", name.replace('/', "-")), &script);
    }
    for place in ["", "decoy/", "decoy/below/"] {
        let description = ONE_VM.replace("\"kernel\"", "\"bzimage\"");
        folder.write(&format!("{place}system.toml"), description.as_bytes());
        folder.write(&format!("{place}bzimage"), &bzimage());
    }
    tree
}

/// `parador` as installed somewhere, in the folder `current`, with cargo first in `PATH` that
/// leaves traces.
fn parador(folder: &Folder, program: &Path, current: &Path, arguments: &[&str]) -> Command {
    if !program.exists() {
        folder.copy_parador(program);
    }
    let mut command = Command::new(program);
    let path = format!("{}:/bin:/usr/bin", folder.path("decoy").display());
    command.args(arguments).current_dir(current).env("PATH", path);
    command.env("XDG_CACHE_HOME", folder.path("cache")).env_remove("PARADOR_ARTIFACTS");
    for name in ["PARADOR_TREE", "CARGO_TARGET_DIR"] {
        command.env_remove(name);
    }
    command.env("CARGO", folder.path("decoy/cargo"));
    command
}

const BUILD: [&str; 5] = ["system", "build", "system.toml", "-o", "image"];

fn refused(output: &Output, expected: i32, text: &str) {
    assert_eq!(code(output), expected, "{}", errors(output));
    assert!(errors(output).contains(text), "{}", errors(output));
}

#[test]
fn the_current_folder_decides_nothing() {
    let folder = Folder::new("");
    let tree = decoy(&folder);
    let program = folder.path("bin/parador");
    for current in [tree.clone(), tree.join("below")] {
        let output = parador(&folder, &program, &current, &BUILD).output().unwrap();
        refused(&output, 66, "cannot find Parador's binaries");
        assert!(!folder.path("owned").exists());
    }
    // Nor do folders of PATH that mean it.
    for path in ["", ".", ":/nowhere", "below"] {
        let arguments = ["run", "--net", "user", "-i", "busybox", "system.toml"];
        let mut command = parador(&folder, &program, &tree, &arguments);
        command.env("PATH", path).status().unwrap();
        let mut command = parador(&folder, &program, &tree, &["kernel", "build"]);
        command.env("PATH", path).status().unwrap();
        assert!(!folder.path("owned").exists(), "PATH={path}");
    }
}

#[test]
fn a_given_tree_is_used_if_it_is_trusted() {
    let folder = Folder::new("");
    let tree = decoy(&folder);
    let program = folder.path("bin/parador");
    let current = folder.path("");
    let build = |more: &[&str]| {
        let mut command = parador(&folder, &program, &current, &[&BUILD[..], more].concat());
        command.output().unwrap()
    };
    let set = |name: &str, mode: u32| {
        fs::set_permissions(tree.join(name), Permissions::from_mode(mode)).unwrap();
    };
    for (name, mode) in
        [("", 0o777), ("scripts", 0o757), ("scripts/cargo", 0o757), (".cargo", 0o777)]
    {
        set(name, mode);
        refused(&build(&["--tree", "decoy"]), 77, "is writable by other users");
        assert!(!folder.path("owned").exists(), "{name}");
        set(name, 0o755);
    }
    refused(&build(&["--tree", "programs"]), 66, "not a Parador source tree");
    refused(&build(&["--tree", "decoy", "--artifacts", "programs"]), 64, "cannot be used with");

    refused(&build(&["--tree", "decoy"]), 70, "cannot build Parador's binaries");
    let owned = String::from_utf8(folder.read("owned")).unwrap();
    assert!(owned.contains("decoy/scripts/cargo xtask build"), "{owned}");
    // The environment does the same.
    let mut command = parador(&folder, &program, &current, &BUILD);
    refused(&command.env("PARADOR_TREE", "decoy").output().unwrap(), 70, "cannot build");
}

#[test]
fn the_own_tree_is_used_if_it_is_trusted() {
    let folder = Folder::new("");
    let tree = decoy(&folder);
    let program = tree.join("target/release/parador");
    let current = folder.path("");
    let build = || parador(&folder, &program, &current, &BUILD).output().unwrap();
    refused(&build(), 70, "cannot build Parador's binaries");
    fs::remove_file(folder.path("owned")).unwrap();
    fs::set_permissions(&tree, Permissions::from_mode(0o777)).unwrap();
    refused(&build(), 77, "is writable by other users");
    assert!(!folder.path("owned").exists());
}

#[test]
fn programs_that_others_may_change_are_not_used() {
    let folder = Folder::new(ONE_VM);
    folder.write("kernel", &bzimage());
    let mut build = folder.parador(&BUILD);
    fs::set_permissions(folder.path("programs"), Permissions::from_mode(0o777)).unwrap();
    refused(&build.output().unwrap(), 77, "is writable by other users");
}
