//! Texts that hide a sensitive instruction from a rewriter that reads text. For each, the rewriter
//! refuses the text, or the verifier rejects the assembled object; none may pass both.

use std::fs;
use std::path::Path;
use std::process::Command;
use wedge_afterburn::verify::VerifyReport;
use wedge_afterburn::{Exceptions, Pad, rewrite, verify};

/// Assembles a text and verifies the object. `None`: the assembler refuses it.
fn assembled(text: &[u8], exceptions: &Exceptions) -> Option<VerifyReport> {
    let folder = tempfile::tempdir().unwrap();
    let (source, object) = (folder.path().join("x.s"), folder.path().join("x.o"));
    fs::write(&source, text).unwrap();
    let done = Command::new("as").arg("-o").arg(&object).arg(&source).output().unwrap();
    let object = done.status.success().then(|| fs::read(&object).unwrap())?;
    Some(verify(Path::new("x.o"), &object, exceptions).unwrap())
}

/// The rewriter's error, or the verifier's report on its output.
fn outcome(text: &str) -> Result<Option<VerifyReport>, String> {
    let rewritten = rewrite(text.as_bytes(), "x.s", Pad::default());
    let rewritten = rewritten.map_err(|error| error.reason)?;
    let text = rewritten.text.unwrap_or_else(|| text.as_bytes().to_vec());
    Ok(assembled(&text, &Exceptions::default()))
}

/// Texts that are refused, and the reasons.
const REFUSED: &[(&str, &str)] = &[
    // The assembler decides the mode.
    (".if 0\n.code32\n.endif\nf: cli\nwrmsr\nret", "`.code32` where it may have no effect"),
    (".ifdef X\nnop\n.else\n.code16\n.endif\ncli", "`.code16` where it may have no effect"),
    (".code32\n.if 0\n.else\n.code64\n.endif\ncli", "`.code64` where it may have no effect"),
    (".macro to32\n.code32\n.endm\ncli", "`.code32` in a macro or a repetition"),
    (".macro to64\n.code64\n.endm\n.code32\nto64\ncli", "`.code64` in a macro or"),
    (".rept 0\n.code32\n.endr\ncli", "`.code32` in a macro or a repetition"),
    (".macro m a\n\\a\n.endm\n.code32\nm .code64\ncli", "`.code64` as an argument"),
    (".macro m a\n\\a\n.endm\n.code32\nm \".code64\"\ncli", "`.code64` as an argument"),
    (".irp a, .code32\n\\a\n.endr\ncli", "`.code32` as an argument"),
    (".macro m a=.code64\n\\a\n.endm\n.code32\nm\ncli", "`.code64` as an argument"),
    (".macro m a\n.code\\a\n.endm\n.code32\nm 64\ncli", "may change the mode"),
    (".macro m a\n.\\a\n.endm\n.code32\nm code64\ncli", "may change the mode"),
    // The assembler ignores definitions of macros with names of directives.
    (".macro .code64\n.endm\n.code32\n.code64\ncli", "`.macro .code64`: a macro's name begins"),
    (".macro .byte a\n.endm\n.byte 0xfa", "`.macro .byte`: a macro's name begins"),
    // Macros that may not be defined, or not be removed.
    (".if 0\n.macro cli\n.endm\n.endif\ncli", "`.macro cli`: the name of an instruction"),
    (".macro a\n.macro mov a b\n.endm\n.endm\nmov %cr3,%rax", "`.macro mov`: the name of"),
    (".macro a\n.macro rep a\n.endm\n.endm\nrep insb", "`.macro rep`: the name of"),
    (".macro a b\n.macro \\b c\n\\c\n.endm\n.endm\na x\nx cli", "`.macro \\b`: a macro's name is"),
    (
        ".macro cli\n.endm\n.if 0\n.purgem cli\n.endif\ncli",
        "`.purgem cli` where it may have no effect",
    ),
    (
        ".macro cli\n.endm\n.macro c\n.purgem cli\n.endm\nc\ncli",
        "`.purgem cli` where it may have no effect",
    ),
    (
        ".macro a b\nmov \\b, %rax\n.endm\n.macro c\n.purgem a\n.macro a b\n.endm\n.endm\na %cr3",
        "`%cr3` as an argument of a macro that moves it",
    ),
    // `.end` that may have no effect, and sections that may not change.
    (".if 0\n.end\n.endif\ncli", "`.end` where it may have no effect"),
    (".if 0\n.section .discard.a,\"ax\"\n.endif\ncli", "a branch of `.if` that ends in another"),
    (".if 0\n.pushsection .discard.a,\"ax\"\n.else\n.endif\ncli", "a branch of `.if` that ends"),
    (".if 0\n.altmacro\n.endif\ncli", "`.altmacro` where it may have no effect"),
    // Other ways to write an instruction.
    ("x=%cr3\nmov x, %rax", "another name for a register"),
    (".set x, %cr3\nmov x, %rax", "another name for a register"),
    ("x==%ds\nmov x, %eax", "another name for a register"),
    ("wait cli", "`wait` before an instruction"),
    (".incbin \"/proc/self/cmdline\"", "`.incbin` hides instructions"),
    (".insn 0xfa", "`.insn` hides an instruction"),
];

