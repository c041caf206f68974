//! Line editor: translates keys into a line, and updates the screen.
//!
//! At the end of the line, the editor writes only the change; elsewhere it rewrites the line. It
//! supports the keys of a VT100 (ECMA-48 sequences) and the usual control characters.

use core::fmt::Write;

use heapless::{Deque, String};

/// Maximum length of a line.
pub const WIDTH: usize = 72;
/// Number of lines in the history.
const HISTORY: usize = 16;

/// A line of input.
pub type Line = String<WIDTH>;

/// Result of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// No action for the caller.
    None,
    /// The line is complete.
    Line,
    /// The user requests completion of the word before the cursor.
    Complete,
}

/// Position in the byte sequence of a key.
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Plain,
    /// After ESC.
    Escape,
    /// In a control sequence, with its first parameter.
    Control(u8),
    /// After a carriage return: a following line feed belongs to it.
    Return,
}

/// Line editor.
pub struct Editor {
    prompt: &'static str,
    line: Line,
    cursor: usize,
    state: State,
    history: Deque<Line, HISTORY>,
    /// Position in the history, counted from its end; 0 for the new line.
    back: usize,
    /// The new line, while a history line is shown.
    new: Line,
}

impl Editor {
    /// Creates an editor with an empty line.
    pub fn new(prompt: &'static str) -> Self {
        Self {
            prompt,
            line: Line::new(),
            cursor: 0,
            state: State::Plain,
            history: Deque::new(),
            back: 0,
            new: Line::new(),
        }
    }

    /// Returns the line up to the cursor.
    pub fn before_cursor(&self) -> &str {
        &self.line[..self.cursor]
    }

    /// Takes the complete line, adds it to the history and starts a new one.
    pub fn take_line(&mut self) -> Line {
        let line = core::mem::take(&mut self.line);
        (self.cursor, self.back) = (0, 0);
        if !line.trim().is_empty() && self.history.back() != Some(&line) {
            if self.history.is_full() {
                self.history.pop_front();
            }
            // There is room now.
            let _ = self.history.push_back(line.clone());
        }
        line
    }

    /// Writes prompt and line, on an empty line of the screen.
    pub fn show(&self, screen: &mut impl Write) {
        let left = self.line.len() - self.cursor;
        // A screen accepts all text.
        let _ = write!(screen, "{}{}", self.prompt, self.line);
        if left > 0 {
            let _ = write!(screen, "\x1b[{left}D");
        }
    }

    fn show_again(&self, screen: &mut impl Write) {
        let _ = write!(screen, "\r\x1b[K");
        self.show(screen);
    }

    /// Processes a byte of a key.
    pub fn key(&mut self, byte: u8, screen: &mut impl Write) -> Event {
        let state = core::mem::replace(&mut self.state, State::Plain);
        match (state, byte) {
            (State::Return, b'\n') => {}
            (State::Escape, b'[' | b'O') => self.state = State::Control(0),
            (State::Escape, _) => {}
            (State::Control(_), b'0'..=b'9') => self.state = State::Control(byte - b'0'),
            (State::Control(_), b' '..=b'?') => self.state = state,
            (State::Control(number), _) => self.control(number, byte, screen),
            (State::Plain | State::Return, _) => return self.plain(byte, screen),
        }
        Event::None
    }

    fn plain(&mut self, byte: u8, screen: &mut impl Write) -> Event {
        const CTRL: u8 = 0x1f;
        match byte {
            0x1b => self.state = State::Escape,
            b'\r' | b'\n' => {
                if byte == b'\r' {
                    self.state = State::Return;
                }
                let _ = write!(screen, "\r\n");
                return Event::Line;
            }
            b'\t' => return Event::Complete,
            0x08 | 0x7f if self.cursor > 0 => self.delete(self.cursor - 1, self.cursor, screen),
            b' '..=b'~' => self.insert(byte as char, screen),
            _ if byte == b'c' & CTRL => {
                let _ = write!(screen, "^C\r\n");
                self.replace(Line::new());
                self.show(screen);
            }
            _ if byte == b'l' & CTRL => {
                let _ = write!(screen, "\x1b[2J\x1b[H");
                self.show(screen);
            }
            _ if byte == b'u' & CTRL => self.delete(0, self.cursor, screen),
            _ if byte == b'k' & CTRL => self.delete(self.cursor, WIDTH, screen),
            _ if byte == b'w' & CTRL => self.delete_word(screen),
            _ if byte == b'd' & CTRL => self.delete(self.cursor, self.cursor + 1, screen),
            _ if byte == b'a' & CTRL => self.control(0, b'H', screen),
            _ if byte == b'e' & CTRL => self.control(0, b'F', screen),
            _ if byte == b'b' & CTRL => self.control(0, b'D', screen),
            _ if byte == b'f' & CTRL => self.control(0, b'C', screen),
            _ if byte == b'p' & CTRL => self.control(0, b'A', screen),
            _ if byte == b'n' & CTRL => self.control(0, b'B', screen),
            _ => {}
        }
        Event::None
    }

