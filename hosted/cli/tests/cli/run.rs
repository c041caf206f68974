//! Refusals of `parador run`: invalid command lines, files and kernels. System tests run VMs.

use crate::support::{Folder, bzimage, code, errors};
use serde_json::Value;
use std::fs::File;
use std::os::unix::net::UnixListener;

/// Runs in `folder` with these arguments, and must end with this code and text.
#[track_caller]
fn refused(folder: &Folder, arguments: &[&str], expected: i32, text: &str) {
    let output = folder.parador(&["run"]).args(arguments).output().unwrap();
    let errors = errors(&output);
    assert_eq!(code(&output), expected, "{arguments:?}: {errors}");
    assert!(errors.contains(text), "{arguments:?}: {errors}");
    assert!(!errors.contains("panicked"), "{errors}");
}

#[test]
fn command_lines() {
    let folder = Folder::new("");
    refused(&folder, &[], 66, "`parador kernel build` builds one");
    refused(&folder, &["k", "--kernel", "k"], 64, "cannot be used with");
    refused(
        &folder,
        &["k", "-m", "63M"],
        64,
        "memory must be page-aligned and at least 64 MiB (got 66060288 bytes)",
    );
    refused(&folder, &["k", "-m", "much"], 64, "invalid size");
    refused(&folder, &["k", "-c", "9"], 64, "9");
    refused(&folder, &["k", "--backend", "vmx"], 64, "possible values");
    refused(&folder, &["k", "--log", "loud"], 64, "possible values");
    refused(&folder, &["k", "--timeout", "soon"], 64, "not a time");
    refused(&folder, &["k", "--balloon", "some"], 64, "invalid size");
    refused(&folder, &["k", "-m", "128M", "--balloon", "65M"], 64, "--balloon on");
    refused(&folder, &["k", "--memry", "1G"], 64, "--memory");
    refused(&folder, &["k", "--on-reset", "exit:256"], 64, "expected exit");
    refused(&folder, &["k", "--on-reset", "reset", "--no-reboot"], 64, "cannot be used with");
}

#[test]
fn spellings_of_others() {
    let folder = Folder::new("");
    refused(&folder, &["-kernel", "k"], 64, "did you mean -k FILE?");
    refused(&folder, &["k", "-append", "quiet"], 64, "did you mean -p TEXT?");
    refused(&folder, &["k", "-hda", "disk"], 64, "did you mean -d FILE?");
    refused(&folder, &["k", "--serial", "tty"], 64, "expected stdio");
}

#[test]
fn messages_for_programs() {
    let folder = Folder::new("");
    let said = |arguments: &[&str]| -> Value {
        let output = folder.parador(&["run"]).args(arguments).output().unwrap();
        let value: Value = serde_json::from_slice(&output.stderr).unwrap();
        assert_eq!(value["code"], code(&output));
        assert_eq!((&value["level"], &value["source"]), (&"error".into(), &"parador".into()));
        assert!(value["time"].as_str().unwrap().ends_with('Z'));
        value
    };
    let missing = said(&["vmlinux", "--log-format", "json"]);
    assert_eq!(missing["reason"], "missing-file");
    assert!(missing["help"].as_str().unwrap().contains("parador kernel build"));
    assert_eq!(said(&["vmlinux", "--log-format=json", "--nonsense"])["reason"], "usage");
    folder.write("vm.toml", b"[vm]\nlog-format = \"json\"\nkernel = \"none\"\n");
    assert_eq!(said(&["--config", "vm.toml"])["reason"], "missing-file");
}

#[test]
fn kernels() {
    let folder = Folder::new("");
    let process = ["vmlinux", "--backend", "process"];
    refused(&folder, &["vmlinux"], 66, "parador kernel build");
    folder.write("vmlinux", b"");
    refused(&folder, &process, 65, "not an ELF file");
    folder.write("vmlinux", &bzimage());
    refused(&folder, &process, 65, "not a bzImage");
    folder.write("vmlinux", b"\x7fELF and no more");
    refused(&folder, &process, 65, "not a valid ELF file");
    refused(&folder, &["programs"], 71, "directory");
    let counters = ["vmlinux", "--backend", "kvm", "--counters"];
    refused(&folder, &counters, 64, "require --backend process");
}

