"""One command for each question that a user or the paper asks; results lie in bench/results with their hardware."""
