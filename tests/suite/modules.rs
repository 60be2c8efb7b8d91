//! The modules of each crate form a tree of imports: no cycle at any level of folders, and one order in the store.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// A module, as the names from the root of its crate.
type ModulePath = Vec<String>;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The modules of a crate, and for each the modules that its code names. Test code is left out.
struct Imports {
    modules: BTreeSet<ModulePath>,
    by_module: BTreeMap<ModulePath, BTreeSet<ModulePath>>,
}

impl Imports {
    fn read(package: &str) -> Self {
        let source = root().join(package).join("src");
        let mut files = BTreeMap::new();
        let mut folders = vec![source.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.extension().is_some_and(|extension| extension == "rs") {
                    let module = path.strip_prefix(&source).unwrap().with_extension("");
                    let mut module: ModulePath =
                        module.iter().map(|name| name.to_str().unwrap().to_owned()).collect();
                    if matches!(module.last().map(String::as_str), Some("lib" | "main")) {
                        module.pop();
                    }
                    let code = without_tests(&fs::read_to_string(path).unwrap());
                    files.entry(module).or_insert_with(String::new).push_str(&code);
                }
            }
        }
        // A module that product code does not declare is a test, or a program of its own.
        let declares = |parent: &[String], name: &str| {
            files.get(parent).is_some_and(|code| code.contains(&format!("mod {name};")))
        };
        let is_product = |module: &ModulePath| {
            (0..module.len()).all(|len| declares(&module[..len], &module[len]))
        };
        let product: BTreeSet<_> = files.keys().filter(|it| is_product(it)).cloned().collect();
        files.retain(|module, _| product.contains(module));
        let modules: BTreeSet<ModulePath> = files.keys().cloned().collect();
        let exported = exports(&files[&Vec::new()]);
        let by_module = files.iter().map(|(module, code)| {
            let named = paths(code).into_iter().filter_map(|path| {
                let path = resolve(module, &path)?;
                let path = match path.first().and_then(|name| exported.get(name)) {
                    Some(path) if !modules.contains(&path[..1]) => path.clone(),
                    _ => path,
                };
                (0..=path.len())
                    .rev()
                    .map(|len| path[..len].to_vec())
                    .find(|it| modules.contains(it))
            });
            (module.clone(), named.collect())
        });
        Self { by_module: by_module.collect(), modules: modules.clone() }
    }

    /// The edges between the modules directly below `folder`.
    fn edges(&self, folder: &[String]) -> BTreeSet<(String, String)> {
        let child = |module: &ModulePath| {
            let is_below = module.len() > folder.len() && module.starts_with(folder);
            is_below.then(|| module[folder.len()].clone())
        };
        let pairs = self.by_module.iter().flat_map(|(module, named)| {
            let from = child(module);
            named.iter().filter_map(move |named| Some((from.clone()?, child(named)?)))
        });
        pairs.filter(|(from, to)| from != to).collect()
    }
}

/// Removes comments, strings and items under `#[cfg(test)]`.
fn without_tests(code: &str) -> String {
    let mut kept = String::new();
    let mut lines = code.lines().map(|line| line.split("//").next().unwrap());
    while let Some(line) = lines.next() {
        if !line.trim_start().starts_with("#[cfg(test)]") && !line.contains("#[cfg(all(test") {
            kept.push_str(line);
            kept.push('\n');
            continue;
        }
        let (mut depth, mut has_body) = (0, false);
        for line in lines.by_ref() {
            depth += line.matches('{').count();
            let closed = line.matches('}').count();
            has_body |= line.contains('{');
            depth = depth.saturating_sub(closed);
            let is_end = if has_body { depth == 0 } else { line.trim_end().ends_with(';') };
            if is_end {
                break;
            }
        }
    }
    kept
}

/// The paths that begin with `crate`, `self` or `super`, one for each item of a group.
fn paths(code: &str) -> Vec<Vec<String>> {
    let mut found = Vec::new();
    for (at, _) in code.char_indices().filter(|(_, char)| matches!(char, 'c' | 's')) {
        let is_start = code[..at].chars().next_back().is_none_or(|it| !is_name(it) && it != ':');
        let starts = ["crate::", "self::", "super::"];
        if is_start && starts.iter().any(|start| code[at..].starts_with(start)) {
            expand(&code[at..], &mut Vec::new(), &mut found);
        }
    }
    found
}

fn is_name(char: char) -> bool {
    char.is_alphanumeric() || char == '_'
}

/// Adds the paths of a use tree to `found`. Returns what follows the tree.
fn expand<'a>(mut code: &'a str, path: &mut Vec<String>, found: &mut Vec<Vec<String>>) -> &'a str {
    let before = path.len();
    loop {
        code = code.trim_start();
        if let Some(mut group) = code.strip_prefix('{') {
            while let Some(rest) = group.trim_start().strip_prefix(|it| it != '}') {
                let item = &group.trim_start()[..group.trim_start().len() - rest.len()];
                group = match item {
                    "," => rest,
                    _ => expand(group.trim_start(), path, found),
                };
            }
            path.truncate(before);
            return group.trim_start().strip_prefix('}').unwrap_or_default();
        }
        let len = code.find(|it| !is_name(it)).unwrap_or(code.len());
        if len > 0 {
            path.push(code[..len].to_owned());
        }
        match code[len..].strip_prefix("::") {
            Some(rest) if len > 0 => code = rest,
            _ => {
                found.push(path.clone());
                path.truncate(before);
                // An item of a group may have another name, or be `*`.
                let rest = &code[len..];
                let end = rest.find([',', '}', ';', '\n']).unwrap_or(rest.len());
                return &rest[end..];
            }
        }
    }
}

