//! Runs tests by the harness of libtest-mimic, once or repeatedly, and reports.

use crate::outcome::{self, Outcome, Test};
use crate::repeat::{Key, Options, State, table};
use anyhow::{Result, bail};
use libtest_mimic::{Arguments, Failed, Trial};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT};
use std::fs;
use std::hint::spin_loop;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

/// Results of the runs of this process.
struct Results {
    outcomes: Vec<Outcome>,
    /// Results that outlive this process, if tests are repeated.
    state: Option<State>,
    /// Runs that have not ended.
    left: usize,
}

/// Gives programs that tests start the default actions of signals that this process ignores, below
/// nohup(1) or in the background of a script: tests send them. A signal that is caught here has its
/// default action in a program that is executed.
fn catch_ignored_signals() -> Result<()> {
    let status = fs::read_to_string("/proc/self/status")?;
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap_or("0");
    let mask = u64::from_str_radix(mask.trim(), 16)?;
    for signal in [SIGHUP, SIGINT, SIGQUIT] {
        if mask >> (signal - 1) & 1 != 0 {
            signal_hook::flag::register(signal, Arc::default())?;
        }
    }
    Ok(())
}

/// Runs `tests`, `parallel` at the same time. `stress`: seconds of load in tests that have such a
/// length. Returns failure if a run has failed, in an interrupted call before this one, too.
pub fn run(
    mut tests: Vec<Test>,
    options: &Options,
    parallel: usize,
    stress: u32,
) -> Result<ExitCode> {
    let program = std::iter::once("systems".to_owned());
    let mut arguments = Arguments::from_iter(program.chain(options.rest.iter().cloned()));
    arguments.test_threads.get_or_insert(parallel);
    tests.retain(|test| {
        let trial = Trial::test(test.name.clone(), || Ok(()));
        options.selects(&test.name, test.class, arguments.exact)
            && !arguments.is_filtered_out(&trial)
    });
    if arguments.list {
        let trials = tests.into_iter().map(|test| Trial::test(test.name, || Ok(()))).collect();
        return Ok(libtest_mimic::run(&arguments, trials).exit_code());
    }
    catch_ignored_signals()?;
    let state = match options.repeat {
        Some(_) => Some(State::open(&Key::of_tree(options.busy, stress)?)?),
        None => None,
    };
    let tests: Arc<[Test]> = tests.into();
    let is_left = |round: usize, test: &Test| {
        state.as_ref().is_none_or(|state| state.runs(&test.name) <= round)
    };
    let rounds = 0..options.repeat.unwrap_or(1);
    let runs: Vec<usize> = rounds
        .flat_map(|round| (0..tests.len()).map(move |index| (round, index)))
        .filter(|&(round, index)| is_left(round, &tests[index]))
        .map(|(_, index)| index)
        .collect();
    let results = Results { outcomes: Vec::new(), state, left: runs.len() };
    if runs.is_empty() {
        print!("{}", results.report(&tests));
    }
    let results = Arc::new(Mutex::new(results));
    let trials = runs.into_iter().map(|index| trial(index, &tests, &results)).collect();
    for _ in 0..options.busy {
        std::thread::spawn(|| {
            loop {
                spin_loop()
            }
        });
    }
    let conclusion = libtest_mimic::run(&arguments, trials);
    let results = results.lock().unwrap_or_else(PoisonError::into_inner);
    if results.left > 0 {
        bail!("{} results are missing", results.left);
    }
    Ok(match results.has_failed(&tests) {
        true => ExitCode::FAILURE,
        false => conclusion.exit_code(),
    })
}

/// One run of a test, for the harness.
fn trial(index: usize, tests: &Arc<[Test]>, results: &Arc<Mutex<Results>>) -> Trial {
    let (tests, results) = (Arc::clone(tests), Arc::clone(results));
    Trial::test(tests[index].name.clone(), move || {
        let outcome = tests[index].run();
        let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
        results.add(outcome.clone(), &tests)?;
        outcome.error.map_or(Ok(()), |error| Err(Failed::from(error)))
    })
}

impl Results {
    /// Adds a result. The last one brings the report, so that the harness's own summary is at the
    /// end. Fails if the result cannot be kept.
    fn add(&mut self, outcome: Outcome, tests: &[Test]) -> Result<()> {
        self.left -= 1;
        let kept = match &mut self.state {
            Some(state) => state.add(outcome.clone()),
            None => Ok(()),
        };
        self.outcomes.push(outcome);
        if self.left == 0 {
            print!("\n{}", self.report(tests));
        }
        kept
    }

    /// All results of the selected tests, if they are kept.
    fn kept(&self, tests: &[Test]) -> Option<Vec<&Outcome>> {
        let is_selected = |name: &str| tests.iter().any(|test| test.name == name);
        self.state.as_ref().map(|state| state.outcomes(is_selected))
    }

    fn report(&self, tests: &[Test]) -> String {
        match self.kept(tests) {
            Some(kept) => table(&kept),
            None => outcome::summary(&self.outcomes),
        }
    }

    fn has_failed(&self, tests: &[Test]) -> bool {
        let kept = self.kept(tests).unwrap_or_default();
        kept.iter().any(|outcome| outcome.error.is_some())
    }
}
