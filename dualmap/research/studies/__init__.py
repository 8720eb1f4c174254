"""Studies: experiments as functions over workloads, variants, runs and tables. The paper's are the evaluation."""
