//! Beds that are kept from one cell to the next, because a boot costs more than most cells.

/// Beds by name, which identifies their complete configuration, in order of their last use.
#[derive(Debug)]
pub struct Pool<B> {
    beds: Vec<(String, B)>,
    most: usize,
}

impl<B> Pool<B> {
    /// Creates a pool of at most `most` beds, but at least one.
    pub fn new(most: usize) -> Pool<B> {
        Pool {
            beds: Vec::new(),
            most: most.max(1),
        }
    }

    /// Takes the bed of that name out of the pool, so a bed whose work fails is not used again. If
    /// the pool has no such bed, drops the beds that were unused for the longest time until a new
    /// one has room.
    pub fn take(&mut self, name: &str) -> Option<B> {
        if let Some(at) = self.beds.iter().position(|(other, _)| other == name) {
            return Some(self.beds.remove(at).1);
        }
        let over = (self.beds.len() + 1).saturating_sub(self.most);
        self.beds.drain(..over);
        None
    }

    /// Returns a bed to the pool after its work.
    pub fn keep(&mut self, name: String, bed: B) {
        self.beds.push((name, bed));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beds_stay_until_others_need_the_room_or_work_fails() {
        let (mut pool, mut made) = (Pool::new(2), 0);
        let mut work = |name: &str| {
            let bed = pool.take(name).unwrap_or_else(|| {
                made += 1;
                made
            });
            if name != "fails" {
                pool.keep(name.to_owned(), bed);
            }
            assert!(pool.beds.len() <= 2);
            bed
        };
        let uses = ["a", "b", "a", "c", "a", "b"].map(&mut work);
        // `b` was unused for the longest time when `c` was created, and `c` when `b` was created
        // again.
        assert_eq!(uses, [1, 2, 1, 3, 1, 4]);
        assert_eq!(["fails", "fails", "b"].map(&mut work), [5, 6, 4]);
    }
}
