//! Objects on all kinds of servers.

use crate::run;
use crate::server::{Asked, Server, answer, part, raw_answer};
use fathom_archive::{Error, Object};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, Instant};

const ETAG: &str = "ETag: \"one\"";
const MODIFIED: &str = "Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT";

const RANGE: &str = "Content-Range: bytes 5000-5299/100000";

type Answers = fn(&Asked) -> Vec<u8>;

fn file() -> Vec<u8> {
    (0..100_000_u32).map(|at| (at / 7) as u8).collect()
}

fn open(server: &Server) -> Result<Object, Error> {
    run(Object::open(&format!("{}/disk.raw", server.url)))
}

/// Opens the server's file and reads a part of it.
fn open_and_read(server: &Server) -> Result<Vec<u8>, Error> {
    run(async {
        let object = Object::open(&format!("{}/disk.raw", server.url)).await?;
        assert_eq!(object.size(), 100_000);
        Ok(object.read(5000, 300).await?.to_vec())
    })
}

#[test]
fn parts_are_the_bytes_of_the_file() {
    for version in [ETAG, MODIFIED] {
        let server = Server::start(move |asked| part(asked, &[version], &file()));
        assert_eq!(open_and_read(&server).unwrap(), file()[5000..5300]);
    }
    let server = Server::start(|asked| part(asked, &[ETAG], &file()));
    let object = open(&server).unwrap();
    assert_eq!(object.version(), "\"one\"");
    assert_eq!(run(object.read(99_999, 1)).unwrap().len(), 1);
    assert_eq!(run(object.read(100_000, 0)).unwrap().len(), 0);
    let before = server.asked();
    for (offset, len) in [(99_999, 2), (u64::MAX, 1), (100_000, 1)] {
        run(object.read(offset, len)).unwrap_err();
    }
    assert_eq!(server.asked(), before, "what is not there is not asked for");
}

#[test]
fn a_path_is_a_file_too() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a disk #2%41.raw");
    std::fs::write(&path, file()).unwrap();
    let object = run(Object::open(path.to_str().unwrap())).unwrap();
    assert_eq!(run(object.read(5000, 300)).unwrap(), file()[5000..5300]);
    std::fs::write(&path, &file()[..99_000]).unwrap();
    let error = run(object.read(5000, 300)).unwrap_err();
    assert!(matches!(error, Error::Changed { .. }), "{error}");
    std::fs::remove_file(&path).unwrap();
    let error = run(object.read(5000, 300)).unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error}");
    let error = run(Object::open("no/such/file")).unwrap_err();
    assert!(matches!(error, Error::NotFound { .. }), "{error}");
    std::fs::write(&path, []).unwrap();
    assert_eq!(run(Object::open(path.to_str().unwrap())).unwrap().size(), 0);
}

/// A server may send the same weak tag for different bytes.
#[test]
fn weak_tag_is_no_version() {
    const WEAK: &str = "ETag: W/\"weak\"";
    let server = Server::start(|asked| part(asked, &[WEAK], &file()));
    let error = open(&server).unwrap_err();
    assert!(matches!(error, Error::Unusable { .. }), "{error}");
    assert!(
        error.to_string().contains("neither a strong ETag"),
        "{error}"
    );
    // With a weak tag, the time of the last change is the version.
    let is_changed = Arc::new(AtomicBool::new(false));
    let server = Server::start({
        let is_changed = is_changed.clone();
        move |asked| {
            const LATER: &str = "Last-Modified: Wed, 21 Oct 2015 07:28:01 GMT";
            let modified = match is_changed.load(SeqCst) {
                true => LATER,
                false => MODIFIED,
            };
            part(asked, &[WEAK, modified], &file())
        }
    });
    let object = open(&server).unwrap();
    assert_eq!(object.version(), "2015-10-21T07:28:00+00:00");
    assert_eq!(run(object.read(5000, 300)).unwrap(), file()[5000..5300]);
    is_changed.store(true, SeqCst);
    let error = run(object.read(5000, 300)).unwrap_err();
    assert!(matches!(error, Error::Changed { .. }), "{error}");
}

/// A signature in the address is sent to the server, and appears in no message.
#[test]
fn what_is_signed_stays_as_it_is() {
    let server = Server::start(|asked| match asked.target.as_str() {
        "/a%20b/disk.raw?signature=secret%2F&x=1" => part(asked, &[ETAG], &file()),
        _ => answer("403 Forbidden", &[], b""),
    });
    let url = format!("{}/a%20b/disk.raw?signature=secret%2F&x=1", server.url);
    let object = run(Object::open(&url)).unwrap();
    assert_eq!(object.shown(), format!("{}/a%20b/disk.raw", server.url));
    let error = run(Object::open(&format!("{}/other?secret", server.url))).unwrap_err();
    assert!(matches!(error, Error::Refused { .. }), "{error}");
    assert!(!error.to_string().contains("secret"), "{error}");
}

#[test]
fn redirects_are_followed() {
    let real = Server::start(|asked| part(asked, &[ETAG], &file()));
    let to = format!("Location: {}/real", real.url);
    let server = Server::start(move |_| answer("302 Found", &[&to], b""));
    assert_eq!(open_and_read(&server).unwrap(), file()[5000..5300]);
    let server = Server::start(|_| answer("302 Found", &["Location: /again"], b""));
    open(&server).unwrap_err();
}

