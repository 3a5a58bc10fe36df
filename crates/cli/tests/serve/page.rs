//! Checks the page at `/` in a headless browser.

use crate::browser::Browser;
use crate::live::{server, uri};
use crate::support::{Kept, Served, eventually, fathom, short_dir};
use serde_json::{Value, json};
use std::fs;
use std::path::PathBuf;
use std::process::Command;

fn load(served: &Served) -> Kept {
    let uri = uri(served, "slow");
    let args = ["bench", "--nbd", &uri, "--rw", "randread", "--iodepth", "4"];
    Kept::spawn(fathom().args(args).args(["--runtime", "10m"]))
}

/// Waits until an expression is true on the page.
fn until(browser: &mut Browser, expression: &str) {
    eventually(expression, || {
        (browser.eval(&format!("Boolean({expression})")) == true).then_some(())
    });
}

/// Returns the number of different colours on a canvas.
fn colours(browser: &mut Browser, canvas: &str) -> f64 {
    browser.number(&format!(
        "(() => {{ const it = document.getElementById('{canvas}'); \
         const all = it.getContext('2d').getImageData(0, 0, it.width, it.height).data; \
         return new Set(new Uint32Array(all.buffer)).size; }})()"
    ))
}

/// Saves a screenshot if the variable FATHOM_PICTURES names a directory.
fn keep_picture(browser: &mut Browser, name: &str) {
    let Some(dir) = std::env::var_os("FATHOM_PICTURES").map(PathBuf::from) else {
        return;
    };
    let shot = browser.call(
        "Page.captureScreenshot",
        json!({ "captureBeyondViewport": true }),
    );
    let base64 = dir.join(format!("{name}.base64"));
    fs::write(&base64, shot["data"].as_str().unwrap()).unwrap();
    let decode = "base64 -d \"$1\" >\"$2\" && rm \"$1\"";
    let decoded = Command::new("sh")
        .args(["-c", decode, "sh"])
        .args([&base64, &dir.join(format!("{name}.png"))])
        .status();
    assert!(decoded.unwrap().success());
}

/// Returns the browser's errors, except its warning about how this test reads canvases.
fn complaints(browser: &mut Browser) -> Vec<String> {
    let mut all = browser.complaints();
    all.retain(|one| !one.contains("willReadFrequently"));
    all
}

fn row(disk: &str) -> String {
    format!("document.querySelector('#disks tr[data-disk=\"{disk}\"]')")
}

#[test]
fn the_page_shows_what_goes_on_at_any_width_by_day_and_by_night() {
    let (served, address) = server("");
    let _load = load(&served);
    for (width, height, dark) in [
        (360, 740, true),
        (1920, 1080, false),
        (360, 740, false),
        (1920, 1080, true),
    ] {
        let mut browser = Browser::start(width, height);
        browser.dark(dark);
        browser.visit(&format!("http://{address}/"));
        let slow = row("slow");
        until(
            &mut browser,
            &format!("{slow} && {slow}.innerText.includes('delay:read=30ms filter: ')"),
        );
        assert_eq!(
            browser.number("document.querySelectorAll('#disks tbody tr').length"),
            3.0
        );
        assert_eq!(
            browser.text("document.getElementById('state').textContent"),
            "live"
        );
        // The page shows the busiest disk, with its latencies in the picture.
        assert_eq!(
            browser.text("document.getElementById('name').textContent"),
            "slow"
        );
        until(
            &mut browser,
            "histories.get('slow').filter((tick) => tick.histogram.length).length > 2",
        );
        until(
            &mut browser,
            "document.getElementById('heat').getAttribute('aria-label').includes('30 ms')",
        );
        let (heat, stages) = (
            colours(&mut browser, "heat"),
            colours(&mut browser, "stages"),
        );
        assert!(heat > 4.0 && stages > 4.0, "{heat} {stages}");
        // The picture of a disk without requests is empty.
        browser.click(&row("idle"));
        until(
            &mut browser,
            "document.getElementById('name').textContent === 'idle'",
        );
        until(
            &mut browser,
            "document.getElementById('heat').getAttribute('aria-label') === 'no requests yet'",
        );
        assert!(colours(&mut browser, "heat") < heat);
        browser.click(&row("slow"));
        until(
            &mut browser,
            "document.getElementById('name').textContent === 'slow'",
        );
        until(&mut browser, "histories.get('slow').length > 8");
        until(
            &mut browser,
            "/queue \\d/.test(document.getElementById('slow').innerText)",
        );
        let wide = browser.number("document.documentElement.scrollWidth - innerWidth");
        assert!(wide <= 0.0, "{width}: {wide} px wider than the window");
        let text = "getComputedStyle(document.body).color";
        let back = "getComputedStyle(document.body).backgroundColor";
        let (text, back) = (browser.text(text), browser.text(back));
        assert_eq!(
            brightness(&text) > brightness(&back),
            dark,
            "{text} on {back}"
        );
        let name = format!("live-{width}-{}", if dark { "dark" } else { "light" });
        keep_picture(&mut browser, &name);
        assert_eq!(complaints(&mut browser), [""; 0]);
    }
}

