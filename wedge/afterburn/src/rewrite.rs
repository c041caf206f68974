//! Pads and records the sensitive instructions of an assembler text.
//!
//! An instruction becomes
//!
//! ```text
//! 97710: cli ; 97711: .nops PAD-length ; 97712: record in section parador_sites_1
//! ```
//!
//! where it stands: in the compiler's output, in a macro's body (each expansion then has its own record), in a
//! string that a macro inserts. The rest of the text stays byte for byte, so the rewriting is a list of insertions.
//! The pad is behind the instruction: labels, exception-table entries and the start of a function stay right.
//!
//! Invariants: what has no sensitive instruction is not changed at all. What is sensitive and cannot be rewritten is
//! an error with its place, never passed over in silence; what hides from the text is found by [`crate::verify`].

mod bytes;
mod macros;
mod place;
mod section;

pub use place::Source;

use crate::lexer::{Lexer, Token, Unterminated};
use crate::mnemonics::{self, Class};
use bytes::{Meaning, Run};
use macros::Macro;
use place::{Mark, Place};
use section::{Change, Names, Section, Stack};
use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::fmt::Write as _;
use std::ops::Range;
use wedge_sites::{Flags, Kind, SITES_SECTION};

/// Bytes that a site owns at least.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Pads {
    /// Any site but `sti`.
    pub usual: u8,
    /// `sti`, which delivers pending interrupts.
    pub sti: u8,
}

impl Default for Pads {
    /// 5 bytes suffice for a jump; 8 for a store of a byte to a fixed place, with a prefix (+0.7 % of a kernel's text).
    fn default() -> Self {
        Self { usual: 8, sti: 16 }
    }
}

impl Pads {
    fn of(self, kind: Kind) -> u8 {
        if kind == Kind::Sti { self.sti } else { self.usual }
    }
}

/// What became of a text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rewritten {
    /// The new text, `None` if nothing is sensitive.
    pub text: Option<Vec<u8>>,
    /// Padded sites by kind: as often as they stand in the text, not as often as macros expand.
    pub padded: BTreeMap<Kind, u32>,
    /// Sites that are only recorded.
    pub recorded: BTreeMap<Kind, u32>,
}

/// Something that could not be rewritten.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Misunderstood {
    /// Where.
    pub source: Source,
    /// What and why.
    pub reason: String,
}

impl fmt::Display for Misunderstood {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.source, self.reason)
    }
}

impl std::error::Error for Misunderstood {}

