//! The README's first commands, typed on a terminal in a source tree in which nothing was built.

use crate::system::workspace;
use crate::terminal::Terminal;
use anyhow::{Context, Result, bail};
use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Time between signs of life while a step takes long.
const SIGN_OF_LIFE: Duration = Duration::from_secs(30);
/// Columns of the newest line that such a sign shows.
const SHOWN_COLUMNS: usize = 80;
/// Variables that cargo, `make` and the tests add to their children's environment and that a
/// user's shell does not have: prefixes of names.
const ADDED: [&str; 8] = [
    "CARGO_BIN_",
    "CARGO_CRATE_",
    "CARGO_MANIFEST_",
    "CARGO_PKG_",
    "CARGO_PRIMARY_",
    "MAKE",
    "MFLAGS",
    "PARADOR_",
];
/// More of them: whole names.
const ADDED_NAMES: [&str; 3] = ["CARGO", "RUSTC", "RUSTDOC"];
/// The folder of build products, which a user may have set for all trees.
const TARGET: &str = "CARGO_TARGET_DIR";

/// Something that a user does and sees.
struct Step {
    /// Description for the report.
    name: &'static str,
    /// Keys that are pressed first.
    keys: &'static str,
    /// Texts that then appear, in this order.
    texts: &'static [&'static str],
    /// Minutes that it may take on a busy machine with two CPUs.
    minutes: u64,
}

/// A command of the README.
pub struct Visit {
    /// Name of the test.
    pub name: &'static str,
    /// Argument of `make`.
    rule: &'static str,
    steps: &'static [Step],
}

/// All visits, in order. The texts are those of `examples/three-guests.toml` and of the RAM disk
/// `busybox`.
pub const VISITS: [Visit; 2] = [
    Visit {
        name: "run",
        rule: "run",
        steps: &[
            Step {
                name: "everything is built, the steward asks",
                keys: "",
                texts: &["steward> "],
                minutes: 45,
            },
            Step {
                name: "the micro-guest is up",
                keys: "\x1d4",
                texts: &["each message of linux-1 gets an answer"],
                minutes: 5,
            },
            Step {
                name: "the second Linux guest is up",
                keys: "\x1d3",
                texts: &["linux-2 (3", " # "],
                minutes: 5,
            },
            Step {
                name: "the first Linux guest is up",
                keys: "\x1d2",
                texts: &["linux-1 (2", " # "],
                minutes: 5,
            },
            Step {
                name: "the first Linux guest reaches the second one",
                keys: "ping -c 3 10.0.0.2\r",
                texts: &["3 packets received", " # "],
                minutes: 2,
            },
            Step {
                name: "the micro-guest answers a message",
                keys: "echo hello >/dev/parador-com0\rhead -n 1 /dev/parador-com0\r",
                texts: &["heard: hello", " # "],
                minutes: 2,
            },
            Step {
                name: "the steward shuts down",
                keys: "\x1d1shutdown\r",
                texts: &["the operator shell ends"],
                minutes: 2,
            },
        ],
    },
    Visit {
        name: "run-hosted",
        rule: "run-hosted",
        steps: &[
            Step {
                name: "the kernel is built and boots to a shell",
                keys: "",
                texts: &["guest:/root #"],
                minutes: 45,
            },
            Step { name: "the guest switches off", keys: "poweroff\r", texts: &[], minutes: 2 },
        ],
    },
];

/// The source tree in which the commands are typed.
pub enum Tree {
    /// The one of this program, for continuous integration, which makes a clone for each run.
    Here(PathBuf),
    /// A clone of this program's tree in a folder for temporary files.
    Clone(TempDir),
}

impl Tree {
    /// The tree of this program.
    pub fn here() -> Self {
        Self::Here(workspace())
    }

    /// Clones the commit that is checked out. Changes that are not committed are not in it.
    pub fn clone_head() -> Result<Self> {
        let folder = TempDir::with_prefix("parador-front-door-").context("cannot make a folder")?;
        let changes = git(&["status", "--porcelain"]).output().context("cannot start git")?;
        if !changes.stdout.is_empty() {
            println!("changes that are not committed are not in the clone");
        }
        println!("cloning into {}", folder.path().display());
        let status = git(&["clone", "--quiet", "."]).arg(folder.path()).status();
        let status = status.context("cannot start git")?;
        if !status.success() {
            bail!("cannot clone {} ({status})", workspace().display());
        }
        Ok(Self::Clone(folder))
    }

