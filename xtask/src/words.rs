//! `cargo xtask words`: the rules of `docs/GLOSSARY.md` that a program can decide.
//!
//! Four kinds of finding: a banned phrase, a comment beyond [`COLUMNS`], a Rust doc comment that begins
//! with a word of [`DOC_WORDS`], and a public type name with more than [`DEFINITIONS`] definitions.
//! The search covers the tracked text sources except [`NOT_SEARCHED`], which each run prints.

use crate::process::{output, workspace};
use crate::source;
use anyhow::{Context, Result, bail};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt::{self, Display};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Banned phrases and their remedies. A phrase matches whole words in any case, across the lines of a
/// paragraph and in names with underscores; `a|b` stands for either word.
const PHRASES: &[(&str, &str)] = &[
    // Pronouns in place of the actor.
    ("nobody|somebody|anybody|everybody", "name the actor (no CPU, another task, each client)"),
    ("everyone|someone|anyone", "name the actor (each client, another task, any user)"),
    ("no one", "name the actor (no CPU, no client)"),
    ("whoever|whom", "name the actor (the caller, the task that)"),
    ("for|to|of|by|from|with|than|against who", "name the actor (the caller, the waiting thread)"),
    ("who asks", "name the actor (the caller, the client)"),
    ("the other one|ones", "name it (the other vCPU, the peer)"),
    ("left to it", "name the actor and the work"),
    ("nothing of", "`no part of`, `does not trust`, `has no information about`"),
    // Information that moves without a named sender.
    ("is|are|was|were|be|been|being told", "name the sender: `the VMM notifies the vCPU`"),
    ("told of", "`notified of`, with the sender"),
    ("tells|told whether|what|where|how|which|who|when|why|of", "`reports`, `returns`, `states`"),
    ("says whether|what|where|how|which|who|when|why", "`reports`, `states`, `specifies`"),
    ("host takes|makes|gives no", "name the failing call: `cannot install the seccomp filter`"),
    // Words that the field does not use.
    ("go on", "`continue`, `resume`, `proceed`"),
    ("goes on", "`continues`, `resumes`, `proceeds`"),
    ("went|gone on", "`continued`, `resumed`"),
    ("going on", "`continuing`, `in progress`"),
    ("come|comes|came|coming back", "`return`, `is returned`"),
    ("anew", "`again`; `restart`, `rebuild`, `reset`"),
    ("gave up", "name the event: `triple fault`, `failed`"),
    ("so many", "`this many`, `the given number of`, or name the parameter"),
    ("see|sees to it", "`ensures`"),
    ("believe|believes|believed", "`trusts`, `relies on`, `validates`"),
    ("shut in", "`confined`, `sandboxed`"),
    ("to be had", "`available`"),
    ("is|are|was|were not there", "`absent`, `missing`, `does not exist`, `not present`"),
    ("that is|are there", "`existing`, `present`"),
    ("answer|answers|answered the door", "`pump the doorbell`"),
    ("see above", "repeat the reason"),
    ("for want of", "`for lack of`"),
    // Names of things.
    ("at the steward", "`in the operator shell`"),
    ("program|programs apart", "`user/kernel isolation without PKU`, `user process`"),
    ("guest's|guests program|programs", "`guest user mode`, `guest applications`"),
    ("program|programs of a|the guest", "`guest user mode`, `guest applications`"),
    ("programs of guests", "`guest user mode`, `guest applications`"),
    ("guest's|guests|machine's processor|processors", "`vCPU`"),
    ("virtual processor|processors", "`vCPU`"),
    ("host's processor|processors", "`host CPU`"),
];

/// First words that make a doc comment a question instead of a contract.
const DOC_WORDS: &[&str] = &["what", "where", "who", "whom", "whose", "how", "whether"];

/// Columns of a comment line; a tab ends at a multiple of [`TAB`].
const COLUMNS: usize = 100;
const TAB: usize = 8;

/// Definitions that a public type name may have in the workspace.
const DEFINITIONS: usize = 3;
/// Names that mean the same in every crate and may be defined in each.
const GENERIC_NAMES: &[&str] = &["Config", "Error", "Header", "Kind", "Options", "Result"];

