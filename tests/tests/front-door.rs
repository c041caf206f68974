//! The README's first commands in a fresh clone, or with `--here` in the present tree.

use anyhow::Result;
use libtest_mimic::{Arguments, Failed, Trial};
use parador_tests::front_door::{Tree, VISITS};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

/// Option: no clone, but the tree of this program.
const HERE: &str = "--here";

fn main() -> ExitCode {
    let mut words: Vec<String> = std::env::args().collect();
    let is_here = words.iter().any(|word| word == HERE);
    words.retain(|word| word != HERE);
    let mut arguments = Arguments::from_iter(words);
    // The second command finds what the first one has built.
    arguments.test_threads = Some(1);
    let shared: Arc<Mutex<Option<Tree>>> = Arc::default();
    let trials = VISITS.iter().map(|visit| {
        let shared = Arc::clone(&shared);
        let body = move || -> Result<()> {
            let mut tree = shared.lock().unwrap_or_else(PoisonError::into_inner);
            if tree.is_none() {
                *tree = Some(if is_here { Tree::here() } else { Tree::clone_head()? });
            }
            tree.as_ref().map_or(Ok(()), |tree| visit.run(tree))
        };
        let name = format!("front-door/{}", visit.name);
        Trial::test(name, move || body().map_err(|error| Failed::from(format!("{error:#}"))))
    });
    let conclusion = libtest_mimic::run(&arguments, trials.collect());
    if let Some(tree) = shared.lock().unwrap_or_else(PoisonError::into_inner).take() {
        tree.finish(conclusion.has_failed());
    }
    conclusion.exit_code()
}