/// Rewrites a text for 64-bit code. `name` is for messages where the text does not say where it comes from.
pub fn rewrite(text: &[u8], name: &str, pads: Pads) -> Result<Rewritten, Misunderstood> {
    let mut rewriter = Rewriter::new(text, name, pads);
    rewriter.run()?;
    // A macro that gets a sensitive mnemonic as an argument, or that is used in the text of an alternative too, is
    // rewritten so that its expansion decides.
    let dynamic = rewriter.mnemonic_inserted && !rewriter.passed.is_empty();
    if dynamic || rewriter.used_in_alternative {
        let (passed, conditional) = (rewriter.passed, rewriter.used_in_alternative);
        rewriter = Rewriter { dynamic, conditional, passed, ..Rewriter::new(text, name, pads) };
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

/// A change of the text.
struct Edit {
    at: usize,
    what: What,
}

/// In the order in which they stand at the same place.
enum What {
    /// After a site's last instruction; whether that is in a macro.
    End(Kind, Flags, bool),
    /// As `End`, for whatever mnemonic the macro's parameter turns out to be.
    EndUnknown(Range<usize>, Flags),
    /// A comma between two instructions in a list of bytes.
    Separate(usize),
    /// A site without instruction.
    Marker(Kind),
    /// Whether macros expanded from here on are only recorded.
    Only(bool),
    /// Mapping symbol: from here on, code is of this mode.
    Mode(bool, u32),
    /// Before a site's first instruction.
    Begin,
    /// A directive for bytes that lost theirs to `Separate`.
    Bytes,
}

impl What {
    /// Order at the same place.
    fn rank(&self) -> u8 {
        match self {
            Self::End(..) | Self::EndUnknown(..) | Self::Only(false) => 0,
            Self::Separate(_) => 1,
            Self::Marker(_) | Self::Mode(..) | Self::Only(true) => 2,
            Self::Begin => 3,
            Self::Bytes => 4,
        }
    }
}

/// An instruction that may be the first of a pair.
#[derive(Clone)]
struct First {
    range: Range<usize>,
    class: Class,
    /// What came since: end and begin of inline assembly statements.
    ended: bool,
    begun: bool,
}

/// A construct that has an end of its own.
enum Frame {
    Macro { name: Vec<u8>, body: Macro, sections: Stack, mode: Mode },
    Repeat { values: Range<usize> },
}

/// Whether the arithmetic flags are dead after the last site.
#[derive(Clone, Copy)]
enum Watch {
    Nothing,
    /// The edit is of the last instruction so far of an inline assembly statement.
    Inside(usize),
    /// The statement ended there.
    After(usize),
}

struct Rewriter<'a> {
    text: &'a [u8],
    pads: Pads,
    /// Second pass: mnemonics may come from arguments.
    dynamic: bool,
    /// Second pass: macros are told whether they may pad.
    conditional: bool,
    line: usize,
    edits: Vec<Edit>,
    place: Place,
    names: Names,
    sections: Stack,
    section_text: Range<usize>,
    mode: Mode,
    /// Last mode of sections that have code of several, by the operands that named them.
    modes: BTreeMap<Vec<u8>, Mode>,
    mapping: u32,
    frames: Vec<Frame>,
    macros: HashMap<Vec<u8>, Macro>,
    alternate: bool,
    /// Set while a string is looked into: where it goes.
    string: Option<Section>,
    first: Option<First>,
    /// Start of prefixes that wait for their instruction, and whether a label came since.
    prefix: Option<(usize, bool)>,
    bytes: Run,
    /// The last instruction of this line, and whether it is a site.
    last: Option<(Range<usize>, bool)>,
    statements_on_line: bool,
    /// Between the labels around an alternative's original text.
    original: bool,
    inline: bool,
    flags_out: bool,
    watch: Watch,
    /// Sensitive mnemonics that arguments of macros may make.
    passed: BTreeMap<&'static str, Kind>,
    mnemonic_inserted: bool,
    /// A macro with sites is used where nothing may be padded.
    used_in_alternative: bool,
    ended: bool,
}

type Step = Result<(), Misunderstood>;

impl<'a> Rewriter<'a> {
    fn new(text: &'a [u8], name: &str, pads: Pads) -> Self {
        Self {
            text,
            pads,
            dynamic: false,
            conditional: false,
            line: 1,
            edits: Vec::new(),
            place: Place::new(name),
            names: Names::default(),
            sections: Stack::default(),
            section_text: 0..0,
            mode: Mode::Long,
            modes: BTreeMap::new(),
            mapping: 0,
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
        Misunderstood { source: self.place.of(self.line), reason: reason.into() }
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
                _ => match self.place.comment(text, self.line) {
                    Some(Mark::Begin) if self.inline => self.statement_begins(),
                    Some(Mark::End) if self.inline => self.statement_ends(),
                    _ => {}
                },
            }
        }
        // Markers are rare, comments are not.
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
                    self.error(format!("`parador:{}` stands alone on its line", kind.name()))
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
        // Linux says so where inline assembly has outputs in the flags.
        if self.inline && find(text, b"output condition code").is_some() {
            self.flags_out = true;
        }
    }

    // Flags after inline assembly. The compiler takes the arithmetic flags to be lost after each statement, unless
    // it has outputs in them. Then an instruction behind it reads them.

    fn statement_begins(&mut self) {
        if let Some(first) = &mut self.first {
            first.begun = first.ended;
        }
        self.flags_die();
        self.watch = Watch::Nothing;
        self.flags_out = false;
    }

    fn statement_ends(&mut self) {
        if let Some(first) = &mut self.first {
            first.ended = true;
        }
        if let Watch::Inside(edit) = self.watch {
            self.watch = if self.flags_out { Watch::Nothing } else { Watch::After(edit) };
        }
    }

    fn flags_die(&mut self) {
        if let Watch::After(edit) = self.watch
            && let What::End(_, flags, _) = &mut self.edits[edit].what
        {
            *flags = flags.with(Flags::FLAGS_DEAD);
        }
    }

    /// An instruction follows.
    fn watch_instruction(&mut self, class: Class) {
        match (self.watch, class) {
            (Watch::After(_), Class::EndsFlags) => self.flags_die(),
            (Watch::After(_), Class::ReadsFlags | Class::Sensitive(_) | Class::Prefix) => {}
            (Watch::After(_), _) if !self.inline => return,
            _ => {}
        }
        self.watch = Watch::Nothing;
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
        // Pseudo-prefixes say only how to encode: {disp32}, {load}.
        let start = at;
        while body.get(at) == Some(&b'{') {
            let Some(length) = body[at..].iter().position(|&byte| byte == b'}') else { break };
            at += length + 1;
            at += blanks(&body[at..]);
        }
        let length = word(&body[at..]);
        let (name, operands) = (&body[at..at + length], at + length);
        let operands = operands + blanks(&body[operands..]);
        if body.len() == start || body.get(operands) == Some(&b'=') {
            return Ok(());
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

    /// Linux puts these labels around the original text of an alternative: in C, and in its assembler macros. A pad
    /// there would be overwritten; that the text really is one is checked in the binary.
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

    /// What was waiting for its second half does not get one.
    fn settle(&mut self) -> Step {
        self.settle_bytes(false)?;
        self.prefix = None;
        self.settle_first()
    }

    fn settle_first(&mut self) -> Step {
        let Some(first) = self.first.take() else { return Ok(()) };
        let Class::Sensitive(kind) = first.class else { return Ok(()) };
        self.site(first.range, kind)?;
        if let (true, Watch::Inside(edit)) = (first.ended, self.watch) {
            self.watch = Watch::After(edit);
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
        if self.mode != Mode::Long || !self.modes.is_empty() {
            self.map_mode(statement.start);
        }
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

    /// An instruction at this place, from its statement's first prefix to its end.
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
        // A REX.W prefix of its own is the only one that makes another instruction of it.
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
                self.first = Some(First { range, class, ended: false, begun: false });
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
                    "a sensitive instruction ({}) in a string, and where the macro puts it is not clear",
                    kind.name()
                )));
            }
        };
        self.watch_instruction(Class::Sensitive(kind));
        self.edits.push(Edit { at: range.start, what: What::Begin });
        if self.inline && self.string.is_none() && flags == Flags::NONE && keeps_flags(kind) {
            self.watch = Watch::Inside(self.edits.len());
        }
        let in_macro = self.has_sites();
        self.edits.push(Edit { at: range.end, what: What::End(kind, flags, in_macro) });
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

    // Macros.

    fn is_parameter(&self, name: &[u8]) -> bool {
        self.alternate
            && matches!(self.frames.last(), Some(Frame::Macro { body, .. }) if body.has(name))
    }

    /// There is a site: every macro being defined has it. Returns whether there are such macros.
    fn has_sites(&mut self) -> bool {
        let mut in_macro = false;
        for frame in &mut self.frames {
            if let Frame::Macro { body, .. } = frame {
                body.has_sites = true;
                in_macro = true;
            }
        }
        in_macro
    }

    /// Words of a macro's arguments: perhaps mnemonics, or their beginnings or ends.
    fn pass(&mut self, arguments: &[u8]) {
        for word in words(arguments).filter(|word| mnemonics::always_sensitive(word).is_some()) {
            let known = mnemonics::sensitive();
            let parts = known.filter(|(name, _)| {
                name.as_bytes().starts_with(word) || name.as_bytes().ends_with(word)
            });
            self.passed.extend(parts);
        }
    }

    /// The macro being defined whose parameter this is.
    fn owner(&mut self, parameter: &[u8]) -> Option<&mut Macro> {
        self.frames.iter_mut().rev().find_map(|frame| match frame {
            Frame::Macro { body, .. } if body.has(parameter) => Some(body),
            _ => None,
        })
    }

    /// A statement whose mnemonic is, or has in it, a macro's parameter.
    fn inserted(&mut self, statement: &Statement<'_>) -> Step {
        let name = statement.name;
        let whole = match statement.operands.is_empty() {
            true => macros::reference(name).or_else(|| self.is_parameter(name).then_some(name)),
            false => None,
        };
        let section = self.section();
        if let Some(parameter) = whole
            && let Some(body) = self.owner(parameter)
        {
            body.used(parameter, section);
        }
        self.settle_first()?;
        self.mnemonic_inserted = true;
        self.watch = Watch::Nothing;
        // `in\size`: the literal part alone says what it may become.
        if let Some(at) = name.iter().position(|&byte| byte == b'\\').filter(|&at| at > 0) {
            let end = name.rsplit(|&byte| byte == b')').next().filter(|end| !end.contains(&b'\\'));
            self.passed.extend(mnemonics::completions(&name[..at], end.unwrap_or_default()));
        }
        let start = self.prefix.take().map_or(statement.start, |(start, _)| start);
        if !self.dynamic || self.string.is_some() {
            return Ok(());
        }
        if self.alternate {
            return Err(
                self.error("a sensitive mnemonic as a macro's argument, in `.altmacro` mode")
            );
        }
        self.has_sites();
        let flags = match section {
            Section::Code => Flags::NONE,
            _ => Flags::RECORD_ONLY,
        };
        let name_at = statement.place + offset(statement.body, name);
        self.edits.push(Edit { at: start, what: What::Begin });
        let what = What::EndUnknown(name_at..name_at + name.len(), flags);
        self.edits.push(Edit { at: statement.end, what });
        Ok(())
    }

    /// Inside of a macro: whether an operand that is a parameter could make an instruction sensitive.
    /// Returns the class if the values of `.irp` decide it.
    fn check_parameters(
        &mut self,
        statement: &Statement<'_>,
    ) -> Result<Option<Class>, Misunderstood> {
        let root =
            [&b"mov"[..], b"push", b"pop"].iter().any(|root| statement.name.starts_with(root));
        let from_outside = |operand: &[u8]| {
            macros::reference(operand.strip_prefix(b"%").unwrap_or(operand)).is_some()
        };
        if !root || !mnemonics::operand_list(statement.operands).any(from_outside) {
            return Ok(None);
        }
        let values = self.frames.iter().rev().find_map(|frame| match frame {
            Frame::Repeat { values } => Some(values.clone()),
            Frame::Macro { .. } => None,
        });
        if let Some(values) = values.filter(|values| names_register(&self.text[values.clone()])) {
            // If it is the same kind with each value, it is of that kind.
            let mut words = macros::arguments(&self.text[values.clone()])
                .map(|word| &self.text[values.clone()][word]);
            let parameter = [b"\\", words.next().unwrap_or_default()].concat();
            let mut classes = words.map(|word| {
                mnemonics::class(statement.name, &replace(statement.operands, &parameter, word))
            });
            let class = classes.next().unwrap_or(Class::Other);
            if classes.any(|other| other != class) {
                return Err(self.error("sensitive registers and others as values of `.irp`"));
            }
            return Ok(Some(class));
        }
        for frame in &mut self.frames {
            if let Frame::Macro { body, .. } = frame {
                body.moves_parameter = true;
            }
        }
        Ok(None)
    }

    /// A macro is called.
    fn call(&mut self, statement: &Statement<'_>, called: &Macro) -> Step {
        self.settle()?;
        self.watch = Watch::Nothing;
        if self.mode == Mode::Long {
            let mut position = 0;
            for argument in macros::arguments(statement.operands) {
                let text = &statement.operands[argument.clone()];
                let name = text.iter().position(|&byte| byte == b'=').map(|at| &text[..at]);
                let name = name.filter(|name| called.has(name));
                let value = argument.start + name.map_or(0, |name| name.len() + 1)..argument.end;
                let section = called.section_of(position, name);
                position += usize::from(name.is_none());
                self.argument(statement, value, section, called)?;
            }
        }
        if called.has_sites {
            self.has_sites();
            let padded = matches!(self.section(), Section::Code | Section::Discarded);
            self.used_in_alternative |= !padded;
            if !padded && self.conditional {
                self.edits.push(Edit { at: statement.start, what: What::Only(true) });
                self.edits.push(Edit { at: statement.end, what: What::Only(false) });
            }
        }
        self.apply(&called.changes)
    }

    fn argument(
        &mut self,
        statement: &Statement<'_>,
        range: Range<usize>,
        section: Section,
        called: &Macro,
    ) -> Step {
        let value = &statement.operands[range.clone()];
        let inner = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\""));
        if let Some(parameter) = macros::reference(inner.unwrap_or(value))
            && let Some(body) = self.owner(parameter)
        {
            if section != Section::Unclear {
                body.used(parameter, section);
            }
            body.moves_parameter |= called.moves_parameter;
            return Ok(());
        }
        if let Some(inner) = inner {
            let start = statement.operands_at + range.start + 1;
            return self.string(start..start + inner.len(), section);
        }
        if called.moves_parameter && names_register(value) {
            return Err(self.error(format!(
                "`{}` as an argument of a macro that moves it: write the instruction outside of the macro",
                text_of(value)
            )));
        }
        self.pass(value);
        Ok(())
    }

    /// Statements in a string that a macro inserts in `section`.
    fn string(&mut self, range: Range<usize>, section: Section) -> Step {
        // A macro of a macro that is not known better: what the outer one says.
        let outer = self.string.replace(section);
        let saved = (self.first.take(), self.prefix.take(), self.last.take());
        let mut lexer = Lexer::new(self.text, range);
        while let Some(token) = lexer.token().map_err(|what| self.unterminated(what))? {
            if let Token::Statement { range, commented } = token {
                self.statement(range, commented)?;
            }
        }
        self.settle()?;
        (self.first, self.prefix, self.last) = saved;
        self.string = outer;
        Ok(())
    }

    // Directives.

    fn directive(&mut self, statement: &Statement<'_>) -> Step {
        let name = lowered(statement.name);
        let operands = statement.operands;
        match &*name {
            b".loc" | b".file" => self.place.directive(&name, operands),
            name if is_neutral(name) => {}
            b".byte" | b".dc.b" => return self.data(statement, 1),
            b".word" | b".value" | b".short" | b".hword" | b".2byte" => {
                return self.data(statement, 2);
            }
            b".long" | b".int" | b".4byte" => return self.data(statement, 4),
            b".quad" | b".8byte" => return self.data(statement, 8),
            b".macro" => return self.macro_begins(statement),
            b".endm" | b".endmacro" => return self.macro_ends(),
            b".purgem" => {
                self.macros.remove(&*lowered(operands));
            }
            b".rept" | b".rep" | b".irp" | b".irep" | b".irpc" | b".irepc" => {
                self.settle()?;
                self.pass(operands);
                let at = statement.operands_at;
                self.frames.push(Frame::Repeat { values: at..at + operands.len() });
            }
            b".endr" => {
                self.settle()?;
                if !matches!(self.frames.pop(), Some(Frame::Repeat { .. })) {
                    return Err(self.error("`.endr` without `.rept` or `.irp`"));
                }
            }
            b".text" | b".data" | b".bss" | b".section" | b".pushsection" | b".popsection"
            | b".previous" => {
                return self.change_section(&name, statement);
            }
            b".code64" => return self.change_mode(Mode::Long),
            b".code32" | b".code16" | b".code16gcc" => return self.change_mode(Mode::Legacy),
            b".altmacro" => self.alternate = true,
            b".noaltmacro" => self.alternate = false,
            b".intel_syntax" => return Err(self.error("Intel syntax is not understood")),
            b".att_syntax" if operands.trim_ascii() == b"noprefix" => {
                return Err(self.error("registers without `%` are not understood"));
            }
            b".include" => {
                return Err(self.error(
                    "`.include` hides instructions: let the preprocessor include the file",
                ));
            }
            b".end" => {
                self.settle()?;
                self.ended = self.frames.is_empty();
            }
            name if name.contains(&b'\\') => {
                self.settle()?;
            }
            _ => {
                // Data, alignment, conditions: two instructions around it do not belong together.
                self.settle()?;
                self.watch = Watch::Nothing;
            }
        }
        Ok(())
    }

    /// Bytes: perhaps instructions.
    fn data(&mut self, statement: &Statement<'_>, width: usize) -> Step {
        let code =
            matches!(self.section(), Section::Code | Section::Replacement | Section::Unclear);
        if !code || self.mode != Mode::Long {
            return self.settle();
        }
        if self.bytes.is_empty() && width > 1 {
            return self.settle();
        }
        let at = statement.operands_at;
        let operands = at..at + statement.operands.len();
        self.bytes.add(self.text, statement.start, operands, width);
        Ok(())
    }

    fn macro_begins(&mut self, statement: &Statement<'_>) -> Step {
        self.settle()?;
        let operands = statement.operands;
        let end = operands
            .iter()
            .position(|byte| matches!(byte, b' ' | b'\t' | b','))
            .unwrap_or(operands.len());
        self.pass(&operands[end..]);
        let sections = std::mem::take(&mut self.sections);
        self.frames.push(Frame::Macro {
            name: lowered(&operands[..end]).into_owned(),
            body: Macro::new(&operands[end..]),
            sections,
            mode: self.mode,
        });
        Ok(())
    }

    fn macro_ends(&mut self) -> Step {
        self.settle()?;
        let Some(Frame::Macro { name, mut body, sections, mode }) = self.frames.pop() else {
            return Err(self.error("`.endm` without `.macro`"));
        };
        if section::balanced(&body.changes) {
            body.changes.clear();
        }
        self.sections = sections;
        self.mode = mode;
        self.macros.insert(name, body);
        Ok(())
    }

    fn change_section(&mut self, name: &[u8], statement: &Statement<'_>) -> Step {
        self.settle()?;
        let operands = statement.operands_at..statement.operands_at + statement.operands.len();
        let change = match name {
            b".text" => Change::Set(Section::Code),
            b".data" | b".bss" => Change::Set(Section::Data),
            b".section" => Change::Set(self.names.section(statement.operands)),
            b".pushsection" => Change::Push(self.names.section(statement.operands)),
            b".previous" => Change::Previous,
            _ => Change::Pop,
        };
        if matches!(change, Change::Set(_)) {
            self.section_text = operands;
        }
        self.apply(&[change])
    }

    fn apply(&mut self, changes: &[Change]) -> Step {
        for change in changes {
            let done = self.sections.apply(*change);
            match self.frames.iter_mut().rev().find_map(|frame| match frame {
                Frame::Macro { body, .. } => Some(body),
                Frame::Repeat { .. } => None,
            }) {
                Some(body) => body.changes.push(*change),
                None if !done => {
                    return Err(self.error("`.popsection` without `.pushsection`"));
                }
                None => {}
            }
        }
        Ok(())
    }

    fn change_mode(&mut self, mode: Mode) -> Step {
        self.settle()?;
        self.mode = mode;
        Ok(())
    }

    /// Marks where code of another mode begins, for whoever decodes the binary.
    fn map_mode(&mut self, at: usize) {
        if !self.frames.is_empty() || self.string.is_some() || self.section() != Section::Code {
            return;
        }
        let name = self.text[self.section_text.clone()].to_vec();
        let known = self.modes.get(&name).copied().unwrap_or(Mode::Long);
        if known != self.mode {
            self.edits.push(Edit { at, what: What::Mode(self.mode == Mode::Long, self.mapping) });
            self.mapping += 1;
            self.modes.insert(name, self.mode);
        }
    }

    // The new text.

    fn finish(mut self) -> Rewritten {
        let mut result =
            Rewritten { text: None, padded: BTreeMap::new(), recorded: BTreeMap::new() };
        if self.edits.is_empty() {
            return result;
        }
        self.edits.sort_by_key(|edit| (edit.at, edit.what.rank()));
        let mut out = Vec::with_capacity(self.text.len() + self.edits.len() * 200);
        let dynamic = self.edits.iter().any(|edit| matches!(edit.what, What::EndUnknown(..)));
        if !self.edits.iter().all(|edit| matches!(edit.what, What::Mode(..))) {
            let dynamic = dynamic.then_some((&self.passed, self.pads));
            prelude(&mut out, dynamic, self.conditional, self.text);
        }
        let mut done = 0;
        for edit in &self.edits {
            out.extend_from_slice(&self.text[done..edit.at.max(done)]);
            done = edit.at.max(done);
            match &edit.what {
                What::Begin => out.extend_from_slice(b"97710:"),
                What::Bytes => out.extend_from_slice(b".byte "),
                What::Separate(end) => {
                    out.push(b';');
                    done = *end;
                }
                What::Mode(long, number) => {
                    let bits = if *long { 64 } else { 32 };
                    out.extend_from_slice(format!("\"$c{bits}.{number}\":").as_bytes());
                }
                What::Marker(kind) => {
                    out.extend_from_slice(b"97710:");
                    record(&mut out, *kind, Flags::NONE, self.pads, false);
                    out.push(b' ');
                    *result.padded.entry(*kind).or_default() += 1;
                }
                What::Only(only) => {
                    let (before, after) = if *only { ("", ";") } else { (";", "") };
                    let text = format!("{before}.set .Lparador_only,{}{after}", u8::from(*only));
                    out.extend_from_slice(text.as_bytes());
                }
                What::End(kind, flags, in_macro) => {
                    record(&mut out, *kind, *flags, self.pads, self.conditional && *in_macro);
                    let counts = match flags.contains(Flags::RECORD_ONLY) {
                        true => &mut result.recorded,
                        false => &mut result.padded,
                    };
                    *counts.entry(*kind).or_default() += 1;
                }
                What::EndUnknown(name, flags) => {
                    let name = text_of(&self.text[name.clone()]);
                    let only = if self.conditional { "|.Lparador_only" } else { "" };
                    let text = format!(";97711:parador_site \"{name}\",{}{only}", flags.bits());
                    out.extend_from_slice(text.as_bytes());
                    *result.padded.entry(Kind::Other).or_default() += 1;
                }
            }
        }
        out.extend_from_slice(&self.text[done..]);
        // A section that ends in another mode must not lend it to what the linker puts behind it.
        for (name, mode) in &self.modes {
            if *mode == Mode::Legacy {
                let name = if name.is_empty() { ".text".into() } else { text_of(name) };
                let number = self.mapping;
                let text = format!("\n.pushsection {name};\"$c64.{number}\":;.popsection\n");
                out.extend_from_slice(text.as_bytes());
                self.mapping += 1;
            }
        }
        result.text = Some(out);
        result
    }
}

