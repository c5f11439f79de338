//! The variables that NCCL reads: from the environment, and from its configuration files.
//!
//! Which names a libnccl knows is read from the file that a job would load, so that no list here can be out of date. What a
//! value means is in tables below, for those variables that people get wrong.

use super::host::Host;
use super::libraries::{Libraries, packages};
use super::software::plugin_file;
use super::{Area, Check, Observation, elf};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

pub(super) const CHECKS: &[Check] = &[
    Check { id: "variable-names", area: Area::Variables, run: names },
    Check { id: "variable-values", area: Area::Variables, run: values },
    Check { id: "variable-effects", area: Area::Variables, run: effects },
];

/// Variables whose value names a library of its own, which reads variables too.
const PLUGINS: &[(&str, &str)] = &[
    ("NCCL_NET_PLUGIN", "net"),
    ("NCCL_TUNER_PLUGIN", "tuner"),
    ("NCCL_PROFILER_PLUGIN", "profiler"),
    ("NCCL_ENV_PLUGIN", "env"),
    ("NCCL_GIN_PLUGIN", "gin"),
];
/// Variables by which images of containers, modules and builds describe NCCL; these are no settings.
const DESCRIPTIONS: &[&str] = &[
    "NCCL_VERSION",
    "NCCL_HOME",
    "NCCL_ROOT",
    "NCCL_DIR",
    "NCCL_PATH",
    "NCCL_INCLUDE_DIR",
    "NCCL_INCLUDE_DIRS",
    "NCCL_LIB_DIR",
    "NCCL_LIBRARY",
    "NCCL_LIBRARIES",
];
/// A name that differs by no more letters is taken for a misspelling.
const MISSPELT_MAX: usize = 2;

/// A value, and where it was set.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Setting {
    value: String,
    /// `the environment`, or a file.
    origin: String,
}

/// All settings of NCCL's, as NCCL resolves them: the environment comes before the user's file, that before the system's.
#[derive(Debug, Default)]
struct NcclSettings {
    all: BTreeMap<String, Setting>,
    /// NcclSettings that another one of the same name hides, and files that cannot be read.
    notes: Vec<Observation>,
}

impl NcclSettings {
    fn read(host: &Host) -> Self {
        let mut s = NcclSettings::default();
        for (name, value) in &host.variables {
            if name.starts_with("NCCL_") || name.starts_with("TORCH_NCCL_") {
                let setting = Setting { value: value.clone(), origin: "the environment".to_owned() };
                s.all.insert(name.clone(), setting);
            }
        }
        let own = match host.variable("NCCL_CONF_FILE") {
            Some(file) => {
                if !Path::new(file).is_file() {
                    let seen = format!("NCCL_CONF_FILE names {file}, which cannot be read");
                    s.notes
                        .push(Observation::warn(seen, "name a file that every rank can read, or unset it"));
                }
                Some(PathBuf::from(file))
            }
            None => host.variable("HOME").map(|h| Path::new(h).join(".nccl.conf")),
        };
        for file in own.into_iter().chain([host.path("etc/nccl.conf")]) {
            s.add_file(&file);
        }
        s
    }

    fn add_file(&mut self, file: &Path) {
        let text = super::host::text(file).unwrap_or_default();
        for line in text.lines().map(str::trim).filter(|l| !l.starts_with('#')) {
            let Some((name, value)) = line.split_once('=') else { continue };
            let origin = file.display().to_string();
            let setting = Setting { value: value.trim().to_owned(), origin };
            match self.all.get(name.trim()) {
                Some(first) if first.value != setting.value => {
                    let seen = format!(
                        "{} is {} in {}, and {} in {}, which counts",
                        name.trim(),
                        setting.value,
                        setting.origin,
                        first.value,
                        first.origin
                    );
                    self.notes.push(Observation::warn(seen, "set it in one place"));
                }
                Some(_) => {}
                None => drop(self.all.insert(name.trim().to_owned(), setting)),
            }
        }
    }

    fn get(&self, name: &str) -> Option<&str> {
        self.all.get(name).map(|s| s.value.as_str()).filter(|v| !v.is_empty())
    }

