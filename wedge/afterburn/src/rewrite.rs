//! Pads and records the sensitive instructions of an assembler text.
//!
//! An instruction becomes
//!
//! ```text
//! 97710: wrmsr ; 97711: .nops PAD-length ; 97712: record in section parador_sites_1
//! 97710: .skip PAD-length, CS prefix ; 97709: cli ; 97711: record
//! ```
//!
//! in its place: in the compiler's output, in a macro's body (each expansion then has its own
//! record), in a string that a macro inserts. The rest of the text stays byte for byte, so the
//! rewriting is a list of insertions. The pad is after the instruction, so labels, exception-table
//! entries and the start of a function stay right. For frequently executed instructions that no
//! exception refers to, prefixes before the instruction replace the pad.
//!
//! Invariants: a text without sensitive instructions is unchanged. A sensitive instruction that
//! cannot be rewritten is an error with its source line, never ignored; [`crate::verify`] finds
//! instructions that the text hides.

mod bytes;
mod conditional;
mod directives;
mod expansion;
mod flags;
mod macros;
mod output;
mod section;
mod source;
mod text;

pub use source::Source;

use crate::lexer::{Lexer, Token, Unterminated};
use crate::mnemonics::{self, Class};
use bytes::{Meaning, Run};
use conditional::{Condition, REGISTER_ALIAS, names_sensitive_register};
use flags::{Watch, keeps_flags};
use macros::Macro;
use output::{Edit, What};
use section::{Names, Section, Stack};
use source::{Mark, SourceTracker};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;
use text::{Statement, blank_comments, blanks, find, label, lowered, text_of, word};
use wedge_sites::{Flags, Kind};

/// Minimum bytes of a site.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pad(pub u8);

impl Default for Pad {
    /// 5 bytes suffice for a jump; 8 for a store of a byte to a fixed address (+0.5 % of a kernel's
    /// text).
    fn default() -> Self {
        Self(8)
    }
}

/// The longest pad of prefixes: an instruction cannot be longer (APM vol. 3, 1.2).
const PREFIXED: u8 = 15;

impl Pad {
    /// Returns true if prefixes without effect can make a site long enough: it has no memory
    /// operand, and no exception refers to it. A NOP would be an additional instruction wherever no
    /// loader rewrites the site.
    fn is_prefixes(self, kind: Kind, text: &[u8]) -> bool {
        let alone = match kind {
            Kind::Cli | Kind::Sti | Kind::Pushf | Kind::SaveFlags | Kind::Swapgs => true,
            // mov %SEGMENT,%REGISTER
            Kind::ReadSegment => {
                text.iter().filter(|&&byte| byte == b'%').count() == 2
                    && !text.iter().any(|byte| matches!(byte, b'(' | b':' | b'\\' | b'[' | b';'))
            }
            _ => false,
        };
        alone && self.0 <= PREFIXED
    }
}

/// A rewritten text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rewritten {
    /// The new text; `None` if the text has no sensitive instruction.
    pub text: Option<Vec<u8>>,
    /// Padded sites by kind, counted as they appear in the text, not per expansion of macros.
    pub padded: BTreeMap<Kind, u32>,
    /// Sites that are only recorded.
    pub recorded: BTreeMap<Kind, u32>,
}

/// A construct that could not be rewritten.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Misunderstood {
    /// Its source line.
    pub source: Source,
    /// The construct and the reason.
    pub reason: String,
}

impl fmt::Display for Misunderstood {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.source, self.reason)
    }
}

impl std::error::Error for Misunderstood {}

/// Rewrites a text for 64-bit code. `name` is the file name in messages for text without line
/// markers.
pub fn rewrite(text: &[u8], name: &str, pad: Pad) -> Result<Rewritten, Misunderstood> {
    let mut rewriter = Rewriter::new(text, name, pad);
    rewriter.run()?;
    // A macro that gets a sensitive mnemonic as an argument, or that is also used in the text of an
    // alternative, needs a second pass, in which its expansion decides.
    let dynamic = rewriter.mnemonic_inserted && !rewriter.passed.is_empty();
    if dynamic || rewriter.used_in_alternative {
        let (passed, conditional) = (rewriter.passed, rewriter.used_in_alternative);
        rewriter = Rewriter { dynamic, conditional, passed, ..Rewriter::new(text, name, pad) };
        rewriter.run()?;
    }
    Ok(rewriter.finish())
}

