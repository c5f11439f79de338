//! A test that cannot run says so by `skipped()`, which fails in CI and is listed at the end: no other way out is allowed.
//!
//! Of the sources' tests this refuses a `return` that nothing explains, a printed word about skipping, and `#[ignore]`
//! without a reason. What explains a `return` is a call of `skipped`, of a function of the same test binary that calls it,
//! or of one that runs the test in a process of its own.

use super::{Token, root, sources, tokens};
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// What explains a `return` by itself: the skip, and the question whether this is the test's own process.
const EXPLAINS: [&str; 2] = ["skipped", "is_child"];
/// The one way, and its list.
const ALLOWED: [&str; 2] = ["tests/support/skip.rs", "tests/skipped"];

/// One function of a source.
struct Function {
    name: String,
    is_test: bool,
    body: Vec<Token>,
}

fn word(t: Option<&Token>) -> Option<&str> {
    match t {
        Some(Token::Word(w)) => Some(w),
        _ => None,
    }
}

fn is_mark(t: Option<&Token>, m: char) -> bool {
    t == Some(&Token::Mark(m))
}

/// The functions of a source, those inside of others too.
fn functions(tokens: &[Token]) -> Vec<Function> {
    let starts = (0..tokens.len()).filter(|i| word(tokens.get(*i)) == Some("fn"));
    starts.filter_map(|i| function(tokens, i)).collect()
}

/// The function whose `fn` stands at `at`; absent for a type, and for a declaration without a body.
fn function(tokens: &[Token], at: usize) -> Option<Function> {
    let name = word(tokens.get(at + 1))?.to_owned();
    let mut depth = 0;
    let open = (at..tokens.len()).find(|i| {
        match tokens[*i] {
            Token::Mark('(' | '[') => depth += 1,
            Token::Mark(')' | ']') => depth -= 1,
            _ => {}
        }
        depth == 0 && matches!(tokens[*i], Token::Mark('{' | ';'))
    })?;
    if is_mark(tokens.get(open), ';') {
        return None;
    }
    Some(Function { name, is_test: has_test_attribute(&tokens[..at]), body: block(tokens, open).to_vec() })
}

/// A block with its braces.
fn block(tokens: &[Token], open: usize) -> &[Token] {
    let mut depth = 0;
    for (i, t) in tokens.iter().enumerate().skip(open) {
        match t {
            Token::Mark('{') => depth += 1,
            Token::Mark('}') => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return &tokens[open..=i];
        }
    }
    &tokens[open..]
}

/// True where the attributes at the end of `before` have `test`, or `tokio::test`.
fn has_test_attribute(mut before: &[Token]) -> bool {
    loop {
        match before {
            [rest @ .., Token::Word(w)] if matches!(w.as_str(), "async" | "pub") => before = rest,
            [rest @ .., Token::Mark(']')] => {
                let mut depth = 1;
                let mut start = rest.len();
                while depth > 0 && start > 0 {
                    start -= 1;
                    match rest[start] {
                        Token::Mark(']') => depth += 1,
                        Token::Mark('[') => depth -= 1,
                        _ => {}
                    }
                }
                let attribute = &rest[start..];
                let name = attribute.iter().take_while(|t| !matches!(t, Token::Mark('(' | '=')));
                if name.last() == Some(&Token::Word("test".to_owned())) {
                    return true;
                }
                before = &rest[..start.saturating_sub(1)];
            }
            _ => return false,
        }
    }
}

/// The functions of a binary that explain a `return` of who calls them.
fn explaining(functions: &[&Function]) -> BTreeSet<String> {
    let mut names: BTreeSet<String> = EXPLAINS.map(str::to_owned).into();
    loop {
        let calls = |f: &&&Function| f.body.iter().any(|t| matches!(t, Token::Word(w) if names.contains(w)));
        let more: BTreeSet<String> =
            functions.iter().filter(|f| !f.is_test).filter(calls).map(|f| f.name.clone()).collect();
        let before = names.len();
        names.extend(more);
        if names.len() == before {
            return names;
        }
    }
}

/// The returns of a test that nothing explains, as so many words around each.
fn unexplained(test: &Function, explains: &BTreeSet<String>) -> Vec<String> {
    let body = &test.body;
    let returns = (0..body.len()).filter(|i| word(body.get(*i)) == Some("return"));
    let wrong = returns.filter(|at| {
        let opens = enclosing(body, *at);
        let of_closure = |open: &&usize| {
            let before = open.checked_sub(1).and_then(|i| body.get(i));
            is_mark(before, '|')
                || matches!(word(before), Some("async" | "move"))
                || is_function(body, **open)
        };
        // The first one is the test's own body.
        if opens.iter().skip(1).any(|o| of_closure(&o)) {
            return false;
        }
        let inner = *opens.last().expect("a return is in a body");
        let header = body[..inner].iter().rposition(|t| matches!(t, Token::Mark(';' | '{' | '}')));
        let around = &body[header.unwrap_or(0)..inner + block(body, inner).len()];
        !around.iter().any(|t| matches!(t, Token::Word(w) if explains.contains(w)))
    });
    wrong.map(|at| format!("{:?}", &body[at.saturating_sub(12)..(at + 4).min(body.len())])).collect()
}

/// Where the blocks around a token open, the outermost first.
fn enclosing(body: &[Token], at: usize) -> Vec<usize> {
    let mut opens = Vec::new();
    for (i, t) in body[..at].iter().enumerate() {
        match t {
            Token::Mark('{') => opens.push(i),
            Token::Mark('}') => drop(opens.pop()),
            _ => {}
        }
    }
    opens
}

