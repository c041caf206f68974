//! Progress on standard error: a live line on a terminal, plain lines elsewhere.

use crate::failure::Failure;
use crate::messages::{self, Level};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

/// Width of the column of names.
const NAME_WIDTH: usize = 14;

/// Prints each step, its result and its duration.
pub struct Steps {
    terminal: bool,
}

/// A step in progress.
pub struct Step {
    bar: ProgressBar,
}

impl Steps {
    /// Creates the display for the current standard error.
    pub fn stderr() -> Self {
        Self { terminal: stderr().is_terminal() && !messages::is_json() && !messages::is_quiet() }
    }

    /// Runs a step. The text that `work` returns is printed as its result.
    pub fn run<T>(
        &self,
        name: &str,
        work: impl FnOnce(&Step) -> Result<(T, String), Failure>,
    ) -> Result<T, Failure> {
        let start = Instant::now();
        let step = Step { bar: self.bar(name) };
        let outcome = work(&step);
        step.bar.finish_and_clear();
        let (value, result) = outcome?;
        let seconds = start.elapsed().as_secs_f64();
        if messages::is_json() {
            messages::say(Level::Info, &format!("{name}: {result} ({seconds:.1} s)"));
        } else if !messages::is_quiet() {
            messages::to_stderr(format_args!("  {name:<NAME_WIDTH$} {result} ({seconds:.1} s)\n"));
        }
        Ok(value)
    }

    fn bar(&self, name: &str) -> ProgressBar {
        if !self.terminal {
            return ProgressBar::hidden();
        }
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{spinner} {prefix} {wide_msg} {elapsed}") {
            bar.set_style(style);
        }
        bar.set_prefix(format!("{name:<NAME_WIDTH$}"));
        bar.enable_steady_tick(Duration::from_millis(100));
        bar
    }
}

impl Step {
    /// Shows the current activity of the step.
    pub fn now(&self, what: impl Into<String>) {
        self.bar.set_message(what.into());
    }

    /// Prints a warning above the live line.
    pub fn warn(&self, text: &str) {
        self.bar.suspend(|| messages::say(Level::Warn, text));
    }
}
