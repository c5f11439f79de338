//! The edges between the modules, as `src/ARCHITECTURE.md` draws them, held against the sources themselves.

mod skips;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Who may use whom, inside the program. `*` is everybody but main.
const EDGES: &[(&str, &[&str])] = &[
    ("model", &[]),
    ("replay", &[]),
    ("bundle", &[]),
    ("bench", &[]),
    ("explain", &[]),
    ("ras", &["model"]),
    ("secret", &[]),
    ("tune", &["bench"]),
    ("advise", &["model"]),
    ("ingest", &["model"]),
    ("import", &["model"]),
    ("join", &["model"]),
    ("detect", &["model", "join"]),
    ("steps", &["model"]),
    ("columns", &[]),
    ("timeline", &["model", "join", "columns"]),
    ("report", &["model", "timeline"]),
    ("diff", &["model", "bench", "timeline"]),
    ("view", &["model"]),
    ("export", &["model", "join", "detect", "secret"]),
    ("cluster", &["model", "join", "secret"]),
    ("recording", &["model", "cluster", "columns"]),
    ("config", &["ingest", "detect", "export", "cluster", "secret"]),
    (
        "runtime",
        &["model", "ingest", "join", "detect", "steps", "export", "cluster", "recording", "config", "secret"],
    ),
    ("doctor", &["model", "ingest", "config", "runtime", "bench", "replay", "bundle", "ras"]),
    ("cli", &["secret"]),
    ("cmd", &["*"]),
    ("main", &["cli", "cmd", "secret"]),
];

/// Folders whose modules use each other in no circle. What a module takes from its parent counts for the module that the
/// parent has it from.
const WITHOUT_CIRCLES: &[&str] = &[
    "plugin/src",
    "plugin/src/calls",
    "plugin/src/governor",
    "plugin/src/record",
    "plugin/src/runtime",
    "plugin/src/tuner",
    "src",
    "src/cluster",
    "src/detect",
    "src/doctor",
    "src/export",
    "src/join",
    "src/join/communicator",
    "src/join/hardware",
    "src/join/wait_graph/cache",
    "src/model",
    "src/tune",
];

/// Modules that may do nothing but think: no I/O, no clock, no thread.
const PURE: &[&str] = &["model", "join", "detect", "steps"];
const IMPURE: &[&[&str]] = &[
    &["std", "fs"],
    &["std", "net"],
    &["std", "process"],
    &["std", "thread"],
    &["tokio"],
    &["rustix"],
    &["libc"],
    &["Instant", "now"],
    &["SystemTime"],
];

/// Foreign crates that belong to few.
const OWNED: &[(&str, &[&str])] = &[
    ("clap", &["cli", "cmd", "main"]),
    ("ringwatch_wire", &["ingest", "tune"]),
    ("nvml_wrapper", &["ingest"]),
    ("async_nats", &["cluster", "runtime"]),
    ("rmcp", &["cmd"]),
    ("nvml_wrapper_sys", &["ingest"]),
    ("tracing_subscriber", &["cmd"]),
];

const VAGUE: &[&str] = &["utils", "util", "common", "helpers", "helper", "manager"];

const TOP: &[&str] = &[
    "Cargo.toml",
    "Cargo.lock",
    "src",
    "plugin",
    "dashboards",
    "config",
    "tests",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
];

// Reading Rust: enough of it to find paths.

/// A piece of source that matters here.
#[derive(Debug, Clone, PartialEq)]
enum Token {
    Word(String),
    /// `::`
    Path,
    Mark(char),
}

