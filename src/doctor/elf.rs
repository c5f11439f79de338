//! Facts of shared libraries that are read from their files, without loading them.

use object::read::ReadCache;
use object::{Object, ObjectSection, ObjectSymbol};
use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;

/// More than this of read-only data is not searched, in bytes. libnccl 2.32.3 has 3 MB.
const DATA_MAX: u64 = 256 << 20;
/// The longest name of a variable.
const NAME_MAX: usize = 64;

/// The facts that a file of libnccl holds about itself.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Nccl {
    /// The version, `2.28.9`.
    pub(super) version: Option<String>,
    /// The CUDA release that it was built for, `12.9`.
    pub(super) cuda: Option<String>,
    /// The names of variables that it reads.
    pub(super) variables: BTreeSet<String>,
}

/// Reads what a libnccl says of itself.
///
/// # Errors
/// Why the file cannot be read.
pub(super) fn nccl(path: &Path) -> Result<Nccl, String> {
    let data = read_only_data(path)?;
    let mut found = Nccl::default();
    for text in data.split(|b| *b == 0) {
        let Ok(text) = std::str::from_utf8(text) else { continue };
        if is_name(text) {
            found.variables.insert(text.to_owned());
        } else if let Some(rest) = text.trim_end().strip_prefix("NCCL version ")
            && let Some((version, cuda)) = rest.split_once("+cuda")
            && version.bytes().all(|b| b.is_ascii_digit() || b == b'.')
        {
            found.version = Some(version.to_owned());
            found.cuda = Some(cuda.to_owned());
        }
    }
    Ok(found)
}

/// The names of variables of libtorch that hold `NCCL`.
///
/// # Errors
/// Why the file cannot be read.
pub(super) fn torch_variables(path: &Path) -> Result<BTreeSet<String>, String> {
    let data = read_only_data(path)?;
    let names = data.split(|b| *b == 0).filter_map(|t| std::str::from_utf8(t).ok());
    Ok(names.filter(|t| t.starts_with("TORCH_NCCL_") && is_upper(t)).map(str::to_owned).collect())
}

/// The names of functions that a library exports and that begin with `prefix`.
///
/// # Errors
/// Why the file cannot be read.
pub(super) fn exports(path: &Path, prefix: &str) -> Result<Vec<String>, String> {
    let why = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
    let cache = ReadCache::new(File::open(path).map_err(|e| why(&e))?);
    let file = object::File::parse(&cache).map_err(|e| why(&e))?;
    let mut names: Vec<String> = file
        .dynamic_symbols()
        .filter(|s| !s.is_undefined())
        .filter_map(|s| Some(s.name().ok()?.to_owned()))
        .filter(|n| n.starts_with(prefix))
        .collect();
    names.sort();
    Ok(names)
}

fn is_upper(text: &str) -> bool {
    text.len() <= NAME_MAX && text.bytes().all(|b| b.is_ascii_uppercase() || b.is_ascii_digit() || b == b'_')
}

fn is_name(text: &str) -> bool {
    text.strip_prefix("NCCL_").is_some_and(|rest| !rest.is_empty()) && is_upper(text)
}

/// The section of constant texts. Only this part of a file of 400 MB is read.
fn read_only_data(path: &Path) -> Result<Vec<u8>, String> {
    let why = |e: &dyn std::fmt::Display| format!("{}: {e}", path.display());
    let cache = ReadCache::new(File::open(path).map_err(|e| why(&e))?);
    let file = object::File::parse(&cache).map_err(|e| why(&e))?;
    let section = file.section_by_name(".rodata").ok_or_else(|| why(&"has no section .rodata"))?;
    if section.size() > DATA_MAX {
        return Err(why(&format!(
            "its read-only data are {} bytes long, more than {DATA_MAX}",
            section.size()
        )));
    }
    section.data().map(<[u8]>::to_vec).map_err(|e| why(&e))
}
