//! Target `afterburn`: the input of the afterburner, which runs on a developer's host.
//!
//! First byte 0: the rest is assembler text. It is rejected with a line number, or rewritten.
//! Removing all insertions then restores the given text. First byte 1: the rest is an ELF file that
//! is verified.

use crate::input::{Input, Seed};
use std::path::Path;
use wedge_afterburn::{Exceptions, Pad, rewrite, verify};

/// Runs an input.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    match input.byte() {
        0 => text(input.rest()),
        _ => binary(input.rest()),
    }
}

fn text(text: &[u8]) {
    match rewrite(text, "x.s", Pad::default()) {
        Ok(rewritten) => {
            let sites: u32 = rewritten.padded.values().chain(rewritten.recorded.values()).sum();
            match rewritten.text {
                Some(new) => assert!(is_within(text, &new), "something was lost"),
                None => assert_eq!(sites, 0),
            }
        }
        Err(error) => assert!(!error.source.file.is_empty() && !error.reason.is_empty()),
    }
}

/// Returns true if `new` is `old` with insertions. Only a comma between bytes, and the blanks
/// around it, may have been replaced.
fn is_within(old: &[u8], new: &[u8]) -> bool {
    let mut new = new.iter();
    let stays = |byte: &&u8| **byte != b',' && !byte.is_ascii_whitespace();
    old.iter().filter(stays).all(|byte| new.any(|other| other == byte))
}

fn binary(file: &[u8]) {
    match verify(Path::new("x"), file, &Exceptions::default()) {
        Ok(report) => assert!(!report.to_string().is_empty()),
        Err(error) => assert_eq!(error.code(), 65, "{error}"),
    }
}

/// Initial inputs.
pub fn seeds() -> Vec<(&'static str, Seed)> {
    let text = |text: &str| Seed::new().bytes(&[0]).bytes(text.as_bytes());
    let record = [0xf0, 0xff, 0xff, 0xff, 1, 8, 0, 0];
    let code = [0xfa, 0x0f, 0x1f, 0x80, 0, 0, 0, 0, 0xfb, 0xc3];
    vec![
        ("text", text("1:\tcli # a\n\tsti; hlt\n\t.byte 0xfa, 0xf4\n\trep; insb\n")),
        (
            "text-compiler",
            text(
                "\t.file \"a.c\"\n#APP\n# 3 \"a.c\" 1\n\trdmsr # x\n# 0 \"\" 2\n#NO_APP\n\tje .L2\n",
            ),
        ),
        (
            "text-macro",
            text(
                ".macro a x\n\\x\n.pushsection .data\n.popsection\n.endm\na cli\na \"hlt; nop\"\n",
            ),
        ),
        (
            "text-marks",
            text("# 7 \"b.h\"\nmovq %rax, (%rdi) # parador:pgtable\n# parador:announce\n"),
        ),
        (
            "text-modes",
            text(
                ".code32\ncli\n.code64\n.section .foo, \"ax\"\nmov %cr3, %rax\n.irp r, ds, es\nmov %eax, %\\r\n.endr\n",
            ),
        ),
        ("elf", Seed::new().bytes(&[1]).bytes(&elf(&code, &record))),
        ("elf-missed", Seed::new().bytes(&[1]).bytes(&elf(&code, &[]))),
    ]
}

/// A linked file with a section of code at 0x1000, followed by a table of sites.
fn elf(code: &[u8], sites: &[u8]) -> Vec<u8> {
    const NAMES: &[u8] = b"\0.text\0parador_sites_1\0.shstrtab\0";
    const HEADER: usize = 64;
    let contents: [(u32, u32, u64, &[u8]); 3] =
        [(1, 1, 6, code), (7, 1, 2, sites), (23, 3, 0, NAMES)];
    let size: usize = contents.iter().map(|(.., data)| data.len().next_multiple_of(8)).sum();
    // Identification; executable, x86-64, version; entry, program headers; section headers after
    // the contents.
    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    file.extend([2, 0, 62, 0, 1, 0, 0, 0]);
    file.extend([0; 16]);
    file.extend(((HEADER + size) as u64).to_le_bytes());
    file.extend([0; 4]);
    for half in [HEADER as u16, 0, 0, 64, 4, 3] {
        file.extend(half.to_le_bytes());
    }
    let mut headers = vec![0; 64];
    let mut address = 0x1000_u64;
    for (name, kind, flags, data) in contents {
        headers.extend(name.to_le_bytes());
        headers.extend(kind.to_le_bytes());
        // Flags, address, offset, size; link and info; alignment; size of entries.
        for long in [flags, address, file.len() as u64, data.len() as u64, 0, 1, 0] {
            headers.extend(long.to_le_bytes());
        }
        file.extend_from_slice(data);
        file.resize(file.len().next_multiple_of(8), 0);
        address += data.len().next_multiple_of(8) as u64;
    }
    file.extend(headers);
    file
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without valid seeds the search has no starting point.
    #[test]
    fn the_seeds_mean_something() {
        let good = verify(
            Path::new("x"),
            &elf(
                &[0xfa, 0x0f, 0x1f, 0x80, 0, 0, 0, 0, 0xc3],
                &[0xf0, 0xff, 0xff, 0xff, 1, 8, 0, 0],
            ),
            &Exceptions::default(),
        );
        assert!(good.unwrap().is_good());
        for (name, seed) in seeds().into_iter().filter(|(name, _)| name.starts_with("text")) {
            let text = seed.finish();
            assert!(rewrite(&text[1..], name, Pad::default()).unwrap().text.is_some(), "{name}");
        }
    }
}