/// Splits a source into words and marks. Comments, texts and characters are left out: what they name is used
/// by nobody.
fn tokens(source: &str) -> Vec<Token> {
    let c: Vec<char> = source.chars().collect();
    let at = |i: usize| c.get(i).copied().unwrap_or('\0');
    let mut out = Vec::new();
    let mut i = 0;
    while i < c.len() {
        match c[i] {
            '/' if at(i + 1) == '/' => {
                while i < c.len() && c[i] != '\n' {
                    i += 1;
                }
            }
            '/' if at(i + 1) == '*' => {
                let mut depth = 0;
                loop {
                    match (at(i), at(i + 1)) {
                        ('/', '*') => (depth, i) = (depth + 1, i + 2),
                        ('*', '/') => (depth, i) = (depth - 1, i + 2),
                        _ => i += 1,
                    }
                    if depth == 0 || i >= c.len() {
                        break;
                    }
                }
            }
            '"' => i = text_end(&c, i),
            'r' | 'b' | 'c' if prefix_of_text(&c, i).is_some() => {
                let (start, hashes) = prefix_of_text(&c, i).unwrap();
                i = if at(start - 1) == '#' || raw(&c, i) {
                    raw_end(&c, start, hashes)
                } else {
                    text_end(&c, start)
                };
            }
            '\'' if at(i + 1) == '\\' => {
                i += 3;
                while i < c.len() && c[i] != '\'' {
                    i += 1;
                }
                i += 1;
            }
            '\'' if at(i + 2) == '\'' => i += 3,
            // A lifetime.
            '\'' => i += 1,
            ':' if at(i + 1) == ':' => {
                out.push(Token::Path);
                i += 2;
            }
            x if x.is_alphanumeric() || x == '_' => {
                let start = i;
                while at(i).is_alphanumeric() || at(i) == '_' {
                    i += 1;
                }
                out.push(Token::Word(c[start..i].iter().collect()));
            }
            x => {
                if !x.is_whitespace() {
                    out.push(Token::Mark(x));
                }
                i += 1;
            }
        }
    }
    out
}

fn raw(c: &[char], i: usize) -> bool {
    c[i] == 'r' || c.get(i + 1) == Some(&'r')
}

/// Where the `"` of `r"`, `b"`, `br#"`, `c"` stands, and the number of `#` before it.
fn prefix_of_text(c: &[char], i: usize) -> Option<(usize, usize)> {
    if i > 0 && (c[i - 1].is_alphanumeric() || c[i - 1] == '_') {
        return None;
    }
    let mut k = i;
    while k < i + 2 && matches!(c.get(k), Some('r' | 'b' | 'c')) {
        k += 1;
    }
    let hashes = c[k..].iter().take_while(|x| **x == '#').count();
    (c.get(k + hashes) == Some(&'"')).then_some((k + hashes, hashes))
}

fn text_end(c: &[char], quote: usize) -> usize {
    let mut i = quote + 1;
    while i < c.len() && c[i] != '"' {
        i += if c[i] == '\\' { 2 } else { 1 };
    }
    i + 1
}

fn raw_end(c: &[char], quote: usize, hashes: usize) -> usize {
    let mut i = quote + 1;
    while i < c.len() {
        if c[i] == '"' && c[i + 1..].iter().take_while(|x| **x == '#').count() >= hashes {
            return i + 1 + hashes;
        }
        i += 1;
    }
    i
}

/// Leaves out the items behind `#[cfg(test)]`: tests may look where the program must not.
fn without_tests(tokens: &[Token]) -> Vec<Token> {
    let word = |t: Option<&Token>, w: &str| t == Some(&Token::Word(w.to_owned()));
    let mark = |t: Option<&Token>, m: char| t == Some(&Token::Mark(m));
    let mut out = Vec::new();
    let mut i = 0;
    while i < tokens.len() {
        let t = &tokens[i..];
        let test = mark(t.first(), '#')
            && mark(t.get(1), '[')
            && word(t.get(2), "cfg")
            && mark(t.get(3), '(')
            && word(t.get(4), "test")
            && mark(t.get(5), ')');
        if !test {
            out.push(tokens[i].clone());
            i += 1;
            continue;
        }
        // To the item's end: a `;`, or the `}` of its body.
        let mut depth = 0i32;
        i += 7;
        while i < tokens.len() {
            match tokens[i] {
                Token::Mark('{') => depth += 1,
                Token::Mark('}') => depth -= 1,
                _ => {}
            }
            let end = depth == 0 && matches!(tokens[i], Token::Mark(';' | '}'));
            i += 1;
            if end {
                break;
            }
        }
    }
    out
}