    /// The value as NCCL reads a number.
    fn number(&self, name: &str) -> Option<i64> {
        self.get(name).map(|v| number(v).0)
    }

    fn is_on(&self, name: &str) -> bool {
        self.number(name).is_some_and(|n| n != 0)
    }
}

/// A number as C's strtoll reads it with base 0, and what is left of the text behind it.
fn number(text: &str) -> (i64, &str) {
    let trimmed = text.trim_start();
    let (sign, digits) = match trimmed.strip_prefix('-') {
        Some(rest) => (-1, rest),
        None => (1, trimmed.strip_prefix('+').unwrap_or(trimmed)),
    };
    let hex = digits.strip_prefix("0x").or_else(|| digits.strip_prefix("0X"));
    let (digits, base) = match hex {
        Some(rest) => (rest, 16),
        None if digits.starts_with('0') => (digits, 8),
        None => (digits, 10),
    };
    let end = digits.find(|c: char| !c.is_digit(base)).unwrap_or(digits.len());
    let (number, rest) = digits.split_at(end);
    (i64::from_str_radix(number, base).map_or(0, |n| sign * n), rest)
}

/// How many letters have to be changed, added or left out to make one name of the other.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let changed = diagonal + usize::from(x != *y);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

/// The names that somebody in a job knows: NCCL, its plugins, PyTorch.
struct Known {
    /// NCCL's version, to be shown.
    version: String,
    names: BTreeSet<String>,
    of_torch: BTreeSet<String>,
}

impl Known {
    fn find(host: &Host) -> Option<Self> {
        let libraries = Libraries::find(host);
        let nccl = libraries.of_job()?;
        let facts = nccl.facts.as_ref().ok()?;
        let mut names = facts.variables.clone();
        for (variable, kind) in PLUGINS {
            // Without the variable NCCL looks for a plugin of this name.
            let usual = format!("libnccl-{kind}.so");
            let values = host.variable(variable).unwrap_or(&usual).split(',');
            for file in values.filter_map(|v| plugin_file(host, v, kind)) {
                // A plugin that cannot be read is told by a check of its own.
                names.extend(elf::nccl(&file).unwrap_or_default().variables);
            }
        }
        let torch = packages(host)
            .into_iter()
            .flat_map(|p| ["libtorch_cuda.so", "libtorch_cpu.so"].map(|f| p.join("torch/lib").join(f)));
        let of_torch =
            torch.filter(|p| p.is_file()).filter_map(|p| elf::torch_variables(&p).ok()).flatten().collect();
        Some(Known { version: nccl.version().to_owned(), names, of_torch })
    }

    /// The known name that is nearest to an unknown one, if it is near.
    fn nearest(&self, name: &str) -> Option<&String> {
        let all = self.names.iter().map(|n| (distance(name, n), n));
        all.filter(|(d, _)| *d <= MISSPELT_MAX).min().map(|(_, n)| n)
    }
}

fn names(host: &Host) -> Vec<Observation> {
    let settings = NcclSettings::read(host);
    let of_nccl: Vec<&String> = settings
        .all
        .keys()
        .filter(|n| n.starts_with("NCCL_") && !DESCRIPTIONS.contains(&n.as_str()))
        .collect();
    if of_nccl.is_empty() {
        return vec![Observation::pass("no NCCL_ variable is set")];
    }
    let Some(known) = Known::find(host) else {
        return vec![Observation::skip(format!(
            "{} are set; which of them NCCL knows is unknown, since no libnccl was found",
            of_nccl.len()
        ))];
    };
    let mut all: Vec<Observation> = Vec::new();
    for name in of_nccl.iter().filter(|n| !known.names.contains(**n)) {
        let in_torch = format!("TORCH_{name}");
        let is = format!("{name} is unknown to NCCL {}, which ignores it", known.version);
        all.push(if known.of_torch.contains(&in_torch) {
            Observation::warn(
                format!("{name} was renamed: PyTorch reads {in_torch}"),
                format!("set {in_torch}"),
            )
        } else if let Some(near) = known.nearest(name) {
            Observation::warn(is, format!("it is near to {near}: correct the name, or unset it"))
        } else {
            Observation::warn(is, "unset it; it is of another release, or of another program")
        });
    }
    if all.is_empty() {
        let names: Vec<&str> = of_nccl.iter().map(|n| n.as_str()).collect();
        all.push(Observation::pass(format!(
            "NCCL {} knows all that are set: {}",
            known.version,
            names.join(", ")
        )));
    }
    all
}

