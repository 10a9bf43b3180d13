//! rdmalloc: under construction.
