//! Filters the output of terminal programs into lines of plain text.
//!
//! Invariant: for any input, the output is printable ASCII in lines of limited length, and never
//! moves the cursor left of the start of the line. So a prefix in front of each line cannot be
//! forged.

/// Maximum length of a line and its prefix: terminals of 80 columns do not wrap it.
pub const COLUMNS: usize = 79;

/// Effect of one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cooked {
    /// No effect.
    Nothing,
    /// The byte added a character to the line.
    Added(u8),
    /// The cursor moved left by one and deleted a character.
    Erased,
    /// The line is complete; [`Cook::next_line`] starts the next one.
    Ended,
}

/// Position in an escape sequence (ECMA-48).
#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Text,
    /// After a carriage return: a line feed may follow.
    Return,
    Escape,
    /// Control sequence: ends with a byte from `@` on.
    Control,
    /// Command string: ends with BEL or ESC.
    String,
}

/// Filter with the current line.
pub struct Cook {
    state: State,
    line: [u8; COLUMNS],
    length: usize,
}

impl Cook {
    /// Creates a filter with an empty line.
    pub const fn new() -> Self {
        Self { state: State::Text, line: [0; COLUMNS], length: 0 }
    }

    /// Returns the current line.
    pub fn line(&self) -> &[u8] {
        &self.line[..self.length]
    }

    /// Starts the next line.
    pub fn next_line(&mut self) {
        self.length = 0;
    }

    /// Processes a byte, for a line of at most `width` characters. `false` in the second place: the
    /// call only completed a full line, and the caller must pass the byte again.
    pub fn take(&mut self, byte: u8, width: usize) -> (Cooked, bool) {
        match (self.state, byte) {
            (_, b'\n') => {
                self.state = State::Text;
                return (Cooked::Ended, true);
            }
            // The program overwrites its line: the filter starts a new one.
            (State::Return, _) if byte != b'\r' => {
                self.state = State::Text;
                return if self.length == 0 {
                    self.take(byte, width)
                } else {
                    (Cooked::Ended, false)
                };
            }
            (_, b'\r') => self.state = State::Return,
            (State::String, 0x07) => self.state = State::Text,
            (_, 0x1b) => self.state = State::Escape,
            (State::String, _) => {}
            (State::Escape, b'[') => self.state = State::Control,
            (State::Escape, b']' | b'P' | b'X' | b'^' | b'_') => self.state = State::String,
            (State::Escape, 0x20..=0x2f) => {}
            (State::Control, 0x20..=0x3f) => {}
            (State::Escape | State::Control, _) => self.state = State::Text,
            (State::Text | State::Return, _) => return self.character(byte, width),
        }
        (Cooked::Nothing, true)
    }

    fn character(&mut self, byte: u8, width: usize) -> (Cooked, bool) {
        let shown = match byte {
            b' '..=b'~' => byte,
            b'\t' => b' ',
            0x08 if self.length > 0 => {
                self.length -= 1;
                return (Cooked::Erased, true);
            }
            0x00 | 0x07 | 0x08 => return (Cooked::Nothing, true),
            _ => b'?',
        };
        if self.length >= width.clamp(1, COLUMNS) {
            return (Cooked::Ended, false);
        }
        self.line[self.length] = shown;
        self.length += 1;
        (Cooked::Added(shown), true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(input: &[u8], width: usize) -> Vec<String> {
        let mut cook = Cook::new();
        let mut lines = Vec::new();
        for &byte in input {
            loop {
                let (cooked, taken) = cook.take(byte, width);
                if cooked == Cooked::Ended {
                    lines.push(String::from_utf8(cook.line().to_vec()).unwrap());
                    cook.next_line();
                }
                if taken {
                    break;
                }
            }
        }
        lines.push(String::from_utf8(cook.line().to_vec()).unwrap());
        lines
    }

    #[test]
    fn plain_text_passes() {
        assert_eq!(lines(b"a b\r\nc\td\n$ ", 70), ["a b", "c d", "$ "]);
        assert_eq!(lines(b"ab\x08 \x08c", 70), ["ac"], "a key that erases");
        assert_eq!(lines(b"\x08\x08x", 70), ["x"], "never beyond the start");
    }

    #[test]
    fn nothing_moves_the_cursor() {
        assert_eq!(lines(b"10%\r20%\r\n", 70), ["10%", "20%", ""]);
        assert_eq!(lines(b"a\x1b[2J\x1b[1;1Hb\x1b[31mc\x1bMd\x1b(Be", 70), ["abcde"]);
        assert_eq!(lines(b"\x1b]0;title\x07a\x1bP1q\x1b\\b", 70), ["ab"]);
        assert_eq!(lines(b"\x1b[1\nx", 70), ["", "x"], "a sequence hides no line feed");
        assert_eq!(lines(b"\x0b\x0c\x85\xffx", 70), ["????x"]);
    }

    #[test]
    fn lines_never_wrap() {
        assert_eq!(lines(b"abcdef", 4), ["abcd", "ef"]);
        assert_eq!(lines(b"abcd\nef", 4), ["abcd", "ef"]);
    }

    #[test]
    fn any_input_gives_plain_lines() {
        let mut random = 1_u32;
        let mut input = Vec::new();
        for _ in 0..100_000 {
            random = random.wrapping_mul(1664525).wrapping_add(1013904223);
            input.push((random >> 24) as u8);
        }
        for line in lines(&input, 20) {
            assert!(line.len() <= 20 && line.bytes().all(|byte| (b' '..=b'~').contains(&byte)));
        }
    }
}
