//! A headless Chromium, driven over its debugging pipe (DevTools protocol). Messages are JSON with
//! a terminating NUL; the browser reads from descriptor 3 and writes to descriptor 4.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use fathom_testing::PATIENCE;
use serde_json::{Value, json};

/// The pages are trusted, and root (as in containers) cannot use the sandbox.
const START: &str = "exec chromium --headless=new --no-sandbox --disable-gpu --hide-scrollbars \
                     --no-first-run --disable-extensions --user-data-dir=\"$0\" \
                     --remote-debugging-pipe about:blank 3<&0 4>&1 </dev/null >/dev/null 2>&1";

pub struct Browser {
    child: Child,
    to: Option<ChildStdin>,
    from: Receiver<Value>,
    session: Option<String>,
    calls: u64,
    /// Events that arrived while a reply was awaited.
    events: Vec<Value>,
    /// The prefix of URLs that the pages may request.
    home: String,
    profile: tempfile::TempDir,
}

impl Browser {
    /// Starts a browser with a window of this size.
    pub fn start(width: u32, height: u32) -> Browser {
        let profile = tempfile::tempdir().unwrap();
        let mut child = Command::new("sh")
            .args(["-c", START])
            .arg(profile.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let to = child.stdin.take();
        let out = BufReader::new(child.stdout.take().unwrap());
        let (sender, from) = channel();
        std::thread::spawn(move || {
            for message in out.split(0).map_while(Result::ok) {
                let message = serde_json::from_slice(&message).expect("JSON from the browser");
                if sender.send(message).is_err() {
                    break;
                }
            }
        });
        let mut browser = Browser {
            child,
            to,
            from,
            session: None,
            calls: 0,
            events: Vec::new(),
            home: "file:".to_owned(),
            profile,
        };
        browser.attach(width, height);
        browser
    }

    fn attach(&mut self, width: u32, height: u32) {
        let targets = self.call("Target.getTargets", json!({}));
        let targets = targets["targetInfos"].as_array().unwrap();
        let page = targets.iter().find(|target| target["type"] == "page");
        let id = page.expect("a page")["targetId"].clone();
        let attached = self.call(
            "Target.attachToTarget",
            json!({"targetId": id, "flatten": true}),
        );
        self.session = attached["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Network"] {
            self.call(&format!("{domain}.enable"), json!({}));
        }
        let size =
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        self.call("Emulation.setDeviceMetricsOverride", size);
    }

    fn next(&mut self) -> Value {
        match self.from.recv_timeout(PATIENCE) {
            Ok(message) => message,
            Err(_) => panic!(
                "no word from chromium (is it installed? tools/setup.sh does that); it is {:?}",
                self.child.try_wait()
            ),
        }
    }

    /// Calls a method and returns its result.
    pub fn call(&mut self, method: &str, params: Value) -> Value {
        self.calls += 1;
        let id = self.calls;
        let mut message = json!({"id": id, "method": method, "params": params});
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        let mut bytes = message.to_string().into_bytes();
        bytes.push(0);
        // Without a browser the pipe breaks; waiting for the reply then explains how to install
        // one.
        let _ = self.to.as_mut().unwrap().write_all(&bytes);
        loop {
            let mut answer = self.next();
            if answer["id"] == id {
                assert!(answer["error"].is_null(), "{method}: {}", answer["error"]);
                return answer["result"].take();
            }
            self.events.push(answer);
        }
    }

    /// Opens a file and waits until it is loaded.
    pub fn open(&mut self, file: &Path) {
        self.navigate(&format!("file://{}", file.display()));
    }

    /// Opens a server's page, which may request more from that server, and waits until it is
    /// loaded.
    #[allow(dead_code, reason = "reports have no server")]
    pub fn visit(&mut self, url: &str) {
        self.home = url.to_owned();
        self.navigate(url);
    }

    fn navigate(&mut self, url: &str) {
        self.call("Page.navigate", json!({ "url": url }));
        while !self
            .events
            .iter()
            .any(|event| event["method"] == "Page.loadEventFired")
        {
            let event = self.next();
            self.events.push(event);
        }
        // Resize observers have run after two frames.
        self.eval(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))",
        );
    }

    /// Returns everything that went wrong so far: exceptions, console messages, and entries of the
    /// browser's log. Also returns requests for anything but files or URLs of the visited server.
    pub fn complaints(&mut self) -> Vec<String> {
        // All events caused so far arrive before this reply.
        self.eval("0");
        let home = &self.home;
        let bad = |event: &&Value| match event["method"].as_str() {
            Some("Runtime.exceptionThrown" | "Runtime.consoleAPICalled" | "Log.entryAdded") => true,
            Some("Network.requestWillBeSent") => {
                let url = event["params"]["request"]["url"].as_str().unwrap_or("");
                !url.starts_with(home)
            }
            _ => false,
        };
        self.events
            .iter()
            .filter(bad)
            .map(Value::to_string)
            .collect()
    }

    /// Evaluates an expression in the page, and awaits it if it is a promise.
    pub fn eval(&mut self, expression: &str) -> Value {
        let params = json!({"expression": expression, "returnByValue": true, "awaitPromise": true});
        let mut result = self.call("Runtime.evaluate", params);
        assert!(
            result["exceptionDetails"].is_null(),
            "{expression}: {}",
            result["exceptionDetails"]
        );
        result["result"]["value"].take()
    }

    /// Evaluates an expression whose value is text.
    pub fn text(&mut self, expression: &str) -> String {
        let value = self.eval(expression);
        value
            .as_str()
            .unwrap_or_else(|| panic!("{expression}: {value}"))
            .to_owned()
    }

    pub fn number(&mut self, expression: &str) -> f64 {
        let value = self.eval(expression);
        value
            .as_f64()
            .unwrap_or_else(|| panic!("{expression}: {value}"))
    }

    /// Sets the preferred colour scheme to dark or light.
    pub fn dark(&mut self, dark: bool) {
        let value = if dark { "dark" } else { "light" };
        let features = json!([{"name": "prefers-color-scheme", "value": value}]);
        self.call(
            "Emulation.setEmulatedMedia",
            json!({ "features": features }),
        );
    }

    /// Scrolls an element into view and returns the position of its top left corner.
    pub fn place(&mut self, element: &str) -> (f64, f64) {
        let corner = self.eval(&format!(
            "(() => {{ const it = {element}; it.scrollIntoView({{block: 'center'}}); \
             const {{left, top}} = it.getBoundingClientRect(); return [left, top]; }})()"
        ));
        (corner[0].as_f64().unwrap(), corner[1].as_f64().unwrap())
    }

    fn mouse(&mut self, kind: &str, x: f64, y: f64, clicks: u32) {
        let button = if clicks > 0 { "left" } else { "none" };
        let params = json!({"type": kind, "x": x, "y": y, "button": button, "clickCount": clicks});
        self.call("Input.dispatchMouseEvent", params);
    }

    /// Moves the pointer to an element, `x` and `y` from its top left corner.
    pub fn point(&mut self, element: &str, x: f64, y: f64) {
        let (left, top) = self.place(element);
        self.mouse("mouseMoved", left + x, top + y, 0);
    }

    /// Clicks on the middle of an element.
    pub fn click(&mut self, element: &str) {
        let (left, top) = self.place(element);
        let width = self.number(&format!("{element}.getBoundingClientRect().width"));
        let height = self.number(&format!("{element}.getBoundingClientRect().height"));
        let (x, y) = (left + width / 2.0, top + height / 2.0);
        self.mouse("mouseMoved", x, y, 0);
        self.mouse("mousePressed", x, y, 1);
        self.mouse("mouseReleased", x, y, 1);
    }

    /// Drags from one `x` of an element to another, at half its height.
    pub fn drag(&mut self, element: &str, from: f64, to: f64) {
        let (left, top) = self.place(element);
        let y = top + self.number(&format!("{element}.getBoundingClientRect().height")) / 2.0;
        self.mouse("mouseMoved", left + from, y, 0);
        self.mouse("mousePressed", left + from, y, 1);
        self.mouse("mouseMoved", left + (from + to) / 2.0, y, 1);
        self.mouse("mouseMoved", left + to, y, 1);
        self.mouse("mouseReleased", left + to, y, 1);
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        // Closing the pipe ends the browser and its children.
        self.to = None;
        while self.from.recv_timeout(Duration::from_secs(10)).is_ok() {}
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(self.profile.path());
    }
}
