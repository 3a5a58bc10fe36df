//! Tests archives in S3, with moto as the server.

use crate::place::{Place, raw};
use crate::support::certificates::Certificates;
use crate::support::check_refusal;
use crate::support::s3::S3;
use serde_json::Value;
use std::fs;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

/// Returns the command `fathom img ARGS`, as a client of this server.
fn img(s3: &S3, args: &[&str], more: &[(&str, &str)]) -> Command {
    let mut command = s3.fathom();
    command
        .arg("img")
        .args(args)
        .envs(more.iter().copied())
        .stdin(Stdio::null());
    command
}

fn done(s3: &S3, args: &[&str]) -> String {
    let output = img(s3, args, &[]).output().unwrap();
    assert!(output.status.success(), "{args:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

fn last(said: &str) -> Value {
    serde_json::from_str(said.lines().last().expect("an end")).expect("JSON")
}

fn check(output: Output, words: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    check_refusal(output.status, &said, 1, words);
}

#[test]
fn an_image_goes_to_a_bucket_and_comes_back() {
    let s3 = S3::start(&[]);
    let place = Place::new();
    let disk = raw(&place, "disk");
    let archive = "s3://bucket/images of ours/x";
    let manifest = format!("{archive}/images/one.manifest");
    let args = [
        "archive",
        "--json",
        "--stripe-size",
        "64k",
        "-f",
        "raw",
        &disk,
    ];
    let told = last(&done(&s3, &[&args[..], &[archive, "one"]].concat()));
    assert_eq!(told["manifest"], manifest.as_str());
    place.write("disk", "raw", &["write -P 77 100 512"]);
    let told = last(&done(&s3, &[&args[..], &[archive, "two"]].concat()));
    assert_eq!(told["new-stripes"], 1, "{told}");
    let again = ["archive", "-f", "raw", &disk, archive, "two"];
    let again = img(&s3, &again, &[]).output().unwrap();
    check(again, &["two.manifest", "already exists"]);
    let listed = done(&s3, &["archive", "--list", "--json", archive]);
    let listed: Value = serde_json::from_str(&listed).unwrap();
    assert_eq!(
        (&listed[0]["name"], &listed[1]["name"]),
        (&"one".into(), &"two".into())
    );
    let back = place.path("back.qcow2");
    let two = format!("{archive}/images/two.manifest");
    done(&s3, &["restore", "-O", "qcow2", &two, &back]);
    place.same("qcow2", &back, &disk);
    // A stripe that is stored in the place of another one is rejected.
    let keys =
        String::from_utf8(s3.curl(&[], "bucket?prefix=images%20of%20ours/x/stripes")).unwrap();
    let keys: Vec<_> = keys
        .split("<Key>")
        .skip(1)
        .map(|rest| rest.split('<').next().unwrap())
        .collect();
    let name = |key: &str| format!("bucket/{}", key.replace(' ', "%20"));
    let other = place.path("other");
    fs::write(&other, s3.curl(&[], &name(keys[1]))).unwrap();
    s3.curl(&["-T", &other], &name(keys[0]));
    fs::remove_file(&back).unwrap();
    let one = ["restore", &*manifest, &back];
    check(img(&s3, &one, &[]).output().unwrap(), &[keys[0], "damaged"]);
    s3.curl(&["-X", "DELETE"], &name(keys[0]));
    check(img(&s3, &one, &[]).output().unwrap(), &[keys[0], "lost"]);
    assert_eq!(place.names(), ["disk", "other"]);
}

/// Each command prints one line and does not retry for long.
#[test]
fn servers_that_refuse_or_are_not_there_are_told() {
    let s3 = S3::start(&[]);
    let place = Place::new();
    let disk = raw(&place, "disk");
    done(
        &s3,
        &["archive", "-f", "raw", &disk, "s3://bucket/x", "image"],
    );
    let begun = Instant::now();
    let nobody = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let nobody = format!("http://{nobody}");
    // The server accepts connections and never replies.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let silent = format!("http://{}", silent.local_addr().unwrap());
    let back = place.path("back");
    let all = |archive: &str, more: &[(&str, &str)], words: &[&str]| {
        let manifest = format!("{archive}/images/image.manifest");
        for args in [
            &["archive", "-f", "raw", &disk, archive, "new"][..],
            &["archive", "--list", archive],
            &["restore", &manifest, &back],
        ] {
            check(img(&s3, args, more).output().unwrap(), words);
        }
    };
    all("s3://nowhere/x", &[], &["s3://nowhere/x", "no such bucket"]);
    all(
        "s3://bucket/x",
        &[("AWS_ENDPOINT_URL", &nobody)],
        &["unreachable", "refused"],
    );
    all(
        "s3://bucket/x",
        &[("AWS_ALLOW_HTTP", "false")],
        &["AWS_ALLOW_HTTP=true"],
    );
    let soon = [
        ("AWS_ENDPOINT_URL", &*silent),
        ("AWS_READ_TIMEOUT", "1 second"),
    ];
    let soon = [soon[0], ("AWS_TIMEOUT", "1 second")];
    all("s3://bucket/x", &soon, &["unreachable", "no reply in time"]);
    all(
        "s3://key:secret@bucket/x",
        &[],
        &["credentials must not be"],
    );
    // From here on, moto checks credentials.
    let text = "Content-Type: text/plain";
    s3.curl(&["-H", text, "-d", "0"], "moto-api/reset-auth");
    all(
        "s3://bucket/x",
        &[],
        &["access denied", "AWS_ACCESS_KEY_ID"],
    );
    // The default timeout of the library is 3 minutes for each request.
    let limit = Duration::from_secs(120);
    assert!(begun.elapsed() < limit, "{:?}", begun.elapsed());
    assert_eq!(place.names(), ["disk"]);
}

#[test]
fn by_tls_only_those_are_asked_whom_the_system_trusts() {
    let certificates = Certificates::new();
    let file = |name: &str| certificates.path("server") + "/" + name;
    let args = [
        "-s",
        "-c",
        &file("server-cert.pem"),
        "-k",
        &file("server-key.pem"),
    ];
    let s3 = S3::start(&args);
    let place = Place::new();
    let disk = raw(&place, "disk");
    let args = ["archive", "-f", "raw", &disk, "s3://bucket/x", "image"];
    let of = |authority: &str| certificates.path(authority) + "/ca-cert.pem";
    let by = |authority: &str| {
        img(&s3, &args, &[("SSL_CERT_FILE", &of(authority))])
            .output()
            .unwrap()
    };
    check(
        by("others"),
        &["is not trusted", "certificate", "SSL_CERT_FILE"],
    );
    let good = by("ours");
    assert!(good.status.success(), "{good:?}");
}
