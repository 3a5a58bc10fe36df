//! A queue of items that are numbered on arrival and leave in about the same order.

use std::collections::VecDeque;

/// Holds the items in flight; memory is bounded by the distance from the oldest to the newest.
#[derive(Debug)]
pub(crate) struct Window<T> {
    base: u64,
    items: VecDeque<Option<T>>,
}

impl<T> Default for Window<T> {
    fn default() -> Window<T> {
        Window {
            base: 0,
            items: VecDeque::new(),
        }
    }
}

impl<T> Window<T> {
    /// Adds an item and returns its number.
    pub(crate) fn push(&mut self, item: T) -> u64 {
        self.items.push_back(Some(item));
        self.base + self.items.len() as u64 - 1
    }

    fn index(&self, id: u64) -> Option<usize> {
        usize::try_from(id.checked_sub(self.base)?).ok()
    }

    pub(crate) fn get(&self, id: u64) -> Option<&T> {
        self.items.get(self.index(id)?)?.as_ref()
    }

    pub(crate) fn get_mut(&mut self, id: u64) -> Option<&mut T> {
        let index = self.index(id)?;
        self.items.get_mut(index)?.as_mut()
    }

    pub(crate) fn remove(&mut self, id: u64) -> Option<T> {
        let index = self.index(id)?;
        let item = self.items.get_mut(index)?.take();
        while let Some(None) = self.items.front() {
            self.items.pop_front();
            self.base += 1;
        }
        item
    }

    /// Returns the oldest remaining item.
    pub(crate) fn oldest(&self) -> Option<(u64, &T)> {
        let first = self.items.front()?.as_ref()?;
        Some((self.base, first))
    }

    /// Returns the newest item, if it has not been removed.
    pub(crate) fn newest(&self) -> Option<(u64, &T)> {
        let last = self.items.back()?.as_ref()?;
        Some((self.base + self.items.len() as u64 - 1, last))
    }

    /// Returns all remaining items, oldest first.
    pub(crate) fn iter(&self) -> impl DoubleEndedIterator<Item = (u64, &T)> {
        let items = self.items.iter().enumerate();
        items.filter_map(|(i, item)| Some((self.base + i as u64, item.as_ref()?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_leaves_out_of_order_leaves_no_hole_behind() {
        let mut window = Window::default();
        let ids: Vec<u64> = (0..5).map(|i| window.push(i * 10)).collect();
        assert_eq!(window.remove(ids[1]), Some(10));
        assert_eq!(window.oldest(), Some((0, &0)));
        assert_eq!(window.remove(ids[0]), Some(0));
        assert_eq!(window.oldest(), Some((2, &20)));
        assert_eq!(window.remove(ids[0]), None);
        assert_eq!(window.get(ids[1]), None);
        *window.get_mut(ids[4]).unwrap() += 1;
        assert_eq!(window.push(50), 5);
        let left: Vec<_> = window.iter().map(|(id, &item)| (id, item)).collect();
        assert_eq!(left, [(2, 20), (3, 30), (4, 41), (5, 50)]);
    }
}
