//! Blocks of every kind with contents that can be told, and threads that allocate beside them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread::JoinHandle;

/// Blocks of every size class, and a large and a huge one, from the program's global allocator.
pub struct Garden {
    /// The blocks; each holds [`Garden::byte`] at each of its places.
    pub blocks: Vec<Vec<u8>>,
    seed: u8,
}

impl Garden {
    /// Plants it. The blocks are in all classes up to 64 KiB (two for each, since a class is not wider than an eighth), and
    /// then 100 KiB, 1 MiB and `huge` bytes.
    pub fn plant(seed: u8, huge: usize) -> Garden {
        let fine = (16..=1024).step_by(16);
        let coarse = (0..6).flat_map(|doubling| (1..=8).map(move |step| (8 + step) << (7 + doubling)));
        let sizes = fine.chain(coarse).chain([100 << 10, 1 << 20, huge]);
        let period = Garden::period(seed);
        let block = |size| period.repeat(size / period.len() + 1)[..size].to_vec();
        Garden { blocks: sizes.map(block).collect(), seed }
    }

    /// What stands in each block, again and again.
    fn period(seed: u8) -> Vec<u8> {
        (0..1 << 16).map(|at| Garden::byte(seed, at)).collect()
    }

    /// What stands at a place of each block.
    #[must_use]
    pub fn byte(seed: u8, at: usize) -> u8 {
        seed ^ (at as u8) ^ (at >> 8) as u8
    }

    /// Its seed.
    #[must_use]
    pub fn seed(&self) -> u8 {
        self.seed
    }

    /// Parts of each block that show the whole: its beginning, its middle and its end, up to 64 KiB each.
    pub fn parts(&self) -> impl Iterator<Item = (usize, &[u8])> {
        self.blocks.iter().flat_map(|block| {
            let len = block.len().min(64 << 10);
            let mut begins = vec![0, (block.len() - len) / 2, block.len() - len];
            begins.dedup();
            begins.into_iter().map(move |from| (from, &block[from..from + len]))
        })
    }

    /// Whether every block still holds what was planted.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        let period = Garden::period(self.seed);
        self.blocks.iter().flat_map(|block| block.chunks(1 << 16)).all(|chunk| chunk == &period[..chunk.len()])
    }
}

/// Threads that allocate, check and free, until they are stopped.
pub struct Churn {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    threads: Vec<JoinHandle<()>>,
}

impl Churn {
    /// Starts `threads` of them.
    pub fn start(threads: u64) -> Churn {
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let churn = |number: u64| {
            let (stop, rounds) = (stop.clone(), rounds.clone());
            std::thread::spawn(move || {
                let mut random = number * 2 + 1;
                let mut held: Vec<Vec<u64>> = Vec::new();
                while !stop.load(Relaxed) {
                    random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    let len = 1 + (random >> 40) as usize % (1 << ((random >> 33) % 15));
                    held.push(vec![random; len]);
                    if held.len() > 64 {
                        let block = held.swap_remove((random >> 50) as usize % 64);
                        assert!(block.iter().all(|word| *word == block[0]), "a block was changed");
                    }
                    rounds.fetch_add(1, Relaxed);
                }
            })
        };
        let threads = (0..threads).map(churn).collect();
        Churn { stop, rounds, threads }
    }

    /// Waits until `count` more blocks have been allocated.
    pub fn wait_for(&self, count: u64) {
        let until = self.rounds.load(Relaxed) + count;
        while self.rounds.load(Relaxed) < until {
            assert!(self.threads.iter().any(|thread| !thread.is_finished()), "all threads have failed");
            std::thread::yield_now();
        }
    }

    /// Stops them.
    ///
    /// # Panics
    ///
    /// If one found a block changed.
    pub fn stop(self) {
        self.stop.store(true, Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().expect("a thread of the churn failed"));
    }
}
