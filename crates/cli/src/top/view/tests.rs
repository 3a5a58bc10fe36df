use super::*;
use crate::top::columns::Column;
use crate::top::look::Look;
use crate::top::samples::{disk, look, sample};
use crate::top::slow::Slow;
use fathom_metrics::{DiskSample, FrontEndSample, QueueSample};
use ratatui::Terminal;
use ratatui::backend::TestBackend;
use ratatui::style::{Color, Modifier};
use std::time::Duration;

fn used(name: &str, iops: f64, guest: &str) -> DiskSample {
    DiskSample {
        front_end: Some(FrontEndSample {
            pid: 7,
            guest: Some(guest.to_owned()),
            ..FrontEndSample::default()
        }),
        queues: vec![QueueSample {
            size: 128,
            ..QueueSample::default()
        }],
        ..disk(name, iops)
    }
}

fn state(look: Look) -> State {
    let mut state = State::new(look, Duration::from_secs(1));
    for _ in 0..3 {
        let disks = vec![
            used("web", 12_345.0, "vm-web"),
            disk("db", 7.0),
            disk("idle", 0.0),
        ];
        state.model.take("s".into(), sample(4711, disks), None);
    }
    state
}

fn frame(state: &State, width: u16, height: u16) -> Terminal<TestBackend> {
    let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
    terminal.draw(|frame| draw(frame, state)).unwrap();
    terminal
}

fn lines(state: &State, width: u16, height: u16) -> Vec<String> {
    let terminal = frame(state, width, height);
    let buffer = terminal.backend().buffer();
    let line = |y| -> String { (0..width).map(|x| buffer[(x, y)].symbol()).collect() };
    (0..height).map(|y| line(y).trim_end().to_owned()).collect()
}

#[test]
fn a_table_of_80_columns_has_what_matters() {
    let lines = lines(&state(look()), 80, 24);
    assert!(
        lines[0].starts_with("fathom top  1 server, 3 disks  IOPS r 12.4k w 0"),
        "{lines:#?}"
    );
    assert!(
        lines[1].contains("queue") && lines[1].contains("every 1s"),
        "{lines:#?}"
    );
    for head in [
        "DISK", "GUEST", "R/s", "W/s", "RMB/s", "WMB/s", "INFL", "p50", "p99", "STAGES", "ERR/s",
        "CPU%",
    ] {
        assert!(lines[2].contains(head), "no {head} in {}", lines[2]);
    }
    let row = &lines[3];
    assert!(
        row.starts_with("web") && row.contains("vm-web") && row.contains("12.3k"),
        "{row}"
    );
    assert!(row.contains("78us") && row.contains("<120us"), "{row}");
    assert!(lines[4].starts_with("db") && lines[5].starts_with("idle"));
    // Without a column for it, the hint of the selected disk has a line of its own.
    assert_eq!(lines[22], "web: latency: 1 in flight / 80 us");
    assert!(lines[23].starts_with("q quit"));
}

#[test]
fn a_wide_table_has_hints_and_fits() {
    let lines = lines(&state(look()), 200, 10);
    assert!(lines[2].ends_with("LIMITED BY"), "{}", lines[2]);
    assert!(lines[3].ends_with("in flight / 80 us"), "{}", lines[3]);
}

#[test]
fn a_bar_has_stages_by_their_share() {
    let mut state = state(look());
    state.columns = vec![Column::Stages];
    let terminal = frame(&state, 24, 10);
    let buffer = terminal.backend().buffer();
    let colours: Vec<_> = (0..24).map(|x| buffer[(x, 3)].fg).collect();
    let count = |stage| {
        let (_, style) = state.look.stage(stage);
        colours.iter().filter(|fg| Some(**fg) == style.fg).count()
    };
    assert_eq!((count(Stage::Queue), count(Stage::Device)), (6, 18));
}

