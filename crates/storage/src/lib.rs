//! How an image's bytes are reached: files, memory, nothing.