/// True where a block is the body of a function, or of an `impl` with functions, inside of another one.
fn is_function(body: &[Token], open: usize) -> bool {
    let header = body[..open].iter().rposition(|t| matches!(t, Token::Mark(';' | '{' | '}')));
    body[header.map_or(0, |h| h + 1)..open]
        .iter()
        .any(|t| matches!(t, Token::Word(w) if w == "fn" || w == "impl"))
}

/// The lines that print a word about skipping, and attributes that ignore a test without a reason.
fn spoken(source: &str) -> Vec<String> {
    let prints = ["print!(", "println!(", "eprint!(", "eprintln!(", "stderr()", "stdout()"];
    let mut wrong = Vec::new();
    for (n, line) in source.lines().enumerate() {
        let code = line.trim_start();
        // The text may follow the macro on a line of its own.
        let text: String = source.lines().skip(n).take(2).collect();
        let is_print = prints.iter().any(|p| code.contains(p));
        if (is_print && text.to_lowercase().contains("skip")) || code.starts_with("#[ignore]") {
            wrong.push(format!("line {}: {code}", n + 1));
        }
    }
    wrong
}

/// The test binary that a source belongs to.
fn binary(path: &str) -> String {
    let of = |folder: &str| {
        let rest = path.strip_prefix(folder)?;
        Some(format!("{folder}{}", rest.split(['/', '.']).next()?))
    };
    if path.starts_with("src/") {
        return "src".to_owned();
    }
    let folders = ["tests/", "plugin/tests/", "plugin/preload/tests/", "plugin/wire/tests/"];
    folders.iter().find_map(|f| of(f)).unwrap_or_else(|| path.to_owned())
}

fn relative(path: &Path) -> String {
    path.strip_prefix(root()).unwrap().display().to_string()
}

#[test]
fn a_test_skips_by_the_one_way_that_is_counted() {
    let folders = ["src", "tests", "plugin"].map(|dir| root().join(dir));
    let mut binaries: BTreeMap<String, Vec<(String, Vec<Function>)>> = BTreeMap::new();
    let mut wrong = Vec::new();
    for file in folders.iter().flat_map(|dir| sources(dir)) {
        let path = relative(&file);
        if ALLOWED.iter().any(|a| path.starts_with(a)) || path.contains("benches/") {
            continue;
        }
        let source = fs::read_to_string(&file).unwrap();
        // What the program itself prints is no test's.
        let is_program = path.starts_with("src/") || path.contains("/src/");
        let tests = if is_program && !path.contains("tests") {
            source.split_once("#[cfg(test)]\n").map_or(String::new(), |(_, tests)| tests.to_owned())
        } else {
            source.clone()
        };
        if !path.starts_with("tests/architecture") {
            wrong.extend(spoken(&tests).into_iter().map(|w| format!("{path}: {w}")));
        }
        binaries.entry(binary(&path)).or_default().push((path, functions(&tokens(&tests))));
    }
    let support = ["tests/support", "plugin/tests/support"];
    let shared: Vec<&Function> =
        support.iter().filter_map(|s| binaries.get(*s)).flatten().flat_map(|(_, f)| f).collect();
    let mut count = 0;
    for files in binaries.values() {
        let own = files.iter().flat_map(|(_, f)| f);
        let explains = explaining(&shared.iter().copied().chain(own).collect::<Vec<_>>());
        for (path, functions) in files {
            for test in functions.iter().filter(|f| f.is_test) {
                count += 1;
                let returns = unexplained(test, &explains);
                wrong.extend(returns.into_iter().map(|r| format!("{path}: {}: {r}", test.name)));
            }
        }
    }
    assert!(count > 500, "{count} tests are not all");
    assert!(wrong.is_empty(), "use skipped() of tests/support/skip.rs:\n{}", wrong.join("\n"));
}

#[test]
fn planted_ways_to_skip_are_found_and_the_one_way_is_not() {
    let wrong = |source: &str| {
        let all = functions(&tokens(source));
        let explains = explaining(&all.iter().collect::<Vec<_>>());
        all.iter().filter(|f| f.is_test).map(|f| unexplained(f, &explains).len()).sum::<usize>()
    };
    let helper = "fn has() -> Option<u8> { if x { skipped(\"t\", \"root\"); return None; } Some(1) }";
    for silent in [
        "#[test] fn t() { if !root() { return; } work() }",
        "#[tokio::test] async fn t() { let Some(x) = tool() else { return }; }",
        "#[test] #[allow(dead_code)] fn t() { if a { b(); return } }",
        "#[test] fn t() { if skipped_not { return; } }",
    ] {
        assert_eq!(wrong(&format!("{helper} {silent}")), 1, "{silent}");
    }
    for loud in [
        "#[test] fn t() { if !root() { return skipped(\"t\", \"root\"); } }",
        "#[test] fn t() { if !root() { skipped(\"t\", \"root\"); return; } }",
        "#[test] fn t() { let Some(x) = has() else { return }; }",
        "#[test] fn t() { if is_child(\"t\") { work(); return; } }",
        "#[test] fn t() { let f = |x| { if x { return; } }; spawn(async move { return; }); fn g() { return; } }",
        "fn t() { if !root() { return; } }",
    ] {
        assert_eq!(wrong(&format!("{helper} {loud}")), 0, "{loud}");
    }
    assert_eq!(spoken("    eprintln!(\"Skipped: no root\");").len(), 1);
    assert_eq!(spoken("eprintln!(\n    \"skipped\",\n);").len(), 1);
    assert_eq!(spoken("#[ignore]\nfn t() {}").len(), 1);
    assert!(spoken("#[ignore = \"needs GPUs\"]\nprintln!(\"{x}\");").is_empty());
}
