//! `parador afterburn`, and `parador` under the name of the assembler, with gcc and a test kernel.

use crate::support::{Folder, code, errors};
use serde_json::{Value, json};
use std::path::Path;
use std::process::{Command, Output};

/// Runs a compiler that finds our assembler, with these options for it.
fn gcc(folder: &Folder, options: &str, arguments: &[&str]) -> Output {
    if !folder.path("tools").exists() {
        succeed(&folder.parador(&["afterburn", "tools", "tools"]).output().unwrap());
    }
    Command::new("gcc")
        .args(["-B", "tools", "-c"])
        .args(arguments)
        .current_dir(folder.path("."))
        .env("PARADOR_AFTERBURN", options)
        .output()
        .unwrap()
}

fn succeed(output: &Output) -> String {
    assert!(output.status.success(), "{}", errors(output));
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn verify(folder: &Folder, file: &str) -> Output {
    folder.parador(&["afterburn", "verify", file]).output().unwrap()
}

/// Makes `guests/previrt` through the afterburner.
fn previrt(folder: &Folder) {
    succeed(&folder.parador(&["afterburn", "tools", "tools"]).output().unwrap());
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guests/previrt");
    let mut make = Command::new("make");
    make.arg("-s").arg("-C").arg(source).arg("PADDED=1");
    make.arg(format!("O={}", folder.path(".").display()))
        .arg(format!("TOOLS={}", folder.path("tools").display()));
    succeed(&make.env_remove("MAKEFLAGS").env_remove("PARADOR_AFTERBURN").output().unwrap());
}

#[test]
fn c_and_assembly_become_sites() {
    let folder = Folder::new("");
    folder.write("a.c", b"void f(void) { asm volatile(\"cli\"); }\nvoid g(void) {}\n");
    folder.write("b.S", b"#define HALT sti; hlt\nHALT\n");
    folder.write("c.c", b"int x;\n");
    let options = "pad=9,stats=stats,keep=texts";
    for source in ["a.c", "b.S", "c.c"] {
        let output = gcc(&folder, options, &["-O1", source]);
        assert_eq!((code(&output), errors(&output).as_str()), (0, ""), "{source}");
    }
    let stats = String::from_utf8(folder.read("stats")).unwrap();
    let mut lines: Vec<Value> =
        stats.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for line in &mut lines {
        let cpu = line.as_object_mut().unwrap().remove("cpu_us").unwrap();
        assert!(cpu.as_u64().is_some_and(|cpu| cpu > 0), "{cpu}");
    }
    assert_eq!(
        lines,
        [
            json!({"output": "a.o", "padded": {"cli": 1}, "recorded": {}}),
            json!({"output": "b.o", "padded": {"sti_hlt": 1}, "recorded": {}}),
            json!({"output": "c.o", "padded": {}, "recorded": {}}),
        ]
    );
    let kept = String::from_utf8(folder.read("texts/a.o.s")).unwrap();
    assert!(kept.contains(".skip -((9-(97711f-97709f))>0)"), "{kept}");
    assert!(!folder.path("texts/c.o.s").exists());
    let report = succeed(&verify(&folder, "a.o"));
    assert!(report.contains("  cli                      1         0          1\n"), "{report}");
    assert!(report.ends_with("  missed 0, wrong 0, overlapping 0, unjudged 0\n"), "{report}");
    // A module without sensitive instructions has no table.
    succeed(&verify(&folder, "c.o"));
}

#[test]
fn what_is_skipped_is_missed() {
    let folder = Folder::new("");
    folder.write("a.c", b"void f(void) { asm volatile(\"cli\"); }\n");
    for options in ["skip=x:vdso/*.o:?.o", "off"] {
        assert_eq!(code(&gcc(&folder, options, &["a.c"])), 0);
        let output = verify(&folder, "a.o");
        let report = String::from_utf8(output.stdout.clone()).unwrap();
        assert!(report.contains(" cli in f+0x"), "{report}");
        assert_eq!(code(&output), 1, "{options}");
    }
}

/// A directive that the assembler does not assemble, and 32-bit code that is named or not.
#[test]
fn code_of_other_modes_is_named_by_the_caller() {
    let folder = Folder::new("");
    folder.write("a.S", b".if 0\n.code32\n.endif\n.globl f\nf: cli\nwrmsr\nret\n");
    let output = gcc(&folder, "", &["a.S"]);
    assert_ne!(code(&output), 0);
    assert!(
        errors(&output).contains("a.S:2: error: afterburn: `.code32` where it may have no effect"),
        "{output:?}"
    );
    // As the afterburner of an earlier version would have left it.
    assert_eq!(code(&gcc(&folder, "off", &["a.S"])), 0);
    let report = String::from_utf8(verify(&folder, "a.o").stdout).unwrap();
    assert!(report.ends_with("  missed 2, wrong 0, overlapping 0, unjudged 0\n"), "{report}");

    folder.write("b.S", b".code32\n.globl g\ng: cli\nret\n.code64\n.globl h\nh: cli\nret\n");
    assert_eq!(code(&gcc(&folder, "", &["b.S"])), 0);
    let report = String::from_utf8(verify(&folder, "b.o").stdout).unwrap();
    assert!(report.contains(" cli in g (.text)\n  kind"), "{report}");
    let named = |symbol: &str| {
        folder.parador(&["afterburn", "verify", "--code32", symbol, "b.o"]).output().unwrap()
    };
    let report = succeed(&named("g"));
    assert!(report.contains(" 2 bytes in g: 32-bit code\n"), "{report}");
    let output = named("x");
    assert!(errors(&output).contains("no symbol `x` in the code"), "{output:?}");
    assert_eq!(code(&output), 64);
}

#[test]
fn an_assembly_that_is_not_understood_stops_the_compiler() {
    let folder = Folder::new("");
    folder.write("a.c", b"\n\nvoid f(void) { asm volatile(\".intel_syntax noprefix\\ncli\"); }\n");
    let output = gcc(&folder, "", &["a.c"]);
    assert_ne!(code(&output), 0);
    let text = errors(&output);
    assert!(text.contains("a.c:3: error: afterburn: Intel syntax is not supported\n"), "{text}");
    assert!(!folder.path("a.o").exists());

    folder.write("b.S", b"nop\n.macro m r\nmov \\r, %eax\n.endm\nm %ds\n");
    let text = errors(&gcc(&folder, "", &["b.S"]));
    assert!(text.contains("b.S:5: error: afterburn: `%ds` as an argument of a macro"), "{text}");
}

#[test]
fn wrong_options_and_no_assembler() {
    let folder = Folder::new("");
    folder.write("a.s", b"cli\n");
    let run = |options: &str, path: &str| {
        let mut command = folder.parador(&["afterburn", "as", "-o", "a.o", "a.s"]);
        command.env("PARADOR_AFTERBURN", options).env("PATH", path).output().unwrap()
    };
    let output = run("pad=4", "/usr/bin");
    assert!(errors(&output).contains("pad=4: a pad has 5 (a jump) to 64 bytes"));
    assert_eq!(code(&output), 64);
    let output = run("", "/nowhere");
    assert!(errors(&output).contains("no assembler: `as` is not in PATH"), "{}", errors(&output));
    assert_eq!(code(&output), 69);
    assert_eq!(code(&run("", "/usr/bin")), 0);
    assert_eq!(
        code(&folder.parador(&["afterburn", "as", "-o", "a.o", "no.s"]).output().unwrap()),
        66
    );
}

#[test]
fn files_that_cannot_be_verified() {
    let folder = Folder::new("");
    previrt(&folder);
    let good = folder.read("previrt-padded.elf");
    let refused = |name: &str, content: &[u8], expected: i32, message: &str| {
        folder.write(name, content);
        let output = verify(&folder, name);
        assert!(errors(&output).contains(message), "{name}: {}", errors(&output));
        assert_eq!(code(&output), expected, "{name}");
    };
    refused("good", &good, 0, "");
    refused("text", b"no kernel at all", 65, "not an ELF file");
    refused("short", &good[..good.len() / 2], 65, "damaged");
    let rename = |to: &[u8; 15]| {
        let from = b"parador_sites_1";
        let mut file = good.clone();
        let places: Vec<usize> = (0..file.len() - 16)
            .filter(|&at| &file[at..at + 15] == from && file[at + 15] == 0)
            .collect();
        assert!(!places.is_empty());
        places.iter().for_each(|&at| file[at..at + 15].copy_from_slice(to));
        file
    };
    refused("none", &rename(b"another_section"), 65, "no section parador_sites_1");
    refused(
        "later",
        &rename(b"parador_sites_7"),
        65,
        "site tables of version 7; this program reads version 1",
    );
    // The size in the section's header: of the one that begins where the first record is.
    let headers = u64::from_le_bytes(good[0x28..0x30].try_into().unwrap()) as usize;
    let sites = succeed(&verify(&folder, "good"));
    let count: u64 = sites
        .lines()
        .find_map(|line| line.strip_prefix("  all ")?.split_whitespace().next()?.parse().ok())
        .unwrap();
    let header = (headers..good.len())
        .step_by(64)
        .find(|&at| good[at + 0x20..at + 0x28] == (8 * count).to_le_bytes())
        .unwrap();
    let mut cut = good.clone();
    cut[header + 0x20..header + 0x28].copy_from_slice(&(8 * count - 3).to_le_bytes());
    refused("cut", &cut, 65, "the table ends inside a record");
    assert_eq!(code(&verify(&folder, "missing")), 66);

    let json = folder.parador(&["afterburn", "verify", "--json", "good"]).output().unwrap();
    let report = succeed(&json);
    assert!(
        report.contains("\"missed\": [],\n") && report.contains("\"overlaps\": [],\n"),
        "{report}"
    );
}

#[test]
fn a_null_image_needs_room() {
    let folder = Folder::new("");
    previrt(&folder);
    let mut command =
        folder.parador(&["afterburn", "null", "--count", "-o", "null.elf", "previrt-padded.elf"]);
    let report = succeed(&command.output().unwrap());
    assert!(
        report.starts_with("null.elf\n  rewritten: 74 moved, 3 with a jump after them\n"),
        "{report}"
    );
    assert_eq!(folder.read("null.elf").len(), folder.read("previrt-padded.elf").len());

    folder.write("a.s", b".globl _start\n_start: cli\n");
    succeed(&folder.parador(&["afterburn", "as", "-o", "a.o", "a.s"]).output().unwrap());
    let linked =
        Command::new("ld").args(["-o", "a.elf", "a.o"]).current_dir(folder.path(".")).output();
    succeed(&linked.unwrap());
    let output = folder.parador(&["afterburn", "null", "-o", "b.elf", "a.elf"]).output().unwrap();
    assert!(errors(&output).contains("no room for stubs"), "{}", errors(&output));
    assert_eq!(code(&output), 65);
    assert!(!folder.path("b.elf").exists());
}
