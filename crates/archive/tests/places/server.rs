//! A web server whose responses a test defines.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A request.
#[derive(Debug, Default)]
pub struct Asked {
    pub target: String,
    pub headers: Vec<(String, String)>,
}

impl Asked {
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self
            .headers
            .iter()
            .find(|(key, _)| key.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }

    /// Returns the start and the exclusive end of the `Range` header.
    pub fn range(&self) -> Option<(usize, usize)> {
        let (from, to) = self
            .header("range")?
            .strip_prefix("bytes=")?
            .split_once('-')?;
        Some((from.parse().ok()?, to.parse::<usize>().ok()? + 1))
    }
}

pub fn answer(status: &str, headers: &[&str], body: &[u8]) -> Vec<u8> {
    let length = format!("Content-Length: {}", body.len());
    raw_answer(status, &[headers, &[&length]].concat(), body)
}

pub fn raw_answer(status: &str, headers: &[&str], body: &[u8]) -> Vec<u8> {
    let head = format!(
        "HTTP/1.1 {status}\r\nConnection: close\r\n{}\r\n\r\n",
        headers.join("\r\n")
    );
    [head.as_bytes(), body].concat()
}

/// Returns the response of a correct server to a request for a part of `file`.
pub fn part(asked: &Asked, headers: &[&str], file: &[u8]) -> Vec<u8> {
    let Some((from, to)) = asked.range() else {
        return answer("200 OK", headers, file);
    };
    if from >= file.len() {
        return answer("416 Range Not Satisfiable", headers, b"");
    }
    let to = to.min(file.len());
    let range = format!("Content-Range: bytes {from}-{}/{}", to - 1, file.len());
    answer(
        "206 Partial Content",
        &[headers, &[&range]].concat(),
        &file[from..to],
    )
}

pub struct Server {
    pub url: String,
    asked: Arc<AtomicUsize>,
}

impl Server {
    /// Serves requests until the test process ends.
    pub fn start(answers: impl Fn(&Asked) -> Vec<u8> + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let url = format!("http://{}", listener.local_addr().expect("bound"));
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = asked.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                counted.fetch_add(1, Ordering::Relaxed);
                let Some(asked) = read(&stream) else { continue };
                // The client may have closed the connection before the end of the response.
                let _ = (&stream).write_all(&answers(&asked));
            }
        });
        Server { url, asked }
    }

    /// Returns the number of requests received.
    pub fn asked(&self) -> usize {
        self.asked.load(Ordering::Relaxed)
    }
}

fn read(stream: &TcpStream) -> Option<Asked> {
    let mut lines = BufReader::new(stream).lines().map_while(Result::ok);
    let first = lines.next()?;
    let headers = lines.take_while(|line| !line.is_empty());
    let headers = headers.filter_map(|line| {
        let (name, value) = line.split_once(':')?;
        Some((name.to_owned(), value.trim().to_owned()))
    });
    Some(Asked {
        target: first.split(' ').nth(1)?.to_owned(),
        headers: headers.collect(),
    })
}