/// Variables whose value is one of a few words.
const WORDS: &[(&str, &[&str])] = &[
    ("NCCL_DEBUG", &["NONE", "VERSION", "WARN", "INFO", "ABORT", "TRACE"]),
    ("NCCL_SOCKET_FAMILY", &["AF_INET", "AF_INET6"]),
    ("NCCL_IB_ADDR_FAMILY", &["AF_INET", "AF_INET6"]),
    ("NCCL_LAUNCH_MODE", &["PARALLEL", "GROUP"]),
    ("NCCL_P2P_LEVEL", PATHS),
    ("NCCL_NET_GDR_LEVEL", PATHS),
];
/// Kinds of paths between two devices, as NCCL writes them: here capital letters matter.
const PATHS: &[&str] = &["LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "PXN", "P2C", "PHB", "SYS"];
/// Of those the ones that are a kind of path, or a number.
const OF_PATHS: &[&str] = &["NCCL_P2P_LEVEL", "NCCL_NET_GDR_LEVEL"];
/// Names of algorithms and protocols, as lists of NCCL_ALGO and NCCL_PROTO hold them.
const ALGORITHMS: &[&str] = &["TREE", "RING", "COLLNETDIRECT", "COLLNETCHAIN", "NVLS", "NVLSTREE", "PAT"];
const PROTOCOLS: &[&str] = &["LL", "LL128", "SIMPLE"];
/// Ends of the names of variables that are numbers.
const NUMBERS: &[&str] = &[
    "_DISABLE",
    "_ENABLE",
    "NTHREADS",
    "NCHANNELS",
    "NRINGS",
    "_CTAS",
    "BUFFSIZE",
    "CHUNKSIZE",
    "_TIMEOUT",
    "_RETRY_CNT",
    "_IB_TC",
    "_IB_SL",
    "GID_INDEX",
    "QPS_PER_CONNECTION",
    "CROSS_NIC",
    "GDR_READ",
    "NSOCKS_PERTHREAD",
    "CHECK_POINTERS",
    "COMM_BLOCKING",
    "IGNORE_CPU_AFFINITY",
];

fn is_word(value: &str, words: &[&str]) -> bool {
    words.iter().any(|w| w.eq_ignore_ascii_case(value))
}

/// The parts of a list like `ring,tree`, `^LL128` or `allreduce:tree,ring;broadcast:ring` that are none of `words`.
fn strangers<'v>(value: &'v str, words: &[&str]) -> Vec<&'v str> {
    let lists = value.split(';').map(|l| l.rsplit_once(':').map_or(l, |(_, list)| list));
    let parts = lists.flat_map(|l| l.trim().trim_start_matches('^').split(','));
    parts.map(str::trim).filter(|w| !w.is_empty() && !is_word(w, words)).collect()
}

fn value(name: &str, setting: &Setting) -> Option<Observation> {
    let v = setting.value.trim();
    let wrong = |why: String, fix: String| {
        let seen = format!("{name}={v} ({}): {why}", setting.origin);
        Some(Observation::warn(seen, fix))
    };
    if v.is_empty() {
        return None;
    }
    if let Some((_, words)) = WORDS.iter().find(|(n, _)| *n == name) {
        let is_path = OF_PATHS.contains(&name);
        let is_known = if is_path { words.contains(&v) || number(v).1.is_empty() } else { is_word(v, words) };
        if !is_known {
            return wrong("NCCL does not know this value".to_owned(), format!("one of {}", words.join(", ")));
        }
    }
    for (list, words) in [("NCCL_ALGO", ALGORITHMS), ("NCCL_PROTO", PROTOCOLS)] {
        let strange = strangers(v, words);
        if name == list && !strange.is_empty() {
            let why = format!("{} is none that NCCL knows; communicators fail with it", strange.join(", "));
            let fix = format!("names of {}, with commas between them", words.join(", "));
            return Some(Observation::fail(format!("{name}={v} ({}): {why}", setting.origin), fix));
        }
    }
    if NUMBERS.iter().any(|end| name.ends_with(end)) {
        let (n, rest) = number(v);
        if !rest.is_empty() {
            return wrong(
                format!("NCCL reads a number and takes {n}"),
                "write the whole number, without a unit or a word".to_owned(),
            );
        }
    }
    None
}

