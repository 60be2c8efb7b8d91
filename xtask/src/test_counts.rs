use std::fmt;

/// Test counts in the output of `cargo test`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TestCounts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    pub(crate) ignored: u64,
}

impl TestCounts {
    /// Sums the `test result:` lines of all test binaries. `None` if there are none.
    pub(crate) fn parse(output: &str) -> Option<Self> {
        let mut sum = None;
        for line in output.lines().filter_map(|line| line.strip_prefix("test result: ")) {
            let sum = sum.get_or_insert(Self::default());
            // "ok. 5 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 0.02s"
            let words: Vec<&str> = line.split([' ', ';']).filter(|word| !word.is_empty()).collect();
            for pair in words.windows(2) {
                let Ok(count) = pair[0].parse::<u64>() else { continue };
                match pair[1] {
                    "passed" => sum.passed += count,
                    "failed" => sum.failed += count,
                    "ignored" => sum.ignored += count,
                    _ => {}
                }
            }
        }
        sum
    }
}

impl fmt::Display for TestCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed", self.passed)?;
        if self.failed > 0 {
            write!(f, ", {} failed", self.failed)?;
        }
        if self.ignored > 0 {
            write!(f, ", {} ignored", self.ignored)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::TestCounts;

    #[test]
    fn counts_of_test_binaries_are_summed() {
        let output = "\
running 3 tests
test a ... ok
test result: ok. 2 passed; 0 failed; 1 ignored; 0 measured; 4 filtered out; finished in 0.02s
   Doc-tests tssd_format
test result: FAILED. 40 passed; 3 failed; 0 ignored; 0 measured; 0 filtered out; finished in 1.50s
9 passed, 9 failed
";
        assert_eq!(
            TestCounts::parse(output),
            Some(TestCounts { passed: 42, failed: 3, ignored: 1 })
        );
        assert_eq!(TestCounts::parse("error: could not compile"), None);
    }
}