/// A statement without its labels.
struct Statement<'s> {
    /// With labels, without comments.
    body: &'s [u8],
    /// Place of `body` in the text.
    place: usize,
    /// Place of the first character after the labels.
    start: usize,
    /// Place of its end.
    end: usize,
    /// Mnemonic, directive or macro.
    name: &'s [u8],
    operands: &'s [u8],
    operands_at: usize,
}

/// What stands before everything else: sections keep the attributes that they were first given, and in strings no
/// quotes may be inserted.
fn prelude(
    out: &mut Vec<u8>,
    dynamic: Option<(&BTreeMap<&str, Kind>, Pads)>,
    conditional: bool,
    text: &[u8],
) {
    let mut prelude = format!(".pushsection {SITES_SECTION},\"a\",@progbits;.popsection;");
    if conditional {
        prelude.push_str(".set .Lparador_only,0;");
    }
    if let Some((passed, pads)) = dynamic {
        prelude.push('\n');
        // Cannot fail: a String takes everything.
        let _ = dynamic_macro(&mut prelude, passed, pads);
    }
    // A comment or a line marker is one only at the start of a line.
    let first = text.iter().find(|byte| !matches!(byte, b' ' | b'\t'));
    if matches!(first, Some(b'#' | b'/')) {
        prelude.push('\n');
    }
    out.extend_from_slice(prelude.as_bytes());
}