/// The path from the root of the crate.
fn resolve(module: &[String], path: &[String]) -> Option<ModulePath> {
    let mut base = if path[0] == "crate" { Vec::new() } else { module.to_vec() };
    let mut rest = if path[0] == "super" { path } else { &path[1..] };
    while let Some(("super", others)) = rest.split_first().map(|(name, it)| (name.as_str(), it)) {
        base.pop()?;
        rest = others;
    }
    base.extend(rest.iter().cloned());
    Some(base)
}

/// The names that the root of a crate exports, with the paths that they come from.
fn exports(root: &str) -> BTreeMap<String, ModulePath> {
    let uses = root.split("pub use ").skip(1).map(|rest| rest.split(';').next().unwrap());
    let mut found = Vec::new();
    for tree in uses {
        expand(tree.trim_start_matches("self::"), &mut Vec::new(), &mut found);
    }
    found.into_iter().filter_map(|path| Some((path.last()?.clone(), path.clone()))).collect()
}

/// The nodes of a cycle, if there is one.
fn cycle(edges: &BTreeSet<(String, String)>) -> Option<BTreeSet<String>> {
    let mut left: BTreeSet<&(String, String)> = edges.iter().collect();
    loop {
        let targets: BTreeSet<&String> = left.iter().map(|(_, to)| to).collect();
        let sources: BTreeSet<&String> = left.iter().map(|(from, _)| from).collect();
        let before = left.len();
        // A module that nothing imports, or that imports nothing, is in no cycle.
        left.retain(|(from, to)| targets.contains(from) && sources.contains(to));
        if left.is_empty() {
            return None;
        }
        if left.len() == before {
            return Some(left.iter().flat_map(|(from, to)| [from.clone(), to.clone()]).collect());
        }
    }
}

#[test]
fn imports_of_each_crate_form_a_tree() {
    for package in ["format", "store", "gpu", "cli", "python", "xtask"] {
        let imports = Imports::read(package);
        assert!(imports.modules.len() > 5, "{package}");
        let folders: BTreeSet<&[String]> = imports
            .modules
            .iter()
            .flat_map(|module| (0..module.len()).map(|len| &module[..len]))
            .collect();
        for folder in folders {
            let found = cycle(&imports.edges(folder));
            assert_eq!(found, None, "{package}: import cycle below `crate::{}`", folder.join("::"));
        }
    }
}

/// The order that ARCHITECTURE.md states.
#[test]
fn folders_of_store_import_only_from_folders_below() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let (_, section) = text.split_once("## Folders of the store").unwrap();
    let list = section.split("```").nth(1).unwrap().lines().skip(1).filter(|line| !line.is_empty());
    let mut level = BTreeMap::new();
    for (number, line) in list.enumerate() {
        // The last line has several folders, between which there may be no imports in both directions.
        let (names, rest) = line.split_at(line.find("  ").unwrap_or(line.len()));
        let names = names.split(' ').filter(|name| !name.is_empty());
        level.extend(names.map(|name| (name.to_owned(), (number, rest.is_empty()))));
    }
    let imports = Imports::read("store");
    let folders: BTreeSet<&String> = imports.modules.iter().filter_map(|it| it.first()).collect();
    assert_eq!(folders, level.keys().collect());
    for (from, to) in imports.edges(&[]) {
        let ((above, _), (below, is_shared)) = (level[&from], level[&to]);
        let is_downward = above < below || above == below && is_shared;
        assert!(is_downward, "`{from}` imports from `{to}`, which is above it in ARCHITECTURE.md");
    }
}

#[test]
fn cycles_and_paths_are_found() {
    let code = "use crate::a::{B, c::{D, self}, e as f};\nfn g() { super::h::i(); xcrate::j(); }\n\
                #[cfg(test)]\nmod tests {\n    use crate::z::Z;\n}\nuse self::k::*;\n";
    let found: BTreeSet<String> =
        paths(&without_tests(code)).iter().map(|path| path.join("::")).collect();
    let expected = [
        "crate::a::B",
        "crate::a::c::D",
        "crate::a::c::self",
        "crate::a::e",
        "super::h::i",
        "self::k",
    ];
    assert_eq!(found, expected.map(str::to_owned).into());
    let names = |names: &[&str]| -> Vec<String> { names.iter().map(|&it| it.to_owned()).collect() };
    assert_eq!(resolve(&names(&["m", "n"]), &names(&["super", "h"])), Some(names(&["m", "h"])));
    let edges = |pairs: &[(&str, &str)]| -> BTreeSet<(String, String)> {
        pairs.iter().map(|&(from, to)| (from.to_owned(), to.to_owned())).collect()
    };
    assert_eq!(cycle(&edges(&[("a", "b"), ("b", "c"), ("a", "c")])), None);
    let found = cycle(&edges(&[("x", "a"), ("a", "b"), ("b", "c"), ("c", "a"), ("c", "y")]));
    assert_eq!(found, Some(names(&["a", "b", "c"]).into_iter().collect()));
}
