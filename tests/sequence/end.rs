//! The end: of a thread, of a sequence, and of one that has failed. Uses `perform`.

use super::world::{Check, GLOBAL, World, check};
use rdmalloc::{Budget, Rdmalloc};

impl World {
    /// A thread has ended.
    pub fn thread_ended(&mut self, thread: usize) -> Check {
        let (ended, left) = std::mem::take(&mut self.left).into_iter().partition(|(of, _)| *of == thread);
        self.left = left;
        let ended: Vec<(usize, usize)> = ended;
        ended.into_iter().try_for_each(|(_, start)| self.forget(start))
    }

    /// Ends everything, after all threads: nothing is left then.
    pub fn end(&mut self) -> Check {
        for attached in self.places.values_mut().flat_map(|place| &mut place.attached) {
            attached.hold = None;
        }
        while let Some((start, held)) = self.held.pop() {
            self.drop_held(start, held)?;
        }
        (1..self.names.len()).try_for_each(|name| self.end_name(name))?;
        let others = self.places.len() - 1;
        check(others == 0, || format!("{others} heaps have neither handle nor block, and have not ended"))?;
        let trimmed = Rdmalloc::new().trim();
        self.check_trimmed(GLOBAL, &trimmed)?;
        check(trimmed.open_arenas == 0, || format!("{trimmed:?} after the last block"))?;
        self.check_figures(GLOBAL)?;
        self.set_budget(GLOBAL, 0)?;
        while !self.place(GLOBAL).attached.is_empty() {
            self.detach(0, 0)?;
        }
        Ok(())
    }

    /// Gives everything back, as far as that can be done, after a check has failed: so that the next sequence begins as this did.
    pub fn give_up(mut self) {
        self.held.clear();
        self.names = [None; 4];
        let places = std::mem::take(&mut self.places);
        for attached in places.values().flat_map(|place| &place.attached) {
            attached.ledger.refuse_after(None);
        }
        let heap = Rdmalloc::new();
        for (number, mut place) in places {
            place.attached.iter_mut().for_each(|attached| attached.hold = None);
            if number == GLOBAL {
                let _ = heap.trim();
                place.attached.iter().for_each(|attached| drop(heap.detach(attached.device)));
            }
        }
        heap.set_budget(Budget::NONE);
    }
}