/// A macro that finds the kind of a mnemonic when it is known, and records a site if there is one.
fn dynamic_macro(out: &mut String, passed: &BTreeMap<&str, Kind>, pads: Pads) -> fmt::Result {
    writeln!(out, ".macro parador_site name,flags\n.set .Lparador_kind,255")?;
    for (name, &kind) in passed {
        writeln!(out, ".ifeqs \"\\name\",\"{name}\"")?;
        writeln!(
            out,
            ".set .Lparador_kind,{}\n.set .Lparador_pad,{}",
            kind.number(),
            pads.of(kind)
        )?;
        writeln!(out, ".endif")?;
    }
    writeln!(out, ".if .Lparador_kind-255\n.if (\\flags)&1\n97712:\n.else")?;
    writeln!(
        out,
        ".nops -((.Lparador_pad-(97711b-97710b))>0)*(.Lparador_pad-(97711b-97710b))\n97712:\n.endif"
    )?;
    writeln!(out, ".pushsection {SITES_SECTION}\n.long 97710b-.")?;
    writeln!(out, ".byte 97711b-97710b,97712b-97710b,.Lparador_kind,\\flags")?;
    writeln!(out, ".popsection\n.endif\n.endm")
}

/// What follows a site's last instruction. `conditional`: expansion decides whether it is padded.
fn record(out: &mut Vec<u8>, kind: Kind, flags: Flags, pads: Pads, conditional: bool) {
    let (number, bits) = (kind.number(), flags.bits());
    let (end, pad) = match flags.contains(Flags::RECORD_ONLY) {
        true => ("97711b", String::new()),
        false => {
            let (pad, times) =
                (pads.of(kind), if conditional { "*(1-.Lparador_only)" } else { "" });
            let nops =
                format!(".nops -(({pad}-(97711b-97710b))>0)*({pad}-(97711b-97710b)){times};97712:");
            ("97712b", nops)
        }
    };
    let only = if conditional { "|.Lparador_only" } else { "" };
    let text = format!(
        ";97711:{pad}.pushsection {SITES_SECTION};.long 97710b-.;\
         .byte 97711b-97710b,{end}-97710b,{number},{bits}{only};.popsection"
    );
    out.extend_from_slice(text.as_bytes());
}

