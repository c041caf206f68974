//! Places of the memory that a VM's processes share, for the module that attacks them
//! (`guests/linux/check/check_escape.c`).
//!
//! They come from the sources: offsets of `proto`'s structures, and those of the wedge's as its
//! file with debugging information has them (`shared_words` in
//! `wedge/on-linux/src/state/shared.rs`).

use crate::system::{artifacts, workspace};
use anyhow::{Context, Result, ensure};
use proto::hosted::balloon::BalloonReport;
use proto::hosted::debug::DebugState;
use proto::hosted::idle::IdleRecord;
use proto::hosted::{
    DiskRecord, Filters, MAX_DISKS, MAX_NETS, MAX_QUEUES, MAX_SHARES, NetRecord, ShareRecord,
    Start, layout,
};
use proto::requests::{PARTS, Part, Queue, REQUESTS, Request, op};
use proto::system::MAX_VCPUS;
use std::fmt::Write;
use std::fs;
use std::mem::offset_of;
use std::path::PathBuf;
use std::process::Command;

/// The generated file, beside the module's source.
pub const HEADER: &str = "check_layout.h";
/// First eight bytes of a sector that a forged request has written; the sector's number is added.
pub const MARK: u64 = 0x7061_7261_0000_0000;
/// Symbols of fields, each of which is attacked, and of other places.
const WORD: &str = "parador_word_";
const PLACE: &str = "parador_place_";
/// The document with the table of what trusted processes read.
const TABLE: &str = "docs/design/0014-device-processes.md";

/// A word of shared memory, or some together.
#[derive(Debug, PartialEq, Eq)]
pub struct Word {
    /// Structure and field.
    pub name: String,
    /// Address in guest processes.
    at: u64,
    length: u64,
}

impl Word {
    fn new(name: impl Into<String>, offset: u64, length: u64) -> Self {
        Self { name: name.into(), at: layout::SHARED + offset, length }
    }
}

fn wedge() -> PathBuf {
    artifacts().join("parador-wedge.debug")
}

/// Symbols of the wedge: address, size, name.
fn symbols() -> Result<Vec<(u64, u64, String)>> {
    let listed = Command::new("nm").arg("-S").arg(wedge()).output().context("cannot start nm")?;
    ensure!(listed.status.success(), "nm: {}", String::from_utf8_lossy(&listed.stderr));
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    let number = |word: &str| u64::from_str_radix(word, 16).ok();
    let symbols = text.lines().filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [at, size, _, name] => Some((number(at)?, number(size)?, name.to_owned())),
            [at, _, name] => Some((number(at)?, 0, name.to_owned())),
            _ => None,
        }
    });
    Ok(symbols.collect())
}

/// All words that a guest can write and that others may read: fields of the wedge's structures, and
/// what the loader has left.
pub fn all() -> Result<Vec<Word>> {
    let fields = symbols()?.into_iter().filter_map(|(at, length, name)| {
        let name = name.strip_prefix(WORD)?.to_owned();
        Some(Word { name, at, length })
    });
    let mut words: Vec<Word> = fields.collect();
    ensure!(words.len() > 40, "the wedge exports {} words", words.len());
    words.sort_by(|a, b| a.name.cmp(&b.name));
    let numbered = |name: &str, offset: u64, count: usize, each: usize| -> Vec<Word> {
        let one =
            |n: usize| Word::new(format!("{name}_{n}"), offset + (n * each) as u64, each as u64);
        (0..count).map(one).collect()
    };
    words.extend(numbered("start", 0, Start::WORDS, 8));
    words.extend(numbered("disk", layout::DISKS, MAX_DISKS, 8 * DiskRecord::WORDS));
    words.extend(numbered("net", layout::NETS, MAX_NETS, 8 * NetRecord::WORDS));
    words.extend(numbered("share", layout::SHARES, MAX_SHARES, 8 * ShareRecord::WORDS));
    words.extend(numbered("filter", layout::FILTERS, Filters::COUNT, 8 * Filters::WORDS));
    words.extend(numbered("idle", layout::IDLE, MAX_VCPUS, size_of::<IdleRecord>()));
    macro_rules! fields {
        ($name:literal, $at:expr, $type:ty; $($field:ident)*) => {
            $(words.push(Word::new(
                concat!($name, "_", stringify!($field)),
                $at + offset_of!($type, $field) as u64,
                8,
            ));)*
        };
    }
    fields!("debug", layout::DEBUG, DebugState; wanted halt_pending breakpoints vcpus);
    fields!("balloon", layout::BALLOON, BalloonReport; requested reports tags values target);
    fields!("queue", layout::QUEUES, Queue; waiting done calls answers pending epoch target);
    Ok(words)
}

