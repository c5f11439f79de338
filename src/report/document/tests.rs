use super::*;
use crate::model::{
    CommId, CommRow, Coverage, Evidence, JobRow, JobSums, Kind, OperationRef, Rank, Track, Unread,
    UnreadReason,
};
use crate::timeline::{LatencyChart, RankSeries};

fn job(name: &str) -> (JobRow, CommRow) {
    let id = CommId::unowned(7);
    let sums = JobSums { comms: vec![id], hosts: vec!["a".into()], ..JobSums::default() };
    let job = JobRow {
        name: Some(name.into()),
        alive: 2,
        gone: 0,
        unknown: 0,
        size: Some(2),
        comms: 1,
        nccl: None,
        ops_per_s: None,
        comm_share: None,
        sums,
    };
    let comm = CommRow {
        id,
        name: None,
        ranks: Some(2),
        seen: 2,
        nodes: None,
        issued: 0,
        finished: 0,
        in_flight: 0,
        ops_per_s: None,
        coverage: Coverage::default(),
        closed: false,
    };
    (job, comm)
}

fn written(form: Form, snapshot: &Snapshot, charts: &[JobCharts]) -> String {
    let mut out = Vec::new();
    let notes = ["3 messages are missing".to_owned()];
    Document { snapshot, charts, notes: &notes }.write(form, &mut out).expect("written");
    String::from_utf8(out).expect("text")
}

fn hostile() -> (Snapshot, Vec<JobCharts>) {
    let (job, comm) = job("</script><script>alert(1)</script>");
    let operation = OperationRef::named("AllReduce", Track::Collective, 3);
    let mut finding = Finding::new(Kind::MissingRank, comm.id, vec![Rank(1)], operation);
    finding.communicator_name = Some("<img src=x>".into());
    finding.evidence = vec![Evidence { text: "a | b\n*c* \u{202e}d".into(), value: None, unit: None }];
    finding.advice = "look at rank 1".into();
    let charts = JobCharts {
        bins: 1,
        ranks: vec![RankSeries {
            label: "</script><b>".into(),
            in_nccl: vec![Some(0.5)],
            waited: vec![Some(0.25)],
            held: vec![None],
        }],
        latency: vec![LatencyChart {
            operation: "AllReduce",
            from_bytes: Some(1 << 20),
            buckets: vec![(1.0, 2)],
        }],
        ..JobCharts::default()
    };
    let snapshot =
        Snapshot { jobs: vec![job], comms: vec![comm], findings: vec![finding], ..Snapshot::default() };
    (snapshot, vec![charts])
}

#[test]
fn text_of_a_job_is_never_markup_in_html() {
    let (snapshot, charts) = hostile();
    let html = written(Form::Html, &snapshot, &charts);
    let own = html.replace(LIBRARY, "").replace(SCRIPT, "");
    assert!(!own.contains("<script>alert") && !own.contains("<img") && !own.contains("<b>"), "{own}");
    assert_eq!(own.matches("</script>").count(), 3, "those of the template");
    assert!(own.contains("a | b*c* d"), "what steers is left out");
    assert!(
        own.contains("1 critical")
            && own.contains("look at rank 1")
            && own.contains("3 messages are missing")
    );
}

#[test]
fn a_chart_is_there_where_it_has_data() {
    let (snapshot, charts) = hostile();
    let html = written(Form::Html, &snapshot, &charts);
    for (chart, has_data) in [
        ("share", true),
        ("waited", true),
        ("latency", true),
        ("held", false),
        ("steps", false),
        ("bandwidth", false),
        ("slowest", false),
    ] {
        assert_eq!(html.contains(&format!("data-chart=\"{chart}\"")), has_data, "{chart}");
    }
}

#[test]
fn text_of_a_job_stays_in_its_cell_in_markdown() {
    let (snapshot, charts) = hostile();
    let text = written(Form::Markdown, &snapshot, &charts);
    assert!(text.contains("- a \\| b\\*c\\* d\n"), "{text}");
    assert!(text.contains("## Job \\</script\\>"), "{text}");
    let rows: Vec<&str> = text.lines().filter(|l| l.starts_with('|')).collect();
    assert!(rows.len() > 8, "{text}");
    for table in text.split("\n\n").filter(|part| part.starts_with('|')) {
        let cells = |line: &str| line.replace("\\|", "").matches('|').count();
        let widths: Vec<usize> = table.lines().map(cells).collect();
        assert!(widths.windows(2).all(|w| w[0] == w[1]), "{table}");
    }
}

#[test]
fn nothing_found_is_said_so_and_not_where_not_all_was_read() {
    let (job, comm) = job("train");
    let healthy = Snapshot { jobs: vec![job], comms: vec![comm], ..Snapshot::default() };
    assert!(written(Form::Html, &healthy, &[]).contains(">No findings.<"));
    assert!(written(Form::Markdown, &healthy, &[]).contains("\nNo findings.\n"));
    let unread = vec![Unread {
        path: "/dev/shm/x".into(),
        reason: UnreadReason::ALL[0],
        detail: "it is damaged".into(),
        owner: None,
    }];
    let partly = Snapshot { unread, ..healthy };
    for form in [Form::Html, Form::Markdown] {
        let text = written(form, &partly, &[]);
        assert!(
            text.contains("No findings in what was read, and not everything was.")
                && text.contains("it is damaged"),
            "{text}"
        );
    }
}
