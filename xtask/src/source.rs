//! Reading the project's own source text: files, lines of code, uses of `unsafe`.

use anyhow::{Context, Result, anyhow};
use proc_macro2::{TokenStream, TokenTree};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// All files with one of these extensions below a directory, in a fixed order.
pub fn files(directory: &Path, extensions: &[&str]) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut pending = vec![directory.to_path_buf()];
    while let Some(directory) = pending.pop() {
        let entries = std::fs::read_dir(&directory)
            .with_context(|| format!("cannot list {}", directory.display()))?;
        for entry in entries {
            let path = entry?.path();
            if path.is_dir() {
                pending.push(path);
            } else if path
                .extension()
                .and_then(|extension| extension.to_str())
                .is_some_and(|extension| extensions.contains(&extension))
            {
                found.push(path);
            }
        }
    }
    found.sort();
    Ok(found)
}

/// Reads a text file; the error names it.
pub fn read(path: &Path) -> Result<String> {
    std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Lines of a source file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lines {
    /// Every line.
    pub total: usize,
    /// Lines that hold code: not blank, not only comment, not of the unit tests.
    pub code: usize,
    /// Lines of code in unit tests.
    pub tests: usize,
}

impl std::ops::AddAssign for Lines {
    fn add_assign(&mut self, other: Self) {
        self.total += other.total;
        self.code += other.code;
        self.tests += other.tests;
    }
}

/// Counts the lines of all Rust and assembly below a directory. Files that are modules for unit
/// tests only count as such.
pub fn lines_below(directory: &Path) -> Result<Lines> {
    lines_of(files(directory, &["rs", "s", "S"])?)
}

/// The same for those files and folders in a directory whose names start with `prefix`.
pub fn lines_with_prefix(directory: &Path, prefix: &str) -> Result<Lines> {
    let is_counted = |file: &PathBuf| {
        let inside = file.strip_prefix(directory).ok().and_then(Path::to_str);
        inside.is_some_and(|inside| inside.starts_with(prefix))
    };
    let files = files(directory, &["rs", "s", "S"])?;
    lines_of(files.into_iter().filter(is_counted).collect())
}

fn lines_of(files: Vec<PathBuf>) -> Result<Lines> {
    let tests = all_test_files(&files)?;
    let mut sum = Lines::default();
    for file in &files {
        let count = lines(&read(file)?);
        sum += if tests.contains(file) {
            Lines { code: 0, tests: count.code + count.tests, ..count }
        } else {
            count
        };
    }
    Ok(sum)
}

/// The Rust files below a directory, without modules for unit tests only and what is below those.
pub fn production_files(directory: &Path) -> Result<Vec<PathBuf>> {
    let files = files(directory, &["rs"])?;
    let tests = all_test_files(&files)?;
    let is_test = |file: &PathBuf| {
        tests.iter().any(|test| file == test || file.starts_with(test.with_extension("")))
    };
    Ok(files.into_iter().filter(|file| !is_test(file)).collect())
}

/// The files with an extension in a directory, not below it.
pub fn files_in(directory: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let all = files(directory, &[extension])?;
    Ok(all.into_iter().filter(|file| file.parent() == Some(directory)).collect())
}

/// Lines of a file, comments included, without an inline module of unit tests at its end.
pub fn production_lines(text: &str) -> usize {
    let lines: Vec<&str> = text.lines().collect();
    let tests = lines.windows(2).position(|pair| {
        pair[0] == "#[cfg(test)]" && pair[1].contains("mod ") && pair[1].ends_with('{')
    });
    tests.unwrap_or(lines.len())
}

/// A function outside of unit tests.
#[derive(Debug, PartialEq, Eq)]
pub struct FunctionLength {
    /// Its name.
    pub name: String,
    /// Lines from `fn` to the end of its body.
    pub lines: usize,
}

/// The functions with a body of a file, nested ones included.
pub struct FunctionLengths(pub Vec<FunctionLength>);

impl FunctionLengths {
    /// Reads a file. Fails if it is no Rust.
    pub fn read(path: &Path) -> Result<Self> {
        let tokens = TokenStream::from_str(&read(path)?)
            .map_err(|error| anyhow!("{}: {error}", path.display()))?;
        let mut functions = Self(Vec::new());
        functions.add(tokens);
        Ok(functions)
    }

    fn add(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut is_test = false;
        for (at, token) in tokens.iter().enumerate() {
            match token {
                TokenTree::Group(group) => {
                    let attribute = group.to_string().replace(' ', "") == "[cfg(test)]";
                    let body = group.delimiter() == proc_macro2::Delimiter::Brace;
                    if !(is_test && body) {
                        self.add(group.stream());
                    }
                    is_test = attribute || is_test && !body;
                }
                TokenTree::Ident(word) if word == "fn" && !is_test => {
                    self.0.extend(function(word, &tokens[at + 1..]));
                }
                TokenTree::Punct(mark) if mark.as_char() == ';' => is_test = false,
                _ => {}
            }
        }
    }
}

/// Returns the function whose keyword is `word`, followed by `rest`; `None` if it has no body.
fn function(word: &proc_macro2::Ident, rest: &[TokenTree]) -> Option<FunctionLength> {
    let TokenTree::Ident(name) = rest.first()? else { return None };
    let body = rest.iter().find_map(|token| match token {
        TokenTree::Group(group) if group.delimiter() == proc_macro2::Delimiter::Brace => {
            Some(Some(group.span_close().end().line))
        }
        TokenTree::Punct(mark) if mark.as_char() == ';' => Some(None),
        _ => None,
    });
    let lines = body?? + 1 - word.span().start().line;
    Some(FunctionLength { name: name.to_string(), lines })
}

/// Mark of attributes that select code for tests of other crates.
const TESTING: &str = "feature = \"testing\"";
/// Attributes of modules that only tests have: those of their own crate, or of others.
const TEST_ONLY: [&str; 2] = ["#[cfg(test)]", "#[cfg(feature = \"testing\")]"];

/// Paths of the modules in files of their own that `file` declares for tests.
pub fn test_files(file: &Path, text: &str) -> Vec<PathBuf> {
    let is_root = ["lib.rs", "main.rs", "mod.rs"].iter().any(|root| file.ends_with(root));
    let folder = if is_root { file.with_file_name("") } else { file.with_extension("") };
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let declared = lines.windows(2).filter(|pair| TEST_ONLY.contains(&pair[0]));
    declared
        .filter_map(|pair| pair[1].strip_suffix(';')?.split_once("mod "))
        .map(|(_, name)| folder.join(name).with_extension("rs"))
        .collect()
}

fn all_test_files(files: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for file in files {
        found.extend(test_files(file, &read(file)?));
    }
    Ok(found)
}

/// Counts the lines of Rust or assembly text. Unit tests are what follows `#[cfg(test)]` on an
/// inline module at the left margin, up to its closing brace.
pub fn lines(text: &str) -> Lines {
    let mut count = Lines::default();
    let mut comment_depth = 0usize;
    let mut attribute = false;
    let mut in_tests = false;
    for line in text.lines() {
        count.total += 1;
        let code = strip_comments(line, &mut comment_depth);
        if code.trim().is_empty() {
            continue;
        }
        if attribute && !in_tests && line.contains("mod ") && line.trim_end().ends_with('{') {
            in_tests = true;
            // The attribute's own line was counted as code.
            count.code -= 1;
            count.tests += 1;
        }
        attribute = line.trim_end() == "#[cfg(test)]";
        let is_for_tests = line.contains(TESTING) && line.trim_start().starts_with("#[");
        if is_for_tests {
            count.tests += 1;
        } else if in_tests {
            count.tests += 1;
            in_tests = !line.starts_with('}');
        } else {
            count.code += 1;
        }
    }
    count
}

/// A line without its comments. A comment mark in a string is taken for a comment, which at most
/// cuts the end of a line that still counts.
fn strip_comments(line: &str, depth: &mut usize) -> String {
    let mut rest = line;
    let mut code = String::new();
    loop {
        if *depth > 0 {
            let Some(end) = rest.find("*/") else { return code };
            rest = &rest[end + 2..];
            *depth -= 1;
            continue;
        }
        let line_comment = rest.find("//");
        let block_comment = rest.find("/*");
        match (line_comment, block_comment) {
            (Some(line), block) if block.is_none_or(|block| line < block) => {
                code.push_str(&rest[..line]);
                return code;
            }
            (_, Some(block)) => {
                code.push_str(&rest[..block]);
                rest = &rest[block + 2..];
                *depth += 1;
            }
            _ => {
                code.push_str(rest);
                return code;
            }
        }
    }
}

/// Uses of the keyword `unsafe` in a crate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unsafe {
    /// Blocks: places where a contract is claimed to hold.
    pub blocks: usize,
    /// Functions, traits, implementations, foreign modules and attributes that declare a contract.
    pub items: usize,
}

