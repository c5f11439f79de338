//! The instructions and cache lines of a piece of code, counted by Valgrind: a measure that no noise of a machine
//! moves.

use super::library::plugin_library;
use object::{Object as _, ObjectSegment as _};
use ringwatch_wire::sync::Word;
use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Write as _};
use std::ops::Range;
use std::path::Path;
use std::process::{Command, Stdio};

/// Bytes of a cache line.
const LINE: u64 = 64;

/// How often each instruction of the plugin was executed, by its address in the file.
pub type Executed = BTreeMap<u64, u64>;

/// Runs a child under Valgrind; `true` for a function whose instructions count.
pub fn executed(child: &mut Command, out: &Path, counts: fn(&str) -> bool) -> Executed {
    let ran = under(child, |valgrind| {
        valgrind
            .args(["--tool=callgrind", "--dump-instr=yes", "--dump-line=no"])
            .args(["--compress-strings=no", "--compress-pos=no"])
            .arg(format!("--callgrind-out-file={}", out.display()));
    })
    .output()
    .unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    own(&std::fs::read_to_string(out).unwrap(), counts)
}

/// The command behind Valgrind with these arguments.
fn under(child: &Command, arguments: impl FnOnce(&mut Command)) -> Command {
    let mut valgrind = Command::new("valgrind");
    arguments(&mut valgrind);
    valgrind.arg(child.get_program()).args(child.get_args());
    for (name, value) in child.get_envs() {
        valgrind.env(name, value.unwrap_or_default());
    }
    valgrind
}

/// The library's own instructions, as far as they count, from callgrind's file: lines of `address cost` under the object
/// that an `ob=` line names; the line after `calls=` holds what the called function cost.
fn own(text: &str, counts: fn(&str) -> bool) -> Executed {
    let library = plugin_library().file_name().unwrap().to_str().unwrap();
    let (mut ours, mut counted, mut of_call) = (false, false, false);
    let mut executed = Executed::new();
    for line in text.lines() {
        if let Some(object) = line.strip_prefix("ob=") {
            ours = object.ends_with(library);
        } else if let Some(function) = line.strip_prefix("fn=") {
            counted = counts(function);
        } else if line.starts_with("calls=") {
            of_call = true;
        } else if let Some((address, cost)) = line.strip_prefix("0x").and_then(|l| l.split_once(' ')) {
            if ours && counted && !of_call {
                let address = u64::from_str_radix(address, 16).unwrap();
                *executed.entry(address).or_default() += cost.trim().parse::<u64>().unwrap();
            }
            of_call = false;
        }
    }
    executed
}

/// The price of one time of a repeated piece of code.
#[derive(Debug, Clone, Copy)]
pub struct Price {
    pub instructions: u64,
    /// Instructions that lock the bus.
    pub locked: u64,
    /// Reads of the time-stamp counter.
    pub counter_reads: u64,
    /// Cache lines of code.
    pub code_lines: u64,
}

impl Price {
    /// The price of one time, by the difference between `times` and twice as many.
    pub fn of(once: &Executed, twice: &Executed, times: u64) -> Self {
        let bytes = std::fs::read(plugin_library()).unwrap();
        let file = object::File::parse(&*bytes).unwrap();
        let mut price = Price { instructions: 0, locked: 0, counter_reads: 0, code_lines: 0 };
        let mut lines = BTreeSet::new();
        let mut sums = [0; 3];
        for (address, count) in twice {
            // The way to the first time may be a little longer or shorter: its waits are polls.
            let more = count.saturating_sub(once.get(address).copied().unwrap_or(0));
            let code = code_at(&file, *address);
            sums[0] += more;
            sums[1] += if locks(code) { more } else { 0 };
            sums[2] += if code.starts_with(&[0x0f, 0x31]) { more } else { 0 };
            if more * 2 >= times {
                lines.insert(address / LINE);
            }
        }
        [price.instructions, price.locked, price.counter_reads] = sums.map(|sum| (sum + times / 2) / times);
        price.code_lines = lines.len() as u64;
        price
    }
}

/// The bytes of the file at an address.
fn code_at<'a>(file: &object::File<'a>, address: u64) -> &'a [u8] {
    let within = file.segments().find(|s| (s.address()..s.address() + s.size()).contains(&address));
    let segment = within.expect("an address of the library");
    let data = segment.data().unwrap();
    usize::try_from(address - segment.address()).ok().and_then(|at| data.get(at..)).unwrap_or_default()
}

