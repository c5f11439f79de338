use super::launch::DEFAULT_PORT;
use super::meeting::{Answer, greet, judge};
use super::*;
use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicU16, Ordering};

const SHORT: Duration = Duration::from_millis(400);
const LONG: Duration = Duration::from_secs(20);

/// A port behind which 32 belong to one test alone, below those that the system gives away.
fn port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let process = u16::try_from(std::process::id() % 16).unwrap();
    10_000 + process * 1320 + NEXT.fetch_add(1, Ordering::Relaxed) * 33
}

fn launch(rank: u32, world: u32, port: u16) -> Launch {
    let master = "127.0.0.1".to_owned();
    Launch { rank, world, local_rank: rank, master, port, key: u64::from(port), epoch: 7 }
}

/// Every rank on a thread of its own.
fn all<T: Send + 'static>(world: u32, work: impl Fn(Rendezvous) -> T + Send + Clone + 'static) -> Vec<T> {
    let port = port();
    let threads: Vec<_> = (0..world)
        .map(|rank| {
            let work = work.clone();
            std::thread::spawn(move || work(Rendezvous::join(&launch(rank, world, port), LONG).unwrap()))
        })
        .collect();
    threads.into_iter().map(|t| t.join().unwrap()).collect()
}

#[test]
fn everybody_gets_everybodys_bytes_in_order() {
    let got = all(5, |mut r| {
        for round in 0..50u32 {
            let own = vec![u8::try_from(r.rank()).unwrap(); round as usize * 100];
            let all = r.all_gather(&own).unwrap();
            for (rank, bytes) in (0u8..).zip(&all) {
                assert_eq!(bytes, &vec![rank; round as usize * 100]);
            }
            r.start_together().unwrap();
        }
        (r.rank(), r.world())
    });
    assert_eq!(got, [(0, 5), (1, 5), (2, 5), (3, 5), (4, 5)]);
}

#[test]
fn a_lost_peer_is_named_to_all_who_can_hear() {
    let said = all(3, |mut r| {
        r.barrier().unwrap();
        if r.rank() == 2 {
            return String::new();
        }
        let error = r.all_gather(b"on").unwrap_err();
        r.give_up(&error.to_string());
        error.to_string()
    });
    assert!(said[0].contains("rank 2 is lost"), "{said:?}");
    assert!(said[1].contains("rank 0 gave up") && said[1].contains("rank 2 is lost"), "{said:?}");
}

#[test]
fn who_gives_up_says_why_also_to_those_who_do_not_wait() {
    let said = all(2, |mut r| {
        r.barrier().unwrap();
        if r.rank() == 1 {
            r.give_up("my GPU is on fire");
            return String::new();
        }
        let until = Instant::now() + LONG;
        loop {
            if let Err(e) = r.check() {
                return e.to_string();
            }
            assert!(Instant::now() < until);
            std::thread::sleep(Duration::from_millis(1));
        }
    });
    assert_eq!(said[0], "rank 1 gave up: my GPU is on fire");
}