#[test]
fn kernels_for_other_backends_are_named() {
    // This program is an ELF file for this processor, but no kernel.
    let folder = Folder::new("");
    let own = std::env::current_exe().unwrap();
    refused(&folder, &[own.to_str().unwrap(), "--backend", "process"], 65, "not pre-virtualized");
}

const CONFIG: &str = "\
[vm]
kernel = \"vmlinux\"
memory = \"256M\"

[[disk]]
path = \"root.img\"
ro = true
";

#[test]
fn descriptions() {
    let folder = Folder::new("");
    let config = |text: &str| folder.write("vm.toml", text.as_bytes());
    let run = ["--config", "vm.toml"];
    refused(&folder, &run, 66, "vm.toml");
    config(&CONFIG.replace("memory", "memroy"));
    refused(&folder, &run, 65, "vm.toml:3:1: error: unknown field `memroy`");
    refused(&folder, &run, 65, "did you mean `memory`?");
    config(&CONFIG.replace("256M", "256"));
    refused(&folder, &run, 65, "vm.toml:3:10: error:");
    config(&CONFIG.replace("ro = true", "ro = \"on\""));
    refused(&folder, &run, 65, "vm.toml:7:6: error:");
    config("vm = {");
    refused(&folder, &run, 65, "vm.toml:1:");
    config("[[disk]]\npath = \"root.img\"\n");
    refused(&folder, &run, 66, "no kernel given");
    config(CONFIG);
    refused(&folder, &run, 66, "root.img");
}

#[test]
fn what_file_and_options_say_together() {
    let folder = Folder::new("");
    std::fs::create_dir(folder.path("vm")).unwrap();
    folder.write("vm/vm.toml", CONFIG.as_bytes());
    let dump = |arguments: &[&str]| {
        let output = folder.parador(&["run", "--dump-config"]).args(arguments).output().unwrap();
        assert_eq!(code(&output), 0, "{}", errors(&output));
        String::from_utf8(output.stdout).unwrap()
    };
    let merged = dump(&["--config", "vm/vm.toml", "-m", "1G", "-d", "data.img,id=data"]);
    assert_eq!(
        merged,
        "[vm]\nkernel = \"vm/vmlinux\"\nmemory = \"1G\"\n\n\
         [[disk]]\npath = \"vm/root.img\"\nro = true\n\n\
         [[disk]]\npath = \"data.img\"\nid = \"data\"\n"
    );
    folder.write("merged.toml", merged.as_bytes());
    assert_eq!(dump(&["--config", "merged.toml"]), merged);
    assert_eq!(dump(&["other"]), "[vm]\nkernel = \"other\"\n");
    folder.write("reset.toml", b"[vm]\non-reset = \"reset\"\n");
    let exits = "[vm]\non-reset = \"exit\"\n";
    assert_eq!(dump(&["--config", "reset.toml", "--no-reboot"]), exits);
    folder.write("both.toml", b"[vm]\non-reset = \"reset\"\nno-reboot = true\n");
    refused(&folder, &["--config", "both.toml"], 65, "conflicts with `on-reset`");
}

#[test]
fn disks() {
    let folder = Folder::new("");
    let run = |disk: &str, expected, text: &str| {
        refused(&folder, &["vmlinux", "-d", disk], expected, text);
    };
    run("a.img,rw=on", 65, "unknown key `rw`");
    run("path=a.img,fromat=raw", 65, "did you mean `format`?");
    run("path=a.img,format=vmdk", 65, "qemu-img");
    let nine = ["-d", "a"].repeat(9);
    refused(&folder, &[&["k"][..], &nine].concat(), 64, "9 disks (limit 8)");
    run("none.img", 66, "none.img");
    File::create(folder.path("small.img")).unwrap();
    run("small.img", 65, "small.img");
    run("programs", 71, "directory");
    run("/dev/null", 65, "neither a file nor a block device");
}