/// The kind of two instructions that belong together.
fn pair(first: Class, second: Class) -> Option<Kind> {
    Some(match (first, second) {
        (Class::Sensitive(Kind::Sti), Class::Sensitive(Kind::Hlt)) => Kind::StiHlt,
        (Class::Sensitive(Kind::Sti), Class::Sensitive(Kind::Mwait)) => Kind::StiMwait,
        (Class::Sensitive(Kind::Pushf), Class::Pop) => Kind::SaveFlags,
        (Class::Push, Class::Sensitive(Kind::Popf)) => Kind::RestoreFlags,
        _ => return None,
    })
}

/// Whether a site leaves nothing in the arithmetic flags that anybody could want.
fn keeps_flags(kind: Kind) -> bool {
    !matches!(
        kind,
        Kind::Lar
            | Kind::Lsl
            | Kind::Verr
            | Kind::Verw
            | Kind::Popf
            | Kind::RestoreFlags
            | Kind::Iret
            | Kind::Encls
            | Kind::Vmcall
            | Kind::Vmmcall
            | Kind::Int
            | Kind::FarCall
            | Kind::Other
    )
}

/// Directives that change neither place nor section and put no bytes here.
fn is_neutral(name: &[u8]) -> bool {
    matches!(
        name,
        b".loc"
            | b".globl"
            | b".global"
            | b".type"
            | b".size"
            | b".weak"
            | b".local"
            | b".hidden"
            | b".set"
            | b".equ"
    ) || name.starts_with(b".cfi_")
}

