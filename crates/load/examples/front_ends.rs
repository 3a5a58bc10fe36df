//! Random reads from many disks by one process: `front_ends QUEUES DEPTH SOCKET...` runs a
//! front-end per socket, for an hour or until it is killed. A process per front-end would cost the
//! kernel more than one process with the same number of queues. `tools/bench/pools.py` compares
//! this program with the latter.

use fathom_load::{Load, Options, Result, Rw, Target, VhostUser, run};
use std::time::Duration;

fn main() -> Result<()> {
    let args: Vec<_> = std::env::args().skip(1).collect();
    let numbers = args.first().zip(args.get(1));
    let numbers =
        numbers.and_then(|(queues, depth)| Some((queues.parse().ok()?, depth.parse().ok()?)));
    let Some((queues, iodepth)) = numbers else {
        eprintln!("usage: front_ends QUEUES DEPTH SOCKET...");
        std::process::exit(2);
    };
    let load = Load {
        rw: Rw::RandRead,
        queues,
        iodepth,
        runtime: Some(Duration::from_secs(3600)),
        ..Load::default()
    };
    std::thread::scope(|scope| {
        let loads: Vec<_> = { args[2..].iter() }
            .map(|socket| {
                let (target, load) = (Target::VhostUser(VhostUser::new(socket)), load.clone());
                scope.spawn(move || run(&Options { target, load }, &mut |_| ()).map(drop))
            })
            .collect();
        { loads.into_iter() }.try_for_each(|load| load.join().expect("a load has panicked"))
    })
}