/// Starts a server that sends the first response to the open request and the second to all others.
fn then(first: Answers, second: Answers) -> Server {
    let opened = Mutex::new(false);
    Server::start(move |asked| {
        let mut opened = opened.lock();
        match std::mem::replace(&mut *opened, true) {
            false => first(asked),
            true => second(asked),
        }
    })
}

fn good(asked: &Asked) -> Vec<u8> {
    part(asked, &[ETAG], &file())
}

#[test]
fn another_file_is_not_taken_for_the_same() {
    let others: [Answers; 5] = [
        // A server that supports conditional requests.
        |asked| match asked.header("if-match") {
            Some("\"one\"") => answer("412 Precondition Failed", &[], b""),
            _ => answer("500 Unconditional", &[], b""),
        },
        // Servers that do not.
        |asked| part(asked, &["ETag: \"two\""], &file()),
        |asked| part(asked, &[], &file()),
        |asked| part(asked, &[ETAG], &file()[..50_000]),
        |asked| part(asked, &[ETAG], &[]),
    ];
    for other in others {
        let error = open_and_read(&then(good, other)).unwrap_err();
        assert!(matches!(error, Error::Changed { .. }), "{error}");
    }
    let dated: Answers = |asked| part(asked, &[MODIFIED], &file());
    let later: Answers = |asked| match asked.header("if-unmodified-since") {
        Some("Wed, 21 Oct 2015 07:28:00 GMT") => part(
            asked,
            &["Last-Modified: Thu, 22 Oct 2015 07:28:00 GMT"],
            &file(),
        ),
        other => panic!("asked for {other:?}"),
    };
    let error = open_and_read(&then(dated, later)).unwrap_err();
    assert!(matches!(error, Error::Changed { .. }), "{error}");
}

#[test]
fn a_server_that_cannot_be_used_is_told_at_once() {
    let cannot: [(Answers, &str); 6] = [
        (|_| answer("200 OK", &[ETAG], &file()), "range requests"),
        (
            |asked| part(asked, &[], &file()),
            "neither a strong ETag nor Last-Modified",
        ),
        (
            |asked| part(asked, &[ETAG, "Content-Encoding: gzip"], &file()),
            "compressed (gzip)",
        ),
        (
            |_| {
                let range = "Content-Range: bytes 7-7/100000";
                answer("206 Partial Content", &[ETAG, range], b"x")
            },
            "Requested 0..1",
        ),
        (
            |_| answer("400 Bad", &[], b"<Code>Odd</Code>"),
            "replied 400 (Odd)",
        ),
        (|_| answer("404 Not Found", &[], b""), "not found"),
    ];
    for (answers, word) in cannot {
        let error = open(&Server::start(answers)).unwrap_err();
        let told = error.to_string();
        assert!(
            told.contains(word) && !error.is_transient(),
            "{word}: {told}"
        );
        assert!(told.starts_with("http://127.0.0.1:"), "{told}");
        assert!(!told.contains('\n') && told.len() < 400, "{told}");
    }
}

#[test]
fn other_bytes_than_asked_for_are_refused() {
    let odd: [Answers; 5] = [
        |asked| {
            let mut answer = part(asked, &[ETAG], &file());
            answer.truncate(answer.len() - 20);
            answer
        },
        |_| answer("206 Partial Content", &[ETAG, RANGE], &[1; 200]),
        |_| answer("206 Partial Content", &[ETAG, RANGE], &[1; 400]),
        |_| answer("200 OK", &[ETAG], &file()),
        |asked| part(asked, &[ETAG, "Content-Encoding: br"], &file()),
    ];
    for odd in odd {
        let error = open_and_read(&then(good, odd)).unwrap_err();
        assert!(!matches!(error, Error::Changed { .. }), "{error}");
    }
}

/// The client neither waits for the rest of a response that is too long, nor stores it.
#[test]
fn an_answer_that_is_too_long_is_left() {
    let others: [(Answers, &str); 2] = [
        (
            |_| answer("206 Partial Content", &[ETAG, RANGE], &[0; 64 << 20]),
            "bytes or more",
        ),
        (
            |_| {
                let headers = [ETAG, RANGE, "Transfer-Encoding: chunked"];
                let chunk = [&b"100000\r\n"[..], &[0; 1 << 20], b"\r\n"].concat();
                raw_answer("206 Partial Content", &headers, &chunk.repeat(32))
            },
            "Content-Length",
        ),
    ];
    for (long, word) in others {
        let error = open_and_read(&then(good, long)).unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    }
}

#[test]
fn a_server_in_trouble_is_waited_for_shortly() {
    let begun = Instant::now();
    let gone = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        format!("http://{}/disk.raw", listener.local_addr().unwrap())
    };
    let error = run(Object::open(&gone)).unwrap_err();
    assert!(error.is_transient(), "{error}");
    let server = Server::start(|_| answer("503 Busy", &[], b""));
    let error = open(&server).unwrap_err();
    assert!(
        error.is_transient() && error.to_string().contains("503"),
        "{error}"
    );
    assert_eq!(server.asked(), 3);
    assert!(begun.elapsed() < Duration::from_secs(40));
}

#[test]
fn a_file_without_bytes_is_one() {
    let server = Server::start(|asked| part(asked, &[ETAG], &[]));
    assert_eq!(open(&server).unwrap().size(), 0);
}
