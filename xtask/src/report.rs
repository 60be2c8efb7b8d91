use std::io::IsTerminal;
use std::time::Duration;

/// A step that ran.
pub(crate) struct Done {
    pub(crate) name: &'static str,
    /// As one would type it.
    pub(crate) command: String,
    pub(crate) time: Duration,
    /// The processor time of its processes, where the system tells.
    pub(crate) cpu: Option<Duration>,
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// How many tests it ran, or how it failed.
    pub(crate) note: String,
    pub(crate) output: String,
}

/// A step that did not run.
pub(crate) struct LeftOut {
    pub(crate) name: &'static str,
    /// Why, or how to run it.
    pub(crate) why: &'static str,
}

/// What ran and what did not.
pub(crate) struct Report {
    pub(crate) done: Vec<Done>,
    pub(crate) left_out: Vec<LeftOut>,
    /// From the start of the first step to the end of the last.
    pub(crate) time: Duration,
}

impl Done {
    /// Its time and its note.
    pub(crate) fn line(&self, style: Style) -> String {
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
        self.done.iter().map(|done| done.failed).sum()
    }

    /// Prints the table, and as the last line, alone, how many passed and failed.
    pub(crate) fn print(&self, style: Style) {
        let seconds = |time: Duration| format!("{:.1} s", time.as_secs_f64());
        let names = self.done.iter().map(|done| done.name);
        let width = names.map(str::len).max().unwrap_or_default().max("total".len());
        println!();
        println!("  {:width$}  {:>9}  {:>9}", "", "time", "CPU time");
        for Done { name, time, cpu, failed, note, .. } in &self.done {
            let (time, cpu) = (seconds(*time), cpu.map(seconds).unwrap_or_default());
            let mark = if *failed > 0 { style.red("✗") } else { style.green("✓") };
            println!("{}", format!("{mark} {name:width$}  {time:>9}  {cpu:>9}  {note}").trim_end());
        }
        let total = seconds(self.time);
        let cpu = seconds(self.done.iter().filter_map(|done| done.cpu).sum());
        println!("  {:width$}  {total:>9}  {cpu:>9}", "total");
        for group in self.left_out.chunk_by(|one, next| one.why == next.why) {
            let names: Vec<&str> = group.iter().map(|left_out| left_out.name).collect();
            println!("left out: {} ({})", names.join(", "), group[0].why);
        }
        let passed: u64 = self.done.iter().map(|done| done.passed).sum();
        println!("\n{passed} passed, {} failed", self.failed());
    }
}

/// Colours, on a terminal that wants them.
#[derive(Clone, Copy)]
pub(crate) struct Style {
    colours: bool,
}

impl Style {
    pub(crate) const PLAIN: Self = Self { colours: false };

    pub(crate) fn of_terminal() -> Self {
        let refused = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
        Self { colours: !refused && std::io::stdout().is_terminal() }
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
