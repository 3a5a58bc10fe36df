//! Tests of STARTTLS, with certificates made here and rustls as the client.

use super::super::{Failure, Mode, Outcome};
use super::client::{Client, TestHost, choice, contexts, header, host, host_with_tls};
use crate::nbd::tls::Tls;
use fathom_nbd::protocol::{Replies, opt, rep};
use fathom_tls::pki::Pki;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::version::{TLS12, TLS13};
use rustls::{
    ClientConfig, ClientConnection, RootCertStore, StreamOwned, SupportedProtocolVersion,
};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

fn server(pki: &Pki, mode: Mode, verify: bool) -> Arc<TestHost> {
    let ca = pki.path("ca-cert.pem");
    let (cert, key) = (pki.path("server-cert.pem"), pki.path("server-key.pem"));
    host_with_tls(Tls::load(mode, &cert, &key, verify.then_some(&*ca)).unwrap())
}

/// Creates a client's TLS session; with `identity`, the client has a certificate.
fn session(
    pki: &Pki,
    identity: Option<&Pki>,
    versions: &[&'static SupportedProtocolVersion],
) -> ClientConnection {
    let mut roots = RootCertStore::empty();
    roots.add(pki.ca().der().clone()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(roots);
    let config = match identity {
        None => config.with_no_client_auth(),
        Some(pki) => {
            let cert = CertificateDer::from_pem_file(pki.path("client-cert.pem")).unwrap();
            let key = PrivateKeyDer::from_pem_file(pki.path("client-key.pem")).unwrap();
            config.with_client_auth_cert(vec![cert], key).unwrap()
        }
    };
    let name = ServerName::try_from("localhost").unwrap();
    ClientConnection::new(Arc::new(config), name).unwrap()
}

type Encrypted = Client<StreamOwned<ClientConnection, UnixStream>>;

fn start_tls(mut client: Client, session: ClientConnection) -> Encrypted {
    client.ask(opt::STARTTLS, b"");
    client.expect(opt::STARTTLS, rep::ACK);
    client.wrap(|socket| StreamOwned::new(session, socket))
}

#[test]
fn everything_goes_by_tls_after_starttls() {
    let pki = Pki::new();
    for version in [&TLS12, &TLS13] {
        let client = Client::new(server(&pki, Mode::On, false));
        let mut client = start_tls(client, session(&pki, None, &[version]));
        client.ask(opt::STARTTLS, b"");
        client.expect(opt::STARTTLS, rep::ERR_INVALID);
        client.ask(opt::GO, &choice("a", &[]));
        client.infos();
        client.expect(opt::GO, rep::ACK);
        assert_eq!(client.agreed().1, "a");
    }
}

#[test]
fn what_was_agreed_upon_before_tls_is_forgotten() {
    let pki = Pki::new();
    // A second, refused request discards the context by itself.
    for asks_again in [false, true] {
        let mut client = Client::new(server(&pki, Mode::On, false));
        client.ask(opt::STRUCTURED_REPLY, b"");
        client.expect(opt::STRUCTURED_REPLY, rep::ACK);
        let option = opt::SET_META_CONTEXT;
        client.ask(option, &contexts("a", &[b"base:allocation"]));
        client.expect(option, rep::META_CONTEXT);
        client.expect(option, rep::ACK);
        let mut client = start_tls(client, session(&pki, None, &[&TLS13]));
        if asks_again {
            client.ask(option, &contexts("a", &[b"base:allocation"]));
            client.expect(option, rep::ERR_INVALID);
        }
        client.ask(opt::GO, &choice("a", &[]));
        client.infos();
        client.expect(opt::GO, rep::ACK);
        let (agreed, _) = client.agreed();
        assert_eq!(agreed.replies, Replies::Simple);
        assert_eq!(agreed.allocation_context, None);
    }
}

#[test]
fn tls_may_be_required() {
    let pki = Pki::new();
    let mut client = Client::new(server(&pki, Mode::Require, false));
    let known = [
        opt::LIST,
        opt::INFO,
        opt::GO,
        opt::STRUCTURED_REPLY,
        opt::EXTENDED_HEADERS,
    ];
    for option in known.into_iter().chain([opt::SET_META_CONTEXT, 77]) {
        client.ask(option, &choice("no such export", &[]));
        client.expect(option, rep::ERR_TLS_REQD);
    }
    let mut client = start_tls(client, session(&pki, None, &[&TLS13]));
    client.ask(opt::LIST, b"");
    client.expect(opt::LIST, rep::SERVER);
    client.expect(opt::LIST, rep::SERVER);
    client.expect(opt::LIST, rep::ACK);
    client.abort();

    let mut client = Client::new(server(&pki, Mode::Require, false));
    client.ask(opt::EXPORT_NAME, b"a");
    client.is_hung_up();
    assert!(client.failure().contains("TLS"));
    let mut client = Client::new(server(&pki, Mode::Require, false));
    client.ask(opt::ABORT, b"");
    client.expect(opt::ABORT, rep::ACK);
}

#[test]
fn tls_need_not_be_there_or_be_used() {
    let mut client = Client::new(host());
    client.ask(opt::STARTTLS, b"");
    client.expect(opt::STARTTLS, rep::ERR_POLICY);
    client.abort();
    let pki = Pki::new();
    let mut client = Client::new(server(&pki, Mode::On, true));
    client.ask(opt::STARTTLS, b"x");
    client.expect(opt::STARTTLS, rep::ERR_INVALID);
    client.ask(opt::GO, &choice("a", &[]));
    client.infos();
    client.expect(opt::GO, rep::ACK);
    client.agreed();
}

#[test]
fn clients_may_have_to_show_a_certificate() {
    let (pki, other) = (Pki::new(), Pki::new());
    for version in [&TLS12, &TLS13] {
        for (identity, good) in [(Some(&pki), true), (None, false), (Some(&other), false)] {
            let client = Client::new(server(&pki, Mode::Require, true));
            let mut client = start_tls(client, session(&pki, identity, &[version]));
            client.try_say(&[&header(opt::GO, 7)[..], &choice("a", &[])].concat());
            if good {
                client.infos();
                client.expect(opt::GO, rep::ACK);
                assert_eq!(client.agreed().1, "a");
            } else {
                assert!(client.failure().starts_with("TLS: "));
            }
        }
    }
}

#[test]
fn plain_text_in_place_of_tls_ends_the_connection() {
    let pki = Pki::new();
    let mut client = Client::new(server(&pki, Mode::Require, false));
    // A man in the middle inserts an option after STARTTLS.
    let both = [header(opt::STARTTLS, 0), header(opt::LIST, 0)].concat();
    client.say(&both);
    client.expect(opt::STARTTLS, rep::ACK);
    assert!(client.failure().starts_with("TLS: "));
}

#[test]
fn a_client_that_leaves_in_tls_is_gone() {
    let pki = Pki::new();
    let mut client = Client::new(server(&pki, Mode::On, false));
    client.ask(opt::STARTTLS, b"");
    client.expect(opt::STARTTLS, rep::ACK);
    assert!(matches!(
        client.outcome(),
        Err(Failure::Refused(_) | Failure::Vanished)
    ));
    let client = Client::new(server(&pki, Mode::On, false));
    let mut client = start_tls(client, session(&pki, None, &[&TLS13]));
    client.ask(opt::LIST, b"x");
    client.expect(opt::LIST, rep::ERR_INVALID);
    assert!(matches!(client.outcome(), Ok(Outcome::Over)));
}

#[test]
fn certificates_that_cannot_be_used_are_told() {
    let pki = Pki::new();
    let load = |cert: &str, key: &str, ca: Option<&str>| {
        let ca = ca.map(|name| pki.path(name));
        let tls = Tls::load(Mode::On, &pki.path(cert), &pki.path(key), ca.as_deref());
        tls.unwrap_err().to_string()
    };
    std::fs::write(pki.path("empty.pem"), "").unwrap();
    let good = ("server-cert.pem", "server-key.pem");
    assert!(load("none.pem", good.1, None).contains("none.pem: cannot read the file"));
    assert!(load("empty.pem", good.1, None).contains("contains no certificate"));
    assert!(load(good.0, "empty.pem", None).contains("empty.pem"));
    assert!(load(good.0, "client-key.pem", None).contains("client-key.pem"));
    assert!(load(good.0, good.1, Some("server-key.pem")).contains("server-key.pem"));
}
