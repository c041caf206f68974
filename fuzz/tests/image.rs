//! File systems of container images: `e2fsck` finds no error in those of random layers.

use parador_fuzz::image::{random, write};
use parador_fuzz::input::Random;
use std::process::Command;

/// Random images, and how many of them are accepted at least.
const IMAGES: usize = 600;
const ACCEPTED: usize = 60;

#[test]
fn written_file_systems_are_whole() {
    let mut numbers = Random::new(7);
    let mut accepted = 0;
    for number in 0..IMAGES {
        let input = random(&mut numbers);
        let file = tempfile::NamedTempFile::new().unwrap();
        let Ok(length) = write(&input, file.as_file()) else { continue };
        assert_eq!(file.as_file().metadata().unwrap().len(), length);
        accepted += 1;
        let mut check = Command::new("/sbin/e2fsck");
        let output = check.args(["-f", "-n"]).arg(file.path()).output().expect("e2fsck starts");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "image {number}: {text}\n{input:02x?}");
    }
    println!("{accepted} of {IMAGES} images accepted");
    assert!(accepted >= ACCEPTED, "only {accepted} of {IMAGES} images are accepted");
}
