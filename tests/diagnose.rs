//! `ringwatch diagnose` and `top --once`: the verdict on live segments and on what dead processes left, and
//! what lies about in the same folder.

use crate::support;
use crate::support::{
    Json, Play, Players, Room, Said, assert_mismatch, assert_missing_rank, evidence, findings, run, skipped,
    until,
};
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, SystemTime};

/// Of a directory by name: what lies in it, live or dead.
fn diagnose(room: &Room) -> Said {
    run(room.ringwatch(["diagnose", "--json"]).arg(room.segments()).env_remove("RINGWATCH_DIR"))
}

/// Of the jobs that run now.
fn diagnose_now(room: &Room) -> Said {
    run(&mut room.ringwatch(["diagnose", "--json"]))
}

/// The first verdict on live processes that is one.
fn verdict(room: &Room) -> Vec<Json> {
    until("a finding", || {
        let said = diagnose_now(room);
        // Processes take a moment to make their segments.
        if said.code == Some(2) && said.err.contains("no segments in") {
            return None;
        }
        assert_eq!(said.err, "");
        let found = findings(&said.out);
        assert_eq!(said.code, Some(if found.is_empty() { 0 } else { 1 }));
        (!found.is_empty()).then_some(found)
    })
}

fn top_once(room: &Room) -> String {
    let said = run(&mut room.ringwatch(["top", "--once"]));
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    said.out
}

#[test]
fn a_missing_rank_is_named_live_and_from_the_black_boxes() {
    let room = Room::new();
    let mut players = Players::start(&room, Play::of("missing-rank").hold(120));
    let live = verdict(&room);
    assert_missing_rank(&live);
    let waited = &live[0].get("evidence").list()[0];
    assert!(waited.get("value").number() >= 3.0 && waited.get("unit").text() == "s", "{waited:?}");

    let text = run(&mut room.ringwatch(["diagnose"]));
    assert_eq!(text.code, Some(1));
    assert!(
        text.out.starts_with("missing-rank: rank 3 in AllReduce of 16777216 bytes (order 3"),
        "{}",
        text.out
    );
    assert!(
        text.out.contains(", since 20") && text.out.contains("    next: look at what rank 3"),
        "{}",
        text.out
    );

    let frame = top_once(&room);
    assert!(frame.contains("missing-rank") && frame.contains("rank 3"), "{frame}");
    assert!(frame.contains("AllReduce"), "{frame}");
    assert!(frame.to_lowercase().contains("lost") || frame.to_lowercase().contains("loss"), "{frame}");

    // What was named live is named after the OOM killer too; only for how long they waited is gone.
    players.kill();
    let dead = diagnose(&room);
    assert_eq!((dead.code, dead.err.as_str()), (Some(1), ""));
    let dead = findings(&dead.out);
    assert_missing_rank(&dead);
    for key in ["kind", "communicator", "ranks", "operation"] {
        assert_eq!(dead[0].get(key), live[0].get(key), "{key}");
    }
    let facts = evidence(&dead[0]);
    assert!(
        facts[0].starts_with("ranks 0, 1, 2 issued it and did not finish; for how long is not known"),
        "{facts:#?}"
    );
    assert!(facts.iter().any(|f| f.contains("the process of rank 3 is gone")), "{facts:#?}");
    let frame = top_once(&room);
    assert!(frame.contains("missing-rank"), "{frame}");
}

#[test]
fn a_mismatch_is_named_live_and_from_the_black_boxes() {
    let room = Room::new();
    let mut players = Players::start(&room, Play::of("mismatch").hold(120));
    let live = verdict(&room);
    // The first look may fall between the ranks' arrivals; what it says of rank 1 holds all the same.
    assert_eq!((live.len(), support::ranks(&live[0])), (1, vec![1]), "{live:#?}");
    players.played();
    assert_mismatch(&verdict(&room));
    players.kill();
    let dead = diagnose(&room);
    assert_eq!((dead.code, dead.err.as_str()), (Some(1), ""));
    assert_mismatch(&findings(&dead.out));
}

#[test]
fn a_healthy_job_has_no_findings() {
    let room = Room::new();
    // Rank 3 of this recording comes late once; the other three are in good health.
    let mut players = Players::start(&room, Play::of("mixed").ranks(&[0, 1, 2]).unpaced().hold(120));
    players.played();
    let look = |said: Said, out: &str| {
        assert_eq!((said.code, said.out.as_str(), said.err.as_str()), (Some(0), out, ""))
    };
    look(run(&mut room.ringwatch(["diagnose"])), "no findings\n");
    look(diagnose_now(&room), "");
    look(diagnose(&room), "");
    players.kill();
    look(diagnose(&room), "");
}

