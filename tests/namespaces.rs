//! Four hosts on one machine: network namespaces, three NATS servers, two analysers, an agent on each host, and a job of
//! four ranks, one a host, played from the two-node recording. What fails is really killed, cut off, skewed or filled.

use crate::support;
use crate::support::nats::{MAPPINGS, program, there};
use crate::support::{Json, Room, run, skipped, until};
use ringwatch::replay::monotonic_ns;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

fn ip(arguments: &str) -> bool {
    let mut command = Command::new("ip");
    command.args(arguments.split(' ')).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|s| s.success())
}

/// Whether such hosts can be made here; without them the test counts as skipped.
fn possible(test: &str) -> bool {
    static MAY: OnceLock<bool> = OnceLock::new();
    // Tests that tried it at the same time under one name would get into each other's way.
    let may = *MAY.get_or_init(|| {
        let probe = format!("rwp{}", std::process::id());
        let may = ip(&format!("netns add {probe}")) && ip(&format!("link add {probe} type bridge"));
        ip(&format!("link del {probe}"));
        ip(&format!("netns del {probe}"));
        may
    });
    if !may {
        skipped(test, "ip, and the right to make network namespaces (root)");
    }
    may && there(test)
}

/// A process that ends with this value, if not before.
struct Running(Child);

impl Running {
    fn kill(&mut self) {
        self.0.kill().expect("our own child");
        self.0.wait().expect("our own child");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Four hosts; everything of theirs ends with this value.
struct Cluster {
    room: Room,
    net: u8,
    servers: Vec<Option<Running>>,
    analysers: Vec<Running>,
    agents: Vec<Option<Running>>,
    /// Variables that a host's processes get besides.
    more: Vec<(String, String)>,
    skewed: Option<usize>,
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.agents.clear();
        self.analysers.clear();
        self.servers.clear();
        for host in 1..=4 {
            // A namespace goes when its last process has gone; its wire must not be there when the next one is made.
            ip(&format!("link del {}.{host}", self.bridge()));
            ip(&format!("netns del {}", self.ns(host)));
        }
        ip(&format!("link del {}", self.bridge()));
    }
}

impl Cluster {
    fn ns(&self, host: usize) -> String {
        format!("rwt{}-{}h{host}", std::process::id(), self.net)
    }

    fn bridge(&self) -> String {
        format!("rw{}b{}", std::process::id(), self.net)
    }

    fn address(&self, host: usize) -> String {
        format!("10.231.{}.{host}", self.net)
    }

    fn urls(&self) -> String {
        (1..=3).map(|h| format!("nats://{}:4222", self.address(h))).collect::<Vec<_>>().join(",")
    }

    /// A command on a host.
    fn on(&self, host: usize, program: &str) -> Command {
        let mut command = self.room.command("ip");
        command.args(["netns", "exec", &self.ns(host), program]);
        if self.skewed == Some(host) {
            command.envs(self.more.iter().map(|(k, v)| (k, v)));
        }
        command
    }

    fn log(&self, command: &mut Command, name: &str) -> Running {
        let file = |end: &str| {
            std::fs::File::options()
                .create(true)
                .append(true)
                .open(self.room.path(&format!("{name}.{end}")))
                .expect("a log")
        };
        Running(command.stdout(file("out")).stderr(file("err")).spawn().expect("it starts"))
    }

