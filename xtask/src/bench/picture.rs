//! `summary.svg`: one line for each workload, the ratio to the best peer across, on a log axis; the geometric means on top.
//!
//! Colours are classes, with rules for light and for dark schemes, and the background is drawn: it can be read on any page.

use super::figures::{Figures, Group, Metric};
use super::programs::{ATTACHED, OURS};
use super::statistics::{Ratio, geometric_mean};
use std::fmt::Write;

const WIDTH: f64 = 1000.0;
/// Where the axis begins and ends.
const LEFT: f64 = 210.0;
const RIGHT: f64 = 760.0;
const MARGIN: f64 = 28.0;
/// Of a line, and of one of the means.
const LINE: f64 = 24.0;
const MEAN: f64 = 34.0;
/// The axis goes no further, whatever a peer takes.
const MOST: f64 = 8.0;

const STYLE: &str = "
text { font-family: system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif; font-size: 13px; fill: #1f2430 }
.title { font-size: 20px; font-weight: 600 } .strong { font-weight: 600 } .mean { font-size: 15px; font-weight: 600 }
.soft { fill: #5c6675 } .small { font-size: 12px } .end { text-anchor: end } .middle { text-anchor: middle }
.page { fill: #ffffff } .band { fill: #f3f5f8 } .ahead { fill: #e6f4ec }
.grid { stroke: #dfe3ea } .one { stroke: #5c6675; stroke-width: 1.5 } .peer { fill: #a9b1be }
.ours { fill: #d9480f } .oursline { stroke: #d9480f; stroke-width: 2.5 }
.local { fill: #ffffff; stroke: #d9480f; stroke-width: 2 }
@media (prefers-color-scheme: dark) {
text { fill: #e6e9ef } .soft { fill: #9aa4b3 }
.page { fill: #14171c } .band { fill: #1d2128 } .ahead { fill: #17291f }
.grid { stroke: #2c323c } .one { stroke: #9aa4b3 } .peer { fill: #616a78 }
.ours { fill: #ff8a4c } .oursline { stroke: #ff8a4c } .local { fill: #14171c; stroke: #ff8a4c }
}";

/// One line of the picture.
struct Line {
    label: String,
    workloads: Vec<usize>,
    metric: Metric,
    is_mean: bool,
}

/// Where a ratio stands on the axis.
struct Axis {
    least: f64,
    most: f64,
}

impl Axis {
    fn at(&self, ratio: f64) -> f64 {
        let (least, most) = (self.least.ln(), self.most.ln());
        LEFT + (RIGHT - LEFT) * (ratio.ln().clamp(least, most) - least) / (most - least)
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

fn titled(svg: &mut String, x: f64, y: f64, class: &str, words: &str, title: &str) {
    let (words, title) = (escape(words), escape(title));
    let _ = writeln!(svg, r#"<text x="{x:.1}" y="{y:.1}" class="{class}">{words}<title>{title}</title></text>"#);
}

fn text(svg: &mut String, x: f64, y: f64, class: &str, words: &str) {
    let _ = writeln!(svg, r#"<text x="{x:.1}" y="{y:.1}" class="{class}">{}</text>"#, escape(words));
}

fn lines(figures: &Figures) -> (Vec<Line>, Vec<(Group, Vec<Line>)>) {
    let mut means = Vec::new();
    for (group, label) in [(Group::Bound, "allocation-bound"), (Group::Whole, "whole programs")] {
        let workloads = figures.of_group(group);
        if workloads.len() > 1 {
            means.push(Line { label: label.into(), workloads, metric: Metric::Wall, is_mean: true });
        }
    }
    let workloads = [figures.of_group(Group::Bound), figures.of_group(Group::Whole)].concat();
    if workloads.len() > 1 {
        means.push(Line { label: "peak memory".into(), workloads, metric: Metric::Rss, is_mean: true });
    }
    let single = |workload: usize| Line {
        label: figures.workloads[workload].name.clone(),
        workloads: vec![workload],
        metric: Metric::Wall,
        is_mean: false,
    };
    let groups = [Group::Bound, Group::Part, Group::Whole].map(|group| (group, figures.of_group(group)));
    let groups = groups.into_iter().filter(|(_, workloads)| !workloads.is_empty());
    (means, groups.map(|(group, workloads)| (group, workloads.into_iter().map(single).collect())).collect())
}

/// The picture.
pub fn draw(figures: &Figures) -> String {
    let (means, groups) = lines(figures);
    let ours: Vec<usize> = [ATTACHED, OURS].iter().filter_map(|name| figures.subject(name)).collect();
    let all = || means.iter().chain(groups.iter().flat_map(|(_, lines)| lines));
    let ratios = |subjects: Vec<usize>| {
        let found = all().flat_map(|line| subjects.iter().filter_map(|&s| ratio(figures, line, s)).collect::<Vec<_>>());
        found.map(|(ratio, _)| ratio).collect::<Vec<Ratio>>()
    };
    let least = ratios(ours).iter().map(|ratio| ratio.low).fold(0.8f64, f64::min);
    let most = ratios((0..figures.subjects.len()).collect()).iter().map(|ratio| ratio.value).fold(1.5f64, f64::max);
    let axis = Axis { least: (least * 0.93).max(1.0 / MOST), most: (most * 1.07).min(MOST) };

    let top = 128.0;
    let height = top
        + means.len() as f64 * MEAN
        + groups.iter().map(|(_, lines)| 34.0 + lines.len() as f64 * LINE).sum::<f64>()
        + 56.0;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" \
         role=\"img\" aria-label=\"rdmalloc against other allocators\">\n<style>{STYLE}\n</style>\n\
         <rect class=\"page\" width=\"{WIDTH}\" height=\"{height}\" rx=\"8\"/>\n"
    );
    heading(&mut svg, figures);
    let bottom = height - 44.0;
    frame(&mut svg, &axis, top, bottom, means.len() as f64 * MEAN);

    let mut y = top;
    for line in &means {
        draw_line(&mut svg, figures, &axis, line, y + MEAN / 2.0);
        y += MEAN;
    }
    for (group, lines) in &groups {
        y += 34.0;
        text(&mut svg, MARGIN, y - 8.0, "soft small strong", &group.title().to_uppercase());
        for line in lines {
            draw_line(&mut svg, figures, &axis, line, y + LINE / 2.0);
            y += LINE;
        }
    }
    let words = format!(
        "Medians of {} runs of {} units of work, in turn; lines: 95 % confidence. One binary for each allocator, fat LTO. \
         cargo xtask bench",
        figures.runs, figures.units
    );
    text(&mut svg, MARGIN, height - 14.0, "soft small", &words);
    svg + "</svg>\n"
}

fn heading(svg: &mut String, figures: &Figures) {
    text(svg, MARGIN, 36.0, "title", "Time with each allocator, against the best of the others");
    let peers: Vec<&str> = figures.peers().map(|peer| figures.subjects[peer].short).collect();
    let mut x = MARGIN;
    let legend = [
        (ATTACHED, "ours", 6.0, "rdmalloc, every block registered (io_uring)"),
        (OURS, "local", 5.0, "rdmalloc, no device"),
    ];
    for (name, class, radius, words) in legend {
        if figures.subject(name).is_some() {
            let _ = writeln!(svg, r#"<circle cx="{:.1}" cy="58" r="{radius}" class="{class}"/>"#, x + 6.0);
            text(svg, x + 18.0, 62.5, "strong", words);
            x += 40.0 + words.len() as f64 * 7.4;
        }
    }
    let _ = writeln!(svg, r#"<circle cx="{:.1}" cy="58" r="4.5" class="peer"/>"#, x + 6.0);
    text(svg, x + 18.0, 62.5, "soft", &peers.join(", "));
}

/// The grid, its numbers, and the line at 1.
fn frame(svg: &mut String, axis: &Axis, top: f64, bottom: f64, means: f64) {
    let one = axis.at(1.0);
    let _ = writeln!(
        svg,
        r#"<rect class="band" x="{:.1}" y="{top:.1}" width="{:.1}" height="{means:.1}" rx="6"/>"#,
        MARGIN - 12.0,
        WIDTH - 2.0 * MARGIN + 24.0
    );
    let _ = writeln!(
        svg,
        r#"<rect class="ahead" x="{LEFT:.1}" y="{top:.1}" width="{:.1}" height="{:.1}"/>"#,
        one - LEFT,
        bottom - top
    );
    text(svg, one - 8.0, top - 28.0, "soft small end", "\u{2190} faster, or less memory");
    text(svg, one + 8.0, top - 28.0, "soft small", "slower, or more \u{2192}");
    text(svg, RIGHT + 16.0, top - 10.0, "soft small", "registered");
    text(svg, RIGHT + 92.0, top - 10.0, "soft small", "best of the others");
    for ratio in [0.125, 0.25, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0] {
        if ratio < axis.least || ratio > axis.most {
            continue;
        }
        let x = axis.at(ratio);
        let class = if ratio == 1.0 { "one" } else { "grid" };
        let _ = writeln!(svg, r#"<path d="M{x:.1} {:.1}V{bottom:.1}" class="{class}"/>"#, top - 4.0);
        text(svg, x, top - 10.0, "soft small middle", &format!("{ratio}\u{d7}"));
    }
}

/// A subject's ratio in a line, and whom it is to.
fn ratio(figures: &Figures, line: &Line, subject: usize) -> Option<(Ratio, usize)> {
    let peers: Vec<usize> = figures.peers().collect();
    let best = figures.best_peer(&line.workloads, line.metric, &peers)?;
    Some((figures.ratio(&line.workloads, line.metric, subject, best)?, best))
}

fn draw_line(svg: &mut String, figures: &Figures, axis: &Axis, line: &Line, y: f64) {
    let (label, mean) = (if line.is_mean { "mean" } else { "" }, line.is_mean);
    match line.workloads[..] {
        [workload] => titled(svg, MARGIN, y + 4.5, label, &line.label, &figures.workloads[workload].about),
        _ => text(svg, MARGIN, y + 4.5, label, &line.label),
    }
    let dot = |svg: &mut String, ratio: f64, radius: f64, class: &str, name: &str| {
        let beyond = if ratio > axis.most { " (beyond the axis)" } else { "" };
        let _ = writeln!(
            svg,
            r#"<circle cx="{:.1}" cy="{y:.1}" r="{radius}" class="{class}"><title>{name} {ratio:.2}{beyond}</title></circle>"#,
            axis.at(ratio)
        );
    };
    let mut best = None;
    for peer in figures.peers() {
        if let Some((ratio, other)) = ratio(figures, line, peer) {
            best = Some(other);
            dot(svg, ratio.value, if mean { 5.5 } else { 4.5 }, "peer", figures.subjects[peer].short);
        }
    }
    let local = figures.subject(OURS).and_then(|subject| ratio(figures, line, subject));
    if let Some((ratio, _)) = local {
        dot(svg, ratio.value, if mean { 6.0 } else { 4.5 }, "local", OURS);
    }
    let attached = figures.subject(ATTACHED).and_then(|subject| ratio(figures, line, subject));
    // Memory that a device reaches is resident on purpose: the program's own need is the other form's.
    if line.metric == Metric::Rss {
        if let Some((ratio, _)) = local {
            text(svg, RIGHT + 16.0, y + 4.5, label, &format!("{:.2}\u{d7} (no device)", ratio.value));
        }
        return;
    }
    if let Some((ratio, _)) = attached {
        let (low, high) = (axis.at(ratio.low), axis.at(ratio.high));
        let _ = writeln!(svg, r#"<path d="M{low:.1} {y:.1}H{high:.1}" class="oursline"/>"#);
        dot(svg, ratio.value, if mean { 7.5 } else { 6.0 }, "ours", ATTACHED);
        let class = if mean { "mean" } else { "strong" };
        text(svg, RIGHT + 16.0, y + 4.5, class, &format!("{:.2}\u{d7}", ratio.value));
    }
    if let Some(best) = best {
        let times = line.workloads.iter().map(|&w| figures.median(w, best, line.metric) * 1e3);
        let words = format!("{}, {:.0} ms", figures.subjects[best].short, geometric_mean(times));
        text(svg, RIGHT + 92.0, y + 4.5, "soft", &words);
    }
}
