//! Statements, comments and line ends of text in the language of the GNU assembler, AT&T syntax,
//! x86 (manual "Using as", 3.2 to 3.5; comment characters: 9.16).
//!
//! The lexer passes over every byte of the text exactly once. It copies nothing: tokens are ranges.

use std::ops::Range;

/// A piece of the text.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Token {
    /// From the first character to the last that is neither blank nor comment. Labels are part of
    /// it.
    Statement {
        /// The statement's range.
        range: Range<usize>,
        /// True if there is a comment inside.
        commented: bool,
    },
    /// `# ...` to the end of the line, or a line that begins with `/`.
    Comment {
        /// The comment's range, without the line's end.
        range: Range<usize>,
        /// True if only blanks precede it on its line.
        first: bool,
    },
    /// `/* ... */`.
    Block(Range<usize>),
    /// The end of a line.
    Newline,
}

/// An unterminated token.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Unterminated {
    /// `"` without an end on its line.
    String,
    /// `/*` without `*/`.
    Comment,
}

/// The kind of token that a character may begin.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Class {
    Plain,
    Blank,
    Newline,
    Separator,
    Hash,
    Slash,
    Quote,
    Apostrophe,
}

const CLASSES: [Class; 256] = {
    let mut table = [Class::Plain; 256];
    table[b' ' as usize] = Class::Blank;
    table[b'\t' as usize] = Class::Blank;
    table[b'\r' as usize] = Class::Blank;
    table[0x0c] = Class::Blank;
    table[b'\n' as usize] = Class::Newline;
    table[b';' as usize] = Class::Separator;
    table[b'#' as usize] = Class::Hash;
    table[b'/' as usize] = Class::Slash;
    table[b'"' as usize] = Class::Quote;
    table[b'\'' as usize] = Class::Apostrophe;
    table
};

/// Lexer of `text[at..end]`.
pub struct Lexer<'a> {
    text: &'a [u8],
    at: usize,
    end: usize,
    /// Number of lines passed.
    line: usize,
    /// True if only blanks precede on the line.
    line_start: bool,
    /// The unfinished statement: start, end so far, and true if it has a comment inside.
    open: Option<(usize, usize, bool)>,
    /// A comment followed `open`; it is inside the statement if more text of the statement follows.
    comment_after: bool,
    /// The token to return after the last one.
    next: Option<Token>,
}

impl<'a> Lexer<'a> {
    /// Begins at the start of a line.
    pub fn new(text: &'a [u8], range: Range<usize>) -> Self {
        Self {
            text,
            at: range.start,
            end: range.end,
            line: 1,
            line_start: true,
            open: None,
            comment_after: false,
            next: None,
        }
    }

    /// The line that the next token begins on, from 1.
    pub fn line(&self) -> usize {
        self.line
    }

    /// The next token, `None` at the end.
    pub fn token(&mut self) -> Result<Option<Token>, Unterminated> {
        if let Some(token) = self.next.take() {
            self.line += usize::from(token == Token::Newline);
            return Ok(Some(token));
        }
        while self.at < self.end {
            let at = self.at;
            match CLASSES[usize::from(self.text[at])] {
                Class::Plain => self.part(at + 1),
                Class::Blank => self.at += 1,
                Class::Apostrophe => {
                    let end = self.character(at);
                    self.part(end);
                }
                Class::Quote => {
                    let end = self.string(at).ok_or(Unterminated::String)?;
                    self.part(end);
                }
                Class::Slash if self.peek(at + 1) == Some(b'*') => {
                    let end = self.block(at).ok_or(Unterminated::Comment)?;
                    // A line end in a comment ends the statement, too.
                    let lines = self.text[at..end].iter().filter(|&&byte| byte == b'\n').count();
                    if lines > 0
                        && let Some(statement) = self.close()
                    {
                        return Ok(Some(statement));
                    }
                    self.line += lines;
                    self.line_start |= lines > 0;
                    self.at = end;
                    self.comment_after = true;
                    return Ok(Some(Token::Block(at..end)));
                }
                Class::Slash if !self.line_start => self.part(at + 1),
                Class::Hash | Class::Slash => {
                    let end = self.line_end(at);
                    let comment = Token::Comment { range: at..end, first: self.line_start };
                    self.at = end;
                    return Ok(Some(self.after_statement(comment)));
                }
                Class::Separator => {
                    self.at += 1;
                    self.line_start = false;
                    if let Some(statement) = self.close() {
                        return Ok(Some(statement));
                    }
                }
                Class::Newline => {
                    self.at += 1;
                    self.line_start = true;
                    let token = self.after_statement(Token::Newline);
                    self.line += usize::from(token == Token::Newline);
                    return Ok(Some(token));
                }
            }
        }
        Ok(self.close())
    }

    /// Extends the statement to `end`.
    fn part(&mut self, end: usize) {
        // Runs of plain characters are the largest part of every text.
        let mut end = end;
        while end < self.end && CLASSES[usize::from(self.text[end])] == Class::Plain {
            end += 1;
        }
        let (start, _, commented) = self.open.unwrap_or((self.at, 0, false));
        let inside = self.open.is_some() && self.comment_after;
        self.open = Some((start, end, commented || inside));
        self.comment_after = false;
        self.line_start = false;
        self.at = end;
    }

