use std::io::IsTerminal;
use std::time::Duration;

/// A step that has run.
pub(crate) struct FinishedStep {
    pub(crate) name: &'static str,
    /// Command line.
    pub(crate) command: String,
    pub(crate) time: Duration,
    /// Processor time of its processes, if available.
    pub(crate) cpu: Option<Duration>,
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// Test counts, or how the step failed.
    pub(crate) note: String,
    pub(crate) output: String,
}

/// A step that was skipped.
pub(crate) struct SkippedStep {
    pub(crate) name: &'static str,
    /// The reason, or how to run the step.
    pub(crate) reason: &'static str,
}

/// Summary of a run.
pub(crate) struct Report {
    pub(crate) finished: Vec<FinishedStep>,
    pub(crate) skipped: Vec<SkippedStep>,
    /// Time from the start of the first step to the end of the last.
    pub(crate) time: Duration,
}

impl FinishedStep {
    /// Returns the time and the note of the step in one line.
    pub(crate) fn summary_line(&self, style: Style) -> String {
        let failed = if self.failed > 0 { style.red("FAILED  ") } else { String::new() };
        let line = format!("{:.1} s  {failed}{}", self.time.as_secs_f64(), self.note);
        line.trim_end().into()
    }
}

impl Report {
    pub(crate) fn has_passed(&self) -> bool {
        self.failed() == 0
    }

    fn failed(&self) -> u64 {
        self.finished.iter().map(|done| done.failed).sum()
    }

    /// Prints the table of steps, and the numbers of passed and failed checks as the last line.
    pub(crate) fn print(&self, style: Style) {
        let seconds = |time: Duration| format!("{:.1} s", time.as_secs_f64());
        let names = self.finished.iter().map(|done| done.name);
        let width = names.map(str::len).max().unwrap_or_default().max("total".len());
        println!();
        println!("  {:width$}  {:>9}  {:>9}", "", "time", "CPU time");
        for FinishedStep { name, time, cpu, failed, note, .. } in &self.finished {
            let (time, cpu) = (seconds(*time), cpu.map(seconds).unwrap_or_default());
            let mark = if *failed > 0 { style.red("✗") } else { style.green("✓") };
            println!("{}", format!("{mark} {name:width$}  {time:>9}  {cpu:>9}  {note}").trim_end());
        }
        let total = seconds(self.time);
        let cpu = seconds(self.finished.iter().filter_map(|done| done.cpu).sum());
        println!("  {:width$}  {total:>9}  {cpu:>9}", "total");
        for group in self.skipped.chunk_by(|one, next| one.reason == next.reason) {
            let names: Vec<&str> = group.iter().map(|left_out| left_out.name).collect();
            println!("skipped: {} ({})", names.join(", "), group[0].reason);
        }
        let passed: u64 = self.finished.iter().map(|done| done.passed).sum();
        println!("\n{passed} passed, {} failed", self.failed());
    }
}

/// Colours of the output. Used on terminals, unless `NO_COLOR` is set.
#[derive(Clone, Copy)]
pub(crate) struct Style {
    colours: bool,
}

impl Style {
    pub(crate) const PLAIN: Self = Self { colours: false };

    pub(crate) fn for_terminal() -> Self {
        let is_disabled = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self { colours: !is_disabled && std::io::stdout().is_terminal() }
    }

    fn green(self, text: &str) -> String {
        self.paint("32", text)
    }

    fn red(self, text: &str) -> String {
        self.paint("31", text)
    }

    fn paint(self, colour: &str, text: &str) -> String {
        if self.colours { format!("\x1b[{colour}m{text}\x1b[m") } else { text.into() }
    }
}