/// Operating mode of the code.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mode {
    /// `.code64`
    Long,
    /// `.code32`, `.code16`
    Legacy,
}

/// An instruction that may be the first of a pair.
#[derive(Clone)]
struct First {
    range: Range<usize>,
    class: Class,
    /// True if the instruction is in an inline assembly statement.
    inline: bool,
    /// Events since the instruction: the statement ended, has outputs in flags, and another one
    /// began.
    ended: bool,
    flags_out: bool,
    begun: bool,
}

/// A construct with an end directive.
enum Frame {
    Macro { name: Vec<u8>, body: Macro, sections: Stack, mode: Mode },
    Repeat { values: Range<usize> },
}

struct Rewriter<'a> {
    text: &'a [u8],
    pad: Pad,
    /// Second pass: mnemonics may come from arguments.
    dynamic: bool,
    /// Second pass: each expansion gets a flag that permits or forbids padding.
    conditional: bool,
    line: usize,
    edits: Vec<Edit>,
    tracker: SourceTracker,
    names: Names,
    sections: Stack,
    mode: Mode,
    /// Open conditionals, innermost last.
    conditions: Vec<Condition>,
    frames: Vec<Frame>,
    macros: HashMap<Vec<u8>, Macro>,
    alternate: bool,
    /// The section that receives the string being examined; `None` outside of strings.
    string: Option<Section>,
    first: Option<First>,
    /// Start of prefixes without an instruction so far, and true if a label followed them.
    prefix: Option<(usize, bool)>,
    bytes: Run,
    /// The last instruction of this line, and true if it is a site.
    last: Option<(Range<usize>, bool)>,
    statements_on_line: bool,
    /// True between the labels around an alternative's original text.
    original: bool,
    inline: bool,
    flags_out: bool,
    watch: Watch,
    /// Sensitive mnemonics that macro arguments may form.
    passed: BTreeMap<&'static str, Kind>,
    mnemonic_inserted: bool,
    /// True if a macro with sites is used where padding is forbidden.
    used_in_alternative: bool,
    ended: bool,
}

type Step = Result<(), Misunderstood>;

impl<'a> Rewriter<'a> {
    fn new(text: &'a [u8], name: &str, pad: Pad) -> Self {
        Self {
            text,
            pad,
            dynamic: false,
            conditional: false,
            line: 1,
            edits: Vec::new(),
            tracker: SourceTracker::new(name),
            names: Names::default(),
            sections: Stack::default(),
            mode: Mode::Long,
            conditions: Vec::new(),
            frames: Vec::new(),
            macros: HashMap::new(),
            alternate: false,
            string: None,
            first: None,
            prefix: None,
            bytes: Run::default(),
            last: None,
            statements_on_line: false,
            original: false,
            inline: false,
            flags_out: false,
            watch: Watch::Nothing,
            passed: BTreeMap::new(),
            mnemonic_inserted: false,
            used_in_alternative: false,
            ended: false,
        }
    }

    fn error(&self, reason: impl Into<String>) -> Misunderstood {
        Misunderstood { source: self.tracker.of(self.line), reason: reason.into() }
    }

    fn run(&mut self) -> Step {
        let mut lexer = Lexer::new(self.text, 0..self.text.len());
        while !self.ended {
            let token = lexer.token().map_err(|what| self.unterminated(what))?;
            self.line = lexer.line();
            match token {
                None => break,
                Some(Token::Statement { range, commented }) => {
                    self.statements_on_line = true;
                    self.statement(range, commented)?;
                }
                Some(Token::Comment { range, first }) => self.comment(range, first)?,
                Some(Token::Block(range)) => self.block(&self.text[range]),
                Some(Token::Newline) => {
                    self.last = None;
                    self.statements_on_line = false;
                }
            }
        }
        self.settle()?;
        match self.frames.last() {
            Some(Frame::Macro { name, .. }) => {
                return Err(self.error(format!("`.macro {}` has no `.endm`", text_of(name))));
            }
            Some(Frame::Repeat { .. }) => return Err(self.error("`.rept` has no `.endr`")),
            None => {}
        }
        if self.sections.depth() > 0 && !self.ended {
            return Err(self.error("`.pushsection` has no `.popsection`"));
        }
        Ok(())
    }