/// Tracked text that is not searched: the beginning of its path, and the reason.
const NOT_SEARCHED: &[(&str, &str)] = &[
    ("third_party/", "written by others"),
    ("fuzz/corpus/", "recorded inputs"),
    ("guests/linux/kernel/patches/", "changes to Linux' own text"),
    ("wedge/afterburn/tests/golden/", "inputs and recorded outputs of the afterburner"),
    ("docs/spec/system-calls.md", "generated from abi, which is searched"),
    ("xtask/src/words", "holds the banned phrases"),
];

/// `cargo xtask words [FOLDER...]`: prints each finding below the folders (all without any) and
/// fails if there is one.
pub fn words(folders: &[String]) -> Result<()> {
    if let Some(option) = folders.iter().find(|folder| folder.starts_with('-')) {
        bail!("unknown option `{option}`\nusage: cargo xtask words [FOLDER...]");
    }
    let tree = Tree::read()?;
    let mut findings = tree.findings();
    let is_searched = |path: &str| {
        folders.is_empty() || folders.iter().any(|folder| Path::new(path).starts_with(folder))
    };
    findings.retain(|found| is_searched(&found.path));
    for (path, reason) in NOT_SEARCHED {
        println!("words: not searched: {path} ({reason})");
    }
    for found in &findings {
        println!("{found}");
    }
    if !findings.is_empty() {
        bail!("{} places against the rules of docs/GLOSSARY.md", findings.len());
    }
    let searched = tree.files.iter().filter(|file| is_searched(&file.path)).count();
    println!("words: {searched} files keep the rules of docs/GLOSSARY.md");
    Ok(())
}

/// Language of a file, as far as its comments differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Language {
    Rust,
    /// C, assembly and linker scripts: `//`, `/* */`, and lines of assembly that begin with `# `.
    C,
    Shell,
    Toml,
    Markdown,
}

impl Language {
    /// The language of a tracked file; `None`: not one of the text sources.
    fn of(path: &str, text: &str) -> Option<Self> {
        let name = path.rsplit('/').next().unwrap_or(path);
        match name.rsplit_once('.').map(|(_, extension)| extension) {
            Some("rs") => Some(Self::Rust),
            Some("c" | "h" | "s" | "S" | "ld") => Some(Self::C),
            Some("sh") => Some(Self::Shell),
            Some("toml") => Some(Self::Toml),
            Some("md") => Some(Self::Markdown),
            _ if name == "Makefile" || name == "Kbuild" => Some(Self::Shell),
            _ => text.lines().next().filter(|first| first.starts_with("#!")).map(|_| Self::Shell),
        }
    }
}

/// A searched file.
struct File {
    /// From the root of the tree.
    path: String,
    language: Language,
    text: String,
}

/// The searched files of the tree.
struct Tree {
    files: Vec<File>,
}

impl Tree {
    /// Reads the tracked text sources.
    fn read() -> Result<Self> {
        let root = workspace();
        let list = output(Command::new("git").arg("-C").arg(&root).args(["ls-files", "-z"]))
            .context("cannot list the tracked files")?;
        let mut files = Vec::new();
        for path in list.split_terminator('\0') {
            if NOT_SEARCHED.iter().any(|(skipped, _)| path.starts_with(skipped)) {
                continue;
            }
            let Ok(bytes) = std::fs::read(root.join(path)) else { continue };
            let Ok(text) = String::from_utf8(bytes) else { continue };
            if let Some(language) = Language::of(path, &text) {
                files.push(File { path: path.to_owned(), language, text });
            }
        }
        Ok(Self { files })
    }

    /// All findings, by file and line.
    fn findings(&self) -> Vec<Finding> {
        let phrases = Phrases::new(PHRASES);
        let mut findings = Vec::new();
        for file in &self.files {
            let mut add = |line, problem| {
                findings.push(Finding { path: file.path.clone(), line, problem });
            };
            for (line, phrase) in phrases.find(&file.text) {
                add(line, Problem::Phrase(phrase));
            }
            for (line, columns) in long_comments(&file.text, file.language) {
                add(line, Problem::Columns(columns));
            }
            if file.language == Language::Rust {
                for (line, word) in doc_words(&file.text) {
                    add(line, Problem::DocWord(word));
                }
            }
        }
        findings.extend(self.repeated_names());
        findings.sort_by(|a, b| (&a.path, a.line).cmp(&(&b.path, b.line)));
        findings
    }