/// The end of the label at `at`: behind its colon.
fn label(body: &[u8], at: usize) -> Option<usize> {
    let end = match body.get(at)? {
        b'"' => crate::lexer::string_end(body, at)?,
        _ => at + label_name(&body[at..]),
    };
    let colon = end + blanks(&body[end..]);
    (end > at && body.get(colon) == Some(&b':')).then_some(colon + 1)
}

fn label_name(text: &[u8]) -> usize {
    let mut at = 0;
    while let Some(byte) = text.get(at) {
        match byte {
            b'\\' if text[at..].starts_with(b"\\()") => at += 3,
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'$' | b'\\' | b'@' => at += 1,
            128.. => at += 1,
            _ => break,
        }
    }
    at
}

/// Length of the mnemonic or directive that the text begins with.
fn word(text: &[u8]) -> usize {
    let mut at = 0;
    while let Some(byte) = text.get(at) {
        match byte {
            b'\\' if text[at..].starts_with(b"\\()") => at += 3,
            b'\\' if text.get(at + 1) == Some(&b'@') => at += 2,
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'$' | b'\\' => {
                // `push$5`: the dollar sign begins an operand.
                if *byte == b'$' && at > 0 && text[0] != b'.' && !text[..at].contains(&b'\\') {
                    break;
                }
                at += 1;
            }
            128.. => at += 1,
            _ => break,
        }
    }
    at
}

