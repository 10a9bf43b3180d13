//! A fork in the middle of a sequence: what its child finds, and can do. Uses `perform`.

use super::held::Held;
use super::world::{Check, GLOBAL, World, check};
use rdmalloc::Rdmalloc;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// No child takes so long; one that waits for a lock that nobody holds is killed then.
const SECONDS: u32 = 60;

impl World {
    /// Forks; the child says by its exit whether all was well.
    pub fn fork(&mut self) -> Check {
        // SAFETY: the child uses the allocators, which see to forks, and ends without returning.
        let child = unsafe { libc::fork() };
        check(child >= 0, || format!("no fork: {}", std::io::Error::last_os_error()))?;
        if child == 0 {
            // SAFETY: kills this process after a while.
            unsafe { libc::alarm(SECONDS) };
            let result = catch_unwind(AssertUnwindSafe(|| self.live_on())).unwrap_or_else(|_| Err("a panic".into()));
            if let Err(error) = &result {
                eprintln!("in a child: {error}");
            }
            // SAFETY: ends the process; no destructor of the parent's runs here.
            unsafe { libc::_exit(i32::from(result.is_err())) };
        }
        let mut status = 0;
        // SAFETY: the child is ours, and `status` a place for what became of it.
        while unsafe { libc::waitpid(child, &raw mut status, 0) } < 0 {}
        check(status == 0, || format!("a child of fork ended with the status {status:#x}"))
    }

    /// In the child: no keys, whole blocks of the global heap, more of them; and everything can be dropped. The other heaps are not
    /// in children, so what lies in them is not looked at.
    fn live_on(&mut self) -> Check {
        let mut parents = Vec::new();
        for place in self.places.values_mut() {
            parents.append(&mut place.attached);
        }
        for attached in &parents {
            let reached = self.roots.keys().find(|start| attached.device.key_of_address(**start).is_ok());
            check(reached.is_none(), || format!("{reached:x?} has a key"))?;
        }
        let before: Vec<usize> = parents.iter().map(|attached| attached.ledger.live()).collect();
        for (start, held) in &self.held {
            let root = &self.roots[start];
            if root.heap == GLOBAL {
                held.check(*start, root)?;
            }
        }
        for (size, align) in [(1, 8), (1, 8), (100, 8), (5000, 256), (20_000, 8), (70_000, 8), (3 << 20, 4096)] {
            self.allocate(0, size, align, size % 2 == 0)?;
        }
        for place in self.places.values().filter(|place| !place.handles.is_empty()) {
            check(place.handles[0].buffer(100).is_err(), || "a buffer of a heap that is not in children".into())?;
        }
        while let Some((start, held)) = self.held.pop() {
            if let Held::Block(_) = held {
                held.check(start, &self.roots[&start])?;
            }
            match held {
                // Collections are not to be dropped there.
                Held::Loose(_) => std::mem::forget(held),
                _ => drop(held),
            }
            self.forget(start)?;
        }
        self.places.values_mut().for_each(|place| place.handles.clear());
        Rdmalloc::new().trim();
        self.allocate(0, 40 << 20, 8, true)?;
        let after: Vec<usize> = parents.iter().map(|attached| attached.ledger.live()).collect();
        // What they hold is the parent's.
        std::mem::forget(parents);
        check(before == after, || format!("the parent's registrations were {before:?}, and are {after:?} to its child"))
    }
}
