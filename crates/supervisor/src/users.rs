//! Chooses the users that tenants' processes run as.

use fathom_host::users::{User, Users};
use std::collections::{BTreeMap, BTreeSet};

/// A tenant keeps its user while the server runs, and in most cases also after a restart with the
/// same tenants.
pub struct Register {
    users: Option<Users>,
    /// Users of the range that are in use, by tenant.
    given: BTreeMap<String, u32>,
}

impl Register {
    pub fn new(users: Option<Users>) -> Register {
        Register {
            users,
            given: BTreeMap::new(),
        }
    }

    /// Keeps the user of a predecessor's tenant, if the range contains that user.
    pub fn keep(&mut self, tenant: &str, user: Option<User>) {
        if let (Some(Users::Range(range)), Some(User { uid, gid })) = (&self.users, user)
            && uid == gid
            && range.contains(&uid)
        {
            self.given.insert(tenant.to_owned(), uid);
        }
    }

    /// Returns a tenant's user. None: processes run as the supervisor's user. `has_process`:
    /// whether a tenant has a process, in which case its user is not given to another tenant.
    pub fn user_of(
        &mut self,
        tenant: &str,
        has_process: impl Fn(&str) -> bool,
    ) -> Result<Option<User>, String> {
        let range = match &self.users {
            None => return Ok(None),
            Some(Users::One(user)) => return Ok(Some(*user)),
            Some(Users::Range(range)) => range.clone(),
        };
        if let Some(uid) = self.given.get(tenant) {
            return Ok(Some(own(*uid)));
        }
        let (first, len) = (*range.start(), range.end() - range.start() + 1);
        let taken: BTreeSet<u32> = self.given.values().copied().collect();
        let uid = if taken.len() < len as usize {
            let begin = (hash(tenant) % u64::from(len)) as u32;
            let mut numbers = (0..len).map(|n| {
                let at = (u64::from(begin) + u64::from(n)) % u64::from(len);
                first + at as u32
            });
            numbers.find(|uid| !taken.contains(uid))
        } else {
            // The range is exhausted, so the user of a tenant without a process is taken.
            let gone = self.given.keys().find(|name| !has_process(name)).cloned();
            gone.and_then(|name| self.given.remove(&name))
        };
        let uid = uid.ok_or_else(|| {
            let tenants = self.given.len();
            format!(
                "no user is left for tenant '{tenant}': {tenants} tenants use all users of \
                 [tenants]; name a larger range"
            )
        })?;
        self.given.insert(tenant.to_owned(), uid);
        Ok(Some(own(uid)))
    }
}

fn own(uid: u32) -> User {
    User { uid, gid: uid }
}

/// FNV-1a, because the result must be the same in each version of the program.
fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_two_that_are_there_are_the_same_and_each_stays_who_it_is() {
        let users = || Register::new(Some("100000-100003".parse().unwrap()));
        let mut register = users();
        let names = ["a", "b", "c", "d"];
        let all = |register: &mut Register| -> Vec<u32> {
            let user = |name: &&str| register.user_of(name, |_| true).unwrap().unwrap();
            names.iter().map(user).map(|user| user.uid).collect()
        };
        let first = all(&mut register);
        let different: BTreeSet<_> = first.iter().collect();
        assert_eq!(different.len(), 4, "{first:?}");
        assert!(first.iter().all(|uid| (100_000..=100_003).contains(uid)));
        assert_eq!(all(&mut register), first);
        // The users are the same after a restart.
        assert_eq!(all(&mut users()), first);
        let error = register.user_of("e", |_| true).unwrap_err();
        assert!(error.contains("no user is left for tenant 'e'"), "{error}");
        // The user of a tenant that has ended is free.
        let user = register.user_of("e", |name| name != "c").unwrap();
        assert_eq!(user.unwrap().uid, first[2]);
        assert!(register.user_of("c", |_| true).is_err());
    }

    #[test]
    fn one_user_is_everybodys() {
        let mut register = Register::new(Some("4000000".parse().unwrap()));
        let user = |register: &mut Register, name| register.user_of(name, |_| true).unwrap();
        let wanted = Some(own(4_000_000));
        assert_eq!(user(&mut register, "a"), wanted);
        assert_eq!(user(&mut register, "b"), wanted);
        assert_eq!(user(&mut Register::new(None), "a"), None);
    }
}