    fn start(skewed: Option<usize>, more: &[(&str, &str)], small_disks: &[usize]) -> Self {
        static NET: AtomicU8 = AtomicU8::new(0);
        let net = (std::process::id() % 30) as u8 * 8 + NET.fetch_add(1, Ordering::Relaxed) % 8;
        let mut c = Cluster {
            room: Room::new(),
            net,
            servers: Vec::new(),
            analysers: Vec::new(),
            agents: Vec::new(),
            more: more.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            skewed,
        };
        let bridge = c.bridge();
        assert!(ip(&format!("link add {bridge} type bridge")) && ip(&format!("link set {bridge} up")));
        assert!(ip(&format!("addr add {}/24 dev {bridge}", c.address(254))));
        for host in 1..=4 {
            let (ns, out) = (c.ns(host), format!("{bridge}.{host}"));
            assert!(ip(&format!("netns add {ns}")));
            assert!(ip(&format!("link add {out} type veth peer name eth0 netns {ns}")));
            assert!(ip(&format!("link set {out} master {bridge} up")));
            assert!(ip(&format!("-n {ns} addr add {}/24 dev eth0", c.address(host))));
            assert!(ip(&format!("-n {ns} link set eth0 up")) && ip(&format!("-n {ns} link set lo up")));
        }
        for host in 1..=3 {
            let store = c.room.path(&format!("js{host}"));
            std::fs::create_dir(&store).expect("a directory");
            if small_disks.contains(&host) {
                let mut mount = Command::new("mount");
                mount.args(["-t", "tmpfs", "-o", "size=8m", "tmpfs"]).arg(&store);
                assert!(mount.status().is_ok_and(|s| s.success()), "a small disk");
            }
            let routes: Vec<String> =
                (1..=3).filter(|h| *h != host).map(|h| format!("\"nats://{}:6222\"", c.address(h))).collect();
            let conf = format!(
                "server_name: n{host}\nlisten: \"{a}:4222\"\ncluster {{ name: rw, listen: \"{a}:6222\", routes: [{}] }}\n\
                 jetstream {{ store_dir: {:?} }}\n{MAPPINGS}",
                routes.join(", "),
                store.display().to_string(),
                a = c.address(host),
            );
            std::fs::write(c.room.path(&format!("n{host}.conf")), conf).expect("written");
            c.servers.push(None);
            c.serve(host);
        }
        for host in 1..=2 {
            let running = c.analyse(host);
            c.analysers.push(running);
        }
        for host in 1..=4 {
            c.agents.push(None);
            c.follow(host);
        }
        until("the analysers speak for all", || {
            let said = c.ask(&["cluster", "status"]);
            (said.code == Some(0) && said.err.is_empty() && said.out.contains("2 analysers, 4 nodes"))
                .then_some(())
        });
        c
    }

    /// Starts a host's server.
    fn serve(&mut self, host: usize) {
        let conf = self.room.path(&format!("n{host}.conf"));
        let nats = program().expect("looked for before");
        let mut command = self.on(host, &nats.display().to_string());
        command.arg("-c").arg(conf);
        self.servers[host - 1] = Some(self.log(&mut command, &format!("nats{host}")));
    }

    fn set(&self, command: &mut Command, host: usize) {
        let mut urls: Vec<String> = self.urls().split(',').map(|u| format!("{u:?}")).collect();
        // One's own server first.
        let at = host.min(3) - 1;
        urls.swap(0, at);
        command.args(["--set", &format!("cluster.servers=[{}]", urls.join(","))]);
        command.args(["--set", &format!("cluster.node=h{host}")]);
    }

    fn analyse(&self, host: usize) -> Running {
        let mut command = self.on(host, support::PROGRAM);
        command.args(["analyser", "--json", "--set", &format!("http.listen={}:9400", self.address(host))]);
        self.set(&mut command, host);
        self.log(&mut command, &format!("analyser{host}"))
    }

    /// Starts a host's agent.
    fn follow(&mut self, host: usize) {
        let mut command = self.on(host, support::PROGRAM);
        command.args(["agent", "--json", "--set", "socket.path=null", "--set", "hardware.enabled=false"]);
        command.args(["--set", "http.listen=null"]);
        command.args(["--set", &format!("segments.directories=[{:?}]", self.segments(host))]);
        self.set(&mut command, host);
        self.agents[host - 1] = Some(self.log(&mut command, &format!("agent{host}")));
    }

    fn segments(&self, host: usize) -> PathBuf {
        let dir = self.room.path(&format!("segments{host}"));
        std::fs::create_dir_all(&dir).expect("a directory");
        dir
    }

    /// A job of four ranks, one a host.
    fn job(&self, scenario: &str) -> Vec<Running> {
        let plugin = self.room.plugin();
        let start_at = monotonic_ns() + 1_000_000_000;
        let play = |host: usize| {
            let mut command = self.on(host, support::PROGRAM);
            let rank = host - 1;
            command
                .args(["replay", "--two-node", "--scenario", scenario, "--hold", "120"])
                .args(["--rank", &rank.to_string(), "--start-at", &start_at.to_string(), "--plugin"])
                .arg(&plugin)
                .env("RINGWATCH_DIR", self.segments(host))
                .env("RANK", rank.to_string())
                .env("WORLD_SIZE", "4");
            self.log(&mut command, &format!("rank{rank}"))
        };
        (1..=4).map(play).collect()
    }

    fn ask(&self, what: &[&str]) -> support::Said {
        run(self.room.ringwatch(what).args(["--cluster", &self.urls()]))
    }

    /// The finding of a kind that is open.
    fn found(&self, kind: &str) -> Option<Json> {
        self.open(&self.ask(&["diagnose", "--json"]), kind)
    }