#[test]
fn the_rewriter_refuses() {
    for (text, reason) in REFUSED {
        match outcome(text) {
            Err(refused) => assert!(refused.contains(reason), "{text}: {refused}"),
            Ok(report) => panic!("{text}: not refused, {report:?}"),
        }
    }
}

#[test]
fn the_verifier_finds_what_the_rewriter_cannot_see() {
    for text in [
        ".macro b a\n.byte \\a\n.endm\nb 0xfa",
        ".set x, 0xfa\n.byte x",
        ".fill 1, 1, 0xfa",
        ".skip 1, 0xfa",
        ".space 2, 0xf4",
        ".word 0x300f",
        ".long 0x90ca010f",
        ".octa 0xfa",
        ".ascii \"\\372\"",
        ".dcb.b 1, 0xfa",
        ".balign 8, 0x90\nnop\n.balign 8, 0xf4",
        "nop\n.org 4, 0xfa",
        // A label cuts the instruction in two; so does a table of data.
        ".byte 0x0f\nx: .byte 0x01, 0xca",
        "jmp 1f\n.byte 0x06, 0x06\n.fill 1, 1, 0xfa\n1: ret",
        // Code after an immediate that is a jump target.
        "jmp 1f + 1\n1: mov $0xfa, %al\nret",
        // Mapping symbols without owner.
        "\"$c32.0\": .fill 1, 1, 0xfa",
    ] {
        let report = outcome(text).unwrap_or_else(|refused| panic!("{text}: {refused}"));
        let report = report.unwrap_or_else(|| panic!("{text}: not assembled"));
        assert!(!report.is_good(), "{text}: {report}");
    }
}

#[test]
fn what_the_assembler_does_not_assemble_may_be_there() {
    for text in [
        ".if 0\ncli\n.else\nsti\nnop\n.endif\nret",
        ".if 1\n.pushsection .data\n.long 1\n.popsection\n.endif\ncli\nret",
        ".macro str\nnop\n.endm\nstr\ncli\nret",
        // A macro that may be removed, and is not; one that replaces another, as in Linux.
        ".macro a b\n\\b\n.endm\n.if 0\n.purgem a\n.endif\na cli\nret",
        ".macro a b\n\\b\n.endm\n.macro c\n.purgem a\n.macro a b\nnop\n\\b\n.endm\n.endm\nc\na cli\nret",
        ".ifndef X\n.macro a\ncli\n.endm\n.endif\na\nret",
        "rex.wrxb cli\nrex64xyz hlt\nadword cli\nword sti\nht cli\nnop\nwait\ncli\nret",
    ] {
        let report = outcome(text).unwrap_or_else(|refused| panic!("{text}: {refused}"));
        let report = report.unwrap_or_else(|| panic!("{text}: not assembled"));
        assert!(report.is_good() && report.sites.padded > 0, "{text}: {report}");
    }
}

/// An exception covers the bytes that the processor executes in that mode and no byte more.
#[test]
fn exceptions_are_as_small_as_they_can_be() {
    let text = b"entry: cli\nmov %eax, %cr0\njmp 1f\n.byte 0x06\n1: ret\nother: cli\nret\ntable: .byte 0xfa, 0xf4\n";
    let code32 = [&b".code32\n"[..], text].concat();
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let exceptions = |code32: &[&str], data: &[&str]| Exceptions {
        code16: Vec::new(),
        code32: names(code32),
        data: names(data),
    };
    let missed = |exceptions: &Exceptions| {
        let report = assembled(&code32, exceptions).unwrap();
        let missed: Vec<String> =
            report.missed.iter().map(|missed| missed.function.clone()).collect();
        let excepted: Vec<(String, u64)> =
            report.excepted.iter().map(|region| (region.function.clone(), region.length)).collect();
        (missed, excepted)
    };
    let (all, none) = missed(&Exceptions::default());
    assert_eq!(all, ["entry", "entry+0x1", "other", "table", "table+0x1"]);
    assert!(none.is_empty());
    let (rest, excepted) = missed(&exceptions(&["entry"], &[]));
    assert_eq!(rest, ["other", "table", "table+0x1"]);
    // Not the byte that the jump skips.
    assert_eq!(excepted, [("entry".to_owned(), 7)]);
    let (rest, excepted) = missed(&exceptions(&["entry", "other"], &["table"]));
    assert!(rest.is_empty(), "{rest:?}");
    assert_eq!(excepted[0], ("table".to_owned(), 2));
    assert_eq!(excepted[2], ("other".to_owned(), 2));
}
