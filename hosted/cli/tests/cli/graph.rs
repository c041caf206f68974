//! `parador system graph`: the pictures of a system with one of everything, as they were looked at.

use crate::support::{Folder, code, errors};
use std::path::PathBuf;

const HOUSE: &str = include_str!("graph/house.toml");

/// The top of the source tree.
fn tree() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Compares with the file, or writes it if `PARADOR_NEW_PICTURES` is set: look at it then.
fn compare(name: &str, text: &str) {
    let path = tree().join(name);
    if std::env::var_os("PARADOR_NEW_PICTURES").is_some() {
        std::fs::write(&path, text).unwrap();
    }
    let expected = std::fs::read_to_string(&path).unwrap();
    assert!(expected == text, "{name} differs; got\n{text}");
}

fn graph(folder: &Folder, arguments: &[&str]) -> String {
    let output =
        folder.parador(&["system", "graph", "system.toml"]).args(arguments).output().unwrap();
    assert_eq!(code(&output), 0, "{}", errors(&output));
    String::from_utf8(output.stdout).unwrap()
}

#[test]
fn pictures() {
    let folder = Folder::new(HOUSE);
    compare("hosted/cli/tests/cli/graph/house.svg", &graph(&folder, &[]));
    compare("hosted/cli/tests/cli/graph/house.dot", &graph(&folder, &["--dot"]));
}

#[test]
fn the_picture_of_the_readme() {
    let example = tree().join("examples/three-guests.toml");
    let folder = Folder::new("");
    let output = folder.parador(&["system", "graph"]).arg(example).output().unwrap();
    assert_eq!(code(&output), 0, "{}", errors(&output));
    compare("docs/three-guests.svg", &String::from_utf8(output.stdout).unwrap());
}

#[test]
fn the_format_follows_the_name_unless_it_is_given() {
    let folder = Folder::new(HOUSE);
    let dot = graph(&folder, &["--format", "dot"]);
    let svg = graph(&folder, &["--format", "svg"]);
    let file = |arguments: &[&str], name: &str| {
        assert_eq!(graph(&folder, arguments), "");
        String::from_utf8(folder.read(name)).unwrap()
    };
    assert_eq!(file(&["-o", "a.svg"], "a.svg"), svg);
    assert_eq!(file(&["-o", "a.dot"], "a.dot"), dot);
    assert_eq!(file(&["-o", "b.svg", "--format", "dot"], "b.svg"), dot);
}

#[test]
fn what_is_wrong_is_not_drawn() {
    let folder = Folder::new("[system]\nboard = \"pc\"\n");
    let output =
        folder.parador(&["system", "graph", "system.toml", "-o", "a.svg"]).output().unwrap();
    assert_eq!(code(&output), 65);
    assert!(!folder.path("a.svg").exists());
    let folder = Folder::new(HOUSE);
    let arguments = ["system", "graph", "system.toml", "-o", "none/a.svg"];
    assert_eq!(code(&folder.parador(&arguments).output().unwrap()), 66);
}
