//! The workloads of `cargo xtask bench`: fixed amounts of work that allocate, each of which checks its own result.
//!
//! A program of `benches/programs` sets one allocator as its global one and calls [`program::main`], which runs one workload.
//! Nothing here knows which allocator that is. The work is the same in every run, by fixed seeds, so a program's time is the
//! measure; workloads of several threads have two, whatever the machine has.
//!
//! | module | what is in it |
//! | --- | --- |
//! | `random` | a small generator, and the distributions of sizes |
//! | `block` | a block that knows whether somebody else wrote to it |
//! | `reach` | scatter-gather entries, where a device is attached |
//! | `micro` | workloads that do little but allocate, one a file |
//! | `whole` | workloads in which allocating is a part, one a file |
//! | `program` | the command line |

mod block;
mod micro;
pub mod program;
mod random;
pub mod reach;
mod whole;

use reach::Reach;

/// How much work a run does. Each workload takes about a millisecond for each unit on a machine of 2026, and a little to begin.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Scale(pub u32);

impl Scale {
    /// So many for each unit.
    fn of(self, each: usize) -> usize {
        self.0 as usize * each
    }
}

/// What a workload is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Group {
    /// Does little but allocate; counts in their geometric mean.
    Bound,
    /// One measure of those alone, beside the mean.
    Part,
    /// A whole program; counts in the geometric mean of these.
    Whole,
}

impl Group {
    /// Its name on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Group::Bound => "bound",
            Group::Part => "part",
            Group::Whole => "whole",
        }
    }
}

/// One workload.
pub struct Workload {
    /// Its name.
    pub name: &'static str,
    /// What it is for.
    pub group: Group,
    /// What it does, in a few words.
    pub about: &'static str,
    /// Does the work. The answer depends on the scale alone.
    ///
    /// Panics if a result is wrong, or memory is not reached by the device that is attached.
    pub run: fn(Scale) -> u64,
}

/// All workloads, for one form of reaching memory.
#[must_use]
pub fn all<R: Reach>() -> [Workload; 19] {
    use Group::{Bound, Part, Whole};
    let workload = |name, group, about, run| Workload { name, group, about, run };
    [
        workload("pair", Bound, "a block taken and given back at once, 16 B to 4 MiB", micro::pair::mixed::<R>),
        workload("churn", Bound, "4096 live, 16 B to 8 KiB, replaced at random", micro::churn::run::<R>),
        workload("batch", Bound, "1000 blocks out, then in", micro::batch::run::<R>),
        workload("larson", Bound, "a server's objects, handed on from thread to new thread", micro::larson::run::<R>),
        workload("xmalloc", Bound, "one thread takes, the other gives back", micro::xmalloc::run::<R>),
        workload("mstress", Bound, "generations of threads that leave objects to others", micro::mstress::run::<R>),
        workload("rptest", Bound, "random sizes, a share given back by the other thread", micro::rptest::run::<R>),
        workload("cache-scratch", Bound, "small objects that must not share a line", micro::cache_scratch::run::<R>),
        workload("alloc-test", Bound, "sizes and places by power laws", micro::alloc_test::run::<R>),
        workload("large", Bound, "1 to 32 MiB, every page touched", micro::large::run::<R>),
        workload("realloc", Bound, "vectors and strings that grow", micro::realloc::run::<R>),
        workload("pair-16", Part, "pairs of 16 B", micro::pair::small::<R>),
        workload("pair-64k", Part, "pairs of 64 KiB", micro::pair::medium::<R>),
        workload("pair-4m", Part, "pairs of 4 MiB", micro::pair::large::<R>),
        workload("xfree", Part, "64 B given back by another thread", micro::xfree::run::<R>),
        workload("json", Whole, "a document of records out, in, and out again", whole::json::run::<R>),
        workload("maps", Whole, "maps of strings and bytes that change", whole::maps::run::<R>),
        workload("tokio", Whole, "tasks that pass bytes", whole::tasks::run::<R>),
        workload("rpc", Whole, "requests and replies, each with its scatter-gather entries", whole::rpc::run::<R>),
    ]
}

/// Runs `work` on two threads at once, with 0 and 1; what each gave.
fn on_two<T: Send>(work: impl Fn(u64) -> T + Sync) -> [T; 2] {
    std::thread::scope(|scope| {
        let other = scope.spawn(|| work(1));
        let here = work(0);
        [here, other.join().expect("no panic")]
    })
}
