//! File systems of unusual forms.

use super::*;
use crate::archive::{ArchiveEntry, Attributes, EntryKind};
use std::process::Command;

/// Writes a tree whose files have no data and lets e2fsck check it.
fn check(tree: &Tree) -> File {
    let named = tempfile::NamedTempFile::new().unwrap();
    let writer = Writer::new(tree, named.as_file()).unwrap();
    writer.write_metadata([1; 16]).unwrap();
    let output = Command::new("e2fsck").args(["-f", "-n"]).arg(named.path()).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    named.into_file()
}

fn add(tree: &mut Tree, path: &str, kind: EntryKind) {
    let path = path.split('/').map(|name| name.as_bytes().to_vec()).collect();
    let attributes = Attributes { mode: 0o644, ..Attributes::default() };
    tree.add(ArchiveEntry { path, kind, attributes }, 0, tree.len()).unwrap();
}

#[test]
fn an_empty_one() {
    check(&Tree::new());
}

#[test]
fn files_with_many_extents() {
    let mut tree = Tree::new();
    // Four extents, five, and the most.
    for (name, blocks) in [("a", 4 * 0x8000), ("b", 4 * 0x8000 + 1), ("c", 1 << 21)] {
        add(&mut tree, name, EntryKind::File(blocks * BLOCK as u64 - 1));
    }
    let file = check(&tree);
    // Nothing but metadata is written.
    use std::os::unix::fs::MetadataExt;
    assert!(file.metadata().unwrap().blocks() < 64 << 11, "a sparse file");
}

#[test]
fn directories_of_many_names() {
    let mut tree = Tree::new();
    for number in 0..3000 {
        let name = format!("large/{number}{}", "x".repeat(number % 250));
        add(&mut tree, &name, EntryKind::Fifo);
    }
    // Names that fill the blocks exactly: 12 + 12 bytes, then 17 of 240 minus 8.
    for number in 10..60 {
        add(&mut tree, &format!("exact/{number}{}", "x".repeat(230)), EntryKind::Fifo);
    }
    add(&mut tree, &format!("z{}", "/d".repeat(100)), EntryKind::Folder);
    check(&tree);
}

#[test]
fn more_inodes_than_blocks_need() {
    let mut tree = Tree::new();
    for number in 0..70_000 {
        add(&mut tree, &format!("{}/{number}", number % 100), EntryKind::File(0));
    }
    check(&tree);
}

#[test]
fn a_file_of_too_many_names() {
    let mut tree = Tree::new();
    add(&mut tree, "a", EntryKind::File(0));
    for number in 0..MAX_LINKS {
        add(&mut tree, &format!("b/{number}"), EntryKind::Hardlink(vec![b"a".to_vec()]));
    }
    let file = tempfile::tempfile().unwrap();
    assert!(Writer::new(&tree, &file).is_err());
}

#[test]
fn attributes_of_many_records() {
    // A comparison with all earlier names would take ten minutes.
    const COUNT: usize = 400_000;
    let records = |names: usize| -> Vec<(String, Vec<u8>)> {
        let all = (0..COUNT).map(|index| (format!("user.{}", index % names), index));
        all.map(|(name, index)| (name, index.to_be_bytes().into())).collect()
    };
    let repeated = records(10);
    let block = format::xattr_block(&repeated).unwrap();
    assert_eq!(block, format::xattr_block(&repeated[COUNT - 10..]).unwrap(), "the last ones");
    let error = format::xattr_block(&records(COUNT)).unwrap_err();
    assert!(error.to_string().contains("do not fit"), "{error}");
}
