use super::*;

/// The banned phrases in a text, each with its line.
fn phrases(text: &str) -> Vec<(usize, &'static str)> {
    let found = Phrases::new(PHRASES).find(text);
    found.into_iter().map(|(line, index)| (line, PHRASES[index].0)).collect()
}

#[test]
fn refuses_banned_phrases() {
    for text in [
        "/// Nobody waits for it.",
        "Whoever asks first is served.",
        "To who takes no uncut segments",
        "the guest is told",
        "the guest is *told* at its next exit",
        "it tells whether the page is mapped",
        "the guest GOES ON",
        "fn goes_on() {}",
        "the machine starts anew",
        "the host takes no filter of system calls",
        "You begin at the `steward`",
        "the guest’s processor",
        "a guests' program",
    ] {
        assert_eq!(phrases(text).len(), 1, "{text}");
    }
}

#[test]
fn accepts_sentences_with_an_actor() {
    for text in [
        "The VMM notifies the vCPU.",
        "the guest continues",
        "the user who started the VM",
        "A caller may tell the two apart.",
        "it goes; on the other side",
        "a register told: of three",
        "nobodyness, foregoes on",
        "as many as the host has",
        "ago on the bus",
    ] {
        assert_eq!(phrases(text), [], "{text}");
    }
}

#[test]
fn finds_phrases_across_lines_of_a_paragraph() {
    assert_eq!(phrases("a\n    /// the guest goes\n    /// on here\n"), [(2, "goes on")]);
    assert_eq!(phrases(" * it goes\n\t * on\n"), [(1, "goes on")]);
    assert_eq!(phrases("\"it goes \\\n    on\""), [(1, "goes on")]);
    assert_eq!(phrases("it goes\n\non\n"), []);
    assert_eq!(phrases("/// it goes\n///\n/// on\n"), []);
}

#[test]
fn every_phrase_has_a_remedy_that_is_allowed() {
    for (phrase, remedy) in PHRASES {
        assert!(!remedy.is_empty(), "{phrase}");
        assert_eq!(phrases(remedy), [], "{phrase}");
    }
}

#[test]
fn measures_comment_lines() {
    let long = "x".repeat(98);
    let lines = |text: String, language| long_comments(&text, language);
    assert_eq!(lines(format!("// {long}"), Language::Rust), [(1, 101)]);
    assert_eq!(lines(format!("//{long}"), Language::Rust), []);
    assert_eq!(lines(format!("let a = 1; // {long}"), Language::Rust), [(1, 112)]);
    assert_eq!(lines(format!("/* a\n   {long}\n*/\n   {long}"), Language::C), [(2, 101)]);
    assert_eq!(lines(format!("\t// {}", "x".repeat(90)), Language::C), [(1, 101)]);
    assert_eq!(lines(format!("#  {long}"), Language::Shell), [(1, 101)]);
    assert_eq!(lines(format!("# {long}x"), Language::C), [(1, 101)]);
    // Code and text have limits of their own.
    assert_eq!(lines(format!("let url = \"http://{long}\";"), Language::Rust), []);
    assert_eq!(lines(format!("case('\"', \"//{long}\")"), Language::Rust), []);
    let raw = format!("r#\"\nls /sys/*/ \"a\" // {long}\n\"#;\n/* {long}");
    assert_eq!(lines(raw, Language::Rust), [(4, 101)]);
    assert_eq!(
        lines(format!("\"a\\\n// {long}\";\nlet a: &'a u8; // {long}"), Language::Rust),
        [(3, 116)]
    );
    assert_eq!(lines(format!("/* a /* b */\n{long}   */\n{long}   "), Language::Rust), [(2, 103)]);
    assert_eq!(lines(format!("echo {long} # a"), Language::Shell), []);
    assert_eq!(lines(format!("# {long}x"), Language::Markdown), []);
}

#[test]
fn a_doc_comment_begins_with_a_noun_or_a_verb() {
    let text =
        "//! What it is.\n\n/// Returns it.\n/// What is more.\nfn a() {}\n/// How.\nfn b() {}\n";
    assert_eq!(doc_words(text), [(1, "What".to_owned()), (6, "How".to_owned())]);
    assert_eq!(doc_words("    /// [whether] it is\n"), [(1, "whether".to_owned())]);
    assert_eq!(doc_words("//! A.\n/// Where\n"), [(2, "Where".to_owned())]);
    assert_eq!(doc_words("/// Whatever\n//// What\n// What\n/// Howl\n/// who_is\n"), []);
}

#[test]
fn reads_public_types() {
    for (line, name) in [
        ("pub struct Vcpu {", "Vcpu"),
        ("    pub(crate) enum Exit<'a> {", "Exit"),
        ("pub unsafe trait Arch: Sized {", "Arch"),
        ("pub type Result<T> = ();", "Result"),
        ("pub struct Unit;", "Unit"),
        ("pub struct Pair(u8, u8);", "Pair"),
    ] {
        assert_eq!(public_type(line).as_deref(), Some(name), "{line}");
    }
    for line in [
        "struct A;",
        "pub fn structure() {}",
        "pub use a::B;",
        "public struct A;",
        "pub const A: u8 = 0;",
    ] {
        assert_eq!(public_type(line), None, "{line}");
    }
    let text = "pub struct A;\n#[cfg(test)]\nmod tests {\n    pub struct B;\n}\npub struct C;\n";
    assert_eq!(public_types(text), [(1, "A".to_owned()), (6, "C".to_owned())]);
}

#[test]
fn counts_definitions_outside_tests() {
    let file = |path: &str, text: &str| File {
        path: path.to_owned(),
        language: Language::Rust,
        text: text.to_owned(),
    };
    let mut tree = Tree {
        files: vec![
            file("a/src/lib.rs", "pub struct Door;\n#[cfg(test)]\nmod testing;\n"),
            file("a/src/testing.rs", "pub struct Door;\n"),
            file("a/tests/it.rs", "pub struct Door;\n"),
            file("b/src/lib.rs", "pub enum Door {}\npub struct Error;\n"),
            file("c/src/lib.rs", "pub trait Door {}\npub struct Error;\npub struct Error;\n"),
        ],
    };
    assert!(tree.repeated_names().is_empty());
    tree.files.push(file("d/src/x.rs", "\npub type Door = u8;\npub struct Error;\n"));
    let places: Vec<String> =
        tree.findings().iter().map(|found| format!("{}:{}", found.path, found.line)).collect();
    assert_eq!(places, ["a/src/lib.rs:1", "b/src/lib.rs:1", "c/src/lib.rs:1", "d/src/x.rs:2"]);
}

#[test]
fn languages_are_known_by_name_or_first_line() {
    for (path, text, language) in [
        ("a/b.rs", "", Some(Language::Rust)),
        ("b.S", "", Some(Language::C)),
        ("Makefile", "", Some(Language::Shell)),
        ("scripts/cargo", "#!/bin/sh\n", Some(Language::Shell)),
        ("README.md", "", Some(Language::Markdown)),
        ("a/b.svg", "<svg>", None),
        ("LICENSE", "Text", None),
    ] {
        assert_eq!(Language::of(path, text), language, "{path}");
    }
}
