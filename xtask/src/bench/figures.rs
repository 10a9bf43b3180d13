//! All that was measured, and what follows from it.

use super::programs::Subject;
use super::statistics::{self, Pairs, Ratio, median};

/// What a workload is for, as the programs tell it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Group {
    /// Bound by allocating.
    Bound,
    /// One measure of those alone; in no mean.
    Part,
    /// A whole program.
    Whole,
}

impl Group {
    /// From its name.
    pub fn parse(name: &str) -> Option<Group> {
        [Group::Bound, Group::Part, Group::Whole].into_iter().find(|group| group.name() == name)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Group::Bound => "bound",
            Group::Part => "part",
            Group::Whole => "whole",
        }
    }

    /// What people read above its workloads.
    pub fn title(self) -> &'static str {
        match self {
            Group::Bound => "bound by allocating",
            Group::Part => "single measures",
            Group::Whole => "whole programs",
        }
    }
}

/// A workload.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Its name.
    pub name: String,
    /// What it is for.
    pub group: Group,
    /// What it does, in a few words.
    pub about: String,
}

/// What one run took.
#[derive(Clone, Debug)]
pub struct Run {
    /// Seconds, from start to end.
    pub wall: f64,
    /// Seconds of all processors.
    pub cpu: f64,
    /// Bytes that were resident at the peak.
    pub rss: f64,
    /// What it computed; `None`: it was stopped, since it took so much longer than another. Its times are the least it can have taken.
    pub result: Option<String>,
}

/// What is measured.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Metric {
    /// Seconds.
    Wall,
    /// Seconds of all processors.
    Cpu,
    /// Bytes.
    Rss,
}

