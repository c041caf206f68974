//! Commands of the operator shell, their syntax, and completion.

use heapless::{String, Vec};
use proto::manage::{Kind, State};
use proto::system::MAX_NAME;

use crate::editor::WIDTH;

/// Kind of a word in a command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// A command.
    Command,
    /// A running VM.
    Running,
    /// A paused VM.
    Paused,
    /// A stopped VM.
    Stopped,
    /// Any VM.
    Vm,
    /// A template.
    Template,
    /// A new name or a number: not completed.
    Free,
}

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    /// Name.
    pub name: &'static str,
    /// Arguments, as shown to users.
    pub usage: &'static str,
    /// Kinds of its arguments.
    pub words: &'static [Word],
    /// Number of optional arguments, at the end.
    pub optional: usize,
    /// Description for users.
    pub help: &'static str,
}

macro_rules! commands {
    ($($name:literal $usage:literal [$($word:ident)*] $optional:literal $help:literal;)+) => {
        &[$(Command {
            name: $name,
            usage: $usage,
            words: &[$(Word::$word),*],
            optional: $optional,
            help: $help,
        }),+]
    };
}

/// All commands.
pub const COMMANDS: &[Command] = commands! {
    "help" "[COMMAND]" [Command] 1 "lists the commands, or describes one";
    "list" "" [] 0 "lists servers, programs, VMs and templates";
    "start" "VM" [Stopped] 0 "starts a stopped VM";
    "stop" "VM" [Running] 0 "presses the ACPI power button: the guest decides how it reacts";
    "kill" "VM" [Running] 0 "ends a VM immediately";
    "pause" "VM" [Running] 0 "stops its vCPUs and its clock";
    "resume" "VM" [Paused] 0 "resumes a paused VM";
    "restart" "VM" [Running] 0 "ends a VM immediately and starts it again";
    "create" "NAME TEMPLATE" [Free Template] 0 "creates a VM from a template";
    "destroy" "VM" [Vm] 0 "ends a VM immediately and removes it";
    "top" "[ROUNDS]" [Free] 1 "shows CPU time, exits and memory of the VMs each second";
    "memory" "" [] 0 "shows free memory";
    "shutdown" "" [] 0 "shuts down all VMs, then the shell";
};

/// Returns the command of this name.
pub fn find(name: &str) -> Option<&'static Command> {
    COMMANDS.iter().find(|command| command.name == name)
}

/// A parsed line.
#[derive(Debug, PartialEq, Eq)]
pub struct ParsedCommand<'l> {
    /// The command.
    pub command: &'static Command,
    /// Its arguments.
    pub words: Vec<&'l str, 2>,
}

