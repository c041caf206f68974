//! Tests with output folders of empty files.

use super::*;
use tempfile::TempDir;

const RECORDED: &str = r#"{"format":7,"kind":"plain","recipe":"","source":"","compiler":"",
    "linux":"6.1.192","sha256":"","bytes":0,"built":""}"#;

fn output(files: &[(&str, &str)]) -> (TempDir, Result<OutputFolder, Failure>) {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(folder.path().join(name), text).unwrap();
    }
    let checked = check_output(folder.path());
    (folder, checked)
}

#[test]
fn only_kernels_made_here_are_replaced() {
    assert!(output(&[]).1.is_ok());
    assert!(output(&[(RECORD, RECORDED), (VMLINUX, ""), (COST, "")]).1.is_ok());
    let refused = |files: &[(&str, &str)], name: &str| {
        let (folder, checked) = output(files);
        let failure = checked.unwrap_err();
        assert_eq!(failure.code(), failure::USAGE);
        assert!(failure.to_string().contains(name), "{failure}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), files.len());
    };
    // A tree of Linux with a kernel.
    refused(&[(VMLINUX, ""), (SYMBOLS, ""), ("COPYING", ""), ("Makefile", "")], "COPYING");
    refused(&[(RECORD, RECORDED), (VMLINUX, ""), ("notes", "")], "notes");
    refused(&[(VMLINUX, ""), (SYMBOLS, "")], RECORD);
    refused(&[(RECORD, "{}"), (VMLINUX, "")], RECORD);
}