    /// Definitions of public type names that have too many.
    fn repeated_names(&self) -> Vec<Finding> {
        let rust = || self.files.iter().filter(|file| file.language == Language::Rust);
        let tests: HashSet<PathBuf> =
            rust().flat_map(|file| source::test_files(Path::new(&file.path), &file.text)).collect();
        let mut places: BTreeMap<String, Vec<(&str, usize)>> = BTreeMap::new();
        for file in rust().filter(|file| !is_test(&file.path, &tests)) {
            for (line, name) in public_types(&file.text) {
                places.entry(name).or_default().push((&file.path, line));
            }
        }
        let repeated = places.into_iter().filter(|(name, places)| {
            places.len() > DEFINITIONS && !GENERIC_NAMES.contains(&name.as_str())
        });
        repeated
            .flat_map(|(name, places)| {
                let count = places.len();
                places.into_iter().map(move |(path, line)| Finding {
                    path: path.to_owned(),
                    line,
                    problem: Problem::TypeName { name: name.clone(), count },
                })
            })
            .collect()
    }
}

/// Whether a file belongs to tests: below a folder `tests`, or a module declared for unit tests.
fn is_test(path: &str, modules: &HashSet<PathBuf>) -> bool {
    let path = Path::new(path);
    path.components().any(|part| part.as_os_str() == "tests")
        || path.ancestors().any(|part| modules.contains(&part.with_extension("rs")))
}

/// A place against the rules.
struct Finding {
    path: String,
    line: usize,
    problem: Problem,
}

/// Kind of a finding.
enum Problem {
    /// Index of the phrase in [`PHRASES`].
    Phrase(usize),
    /// Columns of the comment line.
    Columns(usize),
    /// First word of the doc comment.
    DocWord(String),
    TypeName {
        name: String,
        /// Definitions in the workspace.
        count: usize,
    },
}

impl Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: ", self.path, self.line)?;
        match &self.problem {
            Problem::Phrase(index) => {
                let (phrase, remedy) = PHRASES[*index];
                write!(f, "banned phrase \"{phrase}\": {remedy}")
            }
            Problem::Columns(columns) => {
                write!(f, "comment of {columns} columns: at most {COLUMNS}")
            }
            Problem::DocWord(word) => write!(
                f,
                "doc comment begins with \"{word}\": begin with a noun phrase or a verb (\"Returns\")"
            ),
            Problem::TypeName { name, count } => write!(
                f,
                "public type {name} is defined {count} times: at most {DEFINITIONS}, name the meaning"
            ),
        }
    }
}

/// A word of a text, in lower case.
struct Word {
    text: String,
    line: usize,
    /// Whether only space, emphasis or the border of a comment's lines stand before it.
    continues: bool,
}

/// Splits a text into its words: letters and digits, with apostrophes inside.
fn split_words(text: &str) -> Vec<Word> {
    let mut words = Vec::new();
    let mut line = 1;
    let mut newlines = 0;
    let mut continues = false;
    let mut characters = text.chars().peekable();
    while let Some(character) = characters.next() {
        if character.is_alphanumeric() {
            let mut word = String::from(character.to_ascii_lowercase());
            while let Some(&next) = characters.peek() {
                let mut rest = characters.clone().skip(1);
                let inside =
                    matches!(next, '\'' | '’') && rest.next().is_some_and(char::is_alphanumeric);
                if !next.is_alphanumeric() && !inside {
                    break;
                }
                word.push(if next == '’' { '\'' } else { next.to_ascii_lowercase() });
                characters.next();
            }
            words.push(Word { text: word, line, continues });
            (continues, newlines) = (true, 0);
        } else if character == '\n' {
            line += 1;
            newlines += 1;
            // A blank line ends a paragraph.
            continues &= newlines < 2;
        } else {
            let border = newlines > 0 && matches!(character, '/' | '!' | '#' | '>' | '"');
            let space = character.is_whitespace()
                || matches!(character, '_' | '*' | '`' | '\\' | '\'' | '’');
            continues &= border || space;
        }
    }
    words
}