#[test]
fn wrong_greetings_are_refused_and_the_right_one_is_heard_among_them() {
    let port = port();
    let root = std::thread::spawn(move || Rendezvous::join(&launch(0, 2, port), LONG));
    let right = launch(1, 2, port);
    let address = || {
        (1..=PORTS).find_map(|p| {
            let a = SocketAddr::from(([127, 0, 0, 1], port + p));
            TcpStream::connect(a).ok().map(|s| (a, s))
        })
    };
    let until = Instant::now() + LONG;
    // Somebody who connects and says nothing stays on the line meanwhile.
    let (address, _silent) = loop {
        if let Some(found) = address() {
            break found;
        }
        assert!(Instant::now() < until);
    };
    for (wrong, answer) in [
        (Launch { key: 1, ..right.clone() }, Answer::OtherJob),
        (Launch { epoch: 8, ..right.clone() }, Answer::OtherEpoch),
        (Launch { world: 3, ..right.clone() }, Answer::OtherWorld),
        (Launch { rank: 0, ..right.clone() }, Answer::Taken),
        (Launch { rank: 9, ..right.clone() }, Answer::Taken),
    ] {
        assert_eq!(greet(&wrong, address).unwrap().0, answer);
    }
    let mut old = right.greeting();
    old[11] = 99;
    assert_eq!(judge(&launch(0, 2, port), &old, &[None, None]), Some((Answer::OtherVersion, 1)));
    // A browser that has lost its way is not even answered.
    let mut browser = TcpStream::connect(address).unwrap();
    browser.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: */*\r\n\r\n").unwrap();
    let mut answer = Vec::new();
    browser.read_to_end(&mut answer).ok();
    assert!(answer.is_empty(), "{answer:?}");
    let mut me = Rendezvous::join(&right, LONG).unwrap();
    let mut root = root.join().unwrap().unwrap();
    let other = std::thread::spawn(move || root.all_gather(b"a").unwrap());
    assert_eq!(me.all_gather(b"b").unwrap(), [b"a", b"b"]);
    assert_eq!(other.join().unwrap(), [b"a", b"b"]);
}

#[test]
fn a_port_that_is_taken_is_passed_over() {
    let port = port();
    let _torch = TcpListener::bind(("127.0.0.1", port + 1));
    let root = std::thread::spawn(move || Rendezvous::join(&launch(0, 2, port), LONG).map(|_| ()));
    assert!(Rendezvous::join(&launch(1, 2, port), LONG).is_ok());
    assert!(root.join().unwrap().is_ok());
}

#[test]
fn who_does_not_come_is_named() {
    let port = port();
    let said = Rendezvous::join(&launch(0, 3, port), SHORT).unwrap_err().to_string();
    assert!(said.contains("ranks [1, 2] have not come"), "{said}");
    let said = Rendezvous::join(&launch(1, 3, port), SHORT).unwrap_err().to_string();
    assert!(said.contains("has not found rank 0 at 127.0.0.1"), "{said}");
}

#[test]
fn a_silent_rank_is_named() {
    let port = port();
    let root = std::thread::spawn(move || Rendezvous::join(&launch(0, 2, port), SHORT * 20));
    let _other = Rendezvous::join(&launch(1, 2, port), LONG).unwrap();
    let mut root = root.join().unwrap().unwrap();
    root.limit = SHORT;
    assert!(root.barrier().unwrap_err().to_string().contains("ranks [1] have sent nothing"));
}

#[test]
fn launchers_are_read_by_what_they_set() {
    let read = |set: &[(&str, &str)]| {
        let set: HashMap<String, String> =
            set.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        Launch::read(|name| set.get(name).cloned(), 3).map_err(|e| e.to_string())
    };
    let torch = [
        ("WORLD_SIZE", "4"),
        ("RANK", "2"),
        ("LOCAL_RANK", "0"),
        ("MASTER_ADDR", "node1"),
        ("MASTER_PORT", "29400"),
        ("TORCHELASTIC_RUN_ID", "job"),
    ];
    let l = read(&torch).unwrap().unwrap();
    assert_eq!((l.rank, l.world, l.local_rank, l.master.as_str(), l.port), (2, 4, 0, "node1", 29_400));
    assert_eq!((l.key, l.epoch), (hash("job"), 3));
    let slurm = [
        ("SLURM_NTASKS", "2"),
        ("SLURM_PROCID", "1"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_JOB_ID", "77"),
        ("MASTER_ADDR", "node1"),
    ];
    let l = read(&slurm).unwrap().unwrap();
    assert_eq!((l.rank, l.world, l.local_rank, l.port, l.key), (1, 2, 1, DEFAULT_PORT, hash("77")));
    // Alone.
    assert_eq!(read(&[]), Ok(None));
    assert_eq!(read(&[("WORLD_SIZE", "1"), ("RANK", "0")]), Ok(None));
    assert_eq!(read(&[("SLURM_NTASKS", "8")]), Ok(None));
    // torchrun with one process, whatever Slurm has set around it.
    let mut inside = slurm.to_vec();
    inside.push(("WORLD_SIZE", "1"));
    assert_eq!(read(&inside), Ok(None));
    for (change, named) in [
        (("MASTER_ADDR", ""), "MASTER_ADDR is not set"),
        (("RANK", ""), "RANK is not set"),
        (("RANK", "4"), "rank 4 of 4"),
        (("LOCAL_RANK", "x"), "LOCAL_RANK is \"x\""),
        (("MASTER_PORT", "65530"), "MASTER_PORT"),
    ] {
        let mut set = torch.to_vec();
        set.retain(|(k, _)| *k != change.0);
        set.push(change);
        let said = read(&set).unwrap_err();
        assert!(said.contains(named), "{said}");
    }
}

#[test]
fn bytes_that_are_no_list_are_no_list() {
    assert_eq!(unpack(&pack(&[vec![1, 2], vec![], vec![3]])), Some(vec![vec![1, 2], vec![], vec![3]]));
    assert_eq!(unpack(&[0, 0]), None);
    assert_eq!(unpack(&u64::MAX.to_be_bytes()), None);
}