fn blanks(text: &[u8]) -> usize {
    text.iter().take_while(|byte| matches!(byte, b' ' | b'\t' | b'\r' | 0x0c)).count()
}

fn find(text: &[u8], what: &[u8]) -> Option<usize> {
    text.windows(what.len()).position(|window| window == what)
}

fn text_of(text: &[u8]) -> String {
    String::from_utf8_lossy(text).into_owned()
}

/// In lower case, as the assembler has names of directives and macros.
fn lowered(name: &[u8]) -> Cow<'_, [u8]> {
    match name.iter().any(u8::is_ascii_uppercase) {
        true => Cow::Owned(name.to_ascii_lowercase()),
        false => Cow::Borrowed(name),
    }
}

/// Where `part`, a slice of `whole`, begins.
fn offset(whole: &[u8], part: &[u8]) -> usize {
    part.as_ptr().addr() - whole.as_ptr().addr()
}

/// The statement with blanks in place of its comments, of the same length.
fn blank_comments(statement: &[u8]) -> Vec<u8> {
    let mut out = statement.to_vec();
    let mut at = 0;
    while at < out.len() {
        match out[at] {
            b'"' => at = crate::lexer::string_end(&out, at).unwrap_or(out.len()),
            b'\'' => at += 2,
            b'/' if out.get(at + 1) == Some(&b'*') => {
                let length = find(&out[at + 2..], b"*/").map_or(out.len() - at, |found| found + 4);
                out[at..at + length].fill(b' ');
                at += length;
            }
            _ => at += 1,
        }
    }
    out
}

/// The text with another text in place of each `from`.
fn replace(text: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut rest = text;
    while let Some(at) = find(rest, from) {
        out.extend_from_slice(&rest[..at]);
        out.extend_from_slice(to);
        rest = &rest[at + from.len()..];
    }
    out.extend_from_slice(rest);
    out
}

fn words(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|byte| !(byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b'%' | b'\\')))
}

/// Whether a word of a macro's arguments is a sensitive register.
fn names_register(arguments: &[u8]) -> bool {
    words(arguments).any(mnemonics::is_sensitive_register)
}

#[cfg(test)]
mod tests;