    fn control(&mut self, number: u8, last: u8, screen: &mut impl Write) {
        match (last, number) {
            (b'A', _) => self.show_history(self.back + 1, screen),
            (b'B', _) => self.show_history(self.back.wrapping_sub(1), screen),
            (b'C', _) => self.go_to(self.cursor + 1, screen),
            (b'D', _) => self.go_to(self.cursor.saturating_sub(1), screen),
            (b'H', _) | (b'~', 1 | 7) => self.go_to(0, screen),
            (b'F', _) | (b'~', 4 | 8) => self.go_to(WIDTH, screen),
            (b'~', 3) => self.delete(self.cursor, self.cursor + 1, screen),
            _ => {}
        }
    }

    /// Inserts a character at the cursor, if there is room.
    fn insert(&mut self, character: char, screen: &mut impl Write) {
        let at_end = self.cursor == self.line.len();
        // The line is ASCII: the cursor is between characters.
        if self.line.insert(self.cursor, character).is_err() {
            return;
        }
        self.cursor += 1;
        if at_end {
            let _ = screen.write_char(character);
        } else {
            self.show_again(screen);
        }
    }

    /// Inserts a text at the cursor, as far as there is room.
    pub fn insert_text(&mut self, text: &str, screen: &mut impl Write) {
        text.chars().filter(char::is_ascii_graphic).for_each(|c| self.insert(c, screen));
    }

    /// Inserts a space at the cursor, if there is room.
    pub fn insert_space(&mut self, screen: &mut impl Write) {
        self.insert(' ', screen);
    }

    /// Deletes a range of characters, limited to the line.
    fn delete(&mut self, from: usize, to: usize, screen: &mut impl Write) {
        let to = to.min(self.line.len());
        if from >= to {
            return;
        }
        let last_before_cursor = from + 1 == to && to == self.cursor && to == self.line.len();
        let mut line = Line::new();
        // Both parts fit: they were in one line.
        let _ = line.push_str(&self.line[..from]);
        let _ = line.push_str(&self.line[to..]);
        self.line = line;
        self.cursor = from;
        if last_before_cursor {
            let _ = write!(screen, "\x08 \x08");
        } else {
            self.show_again(screen);
        }
    }

    fn delete_word(&mut self, screen: &mut impl Write) {
        let kept = self.before_cursor().trim_end();
        let start = kept.rfind(' ').map_or(0, |space| space + 1);
        self.delete(start, self.cursor, screen);
    }

    fn go_to(&mut self, cursor: usize, screen: &mut impl Write) {
        let to = cursor.min(self.line.len());
        let from = core::mem::replace(&mut self.cursor, to);
        let _ = match to.cmp(&from) {
            core::cmp::Ordering::Less => write!(screen, "\x1b[{}D", from - to),
            core::cmp::Ordering::Greater => write!(screen, "\x1b[{}C", to - from),
            core::cmp::Ordering::Equal => Ok(()),
        };
    }

    /// Shows a line of the history, or the new line.
    fn show_history(&mut self, back: usize, screen: &mut impl Write) {
        if back > self.history.len() {
            return;
        }
        if self.back == 0 {
            self.new = self.line.clone();
        }
        let old = back.checked_sub(1).and_then(|index| self.history.iter().rev().nth(index));
        let line = old.unwrap_or(&self.new).clone();
        self.replace(line);
        self.back = back;
        self.show_again(screen);
    }

