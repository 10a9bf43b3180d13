//! What is made of figures, by figures that are made up.

use super::bars::{Verdict, judge};
use super::figures::{Figures, Group, Run, Workload};
use super::programs::{ATTACHED, OURS, Subject};
use super::{picture, report};

fn run(wall: f64, rss: f64, result: &str) -> Run {
    Run { wall, cpu: wall, rss, result: Some(result.into()) }
}

/// Two allocation-bound workloads and a whole program, five runs each; each subject with its seconds and bytes.
fn figures(subjects: &[(&'static str, f64, f64)], is_whole: bool) -> Figures {
    let workload = |name: &str, group| Workload { name: name.into(), group, about: "a < b & c".into() };
    let workloads =
        vec![workload("churn", Group::Bound), workload("batch", Group::Bound), workload("json", Group::Whole)];
    let subject = |name: &'static str| Subject { name, short: name, program: "/program".into() };
    let all = subjects.iter().map(|(name, ..)| subject(name)).collect();
    let mut figures = Figures::new((workloads, is_whole), all, Vec::new(), 1, 5);
    for workload in 0..3 {
        for (index, (_, wall, rss)) in subjects.iter().enumerate() {
            (0..5).for_each(|_| figures.record(workload, index, run(*wall, *rss, "same")));
        }
    }
    figures
}

const ALL: [(&str, f64, f64); 5] = [
    (ATTACHED, 0.8, 9e6),
    (OURS, 0.9, 2e6),
    ("rusty_alloc-api", 1.0, 2e6),
    ("snmalloc-rs", 2.0, 3e6),
    ("glibc", 3.0, 1e6),
];

#[test]
fn a_run_with_another_result_is_a_failure_and_counts_for_nothing() {
    let mut figures = figures(&ALL, true);
    assert!(!figures.ours_failed());
    figures.record(0, 3, run(0.001, 1.0, "another"));
    assert!(figures.has_failed(0, 3) && figures.runs(0, 3).is_empty() && !figures.ours_failed());
    figures.record(0, 0, run(0.001, 1.0, "another"));
    assert!(figures.ours_failed());
    assert!(report::table(&figures).contains("failed: rdmalloc-attached in churn: its result is another"));
}

#[test]
fn who_was_stopped_counts_as_what_he_had_taken_and_is_marked() {
    let subjects = [ALL[0], ALL[1], ALL[2], ALL[4]];
    let mut figures = figures(&subjects, true);
    assert_eq!(figures.shortest(0), Some(0.8));
    figures.record(0, 3, Run { result: None, ..run(16.0, 1e6, "") });
    assert!(figures.was_stopped(0, 3) && !figures.has_failed(0, 3) && !figures.was_stopped(1, 3));
    assert_eq!(figures.shortest(0), Some(0.8));
    assert!(report::table(&figures).contains(">3.00"), "{}", report::table(&figures));
    assert!(
        figures.ratio(&[0, 1], super::figures::Metric::Wall, 0, 3).is_some(),
        "the rest can be compared all the same"
    );
}

#[test]
fn ratios_are_to_the_best_peer_and_never_to_ourselves() {
    let csv = report::summary(&figures(&ALL, true));
    let mut lines = csv.lines();
    assert_eq!(lines.next(), Some("workload,allocator,metric,median,min,max,ratio_to_best_peer"));
    assert_eq!(lines.clone().count(), 3 * 5 * 3);
    for line in [
        "churn,rdmalloc-attached,wall,0.800000,0.800000,0.800000,0.8000",
        "churn,rdmalloc,rss,2000000,2000000,2000000,2.0000",
        "json,rusty_alloc-api,cpu,1.000000,1.000000,1.000000,1.0000",
        "batch,glibc,wall,3.000000,3.000000,3.000000,3.0000",
    ] {
        assert!(csv.lines().any(|other| other == line), "{line} is not in\n{csv}");
    }
}

fn verdicts(figures: &Figures, part: &str) -> Vec<Verdict> {
    judge(figures).into_iter().filter(|bar| bar.measure.contains(part)).map(|bar| bar.verdict).collect()
}

#[test]
fn bars_are_missed_by_who_is_slower_or_larger() {
    use Verdict::{Miss, Pass, Unknown};
    let good = figures(&ALL, true);
    assert_eq!(verdicts(&good, "geometric mean"), [Pass, Pass, Pass]);
    assert_eq!(verdicts(&good, "each workload"), [Pass]);
    assert_eq!(verdicts(&good, "time, churn"), [Pass]);
    assert_eq!(verdicts(&good, "time, xfree"), [Unknown], "it was not run");

    let mut slow = ALL;
    slow[0].1 = 1.2;
    slow[1].2 = 2.4e6;
    let slow = figures(&slow, true);
    assert_eq!(verdicts(&slow, "geometric mean"), [Miss, Miss, Miss], "glibc's memory is no bar");
    assert_eq!(verdicts(&slow, "each workload"), [Miss]);
    assert_eq!(verdicts(&slow, "time, churn"), [Miss]);

    let part = figures(&ALL, false);
    assert_eq!(verdicts(&part, "geometric mean"), [Unknown, Unknown, Unknown], "a mean over some says nothing");
    let unattached = figures(&ALL[1..], true);
    assert_eq!(verdicts(&unattached, "time, bound"), [Unknown]);
}

#[test]
fn the_picture_has_every_workload_and_no_number_that_is_none() {
    let mut figures = figures(&ALL, true);
    figures.fail(1, 4, "killed".into());
    let svg = picture::draw(&figures);
    for words in ["churn", "batch", "json", "a &lt; b &amp; c", "0.80\u{d7}", "prefers-color-scheme: dark"] {
        assert!(svg.contains(words), "{words}");
    }
    assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
    assert_eq!(svg.matches("<text").count(), svg.matches("</text>").count());
}
