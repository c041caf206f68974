//! Refused texts, and the reported source lines. The rewritten texts are in `tests/golden`.

use super::*;

fn refused(text: &str) -> String {
    rewrite(text.as_bytes(), "x.s", Pad::default()).unwrap_err().to_string()
}

fn kinds(text: &str) -> Vec<(Kind, u32)> {
    let rewritten = rewrite(text.as_bytes(), "x.s", Pad::default()).unwrap();
    rewritten.padded.into_iter().collect()
}

#[test]
fn refusals_name_the_place() {
    for (text, message) in [
        ("\tnop\n.intel_syntax noprefix\n", "x.s:2: Intel syntax is not supported"),
        (".att_syntax noprefix", "x.s:1: registers without `%` are not supported"),
        ("nop\n\n.include \"a.s\"", "x.s:3: `.include` hides instructions"),
        ("# 7 \"a.h\"\nnop\n.popsection", "a.h:8: `.popsection` without `.pushsection`"),
        (".pushsection .data\nnop", "x.s:2: `.pushsection` has no `.popsection`"),
        (".macro a\ncli\n", "x.s:3: `.macro a` has no `.endm`"),
        (".endm", "x.s:1: `.endm` without `.macro`"),
        (".endr", "x.s:1: `.endr` without `.rept` or `.irp`"),
        (".rept 2\ncli", "x.s:2: `.rept` has no `.endr`"),
        (".ascii \"a\n", "x.s:1: the string does not end on its line"),
        ("nop /* \n", "x.s:1: the comment has no end"),
        ("rep\n1: insb", "x.s:2: a label between a sensitive instruction and its prefix"),
        ("nop # parador:other", "x.s:1: no marker `parador:other`"),
        ("nop # parador:announce", "x.s:1: `parador:announce` must be alone on its line"),
        ("# parador:pgtable", "x.s:1: no instruction before `parador:pgtable` on its line"),
        ("cli # parador:pgtable", "x.s:1: the marked instruction is a site already"),
        (".code32\nmov %eax, (%edx) # parador:pgtable", "x.s:2: a marker in 16-bit or 32-bit code"),
        (
            ".macro a r\nmov \\r, %rax\n.endm\na %cr3",
            "x.s:4: `%cr3` as an argument of a macro that moves it",
        ),
        (
            ".irp r, ds, ax\nmov %\\r, %eax\n.endr",
            "x.s:2: sensitive registers and others as values",
        ),
        (
            ".macro a b\n.ascii \\b\n.endm\na \"cli\"",
            "x.s:4: a sensitive instruction (cli) in a string",
        ),
    ] {
        let refused = refused(text);
        assert!(refused.starts_with(message), "{text}: {refused}");
    }
}

#[test]
fn pads() {
    let pad = Pad(5);
    let rewritten = |text: &str, pad| {
        let text = rewrite(text.as_bytes(), "x.s", pad).unwrap().text.unwrap();
        String::from_utf8(text).unwrap()
    };
    let behind = rewritten("wrmsr", pad);
    assert!(behind.contains("97710:wrmsr;97711:.nops -((5-"), "{behind}");
    // If no exception refers to the instruction, prefixes make it longer.
    for text in ["cli", "mov %ds,%eax", "pushf; pop %rax"] {
        let before = rewritten(text, pad);
        let prefixes = "97710:.skip -((5-(97711f-97709f))>0)*(5-(97711f-97709f)),46;97709:";
        assert!(before.contains(prefixes) && !before.contains(".nops"), "{before}");
        assert!(rewritten(text, Pad(16)).contains(".nops"), "{text}: an instruction has 15 bytes");
    }
    for text in ["mov %ds,(%rax)", "mov %ds,%gs:x", "mov %ds,x", "mov %cr0,%rax"] {
        assert!(rewritten(text, pad).contains(".nops"), "{text}");
    }
}

#[test]
fn what_is_not_sensitive_stays() {
    for text in [
        "",
        "f:\tmovq %rax, %rbx\n\tret\n",
        ".macro op_x op\n\\op\n.endm\nop_x nop\n",
        ".section .rodata\n.byte 0xfa\n",
        ".irp r, a, b\nmov %r\\r\\()x, %rax\n.endr\n",
        "cli_count:\n.set sti, 5\nmov $hlt, %rax\ncall cli\n",
    ] {
        let rewritten = rewrite(text.as_bytes(), "x.s", Pad::default()).unwrap();
        assert_eq!(rewritten.text.map(|text| String::from_utf8(text).unwrap()), None, "{text}");
    }
}

#[test]
fn pairs_need_each_other() {
    assert_eq!(kinds("sti;hlt"), [(Kind::StiHlt, 1)]);
    assert_eq!(kinds("sti\n1: hlt"), [(Kind::Sti, 1), (Kind::Hlt, 1)]);
    assert_eq!(
        kinds("#APP\n# 1 \"a\" 1\nsti\n# 0 \"\" 2\n# 2 \"a\" 1\nhlt\n# 0 \"\" 2\n#NO_APP"),
        [(Kind::StiHlt, 1)]
    );
}

/// `sti` becomes a site only after the next instruction, which may be `hlt`; context changes in
/// between count.
#[test]
fn flags_behind_an_instruction_that_could_be_one_of_two() {
    let flags = |behind: &str| {
        let text = format!("#APP\n# 1 \"a\" 1\n\tsti\n{behind}\n");
        let text = rewrite(text.as_bytes(), "x.s", Pad::default()).unwrap().text.unwrap();
        let text = String::from_utf8(text).unwrap();
        let record = text.split(",1,").nth(1).unwrap_or_else(|| panic!("no sti: {text}"));
        record.split(';').next().unwrap().to_owned()
    };
    const END: &str = "# 0 \"\" 2\n#NO_APP\n";
    for (behind, expected) in [
        ("\tmovq %rax,%rbx\n\tret", "2"),
        ("\tret", "2"),
        ("#APP\n# 2 \"a\" 1\n\tcli\n# 0 \"\" 2\n#NO_APP", "2"),
        ("\tje 1f", "0"),
        ("\tsetc %al", "0"),
    ] {
        assert_eq!(flags(&format!("{END}{behind}")), expected, "{behind}");
    }
    assert_eq!(flags("\tje 1f"), "0", "in the same statement");
    assert_eq!(flags(&format!("/* output condition code z*/\n{END}\tret")), "0");
}