    fn replace(&mut self, line: Line) {
        (self.cursor, self.back) = (line.len(), 0);
        self.line = line;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::string::String;

    /// A terminal of one line, limited to the sequences that the editor uses.
    #[derive(Default)]
    struct Terminal {
        text: Vec<char>,
        cursor: usize,
        lines: Vec<String>,
    }

    impl Terminal {
        fn take(&mut self, output: &str) {
            let mut rest = output.chars();
            while let Some(character) = rest.next() {
                match character {
                    '\r' => self.cursor = 0,
                    '\n' => {
                        self.lines.push(self.text.drain(..).collect());
                    }
                    '\x08' => self.cursor -= 1,
                    '\x1b' => {
                        assert_eq!(rest.next(), Some('['));
                        let sequence: String = rest.by_ref().take_while_inclusive_of_letter();
                        let (number, last) = sequence.split_at(sequence.len() - 1);
                        let number: usize = number.parse().unwrap_or(1);
                        match last {
                            "D" => self.cursor -= number,
                            "C" => self.cursor += number,
                            "K" => self.text.truncate(self.cursor),
                            "J" | "H" => (self.text, self.cursor) = (Vec::new(), 0),
                            _ => panic!("{sequence}"),
                        }
                    }
                    _ => {
                        self.text.resize(self.text.len().max(self.cursor + 1), ' ');
                        self.text[self.cursor] = character;
                        self.cursor += 1;
                    }
                }
            }
        }
    }

    trait Letters: Iterator<Item = char> {
        fn take_while_inclusive_of_letter(&mut self) -> String {
            let mut text = String::new();
            for character in self {
                text.push(character);
                if character.is_ascii_alphabetic() {
                    break;
                }
            }
            text
        }
    }
    impl<I: Iterator<Item = char>> Letters for I {}

    struct Rig {
        editor: Editor,
        terminal: Terminal,
    }

    impl Rig {
        fn new() -> Self {
            let editor = Editor::new("> ");
            let mut rig = Self { editor, terminal: Terminal::default() };
            rig.show();
            rig
        }

        fn show(&mut self) {
            let mut output = String::new();
            self.editor.show(&mut output);
            self.terminal.take(&output);
        }

        /// Types keys; returns the events that are not `None`.
        fn keys(&mut self, keys: &str) -> Vec<Event> {
            let mut events = Vec::new();
            for byte in keys.bytes() {
                let mut output = String::new();
                let event = self.editor.key(byte, &mut output);
                self.terminal.take(&output);
                if event != Event::None {
                    events.push(event);
                }
                if event == Event::Line {
                    self.terminal.lines.push(self.editor.take_line().as_str().into());
                    self.show();
                }
            }
            // The screen always shows the line and the cursor in it.
            let shown: String = self.terminal.text.iter().collect();
            assert_eq!(shown.trim_end(), format!("> {}", self.editor.line).trim_end(), "{keys:?}");
            assert_eq!(self.terminal.cursor, 2 + self.editor.cursor, "{keys:?}");
            events
        }

        fn line(&self) -> &str {
            &self.editor.line
        }
    }

    #[test]
    fn typing_and_corrections() {
        let mut rig = Rig::new();
        rig.keys("lisr\x7ft");
        assert_eq!(rig.line(), "list");
        rig.keys("\x1b[D\x1b[D\x08X");
        assert_eq!(rig.line(), "lXst");
        rig.keys("\x1b[Ha\x1b[Fb\x1b[1~c\x1b[4~d");
        assert_eq!(rig.line(), "calXstbd");
        rig.keys("\x01\x1b[3~\x04");
        assert_eq!(rig.line(), "lXstbd");
        rig.keys("\x05 one two \x17");
        assert_eq!(rig.line(), "lXstbd one ");
        rig.keys("\x1b[D\x1b[D\x0b");
        assert_eq!(rig.line(), "lXstbd on");
        rig.keys("\x15");
        assert_eq!(rig.line(), "");
        rig.keys("\x7f\x1b[D\x1b[C\x17\x0b\x04\x1b[3~");
        rig.keys("a\x1b[D\x1b[3~");
        assert_eq!(rig.line(), "");
        rig.keys("abc\x03x\x0c");
        assert_eq!(rig.line(), "x", "given up");
    }

    #[test]
    fn lines_and_history() {
        let mut rig = Rig::new();
        assert_eq!(rig.keys("one\r\ntwo\ntwo\r"), [Event::Line; 3], "CR LF is one key");
        rig.keys("new\x1b[A");
        assert_eq!(rig.line(), "two");
        rig.keys("\x1b[A");
        assert_eq!(rig.line(), "one", "the same line twice is remembered once");
        rig.keys("\x1b[A\x10");
        assert_eq!(rig.line(), "one");
        rig.keys("\x1b[B\x1b[B\x1b[B");
        assert_eq!(rig.line(), "new");
        for line in 0..20 {
            rig.keys(&format!("\x15{line}\r"));
        }
        rig.keys(&"\x1b[A".repeat(30));
        assert_eq!(rig.line(), "4");
    }

    #[test]
    fn a_full_line_takes_no_more() {
        let mut rig = Rig::new();
        rig.keys(&"x".repeat(WIDTH + 9));
        assert_eq!(rig.line().len(), WIDTH);
        rig.keys("\x01y");
        assert_eq!(rig.line().len(), WIDTH);
    }

    #[test]
    fn any_keys() {
        let mut rig = Rig::new();
        let mut random = 7_u32;
        for _ in 0..20_000 {
            random = random.wrapping_mul(1664525).wrapping_add(1013904223);
            let keys = ["a", "b ", "\x1b[A", "\x1b[B", "\x1b[C", "\x1b[D", "\x08", "\x04"];
            let more = ["\x1b[H", "\x1b[F", "\x0b", "\x17", "\r", "\t", "\x03", "\x00"];
            let index = (random >> 24) as usize;
            rig.keys(keys.get(index % 20).or(more.get(index % 16)).unwrap_or(&"c"));
        }
        assert_eq!(rig.keys("\t"), [Event::Complete]);
    }
}
