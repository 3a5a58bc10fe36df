//! A file in memory, with holes. Copies share the pages that neither has changed.

use fathom_core::{Extents, Status};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

const PAGE: usize = 4096;

#[derive(Clone, Default)]
pub struct Pages {
    len: u64,
    pages: Vec<Option<Arc<[u8; PAGE]>>>,
}

/// Returns the page's index, the offset within the page, and how many of `left` bytes are in that
/// page.
fn place(at: u64, left: u64) -> (usize, usize, usize) {
    let inner = at as usize % PAGE;
    let n = left.min((PAGE - inner) as u64) as usize;
    ((at / PAGE as u64) as usize, inner, n)
}

impl Pages {
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Reads bytes. Bytes beyond the end are zeroes.
    pub fn read(&self, buf: &mut [u8], at: u64) {
        let mut done = 0;
        while done < buf.len() {
            let (page, inner, n) = place(at + done as u64, (buf.len() - done) as u64);
            let out = &mut buf[done..done + n];
            match self.pages.get(page) {
                Some(Some(page)) => out.copy_from_slice(&page[inner..inner + n]),
                _ => out.fill(0),
            }
            done += n;
        }
    }

    /// Reports holes and data from `at` on, as far as there is room in `out`.
    pub fn describe(&self, out: &mut Extents, mut at: u64) {
        loop {
            let (page, _, n) = place(at, out.left());
            let status = match self.pages.get(page) {
                Some(Some(_)) => Status::DATA,
                _ => Status::HOLE,
            };
            if !out.push(status, n as u64) {
                return;
            }
            at += n as u64;
        }
    }

    /// Writes bytes, and extends the file if necessary.
    pub fn write(&mut self, at: u64, bytes: &[u8]) {
        self.set_len(self.len.max(at + bytes.len() as u64));
        let mut done = 0;
        while done < bytes.len() {
            let (page, inner, n) = place(at + done as u64, (bytes.len() - done) as u64);
            let page = self.pages[page].get_or_insert_with(|| Arc::new([0; PAGE]));
            Arc::make_mut(page)[inner..inner + n].copy_from_slice(&bytes[done..done + n]);
            done += n;
        }
    }

    /// Zeroes existing bytes. The length does not change.
    pub fn zero(&mut self, at: u64, len: u64) {
        let end = self.len.min(at + len);
        let mut at = at;
        while at < end {
            let (page, inner, n) = place(at, end - at);
            if n == PAGE {
                self.pages[page] = None;
            } else if let Some(page) = &mut self.pages[page] {
                Arc::make_mut(page)[inner..inner + n].fill(0);
            }
            at += n as u64;
        }
    }

    pub fn set_len(&mut self, len: u64) {
        if len < self.len {
            self.zero(len, self.len - len);
        }
        self.len = len;
        self.pages.resize(len.div_ceil(PAGE as u64) as usize, None);
    }

    pub fn load(path: &Path) -> Pages {
        let bytes = std::fs::read(path).expect("the file");
        let mut pages = Pages::default();
        pages.set_len(bytes.len() as u64);
        for (n, page) in bytes.chunks(PAGE).enumerate() {
            if page.iter().any(|byte| *byte != 0) {
                pages.write((n * PAGE) as u64, page);
            }
        }
        pages
    }

    pub fn store(&self, path: &Path) {
        let file = File::create(path).expect("a file");
        file.set_len(self.len).expect("it can be as long");
        for (n, page) in self.pages.iter().enumerate() {
            let Some(page) = page else { continue };
            let at = (n * PAGE) as u64;
            let there = (self.len - at).min(PAGE as u64) as usize;
            file.write_all_at(&page[..there], at)
                .expect("it is written");
        }
    }
}