    fn unterminated(&self, what: Unterminated) -> Misunderstood {
        self.error(match what {
            Unterminated::String => "the string does not end on its line",
            Unterminated::Comment => "the comment has no end",
        })
    }

    // Comments.

    fn comment(&mut self, range: Range<usize>, first: bool) -> Step {
        let text = &self.text[range.clone()];
        if first {
            match text {
                b"#APP" => {
                    self.inline = true;
                    self.statement_begins();
                }
                b"#NO_APP" => {
                    self.statement_ends();
                    self.inline = false;
                }
                _ => match self.tracker.comment(text, self.line) {
                    Some(Mark::Begin) if self.inline => self.statement_begins(),
                    Some(Mark::End) if self.inline => self.statement_ends(),
                    _ => {}
                },
            }
        }
        // Markers are rare, comments are frequent.
        let Some(at) = find(text, b"parador:") else { return Ok(()) };
        let word = &text[at + b"parador:".len()..];
        let word =
            &word[..word.iter().position(|byte| !byte.is_ascii_lowercase()).unwrap_or(word.len())];
        self.marker(word, range.start)
    }

    /// `# parador:WORD`.
    fn marker(&mut self, word: &[u8], at: usize) -> Step {
        let kind = Kind::from_name(&text_of(word))
            .filter(|kind| kind.is_marker() || *kind == Kind::PageTable)
            .ok_or_else(|| self.error(format!("no marker `parador:{}`", text_of(word))))?;
        if self.mode != Mode::Long {
            return Err(self.error("a marker in 16-bit or 32-bit code"));
        }
        if kind.is_marker() {
            if self.statements_on_line {
                return Err(
                    self.error(format!("`parador:{}` must be alone on its line", kind.name()))
                );
            }
            self.settle()?;
            self.edits.push(Edit { at, what: What::Marker(kind) });
            self.watch = Watch::Nothing;
            return Ok(());
        }
        self.settle()?;
        match self.last.take() {
            Some((instruction, false)) => self.site(instruction, kind),
            Some((_, true)) => Err(self.error("the marked instruction is a site already")),
            None => Err(self.error("no instruction before `parador:pgtable` on its line")),
        }
    }

    fn block(&mut self, text: &[u8]) {
        // Linux writes this comment where inline assembly has outputs in the flags.
        if self.inline && find(text, b"output condition code").is_some() {
            self.flags_out = true;
        }
    }

    // Statements.