impl Metric {
    /// All, with their names in the CSV.
    pub const ALL: [(Metric, &'static str); 3] = [(Metric::Wall, "wall"), (Metric::Cpu, "cpu"), (Metric::Rss, "rss")];

    fn of(self, run: &Run) -> f64 {
        match self {
            Metric::Wall => run.wall,
            Metric::Cpu => run.cpu,
            Metric::Rss => run.rss,
        }
    }
}

/// The runs of a workload by one allocator.
#[derive(Clone, Default)]
struct Cell {
    runs: Vec<Run>,
    failure: Option<String>,
}

/// All that was measured.
pub struct Figures {
    /// What was run.
    pub workloads: Vec<Workload>,
    /// Who took part.
    pub subjects: Vec<Subject>,
    /// Who did not, and why.
    pub left_out: Vec<(&'static str, String)>,
    /// How much work a run was.
    pub units: u32,
    /// Whether these are all the workloads that there are; else the means say little.
    pub is_whole: bool,
    /// How often each was run.
    pub runs: u32,
    /// By workload and subject.
    cells: Vec<Vec<Cell>>,
}

impl Figures {
    /// Nothing measured yet.
    pub fn new(
        (workloads, is_whole): (Vec<Workload>, bool),
        subjects: Vec<Subject>,
        left_out: Vec<(&'static str, String)>,
        units: u32,
        runs: u32,
    ) -> Figures {
        let cells = vec![vec![Cell::default(); subjects.len()]; workloads.len()];
        Figures { workloads, subjects, left_out, units, is_whole, runs, cells }
    }

    /// Leaves a subject out, with the reason.
    pub fn leave_out(&mut self, subject: usize, reason: String) {
        self.left_out.push((self.subjects.remove(subject).name, reason));
        self.cells.iter_mut().for_each(|row| drop(row.remove(subject)));
    }

    /// Notes a run. One with another result than the others' is a failure.
    pub fn record(&mut self, workload: usize, subject: usize, run: Run) {
        let results = self.cells[workload].iter().flat_map(|cell| &cell.runs).filter_map(|run| run.result.as_ref());
        if let Some(result) = &run.result
            && let Some(other) = results.clone().find(|other| *other != result)
        {
            let reason = format!("its result is {result}, and another's {other}");
            return self.fail(workload, subject, reason);
        }
        self.cells[workload][subject].runs.push(run);
    }

    /// Whether a run was stopped; there are no more then.
    pub fn was_stopped(&self, workload: usize, subject: usize) -> bool {
        self.cells[workload][subject].runs.iter().any(|run| run.result.is_none())
    }

    /// The shortest time that a run of a workload has taken so far, in seconds.
    pub fn shortest(&self, workload: usize) -> Option<f64> {
        let runs = self.cells[workload].iter().flat_map(|cell| &cell.runs);
        runs.filter(|run| run.result.is_some()).map(|run| run.wall).min_by(f64::total_cmp)
    }

    /// Notes that a subject does not get through a workload.
    pub fn fail(&mut self, workload: usize, subject: usize, reason: String) {
        self.cells[workload][subject].failure = Some(reason);
    }

    /// Whether that was noted.
    pub fn has_failed(&self, workload: usize, subject: usize) -> bool {
        self.cells[workload][subject].failure.is_some()
    }

    /// Whether one of our forms did not get through.
    pub fn ours_failed(&self) -> bool {
        self.failures().any(|(_, subject, _)| subject.is_ours())
    }

    /// Which workloads a subject does not get through, and why.
    pub fn failures(&self) -> impl Iterator<Item = (&Workload, &Subject, &str)> {
        self.workloads.iter().zip(&self.cells).flat_map(|(workload, row)| {
            let failures = self.subjects.iter().zip(row);
            failures.filter_map(move |(subject, cell)| Some((workload, subject, cell.failure.as_deref()?)))
        })
    }

    /// The runs of a subject in a workload; none, if it failed in one.
    pub fn runs(&self, workload: usize, subject: usize) -> &[Run] {
        let cell = &self.cells[workload][subject];
        if cell.failure.is_some() { &[] } else { &cell.runs }
    }

    /// What was measured in them.
    pub fn values(&self, workload: usize, subject: usize, metric: Metric) -> Vec<f64> {
        self.runs(workload, subject).iter().map(|run| metric.of(run)).collect()
    }

    /// Its median; NaN without runs.
    pub fn median(&self, workload: usize, subject: usize, metric: Metric) -> f64 {
        median(&self.values(workload, subject, metric))
    }

    /// The most memory that any run of a workload has had so far, in bytes.
    pub fn most_memory(&self, workload: usize) -> f64 {
        let runs = self.cells[workload].iter().flat_map(|cell| &cell.runs);
        runs.map(|run| run.rss).fold(0.0, f64::max)
    }

    /// The subjects that are none of our forms.
    pub fn peers(&self) -> impl Iterator<Item = usize> + Clone {
        (0..self.subjects.len()).filter(|&subject| !self.subjects[subject].is_ours())
    }

    /// The subject of a name.
    pub fn subject(&self, name: &str) -> Option<usize> {
        self.subjects.iter().position(|subject| subject.name == name)
    }

    /// The peer that is best in the workloads by the geometric mean; of those that got through all of them.
    pub fn best_peer(&self, workloads: &[usize], metric: Metric, peers: &[usize]) -> Option<usize> {
        let mean = |peer: usize| {
            statistics::geometric_mean(workloads.iter().map(|&workload| self.median(workload, peer, metric)))
        };
        let means = peers.iter().map(|&peer| (peer, mean(peer))).filter(|(_, mean)| mean.is_finite());
        means.min_by(|a, b| a.1.total_cmp(&b.1)).map(|(peer, _)| peer)
    }

    /// How two subjects compare, in the geometric mean over workloads. `None`, if one of them did not get through.
    pub fn ratio(&self, workloads: &[usize], metric: Metric, subject: usize, other: usize) -> Option<Ratio> {
        let pairs = |&workload: &usize| {
            let (first, second) = (self.values(workload, subject, metric), self.values(workload, other, metric));
            // Who was stopped has fewer.
            let some = !first.is_empty() && !second.is_empty();
            some.then(|| first.into_iter().zip(second).collect::<Pairs>())
        };
        let measures = workloads.iter().map(pairs).collect::<Option<Vec<Pairs>>>()?;
        (!measures.is_empty()).then(|| statistics::ratio(&measures))
    }

    /// The workloads of a group.
    pub fn of_group(&self, group: Group) -> Vec<usize> {
        (0..self.workloads.len()).filter(|&workload| self.workloads[workload].group == group).collect()
    }

    /// A subject against the best peer in some workloads: that peer, and the ratio.
    pub fn against_best(&self, workloads: &[usize], metric: Metric, subject: usize) -> Option<(usize, Ratio)> {
        let peers: Vec<usize> = self.peers().collect();
        let best = self.best_peer(workloads, metric, &peers)?;
        Some((best, self.ratio(workloads, metric, subject, best)?))
    }
}