/// Every path that a source names, with the trees of `use` spread out.
fn paths(tokens: &[Token]) -> Vec<Vec<String>> {
    let mut out = Vec::new();
    let mut i = 0;
    while i < tokens.len() {
        if matches!(tokens[i], Token::Word(_)) || tokens[i] == Token::Path {
            i = path(tokens, i, &[], &mut out);
        } else {
            i += 1;
        }
    }
    out
}

/// Reads the path that begins at `i`, below a prefix; gives back where it ends.
fn path(tokens: &[Token], mut i: usize, prefix: &[String], out: &mut Vec<Vec<String>>) -> usize {
    let mut here = prefix.to_vec();
    loop {
        match tokens.get(i) {
            Some(Token::Path) => i += 1,
            Some(Token::Word(w)) => {
                here.push(w.clone());
                i += 1;
                if tokens.get(i) != Some(&Token::Path) {
                    out.push(here);
                    return i;
                }
            }
            // A tree, `a::{b, c::d}`; a brace that no `::` precedes begins a block.
            Some(Token::Mark('{')) if i > 0 && tokens[i - 1] == Token::Path => {
                i += 1;
                while let Some(t) = tokens.get(i) {
                    match t {
                        Token::Mark('}') => return i + 1,
                        Token::Word(_) | Token::Path => i = path(tokens, i, &here, out),
                        Token::Mark(_) => i += 1,
                    }
                }
                return i;
            }
            // A glob, generics, or the end.
            _ => {
                out.push(here);
                return i + usize::from(i < tokens.len());
            }
        }
    }
}

// The rules.

/// What a source does that its place forbids. `module` is its path below the crate, `[]` for the root.
fn violations(module: &[&str], source: &str) -> Vec<String> {
    let tokens = without_tests(&tokens(source));
    let top = module.first().copied().unwrap_or("lib");
    let mut wrong = BTreeSet::new();
    for pair in tokens.windows(2) {
        if let [Token::Word(m), Token::Word(name)] = pair
            && m == "mod"
            && VAGUE.contains(&name.as_str())
        {
            wrong.insert(format!("{top} has a module named {name}, which says nothing"));
        }
    }
    for p in paths(&tokens) {
        let p: Vec<&str> = p.iter().map(String::as_str).collect();
        if let Some(used) = used_module(module, &p)
            && used != top
            && EDGES.iter().any(|(m, _)| *m == used)
        {
            let allowed = EDGES.iter().find(|(m, _)| *m == top).map(|(_, a)| *a);
            let fine = match allowed {
                Some(["*"]) => used != "main",
                Some(a) => a.contains(&used),
                // lib.rs names every module and belongs to none.
                None => top == "lib",
            };
            if !fine {
                wrong.insert(format!("{top} uses {used}"));
            }
        }
        for (krate, owners) in OWNED {
            if p.contains(krate) && !owners.contains(&top) {
                wrong.insert(format!("{top} mentions {krate}"));
            }
        }
        for forbidden in IMPURE.iter().filter(|_| PURE.contains(&top)) {
            let head = ["std", "tokio", "rustix", "libc"].contains(&forbidden[0]);
            let named = if head {
                p.starts_with(forbidden)
            } else {
                p.windows(forbidden.len()).any(|w| w == *forbidden)
            };
            if named {
                wrong.insert(format!("{top} mentions {}", forbidden.join("::")));
            }
        }
    }
    if top != "lib" && !EDGES.iter().any(|(m, _)| *m == top) {
        wrong.insert(format!("{top} has no place in the table of edges"));
    }
    wrong.into_iter().collect()
}

/// A path from the crate's root, as a module names it; absent where it begins elsewhere.
fn absolute(module: &[&str], path: &[&str]) -> Option<Vec<String>> {
    let ups = path.iter().take_while(|p| **p == "super").count();
    let (from, rest) = match path.first().copied()? {
        "crate" => (&module[..0], &path[1..]),
        "self" => (module, &path[1..]),
        "super" => (&module[..module.len().checked_sub(ups)?], &path[ups..]),
        _ => return None,
    };
    Some(from.iter().chain(rest).map(|p| (*p).to_owned()).collect())
}

/// The paths that a source names, from the crate's root.
fn named(module: &[String], source: &str) -> Vec<Vec<String>> {
    let module: Vec<&str> = module.iter().map(String::as_str).collect();
    let of = |p: Vec<String>| absolute(&module, &p.iter().map(String::as_str).collect::<Vec<_>>());
    paths(&without_tests(&tokens(source))).into_iter().filter_map(of).collect()
}

