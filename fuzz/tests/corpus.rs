//! Replay of every input in git, and of mutations of each.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use parador_fuzz::input::Random;
use parador_fuzz::{FuzzTarget, TARGETS};

/// Changed inputs per target.
const CHANGED: usize = 1500;
/// Maximum length of an input, as under the fuzzer.
const LONGEST: usize = 4096;

fn corpus(target: FuzzTarget) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target.name)
}

fn replay(name: &str) {
    let target = parador_fuzz::target(name).unwrap();
    let mut inputs: Vec<(String, Vec<u8>)> = fs::read_dir(corpus(target))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.display().to_string(), fs::read(path).unwrap()))
        .collect();
    inputs.sort();
    assert!(!inputs.is_empty());
    let run = |name: &str, input: &[u8]| {
        if catch_unwind(AssertUnwindSafe(|| (target.run)(input))).is_err() {
            panic!("target {}, {name}: {input:02x?}", target.name);
        }
    };
    for (name, input) in &inputs {
        run(name, input);
    }
    let mut random = Random::new(1);
    for number in 0..CHANGED {
        let (name, input) = &inputs[number % inputs.len()];
        let mut input = input.clone();
        random.mutate(&mut input);
        input.truncate(LONGEST);
        run(&format!("{name}, change {number}"), &input);
    }
}

#[test]
fn virtio() {
    replay("virtio");
}

#[test]
fn board() {
    replay("board");
}

#[test]
fn proto() {
    replay("proto");
}

#[test]
fn kernel() {
    replay("kernel");
}

#[test]
fn afterburn() {
    replay("afterburn");
}

#[test]
fn image() {
    replay("image");
}

#[test]
fn vtlb() {
    replay("vtlb");
}

/// Compares the files `seed-*` with the sources. With `PARADOR_WRITE_SEEDS` in the environment it
/// writes them (`cargo xtask fuzz --seeds`).
#[test]
fn seeds() {
    let write = std::env::var_os("PARADOR_WRITE_SEEDS").is_some();
    for target in TARGETS {
        let folder = corpus(target);
        let mut names = Vec::new();
        for (name, seed) in (target.seeds)() {
            let (name, bytes) = (format!("seed-{name}"), seed.finish());
            let path = folder.join(&name);
            if write {
                fs::create_dir_all(&folder).unwrap();
                fs::write(&path, &bytes).unwrap();
            }
            assert_eq!(fs::read(&path).ok(), Some(bytes), "{}", path.display());
            names.push(name);
        }
        for entry in fs::read_dir(&folder).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            assert!(!name.starts_with("seed-") || names.contains(&name), "no source writes {name}");
        }
    }
}
