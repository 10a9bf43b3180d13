//! What a heap has, and what a drain pass left in it. Uses `heap`.

use crate::class::LiveBlocks;
use crate::heap::Core;
use crate::{pool, thread};
use core::fmt::{self, Write};
use core::ops::Deref;
use core::time::Duration;
use rdmalloc_arenas::{ArenaStats, DeviceStats, SLICE, Times};

/// Figures of a heap: those of its arenas ([`ArenaStats`], to which this derefs), its caches and its devices.
///
/// ```text
/// open == live + cached + idle        retained <= idle
/// ```
///
/// Reading them takes one walk over the arenas and one over the caches; no allocation waits for it.
///
/// ```
/// let heap = rdmalloc::Heap::builder().build()?;
/// let buffer = heap.buffer(1 << 20)?;
/// let stats = heap.stats();
/// assert!(stats.live_bytes >= 1 << 20);
/// assert_eq!(stats.open_bytes, stats.live_bytes + stats.cached_bytes + stats.idle_bytes);
/// println!("{stats}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Stats {
    /// Figures of the arenas.
    #[cfg_attr(feature = "serde", serde(flatten))]
    pub of_arenas: ArenaStats,
    /// Bytes in large blocks, and in spans that are cut into blocks of which at least one was in use when its owner last
    /// looked. What is in use in those, [`Trimmed`] tells.
    pub live_bytes: usize,
    /// Bytes in spare spans that threads and shards keep for themselves. A drain pass takes them.
    pub cached_bytes: usize,
    /// Bytes of open arenas that nobody has taken.
    pub idle_bytes: usize,
    /// Figures of each device.
    pub devices: Vec<DeviceStats>,
}

impl Stats {
    pub(crate) fn of(core: &Core) -> Stats {
        let devices = thread::inside(|| core.arenas.device_stats());
        // Caches first: what they give back meanwhile counts as idle rather than twice.
        let cached = core.cached_bytes();
        let arenas = core.arenas.stats();
        let cached_bytes = cached.min(arenas.taken_bytes);
        let live_bytes = arenas.taken_bytes - cached_bytes;
        let idle_bytes = arenas.open_bytes - arenas.taken_bytes;
        Stats { live_bytes, cached_bytes, idle_bytes, devices, of_arenas: arenas }
    }
}

impl Deref for Stats {
    type Target = ArenaStats;
    fn deref(&self) -> &ArenaStats {
        &self.of_arenas
    }
}

/// Bytes as people read them.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.0 {
            bytes if bytes < 10 << 10 => format!("{bytes} B"),
            bytes if bytes < 10 << 20 => format!("{:.1} KiB", bytes as f64 / 1024.0),
            bytes if bytes < 10 << 30 => format!("{:.1} MiB", bytes as f64 / (1 << 20) as f64),
            bytes => format!("{:.1} GiB", bytes as f64 / (1 << 30) as f64),
        };
        f.pad(&text)
    }
}

fn size(bytes: usize) -> Size {
    Size(bytes as u64)
}

fn times(f: &mut String, what: &str, times: &Times) -> fmt::Result {
    if times.count == 0 {
        return Ok(());
    }
    let micros = |time: Duration| time.as_secs_f64() * 1e6;
    let (total, mean, longest) = (times.total.as_secs_f64() * 1e3, micros(times.mean()), micros(times.longest));
    writeln!(f, "  {what:<14}{:>8} in {total:.1} ms, mean {mean:.0} us, longest {longest:.0} us", times.count)
}

/// A table, for people.
impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = String::new();
        self.write(&mut table)?;
        f.write_str(table.trim_end())
    }
}

impl Stats {
    fn write(&self, f: &mut String) -> fmt::Result {
        let arenas = &self.of_arenas;
        let row = |f: &mut String, name: &str, bytes: usize, rest: fmt::Arguments<'_>| {
            writeln!(f, "  {name:<14}{:>12}  {rest}", size(bytes))
        };
        let ArenaStats { opening_arenas: opening, closing_arenas: closing, .. } = *arenas;
        row(
            f,
            "open",
            arenas.open_bytes,
            format_args!("{} arenas, {opening} opening, {closing} closing", arenas.arenas),
        )?;
        row(f, "  live", self.live_bytes, format_args!("{} spans, with those cached", arenas.spans))?;
        row(f, "  cached", self.cached_bytes, format_args!("in caches of threads and shards"))?;
        let (retained, bytes) = (arenas.retained_arenas, size(arenas.retained_bytes));
        row(f, "  idle", self.idle_bytes, format_args!("{bytes} of it in {retained} arenas without a span"))?;
        row(f, "registered", arenas.registered_bytes, format_args!("{} registrations", arenas.registered))?;
        if arenas.unregistered_arenas > 0 {
            row(f, "unregistered", arenas.unregistered_bytes, format_args!("{} arenas", arenas.unregistered_arenas))?;
        }
        if arenas.hugetlb_bytes > 0 || arenas.fallen_back_arenas > 0 {
            let rest = format_args!("{} arenas have other pages than asked for", arenas.fallen_back_arenas);
            row(f, "hugetlb", arenas.hugetlb_bytes, rest)?;
        }
        if arenas.stuck_arenas > 0 {
            row(f, "stuck", arenas.stuck_bytes, format_args!("{} arenas, kept for ever", arenas.stuck_arenas))?;
        }
        times(f, "opened", &arenas.opening)?;
        times(f, "closed", &arenas.closing)?;
        counts(
            f,
            "refused",
            &[
                (arenas.refused.by_device, "by the device"),
                (arenas.refused.over_budget, "over the budget"),
                (arenas.refused.too_many_registrations, "over the budget of registrations"),
                (arenas.refused.device_full, "over the device's number of registrations"),
                (arenas.refused.over_memlock, "over the memlock limit"),
                (arenas.refused.out_of_memory, "for want of memory"),
            ],
        )?;
        counts(
            f,
            "failed",
            &[
                (arenas.failures.address_space, "no address space"),
                (arenas.failures.no_memory, "no memory"),
                (arenas.failures.not_registered, "not registered, so not opened"),
                (arenas.failures.deregistrations, "not deregistered"),
            ],
        )?;
        for device in &self.devices {
            let DeviceStats { name, registrations, registered_bytes: bytes, .. } = device;
            writeln!(f, "  {name:<14}{:>12}  {registrations} registrations", Size(*bytes))?;
            times(f, "  registered", &device.registering)?;
            times(f, "  deregistered", &device.deregistering)?;
            let (flights, leaked) = (device.flights.under_way as u64, device.flights.leaked as u64);
            counts(f, "  held", &[(device.holds as u64, "holds"), (flights, "flights"), (leaked, "leaked flights")])?;
            counts(f, "  not", &[(device.refusals, "registered"), (device.failures, "deregistered")])?;
        }
        Ok(())
    }
}

