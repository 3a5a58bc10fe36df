use fathom_luks::*;
use std::time::Instant;
fn main() {
    for (ks, ss) in [(64, 512u32), (64, 4096), (32, 512)] {
        let x = Sectors::new(&VolumeKey::new((0..ks).collect()).unwrap(), ss);
        for len in [512usize, 4096, 65536] {
            if len < ss as usize {
                continue;
            }
            let mut b = vec![7u8; len];
            let f = vec![1u8; len];
            for kind in 0..3 {
                let n = 3000_000_000 / len;
                let mut best = 0f64;
                for _ in 0..5 {
                    let t = Instant::now();
                    let n = n / 5;
                    for i in 0..n {
                        let at = i as u64 * 4096;
                        match kind {
                            0 => x.encrypt(&mut b, at),
                            1 => x.decrypt(&mut b, at),
                            _ => x.encrypt_from(&f, &mut b, at),
                        }
                    }
                    best = best.max((n * len) as f64 / t.elapsed().as_secs_f64() / 1e9);
                }
                println!(
                    "key {ks} sector {ss} len {len} {} {best:.2} GB/s",
                    ["enc", "dec", "enc_from"][kind]
                );
            }
        }
    }
}