/// The names that a module takes from its children, with the child of each.
fn taken_from(children: &BTreeSet<String>, source: &str) -> BTreeMap<String, String> {
    let of = |mut p: Vec<String>| {
        if p.first().is_some_and(|p| p == "self") {
            p.remove(0);
        }
        let child = p.first().filter(|c| p.len() > 1 && children.contains(*c))?.clone();
        Some((p.pop()?, child))
    };
    paths(&without_tests(&tokens(source))).into_iter().filter_map(of).collect()
}

/// Which of its siblings each module of a folder uses.
fn siblings(folder: &str, crate_root: &str) -> BTreeMap<String, BTreeSet<String>> {
    let dir = root().join(folder);
    let parent = module_in(crate_root, &dir.with_extension("rs"));
    let is_test = |f: &Path| f.components().any(|c| c.as_os_str() == "tests.rs" || c.as_os_str() == "tests");
    let files: Vec<(Vec<String>, String)> = sources(&dir)
        .into_iter()
        .filter(|f| !is_test(f.strip_prefix(&dir).unwrap()))
        .map(|f| (module_in(crate_root, &f), fs::read_to_string(&f).unwrap()))
        .collect();
    let children: BTreeSet<String> =
        files.iter().filter_map(|(module, _)| module.get(parent.len()).cloned()).collect();
    let own = [dir.join("mod.rs"), dir.join("lib.rs"), dir.with_extension("rs")];
    let own = own.iter().find_map(|f| fs::read_to_string(f).ok()).unwrap();
    let taken = taken_from(&children, &own);
    let mut uses: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (module, source) in &files {
        let Some(child) = module.get(parent.len()) else { continue };
        let of = uses.entry(child.clone()).or_default();
        for path in named(module, source).iter().filter_map(|p| p.strip_prefix(parent.as_slice())) {
            let Some(used) = path.first() else { continue };
            let used = children.get(used).or_else(|| taken.get(used));
            of.extend(used.filter(|u| *u != child).cloned());
        }
    }
    uses
}

/// A module that is in a circle, with what it uses of it; none where there is no circle.
fn circle(uses: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let mut left = uses.clone();
    loop {
        let done: BTreeSet<String> =
            left.iter().filter(|(_, u)| u.is_empty()).map(|(m, _)| m.clone()).collect();
        if done.is_empty() {
            return left.into_iter().map(|(m, u)| format!("{m} uses {u:?}")).collect();
        }
        left.retain(|m, _| !done.contains(m));
        left.values_mut().for_each(|u| u.retain(|m| !done.contains(m)));
    }
}

/// The top module that a path leads to, when it begins at the crate's root.
fn used_module<'a>(module: &[&str], path: &[&'a str]) -> Option<&'a str> {
    match path.first().copied()? {
        "crate" => path.get(1).copied(),
        // The binary sees the library under its name.
        "ringwatch" if module == ["main"] => path.get(1).copied(),
        "super" => {
            let ups = path.iter().take_while(|p| **p == "super").count();
            (ups >= module.len()).then(|| path.get(ups).copied()).flatten()
        }
        _ => None,
    }
}

// The sources.

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn sources(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|e| e == "rs") {
            found.push(path);
        }
    }
    found.sort();
    found
}

/// `src/view/widgets/help.rs` as `[view, widgets, help]`.
fn module_of(file: &Path) -> Vec<String> {
    module_in("src", file)
}

/// The same below the folder of another crate's sources.
fn module_in(crate_root: &str, file: &Path) -> Vec<String> {
    let relative = file.with_extension("");
    let Ok(relative) = relative.strip_prefix(root().join(crate_root)) else { return Vec::new() };
    let mut parts: Vec<String> =
        relative.components().map(|c| c.as_os_str().to_string_lossy().into_owned()).collect();
    if parts.last().is_some_and(|p| p == "mod" || p == "lib") {
        parts.pop();
    }
    parts
}

