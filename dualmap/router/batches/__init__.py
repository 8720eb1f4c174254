"""Files and batches (OpenAI's Batch API): what clients call, where bytes lie, and how lines are run."""