impl std::ops::AddAssign for Unsafe {
    fn add_assign(&mut self, other: Self) {
        self.blocks += other.blocks;
        self.items += other.items;
    }
}

/// Counts the keyword in the tokens of a file, inside macros too.
pub fn count_unsafe(path: &Path) -> Result<Unsafe> {
    let tokens = TokenStream::from_str(&read(path)?)
        .map_err(|error| anyhow!("{}: {error}", path.display()))?;
    Ok(count_in(tokens))
}

fn count_in(tokens: TokenStream) -> Unsafe {
    let mut count = Unsafe::default();
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        match token {
            TokenTree::Ident(word) if word == "unsafe" => {
                let block = matches!(tokens.peek(), Some(TokenTree::Group(group))
                    if group.delimiter() == proc_macro2::Delimiter::Brace);
                if block {
                    count.blocks += 1;
                } else {
                    count.items += 1;
                }
            }
            TokenTree::Group(group) => count += count_in(group.stream()),
            _ => {}
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_lines() {
        let text = "//! Head.\n\nfn a() {} // why\n/* long\n   comment */ fn b() {}\n#[cfg(test)]\nmod tests {\n    fn c() {}\n}\n";
        assert_eq!(lines(text), Lines { total: 9, code: 2, tests: 4 });
    }

    #[test]
    fn counts_files_by_prefix() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let own = lines(&read(&folder.join("source.rs")).unwrap());
        assert_eq!(lines_with_prefix(&folder, "source").unwrap(), own);
        assert_eq!(lines_with_prefix(&folder, "absent").unwrap(), Lines::default());
    }

    #[test]
    fn code_after_tests_counts() {
        let text = "#[cfg(test)]\nmod tests {\n}\nfn a() {}\n#[cfg(test)]\nextern crate std;\n";
        assert_eq!(lines(text), Lines { total: 6, code: 3, tests: 3 });
    }

    #[test]
    fn finds_test_modules() {
        let text = "mod a;\n#[cfg(test)]\nmod tests;\n#[cfg(test)]\npub(crate) mod testing;\n#[cfg(test)]\nmod inline {\n}\n";
        let files = |from: &str| test_files(Path::new(from), text);
        assert_eq!(files("src/lib.rs"), ["src/tests.rs", "src/testing.rs"].map(PathBuf::from));
        assert_eq!(files("src/pool.rs")[0], Path::new("src/pool/tests.rs"));
    }

    #[test]
    fn finds_functions() {
        let text = "fn a() {\n    fn b() {}\n}\ntrait T { fn c(); }\n#[cfg(test)]\nmod tests {\n    fn d() {}\n}\nfn e()\n{\n}\n";
        let mut found = FunctionLengths(Vec::new());
        found.add(TokenStream::from_str(text).unwrap());
        let found: Vec<_> = found.0.iter().map(|f| (f.name.as_str(), f.lines)).collect();
        assert_eq!(found, [("a", 3), ("b", 1), ("e", 3)]);
        assert_eq!(production_lines(text), 4);
    }

    #[test]
    fn counts_unsafe() {
        let text = "#[unsafe(no_mangle)] unsafe fn f() { unsafe { g() } } macro_rules! m { () => { unsafe { h() } } } // unsafe";
        let tokens = TokenStream::from_str(text).unwrap();
        assert_eq!(count_in(tokens), Unsafe { blocks: 2, items: 2 });
    }
}