/// True for an instruction with the prefix LOCK, and for an exchange with memory, which locks without one (x86-64).
fn locks(code: &[u8]) -> bool {
    const PREFIXES: [u8; 5] = [0xf0, 0xf2, 0xf3, 0x66, 0x64];
    let length = code.iter().take_while(|b| PREFIXES.contains(b)).count();
    let (prefixes, rest) = code.split_at(length);
    let rest = match rest {
        [0x40..=0x4f, rest @ ..] => rest,
        rest => rest,
    };
    prefixes.contains(&0xf0) || matches!(rest, [0x86 | 0x87, modrm, ..] if modrm >> 6 != 3)
}

/// A store here separates one time of a repeated piece of code from the next.
static MARK: Word = Word::new(0);
const PLACES: &str = "places of this process:";

/// In the child: names the places that [`data_lines`] has to know.
pub fn announce() {
    let local = 0u8;
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let name = plugin_library().file_name().unwrap().to_str().unwrap();
    let text =
        maps.lines().find(|l| l.ends_with(name) && l.contains(" r-xp ")).expect("the plugin is mapped");
    let here = std::ptr::from_ref(&local).addr() as u64;
    let stack = maps.lines().find(|l| range(l).contains(&here)).expect("this stack is mapped");
    let first = |line: &str| line.split(' ').next().unwrap().to_owned();
    let mark = std::ptr::from_ref(&MARK).addr();
    // In one piece: Valgrind writes to the same place.
    let said = format!("\n{PLACES} {} {} {mark:x}\n", first(text), first(stack));
    std::io::stderr().write_all(said.as_bytes()).unwrap();
}

/// In the child: between one time and the next.
pub fn mark() {
    MARK.set(1);
}

fn range(line: &str) -> Range<u64> {
    let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
    u64::from_str_radix(from, 16).unwrap()..u64::from_str_radix(to, 16).unwrap()
}

/// Cache lines of data that the plugin's own instructions touch between two marks, other than the thread's stack: the
/// median over a child's marks.
pub fn data_lines(child: &mut Command) -> usize {
    let mut ran = under(child, |valgrind| {
        valgrind.args(["--tool=lackey", "--trace-mem=yes", "--basic-counts=no"]);
    })
    .stdout(Stdio::null())
    .stderr(Stdio::piped())
    .spawn()
    .unwrap();
    let mut lines = BufReader::with_capacity(1 << 20, ran.stderr.take().unwrap());
    let mut line = Vec::new();
    let (mut places, mut counts, mut ours) = (None, Vec::new(), false);
    let mut touched: Option<BTreeSet<u64>> = None;
    while lines.read_until(b'\n', &mut line).unwrap() > 0 {
        match (&places, line.first()) {
            (None, _) => places = places_in(&line),
            (Some((text, stack, mark)), Some(b'I' | b' ')) => {
                let address = address_in(&line);
                let code = line.first() == Some(&b'I');
                if code {
                    ours = text.contains(&address);
                } else if address == *mark {
                    counts.extend(touched.replace(BTreeSet::new()).map(|t| t.len()));
                } else if ours && !stack.contains(&address) {
                    touched.iter_mut().for_each(|t| {
                        t.insert(address / LINE);
                    });
                }
            }
            _ => {}
        }
        line.clear();
    }
    assert!(ran.wait().unwrap().success());
    counts.sort_unstable();
    counts[counts.len() / 2]
}

/// The ranges of the plugin's code and of the stack, and the mark's address, where a line names them.
fn places_in(line: &[u8]) -> Option<(Range<u64>, Range<u64>, u64)> {
    let text = std::str::from_utf8(line).ok()?.trim_end();
    let at = text.find(PLACES)?;
    let mut words = text[at + PLACES.len()..].split_ascii_whitespace();
    Some((range(words.next()?), range(words.next()?), u64::from_str_radix(words.next()?, 16).ok()?))
}

/// The address in a line of lackey's: three characters, the address, a comma, the size.
fn address_in(line: &[u8]) -> u64 {
    let digits = line.get(3..).unwrap_or_default().iter().map_while(|b| char::from(*b).to_digit(16));
    digits.fold(0, |n, d| n << 4 | u64::from(d))
}
