use serde_json::{Value, json};

/// Options of the command line.
pub struct Options {
    /// The model of cases that use a whole one: a directory, or `shape:NAME`.
    pub model: String,
    /// Number of measured rounds. Overrides the number of each race.
    pub iterations: Option<usize>,
    /// Number of warmup rounds.
    pub warmup: usize,
    /// Maximum size of the model in bytes. Layers that do not fit are left out.
    pub size: Option<u64>,
    cases: Vec<String>,
}

impl Options {
    /// Parses the options of a suite with this default model and maximum size.
    pub(crate) fn from_args(suite: &str, model: &str, size: Option<u64>) -> Self {
        match Self::parse(model, size, std::env::args().skip(1)) {
            Ok(options) => options,
            Err(error) => exit_with_error(&format!(
                "{error}\n\nUsage: cargo xtask bench {suite} [CASE…] [--model DIR|shape:NAME] \
                 [--iterations N] [--warmup N] [--size SIZE]\n\n\
                 NAME is one of tests/shapes.json; SIZE is in bytes, or has a unit: 600MB, 2GB"
            )),
        }
    }

    fn parse(
        model: &str,
        most: Option<u64>,
        arguments: impl IntoIterator<Item = String>,
    ) -> Result<Self, String> {
        let mut options = Self {
            model: model.into(),
            iterations: None,
            warmup: 1,
            size: most,
            cases: Vec::new(),
        };
        let mut arguments = arguments.into_iter();
        while let Some(argument) = arguments.next() {
            let (name, mut value) = match argument.split_once('=') {
                Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
                None => (argument, None),
            };
            let mut value =
                || value.take().or_else(|| arguments.next()).ok_or(format!("{name} takes a value"));
            match name.as_str() {
                "--model" => options.model = value()?,
                "--iterations" => options.iterations = Some(count(&value()?)?.max(1)),
                "--warmup" => options.warmup = count(&value()?)?,
                "--size" => options.size = Some(size(&value()?)?),
                // Cargo passes this to every bench.
                "--bench" => {}
                option if option.starts_with('-') => return Err(format!("no option {option}")),
                _ => options.cases.push(name),
            }
        }
        Ok(options)
    }

    pub(crate) fn wants(&self, case: &str) -> bool {
        self.cases.is_empty() || self.cases.iter().any(|wanted| case.contains(wanted.as_str()))
    }

    pub(crate) fn to_json(&self) -> Value {
        json!({
            "model": self.model,
            "iterations": self.iterations,
            "warmup": self.warmup,
            "size": self.size,
        })
    }
}

/// Prints an error and ends the process.
pub fn exit_with_error(why: &str) -> ! {
    eprintln!("{why}");
    std::process::exit(2);
}

fn count(text: &str) -> Result<usize, String> {
    text.parse().map_err(|_| format!("{text} is no number"))
}

/// Parses a size. GB are 10^9 bytes.
fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|letter: char| letter.is_ascii_alphabetic());
    let unit = match text[digits.len()..].to_ascii_uppercase().as_str() {
        "" | "B" => 1,
        "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        unit => return Err(format!("{unit} is no unit: KB, MB, GB")),
    };
    let number: u64 = digits.parse().map_err(|_| format!("{text} is no size"))?;
    number.checked_mul(unit).ok_or(format!("{text} is too large"))
}

#[cfg(test)]
mod tests {
    use super::Options;

    #[test]
    fn options_parse_from_arguments() {
        let parse = |words: &str| {
            Options::parse("a model", Some(7), words.split_whitespace().map(str::to_owned))
        };
        let options = parse("put --size 2GB --iterations=3 --bench --warmup 0 get").unwrap();
        assert_eq!(
            (options.size, options.iterations, options.warmup),
            (Some(2_000_000_000), Some(3), 0)
        );
        assert!(options.wants("put cold") && options.wants("get") && !options.wants("views"));
        assert!(parse("").unwrap().wants("views"));
        let options = parse("").unwrap();
        assert_eq!((options.model.as_str(), options.size), ("a model", Some(7)));
        assert_eq!(parse("--model shape:x").unwrap().model, "shape:x");
        for bad in ["--size", "--size 3TB", "--size GB", "--iterations x", "--nothing"] {
            assert!(parse(bad).is_err(), "{bad}");
        }
    }
}