/// Returns the brightness of a colour such as `rgb(1, 2, 3)`.
fn brightness(colour: &str) -> u32 {
    let numbers = colour.split(|c: char| !c.is_ascii_digit());
    numbers
        .filter_map(|number| number.parse::<u32>().ok())
        .sum()
}

#[test]
fn the_page_filters_sorts_and_comes_back_when_the_server_does() {
    let (served, address) = server("");
    let mut browser = Browser::start(1200, 900);
    browser.visit(&format!("http://{address}/"));
    until(&mut browser, &row("idle"));
    let names = "[...document.querySelectorAll('#disks tbody tr')].map((row) => row.dataset.disk)";
    browser.click("document.querySelector('#disks th button')");
    until(
        &mut browser,
        "document.querySelector('#disks th').ariaSort === 'ascending'",
    );
    assert_eq!(browser.eval(names), json!(["bad", "idle", "slow"]));
    browser.click("document.querySelector('#disks th button')");
    until(
        &mut browser,
        "document.querySelector('#disks th').ariaSort === 'descending'",
    );
    assert_eq!(browser.eval(names), json!(["slow", "idle", "bad"]));
    browser.click("document.getElementById('filter')");
    browser.call("Input.insertText", json!({ "text": "BA" }));
    until(
        &mut browser,
        "document.querySelectorAll('#disks tbody tr').length === 1",
    );
    assert_eq!(browser.eval(names), json!(["bad"]));
    assert_eq!(complaints(&mut browser), [""; 0]);
    // After an upgrade, the page connects to the successor.
    let pid = browser.number("sample.pid");
    served.upgrade();
    until(
        &mut browser,
        &format!("sample.pid !== {pid} && document.getElementById('state').textContent === 'live'"),
    );
    // A page that is not visible requests nothing. The page continues when it is visible again.
    browser.eval(
        "Object.defineProperty(document, 'hidden', { value: true, configurable: true }); \
                  document.dispatchEvent(new Event('visibilitychange'))",
    );
    until(
        &mut browser,
        "document.getElementById('state').textContent === 'paused'",
    );
    let number = browser.number("sample.number");
    std::thread::sleep(std::time::Duration::from_secs(2));
    assert_eq!(browser.number("sample.number"), number);
    browser.eval(
        "Object.defineProperty(document, 'hidden', { value: false, configurable: true }); \
                  document.dispatchEvent(new Event('visibilitychange')); sample.number = 0",
    );
    until(
        &mut browser,
        "document.getElementById('state').textContent === 'live' && sample.number > 0",
    );
}

#[test]
fn names_are_text_and_nothing_else_may_run() {
    let dir = short_dir();
    let name = "<img src=x onerror=alert(1)>";
    let config = format!(
        "api = {{ socket = '{}', http = '127.0.0.1:0' }}\n[[disk]]\nname = 'a'\nimage = 'memory:1M'\n\
         vhost-user = '{}'\n",
        dir.path().join("c").display(),
        dir.path().join("s").display()
    );
    fs::write(dir.path().join("conf"), config).unwrap();
    let mut command = fathom();
    command
        .args(["serve", "--config"])
        .arg(dir.path().join("conf"));
    let mut served = Served::spawn(command, dir);
    served.wait_for("metrics are at");
    let log = served.log();
    let address = log.split("metrics are at http://").nth(1).unwrap();
    let address = address.split('/').next().unwrap();
    let head = Command::new("curl")
        .args(["-sI", &format!("http://{address}/")])
        .output()
        .unwrap();
    let head = String::from_utf8(head.stdout).unwrap().to_lowercase();
    for wanted in [
        "200 ok",
        "text/html; charset=utf-8",
        "default-src 'none'",
        "script-src 'nonce-",
        "frame-ancestors 'none'",
        "nosniff",
    ] {
        assert!(head.contains(wanted), "no {wanted} in {head}");
    }
    // The name of a guest may have any characters.
    let socket = served.arg("s");
    let mut guest = Command::new("qemu-system-x86_64");
    guest.args([
        "-name",
        &format!("guest={name}"),
        "-display",
        "none",
        "-m",
        "64",
        "-S",
    ]);
    guest.args([
        "-object",
        "memory-backend-memfd,id=mem,size=64M,share=on",
        "-machine",
        "q35,memory-backend=mem",
    ]);
    guest.args(["-chardev", &format!("socket,id=d,path={socket}")]);
    guest.args(["-device", "vhost-user-blk-pci,chardev=d"]);
    let _guest = Kept::spawn(&mut guest);
    let mut browser = Browser::start(1200, 900);
    browser.visit(&format!("http://{address}/"));
    until(
        &mut browser,
        &format!(
            "document.querySelector('td.guest')?.textContent === {}",
            Value::from(name)
        ),
    );
    assert_eq!(browser.number("document.images.length"), 0.0);
    assert_eq!(complaints(&mut browser), [""; 0]);
    // The policy blocks scripts that are not part of the page.
    browser.eval("const it = document.createElement('script'); it.textContent = 'window.ran = true'; document.body.append(it)");
    assert_eq!(browser.eval("window.ran ?? false"), false);
}
