//! Imports between the files of one crate: `use` items and paths that begin with `crate`, `super`
//! or `self`, outside of unit tests.

use crate::source;
use anyhow::{Context, Result, anyhow};
use proc_macro2::{Delimiter, TokenStream, TokenTree};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::str::FromStr;

/// The module path of a file, from the root of its crate.
type Module = Vec<String>;
/// For each module, the modules that it imports.
type Graph = BTreeMap<Module, BTreeSet<Module>>;

/// Names of the modules in the largest circle of imports; empty: there is none.
pub fn largest_circle(files: &[PathBuf]) -> Result<Vec<String>> {
    let graph = graph(files)?;
    let circles = graph.keys().map(|module| circle(&graph, module));
    let circle = circles.max_by_key(Vec::len).unwrap_or_default();
    let mut names: Vec<String> = circle.iter().map(name).collect();
    names.sort();
    Ok(names)
}

fn name(module: &Module) -> String {
    if module.is_empty() { "crate".to_owned() } else { module.join("::") }
}

fn graph(files: &[PathBuf]) -> Result<Graph> {
    let root = files.iter().filter_map(|file| file.parent()).min_by_key(|p| p.as_os_str().len());
    let root = root.context("a crate without files")?;
    let modules: BTreeSet<Module> = files.iter().map(|file| module_of(root, file)).collect();
    let mut graph = Graph::new();
    for file in files {
        let own = module_of(root, file);
        let tokens = TokenStream::from_str(&source::read(file)?)
            .map_err(|error| anyhow!("{}: {error}", file.display()))?;
        let mut paths = Vec::new();
        collect(tokens, &own, &mut paths);
        let targets = paths.iter().map(|path| deepest(path, &modules));
        let targets: BTreeSet<Module> = targets.filter(|target| *target != own).collect();
        graph.entry(own).or_default().extend(targets);
    }
    Ok(graph)
}

/// `src/a/b.rs` and `src/a/b/mod.rs` are `a::b`; a root file is the empty path.
fn module_of(root: &Path, file: &Path) -> Module {
    let inside = file.strip_prefix(root).unwrap_or(file).with_extension("");
    let mut parts: Module =
        inside.components().map(|part| part.as_os_str().to_string_lossy().into_owned()).collect();
    let is_root = parts.len() == 1 && matches!(parts[0].as_str(), "lib" | "main");
    if is_root || parts.last().is_some_and(|part| part == "mod") {
        parts.pop();
    }
    parts
}

/// The module in a file of its own that a path leads to.
fn deepest(path: &[String], modules: &BTreeSet<Module>) -> Module {
    let lengths = (0..=path.len()).rev();
    let found = lengths.map(|length| path[..length].to_vec()).find(|path| modules.contains(path));
    found.unwrap_or_default()
}

/// Adds the absolute paths that `tokens`, of the module `own`, name.
fn collect(tokens: TokenStream, own: &Module, paths: &mut Vec<Module>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let mut at = 0;
    while at < tokens.len() {
        if is_test_module(&tokens[at..]) {
            // `#`, its group, and the module up to its body or semicolon.
            at += 2;
            while at < tokens.len() && !ends_item(&tokens[at]) {
                at += 1;
            }
            at += 1;
            continue;
        }
        match &tokens[at] {
            TokenTree::Group(group) => collect(group.stream(), own, paths),
            TokenTree::Ident(word) if starts_path(&tokens, at) => {
                let base = base(&word.to_string(), own);
                if let Some(base) = base {
                    at = follow(&tokens, at + 1, base, paths);
                    continue;
                }
            }
            _ => {}
        }
        at += 1;
    }
}

fn ends_item(token: &TokenTree) -> bool {
    match token {
        TokenTree::Group(group) => group.delimiter() == Delimiter::Brace,
        TokenTree::Punct(mark) => mark.as_char() == ';',
        _ => false,
    }
}

/// Returns true if `#[cfg(test)]` begins here.
fn is_test_module(tokens: &[TokenTree]) -> bool {
    matches!(tokens, [TokenTree::Punct(mark), TokenTree::Group(group), ..]
        if mark.as_char() == '#' && group.to_string().replace(' ', "") == "[cfg(test)]")
}

/// Returns true if the word at `at` is the first of a path.
fn starts_path(tokens: &[TokenTree], at: usize) -> bool {
    let is_colon = |token: Option<&TokenTree>| matches!(token, Some(TokenTree::Punct(mark)) if mark.as_char() == ':');
    let follows_colons = at >= 2 && is_colon(tokens.get(at - 1)) && is_colon(tokens.get(at - 2));
    !follows_colons && is_colon(tokens.get(at + 1)) && is_colon(tokens.get(at + 2))
}