fn values(host: &Host) -> Vec<Observation> {
    let settings = NcclSettings::read(host);
    let mut all: Vec<Observation> = settings.all.iter().filter_map(|(name, s)| value(name, s)).collect();
    if all.is_empty() {
        all.push(Observation::pass(match settings.all.len() {
            0 => "none is set".to_owned(),
            n => format!("{n} are set, and nothing is wrong with their values"),
        }));
    }
    all
}

/// Something that settings do which their user may not want.
struct Effect {
    applies: fn(&NcclSettings, &Host) -> bool,
    /// The variables that are shown.
    names: &'static [&'static str],
    what: &'static str,
    fix: &'static str,
}

fn has_rdma(host: &Host) -> bool {
    !host.rdma_devices().is_empty()
}

fn is_set(s: &NcclSettings, name: &str) -> bool {
    s.get(name).is_some()
}

fn debugs(s: &NcclSettings) -> bool {
    s.get("NCCL_DEBUG").is_some_and(|v| is_word(v, &["INFO", "TRACE", "ABORT"]))
}

const EFFECTS: &[Effect] = &[
    Effect {
        applies: |s, _| {
            s.get("NCCL_PROTO").is_some_and(|v| !v.starts_with('^') && v.to_uppercase().contains("LL128"))
        },
        names: &["NCCL_PROTO"],
        what: "LL128 is forced also where NCCL knows that the links do not keep its 128 bytes together, and data are wrong",
        fix: "unset it; NCCL chooses LL128 itself where it is safe",
    },
    Effect {
        applies: |s, _| {
            // An exclusion or a list leaves NCCL a choice.
            let is_one = |v: &str| !v.contains(['^', ',', ';', ':']) && !v.to_uppercase().contains("LL128");
            ["NCCL_ALGO", "NCCL_PROTO"].iter().any(|n| s.get(n).is_some_and(is_one))
        },
        names: &["NCCL_ALGO", "NCCL_PROTO"],
        what: "the choice is the same for all sizes, and slow for most of them",
        fix: "unset it, or write rules for sizes: ringwatch tune",
    },
    Effect {
        applies: |s, _| s.is_on("NCCL_P2P_DISABLE"),
        names: &["NCCL_P2P_DISABLE"],
        what: "GPUs of a host do not use NVLink or PCIe between them, but the host's memory",
        fix: "unset it; see the check p2p for what is wrong with peer access",
    },
    Effect {
        applies: |s, _| s.is_on("NCCL_SHM_DISABLE"),
        names: &["NCCL_SHM_DISABLE"],
        what: "ranks of a host without peer access use the network between them",
        fix: "unset it, and give /dev/shm more room",
    },
    Effect {
        applies: |s, h| s.is_on("NCCL_IB_DISABLE") && has_rdma(h),
        names: &["NCCL_IB_DISABLE"],
        what: "there are RDMA devices, and NCCL uses sockets",
        fix: "unset it",
    },
    Effect {
        applies: |s, h| {
            let ib = |n: &String| n.starts_with("NCCL_IB_") && n != "NCCL_IB_DISABLE";
            s.all.keys().any(ib) && (s.is_on("NCCL_IB_DISABLE") || !has_rdma(h))
        },
        names: &["NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_TC", "NCCL_IB_DISABLE"],
        what: "variables NCCL_IB_* are set, and NCCL ignores them: RDMA is off, or there is no RDMA device",
        fix: "unset them here, or see the check rdma for why no device is there",
    },
    Effect {
        applies: |s, _| debugs(s),
        names: &["NCCL_DEBUG"],
        what: "every rank writes what it does; that was for a search, and was left on",
        fix: "unset it, or set it to WARN",
    },
    Effect {
        applies: |s, _| is_set(s, "NCCL_DEBUG_SUBSYS") && !debugs(s),
        names: &["NCCL_DEBUG_SUBSYS"],
        what: "it is ignored: it selects lines of NCCL_DEBUG=INFO, which is not set",
        fix: "unset it",
    },
    Effect {
        applies: |s, _| {
            s.get("NCCL_DEBUG_FILE").is_some_and(|f| !f.contains("%p") && !f.starts_with("/dev/"))
        },
        names: &["NCCL_DEBUG_FILE"],
        what: "all ranks of a host write over each other's lines in one file",
        fix: "put %h and %p into the name",
    },
    Effect {
        applies: |s, _| {
            let n = |name| s.number(name).unwrap_or(1);
            n("NCCL_SOCKET_NTHREADS").saturating_mul(n("NCCL_NSOCKS_PERTHREAD")) > 64
        },
        names: &["NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"],
        what: "their product is above 64, and NCCL lowers the sockets of a thread",
        fix: "lower one of them",
    },
    Effect {
        applies: |s, _| s.is_on("NCCL_P2P_DISABLE") && is_set(s, "NCCL_P2P_LEVEL"),
        names: &["NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"],
        what: "they contradict each other",
        fix: "unset one of them",
    },
    Effect {
        applies: |s, _| ["NRINGS", "NCHANNELS"].iter().all(|n| is_set(s, &format!("NCCL_MAX_{n}"))),
        names: &["NCCL_MAX_NRINGS", "NCCL_MAX_NCHANNELS"],
        what: "they are two names of one setting",
        fix: "unset NCCL_MAX_NRINGS, the old one",
    },
    Effect {
        applies: |s, _| s.is_on("NCCL_CHECK_POINTERS"),
        names: &["NCCL_CHECK_POINTERS"],
        what: "every call asks the driver about its buffers",
        fix: "unset it",
    },
    Effect {
        applies: |_, h| h.variable("CUDA_LAUNCH_BLOCKING").is_some_and(|v| v != "0"),
        names: &[],
        what: "CUDA_LAUNCH_BLOCKING is set: nothing overlaps, and operations of several communicators can hang",
        fix: "unset it",
    },
];