#[test]
fn modules_use_only_what_they_may() {
    let mut wrong = Vec::new();
    let mut seen = BTreeSet::new();
    for file in sources(&root().join("src")) {
        let module = module_of(&file);
        seen.extend(module.first().cloned());
        let module: Vec<&str> = module.iter().map(String::as_str).collect();
        let source = fs::read_to_string(&file).unwrap();
        let name = file.strip_prefix(root()).unwrap().display().to_string();
        wrong.extend(violations(&module, &source).into_iter().map(|w| format!("{name}: {w}")));
    }
    assert!(wrong.is_empty(), "see src/ARCHITECTURE.md for the edges:\n{}", wrong.join("\n"));
    // A table that fits no module any more would hold nothing.
    let known: BTreeSet<String> = EDGES.iter().map(|(m, _)| (*m).to_owned()).collect();
    assert_eq!(seen, known, "modules in src and in the table");
}

/// The modules that a crate's root declares, with the layer of each: an empty line ends a layer.
fn layers(source: &str) -> BTreeMap<String, usize> {
    let mut of = BTreeMap::new();
    let mut layer = 0;
    for line in source.lines() {
        let declared = line.strip_prefix("pub ").unwrap_or(line).strip_prefix("mod ");
        match declared.and_then(|d| d.strip_suffix(';')) {
            Some(module) => drop(of.insert(module.to_owned(), layer)),
            None if line.is_empty() => layer += 1,
            None => {}
        }
    }
    of
}

#[test]
fn modules_of_the_plugin_use_those_of_lower_layers_alone() {
    let layers = layers(&fs::read_to_string(root().join("plugin/src/lib.rs")).unwrap());
    let uses = siblings("plugin/src", "plugin/src");
    assert_eq!(uses.keys().collect::<Vec<_>>(), layers.keys().collect::<Vec<_>>(), "modules and the list");
    for (module, used) in &uses {
        let above: Vec<&String> = used.iter().filter(|u| layers[*u] >= layers[module]).collect();
        assert!(above.is_empty(), "{module} uses {above:?}, which are not below it in plugin/src/lib.rs");
    }
}

#[test]
fn layers_end_with_an_empty_line() {
    let of = layers("//! Text.\n\nmod a;\npub mod b;\n\n// Text.\nmod c;\n\nfn f() {}\n");
    assert!(of.len() == 3 && of["a"] == of["b"] && of["b"] < of["c"], "{of:?}");
}

#[test]
fn modules_of_a_folder_use_each_other_in_no_circle() {
    for folder in WITHOUT_CIRCLES {
        let crate_root = if folder.starts_with("plugin") { "plugin/src" } else { "src" };
        let circle = circle(&siblings(folder, crate_root));
        assert!(
            circle.is_empty(),
            "{folder}: these modules are in a circle, or above one:\n{}",
            circle.join("\n")
        );
    }
}

#[test]
fn a_circle_is_seen() {
    let set = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<BTreeSet<String>>();
    let uses = |of: &[(&str, &[&str])]| of.iter().map(|(m, u)| ((*m).to_owned(), set(u))).collect();
    assert!(circle(&uses(&[("a", &["b", "c"]), ("b", &["c"]), ("c", &[])])).is_empty());
    assert_eq!(circle(&uses(&[("a", &["b"]), ("b", &["c"]), ("c", &["b"])])).len(), 3);
    // A name that the parent has from a sibling is a use of that sibling.
    let taken = taken_from(&set(&["clock"]), "mod clock; pub use clock::{Map, self as c}; use std::fmt;");
    assert_eq!(taken.get("Map").map(String::as_str), Some("clock"));
    let module = ["join".to_owned(), "late".to_owned()];
    assert_eq!(named(&module, "use super::clock::Map; // crate::no"), [["join", "clock", "Map"]]);
}

#[test]
fn no_file_or_folder_has_a_name_that_says_nothing() {
    for folder in [
        "src",
        "plugin/src",
        "plugin/null/src",
        "plugin/preload/src",
        "plugin/shim/src",
        "plugin/wire/src",
        "tests",
    ] {
        for file in sources(&root().join(folder)) {
            let relative = file.strip_prefix(root()).unwrap().with_extension("");
            let vague =
                relative.components().any(|c| VAGUE.contains(&c.as_os_str().to_string_lossy().as_ref()));
            assert!(!vague, "{}", relative.display());
        }
    }
}

