//! Access to the locations of objects.
//!
//! A place is a directory, a prefix of a bucket, or the files below a URL on a web server.

use crate::address::Address;
use crate::elsewhere::elsewhere;
use crate::error::Error;
use crate::store_error::{Kind, store_error};
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::http::HttpBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientConfigKey, ClientOptions, GetOptions, GetResult, GetResultPayload,
    ObjectStore, RetryConfig,
};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path as FilePath, PathBuf};
use std::sync::{Arc, Once};
use std::time::Duration;
use url::Url;

/// Timeouts for a connection, for the next bytes of a response, and for a complete response.
const TIMES: [(ClientConfigKey, &str); 3] = [
    (ClientConfigKey::ConnectTimeout, "5 seconds"),
    (ClientConfigKey::ReadTimeout, "15 seconds"),
    (ClientConfigKey::Timeout, "120 seconds"),
];

/// Returns a short retry policy. Callers retry, too, and know better for how long.
fn retries() -> RetryConfig {
    RetryConfig {
        backoff: BackoffConfig {
            init_backoff: Duration::from_millis(100),
            max_backoff: Duration::from_secs(1),
            base: 2.0,
        },
        max_retries: 2,
        retry_timeout: Duration::from_secs(10),
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Place {
    store: Arc<dyn ObjectStore>,
    prefix: Path,
    kind: Kind,
    /// Address of the place, for people.
    shown: String,
}

impl Place {
    /// Returns the place that contains an object, and the object's name in it.
    pub(crate) fn of_object(address: &Address) -> Result<(Place, String), Error> {
        match address {
            Address::File(path) => {
                let name = path.file_name().and_then(|name| name.to_str());
                let Some(name) = name else {
                    return Err(Error::unusable(address.shown(), "not the name of a file"));
                };
                let place = Place::file(parent(path)).map_err(|error| match error {
                    Error::NotFound { .. } => Error::NotFound {
                        what: address.shown(),
                    },
                    other => other,
                })?;
                Ok((place, name.to_owned()))
            }
            Address::S3 { key, .. } if key.is_empty() => Err(Error::unusable(
                address.shown(),
                "names no object; write s3://BUCKET/KEY",
            )),
            Address::S3 { bucket, key } => {
                let (above, name) = key.rsplit_once('/').unwrap_or(("", key));
                Ok((Place::s3(bucket, above)?, name.to_owned()))
            }
            // The URL is used unchanged, because only its server knows what it means.
            Address::Web(url) => Ok((Place::web(url.clone())?, String::new())),
        }
    }

    /// Returns the place for a directory, a bucket prefix or a URL.
    pub(crate) fn of_directory(address: &Address) -> Result<Place, Error> {
        match address {
            Address::File(path) => Place::file(path),
            Address::S3 { bucket, key } => Place::s3(bucket, key),
            Address::Web(url) => {
                let mut url = url.clone();
                url.set_query(None);
                let trimmed = url.path().trim_end_matches('/').to_owned();
                url.set_path(&trimmed);
                Place::web(url)
            }
        }
    }

    fn file(directory: &FilePath) -> Result<Place, Error> {
        let shown = directory.display().to_string();
        let store = LocalFileSystem::new_with_prefix(directory);
        let store = store.map_err(|error| store_error(Kind::File, &shown, error))?;
        Ok(Place {
            store: Arc::new(store.with_fsync(true)),
            prefix: Path::default(),
            kind: Kind::File,
            shown,
        })
    }

    fn s3(bucket: &str, prefix: &str) -> Result<Place, Error> {
        choose_cryptography();
        let shown = Address::S3 {
            bucket: bucket.into(),
            key: prefix.into(),
        }
        .shown();
        let prefix = Path::parse(prefix);
        let prefix = prefix.map_err(|error| store_error(Kind::S3, &shown, error.into()))?;
        let mut builder = AmazonS3Builder::from_env()
            .with_bucket_name(bucket)
            .with_retry(retries());
        refuse_open_endpoint(&builder)?;
        for (key, time) in TIMES {
            let key = AmazonS3ConfigKey::Client(key);
            if builder.get_config_value(&key).is_none() {
                builder = builder.with_config(key, time);
            }
        }
        let store = builder.build();
        let store = store.map_err(|error| store_error(Kind::S3, &shown, error))?;
        Ok(Place {
            store: Arc::new(store),
            prefix,
            kind: Kind::S3,
            shown,
        })
    }

    fn web(url: Url) -> Result<Place, Error> {
        choose_cryptography();
        let shown = Address::Web(url.clone()).shown();
        let shown = shown.trim_end_matches('/').to_owned();
        let options = ClientOptions::new().with_allow_http(url.scheme() == "http");
        let set = |options: ClientOptions, (key, time)| options.with_config(key, time);
        let store = HttpBuilder::new()
            .with_url(url)
            .with_client_options(TIMES.into_iter().fold(options, set))
            .with_retry(retries())
            .build();
        Ok(Place {
            store: Arc::new(store.map_err(|error| store_error(Kind::Web, &shown, error))?),
            prefix: Path::default(),
            kind: Kind::Web,
            shown,
        })
    }

    pub(crate) fn kind(&self) -> Kind {
        self.kind
    }

    pub(crate) fn store(&self) -> &dyn ObjectStore {
        &*self.store
    }

    /// Returns the address of the object `name`, or of the place itself if `name` is empty.
    pub(crate) fn shown(&self, name: &str) -> String {
        match name {
            "" => self.shown.clone(),
            name => format!("{}/{name}", self.shown),
        }
    }

    /// Returns the path of an object in the store.
    pub(crate) fn path(&self, name: &str) -> Result<Path, Error> {
        let path = match (self.prefix.as_ref(), name) {
            (prefix, "") => Path::parse(prefix),
            ("", name) => Path::parse(name),
            (prefix, name) => Path::parse(format!("{prefix}/{name}")),
        };
        path.map_err(|error| Error::unusable(self.shown(name), error.to_string()))
    }

    pub(crate) fn store_error(&self, name: &str, error: object_store::Error) -> Error {
        store_error(self.kind, &self.shown(name), error)
    }

    /// Requests an object. The response has not been checked.
    pub(crate) async fn get(
        &self,
        name: &str,
        options: GetOptions,
    ) -> Result<GetResult, object_store::Error> {
        let path = self.path(name).map_err(|_| object_store::Error::NotFound {
            path: name.into(),
            source: "not an object's name".into(),
        })?;
        self.store.get_opts(&path, options).await
    }

    /// Fetches a whole object of at most `most` bytes.
    pub(crate) async fn fetch(&self, name: &str, most: u64) -> Result<Vec<u8>, Error> {
        let failed = |error| self.store_error(name, error);
        let got = self
            .get(name, GetOptions::default())
            .await
            .map_err(failed)?;
        let mut body = Body::new(got);
        body.read_to(most + 1).await.map_err(failed)?;
        match body.bytes.len() as u64 <= most {
            true => Ok(body.bytes),
            false => Err(Error::corrupt(
                self.shown(name),
                format!("more than {most} bytes"),
            )),
        }
    }
}

/// The body of a response, which is read only as far as needed.
pub(crate) struct Body {
    payload: Payload,
    pub(crate) bytes: Vec<u8>,
}

enum Payload {
    File(Arc<File>, u64),
    Stream(BoxStream<'static, Result<bytes::Bytes, object_store::Error>>),
}

impl Body {
    pub(crate) fn new(got: GetResult) -> Body {
        let start = got.range.start;
        Body {
            payload: match got.payload {
                GetResultPayload::File(file, _) => Payload::File(Arc::new(file), start),
                GetResultPayload::Stream(stream) => Payload::Stream(stream),
            },
            bytes: Vec::new(),
        }
    }

    /// Reads until at least `len` bytes have been received or the body ends.
    pub(crate) async fn read_to(&mut self, len: u64) -> Result<(), object_store::Error> {
        while (self.bytes.len() as u64) < len {
            let more = len - self.bytes.len() as u64;
            match &mut self.payload {
                Payload::File(file, start) => {
                    let (file, at) = (file.clone(), *start + self.bytes.len() as u64);
                    let len = more.min(FILE_PIECE) as usize;
                    let read = elsewhere(move || read_at(&file, at, len)).await;
                    let read = read.map_err(|source| object_store::Error::Generic {
                        store: "file",
                        source: source.into(),
                    })?;
                    if read.is_empty() {
                        return Ok(());
                    }
                    self.bytes.extend(read);
                }
                Payload::Stream(stream) => match stream.next().await {
                    Some(piece) => self.bytes.extend_from_slice(&piece?),
                    None => return Ok(()),
                },
            }
        }
        Ok(())
    }
}

const FILE_PIECE: u64 = 4 << 20;

fn read_at(file: &File, at: u64, len: usize) -> std::io::Result<Vec<u8>> {
    let mut bytes = vec![0; len];
    let read = file.read_at(&mut bytes, at)?;
    bytes.truncate(read);
    Ok(bytes)
}

/// Returns the directory that contains a file.
pub(crate) fn parent(path: &FilePath) -> &FilePath {
    match path.parent() {
        Some(parent) if parent != FilePath::new("") => parent,
        _ => FilePath::new("."),
    }
}

/// Installs the default TLS cryptography, so that HTTP clients need not be configured with one.
fn choose_cryptography() {
    static ONCE: Once = Once::new();
    // If the process has already chosen another provider, that one remains in use.
    ONCE.call_once(|| drop(rustls::crypto::ring::default_provider().install_default()));
}

/// Refuses an endpoint without TLS unless the user has allowed it.
fn refuse_open_endpoint(builder: &AmazonS3Builder) -> Result<(), Error> {
    let value = |key| builder.get_config_value(&key).unwrap_or_default();
    let endpoints = [AmazonS3ConfigKey::S3Endpoint, AmazonS3ConfigKey::Endpoint];
    let endpoint = endpoints
        .map(value)
        .into_iter()
        .find(|value| !value.is_empty());
    let allowed = value(AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp));
    match endpoint {
        Some(endpoint) if endpoint.starts_with("http://") && allowed != "true" => {
            Err(Error::unusable(
                endpoint,
                "unencrypted; set AWS_ALLOW_HTTP=true if the network is trusted",
            ))
        }
        _ => Ok(()),
    }
}

/// Creates the directory of an archive if it does not exist.
pub(crate) fn make_directory(path: &PathBuf) -> Result<(), Error> {
    std::fs::create_dir_all(path).map_err(|source| Error::Io {
        what: path.display().to_string(),
        source,
    })
}