    fn open(&self, said: &support::Said, kind: &str) -> Option<Json> {
        let all = said.out.lines().map(|l| serde_json::from_str::<Json>(l).expect("JSON"));
        all.into_iter().find(|f| f.get("kind").text() == kind && matches!(f.get("open"), Json::Bool(true)))
    }

    /// No analyser has an open finding of a kind, if all of the cluster is spoken for: who does not answer says nothing.
    fn is_over(&self, kind: &str) -> Option<()> {
        let said = self.ask(&["diagnose", "--json"]);
        let heard = matches!(said.code, Some(0 | 1)) && !said.err.contains("nobody speaks");
        (heard && self.open(&said, kind).is_none()).then_some(())
    }

    /// Waits for a verdict on a kind.
    fn diagnosed(&self, kind: &str) -> Json {
        until(kind, || {
            let found = self.found(kind);
            if found.is_none() {
                std::thread::sleep(Duration::from_millis(200));
            }
            found
        })
    }

    /// Says whether the analysers' verdicts are kept, if the metric, `cluster status` and `top` say so.
    fn keeps(&self, kept: bool) -> Option<()> {
        let value = if kept { "1" } else { "0" };
        let says = |host: usize| {
            let mut s = TcpStream::connect((self.address(host), 9400)).expect("it listens");
            s.write_all(b"GET /metrics HTTP/1.0\r\nhost: x\r\n\r\n").expect("it reads");
            let mut text = String::new();
            s.read_to_string(&mut text).expect("it answers");
            let line = text.lines().find(|l| l.starts_with("ringwatch_analyser_keeps_verdicts{"));
            line.and_then(|l| l.rsplit(' ').next()).is_some_and(|v| v.trim_end_matches(".0") == value)
        };
        let metrics: Vec<bool> = [1, 2].into_iter().map(says).collect();
        // The one that speaks for nobody has nothing to be kept.
        let metric = if kept { metrics == [true; 2] } else { metrics.contains(&true) };
        let status = self.ask(&["cluster", "status"]);
        let shown = self.ask(&["top", "--once"]);
        println!("kept? {metrics:?}, {status:?}, {shown:?}");
        let status = status.out.contains("told, and not kept: JetStream");
        let shown = shown.out.contains("nothing is kept: JetStream");
        (metric && status != kept && shown != kept).then_some(())
    }

    /// A job goes wrong, and the right rank is named; how late, in seconds.
    fn a_fault_is_named(&self) -> f64 {
        let job = self.job("missing-rank");
        let f = self.diagnosed("missing-rank");
        assert_eq!(numbers(f.get("ranks")), [3.0], "{f:?}");
        let late = after(&f);
        assert!(late >= 2.5, "{late} s after the others began to wait: {f:?}\n{}", self.logs());
        drop(job);
        until("it is over with its job", || self.is_over("missing-rank"));
        late
    }

    /// The last lines of what agents and analysers printed, for a test that fails.
    fn logs(&self) -> String {
        let mut names: Vec<String> = (1..=2).map(|n| format!("analyser{n}")).collect();
        names.extend((1..=4).map(|n| format!("agent{n}")));
        let files = names.iter().flat_map(|name| [format!("{name}.out"), format!("{name}.err")]);
        let last = |name: String| {
            let text = std::fs::read_to_string(self.room.path(&name)).unwrap_or_default();
            let lines: Vec<&str> = text.lines().rev().take(15).collect();
            let lines: String = lines.into_iter().rev().map(|l| format!("{l}\n")).collect();
            format!("--- {name}\n{lines}")
        };
        files.map(last).collect()
    }

    /// How often analysers have printed that a verdict of a kind was opened, together.
    fn printed(&self, kind: &str) -> usize {
        let of = |host: usize| {
            let text =
                std::fs::read_to_string(self.room.path(&format!("analyser{host}.out"))).unwrap_or_default();
            let is =
                |l: &&str| l.contains("\"change\":\"opened\"") && l.contains(&format!("\"kind\":\"{kind}\""));
            text.lines().filter(is).count()
        };
        of(1) + of(2)
    }

    /// A host's agent says that it found a server, after it had lost one.
    fn has_a_server_again(&self, host: usize) -> Option<()> {
        let log = std::fs::read_to_string(self.room.path(&format!("agent{host}.err"))).expect("its log");
        log.contains("the bus is there again").then_some(())
    }

