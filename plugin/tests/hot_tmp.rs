#![allow(unsafe_code, clippy::unwrap_used)]
mod support;
use support::bare::Bare;
use support::library::Plugin;
#[test]
fn hot() {
    let d = tempfile::Builder::new().tempdir_in("/dev/shm").unwrap();
    unsafe { std::env::set_var("RINGWATCH_DIR", d.path()) };
    let p = Plugin::built();
    let c = p.init(5, 7).context;
    let mut b = Bare::new(&p, c);
    for _ in 0..5 {
        let n = 1_000_000u64;
        let t = std::time::Instant::now();
        for _ in 0..n {
            b.call(true);
        }
        let full = t.elapsed().as_nanos() as f64 / n as f64;
        let t = std::time::Instant::now();
        for _ in 0..n {
            b.call(false);
        }
        let nolaunch = t.elapsed().as_nanos() as f64 / n as f64;
        let t = std::time::Instant::now();
        for _ in 0..n {
            b.coll();
        }
        let coll = t.elapsed().as_nanos() as f64 / n as f64;
        let t = std::time::Instant::now();
        for _ in 0..n {
            p.stop(5, 0);
        }
        let nul = t.elapsed().as_nanos() as f64 / n as f64;
        let t = std::time::Instant::now();
        for _ in 0..n {
            std::hint::black_box(t.elapsed());
        }
        let clk = t.elapsed().as_nanos() as f64 / n as f64;
        eprintln!(
            "call+launch {full:.1} ns, call {nolaunch:.1}, coll {coll:.1}, stop(null) {nul:.1}, clock {clk:.1}"
        );
    }
}
