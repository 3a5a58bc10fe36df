//! Addresses of images, as users write them.

use std::fmt;

pub(super) const PREFIX: &str = "rbd:";
pub(super) const FORM: &str = "rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][?conf=FILE][&user=NAME]";

/// Address of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Address {
    pub(super) pool: String,
    pub(super) namespace: Option<String>,
    pub(super) image: String,
    pub(super) snapshot: Option<String>,
    /// Path of the cluster's configuration file. None: the library searches Ceph's usual places.
    pub(super) conf: Option<String>,
    /// Name of the Ceph user. None: client.admin.
    pub(super) user: Option<String>,
}

impl Address {
    pub(super) fn parse(text: &str) -> Result<Address, String> {
        let wrong = || format!("'{text}' is not {}", FORM);
        let rest = text.strip_prefix(PREFIX).ok_or_else(wrong)?;
        let (names, options) = rest.split_once('?').unwrap_or((rest, ""));
        let (names, snapshot) = match names.split_once('@') {
            Some((names, snapshot)) => (names, Some(snapshot)),
            None => (names, None),
        };
        let names: Vec<&str> = names.split('/').collect();
        let (pool, namespace, image) = match names[..] {
            [pool, image] => (pool, None, image),
            [pool, namespace, image] => (pool, Some(namespace), image),
            _ => return Err(wrong()),
        };
        let said = [Some(pool), namespace, Some(image), snapshot];
        // Ceph's names are passed as C strings, so they must not contain zero bytes.
        let is_name = |name: &str| !name.is_empty() && !name.contains(['@', '\0']);
        if !said.into_iter().flatten().all(is_name) {
            return Err(wrong());
        }
        let mut address = Address {
            pool: pool.into(),
            namespace: namespace.map(str::to_owned),
            image: image.into(),
            snapshot: snapshot.map(str::to_owned),
            conf: None,
            user: None,
        };
        for option in options.split('&').filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some(("conf", file)) if is_name(file) => address.conf = Some(file.into()),
                Some(("user", name)) if is_name(name) => address.user = Some(name.into()),
                _ => {
                    return Err(format!(
                        "{}: unknown option; known are 'conf' and 'user'",
                        wrong()
                    ));
                }
            }
        }
        Ok(address)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}/", self.pool)?;
        if let Some(namespace) = &self.namespace {
            write!(f, "{namespace}/")?;
        }
        f.write_str(&self.image)?;
        if let Some(snapshot) = &self.snapshot {
            write!(f, "@{snapshot}")?;
        }
        let options = [("conf", &self.conf), ("user", &self.user)];
        let said = options
            .iter()
            .filter_map(|(key, value)| Some((key, value.as_ref()?)));
        for (n, (key, value)) in said.enumerate() {
            write!(f, "{}{key}={value}", if n == 0 { '?' } else { '&' })?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_what_it_says() {
        for text in [
            "rbd:rbd/a",
            "rbd:pool/tenant/a@before",
            "rbd:rbd/a?user=vm",
            "rbd:rbd/a?conf=/etc/ceph/b.conf&user=vm",
        ] {
            assert_eq!(Address::parse(text).unwrap().to_string(), text);
        }
        let all = Address::parse("rbd:p/n/i@s?user=u&conf=c").unwrap();
        assert_eq!((&*all.pool, &*all.image), ("p", "i"));
        assert_eq!(all.namespace.as_deref(), Some("n"));
        assert_eq!(all.snapshot.as_deref(), Some("s"));
        assert_eq!(
            (all.conf.as_deref(), all.user.as_deref()),
            (Some("c"), Some("u"))
        );
    }

    #[test]
    fn what_is_no_address_is_refused() {
        for text in [
            "rbd:",
            "rbd:a",
            "rbd:a/",
            "rbd:/a",
            "rbd:a//b",
            "rbd:a/b/c/d",
            "rbd:a/b@",
            "rbd:a/b@c@d",
            "rbd:a/b?conf",
            "rbd:a/b?conf=",
            "rbd:a/b?x=y",
            "rbd:a/b\0c",
        ] {
            assert!(Address::parse(text).is_err(), "{text}");
        }
    }
}