    fn statement(&mut self, range: Range<usize>, commented: bool) -> Step {
        let text = self.text;
        let body: Cow<'_, [u8]> = match commented {
            false => Cow::Borrowed(&text[range.clone()]),
            true => Cow::Owned(blank_comments(&text[range.clone()])),
        };
        let body = &*body;
        let mut at = 0;
        while let Some(end) = label(body, at) {
            self.label()?;
            self.label_of_alternative(&body[at..end]);
            at = end;
            at += blanks(&body[at..]);
        }
        // Pseudo-prefixes only select an encoding: {disp32}, {load}.
        let start = at;
        while body.get(at) == Some(&b'{') {
            let Some(length) = body[at..].iter().position(|&byte| byte == b'}') else { break };
            at += length + 1;
            at += blanks(&body[at..]);
        }
        let length = word(&body[at..]);
        let (name, operands) = (&body[at..at + length], at + length);
        let operands = operands + blanks(&body[operands..]);
        if body.len() == start {
            return Ok(());
        }
        if body.get(operands) == Some(&b'=') {
            let value = body[operands..].trim_ascii_start();
            let value = value.iter().position(|&byte| byte != b'=').map(|at| &value[at..]);
            return match names_sensitive_register(value.unwrap_or_default()) {
                true => Err(self.error(REGISTER_ALIAS)),
                false => Ok(()),
            };
        }
        let place = range.start;
        let statement = Statement {
            body,
            place,
            start: place + start,
            end: range.end,
            name,
            operands: &body[operands..],
            operands_at: place + operands,
        };
        if !self.macros.is_empty()
            && let Some(called) = self.macros.get(&*lowered(name))
        {
            let called = called.clone();
            return self.call(&statement, &called);
        }
        if name.first() == Some(&b'.') {
            return self.directive(&statement);
        }
        self.instruction(&statement)
    }

    fn label(&mut self) -> Step {
        self.settle_bytes(false)?;
        self.settle_first()?;
        if let Some((_, label)) = &mut self.prefix {
            *label = true;
        }
        Ok(())
    }

    /// Linux puts these labels around the original text of an alternative: in C, and in its
    /// assembler macros. The kernel would overwrite a pad there; the verifier checks in the binary
    /// that the text is an original.
    fn label_of_alternative(&mut self, label: &[u8]) {
        let in_macro = matches!(self.frames.last(), Some(Frame::Macro { .. }));
        match label {
            b"661:" => self.original = true,
            b"662:" => self.original = false,
            b"140:" if in_macro => self.original = true,
            b"141:" if in_macro => self.original = false,
            _ => {}
        }
    }

    /// Completes a pending first half that has no second half.
    fn settle(&mut self) -> Step {
        self.settle_bytes(false)?;
        self.prefix = None;
        self.settle_first()
    }

    fn settle_first(&mut self) -> Step {
        let Some(first) = self.first.take() else { return Ok(()) };
        let Class::Sensitive(kind) = first.class else { return Ok(()) };
        // The site's own context.
        let inline = std::mem::replace(&mut self.inline, first.inline);
        let done = self.site(first.range, kind);
        self.inline = inline;
        done?;
        if let (true, Watch::Inside(edit)) = (first.ended, self.watch) {
            self.watch = if first.flags_out { Watch::Nothing } else { Watch::After(edit) };
        }
        if first.begun {
            self.flags_die();
            self.watch = Watch::Nothing;
        }
        Ok(())
    }

    fn section(&self) -> Section {
        match self.string.unwrap_or(self.sections.current()) {
            Section::Code if self.original => Section::Replaced,
            section => section,
        }
    }

    // Instructions.

    fn instruction(&mut self, statement: &Statement<'_>) -> Step {
        if self.mode != Mode::Long || self.section() == Section::Discarded {
            return Ok(());
        }
        if !self.bytes.is_empty() {
            self.settle_bytes(true)?;
        }
        let (mut name, mut operands) = (statement.name, statement.operands);
        if name.contains(&b'\\') || self.is_parameter(name) {
            return self.inserted(statement);
        }
        if !self.frames.is_empty()
            && let Some(class) = self.check_parameters(statement)?
        {
            return self.item(statement.start..statement.end, class);
        }
        let mut class = mnemonics::class(name, operands);
        if mnemonics::is_wait(name) && !operands.is_empty() {
            return Err(
                self.error("`wait` before an instruction: write it as a statement of its own")
            );
        }
        while class == Class::Prefix {
            operands = operands.strip_prefix(b"/").unwrap_or(operands);
            let length = word(operands);
            if length == 0 {
                self.prefix.get_or_insert((statement.start, false));
                return Ok(());
            }
            name = &operands[..length];
            operands = operands[length..].trim_ascii_start();
            if name.contains(&b'\\') {
                return self.inserted(statement);
            }
            class = mnemonics::class(name, operands);
            if class == Class::Sensitive(Kind::Sysretl) {
                class = Class::Sensitive(Kind::Sysretq);
            }
        }
        self.item(statement.start..statement.end, class)
    }

    /// Processes an instruction, from its statement's first prefix to its end.
    fn item(&mut self, range: Range<usize>, class: Class) -> Step {
        let start = match self.prefix.take() {
            None => range.start,
            Some((start, false)) => start,
            Some((start, true)) => match class {
                Class::Sensitive(_) => {
                    return Err(
                        self.error("a label between a sensitive instruction and its prefix")
                    );
                }
                _ => start,
            },
        };
        // Of the separate prefixes, only REX.W turns an instruction into another one.
        let class = match class {
            Class::Sensitive(Kind::Sysretl) if start < range.start => {
                Class::Sensitive(Kind::Sysretq)
            }
            class => class,
        };
        let range = start..range.end;
        if let Some(first) = &self.first {
            if let Some(kind) = pair(first.class, class) {
                let whole = first.range.start..range.end;
                self.first = None;
                self.last = Some((whole.clone(), true));
                return self.site(whole, kind);
            }
            self.settle_first()?;
        }
        let sensitive = matches!(class, Class::Sensitive(_));
        self.last = Some((range.clone(), sensitive));
        match class {
            Class::Sensitive(Kind::Sti | Kind::Pushf) | Class::Push => {
                self.watch_instruction(class);
                let inline = self.inline;
                let (ended, flags_out, begun) = (false, false, false);
                self.first = Some(First { range, class, inline, ended, flags_out, begun });
                Ok(())
            }
            Class::Sensitive(kind) => self.site(range, kind),
            _ => {
                self.watch_instruction(class);
                Ok(())
            }
        }
    }

    fn site(&mut self, range: Range<usize>, kind: Kind) -> Step {
        let flags = match self.section() {
            Section::Code => Flags::NONE,
            Section::Replaced | Section::Replacement | Section::Data => Flags::RECORD_ONLY,
            Section::Discarded => return Ok(()),
            Section::Unclear => {
                return Err(self.error(format!(
                    "a sensitive instruction ({}) in a string that a macro inserts in an unknown section",
                    kind.name()
                )));
            }
        };
        self.watch_instruction(Class::Sensitive(kind));
        let in_macro = self.has_sites();
        // If the expansion decides, the pad is after the instruction.
        let prefixed = flags == Flags::NONE
            && !(self.conditional && in_macro)
            && self.pad.is_prefixes(kind, &self.text[range.clone()]);
        self.edits.push(Edit { at: range.start, what: What::Begin { prefixed } });
        if self.inline && self.string.is_none() && flags == Flags::NONE && keeps_flags(kind) {
            self.watch = Watch::Inside(self.edits.len());
        }
        let what = What::End { kind, flags, in_macro, prefixed };
        self.edits.push(Edit { at: range.end, what });
        Ok(())
    }

    fn settle_bytes(&mut self, in_front: bool) -> Step {
        if self.bytes.is_empty() {
            return Ok(());
        }
        let Meaning { items, prefix } = self.bytes.take(in_front);
        if items.is_empty() && prefix.is_none() {
            return self.settle_first();
        }
        for item in items {
            if let Some(comma) = item.comma {
                self.edits.push(Edit { at: comma.start, what: What::Separate(comma.end) });
                self.edits.push(Edit { at: comma.end, what: What::Bytes });
            }
            self.item(item.text, item.kind.map_or(Class::Other, Class::Sensitive))?;
        }
        if let Some(prefix) = prefix {
            self.prefix.get_or_insert((prefix, false));
        }
        Ok(())
    }
}

/// The kind of a pair of instructions that form one site.
fn pair(first: Class, second: Class) -> Option<Kind> {
    Some(match (first, second) {
        (Class::Sensitive(Kind::Sti), Class::Sensitive(Kind::Hlt)) => Kind::StiHlt,
        (Class::Sensitive(Kind::Sti), Class::Sensitive(Kind::Mwait)) => Kind::StiMwait,
        (Class::Sensitive(Kind::Pushf), Class::Pop) => Kind::SaveFlags,
        (Class::Push, Class::Sensitive(Kind::Popf)) => Kind::RestoreFlags,
        _ => return None,
    })
}

#[cfg(test)]
mod tests;