/// The header.
pub fn header() -> Result<String> {
    let mut text =
        "/* Generated from the host's sources: tests/src/hosted/words.rs. */\n".to_owned();
    let mut define = |name: &str, value: u64| {
        // A text takes everything.
        let _ = writeln!(text, "#define {name} {value:#x}UL");
    };
    macro_rules! offsets {
        ($($name:literal $type:ty, $field:ident;)*) => {
            $(define($name, offset_of!($type, $field) as u64);)*
        };
    }
    offsets! {
        "QUEUE_WAITING" Queue, waiting;
        "QUEUE_DONE" Queue, done;
        "QUEUE_CALLS" Queue, calls;
        "QUEUE_REQUESTS" Queue, requests;
        "REQUEST_OP" Request, op;
        "REQUEST_USED" Request, used;
        "REQUEST_SECTOR" Request, sector;
        "REQUEST_COUNT" Request, count;
        "REQUEST_STATUS" Request, status;
        "REQUEST_PARTS" Request, parts;
        "PART_ADDRESS" Part, address;
        "PART_BYTES" Part, length;
    }
    let symbols = symbols()?;
    let end = symbols.iter().map(|(at, ..)| *at).filter(|at| *at < layout::SHARED).max();
    let code = end.context("the wedge has no symbols")?.next_multiple_of(4096) - layout::WEDGE;
    for (name, value) in [
        ("QUEUE_LENGTH", size_of::<Queue>() as u64),
        ("REQUEST_LENGTH", size_of::<Request>() as u64),
        ("PART_LENGTH", size_of::<Part>() as u64),
        ("REQUESTS", REQUESTS as u64),
        ("PARTS", PARTS as u64),
        ("DISKS", MAX_DISKS as u64),
        ("ALL_QUEUES", MAX_QUEUES as u64),
        ("OP_WRITE", op::WRITE.into()),
        ("OP_MESSAGE", op::MESSAGE.into()),
        ("MARK", MARK),
        ("MAX_VCPUS", MAX_VCPUS as u64),
        ("KICK_SIGNAL", layout::KICK_SIGNAL.into()),
        ("WEDGE", layout::WEDGE),
        ("WEDGE_LENGTH", code),
        ("SHARED", layout::SHARED),
        ("SHARED_LENGTH", layout::SHARED_LENGTH),
        ("OWN_VCPU", layout::SHARED + 0x1000),
        ("STUBS", layout::STUBS),
        ("STUBS_LENGTH", layout::STUBS_LENGTH),
        ("PRIVATE", layout::PRIVATE),
        ("SLOTS", layout::SLOTS as u64),
        ("QUEUES", layout::QUEUES),
        ("FILTERS", layout::FILTERS),
        ("CONFIG", layout::CONFIG),
        ("CPU_SETS", layout::CPU_SETS),
        ("CPU_SET_LENGTH", layout::CPU_SET_LENGTH),
        ("CPU_SET_CPUS", layout::CPU_SET_CPUS),
        ("ERRORS_FD", layout::ERRORS_FD.into()),
        ("MEMORY_FD", layout::MEMORY_FD.into()),
        ("DOORBELL_FD", layout::DOORBELL_FD.into()),
    ] {
        define(name, value);
    }
    for (at, length, name) in &symbols {
        if let Some(name) = name.strip_prefix(PLACE).or(name.strip_prefix(WORD)) {
            define(&name.to_uppercase(), *at);
            if name == "vcpu_slots" {
                define("SLOT_LENGTH", length / layout::SLOTS as u64);
            }
        }
    }
    text.push_str("static const struct { unsigned long at, length; } words[] = {\n");
    for Word { name, at, length } in all()? {
        let _ = writeln!(text, "\t{{ {at:#x}, {length} }}, /* {name} */");
    }
    text.push_str("};\n");
    ensure!(MAX_QUEUES == MAX_DISKS + MAX_SHARES, "queues are of disks and shares");
    Ok(text)
}

/// Each field of the memory that all processes of a VM share is in the table of what trusted
/// processes read there.
pub fn documented() -> Result<()> {
    let text = fs::read_to_string(workspace().join(TABLE)).context(TABLE)?;
    let rows: Vec<&str> = text.lines().filter(|line| line.starts_with("| `")).collect();
    for word in all()? {
        let name =
            word.name.trim_end_matches(|letter: char| letter.is_ascii_digit() || letter == '_');
        let name = match word.name.split_once('_') {
            Some(("shared" | "vcpu" | "slot" | "queue" | "debug", _)) => word.name.as_str(),
            _ => name,
        };
        let quoted = format!("`{name}`");
        ensure!(rows.iter().any(|row| row.contains(&quoted)), "{TABLE} has no row for {quoted}");
    }
    Ok(())
}