#[test]
fn no_vm_to_control() {
    let folder = Folder::new("");
    let ctl = |words: &[&str]| {
        let output = folder.parador(&["ctl"]).args(words).output().unwrap();
        (code(&output), errors(&output))
    };
    assert_eq!(ctl(&["status"]).0, 64);
    assert_eq!(ctl(&["-s", "none", "start"]).0, 64);
    assert_eq!(ctl(&["-s", "none", "status"]).0, 66);
    folder.write("file", b"");
    assert_eq!(ctl(&["-s", "file", "pause"]).0, 69);
    // Something else that listens.
    let listener = UnixListener::bind(folder.path("other")).unwrap();
    let other = std::thread::spawn(move || drop(listener.accept().unwrap()));
    let (code, errors) = ctl(&["-s", "other", "stats"]);
    assert_eq!(code, 69, "{errors}");
    other.join().unwrap();
}

/// The findings depend on the host; their format and the exit code do not.
#[test]
fn doctor() {
    let folder = Folder::new("");
    let table = folder.parador(&["doctor"]).output().unwrap();
    let json = folder.parador(&["doctor", "--json"]).output().unwrap();
    let text = String::from_utf8_lossy(&table.stdout);
    let report: Value = serde_json::from_slice(&json.stdout).unwrap();
    let findings = report["findings"].as_array().unwrap();
    assert!(findings.len() >= 10, "{report}");
    for finding in findings {
        assert!(text.contains(finding["name"].as_str().unwrap()), "{text}");
    }
    let missing = findings.iter().any(|finding| finding["state"] == "missing");
    assert_eq!(report["backend"].is_null(), missing, "{report}");
    assert_eq!(text.contains("\nMISSING"), missing, "{text}");
    assert_eq!((code(&table), code(&json)), if missing { (69, 69) } else { (0, 0) });
    // Standard output is closed.
    let mut closed = folder.parador(&["doctor"]);
    closed.stdout(File::options().write(true).open("/dev/full").unwrap());
    let output = closed.output().unwrap();
    assert_eq!(code(&output), 71, "{}", errors(&output));
}

/// Texts are written, or the exit code states the failure.
#[test]
fn texts_on_a_full_disk() {
    let folder = Folder::new("");
    for (words, expected) in
        [(&["--version"][..], 71), (&["-V"], 71), (&["run", "--help"], 71), (&["exec", "-h"], 125)]
    {
        let mut full = folder.parador(words);
        full.stdout(File::options().write(true).open("/dev/full").unwrap());
        let output = full.output().unwrap();
        assert_eq!(code(&output), expected, "{words:?}: {}", errors(&output));
        assert!(errors(&output).contains("cannot write to standard output"), "{words:?}");
        // The reader needs no more.
        let mut unread = folder.parador(words);
        unread.stdout(std::io::pipe().unwrap().1);
        assert_eq!(code(&unread.output().unwrap()), 0, "{words:?}");
    }
}

/// Processes of a VM are `parador`, started by `parador` with a parent-death signal.
#[test]
fn processes_of_a_vm_start_once() {
    let folder = Folder::new("");
    let own = std::process::id().to_string();
    let start = |words: &[&str]| folder.parador(words).output().unwrap();
    let plain = start(&["--version"]).stdout;
    let begun = start(&["--become", "kill", &own, "/proc/self/exe", "--version"]);
    assert_eq!((code(&begun), &begun.stdout), (0, &plain), "{}", errors(&begun));
    let other = start(&["--become", "terminate", &own, "/bin/sh", "-c", "echo $0"]);
    assert_eq!(other.stdout, b"/bin/sh\n", "{}", errors(&other));

    let orphan = start(&["--become", "kill", "1", "/proc/self/exe", "--version"]);
    assert!(code(&orphan) == 70 && errors(&orphan).contains("parador has exited"));
    for wrong in [&["--become"][..], &["--become", "stop", &own, "/proc/self/exe"]] {
        let output = start(wrong);
        assert!(code(&output) == 70 && errors(&output).contains("internal use"), "{wrong:?}");
    }
}
