use super::*;
use crate::pieces::PIECE;
use fathom_trace::{Op, Recorder, Stage, StageHistograms, Stamps, TraceRecord, Wire};
use serde_json::json;

/// Returns a disk with one slow read.
fn measured(name: &str) -> Measured {
    let histograms = Arc::new(StageHistograms::default());
    let mut recorder = Recorder::new(histograms.clone());
    let mut stamps = Stamps::start(0);
    stamps.enter(Stage::Device, 10_000);
    stamps.end(3_000_000);
    recorder.record(Op::Read, 4096, &stamps, || TraceRecord {
        stamps: stamps.raw(),
        offset: 0,
        len: 4096,
        queue: 0,
        op: Op::Read,
        error: 0,
        polled: false,
        wire: Wire::None,
    });
    recorder.flush();
    let worker = json!({
        "requests": 1, "notifications": 0, "sleeps": 0, "polled_ns": 0, "cpu_ns": 1, "batches": [0, 1, 0]
    });
    let slow = json!({
        "id": "1-2", "time_ms": 1_500, "op": "read", "offset": 0, "len": 4096, "queue": 0, "error": 0,
        "polled": false, "total_ns": 3_000_000, "stages": {}, "longest": "device"
    });
    let counts =
        json!({ "histograms": [histograms.state()], "workers": [], "refused": 0, "slow": [slow] });
    Measured::made(name, worker, counts)
}

fn page(disks: Vec<Measured>, form: Form) -> Page {
    Page {
        own: ProcessInfo::default(),
        disks,
        guests: Vec::new(),
        scale: Arc::new(Scale::new(1e9)),
        form,
    }
}

fn pieces(disks: Vec<Measured>, form: Form) -> Vec<Vec<u8>> {
    let mut pieces = Vec::new();
    let take = |piece| {
        pieces.push(piece);
        Ok(())
    };
    expose(page(disks, form), take).unwrap();
    pieces
}

fn text(name: &str, form: Form) -> String {
    String::from_utf8(pieces(vec![measured(name)], form).concat()).unwrap()
}

#[test]
fn names_are_escaped_on_every_line() {
    for form in [Form::OpenMetrics, Form::Text] {
        let plain = text("ab", form);
        assert!(plain.contains("op=\"read\",stage=\"device\""), "{plain}");
        let wanted = plain.replace("disk=\"ab\"", r#"disk="a\"\\\nb""#);
        assert_eq!(text("a\"\\\nb", form), wanted);
    }
}

#[test]
fn a_slow_request_is_beside_its_bucket() {
    let text = text("a", Form::OpenMetrics);
    let found = text.lines().filter(|line| line.contains(" # {slow="));
    let wanted = r#"fathom_request_duration_seconds_bucket{le="0.005",disk="a",op="read"} 1"#;
    let exemplar = r##" # {slow="1-2",stage="device"} 0.003 1.500"##;
    assert_eq!(found.collect::<String>(), format!("{wanted}{exemplar}"));
    assert!(text.ends_with("\n# EOF\n"));
}

#[test]
fn a_page_comes_in_pieces_until_nobody_wants_more() {
    let disks = || (0..20).map(|number| measured(&format!("d{number}")));
    for form in [Form::OpenMetrics, Form::Text] {
        let pieces = pieces(disks().collect(), form);
        assert!(pieces.len() > 2 && pieces.iter().all(|piece| piece.len() <= PIECE));
        let text = String::from_utf8(pieces.concat()).unwrap();
        let ends = text.lines().filter(|line| line.contains("le=\"+Inf\""));
        assert_eq!(ends.count(), 20 * (1 + Stage::COUNT + 1));
    }
    let mut taken = 0;
    let take = |_| {
        taken += 1;
        Err(fmt::Error)
    };
    assert!(expose(page(disks().collect(), Form::Text), take).is_err());
    assert_eq!(taken, 1);
}
