//! The command line as people meet it: help, versions, exit codes.

use crate::support;
use crate::support::{Room, Said};
use clap::CommandFactory;
use std::path::Path;
use std::process::Command;

/// Runs it in a terminal of no particular width.
fn say(arguments: &[&str]) -> Said {
    support::run(Room::new().ringwatch(arguments).env("COLUMNS", "100").env_remove("LINES"))
}

/// Verbs that are not hidden.
fn verbs() -> Vec<String> {
    let cli = ringwatch::cli::Cli::command();
    let shown = cli.get_subcommands().filter(|v| !v.is_hide_set());
    shown.map(|v| v.get_name().to_owned()).collect()
}

fn help(arguments: &[&str]) -> String {
    let said = say(arguments);
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""), "{arguments:?}");
    // Clap ends some lines with a blank.
    let lines: Vec<&str> = said.out.lines().map(str::trim_end).collect();
    lines.join("\n")
}

#[test]
fn help_of_the_program() {
    insta::assert_snapshot!(help(&["--help"]));
}

#[test]
fn help_of_every_verb() {
    for verb in verbs() {
        insta::assert_snapshot!(format!("help_{verb}"), help(&[&verb, "--help"]));
    }
}

#[test]
fn help_comes_short_and_by_verb_as_well() {
    for verb in verbs() {
        assert!(help(&[&verb, "-h"]).contains("Usage: ringwatch"), "{verb}");
        assert_eq!(help(&["help", &verb]), help(&[&verb, "--help"]));
    }
}

#[test]
fn the_version_is_the_packages() {
    assert_eq!(help(&["--version"]), format!("ringwatch {}", env!("CARGO_PKG_VERSION")));
    assert_eq!(help(&["-V"]), help(&["--version"]));
}

#[test]
fn without_a_verb_there_is_help_and_exit_code_2() {
    let said = say(&[]);
    assert_eq!((said.code, said.out.as_str()), (Some(2), ""));
    for verb in verbs() {
        assert!(said.err.contains(&format!("\n  {verb} ")), "{verb} is missing:\n{}", said.err);
    }
    assert!(!said.err.contains("\n  replay "), "what is hidden is not shown");
}

#[test]
fn bad_usage_is_exit_code_2_and_names_what_is_wrong() {
    for (arguments, named) in [
        (["watch"].as_slice(), "watch"),
        (&["top", "--twice"], "--twice"),
        (&["top", "--width", "7"], "7"),
        (&["run"], "CMD"),
        (&["demo", "--scenario", "hang"], "hang"),
        (&["demo", "--json"], "--headless"),
        (&["demo", "--seconds", "0"], "0"),
    ] {
        let said = say(arguments);
        assert_eq!((said.code, said.out.as_str()), (Some(2), ""), "{arguments:?}");
        assert!(said.err.contains(named) && said.err.contains("--help"), "{arguments:?}: {}", said.err);
    }
}

#[test]
fn plugin_prints_what_a_shell_can_take() {
    let room = Room::new();
    let dir = room.path("it's a $(place) of its own");
    let said = support::run(room.ringwatch(["plugin"]).arg(&dir));
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    let shell = format!(
        "{}\n[ -f \"${{LD_LIBRARY_PATH%%:*}}/$NCCL_PROFILER_PLUGIN\" ] && echo \"$LD_LIBRARY_PATH\"",
        said.out
    );
    let mut sh = room.command("sh");
    let there = support::run(sh.arg("-c").arg(shell).env("LD_LIBRARY_PATH", "/usr/old"));
    assert_eq!(there.out, format!("{}:/usr/old\n", dir.display()), "{} {}", said.out, there.err);
}

#[test]
fn plugin_prints_how_to_preload() {
    let room = Room::new();
    for name in ["plain", "a place of its own"] {
        let dir = room.path(name);
        let said = support::run(room.ringwatch(["plugin", "--preload"]).arg(&dir));
        assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
        let shell = format!("{}\nexec grep -o 'libringwatch.*$' /proc/self/maps", said.out);
        let there = support::run(room.command("sh").arg("-c").arg(shell));
        assert!(there.out.starts_with("libringwatch-preload.so\n"), "{} {}", said.out, there.err);
        assert_eq!(there.err, "");
    }
}

#[test]
fn the_readme_mentions_every_verb() {
    let readme = Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md");
    let text = std::fs::read_to_string(readme).expect("README.md");
    for verb in verbs() {
        assert!(text.contains(&format!("ringwatch {verb}")), "README.md does not mention `ringwatch {verb}`");
    }
}

/// `ringwatch ... | head -0`: whoever reads has seen enough.
#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let room = Room::new();
    for arguments in [["--help"].as_slice(), &["--version"], &["plugin"], &["top", "--once"]] {
        let mut command: Command = room.ringwatch(arguments);
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let child = command.stdout(writer).stderr(std::process::Stdio::piped()).spawn().expect("it starts");
        // The writer's end in here goes with the command.
        drop(command);
        let said = support::finish(child);
        let err = String::from_utf8_lossy(&said.stderr);
        assert_eq!((said.status.code(), err.as_ref()), (Some(0), ""), "{arguments:?}");
    }
}
