use fathom_luks::*;
use std::time::*;
fn main() {
    let a: Vec<String> = std::env::args().collect();
    let p = Passphrase::new(std::fs::read(&a[2]).unwrap()).unwrap();
    let o = Options {
        version: a[3].parse().unwrap(),
        effort: Effort {
            time: Duration::from_millis(a[4].parse().unwrap()),
            ..Default::default()
        },
        ..Default::default()
    };
    let t = Instant::now();
    let c = create(&o, &p).unwrap();
    println!("made {:?}", t.elapsed());
    let mut b = c.bytes;
    b.resize(b.len() + (4 << 20), 0);
    std::fs::write(&a[1], &b).unwrap();
    let h = Header::read(&b).unwrap();
    println!("{:?}", h.describe());
    let t = Instant::now();
    assert!(h.unlock(&b, &p).unwrap() == c.key);
    println!("open {:?}", t.elapsed());
}
