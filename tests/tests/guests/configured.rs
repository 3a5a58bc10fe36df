//! A server of several disks that is started with a configuration, and its successors.

use std::path::PathBuf;
use std::process::{Child, Command};
use std::time::Duration;

use fathom_testing::until;
use fathom_tests::image::Image;
use fathom_tests::{Ended, Place, fathom, run};

const STEP: Duration = Duration::from_secs(120);

/// The server ends with the test.
pub struct Configured {
    child: Child,
    api: PathBuf,
}

impl Configured {
    /// Serves each image at a socket with the disk's name; `head` comes before the disks.
    pub fn start(place: &Place, head: &str, disks: &[(&str, &Image)]) -> Self {
        let sockets = place.sockets();
        let api = sockets.join("api");
        let mut text = format!("api = {{ socket = {api:?} }}\n{head}\n");
        for (name, image) in disks {
            let (socket, format, image) = (sockets.join(name), image.format(), image.path());
            text += &format!(
                "[[disk]]\nname = {name:?}\nimage = {image:?}\nformat = {format:?}\n\
                 vhost-user = {socket:?}\n"
            );
        }
        let file = place.path("fathom.toml");
        std::fs::write(&file, text).unwrap();
        let mut command = Command::new(fathom());
        command.args(["serve", "--config"]).arg(file);
        let child = command.spawn().unwrap();
        let server = Self { child, api };
        until("the API's socket", || server.api.exists());
        server
    }

    /// Runs `fathom COMMAND` for this server, followed by `words`.
    pub fn ask(&self, command: &[&str], words: &[&str]) -> Ended {
        let api = self.api.to_str().unwrap();
        run(&[command, &[api], words].concat(), STEP)
    }

    /// Like [`Configured::ask`], but the command must succeed. Returns its output.
    pub fn done(&self, command: &[&str], words: &[&str]) -> String {
        let ended = self.ask(command, words);
        assert_eq!(ended.code, Some(0), "{command:?}: {}", ended.stderr);
        ended.stdout
    }

    /// Returns the output of `fathom COMMAND --json`.
    pub fn json(&self, command: &[&str], words: &[&str]) -> serde_json::Value {
        let said = self.done(command, &[words, &["--json"]].concat());
        serde_json::from_str(&said).unwrap()
    }

    /// Returns the id of the process that serves the disk; `None` while it is being started.
    pub fn process_of(&self, disk: &str) -> Option<u64> {
        let shown = self.ask(&["info"], &["--disk", disk, "--json"]);
        let shown: serde_json::Value = serde_json::from_str(&shown.stdout).ok()?;
        shown["pid"].as_u64()
    }

    /// Ends the server, or its successor.
    pub fn quit(mut self) {
        self.done(&["quit"], &[]);
        assert!(self.child.wait().unwrap().success());
        until("the server's end", || !self.api.exists());
    }
}

impl Drop for Configured {
    fn drop(&mut self) {
        if self.api.exists() {
            let api = self.api.to_string_lossy();
            let _ = Command::new(fathom()).args(["quit", &api]).output();
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
