//! A process of its own: it looks at its mappings.

use rdmalloc::{Heap, Rdmalloc};

#[global_allocator]
static HEAP: Rdmalloc = Rdmalloc::new();

/// `mlockall` faults in every page of what can be read, of tables that nobody wrote too.
#[test]
fn a_program_that_locks_its_memory_does_not_fault_in_tables_of_gigabytes() {
    let _buffer = Heap::builder().build().unwrap().buffer(100).unwrap();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let readable: usize = maps
        .lines()
        .filter_map(|line| {
            let (range, rest) = line.split_once(' ')?;
            let (start, end) = range.split_once('-')?;
            let address = |text| usize::from_str_radix(text, 16).ok();
            rest.starts_with('r').then_some(address(end)? - address(start)?)
        })
        .sum();
    assert!(readable < 2 << 30, "{} MiB can be read", readable >> 20);
}