fn effects(host: &Host) -> Vec<Observation> {
    let settings = NcclSettings::read(host);
    let shown = |names: &[&str]| -> String {
        let set = names.iter().filter_map(|n| Some(format!("{n}={}", settings.get(n)?)));
        set.collect::<Vec<_>>().join(" ")
    };
    let of = |e: &Effect| {
        let shown = shown(e.names);
        let colon = if shown.is_empty() { "" } else { ": " };
        Observation::warn(format!("{shown}{colon}{}", e.what), e.fix)
    };
    let mut all: Vec<Observation> = EFFECTS.iter().filter(|e| (e.applies)(&settings, host)).map(of).collect();
    all.extend(settings.notes);
    if all.is_empty() {
        all.push(Observation::pass("none forces, switches off or contradicts anything"));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_as_nccl_reads_them() {
        assert_eq!(number("4"), (4, ""));
        assert_eq!(number("4M"), (4, "M"));
        assert_eq!(number("0x10"), (16, ""));
        assert_eq!(number("010"), (8, ""));
        assert_eq!(number("-2"), (-2, ""));
        assert_eq!(number("yes"), (0, "yes"));
    }

    #[test]
    fn a_misspelling_is_near() {
        assert_eq!(distance("NCCL_SOCKET_IFNAM", "NCCL_SOCKET_IFNAME"), 1);
        assert_eq!(distance("NCCL_IB_HAC", "NCCL_IB_HCA"), 2);
        assert_eq!(distance("", "abc"), 3);
    }

    #[test]
    fn lists_of_algorithms_are_read_in_both_ways_of_writing_them() {
        for good in
            ["ring", "^tree", "Tree,NVLS", "allreduce:tree,ring;broadcast:ring", "ring;allreduce:^pat"]
        {
            assert!(strangers(good, ALGORITHMS).is_empty(), "{good}");
        }
        assert_eq!(strangers("ring,rign", ALGORITHMS), ["rign"]);
        assert_eq!(strangers("allreduce:LL127", PROTOCOLS), ["LL127"]);
    }
}
