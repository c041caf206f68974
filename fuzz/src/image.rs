//! Target `image`: layers of a container image from a stranger, which become an ext4 file system.
//!
//! One byte: 0: the rest is one layer, compressed or not. Otherwise entries of tar archives follow
//! until the end: one byte, the kind ([`KINDS`]; above: the next layer begins); name, link and
//! data, each with its length in one byte before it; 16 bits: mode and, in the upper four, how
//! often the data is repeated. Checksums and lengths are right.
//!
//! The layers are refused, or the file system is written. `tests/image.rs` has `e2fsck` check some.

use hosted_images::testing::write_layers;
use std::fs::File;
use std::io::Write;
use tar::{EntryType, Header};

use crate::input::{Input, Random, Seed};

/// Kinds of entries. The last three are refused.
const KINDS: [EntryType; 11] = [
    EntryType::Regular,
    EntryType::Directory,
    EntryType::Symlink,
    EntryType::Link,
    EntryType::Fifo,
    EntryType::XHeader,
    EntryType::GNULongName,
    EntryType::GNULongLink,
    EntryType::Char,
    EntryType::GNUSparse,
    EntryType::XGlobalHeader,
];
/// Names that meet often, in all meanings that a path can have.
const NAMES: [&str; 12] = [
    "a",
    "a/b",
    "a/b/c",
    "b",
    "./a/",
    "a/../b",
    "../b",
    "a/.wh.b",
    ".wh.a",
    "a/.wh..wh..opq",
    "/b/c",
    "",
];

/// Runs an input.
pub fn run(bytes: &[u8]) {
    let file = tempfile::tempfile().expect("the temporary folder has room");
    if let Err(error) = write(bytes, &file) {
        assert!(!error.to_string().is_empty());
    }
}

/// Writes the file system of an input to an empty file and returns its length in bytes.
///
/// # Errors
/// The layers are refused.
pub fn write(bytes: &[u8], file: &File) -> std::io::Result<u64> {
    let mut input = Input::new(bytes);
    let layers = match input.byte() {
        0 => vec![input.rest().to_vec()],
        _ => layers(input),
    };
    write_layers(&layers, file)
}

/// Archives of the entries of an input.
fn layers(mut input: Input<'_>) -> Vec<Vec<u8>> {
    let mut layers = vec![Vec::new()];
    while !input.is_empty() {
        let Some(kind) = KINDS.get(usize::from(input.byte())) else {
            layers.push(Vec::new());
            continue;
        };
        let mut field = || {
            let length = input.byte();
            input.bytes(length.into())
        };
        let (name, link, data) = (field(), field(), field());
        let mode = input.half();
        let data = data.repeat(1 + usize::from(mode >> 12) * 8);
        let layer = layers.last_mut().expect("there is at least one");
        entry(layer, (*kind, mode & 0xfff), [name, link], &data);
    }
    for layer in &mut layers {
        layer.extend([0; 1024]);
    }
    layers
}

/// Adds an entry to an archive, by POSIX' ustar format.
fn entry(archive: &mut Vec<u8>, (kind, mode): (EntryType, u16), texts: [&[u8]; 2], data: &[u8]) {
    let mut header = Header::new_ustar();
    for (text, place) in texts.into_iter().zip([0, 157]) {
        let text = &text[..text.len().min(100)];
        header.as_mut_bytes()[place..place + text.len()].copy_from_slice(text);
    }
    header.set_entry_type(kind);
    header.set_mode(mode.into());
    header.set_uid(1000);
    header.set_gid(u64::from(mode));
    header.set_mtime(1 << 32);
    header.set_size(data.len() as u64);
    header.set_cksum();
    archive.write_all(header.as_bytes()).expect("a vector takes all");
    archive.extend(data);
    archive.resize(archive.len().next_multiple_of(512), 0);
}

/// Adds an entry to an input.
fn entry_seed(seed: Seed, kind: u8, name: &str, link: &str, data: &[u8], mode: u16) -> Seed {
    let seed = seed.byte(kind).byte(name.len() as u8).bytes(name.as_bytes());
    let seed = seed.byte(link.len() as u8).bytes(link.as_bytes());
    seed.byte(data.len() as u8).bytes(data).half(mode)
}

/// Returns an input with entries whose names meet.
pub fn random(random: &mut Random) -> Vec<u8> {
    let mut seed = Seed::new().byte(1);
    for _ in 0..random.below(24) {
        let [name, link] = [0; 2].map(|_| NAMES[random.below(NAMES.len())]);
        let kind = random.below(8) as u8;
        seed = match random.below(10) {
            0 => seed.byte(0xff),
            _ => {
                let record = format!("{} path={name}\n", name.len() + 9);
                let data = if kind == 5 { record.as_bytes() } else { name.as_bytes() };
                entry_seed(seed, kind, name, link, data, random.draw() as u16)
            }
        };
    }
    seed.finish()
}

/// Initial inputs.
pub fn seeds() -> Vec<(&'static str, Seed)> {
    let start = || Seed::new().byte(1);
    let folder = |seed, name| entry_seed(seed, 1, name, "", b"", 0o755);
    let file = |seed, name| entry_seed(seed, 0, name, "", b"data", 0xf644);
    let mut plain = Vec::new();
    entry(&mut plain, (EntryType::Regular, 0o644), [b"file", b""], b"data");
    let links = entry_seed(file(folder(start(), "a"), "a/b"), 3, "a/c", "a/b", b"", 0o644);
    let whiteouts = file(folder(start(), "a"), "a/b").byte(0xff);
    let attribute = b"30 SCHILY.xattr.user.a=values\n";
    vec![
        ("plain", Seed::new().byte(0).bytes(&plain).bytes(&[0; 1024])),
        ("links", entry_seed(links, 2, "link", "a/../../b", b"", 0o777)),
        ("whiteout", file(whiteouts.clone(), "a/.wh.b")),
        ("opaque", file(file(whiteouts, "a/.wh..wh..opq"), "a/d")),
        ("attributes", file(entry_seed(start(), 5, "", "", attribute, 0), "a")),
        ("long-name", file(entry_seed(start(), 6, "", "", &[b'n'; 200], 0), "a")),
        ("escape", file(start(), "../a")),
    ]
}