#[test]
fn an_answer_about_nothing_is_none() {
    let room = Room::new();
    let said = diagnose(&room);
    assert_eq!((said.code, said.out.as_str()), (Some(2), ""));
    assert!(
        said.err.contains("no segments in ") && said.err.contains("ringwatch run -- CMD"),
        "{}",
        said.err
    );
    let absent = room.path("absent");
    let file = room.path("file");
    fs::write(&file, "").expect("written");
    for dir in [&absent, &file] {
        let said = run(room.ringwatch(["diagnose", "--json"]).arg(dir));
        assert_eq!((said.code, said.out.as_str()), (Some(2), ""));
        assert!(said.err.contains(&format!("{}: not a directory", dir.display())), "{}", said.err);
    }
    // A frame of nothing is a frame: top waits for jobs to come.
    let frame = top_once(&room);
    assert!(!frame.trim().is_empty());
}

#[test]
fn what_dead_jobs_left_is_told_when_its_directory_is_named() {
    let room = Room::new();
    black_boxes(&room, "missing-rank");
    let now = diagnose_now(&room);
    assert_eq!((now.code, now.out.as_str()), (Some(2), ""));
    let advice = format!("ringwatch diagnose {}\n", room.segments().display());
    assert!(now.err.starts_with("ringwatch: no job runs here") && now.err.ends_with(&advice), "{}", now.err);
    assert_missing_rank(&findings(&diagnose(&room).out));
}

/// Black boxes of a job in rank order, made as fast as the plugin takes them.
fn black_boxes(room: &Room, scenario: &'static str) -> Vec<PathBuf> {
    let mut players = Players::start(room, Play::of(scenario).unpaced());
    let names: Vec<String> = players.children.iter().map(|c| format!("{}-", c.id())).collect();
    players.played();
    players.end();
    let files = room.segment_files();
    assert_eq!(files.len(), 4);
    let begins = |f: &Path, name: &str| f.file_name().is_some_and(|n| n.to_string_lossy().starts_with(name));
    names.iter().map(|n| files.iter().find(|f| begins(f, n)).expect("its segment").clone()).collect()
}

#[test]
fn what_is_no_segment_is_named_and_changes_no_verdict() {
    let elsewhere = Room::new();
    let other_job = black_boxes(&elsewhere, "mismatch");
    let room = Room::new();
    let good = black_boxes(&room, "missing-rank");
    let whole = fs::read(&good[0]).expect("a segment");
    let put = |name: &str, bytes: &[u8]| {
        let path = room.segments().join(name);
        fs::write(&path, bytes).expect("written");
        // One made this moment would be taken for a segment that is being opened.
        let file = fs::File::options().write(true).open(&path).expect("there");
        file.set_modified(SystemTime::UNIX_EPOCH + Duration::from_secs(60)).expect("aged");
        path
    };
    let noise: Vec<u8> = (0..65_536u32).map(|n| (n.wrapping_mul(2_654_435_761) >> 11) as u8).collect();
    let mut version = whole.clone();
    version[8] = 99;
    let mut regions = whole.clone();
    regions[24..112].fill(0xff);
    let mut wrong = vec![
        (put("noise.seg", &noise), "not a segment"),
        (put("text.seg", b"hello"), "5 bytes long"),
        (put("empty.seg", b""), "not ready"),
        (put("zeros.seg", &vec![0; 65_536]), "not ready"),
        (put("header.seg", &whole[..4096]), "table of regions"),
        (put("cut.seg", &whole[..whole.len() - 4096]), "table of regions"),
        (put("odd.seg", &whole[..whole.len() - 3]), "table of regions"),
        (put("version.seg", &version), "format version 99"),
        (put("regions.seg", &regions), "table of regions"),
    ];
    let link = room.segments().join("link.seg");
    symlink(&other_job[0], &link).expect("a link");
    wrong.push((link, "not a regular file"));
    let fifo = room.segments().join("fifo.seg");
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, rustix::fs::FileType::Fifo, mode, 0).expect("a fifo");
    wrong.push((fifo, "not a regular file"));
    let folder = room.segments().join("folder.seg");
    fs::create_dir(&folder).expect("a folder");
    wrong.push((folder, "not a regular file"));
    put("README", b"not asked for");

    let said = diagnose(&room);
    assert_eq!(said.code, Some(1), "{}", said.err);
    assert_missing_rank(&findings(&said.out));
    for (path, why) in &wrong {
        let line =
            said.err.lines().find(|l| l.starts_with(&format!("ringwatch: not read: {}: ", path.display())));
        assert!(
            line.is_some_and(|l| l.contains(why)),
            "{} should be named as {why}:\n{}",
            path.display(),
            said.err
        );
    }
    assert_eq!(said.err.lines().count(), wrong.len(), "{}", said.err);
    // The screen takes it as well.
    assert!(top_once(&room).contains("missing-rank"));
}