    fn close(&mut self) -> Option<Token> {
        self.comment_after = false;
        let (start, end, commented) = self.open.take()?;
        Some(Token::Statement { range: start..end, commented })
    }

    /// Returns the open statement if there is one, and `token` after it.
    fn after_statement(&mut self, token: Token) -> Token {
        match self.close() {
            Some(statement) => {
                self.next = Some(token);
                statement
            }
            None => token,
        }
    }

    fn peek(&self, at: usize) -> Option<u8> {
        self.text[..self.end].get(at).copied()
    }

    /// The end of a character constant: `'x`, `'\x`, with or without a closing `'`.
    fn character(&self, at: usize) -> usize {
        let value = at + 1 + usize::from(self.peek(at + 1) == Some(b'\\'));
        match self.peek(value) {
            None | Some(b'\n') => value.min(self.end),
            Some(_) => value + 1 + usize::from(self.peek(value + 1) == Some(b'\'')),
        }
    }

    fn string(&self, at: usize) -> Option<usize> {
        string_end(&self.text[..self.end], at)
    }

    fn block(&self, at: usize) -> Option<usize> {
        let found = self.text[at + 2..self.end].windows(2).position(|pair| pair == b"*/")?;
        Some(at + 2 + found + 2)
    }

    fn line_end(&self, at: usize) -> usize {
        let rest = &self.text[at..self.end];
        at + rest.iter().position(|&byte| byte == b'\n').unwrap_or(rest.len())
    }
}

/// The position after the string that begins at `at`; `None` if the string does not end on its
/// line.
pub fn string_end(text: &[u8], at: usize) -> Option<usize> {
    let mut end = at + 1;
    loop {
        match text.get(end)? {
            b'"' => return Some(end + 1),
            b'\n' => return None,
            b'\\' => end += 2,
            _ => end += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(text: &str) -> Vec<String> {
        let mut lexer = Lexer::new(text.as_bytes(), 0..text.len());
        let mut list = Vec::new();
        while let Some(token) = lexer.token().unwrap() {
            list.push(match token {
                Token::Statement { range, commented: false } => text[range].to_owned(),
                Token::Statement { range, commented: true } => format!("[{}]", &text[range]),
                Token::Comment { range, first: false } => format!("c {}", &text[range]),
                Token::Comment { range, first: true } => format!("C {}", &text[range]),
                Token::Block(range) => format!("b {}", &text[range]),
                Token::Newline => "\n".to_owned(),
            });
        }
        list
    }

    #[test]
    fn statements() {
        assert_eq!(tokens("1: cli; \tsti ;;\nhlt"), ["1: cli", "sti", "\n", "hlt"]);
        assert_eq!(tokens(""), [""; 0]);
    }

    #[test]
    fn comments() {
        assert_eq!(tokens("cli # a;b\n# 1 \"x\""), ["cli", "c # a;b", "\n", "C # 1 \"x\""]);
        assert_eq!(tokens("/ all\n\t/ all\ncli"), ["C / all", "\n", "C / all", "\n", "cli"]);
        assert_eq!(tokens("rep/insb"), ["rep/insb"]);
        assert_eq!(tokens("mov /* a */ %eax"), ["b /* a */", "[mov /* a */ %eax]"]);
        assert_eq!(tokens("cli /* a;\n# b */ hlt"), ["cli", "b /* a;\n# b */", "hlt"]);
        assert_eq!(tokens("/* a */ cli"), ["b /* a */", "cli"]);
    }

    #[test]
    fn quotes() {
        assert_eq!(tokens(r#".ascii "a;#\"b" ; cli"#), [r#".ascii "a;#\"b""#, "cli"]);
        assert_eq!(tokens("mov $';, %al ; cli"), ["mov $';, %al", "cli"]);
        assert_eq!(tokens(r"mov $'\\', %al ; cli"), [r"mov $'\\', %al", "cli"]);
        assert_eq!(tokens("mov $'#', %al"), ["mov $'#', %al"]);
        let mut lexer = Lexer::new(b".ascii \"a\n", 0..10);
        assert_eq!(lexer.token(), Err(Unterminated::String));
        let mut lexer = Lexer::new(b"/* a", 0..4);
        assert_eq!(lexer.token(), Err(Unterminated::Comment));
        assert_eq!(tokens("'"), ["'"]);
        assert_eq!(tokens("'\\"), ["'\\"]);
    }

    #[test]
    fn lines() {
        let text = b"a\n/* \n */ b\nc";
        let mut lexer = Lexer::new(text, 0..text.len());
        let mut lines = Vec::new();
        while let Some(token) = lexer.token().unwrap() {
            if let Token::Statement { .. } = token {
                lines.push(lexer.line());
            }
        }
        assert_eq!(lines, [1, 3, 4]);
    }
}
