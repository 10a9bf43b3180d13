//! The table for the terminal, and the CSV files.

use super::SLOW;
use super::bars::{self, Verdict, words};
use super::figures::{Figures, Group, Metric, Run, Workload};
use super::programs::{ATTACHED, OURS, Subject};
use super::statistics::geometric_mean;
use std::fmt::Write;

/// `summary.csv`: seconds for `wall` and `cpu`, bytes for `rss`. The ratio is that of the medians, to the peer with the least one.
pub fn summary(figures: &Figures) -> String {
    let mut csv = String::from("workload,allocator,metric,median,min,max,ratio_to_best_peer\n");
    for (workload, Workload { name, .. }) in figures.workloads.iter().enumerate() {
        for (subject, Subject { name: allocator, .. }) in figures.subjects.iter().enumerate() {
            for (metric, metric_name) in Metric::ALL {
                let values = figures.values(workload, subject, metric);
                if values.is_empty() {
                    continue;
                }
                let (min, max) =
                    values.iter().fold((f64::INFINITY, 0.0f64), |(min, max), value| (min.min(*value), max.max(*value)));
                let median = figures.median(workload, subject, metric);
                let peers: Vec<usize> = figures.peers().collect();
                let ratio = figures
                    .best_peer(&[workload], metric, &peers)
                    .map(|best| format!("{:.4}", median / figures.median(workload, best, metric)));
                let digits = if metric == Metric::Rss { 0 } else { 6 };
                let _ = writeln!(
                    csv,
                    "{name},{allocator},{metric_name},{median:.digits$},{min:.digits$},{max:.digits$},{}",
                    ratio.unwrap_or_default()
                );
            }
        }
    }
    csv
}

/// `runs.csv`: each run, so that other questions can be asked of it.
pub fn every_run(figures: &Figures) -> String {
    let mut csv = String::from("workload,allocator,run,wall,cpu,rss\n");
    for (workload, Workload { name, .. }) in figures.workloads.iter().enumerate() {
        for (subject, Subject { name: allocator, .. }) in figures.subjects.iter().enumerate() {
            for (number, Run { wall, cpu, rss, .. }) in figures.runs(workload, subject).iter().enumerate() {
                let _ = writeln!(csv, "{name},{allocator},{number},{wall:.6},{cpu:.6},{rss:.0}");
            }
        }
    }
    csv
}

/// Time and memory of each workload, who was left out, and the bars.
pub fn table(figures: &Figures) -> String {
    let mut text = String::new();
    let ours = figures.subject(ATTACHED).or_else(|| figures.subject(OURS));
    for (metric, title) in [
        (Metric::Wall, "time: milliseconds of the best peer, and ratios to it (medians; 95 % confidence)"),
        (Metric::Cpu, "processor time: the same"),
        (Metric::Rss, "peak memory: MiB of the best peer, and ratios to it"),
    ] {
        let _ = write!(text, "\n{title}\n{:<15}{:>8}  {:<10}", "", "", "best peer");
        for (subject, Subject { short, .. }) in figures.subjects.iter().enumerate() {
            let _ = write!(text, "{short:>9}");
            if Some(subject) == ours && metric != Metric::Rss {
                let _ = write!(text, "{:>15}", "");
            }
        }
        text.push('\n');
        for group in [Group::Bound, Group::Part, Group::Whole] {
            for workload in figures.of_group(group) {
                row(figures, &mut text, &figures.workloads[workload].name, &[workload], metric, ours);
            }
            if group != Group::Part && figures.of_group(group).len() > 1 {
                let name = format!("= {}", group.name());
                row(figures, &mut text, &name, &figures.of_group(group), metric, ours);
            }
        }
    }
    text.push('\n');
    if text.contains('>') {
        let _ = writeln!(
            text,
            "> was stopped after {SLOW} times the time of the shortest run, and counts as that in the means"
        );
    }
    for (name, reason) in &figures.left_out {
        let _ = writeln!(text, "left out: {name}: {reason}");
    }
    for (workload, subject, reason) in figures.failures() {
        let _ = writeln!(text, "failed: {} in {}: {reason}", subject.name, workload.name);
    }
    let _ = writeln!(text, "\nbars (the form with a device attached, unless it says otherwise)");
    for bar in bars::judge(figures) {
        let verdict = match bar.verdict {
            Verdict::Pass => "pass",
            Verdict::Miss => "MISS",
            Verdict::Unknown => "-",
        };
        let _ = writeln!(text, "  {verdict:<5} {}: {}; {}", bar.measure, bar.bar, bar.reached);
    }
    text.push_str(
        "  Key look-up, buffers of 64 KiB, opening arenas and growth are measured by cargo xtask bench --micro and --verbs.\n",
    );
    text
}

fn row(figures: &Figures, text: &mut String, name: &str, workloads: &[usize], metric: Metric, ours: Option<usize>) {
    let peers: Vec<usize> = figures.peers().collect();
    let Some(best) = figures.best_peer(workloads, metric, &peers) else {
        let _ = writeln!(text, "{name:<15}  no peer got through");
        return;
    };
    let unit = if metric == Metric::Rss { f64::from(1 << 20) } else { 1e-3 };
    let mean = geometric_mean(workloads.iter().map(|&w| figures.median(w, best, metric) / unit));
    let _ = write!(text, "{name:<15}{mean:>8.1}  {:<10}", figures.subjects[best].short);
    for subject in 0..figures.subjects.len() {
        match figures.ratio(workloads, metric, subject, best) {
            None => {
                let _ = write!(text, "{:>9}", "-");
            }
            Some(ratio) if Some(subject) == ours && metric != Metric::Rss => {
                let _ = write!(text, "{:>24}", words(ratio));
            }
            Some(ratio) => {
                let stopped = workloads.iter().any(|&workload| figures.was_stopped(workload, subject));
                let mark = if stopped && metric != Metric::Rss { ">" } else { "" };
                let _ = write!(text, "{:>9}", format!("{mark}{:.2}", ratio.value));
            }
        }
    }
    text.push('\n');
}