/// A row of counts, without those that are 0.
fn counts(f: &mut String, what: &str, counts: &[(u64, &str)]) -> fmt::Result {
    for (count, name) in counts.iter().filter(|(count, _)| *count > 0) {
        writeln!(f, "  {what:<14}{count:>8} {name}")?;
    }
    Ok(())
}

/// What a drain pass has closed, and what holds the rest.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Trimmed {
    /// Arenas that were closed: deregistered with every device, and given back to the kernel.
    pub closed_arenas: usize,
    /// Their bytes.
    pub closed_bytes: usize,
    /// Arenas that are open still, since something in them is in use; which ones, `arenas()` tells.
    pub open_arenas: usize,
    /// Their bytes.
    pub open_bytes: usize,
    /// Arenas that a device would not let go of; mapped for ever.
    pub stuck_arenas: usize,
    /// Threads whose caches were passed over, since they were stopped in the middle of an allocation. Try again.
    pub busy_threads: usize,
    /// Blocks in use up to 64 KiB, by their size.
    pub live: LiveBlocks,
    /// Larger blocks in use.
    pub large_blocks: usize,
    /// Their bytes.
    pub large_bytes: usize,
    /// Threads whose blocks `live` lacks: those that were passed over, and those that were allocating just then. What they
    /// have counts as large here.
    pub uncounted_threads: usize,
}

impl Trimmed {
    pub(crate) fn of(core: &Core) -> Trimmed {
        pool::end_what_was_left();
        let (closed, swept) = core.drain();
        core.catch_up();
        let stats = core.arenas.stats();
        Trimmed {
            closed_arenas: closed.arenas,
            closed_bytes: closed.bytes,
            open_arenas: stats.arenas,
            open_bytes: stats.open_bytes,
            stuck_arenas: stats.stuck_arenas,
            busy_threads: swept.busy,
            live: swept.live,
            large_blocks: stats.spans.saturating_sub(swept.slabs),
            large_bytes: stats.taken_bytes.saturating_sub(swept.slab_slices * SLICE),
            uncounted_threads: swept.uncounted,
        }
    }
}

/// A table, for people.
impl fmt::Display for Trimmed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = String::new();
        self.write(&mut table)?;
        f.write_str(table.trim_end())
    }
}

impl Trimmed {
    fn write(&self, f: &mut String) -> fmt::Result {
        let row = |f: &mut String, name: &str, bytes: usize, count: u64, what: &str| {
            writeln!(f, "  {name:<14}{:>12}  {count} {what}", size(bytes))
        };
        row(f, "closed", self.closed_bytes, self.closed_arenas as u64, "arenas")?;
        row(f, "open", self.open_bytes, self.open_arenas as u64, "arenas, held by")?;
        for (bytes, blocks) in self.live.iter() {
            row(f, "  blocks of", bytes, blocks, "in use")?;
        }
        if self.large_blocks > 0 {
            row(f, "  large", self.large_bytes, self.large_blocks as u64, "in use")?;
        }
        let (stuck, busy) = (self.stuck_arenas as u64, self.busy_threads as u64);
        counts(f, "not closed", &[(stuck, "arenas stuck"), (busy, "threads busy: try again")])
    }
}

#[cfg(all(test, feature = "serde"))]
mod tests {
    use crate::Heap;

    #[test]
    fn serde_writes_what_there_is() {
        let heap = Heap::builder().build().unwrap();
        let _buffers = [heap.buffer(1000).unwrap(), heap.buffer(1000).unwrap()];
        let stats = serde_json::to_value(heap.stats()).unwrap();
        assert_eq!((&stats["arenas"], &stats["refused"]["over_budget"]), (&1.into(), &0.into()), "{stats}");
        assert_eq!(stats["live_bytes"], 64 << 10);
        let trimmed = serde_json::to_value(heap.trim()).unwrap();
        assert_eq!((&trimmed["live"]["1024"], &trimmed["open_arenas"]), (&2.into(), &1.into()), "{trimmed}");
    }
}