#[test]
fn random_damage_to_a_segment_is_no_crash_and_no_hang() {
    let room = Room::new();
    let good = black_boxes(&room, "missing-rank");
    let whole = fs::read(&good[0]).expect("a segment");
    let mut seed = 1u64;
    let mut next = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize
    };
    for n in 0..12 {
        let mut bytes = whole.clone();
        // Behind magic, version and geometry, which are refused at once.
        for _ in 0..4_000 {
            let at = 104 + next() % (bytes.len() - 104);
            bytes[at] = next() as u8;
        }
        fs::write(room.segments().join(format!("damaged-{n}.seg")), bytes).expect("written");
    }
    let said = diagnose(&room);
    assert!(matches!(said.code, Some(0 | 1)), "{:?}: {}", said.code, said.err);
    assert!(!said.err.contains("panicked"), "{}", said.err);
    findings(&said.out);
    top_once(&room);
}

/// The same command as a user who may not read the job's files; `None`, and the test counts as skipped, where this user
/// cannot become another or nobody else may reach the program.
fn as_nobody(test: &str, command: &mut Command, program: &Path) -> Option<Said> {
    const NOBODY: u32 = 65_534;
    let able = rustix::process::geteuid().is_root()
        && Command::new(program)
            .arg("--version")
            .uid(NOBODY)
            .gid(NOBODY)
            .stdout(Stdio::null())
            .status()
            .is_ok_and(|s| s.success());
    if !able {
        skipped(test, "root, which can run the program as another user");
        return None;
    }
    Some(run(command.uid(NOBODY).gid(NOBODY)))
}

#[test]
fn segments_that_may_not_be_read_are_named() {
    let test = "segments_that_may_not_be_read_are_named";
    let room = Room::new();
    let good = black_boxes(&room, "missing-rank");
    // Built programs lie where nobody else may look.
    let program = room.path("ringwatch");
    // By another process: a copy of our own may still be open in a child that another test has just forked.
    assert!(Command::new("cp").arg(support::PROGRAM).arg(&program).status().expect("cp starts").success());
    let open =
        |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("allowed");
    for dir in [room.path(""), room.segments()] {
        open(&dir, 0o755);
    }
    open(&program, 0o755);
    let command = || {
        let mut c = room.command(&program.to_string_lossy());
        c.args(["diagnose", "--json"]).arg(room.segments()).current_dir("/");
        c
    };
    let Some(said) = as_nobody(test, &mut command(), &program) else { return };
    assert_eq!((said.code, said.out.as_str()), (Some(2), ""), "{}", said.err);
    for path in &good {
        assert!(
            said.err.contains(&format!("ringwatch: not read: {}: cannot be read: ", path.display())),
            "{}",
            said.err
        );
    }
    assert!(said.err.contains("run ringwatch as the job's user or as root"), "{}", said.err);
    // Rank 0's box stays closed; the three others speak.
    good.iter().skip(1).for_each(|p| open(p, 0o644));
    let said = as_nobody(test, &mut command(), &program).expect("it went before");
    assert!(
        said.err.contains(&format!("ringwatch: not read: {}: cannot be read: ", good[0].display())),
        "{}",
        said.err
    );
    assert_eq!(said.err.lines().count(), 1, "{}", said.err);
    let found = findings(&said.out);
    assert_eq!((said.code, found.len()), (Some(1), 1), "{found:#?}");
    assert_eq!((found[0].get("kind").text(), support::ranks(&found[0])), ("missing-rank", vec![3]));
    let mut report = room.command(&program.to_string_lossy());
    report.arg("report").arg(room.segments()).current_dir("/");
    let said = as_nobody(test, &mut report, &program).expect("it went before");
    assert!(said.out.contains("not read: nothing here is about these"), "{}", said.out);
    assert!(said.out.contains(&format!("  {}: cannot be read: ", good[0].display())), "{}", said.out);
}

#[test]
fn a_reader_that_goes_away_is_no_crash() {
    let room = Room::new();
    black_boxes(&room, "missing-rank");
    let dir = room.segments();
    let dir = dir.to_str().expect("text");
    for arguments in [["diagnose", dir].as_slice(), &["diagnose", "--json", dir], &["top", "--once"]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut command = room.ringwatch(arguments);
        let child = command.stdout(writer).stderr(Stdio::piped()).spawn().expect("it starts");
        drop(command);
        let said = support::finish(child);
        let err = String::from_utf8_lossy(&said.stderr);
        assert_eq!((said.status.code(), err.as_ref()), (Some(0), ""), "{arguments:?}");
    }
}

