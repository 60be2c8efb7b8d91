use serde_json::{Value, json};

use super::Bench;
use super::race::{Role, Runner, Turns, median};
use super::record::number;

/// Cost of one operation at several points: over a variable, or over numbers of tensors and bytes.
pub struct Curve {
    kind: &'static str,
    about: Value,
    runners: Vec<(String, Role, Vec<Value>)>,
    title: String,
}

impl Curve {
    /// Creates a curve of seconds over a variable, such as the number of readers.
    pub fn series(name: &str, what: &str, x: &str) -> Self {
        Self::new("series", name, what, json!({"name": name, "what": what, "x": x, "y": "seconds"}))
    }

    /// Creates a curve of seconds over numbers of tensors and bytes.
    ///
    /// `t = t0 + tensors * per_op + bytes / bandwidth` is fitted to it.
    pub fn fit(operation: &str, what: &str) -> Self {
        Self::new("fit", operation, what, json!({"operation": operation, "what": what}))
    }

    /// Creates a curve of bytes of memory over a variable.
    pub fn memory(name: &str, what: &str, x: &str) -> Self {
        Self::new("series", name, what, json!({"name": name, "what": what, "x": x, "y": "bytes"}))
    }

    fn new(kind: &'static str, name: &str, what: &str, about: Value) -> Self {
        Self { kind, about, runners: Vec::new(), title: format!("{name}: {what}") }
    }

    /// Measures one point. The runners take turns.
    pub fn measure(&mut self, bench: &Bench, x: u64, rounds: usize, runners: Vec<Runner<'_>>) {
        self.point(bench, &json!({"x": x}), "values", rounds, runners);
    }

    /// Measures one point of a fit. The runners take turns.
    pub fn measure_size(
        &mut self,
        bench: &Bench,
        (tensors, bytes): (usize, u64),
        rounds: usize,
        runners: Vec<Runner<'_>>,
    ) {
        let point = json!({"tensors": tensors, "bytes": bytes});
        self.point(bench, &point, "seconds", rounds, runners);
    }

    /// Adds a value of TSSD that is not a time.
    #[expect(clippy::print_stdout, reason = "a bench prints its result")]
    pub fn add_value(&mut self, x: u64, name: &str, value: f64) {
        println!("{} at {x}: {name} {value}", self.title);
        self.add(name, Role::Ours, json!({"x": x, "values": [number(value)]}));
    }

    #[expect(clippy::print_stdout, reason = "a bench prints its result")]
    fn point(
        &mut self,
        bench: &Bench,
        point: &Value,
        values: &str,
        rounds: usize,
        runners: Vec<Runner<'_>>,
    ) {
        let rounds = bench.options.iterations.unwrap_or(rounds);
        let turns = Turns::measure(runners, bench.options.warmup, rounds);
        println!("{} at {point} ({rounds} rounds, interleaved; medians)", self.title);
        for at in 0..turns.runners.len() {
            let seconds = turns.seconds(at);
            println!("  {:<48} {:>10.3} ms", turns.name(at), median(seconds.clone()) * 1e3);
            let mut point = point.clone();
            point[values] = seconds.into_iter().map(number).collect();
            self.add(turns.name(at), turns.role(at), point);
        }
    }

    fn add(&mut self, name: &str, role: Role, point: Value) {
        match self.runners.iter_mut().find(|(known, ..)| known == name) {
            Some((.., points)) => points.push(point),
            None => self.runners.push((name.into(), role, vec![point])),
        }
    }

    /// Records the curve.
    #[expect(clippy::print_stdout, reason = "a bench prints its result")]
    pub fn record(self, bench: &mut Bench) {
        println!();
        let mut record = self.about;
        let runner = |(name, role, points): (String, Role, Vec<Value>)| json!({"name": name, "role": role, "points": points});
        record["runners"] = self.runners.into_iter().map(runner).collect();
        bench.records.write(&json!({ self.kind: record }));
    }
}