    /// The nodes' books, once their agents have ended: observed, published, left out.
    fn books(&mut self) -> Vec<(String, [u64; 3])> {
        for agent in self.agents.iter_mut().filter_map(Option::take) {
            let mut agent = agent;
            let pid = rustix::process::Pid::from_child(&agent.0);
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).expect("our own child");
            support::wait(&mut agent.0);
        }
        until("all have said their last words", || {
            let said = self.ask(&["cluster", "status"]).out;
            let ended: Vec<&str> = said.lines().filter(|l| l.contains(" ended ")).collect();
            (ended.len() == 4).then(|| {
                let row = |l: &&str| {
                    let mut words = l.split_whitespace();
                    let name = words.next().expect("a name").to_owned();
                    let n: Vec<u64> = words.skip(1).map(|w| w.parse().expect("a number")).collect();
                    (name, [n[3], n[4], n[5]])
                };
                ended.iter().map(row).collect()
            })
        })
    }
}

fn numbers(list: &Json) -> Vec<f64> {
    list.list().iter().map(Json::number).collect()
}

/// How long after it began it was first seen, in seconds; a day may end in between.
fn after(f: &Json) -> f64 {
    (seconds(f.get("first_seen").text()) - seconds(f.get("since").text())).rem_euclid(86_400.0)
}

/// Seconds of the day.
fn seconds(rfc3339: &str) -> f64 {
    let time = rfc3339.split_once('T').expect("a time").1.trim_end_matches('Z');
    time.split(':').fold(0.0, |all, part| all * 60.0 + part.parse::<f64>().expect("a number"))
}

fn balanced(books: &[(String, [u64; 3])]) {
    for (node, [observed, published, left_out]) in books {
        assert_eq!(*observed, published + left_out, "{node}");
        assert!(*observed > 0, "{node} saw its rank's operations");
    }
}

#[test]
fn faults_over_four_hosts_are_named_in_time_and_all_books_balance() {
    let _alone = crate::alone();
    if !possible("faults_over_four_hosts_are_named_in_time_and_all_books_balance") {
        return;
    }
    let mut c = Cluster::start(None, &[], &[]);
    let late = c.a_fault_is_named();
    assert!(late < 5.0, "{late} s after the others began to wait\n{}", c.logs());
    let job = c.job("mismatch");
    let f = c.diagnosed("mismatch");
    assert_eq!(numbers(f.get("ranks")), [1.0], "{f:?}");
    assert!(after(&f) < 5.0, "{f:?}");
    assert_eq!((c.printed("missing-rank"), c.printed("mismatch")), (1, 1), "each is told once");
    drop(job);
    balanced(&c.books());
}

#[test]
fn an_agent_is_killed() {
    let _alone = crate::alone();
    if !possible("an_agent_is_killed") {
        return;
    }
    let mut c = Cluster::start(None, &[], &[]);
    let job = c.job("missing-rank");
    c.diagnosed("missing-rank");
    c.agents[1].take().expect("it runs").kill();
    let f = c.diagnosed("silent-node");
    assert_eq!(f.get("place").get("host").text(), "h2");
    // The culprit is on another host, and still named.
    assert_eq!(numbers(c.diagnosed("missing-rank").get("ranks")), [3.0]);
    c.follow(2);
    until("it is heard again", || c.is_over("silent-node"));
    drop(job);
    until("it is over with its job", || c.is_over("missing-rank"));
    c.a_fault_is_named();
    balanced(&c.books());
}

#[test]
fn an_analyser_is_killed() {
    let _alone = crate::alone();
    if !possible("an_analyser_is_killed") {
        return;
    }
    let mut c = Cluster::start(None, &[], &[]);
    let job = c.job("missing-rank");
    c.diagnosed("missing-rank");
    c.analysers[0].kill();
    assert_eq!(numbers(c.diagnosed("missing-rank").get("ranks")), [3.0]);
    assert_eq!(c.printed("missing-rank"), 1, "it is told once");
    drop(job);
    until("it is over with its job", || c.is_over("missing-rank"));
    c.a_fault_is_named();
    balanced(&c.books());
}

/// The server that leads a stream.
fn leader(c: &Cluster) -> usize {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let urls: Vec<String> = c.urls().split(',').map(str::to_owned).collect();
        let client = async_nats::connect(urls).await.expect("a server");
        let js = async_nats::jetstream::new(client);
        let mut stream = js.get_stream("KV_ringwatch-leases").await.expect("the leases");
        let info = stream.info().await.expect("known");
        let name = info.cluster.as_ref().and_then(|c| c.leader.clone()).expect("a leader");
        name.trim_start_matches('n').parse().expect("a number")
    })
}

