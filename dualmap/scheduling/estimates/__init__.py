"""How long things take: time to first token, prefill rates, transfers and answers, from a formula or from samples."""