/// A list of phrases, prepared for search.
struct Phrases {
    /// The alternatives for each word of each phrase.
    phrases: Vec<Vec<Vec<&'static str>>>,
    /// Indices of the phrases that begin with a word.
    by_first: HashMap<&'static str, Vec<usize>>,
}

impl Phrases {
    fn new(list: &[(&'static str, &'static str)]) -> Self {
        let phrases: Vec<Vec<Vec<&str>>> = list
            .iter()
            .map(|(phrase, _)| phrase.split(' ').map(|word| word.split('|').collect()).collect())
            .collect();
        let mut by_first: HashMap<&str, Vec<usize>> = HashMap::new();
        for (index, phrase) in phrases.iter().enumerate() {
            for &word in phrase.first().into_iter().flatten() {
                by_first.entry(word).or_default().push(index);
            }
        }
        Self { phrases, by_first }
    }

    /// The lines where a phrase begins, and its index; the first in the list where several begin.
    fn find(&self, text: &str) -> Vec<(usize, usize)> {
        let words = split_words(text);
        let matches = |start: usize, phrase: &[Vec<&str>]| {
            let Some(found) = words.get(start..start + phrase.len()) else { return false };
            let fits = |word: &Word, options: &Vec<&str>| options.contains(&word.text.as_str());
            found.iter().zip(phrase).all(|(word, options)| fits(word, options))
                && found.iter().skip(1).all(|word| word.continues)
        };
        let mut found = Vec::new();
        let mut start = 0;
        while let Some(word) = words.get(start) {
            let candidates = self.by_first.get(word.text.as_str()).into_iter().flatten();
            let phrase =
                candidates.into_iter().find(|&&index| matches(start, &self.phrases[index]));
            start += phrase.map_or(1, |&index| self.phrases[index].len());
            found.extend(phrase.map(|&index| (word.line, index)));
        }
        found
    }
}

/// Comment lines beyond [`COLUMNS`]: the line's number and its columns.
fn long_comments(text: &str, language: Language) -> Vec<(usize, usize)> {
    let comments = match language {
        Language::Rust | Language::C => comment_lines(text, language),
        Language::Shell => text.lines().map(|line| line.trim_start().starts_with('#')).collect(),
        Language::Toml | Language::Markdown => return Vec::new(),
    };
    let lines = text.lines().zip(comments).enumerate();
    lines
        .filter_map(|(index, (line, is_comment))| {
            let columns = columns(line);
            (is_comment && columns > COLUMNS).then_some((index + 1, columns))
        })
        .collect()
}

/// Whether each line of Rust, C or assembly has a comment or a part of one.
fn comment_lines(text: &str, language: Language) -> Vec<bool> {
    let mut lines = vec![false; text.lines().count()];
    let (mut line, mut at, mut after_word) = (0, 0, false);
    while let Some(first) = text[at..].chars().next() {
        let rest = &text[at..];
        let is_line_start = at == 0 || text[..at].ends_with('\n');
        let (length, is_comment) = match language {
            Language::C
                if is_line_start && rest.trim_start_matches([' ', '\t']).starts_with("# ") =>
            {
                (line_length(rest), true)
            }
            _ => token(rest, after_word, language),
        };
        let newlines = rest[..length].matches('\n').count();
        if is_comment {
            lines.iter_mut().skip(line).take(newlines + 1).for_each(|line| *line = true);
        }
        after_word = first.is_alphanumeric() || first == '_';
        line += newlines;
        at += length;
    }
    lines
}