#[test]
fn the_leader_of_the_servers_is_killed() {
    let _alone = crate::alone();
    if !possible("the_leader_of_the_servers_is_killed") {
        return;
    }
    let mut c = Cluster::start(None, &[], &[]);
    let leads = leader(&c);
    let job = c.job("missing-rank");
    c.servers[leads - 1].take().expect("it runs").kill();
    assert_eq!(numbers(c.diagnosed("missing-rank").get("ranks")), [3.0]);
    drop(job);
    until("it is over with its job", || c.is_over("missing-rank"));
    c.serve(leads);
    c.a_fault_is_named();
    balanced(&c.books());
}

#[test]
fn a_host_is_cut_off_for_half_a_minute() {
    let _alone = crate::alone();
    if !possible("a_host_is_cut_off_for_half_a_minute") {
        return;
    }
    let mut c = Cluster::start(None, &[], &[]);
    let job = c.job("missing-rank");
    c.diagnosed("missing-rank");
    let wire = format!("{}.4", c.bridge());
    assert!(ip(&format!("link set {wire} down")));
    assert_eq!(c.diagnosed("silent-node").get("place").get("host").text(), "h4");
    // The one that is missing is there: nobody can say any more what it does.
    until("nothing rests on it", || c.is_over("missing-rank"));
    std::thread::sleep(Duration::from_secs(25));
    assert!(ip(&format!("link set {wire} up")));
    assert_eq!(numbers(c.diagnosed("missing-rank").get("ranks")), [3.0]);
    until("it is heard again", || c.is_over("silent-node"));
    // It may be heard before it is connected: the kernel sends what the lost connection still held.
    until("its agent has a server again", || c.has_a_server_again(4));
    drop(job);
    balanced(&c.books());
}

#[test]
fn a_hosts_clock_is_two_seconds_off_and_drifts() {
    let _alone = crate::alone();
    let library = ["x86_64-linux-gnu", "aarch64-linux-gnu"]
        .map(|a| format!("/usr/lib/{a}/faketime/libfaketime.so.1"))
        .into_iter()
        .find(|p| Path::new(p).is_file());
    let Some(library) = library else {
        skipped("a_hosts_clock_is_two_seconds_off_and_drifts", "libfaketime (apt install faketime)");
        return;
    };
    if !possible("a_hosts_clock_is_two_seconds_off_and_drifts") {
        return;
    }
    // Two seconds ahead, and 200 us a second more.
    let more = [
        ("LD_PRELOAD", library.as_str()),
        ("FAKETIME", "+2.0 x1.0002"),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
    ];
    let mut c = Cluster::start(Some(3), &more, &[]);
    c.a_fault_is_named();
    let f = c.diagnosed("clock-skew");
    assert_eq!(f.get("place").get("host").text(), "h3");
    let ahead = f.get("evidence").list()[0].get("value").number();
    assert!((1.9..2.2).contains(&ahead), "{f:?}");
    balanced(&c.books());
}

#[test]
fn a_servers_disk_is_full() {
    let _alone = crate::alone();
    if !possible("a_servers_disk_is_full") {
        return;
    }
    let mut c = Cluster::start(None, &[], &[1, 2, 3]);
    let fill = |c: &Cluster, host: usize| {
        // Until there is no room.
        drop(std::fs::write(c.room.path(&format!("js{host}")).join("fill"), vec![0_u8; 8 << 20]));
    };
    let empty = |c: &Cluster, host: usize| {
        std::fs::remove_file(c.room.path(&format!("js{host}")).join("fill")).expect("it was filled");
    };
    // One of three: the other two keep what is said.
    fill(&c, 1);
    c.a_fault_is_named();
    until("it is kept", || c.keeps(true));
    empty(&c, 1);
    c.a_fault_is_named();
    // All of them: verdicts come all the same, and who asks hears that nothing is kept.
    (1..=3).for_each(|host| fill(&c, host));
    c.a_fault_is_named();
    until("it is not kept", || c.keeps(false));
    // A server gives JetStream up when its disk is full, and has it again when it is started anew.
    for host in 1..=3 {
        empty(&c, host);
        c.servers[host - 1].take().expect("it runs").kill();
        c.serve(host);
    }
    until("it is kept again", || c.keeps(true));
    balanced(&c.books());
    c.servers.clear();
    for host in 1..=3 {
        let umount = Command::new("umount").arg(c.room.path(&format!("js{host}"))).status();
        assert!(umount.is_ok_and(|s| s.success()));
    }
}
