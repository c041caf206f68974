//! Texts and their rewritten form: `golden/NAME.s` and `golden/NAME.out.s`. `BLESS=1` in the
//! environment writes the second. The output is assembled, and the verifier must not find a missed
//! instruction in the object.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use wedge_afterburn::{Exceptions, Pad, rewrite, verify};

fn inputs() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut inputs: Vec<PathBuf> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| !path.to_string_lossy().ends_with(".out.s"))
        .collect();
    inputs.sort();
    inputs
}

#[test]
fn rewritten_as_expected() {
    for input in inputs() {
        let name = input.file_name().unwrap().to_string_lossy().into_owned();
        let text = rewrite(&fs::read(&input).unwrap(), &name, Pad::default());
        let text = text.unwrap_or_else(|error| panic!("{error}")).text.unwrap();
        let golden = input.with_extension("out.s");
        if std::env::var_os("BLESS").is_some() {
            fs::write(&golden, &text).unwrap();
        }
        let expected = String::from_utf8(fs::read(&golden).unwrap()).unwrap();
        let text = String::from_utf8(text).unwrap();
        for (line, (is, should)) in text.lines().zip(expected.lines()).enumerate() {
            assert_eq!(is, should, "{name}, line {}", line + 1);
        }
        assert_eq!(text.lines().count(), expected.lines().count(), "{name}");
    }
}

#[test]
fn nothing_is_missed_after_assembly() {
    let folder = tempfile::tempdir().unwrap();
    for input in inputs() {
        let golden = input.with_extension("out.s");
        let object = folder.path().join("x.o");
        let done = Command::new("as").arg("-o").arg(&object).arg(&golden).output().unwrap();
        assert!(
            done.status.success(),
            "{}: {}",
            golden.display(),
            String::from_utf8_lossy(&done.stderr)
        );
        let exceptions = match input.ends_with("modes.s") {
            true => Exceptions {
                code16: vec!["start16".to_owned(), "more16".to_owned()],
                code32: vec!["start32".to_owned()],
                data: Vec::new(),
            },
            false => Exceptions::default(),
        };
        let report = verify(&golden, &fs::read(&object).unwrap(), &exceptions).unwrap();
        assert!(report.is_good(), "{report}");
        assert!(report.sites.padded > 0, "{report}");
    }
}

/// Rewriting only inserts: without pads and records the objects are the same.
#[test]
fn a_text_without_sensitive_instructions_stays() {
    let text = b"\t.text\nf:\tmovq %rax, %rbx # cli\n\tret\n";
    assert_eq!(rewrite(text, "x.s", Pad::default()).unwrap().text, None);
}