/// Normal dependencies of a package of the workspace: name and target.
fn dependencies(package: &str) -> BTreeSet<(String, Option<String>)> {
    let out = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--offline", "--format-version", "1"])
        .current_dir(root())
        .output()
        .unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let packages = metadata["packages"].as_array().unwrap();
    let found = packages.iter().find(|p| p["name"] == package).unwrap();
    found["dependencies"]
        .as_array()
        .unwrap()
        .iter()
        .filter(|d| d["kind"].is_null() || d["kind"] == "build")
        .map(|d| (d["name"].as_str().unwrap().to_owned(), d["target"].as_str().map(str::to_owned)))
        .collect()
}

#[test]
fn what_enters_another_process_depends_on_next_to_nothing() {
    let own = |name: &str| (name.to_owned(), None);
    assert_eq!(dependencies("ringwatch-plugin"), BTreeSet::from([own("ringwatch-wire"), own("libc")]));
    assert_eq!(dependencies("ringwatch-null"), BTreeSet::from([own("libc")]));
    assert_eq!(dependencies("ringwatch-shim"), BTreeSet::from([own("libc")]));
    assert_eq!(dependencies("ringwatch-preload"), BTreeSet::from([own("ringwatch-plugin"), own("libc")]));
    let loom = ("loom".to_owned(), Some("cfg(loom)".to_owned()));
    assert_eq!(dependencies("ringwatch-wire"), BTreeSet::from([loom]));
}

#[test]
fn the_top_of_the_repository_holds_only_what_belongs_there() {
    let listed = Command::new("git")
        .args(["ls-files", "--cached", "--others", "--exclude-standard"])
        .current_dir(root())
        .output();
    let Some(listed) = listed.ok().filter(|o| o.status.success()) else {
        crate::support::skip::skipped(
            "the_top_of_the_repository_holds_only_what_belongs_there",
            "git, and a checkout of it",
        );
        return;
    };
    let listed = String::from_utf8(listed.stdout).unwrap();
    let top: BTreeSet<&str> = listed.lines().filter_map(|l| l.split('/').next()).collect();
    let strange: Vec<_> = top.iter().filter(|n| !n.starts_with('.') && !TOP.contains(n)).collect();
    assert!(strange.is_empty(), "{strange:?} at the top of the repository");
}

// The checker, on planted violations.

/// The names in backticks in the last column of the tables that have a column `test`.
fn tests_named_in(page: &str) -> BTreeSet<String> {
    let rows = page
        .lines()
        .filter(|l| l.starts_with('|'))
        .filter_map(|l| l.trim_end_matches('|').rsplit('|').next());
    let names =
        rows.flat_map(|cell| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<Vec<_>>());
    names.collect()
}

#[test]
fn every_test_that_the_page_on_security_names_is_there() {
    let page = fs::read_to_string(root().join("src/SECURITY.md")).unwrap();
    let named = tests_named_in(&page);
    assert!(named.len() > 40, "{named:?}");
    let places = ["src", "tests", "plugin"].map(|dir| root().join(dir));
    let all: Vec<String> =
        places.iter().flat_map(|dir| sources(dir)).map(|file| fs::read_to_string(file).unwrap()).collect();
    let is_there = |name: &String| all.iter().any(|text| text.contains(&format!("fn {name}(")));
    let missing: Vec<_> = named.iter().filter(|name| !is_there(name)).collect();
    assert!(missing.is_empty(), "src/SECURITY.md names tests that are not there: {missing:?}");
    assert_eq!(tests_named_in("| a | b | `x`, `y` |\n`z`\n"), ["x", "y"].map(str::to_owned).into());
}