/// Processes of a container: another mount and another pid namespace, and a /dev/shm of their own.
#[test]
fn root_sees_into_containers() {
    let test = "root_sees_into_containers";
    let may = Command::new("unshare").args(["-m", "-p", "-f", "--mount-proc", "true"]).output();
    if !may.is_ok_and(|o| o.status.success()) {
        skipped(test, "unshare, and the right to make mount and pid namespaces (root)");
        return;
    }
    let room = Room::new();
    // The container has a /dev/shm of its own; the library lies elsewhere.
    let library = tempfile::tempdir().expect("a directory");
    let plugin = ringwatch::bundle::install(library.path()).expect("installed");
    let job = format!("job-in-a-container-{}", std::process::id());
    let script = "mount -t tmpfs -o size=64m none /dev/shm || exit 1; for r in 0 1 2 3; do \
         \"$0\" replay --scenario missing-rank --rank $r --plugin $PLUGIN --hold 40 & done; wait";
    let mut container = Command::new("unshare")
        .args(["-m", "-p", "-f", "--mount-proc", "--kill-child", "sh", "-c", script])
        .arg(env!("CARGO_BIN_EXE_ringwatch"))
        .env("PLUGIN", &plugin)
        .env("RINGWATCH_JOB", &job)
        .env_remove("RINGWATCH_DIR")
        .stdout(Stdio::null())
        .spawn()
        .expect("unshare runs");
    // Nothing names a directory: all of the host is looked through.
    let frame = until("the container's job", || {
        let said = run(room.ringwatch(["top", "--once"]).env_remove("RINGWATCH_DIR"));
        said.out.contains(&job).then_some(said.out)
    });
    container.kill().expect("killed");
    container.wait().expect("gone");
    let row = frame.lines().find(|l| l.contains(&job)).expect("a row");
    assert!(row.split_whitespace().any(|w| w == "4"), "four processes, alive by their locks: {row}");
}

/// What `report --json` says with these arguments.
fn report(room: &Room, arguments: &[&Path]) -> Json {
    let said = run(room.ringwatch(["report", "--json"]).args(arguments));
    assert_eq!((said.code, said.err.as_str()), (Some(0), ""));
    serde_json::from_str(&said.out).expect("one document")
}

#[test]
fn a_report_sums_up_jobs_live_and_from_their_black_boxes() {
    let room = Room::new();
    let mut players = Players::start(&room, Play::of("missing-rank").hold(120));
    verdict(&room);
    let live = report(&room, &[]);
    let job = &live.get("jobs").list()[0];
    assert_eq!((job.get("running").number(), job.get("gone").number()), (4.0, 0.0));
    assert!(job.get("seen_s").number() > 3.0, "{job:?}");
    let comm = &job.get("communicators").list()[0];
    assert_eq!((comm.get("ranks").number(), comm.get("seen").number()), (4.0, 4.0));
    // Three all-reduces of 2 MiB are over, and the fourth hangs.
    let done = &comm.get("operations").list()[0];
    assert_eq!((done.get("operation").text(), done.get("count").number()), ("AllReduce", 3.0));
    assert_eq!(done.get("bytes").number(), 3.0 * 2_097_152.0);
    assert_eq!(done.get("timed_by").text(), "kernels");
    assert!(done.get("p50_ns").number() > 0.0 && done.get("busbw").number() > 0.0, "{done:?}");
    assert_missing_rank(job.get("findings").list());
    assert_eq!(live.get("findings").list(), []);

    let text = run(&mut room.ringwatch(["report"]));
    assert_eq!((text.code, text.err.as_str()), (Some(0), ""));
    for words in [
        "  ranks         4 running, 0 gone",
        "    AllReduce         2 MiB",
        "  findings: 1 open, 0 over",
        "        open; first seen 20",
        "  losses: none",
    ] {
        assert!(text.out.contains(words), "{words}: {}", text.out);
    }
    players.kill();

    // What is left of two jobs, each in a directory of its own.
    let other = Room::new();
    black_boxes(&other, "mismatch");
    let both = report(&room, &[&room.segments(), &other.segments()]);
    let kinds: Vec<Vec<&str>> = both
        .get("jobs")
        .list()
        .iter()
        .map(|j| j.get("findings").list().iter().map(|f| f.get("kind").text()).collect())
        .collect();
    assert_eq!(kinds.concat().len(), 2, "{kinds:?}");
    assert!(kinds.concat().contains(&"mismatch") && kinds.concat().contains(&"missing-rank"), "{kinds:?}");
    let gone: f64 = both.get("jobs").list().iter().map(|j| j.get("gone").number()).sum();
    assert_eq!(gone, 8.0);

    let absent = room.path("absent");
    let said = run(room.ringwatch(["report"]).arg(&absent));
    assert_eq!((said.code, said.out.as_str()), (Some(2), ""));
    assert!(said.err.contains(&format!("{}: not a directory", absent.display())), "{}", said.err);
}
