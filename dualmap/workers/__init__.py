"""The background: leader election per pool and the jobs that only a leader does."""