#[test]
fn a_planted_edge_is_found_however_it_is_written() {
    for source in [
        "use crate::ingest::Segments;",
        "use crate::{model::Rank, ingest::{Place, Segments}};",
        "use crate::{\n    model::{Rank, CommId},\n    ingest,\n};",
        "fn f() -> crate::ingest::Place { todo!() }",
        "fn f(x: Option<crate::ingest::Place>) {}",
        "pub(crate) use super::super::ingest as i;",
        "mod x { use crate::ingest::*; }",
        "use crate::ingest::{self};",
        "#[cfg(test)] mod tests { fn t() {} } use crate::ingest;",
        "const S: &str = \"\\\"\"; use crate::ingest;",
        "const C: char = '\"'; use crate::ingest; const D: char = '\"';",
        "const R: &str = r#\"a\"b\"#; use crate::ingest;",
        "fn f<'a>(x: &'a str) { crate::ingest::now_ns(); }",
    ] {
        assert_eq!(violations(&["join", "stats"], source), ["join uses ingest"], "{source}");
    }
    assert_eq!(violations(&["cli"], "use crate::model::Rank;"), ["cli uses model"]);
    assert_eq!(violations(&["main"], "use ringwatch::{cli::Cli, ingest};"), ["main uses ingest"]);
    assert_eq!(
        violations(&["view", "widgets", "help"], "use super::super::super::join::Join;"),
        ["view uses join"]
    );
    assert_eq!(violations(&["gadget"], ""), ["gadget has no place in the table of edges"]);
}

#[test]
fn what_is_allowed_or_only_spoken_of_is_not_found() {
    for source in [
        "use crate::model::{Rank, CommId}; use super::Sample; use crate::join::Track;",
        "// use crate::ingest::Segments;",
        "/* use crate::ingest; /* nested */ use crate::view; */",
        "/// See [`crate::ingest`].\nfn f() {}",
        "const S: &str = \"crate::ingest::x\";",
        "const S: &str = r#\"crate::ingest\"#;",
        "#[cfg(test)]\nmod tests { use crate::ingest::Segments; use std::fs; }",
        "#[cfg(test)]\nuse crate::ingest::Segments;",
        "fn f() { let fs = 1; let clap = fs; }",
    ] {
        let spoken: Vec<String> = violations(&["join", "stats"], source)
            .into_iter()
            // A local variable of that name is a mention; only the module's edge is asked here.
            .filter(|v| !v.ends_with("clap"))
            .collect();
        assert_eq!(spoken, Vec::<String>::new(), "{source}");
    }
    assert_eq!(
        violations(&["cmd", "top"], "use crate::{view, runtime::Monitor, bundle};"),
        Vec::<String>::new()
    );
    assert_eq!(violations(&[], "pub mod model; pub mod cmd;"), Vec::<String>::new());
}

#[test]
fn a_planted_impurity_is_found() {
    for (source, what) in [
        ("use std::fs;", "std::fs"),
        ("use std::{collections::BTreeMap, fs::File};", "std::fs"),
        ("fn f() { std::thread::sleep(d) }", "std::thread"),
        ("use std::time::Instant; fn f() { Instant::now(); }", "Instant::now"),
        ("fn f() { std::time::Instant::now(); }", "Instant::now"),
        ("use std::time::{Duration, SystemTime};", "SystemTime"),
        ("use tokio::sync::mpsc;", "tokio"),
        ("use rustix::time::clock_gettime;", "rustix"),
        ("fn f() { unsafe { libc::getpid() }; }", "libc"),
    ] {
        for module in PURE {
            assert_eq!(violations(&[module], source), [format!("{module} mentions {what}")], "{source}");
        }
        assert_eq!(violations(&["runtime"], source), Vec::<String>::new(), "{source}");
    }
}

#[test]
fn a_planted_mention_of_anothers_crate_or_a_vague_module_is_found() {
    assert_eq!(violations(&["view"], "use clap::Parser;"), ["view mentions clap"]);
    assert_eq!(violations(&["model"], "#[derive(clap::ValueEnum)] enum E {}"), ["model mentions clap"]);
    assert_eq!(violations(&["cmd", "top"], "use clap::Parser;"), Vec::<String>::new());
    assert_eq!(violations(&["join"], "use ringwatch_wire::codes;"), ["join mentions ringwatch_wire"]);
    assert_eq!(violations(&["ingest", "tail"], "use ringwatch_wire::codes;"), Vec::<String>::new());
    assert_eq!(
        violations(&["runtime"], "mod utils;"),
        ["runtime has a module named utils, which says nothing"]
    );
}