#[test]
fn a_plain_terminal_shows_letters_only() {
    let plain = Look {
        colour: false,
        many: false,
        unicode: false,
        can_move: true,
    };
    let mut state = state(plain);
    let disks = vec![used("caf\u{e9}\x1b[2J", 100.0, "vm")];
    state.model.take("t".into(), sample(1, disks), None);
    let overlays = [
        Overlay::Nothing,
        Overlay::Help,
        Overlay::Fields,
        Overlay::Order,
    ];
    for (overlay, is_detail) in overlays
        .into_iter()
        .flat_map(|o| [(o.clone(), false), (o, true)])
    {
        state.overlay = overlay;
        state.detail = None;
        if is_detail {
            state.enter();
        }
        let terminal = frame(&state, 100, 40);
        for cell in terminal.backend().buffer().content() {
            assert!(cell.symbol().is_ascii(), "{:?}", cell.symbol());
            assert_eq!((cell.fg, cell.bg), (Color::Reset, Color::Reset));
        }
    }
    state.overlay = Overlay::Nothing;
    state.detail = None;
    let text = lines(&state, 100, 10);
    assert!(
        text.iter().any(|line| line.starts_with("caf??[2J")),
        "{text:#?}"
    );
    assert!(text[3].contains("qqddddddd"), "{text:#?}");
}

#[test]
fn one_disk_has_its_heat_map_with_axes() {
    let mut state = state(Look {
        many: false,
        ..look()
    });
    state.enter();
    state.slow = Slow::Some(vec!["op=read total_us=120".into()]);
    for (width, height) in [(80, 24), (160, 50)] {
        let lines = lines(&state, width, height);
        let all = lines.join("\n");
        assert!(lines[2].starts_with("web  /srv/a.img"), "{all}");
        assert!(
            all.contains("used by vm-web") && all.contains("limited by: latency"),
            "{all}"
        );
        // The latencies are around 2^(65/4) ns.
        assert!(all.contains("us│") && all.contains('█'), "{all}");
        assert!(
            all.contains("latency ") && all.contains("-30s") && all.contains("now"),
            "{all}"
        );
        let first = lines
            .iter()
            .find(|line| line.contains('█') && line.contains('│'))
            .unwrap();
        // The heat map has three intervals. In the narrow map, a column covers two of them.
        let columns = first.chars().filter(|c| *c == '█').count();
        assert_eq!(columns, if width == 80 { 2 } else { 3 }, "{first}");
        assert!(
            all.contains("queue 20us 25%") && all.contains("worker 0"),
            "{all}"
        );
        assert!(
            all.contains("queue 0 0/s 0 of 128") && all.contains("total_us=120"),
            "{all}"
        );
    }
}

#[test]
fn any_size_can_be_drawn() {
    let mut state = state(look());
    for is_detail in [false, true] {
        for overlay in [
            Overlay::Nothing,
            Overlay::Help,
            Overlay::Fields,
            Overlay::Filter("x".into()),
        ] {
            state.overlay = overlay;
            for (width, height) in [(1, 1), (2, 3), (10, 5), (79, 4), (300, 100), (500, 2)] {
                state.size = (width, height);
                frame(&state, width, height);
            }
        }
        state.overlay = Overlay::Nothing;
        if !is_detail {
            state.enter();
        }
    }
}

#[test]
fn the_selected_line_is_always_in_sight() {
    let mut state = State::new(look(), Duration::from_secs(1));
    let disks = (0..100).map(|n| disk(&format!("disk-{n:02}"), 1.0));
    state
        .model
        .take("s".into(), sample(1, disks.collect()), None);
    for wanted in [0, 50, 99] {
        state.step(isize::MIN);
        state.step(wanted);
        let lines = lines(&state, 80, 24);
        let name = format!("disk-{wanted:02}");
        assert!(
            lines[3..22].iter().any(|line| line.starts_with(&name)),
            "{name}: {lines:#?}"
        );
    }
    let terminal = frame(&state, 80, 24);
    let buffer = terminal.backend().buffer();
    let head = &buffer[(0, 2)];
    assert!(head.modifier.contains(Modifier::REVERSED));
}