/// Syntax error.
#[derive(Debug, PartialEq, Eq)]
pub enum SyntaxError<'l> {
    /// The command does not exist.
    Unknown(&'l str),
    /// The number of arguments is wrong.
    Usage(&'static Command),
}

/// Parses a line; `None` if it is empty.
pub fn parse(line: &str) -> Option<Result<ParsedCommand<'_>, SyntaxError<'_>>> {
    let mut words = line.split_ascii_whitespace();
    let name = words.next()?;
    let Some(command) = find(name) else { return Some(Err(SyntaxError::Unknown(name))) };
    let mut rest = Vec::new();
    for word in words {
        if rest.len() == command.words.len() || rest.push(word).is_err() {
            return Some(Err(SyntaxError::Usage(command)));
        }
    }
    let least = command.words.len() - command.optional;
    Some(if rest.len() < least {
        Err(SyntaxError::Usage(command))
    } else {
        Ok(ParsedCommand { command, words: rest })
    })
}

/// Returns the kind of the word at the end of `before_cursor`, and the word's text so far.
pub fn word_at_end(before_cursor: &str) -> (Word, &str) {
    let start = before_cursor.rfind(' ').map_or(0, |space| space + 1);
    let (before, word) = before_cursor.split_at(start);
    let mut words = before.split_ascii_whitespace();
    let kind = match words.next() {
        None => Word::Command,
        Some(name) => {
            let words = find(name).map(|command| command.words).unwrap_or_default();
            let index = before.split_ascii_whitespace().count() - 1;
            words.get(index).copied().unwrap_or(Word::Free)
        }
    };
    (kind, word)
}

/// Returns whether a listed entry matches the kind of a word.
pub fn matches_kind(word: Word, kind: Kind, state: State) -> bool {
    let lives = matches!(state, State::Running | State::Paused);
    match word {
        Word::Command | Word::Free => false,
        Word::Template => kind == Kind::Template,
        Word::Vm => kind == Kind::Vm,
        Word::Running => kind == Kind::Vm && (lives || state == State::Waiting),
        Word::Paused => kind == Kind::Vm && state == State::Paused,
        Word::Stopped => kind == Kind::Vm && !lives,
    }
}

/// State of a completion: the candidates that begin with the typed text.
#[derive(Default)]
pub struct Completion {
    /// Longest common prefix of the candidates.
    common: String<MAX_NAME>,
    /// Number of candidates.
    count: usize,
    /// The candidates, shown if there are several.
    list: String<{ 8 * WIDTH }>,
}

impl Completion {
    /// Adds a name if it begins with `word`.
    pub fn offer(&mut self, word: &str, name: &str) {
        if !name.starts_with(word) {
            return;
        }
        if self.count == 0 {
            // Names fit.
            let _ = self.common.push_str(name);
        } else {
            let same = self.common.bytes().zip(name.bytes()).take_while(|(a, b)| a == b).count();
            self.common.truncate(same);
        }
        self.count += 1;
        // An overlong list is truncated.
        let _ = self.list.push_str(name).and_then(|()| self.list.push_str("  "));
    }

    /// Returns the text to append to `word`, and whether the word is complete then.
    pub fn rest(&self, word: &str) -> (&str, bool) {
        (self.common.get(word.len()..).unwrap_or_default(), self.count == 1)
    }

    /// Returns the candidates if there are several.
    pub fn choices(&self) -> Option<&str> {
        (self.count > 1).then(|| self.list.trim_end())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_taken_apart() {
        assert_eq!(parse("  "), None);
        let parsed =
            |line| parse(line).unwrap().map(|parsed| (parsed.command.name, parsed.words.to_vec()));
        assert_eq!(parsed(" list "), Ok(("list", vec![])));
        assert_eq!(parsed("create a  b"), Ok(("create", vec!["a", "b"])));
        assert_eq!(parsed("top"), Ok(("top", vec![])));
        assert_eq!(parsed("top 3"), Ok(("top", vec!["3"])));
        assert_eq!(parsed("lst"), Err(SyntaxError::Unknown("lst")));
        for line in ["start", "create a", "list x", "top 1 2", "create a b c"] {
            assert!(matches!(parsed(line), Err(SyntaxError::Usage(_))), "{line}");
        }
    }

    #[test]
    fn words_have_kinds() {
        assert_eq!(word_at_end(""), (Word::Command, ""));
        assert_eq!(word_at_end("li"), (Word::Command, "li"));
        assert_eq!(word_at_end("start "), (Word::Stopped, ""));
        assert_eq!(word_at_end("create new te"), (Word::Template, "te"));
        assert_eq!(word_at_end("create ne"), (Word::Free, "ne"));
        assert_eq!(word_at_end("list x"), (Word::Free, "x"));
        assert_eq!(word_at_end("nonsense x"), (Word::Free, "x"));
    }

    #[test]
    fn completions() {
        let complete = |word: &str| {
            let mut completion = Completion::default();
            COMMANDS.iter().for_each(|command| completion.offer(word, command.name));
            let (rest, whole) = completion.rest(word);
            (rest.to_owned(), whole, completion.choices().map(str::to_owned))
        };
        assert_eq!(complete("li"), ("st".into(), true, None));
        assert_eq!(complete("re"), ("s".into(), false, None.or(Some("resume  restart".into()))));
        assert_eq!(complete("x"), (String::<1>::new().as_str().into(), false, None));
        assert!(complete("").2.unwrap().starts_with("help  list"));
    }

    #[test]
    fn names_fit_their_commands() {
        assert!(matches_kind(Word::Running, Kind::Vm, State::Paused));
        assert!(!matches_kind(Word::Running, Kind::Task, State::Running));
        assert!(matches_kind(Word::Stopped, Kind::Vm, State::Ended(3)));
        assert!(!matches_kind(Word::Stopped, Kind::Vm, State::Running));
        assert!(matches_kind(Word::Template, Kind::Template, State::New));
        assert!(!matches_kind(Word::Free, Kind::Vm, State::New));
    }
}
