//! What rdmalloc has to reach: the bars that whole programs can judge.

use super::figures::{Figures, Group, Metric};
use super::programs::{ATTACHED, OURS};
use super::statistics::Ratio;

/// Whether a bar is reached.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// It is.
    Pass,
    /// It is not.
    Miss,
    /// What it is about was not measured.
    Unknown,
}

/// A bar, and where we stand.
pub struct Bar {
    /// What is measured.
    pub measure: String,
    /// What it has to be.
    pub bar: String,
    /// What it is.
    pub reached: String,
    /// Whether that will do.
    pub verdict: Verdict,
}

/// At most so many times the best single peer's time, over the allocator-bound workloads and the whole programs.
const MEANS: [(Group, f64); 2] = [(Group::Bound, 0.90), (Group::Whole, 1.00)];
/// At most so many times the best peer's time in each workload, as far as that is sure.
const EACH: f64 = 1.10;
/// Ahead of these two in each of these.
const RIVALS: [&str; 2] = ["rusty_alloc-api", "snmalloc-rs"];
const DUELS: [&str; 6] = ["pair-16", "churn", "batch", "pair-64k", "pair-4m", "xfree"];
/// At most so many times the memory of the leanest of these.
const MEMORY: f64 = 1.15;
const LEAN: [&str; 4] = ["rusty_alloc-api", "snmalloc-rs", "mimalloc", "tikv-jemallocator"];

/// A ratio as people read it.
pub fn words(ratio: Ratio) -> String {
    format!("{:.2} [{:.2} to {:.2}]", ratio.value, ratio.low, ratio.high)
}

fn verdict(good: bool) -> Verdict {
    if good { Verdict::Pass } else { Verdict::Miss }
}

/// All bars, judged.
pub fn judge(figures: &Figures) -> Vec<Bar> {
    let mut bars = Vec::new();
    let unknown = |measure: String, bar: String, why: &str| Bar {
        measure,
        bar,
        reached: why.to_owned(),
        verdict: Verdict::Unknown,
    };
    let attached = figures.subject(ATTACHED);
    for (group, most) in MEANS {
        let measure = format!("time, {}, geometric mean", group.title());
        let bar = format!("at most {most:.2} x the best single peer");
        let workloads = figures.of_group(group);
        let found = attached.filter(|_| figures.is_whole);
        let found = found.and_then(|subject| figures.against_best(&workloads, Metric::Wall, subject));
        bars.push(match found {
            None => unknown(measure, bar, "not measured over all workloads"),
            Some((best, ratio)) => Bar {
                measure,
                bar,
                reached: format!("{} x {}", words(ratio), figures.subjects[best].short),
                verdict: verdict(ratio.value <= most),
            },
        });
    }
    bars.push(each(figures, attached));
    for name in DUELS {
        let measure = format!("time, {name}");
        let bar = "ahead of rusty_alloc and snmalloc".to_owned();
        let workload = figures.workloads.iter().position(|workload| workload.name == name);
        let duel = |rival: &str| {
            let rival = figures.subject(rival)?;
            Some((figures.ratio(&[workload?], Metric::Wall, attached?, rival)?, figures.subjects[rival].short))
        };
        let duels: Vec<_> = RIVALS.iter().filter_map(|rival| duel(rival)).collect();
        bars.push(if duels.len() < RIVALS.len() {
            unknown(measure, bar, "not measured against both")
        } else {
            let reached: Vec<_> = duels.iter().map(|(ratio, rival)| format!("{:.2} x {rival}", ratio.value)).collect();
            let verdict = verdict(duels.iter().all(|(ratio, _)| ratio.value < 1.0));
            Bar { measure, bar, reached: reached.join(", "), verdict }
        });
    }
    bars.push(memory(figures));
    bars
}

fn each(figures: &Figures, attached: Option<usize>) -> Bar {
    let measure = "time, each workload".to_owned();
    let bar = format!("at most {EACH:.2} x the best peer in it, beyond the confidence interval");
    let judged = (0..figures.workloads.len()).filter(|w| figures.workloads[*w].group != Group::Part);
    let mut worse = Vec::new();
    let mut measured = 0;
    for workload in judged {
        let found = attached.and_then(|subject| figures.against_best(&[workload], Metric::Wall, subject));
        let Some((best, ratio)) = found else { continue };
        measured += 1;
        if ratio.low > EACH {
            let (name, best) = (&figures.workloads[workload].name, figures.subjects[best].short);
            worse.push(format!("{name} {:.2} x {best}", ratio.value));
        }
    }
    let (reached, verdict) = match (measured, worse.is_empty()) {
        (0, _) => ("not measured".to_owned(), Verdict::Unknown),
        (n, true) => (format!("in all {n}"), Verdict::Pass),
        (n, false) => (format!("not in {} of {n}: {}", worse.len(), worse.join(", ")), Verdict::Miss),
    };
    Bar { measure, bar, reached, verdict }
}

fn memory(figures: &Figures) -> Bar {
    let measure = "peak memory without a device, geometric mean".to_owned();
    let bar = format!("at most {MEMORY:.2} x the leanest of rusty_alloc, snmalloc, mimalloc, jemalloc");
    let workloads = [figures.of_group(Group::Bound), figures.of_group(Group::Whole)].concat();
    let lean: Vec<usize> = LEAN.iter().filter_map(|name| figures.subject(name)).collect();
    let found = figures
        .best_peer(&workloads, Metric::Rss, &lean)
        .filter(|_| figures.is_whole)
        .and_then(|best| Some((best, figures.ratio(&workloads, Metric::Rss, figures.subject(OURS)?, best)?)));
    match found {
        None => Bar { measure, bar, reached: "not measured over all workloads".into(), verdict: Verdict::Unknown },
        Some((best, ratio)) => Bar {
            measure,
            bar,
            reached: format!("{} x {}", words(ratio), figures.subjects[best].short),
            verdict: verdict(ratio.value <= MEMORY),
        },
    }
}