    fn path(&self) -> &Path {
        match self {
            Self::Here(path) => path,
            Self::Clone(folder) => folder.path(),
        }
    }

    /// Removes a clone, or keeps it for a look at what failed.
    pub fn finish(self, has_failed: bool) {
        if let Self::Clone(folder) = self {
            if has_failed {
                println!("the clone is kept in {}", folder.keep().display());
            } else if let Err(error) = folder.close() {
                println!("cannot remove the clone: {error}");
            }
        }
    }

    /// `make RULE` with the environment of a user's shell.
    fn make(&self, rule: &str) -> Command {
        let mut command = Command::new("make");
        command.arg(rule).current_dir(self.path());
        let is_clone = matches!(self, Self::Clone(_));
        for (name, _) in env::vars_os() {
            if is_added(&name) || (is_clone && name == TARGET) {
                command.env_remove(name);
            }
        }
        command
    }
}

fn git(arguments: &[&str]) -> Command {
    let mut command = Command::new("git");
    command.args(arguments).current_dir(workspace()).stdin(Stdio::null());
    command
}

/// Returns true for a variable that cargo, `make` or the tests have set.
fn is_added(name: &OsString) -> bool {
    let name = name.to_string_lossy();
    ADDED_NAMES.contains(&&*name) || ADDED.iter().any(|prefix| name.starts_with(prefix))
}

impl Visit {
    /// Types the command and does every step; it has to end with exit code 0.
    pub fn run(&self, tree: &Tree) -> Result<()> {
        let start = Instant::now();
        println!("make {}: starts", self.rule);
        let mut terminal = Terminal::start(&tree.make(self.rule))?;
        let outcome = self.follow(&mut terminal);
        outcome.with_context(|| format!("make {}\n{}", self.rule, terminal.screen.tail()))?;
        println!("make {}: ended well after {:.1} s", self.rule, start.elapsed().as_secs_f64());
        Ok(())
    }

    fn follow(&self, terminal: &mut Terminal) -> Result<()> {
        let mut last = Instant::now();
        for step in self.steps {
            let start = Instant::now();
            last = start + Duration::from_secs(60 * step.minutes);
            terminal.type_text(step.keys)?;
            for text in step.texts {
                self.wait_for(text, last, terminal)
                    .with_context(|| format!("{}: limit {} min", step.name, step.minutes))?;
            }
            let seconds = start.elapsed().as_secs_f64();
            println!("make {}: {} after {seconds:.1} s", self.rule, step.name);
        }
        match terminal.wait(last)? {
            0 => Ok(()),
            code => bail!("ended with code {code} instead of 0"),
        }
    }

    /// Waits for a text and shows progress meanwhile.
    fn wait_for(&self, text: &str, deadline: Instant, terminal: &mut Terminal) -> Result<()> {
        let start = Instant::now();
        while deadline.saturating_duration_since(Instant::now()) > SIGN_OF_LIFE {
            if terminal.screen.find(text, Instant::now() + SIGN_OF_LIFE)? {
                return Ok(());
            }
            let seconds = start.elapsed().as_secs();
            let line: String = terminal.screen.newest_line().chars().take(SHOWN_COLUMNS).collect();
            println!("make {}: {seconds:>5} s  {line}", self.rule);
        }
        terminal.screen.expect(text, deadline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_users_environment() {
        for name in ["CARGO", "CARGO_PKG_NAME", "MAKEFLAGS", "MAKELEVEL", "PARADOR_ARTIFACTS"] {
            assert!(is_added(&name.into()), "{name}");
        }
        for name in ["CARGO_HOME", "CARGO_NET_OFFLINE", "RUSTUP_HOME", "HOME", "PATH", TARGET] {
            assert!(!is_added(&name.into()), "{name}");
        }
    }
}
