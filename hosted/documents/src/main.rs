//! Files of the package of Parador that are made from `parador` itself: manual pages, completions
//! for shells, and the RAM disk of `parador exec`. `cargo xtask package` starts it.
#![forbid(unsafe_code)]

use anyhow::{Context, Result};
use clap::{Command, CommandFactory};
use clap_complete::Shell;
use clap_mangen::Man;
use hosted_command::release::RELEASE;
use hosted_system::initramfs;
use parador_cli::commands::Cli;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

/// Name of the program.
const NAME: &str = "parador";
/// Completions: shell, and path below the root directory, where Debian's shells look.
const COMPLETIONS: [(Shell, &str); 3] = [
    (Shell::Bash, "usr/share/bash-completion/completions/parador"),
    (Shell::Zsh, "usr/share/zsh/vendor-completions/_parador"),
    (Shell::Fish, "usr/share/fish/vendor_completions.d/parador.fish"),
];
/// Manual pages, below the root directory.
const PAGES: &str = "usr/share/man/man1";
/// RAM disk with the agent, below the root directory.
const DISK: &str = "usr/lib/parador/agent.cpio";

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let result = match &arguments[..] {
        [root, agent] => write(Path::new(root), Path::new(agent)),
        _ => Err(anyhow::anyhow!("usage: hosted-documents ROOT AGENT")),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hosted-documents: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Writes all files below the folder `root`; `agent` is the agent's binary.
fn write(root: &Path, agent: &Path) -> Result<()> {
    let read = fs::read(agent).with_context(|| format!("cannot read {}", agent.display()))?;
    put(&root.join(DISK), &initramfs::agent(&read))?;
    for (name, page) in pages()? {
        put(&root.join(PAGES).join(name), &page)?;
    }
    for (shell, path) in COMPLETIONS {
        put(&root.join(path), &completions(shell))?;
    }
    Ok(())
}

fn put(path: &Path, content: &[u8]) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new(""));
    fs::create_dir_all(folder)
        .and_then(|()| fs::write(path, content))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Returns the complete command line of `parador`, without the subcommand `help`.
fn command() -> Command {
    let mut command = Cli::command().disable_help_subcommand(true);
    command.build();
    command
}

/// Returns the manual pages by file name: one of `parador`, and one of each subcommand.
fn pages() -> Result<Vec<(String, Vec<u8>)>> {
    let mut pages = Vec::new();
    add_pages(command(), &mut pages)?;
    Ok(pages)
}

fn add_pages(command: Command, pages: &mut Vec<(String, Vec<u8>)>) -> Result<()> {
    for subcommand in command.get_subcommands().filter(|other| !other.is_hide_set()) {
        add_pages(subcommand.clone(), pages)?;
    }
    let page = Man::new(command);
    let mut text = Vec::new();
    page.render(&mut text).context("cannot write a manual page")?;
    pages.push((page.get_filename(), text));
    Ok(())
}

/// Returns the completions for a shell.
fn completions(shell: Shell) -> Vec<u8> {
    let mut text = Vec::new();
    clap_complete::generate(shell, &mut visible(&Cli::command()), NAME, &mut text);
    text
}

/// Copies a command without hidden options and subcommands, which completions for bash would have.
fn visible(command: &Command) -> Command {
    let options = command.get_arguments().filter(|option| !option.is_hide_set()).cloned();
    let subcommands = command.get_subcommands().filter(|other| !other.is_hide_set());
    // clap keeps names for the time of the program.
    let name: &'static str = command.get_name().to_owned().leak();
    let copy = Command::new(name).args(options);
    let copy = match command.get_about() {
        Some(about) => copy.about(about.clone()),
        None => copy,
    };
    let copy = match command.get_version() {
        Some(_) => copy.version(RELEASE),
        None => copy,
    };
    copy.subcommands(subcommands.map(visible))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Arg;
    use std::collections::{BTreeMap, BTreeSet};

    /// Returns all commands, with their names as in file names: `parador-kernel-build`.
    fn all() -> BTreeMap<String, Command> {
        fn add(command: &Command, all: &mut BTreeMap<String, Command>) {
            let name = command.get_display_name().unwrap_or(command.get_name());
            all.insert(name.to_owned(), command.clone());
            command.get_subcommands().for_each(|other| add(other, all));
        }
        let mut all = BTreeMap::new();
        add(&command(), &mut all);
        all
    }

    /// Returns the spellings of an option: `-m` and `--memory`.
    fn spellings(option: &Arg) -> Vec<String> {
        let long = option.get_long_and_visible_aliases().unwrap_or_default();
        let short = option.get_short_and_visible_aliases().unwrap_or_default();
        let long = long.into_iter().map(|name| format!("--{name}"));
        long.chain(short.into_iter().map(|name| format!("-{name}"))).collect()
    }

    /// Removes the escapes of roff.
    fn plain(page: &[u8]) -> String {
        let text = String::from_utf8(page.to_vec()).unwrap();
        text.replace("\\-", "-").replace("\\fB", "").replace("\\fI", "").replace("\\fR", "")
    }

    /// Returns the words of a page or a script, which an option is one of.
    fn words(text: &str) -> Vec<&str> {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        text.split(|c| !is_part(c)).collect()
    }

    #[test]
    fn pages_have_the_options_of_their_command() {
        let pages: BTreeMap<_, _> = pages().unwrap().into_iter().collect();
        let all = all();
        let names: BTreeSet<String> = all.keys().map(|name| format!("{name}.1")).collect();
        assert_eq!(pages.keys().cloned().collect::<BTreeSet<_>>(), names);
        for (name, command) in &all {
            let page = plain(&pages[&format!("{name}.1")]);
            // The description, without examples and other text around it.
            let options = page.split(".SH OPTIONS").nth(1).unwrap();
            let options = words(options.split("\n.SH").next().unwrap());
            for option in command.get_arguments() {
                for spelling in spellings(option) {
                    let is_there = options.contains(&&*spelling);
                    assert_eq!(is_there, !option.is_hide_set(), "{name}: {spelling}");
                }
            }
            for subcommand in command.get_subcommands() {
                let reference = format!("{name}-{}(1)", subcommand.get_name());
                assert!(page.contains(&reference), "{name}: {reference}");
            }
        }
    }

    #[test]
    fn completions_have_all_options() {
        for (shell, _) in COMPLETIONS {
            let script = String::from_utf8(completions(shell)).unwrap();
            let words = words(&script);
            for (name, command) in all() {
                for option in command
                    .get_arguments()
                    .filter_map(|option| Some((option.get_long()?, option.is_hide_set())))
                {
                    // fish writes options without dashes.
                    let (long, is_hidden) = option;
                    let is_there = words.contains(&&*format!("--{long}"))
                        || shell == Shell::Fish && words.contains(&long);
                    assert_eq!(is_there, !is_hidden, "{shell}: {name} --{long}");
                }
                assert!(words.contains(&command.get_name()), "{shell}: {name}");
            }
        }
    }

    #[test]
    fn everything_is_where_debian_looks() {
        let root = tempfile::tempdir().unwrap();
        let agent = root.path().join("agent");
        fs::write(&agent, "agent").unwrap();
        write(root.path(), &agent).unwrap();
        let disk = fs::read(root.path().join(DISK)).unwrap();
        assert_eq!(initramfs::init(&disk), Some(&b"agent"[..]));
        for (_, path) in COMPLETIONS {
            assert!(root.path().join(path).is_file(), "{path}");
        }
        assert!(root.path().join(PAGES).join("parador-exec.1").is_file());
        assert!(write(root.path(), &root.path().join("none")).is_err());
    }
}
