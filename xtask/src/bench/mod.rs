//! `cargo xtask bench`: whole programs, one for each allocator, compared run by run.
//!
//! | module | what it does |
//! | --- | --- |
//! | `micro` | the criterion benches, which `--micro` and `--verbs` run instead |
//! | `programs` | builds the programs; who takes part, and why others do not |
//! | `measure` | runs a program once: time, processor time, memory |
//! | `statistics` | medians, and how sure a ratio is |
//! | `figures` | all that was measured, and what follows from it |
//! | `bars` | what the attached form has to reach |
//! | `report` | the table for the terminal, and the CSV files |
//! | `picture` | the SVG |

mod bars;
mod figures;
mod measure;
pub mod micro;
mod picture;
mod programs;
mod report;
mod statistics;
#[cfg(test)]
mod tests;

use crate::{Error, Result, Workspace, step};
use figures::{Figures, Run};
use indicatif::{ProgressBar, ProgressStyle};
use measure::Outcome;
use programs::Subject;
use std::fs;
use std::time::Duration;

/// What the user chose.
pub struct Options {
    /// Less work.
    pub quick: bool,
    /// Only these workloads, or groups of them; all, if empty.
    pub only: Vec<String>,
    /// Only these allocators; all, if empty.
    pub allocators: Vec<String>,
    /// How often each program runs each workload.
    pub runs: Option<u32>,
}

/// The fewest runs of which anything is said.
const FEWEST: u32 = 5;

/// Who takes this many times as long as the shortest run of a workload is stopped, and not run again: some would take hours.
pub const SLOW: f64 = 10.0;
/// Seconds that everyone has.
const LEAST_PATIENCE: f64 = 1.0;

/// Bytes that are warmed before a run, beside what runs of the workload have had.
const LEAST_WARM: usize = 96 << 20;

/// How much work a run is, in units of about a millisecond, and how often it runs.
fn plan(options: &Options) -> Result<(u32, u32)> {
    let (units, runs) = if options.quick { (50, FEWEST) } else { (400, 7) };
    let runs = options.runs.unwrap_or(runs);
    if runs < FEWEST {
        return Err(Error::Usage(format!("--runs takes {FEWEST} or more: fewer say nothing")));
    }
    Ok((units, runs))
}

/// Builds, measures, and reports; the exit status.
pub fn run(workspace: &Workspace, options: &Options) -> Result<i32> {
    let (units, runs) = plan(options)?;
    let programs = programs::build(workspace, &options.allocators)?;
    let workloads = programs.workloads(&options.only)?;
    let mut figures = Figures::new(workloads, programs.subjects, programs.left_out, units, runs);
    warm(&mut figures)?;
    let total = u64::from(runs) * figures.workloads.len() as u64 * figures.subjects.len() as u64;
    step!(
        "{} workloads, {} allocators, {runs} runs each, in turn{}",
        figures.workloads.len(),
        figures.subjects.len(),
        if options.quick { " (quick: short runs, so their ratios are rough)" } else { "" }
    );
    let bar = ProgressBar::new(total);
    let style = "{bar:40} {pos}/{len}  {elapsed_precise}, {eta_precise} left  {msg}";
    bar.set_style(ProgressStyle::with_template(style).expect("a template that indicatif knows"));
    for workload in 0..figures.workloads.len() {
        if bar.is_hidden() {
            step!("{}", figures.workloads[workload].name);
        }
        for round in 0..runs as usize {
            for turn in 0..figures.subjects.len() {
                // Each begins a round in its turn, and follows each other: what one leaves the machine with hits all alike.
                let subject = (turn + round) % figures.subjects.len();
                let names = (figures.workloads[workload].name.clone(), figures.subjects[subject].name);
                bar.set_message(format!("{}, {}", names.0, names.1));
                if figures.has_failed(workload, subject) || figures.was_stopped(workload, subject) {
                    bar.inc(1);
                    continue;
                }
                measure::warm_memory(&figures.subjects[subject], LEAST_WARM + figures.most_memory(workload) as usize)?;
                let patience =
                    figures.shortest(workload).map(|best| Duration::from_secs_f64((best * SLOW).max(LEAST_PATIENCE)));
                match measure::run(&figures.subjects[subject], &names.0, units, patience) {
                    Ok(Outcome::Done(run)) => figures.record(workload, subject, run),
                    Ok(Outcome::Skipped(reason)) => figures.fail(workload, subject, reason),
                    Err(error) => figures.fail(workload, subject, error.to_string()),
                }
                bar.inc(1);
            }
        }
    }
    bar.finish_and_clear();
    let folder = workspace.target.join("bench");
    fs::create_dir_all(&folder)?;
    fs::write(folder.join("summary.csv"), report::summary(&figures))?;
    fs::write(folder.join("runs.csv"), report::every_run(&figures))?;
    fs::write(folder.join("summary.svg"), picture::draw(&figures))?;
    print!("{}", report::table(&figures));
    println!("\nwritten: {0}/summary.csv, {0}/runs.csv, {0}/summary.svg", folder.display());
    Ok(i32::from(figures.ours_failed()))
}

/// Runs each program for a moment: it is read from the disk then, and whoever cannot take part says so.
fn warm(figures: &mut Figures) -> Result<()> {
    let Some(workload) = figures.workloads.first().map(|workload| workload.name.clone()) else { return Ok(()) };
    let able = |subject: &Subject| match measure::run(subject, &workload, 1, None)? {
        Outcome::Done(Run { .. }) => Ok(None),
        Outcome::Skipped(reason) => Ok(Some(reason)),
    };
    let mut index = 0;
    while let Some(subject) = figures.subjects.get(index) {
        match able(subject) {
            Ok(None) => index += 1,
            Ok(Some(reason)) => figures.leave_out(index, reason),
            Err(Error::Failed(reason)) if !subject.is_ours() => figures.leave_out(index, reason),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