/// Length of the first token of a text (a comment, a literal or one character), and whether it is a
/// comment. `after_word`: a letter or digit stands before, so `r"` begins no raw string.
fn token(rest: &str, after_word: bool, language: Language) -> (usize, bool) {
    let first = rest.chars().next().map_or(0, char::len_utf8);
    let until = |from: usize, end: &str| {
        rest[from..].find(end).map_or(rest.len(), |at| from + at + end.len())
    };
    if rest.starts_with("//") {
        return (line_length(rest), true);
    }
    if rest.starts_with("/*") {
        return (block_length(rest, language), true);
    }
    if rest.starts_with('"') {
        return (string_length(rest), false);
    }
    if language == Language::Rust && rest.starts_with('r') && !after_word {
        let marks = rest[1..].bytes().take_while(|&byte| byte == b'#').count();
        if rest[1 + marks..].starts_with('"') {
            return (until(2 + marks, &format!("\"{}", "#".repeat(marks))), false);
        }
    }
    // A character's literal; a lifetime has no second apostrophe.
    let mut characters = rest.char_indices().skip(1);
    match (rest.starts_with('\''), characters.next(), characters.next()) {
        (true, Some((_, '\\')), Some((at, escaped))) => {
            (until(at + escaped.len_utf8(), "'"), false)
        }
        (true, Some(_), Some((at, '\''))) => (at + 1, false),
        _ => (first, false),
    }
}

fn line_length(rest: &str) -> usize {
    rest.find('\n').unwrap_or(rest.len())
}

/// Length of the block comment at the start of a text. Those of Rust nest.
fn block_length(rest: &str, language: Language) -> usize {
    let (mut at, mut depth) = (2, 1usize);
    while depth > 0 {
        let Some(end) = rest[at..].find("*/") else { return rest.len() };
        let inner = rest[at..at + end].matches("/*").count();
        depth = if language == Language::Rust { depth + inner - 1 } else { 0 };
        at += end + 2;
    }
    at
}

/// Length of the string literal at the start of a text.
fn string_length(rest: &str) -> usize {
    let mut is_escaped = false;
    for (at, character) in rest.char_indices().skip(1) {
        match character {
            '"' if !is_escaped => return at + 1,
            _ => is_escaped = character == '\\' && !is_escaped,
        }
    }
    rest.len()
}

/// Columns that a line takes on a terminal.
fn columns(line: &str) -> usize {
    line.chars().fold(0, |column, character| match character {
        '\t' => (column / TAB + 1) * TAB,
        _ => column + 1,
    })
}

/// Doc comments that begin with a word of [`DOC_WORDS`]: the line's number and the word.
fn doc_words(text: &str) -> Vec<(usize, String)> {
    let mark = |line: &str| {
        let line = line.trim_start();
        let outer = line.starts_with("///") && !line.starts_with("////");
        (outer || line.starts_with("//!")).then(|| line[..3].to_owned())
    };
    let mut previous = None;
    let mut found = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let current = mark(line);
        if let Some(mark) = current.as_ref().filter(|_| current != previous) {
            let text = line.trim_start().trim_start_matches(mark.as_str());
            let text = text.trim_start_matches(|character: char| !character.is_alphanumeric());
            let word: String = text
                .chars()
                .take_while(|&character| {
                    character.is_alphanumeric() || matches!(character, '\'' | '_')
                })
                .collect();
            if DOC_WORDS.contains(&word.to_ascii_lowercase().as_str()) {
                found.push((index + 1, word));
            }
        }
        previous = current;
    }
    found
}

/// Public types that a file defines outside its unit tests: the line's number and the name.
fn public_types(text: &str) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut attribute = false;
    let mut in_tests = false;
    for (index, line) in text.lines().enumerate() {
        in_tests |= attribute && line.contains("mod ") && line.trim_end().ends_with('{');
        attribute = line.trim_end() == "#[cfg(test)]";
        if in_tests {
            in_tests = !line.starts_with('}');
        } else if let Some(name) = public_type(line) {
            found.push((index + 1, name));
        }
    }
    found
}

/// The name of the public type that a line defines.
fn public_type(line: &str) -> Option<String> {
    let rest = line.trim_start().strip_prefix("pub")?;
    let rest = match rest.strip_prefix('(') {
        Some(scope) => scope.split_once(')')?.1,
        None => rest,
    };
    let mut words = rest.split_whitespace();
    let mut keyword = rest.starts_with(' ').then(|| words.next())??;
    while matches!(keyword, "unsafe" | "auto") {
        keyword = words.next()?;
    }
    if !matches!(keyword, "struct" | "enum" | "trait" | "type" | "union") {
        return None;
    }
    let name = words.next()?;
    let end = name.find(|character: char| !character.is_alphanumeric() && character != '_');
    Some(name[..end.unwrap_or(name.len())].to_owned())
}

#[cfg(test)]
mod tests;