/// The module that the first word of a path stands for.
fn base(word: &str, own: &Module) -> Option<Module> {
    match word {
        "crate" => Some(Vec::new()),
        "self" => Some(own.clone()),
        "super" => Some(own.split_last().map(|(_, rest)| rest.to_vec()).unwrap_or_default()),
        _ => None,
    }
}

/// Follows a path of which `base` is known, from `at` on. Returns the first token after it.
fn follow(tokens: &[TokenTree], mut at: usize, base: Module, paths: &mut Vec<Module>) -> usize {
    let mut path = base;
    loop {
        let colons = matches!(
            (tokens.get(at), tokens.get(at + 1)),
            (Some(TokenTree::Punct(a)), Some(TokenTree::Punct(b)))
                if a.as_char() == ':' && b.as_char() == ':'
        );
        match tokens.get(at + 2) {
            Some(TokenTree::Ident(word)) if colons => {
                let word = word.to_string();
                if word == "super" {
                    path.pop();
                } else {
                    path.push(word);
                }
                at += 3;
            }
            Some(TokenTree::Group(group)) if colons && group.delimiter() == Delimiter::Brace => {
                branches(group.stream(), &path, paths);
                return at + 3;
            }
            _ => {
                paths.push(path);
                return at;
            }
        }
    }
}

/// The branches of `{a, b::c, self}` after `path`.
fn branches(tokens: TokenStream, path: &Module, paths: &mut Vec<Module>) {
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    for branch in tokens.split(|token| matches!(token, TokenTree::Punct(m) if m.as_char() == ',')) {
        let Some(TokenTree::Ident(word)) = branch.first() else { continue };
        let mut base = path.clone();
        if *word != "self" {
            base.push(word.to_string());
        }
        follow(branch, 1, base, paths);
    }
}

/// The modules that import one another, `module` included.
fn circle(graph: &Graph, module: &Module) -> Vec<Module> {
    let reached = reachable(graph, module);
    let returns = |other: &&Module| reachable(graph, other).contains(module);
    reached.into_iter().filter(returns).cloned().collect()
}

/// The modules that `from` imports, directly or through others.
fn reachable<'g>(graph: &'g Graph, from: &Module) -> BTreeSet<&'g Module> {
    let mut found = BTreeSet::new();
    let mut pending: Vec<&Module> = graph.get(from).into_iter().flatten().collect();
    while let Some(module) = pending.pop() {
        if found.insert(module) {
            pending.extend(graph.get(module).into_iter().flatten());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str, own: &[&str]) -> Vec<String> {
        let own: Module = own.iter().map(|part| (*part).to_owned()).collect();
        let mut paths = Vec::new();
        collect(TokenStream::from_str(text).unwrap(), &own, &mut paths);
        paths.iter().map(name).collect()
    }

    #[test]
    fn paths_of_a_file() {
        assert_eq!(names("use crate::a::{self, b::C, d};", &[]), ["a", "a::b::C", "a::d"]);
        assert_eq!(
            names("fn f() { super::x::g(); self::y() }", &["m", "n"]),
            ["m::x::g", "m::n::y"]
        );
        assert_eq!(names("use std::crate_like::x; a::self_like::b();", &[]), [""; 0]);
        assert_eq!(names("#[cfg(test)] mod tests { use super::*; } use crate::z;", &["m"]), ["z"]);
        assert_eq!(names("use super::super::q::R;", &["m", "n"]), ["q::R"]);
    }

    #[test]
    fn circles() {
        let folder = std::env::temp_dir().join(format!("xtask-imports-{}", std::process::id()));
        std::fs::create_dir_all(folder.join("c")).unwrap();
        let write = |name: &str, text: &str| {
            let path = folder.join(name);
            std::fs::write(&path, text).unwrap();
            path
        };
        let files = [
            write("lib.rs", "mod a; mod b; mod c;"),
            write("a.rs", "use crate::b::X;"),
            write("b.rs", "fn f() { crate::c::d::g() }"),
            write("c.rs", "mod d;"),
            write("c/d.rs", "use crate::a::Y; #[cfg(test)] mod tests { use crate::c; }"),
        ];
        let circle = largest_circle(&files).unwrap();
        let straight = largest_circle(&files[..3]).unwrap();
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(circle, ["a", "b", "c::d"]);
        assert!(straight.is_empty());
    }
}
